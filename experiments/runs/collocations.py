"""The collocations of a run's training text, which PMI masking hides: counted once, and kept in the cache."""

import hashlib
from collections.abc import Callable, Iterator
from itertools import islice
from pathlib import Path

from experiments.runs.sources import Sources
from experiments.study.experiment import Experiment
from lm.data import collocations
from lm.data.collocations import Collocations
from lm.data.corpus.shards import sample_documents
from lm.data.corpus.token_cache import EncodedDocuments, concatenate, encode_documents
from lm.files import matches_checksum
from lm.tokenizers.tokenizer import Tokenizer

FOLDER = "collocations"  # in the cache
COUNTED_TOKENS = 1 << 25  # more text takes more memory: 2 GB for so much [tokens]
DOCUMENTS_PER_CALL = 1_000  # that are encoded together


def find_collocations(
    experiment: Experiment, vocabulary: Tokenizer, sources: Sources, say: Callable[[str], object]
) -> Collocations:
    """Return the collocations of the experiment's training text, counted first if the cache lacks them."""
    name = experiment.data.corpus
    number = round(collocations.PER_TOKEN * vocabulary.vocab_size)
    path = collocations_path(experiment, vocabulary, sources)
    if not matches_checksum(path):
        say(f"counting the collocations of {name}, of which PMI masking uses at most {number:,}")
        text = first_tokens(sample_documents(sources.corpus(name, "train")), vocabulary)
        found = collocations.find_collocations(text, vocabulary.word_starts, number)
        collocations.save_collocations(path, found, (vocabulary.decode(each.tokens) for each in found))
    return Collocations(each.tokens for each in collocations.load_collocations(path))


def collocations_path(experiment: Experiment, vocabulary: Tokenizer, sources: Sources) -> Path:
    """Return the file of collocations, named by a hash of what they depend on."""
    ingredients = (
        sources.corpus_fingerprint(experiment.data.corpus, "train"),
        vocabulary.fingerprint,
        collocations.PER_TOKEN,
        collocations.MIN_COUNT,
        collocations.SHARES,
        COUNTED_TOKENS,
    )
    key = hashlib.sha256(" ".join(map(str, ingredients)).encode()).hexdigest()[:16]
    return sources.cache / FOLDER / f"{key}.jsonl"


def first_tokens(documents: Iterator[str], vocabulary: Tokenizer) -> EncodedDocuments:
    """Return the first documents as tokens: as many as have COUNTED_TOKENS together."""
    parts, count = list[EncodedDocuments](), 0
    while count < COUNTED_TOKENS and (texts := [*islice(documents, DOCUMENTS_PER_CALL)]):
        parts.append(encode_documents(texts, vocabulary))
        count += len(parts[-1].tokens)
    return concatenate(parts)

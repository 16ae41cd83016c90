"""Corpora as tests read them: all documents, what tells a corpus from others, and shards that are watched."""

from dataclasses import dataclass, field

from lm.data.batches import Batches
from lm.data.corpus.sampler import CorpusSampler
from lm.data.corpus.shards import InMemoryShard, corpus_fingerprint, iter_documents, split_shards
from lm.data.corpus.spec import corpus_shards
from lm.data.corpus.token_cache import EncodedCorpus
from lm.data.pretraining import pretraining_rows
from lm.objectives.denoising import OBJECTIVES
from lm.tokenizers.sentencepiece import ByteTokenizer

VOCABULARY = ByteTokenizer(100)
WORDS = [f"document {i} " + "of some length " * (i % 13) for i in range(400)]


def documents(spec, split, cache, corrupt="stop"):
    return [*iter_documents(corpus_shards(spec, split, cache, corrupt))]


def fingerprint(spec, split, cache):
    return corpus_fingerprint(corpus_shards(spec, split, cache))


@dataclass(frozen=True)
class Watched:
    """A shard that notes what is read of it."""

    texts: InMemoryShard
    name: str
    read_windows: list = field(default_factory=list, hash=False, compare=False)
    size = property(lambda self: self.texts.size)
    fingerprint = property(lambda self: self.texts.fingerprint)

    @staticmethod
    def several(count=8):
        """WORDS, dealt to shards."""
        return [Watched(InMemoryShard(tuple(WORDS[i::count])), str(i)) for i in range(count)]

    def read(self, number, size):
        self.read_windows.append(number)
        return self.texts.read(number, size)


def rows_in_streams(shards, folder, streams=4, notes=None, unique=None, name="mass-style", seed=3):
    """Batches of 8 rows of shards in windows of 1000 bytes."""
    corpus = EncodedCorpus(tuple(split_shards(shards, streams)), VOCABULARY, folder, 1000, streams)
    reading = CorpusSampler(corpus, streams, seed, unique, notes)
    settings = {"architecture": "encoder-decoder", "inputs_length": 32, "batch_size": 8}
    return Batches(pretraining_rows(reading, OBJECTIVES[name], **settings), 8)

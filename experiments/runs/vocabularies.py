"""The vocabulary of a run, found or trained, and the texts it is trained on."""

import hashlib
from collections.abc import Callable, Iterator, Sequence
from itertools import chain
from pathlib import Path

from experiments.study.experiment import Experiment
from lm.data.corpus.shards import corpus_fingerprint, sample_documents
from lm.data.corpus.spec import corpus_shards, dataset_rows
from lm.data.corpus.tables import TableRows
from lm.data.corpus.tfds import TfdsRows
from lm.data.tasks.mixtures import mixture
from lm.data.tasks.task import BaseTask, Task
from lm.files import matches_checksum
from lm.tokenizers.huggingface import load_tokenizer
from lm.tokenizers.sentencepiece import REQUIRED_CHARACTERS, train_sentencepiece
from lm.tokenizers.tokenizer import TOKENIZER_ALGORITHMS, UNK, Tokenizer
from lm.tokenizers.wordpiece import train_wordpiece

LOOKED_AT = 200  # of a task, to see what the vocabulary lacks [answers]
Say = Callable[[str], object]
TaskRows = tuple[Task, TfdsRows | TableRows]


def find_vocabulary(experiment: Experiment, cache: Path, say: Say) -> Tokenizer:
    """The vocabulary that ``data.vocabulary`` names; trained on its corpus first if it must be."""
    data = experiment.data
    kind = next((kind for kind in TOKENIZER_ALGORITHMS if kind == data.vocabulary.partition(":")[0]), None)
    if kind is None:
        return load_tokenizer(data.vocabulary, data.sentinels, experiment.model.vocab_size)
    name = vocabulary_corpus(experiment) or data.corpus
    corpus = corpus_shards(name, "train", cache, data.corrupt_records)
    tasks = task_rows(experiment, cache) if data.vocabulary_texts == "corpus+tasks" else []
    task_keys = [f"{task.name} {rows.fingerprint}" for task, rows in tasks]
    bytes_ = [data.unknown] * (data.unknown == "bytes")
    ingredients = [corpus_fingerprint(corpus), data.vocabulary_size, REQUIRED_CHARACTERS, *bytes_, *task_keys]
    key = hashlib.sha256(" ".join(map(str, ingredients)).encode()).hexdigest()[:16]
    suffix = "txt" if kind == "wordpiece" else "model"
    path = cache / "vocabulary" / f"{kind}-{data.vocabulary_size}-{key}.{suffix}"
    if not matches_checksum(path):
        texts_of = name + " and the tasks" * bool(tasks)
        say(f"training a {kind} vocabulary of {data.vocabulary_size:,} word pieces on {texts_of}")
        texts = _with_tasks(sample_documents(corpus), tasks)
        if kind == "wordpiece":
            train_wordpiece(texts, data.vocabulary_size, path)
        else:
            train_sentencepiece(texts, data.vocabulary_size, path, data.unknown, kind)
    return load_tokenizer(path, data.sentinels, experiment.model.vocab_size)


def vocabulary_corpus(experiment: Experiment) -> str:
    """The corpus that ``data.vocabulary`` names to be trained on; "" if it names none."""
    kind, _, named = experiment.data.vocabulary.partition(":")
    return named if kind in TOKENIZER_ALGORITHMS else ""


def _with_tasks(documents: Iterator[str], tasks: Sequence[TaskRows]) -> Iterator[str]:
    """Documents and, after each of them, the texts of a row of each task, while there are any."""
    rows = [map(task.to_text, stored) for task, stored in tasks]
    for document in documents:
        yield document
        for texts in rows:
            yield from next(texts, ())
    yield from chain.from_iterable(chain.from_iterable(rows))


def unwritable(tasks: Sequence[TaskRows], vocabulary: Tokenizer) -> dict[str, float]:
    """Task -> the share of its first answers that have a character which our own vocabulary lacks."""
    shares = {}
    for task, rows in tasks:
        answers = [task.to_text(rows[place])[1] for place in range(min(LOOKED_AT, len(rows)))]
        encoded = vocabulary.encode_batch(answers)
        shares[task.name] = sum(UNK in ids for ids in encoded) / max(len(encoded), 1)
    return shares


def task_rows(experiment: Experiment, cache: Path) -> list[TaskRows]:
    """The training sets of all tasks that the experiment is tuned on."""
    tasks = [task for name in experiment.tuning.mixtures for task in mixture(name) if task.train]
    return [(task, rows_of(task, "train", experiment, cache)) for task in tasks]


def rows_of(task: BaseTask, split: str, experiment: Experiment, cache: Path) -> TfdsRows | TableRows:
    """The stored rows of a task; only training may skip corrupt ones, or scores would not compare."""
    corrupt = experiment.data.corrupt_records if split == "train" else "stop"
    return dataset_rows(task.source, getattr(task, split), cache, corrupt)

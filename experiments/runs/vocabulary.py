"""The vocabulary of a run: found or trained, and stored with each stage, which outlives its corpus."""

import hashlib
from collections.abc import Callable, Iterator, Sequence
from itertools import chain
from pathlib import Path

from experiments.runs import provenance
from experiments.runs.sources import Sources
from experiments.study.experiment import Experiment
from lm.config.base import SettingError
from lm.data.corpus.shards import sample_documents
from lm.data.corpus.tables import TableRows
from lm.data.corpus.tfds import TfdsRows
from lm.data.tasks.mixtures import mixture
from lm.data.tasks.task import Task
from lm.files import matches_checksum, write
from lm.tokenizers.huggingface import load_tokenizer
from lm.tokenizers.sentencepiece import REQUIRED_CHARACTERS, train_sentencepiece
from lm.tokenizers.tokenizer import TOKENIZER_ALGORITHMS, Tokenizer
from lm.tokenizers.wordpiece import train_wordpiece

TOKENIZER_FOLDER = "tokenizer"  # in the folder of a stage
NO_FINGERPRINT = ""  # the fingerprint in the record of a model that was imported without its tokenizer
SAMPLED_ANSWERS = 200  # of a task, to see what the vocabulary lacks

TaskRows = tuple[Task, TfdsRows | TableRows]


def find_vocabulary(experiment: Experiment, sources: Sources, say: Callable[[str], object]) -> Tokenizer:
    """Return the vocabulary that ``data.vocabulary`` names, trained on its corpus first if it must be."""
    data = experiment.data
    kind = next((kind for kind in TOKENIZER_ALGORITHMS if kind == data.vocabulary.partition(":")[0]), None)
    if kind is None:
        return load_tokenizer(data.vocabulary, data.sentinels, experiment.model.vocab_size)
    name = vocabulary_corpus(experiment) or data.corpus
    tasks = _task_rows(experiment, sources) if data.vocabulary_texts == "corpus+tasks" else []
    task_keys = [f"{task.name} {rows.fingerprint}" for task, rows in tasks]
    unknown = [data.unknown] if data.unknown == "bytes" else []
    fingerprint = sources.corpus_fingerprint(name, "train")
    ingredients = [fingerprint, data.vocabulary_size, REQUIRED_CHARACTERS, *unknown, *task_keys]
    key = hashlib.sha256(" ".join(map(str, ingredients)).encode()).hexdigest()[:16]
    suffix = "txt" if kind == "wordpiece" else "model"
    path = sources.cache / "vocabulary" / f"{kind}-{data.vocabulary_size}-{key}.{suffix}"
    if not matches_checksum(path):
        trained_on = f"{name} and the tasks" if tasks else name
        say(f"training a {kind} vocabulary of {data.vocabulary_size:,} word pieces on {trained_on}")
        texts = _with_tasks(sample_documents(sources.corpus(name, "train")), tasks)
        if kind == "wordpiece":
            train_wordpiece(texts, data.vocabulary_size, path)
        else:
            train_sentencepiece(texts, data.vocabulary_size, path, data.unknown, kind)
    return load_tokenizer(path, data.sentinels, experiment.model.vocab_size)


def vocabulary_corpus(experiment: Experiment) -> str:
    """Return the corpus that ``data.vocabulary`` names to be trained on; "" if it names none."""
    kind, _, named = experiment.data.vocabulary.partition(":")
    return named if kind in TOKENIZER_ALGORITHMS else ""


def _with_tasks(documents: Iterator[str], tasks: Sequence[TaskRows]) -> Iterator[str]:
    """Yield documents and, after each of them, the texts of one row of each task, while there are any."""
    rows = [map(task.to_text, stored) for task, stored in tasks]
    for document in documents:
        yield document
        for texts in rows:
            yield from next(texts, ())
    yield from chain.from_iterable(chain.from_iterable(rows))


def _task_rows(experiment: Experiment, sources: Sources) -> list[TaskRows]:
    """Return the training sets of all tasks that the experiment is fine-tuned on."""
    tasks = [task for name in experiment.tuning.mixtures for task in mixture(name) if task.train]
    return [(task, sources.stored(task, "train")) for task in tasks]


def unwritable_answers(task: Task, rows: TfdsRows | TableRows, vocabulary: Tokenizer) -> float:
    """Return the share of a task's first answers with a character that the vocabulary lacks."""
    answers = [task.to_text(rows[number])[1] for number in range(min(SAMPLED_ANSWERS, len(rows)))]
    encoded = vocabulary.encode_batch(answers)
    return sum(vocabulary.unk in ids for ids in encoded) / max(len(encoded), 1)


def store_vocabulary(stage: Path, vocabulary: Tokenizer) -> None:
    """Copy ``vocabulary`` into the folder of a stage, replacing another; equal files are not written."""
    folder, files = stage / TOKENIZER_FOLDER, vocabulary.files()
    for path in folder.iterdir() if folder.is_dir() else ():
        if path.name not in files:
            path.unlink()
    for name, contents in files.items():
        path = folder / name
        if not path.exists() or path.read_bytes() != contents:
            write(path, contents)


def stored_vocabulary(stage: Path, experiment: Experiment) -> Tokenizer:
    """Return the vocabulary that a stage was trained with; SettingError if it is gone or another."""
    recorded = provenance.read(stage)["vocabulary"]["fingerprint"]
    folder = stage / TOKENIZER_FOLDER
    vocabulary = read_vocabulary(folder, experiment)
    if recorded not in (NO_FINGERPRINT, vocabulary.fingerprint):
        raise SettingError(
            f"{folder} is not the vocabulary that this model was trained with: its fingerprint is "
            f"{vocabulary.fingerprint[:12]}, {stage / provenance.ORIGIN_FILE} has {recorded[:12]}"
        )
    return vocabulary


def read_vocabulary(folder: Path, experiment: Experiment) -> Tokenizer:
    """Return the vocabulary of an experiment from the files in ``folder``; SettingError if it is gone."""
    data, vocab_size = experiment.data, experiment.model.vocab_size
    if data.vocabulary == "bytes":  # which has no files
        return load_tokenizer("bytes", data.sentinels, vocab_size)
    if not folder.is_dir():
        raise SettingError(f"{folder} is missing: the vocabulary that this model was trained with")
    return load_tokenizer(folder, data.sentinels, vocab_size)

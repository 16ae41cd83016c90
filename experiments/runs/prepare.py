"""Prepares the inputs of a run: its tasks, its vocabulary and its corpus as tokens."""

from collections.abc import Callable, Sequence
from itertools import chain
from pathlib import Path

import numpy as np

from experiments.runs import provenance
from experiments.runs.collocations import find_collocations
from experiments.runs.inputs import Inputs, encoded_split, run_reads_corpus
from experiments.runs.kinds.pretraining import teacher_checkpoint
from experiments.runs.kinds.stage import SPLITS, Stage
from experiments.runs.paths import start_folder
from experiments.runs.sources import Sources
from experiments.runs.stages import external_checkpoint, stages
from experiments.runs.vocabulary import (
    TOKENIZER_FOLDER,
    find_vocabulary,
    stored_vocabulary,
    unwritable_answers,
)
from experiments.study.experiment import Experiment
from lm.c4.filters import FILTERS
from lm.config.base import SettingError
from lm.data.corpus.readers import WINDOW_READERS
from lm.data.corpus.shards import sample_documents
from lm.data.corpus.spec import corpus_parts
from lm.data.documentation.pinned import SHINGLE, shingles
from lm.data.tasks.mixtures import mixture
from lm.data.tasks.task import Task
from lm.special_tokens import check_special
from lm.tokenizers.tokenizer import Tokenizer

MANY_COPIES = 0.05  # share of the held-out text that the training text has too; so much is reported
MAX_COMPARED = 16_000_000  # size of a text up to which its copies are looked for [bytes]
MANY_UNWRITABLE = 0.05  # fraction of a task's answers; if the vocabulary cannot spell so many, it is reported

Say = Callable[[str], object]


def prepare(experiment: Experiment, cache: Path, say: Say) -> Inputs:
    """Prepare and return the inputs of ``experiment``; raise SettingError if one is missing or does not fit.

    It may train a vocabulary.
    """
    sources = Sources(cache, experiment.data.corrupt_records)
    return prepare_inputs(experiment, stages(experiment), sources, say)


def prepare_inputs(experiment: Experiment, run_stages: Sequence[Stage], sources: Sources, say: Say) -> Inputs:
    """Prepare and return the inputs of ``experiment``; raise SettingError as ``prepare`` does."""
    for name in experiment.tuning.mixtures:
        mixture(name)  # raises SettingError for an unknown name
    skipped = _open_tasks(run_stages, sources)
    for name, count in skipped.items():
        say(f"{count:,} corrupt records of {name} are left out of training (data.corrupt_records='skip')")
    given = external_checkpoint(experiment, sources.cache)
    if given is None:
        vocabulary = find_vocabulary(experiment, sources, say)
        _report_unwritable(run_stages, vocabulary, sources, say)
    else:
        vocabulary = stored_vocabulary(given.folder, experiment)
    check_special(experiment.model, vocabulary, f"data.vocabulary={experiment.data.vocabulary}")
    if vocabulary.vocab_size > experiment.model.vocab_size:
        raise SettingError(
            f"model.vocab_size={experiment.model.vocab_size} is less than the vocabulary's "
            f"{vocabulary.vocab_size} (sentinels included): set it to "
            f"{-(-vocabulary.vocab_size // 128) * 128}"
        )
    check_teacher_vocabulary(experiment, vocabulary, sources.cache)
    if run_reads_corpus(experiment):
        _report_copies(experiment.data.corpus, sources, say)
    train, validation = (encoded_split(experiment, split, vocabulary, sources) for split in SPLITS)
    collocations = None
    if any(stage.needs_collocations for stage in run_stages):
        collocations = find_collocations(experiment, vocabulary, sources, say)
    return Inputs(vocabulary, train, validation, sources, skipped, collocations=collocations)


def check_teacher_vocabulary(experiment: Experiment, vocabulary: Tokenizer, cache: Path) -> None:
    """Raise SettingError if the teacher of pre-training (``distillation.teacher``) has another vocabulary."""
    name = experiment.distillation.teacher
    if not name or not experiment.pretraining.steps:
        return
    teacher = teacher_checkpoint(start_folder(name, cache))
    fingerprint = provenance.read(teacher.folder)["vocabulary"]["fingerprint"]
    if fingerprint != vocabulary.fingerprint:
        expected = f"the vocabulary {fingerprint[:12]} in {teacher.folder / TOKENIZER_FOLDER}"
        found = f"data.vocabulary={experiment.data.vocabulary!r} is {vocabulary.fingerprint[:12]}"
        raise SettingError(
            f"distillation.teacher={name!r} has {expected}, and {found}: they should be equal; start from "
            "the teacher (--start MODEL), name that folder as data.vocabulary, or choose a teacher that has "
            "the vocabulary of the row"
        )


def _open_tasks(run_stages: Sequence[Stage], sources: Sources) -> dict[str, int]:
    """Find the files of all tasks; return how many corrupt records of each are left out of training."""
    skipped = {}
    for stage in run_stages:
        for split, tasks in stage.tasks.items():
            for task in tasks:
                rows = sources.stored(task, split)
                if split == "train" and rows.skipped:
                    skipped[task.name] = len(rows.skipped)
    return skipped


def _report_copies(corpus: str, sources: Sources, say: Say) -> None:
    """Report a small text of one's own whose held-out part repeats much of its training part.

    Texts of other kinds are not compared: the built-in one has no copies, and data sets have splits.
    """
    if not {part.partition(":")[0] for part in corpus_parts(corpus)} <= {*WINDOW_READERS}:
        return
    train, held_out = (sources.corpus(corpus, split) for split in SPLITS)
    if sum(shard.size for shard in (*train, *held_out)) > MAX_COMPARED:
        return
    documents = [[*sample_documents(shards)] for shards in (train, held_out)]
    if sum(map(len, chain(*documents))) > MAX_COMPARED:  # a compressed file holds more than its size says
        return
    known, asked = (shingles(texts)[0] for texts in documents)
    share = float(np.isin(asked, known).mean()) if len(asked) else 0.0
    if share >= MANY_COPIES:
        say(
            f"{share:.0%} of the held-out text of {corpus} is in its training text too ({SHINGLE} words in a "
            "row), so that held-out losses are too low. To leave out copies alone, and then train with "
            f"--data.corpus tfds:NAME: lm data clean FOLDER --name NAME --without {' '.join(FILTERS)}"
        )


def _report_unwritable(
    run_stages: Sequence[Stage], vocabulary: Tokenizer, sources: Sources, say: Say
) -> None:
    """Report the tasks of which the vocabulary cannot spell many answers."""
    tasks = {
        task.name: task for stage in run_stages for task in stage.tasks["train"] if isinstance(task, Task)
    }
    for name, task in tasks.items():
        share = unwritable_answers(task, sources.stored(task, "train"), vocabulary)
        if share >= MANY_UNWRITABLE:
            say(
                f"{share:.0%} of the answers of {name} have characters that the vocabulary lacks, and can "
                "never be written right: unigram and bpe with --data.unknown bytes write all"
            )

"""What rows are compared in: columns of tasks, and each as it grew with what was spent on training."""

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from math import log, sqrt
from statistics import mean, stdev, variance
from typing import Any, Literal

import numpy as np

from experiments.runs.result import Result
from experiments.study.experiment import Experiment
from experiments.study.table import Paper
from lm.data.tasks.task import LOWER

Tasks = Mapping[str, Mapping[str, Any]]  # task -> its best checkpoint, as in scores.json
Frame = Literal["updates", "FLOP", "content tokens"]  # what rows have spent as much of when they are compared
FRAMES: tuple[Frame, ...] = ("updates", "FLOP", "content tokens")
UNITS = {"bits_above_chance": "bits above chance", "bits_per_byte": "bits per byte ↓"}
HELD_OUT_LOSS, DOCUMENTS = "held-out loss", "bits a byte"
HELD_OUT = (HELD_OUT_LOSS, DOCUMENTS)  # columns of a table without tasks; less is better


@dataclass(frozen=True)
class Score:
    """Mean and sample standard deviation over seeds; the deviation of one seed is unknown (None)."""

    mean: float
    std: float | None

    @classmethod
    def of(cls, values: Iterable[float | None]) -> "Score | None":
        """Those of the known values; None if there is none."""
        known = [value for value in values if value is not None]
        return cls(mean(known), stdev(known) if len(known) > 1 else None) if known else None


@dataclass(frozen=True)
class Measured:
    """A column of results: one task, or the tasks of one of the paper's columns."""

    name: str
    tasks: tuple[str, ...]
    measure: str  # which metric of the tasks counts; "score": the mean of several
    like: str | None  # the paper's column of the same kind
    chance: float | None  # what guessing gives
    metric: str  # of its tasks, where they count as "score"

    @property
    def title(self) -> str:
        return f"{self.name} [{UNITS[self.measure]}]" if self.measure in UNITS else self.name

    @property
    def better(self) -> int:
        """1: more is better; -1: less is."""
        return -1 if self.measure in LOWER or self.is_held_out else 1

    @property
    def is_held_out(self) -> bool:
        """Whether it is the loss on held-out text, which compares rows with the same targets alone."""
        return self.measure in HELD_OUT

    @property
    def digits(self) -> int:
        """Places that are shown: two of scores out of 100, three of bits."""
        return 3 if self.measure in UNITS or self.is_held_out else 2

    def value(self, tasks: Tasks) -> float | None:
        """Mean over the column's tasks, by what ``scores.json`` says of each.

        None if one is missing, or its score undefined.
        """
        if not tasks.keys() >= set(self.tasks):
            return None
        scores = [tasks[name]["metrics"].get(self.measure, tasks[name]["score"]) for name in self.tasks]
        return None if None in scores else mean(scores)

    def examples(self, values: Mapping[str, np.ndarray]) -> tuple[np.ndarray, np.ndarray] | None:
        """Numerators and denominators [N], whose sums give the value, from what a task's examples came to.

        None if they are not known.
        """
        if self.measure not in UNITS or "bits" not in values:
            return None
        ones = np.ones(len(values["bits"]))
        return values["bits"], values.get("bytes", ones) if self.measure in LOWER else ones


def held_out(run: Result) -> Tasks:
    """Return what a run came to on held-out text, in the form in which the scores of tasks are."""
    likelihood = run.likelihood()
    known = {
        HELD_OUT_LOSS: run.held_out_loss,
        DOCUMENTS: None if likelihood is None else likelihood.bits_per_byte,
    }
    return {
        name: {"column": name, "metric": name, "measure": name, "score": value, "metrics": {}}
        for name, value in known.items()
        if value is not None
    }


def has_equal_targets(column: Measured, a: Experiment, b: Experiment) -> bool:
    """Whether two experiments are measured on the same tokens, or bytes, of held-out text."""
    if column.measure == DOCUMENTS:
        return (a.data.corpus, a.data.held_out_documents) == (b.data.corpus, b.data.held_out_documents)
    if not column.is_held_out:
        return True
    names = "corpus vocabulary vocabulary_texts vocabulary_size unknown sentinels inputs_length".split()
    return a.objective == b.objective and all(getattr(a.data, x) == getattr(b.data, x) for x in names)


def measured_columns(results: Iterable[Tasks], paper: Paper | None) -> list[Measured]:
    """The columns in which any run with these tasks was scored, the paper's first and in its order."""
    tasks: dict[str, dict[str, Mapping[str, Any]]] = {}
    for result in results:
        for name, best in result.items():
            tasks.setdefault(best["column"], {}).setdefault(name, best)
    published = [column.name for column in paper.columns] if paper else []
    names = [name for name in published if name in tasks] + [name for name in tasks if name not in published]
    return [_column(name, tasks[name], published) for name in names]


def _column(name: str, tasks: Tasks, published: Sequence[str]) -> Measured:
    best = next(iter(tasks.values()))
    metric = ", ".join(dict.fromkeys(best["metric"].replace("_", " ") for best in tasks.values()))
    like = name if name in published else best.get("like")
    paper = like if like in published else None
    return Measured(name, tuple(tasks), best.get("measure", "score"), paper, best.get("chance"), metric)


@dataclass(frozen=True)
class Growth:
    """What a run scored after parts of its pre-training: [P] points, in order of what was spent."""

    spent: Mapping[Frame, np.ndarray]  # [P]
    values: Mapping[str, np.ndarray]  # column -> [P]

    @classmethod
    def of(
        cls,
        branches: Mapping[int, Tasks],
        columns: Sequence[Measured],
        spent: Mapping[Frame, tuple[float, float]],
    ) -> "Growth":
        """``branches``: updates -> tasks, the last of the whole pre-training.

        ``spent``: on what went before the counted updates, and in all; the rest is spent evenly.
        """
        places = sorted(branches)
        shares = np.array(places) / max(places[-1], 1)
        grown = {frame: start + (total - start) * shares for frame, (start, total) in spent.items()}
        found = {c.name: [c.value(branches[place]) for place in places] for c in columns}
        return cls(grown, {name: np.array(values, float) for name, values in found.items()})

    def most(self, frame: Frame) -> float:
        """What the whole pre-training spent."""
        return float(self.spent[frame][-1])

    def updates(self, frame: Frame, spent: float) -> float:
        """After how many updates so much was spent."""
        return float(np.interp(spent, self.spent[frame], self.spent["updates"]))

    def at(self, frame: Frame, spent: float, column: str) -> float | None:
        """A column where so much was spent, linear in its logarithm; None out of the measured range."""
        places, tolerance = self.spent[frame], 1e-6
        if not places[0] * (1 - tolerance) <= spent <= places[-1] * (1 + tolerance) or places[0] <= 0:
            return None
        return float(np.interp(log(spent), np.log(places), self.values[column]))


def has_plateau(experiment: Experiment) -> bool:
    """Whether the loss on held-out text tells if pre-training has learnt anything.

    Not of a row that learns tasks beside the corpus, nor of one that learns a few texts by heart.
    """
    return experiment.mixing.pretraining == "corpus" and not experiment.data.repeats


def leaving(exit_step: int | None, experiment: Experiment) -> str:
    """Where a run left the plateau, to be read behind its losses; empty if it has none to leave."""
    if not has_plateau(experiment):
        return ""
    return "; plateau not left" if exit_step is None else f"; plateau left at step {exit_step:,}"


def pooled(rows: Iterable[Sequence[float]]) -> float:
    """The deviation within rows; 0 if none has two values."""
    several = [row for row in rows if len(row) > 1]
    freedom = sum(len(row) - 1 for row in several)
    return sqrt(sum(variance(row) * (len(row) - 1) for row in several) / freedom) if freedom else 0.0

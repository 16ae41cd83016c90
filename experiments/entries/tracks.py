"""The tracks of the public table: what an entry is measured by, and what all entries of a track share.

``text`` measures a language model of documents. ``tasks`` measures what a model learns when it is fine-tuned.
"""

from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from statistics import mean
from typing import Literal

from experiments.entries import rules
from experiments.runs.result import Result
from experiments.study.experiment import Experiment
from experiments.study.registry import build
from lm.config.base import SettingError
from lm.data.tasks.benchmarks import TASKS
from lm.data.tasks.task import LOWER_IS_BETTER

TrackName = Literal["text", "tasks"]


@dataclass(frozen=True)
class Track:
    """Holds how entries of a track are measured and compared."""

    title: str  # of the table
    heading: str  # of the column of scores
    unit: str  # of the scores
    digits: int  # decimals to show
    lower_is_better: bool
    tolerance: float  # between kinds of machines, whose rounding differs [unit]
    reference: str  # row of the study whose data, tuning and fine-tuning all entries have
    # returns the score of a run, and half of the 95 % interval of a bound, 0 where the score is exact [unit];
    # SettingError if the run has none
    score: Callable[[Result, Path], tuple[float, float]]

    def fixed(self, experiment: Experiment) -> Experiment:
        """Return ``experiment`` with the tuning and the held-out documents of the track."""
        reference = build(self.reference, rules.RULES.scale)
        documents = 0 if reference.tuning.mixtures else rules.RULES.held_out_documents
        return replace(
            experiment,
            data=replace(experiment.data, held_out_documents=documents),
            # scores of a part of pre-training, which the study has for its budgets, are not part of the score
            tuning=replace(reference.tuning, branches=(1.0,)),
            finetuning=reference.finetuning,
        )


# ---- text


def bits_per_byte(result: Result, folder: Path) -> tuple[float, float]:
    """Return the bits per byte of the held-out documents after the last step."""
    likelihood = result.likelihood()
    if likelihood is None:
        raise SettingError(
            f"{folder}: no bits per byte were measured; an entry is a decoder without inputs, an encoder "
            "that is trained by masked-diffusion or any-order, or counts n-grams"
        )
    return likelihood.bits_per_byte, likelihood.bits_per_byte_interval


# ---- tasks


@dataclass(frozen=True)
class BaselineScore:
    """Holds what T5's baseline scores in a task, and the standard deviation of a run."""

    mean: float  # over seeds 0 to 2 [bits per byte, or bits above chance]
    deviation: float  # of a run, by its seed and the choice of examples, over the rows of T5's Tables 1 and 4


# From docs/results/mini.tar.xz, by seeds 0 to 2 of each row, whatever seeds come later: the scores of
# archived entries are in this unit. The study does not average the task "modality" at this scale, whose score
# falls with pre-training.
BASELINE_SCORES: Mapping[str, BaselineScore] = {
    "extract": BaselineScore(0.6374, 0.0819),
    "restore": BaselineScore(0.5064, 0.0364),
    "next": BaselineScore(0.7485, 0.0591),
    "summary": BaselineScore(0.9508, 0.0615),
    "order": BaselineScore(0.9361, 0.0616),
    "acceptability": BaselineScore(0.6736, 0.0242),
    "agreement": BaselineScore(0.5742, 0.0581),
    "determiners": BaselineScore(0.3631, 0.0452),
    "verb-forms": BaselineScore(0.4529, 0.0539),
}


def mean_over_halves(result: Result, folder: Path) -> tuple[float, float]:
    """Return the mean distance of the tasks' scores from T5's baseline, both halves with equal weight.

    Each distance is in standard deviations of a run, and positive where the run is better.
    """
    distances: dict[str, list[float]] = {}
    for name, baseline in BASELINE_SCORES.items():
        score = result.tasks.get(name, {}).get("score")
        if score is None:
            raise SettingError(
                f"{folder}: the task {name} was not scored; an entry of tasks answers them all"
            )
        task = TASKS[name]
        sign = -1 if task.measure in LOWER_IS_BETTER else 1
        distances.setdefault(task.half, []).append(sign * (score - baseline.mean) / baseline.deviation)
    return mean(map(mean, distances.values())), 0.0


TRACKS: Mapping[TrackName, Track] = {
    "text": Track(
        title="Bits per byte of held-out text",
        heading="bits per byte",
        unit="bits per byte",
        digits=4,
        lower_is_better=True,
        tolerance=0.05,
        reference="history/transformer",
        score=bits_per_byte,
    ),
    "tasks": Track(
        title="Distance from T5's baseline in nine tasks, mean of both halves",
        heading="mean distance",
        unit="standard deviations of a run",
        digits=2,
        lower_is_better=False,
        tolerance=1.5,  # four times the deviation of the mean over seeds
        reference="t5/1-baseline/baseline",
        score=mean_over_halves,
    ),
}

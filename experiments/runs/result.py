"""Whose a run is, and what it scored when it finished. Folders of runs may lie in a bucket (gs://)."""

import re
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from statistics import mean
from typing import Any

from etils import epath

from experiments.study.experiment import Experiment, flatten, result_settings, setting_changes
from lm.files import checksum, seal, unseal, write
from lm.settings import DataError, SettingError

SIGNED = {"matthews", "pearson", "spearman"}  # metrics that may be below 0
LARGEST = 700.0  # loss of which there is a perplexity: e^700 is near the largest number [nats]


@dataclass(frozen=True)
class Result:
    """What one finished run scored and cost. SettingError for a value that no run comes to."""

    columns: Mapping[str, float]  # the paper's column -> our stand-in's score
    tasks: Mapping[str, Mapping[str, Any]]  # task -> {"step", "score", "metrics"} of its best checkpoint
    held_out_loss: float | None  # after pre-training, nats a target token; None without
    seconds: float  # of training, compilation and evaluation left out
    tokens: int  # target tokens learnt from, padding not counted
    folder: Path
    # held-out, by length of rows [x inputs_length]
    length_losses: Mapping[str, float] = field(default_factory=dict)
    phases: Mapping[str, str] = field(default_factory=dict)  # phase -> its folder, below that of the scale
    # phase -> how many lines of metrics it had in the end
    records: Mapping[str, int] = field(default_factory=dict)

    def __post_init__(self):
        for name, best in _group("tasks", self.tasks):
            _check_task(name, best)
        signed = any(SIGNED & best["metrics"].keys() for best in self.tasks.values())
        for name, score in _group("columns", self.columns):
            _within(name, score, -100 * signed, 100)
        longer = [
            (f"length_losses {times}", loss) for times, loss in _group("length_losses", self.length_losses)
        ]
        for name, loss in [
            *longer,
            ("held_out_loss", 0 if self.held_out_loss is None else self.held_out_loss),
        ]:
            _within(name, loss, 0, LARGEST)
        for name, count in [
            ("seconds", self.seconds),
            ("tokens", self.tokens),
            *_group("records", self.records),
        ]:
            _within(name, count, 0, 1e300)
        if not all(re.fullmatch("[1-9][0-9]{0,8}", times) for times in self.length_losses):
            raise SettingError("a length of rows is no whole number")
        for _, place in _group("phases", self.phases):
            if not isinstance(place, str) or Path(place).is_absolute() or ".." in Path(place).parts:
                raise SettingError("a phase lies outside of the runs")

    @property
    def seed(self) -> int:
        return int(self.folder.name.removeprefix("seed-"))

    @property
    def task_loss(self) -> float | None:
        """Mean over tasks of the loss of their targets, nats a token; None for heads and ensembles."""
        found = [best["metrics"].get("loss") for best in self.tasks.values()]
        return mean(found) if found and None not in found else None

    def phase_folders(self) -> dict[str, Path]:
        """Phase -> the folder with its metrics and predictions, of those that are there."""
        ups, named = (self.folder, *self.folder.parents), self.phases.items()
        found = {name: next((up / path for up in ups if (up / path).exists()), None) for name, path in named}
        return {name: place for name, place in found.items() if place is not None}


def _group(name: str, values: Any) -> Iterable[tuple[str, Any]]:
    if not isinstance(values, Mapping):
        raise SettingError(f"{name} should be values by name")
    return values.items()


def _within(name: str, value: Any, low: float, high: float) -> None:
    rounding = 1e-6
    if (
        isinstance(value, bool)
        or not isinstance(value, int | float)
        or not low - rounding <= value <= high + rounding
    ):
        raise SettingError(f"{name} {value!r:.40} should be a number from {low:g} to {high:g}")


def _check_task(name: str, best: Any) -> None:
    """SettingError unless a task says its column, metric, step, score and metrics."""
    found = dict(_group(name, best))
    if not all(isinstance(found.get(text), str) for text in ("column", "metric")):
        raise SettingError(f"{name} lacks its column or its metric")
    _within(f"step of {name}", found.get("step"), 0, 1e300)
    metrics = dict(_group(f"metrics of {name}", found.get("metrics")))
    low = -100 * bool(SIGNED & metrics.keys())
    for metric, value in (metrics | {"score": found.get("score")}).items():
        _within(f"{metric} of {name}", value, *((0, LARGEST) if metric == "loss" else (low, 100)))


def check_settings(
    experiment: Experiment, folder: Path, allowed: Callable[[str], object] | None = None
) -> None:
    """SettingError if ``folder`` holds a run of other settings, unless ``allowed`` is told the difference."""
    path = epath.Path(folder) / "settings.json"
    if not path.exists():
        return
    try:
        there = flatten(unseal(path.read_bytes(), path))
    except SettingError as error:
        raise SettingError(
            f"{path} cannot be read ({error}): choose other --runs or delete {folder}"
        ) from error
    if lines := setting_changes(there, result_settings(experiment)):
        text = "".join(f"\n  {line}" for line in lines)
        if allowed is None:
            raise SettingError(
                f"{folder} belongs to a run with other settings: choose other --runs, delete it or, "
                f"unless it is finished, go on with --allow settings{text}"
            )
        allowed(f"{folder}: allowed:{text}")


def fingerprint(folder: Path) -> str:
    """Of the settings in ``folder`` that change results; SettingError if they are damaged or missing."""
    path = epath.Path(folder) / "settings.json"
    try:
        return checksum(flatten(unseal(path.read_bytes(), path)))
    except OSError as error:
        raise SettingError(f"{path}, which tells whose scores these are, cannot be read: {error}") from error


def write_result(folder: Path, found: Mapping[str, Any]) -> None:
    """``scores.json``: what a run came to, bound to the settings of the run in ``folder``."""
    write(folder / "scores.json", seal({**found, "settings": fingerprint(folder)}))


def read_result(folder: Path) -> Result | None:
    """The result of a finished run, else None; SettingError if its file is damaged or another run's."""
    path, mend = epath.Path(folder) / "scores.json", "delete it and run the row again"
    if not path.exists():
        return None
    found = unseal(path.read_bytes(), path, mend)
    if found.pop("settings", None) != fingerprint(path.parent):
        raise DataError(f"{path} has the scores of a run with other settings; {mend}")
    try:
        return Result(folder=path.parent, **found)
    except (SettingError, TypeError) as error:  # a TypeError: more or less than a result has
        raise DataError(
            f"{path} does not count: {error}; the run diverged, or the file is damaged: {mend}"
        ) from error

"""Where the runs of a row lie, and what the finished ones scored. Folders of runs may lie in a bucket (gs://)."""

import os
import re
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from hashlib import sha256
from math import exp
from pathlib import Path
from statistics import mean, stdev
from typing import Any

from etils import epath

from experiments import origin
from experiments.experiment import Changes, Experiment, Row
from experiments.registry import build, twin
from lm.config import DataError, SettingError, diff
from lm.files import checksum, seal, unseal, unseal_lines, write

Runs = str | os.PathLike | Sequence[str | os.PathLike]  # one folder of runs, or several


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
    length_losses: Mapping[str, float] = field(default_factory=dict)  # held-out, by length of rows [x inputs_length]
    phases: Mapping[str, str] = field(default_factory=dict)  # phase -> its folder, below that of the scale
    records: Mapping[str, int] = field(default_factory=dict)  # phase -> how many lines of metrics it had in the end

    def __post_init__(self):
        for name, best in _group("tasks", self.tasks):
            _check_task(name, best)
        signed = any(SIGNED & best["metrics"].keys() for best in self.tasks.values())
        for name, score in _group("columns", self.columns):
            _within(name, score, -100 * signed, 100)
        longer = [(f"length_losses {times}", loss) for times, loss in _group("length_losses", self.length_losses)]
        for name, loss in [*longer, ("held_out_loss", 0 if self.held_out_loss is None else self.held_out_loss)]:
            _within(name, loss, 0, LARGEST)
        for name, count in [("seconds", self.seconds), ("tokens", self.tokens), *_group("records", self.records)]:
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
        """Mean over tasks of the loss of their targets, nats a token; None if one has none, as heads and ensembles."""
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
    if isinstance(value, bool) or not isinstance(value, int | float) or not low - rounding <= value <= high + rounding:
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


def roots(runs: Runs) -> list[epath.Path]:
    """The folders of runs, as paths that may lie in a bucket; SettingError if they cannot be looked into."""
    paths = [epath.Path(root) for root in ([runs] if isinstance(runs, str | os.PathLike) else runs)]
    for path in paths:
        try:
            path.exists()
        except (ImportError, OSError) as error:  # the package for this kind of bucket, or the right to read it
            raise SettingError(f"--runs {path} cannot be read: {error}") from error
    return paths


def run_folder(runs: Path, scale: str, name: str, seed: int, overrides: Mapping[str, Any]) -> Path:
    """The folder of one run; rows that make the same changes share it, settings given by hand are part of it."""
    parent, _, last = twin(name).rpartition("/")
    return runs / scale / parent / with_overrides(last, overrides) / f"seed-{seed}"


def with_overrides(name: str, overrides: Mapping[str, Any]) -> str:
    """A file name, with the settings given by hand in it."""
    suffix = "".join(f",{path}={value}" for path, value in sorted(overrides.items()) if path != "seed")
    last = (name + suffix.replace("/", "_")).encode()
    if len(last) > 255:  # bytes: the longest file name on Linux and macOS
        last = last[:238].decode(errors="ignore").encode() + b"," + sha256(last).hexdigest()[:16].encode()
    return last.decode()


def check_settings(experiment: Experiment, folder: Path, allowed: Callable[[str], object] | None = None) -> None:
    """SettingError with the difference if ``folder`` holds a run of other settings; ``allowed`` is told it instead."""
    path = epath.Path(folder) / "settings.json"
    if not path.exists():
        return
    try:
        there = origin.flat(unseal(path.read_bytes(), path))
    except SettingError as error:
        raise SettingError(f"{path} cannot be read ({error}): choose other --runs or delete {folder}") from error
    if lines := origin.changes(there, origin.settings_of(experiment)):
        text = "".join(f"\n  {line}" for line in lines)
        if allowed is None:
            said = "belongs to a run with other settings: choose other --runs, delete it or, unless it is finished,"
            raise SettingError(f"{folder} {said} go on with --allow settings{text}")
        allowed(f"{folder}: allowed:{text}")


def fingerprint(folder: Path) -> str:
    """That of the settings in ``folder`` which change numbers; SettingError if they are damaged or not there."""
    path = epath.Path(folder) / "settings.json"
    try:
        return checksum(origin.flat(unseal(path.read_bytes(), path)))
    except OSError as error:
        raise SettingError(f"{path}, which tells whose scores these are, cannot be read: {error}") from error


def write_result(folder: Path, found: Mapping[str, Any]) -> None:
    """``scores.json``: what a run came to, bound to the settings of the run in ``folder``."""
    write(folder / "scores.json", seal({**found, "settings": fingerprint(folder)}))


def read_result(folder: Path) -> Result | None:
    """The result of a finished run, None of an unfinished one; SettingError if its file is damaged or another run's."""
    path, mend = epath.Path(folder) / "scores.json", "delete it and run the row again"
    if not path.exists():
        return None
    found = unseal(path.read_bytes(), path, mend)
    if found.pop("settings", None) != fingerprint(path.parent):
        raise DataError(f"{path} has the scores of a run with other settings; {mend}")
    try:
        return Result(folder=path.parent, **found)
    except (SettingError, TypeError) as error:  # a TypeError: more or less than a result has
        raise DataError(f"{path} does not count: {error}; the run diverged, or the file is damaged: {mend}") from error


def by_hand(name: str, scale: str, experiment: Experiment) -> Changes:
    """In what ``experiment`` differs from row ``name`` and is therefore called otherwise."""
    changed = diff(build(name, scale), experiment).items()
    return {path: new for path, (_, new) in changed if not path.startswith(origin.FREE)}


def results(
    row: Row, scale: str, runs: Runs, complain: Callable[[str], object] | None = None, given: Changes | None = None
) -> list[Result]:
    """Every finished seed of ``row`` at ``scale``; a seed that lies in several folders of runs counts once.

    ``given``: settings that were changed by hand, as for ``build``.

    ``complain`` is told of each run that does not count; without it the first such run is an error.
    """
    found: dict[int, Result] = {}
    own = by_hand(row.name, scale, build(row.name, scale, given))
    for root in roots(runs):
        home = run_folder(root, scale, row.name, 0, own).parent
        folders = home.iterdir() if home.exists() else ()
        for folder in sorted(f for f in folders if re.fullmatch(r"seed-\d+", f.name)):
            try:
                seed = {"seed": int(folder.name.removeprefix("seed-"))}
                check_settings(build(row.name, scale, {**(given or {}), **seed}), folder)
                result = read_result(folder)
            except (SettingError, OSError) as error:
                if complain is None:
                    raise
                complain(str(error))
                continue
            if result is not None:
                found.setdefault(result.seed, result)
            elif complain is not None:
                complain(f"{folder} has not finished")
    return [found[seed] for seed in sorted(found)]


Curves = Mapping[str, Sequence[Sequence[tuple[float, float]]]]  # what was watched -> lines of (step, value)
PLOTTED = 1e30  # at most: what is beyond it, or no number, is left out of a curve


def curves(found: Iterable[Result], complain: Callable[[str], object]) -> Curves:
    """The losses of pre-training and the scores of fine-tuning, a line a seed and member of an ensemble.

    ``complain`` is told of each file that is damaged, which gives no line.
    """
    drawn: dict[str, list] = {}
    for result in found:
        for name, folder in result.phase_folders().items():
            try:
                lines = phase_records(folder, result.records.get(name, 0))
            except (SettingError, OSError) as error:
                complain(f"{error}; its curves are not shown")
                continue
            for shown, (kind, value) in watched(name).items():
                points = [(line.get("step"), line.get(value)) for line in lines if line.get("kind") == kind]
                points = [point for point in points if all(_is_plotted(number) for number in point)]
                drawn.setdefault(shown, []).extend([points] if points else [])
    return {name: lines for name, lines in drawn.items() if lines}


def watched(phase: str) -> Mapping[str, tuple[str, str]]:
    """What is drawn of a phase -> the kind of its records and their value."""
    name = phase.partition("/")[0]
    if name != "pretraining":
        return {f"{name}: score": ("eval", "score")}
    return {"pre-training loss [nats/token]": ("train", "loss"), "held-out loss [nats/token]": ("eval", "loss")}


def phase_records(folder: Path, count: int) -> list[dict[str, Any]]:
    """What a phase of a finished run recorded, ``count`` lines or more; DataError if any was changed or lost."""
    path, mend = folder / "metrics.jsonl", "put back a copy that is whole"
    found = unseal_lines(path.read_bytes(), path, mend) if path.exists() else []
    if len(found) < count:
        raise DataError(f"{path} has lost its end: {len(found)} of {count} lines are there; {mend}")
    return found


def _is_plotted(value: Any) -> bool:
    return isinstance(value, int | float) and -PLOTTED < value < PLOTTED


def scores(found: list[Result]) -> dict[str, Score]:
    """Column -> mean and deviation over the seeds."""
    columns = dict.fromkeys(column for result in found for column in result.columns)
    return {c: Score.of(result.columns.get(c) for result in found) for c in columns}


def lengths(found: list[Result]) -> dict[int, Score]:
    """How many times as long as in training -> perplexity of held-out text in such rows, over the seeds."""
    times = dict.fromkeys(n for result in found for n in result.length_losses)
    each = {n: [result.length_losses[n] for result in found if n in result.length_losses] for n in times}
    return {int(n): Score.of(map(exp, losses)) for n, losses in each.items()}

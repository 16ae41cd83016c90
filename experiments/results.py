"""Where the runs of a row lie, and what the finished ones scored. Folders of runs may lie in a bucket (gs://)."""

import json
import os
import re
from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from hashlib import sha256
from math import exp, isfinite
from pathlib import Path
from statistics import mean, stdev
from typing import Any

from etils import epath

from experiments import origin
from experiments.experiment import Experiment, Row
from experiments.registry import build, twin
from lm.config import SettingError
from lm.files import unseal

Runs = str | os.PathLike | Sequence[str | os.PathLike]  # one folder of runs, or several


@dataclass(frozen=True)
class Result:
    """What one finished run scored and cost."""

    columns: Mapping[str, float]  # the paper's column -> our stand-in's score
    tasks: Mapping[str, Mapping[str, Any]]  # task -> {"step", "score", "metrics"} of its best checkpoint
    held_out_loss: float | None  # after pre-training, nats a target token; None without
    seconds: float  # of training, compilation and evaluation left out
    tokens: int  # target tokens learnt from, padding not counted
    folder: Path
    length_losses: Mapping[str, float] = field(default_factory=dict)  # held-out, by length of rows [x inputs_length]
    phases: Mapping[str, str] = field(default_factory=dict)  # phase -> its folder, below that of the scale

    def __post_init__(self):
        numbers = [*self.columns.values(), self.held_out_loss or 0.0, self.seconds, self.tokens]
        if not all(isfinite(number) for number in (*numbers, *self.length_losses.values())):
            raise ValueError("a score is not finite")
        if not all({"column", "metric"} <= best.keys() for best in self.tasks.values()):
            raise ValueError("a task lacks its column or its metric")
        if any(Path(place).is_absolute() or ".." in Path(place).parts for place in self.phases.values()):
            raise ValueError("a phase lies outside of the runs")

    @property
    def seed(self) -> int:
        return int(self.folder.name.removeprefix("seed-"))

    @property
    def task_loss(self) -> float | None:
        """Mean over tasks of the loss of their targets, nats a token; None if one has none, as heads and ensembles."""
        found = [best.get("metrics", {}).get("loss") for best in self.tasks.values()]
        return mean(found) if found and None not in found else None

    def phase_folders(self) -> dict[str, Path]:
        """Phase -> the folder with its metrics and predictions, of those that are there."""
        ups, named = (self.folder, *self.folder.parents), self.phases.items()
        found = {name: next((up / path for up in ups if (up / path).exists()), None) for name, path in named}
        return {name: place for name, place in found.items() if place is not None}


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
    suffix = "".join(f",{path}={value}" for path, value in sorted(overrides.items()) if path != "seed")
    parent, _, last = twin(name).rpartition("/")
    last = (last + suffix.replace("/", "_")).encode()
    if len(last) > 255:  # bytes: the longest file name on Linux and macOS
        last = last[:238].decode(errors="ignore").encode() + b"," + sha256(last).hexdigest()[:16].encode()
    return runs / scale / parent / last.decode() / f"seed-{seed}"


def check_settings(experiment: Experiment, folder: Path, allowed: Callable[[str], object] | None = None) -> None:
    """SettingError with the difference if ``folder`` holds a run of other settings; ``allowed`` is told it instead."""
    path = epath.Path(folder) / "settings.json"
    if not path.exists():
        return
    try:
        there = origin.flat(unseal(path.read_bytes(), path))
    except (ValueError, AttributeError) as error:
        raise SettingError(f"{path} cannot be read ({error}): choose other --runs or delete {folder}") from error
    if lines := origin.changes(there, origin.settings_of(experiment)):
        text = "".join(f"\n  {line}" for line in lines)
        if allowed is None:
            said = "belongs to a run with other settings: choose other --runs, delete it or, unless it is finished,"
            raise SettingError(f"{folder} {said} go on with --allow settings{text}")
        allowed(f"{folder}: allowed:{text}")


def read_result(folder: Path) -> Result | None:
    """The result of a finished run, None of an unfinished one; SettingError if its file is damaged."""
    path = epath.Path(folder) / "scores.json"
    if not path.exists():
        return None
    try:
        return Result(folder=path.parent, **json.loads(path.read_text()))
    except (ValueError, TypeError, AttributeError) as error:
        raise SettingError(f"{path} is damaged ({error!r}): delete it and run the row again") from error


def results(row: Row, scale: str, runs: Runs, complain: Callable[[str], object] | None = None) -> list[Result]:
    """Every finished seed of ``row`` at ``scale``; a seed that lies in several folders of runs counts once.

    ``complain`` is told of each run that does not count; without it the first such run is an error.
    """
    found: dict[int, Result] = {}
    for root in roots(runs):
        home = run_folder(root, scale, row.name, 0, {}).parent
        folders = home.iterdir() if home.exists() else ()
        for folder in sorted(f for f in folders if re.fullmatch(r"seed-\d+", f.name)):
            try:
                check_settings(build(row.name, scale, {"seed": int(folder.name.removeprefix("seed-"))}), folder)
                result = read_result(folder)
                if result is not None and not (folder / "settings.json").exists():
                    raise SettingError(f"{folder} has scores but no settings.json to tell whose they are")
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


def json_lines(path: Path) -> list[dict[str, Any]]:
    """The objects in a file of JSON lines, none if there is no file; a line that a kill cut short is left out."""
    found = []
    for line in path.read_bytes().splitlines() if path.exists() else ():
        with suppress(ValueError):
            found.append(json.loads(line))
    return [line for line in found if isinstance(line, dict)]


Curves = Mapping[str, Sequence[Sequence[tuple[float, float]]]]  # what was watched -> lines of (step, value)


def curves(found: list[Result]) -> Curves:
    """The losses of pre-training and the scores of fine-tuning, a line a seed and member of an ensemble."""
    drawn: dict[str, list] = {}
    for name, folder in ((name, folder) for result in found for name, folder in result.phase_folders().items()):
        task, lines = name.partition("/")[0], json_lines(folder / "metrics.jsonl")
        kinds = {f"{task}: score": ("eval", "score")}
        if task == "pretraining":
            kinds = {
                "pre-training loss [nats/token]": ("train", "loss"),
                "held-out loss [nats/token]": ("eval", "loss"),
            }
        for shown, (kind, value) in kinds.items():
            points = [(line.get("step"), line.get(value)) for line in lines if line.get("kind") == kind]
            points = [point for point in points if all(isinstance(n, int | float) and isfinite(n) for n in point)]
            drawn.setdefault(shown, []).extend([points] if points else [])
    return {name: lines for name, lines in drawn.items() if lines}


def scores(found: list[Result]) -> dict[str, Score]:
    """Column -> mean and deviation over the seeds."""
    columns = dict.fromkeys(column for result in found for column in result.columns)
    return {c: Score.of(result.columns.get(c) for result in found) for c in columns}


def lengths(found: list[Result]) -> dict[int, Score]:
    """How many times as long as in training -> perplexity of held-out text in such rows, over the seeds."""
    times = found[0].length_losses if found else {}
    return {int(n): Score.of(exp(result.length_losses[n]) for result in found) for n in times}

"""Where the runs of a row lie, and what the finished ones scored."""

import json
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from math import exp
from pathlib import Path
from statistics import mean, stdev
from typing import Any

from experiments.experiment import Experiment, Row
from experiments.registry import build, twin
from lm.config import SettingError, diff, from_json


@dataclass(frozen=True)
class Result:
    """What one finished run scored and cost."""

    columns: Mapping[str, float]  # the paper's column -> our stand-in's score
    tasks: Mapping[str, Mapping[str, Any]]  # task -> {"step", "score", "metrics"} of its best checkpoint
    held_out_loss: float | None  # after pre-training, nats a target token; None without
    seconds: float  # of training, compilation and evaluation left out
    tokens: int  # target tokens learnt from, padding not counted
    folder: Path
    length_losses: Mapping[str, float] = field(
        default_factory=dict
    )  # held-out loss in longer rows, by how many times as long as in training


@dataclass(frozen=True)
class Score:
    """Mean and sample standard deviation over seeds; the deviation of one seed is unknown (None)."""

    mean: float
    std: float | None

    @classmethod
    def of(cls, values: Iterable[float]) -> "Score":
        values = list(values)
        return cls(mean(values), stdev(values) if len(values) > 1 else None)


def run_folder(runs: Path, scale: str, name: str, seed: int, overrides: Mapping[str, Any]) -> Path:
    """The folder of one run; rows that make the same changes share it, settings given by hand are part of it."""
    suffix = "".join(f",{path}={value}" for path, value in sorted(overrides.items()) if path != "seed")
    return runs / scale / (twin(name) + suffix.replace("/", "_")) / f"seed-{seed}"


def check_settings(experiment: Experiment, folder: Path) -> None:
    """SettingError with the difference if ``folder`` holds a run of other settings."""
    path = folder / "settings.json"
    if path.exists():
        changed = diff(from_json(Experiment, path.read_text()), experiment)
        lines = "".join(f"\n  {name}: {old} there, {new} now" for name, (old, new) in changed.items())
        if changed:
            raise SettingError(
                f"{folder} belongs to a run with other settings: choose other --runs or delete it{lines}"
            )


def read_result(folder: Path) -> Result | None:
    """The result of a finished run, None of an unfinished one; SettingError if its file is damaged."""
    path = folder / "scores.json"
    if not path.exists():
        return None
    try:
        found = json.loads(path.read_text())
        return Result(folder=folder, **found)
    except (ValueError, TypeError) as error:
        raise SettingError(f"{path} is damaged ({error!r}): delete it and run the row again") from error


def results(row: Row, scale: str, runs: Path) -> list[Result]:
    """Every finished seed of ``row`` at ``scale``."""
    found = []
    for folder in sorted(run_folder(runs, scale, row.name, 0, {}).parent.glob("seed-*")):
        check_settings(build(row.name, scale, {"seed": int(folder.name.removeprefix("seed-"))}), folder)
        found.append(read_result(folder))
    return [result for result in found if result is not None]


def scores(found: list[Result]) -> dict[str, Score]:
    """Column -> mean and deviation over the seeds."""
    columns = found[0].columns if found else {}
    return {column: Score.of(result.columns[column] for result in found) for column in columns}


def lengths(found: list[Result]) -> dict[int, Score]:
    """How many times as long as in training -> perplexity of held-out text in such rows, over the seeds."""
    times = found[0].length_losses if found else {}
    return {int(n): Score.of(exp(result.length_losses[n]) for result in found) for n in times}


def losses(found: list[Result]) -> Score | None:
    """Mean and deviation over the seeds of the held-out loss after pre-training."""
    values = [result.held_out_loss for result in found if result.held_out_loss is not None]
    return Score.of(values) if values else None

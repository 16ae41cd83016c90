"""The finished runs of a row, in one folder of runs or several, and what was watched while they trained."""

import os
import re
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from math import exp
from pathlib import Path
from statistics import mean, stdev
from typing import Any

from etils import epath

from experiments.runs.result import Result, check_settings, read_result
from experiments.runs.stages import group_of
from experiments.study.experiment import Changes, Row
from experiments.study.registry import build, by_hand, run_folder
from lm.files import unseal_lines
from lm.settings import DataError, SettingError

Runs = str | os.PathLike | Sequence[str | os.PathLike]  # one folder of runs, or several


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
        # the package for this kind of bucket, or the right to read it
        except (ImportError, OSError) as error:
            raise SettingError(f"--runs {path} cannot be read: {error}") from error
    return paths


def results(
    row: Row,
    scale: str,
    runs: Runs,
    complain: Callable[[str], object] | None = None,
    given: Changes | None = None,
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
    name, pretrains = group_of(phase)
    if not pretrains:
        return {f"{name}: score": ("eval", "score")}
    return {
        "pre-training loss [nats/token]": ("train", "loss"),
        "held-out loss [nats/token]": ("eval", "loss"),
    }


def phase_records(folder: Path, count: int) -> list[dict[str, Any]]:
    """What a phase of a finished run recorded, ``count`` lines or more; DataError if any was changed or
    lost.
    """
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

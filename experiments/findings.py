"""What a table's finished rows show beside the paper's: the order of the rows, and which differ from the baseline."""

from collections.abc import Mapping, Sequence

import numpy as np

from experiments.experiment import Table
from experiments.registry import REGISTRY, baseline_of, twin
from experiments.results import Result
from experiments.sheets import Cell, Finished, Sheet, columns_of, plain
from experiments.statistics import DRAWS, agreement, pooled_std
from experiments.t5.tables import BASELINE_STD

RESAMPLED = (
    "Each cell: the place of ours (of the paper's). τ is Kendall's τ-b: of all pairs of rows, those in the paper's "
    f"order less those in the opposite one. Its interval is of {DRAWS:,} bootstrap draws of rows, of the seeds within "
    "each row and, for the average, of columns; below stands how often a random order agrees as well or better."
)
AVERAGE = (
    " The average is over columns in units of their noise: the deviation over seeds, pooled over the rows (ours), or "
    "over ten runs of the baseline (the paper's)."
)


def orders(table: Table, found: Finished) -> tuple[list[Sheet], str]:
    """The places of the rows and their rank correlations, and what these are; no sheets without three rows."""
    columns = columns_of(table, found)
    found = _complete(found, columns)
    rows = [row for row in table.rows if found[row.name] and all(c in row.paper for c in columns)]
    if len(rows) < 3 or not columns:
        return [], f"The order of the rows is compared with the paper's when three have finished; {len(rows)} have."
    ours = [_sample(found[row.name], columns) for row in rows]
    paper = np.array([[row.paper[c] for c in columns] for row in rows])
    sides = {c: ([sample[:, [i]] for sample in ours], paper[:, [i]]) for i, c in enumerate(columns)}
    noise, theirs = _noise(table, found, columns), np.array([BASELINE_STD[c] for c in columns])
    if noise is not None and (told := noise > 0).any():
        sides = {"average": ([s[:, told] / noise[told] for s in ours], paper[:, told] / theirs[told])} | sides
    order = np.argsort(-next(iter(sides.values()))[1].mean(1), kind="stable")
    places = {"row": [Cell(rows[i].label) for i in order]}
    alike = {"": [Cell("τ"), Cell("95 % interval"), Cell("by chance")]}
    for name, (samples, scores) in sides.items():
        left, right = _places(np.array([sample.mean() for sample in samples])), _places(scores.mean(1))
        places[name] = [Cell(f"{left[i]} ({right[i]})") for i in order]
        got = agreement(samples, scores, seed=0)
        texts = (f"{got.tau:.2f}", f"{got.low:.2f} … {got.high:.2f}", f"{got.chance:.3f}") if got else ["–"] * 3
        alike[name] = [Cell(text) for text in texts]
    last = AVERAGE if "average" in sides else " There is no average yet: the noise is not known without a second seed."
    return [places, alike], RESAMPLED + last


def differences(table: Table, found: Finished) -> str:
    """Which rows differ from the baseline by more than two standard deviations of the noise, ours and the paper's.

    Nothing is claimed of a row, or against a baseline, with one seed. With two on both sides, two deviations are twice
    the standard error of a difference or more.
    """
    columns, base = columns_of(table, found), REGISTRY[baseline_of(table.rows[0].name)]
    found = _complete(found, columns)
    noise, rows = _noise(table, found, columns), [row for row in table.rows if row.changes != base.changes]
    stds = {} if noise is None else {c: std for c, std in zip(columns, noise, strict=True) if std > 0}
    twice = [row for row in rows if min(len(found[row.name]), len(found[base.name])) > 1]
    deltas = {(row.label, c): _mean(found[row.name], c) - _mean(found[base.name], c) for row in twice for c in stds}
    ours = {key: delta for key, delta in deltas.items() if abs(delta) > 2 * stds[key[1]]}
    theirs = {(row.label, c): row.paper[c] - base.paper[c] for row in rows for c in columns if c in row.paper}
    theirs = {key: delta for key, delta in theirs.items() if abs(delta) > 2 * BASELINE_STD[key[1]]}
    if not columns:
        return ""
    lines = ["None of our differences is told from noise: that takes two seeds of a row and of the baseline."]
    if twice:
        lines = [f"Ours, beyond two standard deviations over seeds{_stds(stds)}, pooled over the rows: {_named(ours)}."]
    if base.paper:
        spread = _stds({c: BASELINE_STD[c] for c in columns})
        lines.append(f"The paper's, beyond two of ten runs of its baseline{spread}: {_named(theirs)}.")
    if both := [delta * ours.get(key, 0.0) for key, delta in theirs.items() if key in deltas]:
        lines.append(
            f"Of {len(both)} such differences of the paper ours shows {sum(d > 0 for d in both)}, the reverse of "
            f"{sum(d < 0 for d in both)}, and {both.count(0)} are within our noise."
        )
    return "Differences to the baseline:\n\n" + "\n".join(f"- {line}" for line in lines)


def _stds(stds: Mapping[str, float]) -> str:
    return " (" * bool(stds) + ", ".join(f"{c} {std:.2f}" for c, std in stds.items()) + ")" * bool(stds)


def _named(deltas: Mapping[tuple[str, str], float]) -> str:
    rows: dict[str, list[str]] = {}
    for (label, column), delta in deltas.items():
        rows.setdefault(plain(label), []).append(f"{column} {delta:+.2f}")
    return "; ".join(f"{label} ({', '.join(texts)})" for label, texts in rows.items()) or "no row"


def _mean(found: list[Result], column: str) -> float:
    return float(np.mean([result.columns[column] for result in found]))


def _noise(table: Table, found: Finished, columns: Sequence[str]) -> np.ndarray | None:
    """[C]: deviation over seeds, pooled over the rows and their baseline; None if no row has a second seed."""
    rows = {twin(row.name): row.name for row in (*table.rows, REGISTRY[baseline_of(table.rows[0].name)])}
    return pooled_std([_sample(found[name], columns) for name in rows.values() if found[name]])


def _complete(found: Finished, columns: Sequence[str]) -> Finished:
    """The runs that were scored in every column."""
    return {name: [run for run in runs if run.columns.keys() >= set(columns)] for name, runs in found.items()}


def _sample(found: list[Result], columns: Sequence[str]) -> np.ndarray:
    """[S, C]"""
    return np.array([[result.columns[c] for c in columns] for result in found])


def _places(values: np.ndarray) -> np.ndarray:
    """[R] -> [R]: 1 for the highest; equal ones share the better place."""
    return 1 + (values[None, :] > values[:, None]).sum(1)

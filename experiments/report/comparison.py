"""Finished runs compared: whether two rows differ by more than chance, how alike two orders of rows are."""

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from math import exp, sqrt
from statistics import mean, stdev, variance
from typing import NamedTuple

import numpy as np

from experiments.runs.result import Result
from experiments.study.experiment import Row, Table
from experiments.study.t5.tables import COLUMNS

Samples = Mapping[str, Mapping[int, float]]  # row -> seed -> value
Value = Callable[[Result], float | None]  # of a run; None: it has none
Curves = Mapping[str, Sequence[Sequence[tuple[float, float]]]]  # what was recorded -> lines of (step, value)
LEVEL = 0.05  # how often rows that do not differ are told apart nevertheless
DRAWS = 4_000  # of the bootstrap
ROUNDING = 1e-9  # of values: a smaller deviation counts as none


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
class Finished:
    """The finished runs of a table's rows, and of the row that they are compared with."""

    table: Table
    baseline: Row
    runs: Mapping[str, Sequence[Result]]  # row -> its seeds

    def of(self, row: Row) -> Sequence[Result]:
        return self.runs[row.name]

    @property
    def columns(self) -> list[str]:
        """The paper's columns in which any row of the table was scored."""
        scored = {name for row in self.table.rows for run in self.of(row) for name in run.columns}
        return [name for name in COLUMNS if name in scored]

    def key(self, row: Row) -> str:
        """The name of ``row`` in samples: rows with the same changes share their runs, and have one name."""
        rows = (*self.table.rows, self.baseline)
        return next(other.name for other in rows if other.changes == row.changes)

    def samples(self, value: Value) -> dict[str, dict[int, float]]:
        """A value of the runs of each row of the table and of their baseline."""
        return {
            self.key(row): {run.seed: x for run in self.of(row) if (x := value(run)) is not None}
            for row in (*self.table.rows, self.baseline)
        }


def in_column(name: str) -> Value:
    """A run's score in a column of the paper."""
    return lambda run: run.columns.get(name)


def perplexities(runs: Iterable[Result]) -> dict[int, Score]:
    """Length of rows [x that of training] -> perplexity of held-out text in such rows, over the seeds."""
    losses: dict[int, list[float]] = {}
    for run in runs:
        for times, loss in run.length_losses.items():
            losses.setdefault(int(times), []).append(exp(loss))
    return {times: score for times, x in losses.items() if (score := Score.of(x))}


def compare(samples: Samples, row: str, other: str) -> int | None:
    """1, -1: ``row`` is above, below ``other`` by more than chance; 0: it is not; None: it is unknown.

    Student's t test of two means, noise pooled over all rows. One seed, or values that never vary: unknown.
    """
    values, other_values = samples[row], samples[other]
    if min(len(values), len(other_values)) < 2:
        return None
    if row == other:
        return 0
    paired = values.keys() == other_values.keys()
    std, freedom = _beside_seeds(samples, sorted(values)) if paired else _within_rows(samples)
    if std <= ROUNDING * max(abs(x) for seeds in samples.values() for x in seeds.values()):
        return None
    from scipy.special import stdtr  # takes its time to import, which `lm list` need not wait for

    delta = np.mean([*values.values()]) - np.mean([*other_values.values()])
    error = std * sqrt(1 / len(values) + 1 / len(other_values))
    return int(np.sign(delta)) * bool(2 * stdtr(freedom, -abs(delta) / error) < LEVEL)


def pooled(samples: Samples) -> float:
    """The deviation over seeds, pooled over the rows; 0 if unknown."""
    return _within_rows(samples)[0]


def _within_rows(samples: Samples) -> tuple[float, int]:
    """The deviation over the seeds of a row, pooled over the rows, and its degrees of freedom."""
    rows = [[*row.values()] for row in samples.values() if row]
    freedom = sum(len(row) - 1 for row in rows)
    squares = sum(variance(row) * (len(row) - 1) for row in rows if len(row) > 1)
    return sqrt(squares / freedom) if freedom else 0.0, freedom


def _beside_seeds(samples: Samples, seeds: Sequence[int]) -> tuple[float, int]:
    """The deviation of rows that have exactly these seeds, without what a seed does to all of them alike."""
    values = np.array([[row[seed] for seed in seeds] for row in samples.values() if sorted(row) == [*seeds]])
    residuals = values - values.mean(0) - values.mean(1, keepdims=True) + values.mean()
    freedom = (values.shape[0] - 1) * (values.shape[1] - 1)
    return sqrt((residuals**2).sum() / freedom), freedom


class Agreement(NamedTuple):
    """How alike two orders of rows are: Kendall's tau-b."""

    tau: float
    interval: tuple[float, float] | None  # of 95 %; None where a row has one seed
    tied: int  # pairs of our rows with the same mean

    def __str__(self) -> str:
        notes = ["{:.2f} … {:.2f}".format(*self.interval) if self.interval else "one seed: no interval"]
        notes += [f"{self.tied} pairs of rows tied"] * bool(self.tied)
        return f"{self.tau:.2f} ({', '.join(notes)})"


def agreement(measured: Samples, paper: Mapping[str, float], seed: int) -> Agreement | None:
    """How alike measured means and the paper's values order the rows; None if either has all rows alike.

    The bootstrap draws seeds with replacement, the same for all rows where all rows have the same seeds. Rows
    are not drawn: they are those of the table.
    """
    rng, published = np.random.default_rng(seed), np.array([paper[name] for name in measured])
    values = [np.array([row[s] for s in sorted(row)]) for row in measured.values()]
    means = np.array([row.mean() for row in values])
    tau = float(kendall(means, published))
    if np.isnan(tau):
        return None
    tied = int((means[:, None] == means).sum() - len(means)) // 2
    if min(map(len, values)) < 2:
        return Agreement(tau, None, tied)
    same = len({tuple(sorted(row)) for row in measured.values()}) == 1
    first = rng.integers(len(values[0]), size=(DRAWS, len(values[0])))
    drawn = [row[first if same else rng.integers(len(row), size=(DRAWS, len(row)))].mean(1) for row in values]
    # a draw in which all rows are alike agrees with no order: tau 0
    taus = np.nan_to_num(kendall(np.stack(drawn, -1), np.broadcast_to(published, (DRAWS, len(published)))))
    low, high = np.quantile(taus, (0.025, 0.975)).tolist()
    return Agreement(tau, (low, high), tied)


def kendall(x: np.ndarray, y: np.ndarray) -> np.ndarray:
    """[..., R], [..., R] -> [...]: Kendall's tau-b; NaN where either side is all alike.

    The pairs of rows in the same order less those in the opposite one, over all pairs but for ties. (scipy's
    function takes one pair of orders a call; the bootstrap has thousands.)
    """
    left, right = (np.sign(side[..., :, None] - side[..., None, :]) for side in (x, y))
    pairs = np.sqrt((left**2).sum((-2, -1)) * (right**2).sum((-2, -1)))
    return np.divide((left * right).sum((-2, -1)), pairs, out=np.full(pairs.shape, np.nan), where=pairs > 0)

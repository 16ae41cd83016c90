"""What the seeds of rows tell: whether two rows differ by more than chance, and how alike two orders of rows
are.
"""

from collections.abc import Mapping, Sequence
from math import sqrt
from typing import NamedTuple

import numpy as np

Samples = Mapping[str, Mapping[int, float]]  # row -> seed -> value
LEVEL = 0.05  # how often rows that do not differ are told apart all the same
DRAWS = 4_000  # of the bootstrap
ROUNDING = 1e-9  # of values: a deviation below it is none


def compare(samples: Samples, one: str, other: str) -> int | None:
    """1, -1: row ``one`` is above, below ``other`` by more than chance; 0: not so; None: it cannot be told.

    Student's t test of two means. The noise is pooled over all rows. One seed, or values that never vary,
    tell nothing.
    """
    ours, theirs = samples[one], samples[other]
    if min(len(ours), len(theirs)) < 2:
        return None
    if one == other:
        return 0
    paired = ours.keys() == theirs.keys()
    std, freedom = _beside_seeds(samples, sorted(ours)) if paired else _within_rows(samples)
    if std <= ROUNDING * max(abs(value) for row in samples.values() for value in row.values()):
        return None
    from scipy.stats import t  # which listing rows need not wait for

    delta = np.mean([*ours.values()]) - np.mean([*theirs.values()])
    error = std * sqrt(1 / len(ours) + 1 / len(theirs))
    return int(np.sign(delta)) * bool(2 * t.sf(abs(delta) / error, freedom) < LEVEL)


def _within_rows(samples: Samples) -> tuple[float, int]:
    """The deviation over the seeds of a row, pooled over the rows, and its degrees of freedom."""
    rows = [[*row.values()] for row in samples.values() if row]
    freedom = sum(len(row) - 1 for row in rows)
    return sqrt(sum(np.var(row) * len(row) for row in rows) / freedom), freedom


def _beside_seeds(samples: Samples, seeds: Sequence[int]) -> tuple[float, int]:
    """The deviation of rows that have just these seeds, without what a seed does to all of them alike."""
    values = np.array([[row[seed] for seed in seeds] for row in samples.values() if sorted(row) == [*seeds]])
    left = values - values.mean(0) - values.mean(1, keepdims=True) + values.mean()
    freedom = (values.shape[0] - 1) * (values.shape[1] - 1)
    return sqrt((left**2).sum() / freedom), freedom


class Agreement(NamedTuple):
    """Kendall's tau-b, its 95 % interval (None where a row has one seed), and the pairs of our rows that are
    tied.
    """

    tau: float
    interval: tuple[float, float] | None
    tied: int

    def __str__(self) -> str:
        said = (
            [f"{self.interval[0]:.2f} … {self.interval[1]:.2f}"]
            if self.interval
            else ["one seed: no interval"]
        )
        said += [f"{self.tied} pairs of rows tied"] * bool(self.tied)
        return f"{self.tau:.2f} ({', '.join(said)})"


def agreement(ours: Samples, paper: Mapping[str, float], seed: int) -> Agreement | None:
    """How alike our means and the paper's values order the rows; None if a side is all alike.

    A draw of the bootstrap takes seeds with replacement: the same of all rows where all have the same. Rows
    stay: they are those of the table.
    """
    rng, theirs = np.random.default_rng(seed), np.array([paper[name] for name in ours])
    values = [np.array([row[s] for s in sorted(row)]) for row in ours.values()]
    means = np.array([row.mean() for row in values])
    tau = float(kendall(means, theirs))
    if np.isnan(tau):
        return None
    tied = int((means[:, None] == means).sum() - len(means)) // 2
    if min(map(len, values)) < 2:
        return Agreement(tau, None, tied)
    same = len({tuple(sorted(row)) for row in ours.values()}) == 1
    first = rng.integers(len(values[0]), size=(DRAWS, len(values[0])))
    drawn = [row[first if same else rng.integers(len(row), size=(DRAWS, len(row)))].mean(1) for row in values]
    # all alike: 0
    taus = np.nan_to_num(kendall(np.stack(drawn, -1), np.broadcast_to(theirs, (DRAWS, len(theirs)))))
    return Agreement(tau, tuple(np.quantile(taus, (0.025, 0.975)).tolist()), tied)


def kendall(x: np.ndarray, y: np.ndarray) -> np.ndarray:
    """[..., R], [..., R] -> [...]: Kendall's tau-b; NaN where either side is all alike. scipy's takes one
    pair a call.

    The pairs of rows in the same order less those in the opposite one, over all pairs but for ties.
    """
    ours, theirs = (np.sign(side[..., :, None] - side[..., None, :]) for side in (x, y))
    pairs = np.sqrt((ours**2).sum((-2, -1)) * (theirs**2).sum((-2, -1)))
    return np.divide((ours * theirs).sum((-2, -1)), pairs, out=np.full(pairs.shape, np.nan), where=pairs > 0)

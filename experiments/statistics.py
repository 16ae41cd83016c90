"""What repeated runs can tell: noise, how alike two orders are, and how sure that is. numpy only."""

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

DRAWS = 4_000  # of the bootstrap, and of random orders


def kendall(x: np.ndarray, y: np.ndarray) -> np.ndarray:
    """[..., R], [..., R] -> [...]: Kendall's tau-b of the last axis; NaN where either side is all alike.

    The pairs of rows in the same order less those in the opposite one, over all pairs but for ties.
    """
    ours, theirs = (np.sign(side[..., :, None] - side[..., None, :]) for side in (x, y))
    pairs = np.sqrt((ours**2).sum((-2, -1)) * (theirs**2).sum((-2, -1)))
    return np.divide((ours * theirs).sum((-2, -1)), pairs, out=np.full(pairs.shape, np.nan), where=pairs > 0)


def pooled_std(samples: Sequence[np.ndarray]) -> np.ndarray | None:
    """Samples [S, C] -> [C]: the deviation within samples, whatever their means; None if none has a second seed."""
    freedom = sum(len(sample) - 1 for sample in samples)
    if freedom < 1:
        return None
    return np.sqrt(sum(((sample - sample.mean(0)) ** 2).sum(0) for sample in samples) / freedom)


@dataclass(frozen=True)
class Agreement:
    """Kendall's tau-b, its 95 % interval, and how often a random order agrees as well or better."""

    tau: float
    low: float
    high: float
    chance: float


def agreement(ours: Sequence[np.ndarray], paper: np.ndarray, seed: int) -> Agreement | None:
    """R samples [S, C], paper [R, C] -> how alike the means over columns order the rows; None if a side is all alike.

    A draw of the bootstrap takes rows, columns, and seeds within each row, all with replacement.
    """
    rng, (rows, columns) = np.random.default_rng(seed), paper.shape
    means = np.stack([sample.mean((0, 1)) for sample in ours])
    tau = kendall(means, paper.mean(1))
    if np.isnan(tau):
        return None
    orders = rng.permuted(np.tile(means, (DRAWS, 1)), axis=1)
    chance = (kendall(orders, np.broadcast_to(paper.mean(1), orders.shape)) >= tau - 1e-9).mean()
    seeds = [sample[rng.integers(len(sample), size=(DRAWS, len(sample)))].mean(1) for sample in ours]
    weights = rng.multinomial(columns, np.full(columns, 1 / columns), size=DRAWS) / columns
    drawn = rng.integers(rows, size=(DRAWS, rows))
    left = np.take_along_axis(np.einsum("rdc,dc->dr", np.stack(seeds), weights), drawn, 1)
    right = np.take_along_axis(np.einsum("rc,dc->dr", paper, weights), drawn, 1)
    low, high = np.nanquantile(kendall(left, right), (0.025, 0.975))
    return Agreement(float(tau), float(low), float(high), float(chance))

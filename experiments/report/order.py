"""Measure how far two lists of scores put the same rows into the same order.

Kendall's tau is 1 for equal orders, 0 on average for unrelated ones, and -1 for opposite ones. Decision
accuracy (Magnusson et al. 2025, "DataDecide") is the share of pairs of rows of which both lists call the same
row better.
"""

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from statistics import fmean

import numpy as np

from experiments.report.statistics import ALPHA, seed_weights
from experiments.study.claims import has_noise, published_means, simulate_published_means
from experiments.study.table import Table

MIN_ROWS = 3  # fewest rows whose order is compared with the paper's; two scales are compared from two rows on
DECIMALS = 9  # of scores that are compared: scores that are equal up to rounding are tied
RANDOM_ORDERS = 100_000  # with ties, the number of orders that are drawn where there are more (9! = 362,880)
ORDERS_AT_ONCE = 1_000  # how many of them are held in memory
SeedScores = Mapping[str, Mapping[int, float]]  # row -> seed -> score


@dataclass(frozen=True)
class PaperOrder:
    """Holds how far the rows of a table are in the order of their published scores."""

    rows: tuple[str, ...]
    tau: float  # Kendall's tau-b of our mean scores with the published means
    p: float  # probability of a tau as far from 0 if all orders were equally likely
    # 95 % bootstrap interval of tau over seeds and examples; None if all rows share fewer than two seeds
    interval: tuple[float, float] | None
    # mean tau of simulated repeats of the paper with its published means; None if the paper gives no noise
    replication: float | None


@dataclass(frozen=True)
class ScalePrediction:
    """Holds how far the order of rows at one scale predicts that at another."""

    rows: tuple[str, ...]
    accuracy: float  # share of pairs in the same order; half a pair if tied at one scale
    accuracy_interval: tuple[float, float] | None  # 95 %, over the seeds of both scales
    tau: float
    tau_interval: tuple[float, float] | None
    p: float


def kendall_tau(x: np.ndarray, y: np.ndarray) -> np.ndarray:
    """Return Kendall's tau-b of x [..., N] with y [..., N]; nan where all of x or all of y are equal.

    tau_b = (C - D) / sqrt((P - T_x) (P - T_y)): C and D are the numbers of concordant and discordant pairs
    among the P = N (N - 1) / 2, and T_x and T_y the numbers of pairs that are tied in x and in y (Kendall
    1945, "The treatment of ties in ranking problems").
    """
    signs_x, signs_y = _pair_signs(x), _pair_signs(y)
    untied = np.sqrt((signs_x**2).sum(-1) * (signs_y**2).sum(-1))
    with np.errstate(invalid="ignore"):
        return (signs_x * signs_y).sum(-1) / untied


def decision_accuracy(x: np.ndarray, y: np.ndarray) -> np.ndarray:
    """Return the share of the pairs of N items that x [..., N] and y [..., N] put into the same order.

    A pair that is tied in either counts as half.
    """
    return (1 + _pair_signs(x) * _pair_signs(y)).mean(-1) / 2


def _pair_signs(x: np.ndarray) -> np.ndarray:
    """Return 1, 0 or -1 for each pair i < j: the sign of x_i - x_j; [..., N] -> [..., N (N - 1) / 2]."""
    x = np.round(x, DECIMALS)
    first, second = np.triu_indices(x.shape[-1], 1)
    return np.sign(x[..., first] - x[..., second])


def tau_p_value(x: np.ndarray, y: np.ndarray) -> float:
    """Return the two-sided p-value of Kendall's tau-b of x [N] with y [N] under random orders.

    It is the probability of an absolute tau at least as large if all N! orders of y are equally likely. It is
    exact without ties, and with ties where N! is at most RANDOM_ORDERS. For more rows with ties it is
    estimated from random orders; it is never 0, since the observed order is one of all.
    """
    from scipy.stats import kendalltau, permutation_test  # slow to import

    if np.isnan(kendall_tau(x, y)):
        return 1.0
    if _pair_signs(x).all() and _pair_signs(y).all():  # without ties
        return float(kendalltau(x, y, method="exact").pvalue)
    test = permutation_test(
        (y,),
        lambda orders, axis=-1: np.abs(kendall_tau(x, orders)),
        permutation_type="pairings",
        vectorized=True,
        n_resamples=RANDOM_ORDERS,
        batch=ORDERS_AT_ONCE,
        alternative="greater",
        rng=np.random.default_rng(0),
    )
    return float(test.pvalue)


def paper_order(
    table: Table, scores: Mapping[str, float], resampled: Mapping[str, np.ndarray] | None
) -> PaperOrder | None:
    """Return how far our scores of a table's rows are in the order of its paper.

    None for too few rows, and where all of ours or all of the paper's are equal: these have no order.

    scores: row -> mean score over seeds. resampled: row -> its mean score in each bootstrap resample, with
    the same resamples for all rows, [NUM_RESAMPLES]; None if fewer than two seeds are common to all rows.

    The tau of simulated repeats is an optimistic ceiling: it compares the published means with these means
    plus the noise of one repeat, as if the published means were exact. ``simulate_replication`` takes them as
    noisy too, and adds noise of twice the variance. With that noise tau would fall from 0.82 to 0.77 in
    t5/5-bert-style, from 0.79 to 0.73 in t5/7-span-length, from 0.74 to 0.64 in glu/2-glue and from 0.68 to
    0.59 in glu/4-squad.
    """
    published = published_means(table)
    rows = tuple(name for name in published if name in scores)
    if len(rows) < MIN_ROWS:
        return None
    ours = np.array([scores[name] for name in rows])
    theirs = np.array([published[name] for name in rows])
    tau = float(kendall_tau(ours, theirs))
    if np.isnan(tau):
        return None
    interval = None
    if resampled is not None:
        interval = percentile_interval(kendall_tau(np.stack([resampled[name] for name in rows], -1), theirs))
    replication = None
    if has_noise(table):
        published_rows = [row for row in table.rows if row.name in rows]
        replicated = simulate_published_means(published_rows, table).T
        replication = float(kendall_tau(replicated, theirs).mean())
    return PaperOrder(rows, tau, tau_p_value(ours, theirs), interval, replication)


def scale_prediction(smaller: SeedScores, larger: SeedScores) -> ScalePrediction | None:
    """Return how far the rows' order at a smaller scale predicts that at a larger.

    None for fewer than two rows with scores at both scales.

    Rows are compared by their means over seeds. Intervals are of bootstrap resamples of the seeds that all
    rows of a scale have; the seeds of two scales are drawn independently.
    """
    rows = tuple(name for name in smaller if smaller[name] and larger.get(name))
    if len(rows) < 2:
        return None
    x = np.array([fmean(smaller[name].values()) for name in rows])
    y = np.array([fmean(larger[name].values()) for name in rows])
    accuracy_interval = tau_interval = None
    drawn_x, drawn_y = _resampled_means(smaller, rows), _resampled_means(larger, rows)
    if drawn_x is not None and drawn_y is not None:
        drawn_y = np.random.default_rng(2).permutation(drawn_y)  # independent of the draws of the smaller
        accuracy_interval = percentile_interval(decision_accuracy(drawn_x, drawn_y))
        tau_interval = percentile_interval(kendall_tau(drawn_x, drawn_y))
    return ScalePrediction(
        rows,
        float(decision_accuracy(x, y)),
        accuracy_interval,
        float(kendall_tau(x, y)),
        tau_interval,
        tau_p_value(x, y),
    )


def _resampled_means(scores: SeedScores, rows: Sequence[str]) -> np.ndarray | None:
    """Return the means of rows over resampled seeds, [NUM_RESAMPLES, rows]; None for fewer than two seeds."""
    seeds = common_seeds(scores[name] for name in rows)
    if len(seeds) < 2:
        return None
    by_seed = np.array([[scores[name][seed] for name in rows] for seed in seeds])
    return seed_weights(len(seeds)) @ by_seed


def common_seeds(rows: Iterable[Mapping[int, object]]) -> list[int]:
    """Return the seeds that all rows have, in rising order."""
    sets = [set(seeds) for seeds in rows]
    return sorted(set.intersection(*sets)) if sets else []


def percentile_interval(values: np.ndarray) -> tuple[float, float] | None:
    """Return the 95 % interval between percentiles of resampled values; None if they are undefined."""
    known = values[np.isfinite(values)]
    if not len(known):
        return None
    low, high = np.quantile(known, (ALPHA / 2, 1 - ALPHA / 2)).tolist()
    return low, high

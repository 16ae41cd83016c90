"""Statistics of differences between rows: how large they are, and whether they exceed noise.

A score varies with the seed of a run and with the examples that it was measured on. So both are resampled,
by the multi-bootstrap (Sellam et al. 2022, "The MultiBERTs"). Rows are compared seed by seed, and all rows
get the same resamples.
"""

from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cache, lru_cache
from itertools import chain
from math import inf, sqrt
from statistics import fmean, median
from typing import NamedTuple

import numpy as np

ALPHA = 0.05  # family-wise error rate: how often a table in which nothing differs shows a difference
POWER = 0.8  # probability of finding a difference that is called detectable
NUM_RESAMPLES = 10_000  # of the bootstrap
NUM_SIMULATED = 2_000  # number of simulated pairs of rows, and of bootstrap resamples of each
# With more seeds per row, simulated tests are t tests alone: with the bootstrap too, the smallest difference
# that is found would be larger by less than 1 %.
MAX_BOOTSTRAPPED_SEEDS = 30
CHUNK = 500  # resamples computed at a time, so that their counts fit the processor's cache
MIN_VARIANCES = 3  # fewer are too few to estimate their spread
RELATIVE_TOLERANCE = 1e-9  # smaller differences are rounding, of values of about 1 or more
# A seed is an outlier if it is further than this from its row's median, in units of the median row's standard
# deviation over seeds.
OUTLIER_THRESHOLD = 4.0
RowPair = tuple[str, str]  # names of two rows
RunKey = tuple[str, int]  # name of a row, seed


@lru_cache(maxsize=4)
def _bootstrap_counts(num_examples: int) -> np.ndarray:
    """Return how often each resample draws each of N examples, uint8 [NUM_RESAMPLES, N].

    The random seed is fixed, so all rows get the same resamples.
    """
    rng, counts = np.random.default_rng(0), np.empty((NUM_RESAMPLES, num_examples), np.uint8)
    offsets = np.arange(CHUNK)[:, None] * num_examples
    for start in range(0, NUM_RESAMPLES, CHUNK):
        indices = offsets + rng.integers(num_examples, size=(CHUNK, num_examples))
        flat = np.bincount(indices.ravel(), minlength=CHUNK * num_examples)
        counts[start : start + CHUNK] = flat.reshape(CHUNK, num_examples)
    return counts


@lru_cache(maxsize=4)
def seed_weights(num_seeds: int) -> np.ndarray:
    """Return the weight of each of S >= 2 seeds in the mean of each resample, [NUM_RESAMPLES, S].

    The bootstrap underestimates the variance by a factor of (S - 1) / S, so the weights' distances from 1/S
    are multiplied by sqrt(S / (S - 1)).
    """
    rng = np.random.default_rng(1)
    drawn = rng.multinomial(num_seeds, [1 / num_seeds] * num_seeds, size=NUM_RESAMPLES) / num_seeds
    return 1 / num_seeds + (drawn - 1 / num_seeds) * sqrt(num_seeds / (num_seeds - 1))


def bootstrap_ratios(numerators: np.ndarray, denominators: np.ndarray) -> np.ndarray:
    """Return sum(numerators) / sum(denominators) over resampled examples: [M, N], [N] -> [M, NUM_RESAMPLES].

    Bits per byte is such a ratio of sums; a plain mean has denominators of one.
    """
    counts, ratios = _bootstrap_counts(len(denominators)), []
    columns = np.vstack([numerators, denominators]).T
    for start in range(0, NUM_RESAMPLES, CHUNK):
        sums = counts[start : start + CHUNK].astype(np.float64) @ columns
        ratios.append(sums[:, :-1] / sums[:, -1:])
    return np.concatenate(ratios).T


def bootstrap_deltas(
    runs: Mapping[RunKey, tuple[np.ndarray, np.ndarray]],
) -> dict[RunKey, np.ndarray]:
    """Return run -> its bootstrap deltas over examples, [NUM_RESAMPLES].

    A delta is the run's ratio of sums on a resample of the examples minus its ratio on the examples.
    runs: run -> numerators [N], denominators [N]. A run whose denominators differ from those of most runs was
    scored on other examples, and is left out; other examples with the same denominators are not noticed.
    """
    if not runs:
        return {}
    common, _ = Counter(denominators.tobytes() for _, denominators in runs.values()).most_common(1)[0]
    shared = {run: values for run, values in runs.items() if values[1].tobytes() == common}
    numerators = np.stack([values for values, _ in shared.values()])
    denominators = next(iter(shared.values()))[1]
    ratios = bootstrap_ratios(numerators, denominators)
    return dict(zip(shared, ratios - (numerators.sum(1) / denominators.sum())[:, None], strict=True))


def bootstrap_difference(
    deltas: Mapping[str, Mapping[int, np.ndarray]], a: str, b: str, seeds: Sequence[int]
) -> np.ndarray | None:
    """Return row a's bootstrap deltas minus row b's, [S, NUM_RESAMPLES]; None if no seed has both.

    deltas: row -> seed -> [NUM_RESAMPLES]. Seeds that lack them get the mean over the other seeds, since
    the same examples are hard for all seeds.
    """
    deltas_a, deltas_b = deltas.get(a, {}), deltas.get(b, {})
    known = {seed: deltas_a[seed] - deltas_b[seed] for seed in seeds if seed in deltas_a and seed in deltas_b}
    if not known:
        return None
    mean: np.ndarray = np.mean([*known.values()], axis=0)
    return np.stack([known.get(seed, mean) for seed in seeds])


def sample_variance(values: Sequence[float] | np.ndarray) -> float:
    """Return the unbiased variance; 0 for fewer than two values, and for values equal up to rounding."""
    if len(values) < 2:
        return 0.0
    tolerance = RELATIVE_TOLERANCE * max(1.0, float(np.abs(values).max()))
    variance = float(np.var(values, ddof=1))
    return variance if variance > tolerance**2 else 0.0


@dataclass(frozen=True)
class PairedDifference:
    """The difference of two rows, seed by seed, in noise standard deviations."""

    by_seed: np.ndarray  # [S], for the seeds that both rows have
    # bootstrap deltas of each seed's difference over examples, [S, NUM_RESAMPLES]; None if unknown
    by_examples: np.ndarray | None = None

    @property
    def variance(self) -> float:
        """Return the ``sample_variance`` over seeds."""
        return sample_variance(self.by_seed)

    @property
    def example_variance(self) -> float:
        """Return the variance of the mean over seeds due to the choice of examples."""
        return 0.0 if self.by_examples is None else float(self.by_examples.mean(0).var())

    def resampled_means(self) -> np.ndarray:
        """Return the mean difference with both seeds and examples resampled, [NUM_RESAMPLES]."""
        weights = seed_weights(len(self.by_seed))
        by_seed = weights @ self.by_seed
        if self.by_examples is None:
            return by_seed
        by_examples = (weights.T * self.by_examples).sum(0)
        return by_seed + by_examples


@dataclass(frozen=True)
class PairedTest:
    """A difference with its test. The defaults hold for a difference whose noise is unknown."""

    mean: float
    low: float = -inf  # ends of the 95 % t interval, not adjusted for the number of tests
    high: float = inf
    bootstrap: tuple[float, float] = (-inf, inf)  # the same interval by the multi-bootstrap
    p: float = 1.0  # p-value of "no difference", adjusted by Holm's method
    p_not_equivalent: float = 1.0  # p-value of "the difference is the margin or more", adjusted likewise
    by_seed: tuple[float, ...] = ()
    degrees_of_freedom: float = 0.0

    @property
    def sign(self) -> int:
        """Return 1 or -1 if the difference is significantly above or below zero, else 0.

        The bootstrap interval must exclude zero as well, because it does not rely on the variance of other
        pairs as the t test does.
        """
        excludes_zero = self.bootstrap[0] > 0 or self.bootstrap[1] < 0
        return int(np.sign(self.mean)) if self.p < ALPHA and excludes_zero else 0

    @property
    def is_equivalent(self) -> bool:
        """Return whether the rows differ by less than the margin, by two one-sided tests (TOST)."""
        return self.p_not_equivalent < ALPHA


def compare_pairs(
    differences: Mapping[RowPair, PairedDifference], margin: float
) -> dict[RowPair, PairedTest]:
    """Test all differences by paired t tests; Holm's method controls the family-wise error rate.

    The variances over seeds are moderated: shrunk towards their common value (Smyth 2004). Each pair gets the
    larger of its own variance and the moderated one, because pairs share rows, which makes their variances
    look more alike than they are. The variance due to examples is added. A pair whose seeds agree exactly, as
    those of n-gram models do, is tested only if at least MIN_VARIANCES other pairs vary.

    Pairs that share a row are not independent: all varying pairs together have ``degrees_of_freedom``. A
    moderated variance has at most these or, if they are more, the degrees of freedom of the pair's own seeds.

    margin: differences below it count as equivalent, in the unit of the differences.
    """
    from scipy.special import stdtr, stdtrit  # slow to import; commands without statistics need not wait

    tests = {}
    for pair, difference in differences.items():
        by_seed = difference.by_seed
        tests[pair] = PairedTest(float(by_seed.mean()), by_seed=tuple(by_seed.tolist()))
    varied = {pair: len(x.by_seed) for pair, x in differences.items() if x.variance > 0}
    # Seeds that agree exactly give no variance. It is borrowed if enough other pairs have one: two say too
    # little of the variance of a third.
    can_borrow_variance = len(varied) >= MIN_VARIANCES
    testable = {
        pair: x
        for pair, x in differences.items()
        if pair in varied or (can_borrow_variance and len(x.by_seed) >= 2)
    }
    if not testable:
        return tests
    variances = np.array([x.variance for x in testable.values()])
    num_seeds = np.array([len(x.by_seed) for x in testable.values()])
    example_variances = np.array([x.example_variance for x in testable.values()])
    standard_errors, dof = _standard_errors(
        variances, num_seeds, example_variances, degrees_of_freedom(varied)
    )
    means = np.array([x.by_seed.mean() for x in testable.values()])
    half_widths = stdtrit(dof, 1 - ALPHA / 2) * standard_errors
    p = holm_adjust(2 * stdtr(dof, -np.abs(means) / standard_errors))
    p_not_equivalent = holm_adjust(stdtr(dof, (np.abs(means) - margin) / standard_errors))
    for i, (pair, x) in enumerate(testable.items()):
        low, high = np.quantile(x.resampled_means(), (ALPHA / 2, 1 - ALPHA / 2)).tolist()
        tests[pair] = replace(
            tests[pair],
            low=float(means[i] - half_widths[i]),
            high=float(means[i] + half_widths[i]),
            bootstrap=(low, high),
            p=float(p[i]),
            p_not_equivalent=float(p_not_equivalent[i]),
            degrees_of_freedom=float(dof[i]),
        )
    return tests


def _standard_errors(
    variances: np.ndarray, num_seeds: np.ndarray, example_variances: np.ndarray, max_dof: int
) -> tuple[np.ndarray, np.ndarray]:
    """Return the standard error of each pair's mean difference, and its degrees of freedom, both [P].

    variances: of each pair over its seeds. max_dof: degrees of freedom of all varying pairs together.
    """
    moderated, dof = moderated_variance(variances, num_seeds - 1)
    dof = np.minimum(dof, np.maximum(num_seeds - 1, max_dof))
    return np.sqrt(np.maximum(variances, moderated) / num_seeds + example_variances), dof


def degrees_of_freedom(num_seeds: Mapping[RowPair, int]) -> int:
    """Return the degrees of freedom of pairs' differences around their means, by the seeds of each pair.

    They are (R - 1) (S - 1) if the pairs join all R rows and each has S seeds, as in a two-way layout of rows
    and seeds without interaction. In general each seed after the first adds as many as the pairs that have it
    are independent: the rank of their contrasts. Pairs with fewer seeds are taken to have the first of them.
    """
    rows = [*dict.fromkeys(chain.from_iterable(num_seeds))]
    contrasts = np.zeros((len(num_seeds), len(rows)))
    for contrast, (a, b) in zip(contrasts, num_seeds, strict=True):
        contrast[rows.index(a)] += 1
        contrast[rows.index(b)] -= 1
    counts = np.array([*num_seeds.values()])
    dof, fewer = 0, 1
    for count in sorted(set(num_seeds.values())):
        dof += (count - fewer) * int(np.linalg.matrix_rank(contrasts[counts >= count]))
        fewer = count
    return dof


def seed_intervals(by_seed: Sequence[float]) -> dict[str, tuple[float, float] | None]:
    """Return 95 % confidence intervals of the mean over seeds: "t" (Student) and "bca" (bootstrap).

    None for an interval that cannot be estimated: both need seeds that differ, and "bca" three of them.
    """
    from scipy.special import stdtrit  # slow to import, as is scipy.stats

    values = np.array(by_seed)
    variance = sample_variance(values)
    if not variance:
        return {"t": None, "bca": None}
    half_width = stdtrit(len(values) - 1, 1 - ALPHA / 2) * sqrt(variance / len(values))
    intervals: dict[str, tuple[float, float] | None] = {
        "t": (values.mean() - half_width, values.mean() + half_width),
        "bca": None,
    }
    if len(values) > 2:
        from scipy.stats import bootstrap

        result = bootstrap((values,), np.mean, n_resamples=NUM_RESAMPLES, rng=np.random.default_rng(0))
        low, high = result.confidence_interval
        if np.isfinite([low, high]).all():
            intervals["bca"] = (float(low), float(high))
    return intervals


@cache
def expected_median_variance(dof: tuple[int, ...]) -> float:
    """Return the expected median of independent sample variances of normal noise with variance 1.

    dof: the degrees of freedom of each. The median is the middle order statistic, or the mean of the two in
    the middle. The expectation of an order statistic is the integral over x of the probability that it is
    above x.
    """
    from scipy.special import chdtr

    nodes, weights = np.polynomial.legendre.leggauss(200)
    t = (1 + nodes) / 2  # from (-1, 1) to (0, 1), and from there to (0, inf)
    x, dx = (t / (1 - t)) ** 2, weights * t / (1 - t) ** 3
    count = np.zeros((len(dof) + 1, len(x)))  # count[n]: probability that n variances are up to x
    count[0] = 1
    for each in dof:
        below = chdtr(each, each * x)
        count[1:] = (1 - below) * count[1:] + below * count[:-1]
        count[0] *= 1 - below
    middle_ranks = {(len(dof) - 1) // 2, len(dof) // 2}
    return fmean(count[: rank + 1].sum(0) @ dx for rank in middle_ranks)


def moderated_variance(variances: np.ndarray, dof: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """Shrink variances [P] towards their common value, and return them with their degrees of freedom [P].

    An inverse gamma prior is fitted to the mean and variance of their logarithms (Smyth 2004, section 6.2;
    limma's ``squeezeVar``), without those that are zero. If the variances differ no more than sampling
    explains, all become equal; the more they differ beyond that, the less they are shrunk.
    """
    from scipy.optimize import brentq
    from scipy.special import digamma, polygamma

    known = variances > 0
    if known.sum() < MIN_VARIANCES:
        return variances, dof.astype(float)
    half_dof = dof[known] / 2
    logs = np.log(variances[known]) - digamma(half_dof) + np.log(half_dof)
    excess = float(logs.var(ddof=1) - polygamma(1, half_dof).mean())  # over the variance that sampling gives
    if excess < 1e-4:  # the true variances are equal
        return np.full_like(variances, np.exp(logs.mean())), np.full(len(variances), inf)
    half_prior = brentq(lambda x: polygamma(1, x) - excess, 1e-3, 1e5)  # half its degrees of freedom
    prior = np.exp(logs.mean() + digamma(half_prior) - np.log(half_prior))
    total = dof + 2 * half_prior
    return (2 * half_prior * prior + dof * variances) / (2 * half_prior + dof), total


def holm_adjust(p: np.ndarray) -> np.ndarray:
    """Return p-values [P] adjusted for the number of tests by Holm's step-down method (1979)."""
    order, adjusted = np.argsort(p), np.empty_like(p)
    adjusted[order] = np.minimum(np.maximum.accumulate(p[order] * np.arange(len(p), 0, -1)), 1)
    return adjusted


class SimulatedTests(NamedTuple):
    """Holds what the tests of a table find for many simulated pairs of rows.

    Both are in standard deviations of the difference of two runs over seeds.
    """

    detection_thresholds: np.ndarray  # smallest true difference at which the tests call each pair different
    # smallest margin at which the tests call each pair, whose rows are equal, equivalent
    equivalence_thresholds: np.ndarray


@lru_cache(maxsize=64)
def simulate_tests(pairs: tuple[RowPair, ...], num_seeds: int, example_variance: float) -> SimulatedTests:
    """Simulate the tests of ``compare_pairs``, the t test and the bootstrap, on tables with normal noise.

    All rows have the same noise. Each pair is tested at the strictest step of Holm's method.

    Args:
        pairs: The pairs of rows that a table tests together, at least one.
        num_seeds: Seeds per row, at least 2.
        example_variance: Variance of a pair's mean difference due to the choice of examples, as a multiple of
            the variance over seeds of the difference of two single runs.
    """
    from scipy.special import stdtrit  # slow to import

    rng = np.random.default_rng(num_seeds)
    rows = sorted({*chain.from_iterable(pairs)})
    first = [rows.index(a) for a, _ in pairs]
    second = [rows.index(b) for _, b in pairs]
    alpha, max_dof = ALPHA / len(pairs), degrees_of_freedom(dict.fromkeys(pairs, num_seeds))
    detection_thresholds, equivalence_thresholds = [], []
    for _ in range(-(-NUM_SIMULATED // len(pairs))):
        noise = rng.normal(scale=sqrt(0.5), size=(len(rows), num_seeds))
        by_seed = noise[first] - noise[second]
        standard_errors, dof = _standard_errors(
            by_seed.var(axis=1, ddof=1),
            np.full(len(pairs), num_seeds),
            np.full(len(pairs), example_variance),
            max_dof,
        )
        # [0]: errors due to the examples that the runs are scored on; [1:]: changes in resamples of these
        example_errors = rng.normal(scale=sqrt(example_variance), size=(1 + NUM_SIMULATED, len(pairs)))
        means = by_seed.mean(axis=1) + example_errors[0]
        threshold = stdtrit(dof, 1 - alpha / 2) * standard_errors - means
        if num_seeds <= MAX_BOOTSTRAPPED_SEEDS:
            resampled_seeds = seed_weights(num_seeds)[:NUM_SIMULATED] @ by_seed.T
            resampled = resampled_seeds + example_errors[0] + example_errors[1:]
            threshold = np.maximum(threshold, -np.quantile(resampled, ALPHA / 2, axis=0))
        detection_thresholds.append(threshold)
        equivalence_thresholds.append(np.abs(means) + stdtrit(dof, 1 - alpha) * standard_errors)
    return SimulatedTests(np.concatenate(detection_thresholds), np.concatenate(equivalence_thresholds))


def outlying_seeds(rows: Mapping[str, Mapping[int, float]]) -> list[tuple[str, int]]:
    """Return (row, seed) of values far from their row's median, in rows with three seeds or more.

    Far is more than OUTLIER_THRESHOLD times the median over these rows of their standard deviations. Rows
    whose seeds agree, such as n-gram models, do not count.
    """
    variances = {row: sample_variance([*seeds.values()]) for row, seeds in rows.items() if len(seeds) > 2}
    varied = {row: variance for row, variance in variances.items() if variance > 0}
    if not varied:
        return []
    limit = OUTLIER_THRESHOLD * median(map(sqrt, varied.values()))
    outliers = []
    for row in varied:
        center = median(rows[row].values())
        outliers += [(row, seed) for seed, value in rows[row].items() if abs(value - center) > limit]
    return outliers

"""Differences between rows: how large, how sure, and whether none is left. Arrays in, numbers out.

A value varies with the seed and with the examples it was measured on, so both are drawn (Sellam et al. 2022,
MultiBERTs: the multi-bootstrap); seeds are paired, and all rows see the same draws.
"""

from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from functools import lru_cache
from math import inf, sqrt
from statistics import median

import numpy as np

LEVEL = 0.05  # how often a table in which nothing differs shows a difference nevertheless
DRAWS = 10_000  # of the bootstrap
_CHUNK = 500  # draws at a time
ROUNDING = 1e-9  # of values: a smaller difference counts as none
OUTLIER = 4.0  # deviations from a row's median from which on a seed is named
RowPair = tuple[str, str]  # names of two rows


@lru_cache(maxsize=4)
def _counts(examples: int) -> np.ndarray:
    """uint8 [DRAWS, N]: how often each draw takes each of N examples; the same for every row and task."""
    rng, counts = np.random.default_rng(0), np.empty((DRAWS, examples), np.uint8)
    starts = np.arange(_CHUNK)[:, None] * examples
    for start in range(0, DRAWS, _CHUNK):
        drawn = starts + rng.integers(examples, size=(_CHUNK, examples))
        counts[start : start + _CHUNK] = np.bincount(drawn.ravel(), minlength=_CHUNK * examples).reshape(
            _CHUNK, examples
        )
    return counts


@lru_cache(maxsize=4)
def _seed_weights(count: int) -> np.ndarray:
    """[DRAWS, S]: what each of S >= 2 seeds counts in each draw with replacement.

    Drawn from S, means spread 1 - 1/S times as much as those of new seeds would, so weights are spread out.
    """
    drawn = np.random.default_rng(1).multinomial(count, [1 / count] * count, size=DRAWS) / count
    return 1 / count + (drawn - 1 / count) * sqrt(count / (count - 1))


def resample_examples(numerators: np.ndarray, denominators: np.ndarray) -> np.ndarray:
    """[M, N], [N] -> [M, DRAWS]: the ratio of both sums over examples drawn with replacement.

    A ratio of sums (bits over bytes) is drawn as such; a mean has denominators of one.
    """
    counts, sides, ratios = _counts(len(denominators)), np.vstack([numerators, denominators]).T, []
    for start in range(0, DRAWS, _CHUNK):
        sums = counts[start : start + _CHUNK].astype(np.float64) @ sides
        ratios.append(sums[:, :-1] / sums[:, -1:])
    return np.concatenate(ratios).T


def noise_of_examples(
    runs: Mapping[tuple[str, int], tuple[np.ndarray, np.ndarray]],
) -> dict[tuple[str, int], np.ndarray]:
    """Run -> [DRAWS]: how far the ratio of its sums moves if examples are drawn, alike for all runs.

    ``runs``: run -> numerators [N], denominators [N]; those with other denominators than most are left out.
    """
    if not runs:
        return {}
    common, _ = Counter(denominators.tobytes() for _, denominators in runs.values()).most_common(1)[0]
    alike = {run: values for run, values in runs.items() if values[1].tobytes() == common}
    numerators = np.stack([values for values, _ in alike.values()])
    denominators = next(iter(alike.values()))[1]
    drawn = resample_examples(numerators, denominators)
    return dict(zip(alike, drawn - (numerators.sum(1) / denominators.sum())[:, None], strict=True))


def apart(
    noise: Mapping[str, Mapping[int, np.ndarray]], a: str, b: str, seeds: Sequence[int]
) -> np.ndarray | None:
    """[S, DRAWS]: row a's less row b's; None if it is known of no seed of both.

    Seeds of which it is not known move as the mean of the others: the same examples are hard for all.
    """
    one, other = noise.get(a, {}), noise.get(b, {})
    known = {seed: one[seed] - other[seed] for seed in seeds if seed in one and seed in other}
    if not known:
        return None
    usual = np.mean([*known.values()], axis=0)
    return np.stack([known[seed] if seed in known else usual for seed in seeds])


@dataclass(frozen=True)
class Difference:
    """Of two rows, seed by seed."""

    by_seed: np.ndarray  # [S], of the seeds that both rows have
    by_examples: np.ndarray | None = None  # [S, DRAWS]: how it deviates from by_seed if examples are drawn

    @property
    def variance(self) -> float:
        """Over seeds; 0 if it is unknown: of one seed, or where all seeds are tied."""
        if len(self.by_seed) < 2:
            return 0.0
        least = ROUNDING * float(np.abs(self.by_seed).max())
        variance = float(self.by_seed.var(ddof=1))
        return variance if variance > least**2 else 0.0

    @property
    def example_variance(self) -> float:
        """Of the mean over seeds, by the choice of examples."""
        return 0.0 if self.by_examples is None else float(self.by_examples.mean(0).var())

    def draws(self) -> np.ndarray:
        """[DRAWS]: the mean over seeds and examples, both drawn with replacement."""
        weights = _seed_weights(len(self.by_seed))
        seeds = weights @ self.by_seed
        return seeds if self.by_examples is None else seeds + (weights.T * self.by_examples).sum(0)


@dataclass(frozen=True)
class Judged:
    """What a difference says among the others of its table; without noise known, nothing."""

    mean: float
    low: float = -inf  # interval of 95 % for this difference alone
    high: float = inf
    drawn: tuple[float, float] = (-inf, inf)  # the same by the multi-bootstrap alone
    p: float = 1.0  # that so large a difference comes of noise, after Holm
    p_apart: float = 1.0  # that rows which differ by the margin or more come so close, after Holm
    by_seed: tuple[float, ...] = ()
    error: float = inf  # of the mean
    freedom: float = 0.0  # degrees of, with which the error is known

    @property
    def sign(self) -> int:
        """1, -1: above, below 0 by more than noise; 0: it may be noise.

        The multi-bootstrap has to agree, which takes no variance from other pairs.
        """
        apart = self.p < LEVEL and (self.drawn[0] > 0 or self.drawn[1] < 0)
        return int(np.sign(self.mean)) if apart else 0

    @property
    def equivalent(self) -> bool:
        """Whether the rows differ by less than the margin: two one-sided tests."""
        return self.p_apart < LEVEL


def judge_family(differences: Mapping[RowPair, Difference], margin: float) -> dict[RowPair, Judged]:
    """Each difference of two rows as one of a family, whose errors Holm's rule shares out.

    Student's t, with the variance of few seeds drawn towards that of the whole family as far as the family is
    alike (Smyth 2004), and no more degrees of freedom than the rows and seeds have. A pair whose own seeds
    vary more keeps its own variance: as pairs share rows, they look more alike than they are. To it comes the
    variance by examples. ``margin`` is the difference that is as good as none.
    """
    from scipy.special import stdtr, stdtrit  # take their time to import, which `lm list` need not wait for

    judged = {
        pair: Judged(float(x.by_seed.mean()), by_seed=tuple(x.by_seed.tolist()))
        for pair, x in differences.items()
    }
    known = {pair: x for pair, x in differences.items() if x.variance > 0}
    if not known:
        return judged
    own = np.array([x.variance for x in known.values()])
    freedom = np.array([len(x.by_seed) - 1 for x in known.values()])
    variances, freedoms = moderate(own, freedom)
    freedoms = np.minimum(freedoms, np.maximum(freedom, _freedom(known)))
    means = np.array([x.by_seed.mean() for x in known.values()])
    by_examples = [x.example_variance for x in known.values()]
    errors = np.sqrt(np.maximum(own, variances) / (freedom + 1) + by_examples)
    half = stdtrit(freedoms, 1 - LEVEL / 2) * errors
    different = holm(2 * stdtr(freedoms, -np.abs(means) / errors))
    alike = holm(stdtr(freedoms, (np.abs(means) - margin) / errors))
    for place, (pair, x) in enumerate(known.items()):
        low, high = np.quantile(x.draws(), (LEVEL / 2, 1 - LEVEL / 2)).tolist()
        judged[pair] = replace(
            judged[pair],
            low=float(means[place] - half[place]),
            high=float(means[place] + half[place]),
            drawn=(low, high),
            p=float(different[place]),
            p_apart=float(alike[place]),
            error=float(errors[place]),
            freedom=float(freedoms[place]),
        )
    return judged


def _freedom(differences: Mapping[RowPair, Difference]) -> int:
    """Degrees of freedom within the rows of these pairs, after what a seed does to all of them.

    No more than the pairs have, if they hang together in several groups.
    """
    seeds: dict[str, int] = {}
    for pair, difference in differences.items():
        for row in pair:
            seeds[row] = max(seeds.get(row, 0), len(difference.by_seed))
    within = sum(count - 1 for count in seeds.values()) - (max(seeds.values()) - 1)
    return min(within, sum(len(x.by_seed) - 1 for x in differences.values()))


def intervals(by_seed: Sequence[float]) -> dict[str, tuple[float, float] | None]:
    """Intervals of 95 % by the seeds alone: Student's, and the bootstrap's (BCa) from three seeds on."""
    from scipy.stats import bootstrap
    from scipy.stats import t as student

    values = np.array(by_seed)
    if len(values) < 2 or np.ptp(values) <= ROUNDING * np.abs(values).max():
        return {"t": None, "bca": None}
    half = student.ppf(1 - LEVEL / 2, len(values) - 1) * values.std(ddof=1) / sqrt(len(values))
    found: dict[str, tuple[float, float] | None] = {
        "t": (values.mean() - half, values.mean() + half),
        "bca": None,
    }
    if len(values) > 2:
        drawn = bootstrap((values,), np.mean, n_resamples=DRAWS, rng=np.random.default_rng(0))
        low, high = drawn.confidence_interval
        found["bca"] = (float(low), float(high)) if np.isfinite([low, high]).all() else None
    return found


def moderate(variances: np.ndarray, freedom: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """[P] variances with [P] degrees of freedom -> both after drawing them towards their common value.

    By as much as chance explains their spread: the inverse gamma prior is fitted to the mean and variance of
    their logarithms (Smyth 2004, section 6.2).
    """
    from scipy.optimize import brentq
    from scipy.special import digamma, polygamma

    if len(variances) < 3:  # of two no spread can be told
        return variances, freedom.astype(float)
    logs = np.log(variances) - digamma(freedom / 2) + np.log(freedom / 2)
    spread = float(logs.var(ddof=1) - polygamma(1, freedom / 2).mean())
    if spread < 1e-4:  # of the sampling alone: the variances are one
        return np.full_like(variances, np.exp(logs.mean())), np.full(len(variances), inf)
    half = brentq(lambda x: polygamma(1, x) - spread, 1e-3, 1e5)
    prior = np.exp(logs.mean() + digamma(half) - np.log(half))
    return (2 * half * prior + freedom * variances) / (2 * half + freedom), freedom + 2 * half


def holm(p: np.ndarray) -> np.ndarray:
    """[P] -> [P]: p-values of which any below a level claims that level for all together (Holm 1979)."""
    order, adjusted = np.argsort(p), np.empty_like(p)
    adjusted[order] = np.minimum(np.maximum.accumulate(p[order] * np.arange(len(p), 0, -1)), 1)
    return adjusted


def power(effect: float, error: float, freedom: float, level: float = LEVEL) -> float:
    """How often a t test at ``level`` finds a mean of ``effect``, known with ``freedom`` up to ``error``."""
    from scipy.special import nctdtr, stdtrit

    bar, shift = stdtrit(freedom, 1 - level / 2), effect / error
    return float(1 - nctdtr(freedom, shift, bar) + nctdtr(freedom, shift, -bar))


def outliers(rows: Mapping[str, Mapping[int, float]]) -> list[tuple[str, int]]:
    """(row, seed) of values far from their row's median; of rows with three seeds or more."""
    told = {row: seeds for row, seeds in rows.items() if len(seeds) > 2}
    scale = median(float(np.std([*seeds.values()], ddof=1)) for seeds in told.values()) if told else 0.0
    return [
        (row, seed)
        for row, seeds in told.items()
        for seed, value in seeds.items()
        if abs(value - median(seeds.values())) > OUTLIER * scale > 0
    ]

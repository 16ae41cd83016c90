"""Power laws of loss in compute: their fit, its uncertainty over seeds, and what they predict.

L(C) = E + A C^-a, with the irreducible loss E >= 0, A >= 0 and the exponent a > 0 (Kaplan et al. 2020,
"Scaling Laws for Neural Language Models", and with E Hoffmann et al. 2022, "Training Compute-Optimal Large
Language Models").
"""

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import NamedTuple

import numpy as np

from experiments.report.metrics import pooled_std

MIN_RUNGS = 3  # that a law is fitted to, which has as many numbers
EXPONENTS = np.geomspace(0.02, 2, 400)  # among which the exponent is sought
DRAWS = 1_000  # of a rung's mean over seeds
CONFIDENCE = 0.95


class PowerLaws(NamedTuple):
    """Holds one or many power laws: arrays of equal shape, of any number of axes."""

    floor: np.ndarray  # E, in the unit of the loss
    factor: np.ndarray  # A, for compute in units of ``unit``
    exponent: np.ndarray  # a
    unit: float  # of compute [FLOP]

    def __call__(self, flops: float) -> np.ndarray:
        """Return the losses at a compute [FLOP]."""
        return self.floor + self.factor * (flops / self.unit) ** -self.exponent


def fit_power_laws(flops: np.ndarray, losses: np.ndarray, weights: np.ndarray) -> PowerLaws:
    """Return the power law nearest to each row of losses, by weighted least squares.

    flops [rungs], losses [..., rungs], weights [rungs]. For each of EXPONENTS the best E and A follow in
    closed form; where they would be below 0, they are 0.
    """
    unit = float(flops[-1])
    shares = weights / weights.sum()
    powers = (flops / unit) ** -EXPONENTS[:, None]  # [exponents, rungs]
    centred = powers - (powers @ shares)[:, None]
    mean_loss = losses @ shares
    factor = (losses * shares) @ centred.T / (shares * centred**2).sum(1)  # [..., exponents]
    floor = mean_loss[..., None] - factor * (powers @ shares)
    # without a floor; and without compute, where the loss does not fall
    without_floor = (losses * shares) @ powers.T / (shares * powers**2).sum(1)
    is_below = floor < 0
    factor, floor = np.where(is_below, without_floor, factor), np.where(is_below, 0, floor)
    is_rising = factor < 0
    factor, floor = np.where(is_rising, 0, factor), np.where(is_rising, mean_loss[..., None], floor)
    residuals = losses[..., None, :] - floor[..., None] - factor[..., None] * powers
    best = (shares * residuals**2).sum(-1).argmin(-1)[..., None]
    floor, factor = (np.take_along_axis(values, best, -1)[..., 0] for values in (floor, factor))
    return PowerLaws(floor, factor, EXPONENTS[best[..., 0]], unit)


class Interval(NamedTuple):
    """An estimate with its 95 % interval, which is widened to include it."""

    value: float
    low: float
    high: float


@dataclass(frozen=True)
class Rung:
    """One size of a kind of model: what its training cost, and the loss of each seed."""

    name: str
    flops: float  # of a seed's training
    parameters: int
    losses: tuple[float, ...]  # over seeds
    relation: str = ""  # "≤" if the losses are upper bounds, as those of masked diffusion

    @property
    def mean(self) -> float:
        """Return the mean loss over seeds."""
        return float(np.mean(self.losses))


class Ladder:
    """The rungs of a kind of model, and the power laws that agree with them.

    One law is fitted to the means over seeds. The others are fitted to means that differ from these by
    chance, as the means of other seeds would: by Student's t distribution, with the variance between seeds
    pooled over rungs. Their intervals say how sure the law is if the loss follows one, and nothing of whether
    it does.
    """

    def __init__(self, rungs: Sequence[Rung]):
        """Take the rungs in any order: MIN_RUNGS or more for a law."""
        self.rungs = sorted(rungs, key=lambda rung: rung.flops)

    @property
    def sizes(self) -> tuple[str, ...]:
        """Return the names of the rungs, in rising order of compute."""
        return tuple(rung.name for rung in self.rungs)

    @property
    def degrees_of_freedom(self) -> int:
        """Return the degrees of freedom of the variance between seeds; 0 with one seed per rung."""
        return sum(len(rung.losses) - 1 for rung in self.rungs)

    @cached_property
    def laws(self) -> tuple[PowerLaws, PowerLaws]:
        """Return the law of the means over seeds, and DRAWS laws of means that differ by chance."""
        counts = np.array([len(rung.losses) for rung in self.rungs])
        means = np.array([rung.mean for rung in self.rungs])
        flops = np.array([rung.flops for rung in self.rungs])
        drawn = means + self._chance(np.random.default_rng(0), counts)
        return fit_power_laws(flops, means, counts), fit_power_laws(flops, drawn, counts)

    def _chance(self, rng: np.random.Generator, counts: np.ndarray) -> np.ndarray:
        """Return by how much means over so many seeds differ by chance: [DRAWS, len(counts)].

        With one seed per rung that is not known, and 0.
        """
        deviation = pooled_std(rung.losses for rung in self.rungs)
        drawn = rng.standard_t(max(self.degrees_of_freedom, 1), (DRAWS, len(counts)))
        return deviation / np.sqrt(counts) * drawn

    def predicted(self, flops: float, seeds: int | None = None) -> Interval:
        """Return the loss that the law predicts at a compute [FLOP].

        seeds: the interval is that of the mean over so many seeds; None: of the law itself.
        """
        best, drawn = self.laws
        losses = drawn(flops)
        if seeds:
            losses = losses + self._chance(np.random.default_rng(1), np.array([seeds]))[:, 0]
        return _interval(float(best(flops)), losses)

    @property
    def floor(self) -> Interval:
        """Return the loss that is left at infinite compute."""
        best, drawn = self.laws
        return _interval(float(best.floor), drawn.floor)

    @property
    def exponent(self) -> Interval:
        """Return the exponent of compute."""
        best, drawn = self.laws
        return _interval(float(best.exponent), drawn.exponent)

    def smallest(self, count: int) -> "Ladder":
        """Return the ladder of the ``count`` rungs with the least compute."""
        return Ladder(self.rungs[:count])


def _interval(value: float, drawn: np.ndarray) -> Interval:
    tail = (1 - CONFIDENCE) / 2
    low, high = np.quantile(drawn, (tail, 1 - tail))
    return Interval(value, min(value, float(low)), max(value, float(high)))

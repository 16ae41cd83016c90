"""The power of a table's tests: how small a difference they find, and how surely that rows are equal."""

from bisect import bisect_left
from collections.abc import Mapping
from dataclasses import dataclass
from itertools import combinations
from math import inf, sqrt

import numpy as np

from experiments.console import Cell, Sheet
from experiments.report.comparison import EQUIVALENCE_MARGIN, Comparison
from experiments.report.metrics import Group
from experiments.report.statistics import (
    ALPHA,
    PairedDifference,
    degrees_of_freedom,
    equivalence_power,
    smallest_difference,
)
from experiments.report.text import GROUP_TITLES
from experiments.study.claims import paper_claims
from lm.config.base import SettingError

SEED_COUNTS = (2, 3, 5, 10, 20)
MAX_SEEDS = 1000  # per row, beyond which nobody trains
DIFFERENCE_TITLE = (
    "Smallest difference of two rows that is found with a power of 80 %\n"
    "[standard deviations of a run], with the noise of all pairs of rows together\n"
    "and corrected for the claims of the table. A report takes the pair of claimed\n"
    "rows with the median noise."
)
EQUIVALENCE_TITLE = (
    f"Probability that equal rows are found equivalent (within {EQUIVALENCE_MARGIN:.2f} deviations)"
)


@dataclass(frozen=True)
class Noise:
    """Holds the noise of a difference between two rows of a table, in one group of tasks."""

    over_seeds: float  # variance with one seed per row [variances of a run]
    over_examples: float  # variance that more seeds do not lessen [variances of a run]
    rows: int  # of the table, all of which give degrees of freedom
    alpha: float  # level of the strictest step of Holm's method
    measured_rows: int  # rows that have run, on which the variance over seeds was measured
    measured_freedom: int  # degrees of freedom of that measurement

    def standard_error(self, count: int) -> float:
        """Return the standard error of a difference with ``count`` seeds per row."""
        return sqrt(self.over_seeds / count + self.over_examples)

    def freedom(self, count: int) -> int:
        """Return the degrees of freedom of a t test with ``count`` seeds per row."""
        return (self.rows - 1) * (count - 1)

    @property
    def largest_factor(self) -> float:
        """Return how many times its estimate the noise over seeds may be, at a level of 95 %."""
        from scipy.special import chdtri  # slow to import

        return sqrt(self.measured_freedom / chdtri(self.measured_freedom, 0.95))

    def smallest_difference(self, count: int) -> float:
        """Return the smallest difference of two rows that is found; none with one seed."""
        if count < 2:
            return inf
        return smallest_difference(self.standard_error(count), self.freedom(count), self.alpha)

    def seeds_to_find(self, difference: float) -> int | None:
        """Return the fewest seeds per row that find a difference; None if MAX_SEEDS do not.

        More seeds do not lessen the noise of the examples, so that there may be no such number.
        """
        counts = range(2, MAX_SEEDS + 1)
        place = bisect_left(counts, True, key=lambda count: self.smallest_difference(count) <= difference)
        return counts[place] if place < len(counts) else None

    def equivalence_power(self, count: int) -> float:
        """Return the probability that two equal rows are found equivalent; 0 with one seed."""
        if count < 2:
            return 0.0
        error, freedom = self.standard_error(count), self.freedom(count)
        return equivalence_power(error, freedom, EQUIVALENCE_MARGIN, self.alpha)


def measure_noise(comparison: Comparison, group: Group) -> Noise:
    """Return the noise of a table's differences.

    The variance over seeds is pooled over all pairs of rows that have run. The level is that of the strictest
    step of Holm's method over the claims of the table, or over the pairs with its baseline if it has none.
    SettingError if no two rows have two seeds in common.
    """
    pairs = list(combinations(comparison.scored_names, 2))
    found = [comparison.difference(a, b, "updates", group) for a, b in pairs]
    known = {
        pair: each
        for pair, each in zip(pairs, found, strict=True)
        if isinstance(each, PairedDifference) and each.variance > 0
    }
    if not known:
        raise SettingError(
            f"{comparison.table.name}: no two rows that have left the unigram plateau have two seeds in "
            "common, from which the noise follows: train some with --seeds 2, or longer if lm report says "
            "'not yet learning'"
        )
    freedom = [len(each.by_seed) - 1 for each in known.values()]
    rows = len({*map(comparison.canonical_name, comparison.table.rows), comparison.canonical_baseline})
    tests = sum(claim.is_about(group) for claim in paper_claims(comparison.table)) or rows - 1
    return Noise(
        float(np.average([each.variance for each in known.values()], weights=freedom)),
        float(np.median([each.example_variance for each in known.values()])),
        rows,
        ALPHA / tests,
        len({row for pair in known for row in pair}),
        degrees_of_freedom(known),
    )


def measurement_note(noises: Mapping[Group, Noise]) -> str:
    """Return on how much the noise of a table rests, by group, and how far it may be too small."""
    noise = min(noises.values(), key=lambda each: each.measured_freedom)
    remedy = " Train more seeds before relying on these figures." if noise.largest_factor > 2 else ""
    freedom = f"{noise.measured_freedom} degree{'s' * (noise.measured_freedom != 1)} of freedom"
    return (
        f"The noise was measured on {noise.measured_rows} rows, with {freedom}. It may be up to "
        f"{noise.largest_factor:.1f} times as large (95 %), and so may the differences.{remedy}"
    )


def power_sheets(noises: Mapping[Group, Noise]) -> dict[str, Sheet]:
    """Return by title a sheet of smallest differences, and one of the probabilities of equivalence.

    Each has a line per number of seeds, and a column per group of tasks.
    """
    first: Sheet = {"seeds per row": [Cell(str(count)) for count in SEED_COUNTS]}
    differences, probabilities = dict(first), dict(first)
    for group, noise in noises.items():
        title = GROUP_TITLES[group]
        smallest = [noise.smallest_difference(count) for count in SEED_COUNTS]
        differences[title] = [Cell(f"{value:.1f}", value=value) for value in smallest]
        powers = [noise.equivalence_power(count) for count in SEED_COUNTS]
        probabilities[title] = [Cell(f"{value:.0%}", value=value) for value in powers]
    return {DIFFERENCE_TITLE: differences, EQUIVALENCE_TITLE: probabilities}


def seeds_sheet(noises: Mapping[Group, Noise], difference: float) -> dict[str, Sheet]:
    """Return by title a line with the number of seeds per row that find a difference, per group of tasks."""
    title = (
        f"Seeds per row that find a difference of {difference:g} standard deviations of a run\n"
        "with a power of 80 %, corrected for the claims of the table"
    )
    sheet: Sheet = {"difference": [Cell(f"{difference:g}", value=difference)]}
    for group, noise in noises.items():
        count = noise.seeds_to_find(difference)
        text = f"more than {MAX_SEEDS:,}" if count is None else str(count)
        sheet[GROUP_TITLES[group]] = [Cell(text, value=count)]
    return {title: sheet}

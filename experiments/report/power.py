"""The power of a table's tests: how small a difference they find, and how surely that rows are equal.

The tests are simulated as reports make them. The power formula of a single t test would be too optimistic:
reports use the larger of a pair's own variance and the moderated one, and also require that the bootstrap
interval excludes zero.
"""

from bisect import bisect_left
from collections.abc import Mapping
from dataclasses import dataclass
from itertools import chain, combinations
from math import inf, sqrt

import numpy as np

from experiments.console import Cell, Sheet
from experiments.report.comparison import EQUIVALENCE_MARGIN, Comparison
from experiments.report.metrics import GROUP_TITLES, Group
from experiments.report.statistics import (
    POWER,
    PairedDifference,
    RowPair,
    SimulatedTests,
    degrees_of_freedom,
    simulate_tests,
)
from experiments.study.claims import claims_to_test
from lm.config.base import SettingError

SEED_COUNTS = (2, 3, 5, 10, 20)
MAX_SEEDS = 1000  # per row, beyond which nobody trains
DIFFERENCE_TITLE = (
    f"Smallest difference of two rows that is found with a power of {100 * POWER:g} %\n"
    "[standard deviations of a run], by a simulation of the tests of a report on\n"
    "all claims of the table, with the noise of all pairs of rows together"
)
EQUIVALENCE_TITLE = (
    f"Probability that equal rows are found equivalent (within {EQUIVALENCE_MARGIN:.2f} deviations)"
)
NOISE_TITLE = (
    "The noise in these simulations: the standard deviation of the difference of two\n"
    "runs over seeds, and of two rows over examples [standard deviations of a run]"
)


@dataclass(frozen=True)
class Noise:
    """Holds the noise of a difference between two rows of a table, in one group of tasks."""

    # variance between seeds, with one seed per row [squared standard deviations of a run]
    seed_variance: float
    # variance due to the choice of examples, which more seeds do not reduce, in the same unit
    example_variance: float
    pairs: tuple[RowPair, ...]  # of rows that are tested together
    measured_rows: int  # number of rows with runs, on which the variance between seeds was measured
    measured_beside: tuple[str, ...]  # of these, the baseline and the control, if they are not in the table
    measured_dof: int  # degrees of freedom of that measurement

    def simulated(self, count: int) -> SimulatedTests:
        """Return the simulated tests with ``count`` seeds per row."""
        return simulate_tests(self.pairs, count, self.example_variance / self.seed_variance)

    @property
    def std_upper_factor(self) -> float:
        """Return the upper 95 % limit of the true standard deviation between seeds, divided by its estimate.

        The limit is one-sided, from the chi-squared distribution.
        """
        from scipy.special import chdtri  # slow to import

        return sqrt(self.measured_dof / chdtri(self.measured_dof, 0.95))

    def smallest_difference(self, count: int) -> float:
        """Return the smallest true difference of two rows that tests find with probability POWER.

        It is infinite with one seed.
        """
        if count < 2:
            return inf
        thresholds = self.simulated(count).detection_thresholds
        return sqrt(self.seed_variance) * float(np.quantile(thresholds, POWER))

    def seeds_to_find(self, difference: float) -> int | None:
        """Return the fewest seeds per row with which tests find a difference with probability POWER.

        Tests are simulated, so a number such as 50 may be a few too high or too low. None if MAX_SEEDS do not
        suffice: more seeds do not reduce the noise of the examples.
        """
        most = 2
        while self.smallest_difference(most) > difference:
            if most == MAX_SEEDS:
                return None
            most = min(2 * most, MAX_SEEDS)
        counts = range(max(2, most // 2), most + 1)
        index = bisect_left(counts, True, key=lambda count: self.smallest_difference(count) <= difference)
        return counts[index]

    def equivalence_power(self, count: int) -> float:
        """Return the probability that two equal rows are found equivalent; 0 with one seed."""
        if count < 2:
            return 0.0
        margin = EQUIVALENCE_MARGIN / sqrt(self.seed_variance)
        return float(np.mean(self.simulated(count).equivalence_thresholds < margin))


def measure_noise(comparison: Comparison, group: Group) -> Noise:
    """Return the noise of a table's differences.

    The variance between seeds is pooled over all pairs of rows with runs. The pairs that are tested are those
    of the table's claims about the group or, if no claim compares rows that differ, of its rows with the
    baseline. SettingError if no two rows differ, or none have two seeds in common.
    """
    tested = _tested_pairs(comparison, group)
    if not tested:
        raise SettingError(
            f"{comparison.table.name}: no two of its rows differ, so that a report tests nothing: add a row "
            "that is not the baseline, or leave out the settings that make all rows equal"
        )
    num_seeds: dict[RowPair, int] = {}
    variances, example_variances = [], []
    for pair in combinations(comparison.names_with_control, 2):
        difference = comparison.difference(*pair, "updates", group)
        if isinstance(difference, PairedDifference) and difference.variance > 0:
            num_seeds[pair] = len(difference.by_seed)
            variances.append(difference.variance)
            example_variances.append(difference.example_variance)
    if not num_seeds:
        raise SettingError(
            f"{comparison.table.name}: no two rows that have left the unigram plateau have two seeds in "
            "common whose differences vary, from which the noise follows: train some with --seeds 2, or "
            "longer if lm report says 'not yet learning'"
        )
    measured = dict.fromkeys(chain.from_iterable(num_seeds))
    of_table = {*map(comparison.canonical_name, comparison.table.rows)}
    return Noise(
        seed_variance=float(np.average(variances, weights=[count - 1 for count in num_seeds.values()])),
        example_variance=float(np.median(example_variances)),
        pairs=tested,
        measured_rows=len(measured),
        measured_beside=tuple(row for row in measured if row not in of_table),
        measured_dof=degrees_of_freedom(num_seeds),
    )


def _tested_pairs(comparison: Comparison, group: Group) -> tuple[RowPair, ...]:
    """Return the pairs of rows of the claims about a group; if there are none, of the rows with the baseline.

    A row is no pair with itself, or with a row that is the same experiment.
    """
    name, baseline = comparison.canonical_name, comparison.canonical_baseline
    claims = [claim for claim in claims_to_test(comparison.table) if claim.covers_tasks(group)]
    claimed = [(name(claim.better), name(claim.worse)) for claim in claims]
    with_baseline = [(name(row), baseline) for row in comparison.table.rows]
    for pairs in (claimed, with_baseline):
        if different := tuple(dict.fromkeys((a, b) for a, b in pairs if a != b)):
            return different
    return ()


def measurement_note(noises: Mapping[Group, Noise]) -> str:
    """Return a sentence on which rows and how many degrees of freedom the noise was measured with.

    It is about the group with the fewest, and also says how far the noise may be underestimated.
    """
    noise = min(noises.values(), key=lambda each: each.measured_dof)
    remedy = " Train more seeds before relying on these figures." if noise.std_upper_factor > 2 else ""
    dof = f"{noise.measured_dof} degree{'s' * (noise.measured_dof != 1)} of freedom"
    beside = ""
    if noise.measured_beside:
        beside = f" ({noise.measured_rows - len(noise.measured_beside)} of the table, and "
        beside += f"{' and '.join(noise.measured_beside)})"
    return (
        f"The noise was measured on {noise.measured_rows} rows{beside}, with {dof}. It may be up to "
        f"{noise.std_upper_factor:.1f} times as large (95 %), and so may the differences.{remedy}"
    )


def noise_sheet(noises: Mapping[Group, Noise]) -> Sheet:
    """Return a line per group of tasks: the noise, pairs and rows that its tests are simulated with."""
    sheet: Sheet = {}
    for group, noise in noises.items():
        tested_rows = {*chain.from_iterable(noise.pairs)}
        line = {
            "tasks": Cell(GROUP_TITLES[group]),
            "over seeds": _deviation_cell(noise.seed_variance),
            "over examples": _deviation_cell(noise.example_variance),
            "pairs tested": Cell(str(len(noise.pairs)), value=len(noise.pairs)),
            "rows of these": Cell(str(len(tested_rows)), value=len(tested_rows)),
        }
        for title, cell in line.items():
            sheet.setdefault(title, []).append(cell)
    return sheet


def _deviation_cell(variance: float) -> Cell:
    deviation = sqrt(variance)
    return Cell(f"{deviation:.3f}", value=deviation)


def power_sheets(noises: Mapping[Group, Noise]) -> dict[str, Sheet]:
    """Return by title a sheet of smallest differences, and one of the probabilities of equivalence.

    Each has a line per number of seeds, and a column per group of tasks.
    """
    seeds: Sheet = {"seeds per row": [Cell(str(count)) for count in SEED_COUNTS]}
    differences, probabilities = dict(seeds), dict(seeds)
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
        f"with a power of {100 * POWER:g} %, by a simulation of the tests on all claims of the table"
    )
    sheet: Sheet = {"difference": [Cell(f"{difference:g}", value=difference)]}
    for group, noise in noises.items():
        count = noise.seeds_to_find(difference)
        text = f"more than {MAX_SEEDS:,}" if count is None else str(count)
        sheet[GROUP_TITLES[group]] = [Cell(text, value=count)]
    return {title: sheet}

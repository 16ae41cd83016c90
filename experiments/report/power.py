"""The power of a table's tests: how small a difference they find, and how surely that rows are equal."""

from collections.abc import Sequence
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
    equivalence_power,
    smallest_difference,
)
from experiments.report.text import GROUP_TITLES
from experiments.study.claims import paper_claims
from lm.config.base import SettingError

SEED_COUNTS = (2, 3, 5, 10, 20)
TITLE = "Smallest difference of two rows that is found with a power of 80 % [standard deviations of a run]"
EQUIVALENCE_TITLE = (
    f"Probability that equal rows are found equivalent (within {EQUIVALENCE_MARGIN:.2f} deviations)"
)


@dataclass(frozen=True)
class Precision:
    """Holds what the tests of a table know of a difference between two rows, with so many seeds per row."""

    standard_error: float  # of a difference [standard deviations of a run]
    freedom: int  # degrees of freedom of its t test
    alpha: float  # level of the strictest step of Holm's method


def smallest_differences(comparison: Comparison, group: Group, counts: Sequence[int]) -> list[float]:
    """Return for each number of seeds the smallest difference of two rows that the table's tests find.

    SettingError if no two rows have two seeds in common.
    """
    found = [(count, precision(comparison, group, count)) for count in counts]
    return [
        smallest_difference(each.standard_error, each.freedom, each.alpha) if count > 1 else inf
        for count, each in found
    ]


def equivalence_powers(comparison: Comparison, group: Group, counts: Sequence[int]) -> list[float]:
    """Return for each number of seeds the probability that the table finds two equal rows equivalent."""
    found = [(count, precision(comparison, group, count)) for count in counts]
    return [
        equivalence_power(each.standard_error, each.freedom, EQUIVALENCE_MARGIN, each.alpha)
        if count > 1
        else 0.0
        for count, each in found
    ]


def precision(comparison: Comparison, group: Group, count: int) -> Precision:
    """Return how exactly the table measures differences with ``count`` seeds per row.

    The variance over seeds is pooled over all pairs of rows that have run, and shrinks with more seeds. The
    variance over examples stays. All rows of the table give degrees of freedom. The level is that of the
    strictest step of Holm's method over the claims of the table, or over the pairs with its baseline if it
    has none. SettingError if no two rows have two seeds in common.
    """
    pairs = combinations(comparison.scored_names, 2)
    found = [comparison.difference(a, b, "updates", group) for a, b in pairs]
    known = [each for each in found if isinstance(each, PairedDifference) and each.variance > 0]
    if not known:
        raise SettingError(
            f"{comparison.table.name}: no two rows have finished two seeds in common, from which the noise "
            "follows: train some with --seeds 2"
        )
    freedom = [len(each.by_seed) - 1 for each in known]
    over_seeds = float(np.average([each.variance for each in known], weights=freedom))
    over_examples = float(np.median([each.example_variance for each in known]))
    rows = len({comparison.canonical_name(row) for row in comparison.table.rows})
    tests = len(paper_claims(comparison.table)) or rows - 1
    error = sqrt(over_seeds / count + over_examples)
    return Precision(error, (rows - 1) * (count - 1), ALPHA / tests)


def power_sheet(comparison: Comparison) -> Sheet:
    """Return the smallest differences: a line per number of seeds, and a column per group of tasks."""
    sheet: Sheet = {"seeds per row": [Cell(str(count)) for count in SEED_COUNTS]}
    for group in comparison.groups:
        values = smallest_differences(comparison, group, SEED_COUNTS)
        sheet[GROUP_TITLES[group]] = [Cell(f"{value:.1f}", value=value) for value in values]
    return sheet


def equivalence_sheet(comparison: Comparison) -> Sheet:
    """Return the probabilities of equivalence: a line per number of seeds, a column per group of tasks."""
    sheet: Sheet = {"seeds per row": [Cell(str(count)) for count in SEED_COUNTS]}
    for group in comparison.groups:
        values = equivalence_powers(comparison, group, SEED_COUNTS)
        sheet[GROUP_TITLES[group]] = [Cell(f"{value:.0%}", value=value) for value in values]
    return sheet

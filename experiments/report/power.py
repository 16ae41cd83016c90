"""How small a difference a table can tell: the power of its tests with so many seeds per row."""

from collections.abc import Sequence
from itertools import combinations
from math import inf, sqrt

import numpy as np

from experiments.console import Cell, Sheet
from experiments.report.comparison import Comparison
from experiments.report.metrics import Group
from experiments.report.statistics import ALPHA, PairedDifference, smallest_difference
from experiments.report.text import GROUP_TITLES
from experiments.study.claims import paper_claims
from lm.config.base import SettingError

SEED_COUNTS = (2, 3, 5, 10, 20)
TITLE = "Smallest difference of two rows that is found with a power of 80 % [standard deviations of a run]"


def smallest_differences(comparison: Comparison, group: Group, counts: Sequence[int]) -> list[float]:
    """Return for each number of seeds the smallest difference of two rows that the table's tests find.

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
    return [
        smallest_difference(sqrt(over_seeds / count + over_examples), (rows - 1) * (count - 1), ALPHA / tests)
        if count > 1
        else inf
        for count in counts
    ]


def power_sheet(comparison: Comparison) -> Sheet:
    """Return a line for each number of seeds, and a column for each group of tasks."""
    sheet: Sheet = {"seeds per row": [Cell(str(count)) for count in SEED_COUNTS]}
    for group in comparison.groups:
        values = smallest_differences(comparison, group, SEED_COUNTS)
        sheet[GROUP_TITLES[group]] = [Cell(f"{value:.1f}", value=value) for value in values]
    return sheet

"""Claims about a table: pairs of rows of which one is said to be better, which reports test.

Where a paper gives its noise, nothing is typed in: a claim is a pair of rows whose published scores differ
beyond it. They are compared by their mean over the table's columns, each in standard deviations of the
baseline. Elsewhere the claims are the table's conclusions.
"""

from dataclasses import dataclass
from itertools import combinations
from math import sqrt
from typing import NamedTuple

import numpy as np

from experiments.study.table import Column, Row, Table

SIGNIFICANT = 2.0  # deviations of a difference at which a paper tells two rows apart: the T5 paper's rule
REPLICATIONS = 10_000  # that are simulated


@dataclass(frozen=True)
class Claim:
    """Row ``better`` is said to have a higher mean score than row ``worse``."""

    better: Row
    worse: Row
    z: float | None  # of the published difference, in its standard deviations; None: noise is not known
    conclusion: str  # what the paper's text says about it; empty if nothing in particular

    @property
    def names(self) -> set[str]:
        """Return the names of both rows."""
        return {self.better.name, self.worse.name}


class Counts(NamedTuple):
    """How many claims have each verdict."""

    confirmed: float
    contradicted: float
    undecided: float
    # their rows do not learn yet, or have no common seed or no scores at equal cost
    uncompared: float = 0


def paper_claims(table: Table) -> tuple[Claim, ...]:
    """Return the claims of the paper that our runs of a table are tested on.

    If the paper gives the noise of its scores, a claim is a pair of rows whose published scores differ
    significantly. Otherwise the claims are the table's conclusions, and there need be no paper; those in
    columns by which its rows are not compared are left out.
    A table with ``surrogate_data`` has no claims, at any scale.
    """
    if table.surrogate_data:
        return ()
    if not has_noise(table):
        rows = {row.key: row for row in table.rows}
        known = [
            each
            for each in table.conclusions
            if {each.better, each.worse} <= rows.keys() and each.column in ("", *table.columns)
        ]
        return tuple(Claim(rows[each.better], rows[each.worse], None, each.text) for each in known)
    texts = {(each.better, each.worse): each.text for each in table.conclusions}
    scores = {row: standardized(row, table) for row in published_rows(table)}
    found = []
    for a, b in combinations(scores, 2):
        if table.pairs == "with-baseline" and table.baseline not in (a.name, b.name):
            continue
        better, worse = (a, b) if scores[a].mean() >= scores[b].mean() else (b, a)
        z = _mean_z(scores[better] - scores[worse])
        if z >= SIGNIFICANT:
            found.append(Claim(better, worse, z, texts.get((better.key, worse.key), "")))
    return tuple(found)


def simulate_replication(table: Table) -> Counts:
    """Return what the paper would find of its own claims by the same rule, with new noise of its own size.

    The scores that it printed have noise too, so that those of a replication differ by twice the variance of
    one run. The counts are means over many simulated replications.
    """
    wanted = paper_claims(table)
    if not has_noise(table) or not wanted:
        return Counts(0, 0, 0)
    rows = published_rows(table)
    columns = len(table.columns)
    printed = np.array([standardized(row, table) for row in rows])  # [rows, columns]
    noise = np.random.default_rng(0).normal(size=(REPLICATIONS, len(rows), columns))
    replicated = (printed + sqrt(2) * noise).mean(-1).T  # [rows, replications]
    means = {row.name: mean for row, mean in zip(rows, replicated, strict=True)}
    differences = np.stack([means[claim.better.name] - means[claim.worse.name] for claim in wanted])
    z = differences * sqrt(columns / 2)
    confirmed = float((z >= SIGNIFICANT).sum(0).mean())
    contradicted = float((-z >= SIGNIFICANT).sum(0).mean())
    return Counts(confirmed, contradicted, len(wanted) - confirmed - contradicted)


def compared_columns(table: Table) -> tuple[Column, ...]:
    """Return the paper's columns by which it compares the rows of a table; () without a paper."""
    return tuple(table.paper.column(name) for name in table.columns) if table.paper else ()


def published_rows(table: Table) -> tuple[Row, ...]:
    """Return the rows that have a published score in each column by which rows are compared."""
    if not table.columns:
        return ()
    return tuple(row for row in table.rows if set(table.columns) <= row.published.keys())


def has_noise(table: Table) -> bool:
    """Return whether the paper gives the standard deviation of every column in which rows are compared."""
    columns = compared_columns(table)
    return bool(columns) and all(column.std is not None for column in columns)


def standardized(row: Row, table: Table) -> np.ndarray:
    """Return a row's published scores in deviations of the paper's baseline, [columns]; more is better.

    The columns are those by which the paper compares the rows of ``table``. ValueError if it does not give
    the deviation of one.
    """
    scores = []
    for column in compared_columns(table):
        if column.std is None:
            raise ValueError(f"table {table.name} gives no standard deviation of {column.name}")
        sign = 1 if column.higher_is_better else -1
        scores.append(sign * row.published[column.name] / column.std)
    return np.array(scores)


def _mean_z(difference: np.ndarray) -> float:
    """Return the z of the mean over columns of a difference of two runs, each with a deviation of one."""
    return float(difference.mean()) * sqrt(len(difference) / 2)

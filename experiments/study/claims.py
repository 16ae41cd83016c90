"""Claims about a table, which reports test: one row is said to be better than, or as good as, another.

Where a paper gives its noise, claims are derived: each pair of rows whose published scores differ beyond it.
Rows are compared by the mean of their scores over the table's columns; each score is in units of that
column's standard deviation over runs. The conclusions that a table's file states are claims too, whatever the
published scores.
"""

from collections.abc import Sequence
from dataclasses import dataclass, replace
from itertools import combinations
from math import sqrt
from typing import NamedTuple

import numpy as np

from experiments.study.table import Column, Conclusion, Half, Relation, Row, Table, pair_text

# Two published rows differ if their means over the table's columns are this many standard errors of their
# difference apart. The T5 paper's rule is two standard deviations of a run in a single column.
SIGNIFICANT = 2.0
REPLICATIONS = 10_000  # number of simulated repeats of a paper


@dataclass(frozen=True)
class Claim:
    """Row ``better`` is said to have a higher mean score than row ``worse``, or an equivalent one."""

    better: Row
    worse: Row
    # difference of the published means over all of the table's columns, even if a conclusion is about one of
    # them [standard errors]; None: the paper does not give its noise, a row has no published score in one of
    # these columns, or the rows are said to be equivalent
    z: float | None
    conclusion: str  # what the table's file says about it; empty if nothing
    relation: Relation = "better"
    tasks: Half | None = None  # the half of the tasks that it is about; None: all

    def covers_tasks(self, group: str) -> bool:
        """Return whether the claim is tested on this group of tasks, one of those that reports judge by."""
        return self.tasks is None or self.tasks == group

    @property
    def names(self) -> set[str]:
        """Return the names of both rows."""
        return {self.better.name, self.worse.name}

    @property
    def pair(self) -> str:
        """Return the rows with the sign of what is said of them, such as "15 > 50"."""
        return pair_text(self.better.key, self.worse.key, self.relation)


class VerdictCounts(NamedTuple):
    """Holds how many claims have each verdict; simulations give means, which need not be whole numbers."""

    confirmed: float
    contradicted: float
    undecided: float
    # one of their rows has not left the unigram plateau, or they have no common seed or scores at equal cost
    uncompared: float = 0

    @property
    def total(self) -> float:
        """Return the number of all claims."""
        return sum(self)

    @property
    def share_confirmed(self) -> float:
        """Return the share of all claims that is confirmed; nan without claims."""
        return self.confirmed / self.total if self.total else float("nan")


def claims_to_test(table: Table) -> tuple[Claim, ...]:
    """Return the claims that our runs of a table are tested on: the paper's, and our own hypotheses.

    These are the pairs of rows whose published scores differ significantly, if the paper gives the noise of
    its scores, and the table's conclusions; there need be no paper. Conclusions about a column by which the
    table does not compare its rows are left out (``is_tested``). A table with ``surrogate_data`` has no
    claims, at any scale.
    """
    if table.surrogate_data:
        return ()
    rows = {row.key: row for row in table.rows}
    conclusions = [each for each in table.conclusions if is_tested(each, table)]
    # a pair may have one for each half of the tasks
    conclusions_of_pair: dict[tuple[str, str], list[Conclusion]] = {}
    for each in conclusions:
        if each.relation == "better":
            conclusions_of_pair.setdefault((each.better, each.worse), []).append(each)
    pairs_from_scores: set[tuple[str, str]] = set()
    derives_claims = has_noise(table)
    claims = []
    for a, b in combinations(published_rows(table) if derives_claims else (), 2):
        if table.pairs == "with-baseline" and table.baseline not in (a.name, b.name):
            continue
        difference = published_z(a, b, table)
        better, worse = (a, b) if difference >= 0 else (b, a)
        if (z := abs(difference)) >= SIGNIFICANT:
            pair = better.key, worse.key
            pairs_from_scores.add(pair)
            stated = conclusions_of_pair.get(pair, [Conclusion(*pair, text="")])
            claims += [Claim(better, worse, z, each.text, tasks=each.tasks) for each in stated]
    equivalences = []
    for each in conclusions:
        if not {each.better, each.worse} <= rows.keys():
            continue
        better, worse = rows[each.better], rows[each.worse]
        if each.relation == "equivalent":
            equivalences.append(Claim(better, worse, None, each.text, each.relation, each.tasks))
        elif (each.better, each.worse) not in pairs_from_scores:
            known = derives_claims and {better, worse} <= set(published_rows(table))
            published = published_z(better, worse, table) if known else None
            claims.append(Claim(better, worse, published, each.text, tasks=each.tasks))
    return (*claims, *equivalences)


def is_tested(conclusion: Conclusion, table: Table) -> bool:
    """Return whether our runs of ``table`` are tested on a conclusion.

    It must be about one of the table's columns, or about a held-out loss if one of the table's columns is
    such a loss.
    """
    if conclusion.column in ("", *table.columns):
        return True
    assert table.paper is not None, "a conclusion with a column has a paper"
    is_loss = table.paper.column(conclusion.column).held_out
    return is_loss and any(column.held_out for column in compared_columns(table))


def contradicted_conclusions(table: Table) -> list[str]:
    """Return a sentence for each conclusion whose published scores differ significantly the other way.

    A conclusion about a column is compared with the scores in it, any other with those in the table's
    columns. Such a conclusion may be a hypothesis against the paper; more often a column of losses lacks
    ``higher_is_better=False``, or the two rows are exchanged.
    """
    rows = {row.key: row for row in table.rows}
    notes = []
    for each in table.conclusions:
        compared = replace(table, columns=(each.column,)) if each.column else table
        known = [rows[key] for key in (each.better, each.worse) if key in rows]
        if each.relation != "better" or not has_noise(compared):
            continue
        if len(known) < 2 or not {*known} <= {*published_rows(compared)}:
            continue
        better, worse = known
        z = published_z(better, worse, compared)
        if z <= -SIGNIFICANT:
            columns = ", ".join(compared.columns)
            notes.append(
                f'Conclusion "{each.text}" ({each.pair}): the published scores in {columns} say the opposite '
                f"(z = {z:.1f}). Unless that is meant, exchange the rows of the Conclusion or, if less is "
                f"better, give the Column higher_is_better=False."
            )
    return notes


def published_z(a: Row, b: Row, table: Table) -> float:
    """Return z of the difference of the published means of rows a and b: positive if a is better.

    The means are over C columns, which are taken as independent. A score that is the mean of n runs has a
    variance of 1/n in the unit of ``standardized``, so that z = mean difference / sqrt((1/n_a + 1/n_b) / C).
    """
    difference = standardized(a, table) - standardized(b, table)
    variance = (1 / a.published_runs + 1 / b.published_runs) / len(difference)
    return float(difference.mean()) / sqrt(variance)


def simulate_replication(table: Table) -> VerdictCounts:
    """Return how many of a paper's claims a replication as noisy as the paper gives each verdict.

    The rule is that of the claims. Printed scores are noisy too: a replication differs from them by the noise
    of both, which has twice the variance of a printed score. (``paper_order`` takes the printed scores for
    the true ones.) The counts are means over simulated replications.
    """
    claims = [claim for claim in claims_to_test(table) if claim.z is not None]
    if not claims:
        return VerdictCounts(0, 0, 0)
    rows = published_rows(table)
    simulated = simulate_published_means(rows, table, variance=2.0)
    means = dict(zip((row.name for row in rows), simulated, strict=True))
    num_columns = len(table.columns)
    confirmed = contradicted = 0.0
    for claim in claims:
        variance = (1 / claim.better.published_runs + 1 / claim.worse.published_runs) / num_columns
        z = (means[claim.better.name] - means[claim.worse.name]) / sqrt(variance)
        confirmed += float((z >= SIGNIFICANT).mean())
        contradicted += float((-z >= SIGNIFICANT).mean())
    return VerdictCounts(confirmed, contradicted, len(claims) - confirmed - contradicted)


def simulate_published_means(rows: Sequence[Row], table: Table, variance: float = 1.0) -> np.ndarray:
    """Return the rows' published means over the table's columns plus noise, [rows, REPLICATIONS].

    variance: of the noise, as a multiple of that of the printed scores.
    """
    means = np.array([standardized(row, table).mean() for row in rows])
    errors = [sqrt(variance / row.published_runs / len(table.columns)) for row in rows]
    noise = np.random.default_rng(0).normal(size=(len(rows), REPLICATIONS))
    return means[:, None] + np.array(errors)[:, None] * noise


def published_means(table: Table) -> dict[str, float]:
    """Return row -> its published mean over the table's columns; a higher mean is better.

    Columns are in standard deviations of a single run. Where the paper does not give these, a column is in
    standard deviations over the table's rows.
    """
    rows, columns = published_rows(table), compared_columns(table)
    if not rows:
        return {}
    if has_noise(table):
        return {row.name: float(standardized(row, table).mean()) for row in rows}
    names = [column.name for column in columns]
    signs = [1 if column.higher_is_better else -1 for column in columns]
    scores = np.array([[row.published[name] for name in names] for row in rows]) * signs
    spread = scores.std(0)
    z = (scores - scores.mean(0)) / np.where(spread > 0, spread, 1)
    return {row.name: float(mean) for row, mean in zip(rows, z.mean(1), strict=True)}


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
    """Return a row's published scores in standard deviations of a single run, [columns]; more is better.

    The columns are those by which the paper compares the rows of ``table``. ValueError if it does not give
    the standard deviation of one.
    """
    scores = []
    for column in compared_columns(table):
        if column.std is None:
            raise ValueError(f"table {table.name}: {column.name} has no published standard deviation")
        sign = 1 if column.higher_is_better else -1
        scores.append(sign * row.published[column.name] / column.std)
    return np.array(scores)

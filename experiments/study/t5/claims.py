"""What the paper claims: pairs of rows that its own noise lets it tell apart, and what a repeat would find.

Nothing is typed in: a claim follows from two rows' scores in ``scores.json`` and the deviations of the
paper's ten baselines. Rows are compared by their mean over all columns, each in its deviations.
"""

from dataclasses import dataclass, replace
from itertools import combinations
from math import sqrt
from typing import NamedTuple

import numpy as np

from experiments.study.experiment import Row, Table
from experiments.study.t5.scores import BASELINE_STD, COLUMNS

TOLD_APART = 2.0  # deviations of a difference from which on the paper tells two rows apart: its own rule
REPEATS = 10_000  # of the paper, simulated
_ELSEWHERE = ("t5/8-data",)  # tables whose corpora only scale `base` has: others stand in for them

CONCLUSIONS = {  # (better row, worse row) -> what the paper's text concludes from it
    ("1-baseline/baseline", "1-baseline/no-pretraining"): "pre-training helps",
    ("2-architecture/encoder-decoder", "2-architecture/encoder-decoder-6-layers"): "half the layers hurt",
    (
        "2-architecture/encoder-decoder-shared",
        "2-architecture/prefix-lm",
    ): "sharing costs less than no encoder",
    ("2-architecture/encoder-decoder", "2-architecture/language-model"): "causal decoders are worse",
    ("2-architecture/prefix-lm+lm", "2-architecture/language-model+lm"): "a visible prefix helps",
    ("2-architecture/encoder-decoder", "2-architecture/encoder-decoder+lm"): "denoising beats LM",
    ("4-objective/bert-style", "4-objective/deshuffling"): "deshuffling is worse",
    ("4-objective/bert-style", "4-objective/prefix-lm"): "denoising beats prefix LM",
    ("6-corruption-rate/15", "6-corruption-rate/50"): "50 % noise is too much",
    ("9-repeats/full", "9-repeats/4096"): "many repeats hurt",
    ("10-fine-tuning/adapters-2048", "10-fine-tuning/adapters-32"): "adapters need width",
    ("10-fine-tuning/all", "10-fine-tuning/gradual-unfreezing"): "tuning everything is best",
    ("11-mixing/baseline", "11-mixing/equal"): "equal mixing is worst",
    ("12-multi-task/baseline", "12-multi-task/supervised+fine-tuning"): "supervised alone is worse",
    ("12-multi-task/baseline", "12-multi-task/multi-task"): "fine-tuning is needed",
    ("13-scaling/steps", "13-scaling/baseline"): "more steps help",
    ("13-scaling/size", "13-scaling/baseline"): "more parameters help",
    ("13-scaling/ensemble", "13-scaling/baseline"): "ensembles help",
}


@dataclass(frozen=True)
class Claim:
    """The paper's mean of row ``better`` is above that of ``worse`` by ``z`` deviations of the difference."""

    better: Row
    worse: Row
    z: float

    @property
    def names(self) -> set[str]:
        """Of both rows."""
        return {self.better.name, self.worse.name}

    @property
    def conclusion(self) -> str:
        """What the paper's text says of it; empty if nothing in particular."""
        return CONCLUSIONS.get(
            (self.better.name.removeprefix("t5/"), self.worse.name.removeprefix("t5/")), ""
        )


class Counts(NamedTuple):
    """How many claims are each."""

    confirmed: float
    contradicted: float
    undecided: float
    # of rows that do not learn yet, or lack a common seed or scores after equal spending
    uncompared: float = 0


def claims(table: Table) -> tuple[Claim, ...]:
    """The claims of a table; none of tables that are not the paper's."""
    if table.name in _ELSEWHERE or not (table := _scored(table)).rows:
        return ()
    scores, pairs = _deviations(table), combinations(range(len(table.rows)), 2)
    ordered = [(a, b) if scores[a].mean() >= scores[b].mean() else (b, a) for a, b in pairs]
    listed = [Claim(table.rows[a], table.rows[b], _z(scores[a] - scores[b])) for a, b in ordered]
    return tuple(claim for claim in listed if claim.z >= TOLD_APART)


def repeat_of_paper(table: Table) -> Counts:
    """What the paper would find of its own claims with the same rule and new noise of its own size.

    The scores that it printed have noise too, so that those of a repeat differ by twice the variance of one.
    """
    table = _scored(table)
    wanted = claims(table)
    if not wanted:
        return Counts(0, 0, 0)
    noise = np.random.default_rng(0).normal(size=(REPEATS, len(table.rows), len(COLUMNS)))
    repeated = (_deviations(table) + sqrt(2) * noise).mean(-1).T
    means = dict(zip((row.name for row in table.rows), repeated, strict=True))
    differences = np.stack([means[claim.better.name] - means[claim.worse.name] for claim in wanted])
    z = differences * sqrt(len(COLUMNS) / 2)
    found, denied = (float((side >= TOLD_APART).sum(0).mean()) for side in (z, -z))
    return Counts(found, denied, len(wanted) - found - denied)


def _scored(table: Table) -> Table:
    """The table without rows that the paper does not have."""
    return replace(table, rows=tuple(row for row in table.rows if row.paper))


def in_deviations(row: Row) -> np.ndarray:
    """[columns]: the paper's scores of a row, in deviations of its ten baselines."""
    return np.array([row.paper[column] / BASELINE_STD[column] for column in COLUMNS])


def _deviations(table: Table) -> np.ndarray:
    """[R, columns]: the paper's scores, in deviations of its baseline."""
    return np.array([in_deviations(row) for row in table.rows])


def _z(difference: np.ndarray) -> float:
    """Of the mean over columns of the difference of two runs, each with a deviation of one."""
    return float(difference.mean()) * sqrt(len(difference) / 2)

"""What a table's finished rows show beside the paper's: which differ from the baseline, and the order of the rows."""

from collections.abc import Sequence
from itertools import product
from typing import NamedTuple

import numpy as np
from scipy.stats import rankdata

from experiments.experiment import Table
from experiments.results import scores
from experiments.sheets import Cell, Finished, Sheet, base_of, columns_of, noise, published, sign
from experiments.t5.tables import BASELINE_STD

DRAWS = 4_000  # of the bootstrap


def differences(table: Table, found: Finished) -> str:
    """How many of the paper's differences to the baseline ours show; those of rows with one seed tell nothing."""
    base, stds = base_of(table), noise(table, found)
    ours = {row.name: scores(found[row.name]) for row in (*table.rows, base)}
    known = []
    for row, (c, std) in product((row for row in table.rows if row.changes != base.changes), stds.items()):
        theirs = sign(published(row, c), published(base, c), BASELINE_STD[c])
        own = sign(ours[row.name].get(c), ours[base.name].get(c), std)
        known += [(theirs, own)] if theirs and own is not None else []
    if not known:
        return "Differences to the baseline: to tell them from noise takes two seeds of it and of other rows."
    same = sum(theirs == own for theirs, own in known)
    within = sum(own == 0 for _, own in known)
    return (
        f"Differences to the baseline: of the paper's {len(known)} (▲ or ▼) in scores that we have two seeds of, ours "
        f"agree with {same} and contradict {len(known) - same - within}; {within} are within our noise."
    )


def orders(table: Table, found: Finished) -> tuple[Sheet | None, str]:
    """The places of the rows, and how alike ours and the paper's are; no sheet without three rows."""
    columns = columns_of(table, found)
    found = {name: [run for run in runs if run.columns.keys() >= set(columns)] for name, runs in found.items()}
    rows = [row for row in table.rows if found[row.name] and row.paper.keys() >= set(columns)]
    if len(rows) < 3 or not columns:
        return None, f"Orders are compared from three finished rows on; there are {len(rows)}."
    ours = [np.array([[run.columns[c] for c in columns] for run in found[row.name]]) for row in rows]
    paper = np.array([[row.paper[c] for c in columns] for row in rows])
    sides = {c: ([sample[:, [i]] for sample in ours], paper[:, [i]]) for i, c in enumerate(columns)}
    if stds := noise(table, found):
        told = [columns.index(c) for c in stds]
        scaled = [sample[:, told] / list(stds.values()) for sample in ours]
        sides = {"average": (scaled, paper[:, told] / [BASELINE_STD[c] for c in stds])} | sides
    lost = [[run.task_loss for run in found[row.name]] for row in rows]
    if all(None not in each for each in lost):  # less is better
        sides |= {"loss on tasks": ([-np.array(each)[:, None] for each in lost], next(iter(sides.values()))[1])}
    order = np.argsort(-next(iter(sides.values()))[1].mean(1), kind="stable")
    sheet, texts = {"row": [Cell(rows[i].label) for i in order]}, []
    for name, (samples, theirs) in sides.items():
        left, right = (rankdata(-np.array(side), "min") for side in ([s.mean() for s in samples], theirs.mean(1)))
        sheet[name] = [Cell(f"{left[i]} ({right[i]})") for i in order]
        if alike := agreement(samples, theirs, seed=0):
            texts.append(f"{name} {alike.tau:.2f} ({alike.low:.2f} … {alike.high:.2f})")
    return (
        sheet,
        f"Kendall's τ between the two orders (95 % interval): {', '.join(texts) or 'unknown, as all are alike'}.",
    )


class Agreement(NamedTuple):
    """Kendall's tau-b and its 95 % interval."""

    tau: float
    low: float
    high: float


def agreement(ours: Sequence[np.ndarray], paper: np.ndarray, seed: int) -> Agreement | None:
    """R samples [S, C], paper [R, C] -> how alike the means over columns order the rows; None if a side is all alike.

    A draw of the bootstrap takes rows, columns, and seeds within each row, all with replacement.
    """
    rng, (rows, columns) = np.random.default_rng(seed), paper.shape
    tau = kendall(np.array([sample.mean() for sample in ours]), paper.mean(1))
    if np.isnan(tau):
        return None
    seeds = [sample[rng.integers(len(sample), size=(DRAWS, len(sample)))].mean(1) for sample in ours]
    weights = rng.multinomial(columns, np.full(columns, 1 / columns), size=DRAWS) / columns
    drawn = rng.integers(rows, size=(DRAWS, rows))
    left = np.take_along_axis(np.einsum("rdc,dc->dr", np.stack(seeds), weights), drawn, 1)
    right = np.take_along_axis(np.einsum("rc,dc->dr", paper, weights), drawn, 1)
    return Agreement(float(tau), *np.nanquantile(kendall(left, right), (0.025, 0.975)).tolist())


def kendall(x: np.ndarray, y: np.ndarray) -> np.ndarray:
    """[..., R], [..., R] -> [...]: Kendall's tau-b; NaN where either side is all alike. scipy's takes one pair a call.

    The pairs of rows in the same order less those in the opposite one, over all pairs but for ties.
    """
    ours, theirs = (np.sign(side[..., :, None] - side[..., None, :]) for side in (x, y))
    pairs = np.sqrt((ours**2).sum((-2, -1)) * (theirs**2).sum((-2, -1)))
    return np.divide((ours * theirs).sum((-2, -1)), pairs, out=np.full(pairs.shape, np.nan), where=pairs > 0)

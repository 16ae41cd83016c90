"""What a table's finished rows show beside the paper's: which differ from the baseline, and the order of the
rows.
"""

from collections.abc import Callable
from itertools import product
from statistics import mean

from scipy.stats import rankdata

from experiments.console import Cell, Sheet
from experiments.report.comparison import Samples, agreement, compare
from experiments.report.sheets import Finished, base_of, columns_of, noise, published, samples_of, sign
from experiments.runs.result import Result
from experiments.study.experiment import Row, Table
from experiments.study.registry import twin
from experiments.study.t5.tables import BASELINE_STD


def differences(table: Table, found: Finished) -> str:
    """How many of the paper's differences to the baseline ours show; those of rows with one seed tell
    nothing.
    """
    base, known = base_of(table), []
    rows = [row for row in table.rows if row.changes != base.changes]
    for row, c in product(rows, columns_of(table, found)):
        theirs = sign(published(row, c), published(base, c), BASELINE_STD[c])
        ours = samples_of(table, found, lambda run, c=c: run.columns.get(c))
        own = compare(ours, twin(row.name), twin(base.name))
        known += [(theirs, own)] if theirs and own is not None else []
    if not known and (len(found[base.name]) < 2 or all(len(found[row.name]) < 2 for row in rows)):
        return (
            "With one seed, differences from the baseline cannot be told from noise; "
            "run with --seeds 2 or more."
        )
    if not known:
        return (
            "Differences from the baseline: where the paper has some, our scores are the same with each seed."
        )
    same = sum(theirs == own for theirs, own in known)
    within = sum(own == 0 for _, own in known)
    return (
        f"Differences from the baseline: of the paper's {len(known)} (▲ or ▼) in scores that we have two "
        "seeds of, "
        f"ours agree with {same} and contradict {len(known) - same - within}; {within} are within our noise."
    )


def orders(table: Table, found: Finished) -> tuple[Sheet | None, str]:
    """The places of the rows, and how alike ours and the paper's are; no sheet without three rows."""
    columns = columns_of(table, found)
    found = {
        name: [run for run in runs if run.columns.keys() >= set(columns)] for name, runs in found.items()
    }
    rows = [row for row in table.rows if found[row.name] and row.paper.keys() >= set(columns)]
    if len(rows) < 3 or not columns:
        return None, f"Orders are compared from three finished rows on; there are {len(rows)}."
    sides = _sides(table, found, rows, columns)
    theirs = next(iter(sides.values()))[1]
    order = sorted(rows, key=lambda row: -theirs[row.name])
    sheet, texts = {"row": [Cell(row.label) for row in order]}, []
    for name, (ours, paper) in sides.items():
        left, right = (
            dict(zip(paper, rankdata([-value for value in side], "average"), strict=True))
            for side in ([mean(row.values()) for row in ours.values()], paper.values())
        )
        sheet[name] = [Cell(f"{left[row.name]:g} ({right[row.name]:g})") for row in order]
        if alike := agreement(ours, paper, seed=0):
            texts.append(f"{name} {alike}")
    return (
        sheet,
        "Kendall's τ between the two orders (95 % interval): "
        f"{', '.join(texts) or 'unknown, as all are alike'}.",
    )


def _sides(
    table: Table, found: Finished, rows: list[Row], columns: list[str]
) -> dict[str, tuple[Samples, dict[str, float]]]:
    """What the rows are ordered by -> ours, and the paper's."""

    def ours(value: Callable[[Result], float]) -> Samples:
        return {row.name: {run.seed: value(run) for run in found[row.name]} for row in rows}

    sides = {
        c: (ours(lambda run, c=c: run.columns[c]), {row.name: row.paper[c] for row in rows}) for c in columns
    }
    if stds := noise(table, found):
        average = {row.name: mean(row.paper[c] / BASELINE_STD[c] for c in stds) for row in rows}
        scaled = ours(lambda run: mean(run.columns[c] / std for c, std in stds.items()))
        sides = {"average": (scaled, average)} | sides
    if all(run.task_loss is not None for row in rows for run in found[row.name]):  # less is better
        sides |= {"loss on tasks": (ours(lambda run: -run.task_loss), next(iter(sides.values()))[1])}
    return sides

"""Ladders of a table: how the loss of each kind of model falls with compute, and what that predicts.

The rows of such a table are called KIND-xSIZE, as in ``ladder`` or ``history-budgets``. The loss is measured
in bits per byte of held-out documents, which do not depend on the vocabulary.
"""

import re
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from statistics import mean

import numpy as np

from experiments.console import Cell, Sheet
from experiments.figures.panels import Score
from experiments.report.comparison import Comparison
from experiments.report.order import decision_accuracy
from experiments.report.scaling import MIN_RUNGS, Interval, Ladder, Rung
from experiments.report.text import add_line, bound_sign, score_cell
from experiments.study.registry import TABLES
from experiments.study.table import Row, Table
from lm.config.base import SettingError

RUNG = re.compile(r"(?P<kind>.+)-x(?P<size>\d*\.?\d+)")  # the last part of a row's name

RUNGS_TITLE = "Bits per byte of held-out documents by compute"
LAWS_TITLE = "Laws of all sizes: bits per byte = floor + factor * FLOP^-exponent"
DECISIONS_TITLE = "Pairs of kinds in the order of the largest size (decision accuracy)"
NOTE = (
    "predicted: the 95 % interval by the law of the smaller sizes, in the second table of all. It takes "
    "the law for granted, and knows only the chance of seeds."
)
NO_INTERVALS = "With one seed per size the chance of seeds is not known, and intervals are left out."


def kind_and_size(row: Row) -> tuple[str, float] | None:
    """Return the kind and the size of a row that is called KIND-xSIZE; None for another row."""
    match = RUNG.fullmatch(row.name.rpartition("/")[2])
    return (match["kind"], float(match["size"])) if match else None


def has_rungs(table: Table) -> bool:
    """Return whether a table has a kind of model at MIN_RUNGS sizes or more."""
    kinds = [name[0] for name in map(kind_and_size, table.rows) if name]
    return any(kinds.count(kind) >= MIN_RUNGS for kind in kinds)


def check_rungs(tables: Iterable[Table]) -> None:
    """Raise SettingError for a table without rungs, with the names of those that have some."""
    for table in tables:
        if not has_rungs(table):
            known = ", ".join(name for name, each in TABLES.items() if has_rungs(each))
            raise SettingError(
                f"{table.name} has no kind of model at {MIN_RUNGS} sizes, in rows called KIND-xSIZE; "
                f"{known} have"
            )


def ladders(comparison: Comparison) -> dict[str, Ladder]:
    """Return kind -> its ladder of the sizes that have finished.

    Kinds that have finished fewer than MIN_RUNGS sizes are left out, and counted models, which need no
    compute. SettingError if none is left.
    """
    table = comparison.table
    rungs: dict[str, list[Rung]] = {}
    for row in table.rows:
        name, results = kind_and_size(row), comparison.runs_of(row)
        likelihoods = [*filter(None, (result.likelihood() for result in results))]
        flops = mean(result.flops for result in results) if results else 0.0
        if name and likelihoods and flops:
            kind, size = name
            losses, relation = tuple(each.bits_per_byte for each in likelihoods), bound_sign(results)
            rung = Rung(f"{size:g}", flops, results[0].parameters, losses, relation)
            rungs.setdefault(kind, []).append(rung)
    complete = {}
    for kind, each in rungs.items():
        if len({rung.flops for rung in each}) >= MIN_RUNGS:
            complete[kind] = Ladder(each)
    if not complete:
        raise SettingError(
            f"{table.name}: no kind of model has finished {MIN_RUNGS} sizes with bits per byte of held-out "
            f"documents; train them with lm sweep {table.name}, in rows with data.held_out_documents=64"
        )
    return complete


def ladder_sheets(found: Mapping[str, Ladder]) -> dict[str, Sheet]:
    """Return by title the sheets of rungs, of laws, and of decisions between kinds if there are several."""
    sheets = {RUNGS_TITLE: rungs_sheet(found), LAWS_TITLE: laws_sheet(found)}
    if (decisions := decisions_sheet(found)) is not None:
        sheets[DECISIONS_TITLE] = decisions
    return sheets


def rungs_sheet(found: Mapping[str, Ladder]) -> Sheet:
    """Return a line per kind and size: its cost, its loss, and what the smaller sizes predict."""
    sheet: Sheet = {}
    for kind, ladder in found.items():
        for index, rung in enumerate(ladder.rungs):
            line = {
                "row": Cell(f"{kind}-x{rung.name}"),
                "FLOP": Cell(f"{rung.flops:.2g}", value=rung.flops),
                "parameters": Cell(f"{rung.parameters / 1e6:.2f} M", value=rung.parameters),
                "bits per byte": score_cell(3, Score.of(rung.losses), prefix=rung.relation),
                "predicted": _range_cell(prediction_of(ladder, index), ladder.smallest(index)),
                "seeds": Cell(str(len(rung.losses)), value=len(rung.losses)),
            }
            add_line(sheet, line)
    return sheet


def prediction_of(ladder: Ladder, index: int) -> Interval | None:
    """Return what the smaller sizes predict of the mean of a rung; None if they are fewer than MIN_RUNGS."""
    if index < MIN_RUNGS:
        return None
    rung = ladder.rungs[index]
    return ladder.smallest(index).predicted(rung.flops, len(rung.losses))


def next_flops(ladder: Ladder) -> float:
    """Return the compute of the size after the largest, as far from it as that is from the one before."""
    *_, before, last = ladder.rungs
    return last.flops**2 / before.flops


def laws_sheet(found: Mapping[str, Ladder]) -> Sheet:
    """Return a line per kind: the numbers of its law, and what it predicts beyond the largest size."""
    sheet: Sheet = {}
    for kind, ladder in found.items():
        flops = next_flops(ladder)
        line = {
            "row": Cell(kind),
            "floor": _interval_cell(ladder.floor, ladder),
            "exponent": _interval_cell(ladder.exponent, ladder),
            "at FLOP": Cell(f"{flops:.2g}", value=flops),
            "predicted": _range_cell(ladder.predicted(flops), ladder),
        }
        add_line(sheet, line)
    return sheet


def decisions_sheet(found: Mapping[str, Ladder]) -> Sheet | None:
    """Return a line per size but the largest: how many pairs of kinds have the order of the largest size.

    The kinds are those with the sizes that most kinds have. They are compared by their losses at the size,
    and by the losses that the laws of the sizes up to it predict at the largest. None if fewer than two kinds
    have the same sizes.
    """
    ((sizes, num_kinds),) = Counter(ladder.sizes for ladder in found.values()).most_common(1)
    if num_kinds < 2:
        return None
    alike = [ladder for ladder in found.values() if ladder.sizes == sizes]
    largest = [ladder.rungs[-1].mean for ladder in alike]
    by_losses, by_laws = [], []
    for count in range(1, len(sizes)):
        by_losses.append(_pairs([ladder.rungs[count - 1].mean for ladder in alike], largest))
        if count < MIN_RUNGS:
            by_laws.append(Cell())
            continue
        predicted = [ladder.smallest(count).predicted(ladder.rungs[-1].flops).value for ladder in alike]
        by_laws.append(_pairs(predicted, largest))
    sizes_below = [*map(Cell, sizes[:-1])]
    return {"size": sizes_below, "by losses at it": by_losses, "by laws up to it": by_laws}


def _pairs(losses: Sequence[float], largest: Sequence[float]) -> Cell:
    share = float(decision_accuracy(np.array(losses), np.array(largest)))
    pairs = len(losses) * (len(losses) - 1) // 2
    return Cell(f"{share * pairs:g} of {pairs}", value=share)


def _interval_cell(interval: Interval, ladder: Ladder) -> Cell:
    if not ladder.degrees_of_freedom:
        return Cell(f"{interval.value:.2f}", value=interval.value)
    return Cell(f"{interval.value:.2f} [{interval.low:.2f}, {interval.high:.2f}]", value=interval.value)


def _range_cell(interval: Interval | None, ladder: Ladder) -> Cell:
    if interval is None:
        return Cell()
    if not ladder.degrees_of_freedom:
        return Cell(f"{interval.value:.3f}", value=interval.value)
    return Cell(f"{interval.low:.3f} to {interval.high:.3f}", value=interval.value)

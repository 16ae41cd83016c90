"""What a report's tables say, as cells made once: a terminal, Markdown and a browser show the same."""

import re
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from math import sqrt
from statistics import variance
from typing import NamedTuple

from experiments.experiment import Row, Table
from experiments.registry import REGISTRY, baseline_of, twin
from experiments.results import Result, Score, lengths, scores
from experiments.t5.tables import BASELINE_STD, COLUMNS

Finished = Mapping[str, list[Result]]  # row -> its seeds
HARD = "\N{NO-BREAK SPACE}"
ARROWS = {1: f"{HARD}▲", 0: "", -1: f"{HARD}▼"}
TEXTS = ("row", "inputs", "target", "prediction")  # headings of what is no number


class Cell(NamedTuple):
    """One cell of a sheet."""

    text: str = "–"
    best: bool = False


Sheet = dict[str, list[Cell]]  # heading -> a cell a line


def markdown(sheet: Sheet) -> str:
    """The sheet as a table of Markdown."""
    rule = "".join("|:---" if head in TEXTS else "|---:" for head in sheet)
    lines = [" | ".join(map(_markdown, cells)) for cells in zip(*sheet.values(), strict=True)]
    return "\n".join([f"| {' | '.join(sheet)} |", f"{rule}|", *(f"| {line} |" for line in lines)])


def _markdown(cell: Cell) -> str:
    return f"**{plain(cell.text)}**" if cell.best else plain(cell.text)


def plain(text: str) -> str:
    """``text`` as Markdown that shows it as it is."""
    return re.sub(r"([\\`*_|<\[&])", r"\\\1", text)


def base_of(table: Table) -> Row:
    """The row that those of ``table`` are compared with."""
    return REGISTRY[baseline_of(table.rows[0].name)]


def columns_of(table: Table, found: Finished) -> list[str]:
    """The paper's columns in which any row of ``table`` was scored."""
    return [c for c in COLUMNS if any(c in result.columns for row in table.rows for result in found[row.name])]


def noise(table: Table, found: Finished) -> dict[str, float]:
    """Column -> deviation over seeds, pooled over the rows and their baseline; without columns that never vary."""
    each = {c: pooled(table, found, lambda run, c=c: run.columns.get(c)) for c in columns_of(table, found)}
    return {c: std for c, std in each.items() if std}


def pooled(table: Table, found: Finished, value: Callable[[Result], float | None]) -> float:
    """The deviation over seeds of a value of runs, over all rows of ``table`` and their baseline; 0 if unknown."""
    rows = {twin(row.name): row.name for row in (*table.rows, base_of(table))}.values()
    samples = [[each for run in found[name] if (each := value(run)) is not None] for name in rows]
    freedom = sum(len(sample) - 1 for sample in samples if sample)
    return sqrt(sum(variance(s) * (len(s) - 1) for s in samples if len(s) > 1) / freedom) if freedom else 0.0


def sign(score: Score | None, baseline: Score | None, std: float) -> int | None:
    """1, -1: above, below the baseline by more than two deviations; 0: not so; None: one seed tells nothing."""
    if None in (score, baseline) or None in (score.std, baseline.std) or not std:
        return None
    delta = score.mean - baseline.mean
    return int(abs(delta) > 2 * std) * (1 if delta > 0 else -1)


def published(row: Row, column: str) -> Score | None:
    """The paper's score; its deviation is that of ten runs of the baseline."""
    return Score(row.paper[column], BASELINE_STD[column]) if column in row.paper else None


def scoreboard(table: Table, found: Finished) -> Sheet:
    """Every row: ours and the paper's score in every column, and what it cost."""
    base, stds, runs = base_of(table), noise(table, found), [found[row.name] for row in table.rows]
    sheet = {"row": [Cell(row.label) for row in table.rows]}
    baseline, ours = scores(found[base.name]), [scores(each) for each in runs]
    for c in columns_of(table, found):
        sheet[c] = _compared([each.get(c) for each in ours], baseline.get(c), stds.get(c, 0.0), partial(_text, 2))
        if base.paper:
            theirs = [published(row, c) for row in table.rows]
            sheet[f"{c}, paper"] = _compared(theirs, published(base, c), BASELINE_STD[c], lambda s: f"{s.mean:.2f}")
    perplexity = [lengths(each) for each in runs]
    for n in dict.fromkeys(n for at in perplexity for n in at):
        sheet[f"perplexity at {n} ×"] = [_cell(2, at.get(n)) for at in perplexity]
    losses = [Score.of(run.task_loss for run in each) for each in (*runs, found[base.name])]
    if any(losses[:-1]):
        lost = [Score(-each.mean, each.std) if each else None for each in losses]
        std = pooled(table, found, lambda run: run.task_loss)
        sheet["loss on tasks"] = _compared(lost[:-1], lost[-1], std, lambda s: _text(3, Score(-s.mean, s.std)))
    minutes = [Score.of(run.seconds / 60 for run in each) for each in runs]
    return sheet | {
        "held-out loss": [_cell(3, Score.of(run.held_out_loss for run in each)) for each in runs],
        "seeds": [Cell(str(len(each))) for each in runs],
        "minutes": [Cell(f"{time.mean:.1f}") if time else Cell() for time in minutes],
    }


def _compared(
    values: Sequence[Score | None], baseline: Score | None, std: float, show: Callable[[Score], str]
) -> list[Cell]:
    """Scores with an arrow where they differ from the baseline; within two deviations of the best they are bold."""
    means = [score.mean for score in values if score]
    best = max(means) - 2 * std if len(set(means)) > 1 else float("inf")  # all alike: none stands out
    return [
        Cell(show(score) + ARROWS[sign(score, baseline, std) or 0], score.mean >= best) if score else Cell()
        for score in values
    ]


def _text(digits: int, score: Score) -> str:
    return f"{score.mean:.{digits}f}" + (f"{HARD}±{HARD}{score.std:.{digits}f}" if score.std is not None else "")


def _cell(digits: int, score: Score | None) -> Cell:
    return Cell(_text(digits, score)) if score else Cell()

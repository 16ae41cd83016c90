"""What a report's tables say, as cells made once: a terminal, Markdown and a browser show the same."""

from collections.abc import Callable, Mapping
from functools import partial
from math import sqrt
from statistics import mean, variance
from typing import Literal

from experiments.console import Cell, Sheet
from experiments.report.comparison import Samples, compare
from experiments.report.results import Score, lengths
from experiments.runs.result import Result
from experiments.study.experiment import Row, Table
from experiments.study.registry import REGISTRY, baseline_of, twin
from experiments.study.t5.tables import BASELINE_STD, COLUMNS

Finished = Mapping[str, list[Result]]  # row -> its seeds
HARD = "\N{NO-BREAK SPACE}"
ARROWS = {1: f"{HARD}▲", 0: "", -1: f"{HARD}▼"}


def base_of(table: Table) -> Row:
    """The row that those of ``table`` are compared with."""
    return REGISTRY[baseline_of(table.rows[0].name)]


def columns_of(table: Table, found: Finished) -> list[str]:
    """The paper's columns in which any row of ``table`` was scored."""
    return [
        c for c in COLUMNS if any(c in result.columns for row in table.rows for result in found[row.name])
    ]


def noise(table: Table, found: Finished) -> dict[str, float]:
    """Column -> deviation over seeds, pooled over the rows and their baseline; without columns that never
    vary.
    """
    each = {
        c: pooled(samples_of(table, found, lambda run, c=c: run.columns.get(c)))
        for c in columns_of(table, found)
    }
    return {c: std for c, std in each.items() if std}


def pooled(samples: Samples) -> float:
    """The deviation over seeds, over all rows; 0 if unknown."""
    rows = [[*row.values()] for row in samples.values() if row]
    freedom = sum(len(row) - 1 for row in rows)
    return (
        sqrt(sum(variance(row) * (len(row) - 1) for row in rows if len(row) > 1) / freedom)
        if freedom
        else 0.0
    )


def samples_of(table: Table, found: Finished, value: Callable[[Result], float | None]) -> Samples:
    """A value of the runs of each row of ``table`` and of their baseline; rows that are one have one name."""
    rows = {twin(row.name): row.name for row in (*table.rows, base_of(table))}
    return {
        one: {run.seed: each for run in found[name] if (each := value(run)) is not None}
        for one, name in rows.items()
    }


def sign(score: Score | None, baseline: Score | None, std: float) -> int | None:
    """The paper's rule: 1, -1 above, below the baseline by more than two deviations of a run; 0 not so."""
    if None in (score, baseline):
        return None
    delta = score.mean - baseline.mean
    return int(abs(delta) > 2 * std) * (1 if delta > 0 else -1)


def published(row: Row, column: str) -> Score | None:
    """The paper's score; its deviation is that of ten runs of the baseline."""
    return Score(row.paper[column], BASELINE_STD[column]) if column in row.paper else None


def scoreboard(table: Table, found: Finished) -> Sheet:
    """Every row: ours and the paper's score in every column, and what it cost."""
    base, runs = base_of(table), [found[row.name] for row in table.rows]
    sheet = {"row": [Cell(row.label) for row in table.rows]}
    for c in columns_of(table, found):
        sheet[c] = _ours(table, found, lambda run, c=c: run.columns.get(c), partial(_text, 2))
        if base.paper:
            sheet[f"{c}, paper"] = _papers(table, c)
    perplexity = [lengths(each) for each in runs]
    for n in dict.fromkeys(n for at in perplexity for n in at):
        sheet[f"perplexity at {n} ×"] = [_cell(2, at.get(n)) for at in perplexity]
    if any(run.task_loss is not None for each in runs for run in each):
        sheet["loss on tasks"] = _ours(table, found, lambda run: run.task_loss, partial(_text, 3), better=-1)
    minutes = [Score.of(run.seconds / 60 for run in each) for each in runs]
    return sheet | {
        "held-out loss": [_cell(3, Score.of(run.held_out_loss for run in each)) for each in runs],
        "seeds": [Cell(str(len(each))) for each in runs],
        "minutes": [Cell(f"{time.mean:.1f}") if time else Cell() for time in minutes],
    }


def _ours(
    table: Table,
    found: Finished,
    value: Callable[[Result], float | None],
    show: Callable[[Score], str],
    better: Literal[1, -1] = 1,
) -> list[Cell]:
    """Our rows, with an arrow where they differ from the baseline by more than chance; more, or less, is
    ``better``.

    The best is bold, and what cannot be told from it, where something can.
    """
    names, base = [twin(row.name) for row in table.rows], twin(base_of(table).name)
    samples = samples_of(table, found, lambda run: None if value(run) is None else better * value(run))
    there = [name for name in names if samples[name]]
    best = max(there, key=lambda name: mean(samples[name].values()), default=base)
    told = {name: compare(samples, best, name) for name in there}
    bold = {name for name in told if told[name] == 0 and 1 in told.values()}
    cells = []
    for name, row in zip(names, table.rows, strict=True):
        score = Score.of(map(value, found[row.name]))
        arrow = ARROWS[compare(samples, name, base) or 0]
        cells.append(Cell(show(score) + arrow, name in bold) if score else Cell())
    return cells


def _papers(table: Table, column: str) -> list[Cell]:
    """The paper's rows by its rule: an arrow beyond two deviations of the baseline, bold within two of the
    best.
    """
    base, std = published(base_of(table), column), BASELINE_STD[column]
    rows = [published(row, column) for row in table.rows]
    best = max((score.mean for score in rows if score), default=0.0) - 2 * std
    return [
        Cell(f"{score.mean:.2f}{ARROWS[sign(score, base, std) or 0]}", score.mean >= best)
        if score
        else Cell()
        for score in rows
    ]


def _text(digits: int, score: Score) -> str:
    return f"{score.mean:.{digits}f}" + (
        f"{HARD}±{HARD}{score.std:.{digits}f}" if score.std is not None else ""
    )


def _cell(digits: int, score: Score | None) -> Cell:
    return Cell(_text(digits, score)) if score else Cell()

"""What a report says of a table: scores beside the paper's, differences from the baseline, order of rows."""

from collections.abc import Iterable
from itertools import product
from statistics import mean
from typing import Literal

from experiments.console import Cell, Sheet
from experiments.report.comparison import (
    Finished,
    Samples,
    Score,
    Value,
    agreement,
    compare,
    in_column,
    perplexities,
    pooled,
)
from experiments.study.experiment import Row
from experiments.study.t5.tables import BASELINE_STD

HARD = "\N{NO-BREAK SPACE}"
ARROWS = {1: f"{HARD}▲", 0: "", None: "", -1: f"{HARD}▼"}
UNLIKE = "≠"  # behind the name of a row whose runs were made of other things than those beside it


def scoreboard(finished: Finished) -> Sheet:
    """Every row: our and the paper's score in every column, and what it cost."""
    rows = finished.table.rows
    runs = [finished.of(row) for row in rows]
    sheet = {"row": [Cell(row.label) for row in rows]}
    for column in finished.columns:
        sheet[column] = _measured(finished, in_column(column), digits=2)
        if finished.baseline.paper:
            sheet[f"{column}, paper"] = _published(finished, column)
    by_length = [perplexities(seeds) for seeds in runs]
    for times in dict.fromkeys(times for scores in by_length for times in scores):
        sheet[f"perplexity at {times} ×"] = [_cell(2, scores.get(times)) for scores in by_length]
    if any(run.task_loss is not None for seeds in runs for run in seeds):
        sheet["loss on tasks"] = _measured(finished, lambda run: run.task_loss, digits=3, better=-1)
    minutes = [Score.of(run.seconds / 60 for run in seeds) for seeds in runs]
    return sheet | {
        "held-out loss": [_cell(3, Score.of(run.held_out_loss for run in seeds)) for seeds in runs],
        "seeds": [Cell(str(len(seeds))) for seeds in runs],
        "minutes": [Cell(f"{score.mean:.1f}") if score else Cell() for score in minutes],
    }


def _measured(finished: Finished, value: Value, digits: int, better: Literal[1, -1] = 1) -> list[Cell]:
    """A value of the runs, with an arrow where rows differ from the baseline by more than chance.

    More (1) or less (-1) is ``better``. Bold: the best, and rows that do not differ from it if any row does.
    """
    values = finished.samples(value)
    samples = {row: {seed: better * x for seed, x in seeds.items()} for row, seeds in values.items()}
    keys, baseline = [finished.key(row) for row in finished.table.rows], finished.key(finished.baseline)
    scored = [key for key in keys if samples[key]]
    best = max(scored, key=lambda key: mean(samples[key].values()), default=baseline)
    below_best = {key: compare(samples, best, key) for key in scored}
    cells = []
    for key in keys:
        arrow = ARROWS[compare(samples, key, baseline)]
        bold = below_best.get(key) == 0 and 1 in below_best.values()
        score = Score.of(values[key].values())
        cells.append(Cell(_text(digits, score) + arrow, bold) if score else Cell())
    return cells


def _published(finished: Finished, column: str) -> list[Cell]:
    """The paper's rows, by its rule: arrows beyond two deviations of the base, bold within two of best."""
    std, scores = BASELINE_STD[column], [row.paper.get(column) for row in finished.table.rows]
    best = max((score for score in scores if score is not None), default=0.0)
    return [
        Cell()
        if score is None
        else Cell(f"{score:.2f}{ARROWS[published_sign(finished, row, column)]}", score >= best - 2 * std)
        for row, score in zip(finished.table.rows, scores, strict=True)
    ]


def published_sign(finished: Finished, row: Row, column: str) -> int | None:
    """The paper's rule: 1, -1 above, below the baseline by more than two deviations of a run; 0: neither.

    None where the paper has no score. The deviation is that of ten runs of the baseline.
    """
    score, baseline = row.paper.get(column), finished.baseline.paper.get(column)
    if score is None or baseline is None:
        return None
    delta = score - baseline
    return int(abs(delta) > 2 * BASELINE_STD[column]) * (1 if delta > 0 else -1)


def _text(digits: int, score: Score) -> str:
    deviation = "" if score.std is None else f"{HARD}±{HARD}{score.std:.{digits}f}"
    return f"{score.mean:.{digits}f}{deviation}"


def _cell(digits: int, score: Score | None) -> Cell:
    return Cell(_text(digits, score)) if score else Cell()


def differences(finished: Finished) -> str:
    """How many of the paper's differences from the baseline ours show; rows with one seed show none."""
    base, pairs = finished.baseline, []
    rows = [row for row in finished.table.rows if row.changes != base.changes]
    samples = {column: finished.samples(in_column(column)) for column in finished.columns}
    for row, column in product(rows, samples):
        paper = published_sign(finished, row, column)
        measured = compare(samples[column], finished.key(row), finished.key(base))
        pairs += [(paper, measured)] if paper and measured is not None else []
    if not pairs and (len(finished.of(base)) < 2 or all(len(finished.of(row)) < 2 for row in rows)):
        text = "With one seed, differences from the baseline cannot be told from noise"
        return f"{text}; run with --seeds 2 or more."
    if not pairs:
        text = "Differences from the baseline: where the paper has some, our scores"
        return f"{text} are the same with each seed."
    same, within = sum(paper == x for paper, x in pairs), sum(x == 0 for _, x in pairs)
    return (
        f"Differences from the baseline: of the paper's {len(pairs)} (▲ or ▼) in scores that we have two "
        f"seeds of, ours agree with {same} and contradict {len(pairs) - same - within}; {within} are within "
        "our noise."
    )


def ranks(finished: Finished) -> tuple[Sheet | None, str]:
    """The rank of each row in our order and the paper's, how alike they are; no sheet below three rows."""
    columns = set(finished.columns)
    scored = {
        row: [run for run in runs if run.columns.keys() >= columns] for row, runs in finished.runs.items()
    }
    rows = [row for row in finished.table.rows if scored[row.name] and row.paper.keys() >= columns]
    if len(rows) < 3 or not columns:
        return None, f"Orders are compared if three or more rows have finished; there are {len(rows)}."
    criteria = _criteria(Finished(finished.table, finished.baseline, scored), rows)
    first = next(iter(criteria.values()))[1]
    order = sorted(rows, key=lambda row: -first[row.name])
    sheet, texts = {"row": [Cell(row.label) for row in order]}, []
    for name, (measured, paper) in criteria.items():
        means = {row: mean(seeds.values()) for row, seeds in measured.items()}
        measured_rank, paper_rank = _average_ranks(means), _average_ranks(paper)
        sheet[name] = [Cell(f"{measured_rank[row.name]:g} ({paper_rank[row.name]:g})") for row in order]
        if tau := agreement(measured, paper, seed=0):
            texts.append(f"{name} {tau}")
    taus = ", ".join(texts) or "unknown, as all rows are alike"
    return sheet, f"Kendall's τ between the two orders (95 % interval): {taus}."


def _average_ranks(values: dict[str, float]) -> dict[str, float]:
    """1 for the largest; equal values share the mean of their ranks."""
    ranked = list(values.values())
    above = {name: sum(other > value for other in ranked) for name, value in values.items()}
    return {name: above[name] + (ranked.count(value) + 1) / 2 for name, value in values.items()}


def _criteria(finished: Finished, rows: list[Row]) -> dict[str, tuple[Samples, dict[str, float]]]:
    """What the rows are ordered by -> measured values, and the paper's; in all of them more is better."""

    def measured(value: Value) -> Samples:
        samples = finished.samples(value)
        return {row.name: samples[finished.key(row)] for row in rows}

    papers = {column: {row.name: row.paper[column] for row in rows} for column in finished.columns}
    criteria = {column: (measured(in_column(column)), paper) for column, paper in papers.items()}
    noise = {column: pooled(finished.samples(in_column(column))) for column in finished.columns}
    if noise := {column: std for column, std in noise.items() if std}:
        # columns have scores of different spread: in deviations each weighs the same
        published = {row.name: mean(row.paper[c] / BASELINE_STD[c] for c in noise) for row in rows}
        scaled = measured(lambda run: mean(run.columns[column] / std for column, std in noise.items()))
        criteria = {"average": (scaled, published)} | criteria
    if all(run.task_loss is not None for row in rows for run in finished.of(row)):
        first = next(iter(criteria.values()))[1]
        criteria["loss on tasks"] = (measured(lambda run: run.task_loss and -run.task_loss), first)
    return criteria


def marked(sheet: Sheet, labels: Iterable[str]) -> Sheet:
    """The sheet with the mark ≠ behind the rows of these ``labels``."""
    marks = {label: f"{label} {UNLIKE}" for label in labels}
    return sheet | {"row": [cell._replace(text=marks.get(cell.text, cell.text)) for cell in sheet["row"]]}

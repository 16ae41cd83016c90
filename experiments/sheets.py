"""What a report's tables say, as cells made once: a terminal, Markdown and a browser show the same."""

import re
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Literal

from experiments.experiment import Row, Table
from experiments.registry import REGISTRY, baseline_of, build
from experiments.results import Result, Score, lengths, losses, scores
from experiments.t5.tables import COLUMNS
from lm.config import diff

Finished = Mapping[str, list[Result]]  # row -> its seeds


@dataclass(frozen=True)
class Cell:
    """One cell; a terminal leaves out its ``note``."""

    text: str = "–"
    note: str = ""
    style: Literal["plain", "best", "code"] = "plain"


Sheet = dict[str, list[Cell]]  # heading -> a cell a line
WIDE = ("changes", "cost a run")  # headings that a terminal has no room for


def markdown(sheet: Sheet) -> str:
    """The sheet as a table of Markdown."""
    rule = "".join("|:---" if head in ("row", "changes", "") else "|---:" for head in sheet)
    lines = [" | ".join(map(_markdown, cells)) for cells in zip(*sheet.values(), strict=True)]
    return "\n".join([f"| {' | '.join(sheet)} |", f"{rule}|", *(f"| {line} |" for line in lines)])


def _markdown(cell: Cell) -> str:
    if cell.style == "code":
        return "`" + cell.text.replace("`", "'").replace("|", r"\|") + "`"
    text = plain(cell.text)
    return (f"**{text}**" if cell.style == "best" else text) + (f" {cell.note}" if cell.note else "")


def plain(text: str) -> str:
    """``text`` as Markdown that shows it as it is."""
    return re.sub(r"([\\`*_|<\[])", r"\\\1", text)


def changes_of(row: Row, scale: str) -> str:
    """What a row changes, as settings."""
    changed = diff(build(baseline_of(row.name), scale), build(row.name, scale))
    return ", ".join(f"{p}={new:.4g}" if type(new) is float else f"{p}={new}" for p, (_, new) in changed.items())


def columns_of(table: Table, found: Finished) -> list[str]:
    """The paper's columns in which any row of ``table`` was scored."""
    return [c for c in COLUMNS if any(c in result.columns for row in table.rows for result in found[row.name])]


def scoreboard(table: Table, found: Finished, scale: str) -> Sheet:
    """Every row: what it changes, ours and the paper's score in every column, and what it cost."""
    rows, base = table.rows, REGISTRY[baseline_of(table.rows[0].name)]
    baseline, ours = scores(found[base.name]), [scores(found[row.name]) for row in rows]
    changed = [changes_of(row, scale) for row in rows]
    sheet = {"row": [Cell(row.label) for row in rows]}
    for c in columns_of(table, found):
        least = _threshold([score[c] for score in ours if c in score])
        sheet[c] = [_score(score.get(c), baseline.get(c), least) for score in ours]
        if base.paper:
            sheet[f"{c}, paper"] = [_paper(row.paper.get(c), base.paper[c]) for row in rows]
    perplexity = [lengths(found[row.name]) for row in rows]
    for n in dict.fromkeys(n for at in perplexity for n in at):
        sheet[f"perplexity at {n} ×"] = [_plain(at.get(n)) for at in perplexity]
    return sheet | {
        "held-out loss": [_plain(losses(found[row.name])) for row in rows],
        "seeds": [Cell(str(len(found[row.name]))) for row in rows],
        "cost a run": [Cell(_cost(found[row.name])) for row in rows],
        "changes": [Cell(new, style="code") if new else Cell("the baseline") for new in changed],
    }


def _threshold(values: list[Score]) -> float:
    """The least score that is not significantly below the best; with one seed a run, the best itself."""
    top = max(values, key=lambda score: score.mean)
    if top.mean == min(score.mean for score in values):
        return float("inf")  # all alike: none stands out
    return top.mean - 2 * (top.std or 0.0)


def _score(score: Score | None, baseline: Score | None, threshold: float) -> Cell:
    if score is None:
        return Cell()
    text = f"{score.mean:.2f}" + (f" ± {score.std:.2f}" if score.std is not None else "")
    note = _delta(score.mean, baseline.mean) if baseline else ""
    return Cell(text, note, "best" if score.mean >= threshold else "plain")


def _paper(score: float | None, baseline: float) -> Cell:
    return Cell() if score is None else Cell(f"{score:.2f}", _delta(score, baseline))


def _plain(score: Score | None) -> Cell:
    if score is None:
        return Cell()
    return Cell(f"{score.mean:.3f}" + (f" ± {score.std:.3f}" if score.std is not None else ""))


def _delta(value: float, baseline: float) -> str:
    return f"({value - baseline:+.2f})" if value != baseline else ""


def _cost(found: list[Result]) -> str:
    if not found:
        return "–"
    seconds = sum(result.seconds for result in found) / len(found)
    tokens = sum(result.tokens for result in found) / len(found)
    return f"{seconds / 60:.1f} min, {tokens / 1e6:.1f} M tokens"

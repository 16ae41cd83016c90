"""What the commands of ``lm`` print that only need settings and finished runs."""

import shutil
from pathlib import Path

from rich.console import Console
from rich.markup import escape
from rich.table import Table as Grid

from experiments import report
from experiments.experiment import Experiment
from experiments.registry import baseline_of, build, find, find_one, tables
from experiments.results import lengths, losses, results, scores
from experiments.t5.tables import COLUMNS
from lm.config import comments, diff, leaves

# A pipe has no width of its own: give lines room there, so that nothing is cut in a file.
CONSOLE = Console(width=None if Console().is_terminal else max(140, shutil.get_terminal_size().columns))


def show_rows(pattern: str, scale: str, runs: Path) -> None:
    """Print one line a row: its name, label, changes, finished seeds."""
    rows = find(pattern)
    for table in tables(rows):
        grid = Grid(
            "row", "in the paper", "changes", "finished", title=f"{table.name}: {table.title}", title_justify="left"
        )
        for row in (row for row in table.rows if row in rows):
            changed = diff(build(baseline_of(row.name), scale), build(row.name, scale))
            text = ", ".join(f"{path}={new}" for path, (_, new) in changed.items()) or "(the baseline)"
            finished = len(results(row, scale, runs))
            grid.add_row(row.name, escape(row.label), escape(text), f"{finished} seed{'s' * (finished != 1)}")
        CONSOLE.print(grid)


def show_settings(name: str, scale: str) -> None:
    """Print every setting of a row with its value and what it means."""
    meaning = comments(Experiment)
    grid = Grid("setting", "value", "meaning [unit]", title=f"{name} at scale {scale}", title_justify="left")
    for path, value in leaves(build(name, scale)):
        grid.add_row(path, escape(str(value)), escape(meaning.get(path, "")))
    CONSOLE.print(grid)


def show_diff(name: str, other: str, scale: str) -> None:
    """Print the settings in which row ``name`` differs from row ``other``, or from its baseline."""
    other = other or baseline_of(find_one(name).name)
    changed = diff(build(other, scale), build(name, scale))
    if not changed:
        CONSOLE.print(f"{name} and {other} are the same experiment at scale {scale}.")
    for path, (old, new) in changed.items():
        CONSOLE.print(f"{path}: {old} → {new}", highlight=False)


def show_report(pattern: str, scale: str, runs: Path) -> None:
    """Write the report of the tables that ``pattern`` names, and print them."""
    wanted = tables(find(pattern))
    path = report.write_report(wanted, scale, runs)
    for table in wanted:
        CONSOLE.print(scoreboard(table, scale, runs))
    CONSOLE.print(
        f"Report: {path}\nPlots:  {', '.join(str(p) for p in sorted(path.parent.glob('*.png')))}", highlight=False
    )


def scoreboard(table, scale: str, runs: Path) -> Grid:
    """One table for the terminal: each column's score of ours beside the paper's."""
    found = {row.name: scores(results(row, scale, runs)) for row in table.rows}
    columns = [c for c in COLUMNS if any(c in ours for ours in found.values())]
    beside = "; ours │ the paper's" if any(row.paper for row in table.rows) else ""
    grid = Grid("row", title=f"{table.name}: {table.title} (scale {scale}{beside})", title_justify="left")
    for column in columns:
        grid.add_column(column, justify="right")
    longer = next(filter(None, (list(lengths(results(row, scale, runs))) for row in table.rows)), [])
    for times in longer:
        grid.add_column(f"perplexity at {times} ×", justify="right")
    grid.add_column("held-out loss", justify="right")
    for row in table.rows:
        ours = found[row.name]
        cells = [_score(ours.get(c)) + (f" │ {row.paper[c]:5.2f}" if row.paper else "") for c in columns]
        held_out = losses(results(row, scale, runs))
        perplexity = lengths(results(row, scale, runs))
        cells += [_score(perplexity.get(times)) for times in longer]
        grid.add_row(escape(row.label), *cells, _score(held_out))
    return grid


def _score(score) -> str:
    if score is None:
        return "–"
    return f"{score.mean:.2f}" if score.std is None else f"{score.mean:.2f} ± {score.std:.2f}"

"""What the commands of ``lm`` print that only need settings and finished runs."""

import shutil
from pathlib import Path

from rich.box import SIMPLE_HEAD
from rich.console import Console
from rich.markup import escape
from rich.table import Column
from rich.table import Table as Grid

from experiments.cli import RUNS
from experiments.experiment import Changes, Experiment, Table
from experiments.registry import baseline_of, build, find, find_one, tables
from experiments.results import results
from experiments.sheets import Sheet
from lm.config import comments, diff, leaves

# A pipe has no width of its own: give lines room there, so that nothing is cut in a file.
CONSOLE = Console(width=None if Console().is_terminal else max(160, shutil.get_terminal_size().columns))


def show_rows(pattern: str = "*", /, scale: str = "nano", runs: Path = RUNS, names: bool = False) -> None:
    """List the rows of the study, what each changes, and how many seeds of it have finished.

    Args:
        pattern: shell-style pattern over rows and tables, such as 't5/6-*'.
        scale: size of the study: nano, mini, mini-real or base.
        runs: folder that holds the runs.
        names: print the names alone, one a line.
    """
    rows = find(pattern)
    if names:
        print("\n".join(row.name for row in rows))
        return
    for table in tables(rows):
        title = f"{table.name}: {table.title}"
        listed = listing("row", "in the paper", "changes", "finished", title=title)
        for row in (row for row in table.rows if row in rows):
            changed = diff(build(baseline_of(row.name), scale), build(row.name, scale))
            new = (f"{p}={v:.4g}" if type(v) is float else f"{p}={v}" for p, (_, v) in changed.items())
            text = ", ".join(new) or "(the baseline)"
            finished = len(results(row, scale, runs, complain=lambda line: None))
            listed.add_row(row.name, escape(row.label), escape(text), f"{finished} seed{'s' * (finished != 1)}")
        CONSOLE.print(listed)


def show_settings(name: str, /, scale: str = "nano") -> None:
    """Show every setting of a row, with its meaning and unit.

    Args:
        name: row of the registry, such as t5/6-corruption-rate/15.
        scale: size of the study: nano, mini, mini-real or base.
    """
    meaning = comments(Experiment)
    grid = listing("setting", "value", "meaning [unit]", title=f"{name} at scale {scale}")
    for path, value in leaves(build(name, scale)):
        grid.add_row(path, escape(str(value)), escape(meaning.get(path, "")))
    CONSOLE.print(grid)


def show_diff(name: str, other: str = "", /, scale: str = "nano") -> None:
    """Show the settings in which a row differs from another.

    Args:
        name: row of the registry.
        other: row to compare with; by default the paper's baseline, or the first row of another table.
        scale: size of the study: nano, mini, mini-real or base.
    """
    other = other or baseline_of(find_one(name).name)
    changed = diff(build(other, scale), build(name, scale))
    if not changed:
        CONSOLE.print(f"{name} and {other} are the same experiment at scale {scale}.")
    for path, (old, new) in changed.items():
        CONSOLE.print(f"{path}: {old} → {new}", highlight=False)


def show_report(
    pattern: str = "t5/*", /, scale: str = "nano", runs: tuple[str, ...] = (str(RUNS),), watch: bool = False
) -> None:
    """Write the tables of all finished runs beside the paper's: Markdown, a page for the browser, CSV and pictures.

    Args:
        pattern: shell-style pattern over rows and tables.
        scale: size of the study: nano, mini, mini-real or base.
        runs: one or more folders that hold runs, gs:// included; the report goes into the first.
        watch: write it again whenever a run goes on, until interrupted.
    """
    from experiments import report  # whose pictures and page need more than listing rows does

    wanted = tables(find(pattern))

    if watch:
        report.watch(wanted, scale, runs, _say)
    else:
        print_report(wanted, scale, runs)


def print_report(wanted: list[Table], scale: str, runs: tuple[str, ...], given: Changes | None = None) -> None:
    """Write the report on tables, and print what a terminal shows of it; ``given`` as of ``results``."""
    from experiments import report

    written = report.write_report(wanted, scale, runs, given=given)
    titles = {table.name: table.title for table in wanted}
    for name, (scores, *places) in written.sheets.items():
        show_sheet(f"{name}: {titles[name]} (scale {scale})", scores)
        for sheet in places:
            show_sheet("Places: ours (the paper's)", sheet)
        for line in written.notes[name]:
            _say(line)
    for line in written.left_out:
        _say(f"not counted: {line}")
    _say(f"Report: {written.path.parent}/report.md, .html, .csv")


def _say(text: str) -> None:
    CONSOLE.print(text, highlight=False, markup=False, soft_wrap=True)


def listing(*heads: str, title: str | None = None) -> Grid:
    """A table of texts, of which none is cut: what is too wide goes on in the next line, but for the name in front."""
    columns = [Column(head, overflow="fold", no_wrap=head == heads[0]) for head in heads]
    return Grid(*columns, title=title, title_justify="left")


def show_sheet(title: str, sheet: Sheet) -> None:
    """Print a sheet, in as many blocks of columns as the terminal's width asks for, each with the rows' names."""
    (first, names), *others = sheet.items()
    parts: list[Sheet] = [{first: names}]
    for head, cells in others:
        if len(parts[-1]) > 1 and _width(parts[-1] | {head: cells}) > CONSOLE.width:
            parts.append({first: names})
        parts[-1][head] = cells
    for number, part in enumerate(parts):
        CONSOLE.print(_grid("" if number else title, part))


def _width(sheet: Sheet) -> int:
    """Of a sheet in the terminal [characters]."""
    return 1 + sum(max(len(head), *(len(cell.text) for cell in cells)) + 2 for head, cells in sheet.items())


def _grid(title: str, sheet: Sheet) -> Grid:
    made = Grid(title=escape(title), title_justify="left", box=SIMPLE_HEAD, pad_edge=False, padding=(0, 1, 0, 0))
    for head in sheet:
        made.add_column(escape(head), justify="left" if head == "row" else "right", overflow="fold")
    for cells in zip(*sheet.values(), strict=True):
        made.add_row(*(f"[bold]{escape(cell.text)}[/]" if cell.best else escape(cell.text) for cell in cells))
    return made

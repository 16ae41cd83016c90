"""``lm list``: the tables of the study, or their rows, what each changes, and which have finished."""

import shlex
from collections.abc import Sequence
from pathlib import Path

from rich.markup import escape
from rich.table import Table as Grid

from experiments.cli.settings import Runs, Scale
from experiments.console import NAMES_CONSOLE, NARROW, RUNS, listing, print_line
from experiments.study.paths import changed_runs, check_runs, row_folder, rows_with_runs, seed_folders
from experiments.study.plugins import plugin_arguments
from experiments.study.registry import baseline_of, build, equal_rows_among, find, tables_of
from experiments.study.scales import DEFAULT_SCALE, SCALES
from experiments.study.settings_diff import relevant_diff
from experiments.study.table import Row
from experiments.study.words import shown_value


def list_rows(
    pattern: str = "", /, scale: Scale = DEFAULT_SCALE, runs: Runs = RUNS, names: bool = False
) -> None:
    """List the tables of the study; with a pattern, their rows: what each changes, and its finished seeds.

    "2 changed" counts finished runs with settings of your own; lm report --variants shows them.

        lm list
        lm list 't5/6-*' --scale mini

    Args:
        pattern: Shell-style pattern of rows or tables, such as 't5/6-*'. Left out, tables are listed.
        names: Print only the names of rows, one per line.
    """
    rows = find(pattern or "*")
    if names:
        print("\n".join(row.name for row in rows))
        return
    check_runs(runs)
    trained = rows_with_runs(runs, scale)
    if not pattern:
        _list_tables(rows, scale, runs, trained)
        _print_other_scales(rows, scale, runs)
        return
    for table in tables_of(rows):
        prefix = f"{table.name}/" if NAMES_CONSOLE.width < NARROW else ""
        title = f"{table.name}{'/ROW' * bool(prefix)}: {table.title}"
        label = "in the paper" if any(row.published for row in table.rows) else "label"
        has_labels = any(row.label != row.name.removeprefix(f"{table.name}/") for row in table.rows)
        listed = listing("row", *[label] * has_labels, "changes", "finished", title=title)
        for row in table.rows:
            if row not in rows:
                continue
            finished = "not run" if row.needs else finished_text(row.name, scale, runs, trained)
            label_cells = [escape(row.label)] * has_labels
            listed.add_row(
                row.name.removeprefix(prefix), *label_cells, escape(changes_text(row, scale)), finished
            )
        NAMES_CONSOLE.print(listed)
    _print_other_scales(rows, scale, runs, pattern)


def _list_tables(rows: Sequence[Row], scale: str, runs: Path, trained: Sequence[str]) -> None:
    """Print a line per table of these rows, under the name of its paper, and how its rows are listed."""
    tables = tables_of(rows)
    finished = {
        table.name: sum(finished_seeds(row.name, scale, runs, trained) > 0 for row in table.rows)
        for table in tables
    }
    any_finished = any(finished.values())
    listed = Grid(box=None, pad_edge=False, padding=(0, 1, 0, 0))
    for head in ("table", "what it compares", "rows", *["finished"] * any_finished):
        listed.add_column(head, justify="right" if head in ("rows", "finished") else "left")
    paper = None
    for table in tables:
        if table.paper is not None and table.paper is not paper:
            listed.add_row("", f"[bold]{escape(table.paper.name)}, {escape(table.paper.citation)}[/]")
        paper = table.paper
        counts = [str(len(table.rows)), *[str(finished[table.name] or "")] * any_finished]
        listed.add_row(table.name, escape(table.title), *counts)
    NAMES_CONSOLE.print(listed)
    print_line("lm list TABLE lists its rows; lm show ROW --diff says what a row changes")


def _print_other_scales(rows: Sequence[Row], scale: str, runs: Path, *pattern: str) -> None:
    """Print a line for each other scale at which rows have finished, with the command that lists them."""
    for name, count in rows_at_other_scales(rows, scale, runs).items():
        words = ["lm", *plugin_arguments(), "list", *pattern, "--scale", name]
        if runs != RUNS:
            words += ["--runs", str(runs)]
        rows_of_scale = f"{count} row{'s' * (count != 1)} of these"
        print_line(f"{rows_of_scale} finished at scale {name}: {shlex.join(words)} shows which")


def changes_text(row: Row, scale: str) -> str:
    """Return what a row changes in its baseline, or what it needs before it can be built."""
    if row.needs:
        return f"needs {', '.join(row.needs)}"
    changed = relevant_diff(build(baseline_of(row.name), scale), build(row.name, scale))
    parts = [changed_setting(row, path, new) for path, (_, new) in changed.items()]
    return ", ".join(parts) or "(the baseline)"


def changed_setting(row: Row, path: str, value: object) -> str:
    """Return a setting that a row changes, and how it follows from the scale: "model.d_model=128 (x 2)"."""
    shown = shown_value(value) if isinstance(value, float) else str(value)
    derivation = row.derivation(path)
    return f"{path}={shown} ({derivation})" if derivation else f"{path}={shown}"


def rows_at_other_scales(rows: Sequence[Row], scale: str, runs: Path) -> dict[str, int]:
    """Return {another scale: how many of ``rows`` have finished there}, for scales with any."""
    counts = {}
    for name in SCALES:
        if name != scale and (trained := rows_with_runs(runs, name)):
            counts[name] = sum(finished_seeds(row.name, name, runs, trained) > 0 for row in rows)
    return {name: count for name, count in counts.items() if count}


def finished_text(row: str, scale: str, runs: Path, trained: Sequence[str]) -> str:
    """Return how many seeds of a row have finished, and how many runs with changed settings."""
    finished = finished_seeds(row, scale, runs, trained)
    by_hand = sum(changed_runs(runs, scale, name) for name in {row, *equal_rows_among(row, trained, scale)})
    seeds = [f"{finished} seed{'s' * (finished != 1)}"] if finished or not by_hand else []
    own = [f"{by_hand} changed"] if by_hand else []
    return ", ".join(seeds + own)


def finished_seeds(row: str, scale: str, runs: Path, trained: Sequence[str]) -> int:
    """Return how many seeds of a row, or of a row that is the same experiment, have scores.

    ``trained``: the rows that have runs at this scale, which alone are compared with the row.
    """
    first = next(equal_rows_among(row, trained, scale), None)
    if first is None:
        return 0
    return sum((seed / "scores.json").exists() for seed in seed_folders(row_folder(runs, scale, first, {})))

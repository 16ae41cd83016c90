"""``lm ladder``: how loss falls with compute, and what that predicts."""

from pathlib import Path

from experiments.cli.settings import Scale, first_folder
from experiments.console import CONSOLE, RUNS, print_line, show_sheet
from experiments.study.registry import find, tables_of
from experiments.study.scales import DEFAULT_SCALE
from lm.config.base import SettingError


def ladder(
    pattern: str,
    /,
    scale: Scale = DEFAULT_SCALE,
    runs: tuple[str, ...] = (str(RUNS),),
    out: Path | None = None,
) -> None:
    """Fit power laws of loss in compute to a table of sizes, predict larger ones, and draw them.

    Rows are called KIND-xSIZE. A kind needs three sizes; from the fourth on, the loss of each is also
    predicted by the smaller ones, which shows how far the law can be trusted.

        lm ladder ladder --scale mini
        lm ladder history-budgets --scale mini

    Args:
        pattern: Shell-style pattern of tables, such as 'history-*'.
        runs: One or more folders of runs, also gs://.
        out: Picture to write, .png, .svg or .pdf; by default TABLE.png.
    """
    from experiments.figures.draw import check_format, save_figure
    from experiments.report.ladder import NO_INTERVALS, NOTE, check_rungs, ladder_sheets, ladders
    from experiments.report.ladder_figure import ladder_figure
    from experiments.report.report import compare_tables

    first_folder(runs)
    tables = tables_of(find(pattern))
    check_rungs(tables)
    if out and len(tables) > 1:
        names = ", ".join(table.name for table in tables)
        raise SettingError(f"--out {out} is one picture: name one of the tables {names}, or leave it out")
    if out:
        check_format(out)
    for comparison in compare_tables(tables, scale, runs, {}, print_line):
        picture = out or Path(f"{comparison.table.name.replace('/', '-')}.png")
        found = ladders(comparison)
        for title, sheet in ladder_sheets(found).items():
            show_sheet(title, sheet)
        CONSOLE.print(NOTE, highlight=False)
        if not all(each.degrees_of_freedom for each in found.values()):
            CONSOLE.print(NO_INTERVALS, highlight=False)
        save_figure(ladder_figure(found), picture, comparison.table.title)
        print_line(f"{picture}: {comparison.table.title}")

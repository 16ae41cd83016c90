"""``lm power``: how small a difference the tables of the study can tell."""

from experiments.cli.settings import Scale
from experiments.console import RUNS, print_line, show_sheet
from experiments.study.registry import find, tables_of
from experiments.study.scales import DEFAULT_SCALE


def power(pattern: str, /, scale: Scale = DEFAULT_SCALE, runs: tuple[str, ...] = (str(RUNS),)) -> None:
    """Show the smallest difference that a table tells from noise, by the number of seeds per row.

    A second table has the probability that rows which do not differ are found equivalent. The noise is
    measured on the table's finished runs: two rows with two seeds are enough.

        lm power t5/6-corruption-rate
        lm power 't5/*' --scale mini

    Args:
        pattern: Shell-style pattern of rows or tables, such as 't5/6-*'.
        runs: One or more folders of runs, also gs://.
    """
    from experiments.report.power import power_sheets
    from experiments.report.report import compare_tables, shown_comparisons

    tables = compare_tables(tables_of(find(pattern)), scale, runs, {}, print_line)
    for comparison in shown_comparisons(tables):
        for title, sheet in power_sheets(comparison).items():
            print_line(title)
            show_sheet(comparison.table.name, sheet)

"""``lm power``: how small a difference the tables of the study can tell."""

from math import inf
from typing import TYPE_CHECKING

from experiments.cli.settings import ConfigFile, Scale, Settings, Start, first_folder, given_changes
from experiments.console import CONSOLE, RUNS, print_line, show_sheet
from experiments.study.registry import find, tables_of
from experiments.study.scales import DEFAULT_SCALE
from lm.config.base import SettingError

if TYPE_CHECKING:
    from experiments.report.metrics import Group
    from experiments.report.power import Noise


def power(
    pattern: str,
    /,
    *,
    settings: Settings,
    scale: Scale = DEFAULT_SCALE,
    config: ConfigFile = None,
    start: Start = "",
    runs: tuple[str, ...] = (str(RUNS),),
    difference: float | None = None,
) -> None:
    """Show the smallest difference that a table tells from noise, by the number of seeds per row.

    A second table has the probability that rows which do not differ are found equivalent, a third the noise.
    It is measured on the table's finished runs. It needs two rows with two seeds in common; with fewer than
    three seeds it may be far too small, by the factor that is printed. Give the settings with which they
    were swept.

        lm power t5/6-corruption-rate
        lm power 't5/*' --scale mini
        lm power t5/6-corruption-rate --difference 1.5

    Args:
        pattern: Shell-style pattern of rows or tables, such as 't5/6-*'.
        runs: One or more folders of runs, also gs://.
        difference: A true difference of two rows [standard deviations of a run]: show how many seeds find it
            with a power of 80 %.
    """
    from experiments.report.power import (
        NOISE_TITLE,
        measure_noise,
        measurement_note,
        noise_sheet,
        power_sheets,
        seeds_sheet,
    )
    from experiments.report.report import compare_tables, shown_comparisons

    if difference is not None and not 0 < difference < inf:
        raise SettingError(f"--difference {difference} should be a positive number of standard deviations")
    rows = find(pattern)
    trainable = [row.name for row in rows if not row.needs]
    changes = given_changes(trainable, scale, settings, config, start, first_folder(runs))
    tables = compare_tables(tables_of(rows), scale, runs, changes, print_line)
    measured: dict[str, dict[Group, Noise]] = {}  # by the names of tables
    problems = []
    for comparison in shown_comparisons(tables):
        try:
            if not comparison.groups:
                raise SettingError(
                    f"{comparison.table.name}: none of its runs has a score to compare: pre-train them on a "
                    "corpus, or fine-tune them on tasks (tuning.mixtures)"
                )
            noises = {group: measure_noise(comparison, group) for group in comparison.groups}
            measured[comparison.table.name] = noises
        except SettingError as error:  # a reason to end only if there is no other table
            problems.append(str(error))
    if not measured:
        raise SettingError("\n".join(problems))
    for name, noises in measured.items():
        with CONSOLE.status(f"simulating the tests of {name}"):  # which takes seconds
            sheets = power_sheets(noises) if difference is None else seeds_sheet(noises, difference)
        for title, sheet in (sheets | {NOISE_TITLE: noise_sheet(noises)}).items():
            print_line(title)
            show_sheet(name, sheet)
        CONSOLE.print(measurement_note(noises), highlight=False)
    for problem in problems:
        print_line(problem)

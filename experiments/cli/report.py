"""``lm report``: the tables of finished runs beside the paper's."""

import shlex
from typing import Literal

from experiments.cli.settings import (
    ConfigFile,
    Scale,
    Settings,
    Start,
    first_folder,
    given_changes,
    given_points,
)
from experiments.console import RUNS, print_line
from experiments.study.overrides import command_line_overrides
from experiments.study.plugins import plugin_arguments
from experiments.study.registry import find, registered, tables_of
from experiments.study.scales import DEFAULT_SCALE
from experiments.study.words import setting_arguments
from lm.config.base import SettingError


def report(
    pattern: str = "t5/*",
    /,
    *,
    settings: Settings,
    scale: Scale = DEFAULT_SCALE,
    config: ConfigFile = None,
    start: Start = "",
    runs: tuple[str, ...] = (str(RUNS),),
    against: str = "",
    grid: tuple[str, ...] = (),
    variants: bool = False,
    watch: bool = False,
    latex: bool = False,
    pictures: Literal["png", "svg", "pdf"] = "png",
) -> None:
    """Write the tables of finished runs beside the paper's: Markdown, a web page, CSV and pictures.

    Give the settings with which the runs were swept.

        lm report t5/6-corruption-rate
        lm report 't5/*' --scale mini --runs runs gs://bucket/runs
        lm report 't5/*' --scale nano --against mini

    Args:
        pattern: Shell-style pattern of rows or tables, such as 't5/6-*'.
        runs: One or more folders of runs, also gs://; the report goes into the first.
        against: Another scale, or the results.json of another report: how far the order of rows here predicts
            the order there.
        grid: Settings and values with which the runs were swept, as for lm sweep.
        variants: Also show runs with settings given by hand, each combination as a row of its own.
        watch: Write the report again whenever a run makes progress, until interrupted.
        latex: Also write narrow tables for a paper, report.tex, and the papers that they cite, report.bib.
        pictures: Also write the pictures in this format.
    """
    from experiments.report import report as reports  # whose pictures and page need more than a list of rows
    from experiments.report.overrides import variant_rows, with_override_rows

    rows = find(pattern)
    trainable = [row.name for row in rows if not row.needs]  # of the others published scores are shown
    changes = given_changes(trainable, scale, settings, config, start, first_folder(runs))
    if watch and (against or latex or pictures != "png"):
        raise SettingError("--watch writes the report alone: leave out --against, --latex and --pictures")
    if variants and (changes or grid):
        raise SettingError("--variants shows all settings given by hand: leave out settings and --grid")

    named = setting_arguments(command_line_overrides(changes, settings))
    wanted = tables_of(rows)
    if grid:
        from experiments.cli.sweep import grid_tables

        points = given_points(trainable, scale, grid, changes, settings, start, first_folder(runs))
        wanted = grid_tables(pattern, scale, points, changes)
        changes = {}  # which the rows of these tables have themselves
    if variants:
        wanted = with_override_rows(wanted, scale, runs, print_line)
    with registered(variant_rows(wanted, scale)):
        if watch:
            reports.watch(wanted, scale, runs, overrides=changes)
            return
        words = ["lm", *plugin_arguments(), "report", pattern, "--scale", scale, *named]
        words += ["--start", start] * bool(start) + ["--grid", *grid] * bool(grid) + ["--runs", *runs]
        words += ["--against", against] * bool(against) + ["--variants"] * variants
        words += ["--latex"] * latex + ["--pictures", pictures]
        written = reports.print_report(wanted, scale, runs, changes, shlex.join(words), against)
        if pictures != "png":
            print_line(f"Pictures: {', '.join(reports.write_pictures(written, pictures))}")
        if latex:
            print_line(f"LaTeX: {', '.join(map(str, reports.write_latex(written, scale, changes)))}")

"""``lm sweep``: train all rows that match a pattern, or a grid of settings, and write their report."""

import shlex
import sys
from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Annotated, Any, Literal

import tyro

from experiments.cli.run_options import Options, RowRun, heads_kept, link_shared_run, row_run
from experiments.cli.settings import (
    Allow,
    ConfigFile,
    DryRun,
    GridPoint,
    Restart,
    Runs,
    Settings,
    Start,
    given_changes,
    given_points,
)
from experiments.cli.train import job_count, train_unfinished
from experiments.console import RUNS, print_line
from experiments.processes.progress import NO_TOOLS, Tools
from experiments.study.changes import Overrides
from experiments.study.experiment import Experiment
from experiments.study.overrides import (
    NO_SETTINGS,
    command_line_overrides,
    effective_overrides,
    explicit_overrides,
    overrides_of,
    setting_values,
    short_name,
    start_changes,
)
from experiments.study.paths import check_runs, seed_folders, with_overrides
from experiments.study.plugins import plugin_arguments
from experiments.study.registry import (
    BUILTIN_TABLES,
    baseline_of,
    build,
    canonical_row,
    find,
    find_buildable,
    find_one,
    needs_text,
    registered,
    tables_of,
)
from experiments.study.scales import DEFAULT_SCALE, SCALES
from experiments.study.table import Axis, Row, Table
from experiments.study.words import setting_arguments
from lm.config.base import SettingError, leaves, listed, setting_descriptions, unused_settings


def _scale_type() -> object:
    return Literal[tuple(SCALES)] | None


TABLES_SCALE = f"(default: the table's; {DEFAULT_SCALE} if tables differ)"
TABLES_SEEDS = "(default: the table's; 1 if tables differ)"
TableScale = Annotated[
    str | None,
    tyro.conf.DisallowNone,
    tyro.conf.arg(constructor_factory=_scale_type, help_behavior_hint=TABLES_SCALE),
]
TableSeeds = Annotated[int | None, tyro.conf.DisallowNone, tyro.conf.arg(help_behavior_hint=TABLES_SEEDS)]


def sweep(
    pattern: str,
    /,
    settings: Settings,
    grid: tuple[str, ...] = (),
    scale: TableScale = None,
    seeds: TableSeeds = None,
    config: ConfigFile = None,
    start: Start = "",
    runs: Runs = RUNS,
    jobs: int = 0,
    dry_run: DryRun = False,
    allow: Allow = "",
    restart: Restart = 0,
    tools: Annotated[Tools, tyro.conf.arg(name="")] = NO_TOOLS,
) -> None:
    """Train and evaluate all rows that match and have not finished, then write the report.

    The same command resumes from the newest checkpoints. Settings given as options apply to every row.

        lm sweep t5/6-corruption-rate --seeds 3
        lm sweep 't5/4-*' --pretraining.optimizer.learning-rate 0.5
        lm sweep t5/1-baseline/baseline \\
          --grid model.mlp.d_ff=128,256 model.dropout=0,0.1
        lm sweep 't5/*' --dry-run

    Args:
        pattern: Shell-style pattern of rows or tables, such as 't5/6-*'.
        grid: Train every combination of these values: SETTING=VALUE,VALUE,... Separate the elements of a list
            by blanks, such as 'data.held_out_lengths=1,1 2', and quote a value that has commas.
        scale: Size of the study.
        seeds: Number of runs per row, with seeds 0, 1, ...
        jobs: Runs in parallel, each in a process with one thread. 0 chooses: one per core for tiny models on
            CPU (scales nano and mini), whose steps keep only one core busy, else 1. On GPUs the runs are
            shared out over the GPUs, and runs on the same GPU share its memory.
    """
    del restart  # run_with_restarts has read it before this command was parsed
    rows = find_buildable(pattern)
    scale, seeds = default_scale_and_seeds(tables_of(rows), scale, seeds)
    changes = given_changes([row.name for row in rows], scale, settings, config, start, runs)
    options = Options(scale, runs, allow, start, tools)
    train_rows(pattern, seeds, changes, options, jobs, grid, dry_run, settings)


def default_scale_and_seeds(found: Sequence[Table], scale: str | None, seeds: int | None) -> tuple[str, int]:
    """Return the given scale and seeds, with those of the tables in place of None.

    If the tables differ in one of them, it is DEFAULT_SCALE or one seed, and a line says so: a sweep has one
    scale and one number of seeds, as its report has.
    """
    scales, numbers = {table.scale for table in found}, {table.seeds for table in found}
    differing = []
    if scale is None:
        if len(scales) > 1:
            differing.append(f"--scale is {DEFAULT_SCALE}")
        scale = scales.pop() if len(scales) == 1 else DEFAULT_SCALE
    if seeds is None:
        if len(numbers) > 1:
            differing.append("--seeds is 1")
        seeds = numbers.pop() if len(numbers) == 1 else 1
    if differing:
        own = ", ".join(f"{table.name} {table.scale} and {table.seeds}" for table in found)
        print_line(
            f"{' and '.join(differing)}, since the tables differ: their own scales and numbers of seeds are "
            f"{own}. Sweep a table alone to train its own."
        )
    return scale, seeds


def train_rows(
    pattern: str,
    seeds: int,
    changes: Overrides,
    options: Options,
    jobs: int = 1,
    grid: Sequence[str] = (),
    dry_run: bool = False,
    settings: Mapping[str, Any] = NO_SETTINGS,
) -> None:
    """Train all rows that match and have not finished, with ``changes`` to each, then write the report.

    jobs: runs in parallel; 0 chooses, as in ``sweep``.
    settings: those of ``changes`` that were given as options.
    """
    if seeds < 1:
        raise SettingError(f"--seeds {seeds} should be at least 1")
    check_runs(options.runs)
    names = [row.name for row in find_buildable(pattern)]
    points = given_points(names, options.scale, grid, changes, settings, options.start, options.runs)
    if any("seed" in point.changes for point in points):
        raise SettingError("seed: a sweep takes --seeds N, and trains seeds 0 to N - 1")
    for row in find(pattern):
        if row.needs:
            print_line(f"left out: {needs_text(row)}")
    for name in names:
        if find_one(name).table in BUILTIN_TABLES:
            continue
        same = canonical_row(name, options.scale)
        if same != name:
            print_line(f"{name} is the same experiment as {same} at this scale; they share their runs")
    compared = compared_experiments(pattern, points, changes, options.scale)
    wanted = wanted_runs(compared, seeds, options)
    if grid:
        wanted = [run._replace(label=grid_label(run, list(points[0].values))) for run in wanted]
    wanted = without_equal_rows(wanted, options.scale)
    titles: dict[str, list[str]] = {}  # line about the heads of rows -> the titles of their runs
    for run in wanted:
        titles.setdefault(heads_kept(run.experiment, changes), []).append(run.title)
    for line, named in titles.items():
        if line:
            print_line(f"{listed(list(dict.fromkeys(named)))}: {line}")
    count = job_count(jobs, wanted)
    if dry_run:
        from experiments.cli.dry_run import print_dry_run

        print_dry_run(wanted, options, count)
        return
    if further := further_seeds(wanted):
        noun = "seed" if len(further) == 1 else "seeds"
        print_line(f"beyond --seeds {seeds}, the report has the finished runs of {noun} {listed(further)}")
    for name, experiment in compared:  # before training, so that a sweep that is interrupted leaves them too
        link_shared_run(row_run(name, experiment, options), options)
    failed = train_unfinished(wanted, options, count)
    from experiments.report.overrides import variant_rows
    from experiments.report.report import print_report  # slow to import: it draws

    found = tables_of(find(pattern))
    if grid:
        found = grid_tables(pattern, options.scale, points, changes)
    command = shlex.join(sweep_argv(pattern, seeds, changes, options, grid, settings))
    try:
        with registered(variant_rows(found, options.scale)):
            overrides = {} if grid else changes
            print_report(found, options.scale, (str(options.runs),), overrides, command)
    except SettingError:
        if not failed:
            raise
    if failed:
        sys.exit(failed)


def compared_experiments(
    pattern: str, points: Sequence[GridPoint], changes: Overrides, scale: str
) -> list[tuple[str, Experiment]]:
    """Return (row, experiment) of all rows that match at each point of the grid, then of their baselines.

    Each row gets only those changes and grid values that it reads. The baselines get ``changes`` alone.
    """
    names = [row.name for row in find_buildable(pattern)]
    overrides = [(name, point.changes) for name in names for point in points]
    overrides += [(name, changes) for name in dict.fromkeys(map(baseline_of, names))]
    return [(name, build(name, scale, effective_overrides(name, scale, given))) for name, given in overrides]


def wanted_runs(compared: Sequence[tuple[str, Experiment]], seeds: int, options: Options) -> list[RowRun]:
    """Return the run of each row and seed, once for rows that build the same experiment."""
    runs: dict[Path, RowRun] = {}
    for seed in range(seeds):
        for name, experiment in compared:
            run = row_run(name, replace(experiment, seed=seed), options)
            runs.setdefault(run.folder, run)
    return list(runs.values())


def further_seeds(wanted: Sequence[RowRun]) -> list[str]:
    """Return the seeds of finished runs that lie beside those of ``wanted``: reports have them too."""
    folders = {run.folder for run in wanted}
    seeds: set[str] = set()
    for folder_of_row in {folder.parent for folder in folders}:
        for other in seed_folders(folder_of_row):
            if other not in folders and (other / "scores.json").exists():
                seeds.add(other.name.removeprefix("seed-"))
    return sorted(seeds, key=int)


def without_equal_rows(wanted: Sequence[RowRun], scale: str) -> list[RowRun]:
    """Drop the runs of rows that settings of the command line make the same as another row.

    For example, with steps of pre-training a row without pre-training is the baseline. The baseline is kept
    if it is among them, otherwise the first row. Each dropped row is reported, and so is a single row that
    is left.
    """

    def is_not_baseline(run: RowRun) -> bool:
        return canonical_row(run.name, scale) != canonical_row(baseline_of(run.name), scale)

    kept: dict[Experiment, str] = {}  # the title of the run that is trained
    for run in sorted(wanted, key=is_not_baseline):  # baselines first, so that they are kept
        kept.setdefault(run.experiment, run.title)
    dropped = {run.title: kept[run.experiment] for run in wanted if kept[run.experiment] != run.title}
    for title, same in dropped.items():
        print_line(f"left out: {title}, which these settings make the same as {same}")
    if dropped and len(set(kept.values())) == 1:
        only = next(run.name for run in wanted if run.title == kept[run.experiment])
        print_line(
            f"only {only} is left, and a table of one row compares nothing: leave out the settings "
            "in which the rows differ"
        )
    return [run for run in wanted if kept[run.experiment] == run.title]


def grid_tables(pattern: str, scale: str, points: Sequence[GridPoint], changes: Overrides) -> list[Table]:
    """Return a table for each table with matching rows: its baseline, then each row at each grid point.

    Rows are labelled with their values of the grid's settings; settings given to all rows are in the title.
    """
    rows, settings = find_buildable(pattern), list(points[0].values)
    shared = setting_values(explicit_overrides(changes))
    found = []
    for table in tables_of(rows):
        baseline = grid_row(find_one(table.baseline), scale, changes, settings)
        new = {baseline.name: baseline}
        for row in table.rows:
            if row not in rows:
                continue
            for point in points:
                at_point = grid_row(row, scale, point.changes, settings)
                new[at_point.name] = at_point
        varied = "-".join(map(short_name, settings)).replace(".", "-")
        title = f"{table.title}: {' x '.join(settings)}".lstrip(": ")
        found.append(
            Table(
                name=f"{table.name}-grid-{varied}",
                title=f"{title}, with {shared}" if shared else title,
                rows=tuple(new.values()),
                baseline=baseline.name,
                axis=grid_axis(points),
                scale=scale,
                surrogate_data=table.surrogate_data,
            )
        )
    return found


def grid_row(row: Row, scale: str, changes: Overrides, settings: Sequence[str]) -> Row:
    """Return a row with ``changes`` added, named as the folder of its runs.

    Changes that the row does not read are ignored. Its label has its values of those ``settings`` that it
    reads.
    """
    from experiments.report.overrides import override_row

    experiment = build(row.name, scale, effective_overrides(row.name, scale, changes))
    given = overrides_of(row.name, scale, experiment)
    suffix = with_overrides(row.key, given).removeprefix(row.key)
    new = override_row(row, start_changes(experiment) | given, suffix) if given else row
    values = dict(leaves(experiment))
    unused = unused_settings(experiment, settings)
    own_values = setting_values({path: values[path] for path in settings if path not in unused})
    return replace(new, label=f"{row.label}, {own_values}" if own_values else row.label)


def grid_label(run: RowRun, settings: Sequence[str]) -> str:
    """Return the name of a run's row, followed by its values of a grid's settings."""
    values = dict(leaves(run.experiment))
    return f"{run.name}, {setting_values({path: values[path] for path in settings})}"


def grid_axis(points: Sequence[GridPoint]) -> Axis | None:
    """Return the x axis of the plot of a grid, or None unless it varies a single numeric setting."""
    settings = {path for point in points for path in point.values}
    values = [value for point in points for value in point.values.values()]
    if len(settings) != 1 or any(isinstance(value, bool | str | tuple) or value is None for value in values):
        return None
    (path,) = settings
    return Axis(path, setting_descriptions(Experiment).get(path, path), log=min(values) > 0)


def sweep_argv(
    pattern: str,
    seeds: int,
    changes: Overrides,
    options: Options,
    grid: Sequence[str] = (),
    settings: Mapping[str, Any] = NO_SETTINGS,
) -> list[str]:
    """Return the command line that repeats this sweep, which its report records.

    settings: those of ``changes`` that were given as options.
    """
    words = ["lm", *plugin_arguments(), "sweep", pattern, "--scale", options.scale, "--seeds", str(seeds)]
    words += setting_arguments(command_line_overrides(changes, settings))
    words += ["--start", options.start] if options.start else []
    words += ["--runs", str(options.runs)] if options.runs != RUNS else []
    return [*words, *(["--grid", *grid] if grid else [])]

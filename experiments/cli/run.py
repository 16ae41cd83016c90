"""``lm run``: train, fine-tune and evaluate one row."""

from typing import Annotated

import tyro

from experiments.cli.run_names import check_name, other_run_with_name
from experiments.cli.run_options import Options, heads_kept, row_run
from experiments.cli.settings import (
    Allow,
    ConfigFile,
    DryRun,
    Restart,
    Runs,
    Scale,
    Settings,
    Start,
    given_changes,
)
from experiments.cli.train import train_row
from experiments.console import RUNS, print_line
from experiments.processes.progress import NO_TOOLS, Tools
from experiments.study.registry import build
from experiments.study.scales import DEFAULT_SCALE
from lm.config.base import SettingError


def run(
    row: str,
    /,
    settings: Settings,
    scale: Scale = DEFAULT_SCALE,
    config: ConfigFile = None,
    start: Start = "",
    runs: Runs = RUNS,
    name: str = "",
    check: bool = False,
    dry_run: DryRun = False,
    allow: Allow = "",
    restart: Restart = 0,
    tools: Annotated[Tools, tyro.conf.arg(name="")] = NO_TOOLS,
) -> None:
    """Train, fine-tune and evaluate one row; any of its settings can be changed.

    The same command resumes from the newest checkpoint, for instance after a crash. The name of the run's
    folder contains the settings that you change.

        lm run t5/1-baseline/baseline
        lm run gpt/base --data.corpus text:book.txt \\
          --pretraining.steps 500 --name book
        lm run t5/1-baseline/baseline --scale mini --dry-run

    Args:
        row: Row of a table, such as t5/6-corruption-rate/15.
        name: Name of the run, by which other commands find it: @NAME. The run of the last lm run is @last.
        check: Only check settings, data, vocabulary and folder, preparing data where needed; train nothing.
    """
    del restart  # run_with_restarts has read it before this command was parsed
    if check and dry_run:
        raise SettingError("--check prepares data and --dry-run prepares nothing: choose one")
    changes = given_changes([row], scale, settings, config, start, runs)
    check_name(runs, name)
    options = Options(scale, runs, allow, start, tools)
    experiment = build(row, scale, changes)
    if line := heads_kept(experiment, changes):
        print_line(line)
    if dry_run:
        from experiments.cli.dry_run import print_dry_run

        planned = row_run(row, experiment, options)
        print_dry_run([planned], options, jobs=1)
        if other := other_run_with_name(name, runs, planned.folder):
            print_line(f"@{name} would name this run; now: {other}")
    else:
        train_row(row, experiment, options, check, name)

"""``lm list``, ``show``, ``diff`` and ``report``: what only needs settings and finished runs."""

import shlex
from collections.abc import Sequence
from pathlib import Path
from typing import Annotated

from rich.markup import escape

from experiments.cli.arguments import FLAT, first_word, named_settings, option, parse
from experiments.console import CONSOLE, RUNS, listing
from experiments.report.results import results
from experiments.runs.stages import Stage
from experiments.runs.stages import stages as stages_of_run
from experiments.study.experiment import Experiment
from experiments.study.registry import baseline_of, build, find, find_one, run_folder, tables
from lm.settings import comments, diff, leaves
from lm.train import manifest


def show_rows(pattern: str = "*", /, scale: str = "nano", runs: Path = RUNS, names: bool = False) -> None:
    """List the rows of the study, what each changes, and how many seeds of it have finished.

    Args:
        pattern: shell-style pattern over rows and tables, such as 't5/6-*'.
        scale: size of the study: nano, mini, mini-real, small, medium or base.
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
            listed.add_row(
                row.name, escape(row.label), escape(text), f"{finished} seed{'s' * (finished != 1)}"
            )
        CONSOLE.print(listed)


def show_row(name: str, /, scale: str = "nano", stages: bool = False, runs: Path = RUNS) -> None:
    """Show every setting of a row, with its meaning and unit, or the stages of its run.

    Args:
        name: row of the registry, such as t5/6-corruption-rate/15.
        scale: size of the study: nano, mini, mini-real, small, medium or base.
        stages: show the stages of training instead: what each starts from, its steps and its folder.
        runs: folder that holds the runs, for the steps that are saved.
    """
    experiment, title = build(name, scale), f"{name} at scale {scale}"
    if stages:
        folder = run_folder(runs, scale, name, experiment.seed, {})
        show_stages(stages_of_run(experiment, folder, runs / scale), title)
        return
    meaning = comments(Experiment)
    grid = listing("setting", "value", "meaning [unit]", title=title)
    for path, value in leaves(experiment):
        grid.add_row(path, escape(str(value)), escape(meaning.get(path, "")))
    CONSOLE.print(grid)


def show_stages(stages: Sequence[Stage], title: str) -> None:
    """A line for each stage: what it is trained on, what it starts from, its steps and its folder."""
    grid = listing("stage", "trained on", "starts from", "steps", "saved", "folder", title=title)
    for stage in stages:
        corpus = stage.kind in ("pretrain", "vectors") and stage.settings.mixing.pretraining != "tasks"
        data = ", ".join((stage.settings.data.corpus, *stage.on) if corpus else stage.on)
        parent = stage.parent.name if stage.parent else "random parameters"
        if stage.parent and stage.parent_step != stage.parent.training.steps:
            parent += f", step {stage.parent_step:,}"
        saved = max(manifest.steps(stage.folder / "checkpoints"), default=0)
        counts = (f"{number:,}" for number in (stage.training.steps, saved))
        grid.add_row(stage.name, escape(data), parent, *counts, str(stage.folder))
    CONSOLE.print(grid)


def show_diff(name: str, other: str = "", /, scale: str = "nano") -> None:
    """Show the settings in which a row differs from another.

    Args:
        name: row of the registry.
        other: row to compare with; by default the paper's baseline, or the first row of another table.
        scale: size of the study: nano, mini, mini-real, small, medium or base.
    """
    other = other or baseline_of(find_one(name).name)
    changed = diff(build(other, scale), build(name, scale))
    if not changed:
        CONSOLE.print(f"{name} and {other} are the same experiment at scale {scale}.")
    for path, (old, new) in changed.items():
        CONSOLE.print(f"{path}: {old} → {new}", highlight=False)


def report_command(arguments: Sequence[str]) -> None:
    """Write the tables of all finished runs beside the paper's: Markdown, a web page, data and pictures."""
    default = build(find(first_word(arguments, "t5/*"))[0].name, option(arguments, "--scale", "nano"))

    def report(
        pattern: str = "t5/*",
        /,
        settings: Annotated[Experiment, FLAT] = default,
        scale: str = "nano",
        runs: tuple[str, ...] = (str(RUNS),),
        watch: bool = False,
    ) -> None:
        """Write the tables of all finished runs beside the paper's: Markdown, a web page, data and pictures.

        Settings given here are those that the runs were swept with.

        Args:
            pattern: shell-style pattern over rows and tables.
            scale: size of the study: nano, mini, mini-real, small, medium or base.
            runs: one or more folders that hold runs, gs:// included; the report goes into the first.
            watch: write it again whenever a run makes progress, until interrupted.
        """
        from experiments.report import report  # whose pictures and page need more than listing rows does

        wanted, changes = tables(find(pattern)), named_settings(arguments, settings)
        if watch:
            report.watch(wanted, scale, runs, overrides=changes)
        else:
            report.print_report(wanted, scale, runs, changes, shlex.join(["lm", "report", *arguments]))

    parse(report, "lm report", arguments)

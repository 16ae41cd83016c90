"""The commands on rows of the study whose every setting can be changed on the command line, as ``--path
value``.
"""

from collections.abc import Sequence
from pathlib import Path
from typing import Any

from experiments.console import RUNS
from lm.settings import SettingError, leaves


def run(arguments: Sequence[str]) -> None:
    """Train, fine-tune and evaluate one row; any of its settings can be changed on the command line."""
    from typing import Annotated

    import tyro

    from experiments.cli.arguments import read
    from experiments.cli.train import run_row
    from experiments.runs.origin import allowed
    from experiments.study.experiment import Experiment
    from experiments.study.registry import build

    named = _named(arguments)
    default = build(named, _option(arguments, "--scale", "nano"))

    def run(
        name: str,
        /,
        settings: Annotated[Experiment, tyro.conf.arg(name="")] = default,
        scale: str = "nano",
        runs: Path = RUNS,
        check: bool = False,
        allow: str = "",
        restart: int = 0,
    ) -> None:
        """Train, fine-tune and evaluate one row; any of its settings can be changed.

        Started again, a run goes on where it stopped. Settings given here become part of the run's folder
        name.

        Args:
            name: row of the registry, such as t5/6-corruption-rate/15.
            scale: size of the study: nano, mini, mini-real or base.
            runs: folder that holds the runs.
            check: only check settings, data, vocabulary and folder; train nothing.
            allow: go on although these changed since it was begun: settings,vocabulary,data,code,packages.
            restart: start it again so many times when it crashes or is asked to end; see lm sweep --help.
        """
        if name != named:
            raise SettingError(f"{name!r} should stand first: lm run {name} [OPTIONS]")
        run_row(name, scale, settings, runs, check, allowed(allow))

    read(run, "lm run", arguments)


def sweep(arguments: Sequence[str]) -> None:
    """Train and evaluate every row that matches and has not finished, then write the report."""
    from typing import Annotated

    import tyro

    from experiments.cli import train as rows
    from experiments.cli.arguments import read
    from experiments.study.experiment import Experiment
    from experiments.study.registry import build, find

    named = _named(arguments)
    default = build(find(named)[0].name, _option(arguments, "--scale", "nano"))

    def sweep(
        pattern: str,
        /,
        settings: Annotated[Experiment, tyro.conf.arg(name="")] = default,
        scale: str = "nano",
        seeds: int = 1,
        runs: Path = RUNS,
        allow: str = "",
        restart: int = 0,
    ) -> None:
        """Train and evaluate every row that matches and has not finished, then write the report.

        Killed or interrupted, it resumes where it stopped when started again. Settings given here hold for
        every row.

        Args:
            pattern: shell-style pattern over rows and tables, such as 't5/6-*'.
            scale: size of the study: nano, mini, mini-real or base.
            seeds: runs of each row, with seeds 0, 1, ...
            runs: folder that holds the runs.
            allow: go on although these changed since a run was begun: settings,vocabulary,data,code,packages.
            restart: restart up to so many times after a crash or exit code 42; never after bad settings, a
                non-finite loss or a signal.
        """
        if pattern != named:
            raise SettingError(f"{pattern!r} should stand first: lm sweep {pattern} [OPTIONS]")
        rows.sweep(pattern, scale, seeds, runs, _given(arguments, settings), allow=allow)

    read(sweep, "lm sweep", arguments)


def _given(arguments: Sequence[str], settings: Any) -> dict[str, Any]:
    """``{path: value}`` of the settings that the command line names, be they those of the row or not."""
    flags = {
        word.partition("=")[0].removeprefix("--").replace("-", "_") for word in arguments if word[:2] == "--"
    }
    named = {flag.replace(".no_", ".") for flag in flags} | flags
    return {path: value for path, value in leaves(settings) if path in named}


def plan(arguments: Sequence[str]) -> None:
    """Compile rows for a TPU slice that need not be there: memory, time and hours before they are paid
    for.
    """
    from typing import Annotated

    import tyro

    from experiments.cli.arguments import read
    from experiments.plan.plans import row_of, show_plans
    from experiments.study.experiment import Experiment
    from experiments.study.registry import find

    asked = [
        _option(arguments, flag, default)
        for flag, default in (("--scale", "base"), ("--size", ""), ("--mesh", ""))
    ]
    rows, given = {}, None
    for row in find(_named(arguments)):
        default = row_of(row.name, *asked)

        def plan(
            pattern: str,
            /,
            settings: Annotated[Experiment, tyro.conf.arg(name="")] = default,
            topology: str = "v5e:4x4",
            mesh: str = "",
            scale: str = "base",
            size: str = "",
            search: bool = False,
            price: float = 0.0,
            runs: Path = RUNS,
        ) -> tuple:
            """Compile the training step of rows for a TPU slice with libtpu, here, and say what it needs.

            Any setting of the rows can be changed, as for lm run.

            Args:
                pattern: shell-style pattern over rows and tables, such as 't5/2-architecture/*'.
                topology: generation and shape of the slice: v4, v5e, v5p, v6e or tpu7x, such as v5p:4x4x8.
                mesh: sizes of the mesh's axes, such as fsdp=8,tensor=2 or slice=2; data takes what is left.
                scale: size of the study: nano, mini, mini-real or base.
                size: a published model's size in place of the scale's, such as t5-11b.
                search: compile likely meshes, rematerialisations and micro-batches; recommend the fastest
                that fits.
                price: of a chip-hour [dollars]; 0: unknown.
                runs: folder whose cache remembers what was compiled.
            """
            return settings, scale, size, topology, runs, price, search

        rows[row.name], *given = read(plan, "lm plan", arguments)
    show_plans(rows, *given)


def _named(arguments: Sequence[str]) -> str:
    """The row or pattern that stands first; what is wrong with the arguments is found when they are read."""
    from experiments.study.registry import BASELINE_ROW

    return arguments[0] if arguments and not arguments[0].startswith("-") else BASELINE_ROW


def _option(arguments: Sequence[str], flag: str, default: str) -> str:
    """The value of ``flag`` in ``arguments``, whichever way it is written; the last one, as the parser takes
    it.
    """
    found = default
    for place, argument in enumerate(arguments):
        if argument == flag and place + 1 < len(arguments):
            found = arguments[place + 1]
        elif argument.startswith(f"{flag}="):
            found = argument.partition("=")[2]
    return found

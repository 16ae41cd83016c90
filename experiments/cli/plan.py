"""``lm plan``: rows as the command line changes them, to be compiled for a TPU slice."""

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated

from experiments.cli.arguments import FLAT, first_word, option, parse
from experiments.console import RUNS
from experiments.study.experiment import Experiment
from experiments.study.registry import find


@dataclass(frozen=True)
class Options:
    """What lm plan takes besides settings."""

    topology: str = (
        "v5e:4x4"  # generation and shape of the slice: v4, v5e, v5p, v6e or tpu7x, such as v5p:4x4x8
    )
    # sizes of the mesh's axes, such as fsdp=8,tensor=2 or slice=2; data takes the remaining devices
    mesh: str = ""
    scale: str = "base"  # size of the study: nano, mini, mini-real or base
    size: str = ""  # a published model's size in place of the scale's, such as t5-11b
    # compile likely meshes, rematerialisations and micro-batches; recommend the fastest that fits
    search: bool = False
    price: float = 0.0  # of a chip-hour [dollars]; 0: unknown
    runs: Path = RUNS  # folder whose cache holds what was compiled before


def plan(arguments: Sequence[str]) -> None:
    """Compile rows for a TPU slice that need not exist: memory, time and hours before you pay for them."""
    from experiments.plan.plans import row_of, show_plans  # with jax

    early = (("--scale", Options.scale), ("--size", Options.size), ("--mesh", Options.mesh))
    scale_size_mesh = [option(arguments, flag, default) for flag, default in early]
    rows = {}
    for row in find(first_word(arguments)):
        default = row_of(row.name, *scale_size_mesh)

        def plan(
            pattern: str,
            /,
            settings: Annotated[Experiment, FLAT] = default,
            options: Annotated[Options, FLAT] = Options(),
        ) -> tuple[Experiment, Options]:
            """Compile the training step of rows for a TPU slice with libtpu, here, and print what it needs.

            Any setting of the rows can be changed, as for lm run.

            Args:
                pattern: shell-style pattern over rows and tables, such as 't5/2-architecture/*'.
            """
            return settings, options

        rows[row.name], options = parse(plan, "lm plan", arguments)
    show_plans(
        rows, options.scale, options.size, options.topology, options.runs, options.price, options.search
    )

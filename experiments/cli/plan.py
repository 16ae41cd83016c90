"""``lm plan``: rows as the command line changes them, to be compiled for a TPU slice."""

from collections.abc import Sequence
from typing import Annotated

from experiments.cli.arguments import FLAT, first_word, option, parse
from experiments.study.experiment import Experiment
from experiments.study.registry import find


def plan(arguments: Sequence[str]) -> None:
    """Compile rows for a TPU slice that need not exist: memory, time and hours before you pay for them."""
    from experiments.plan.plans import PlanOptions, row_of, show_plans  # with jax

    early = (("--scale", PlanOptions.scale), ("--size", PlanOptions.size), ("--mesh", PlanOptions.mesh))
    scale_size_mesh = [option(arguments, flag, default) for flag, default in early]
    rows, options = {}, (defaults := PlanOptions())
    for row in find(first_word(arguments)):
        default = row_of(row.name, *scale_size_mesh)

        def plan(
            pattern: str,
            /,
            settings: Annotated[Experiment, FLAT] = default,
            options: Annotated[PlanOptions, FLAT] = defaults,
        ) -> tuple[Experiment, PlanOptions]:
            """Compile the training step of rows for a TPU slice with libtpu, here, and print what it needs.

            Any setting of the rows can be changed, as for lm run.

            Args:
                pattern: shell-style pattern over rows and tables, such as 't5/2-architecture/*'.
            """
            return settings, options

        rows[row.name], options = parse(plan, "lm plan", arguments)
    show_plans(rows, options)

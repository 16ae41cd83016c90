"""``lm plan``: compile the training step of rows for a TPU slice."""

from typing import Annotated

import tyro

from experiments.cli.settings import ConfigFile, Settings, Start, given_changes
from experiments.plan.plans import PlanOptions, row_of, show_plans
from experiments.study.changes import apply
from experiments.study.registry import find_buildable

DEFAULTS = PlanOptions()


def plan(
    pattern: str,
    /,
    settings: Settings,
    options: Annotated[PlanOptions, tyro.conf.arg(name="")] = DEFAULTS,
    config: ConfigFile = None,
    start: Start = "",
) -> None:
    """Compile the training step of rows for a TPU slice with libtpu, here, and print what it needs.

    A row takes minutes. lm show ROW --scale base --costs prints parameters and FLOP at once.

        lm plan t5/1-baseline/baseline --scale base --topology v5e:4x4
        lm plan 't5/2-architecture/*' --scale small --search

    Args:
        pattern: Shell-style pattern of rows or tables, such as 't5/2-architecture/*'.
    """
    names = [row.name for row in find_buildable(pattern)]
    changes = given_changes(names, options.scale, settings, config, start, options.runs)
    planned = {name: row_of(name, options.scale, options.size, options.mesh) for name in names}
    show_plans({name: apply(experiment, changes) for name, experiment in planned.items()}, options)

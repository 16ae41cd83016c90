"""``lm tasks``: which tasks there are, and which of their data sets are prepared here."""

from collections.abc import Mapping
from fnmatch import fnmatch
from pathlib import Path

from experiments.cli import RUNS
from experiments.commands import CONSOLE, listing
from lm.config import SettingError, nearest
from lm.data import rows
from lm.data.tasks import TASKS
from lm.data.tasks.labelled import LABELLED, LabelledTask


def show_tasks(pattern: str = "*", /, runs: Path = RUNS) -> None:
    """List the tasks: how each is answered and scored, and the rows of what is prepared here.

    Args:
        pattern: shell-style pattern over the names of tasks, such as 'multi30k*'.
        runs: folder that holds the runs and their data.
    """
    cache = runs / "cache"
    found = [task for task in (*TASKS.values(), *LABELLED.values()) if fnmatch(task.name, pattern)]
    if not found:
        raise SettingError(f"no task matches {pattern!r}{nearest(pattern, {*TASKS, *LABELLED})}")
    grid, missing = listing("task", "answered", "column", "metrics", "data set", "train", "validation"), set()
    for task in found:
        folder = rows.newest(task.source, "*.*.*", cache)
        sizes = rows.split_sizes(folder) if folder else None  # read without TFDS
        missing |= {task.source} if sizes is None else set()
        names = ", ".join(f"({name})" if name in task.beside else name for name in task.metrics)
        how = f"by a head: {task.kind}" if isinstance(task, LabelledTask) else "in words"
        counts = [rows_in(sizes, split) for split in (task.train, task.validation)]
        grid.add_row(task.name, how, task.column or "–", names, task.source, *counts)
    CONSOLE.print(grid)
    own = {name for name in missing if name.startswith("documentation/")}
    if own:
        CONSOLE.print(f"{', '.join(sorted(own))}: written by the first run that reads them", highlight=False)
    if missing - own:
        command = rows.preparation("NAME", rows.tfds_folders(cache)[0])
        CONSOLE.print(f"To prepare a data set: {command}", highlight=False)


def rows_in(sizes: Mapping[str, int] | None, split: str | None) -> str:
    """How many rows a split has, such as ``validation_matched+validation_mismatched``."""
    if sizes is None:
        return "not prepared"
    return "–" if split is None else f"{sum(sizes.get(name, 0) for name in split.split('+')):,}"

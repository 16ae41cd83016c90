"""The tasks by name: four on the installed documentation, and the paper's benchmarks."""

import copyreg
from collections.abc import Mapping

from lm.data.tasks import benchmarks, documentation
from lm.data.tasks.task import Task
from lm.settings import SettingError, nearest

# for workers: its functions do not pickle, its name does
copyreg.pickle(Task, lambda each: (task, (each.name,)))

TASKS: Mapping[str, Task] = {task.name: task for task in (*documentation.TASKS, *benchmarks.TASKS)}


def task(name: str) -> Task:
    """``TASKS[name]``, or a SettingError with the nearest name."""
    if name not in TASKS:
        raise SettingError(f"there is no task {name!r}{nearest(name, TASKS)}")
    return TASKS[name]

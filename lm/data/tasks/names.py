"""Names of tasks: that of a built-in task, or the path of a task file."""

from pathlib import PurePath

TASK_FILE = ".toml"


def is_task_file(name: str) -> bool:
    """Return whether a name is the path of a task file (``lm.data.tasks.task_files``)."""
    return name.endswith(TASK_FILE)


def task_name(name: str) -> str:
    """Return the name of a task in records and folders: ``reviews.toml`` for ``tasks/reviews.toml``."""
    return PurePath(name).name if is_task_file(name) else name

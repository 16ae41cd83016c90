"""What tasks are called: by a name of this package, or by the file that declares one."""

from pathlib import PurePath

TASK_FILE = ".toml"


def is_task_file(name: str) -> bool:
    """Whether a name is the path of a file that declares a task (``lm.data.tasks.declared``)."""
    return name.endswith(TASK_FILE)


def task_name(name: str) -> str:
    """The name of a task in records and folders: of ``tasks/reviews.toml`` it is ``reviews.toml``."""
    return PurePath(name).name if is_task_file(name) else name

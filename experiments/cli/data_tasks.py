"""``lm data tasks``: the tasks, their metrics, and whether their data are here."""

from collections.abc import Mapping
from fnmatch import fnmatch

from experiments.cli.settings import Runs
from experiments.console import CONSOLE, RUNS, Cell, Sheet, print_line, show_sheet
from experiments.study.paths import check_runs
from lm.config.base import SettingError, did_you_mean
from lm.data.corpus import tfds
from lm.data.tasks.benchmarks import TASKS
from lm.data.tasks.labelled import LABELLED, LabelledTask


def data_tasks(pattern: str = "*", /, runs: Runs = RUNS) -> None:
    """List the tasks: how each is answered and scored, and how many examples are prepared here.

        lm data tasks
        lm data tasks 'multi30k*'

    Args:
        pattern: Shell-style pattern of names of tasks.
    """
    check_runs(runs)
    cache, missing = runs / "cache", set()
    tasks = [task for task in (*TASKS.values(), *LABELLED.values()) if fnmatch(task.name, pattern)]
    if not tasks:
        raise SettingError(f"no task matches {pattern!r}{did_you_mean(pattern, {*TASKS, *LABELLED})}")
    headings = ("task", "answered", "column", "metrics", "data set", "train", "validation")
    sheet: Sheet = {head: [] for head in headings}
    for task in tasks:
        folder = tfds.newest_version(task.source, "*.*.*", cache)
        sizes = tfds.split_sizes(folder) if folder else None  # read without TFDS
        if sizes is None:
            missing.add(task.source)
        metrics = ", ".join(f"({name})" if name in task.unscored_metrics else name for name in task.metrics)
        how = f"by a head: {task.kind}" if isinstance(task, LabelledTask) else "in words"
        counts = [_row_count(sizes, split) for split in (task.train, task.validation)]
        texts = (task.name, how, task.column or "–", metrics, task.source, *counts)
        for head, text in zip(headings, texts, strict=True):
            sheet[head].append(Cell(text))
    show_sheet("Tasks", sheet)
    documentation = {name for name in missing if name.startswith("documentation/")}
    if documentation:
        names = ", ".join(sorted(documentation))
        CONSOLE.print(f"{names}: written by the first run that reads them", highlight=False)
    if missing - documentation:
        command = tfds.preparation_command("NAME", tfds.tfds_folders(cache)[0])
        print_line(f"To prepare a data set: {command}")


def _row_count(sizes: Mapping[str, int] | None, split: str | None) -> str:
    """Return the number of rows of a split, such as ``validation_matched+validation_mismatched``."""
    if sizes is None:
        return "not prepared"
    if split is None:
        return "–"
    return f"{sum(sizes.get(name, 0) for name in split.split('+')):,}"

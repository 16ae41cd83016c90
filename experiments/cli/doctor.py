"""What there is: ``lm doctor`` (devices, versions, data, disk), ``lm tasks``, and ``lm verify`` (good
checkpoints).
"""

import os
import platform
import shutil
import sys
from collections.abc import Iterator, Mapping, Sequence
from contextlib import suppress
from fnmatch import fnmatch
from importlib import metadata
from pathlib import Path

from rich.console import Console

from experiments.console import CONSOLE, RUNS, listing
from experiments.processes.exit_codes import EXIT_CODES
from experiments.runs.stages import stages_of
from lm.data.tasks.benchmarks import TASKS
from lm.data.tasks.labelled import LABELLED, LabelledTask
from lm.data.text import tfds as rows
from lm.data.text.tfds import prepared, tfds_folders
from lm.settings import SettingError, nearest
from lm.train import manifest

PACKAGES = (
    "jax",
    "jaxlib",
    "flax",
    "optax",
    "orbax-checkpoint",
    "grain",
    "tensorflow-datasets",
    "sentencepiece",
)


def examine(runs: Path = RUNS) -> None:
    """Show devices, versions, data found and free disk space.

    Args:
        runs: folder that holds the runs.
    """
    import jax

    console = Console(soft_wrap=True)
    devices = jax.devices()
    memory = (devices[0].memory_stats() or {}).get("bytes_limit")
    console.print(
        f"[bold]devices[/]   {len(devices)} × {devices[0].device_kind}, backend {jax.default_backend()}"
        + (f", {memory / 2**30:.0f} GiB each" if memory else "")
    )
    console.print(
        f"[bold]host[/]      {os.cpu_count()} CPU cores, Python {platform.python_version()}, "
        f"{platform.platform()}"
    )
    console.print("[bold]versions[/]  " + ", ".join(f"{name} {metadata.version(name)}" for name in PACKAGES))
    console.print(
        "[bold]data[/]      looked for in "
        + ", ".join(str(folder) for folder in tfds_folders(runs / "cache"))
    )
    for name in prepared(runs / "cache"):
        console.print(f"          tfds:{name}")
    place = runs.resolve()
    free = shutil.disk_usage(next(path for path in (place, *place.parents) if path.exists())).free
    console.print(f"[bold]disk[/]      {free / 2**30:.1f} GiB free for {place}")
    if free < 2**30:
        console.print(
            "          [yellow]less than 1 GiB: checkpoints of a small model need some 100 MB a row[/]"
        )


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


def verify_runs(run: tuple[Path, ...], /) -> None:
    """Check every file of the checkpoints of runs against the checksums that were saved with them.

    The exit code is 1 if one is bad.

    Args:
        run: folders of runs, of phases, or of many runs, such as runs.
    """
    if not run:
        raise SettingError("lm verify takes one or more folders, such as runs")
    if verify(run):
        sys.exit(EXIT_CODES["failed"])


def verify(folders: Sequence[Path]) -> int:
    """Print each checkpoint of the phases in ``folders``, its size and what is wrong with it; how many are
    bad.

    A folder is that of a run, whose pre-training may lie elsewhere, of a phase, or of many runs; SettingError
    if there is no checkpoint in one.
    """
    bad, seen = 0, set()
    for folder in folders:
        found = [(place, *each) for place in _places(folder) for each in manifest.steps(place).items()]
        if not found:
            raise SettingError(f"{folder} holds no checkpoint; name the folder of a run, or of many")
        for place, step, path in found:
            if (known := (place.resolve(), step)) in seen:
                continue
            seen.add(known)
            fault, size = manifest.fault(path, step), 0
            with suppress(OSError):
                size = sum(file.lstat().st_size for file in path.rglob("*"))
            if path.is_dir():  # a run that goes on has not deleted it meanwhile
                print(f"{path}  {size / 1e6:.1f} MB  {fault or 'good'}", flush=True)
                bad += fault is not None
    return bad


def _places(folder: Path) -> Iterator[Path]:
    """The folders with checkpoints below ``folder``, and that of the pre-training which this run shares."""
    if manifest.steps(folder):
        yield folder
    for up, names, _ in os.walk(folder):
        if "checkpoints" in names:
            names.remove("checkpoints")
            yield Path(up, "checkpoints")
    if (folder / "settings.json").exists():
        for stage in stages_of(folder):
            yield stage.folder / "checkpoints"

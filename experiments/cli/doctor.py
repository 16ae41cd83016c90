"""What is here: ``lm doctor`` (devices, versions, data, disk), ``lm tasks``, ``lm verify`` (checkpoints)."""

import os
import platform
import shutil
import sys
from collections.abc import Iterator, Mapping, Sequence
from contextlib import suppress
from fnmatch import fnmatch
from importlib import metadata
from pathlib import Path

from rich.markup import escape

from experiments.console import CONSOLE, RUNS, UNBROKEN, Cell, Sheet, show_sheet
from experiments.processes.exit_codes import EXIT_CODES
from experiments.processes.memory import has_glibc, tunables
from experiments.runs.stages import COUNTS_FILE, stages_of
from lm.config.base import DataError, SettingError, nearest
from lm.data.corpus import tfds
from lm.data.corpus.token_cache import TOKENS_FOLDER, token_cache_bytes
from lm.data.tasks.benchmarks import TASKS
from lm.data.tasks.labelled import LABELLED, LabelledTask
from lm.files import matches_checksum
from lm.train.runtime import manifest

SHOWN = "jax jaxlib flax optax orbax-checkpoint grain tensorflow-datasets sentencepiece".split()  # versions


def examine(runs: Path = RUNS) -> None:
    """Show devices, versions, data found and free disk space.

    Args:
        runs: folder that holds the runs.
    """
    import jax

    devices, cache, root = jax.devices(), runs / "cache", runs.resolve()
    memory = (devices[0].memory_stats() or {}).get("bytes_limit")
    free = shutil.disk_usage(next(path for path in (root, *root.parents) if path.exists())).free / 2**30
    kind = f"{len(devices)} × {devices[0].device_kind}, backend {jax.default_backend()}"
    lines = [
        ("devices", kind + (f", {memory / 2**30:.0f} GiB each" if memory else "")),
        ("host", f"{os.cpu_count()} CPU cores, Python {platform.python_version()}, {platform.platform()}"),
        ("versions", ", ".join(f"{name} {metadata.version(name)}" for name in SHOWN)),
        ("data", f"looked for in {', '.join(map(str, tfds.tfds_folders(cache)))}"),
        *(("", f"tfds:{name}{damage(name, cache)}") for name in tfds.prepared_sets(cache)),
        ("disk", f"{free:.1f} GiB free for {root}"),
        (
            "",
            f"{token_cache_bytes(cache / TOKENS_FOLDER) / 2**30:.1f} GiB of encoded text in "
            f"{cache / TOKENS_FOLDER}",
        ),
    ]
    if free < 1:
        lines += [("", "[yellow]less than 1 GiB: checkpoints of a small model need some 100 MB a row[/]")]
    lines.append(("memory", about_memory()))
    for name, text in lines:
        UNBROKEN.print(f"[bold]{name:9}[/] {text}")


def about_memory() -> str:
    """How freed memory is kept between the steps of training."""
    if (given := os.environ.get("GLIBC_TUNABLES")) is not None:
        return f"GLIBC_TUNABLES={given}, as it stands in the environment"
    if not has_glibc():
        return "the C library is not glibc: each step of training takes its memory anew"
    return f"commands that train on CPUs set GLIBC_TUNABLES={tunables()}"


def damage(name: str, cache: Path) -> str:
    """What is missing of a data set; "" if all of its files are there."""
    try:
        folder = tfds.find_prepared(name, cache)
        for split in tfds.split_sizes(folder) or ():
            tfds.check_files(folder, split, max_opened=0)
    except (DataError, SettingError) as error:
        return f": [yellow]{escape(str(error))}[/]"
    return ""


def show_tasks(pattern: str = "*", /, runs: Path = RUNS) -> None:
    """List the tasks: how each is answered and scored, and the rows of what is prepared here.

    Args:
        pattern: shell-style pattern over the names of tasks, such as 'multi30k*'.
        runs: folder that holds the runs and their data.
    """
    cache, missing = runs / "cache", set()
    tasks = [task for task in (*TASKS.values(), *LABELLED.values()) if fnmatch(task.name, pattern)]
    if not tasks:
        raise SettingError(f"no task matches {pattern!r}{nearest(pattern, {*TASKS, *LABELLED})}")
    heads = ("task", "answered", "column", "metrics", "data set", "train", "validation")
    sheet: Sheet = {head: [] for head in heads}
    for task in tasks:
        folder = tfds.newest_version(task.source, "*.*.*", cache)
        sizes = tfds.split_sizes(folder) if folder else None  # read without TFDS
        if sizes is None:
            missing.add(task.source)
        metrics = ", ".join(f"({name})" if name in task.unscored_metrics else name for name in task.metrics)
        how = f"by a head: {task.kind}" if isinstance(task, LabelledTask) else "in words"
        counts = [_row_count(sizes, split) for split in (task.train, task.validation)]
        texts = (task.name, how, task.column or "–", metrics, task.source, *counts)
        for head, text in zip(heads, texts, strict=True):
            sheet[head].append(Cell(text))
    show_sheet("Tasks", sheet)
    documentation = {name for name in missing if name.startswith("documentation/")}
    if documentation:
        names = ", ".join(sorted(documentation))
        CONSOLE.print(f"{names}: written by the first run that reads them", highlight=False)
    if missing - documentation:
        command = tfds.preparation_command("NAME", tfds.tfds_folders(cache)[0])
        CONSOLE.print(f"To prepare a data set: {command}", highlight=False)


def _row_count(sizes: Mapping[str, int] | None, split: str | None) -> str:
    """The rows of a split, such as ``validation_matched+validation_mismatched``."""
    if sizes is None:
        return "not prepared"
    return "–" if split is None else f"{sum(sizes.get(name, 0) for name in split.split('+')):,}"


def verify_runs(run: tuple[Path, ...], /) -> None:
    """Check every file of the checkpoints of runs, and tables of counts, against their saved checksums.

    The exit code is 1 if one is bad.

    Args:
        run: folders of stages, of runs, or of many runs, such as runs.
    """
    if not run:
        raise SettingError("lm verify takes one or more folders, such as runs")
    if verify(run):
        sys.exit(EXIT_CODES["failed"])


def verify(folders: Sequence[Path]) -> int:
    """Print each checkpoint and table of counts in ``folders``, its size and what is wrong with it.

    The number of bad ones. A folder is that of a stage, of a run, whose pre-training may lie elsewhere, or of
    many runs; SettingError if there is nothing to check in one.
    """
    bad, seen = 0, set()
    for folder in folders:
        steps = [(parent, *step) for parent in _parents(folder) for step in manifest.steps(parent).items()]
        counts = sorted(folder.rglob(COUNTS_FILE))
        if not steps and not counts:
            raise SettingError(f"{folder} holds no checkpoint; name the folder of a run, or of many")
        for path in counts:
            fault = None if matches_checksum(path) else "does not fit its checksum"
            print(f"{path}  {path.stat().st_size / 1e6:.1f} MB  {fault or 'good'}", flush=True)
            bad += fault is not None
        for parent, step, path in steps:
            if (parent.resolve(), step) in seen:
                continue
            seen.add((parent.resolve(), step))
            fault, size = manifest.find_damage(path, step), 0
            with suppress(OSError):
                size = sum(file.lstat().st_size for file in path.rglob("*"))
            if path.is_dir():  # a run in progress has not deleted it meanwhile
                print(f"{path}  {size / 1e6:.1f} MB  {fault or 'good'}", flush=True)
                bad += fault is not None
    return bad


def _parents(folder: Path) -> Iterator[Path]:
    """The folders with checkpoints below ``folder``, and those of the pre-trainings that this run shares."""
    if manifest.steps(folder):
        yield folder
    for up, names, _ in os.walk(folder):
        if "checkpoints" in names:
            names.remove("checkpoints")
            yield Path(up, "checkpoints")
    if (folder / "settings.json").exists():
        for stage in stages_of(folder):
            yield stage.folder / "checkpoints"

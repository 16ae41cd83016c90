"""``lm doctor``: devices, versions, data and disk; whether checkpoints are whole."""

import os
import platform
import shutil
import sys
from collections.abc import Iterator, Sequence
from contextlib import suppress
from importlib import metadata
from importlib.util import find_spec
from pathlib import Path
from typing import Annotated

import tyro
from rich.markup import escape

from experiments.cli.settings import Runs
from experiments.cli.status import run_folders
from experiments.console import RUNS, UNBROKEN, binary_size
from experiments.processes.exit_codes import EXIT_CODES
from experiments.processes.memory import has_glibc
from experiments.runs.paths import COUNTS_FILE, find_cache, scale_folder
from experiments.study.paths import check_runs
from lm.config.base import DataError, SettingError
from lm.data.corpus import tfds
from lm.data.corpus.token_cache import TOKENS_FOLDER, token_cache_bytes
from lm.devices import visible_gpus
from lm.files import matches_checksum
from lm.train.runtime import manifest

CUDA_PLUGIN = "jax_cuda13_plugin"  # what the extra [gpu] installs


def doctor(
    runs: Runs = RUNS,
    verify: Annotated[
        tuple[Path, ...] | None, tyro.conf.arg(metavar="PATH [PATH ...]", help_behavior_hint="")
    ] = None,
) -> None:
    """Show devices, versions, the data found and the free disk space; or check the files of checkpoints.

    The exit code is 1 if --verify finds a damaged file.

        lm doctor
        lm doctor --verify runs

    Args:
        verify: Check every file of the checkpoints in these folders, and tables of counts, against the
            checksums that were saved with them: folders of stages, of runs, or of many runs, such as a row's.
    """
    check_runs(runs)
    if verify is None:
        examine(runs)
    elif not verify:
        raise SettingError("--verify: name one or more folders of stages, of runs, or of many runs")
    elif find_damage(verify):
        sys.exit(EXIT_CODES["failed"])


def examine(runs: Path) -> None:
    """Print devices, versions, the data found and the free disk space."""
    import jax

    try:
        devices, cache, root = jax.devices(), runs / "cache", runs.resolve()
    except (AssertionError, RuntimeError) as error:  # the first for cuda without its plugin
        asked = f"JAX_PLATFORMS={os.environ.get('JAX_PLATFORMS', '')!r}"
        mend = "Try: JAX_PLATFORMS=cpu lm doctor"
        raise SettingError(f"jax starts no device with {asked} ({error!r}). {mend}") from error
    memory = (devices[0].memory_stats() or {}).get("bytes_limit")
    free = shutil.disk_usage(next(path for path in (root, *root.parents) if path.exists())).free / 2**30
    kind = f"{len(devices)} × {devices[0].device_kind}, backend {jax.default_backend()}"
    lines = [
        ("devices", kind + (f", {memory / 2**30:.0f} GiB each" if memory else "")),
        *(("", f"[yellow]{escape(line)}[/]") for line in unused_gpus(jax.default_backend())),
        ("host", f"{os.cpu_count()} CPU cores, Python {platform.python_version()}"),
        ("", platform.platform()),
        ("versions", versions("jax", "jaxlib", "flax", "optax")),
        ("", versions("orbax-checkpoint", "grain")),
        ("", versions("tensorflow-datasets", "sentencepiece")),
        ("data", f"looked for in {escape(', '.join(map(str, tfds.tfds_folders(cache))))}"),
        *(("", f"tfds:{name}{damage(name, cache)}") for name in tfds.prepared_sets(cache)),
        ("disk", f"{free:.1f} GiB free for {escape(str(root))}"),
        (
            "",
            f"{binary_size(token_cache_bytes(cache / TOKENS_FOLDER))} of encoded text in "
            f"{escape(str(cache / TOKENS_FOLDER))}",
        ),
    ]
    if free < 1:
        lines += [("", "[yellow]less than 1 GiB: checkpoints of a small model need some 100 MB a row[/]")]
    lines.append(("memory", about_memory()))
    for name, text in lines:
        UNBROKEN.print(f"[bold]{name:9}[/] {text}")


def versions(*packages: str) -> str:
    """Return the names and versions of packages, separated by commas."""
    return ", ".join(f"{name} {metadata.version(name)}" for name in packages)


def unused_gpus(backend: str) -> list[str]:
    """Return a line: why jax leaves the GPUs here unused, and how to fix it; none if it uses them."""
    gpus = visible_gpus()
    if backend != "cpu" or not gpus:
        return []
    named = f"{len(gpus)} NVIDIA GPU{'s' * (len(gpus) > 1)} here, which jax does not use: "
    if chosen := os.environ.get("JAX_PLATFORMS"):
        return [f"{named}JAX_PLATFORMS={chosen}. Try: env -u JAX_PLATFORMS lm doctor"]
    if find_spec(CUDA_PLUGIN) is None:
        return [f"{named}{CUDA_PLUGIN} is not installed. Run: pip install 'lm-study[gpu]'"]
    return [f"{named}CUDA does not start. CUDA 13 needs driver 580 or newer; nvidia-smi shows yours"]


def about_memory() -> str:
    """Return how freed memory is kept between the steps of training on a CPU (docs/speed.md)."""
    if (given := os.environ.get("GLIBC_TUNABLES")) is not None:
        return f"steps keep their memory as GLIBC_TUNABLES={escape(given)} says"
    if not has_glibc():
        return "the C library is not glibc: each step of training takes its memory anew"
    return "steps on a CPU keep theirs for the next (GLIBC_TUNABLES, see Speed)"


def damage(name: str, cache: Path) -> str:
    """Return what is missing of a data set; "" if all of its files are there."""
    try:
        folder = tfds.find_prepared(name, cache)
        for split in tfds.split_sizes(folder) or ():
            tfds.check_files(folder, split, max_opened=0)
    except (DataError, SettingError) as error:
        return f": [yellow]{escape(str(error))}[/]"
    return ""


def find_damage(folders: Sequence[Path]) -> int:
    """Print each checkpoint and table of counts, its size and whether it is damaged; return how many are.

    A folder is that of a stage, of a run or of many, whose pre-trainings may be elsewhere; SettingError if it
    holds nothing to check. A run that cannot be read, so that they are not known, counts as damaged.
    """
    for folder in folders:  # before the first of them is read, which may take minutes
        if not folder.is_dir():
            raise SettingError(f"--verify: there is no folder {folder}; name that of a run, or of many")
    damaged, seen = 0, set[Path]()
    for folder in folders:
        parents, unreadable = [*_parents(folder)], []
        for run in run_folders(folder):
            try:
                parents += _shared_parents(run, folder)
            except SettingError as error:
                unreadable.append(error)
                print(error, flush=True)
        damaged += len(unreadable)
        steps = {path: step for parent in parents for step, path in manifest.steps(parent).items()}
        counts = sorted(folder.rglob(COUNTS_FILE))
        if not steps and not counts and not unreadable:
            raise SettingError(f"{folder} holds no checkpoint; name the folder of a run, or of many")
        for path in (*counts, *steps):
            if path.resolve() in seen:
                continue
            seen.add(path.resolve())
            if path in steps:
                fault = manifest.find_damage(path, steps[path])
            else:
                fault = None if matches_checksum(path) else "does not fit its checksum"
            size = 0
            with suppress(OSError):
                size = sum(file.lstat().st_size for file in (path, *path.rglob("*")))
            if path.exists():  # a run in progress has not deleted it meanwhile
                print(f"{path}  {size / 1e6:.1f} MB  {fault or 'good'}", flush=True)
                damaged += fault is not None
    return damaged


def _parents(folder: Path) -> Iterator[Path]:
    """Yield the folders with checkpoints at or below ``folder``."""
    if manifest.steps(folder):
        yield folder
    for parent, names, _ in os.walk(folder):
        if "checkpoints" in names:
            names.remove("checkpoints")
            yield Path(parent, "checkpoints")


def _shared_parents(run: Path, folder: Path) -> list[Path]:
    """Return the folders with checkpoints of a run's stages, unless all of its scale is in ``folder``."""
    scale = scale_folder(run, find_cache(run))
    if folder.resolve() in (scale, *scale.parents):
        return []
    from experiments.runs.stages import stages_of  # with jax

    return [stage.folder / "checkpoints" for stage in stages_of(run)]

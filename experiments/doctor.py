"""``lm doctor``: what a run would find here."""

import os
import platform
import shutil
from importlib import metadata
from pathlib import Path

from rich.console import Console

from experiments.cli import RUNS
from lm.data.rows import prepared, tfds_folders

PACKAGES = ("jax", "jaxlib", "flax", "optax", "orbax-checkpoint", "grain", "tensorflow-datasets", "sentencepiece")


def examine(runs: Path = RUNS) -> None:
    """Show devices, versions, data found and free disk space.

    Args:
        runs: folder that holds the runs.
    """
    import jax

    console = Console(soft_wrap=True)
    devices = jax.devices()
    memory = (devices[0].memory_stats() or {}).get("bytes_limit")
    console.print(f"[bold]devices[/]   {len(devices)} × {devices[0].device_kind}, backend {jax.default_backend()}"
                  + (f", {memory / 2**30:.0f} GiB each" if memory else ""))  # fmt: skip
    console.print(
        f"[bold]host[/]      {os.cpu_count()} CPU cores, Python {platform.python_version()}, {platform.platform()}"
    )
    console.print("[bold]versions[/]  " + ", ".join(f"{name} {metadata.version(name)}" for name in PACKAGES))
    console.print(
        "[bold]data[/]      looked for in " + ", ".join(str(folder) for folder in tfds_folders(runs / "cache"))
    )
    for name in prepared(runs / "cache"):
        console.print(f"          tfds:{name}")
    place = runs.resolve()
    free = shutil.disk_usage(next(path for path in (place, *place.parents) if path.exists())).free
    console.print(f"[bold]disk[/]      {free / 2**30:.1f} GiB free for {place}")
    if free < 2**30:
        console.print("          [yellow]less than 1 GiB: checkpoints of a small model need some 100 MB a row[/]")

"""``lm verify``: which checkpoints of runs are good, and what is wrong with the others. It needs no jax."""

import os
import sys
from collections.abc import Iterator, Sequence
from contextlib import suppress
from pathlib import Path

from experiments.exit_codes import EXIT_CODES
from experiments.folders import cache_of, home_of, load_settings, phases
from lm.config import SettingError
from lm.train import manifest


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
    """Print each checkpoint of the phases in ``folders``, its size and what is wrong with it; how many are bad.

    A folder is that of a run, whose pre-training may lie elsewhere, of a phase, or of many runs; SettingError if there
    is no checkpoint in one.
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
        for phase in phases(load_settings(folder), folder, home_of(folder, cache_of(folder))).values():
            yield phase / "checkpoints"

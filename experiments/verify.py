"""``lm verify``: which checkpoints of runs are good, and what is wrong with the others. It needs no jax."""

import os
from collections.abc import Iterator, Sequence
from contextlib import suppress
from pathlib import Path

from experiments.experiment import Experiment
from experiments.folders import cache_of, home_of, phases
from lm.config import SettingError, from_json
from lm.train import manifest


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
    settings = folder / "settings.json"
    if settings.exists():
        try:
            experiment = from_json(Experiment, settings.read_text())
        except (OSError, ValueError) as error:
            raise SettingError(f"{settings} cannot be read ({error}), so that its pre-training is unknown") from error
        for phase in phases(experiment, folder, home_of(folder, cache_of(folder))).values():
            yield phase / "checkpoints"

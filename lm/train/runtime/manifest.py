"""Checkpoints as folders: manifests with the checksums of all files, and which checkpoints are kept.

A step is written under a temporary name, then its manifest, then it is renamed: a folder with a step's name
was complete. A folder is renamed before it is deleted. This module needs the standard library alone, so that
checkpoints are listed and verified without jax.
"""

import hashlib
import json
import re
import shutil
from collections.abc import Iterator, Mapping
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from errno import ENOSPC
from math import inf
from pathlib import Path
from typing import Any

from lm.config.base import MAX_INT32
from lm.config.training import CheckpointConfig
from lm.files import checksum, json_with_checksum, write

MANIFEST = "manifest.json"
UNFINISHED = "unfinished-"  # before the name of what is no step yet, or no longer
REPLACED = "replaced-"  # before the number of a step while another takes its place; it counts until then

Manifest = dict[str, Any]
Manifests = Mapping[int, Manifest | None]  # by step; None where the manifest is damaged
_FIELDS = {  # name -> type, and that of its values
    "sha256": (str, None),  # of all else
    "step": (int, None),
    "saved": (float, None),  # when [unix seconds]
    "hour": (float, None),  # when the hour began in which it was saved [unix seconds]
    "scores": (dict, float),  # by name
    "losses": (dict, float),  # by the score's name: which of two checkpoints with that score is better
    "arrays": (dict, list),  # [shape, dtype] by name
    "files": (dict, str),  # sha256 by path below the folder
}


class Damage(ValueError):
    """A checkpoint is damaged; the message says how."""


def steps(folder: Path) -> dict[int, Path]:
    """Return the path of each step that was saved completely, in order; it may have been damaged since."""
    paths = {}
    # In reverse order what is being replaced comes first, and what replaces it takes precedence.
    for path in sorted(folder.iterdir(), reverse=True) if folder.is_dir() else ():
        named = re.fullmatch(rf"(?:{REPLACED})?(0|[1-9][0-9]{{0,9}})", path.name)
        if named and int(named[1]) <= MAX_INT32 and path.is_dir():
            paths[int(named[1])] = path
    return dict(sorted(paths.items()))


def find_damage(path: Path, step: int) -> str | None:
    """Return how the checkpoint of ``step`` in the folder ``path`` is damaged, or None; reads every byte."""
    try:
        listed, actual = read_manifest(path, step)["files"], checksums(path)
    except Damage as wrong:
        return str(wrong)
    except OSError as error:
        return f"cannot be read ({error.strerror or error})"
    for name in sorted(listed.keys() | actual.keys()):
        if name not in actual:
            return f"file {name!r} is missing"
        if name not in listed:
            return f"file {name!r} is unknown"
        if listed[name] != actual[name]:
            return f"file {name!r} is changed"
    return None


def read_manifest(path: Path, step: int) -> Manifest:
    """Return the manifest in the folder of ``step``; raise Damage if the manifest itself is damaged."""
    file = path / MANIFEST
    if not file.is_file():
        raise Damage(f"{MANIFEST} is missing")
    try:
        manifest = json.loads(file.read_bytes())
        actual_checksum = checksum(manifest)
        manifest.setdefault("losses", {})  # older ones lack it
    except (OSError, ValueError, RecursionError, AttributeError) as error:
        raise Damage(f"{MANIFEST} cannot be read ({type(error).__name__})") from error
    for name, (kind, inner) in _FIELDS.items():
        value = manifest.get(name)
        values = value.values() if inner and type(value) is dict else ()
        if type(value) is not kind or not all(type(each) is inner for each in values):
            raise Damage(f"{MANIFEST} is none of a checkpoint: its {name} is missing or of another type")
    if manifest["sha256"] != actual_checksum:
        raise Damage(f"{MANIFEST} was changed")
    if manifest["step"] != step:
        raise Damage(f"{MANIFEST} is of step {manifest['step']}")
    return manifest


def manifests(folder: Path) -> dict[int, Manifest | None]:
    """Return the manifest of each step, in order; None where it is damaged."""
    by_step: dict[int, Manifest | None] = {}
    for step, path in steps(folder).items():
        by_step[step] = None
        with suppress(Damage):
            by_step[step] = read_manifest(path, step)
    return by_step


def write_scores(folder: Path, step: int, ranks: Mapping[str, dict[str, float]]) -> None:
    """Put the members ``ranks`` into the manifest of ``step``, if that was saved; raise Damage if damaged."""
    path = steps(folder).get(step)
    if ranks and path is not None:
        draft = folder / f"{UNFINISHED}{step}-scores"  # in the step's own folder it would be an unknown file
        write(draft, _manifest_text(read_manifest(path, step) | dict(ranks)))
        draft.replace(path / MANIFEST)


def prepare_folder(folder: Path, size: int) -> None:
    """Make the folder of checkpoints; raise OSError if it is not writable or ``size`` bytes do not fit."""
    folder.mkdir(parents=True, exist_ok=True)
    clear_leftovers(folder)
    disk = shutil.disk_usage(folder)
    if disk.free < size and disk.total:  # some file systems say 0 of everything
        raise OSError(ENOSPC, f"{size / 1e9:.2g} GB are needed, {disk.free / 1e9:.2g} GB are free")
    probe = folder / f"{UNFINISHED}probe"
    probe.mkdir()
    probe.rmdir()


def publish(draft: Path, manifest: Manifest, config: CheckpointConfig) -> None:
    """Complete the manifest of the checkpoint in the folder ``draft``, and rename the folder to its step."""
    folder, step = draft.parent, manifest["step"]
    before = {n: each for n, each in manifests(folder).items() if n < step}
    manifest |= {"hour": hour_start(before, manifest["saved"], config), "files": checksums(draft)}
    write(draft / MANIFEST, _manifest_text(manifest))
    final = folder / str(step)
    if final.exists():
        final.rename(folder / f"{REPLACED}{step}")
    draft.rename(final)


def garbage_collect(folder: Path, last: int, config: CheckpointConfig) -> None:
    """Delete checkpoints that are not kept once ``last`` is the newest step, and what a kill left undone.

    Steps after ``last`` are deleted: the run has resumed from an earlier one.
    """
    by_step, paths = manifests(folder), steps(folder)
    retained = steps_to_keep({step: each for step, each in by_step.items() if step <= last}, config)
    for step in by_step.keys() - retained:
        _remove(paths[step])
    clear_leftovers(folder)


def clear_leftovers(folder: Path) -> None:
    """Delete what a kill or a failed save left; a step that it was to replace gets its name back."""
    for path in [*folder.iterdir()]:
        final = folder / path.name.removeprefix(REPLACED)
        if path.name.startswith(UNFINISHED):
            _delete_path(path)
        elif final != path and final.exists():
            _remove(path)
        elif final != path:
            path.rename(final)


def _remove(path: Path) -> None:
    _delete_path(path.rename(path.with_name(f"{UNFINISHED}{path.name}-removed")))


def _delete_path(path: Path) -> None:
    if path.is_dir() and not path.is_symlink():
        shutil.rmtree(path, ignore_errors=True)
    else:
        path.unlink(missing_ok=True)


def _manifest_text(manifest: Manifest) -> str:
    """Return the text of a manifest's file, with its checksum."""
    return json_with_checksum(manifest).strip()


def checksums(folder: Path) -> dict[str, str]:
    """Return {path below folder: sha256} of all files but the manifest; raise Damage at a link or device."""

    def files(below: Path) -> Iterator[Path]:
        for path in below.iterdir():
            if path.is_symlink() or not (path.is_dir() or path.is_file()):
                raise Damage(f"{str(path.relative_to(folder))!r} is neither a file nor a folder")
            yield from files(path) if path.is_dir() else [path]

    def sha256(path: Path) -> str:
        with path.open("rb") as file:
            return hashlib.file_digest(file, "sha256").hexdigest()

    if folder.is_symlink():
        raise Damage("is a symbolic link")
    paths = {str(path.relative_to(folder)): path for path in files(folder)}
    paths.pop(MANIFEST, None)
    with ThreadPoolExecutor(8) as pool:
        return dict(zip(paths, pool.map(sha256, paths.values()), strict=True))


def best(manifests: Manifests, name: str, kind: str) -> int | None:
    """Return the step with the "lowest" or "highest" (``kind``) score of this name; None if no step has one.

    Of steps with equal scores it is the one with the lowest loss, or else the last.
    """
    sign = {"lowest": 1, "highest": -1}[kind]
    ranks: dict[int, tuple[float, float, int]] = {}  # the least is the best
    for step, manifest in manifests.items():
        if manifest is not None and name in manifest["scores"]:
            ranks[step] = sign * manifest["scores"][name], manifest["losses"].get(name, inf), -step
    return min(ranks, key=ranks.__getitem__, default=None)


def hour_start(manifests: Manifests, saved: float, config: CheckpointConfig) -> float:
    """Return when the hour of a checkpoint ``saved`` after these began [unix seconds].

    ``steps_to_keep`` says what an hour is.
    """
    last = next((each for _, each in sorted(manifests.items(), reverse=True) if each), None)
    if last is None:
        return saved
    return last["saved"] if _ends_hour(last, config) else last["hour"]


def steps_to_keep(manifests: Manifests, config: CheckpointConfig) -> set[int]:
    """Return the steps to keep: the newest, the best by each score, those named, and one for each hour.

    An hour begins with the first checkpoint, and again with each one that ends an hour: the first that is
    saved at least ``config.hours`` after it began. A clock that is set back or forward by more ends it once.
    (docs/choices.md says why these are not orbax's preservation policies.)
    """
    names = {name for each in manifests.values() if each for name in each["scores"]}
    bests = {step for name in names if (step := best(manifests, name, config.best)) is not None}
    hourly = {step for step, each in manifests.items() if each and _ends_hour(each, config)}
    named = manifests.keys() & {*config.steps}
    return {*sorted(manifests)[-config.keep :], *bests, *named, *hourly}


def _ends_hour(manifest: Manifest, config: CheckpointConfig) -> bool:
    return bool(config.hours) and abs(manifest["saved"] - manifest["hour"]) >= 3600 * config.hours

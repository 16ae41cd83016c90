"""What proves a checkpoint: a manifest with the checksum of every file, sealed by its own; and which ones
stay.

Only the standard library, so that checkpoints are listed and verified without jax.
"""

import hashlib
import json
import re
from collections.abc import Iterator, Mapping
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from math import inf
from pathlib import Path
from typing import Any

from lm.files import checksum, seal, write
from lm.train.config import CheckpointConfig

MANIFEST = "manifest.json"
UNFINISHED = "unfinished-"  # before the name of what is no step yet, or no more
REPLACED = "replaced-"  # before the number of a step while another takes its place; it counts until then

Manifest = dict[str, Any]
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


class Fault(ValueError):
    """What is wrong with a checkpoint."""


def steps(folder: Path) -> dict[int, Path]:
    """Where each step lies that was saved completely, in order; they may have been damaged since."""
    found = {}
    # what is being replaced comes first
    for path in sorted(folder.iterdir(), reverse=True) if folder.is_dir() else ():
        named = re.fullmatch(rf"(?:{REPLACED})?(0|[1-9][0-9]{{0,8}})", path.name)
        if named and path.is_dir():
            found[int(named[1])] = path
    return dict(sorted(found.items()))


def fault(path: Path, step: int) -> str | None:
    """What is wrong with the checkpoint of ``step`` in the folder ``path``, or None; every byte is read."""
    try:
        due, found = read(path, step)["files"], checksums(path)
    except Fault as wrong:
        return str(wrong)
    except OSError as error:
        return f"cannot be read ({error.strerror or error})"
    for name in sorted(due.keys() | found.keys()):
        if due.get(name) != found.get(name):
            kind = "missing" if name not in found else "unknown" if name not in due else "changed"
            return f"file {name!r} is {kind}"
    return None


def read(path: Path, step: int) -> Manifest:
    """The manifest in the folder of ``step``, whose files may be damaged; Fault if it is not whole itself."""
    file = path / MANIFEST
    if not file.is_file():
        raise Fault(f"{MANIFEST} is missing")
    try:
        manifest = json.loads(file.read_bytes())
        sealed = checksum(manifest)
        manifest.setdefault("losses", {})  # older ones lack it
    except (OSError, ValueError, RecursionError, AttributeError) as error:
        raise Fault(f"{MANIFEST} cannot be read ({type(error).__name__})") from error
    for name, (kind, of) in _FIELDS.items():
        values = manifest.get(name)
        if type(values) is not kind or not all(
            type(value) is of for value in (values.values() if of else ())
        ):
            raise Fault(f"{MANIFEST} is none of a checkpoint: its {name} is missing or of another type")
    if manifest["sha256"] != sealed:
        raise Fault(f"{MANIFEST} was changed")
    if manifest["step"] != step:
        raise Fault(f"{MANIFEST} is of step {manifest['step']}")
    return manifest


def sealed(about: Manifest) -> str:
    """What is written of a manifest: every byte of it says something."""
    return seal(about).strip()


def rank(folder: Path, step: int, ranks: Mapping[str, dict[str, float]]) -> None:
    """Put the ``ranks`` of ``step`` into its manifest, if there are any and it is there; Fault if that is
    damaged.
    """
    place = steps(folder).get(step)
    if ranks and place is not None:
        draft = folder / f"{UNFINISHED}{step}-scores"  # in the step's own folder it would be an unknown file
        write(draft, sealed(read(place, step) | ranks))
        draft.replace(place / MANIFEST)


def manifests(folder: Path) -> dict[int, Manifest | None]:
    """The manifest of each step, in order; None where there is a fault in it."""
    found: dict[int, Manifest | None] = {}
    for step, path in steps(folder).items():
        found[step] = None
        with suppress(Fault):
            found[step] = read(path, step)
    return found


def checksums(folder: Path) -> dict[str, str]:
    """``{path below folder: sha256}`` of every file but the manifest; Fault if there is a link or a
    device.
    """

    def files(below: Path) -> Iterator[Path]:
        for path in below.iterdir():
            if path.is_symlink() or not (path.is_dir() or path.is_file()):
                raise Fault(f"{str(path.relative_to(folder))!r} is neither a file nor a folder")
            yield from files(path) if path.is_dir() else [path]

    def checksum(path: Path) -> str:
        with path.open("rb") as file:
            return hashlib.file_digest(file, "sha256").hexdigest()

    if folder.is_symlink():
        raise Fault("is a symbolic link")
    paths = {str(path.relative_to(folder)): path for path in files(folder)}
    paths.pop(MANIFEST, None)
    with ThreadPoolExecutor(8) as pool:
        return dict(zip(paths, pool.map(checksum, paths.values()), strict=True))


def best(manifests: Mapping[int, Manifest | None], name: str, kind: str) -> int | None:
    """The step with the "lowest" or "highest" (``kind``) score of this name; None without.

    Of several with the same score the one with the lowest loss, else the last.
    """
    sign = {"lowest": 1, "highest": -1}[kind]
    scored = {step: each for step, each in manifests.items() if each and name in each["scores"]}
    ranks = {n: (sign * m["scores"][name], m["losses"].get(name, inf), -n) for n, m in scored.items()}
    return min(ranks, key=ranks.__getitem__, default=None)


def hour(manifests: Mapping[int, Manifest | None], saved: float, config: CheckpointConfig) -> float:
    """When the hour began in which a checkpoint is ``saved`` after these [unix seconds]; see ``kept``."""
    last = next((each for _, each in sorted(manifests.items(), reverse=True) if each), None)
    if last is None:
        return saved
    return last["saved"] if _ends_hour(last, config) else last["hour"]


def kept(manifests: Mapping[int, Manifest | None], config: CheckpointConfig) -> set[int]:
    """Which of these steps stay: the newest, the best by each score, and each that ended an hour.

    An hour begins with the first checkpoint, and with each that ends one: the first saved at least
    ``config.hours`` after its begin. A clock that is put back or forward by more ends it once.
    """
    names = {name for each in manifests.values() if each for name in each["scores"]}
    bests = {best(manifests, name, config.best) for name in names}
    return {
        *sorted(manifests)[-config.keep :],
        *bests,
        *(n for n, m in manifests.items() if m and _ends_hour(m, config)),
    }


def _ends_hour(manifest: Manifest, config: CheckpointConfig) -> bool:
    return bool(config.hours) and abs(manifest["saved"] - manifest["hour"]) >= 3600 * config.hours

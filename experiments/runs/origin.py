"""What a phase was begun with: the one record that going on, reading, comparing and pooling runs ask.

``origin.json`` in the folder of each phase says it, sealed by a checksum. Going on with other settings, data,
code or packages is refused, unless it is allowed. Of a finished phase, which others may start from, it is
settings, vocabulary and data that must fit.
"""

import hashlib
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

from experiments.study.experiment import setting_changes
from lm import settings as config
from lm.files import seal, unseal, write
from lm.settings import SettingError, nearest

FILE = "origin.json"

FINISHED = ("settings", "vocabulary", "data")  # what is compared of a finished phase
ORIGINS = (*FINISHED, "code", "packages")  # and of one that is gone on with
# of experiments.runs: what changes numbers, settings apart
CODE = ("stages", "prepare", "recipes", "session", "run")

Origin = Mapping[str, Mapping[str, Any]]  # of ORIGINS: name -> value


def allowed(names: str) -> frozenset[str]:
    """The ORIGINS named in the option --allow, separated by commas; SettingError for unknown ones."""
    found = frozenset(filter(None, names.split(",")))
    for name in sorted(found - set(ORIGINS)):
        raise SettingError(f"--allow {name!r} is nothing that can be allowed{nearest(name, ORIGINS)}")
    return found


def read(folder: Path) -> dict[str, Any]:
    """The record of the phase in ``folder``; SettingError if it is missing, or is not as it was written."""
    path = folder / FILE
    try:
        found = unseal(path.read_bytes(), path)
    except FileNotFoundError as error:
        raise SettingError(f"{path} is missing, which says what was trained there") from error
    if wrong := [name for name in (*ORIGINS, "allowed") if not _is_said(name, found.get(name))]:
        raise SettingError(f"{path} says nothing of {', '.join(wrong)}: it was not written by this version")
    return found


def _is_said(name: str, value: Any) -> bool:
    """Whether this is what ``record`` writes under a name."""
    if name == "allowed":
        return isinstance(value, list) and all(
            isinstance(each, dict) and isinstance(each.get("changed"), list) for each in value
        )
    if not isinstance(value, dict) or (name == "vocabulary" and "fingerprint" not in value):
        return False
    return name == "settings" or all(key.strip() and isinstance(text, str) for key, text in value.items())


def record(folder: Path, now: Origin, past: Sequence[Mapping[str, Any]] = ()) -> None:
    """Write what the stage in ``folder`` is trained with; ``past``: what changed since it was started."""
    write(folder / FILE, seal({**now, "allowed": [*past]}))


def check(
    folder: Path, now: Origin, state: str, allow: frozenset[str], say: Callable[[str], object] = print
) -> None:
    """Compare the phase in ``folder``, whose ``state`` is "new", "begun" or "finished", with what is known
    ``now``.

    SettingError with the differences that are not in ``allow``; those that are, are said and kept in
    origin.json.
    """
    from lm.train import log  # brings jax along, which comparing settings need not wait for

    found, past = {}, []
    if state != "new":
        try:
            there = read(folder)
            past = there["allowed"]
        except SettingError as error:
            there, unknown = {}, str(error)
        for name in FINISHED if state == "finished" else ORIGINS:
            if name in now and (
                lines := setting_changes(there[name], now[name]) if there else [f"not known: {unknown}"]
            ):
                found[name] = [f"{name}: {line}" for line in lines]
    text = "".join(f"\n  {line}" for lines in found.values() for line in lines)
    if refused := [name for name in found if name not in allow]:
        raise SettingError(
            f"{folder} was {'trained' if state == 'finished' else 'begun'} with other "
            f"{' and '.join(refused)}:"
            f"{text}\nchoose other --runs, delete it, or go on with --allow {','.join(found)}"
        )
    if found:
        say(f"{folder}: allowed:{text}")
        past = [*past, {"time": log.now(), "changed": sum(found.values(), [])}]
    if state == "new" or (found and state == "begun"):
        record(folder, now, past)


def code() -> dict[str, str]:
    """``{file: start of its sha256}`` of the library, and of what of the study makes numbers."""
    root = Path(config.__file__).parents[1]
    files = [
        *sorted(root.glob("lm/**/*.py")),
        *(root / "experiments" / "runs" / f"{name}.py" for name in CODE),
    ]
    return {str(file.relative_to(root)): hashlib.sha256(file.read_bytes()).hexdigest()[:12] for file in files}

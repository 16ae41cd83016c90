"""What a phase was begun with. Going on with other settings, data, code or packages is refused, unless it is allowed.

``origin.json`` in the folder of each phase says it. Of a finished phase, which others may start from, it is settings,
vocabulary and data that must fit.
"""

import hashlib
import json
from collections.abc import Callable, Mapping
from dataclasses import asdict
from pathlib import Path
from typing import Any

from experiments.experiment import BASELINE, Experiment
from lm import config
from lm.config import SettingError, nearest, parse_json
from lm.files import write

FINISHED = ("settings", "vocabulary", "data")  # what is compared of a finished phase
ORIGINS = (*FINISHED, "code", "packages")  # and of one that is gone on with
FREE = (  # settings that change no number of what is done: a run may go on elsewhere, or past what stopped it
    "mesh", "data.workers", "guard.non_finite", "guard.in_a_row", "guard.failed_save", "pretraining.keep_hours",
    "finetuning.keep_hours",
)  # fmt: skip
SHOWN = 12  # differences of a kind, at most [lines]

Origin = Mapping[str, Mapping[str, Any]]  # of ORIGINS: name -> value


def allowed(names: str) -> frozenset[str]:
    """Of ORIGINS those named in the option --allow, with commas between them; SettingError for what is none."""
    found = frozenset(filter(None, names.split(",")))
    for name in sorted(found - set(ORIGINS)):
        raise SettingError(f"--allow {name!r} is nothing that can be allowed{nearest(name, ORIGINS)}")
    return found


def settings_of(experiment: Experiment) -> dict[str, Any]:
    """``{path: value}`` of the settings that change numbers, with the values that JSON has."""
    return flat(json.loads(json.dumps(asdict(experiment))))


def flat(settings: Mapping[str, Any], prefix: str = "") -> dict[str, Any]:
    """``{path: value}`` of nested settings out of JSON, without those of FREE."""
    found = {}
    for name, value in settings.items():
        if prefix + name not in FREE:
            found |= flat(value, f"{prefix}{name}.") if isinstance(value, dict) else {prefix + name: value}
    return found


def changes(old: Mapping[str, Any], new: Mapping[str, Any]) -> list[str]:
    """A line for each difference. A setting that the old ones lack is newer, and was what the baseline has."""
    old = {name: value for name, value in settings_of(BASELINE).items() if name in new} | old
    names = [name for name in new | old if name not in old or name not in new or old[name] != new[name]]
    lines = [f"{name}: {old.get(name, 'none')} -> {new.get(name, 'none')}" for name in names]
    return lines if len(lines) <= SHOWN else [*lines[:SHOWN], f"and {len(lines) - SHOWN} more"]


def check(folder: Path, now: Origin, state: str, allow: frozenset[str], say: Callable[[str], object] = print) -> None:
    """Compare the phase in ``folder``, whose ``state`` is "new", "begun" or "finished", with what it has ``now``.

    SettingError with the differences that are not in ``allow``; those that are, are said and kept in origin.json.
    """
    from lm.train import log  # brings jax along, which comparing settings need not wait for

    path, found, past = folder / "origin.json", {}, []
    if state != "new" and path.exists():
        there = _read(path)
        past = there.get("allowed", past)
        for name in FINISHED if state == "finished" else ORIGINS:
            lines = changes(there[name], now[name]) if name in there else [f"not known: {path} is damaged"]
            found |= {name: [f"{name}: {line}" for line in lines]} if lines else {}
    text = "".join(f"\n  {line}" for lines in found.values() for line in lines)
    if refused := [name for name in found if name not in allow]:
        raise SettingError(
            f"{folder} was {'trained' if state == 'finished' else 'begun'} with other {' and '.join(refused)}:{text}\n"
            f"choose other --runs, delete it, or go on with --allow {','.join(found)}"
        )
    if found:
        say(f"{folder}: allowed:{text}")
        past = [*past, {"time": log.now(), "changed": sum(found.values(), [])}]
    if state == "new" or not path.exists() or (found and state == "begun"):
        write(path, json.dumps({**now, "allowed": past}, indent=1) + "\n")


def _read(path: Path) -> dict[str, Any]:
    """What is whole of a file that may be damaged."""
    try:
        found = parse_json(path.read_bytes(), path)
        kinds = dict.fromkeys(ORIGINS, dict) | {"allowed": list}
        return {name: found[name] for name, kind in kinds.items() if isinstance(found.get(name), kind)}
    except (ValueError, AttributeError):
        return {}


def code() -> dict[str, str]:
    """``{file: start of its sha256}`` of the library."""
    root = Path(config.__file__).parent
    files = sorted(root.rglob("*.py"))
    return {str(file.relative_to(root.parent)): hashlib.sha256(file.read_bytes()).hexdigest()[:12] for file in files}

"""How two experiments, or the settings that a run recorded and those of now, differ."""

import json
from collections.abc import Mapping
from functools import cache
from typing import Any

from experiments.study.experiment import BASELINE, Experiment, PretrainingPhase
from lm.config.base import diff, leaves, unused_settings


def relevant_diff(old: Experiment, new: Experiment) -> dict[str, tuple[Any, Any]]:
    """Return ``{path: (old value, new value)}`` of the settings that differ and that ``new`` reads."""
    changed = diff(old, new)
    unread = unused_settings(new, changed)
    return {path: pair for path, pair in changed.items() if path not in unread}


# Settings that change no result: a run may resume on other devices, or past what stopped it.
NON_SEMANTIC = (
    "mesh",
    "data.workers",
    "data.encoders",
    "data.cache_size",
    "guard.non_finite",
    "guard.in_a_row",
    "guard.failed_save",
    "pretraining.keep_hours",
    "finetuning.keep_hours",
)
MAX_LISTED = 12  # changes of settings in an error message [lines]


def result_settings(experiment: Experiment) -> dict[str, Any]:
    """Return ``{path: value}`` of the settings that change results, with values as JSON has them."""
    settings = {path: value for path, value in leaves(experiment) if not path.startswith(NON_SEMANTIC)}
    return {path: _in_json(value) for path, value in settings.items()}


def _in_json(value: Any) -> Any:
    """Return a setting's value as JSON has it; a phase of pre-training is its text."""
    if isinstance(value, tuple):
        return [_in_json(each) for each in value]
    return str(value) if isinstance(value, PretrainingPhase) else value


def flatten(nested: Mapping[str, Any], prefix: str = "") -> dict[str, Any]:
    """Return ``{path: value}`` of nested settings, as JSON has them, without those that change no result."""
    flat: dict[str, Any] = {}
    for name, value in nested.items():
        path = prefix + name
        if path in NON_SEMANTIC:
            continue
        if isinstance(value, dict):
            flat |= flatten(value, f"{path}.")
        elif path == "pretraining.phases":
            flat[path] = [str(PretrainingPhase.parse(json.dumps(phase))) for phase in value]
        else:
            flat[path] = value
    return flat


@cache
def _baseline_settings() -> dict[str, Any]:
    return result_settings(BASELINE)


def setting_changes(old: Mapping[str, Any], new: Mapping[str, Any]) -> list[str]:
    """Return a line per difference between recorded settings, at most MAX_LISTED.

    A setting that ``old`` lacks was added since, and had the baseline's value.
    """
    old = {name: value for name, value in _baseline_settings().items() if name in new} | dict(old)
    names = [name for name in {**new, **old} if name not in old or name not in new or old[name] != new[name]]
    lines = [f"{name}: {old.get(name, 'none')} -> {new.get(name, 'none')}" for name in names]
    return lines if len(lines) <= MAX_LISTED else [*lines[:MAX_LISTED], f"and {len(lines) - MAX_LISTED} more"]

"""Settings as the words of a command line, which parses them back to the same values."""

from collections.abc import Mapping
from functools import cache
from typing import Any, get_type_hints

from experiments.study.experiment import Experiment


def setting_arguments(changes: Mapping[str, Any]) -> list[str]:
    """Return the words that set each ``{path: value}`` on the command line; a shell has to quote them."""
    return [word for path, value in changes.items() for word in _words(path, value)]


def _words(path: str, value: Any) -> list[str]:
    if _is_switch(path):
        group, dot, last = path.rpartition(".")
        return [f"--{path}" if value else f"--{group}{dot}no-{last}"]
    if isinstance(value, tuple):
        return [f"--{path}", *map(str, value)]
    text = str(value)
    if text.startswith("-"):  # as a word of its own it might be taken for an option
        return [f"--{path}={text}"]
    return [f"--{path}", text]


@cache
def _is_switch(path: str) -> bool:
    """Return whether a setting is either on or off, and not None, as the flag alone says."""
    kind: Any = Experiment
    for name in path.split("."):
        kind = get_type_hints(kind)[name]
    return kind is bool


def shown_value(value: Any) -> str:
    """Return a value as it is written on the command line."""
    if isinstance(value, tuple):
        return " ".join(map(str, value)) or "none"
    return f"{value:.6g}" if isinstance(value, float) else str(value)

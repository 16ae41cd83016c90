"""Writes experiments/study/setting_paths.py, the type of every setting by its path.

Run it when settings change:

python tests/golden/make_setting_paths.py
"""

import dataclasses
import subprocess
import sys
import types
import typing
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from experiments.study.experiment import Experiment

PLACE = Path(__file__).parents[2] / "experiments/study/setting_paths.py"
# a user's module adds choices to these
EXTENSIBLE = ("objective.noise", "optimizer.name", "loss.name", "mixer.kind", "mlp.activation")

HEAD = '''"""The type of every setting by its path, for type checkers and the completion of editors.

Made from the settings' classes by tests/golden/make_setting_paths.py; not to be edited.
"""
'''


def paths(cls: type, prefix: str = "") -> Iterator[tuple[str, Any]]:
    """Yield (path, type) of every setting and group of settings of a nested dataclass."""
    hints = typing.get_type_hints(cls)
    for field in dataclasses.fields(cls):
        kind = hints[field.name]
        yield prefix + field.name, kind
        if dataclasses.is_dataclass(kind):
            yield from paths(kind, f"{prefix}{field.name}.")


def written(kind: Any) -> str:
    """Return a type as source code."""
    origin, arguments = typing.get_origin(kind), typing.get_args(kind)
    if origin is typing.Literal:
        return f"Literal[{', '.join(map(repr, arguments))}]"
    if origin is tuple:
        return f"tuple[{written(arguments[0])}, ...]"
    if origin in (typing.Union, types.UnionType):
        return " | ".join(map(written, arguments))
    return "None" if kind is type(None) else kind.__name__


def outdated() -> list[str]:
    """Return the paths whose type the module does not say, or which no setting has any more."""
    from experiments.study.setting_paths import Change, Changes

    written_types = typing.get_type_hints(Changes)
    types_now = {
        path: (str if path.endswith(EXTENSIBLE) else kind) | Change for path, kind in paths(Experiment)
    }
    names = types_now | written_types
    return [path for path in names if types_now.get(path) != written_types.get(path)]


def module() -> str:
    """Return the source of the module."""
    entries, imported = [], {("experiments.study.experiment", "Experiment")}
    for path, kind in paths(Experiment):
        for cls in (kind, *typing.get_args(kind)):
            if dataclasses.is_dataclass(cls):
                imported.add((cls.__module__, cls.__name__))
        name = "str" if path.endswith(EXTENSIBLE) else written(kind)
        entries.append(f'"{path}": {name} | Change,')
    lines = [
        HEAD,
        "from collections.abc import Callable",
        "from typing import Any, Literal, TypedDict",
        *(f"from {name} import {cls}" for name, cls in sorted(imported)),
        "Change = Callable[[Any, Experiment], Any]  # of (old value, experiment)",
        'Changes = TypedDict("Changes", {',
        *entries,
        "}, total=False)",
    ]
    source = "\n".join(lines)
    for command in (["check", "--select", "I", "--fix-only", "--quiet"], ["format"]):
        ruff = [sys.executable, "-m", "ruff", *command, "--stdin-filename", str(PLACE), "-"]
        source = subprocess.run(ruff, input=source, capture_output=True, text=True, check=True).stdout
    return source


if __name__ == "__main__":
    PLACE.write_text(module())

"""What a stage was started with: the one record that resuming, reading, comparing and pooling runs use.

``origin.json`` in the folder of each stage holds it, sealed by a checksum. Resuming with other settings,
data, code or packages is refused, unless it is allowed. Of a finished stage, which others may start from,
only settings, vocabulary and data must be the same: code can no longer change its numbers.
"""

import ast
import hashlib
from collections.abc import Callable, Mapping, Sequence
from functools import cache
from pathlib import Path
from typing import Any

from experiments.study.plugins import ORIGIN_FILE, STUDY_OPTION, study_files
from experiments.study.settings_diff import setting_changes
from lm.config import base as config
from lm.config.base import SettingError, nearest
from lm.files import json_with_checksum, parse_with_checksum, write

FILE = ORIGIN_FILE

FINISHED = ("settings", "vocabulary", "data")  # what is compared of a finished stage
ORIGINS = (*FINISHED, "code", "packages")  # and of one that resumes
# modules beside this that change numbers
CODE = (
    "stages",
    "vocabularies",
    "prepare",
    "recipes",
    "session",
    "run",
    "scores",
    "counted",
)

Origin = Mapping[str, Mapping[str, Any]]  # of ORIGINS: name -> value


def allowed(names: str) -> frozenset[str]:
    """The ORIGINS named in the option --allow, separated by commas; SettingError for unknown ones."""
    allow = frozenset(filter(None, names.split(",")))
    for name in sorted(allow - set(ORIGINS)):
        raise SettingError(f"--allow {name!r} is unknown{nearest(name, ORIGINS)}")
    return allow


def read(folder: Path) -> dict[str, Any]:
    """The record of the stage in ``folder``; SettingError if it is missing, or is not as it was written."""
    path = folder / FILE
    try:
        origin = parse_with_checksum(path.read_bytes(), path)
    except FileNotFoundError as error:
        raise SettingError(f"{path} is missing, which records what was trained there") from error
    if wrong := [name for name in (*ORIGINS, "allowed") if not _is_valid(name, origin.get(name))]:
        raise SettingError(f"{path} lacks {', '.join(wrong)}: it was not written by this version")
    return origin


def _is_valid(name: str, value: Any) -> bool:
    """Whether this is what ``record`` writes under a name."""
    if name == "allowed":
        changes = value if isinstance(value, list) else [None]
        return all(isinstance(change, dict) and isinstance(change.get("changed"), list) for change in changes)
    if not isinstance(value, dict) or (name == "vocabulary" and "fingerprint" not in value):
        return False
    return name == "settings" or all(key.strip() and isinstance(text, str) for key, text in value.items())


def record(folder: Path, origin: Origin, past: Sequence[Mapping[str, Any]] = ()) -> None:
    """Write what the stage in ``folder`` is trained with; ``past``: what changed since it was started."""
    write(folder / FILE, json_with_checksum({**origin, "allowed": [*past]}))


def check(
    folder: Path, current: Origin, state: str, allow: frozenset[str], say: Callable[[str], object] = print
) -> None:
    """Compare the stage in ``folder``, which is "new", "begun" or "finished", with the ``current`` origin.

    SettingError with the differences that are not in ``allow``; allowed ones are reported and recorded.
    """
    from lm.train.runtime import log  # brings jax along, which comparing settings need not wait for

    changes: dict[str, list[str]] = {}
    past, unknown = [], ""
    if state != "new":
        try:
            recorded = read(folder)
            past = recorded["allowed"]
        except SettingError as error:
            unknown = f"not known: {error}"
        for name in FINISHED if state == "finished" else ORIGINS:
            if name in current:
                lines = [unknown] if unknown else setting_changes(recorded[name], current[name])
                changes |= {name: [f"{name}: {line}" for line in lines]} if lines else {}
    text = "".join(f"\n  {line}" for lines in changes.values() for line in lines)
    if refused := [name for name in changes if name not in allow]:
        done, names = "trained" if state == "finished" else "started", " and ".join(refused)
        raise SettingError(
            f"{folder} was {done} with other {names}:{text}\nchoose other --runs, delete it, or accept the "
            f"change with --allow {','.join(changes)}"
        )
    if changes:
        say(f"{folder}: allowed:{text}")
        past = [*past, {"time": log.now(), "changed": sum(changes.values(), [])}]
    if state == "new" or (changes and state == "begun"):
        record(folder, current, past)


def code() -> dict[str, str]:
    """Return ``{file: digest}`` of the library, what of the study makes numbers, and own modules.

    A digest is of what Python does, so that another comment, docstring or layout is no other code.
    """
    root = Path(config.__file__).parents[2]
    files = [*sorted(root.glob("lm/**/*.py")), *(root / f"experiments/runs/{name}.py" for name in CODE)]
    named = {str(file.relative_to(root)): file for file in files}
    named |= {f"{STUDY_OPTION} {file.name}": file for file in study_files()}
    return {name: code_digest(file.read_bytes()) for name, file in named.items()}


@cache  # a process asks several times, and reading the syntax of all files takes a quarter of a second
def code_digest(source: bytes) -> str:
    """Return the start of the sha256 of a module's syntax tree, the same on every version of Python."""
    parts: list[str] = []
    _write_syntax(ast.parse(source), parts)
    return hashlib.sha256("\0".join(parts).encode()).hexdigest()[:12]


def _write_syntax(node: Any, parts: list[str]) -> None:
    """Append to ``parts`` what a node consists of, except for strings that are statements: they do nothing.

    ``ast.dump`` and ``ast.unparse`` write one tree differently from version to version. What is absent is
    left out, since versions add fields.
    """
    if isinstance(node, list):
        for each in node:
            _write_syntax(each, parts)
        parts.append("]")
    elif isinstance(node, ast.AST):
        if _is_text_alone(node):
            return
        parts.append(type(node).__name__)
        for name in node._fields:
            value = getattr(node, name, None)
            if isinstance(node, ast.JoinedStr):  # some versions end it with an empty text
                value = [each for each in node.values if not _is_empty_text(each)]
            if value is not None and value != [] and name != "kind":  # the u of u"text"
                parts.append(name)
                _write_syntax(value, parts)
        parts.append(")")
    else:
        parts.append(ascii(node))


def _is_text_alone(node: ast.AST) -> bool:
    """Return whether a node is a statement that is only a string, such as a docstring."""
    return (
        isinstance(node, ast.Expr)
        and isinstance(node.value, ast.Constant)
        and isinstance(node.value.value, str)
    )


def _is_empty_text(node: ast.AST) -> bool:
    return isinstance(node, ast.Constant) and node.value == ""

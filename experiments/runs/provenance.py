"""Keeps one record of what a stage was trained with, which resuming, reading, comparing and pooling runs use.

``origin.json`` in the folder of each stage holds it, with a checksum. Resuming with other settings, data,
code or packages is refused, unless it is allowed. Of a finished stage, which others may start from, only
settings, vocabulary and data must be the same: code can no longer change its numbers.
"""

import ast
import hashlib
from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import suppress
from functools import cache
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

from experiments.study.plugins import ORIGIN_FILE, STUDY_OPTION, study_files
from experiments.study.settings_diff import setting_changes
from lm.config import base as config
from lm.config.base import SettingError, did_you_mean
from lm.files import json_with_checksum, parse_with_checksum, relative, write
from lm.train.runtime.records import now

if TYPE_CHECKING:
    from experiments.runs.result import Result

PARTS_OF_FINISHED = ("settings", "vocabulary", "data")  # what is compared of a finished stage
PARTS = (*PARTS_OF_FINISHED, "code", "packages")  # and of one that resumes
# data that are made of the text before training; they are compared where they were made or read
COLLOCATIONS = "collocations"

Provenance = Mapping[str, Mapping[str, Any]]  # one of PARTS -> name -> value


def allowed(names: str) -> frozenset[str]:
    """Return the PARTS named in the option --allow, separated by commas; SettingError for unknown ones."""
    allow = frozenset(filter(None, names.split(",")))
    for name in sorted(allow - set(PARTS)):
        raise SettingError(f"--allow {name!r} is unknown{did_you_mean(name, PARTS)}")
    return allow


def read(folder: Path) -> dict[str, Any]:
    """Return the record of the stage in ``folder``; SettingError if it is missing or damaged."""
    path = folder / ORIGIN_FILE
    try:
        recorded = parse_with_checksum(path.read_bytes(), path)
    except FileNotFoundError as error:
        raise SettingError(f"{path} is missing, which records what was trained there") from error
    if wrong := [name for name in (*PARTS, "allowed") if not _is_valid(name, recorded.get(name))]:
        raise SettingError(f"{path} lacks {', '.join(wrong)}: it was not written by this version")
    return recorded


def _is_valid(name: str, value: Any) -> bool:
    """Return whether this is what ``record`` writes under a name."""
    if name == "allowed":
        changes = value if isinstance(value, list) else [None]
        return all(isinstance(change, dict) and isinstance(change.get("changed"), list) for change in changes)
    if not isinstance(value, dict) or (name == "vocabulary" and "fingerprint" not in value):
        return False
    return name == "settings" or all(key.strip() and isinstance(text, str) for key, text in value.items())


def record(folder: Path, current: Provenance, past: Sequence[Mapping[str, Any]] = ()) -> None:
    """Write what the stage in ``folder`` is trained with; ``past``: what changed since it was started."""
    write(folder / ORIGIN_FILE, json_with_checksum({**current, "allowed": [*past]}))


def differences(folder: Path, current: Provenance, state: str) -> dict[str, list[str]]:
    """Return which PARTS of the stage in ``folder`` changed, each with a line per change.

    ``state``: "new", "begun" or "finished". A record that cannot be read differs in every part.
    """
    if state == "new":
        return {}
    compared = [name for name in (PARTS_OF_FINISHED if state == "finished" else PARTS) if name in current]
    try:
        recorded = read(folder)
    except SettingError as error:
        return {name: [f"{name}: not known: {error}"] for name in compared}
    if COLLOCATIONS not in current.get("data", {}):
        recorded["data"].pop(COLLOCATIONS, None)
    changes = {name: setting_changes(recorded[name], current[name]) for name in compared}
    return {name: [f"{name}: {line}" for line in lines] for name, lines in changes.items() if lines}


def check(
    folder: Path, current: Provenance, state: str, allow: frozenset[str], say: Callable[[str], object] = print
) -> None:
    """Record the ``current`` provenance of the stage in ``folder``, which is "new", "begun" or "finished".

    SettingError with what changed if that is not in ``allow``. Allowed changes are reported and, unless the
    stage has finished, recorded.
    """
    changes = differences(folder, current, state)
    text = "".join(f"\n  {line}" for lines in changes.values() for line in lines)
    if refused := [name for name in changes if name not in allow]:
        done, names = "trained" if state == "finished" else "started", " and ".join(refused)
        raise SettingError(
            f"{folder} was {done} with other {names}:{text}\nchoose other --runs, delete it, or accept the "
            f"change with --allow {','.join(changes)}"
        )
    if changes:
        say(f"{folder}: allowed:{text}")
    if state == "new" or (changes and state == "begun"):
        record(folder, current, _history(folder, changes))


def _history(folder: Path, changes: Mapping[str, list[str]]) -> list[dict[str, Any]]:
    """Return the allowed changes that the stage in ``folder`` records, with these."""
    if not changes:
        return []
    try:
        past = read(folder)["allowed"]
    except SettingError:
        past = []
    return [*past, {"time": now(), "changed": [line for lines in changes.values() for line in lines]}]


# ---- code


ROOT = Path(config.__file__).parents[2]
TRAINERS = ROOT / "experiments/runs/kinds"  # what trains and scores stages
# packages whose code can change a number; settings of the study are compared by themselves
COUNTED = ("lm.", "experiments.runs.")


def code() -> dict[str, str]:
    """Return ``{file: digest}`` of the modules that train and score, all that they import, and own ones.

    A digest is of what Python does, so that another comment, docstring or layout is no other code.
    """
    named = {str(path.relative_to(ROOT)): module for path, module in imported_modules(TRAINERS).items()}
    digests = {name: module.digest for name, module in named.items()} | own_code()
    return dict(sorted(digests.items()))


def own_code() -> dict[str, str]:
    """Return ``{"--study FILE": digest}`` of the modules of the user's own."""
    return {f"{STUDY_OPTION} {file.name}": parse_module(file.read_bytes()).digest for file in study_files()}


def other_modules_note(runs: "Iterable[Result | None]") -> str:
    """Return which of these finished runs were trained with other modules of the user's own than now.

    "" if none was. Without such modules no run is read. A run records every module that was loaded, even if
    its row uses nothing of it: a changed module need not change the run.
    """
    now, others, count = own_code(), set[str](), 0
    folders: dict[Path, None] = {}  # of these runs, and of the stages that they share with other runs
    for run in filter(None, runs if now else ()):
        changed: dict[Path, set[str]] = {}  # folder of a stage -> modules that are others now
        for folder in run.stage_folders().values():
            with suppress(SettingError):  # of a damaged record, which others report
                then = read(folder)["code"]
                changed[folder] = {name for name in now if then.get(name, now[name]) != now[name]}
        stages = [folder for folder, names in changed.items() if names]
        if stages:
            count += 1
            others.update(*changed.values())
            shared = [folder for folder in stages if not folder.is_relative_to(run.folder)]
            folders |= dict.fromkeys([run.folder, *shared])
    if not count:
        return ""
    files = ", ".join(name.removeprefix(f"{STUDY_OPTION} ") for name in sorted(others))
    which = "1 finished run was" if count == 1 else f"{count} finished runs were"
    it, its_row = ("it", "its row") if count == 1 else ("them", "their rows")
    return (
        f"{which} trained with another {files} than there is now. Keep {it} if the change has no effect on "
        f"{its_row}; to train {it} again, delete {', '.join(map(relative, folders))}. A run that has not "
        "finished goes on with --allow code"
    )


class Module(NamedTuple):
    """A module of Python: what it does and, by name, what it imports."""

    digest: str  # start of the SHA-256 of its syntax tree, the same on every version of Python
    imports: frozenset[str]  # modules, and what is in them: a name may be either


@cache
def imported_modules(folder: Path) -> Mapping[Path, Module]:
    """Return the modules of COUNTED in ``folder``, and all that these import, directly or not."""
    found: dict[Path, Module] = {}
    todo = sorted(folder.glob("*.py"))
    while todo:
        path = todo.pop()
        if path in found:
            continue
        found[path] = parse_module(path.read_bytes())
        for name in found[path].imports:
            if name.startswith(COUNTED):
                todo += files_of(name)
    return found


def files_of(name: str) -> list[Path]:
    """Return the file of the module, or of the module with the class or function, of this name."""
    paths = (ROOT / each.replace(".", "/") for each in (name, name.rpartition(".")[0]))
    files = (file for path in paths for file in (path.with_suffix(".py"), path / "__init__.py"))
    return [file for file in files if file.exists()]


@cache  # a process asks several times, and reading the syntax of all files takes a quarter of a second
def parse_module(source: bytes) -> Module:
    """Return the digest of what a module does, and its imports, by its source."""
    tree = ast.parse(source)
    parts: list[str] = []
    imports: set[str] = set()
    _write_syntax(tree, parts, imports)
    return Module(hashlib.sha256("\0".join(parts).encode()).hexdigest()[:12], frozenset(imports))


def _write_syntax(node: Any, parts: list[str], imports: set[str]) -> None:
    """Append to ``parts`` what a node consists of, and add to ``imports`` what it imports.

    Strings that are statements are left out: they do nothing. ``ast.dump`` and ``ast.unparse`` write one tree
    differently from version to version. What is absent is left out, since versions add fields.
    """
    if isinstance(node, list):
        for each in node:
            _write_syntax(each, parts, imports)
        parts.append("]")
    elif isinstance(node, ast.AST):
        if isinstance(node, ast.Expr) and isinstance(node.value, ast.Constant):
            if isinstance(node.value.value, str):  # such as a docstring
                return
        if isinstance(node, ast.Import):
            imports.update(alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom) and node.module:
            imports.update(f"{node.module}.{alias.name}" for alias in node.names)
        parts.append(type(node).__name__)
        for name in node._fields:
            value = getattr(node, name, None)
            if isinstance(node, ast.JoinedStr):  # some versions end it with an empty text
                value = [each for each in node.values if getattr(each, "value", None) != ""]
            if value is not None and value != [] and name != "kind":  # the u of u"text"
                parts.append(name)
                _write_syntax(value, parts, imports)
        parts.append(")")
    else:
        parts.append(ascii(node))

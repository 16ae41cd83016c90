"""Plug-ins: Python modules of a user that add tables, rows, scales, objectives and more (docs/extending.md).

``--study my_rows.py`` with any command, or the environment variable LM_STUDY, names one or more.
Each is run in every process before the command is parsed, and adds entries to the dictionaries in which this
project registers its own. These are imported inside of functions, since the command line imports this module
before it knows what to do.
"""

import ast
import copyreg
import os
import sys
import traceback
from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import suppress
from dataclasses import astuple, replace
from importlib.machinery import PathFinder
from importlib.util import module_from_spec, spec_from_file_location
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal, NoReturn

from experiments.study.names import check_row_name, check_scale_name, check_task_name
from lm.config.base import SettingError, most_like, set_choices
from lm.files import parse_with_checksum, relative

if TYPE_CHECKING:
    from experiments.study.table import Table

STUDY_OPTION = "--study"
ORIGIN_FILE = "origin.json"  # in the folder of each stage of a run
# an environment variable, which started processes inherit, of files separated as in PATH
STUDY_VARIABLE = "LM_STUDY"

# (registry, or "table"; name of an entry) -> the study module that added it; the project's own are not in it
_MODULE_OF_ENTRY: dict[tuple[str, str], Path] = {}


class _TokenLoss:
    """Marks a loss that a plug-in added: settings in ``ignores`` do not apply to it (``set_choices``)."""

    ignores = ("label_smoothing",)  # which changes the targets of the cross-entropy alone


Refuse = Callable[[str, str], NoReturn]  # (a string of the module, message): raises SettingError at its line


def pop_study_option(arguments: Sequence[str]) -> list[str]:
    """Move ``--study FILE`` from the arguments of ``lm`` to the environment; return the other arguments.

    The files come behind those that LM_STUDY names already.
    """
    files = [str(file) for file in study_files()]
    others: list[str] = []
    words = iter(arguments)
    for word in words:
        name, equals, value = word.partition("=")
        if name != STUDY_OPTION:
            others.append(word)
            continue
        value = value if equals else next(words, "")
        if not value or value.startswith("-"):
            raise SettingError(f"{STUDY_OPTION} lacks its value: {STUDY_OPTION} FILE, such as my_rows.py")
        files.append(str(Path(value).absolute()))
    if files:
        os.environ[STUDY_VARIABLE] = os.pathsep.join(files)
    return others


def study_files() -> list[Path]:
    """Return the modules that the environment names, as absolute paths; each once, however it is spelt."""
    files: dict[str, Path] = {}
    for name in filter(None, os.environ.get(STUDY_VARIABLE, "").split(os.pathsep)):
        files.setdefault(os.path.realpath(name), Path(name).absolute())
    return [*files.values()]


def plugin_arguments() -> list[str]:
    """Return the arguments that make another command find the same modules."""
    return [word for file in study_files() for word in (STUDY_OPTION, relative(file))]


def location_in_study(error: BaseException) -> str:
    """Return ``"my_rows.py:12: "`` if an error was raised in one of the modules, else ``""``."""
    files = {str(file): file for file in study_files()}
    if isinstance(error, SyntaxError) and error.filename in files:
        return f"{relative(files[error.filename])}:{error.lineno}: "
    for frame in reversed(traceback.extract_tb(error.__traceback__)):
        if frame.filename in files:
            return f"{relative(files[frame.filename])}:{frame.lineno}: "
    return ""


def needed_study(folders: Iterable[Path]) -> str:
    """Return ``"; it was trained with --study my_rows.py"`` if a stage below ``folders`` was, else ""."""
    names: list[str] = []
    for folder in folders:
        for file in folder.rglob(ORIGIN_FILE):
            with suppress(SettingError, OSError):  # of a damaged record
                code = parse_with_checksum(file.read_bytes(), file).get("code", {})
                names += [name for name in code if name.startswith(STUDY_OPTION)]
    return f"; it was trained with {' '.join(dict.fromkeys(names))}" if names else ""


def load_study() -> None:
    """Run the modules that the environment names, each once per process.

    Raise SettingError, with file and line, for whatever is wrong with one.
    """
    for file in study_files():
        module = sys.modules.get(file.stem)
        if module is None:
            _load(file)
            continue
        origin = module.__spec__.origin if module.__spec__ else None
        if os.path.realpath(origin or "") != os.path.realpath(file):
            raise SettingError(
                f"{STUDY_OPTION} {relative(file)}: a module {file.stem!r} is loaded already; rename it"
            )


def _load(file: Path) -> None:
    """Run a module, check what it added, and let settings take the names of that."""
    if file.suffix != ".py" or not file.is_file():
        raise SettingError(
            f"{STUDY_OPTION} {relative(file)} should be a Python file that is there, such as my_rows.py"
        )
    if file.stem in sys.stdlib_module_names:
        raise SettingError(f"{STUDY_OPTION} {relative(file)}: Python has a module {file.stem!r}; rename it")
    found = PathFinder.find_spec(file.stem)
    if found and found.origin and os.path.realpath(found.origin) != os.path.realpath(file):
        raise SettingError(
            f"{STUDY_OPTION} {relative(file)}: {found.origin} is a module {file.stem!r} too; rename it"
        )
    source = file.read_text("utf-8-sig", errors="replace")
    registries = _registries(source)
    entries = {name: dict(registry) for name, registry in registries.items()}
    tables = _tables()
    try:
        _run(file, registries)
        _check_and_extend(file, source, registries, entries, tables)
    except Exception as error:
        _undo(file, registries, entries, tables)
        if isinstance(error, SettingError):
            raise
        # of an entry that is not what its registry holds, such as a number among tables
        raise SettingError(f"{relative(file)}: {type(error).__name__}: {error}") from error


def _undo(
    file: Path,
    registries: Mapping[str, Any],
    entries: Mapping[str, dict[str, Any]],
    tables: "dict[str, Table]",
) -> None:
    """Take back what a refused module has added, so that loading it again refuses it again."""
    from experiments.study.registry import TABLES

    sys.modules.pop(file.stem, None)
    contents_before: list[tuple[Any, Mapping[str, Any]]] = [(TABLES, tables)]
    contents_before += [(registries[name], old) for name, old in entries.items()]
    for registry, before in contents_before:
        registry.clear()
        registry.update(before)
    added_by_file = [entry for entry, module in _MODULE_OF_ENTRY.items() if module == file]
    for entry in added_by_file:
        del _MODULE_OF_ENTRY[entry]
    _set_choices(registries)


def _check_and_extend(
    file: Path,
    source: str,
    registries: Mapping[str, Mapping[str, Any]],
    entries: Mapping[str, dict[str, Any]],
    tables: "dict[str, Table]",
) -> None:
    """Check what a module has added to ``registries``, and let settings take its names.

    entries, tables: what was there before.
    """
    lines = _lines_of_strings(source)

    def refuse(name: str, message: str) -> NoReturn:
        """Raise SettingError at the line where ``name`` stands in quotes."""
        line = f":{lines[name]}" if name in lines else ""
        raise SettingError(f"{relative(file)}{line}: {message}")

    added = {}
    for name, registry in registries.items():
        _check_unchanged(name, entries[name], registry, refuse)
        added[name] = {key: entry for key, entry in registry.items() if key not in entries[name]}
    _check_tables_kept(tables, refuse)
    _check_entries(added, refuse)
    for name, new in added.items():
        _MODULE_OF_ENTRY.update({(name, key): file for key in new})
    _MODULE_OF_ENTRY.update({("table", name): file for name in _tables() if name not in tables})
    _extend_choices(added)
    _load_plugins_before_unpickling()
    for scale in added["SCALES"]:
        _check_built(scale, "scale", refuse)
    for name, row in added["REGISTRY"].items():
        if not row.needs:
            _check_built(name, "row", refuse)


def _run(file: Path, registries: Mapping[str, Mapping[str, Any]]) -> None:
    """Import a module from its file; its own folder is searched for what it imports.

    SettingError, with file and line, for any error in it, and the nearest key to one that is in no registry.
    """
    spec = spec_from_file_location(file.stem, file)
    assert spec is not None and spec.loader is not None
    module = sys.modules[file.stem] = module_from_spec(spec)
    if str(file.parent) not in sys.path:
        sys.path.append(str(file.parent))
    try:
        spec.loader.exec_module(module)
    except (Exception, SystemExit) as error:
        place = location_in_study(error) or f"{relative(file)}: "
        kind = "" if isinstance(error, SettingError) else f"{type(error).__name__}: "
        raise SettingError(f"{place}{kind}{_reason(error, registries)}") from error


def _reason(error: BaseException, registries: Mapping[str, Mapping[str, Any]]) -> str:
    """Return the message of an error of a plug-in, with the nearest key for a KeyError on a registry."""
    if isinstance(error, KeyError):
        line = traceback.extract_tb(error.__traceback__)[-1].line or ""
        names: list[str] = []
        for name, registry in registries.items():
            if f"{name}[" in line:
                names += registry
        close = most_like(str(error.args[0]) if error.args else "", names)
        return f"{error}; did you mean {close!r}?" if close else str(error)
    if isinstance(error, SystemExit):
        return f"it ends the program (exit code {error.code}), where it should add to the study and return"
    return error.msg if isinstance(error, SyntaxError) else str(error)


def _lines_of_strings(source: str) -> dict[str, int]:
    """Return the line of each string of a module: that of a key of a dict, as rows are, else the first."""
    nodes = [*ast.walk(ast.parse(source))]
    keys = [key for node in nodes if isinstance(node, ast.Dict) for key in node.keys]
    lines: dict[str, int] = {}
    for found in (keys, nodes):
        strings = [node for node in found if isinstance(node, ast.Constant) and isinstance(node.value, str)]
        for node in sorted(strings, key=lambda node: node.lineno):
            lines.setdefault(str(node.value), node.lineno)
    return lines


def _registries(source: str) -> dict[str, Mapping[str, Any]]:
    """Return all that a module can add to, by name.

    Mixers, activations and losses, whose import takes seconds, are among them if its own source names them; a
    module that it imports may define them, but not enter them.
    """
    from experiments.study.registry import REGISTRY
    from experiments.study.scales import SCALES
    from lm.config.training import OPTIMIZERS
    from lm.data.tasks.benchmarks import TASKS
    from lm.data.tasks.labelled import LABELLED
    from lm.data.tasks.mixtures import MIXTURES
    from lm.data.tasks.task_files import LABEL_METRICS, TAG_METRICS, TEXT_METRICS
    from lm.objectives.corruption import NOISES
    from lm.objectives.denoising import DENOISER_MIXTURES, OBJECTIVES

    registries: dict[str, Mapping[str, Any]] = {
        "REGISTRY": REGISTRY,
        "SCALES": SCALES,
        "OBJECTIVES": OBJECTIVES,
        "DENOISER_MIXTURES": DENOISER_MIXTURES,
        "NOISES": NOISES,
        "OPTIMIZERS": OPTIMIZERS,
        "TASKS": TASKS,
        "LABELLED": LABELLED,
        "MIXTURES": MIXTURES,
        "TEXT_METRICS": TEXT_METRICS,
        "LABEL_METRICS": LABEL_METRICS,
        "TAG_METRICS": TAG_METRICS,
    }
    if "MIXERS" in source:
        from lm.nn.mixers import MIXERS

        registries["MIXERS"] = MIXERS
    if "ACTIVATIONS" in source:
        from lm.nn.layers import ACTIVATIONS

        registries["ACTIVATIONS"] = ACTIVATIONS
    if "TOKEN_LOSSES" in source:
        from lm.train.losses import TOKEN_LOSSES

        registries["TOKEN_LOSSES"] = TOKEN_LOSSES
    return registries


def _tables() -> "dict[str, Table]":
    """Return the tables that are registered now."""
    from experiments.study.registry import TABLES

    return dict(TABLES)


def _check_unchanged(name: str, old: Mapping[str, Any], new: Mapping[str, Any], refuse: Refuse) -> None:
    """Refuse a module that removed or replaced an entry of a registry."""
    for key, entry in old.items():
        if new.get(key) is not entry:
            refuse(key, f"{name}[{key!r}] is {_owner(name, key)}; choose another name")


def _owner(registry: str, name: str) -> str:
    """Return a phrase: whose an entry of a registry, or a table, is."""
    file = _MODULE_OF_ENTRY.get((registry, name))
    return "the project's own" if file is None else f"added by {relative(file)}"


def _check_tables_kept(before: "Mapping[str, Table]", refuse: Refuse) -> None:
    """Refuse a module that changed a table, other than by rows behind its own."""
    now = _tables()
    for name, table in before.items():
        after = now.get(name)
        if after is None or replace(after, rows=after.rows[: len(table.rows)]) != table:
            owner = _owner("table", name)
            refuse(name, f"table {name!r} is {owner}; add_rows(TABLE, ROWS) adds rows to it")


def _check_entries(added: Mapping[str, Mapping[str, Any]], refuse: Refuse) -> None:
    """Refuse a wrong name, a function that does not return what it should, and a row without a table.

    A name is wrong if a folder cannot have it, or if the entry is called otherwise.
    """
    from experiments.study import entry_checks

    checks: dict[str, Callable[[str], None]] = {
        "REGISTRY": check_row_name,
        "SCALES": check_scale_name,
        "TASKS": check_task_name,
        "LABELLED": check_task_name,
        "MIXTURES": check_task_name,
    }
    for registry, check in checks.items():
        for name, entry in added[registry].items():
            try:
                check(name)
            except SettingError as error:
                refuse(name, str(error))
            if getattr(entry, "name", name) != name:
                refuse(name, f"{registry}[{name!r}] is called {entry.name!r}; it should have one name")
    function_checks: dict[str, Callable[[str, Any], None]] = {
        "NOISES": entry_checks.check_noise,
        "ACTIVATIONS": entry_checks.check_activation,
        "TOKEN_LOSSES": entry_checks.check_token_loss,
    }
    for registry, check_entry in function_checks.items():
        for name, entry in added.get(registry, {}).items():
            try:
                check_entry(name, entry)
            except SettingError as error:
                if error.__cause__ is not None and (place := location_in_study(error.__cause__)):
                    raise SettingError(f"{place}{error}") from error
                refuse(name, str(error))
    rows = [row.name for table in _tables().values() for row in table.rows]
    for name in added["REGISTRY"]:
        if name not in rows:
            refuse(name, f"row {name!r} is in no table; add_table(TABLE) adds a table with its rows")


def _check_built(name: str, kind: Literal["row", "scale"], refuse: Refuse) -> None:
    """Refuse a row or scale that cannot be built; a row is built at the scale of its table."""
    from experiments.study.registry import BASELINE_ROW, REGISTRY, TABLES, build, check_row

    try:
        if kind == "scale":
            build(BASELINE_ROW, name)
        else:
            check_row(name, TABLES[REGISTRY[name].table].scale)
    except Exception as error:
        is_named = kind == "row" and str(error).startswith(f"row {name!r}")
        message = str(error) if is_named else f"{kind} {name!r}: {error}"
        for raised in filter(None, (error, error.__cause__)):
            if place := location_in_study(raised):
                raise SettingError(f"{place}{message}") from error
        refuse(name if kind == "scale" else REGISTRY[name].key, message)


def _extend_choices(added: Mapping[str, Mapping[str, Any]]) -> None:
    """Make the added names valid choices of their settings, and add a mixture for each task that can be
    fine-tuned on alone.
    """
    from lm.data.tasks.mixtures import MIXTURES, single_task_mixtures

    MIXTURES |= {name: mixture for name, mixture in single_task_mixtures().items() if name not in MIXTURES}
    _set_choices([registry for registry, entries in added.items() if entries])


def _set_choices(registries: Iterable[str]) -> None:
    """Make the names in these registries, and no others, the choices of the settings that name an entry."""
    from lm.config.layers import MixerConfig, MlpConfig
    from lm.config.training import OPTIMIZERS, LossConfig, SharedOptimizerSettings
    from lm.objectives.corruption import NOISES
    from lm.objectives.denoising import Objective

    changed = {*registries}
    if "NOISES" in changed:
        set_choices(Objective, "noise", NOISES)
    if "OPTIMIZERS" in changed:
        set_choices(SharedOptimizerSettings, "name", OPTIMIZERS)
    if "MIXERS" in changed:
        from lm.nn.mixers import MIXERS

        set_choices(MixerConfig, "kind", MIXERS)
    if "ACTIVATIONS" in changed:
        from lm.nn.layers import ACTIVATIONS

        set_choices(MlpConfig, "activation", ACTIVATIONS | {"none": None})
    if "TOKEN_LOSSES" in changed:
        from lm.train.losses import TOKEN_LOSSES

        set_choices(LossConfig, "name", {"cross-entropy": None} | dict.fromkeys(TOKEN_LOSSES, _TokenLoss))


def _load_plugins_before_unpickling() -> None:
    """Make processes that receive an objective or a task run the modules before they unpickle it."""
    from lm.data.tasks.benchmarks import find_task
    from lm.data.tasks.labelled import find_labelled
    from lm.data.tasks.task import LabelledTask, Task
    from lm.objectives.denoising import Objective

    copyreg.pickle(Objective, lambda objective: (_unpickle, (Objective, *astuple(objective))))
    copyreg.pickle(Task, lambda task: (_unpickle, (find_task, task.name_or_path)))
    copyreg.pickle(LabelledTask, lambda task: (_unpickle, (find_labelled, task.name_or_path)))


def _unpickle(make: Callable[..., Any], *values: Any) -> Any:
    load_study()
    return make(*values)

"""Modules of a user's own, which add tables, rows, scales, objectives and more (docs/extending.md).

``--study my_rows.py`` with any command, or ``LM_STUDY=my_rows.py``, names one. It is run before the command
is parsed, in every process; what it adds to are the dictionaries that this project's own modules fill. Those
are imported inside of functions, since the command line imports this module before it knows what to do.
"""

import ast
import copyreg
import os
import sys
import traceback
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import astuple, replace
from importlib.util import module_from_spec, spec_from_file_location
from pathlib import Path
from typing import TYPE_CHECKING, Any

from experiments.study.names import check_row_name, check_scale_name, check_task_name
from lm.config.base import SettingError, set_choices
from lm.files import parse_with_checksum

if TYPE_CHECKING:
    from experiments.study.table import Table

STUDY_OPTION = "--study"
ORIGIN_FILE = "origin.json"  # in the folder of each stage of a run
STUDY = "LM_STUDY"  # in the environment, which processes that are started inherit: modules, as in PATH


def without_study(arguments: Sequence[str]) -> list[str]:
    """The arguments of ``lm`` without ``--study FILE``, which from now on stands in the environment."""
    files, others, words = [], [], iter(arguments)
    for word in words:
        name, equals, value = word.partition("=")
        if name == STUDY_OPTION:
            value = value if equals else next(words, "")
            if not value or value.startswith("-"):
                raise SettingError(f"{STUDY_OPTION} lacks its value: {STUDY_OPTION} FILE, such as my_rows.py")
            files.append(str(Path(value).absolute()))
        else:
            others.append(word)
    if files:
        os.environ[STUDY] = os.pathsep.join(files)
    return others


def study_files() -> list[Path]:
    """The modules that the environment names."""
    return [Path(name) for name in os.environ.get(STUDY, "").split(os.pathsep) if name]


def study_words() -> list[str]:
    """What a command has to be given besides, to find the same."""
    return [word for file in study_files() for word in (STUDY_OPTION, shown(file))]


def place_in_study(error: BaseException) -> str:
    """``"my_rows.py:12: "`` if an error came about in a module of these, else nothing."""
    files = {str(file): file for file in study_files()}
    if isinstance(error, SyntaxError) and error.filename in files:
        return f"{shown(files[error.filename])}:{error.lineno}: "
    for frame in reversed(traceback.extract_tb(error.__traceback__)):
        if frame.filename in files:
            return f"{shown(files[frame.filename])}:{frame.lineno}: "
    return ""


def shown(file: Path) -> str:
    """From the current folder, if it is below that."""
    return str(file.relative_to(Path.cwd()) if file.is_relative_to(Path.cwd()) else file)


def needed_study(folder: Path) -> str:
    """``"; it was trained with --study my_rows.py"`` of a run whose code had such modules, else nothing."""
    recorded = (
        parse_with_checksum(file.read_bytes(), file).get("code", {}) for file in folder.rglob(ORIGIN_FILE)
    )
    names = {name: None for code in recorded for name in code if name.startswith(STUDY_OPTION)}
    return f"; it was trained with {' '.join(names)}" if names else ""


def load_study() -> None:
    """Run the modules that the environment names, once; SettingError with file and line of what is wrong."""
    for file in study_files():
        module = sys.modules.get(file.stem)
        if module is None:
            _load(file)
        elif module.__spec__ is None or module.__spec__.origin != str(file):
            raise SettingError(
                f"{STUDY_OPTION} {shown(file)}: a module {file.stem!r} is loaded already; rename it"
            )


def _load(file: Path) -> None:
    """Run a module, let settings take what it added, and see that its rows and scales can be built."""
    if file.suffix != ".py" or not file.is_file():
        raise SettingError(
            f"{STUDY_OPTION} {shown(file)} should be a Python file that is there, such as my_rows.py"
        )
    source = file.read_text("utf-8", errors="replace")
    before, tables = {name: dict(entries) for name, entries in _registries(source)}, _tables()
    spec = spec_from_file_location(file.stem, file)
    assert spec is not None and spec.loader is not None
    module = sys.modules[file.stem] = module_from_spec(spec)
    if str(file.parent) not in sys.path:
        sys.path.append(str(file.parent))
    try:
        spec.loader.exec_module(module)
    except (Exception, SystemExit) as error:
        kind = "" if isinstance(error, SettingError) else f"{type(error).__name__}: "
        raise SettingError(f"{place_in_study(error) or f'{shown(file)}: '}{kind}{_reason(error)}") from error
    added = {name: _added(name, before[name], table, (file, source)) for name, table in _registries(source)}
    _check_kept(tables, (file, source))
    _check_names(added, (file, source))
    _let_settings_take(added)
    _go_along()
    for name in (*added["REGISTRY"], *added["SCALES"]):
        _check_built(name, name in added["SCALES"], (file, source))


def _tables() -> "dict[str, Table]":
    """Return the tables that are registered now."""
    from experiments.study.registry import TABLES

    return dict(TABLES)


def _check_kept(before: "Mapping[str, Table]", module: tuple[Path, str]) -> None:
    """SettingError unless every table is what it was, but for rows that were added behind its own."""
    now = _tables()
    for name, table in before.items():
        after = now.get(name)
        if after is None or replace(after, rows=after.rows[: len(table.rows)]) != table:
            place = _line(*module, name)
            raise SettingError(
                f"{place}table {name!r} is the project's own; add_rows(TABLE, ROWS) adds rows to it"
            )


def _check_names(added: Mapping[str, Mapping[str, Any]], module: tuple[Path, str]) -> None:
    """SettingError for a name that cannot be that of a folder of its own."""
    checks: dict[str, Callable[[str], None]] = {"REGISTRY": check_row_name, "SCALES": check_scale_name}
    checks |= dict.fromkeys(("TASKS", "LABELLED", "MIXTURES"), check_task_name)
    rows = [row for table in _tables().values() for row in table.rows]
    for table, check in checks.items():
        for name, entry in added[table].items():
            try:
                check(name)
                if getattr(entry, "name", name) != name:
                    raise SettingError(f"{table}[{name!r}] is called {entry.name!r}; it should have one name")
                if table == "REGISTRY" and entry not in rows:
                    raise SettingError(
                        f"row {name!r} is in no table; add_table(TABLE) adds a table with its rows"
                    )
            except SettingError as error:
                raise SettingError(f"{_line(*module, name)}{error}") from error


def _reason(error: BaseException) -> str:
    if isinstance(error, SystemExit):
        return f"it ends the program (exit code {error.code}), where it should add to the study and return"
    return error.msg if isinstance(error, SyntaxError) else str(error)


def _registries(source: str) -> Iterator[tuple[str, Mapping[str, Any]]]:
    """All that a module can add to, by name; mixers, whose import takes seconds, if the source names them."""
    from experiments.study import registry, scales
    from lm.config import training
    from lm.data.tasks import benchmarks, declared, labelled, mixtures
    from lm.objectives import corruption, denoising

    yield from (("REGISTRY", registry.REGISTRY), ("SCALES", scales.SCALES))
    yield from (("OBJECTIVES", denoising.OBJECTIVES), ("NOISES", corruption.NOISES))
    yield from (
        ("OPTIMIZERS", training.OPTIMIZERS),
        ("TASKS", benchmarks.TASKS),
        ("LABELLED", labelled.LABELLED),
    )
    yield from (("MIXTURES", mixtures.MIXTURES), ("TEXT_METRICS", declared.TEXT_METRICS))
    yield ("LABEL_METRICS", declared.LABEL_METRICS)
    if "MIXERS" in source:
        from lm.nn.mixers import MIXERS

        yield "MIXERS", MIXERS


def _added(
    name: str, old: Mapping[str, Any], new: Mapping[str, Any], module: tuple[Path, str]
) -> dict[str, Any]:
    """What ``new`` has and ``old`` has not; SettingError if anything of ``old`` is gone or another."""
    for key, value in old.items():
        if new.get(key) is not value:
            raise SettingError(
                f"{_line(*module, key)}{name}[{key!r}] is the project's own; choose another name"
            )
    return {key: value for key, value in new.items() if key not in old}


def _let_settings_take(added: Mapping[str, Mapping[str, Any]]) -> None:
    """Settings that choose by name take the new names, and tasks that can be tuned on alone are mixtures."""
    from lm.config.layers import MixerConfig
    from lm.config.training import OPTIMIZERS, Schedule
    from lm.data.tasks.mixtures import MIXTURES, alone
    from lm.objectives.corruption import NOISES
    from lm.objectives.denoising import Objective

    MIXTURES |= {name: one for name, one in alone().items() if name not in MIXTURES}
    set_choices(Objective, "noise", NOISES)
    set_choices(Schedule, "name", OPTIMIZERS)
    if added.get("MIXERS"):
        from lm.nn.mixers import MIXERS

        set_choices(MixerConfig, "kind", MIXERS)


def _go_along() -> None:
    """What names an entry of these tables has a process that it is sent to run the modules first."""
    from lm.data.tasks.benchmarks import find_task
    from lm.data.tasks.labelled import find_labelled
    from lm.data.tasks.task import LabelledTask, Task
    from lm.objectives.denoising import Objective

    copyreg.pickle(Objective, lambda objective: (_received, (Objective, *astuple(objective))))
    copyreg.pickle(Task, lambda task: (_received, (find_task, task.handle)))
    copyreg.pickle(LabelledTask, lambda task: (_received, (find_labelled, task.handle)))


def _received(make: Callable[..., Any], *values: Any) -> Any:
    """What was sent to this process."""
    load_study()
    return make(*values)


def _check_built(name: str, is_scale: bool, module: tuple[Path, str]) -> None:
    """SettingError, with file and line, for a row or scale that cannot be built."""
    from experiments.study.registry import BASELINE_ROW, build, check_row

    try:
        if is_scale:
            build(BASELINE_ROW, name)
        else:
            check_row(name, "nano")
    except Exception as error:
        what = f"{'scale' if is_scale else 'row'} {name!r}"
        place = place_in_study(error) or _line(*module, name.rpartition("/")[2])
        raise SettingError(f"{place}{what}: {error}") from error


def _line(file: Path, source: str, word: str) -> str:
    """``"my_rows.py:12: "``: where a word first stands in quotes, or the file alone."""
    nodes = (node for node in ast.walk(ast.parse(source)) if isinstance(node, ast.Constant))
    lines = [node.lineno for node in nodes if node.value == word]
    return f"{shown(file)}:{min(lines)}: " if lines else f"{shown(file)}: "

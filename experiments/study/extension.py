"""Modules of a user's own (docs/extending.md), which add to the study what is found by name.

``--study my_rows.py`` with any command, or ``LM_STUDY=my_rows.py``, names one. It is run before the command
is looked at, in every process; what it adds to are the tables that this project's own modules fill.
"""

import ast
import copyreg
import sys
from collections.abc import Callable, Iterator, Mapping
from dataclasses import astuple
from importlib.util import module_from_spec, spec_from_file_location
from pathlib import Path
from typing import Any

from experiments.study.experiment import Row
from experiments.study.folders import check_row_name, check_scale_name, check_task_name
from experiments.study.own import STUDY_OPTION, place_in_study, shown, study_files
from lm.config.base import SettingError, set_choices


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
    before, rows = {name: dict(table) for name, table in _tables(source)}, _rows_of_tables()
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
    added = {name: _added(name, before[name], table, (file, source)) for name, table in _tables(source)}
    _check_kept(rows, (file, source))
    _check_names(added, (file, source))
    _let_settings_take(added)
    _go_along()
    for name in (*added["REGISTRY"], *added["SCALES"]):
        _check_built(name, name in added["SCALES"], (file, source))


def _rows_of_tables() -> dict[str, tuple[Row, ...]]:
    """Table -> its rows."""
    from experiments.study.registry import TABLES

    return {table.name: table.rows for table in TABLES}


def _check_kept(before: Mapping[str, tuple[Row, ...]], module: tuple[Path, str]) -> None:
    """SettingError unless every table still begins with the rows that it had."""
    after = _rows_of_tables()
    for name, rows in before.items():
        if after.get(name, ())[: len(rows)] != rows:
            place = _line(*module, name)
            raise SettingError(
                f"{place}table {name!r} is the project's own; add_rows(TABLE, ROWS) adds rows to it"
            )


def _check_names(added: Mapping[str, Mapping[str, Any]], module: tuple[Path, str]) -> None:
    """SettingError for a name that cannot be that of a folder of its own."""
    checks: dict[str, Callable[[str], None]] = {"REGISTRY": check_row_name, "SCALES": check_scale_name}
    checks |= dict.fromkeys(("TASKS", "LABELLED", "MIXTURES"), check_task_name)
    for table, check in checks.items():
        for name, entry in added[table].items():
            try:
                check(name)
                if getattr(entry, "name", name) != name:
                    raise SettingError(f"{table}[{name!r}] is called {entry.name!r}; it should have one name")
            except SettingError as error:
                raise SettingError(f"{_line(*module, name)}{error}") from error


def _reason(error: BaseException) -> str:
    if isinstance(error, SystemExit):
        return f"it ends the program (exit code {error.code}), where it should add to the study and return"
    return error.msg if isinstance(error, SyntaxError) else str(error)


def _tables(source: str) -> Iterator[tuple[str, Mapping[str, Any]]]:
    """All that a module can add to, by name; mixers, whose import takes seconds, if the source names them."""
    from experiments.study import registry, scales
    from lm.config import training
    from lm.data.tasks import benchmarks, labelled, mixtures, task_files
    from lm.objectives import corruption, denoising

    yield from (("REGISTRY", registry.REGISTRY), ("SCALES", scales.SCALES))
    yield from (("OBJECTIVES", denoising.OBJECTIVES), ("NOISES", corruption.NOISES))
    yield from (
        ("OPTIMIZERS", training.OPTIMIZERS),
        ("TASKS", benchmarks.TASKS),
        ("LABELLED", labelled.LABELLED),
    )
    yield from (("MIXTURES", mixtures.MIXTURES), ("TEXT_METRICS", task_files.TEXT_METRICS))
    yield ("LABEL_METRICS", task_files.LABEL_METRICS)
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
    from lm.data.tasks.mixtures import MIXTURES, single_task_mixtures
    from lm.objectives.corruption import NOISES
    from lm.objectives.denoising import Objective

    MIXTURES |= {name: one for name, one in single_task_mixtures().items() if name not in MIXTURES}
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
    copyreg.pickle(Task, lambda task: (_received, (find_task, task.name_or_path)))
    copyreg.pickle(LabelledTask, lambda task: (_received, (find_labelled, task.name_or_path)))


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

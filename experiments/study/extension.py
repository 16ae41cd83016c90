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

from experiments.study.own import STUDY_OPTION, place_in_study, shown, study_files
from lm.settings import SettingError, set_choices


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
    before = {name: dict(table) for name, table in _tables(source)}
    spec = spec_from_file_location(file.stem, file)
    assert spec is not None and spec.loader is not None
    module = sys.modules[file.stem] = module_from_spec(spec)
    if str(file.parent) not in sys.path:
        sys.path.append(str(file.parent))
    try:
        spec.loader.exec_module(module)
    except KeyboardInterrupt:
        raise
    except BaseException as error:  # sys.exit() too, whose code would be taken for one of lm's own
        kind = "" if isinstance(error, SettingError) else f"{type(error).__name__}: "
        raise SettingError(f"{place_in_study(error) or f'{shown(file)}: '}{kind}{_reason(error)}") from error
    added = {name: _added(name, before[name], table, (file, source)) for name, table in _tables(source)}
    _let_settings_take(added)
    _go_along()
    for name in (*added["REGISTRY"], *added["SCALES"]):
        _check_built(name, name in added["SCALES"], (file, source))


def _reason(error: BaseException) -> str:
    if isinstance(error, SystemExit):
        return f"{error}; a study module should run to its end"
    return error.msg if isinstance(error, SyntaxError) else str(error)


def _tables(source: str) -> Iterator[tuple[str, Mapping[str, Any]]]:
    """All that a module can add to, by name; mixers, whose import takes seconds, if the source names them."""
    from experiments.study import registry, scales
    from lm.data import noise, objectives
    from lm.data.tasks import benchmarks, declared, labelled, mixtures
    from lm.train import config

    yield from (("REGISTRY", registry.REGISTRY), ("SCALES", scales.SCALES))
    yield from (("OBJECTIVES", objectives.OBJECTIVES), ("NOISES", noise.NOISES))
    yield from (
        ("OPTIMIZERS", config.OPTIMIZERS),
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
    from lm.data.noise import NOISES
    from lm.data.objectives import Objective
    from lm.data.tasks.mixtures import MIXTURES, alone
    from lm.nn.config import ModelConfig
    from lm.train.config import OPTIMIZERS, Schedule

    MIXTURES |= {name: one for name, one in alone().items() if name not in MIXTURES}
    set_choices(Objective, "noise", NOISES)
    set_choices(Schedule, "name", OPTIMIZERS)
    if added.get("MIXERS"):
        from lm.nn.mixers import MIXERS

        set_choices(ModelConfig, "mixer", MIXERS)


def _go_along() -> None:
    """What names an entry of these tables has a process that it is sent to run the modules first."""
    from lm.data.objectives import Objective
    from lm.data.tasks.benchmarks import find_task
    from lm.data.tasks.labelled import find_labelled
    from lm.data.tasks.task import LabelledTask, Task

    copyreg.pickle(Objective, lambda objective: (_received, (Objective, *astuple(objective))))
    copyreg.pickle(Task, lambda task: (_received, (find_task, task.handle)))
    copyreg.pickle(LabelledTask, lambda task: (_received, (find_labelled, task.handle)))


def _received(make: Callable[..., Any], *values: Any) -> Any:
    """What was sent to this process."""
    load_study()
    return make(*values)


def _check_built(name: str, is_scale: bool, module: tuple[Path, str]) -> None:
    """SettingError, with file and line, for a row or scale that cannot be built."""
    from experiments.study.registry import BASELINE_ROW, build

    try:
        build(BASELINE_ROW if is_scale else name, name if is_scale else "nano")
    except Exception as error:
        what = f"{'scale' if is_scale else 'row'} {name!r}"
        place = place_in_study(error) or _line(*module, name.rpartition("/")[2])
        raise SettingError(f"{place}{what}: {error}") from error


def _line(file: Path, source: str, word: str) -> str:
    """``"my_rows.py:12: "``: where a word first stands in quotes, or the file alone."""
    nodes = (node for node in ast.walk(ast.parse(source)) if isinstance(node, ast.Constant))
    lines = [node.lineno for node in nodes if node.value == word]
    return f"{shown(file)}:{min(lines)}: " if lines else f"{shown(file)}: "

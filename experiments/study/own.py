"""Modules of a user's own, as the command line and the environment name them (docs/extending.md).

Only the standard library is imported here. What runs them is ``experiments.study.extension``.
"""

import os
import traceback
from collections.abc import Sequence
from pathlib import Path

from lm.config.base import SettingError
from lm.files import parse_with_checksum

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

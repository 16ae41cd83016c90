"""Checks names of rows, tables, scales and tasks, which become names of folders and files."""

import re
from collections.abc import Iterable

from lm.config.base import SettingError

PLAIN_NAME = re.compile(r"[\w.,:=@%+-]+(/[\w.,:=@%+-]+)*", re.ASCII)  # needs no quoting in a shell
STARTS_FOLDER = "starts"  # of checkpoints that runs start from, in the folder of all runs
COURSE_FOLDER = "course"  # of the trained models that come along, beside it
VERIFIED_FOLDER = "verified"  # of what ``lm entry verify`` trains again, beside it
REPORT_FILES = ("report", "order")  # names of the files of a whole report, without an ending
# Folders of these names lie beside those of scales and of tables.
RESERVED_SCALES = ("cache", COURSE_FOLDER, STARTS_FOLDER, VERIFIED_FOLDER)
RESERVED_TABLES = ("pretraining", "reports")


def check_row_name(name: str) -> None:
    """Raise SettingError unless ``name`` is TABLE/ROW and can be that of a folder of its scale."""
    _check_name("row", name)
    table, _, last = name.rpartition("/")
    if name.split("/")[0] in RESERVED_TABLES or not table:
        raise SettingError(
            f"row {name!r} should be TABLE/ROW, where TABLE is not {' or '.join(RESERVED_TABLES)}"
        )
    if re.fullmatch(r"seed-\d+", last):
        raise SettingError(f"row {name!r} is called as the folder of a seed is; choose another name")
    if "," in last:
        raise SettingError(f"row {name!r} is called as a row with settings given by hand is; leave out ','")


def check_scale_name(name: str) -> None:
    """Raise SettingError unless ``name`` can be that of a folder beside those of other scales."""
    _check_name("scale", name)
    if "/" in name or name in RESERVED_SCALES:
        raise SettingError(f"scale {name!r} should be one word other than {' and '.join(RESERVED_SCALES)}")


def check_task_name(name: str) -> None:
    """Raise SettingError unless ``name``, of a task or mixture, can be that of a folder of a run."""
    _check_name("task", name)
    if "/" in name:
        raise SettingError(f"task {name!r} should be one word: a folder of each run is called so")


def _check_name(what: str, name: str) -> None:
    if not PLAIN_NAME.fullmatch(name):
        raise SettingError(
            f"{what} {name!r} should be named in letters, digits and . , : = @ % + -, with / between words"
        )
    if {".", ".."} & set(name.split("/")):
        raise SettingError(f"{what} {name!r} leads out of the folder of runs; name it without '.' and '..'")
    if name.startswith("-"):
        raise SettingError(f"{what} {name!r} reads as an option; begin it with a letter or digit")


def file_name(table: str) -> str:
    """Return what files about a table are called, without an ending."""
    return table.replace("/", "-")


def check_table_name(name: str, others: Iterable[str]) -> None:
    """Raise SettingError for a table whose files one of ``others``, or a whole report, would overwrite."""
    same = [other for other in others if file_name(other) == file_name(name)]
    if same or file_name(name) in REPORT_FILES:
        other = f"table {same[0]!r}" if same else "a whole report"
        raise SettingError(
            f"files of table {name!r} would be called as those of {other}; choose another name"
        )

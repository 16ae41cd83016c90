"""Where runs lie, what lies beside them, and which names a folder may have."""

import os
import re
from contextlib import suppress
from pathlib import Path

from lm.config.base import SettingError

STARTS_FOLDER = "starts"  # the folder of what runs start from, in the folder of all runs

PLAIN_NAME = re.compile(r"[\w.,:=@%+-]+(/[\w.,:=@%+-]+)*", re.ASCII)  # that is a folder, and needs no quoting
BESIDE_SCALES = ("cache", STARTS_FOLDER)  # folders in the folder of all runs
BESIDE_TABLES = ("pretraining", "reports")  # folders in that of a scale


def check_row_name(name: str) -> None:
    """SettingError unless a row of this name, TABLE/ROW, has a folder of its own among those of its scale."""
    _check_name("row", name)
    table, _, last = name.rpartition("/")
    if name.split("/")[0] in BESIDE_TABLES or not table:
        raise SettingError(
            f"row {name!r} should be TABLE/ROW, where TABLE is not {' or '.join(BESIDE_TABLES)}"
        )
    if re.fullmatch(r"seed-\d+", last):
        raise SettingError(f"row {name!r} is called as the folder of a seed is; choose another name")
    if re.search(r",[\w.]+=", last):
        raise SettingError(f"row {name!r} is called as a row with settings given by hand is; leave out ','")


def check_scale_name(name: str) -> None:
    """SettingError unless the runs of a scale of this name have a folder of their own."""
    _check_name("scale", name)
    if "/" in name or name in BESIDE_SCALES:
        raise SettingError(f"scale {name!r} should be one word other than {' and '.join(BESIDE_SCALES)}")


def check_task_name(name: str) -> None:
    """SettingError unless what a task or mixture of this name came to lies in the folder of its run."""
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


def check_runs(runs: Path) -> None:
    """SettingError if nothing can be written to ``runs`` as to a folder."""
    if runs.parts[:1] == ("gs:",):
        raise SettingError(
            f"--runs gs://{'/'.join(runs.parts[1:])} should be a folder: mount the bucket, as lm-launch does "
            "on TPUs (gcsfuse --implicit-dirs --rename-dir-limit=1000000 BUCKET FOLDER)"
        )


def lead_to(name: Path, folder: Path) -> None:
    """Make ``name`` a link to ``folder``, unless something is there or the file system has no links."""
    with suppress(OSError):
        name.parent.mkdir(parents=True, exist_ok=True)
        name.symlink_to(os.path.relpath(folder, name.parent), target_is_directory=True)

"""Where runs, their caches and their reports lie."""

import json
import os
import re
from collections.abc import Mapping, Sequence
from contextlib import suppress
from glob import escape
from hashlib import sha256
from itertools import groupby
from pathlib import Path
from typing import Any

from experiments.study.names import file_name
from experiments.study.registry import BUILTIN_TABLES, REGISTRY, TABLES, equal_rows
from experiments.study.table import Table
from lm.config.base import SettingError


def check_runs(runs: Path) -> None:
    """Raise SettingError if ``runs`` is a bucket, to which nothing can be written as to a folder."""
    if runs.parts[:1] == ("gs:",):
        raise SettingError(
            f"--runs gs://{'/'.join(runs.parts[1:])} should be a folder: mount the bucket, as lm launch does "
            "on TPUs (gcsfuse --implicit-dirs --rename-dir-limit=1000000 BUCKET FOLDER)"
        )


def link_to(name: Path, folder: Path) -> None:
    """Make ``name`` a link to ``folder``, unless something is there or the file system has no links."""
    with suppress(OSError):
        name.parent.mkdir(parents=True, exist_ok=True)
        name.symlink_to(os.path.relpath(folder, name.parent), target_is_directory=True)


def run_folder(runs: Path, scale: str, name: str, seed: int, overrides: Mapping[str, Any]) -> Path:
    """Return the folder of a run of row ``name``; rows that are the same experiment at a scale share it.

    It is the folder of the first of these rows that has runs, or of the first row if none has.
    """
    folders = [row_folder(runs, scale, row, overrides) for row in equal_rows(name, scale)]
    found = [folder for folder in folders if folder.exists()] if len(folders) > 1 else folders
    return (found or folders)[0] / f"seed-{seed}"


def row_folder(runs: Path, scale: str, name: str, overrides: Mapping[str, Any]) -> Path:
    """Return the folder called as row ``name`` with these overrides, in which each seed has a folder."""
    table, _, key = name.rpartition("/")
    return runs / scale / table / with_overrides(key, overrides)


def seed_folders(folder: Path) -> list[Path]:
    """Return the folders ``seed-NUMBER`` of the runs of a row in ``folder``; other names are no runs."""
    if not folder.is_dir():
        return []
    return sorted(path for path in folder.iterdir() if re.fullmatch(r"seed-\d+", path.name))


def changed_runs(runs: Path, scale: str, name: str) -> int:
    """Return how many runs of row ``name`` have finished with settings of one's own."""
    plain = row_folder(runs, scale, name, {})
    return sum(1 for _ in plain.parent.glob(f"{escape(plain.name)},*/seed-*/scores.json"))


def rows_with_runs(runs: Path, scale: str) -> list[str]:
    """Return the rows that have a folder of runs at a scale, without overrides, in registry order."""
    if not (runs / scale).is_dir():
        return []
    return [name for name in REGISTRY if row_folder(runs, scale, name, {}).is_dir()]


def with_overrides(name: str, overrides: Mapping[str, Any]) -> str:
    """Return ``name`` with the overrides behind it, as a file name that needs no quoting in a shell."""
    given = sorted((path, value) for path, value in overrides.items() if path != "seed")
    return _shortened(name + "".join(f",{path}={_quoted(value)}" for path, value in given))


def _quoted(value: Any) -> str:
    """Return a value in characters that no shell interprets; if others are replaced, a checksum follows."""
    if isinstance(value, tuple):
        text = ":".join(map(str, value)) or "none"
    else:
        text = str(value)
    text = text.replace("/", "_")
    safe = re.sub(r"[^\w.,:=@%-]", "_", text, flags=re.ASCII)
    return safe if safe == text else f"{safe}-{sha256(text.encode()).hexdigest()[:6]}"


def _shortened(name: str) -> str:
    """Return ``name`` in at most 255 bytes, as Linux and macOS allow: a checksum replaces what is cut."""
    encoded = name.encode()
    if len(encoded) <= 255:
        return name
    return encoded[:238].decode(errors="ignore") + "," + sha256(encoded).hexdigest()[:16]


def report_folder(runs: Path, scale: str, tables: Sequence[Table], overrides: Mapping[str, Any]) -> Path:
    """Return the folder of the report on ``tables``, which no other set of tables or overrides has."""
    name = report_name([table.name for table in tables])
    # ``with_overrides`` writes "/" as "_": a checksum tells a/b from a_b
    if with_slash := {path: str(value) for path, value in overrides.items() if "/" in str(value)}:
        name += f"-{sha256(json.dumps(with_slash, sort_keys=True).encode()).hexdigest()[:6]}"
    return runs / scale / "reports" / with_overrides(name, overrides)


def report_name(tables: Sequence[str]) -> str:
    """Return what a report on ``tables`` is called: t5-1-baseline, t5-1+2+4, t5, bert+gpt.

    Names that are clear only among this project's own tables end with a checksum if another is in the set.
    """
    if len(tables) == 1:
        name = file_name(tables[0])
        groups = {_group(table) for table in TABLES if "/" in table}
        is_clear = "+" not in name and name not in groups
    else:
        name = "+".join(_group_name(group, list(some)) for group, some in groupby(tables, _group))
        is_clear = False
    if is_clear or BUILTIN_TABLES.issuperset(tables):
        return name
    return f"{name}-{sha256(json.dumps(list(tables)).encode()).hexdigest()[:6]}"


def _group_name(group: str, tables: list[str]) -> str:
    """Return a group of tables with the numbers of those in ``tables``; the group alone if they are all."""
    whole = [table for table in TABLES if _group(table) == group]
    if tables == whole:
        return group
    numbers = {name: name.partition("/")[2].split("-")[0] for name in whole}
    if len(set(numbers.values())) == len(numbers):
        parts = [numbers[name] for name in tables]
    else:
        parts = [file_name(name.partition("/")[2]) for name in tables]
    return f"{group}-{'+'.join(parts)}"


def _group(table: str) -> str:
    """Return "t5" for "t5/4-objective"."""
    return table.split("/")[0]

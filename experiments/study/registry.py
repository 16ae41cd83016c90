"""Every row that can be run, found by name or pattern, its settings at a scale and where its runs lie."""

import fnmatch
import re
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import replace
from functools import cache, lru_cache
from hashlib import sha256
from pathlib import Path
from typing import Any

from experiments.study import classic, history, sequences, vectors
from experiments.study.experiment import BASELINE, FREE, Changes, Experiment, Row, Table, apply
from experiments.study.experiment import table as new_table
from experiments.study.folders import check_row_name
from experiments.study.scales import SCALES
from experiments.study.t5 import tables as t5
from lm.config.base import SettingError, check_used, diff, leaves, nearest, unused_settings
from lm.objectives.denoising import OBJECTIVES

# where a row starts from a checkpoint, these settings of a model stay the row's, those of data are not
OF_TRAINING = ("dropout", "dtype", "attention.implementation", "compile.layers", "compile.remat")
OF_VOCABULARY = ("vocabulary", "vocabulary_texts", "vocabulary_size", "unknown", "sentinels")
BASELINE_ROW = "t5/1-baseline/baseline"

TABLES = [*t5.TABLES, *classic.TABLES, *history.TABLES, *sequences.TABLES, *vectors.TABLES]

REGISTRY: dict[str, Row] = {row.name: row for table in TABLES for row in table.rows}

OWN_TABLES = frozenset(table.name for table in TABLES)  # of this project
REPORT = "report"  # files of a report that is on several tables


def add_rows(name: str, rows: Mapping[str, Changes], title: str = "") -> None:
    """Put rows, each with what it changes in BASELINE, behind those of table ``name``, or into a new one.

    SettingError for a name that is there already, or that a folder should not have.
    """
    new = new_table(name, title, None, rows)
    for row in new.rows:
        check_row_name(row.name)
        if row.name in REGISTRY:
            raise SettingError(f"there is a row {row.name!r} already; choose another name")
        if any(row.name == table.name for table in TABLES):
            raise SettingError(f"row {row.name!r} is called as a table is; choose another name")
    place = next((place for place, table in enumerate(TABLES) if table.name == name), None)
    if place is None:
        _check_file_name(name)
        TABLES.append(new)
    else:
        TABLES[place] = replace(TABLES[place], rows=(*TABLES[place].rows, *new.rows))
    REGISTRY.update({row.name: row for row in new.rows})


def file_name(table: str) -> str:
    """Return what files about a table are called, without an ending."""
    return table.replace("/", "-")


def _check_file_name(table: str) -> None:
    """SettingError for a new table whose files would be called as those of another."""
    same = [other.name for other in TABLES if file_name(other.name) == file_name(table)]
    if same or file_name(table) == REPORT:
        other = f"table {same[0]!r}" if same else "a whole report"
        raise SettingError(
            f"files of table {table!r} would be called as those of {other}; choose another name"
        )


@contextmanager
def registered(rows: Iterable[Row]) -> Iterator[None]:
    """``rows`` are found by their names as long as this lasts."""
    new = {row.name: row for row in rows if row.name not in REGISTRY}
    REGISTRY.update(new)
    try:
        yield
    finally:
        for name in new:
            del REGISTRY[name]


def find(pattern: str) -> list[Row]:
    """The rows whose own or table's name a shell-style ``pattern`` matches; SettingError if there is none."""
    rows = [row for row in REGISTRY.values() if fnmatch.filter((row.name, row.table), pattern)]
    if not rows:
        names = [*REGISTRY, *(table.name for table in TABLES)]
        raise SettingError(f"no row or table is called {pattern!r}{_like(pattern, names)}")
    return rows


def find_one(name: str) -> Row:
    """The row called exactly ``name``; SettingError with the nearest name if there is none."""
    if name not in REGISTRY:
        if rows := [row.name for table in TABLES for row in table.rows if table.name == name.rstrip("/")]:
            text = f"{name!r} is a table of {len(rows)} rows: name one of them, such as {rows[0]!r}, or train"
            raise SettingError(f"{text} all with lm sweep {name}")
        raise SettingError(f"no row is called {name!r}{_like(name, REGISTRY)}")
    return REGISTRY[name]


def _like(name: str, names: Iterable[str]) -> str:
    """The rows whose last part is ``name``, the paper's baseline first, or the one spelt most like it."""
    if ends := [row for row in REGISTRY if row.endswith(f"/{name}")]:
        nearest_rows = sorted(ends, key=lambda row: row != BASELINE_ROW)[:5]
        return f"; did you mean {' or '.join(map(repr, nearest_rows))}?"
    return nearest(name, names)


def tables(rows: list[Row]) -> list[Table]:
    """The tables that any of ``rows`` belongs to, in the paper's order."""
    names = {row.table for row in rows}
    return [table for table in TABLES if table.name in names]


def baseline_of(name: str) -> str:
    """The row that row ``name`` is compared with: the paper's baseline, or the first of its own table."""
    if name.startswith("t5/"):
        return BASELINE_ROW
    return next(table.rows[0].name for table in TABLES if table.name == REGISTRY[name].table)


def build(name: str, scale: str, overrides: Changes | None = None) -> Experiment:
    """The settings of row ``name`` at ``scale``: baseline, then scale, then row, then ``overrides``."""
    if scale not in SCALES:
        raise SettingError(f"scale={scale!r} is unknown{nearest(scale, SCALES)}")
    return apply(_built(find_one(name), tuple(SCALES[scale].items())), overrides or {})


@cache  # listing a study builds hundreds of rows
def _built(row: Row, scale: tuple[tuple[str, Any], ...]) -> Experiment:
    return apply(_scaled(scale), row.changes)


@cache
def _scaled(scale: tuple[tuple[str, Any], ...]) -> Experiment:
    return apply(BASELINE, dict(scale))


def equal_rows(name: str, scale: str) -> list[str]:
    """Return all rows that are the same experiment as ``name`` at ``scale``, in the order of the registry."""
    return _equal_rows(tuple(REGISTRY.values()), tuple(SCALES[scale].items()))[build(name, scale)]


@lru_cache(maxsize=8)
def _equal_rows(rows: tuple[Row, ...], scale: tuple[tuple[str, Any], ...]) -> Mapping[Experiment, list[str]]:
    equal: dict[Experiment, list[str]] = {}
    for row in rows:
        with suppress(Exception):  # a row of somebody's own that cannot be built at this scale equals none
            equal.setdefault(_built(row, scale), []).append(row.name)
    return equal


def twin(name: str, scale: str) -> str:
    """Return the first row that is the same experiment at ``scale``: equal experiments share one run."""
    return equal_rows(name, scale)[0]


def by_hand(name: str, scale: str, experiment: Experiment) -> Changes:
    """In what ``experiment`` differs from row ``name`` and is therefore called otherwise."""
    started = {path: new for path, new in start_changes(experiment).items() if path != "start.model"}
    changed = diff(build(name, scale, started), experiment).items()
    return {path: new for path, (_, new) in changed if not path.startswith(FREE)}


def start_changes(experiment: Experiment) -> Changes:
    """What a row takes over where it starts from the checkpoint that this experiment has; {} without one.

    That is the shape of the model, its vocabulary and special ids. Pre-training is left out, unless it is
    asked for by its steps; the rate of dropout, and how the model is compiled, stay the row's.
    """
    if not experiment.start.model:
        return {}
    model = {f"model.{path}": new for path, new in leaves(experiment.model) if path not in OF_TRAINING}
    data = {f"data.{name}": getattr(experiment.data, name) for name in OF_VOCABULARY}
    vectors = {f"vectors.{path}": new for path, new in leaves(BASELINE.vectors)}
    left_out = vectors | {"start.steps": 0, "pretraining.steps": 0}
    return model | data | left_out | {"start.model": experiment.start.model}


def named_changes(changes: Changes) -> Changes:
    """``changes`` without what follows from ``start.model`` among them."""

    def follows(path: str, new: Any) -> bool:
        group, _, name = path.partition(".")
        shape = group == "model" and name not in OF_TRAINING
        words = group == "data" and name in OF_VOCABULARY
        return shape or words or group == "vectors" or (path.endswith(".steps") and new == 0)

    is_started = "start.model" in changes
    return {path: new for path, new in changes.items() if not (is_started and follows(path, new))}


def check_start(experiment: Experiment, changes: Changes) -> None:
    """SettingError for a setting in ``changes`` that contradicts the checkpoint of ``experiment``."""
    for path, due in start_changes(experiment).items():
        if path in changes and path != "pretraining.steps" and changes[path] != due:
            raise SettingError(
                f"--{path} {changes[path]} contradicts --start: the checkpoint {experiment.start.model} has "
                f"{due!r:.60}; leave it out"
            )


def check_row(name: str, scale: str) -> None:
    """SettingError for what row ``name`` changes of its own at ``scale`` although its model reads it not."""
    check_used(build(name, scale), own_changes(name, scale))


def check_given(experiments: Sequence[Experiment], paths: Iterable[str]) -> None:
    """SettingError for a setting, given by hand at one of ``paths``, that none of these experiments reads."""
    for path in paths:
        if path == "start.model":
            raise SettingError(f"{path} is set by --start: name a folder, a run or hf:NAME there")
        reasons = [unused_settings(experiment, [path]) for experiment in experiments]
        if all(reasons):
            raise SettingError("; ".join(reasons[0].values()))


def read_changes(name: str, scale: str, changes: Changes) -> Changes:
    """Those of ``changes``, made in many rows, that row ``name`` reads: without the others it is the same."""
    if "start.model" in changes:  # which has all of its checkpoint
        return changes
    lost = unused_settings(build(name, scale, changes), changes)
    return {path: value for path, value in changes.items() if path not in lost}


def own_changes(name: str, scale: str) -> list[str]:
    """The settings that row ``name`` changes in the plain baseline, and in the row that it is nearest to.

    Rows are made of others, whose settings need not all be read any more: ``BERT | {"pretraining.steps": 0}``
    has BERT's optimiser. Such rows stand earlier in the row's table, or are the first of an earlier one; for
    a row of counts, they are any networks of its table. An objective of OBJECTIVES is one change, whatever of
    it is read.
    """
    experiment, plain = build(name, scale), _scaled(tuple(SCALES[scale].items()))
    known = [build(row.name, scale) for row in _rows_before(name) if "counts.model" not in row.changes]
    nearest_one = min((diff(other, experiment) for other in (plain, *known)), key=len)
    whole = [path for path, new in REGISTRY[name].changes.items() if new in OBJECTIVES.values()]
    own = [path for path in nearest_one if path in diff(plain, experiment)]
    return [path for path in own if path.rpartition(".")[0] not in whole]


def _rows_before(name: str) -> Iterator[Row]:
    """The rows that ``own_changes`` compares a row with."""
    for one in TABLES:
        place = [row.name for row in one.rows].index(name) if REGISTRY[name] in one.rows else None
        if place is not None:
            yield from one.rows if "counts.model" in REGISTRY[name].changes else one.rows[:place]
            return
        yield one.rows[0]


def run_folder(runs: Path, scale: str, name: str, seed: int, overrides: Mapping[str, Any]) -> Path:
    """Return the folder of a run, with overrides in its name; rows that are one experiment share it.

    It is that of the first of these rows which has runs, or will have them.
    """
    folders = [row_folder(runs, scale, row, overrides) for row in equal_rows(name, scale)]
    if len(folders) > 1:
        folders = [folder for folder in folders if folder.exists()] or folders
    return folders[0] / f"seed-{seed}"


def row_folder(runs: Path, scale: str, name: str, overrides: Mapping[str, Any]) -> Path:
    """Return the folder that is called as row ``name`` with these overrides is.

    One that an earlier release made, whose names needed quoting in a shell, is found where it lies.
    """
    parent, _, last = name.rpartition("/")
    new, old = with_overrides(last, overrides), _shortened(last + _written_before(overrides))
    folder = runs / scale / parent
    if new != old and (folder / old).exists() and not (folder / new).exists():
        new = old
    return folder / new


def with_overrides(name: str, overrides: Mapping[str, Any]) -> str:
    """A file name, with the settings given by hand in it, that needs no quoting in a shell."""
    given = sorted((path, value) for path, value in overrides.items() if path != "seed")
    return _shortened(name + "".join(f",{path}={_plain(value)}" for path, value in given))


def _plain(value: Any) -> str:
    """A value in letters that no shell reads; where others had to go, a checksum tells it from the like."""
    text = ":".join(map(str, value)) or "none" if isinstance(value, tuple) else str(value)
    text = text.replace("/", "_")
    plain = re.sub(r"[^\w.,:=@%-]", "_", text, flags=re.ASCII)
    return plain if plain == text else f"{plain}-{sha256(text.encode()).hexdigest()[:6]}"


def _written_before(overrides: Mapping[str, Any]) -> str:
    """What stood behind the names of folders up to release 0.1."""
    suffix = "".join(f",{path}={value}" for path, value in sorted(overrides.items()) if path != "seed")
    return suffix.replace("/", "_")


def _shortened(name: str) -> str:
    """At most 255 bytes: the longest file name on Linux and macOS."""
    last = name.encode()
    if len(last) > 255:
        last = last[:238].decode(errors="ignore").encode() + b"," + sha256(last).hexdigest()[:16].encode()
    return last.decode()

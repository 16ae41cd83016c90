"""Every table and row by its name, and the experiment that a row is at a scale."""

import fnmatch
from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager, suppress
from dataclasses import replace
from functools import cache, lru_cache
from typing import Any

from experiments.study import baselines, classic, sequences, vectors
from experiments.study.changes import Changes, apply
from experiments.study.experiment import BASELINE, Experiment
from experiments.study.names import check_row_name, check_table_name
from experiments.study.papers import t5
from experiments.study.scales import SCALES
from experiments.study.table import Published, Row, Table, make_rows
from lm.config.base import SettingError, check_used, diff, nearest
from lm.objectives.denoising import OBJECTIVES

BASELINE_ROW = t5.BASELINE_ROW  # the row without changes

# table's name -> table, in the order in which they are listed
TABLES: dict[str, Table] = {
    table.name: table
    for table in (*t5.TABLES, *classic.TABLES, *baselines.TABLES, *sequences.TABLES, *vectors.TABLES)
}
REGISTRY: dict[str, Row] = {row.name: row for table in TABLES.values() for row in table.rows}

BUILTIN_TABLES = frozenset(TABLES)  # of this project


def add_table(table: Table) -> None:
    """Register a table with all of its rows.

    SettingError for a name that is there already or that a folder should not have, or an unknown baseline.
    """
    if table.name in TABLES:
        raise SettingError(
            f"there is a table {table.name!r} already; choose another name, or add rows to it with "
            f"add_rows({table.name!r}, {{ROW: CHANGES}})"
        )
    _check_new(table.rows, [*TABLES, table.name])
    check_table_name(table.name, TABLES)
    known = [*REGISTRY, *(row.name for row in table.rows)]
    if table.baseline not in known:
        raise SettingError(
            f"table {table.name!r}: there is no row {table.baseline!r}, its baseline"
            f"{nearest(table.baseline, known)}"
        )
    TABLES[table.name] = table
    REGISTRY.update({row.name: row for row in table.rows})


def add_rows(
    name: str, rows: Mapping[str, Changes], published: Mapping[str, Published] | None = None
) -> None:
    """Register more rows of table ``name``, behind its own; SettingError as by add_table."""
    if name not in TABLES:
        raise SettingError(
            f"there is no table {name!r}{nearest(name, TABLES)}; a new one is made by "
            f"add_table(make_table({name!r}, TITLE, {{ROW: CHANGES}}))"
        )
    table = TABLES[name]
    new = make_rows(name, rows, published or {}, table.paper)
    _check_new(new, TABLES)
    TABLES[name] = replace(table, rows=(*table.rows, *new))
    REGISTRY.update({row.name: row for row in new})


def _check_new(rows: Iterable[Row], tables: Iterable[str]) -> None:
    """SettingError for a row whose name a row or one of ``tables`` has already, or a folder cannot have."""
    for row in rows:
        check_row_name(row.name)
        if row.name in REGISTRY:
            raise SettingError(f"there is a row {row.name!r} already; choose another name")
        if row.name in tables:
            raise SettingError(f"row {row.name!r} is called as a table is; choose another name")


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
        names = [*REGISTRY, *TABLES]
        raise SettingError(f"no row or table is called {pattern!r}{_like(pattern, names)}")
    return rows


def find_one(name: str) -> Row:
    """The row called exactly ``name``; SettingError with the nearest name if there is none."""
    if name not in REGISTRY:
        if (table := TABLES.get(name.rstrip("/"))) is not None:
            raise SettingError(
                f"{name!r} is a table of {len(table.rows)} rows: name one of them, such as "
                f"{table.rows[0].name!r}, or train all with lm sweep {name}"
            )
        raise SettingError(f"no row is called {name!r}{_like(name, REGISTRY)}")
    return REGISTRY[name]


def _like(name: str, names: Iterable[str]) -> str:
    """The rows whose last part is ``name``, the paper's baseline first, or the one spelt most like it."""
    if ends := [row for row in REGISTRY if row.endswith(f"/{name}")]:
        nearest_rows = sorted(ends, key=lambda row: row != BASELINE_ROW)[:5]
        return f"; did you mean {' or '.join(map(repr, nearest_rows))}?"
    return nearest(name, names)


def tables_of(rows: Iterable[Row]) -> list[Table]:
    """Return the tables that any of ``rows`` belongs to, in the order in which they are listed."""
    names = {row.table for row in rows}
    return [table for table in TABLES.values() if table.name in names]


def baseline_of(name: str) -> str:
    """Return the name of the row that row ``name`` is compared with: its table's baseline."""
    return TABLES[REGISTRY[name].table].baseline


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


def canonical_row(name: str, scale: str) -> str:
    """Return the first row that is the same experiment at ``scale``: equal experiments share one run."""
    return equal_rows(name, scale)[0]


def check_row(name: str, scale: str) -> None:
    """SettingError for what row ``name`` changes of its own at ``scale`` although its model reads it not."""
    check_used(build(name, scale), own_changes(name, scale))


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
    """Yield the rows that ``own_changes`` compares a row with."""
    row = REGISTRY[name]
    for table in TABLES.values():
        if row in table.rows:
            yield from table.rows if "counts.model" in row.changes else table.rows[: table.rows.index(row)]
            return
        yield table.rows[0]

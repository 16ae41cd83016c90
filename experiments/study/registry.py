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

    Raise SettingError for a name that is taken or cannot be that of a folder, and for an unknown baseline.
    """
    for row in table.rows:
        if row.table != table.name:
            raise SettingError(f"row {row.name!r} of table {table.name!r} should be called {table.name}/ROW")
    if table.name in TABLES:
        raise SettingError(
            f"there is a table {table.name!r} already; choose another name, or add rows to it with "
            f"add_rows({table.name!r}, {{ROW: CHANGES}})"
        )
    _check_new_rows(table.rows, [*TABLES, table.name])
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
    """Register more rows of table ``name``, behind its own; raise SettingError as add_table does."""
    if name not in TABLES:
        raise SettingError(
            f"there is no table {name!r}{nearest(name, TABLES)}; a new one is made by "
            f"add_table(make_table({name!r}, TITLE, {{ROW: CHANGES}}))"
        )
    table = TABLES[name]
    new = make_rows(name, rows, published or {}, table.paper)
    _check_new_rows(new, TABLES)
    TABLES[name] = replace(table, rows=(*table.rows, *new))
    REGISTRY.update({row.name: row for row in new})


def _check_new_rows(rows: Iterable[Row], tables: Iterable[str]) -> None:
    """Raise SettingError for a row whose name a row or one of ``tables`` has, or a folder cannot have."""
    for row in rows:
        check_row_name(row.name)
        if row.name in REGISTRY:
            raise SettingError(f"there is a row {row.name!r} already; choose another name")
        if row.name in tables:
            raise SettingError(f"row {row.name!r} is called as a table is; choose another name")


@contextmanager
def registered(rows: Iterable[Row]) -> Iterator[None]:
    """Register ``rows`` for the time of a ``with`` block, without adding them to their tables."""
    new = {row.name: row for row in rows if row.name not in REGISTRY}
    REGISTRY.update(new)
    try:
        yield
    finally:
        for name in new:
            del REGISTRY[name]


def find(pattern: str) -> list[Row]:
    """Return the rows whose name, or whose table's name, a shell-style ``pattern`` matches.

    Raise SettingError if there are none.
    """
    rows = [row for row in REGISTRY.values() if fnmatch.filter((row.name, row.table), pattern)]
    if not rows:
        raise SettingError(
            f"no row or table is called {pattern!r}{_suggestion(pattern, [*REGISTRY, *TABLES])}"
        )
    return rows


def find_one(name: str) -> Row:
    """Return the row called exactly ``name``; raise SettingError with the nearest name if there is none."""
    if name not in REGISTRY:
        if (table := TABLES.get(name.rstrip("/"))) is not None:
            raise SettingError(
                f"{name!r} is a table of {len(table.rows)} rows: name one of them, such as "
                f"{table.rows[0].name!r}, or train all with lm sweep {name}"
            )
        raise SettingError(f"no row is called {name!r}{_suggestion(name, REGISTRY)}")
    return REGISTRY[name]


def _suggestion(name: str, names: Iterable[str]) -> str:
    """Return "; did you mean ...?" with the rows that end with ``name``, or the name spelt most like it."""
    rows = [row for row in REGISTRY if row.endswith(f"/{name}")]
    if not rows:
        return nearest(name, names)
    rows.sort(key=lambda row: row != BASELINE_ROW)  # the paper's baseline first
    return f"; did you mean {' or '.join(map(repr, rows[:5]))}?"


def tables_of(rows: Iterable[Row]) -> list[Table]:
    """Return the tables that any of ``rows`` belongs to, in the order in which they are listed."""
    names = {row.table for row in rows}
    return [table for table in TABLES.values() if table.name in names]


def baseline_of(name: str) -> str:
    """Return the name of the row that row ``name`` is compared with: its table's baseline."""
    return TABLES[REGISTRY[name].table].baseline


def build(name: str, scale: str, overrides: Mapping[str, Any] | None = None) -> Experiment:
    """Return row ``name`` at ``scale``: the baseline, changed by the scale, the row, then ``overrides``."""
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
        with suppress(Exception):  # a user's row that cannot be built at this scale equals no other
            equal.setdefault(_built(row, scale), []).append(row.name)
    return equal


def canonical_row(name: str, scale: str) -> str:
    """Return the first row that is the same experiment at ``scale``: equal experiments share one run."""
    return equal_rows(name, scale)[0]


def check_row(name: str, scale: str) -> None:
    """Raise SettingError for a setting that row ``name`` itself changes at ``scale`` and nothing reads."""
    check_used(build(name, scale), own_changes(name, scale))


def own_changes(name: str, scale: str) -> list[str]:
    """Return the settings that row ``name`` itself changes, rather than takes over from another row.

    Rows are made of others, whose settings need not all be read any more: ``BERT | {"pretraining.steps": 0}``
    keeps BERT's optimiser. So a setting counts if the row differs in it from the baseline and also from the
    row that it is nearest to. A published objective is one change, whatever of it is read.
    """
    experiment, baseline = build(name, scale), _scaled(tuple(SCALES[scale].items()))
    others = [build(row.name, scale) for row in _possible_origins(name)]
    from_baseline = diff(baseline, experiment)
    from_nearest = min((diff(other, experiment) for other in (baseline, *others)), key=len)
    changes = REGISTRY[name].changes
    objectives = [path for path, value in changes.items() if value in OBJECTIVES.values()]
    own = [path for path in from_nearest if path in from_baseline]
    return [path for path in own if path.rpartition(".")[0] not in objectives]


def _possible_origins(name: str) -> list[Row]:
    """Return the networks that row ``name`` may have been made of.

    They are the first rows of the tables before its own, and of that the rows before it; for a row of counts,
    all rows of its table.
    """
    row = REGISTRY[name]
    before: list[Row] = []
    for table in TABLES.values():
        if row in table.rows:
            is_counts = "counts.model" in row.changes
            before += table.rows if is_counts else table.rows[: table.rows.index(row)]
            break
        before.append(table.rows[0])
    return [other for other in before if "counts.model" not in other.changes]

"""Looks up tables and rows by name, and builds the experiment of a row at a scale.

A scale is a named preset of the sizes of model and data (study.scales).
"""

import fnmatch
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import is_dataclass, replace
from functools import cache, lru_cache
from typing import Any

from experiments.study import (
    adaptation,
    baselines,
    classic,
    diffusion,
    ladder,
    recipe,
    seq2seq,
    start,
    word_vectors,
)
from experiments.study.changes import Changes, ShareOf, Times, apply
from experiments.study.experiment import BASELINE, Experiment
from experiments.study.names import check_row_name, check_table_name
from experiments.study.now import architectures, denoisers, encoders, experts
from experiments.study.papers import (
    clark,
    fedus,
    gisserot,
    glu,
    jo,
    lan,
    lewis,
    liu,
    narang,
    sahoo,
    t5,
    tay,
    wang,
    weller,
    wettig,
)
from experiments.study.scales import PAPER_SCALE, SCALES
from experiments.study.table import Missing, Paper, Published, Row, Setup, Table, make_rows
from lm.config.base import SettingError, check_used, did_you_mean, diff, leaves
from lm.objectives.denoising import OBJECTIVES

BASELINE_ROW = t5.BASELINE_ROW  # name of the row without changes

# papers beside T5's, in the order of publication
PAPER_MODULES = (liu, lan, lewis, glu, clark, fedus, narang, tay, wettig, wang, sahoo, jo, gisserot, weller)
_OTHER_TABLES = (
    classic,
    baselines,
    ladder,
    seq2seq,
    word_vectors,
    start,
    recipe,
    adaptation,
    encoders,
    architectures,
    denoisers,
    diffusion,
    experts,
)
# name -> table, in the order of `lm list`
TABLES: dict[str, Table] = {
    table.name: table for module in (t5, *_OTHER_TABLES, *PAPER_MODULES) for table in module.TABLES
}
REGISTRY: dict[str, Row] = {row.name: row for table in TABLES.values() for row in table.rows}

BUILTIN_TABLES = frozenset(TABLES)  # names of the tables of this project; plug-ins add others


def add_table(table: Table) -> None:
    """Register a table with all of its rows.

    Raise SettingError if a name is taken or cannot name a folder, if the baseline is unknown, or if it cannot
    be built and another row can.
    """
    for row in table.rows:
        if row.table != table.name:
            raise SettingError(f"row {row.name!r} of table {table.name!r} should be called {table.name}/ROW")
    if table.name in TABLES:
        raise SettingError(
            f"there is a table {table.name!r} already; choose another name, or add rows to it with "
            f"add_rows({table.name!r}, {{ROW: CHANGES}})"
        )
    if table.name in REGISTRY:
        raise SettingError(f"table {table.name!r} has the name of a row; choose another name")
    _check_new_rows(table.rows, [*TABLES, table.name])
    check_table_name(table.name, TABLES)
    known = [*REGISTRY, *(row.name for row in table.rows)]
    if table.baseline not in known:
        raise SettingError(
            f"table {table.name!r}: there is no row {table.baseline!r}, its baseline"
            f"{did_you_mean(table.baseline, known)}"
        )
    _check_baseline(table)
    TABLES[table.name] = table
    REGISTRY.update({row.name: row for row in table.rows})


def add_rows(
    name: str, rows: Mapping[str, Changes | Missing], published: Mapping[str, Published] | None = None
) -> None:
    """Append rows to table ``name``; raise SettingError as ``add_table`` does."""
    if name not in TABLES:
        raise SettingError(
            f"there is no table {name!r}{did_you_mean(name, TABLES)}; a new one is made by "
            f"add_table(make_table({name!r}, TITLE, {{ROW: CHANGES}}))"
        )
    table = TABLES[name]
    new = make_rows(name, rows, published or {}, table.paper, table.setup)
    _check_new_rows(new, TABLES)
    extended = replace(table, rows=(*table.rows, *new))
    _check_baseline(extended)
    TABLES[name] = extended
    REGISTRY.update({row.name: row for row in new})


def _check_baseline(table: Table) -> None:
    """Raise SettingError if a table's baseline cannot be built, and a row to be compared with it can."""
    own_rows = {row.name: row for row in table.rows}
    baseline = own_rows.get(table.baseline) or REGISTRY[table.baseline]
    if baseline.needs and table.can_be_built:
        raise SettingError(
            f"table {table.name!r}: no row can be compared with its baseline, since {needs_text(baseline)}; "
            "make a table with another baseline"
        )


def _check_new_rows(rows: Iterable[Row], tables: Iterable[str]) -> None:
    """Raise SettingError if a row's name is taken by a row or by ``tables``, or cannot name a folder."""
    for row in rows:
        check_row_name(row.name)
        if row.name in REGISTRY:
            raise SettingError(f"there is a row {row.name!r} already; choose another name")
        if row.name in tables:
            raise SettingError(f"row {row.name!r} has the name of a table; choose another name")


@contextmanager
def registered(rows: Iterable[Row]) -> Iterator[None]:
    """Register ``rows`` within a ``with`` block, without adding them to their tables."""
    new = {row.name: row for row in rows if row.name not in REGISTRY}
    REGISTRY.update(new)
    try:
        yield
    finally:
        for name in new:
            del REGISTRY[name]


def find(pattern: str) -> list[Row]:
    """Return the rows whose name or table matches a shell-style ``pattern``.

    Raise SettingError if no row does.
    """
    rows = [row for row in REGISTRY.values() if fnmatch.filter((row.name, row.table), pattern)]
    if not rows:
        raise SettingError(
            f"no row or table is called {pattern!r}{_suggestion(pattern, [*REGISTRY, *TABLES])}"
        )
    return rows


def find_buildable(pattern: str) -> list[Row]:
    """Return the rows that match ``pattern`` as in ``find``, without those that need what this code lacks.

    Raise SettingError, with what they need, if no other row matches.
    """
    rows = find(pattern)
    buildable = [row for row in rows if not row.needs]
    if not buildable:
        raise SettingError(none_buildable_text(rows))
    return buildable


def needs_text(row: Row) -> str:
    """Return why a row with ``needs`` cannot be built."""
    text = f"row {row.name!r} cannot be built: it needs {' and '.join(row.needs)}, which this code lacks"
    table = TABLES.get(row.table)
    if row.published and (table is None or table.can_be_built):
        text += "; a report on its table has its published scores"
    return text


def none_buildable_text(rows: Sequence[Row]) -> str:
    """Return why none of ``rows`` can be built, and where their needs and published scores are listed."""
    first = rows[0]
    text = needs_text(first)
    if len(rows) > 1:
        text = (
            f"none of these {len(rows)} rows can be built: {text}; lm list {first.table} says what each needs"
        )
    group = first.table.partition("/")[0]
    if first.published and first.table in BUILTIN_TABLES and not TABLES[first.table].can_be_built:
        text += f"; docs/papers/{group}.md has their published scores"
    return text


def find_one(name: str) -> Row:
    """Return the row called exactly ``name``; if there is none, raise SettingError with a similar name."""
    if name not in REGISTRY:
        if (table := TABLES.get(name.rstrip("/"))) is not None:
            raise SettingError(
                f"{name!r} is a table of {len(table.rows)} rows: name one of them, such as "
                f"{table.rows[0].name!r}, or train all with lm sweep {name}"
            )
        raise SettingError(f"no row is called {name!r}{_suggestion(name, REGISTRY)}")
    return REGISTRY[name]


def _suggestion(name: str, names: Iterable[str]) -> str:
    """Return the end of an error message for an unknown ``name``, such as "; did you mean 'x'?".

    It suggests the first of these that exist: tables whose names continue it with "-", the tables of a group
    of this name, rows of this name in any table, similar names. If no table's name begins with the part
    before its first "/", the message also says how to load rows of one's own (--study).
    """
    name = name.rstrip("/")
    if longer := [table for table in TABLES if table.startswith(f"{name.rstrip('*')}-")]:
        return f"; did you mean {' or '.join(map(repr, longer[:5]))}?"
    if any(table.startswith(f"{name}/") for table in TABLES):
        return f"; did you mean '{name}/*'?"
    group, _, last = name.rpartition("/")
    rows = [row for row in REGISTRY if row.endswith(f"/{name}")]
    if group and last:
        rows = rows or [row for row in REGISTRY if row.startswith(f"{group}/") and f"/{last}" in row]
    if not rows:
        similar = did_you_mean(name, names)
        tables = {table.partition("/")[0] for table in TABLES}
        if name.partition("/")[0] in tables:
            return similar
        begin = f"{similar} Rows" if similar else "; rows"
        return f"{begin} of your own need --study MODULE.py"
    rows.sort(key=lambda row: row != BASELINE_ROW)  # the paper's baseline first
    return f"; did you mean {' or '.join(map(repr, rows[:5]))}?"


def tables_of(rows: Iterable[Row]) -> list[Table]:
    """Return the tables of ``rows``, in the order of `lm list`."""
    names = {row.table for row in rows}
    return [table for table in TABLES.values() if table.name in names]


def papers() -> dict[str, Paper]:
    """Return the paper of each table group: the first part of a table's name, such as "t5"."""
    found: dict[str, Paper] = {}
    for table in TABLES.values():
        if table.paper is not None:
            found.setdefault(table.name.partition("/")[0], table.paper)
    return found


def tables_of_paper(group: str) -> list[Table]:
    """Return the tables of the paper that ``papers`` calls ``group``."""
    return [table for name, table in TABLES.items() if name.partition("/")[0] == group]


def baseline_of(name: str) -> str:
    """Return the full name of the baseline of the table of row ``name``."""
    return TABLES[REGISTRY[name].table].baseline


def build(name: str, scale: str, overrides: Mapping[str, Any] | None = None) -> Experiment:
    """Return row ``name`` as an experiment, with ``overrides`` applied after the row's changes.

    BASELINE is changed by the scale, by the setup of the row's paper or table, and by the row. Raise
    SettingError for a row that needs what this code lacks.
    """
    if scale not in SCALES:
        raise SettingError(f"scale={scale!r} is unknown{did_you_mean(scale, SCALES)}")
    row = find_one(name)
    if row.needs:
        raise SettingError(needs_text(row))
    return apply(_build_row(row, _scale_changes(scale), scale == PAPER_SCALE), overrides or {})


ScaleChanges = tuple[tuple[str, Any], ...]  # (path, value) of a scale, which is hashable


def _scale_changes(scale: str) -> ScaleChanges:
    """Return the changes of a scale as a key of caches: a scale that is replaced is built anew."""
    return tuple(SCALES[scale].items())


@contextmanager
def _named_in_errors(name: str) -> Iterator[None]:
    """Put the name of a row before the message of a SettingError that is raised within a ``with`` block."""
    try:
        yield
    except SettingError as error:
        raise SettingError(f"row {name!r}: {error}") from error


@cache  # `lm list` builds hundreds of rows
def _build_row(row: Row, scale: ScaleChanges, is_paper_scale: bool) -> Experiment:
    """Return BASELINE changed by a scale, by the row's setup and by the row.

    A SettingError names the row unless the scale alone is wrong.
    """
    _build_scale(scale)
    with _named_in_errors(row.name):
        return apply(_build_setup(row.setup, scale, is_paper_scale), row.changes)


@cache
def _build_setup(setup: Setup, scale: ScaleChanges, is_paper_scale: bool) -> Experiment:
    """Return BASELINE changed by a scale and by what the rows of a paper or table share."""
    sizes = setup.at_base if is_paper_scale else {}
    return apply(_build_scale(scale), {**setup.changes, **sizes})


@cache
def _build_scale(scale: ScaleChanges) -> Experiment:
    """Return BASELINE changed by a scale."""
    return apply(BASELINE, dict(scale))


def equal_rows(name: str, scale: str) -> list[str]:
    """Return the names of all rows that build the same experiment at ``scale``, in registry order."""
    build(name, scale)  # raises SettingError if the row cannot be built
    rows = tuple(row for row in REGISTRY.values() if not row.needs)
    changes, is_paper_scale = _scale_changes(scale), scale == PAPER_SCALE
    values = _setting_values(find_one(name), changes, is_paper_scale)
    return _rows_by_values(rows, changes, is_paper_scale)[values]


def equal_rows_among(name: str, among: Iterable[str], scale: str) -> Iterator[str]:
    """Yield those of the rows ``among`` that build the same experiment at ``scale`` as row ``name``.

    A row that needs what this code lacks builds none, and equals no row.
    """
    if find_one(name).needs:
        return
    changes, is_paper_scale = _scale_changes(scale), scale == PAPER_SCALE
    wanted = _setting_values(find_one(name), changes, is_paper_scale)
    for row in map(find_one, among):
        with suppress(Exception):  # a plug-in's row may have changes that fail at this scale
            if not row.needs and _setting_values(row, changes, is_paper_scale) == wanted:
                yield row.name


@lru_cache(maxsize=8)
def _rows_by_values(
    rows: tuple[Row, ...], scale: ScaleChanges, is_paper_scale: bool
) -> Mapping[tuple[Any, ...], list[str]]:
    """Return the rows' names by the values of all settings that they build."""
    by_values: dict[tuple[Any, ...], list[str]] = {}
    for row in rows:
        with suppress(Exception):  # a plug-in's row may have changes that fail at this scale
            by_values.setdefault(_setting_values(row, scale, is_paper_scale), []).append(row.name)
    return by_values


@cache
def _setting_values(row: Row, scale: ScaleChanges, is_paper_scale: bool) -> tuple[Any, ...]:
    """Return the values of all settings of a row, in order.

    If all of its changes are constants or multiples, they are computed without building the experiment, which
    takes ten times as long.
    """
    values = dict(_setup_values(row.setup, scale, is_paper_scale))
    for path, value in row.changes.items():
        if isinstance(value, Times):
            values[path] = value.compute(values[path])
        elif isinstance(value, ShareOf):
            values[path] = value.compute(values[value.path])
        elif is_dataclass(value) and not callable(value):  # a group, such as the objective
            values |= leaves(value, f"{path}.")
        elif path in values and not callable(value):
            values[path] = tuple(value) if isinstance(value, list) else value
        else:
            return tuple(value for _, value in leaves(_build_row(row, scale, is_paper_scale)))
    return tuple(values.values())


@cache
def _setup_values(setup: Setup, scale: ScaleChanges, is_paper_scale: bool) -> tuple[tuple[str, Any], ...]:
    return tuple(leaves(_build_setup(setup, scale, is_paper_scale)))


def canonical_row(name: str, scale: str) -> str:
    """Return the first row that builds the same experiment at ``scale``; all of them share its run."""
    return equal_rows(name, scale)[0]


def check_row(name: str, scale: str) -> None:
    """Raise SettingError if nothing reads a setting that row ``name`` itself changes at ``scale``."""
    experiment, changed = build(name, scale), own_changes(name, scale)
    with _named_in_errors(name):
        check_used(experiment, changed)


def own_changes(name: str, scale: str) -> list[str]:
    """Return the paths of the settings that row ``name`` changes itself, rather than inherits.

    Rows are often written as changes of another row, such as ``BERT | {"pretraining.steps": 0}``, which keeps
    BERT's optimizer although nothing reads it any more. The parent is not recorded, so it is guessed as the
    most similar of the candidates: the one with the fewest differing settings. A setting is the row's own if
    it differs both from that parent and from BASELINE with the scale and the setup of the row's table.
    Setting ``objective`` to a preset of OBJECTIVES counts as one change: settings within the preset are
    listed only if the row also names them separately.
    """
    experiment = build(name, scale)
    baseline = _build_setup(REGISTRY[name].setup, _scale_changes(scale), scale == PAPER_SCALE)
    candidates = [baseline]
    for row in _candidate_parent_rows(name):
        with suppress(Exception):  # another row that fails at this scale, as a plug-in's may, is no parent
            candidates.append(build(row.name, scale))
    from_baseline = diff(baseline, experiment)
    from_parent = min((diff(candidate, experiment) for candidate in candidates), key=len)
    changes = REGISTRY[name].changes
    objective_presets = [path for path, value in changes.items() if value in OBJECTIVES.values()]
    own = [path for path in from_parent if path in from_baseline]
    return [path for path in own if path in changes or path.rpartition(".")[0] not in objective_presets]


def _candidate_parent_rows(name: str) -> list[Row]:
    """Return the rows that row ``name`` may be a change of.

    These are the first row of each earlier table and the rows before it in its own table. A count-based row
    (an n-gram model or HMM) may be a change of any row of its table. Count-based rows are never parents.
    """
    row = REGISTRY[name]
    candidates: list[Row] = []
    for table in TABLES.values():
        if row in table.rows:
            if "counts.model" in row.changes:
                candidates += table.rows
            else:
                candidates += table.rows[: table.rows.index(row)]
            break
        candidates.append(table.rows[0])
    return [each for each in candidates if "counts.model" not in each.changes and not each.needs]

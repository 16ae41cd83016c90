"""A table of a study is a value: its rows, what they are compared with, and what a paper published of them.

Listing, sweeps, reports, plots and verdicts read what is here; nothing about a table is written elsewhere.
"""

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, is_dataclass

from experiments.study.changes import Changes, ReadOnly
from experiments.study.experiment import BASELINE
from experiments.study.scales import DEFAULT_SCALE
from lm.config.base import SettingError, leaves, nearest

KEEP_ROW = "a row stays what it is; add one of your own with add_rows(TABLE, {ROW: CHANGES})"


@dataclass(frozen=True)
class Row:
    """One row of a table: an experiment, as its difference from the paper's baseline."""

    name: str  # TABLE/ROW, such as "t5/6-corruption-rate/15"
    label: str  # what plots and reports call it: its name in the paper, if it is from one
    changes: ReadOnly  # path of a setting -> its value, or a function of the value that the scale has
    published: ReadOnly  # column of the paper -> score; empty if the paper has no such row

    @property
    def table(self) -> str:
        """Return the name of the row's table."""
        return self.name.rpartition("/")[0]

    @property
    def key(self) -> str:
        """Return the row's name within its table."""
        return self.name.rpartition("/")[2]

    def derivation(self, path: str) -> str:
        """Return how the row gets a setting from the scale's value, such as "x 2"; "" of a plain value."""
        change = self.changes.get(path)
        return str(change) if callable(change) and is_dataclass(change) else ""


@dataclass(frozen=True)
class Axis:
    """The x axis of a table's plot: a numeric setting in which its rows differ."""

    setting: str  # path, such as "objective.rate"
    label: str  # with its unit in square brackets
    log: bool = True  # logarithmic; a row where the setting is 0 has no place on it


@dataclass(frozen=True)
class Column:
    """One column of scores in a paper."""

    name: str  # "SQuAD"
    unit: str  # "exact match"
    std: float | None = None  # standard deviation over runs of the paper's baseline; None: not published
    higher_is_better: bool = True


@dataclass(frozen=True)
class Paper:
    """The paper whose scores are printed beside ours, and the noise of its scores."""

    name: str  # "T5": a report on its tables is called "The T5 study"
    citation: str  # "Raffel et al. 2020"
    columns: tuple[Column, ...]  # in the order of its tables

    def column(self, name: str) -> Column:
        """Return the column of this name; raise KeyError if there is none."""
        return {column.name: column for column in self.columns}[name]


@dataclass(frozen=True)
class Published:
    """What a paper prints about one row."""

    label: str
    scores: Mapping[str, float]  # column -> score on the validation set
    source: str = ""  # "JMLR 21(140), Table 4, page 22"


@dataclass(frozen=True)
class Conclusion:
    """What the text of a paper concludes from two rows of one table."""

    better: str  # a row's name within the table
    worse: str
    text: str  # "50 % noise is too much"


@dataclass(frozen=True)
class Table:
    """Rows that are compared with each other. ``make_table`` makes one."""

    name: str
    title: str
    rows: tuple[Row, ...]
    baseline: str  # full name of the row that all are compared with; it may be in another table
    axis: Axis | None = None
    scale: str = DEFAULT_SCALE  # at which our results are published, and `lm sweep TABLE` trains
    seeds: int = 1  # that it trains
    paper: Paper | None = None
    conclusions: tuple[Conclusion, ...] = ()
    # below scale `base` other data replace those of the paper, so that none of its claims is judged
    surrogate_data: bool = False


def make_table(
    name: str,
    title: str,
    rows: Mapping[str, Changes],
    *,
    baseline: str = "",
    axis: Axis | None = None,
    scale: str = DEFAULT_SCALE,
    seeds: int = 1,
    paper: Paper | None = None,
    published: Mapping[str, Published] | None = None,
    conclusions: Iterable[Conclusion] = (),
    surrogate_data: bool = False,
) -> Table:
    """Return the table whose row ``key`` is the paper's baseline with the changes ``rows[key]``.

    baseline: full name of the row compared with; the table's first row, if it is empty.
    published: row -> what ``paper`` prints about it; rows that the paper lacks may be left out.
    Raise SettingError for a published score or a conclusion about a row that the table lacks, and for scores
    in other columns than the paper's.
    """
    if not rows:
        raise SettingError(f"table {name!r} has no rows; give it one, such as {{'base': {{}}}}")
    if seeds < 1:
        raise SettingError(f"table {name!r}: seeds={seeds} should be at least 1")
    made = make_rows(name, rows, published or {}, paper)
    if axis is not None:
        _check_axis(name, axis)
    conclusions = tuple(conclusions)
    for key in (key for each in conclusions for key in (each.better, each.worse)):
        _check_is_row(name, key, rows, "a conclusion")
    return Table(
        name=name,
        title=title,
        rows=made,
        baseline=baseline or made[0].name,
        axis=axis,
        scale=scale,
        seeds=seeds,
        paper=paper,
        conclusions=conclusions,
        surrogate_data=surrogate_data,
    )


def make_rows(
    table: str, rows: Mapping[str, Changes], published: Mapping[str, Published], paper: Paper | None
) -> tuple[Row, ...]:
    """Return rows of ``table``, with the scores that ``paper`` has of them; SettingError as in make_table."""
    for key, scores in published.items():
        _check_is_row(table, key, rows, "a published score")
        _check_columns(f"{table}/{key}", scores, paper)
    made = []
    for key, changes in rows.items():
        known = published.get(key, Published(key, {}))
        made.append(make_row(f"{table}/{key}", known.label, changes, known.scores))
    return tuple(made)


def make_row(name: str, label: str, changes: Mapping[str, object], published: Mapping[str, float]) -> Row:
    """Return a row whose changes and published scores nobody can change."""
    return Row(name, label, ReadOnly(changes, KEEP_ROW), ReadOnly(published, KEEP_ROW))


def _check_axis(table: str, axis: Axis) -> None:
    """Raise SettingError unless the axis is a setting that may be a number."""
    settings = dict(leaves(BASELINE))
    if axis.setting not in settings:
        like = nearest(axis.setting, settings)
        raise SettingError(f"table {table!r}: its axis: there is no setting {axis.setting!r}{like}")
    value = settings[axis.setting]
    if isinstance(value, bool | str | tuple):
        raise SettingError(f"table {table!r}: its axis: {axis.setting}={value!r} is not a number")


def _check_is_row(table: str, key: str, rows: Mapping[str, Changes], what: str) -> None:
    if key not in rows:
        raise SettingError(
            f"table {table!r}: {what} names the row {key!r}, which it lacks{nearest(key, rows)}"
        )


def _check_columns(row: str, published: Published, paper: Paper | None) -> None:
    """Raise SettingError unless the scores are those of all columns of ``paper``."""
    if paper is None:
        raise SettingError(f"row {row!r} has published scores: name their paper, with paper=Paper(...)")
    due = [column.name for column in paper.columns]
    if published.scores and set(published.scores) != set(due):
        raise SettingError(
            f"row {row!r} has scores in {', '.join(published.scores)}; "
            f"{paper.citation} should have one in each of {', '.join(due)}"
        )

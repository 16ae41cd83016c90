"""Tables of experiments as data: their rows, their baseline, and the scores that a paper published.

``lm list``, ``lm sweep``, reports, plots and verdicts on claims all read a Table. Nothing about a table is
written anywhere else.
"""

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, is_dataclass

from experiments.study.changes import Changes, ReadOnly
from experiments.study.experiment import BASELINE
from experiments.study.scales import DEFAULT_SCALE
from lm.config.base import SettingError, leaves, nearest

READ_ONLY_ROW_ERROR = "a row stays what it is; add one of your own with add_rows(TABLE, {ROW: CHANGES})"


@dataclass(frozen=True)
class Row:
    """One row of a table: an experiment, as its difference from the paper's baseline."""

    name: str  # TABLE/ROW, such as "t5/6-corruption-rate/15"
    label: str  # its name in plots and reports, which is the paper's if it is a row of a paper
    # path of a setting -> its value, or a function of its value at the scale. A scale is a named preset of
    # the sizes of model and data (study.scales).
    changes: ReadOnly
    published: ReadOnly  # column of the paper -> its score; empty if the paper has no such row
    published_runs: int = 1  # number of the paper's runs whose mean its score is

    @property
    def table(self) -> str:
        """Return the name of the row's table."""
        return self.name.rpartition("/")[0]

    @property
    def key(self) -> str:
        """Return the row's name within its table."""
        return self.name.rpartition("/")[2]

    def derivation(self, path: str) -> str:
        """Return how the row computes a setting from the scale's value, such as "x 2"; "" for a constant."""
        change = self.changes.get(path)
        return str(change) if callable(change) and is_dataclass(change) else ""


@dataclass(frozen=True)
class Axis:
    """The x axis of a table's plot: a numeric setting in which its rows differ."""

    setting: str  # path, such as "objective.rate"
    label: str  # with its unit in square brackets
    log: bool = True  # logarithmic; rows where the setting is 0 are not plotted


@dataclass(frozen=True)
class Column:
    """One column of scores in a paper."""

    name: str  # "SQuAD"
    unit: str  # "exact match"
    std: float | None = None  # standard deviation over runs of the paper's baseline; None: not published
    higher_is_better: bool = True


@dataclass(frozen=True)
class Paper:
    """A paper whose scores are printed beside ours, with the noise of those scores."""

    name: str  # "T5": a report on its tables is called "The T5 study"
    citation: str  # "Raffel et al. 2020"
    columns: tuple[Column, ...]  # in the order of its tables

    def column(self, name: str) -> Column:
        """Return the column of this name; raise KeyError if there is none."""
        return {column.name: column for column in self.columns}[name]


@dataclass(frozen=True)
class Published:
    """The scores of one row in a paper, and where it prints them."""

    label: str
    scores: Mapping[str, float]  # column -> score on the validation set
    source: str = ""  # "JMLR 21(140), Table 4, page 22"
    runs: int = 1  # number of runs whose mean the scores are: ten for the T5 paper's baseline


@dataclass(frozen=True)
class Conclusion:
    """A sentence of a paper's text that calls one row of a table better than another."""

    better: str  # a row's name within the table
    worse: str
    text: str  # "50 % noise is too much"


@dataclass(frozen=True)
class Table:
    """Rows that are compared with a baseline and with each other. ``make_table`` makes one.

    A claim (``study.claims.paper_claims``) is a conclusion or, if the paper gives its noise, a pair of rows
    whose published scores differ significantly. Reports test each claim on our runs.
    """

    name: str
    title: str
    rows: tuple[Row, ...]
    baseline: str  # full name of the row that all others are compared with; it may belong to another table
    axis: Axis | None = None
    scale: str = DEFAULT_SCALE  # the scale of our published results, and the default of `lm sweep TABLE`
    seeds: int = 1  # number of seeds, likewise
    paper: Paper | None = None
    # hypotheses, written before the rows are run: reports give a verdict on exactly these
    conclusions: tuple[Conclusion, ...] = ()
    # The rows stand in for the paper's with other data. paper_claims() returns no claims then, at any scale,
    # although the published scores are still printed.
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
    """Return a table in which row ``key`` is ``study.experiment.BASELINE`` with the changes ``rows[key]``.

    baseline: full name of the row to compare with; empty means the table's first row.
    published: row -> its scores in ``paper``; leave out the rows that the paper lacks.
    Raise SettingError if a published score or a conclusion names a row that the table lacks, or if the scores
    of a row are not in the paper's columns.
    """
    if not rows:
        raise SettingError(f"table {name!r} has no rows; give it one, such as {{'base': {{}}}}")
    if seeds < 1:
        raise SettingError(f"table {name!r}: seeds={seeds} should be at least 1")
    made = make_rows(name, rows, published or {}, paper)
    if axis is not None:
        _check_axis(name, axis)
    conclusions = tuple(conclusions)
    for each in conclusions:
        _check_is_row(name, each.better, rows, "a conclusion")
        _check_is_row(name, each.worse, rows, "a conclusion")
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
    """Return the rows of ``table`` with their published scores; raise SettingError as ``make_table`` does."""
    for key, scores in published.items():
        _check_is_row(table, key, rows, "a published score")
        _check_columns(f"{table}/{key}", scores, paper)
    made = []
    for key, changes in rows.items():
        entry = published.get(key, Published(key, {}))
        if entry.runs < 1:
            raise SettingError(f"row {table}/{key}: runs={entry.runs} of its paper should be at least 1")
        made.append(make_row(f"{table}/{key}", entry.label, changes, entry.scores, entry.runs))
    return tuple(made)


def make_row(
    name: str,
    label: str,
    changes: Mapping[str, object],
    published: Mapping[str, float],
    published_runs: int = 1,
) -> Row:
    """Return a row whose changes and published scores are read-only."""
    return Row(
        name,
        label,
        ReadOnly(changes, READ_ONLY_ROW_ERROR),
        ReadOnly(published, READ_ONLY_ROW_ERROR),
        published_runs,
    )


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
    """Raise SettingError unless there is one score for each column of ``paper``, or none at all."""
    if paper is None:
        raise SettingError(f"row {row!r} has published scores: name their paper, with paper=Paper(...)")
    required = [column.name for column in paper.columns]
    if published.scores and set(published.scores) != set(required):
        raise SettingError(
            f"row {row!r} has scores in {', '.join(published.scores)}; "
            f"{paper.citation} should have one in each of {', '.join(required)}"
        )

"""Tables of experiments as data: their rows, their baseline, and the scores that a paper published.

``lm list``, ``lm sweep``, reports, plots and verdicts on claims all read a Table. Nothing about a table is
written anywhere else.
"""

import json
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field, is_dataclass
from math import isfinite
from pathlib import Path
from typing import Any, Literal, get_args

from experiments.study.changes import Changes, ReadOnly
from experiments.study.experiment import BASELINE
from experiments.study.scales import DEFAULT_SCALE
from lm.config.base import SettingError, did_you_mean, leaves

READ_ONLY_ROW_ERROR = "a row stays what it is; add one of your own with add_rows(TABLE, {ROW: CHANGES})"
Pairs = Literal["all", "with-baseline"]  # pairs of rows that a table compares
# What is said of two rows: the first is better than the second, or they are equivalent, which means that they
# differ by less than the equivalence margin that reports use.
Relation = Literal["better", "equivalent"]
# A half of the tasks: those that cannot be answered without their input, or those that measure how well a
# model knows the language of the text.
Half = Literal["reading", "language"]
RELATION_SIGNS: Mapping[Relation, str] = {"better": ">", "equivalent": "≈"}
SECOND_HAND, UNSURE = "second hand", "unsure"  # why a published score may be wrong


def read_only(changes: Mapping[str, object]) -> ReadOnly:
    """Return ``changes`` as a mapping that nobody can change."""
    return ReadOnly(changes, READ_ONLY_ROW_ERROR)


@dataclass(frozen=True)
class Setup:
    """Holds what all rows of a paper or table share: their changes from ``study.experiment.BASELINE``.

    A row is built from BASELINE by applying, in order: the scale's changes, ``changes``, ``at_base`` (only at
    scale ``base``) and the row's own changes.
    """

    changes: ReadOnly = read_only({})  # at every scale: the kind of model, the objective, the optimiser
    # at scale `base` alone: the sizes, steps, batches and rates of the paper
    at_base: ReadOnly = read_only({})


def make_setup(changes: Changes, at_base: Changes | None = None) -> Setup:
    """Return a setup whose changes are read-only."""
    return Setup(read_only(changes), read_only(at_base or {}))


BASELINE_SETUP = Setup()  # no changes: study.experiment.BASELINE, which is the setup of the T5 paper


@dataclass(frozen=True)
class Missing:
    """Stands in a table for the changes of a row that cannot be built, since this code lacks parts of it."""

    needs: tuple[str, ...]  # what is missing, in the field's words: ("mixture of experts",)


def missing(*needs: str) -> Missing:
    """Return a placeholder for a row that needs something this code lacks, such as "mixture of experts"."""
    if not needs or not all(needs):
        raise SettingError('missing() should say what a row needs, such as missing("mixture of experts")')
    return Missing(needs)


@dataclass(frozen=True)
class Row:
    """One row of a table: an experiment, as its difference from the baseline of its paper or table."""

    name: str  # TABLE/ROW, such as "t5/6-corruption-rate/15"
    label: str  # its name in plots and reports, which is the paper's if it is a row of a paper
    # path of a setting -> its new value, or a function (old value, experiment) -> new value
    changes: ReadOnly
    published: ReadOnly  # column of the paper -> its score; empty if the paper has no such row
    setup: Setup = BASELINE_SETUP  # what comes before the row's own changes
    needs: tuple[str, ...] = ()  # what this code lacks to build the row; () if it can be built
    published_runs: int = 1  # number of the paper's runs whose mean its score is
    doubts: ReadOnly = read_only({})  # column -> SECOND_HAND or UNSURE
    intervals: ReadOnly = read_only({})  # column -> half width of the interval that the paper prints

    def __hash__(self) -> int:
        return hash(self.name)  # rows are looked up hundreds of times

    @property
    def table(self) -> str:
        """Return the name of the row's table."""
        return self.name.rpartition("/")[0]

    @property
    def key(self) -> str:
        """Return the row's name within its table."""
        return self.name.rpartition("/")[2]

    def derivation(self, path: str) -> str:
        """Return how the row computes a setting from the scale's value, such as "x 2".

        Return "" for a constant, and for a setting whose group a later change sets as a whole.
        """
        setting_it = [each for each in self.changes if path == each or path.startswith(f"{each}.")]
        change = self.changes[path] if setting_it[-1:] == [path] else None
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
    higher_is_better: bool | None = None  # None becomes False for a loss on held-out text, else True
    held_out: bool = False  # whether it is a loss on held-out text; reports print ours beside it

    def __post_init__(self) -> None:
        """Set ``higher_is_better`` if it is not given; SettingError unless ``std`` is above 0."""
        if self.std is not None and not self.std > 0:
            raise SettingError(f"column {self.name!r}: std={self.std} should be above 0, or None")
        if self.higher_is_better is None:
            object.__setattr__(self, "higher_is_better", not self.held_out)


@dataclass(frozen=True)
class NoiseEstimate:
    """The runs from whose scores the standard deviations of a paper's columns were estimated."""

    num_runs: int
    description: str  # "the baseline, pre-trained and fine-tuned with other seeds"


@dataclass(frozen=True)
class Paper:
    """A paper whose scores are printed beside ours, with the noise of those scores."""

    name: str  # "T5": a report on its tables is called "The T5 study"
    citation: str  # "Raffel et al. 2020"
    columns: tuple[Column, ...]  # in the order of its tables
    authors: str = ""  # all of them: "Noam Shazeer, Barret Zoph"
    question: str = ""  # that the paper asks, in a sentence
    source: str = ""  # "arXiv 1910.10683"
    title: str = ""  # as printed
    noise: NoiseEstimate | None = None  # None: the paper gives no noise
    setup: Setup = BASELINE_SETUP  # of those tables that have none of their own

    def column(self, name: str) -> Column:
        """Return the column of this name; raise KeyError if there is none."""
        return {column.name: column for column in self.columns}[name]


@dataclass(frozen=True)
class Published:
    """The scores of one row in a paper, and where it prints them."""

    label: str
    scores: Mapping[str, float]  # column -> score; columns that the paper leaves empty are left out
    source: str = ""  # "JMLR 21(140), Table 4, page 22"
    runs: int = 1  # number of runs whose mean the scores are: ten for the T5 paper's baseline
    second_hand: bool = False  # whether the scores were read in another text than the paper
    unsure: tuple[str, ...] = ()  # columns whose score may be misread
    # column -> half width of the interval that the paper prints
    intervals: Mapping[str, float] = field(default_factory=dict)

    @property
    def doubts(self) -> dict[str, str]:
        """Return column -> why its score may be wrong; columns without doubt are left out."""
        doubts = dict.fromkeys(self.scores, SECOND_HAND) if self.second_hand else {}
        return doubts | dict.fromkeys(self.unsure, UNSURE)


class PublishedScores:
    """The published scores of a paper's tables, read from a JSON file, which lies beside the paper's module.

    The file has ``columns`` (name -> what a Column has) and ``tables`` (name of a table -> row -> what a
    Published has). It holds facts and figures only; what a row changes is in the module.
    """

    def __init__(self, path: Path):
        """Read a file such as ``Path(__file__).with_name("glu_scores.json")``."""
        file = json.loads(path.read_text("utf-8"))
        self.columns = tuple(Column(name, **column) for name, column in file["columns"].items())
        self._tables: Mapping[str, Mapping[str, Any]] = file["tables"]

    def table(self, name: str) -> dict[str, Published]:
        """Return row -> its published scores, in the order of the paper; raise SettingError for no table."""
        if name not in self._tables:
            raise SettingError(
                f"there are no published scores of table {name!r}{did_you_mean(name, self._tables)}"
            )
        return {
            key: Published(**row | {"unsure": tuple(row.get("unsure", ()))})
            for key, row in self._tables[name].items()
        }


@dataclass(frozen=True)
class Conclusion:
    """A sentence, of a paper or of ours, that calls one row of a table better than another, or as good.

    >>> Conclusion("narrow", "wide", "a narrow layer is as good", relation="equivalent").pair
    'narrow ≈ wide'
    """

    better: str  # a row's name within the table; one of the two rows if they are said to be equivalent
    worse: str
    text: str  # "50 % noise is too much"
    column: str = ""  # that the statement is about; empty: the table's columns
    relation: Relation = "better"
    tasks: Half | None = None  # the half of the tasks that it is about; None: all tasks that the rows have

    @property
    def pair(self) -> str:
        """Return its rows with the sign of what it says of them, such as "15 > 50"."""
        return pair_text(self.better, self.worse, self.relation)


def pair_text(better: str, worse: str, relation: Relation) -> str:
    """Return the names of two rows with ">" or "≈" between them."""
    return f"{better} {RELATION_SIGNS[relation]} {worse}"


@dataclass(frozen=True)
class Table:
    """Rows that are compared with a baseline and with each other. ``make_table`` makes one.

    A claim (``study.claims.claims_to_test``) is a conclusion or, if the paper gives its noise, a pair of rows
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
    setup: Setup = BASELINE_SETUP  # what comes before the changes of each row
    columns: tuple[str, ...] = ()  # names of the paper's columns by which its rows are compared
    pairs: Pairs = "all"  # which pairs of rows may become claims, if the paper gives its noise
    # hypotheses, written before the rows are run: reports give a verdict on exactly these
    conclusions: tuple[Conclusion, ...] = ()
    # The rows stand in for the paper's with other data. claims_to_test() returns none then, at any scale,
    # although the published scores are still printed.
    surrogate_data: bool = False

    @property
    def can_be_built(self) -> bool:
        """Return whether this code has what any of the rows needs."""
        return any(not row.needs for row in self.rows)


def make_table(
    name: str,
    title: str,
    rows: Mapping[str, Changes | Missing],
    *,
    baseline: str = "",
    axis: Axis | None = None,
    scale: str = DEFAULT_SCALE,
    seeds: int = 1,
    paper: Paper | None = None,
    setup: Setup | None = None,
    columns: Iterable[str] | None = None,
    pairs: Pairs = "all",
    published: Mapping[str, Published] | PublishedScores | None = None,
    conclusions: Iterable[Conclusion] = (),
    surrogate_data: bool = False,
) -> Table:
    """Return a table in which row ``key`` is the setup with the changes ``rows[key]``.

    baseline: the row to compare with: its name within the table, or the full name of a row of another one;
    empty means the table's first row.
    setup: what all rows share; None means that of the paper, or without one ``study.experiment.BASELINE``.
    columns: those of the paper's columns by which it compares these rows; None means all.
    pairs: whether a claim may be any pair of rows, or only a row and the baseline.
    published: row -> its scores in ``paper``, without the rows that the paper lacks; or the paper's scores,
    among which those of this table are found by its name.
    Raise SettingError if a published score or a conclusion names a row that the table lacks, if a conclusion
    compares a row with itself or is given twice, if the scores of a row are not in the paper's columns, and
    for a table without rows or with values that are not choices.
    """
    if not rows:
        raise SettingError(f"table {name!r} has no rows; give it one, such as {{'base': {{}}}}")
    if seeds < 1:
        raise SettingError(f"table {name!r}: seeds={seeds} should be at least 1")
    if setup is None:
        setup = paper.setup if paper else BASELINE_SETUP
    if columns is None:
        columns = (column.name for column in (paper.columns if paper else ()))
    if pairs not in get_args(Pairs):
        raise SettingError(f"table {name!r}: pairs={pairs!r} should be one of {get_args(Pairs)}")
    columns = tuple(columns)
    _check_known_columns(f"table {name!r}", columns, paper)
    if isinstance(published, PublishedScores):
        published = published.table(name)
    if baseline in rows:
        baseline = f"{name}/{baseline}"
    made = make_rows(name, rows, published or {}, paper, setup)
    if axis is not None:
        _check_axis(name, axis)
    conclusions = tuple(conclusions)
    for each in conclusions:
        _check_is_row(name, each.better, rows, "a conclusion")
        _check_is_row(name, each.worse, rows, "a conclusion")
        if each.relation not in RELATION_SIGNS:
            raise SettingError(
                f"table {name!r}: a conclusion: relation={each.relation!r} should be 'better' or 'equivalent'"
            )
        if each.tasks not in (None, *get_args(Half)):
            raise SettingError(
                f"table {name!r}: a conclusion: tasks={each.tasks!r} should be 'reading', 'language' or None"
            )
        if each.column:
            _check_known_columns(f"table {name!r}: a conclusion", [each.column], paper)
        if each.better == each.worse:
            raise SettingError(f"table {name!r}: a conclusion compares {each.better!r} with itself")
        if conclusions.count(each) > 1:
            raise SettingError(f"table {name!r}: the conclusion {each.text!r} is given twice")
    return Table(
        name=name,
        title=title,
        rows=made,
        baseline=baseline or made[0].name,
        axis=axis,
        scale=scale,
        seeds=seeds,
        paper=paper,
        setup=setup,
        columns=columns,
        pairs=pairs,
        conclusions=conclusions,
        surrogate_data=surrogate_data,
    )


def make_rows(
    table: str,
    rows: Mapping[str, Changes | Missing],
    published: Mapping[str, Published],
    paper: Paper | None,
    setup: Setup = BASELINE_SETUP,
) -> tuple[Row, ...]:
    """Return the rows of ``table`` with their published scores; raise SettingError as ``make_table`` does."""
    for key, scores in published.items():
        _check_is_row(table, key, rows, "a published score")
        _check_scores(f"{table}/{key}", scores, paper)
    return tuple(
        make_row(f"{table}/{key}", changes, published.get(key, Published(key, {})), setup)
        for key, changes in rows.items()
    )


def make_row(
    name: str, changes: Changes | Missing, published: Published, setup: Setup = BASELINE_SETUP
) -> Row:
    """Return a row whose changes and published scores are read-only."""
    own, needs = ({}, changes.needs) if isinstance(changes, Missing) else (changes, ())
    return Row(
        name,
        published.label,
        read_only(own),
        read_only(published.scores),
        setup,
        needs,
        published.runs,
        read_only(published.doubts),
        read_only(published.intervals),
    )


def _check_axis(table: str, axis: Axis) -> None:
    """Raise SettingError unless the axis is a setting that may be a number."""
    settings = dict(leaves(BASELINE))
    if axis.setting not in settings:
        like = did_you_mean(axis.setting, settings)
        raise SettingError(f"table {table!r}: its axis: there is no setting {axis.setting!r}{like}")
    value = settings[axis.setting]
    if isinstance(value, bool | str | tuple):
        raise SettingError(f"table {table!r}: its axis: {axis.setting}={value!r} is not a number")


def _check_is_row(table: str, key: str, rows: Mapping[str, object], what: str) -> None:
    if key not in rows:
        raise SettingError(
            f"table {table!r}: {what} names the row {key!r}, which it lacks{did_you_mean(key, rows)}"
        )


def _check_scores(row: str, published: Published, paper: Paper | None) -> None:
    """Raise SettingError unless the scores of ``row`` are numbers in columns of ``paper``."""
    if paper is None:
        raise SettingError(f"row {row!r} has published scores: name their paper, with paper=Paper(...)")
    named = [*published.scores, *published.unsure, *published.intervals]
    _check_known_columns(f"row {row!r}", named, paper)
    if published.runs < 1:
        raise SettingError(f"row {row!r}: runs={published.runs} of its paper should be at least 1")
    for column, score in published.scores.items():
        if isinstance(score, bool) or not isinstance(score, int | float) or not isfinite(score):
            raise SettingError(f"row {row!r}: its score in {column} is {score!r}, which should be a number")


def _check_known_columns(what: str, columns: Iterable[str], paper: Paper | None) -> None:
    """Raise SettingError if one of ``columns`` is none of ``paper``."""
    known = [column.name for column in (paper.columns if paper else ())]
    for column in columns:
        if column not in known:
            if paper is None:
                raise SettingError(f"{what}: column {column!r} needs a paper: give paper=Paper(...)")
            raise SettingError(
                f"{what}: {paper.citation} has no column {column!r}{did_you_mean(column, known)}"
            )

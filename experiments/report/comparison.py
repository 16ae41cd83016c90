"""Finished runs of a table compared: which columns count, and the paper's claims in three frames."""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from math import hypot, inf, sqrt
from statistics import mean
from typing import Any, Literal, get_args

import numpy as np

from experiments.report.columns import (
    FRAMES,
    Frame,
    Growth,
    Measured,
    Tasks,
    has_equal_targets,
    has_plateau,
    held_out,
    measured_columns,
    pooled,
)
from experiments.report.statistics import (
    ROUNDING,
    Difference,
    Judged,
    RowPair,
    apart,
    judge_family,
    noise_of_examples,
    outliers,
)
from experiments.runs.result import Result
from experiments.study.claims import SIGNIFICANT, Claim, claims
from experiments.study.experiment import Experiment
from experiments.study.table import Row, Table
from lm.config.base import SettingError

SIGNAL = 3.0  # spread of the rows over the deviation of a repeat: a column below that is not averaged
FROM_CHANCE = 3.0  # of the baseline: nor is one whose baseline guesses [standard errors]
Curves = Mapping[str, Sequence[Sequence[tuple[float, float]]]]  # what was recorded -> lines of (step, value)
# deviations of a repeat: the smallest difference of two rows, over its seven columns, that the T5 paper tells
MARGIN = SIGNIFICANT * sqrt(2 / 7)
ALIKE: Mapping[str, list[str]] = {}
WHOLE: Mapping[int, float] = {}
Uncompared = Literal["not yet learning", "out of range", "no common seed"]  # why rows are not compared
Word = Literal["confirmed", "contradicted", "equivalent", "undecided", Uncompared]
UNCOMPARED = get_args(Uncompared)


@dataclass(frozen=True)
class Finished:
    """The finished runs of a table's rows, and of the row that they are compared with."""

    table: Table
    baseline: Row
    runs: Mapping[str, Sequence[Result]]  # row -> its seeds
    settings: Mapping[str, Experiment] = field(default_factory=dict)  # of each row

    def of(self, row: Row) -> Sequence[Result]:
        return self.runs[row.name]

    @property
    def trained(self) -> list[Row]:
        """The rows of the table of which any seed has finished."""
        return [row for row in self.table.rows if self.of(row)]

    @cached_property
    def columns(self) -> list[Measured]:
        """The columns in which any row of the table was scored."""
        tasks = [self.tasks(run) for row in self.table.rows for run in self.of(row)]
        return measured_columns(tasks, self.table.paper)

    @cached_property
    def has_tasks(self) -> bool:
        """Whether any row of the table was scored on a task."""
        return any(run.tasks for row in self.table.rows for run in self.of(row))

    def tasks(self, run: Result) -> Tasks:
        """Return what a run was scored on: tasks or, in a table without any, held-out text."""
        return run.tasks if self.has_tasks else held_out(run)

    def comparable(self, column: Measured, a: str, b: str) -> bool:
        """Whether two rows have the same targets in a column, as far as settings are known."""
        known = {a, b} <= self.settings.keys()
        return not known or has_equal_targets(column, self.settings[a], self.settings[b])

    @property
    def keys(self) -> list[str]:
        """The names of the rows and their baseline, once each."""
        return list(dict.fromkeys(map(self.key, (*self.table.rows, self.baseline))))

    def key(self, row: Row) -> str:
        """Return the name of ``row`` in samples: rows that are one experiment share their runs and a name."""
        rows = (*self.table.rows, self.baseline)
        return next(other.name for other in rows if self._is_same(other, row))

    def _is_same(self, a: Row, b: Row) -> bool:
        if a.name == b.name:
            return True
        if {a.name, b.name} <= self.settings.keys():
            return self.settings[a.name] == self.settings[b.name]
        return a.changes == b.changes

    def samples(self, column: Measured) -> dict[str, dict[int, float]]:
        """Row -> seed -> its value in a column, for the rows of the table and their baseline."""
        return {
            key: {run.seed: x for run in self.runs[key] if (x := column.value(self.tasks(run))) is not None}
            for key in self.keys
        }

    def deviation(self, column: Measured) -> float:
        """Of a column over the seeds of a row, pooled over the rows; 0 if unknown."""
        return pooled([*row.values()] for row in self.samples(column).values())

    def learning(self, key: str, updates: Mapping[int, float] = WHOLE) -> bool:
        """Whether most of a row's seeds have left the plateau, or never had one to leave.

        ``updates``: seed -> after how many of its pre-training, of these seeds; else of all, after all.
        """
        if key in self.settings and not has_plateau(self.settings[key]):
            return True
        runs = [run for run in self.runs[key] if not updates or run.seed in updates]
        exits = [(r.exit_step, updates.get(r.seed, inf)) for r in runs if r.content_loss is not None]
        stuck = [left for left, trained in exits if left is None or left > trained * (1 + ROUNDING)]
        return 2 * len(stuck) < len(runs) or not runs


@dataclass(frozen=True)
class Verdict:
    """What runs say of a claim in one frame. Only the first two words decide it."""

    word: Word
    judged: Judged | None = None  # of better - worse, in deviations of a repeat


Verdicts = Mapping[Frame, Sequence[tuple[Claim, Verdict]]]


class Evidence:
    """The columns of a table that count, and its rows' differences over them."""

    def __init__(
        self, finished: Finished, complain: Callable[[str], object], unlike: Mapping[str, list[str]] = ALIKE
    ):
        """``complain`` is called with each file that is damaged and each run that lacks what others have.

        ``unlike``: rows that were made of other things than those beside them, and of which.
        """
        self.finished, self.complain, self.unlike = finished, complain, unlike

    @cached_property
    def signals(self) -> dict[str, float | None]:
        """Column -> the range of its rows' means in deviations of a repeat; None if unknown.

        Of rows with two seeds or more: the mean of one is far from the others by its noise alone.
        """
        signals: dict[str, float | None] = {}
        for column in self.finished.columns:
            means = [mean(x.values()) for x in self.finished.samples(column).values() if len(x) > 1]
            is_known = len(means) > 1 and self.finished.deviation(column) > 0
            signals[column.name] = float(np.ptp(means)) / self.units[column.name] if is_known else None
        return signals

    @cached_property
    def units(self) -> dict[str, float]:
        """Column -> its deviation if both seeds and examples were others; 1 if unknown.

        Seeds are too few to weigh columns by them alone: one that happens to repeat well would decide all.
        """
        seeds = {column.name: self.finished.deviation(column) for column in self.finished.columns}
        return {name: hypot(noise, self._by_draws(name)) or 1.0 for name, noise in seeds.items()}

    def _by_draws(self, name: str) -> float:
        noise = [np.var(x) for row in self._by_examples[name].values() for x in row.values()]
        return sqrt(np.mean(noise or [0.0]))

    @cached_property
    def kept(self) -> list[Measured]:
        """The columns that are averaged: they tell rows apart, and the baseline does not guess."""
        return [column for column in self.finished.columns if self._is_kept(column)]

    def _is_kept(self, column: Measured) -> bool:
        if column.is_held_out:  # which rows with other targets have too
            return False
        from_chance = self.from_chance(column)
        is_learned = from_chance is None or from_chance >= FROM_CHANCE
        return is_learned and (self.signals[column.name] or 0.0) >= SIGNAL

    @cached_property
    def growth(self) -> dict[str, dict[int, Growth]]:
        """Row -> seed -> what it scored with more and more pre-training; of runs with all kept columns."""
        rows: dict[str, dict[int, Growth]] = {}
        for key in (key for key in self.finished.keys if self.kept and key in self.finished.settings):
            rows[key] = {}
            for run in self.finished.runs[key]:
                if lacking := [c.name for c in self.kept if c.value(run.tasks) is None]:
                    missing = f"has no score in {', '.join(lacking)}"
                    self.complain(f"{key} seed {run.seed} {missing}: it is in no combined score")
                else:
                    rows[key][run.seed] = grown(run, self.kept, self.finished.settings[key])
        return rows

    def combine(self, values: Mapping[str, float]) -> float:
        """Mean over the kept columns, in deviations of a repeat; more is better."""
        parts = [c.better * values[c.name] / self.units[c.name] for c in self.kept]
        return sum(parts) / len(parts)

    def combined(self, key: str) -> dict[int, float]:
        """Seed -> a row's combined score less the baseline's, at the end of training.

        That is the mean of the baseline's seeds that the row has too, so that what a seed does to all rows
        cancels; of all of them if the row has none of them.
        """
        seeds, zero = self.growth.get(key, {}), self._zero(key)
        return {} if zero is None else {seed: self._last(growth) - zero for seed, growth in seeds.items()}

    def _zero(self, key: str) -> float | None:
        """The baseline's score that a row's is told from; None if no baseline has finished."""
        base = self.growth.get(self.finished.key(self.finished.baseline), {})
        shared = self.growth.get(key, {}).keys() & base.keys()
        return mean(self._last(base[seed]) for seed in shared or base) if base else None

    def _last(self, growth: Growth) -> float:
        return self.combine({c.name: float(growth.values[c.name][-1]) for c in self.kept})

    def curve(self, key: str, frame: Frame) -> list[list[tuple[float, float]]]:
        """A line a seed of (spent, combined score less the baseline's at its end)."""
        zero, lines = self._zero(key) or 0.0, []
        for growth in self.growth.get(key, {}).values():
            points = zip(*(growth.values[c.name] for c in self.kept), strict=True)
            scores = [self.combine(dict(zip(growth.values, point, strict=True))) - zero for point in points]
            lines.append(list(zip(growth.spent[frame].tolist(), scores, strict=True)))
        return lines

    @cached_property
    def _by_examples(self) -> dict[str, dict[str, dict[int, np.ndarray]]]:
        """Column -> row -> seed -> [DRAWS]: how far its value moves if examples are drawn; where known."""
        return {c.name: example_noise(self.finished, c, self.complain) for c in self.finished.columns}

    def _apart_by_examples(self, a: str, b: str, seeds: Sequence[int]) -> np.ndarray | None:
        """[S, DRAWS]: how far the combined scores of two rows move apart, by the columns known of both."""
        moved = [(c, apart(self._by_examples[c.name], a, b, seeds)) for c in self.kept]
        parts = [x * c.better / self.units[c.name] for c, x in moved if x is not None]
        return np.sum(parts, axis=0) / len(self.kept) if parts else None

    def from_chance(self, column: Measured) -> float | None:
        """How much better than chance the baseline is, in standard errors by seeds and examples, if known."""
        base = self.finished.key(self.finished.baseline)
        values, noise = self.finished.samples(column)[base], self._by_examples[column.name].get(base, {})
        by_examples = np.var(np.mean([*noise.values()], axis=0)) if noise else 0.0
        by_seeds = np.var([*values.values()], ddof=1) / len(values) if len(values) > 1 else 0.0
        error = float(np.sqrt(by_examples + by_seeds))
        if column.chance is None or not values or not error:
            return None
        return column.better * (mean(values.values()) - column.chance) / error

    def difference(self, a: str, b: str, frame: Frame) -> Difference | Uncompared:
        """Row a's combined score less row b's where both have spent as much, or why there is none.

        That is what the one that spent less has spent in all; after equal updates it is the end of training
        of both, as in the paper. The noise by examples is that at the end.
        """
        of_a, of_b = (self.growth.get(row, {}) for row in (a, b))
        if not (seeds := sorted(of_a.keys() & of_b.keys())):
            return "no common seed"
        ends = {seed: min(of_a[seed].most(frame), of_b[seed].most(frame)) for seed in seeds}
        sides = []
        for row, of_row in ((a, of_a), (b, of_b)):
            spent = {s: of_row[s].most(frame) if frame == "updates" else ends[s] for s in seeds}
            scores = [self._at(of_row[seed], frame, spent[seed]) for seed in seeds]
            if None in scores:
                return "out of range"
            if not self.finished.learning(row, {s: of_row[s].updates(frame, spent[s]) for s in seeds}):
                return "not yet learning"
            sides.append(np.array(scores, np.float64))
        return Difference(sides[0] - sides[1], self._apart_by_examples(a, b, seeds))

    def _at(self, growth: Growth, frame: Frame, spent: float) -> float | None:
        if frame == "updates":  # which a row without pre-training has none of
            return self._last(growth)
        values = {c.name: growth.at(frame, spent, c.name) for c in self.kept}
        known = {name: x for name, x in values.items() if x is not None and not np.isnan(x)}
        return self.combine(known) if len(known) == len(values) else None

    def marks(self, column: Measured) -> dict[str, int]:
        """Row -> 1, -1, 0: better, worse than the baseline in a column, or it may be noise."""
        return {key: judged.sign for key, judged in self.judged(column).items()}

    def judged(self, column: Measured) -> dict[str, Judged]:
        """Return for each row how it differs from the baseline in a column, in deviations; more is better.

        Rows that share no seed with the baseline are left out, and those with other targets.
        """
        samples, base = self.finished.samples(column), self.finished.key(self.finished.baseline)
        unit, pairs = column.better / self.units[column.name], {}
        for key in (key for key in samples if key != base and self.finished.comparable(column, key, base)):
            if seeds := sorted(samples[key].keys() & samples[base].keys()):
                by_seed = unit * np.array([samples[key][s] - samples[base][s] for s in seeds])
                by_examples = apart(self._by_examples[column.name], key, base, seeds)
                pairs[key, base] = Difference(by_seed, None if by_examples is None else unit * by_examples)
        return {key: judged for (key, _), judged in judge_family(pairs, MARGIN).items()}

    def less_baseline(self, column: Measured) -> dict[str, tuple[float, float, float]]:
        """Return for each row its value less the baseline's, and the ends of the interval of 95 %."""
        unit = column.better * self.units[column.name]
        found = {}
        for key, x in self.judged(column).items():
            ends = unit * x.low, unit * x.high
            found[key] = unit * x.mean, min(ends), max(ends)
        return found

    def verdicts(self) -> Verdicts:
        """Every claim about two rows that have finished, in each frame."""
        key, rows = self.finished.key, self.finished.runs
        wanted = [
            c for c in claims(self.finished.table) if rows.get(key(c.better)) and rows.get(key(c.worse))
        ]
        return {frame: self._judge(wanted, frame) for frame in FRAMES}

    def _judge(self, wanted: Sequence[Claim], frame: Frame) -> list[tuple[Claim, Verdict]]:
        pairs = [(self.finished.key(claim.better), self.finished.key(claim.worse)) for claim in wanted]
        found: dict[RowPair, Verdict] = {}
        differences: dict[RowPair, Difference] = {}
        for pair in pairs:
            if not all(map(self.finished.learning, pair)):
                found[pair] = Verdict("not yet learning")
            elif not self.kept:
                found[pair] = Verdict("undecided")
            elif isinstance(difference := self.difference(*pair, frame), str):
                found[pair] = Verdict(difference)
            else:
                differences[pair] = difference
        found |= {pair: said(judged) for pair, judged in judge_family(differences, MARGIN).items()}
        return [(claim, found[pair]) for claim, pair in zip(wanted, pairs, strict=True)]

    def outlying_seeds(self) -> list[tuple[str, int]]:
        """(row, seed) whose combined score is far from that of the row's other seeds."""
        return outliers({key: self.combined(key) for key in self.growth})


def grown(run: Result, columns: Sequence[Measured], settings: Experiment) -> Growth:
    """A run's scores after parts of its pre-training and after all of it."""
    last = settings.pretraining.steps
    points: dict[int, dict[str, Mapping[str, Any]]] = {}
    for name, branches in run.branches.items():
        for updates, best in branches.items():
            points.setdefault(int(updates), {})[name] = best
    early = {
        updates: tasks
        for updates, tasks in points.items()
        if updates < last and all(column.value(tasks) is not None for column in columns)
    }
    spent: dict[Frame, tuple[float, float]] = {
        "updates": (0.0, last),
        "FLOP": (run.start_flops, run.flops),
        "content tokens": (run.start_tokens, run.content_tokens),
    }
    return Growth.of({**early, last: run.tasks}, columns, spent)


def said(judged: Judged) -> Verdict:
    """The verdict on a claim by the difference of its better and its worse row."""
    undecided: Word = "equivalent" if judged.equivalent else "undecided"
    words: dict[int, Word] = {1: "confirmed", -1: "contradicted", 0: undecided}
    return Verdict(words[judged.sign], judged)


def example_noise(
    finished: Finished, column: Measured, complain: Callable[[str], object]
) -> dict[str, dict[int, np.ndarray]]:
    """Row -> seed -> [DRAWS]: a column's value with examples drawn, less its own; of runs that kept them.

    All runs see the same draws; runs whose examples are not those of most others are left out.
    """
    known, lacking = {}, []
    for place, run in {(key, run.seed): run for key in finished.keys for run in finished.runs[key]}.items():
        try:
            alone = len(column.tasks) == 1 and not column.is_held_out
            values = column.examples(run.example_values(column.tasks[0]) if alone else {})
        except (SettingError, OSError) as error:
            complain(f"{error}; its examples are not drawn")
            continue
        if values is not None and len(values[0]):
            known[place] = values
        elif column.value(finished.tasks(run)) is not None:
            lacking.append(place)
    drawn = noise_of_examples(known)
    for key, seed in (place for place in known if place not in drawn):
        complain(f"{key} seed {seed}: its examples of {column.name} are other ones than those of most runs")
    for key, seed in lacking if known else ():
        complain(f"{key} seed {seed}: the values of its examples of {column.name} are missing; not drawn")
    keys = dict.fromkeys(key for key, _ in drawn)
    return {key: {seed: x for (row, seed), x in drawn.items() if row == key} for key in keys}

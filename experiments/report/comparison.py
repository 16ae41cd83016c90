"""Compares the finished runs of a table: how each row differs from the baseline, the verdict on each claim at
equal budgets, and whether the rows are in the paper's order.

The metrics used for verdicts are fixed in advance: all tasks of the runs except those that the study has
declared unfit. They are judged in two halves, tasks that need their input ("reading") and tasks on the
language itself ("language"), and on both together. No task is dropped because of the scores of the rows that
are compared.

Differences are averaged over metrics in units of each metric's noise standard deviation: how much a score
varies with a new seed and new examples. It is estimated from the median row of all tables that are reported
together, so that their combined scores share one scale.
"""

from collections.abc import Callable, Mapping, Sequence
from copy import copy
from dataclasses import dataclass, replace
from functools import cached_property
from itertools import chain
from math import hypot, inf, sqrt
from statistics import mean
from typing import Literal, NamedTuple, get_args

import numpy as np

from experiments.report.metrics import (
    JUDGED_BUDGETS,
    Budget,
    BudgetCurve,
    Group,
    Metric,
    TaskScores,
    budget_curve,
    find_metrics,
    has_same_targets,
    metric_groups,
    pooled_std,
    run_scores,
    typical_std,
)
from experiments.report.order import MIN_ROWS, PaperOrder, common_seeds, paper_order
from experiments.report.statistics import (
    RELATIVE_TOLERANCE,
    PairedDifference,
    PairedTest,
    RowPair,
    RunKey,
    bootstrap_deltas,
    bootstrap_difference,
    compare_pairs,
    outlying_seeds,
    sample_variance,
    seed_weights,
)
from experiments.runs import provenance
from experiments.runs.plateau import has_plateau
from experiments.runs.result import Result
from experiments.study.claims import SIGNIFICANT, Claim, claims_to_test
from experiments.study.experiment import Experiment
from experiments.study.registry import REGISTRY
from experiments.study.start import START_ONLY_ROW
from experiments.study.table import Relation, Row, Table
from lm.config.base import SettingError

# A row counts as above chance if its score exceeds chance by this many standard errors.
MIN_ABOVE_CHANCE = 3.0
# Rows that differ by less are equivalent [noise standard deviations]. A mean over the seven columns of the T5
# paper has 1 / sqrt(7) of the standard deviation of one column, and a difference of two runs has sqrt(2)
# times that of one run: its standard error is sqrt(2 / 7). The margin is SIGNIFICANT such standard errors,
# the least difference of two single runs that is significant in the paper.
EQUIVALENCE_MARGIN = SIGNIFICANT * sqrt(2 / 7)
# In place of a standard deviation that is unknown: differences divided by it keep the metric's own unit.
UNKNOWN_NOISE = 1.0
# Of a row with more seeds, the examples of this many are resampled; more would hardly narrow an interval.
MAX_RESAMPLED_SEEDS = 20
# Why two rows are not compared:
# - "not yet learning": one of them was still on the unigram plateau
# - "out of range": one of them was never scored after so little training; scores are not extrapolated
# - "no common seed": no seed has scores of both
# - "different targets": a metric measures them on different evaluation tokens
# - "same experiment": settings that were given to all rows have made them equal
Uncompared = Literal[
    "not yet learning", "out of range", "no common seed", "different targets", "same experiment"
]
OtherTasks = Literal["other tasks"]  # the claim does not concern the tasks that are judged
VerdictWord = Literal["confirmed", "contradicted", "equivalent", "undecided", Uncompared, OtherTasks]
BaselineVerdict = Literal["better", "worse", "equivalent", "undecided"]
UNCOMPARED: tuple[Uncompared, ...] = get_args(Uncompared)
Warn = Callable[[str], object]  # called with a line on each score that is left out, and why


class Mismatch(NamedTuple):
    """Says in what the provenance of a run differs from that of most runs that it is compared with."""

    row: str
    seed: int
    reason: str

    def __str__(self) -> str:
        return f"{self.row} seed {self.seed}: {self.reason}"


@dataclass(frozen=True)
class Verdict:
    """The verdict of our runs on a claim at one budget.

    "confirmed" and "contradicted" settle the claim; the other words leave it open.
    """

    word: VerdictWord
    test: PairedTest | None = None  # of better - worse [noise standard deviations]


@dataclass(frozen=True)
class BaselineDifference:
    """A row's difference from the baseline in one metric, in the unit of the metric."""

    mean: float
    low: float  # ends of the 95 % confidence interval; infinite if too few seeds differ to estimate it
    high: float
    verdict: BaselineVerdict
    test: PairedTest  # [noise standard deviations], positive if the row is better


@dataclass(frozen=True)
class MetricNoise:
    """Holds how much a metric varies with new seeds and with new examples, as standard deviations."""

    seeds: float  # 0 if no row has two seeds with different values
    examples: float  # 0 if no run kept the values of its examples

    @property
    def is_known(self) -> bool:
        """Return whether at least one of both is known."""
        return self.seeds > 0 or self.examples > 0

    @property
    def std(self) -> float:
        """Return the standard deviation of both together; UNKNOWN_NOISE if neither is known."""
        return hypot(self.seeds, self.examples) if self.is_known else UNKNOWN_NOISE


Verdicts = Mapping[Group, Mapping[Budget, Sequence[tuple[Claim, Verdict]]]]


class Comparison:
    """The finished runs of a table, their scores, differences and verdicts.

    Rows whose settings are equal are the same experiment and share their runs. The canonical name of such
    rows is the name of the first of them in the table. Arguments called ``name``, ``a`` or ``b`` and the keys
    of computed mappings are canonical names. ``runs``, ``experiments``, ``mismatches`` and ``paper_orders``
    have the rows' own names instead.

    ``baseline`` is the row that the table names as its baseline; it may be a row of another table.
    ``canonical_baseline`` is its canonical name. ``baseline_row`` is the row of this table that is the same
    experiment or, if there is none, ``baseline``. The seeds of a row are its finished runs, each of another
    seed.
    """

    def __init__(
        self,
        table: Table,
        runs: Mapping[str, Sequence[Result]],
        experiments: Mapping[str, Experiment],
        warn: Warn,
        mismatches: Mapping[str, Sequence[Mismatch]] | None = None,
        not_averaged: Mapping[str, str] | None = None,
    ):
        """Compare ``runs`` (row -> its finished seeds) of the table's rows and its baseline.

        experiments: row -> its settings. mismatches: row -> how the provenance of its runs differs from that
        of most runs. warn: called with a line on each damaged file and each run that lacks a score.
        not_averaged: task that the study leaves out of averages -> why (``study.scales.NOT_AVERAGED``).
        """
        self.table, self.runs, self.experiments, self.warn = table, runs, experiments, warn
        self.mismatches = mismatches or {}
        self.not_averaged = not_averaged or {}
        self.baseline = REGISTRY[table.baseline]
        self._scores: dict[int, TaskScores] = {}
        self._vocabularies: dict[str, str] = {}
        self._values_by_seed: dict[str, dict[str, dict[int, float]]] = {}
        self._differences: dict[str, dict[str, BaselineDifference]] = {}
        self._combined_scores: dict[tuple[str, Group], dict[int, float]] = {}

    # ---- rows and runs

    @cached_property
    def _canonical_names(self) -> dict[str, str]:
        """Map the name of each row to its canonical name."""
        name_of_experiment: dict[Experiment | str, str] = {}
        names = {}
        for row in (*self.table.rows, self.baseline):
            # a row that needs what this code lacks (``Row.needs``) cannot be built, and has no experiment
            experiment = self.experiments.get(row.name, row.name)
            names[row.name] = name_of_experiment.setdefault(experiment, row.name)
        return names

    def canonical_name(self, row: Row) -> str:
        """Return the name of the first row of the table that builds the same experiment as ``row``."""
        return self._canonical_names[row.name]

    @property
    def canonical_names(self) -> list[str]:
        """Return the canonical names of all rows and the baseline, each once."""
        return list(dict.fromkeys(self._canonical_names.values()))

    @property
    def canonical_baseline(self) -> str:
        """Return the canonical name of the baseline."""
        return self.canonical_name(self.baseline)

    @property
    def baseline_row(self) -> Row:
        """Return the row of the table that is the baseline's experiment, or else the baseline itself."""
        rows = (row for row in self.table.rows if self.canonical_name(row) == self.canonical_baseline)
        return next(rows, self.baseline)

    def including_baseline(self) -> "Comparison":
        """Return this comparison with the baseline added as the first row, unless it is already a row."""
        if self.baseline_row in self.table.rows:
            return self
        extended = copy(self)  # shares what has been computed, which includes the baseline
        extended.table = replace(self.table, rows=(self.baseline, *self.table.rows))
        return extended

    @property
    def control(self) -> str | None:
        """Return the canonical name of the control, START_ONLY_ROW; None if it has no finished run.

        At small scales a short pre-training on copying the inputs, the start, precedes each row's own
        pre-training. The control has only the start, and is then fine-tuned like the others. What a row
        scores above the control is therefore the effect of its own pre-training.
        """
        name = self._canonical_names.get(START_ONLY_ROW, START_ONLY_ROW)
        return name if self.runs.get(name) else None

    @property
    def names_with_control(self) -> list[str]:
        """Return the canonical names of rows, the baseline and, if it has runs, the control; each once."""
        return list(dict.fromkeys([*self.canonical_names, *filter(None, [self.control])]))

    def runs_of(self, row: Row) -> Sequence[Result]:
        """Return the finished seeds of a row."""
        return self.runs[row.name]

    @property
    def trained_rows(self) -> list[Row]:
        """Return the rows of the table with a finished seed."""
        return [row for row in self.table.rows if self.runs_of(row)]

    @property
    def finished_runs(self) -> list[Result]:
        """Return the finished seeds of all rows of the table; those that rows share are repeated."""
        return [*chain.from_iterable(map(self.runs_of, self.table.rows))]

    def scores(self, run: Result) -> TaskScores:
        """Return the scores of a run on tasks and on held-out text."""
        if id(run) not in self._scores:
            self._scores[id(run)] = run_scores(run)
        return self._scores[id(run)]

    def has_left_plateau(self, name: str, updates: Mapping[int, float] | None = None) -> bool:
        """Return whether more than half of a row's seeds have left the unigram plateau; True without runs.

        A run has left it once its held-out loss is clearly below that of a unigram model.
        ``Result.exit_step`` is the step of pre-training at which that was first measured. Only content tokens
        count: targets other than sentinels, EOS and copies of the input token at the same place. Rows for
        which it cannot be measured count as having left (``has_plateau``): they train on tasks, memorize a
        text, have an objective that only copies, or are not pre-trained.

        updates: seed -> number of updates. If given, only these seeds count, and a seed has left the plateau
        only if it did so by that update. By default all seeds count, with all of their pre-training.
        """
        if name not in self.experiments or not has_plateau(self.experiments[name]):
            return True
        runs = [run for run in self.runs[name] if updates is None or run.seed in updates]
        num_stuck = 0
        for run in runs:
            limit = inf if updates is None else updates[run.seed] * (1 + RELATIVE_TOLERANCE)
            has_left = run.exit_step is not None and run.exit_step <= limit
            if run.content_loss is not None and not has_left:
                num_stuck += 1
        return 2 * num_stuck < len(runs) or not runs

    # ---- metrics

    @cached_property
    def metrics(self) -> list[Metric]:
        """Return the metrics that any run of the table has.

        One is the score of a task or, where a column of the paper is the mean of several tasks, of all of
        them; held-out text has metrics of its own.
        """
        return find_metrics(self.finished_runs, self.table)

    @property
    def has_tasks(self) -> bool:
        """Return whether any row of the table is scored on a task."""
        return any(not metric.is_held_out for metric in self.metrics)

    def values_by_seed(self, metric: Metric) -> dict[str, dict[int, float]]:
        """Return row -> seed -> value of one metric, with the baseline's among the rows."""
        if metric.name not in self._values_by_seed:
            values = self._values_by_seed[metric.name] = {}
            for name in self.canonical_names:
                values[name] = {}
                for run in self.runs[name]:
                    value = metric.value(self.scores(run))
                    if value is not None:
                        values[name][run.seed] = value
        return self._values_by_seed[metric.name]

    def std(self, metric: Metric) -> float:
        """Return the standard deviation over seeds, pooled over rows; 0 if no row has two seeds."""
        return pooled_std([*seeds.values()] for seeds in self.values_by_seed(metric).values())

    @cached_property
    def noise(self) -> dict[str, MetricNoise]:
        """Return metric -> the noise of its value over new seeds and new examples.

        It is estimated from this table's rows, unless ``share_noise`` has replaced it by the estimate over
        several tables.
        """
        return typical_noise([self])

    @property
    def noise_std(self) -> dict[str, float]:
        """Return metric -> its unit: the standard deviation of ``noise``."""
        return {name: noise.std for name, noise in self.noise.items()}

    @cached_property
    def signal_to_noise(self) -> dict[str, float | None]:
        """Return metric -> range of the rows' means in noise standard deviations; None if unknown.

        Only rows with two seeds or more count, since noise alone can move a single seed far from other rows.
        Rows that a metric of held-out text measures on other tokens count too.
        """
        ratios: dict[str, float | None] = {}
        for metric in self.metrics:
            ratios[metric.name] = None
            means = [mean(seeds.values()) for seeds in self.values_by_seed(metric).values() if len(seeds) > 1]
            # Rows on the plateau may vary over seeds where the unit, that of the learning rows, is unknown.
            if len(means) > 1 and self.std(metric) > 0 and self.noise[metric.name].is_known:
                ratios[metric.name] = (max(means) - min(means)) / self.noise_std[metric.name]
        return ratios

    @cached_property
    def groups(self) -> dict[Group, dict[str, float]]:
        """Return group -> metric -> its weight; claims are judged on each group, mainly on the first.

        A metric is left out if all of its tasks are in ``not_averaged``.
        """
        left_out = self.not_averaged.keys()
        return metric_groups(metric for metric in self.metrics if not set(metric.tasks) <= left_out)

    @property
    def main_group(self) -> Group | None:
        """Return the group that claims are judged on first; None if nothing was scored."""
        return next(iter(self.groups), None)

    @cached_property
    def judging_metrics(self) -> list[Metric]:
        """Return the metrics of all groups."""
        names = set[str]().union(*self.groups.values())
        return [metric for metric in self.metrics if metric.name in names]

    def standard_errors_above_chance(self, metric: Metric, name: str) -> float | None:
        """Return how much better than chance a row is [standard errors over seeds and examples].

        None if the chance level or the error is unknown: so it is of accuracies whose examples were not kept,
        since seeds alone say too little about it.
        """
        values = self.values_by_seed(metric)[name]
        deltas = self._bootstrap_deltas[metric.name].get(name, {})
        if metric.chance is None or not values or (metric.measure == "score" and not deltas):
            return None
        example_variance = np.var(np.mean([*deltas.values()], axis=0)) if deltas else 0.0
        error = sqrt(example_variance + sample_variance([*values.values()]) / len(values))
        if not error:
            return None
        return metric.sign * (mean(values.values()) - metric.chance) / error

    def rows_above_chance(self, metric: Metric) -> tuple[int, int] | None:
        """Return how many rows are above chance, and of how many; None if chance is unknown."""
        num_above = num_known = 0
        for name in dict.fromkeys(map(self.canonical_name, self.trained_rows)):
            errors = self.standard_errors_above_chance(metric, name)
            if errors is not None:
                num_known += 1
                num_above += errors >= MIN_ABOVE_CHANCE
        return (num_above, num_known) if num_known else None

    def is_comparable(self, metric: Metric, a: str, b: str) -> bool:
        """Return whether a metric measures two rows on the same evaluation tokens.

        Held-out loss and bits per byte may differ in them; tasks are always comparable.
        """
        if not {a, b} <= self.experiments.keys():
            return False
        pair = self.experiments[a], self.experiments[b]
        if has_same_targets(metric, *pair):
            return True
        if not has_same_targets(metric, *pair, has_same_vocabulary=True):
            return False
        # A run that started from another one has that one's vocabulary under a name of its own.
        vocabulary = self._vocabulary(a)
        return vocabulary != "" and vocabulary == self._vocabulary(b)

    def _vocabulary(self, name: str) -> str:
        """Return the fingerprint of the vocabulary that all runs of a row record; "" if it is not known."""
        if name not in self._vocabularies:
            found = set[str]()
            try:
                for run in self.runs.get(name, ()):
                    found |= {
                        provenance.read(folder)["vocabulary"]["fingerprint"]
                        for folder in run.stage_folders().values()
                    }
            except (SettingError, OSError):  # ``mismatches`` has a line on it
                found = set()
            self._vocabularies[name] = found.pop() if len(found) == 1 else ""
        return self._vocabularies[name]

    @cached_property
    def _bootstrap_deltas(self) -> dict[str, dict[str, dict[int, np.ndarray]]]:
        """Return metric -> row -> seed -> bootstrap deltas over the examples, [NUM_RESAMPLES].

        A delta is the metric's value on a resample of the examples minus its value on the examples.
        """
        return {metric.name: example_bootstrap_deltas(self, metric) for metric in self.metrics}

    # ---- differences from the baseline

    def differences(self, metric: Metric) -> dict[str, BaselineDifference]:
        """Return the difference of each row from the baseline in one metric.

        The tests are corrected for their number. Rows are left out that share no seed with the baseline, or
        that the metric measures on other tokens.
        """
        if metric.name not in self._differences:
            self._differences[metric.name] = self._compare_with_baseline(metric)
        return self._differences[metric.name]

    def _compare_with_baseline(self, metric: Metric) -> dict[str, BaselineDifference]:
        values, base = self.values_by_seed(metric), self.canonical_baseline
        # dividing by it turns a difference into noise standard deviations, positive if the row is better
        signed_noise_std = metric.sign * self.noise_std[metric.name]
        pairs = {}
        for name in values:
            seeds = sorted(values[name].keys() & values[base].keys())
            if name == base or not seeds or not self.is_comparable(metric, name, base):
                continue
            by_seed = np.array([values[name][seed] - values[base][seed] for seed in seeds])
            by_examples = bootstrap_difference(self._bootstrap_deltas[metric.name], name, base, seeds)
            if by_examples is not None:
                by_examples = by_examples / signed_noise_std
            pairs[name, base] = PairedDifference(by_seed / signed_noise_std, by_examples)
        found = {}
        for (name, _), test in compare_pairs(pairs, EQUIVALENCE_MARGIN).items():
            # back to the unit of the metric; a negative sign exchanges the ends of the interval
            low, high = sorted((signed_noise_std * test.low, signed_noise_std * test.high))
            verdict = to_baseline_verdict(test)
            found[name] = BaselineDifference(signed_noise_std * test.mean, low, high, verdict, test)
        return found

    # ---- the combined score

    @cached_property
    def budget_curves(self) -> dict[str, dict[int, BudgetCurve]]:
        """Return row -> seed -> its scores by the budget spent, at each of its branches and at the end.

        Branches are intermediate checkpoints that were fine-tuned too. Runs that lack a judging metric are
        left out, with a warning.
        """
        rows: dict[str, dict[int, BudgetCurve]] = {}
        if not self.judging_metrics:
            return rows
        for name in self.names_with_control:
            rows[name] = {}
            for run in self.runs[name]:
                scores = self.scores(run)
                missing = [metric.name for metric in self.judging_metrics if metric.value(scores) is None]
                if missing:
                    lacks = f"has no score in {', '.join(missing)}"
                    self.warn(f"{name} seed {run.seed} {lacks}: it is in no mean z-score")
                else:
                    curve = budget_curve(run, self.judging_metrics, self.experiments[name])
                    rows[name][run.seed] = curve
        return rows

    def signed_weights(self, group: Group) -> dict[str, float]:
        """Return metric -> its weight divided by its noise standard deviation; negative if lower is better.

        So the weighted sum of values is a weighted mean in noise standard deviations.
        """
        weights = self.groups[group]
        return {
            metric.name: weights[metric.name] * metric.sign / self.noise_std[metric.name]
            for metric in self.judging_metrics
            if metric.name in weights
        }

    def average(self, values: Mapping[str, float], group: Group) -> float:
        """Return the weighted mean over a group's metrics, in noise standard deviations; more is better."""
        return sum(weight * values[name] for name, weight in self.signed_weights(group).items())

    def combined_scores(self, name: str, group: Group) -> dict[int, float]:
        """Return seed -> a row's average minus the baseline's, after training; printed as "mean z-score".

        What is subtracted is the baseline's mean over the seeds that both rows have, so that effects of these
        seeds on both rows cancel in the mean. Without a common seed it is the mean over all seeds of the
        baseline. Empty if the baseline has no finished run, or if a metric of the group measures the two rows
        on different tokens.
        """
        if (name, group) not in self._combined_scores:
            self._combined_scores[name, group] = self._minus_baseline(name, group)
        return self._combined_scores[name, group]

    def _minus_baseline(self, name: str, group: Group) -> dict[int, float]:
        baseline_average = self._baseline_average(name, group)
        if baseline_average is None:
            return {}
        curves = self.budget_curves.get(name, {})
        return {seed: self._final_average(curve, group) - baseline_average for seed, curve in curves.items()}

    def scores_by_content_tokens(self, name: str, group: Group) -> list[dict[float, float]]:
        """Return, for each seed, content tokens -> the row's average minus the baseline's final average.

        What is subtracted, and when the result is empty, is as for ``combined_scores``.
        """
        baseline_average = self._baseline_average(name, group)
        if baseline_average is None:
            return []
        seeds = []
        for curve in self.budget_curves.get(name, {}).values():
            by_tokens = {}
            for i, tokens in enumerate(curve.spent["content tokens"].tolist()):
                values = {metric.name: float(curve.values[metric.name][i]) for metric in self.judging_metrics}
                by_tokens[tokens] = self.average(values, group) - baseline_average
            seeds.append(by_tokens)
        return seeds

    def is_group_comparable(self, group: Group, a: str, b: str) -> bool:
        """Return whether all metrics of a group measure two rows on the same evaluation tokens."""
        metrics = [metric for metric in self.judging_metrics if metric.name in self.groups[group]]
        return all(self.is_comparable(metric, a, b) for metric in metrics)

    def _baseline_average(self, name: str, group: Group) -> float | None:
        """Return the baseline's final average over the seeds that it shares with a row.

        If there are none, it is over all seeds of the baseline. None if the baseline has no finished run, or
        if a metric of the group measures the two rows on different tokens.
        """
        base = self.budget_curves.get(self.canonical_baseline, {})
        if not base or not self.is_group_comparable(group, name, self.canonical_baseline):
            return None
        shared = self.budget_curves.get(name, {}).keys() & base.keys()
        return mean(self._final_average(base[seed], group) for seed in shared or base)

    def _final_average(self, curve: BudgetCurve, group: Group) -> float:
        values = {metric.name: float(curve.values[metric.name][-1]) for metric in self.judging_metrics}
        return self.average(values, group)

    # ---- the order of rows

    @cached_property
    def paper_orders(self) -> dict[Group, PaperOrder]:
        """Return group of metrics -> how well the rows' order, by their mean score, agrees with the paper's.

        Rows that have not left the unigram plateau are not ordered. Empty for fewer than three rows. The
        interval resamples the seeds that all of these rows have, and examples; all rows get the same
        resamples.
        """
        names = {row.name: self.canonical_name(row) for row in self.table.rows if row.published}
        orders: dict[Group, PaperOrder] = {}
        for group in self.groups:
            scores = {}
            for row, name in names.items():
                by_seed = self.combined_scores(name, group)
                if by_seed and self.has_left_plateau(name):
                    scores[row] = mean(by_seed.values())
            if len(scores) < MIN_ROWS:
                continue
            order = paper_order(self.table, scores, self._resampled_averages([*scores], group))
            if order is not None:
                orders[group] = order
        return orders

    def _resampled_averages(self, rows: Sequence[str], group: Group) -> dict[str, np.ndarray] | None:
        """Return a row's own name -> its average over resampled seeds and examples, [NUM_RESAMPLES].

        None if the rows have fewer than two seeds in common.
        """
        names = {row: self._canonical_names[row] for row in rows}
        seeds = common_seeds(self.budget_curves[name] for name in names.values())
        if len(seeds) < 2:
            return None
        seed_draws = seed_weights(len(seeds))
        resampled = {}
        for row, name in names.items():
            curves = self.budget_curves[name]
            averages = np.array([self._final_average(curves[seed], group) for seed in seeds])
            resampled[row] = seed_draws @ averages
            for metric, weight in self.signed_weights(group).items():
                deltas = self._bootstrap_deltas[metric].get(name, {})
                if not deltas:
                    continue
                # Seeds without deltas get the mean over the others, since the same examples are hard for all.
                mean_delta: np.ndarray = np.mean([*deltas.values()], axis=0)
                for i, seed in enumerate(seeds):
                    resampled[row] += weight * seed_draws[:, i] * deltas.get(seed, mean_delta)
        return resampled

    # ---- claims

    def difference(self, a: str, b: str, budget: Budget, group: Group) -> PairedDifference | Uncompared:
        """Return row a's average minus row b's at an equal budget, or the reason why they are not compared.

        Each pair of runs is compared at the smaller of the two amounts that they spent of the budget in all.
        With the budget "updates", each row is instead scored after all of its own training, however long that
        is, as in the paper. The noise due to examples is known only for the end of training; that value is
        used at all budgets.
        """
        if not self.is_group_comparable(group, a, b):
            return "different targets"
        curves_a, curves_b = self.budget_curves.get(a, {}), self.budget_curves.get(b, {})
        seeds = sorted(curves_a.keys() & curves_b.keys())
        if not seeds:
            return "no common seed"
        averages = []
        for name, curves in ((a, curves_a), (b, curves_b)):
            spent_by_seed = {seed: curves[seed].total(budget) for seed in seeds}
            if budget != "updates":
                for seed in seeds:
                    spent_by_seed[seed] = min(curves_a[seed].total(budget), curves_b[seed].total(budget))
            values = [self._average_at(curves[seed], budget, spent_by_seed[seed], group) for seed in seeds]
            if None in values:
                return "out of range"
            updates_by_seed = {seed: curves[seed].updates_at(budget, spent_by_seed[seed]) for seed in seeds}
            if not self.has_left_plateau(name, updates_by_seed):
                return "not yet learning"
            averages.append(np.array(values, np.float64))
        return PairedDifference(averages[0] - averages[1], self._example_difference(a, b, seeds, group))

    def _average_at(self, curve: BudgetCurve, budget: Budget, spent: float, group: Group) -> float | None:
        """Return a run's average when it had spent ``spent`` of a budget; None outside the measured range."""
        if budget == "updates":  # also for rows without pre-training, which have no updates
            return self._final_average(curve, group)
        values = {}
        for name in self.groups[group]:
            value = curve.score_at(budget, spent, name)
            if value is None or np.isnan(value):
                return None
            values[name] = value
        return self.average(values, group)

    def _example_difference(self, a: str, b: str, seeds: Sequence[int], group: Group) -> np.ndarray | None:
        """Return the bootstrap deltas of two rows' difference over examples, [S, NUM_RESAMPLES].

        Metrics whose examples either row lacks add no noise; None if that holds for all of them.
        """
        parts = []
        for metric, weight in self.signed_weights(group).items():
            deltas = bootstrap_difference(self._bootstrap_deltas[metric], a, b, seeds)
            if deltas is not None:
                parts.append(weight * deltas)
        return np.sum(parts, axis=0) if parts else None

    def gains_over_start(self, group: Group) -> dict[str, PairedTest]:
        """Return row -> the test of its average, after training, against that of the control.

        Only rows with the control's model are compared, since other models have a start of their own.
        Empty without a control.
        """
        control = self.control
        if control is None:
            return {}
        differences = {}
        for name in self.canonical_names:
            experiment = self.experiments.get(name)  # None: the row cannot be built
            if name == control or experiment is None or experiment.model != self.experiments[control].model:
                continue
            difference = self.difference(name, control, "updates", group)
            if isinstance(difference, PairedDifference):
                differences[name, control] = difference
        tests = compare_pairs(differences, EQUIVALENCE_MARGIN)
        return {name: test for (name, _), test in tests.items()}

    def verdicts(self) -> Verdicts:
        """Return group -> budget -> the verdict on each claim whose two rows both have finished runs."""
        claims = [claim for claim in claims_to_test(self.table) if all(map(self.runs.get, self._pair(claim)))]
        # Without any score there are no groups; the claims are still listed, without a test.
        groups: Sequence[Group] = [*self.groups] or ["held-out text"]
        verdicts: dict[Group, dict[Budget, list[tuple[Claim, Verdict]]]] = {}
        for group in groups:
            verdicts[group] = {budget: self._judge(claims, budget, group) for budget in JUDGED_BUDGETS}
        return verdicts

    def _judge(self, claims: Sequence[Claim], budget: Budget, group: Group) -> list[tuple[Claim, Verdict]]:
        """Return each claim with its verdict at one budget, judged by one group.

        Pairs that can be compared are tested together, since Holm's method depends on their number. The
        others have a verdict without a test.
        """
        pairs = [self._pair(claim) for claim in claims]
        untested: dict[RowPair, Verdict] = {}
        differences: dict[RowPair, PairedDifference] = {}
        for claim, pair in zip(claims, pairs, strict=True):
            if not claim.covers_tasks(group):
                continue
            if pair[0] == pair[1]:  # settings of the command line have made the two rows one experiment
                untested[pair] = Verdict("same experiment")
            elif not all(map(self.has_left_plateau, pair)):
                untested[pair] = Verdict("not yet learning")
            elif group not in self.groups:  # nothing was scored
                untested[pair] = Verdict("undecided")
            else:
                difference = self.difference(*pair, budget, group)
                if isinstance(difference, PairedDifference):
                    differences[pair] = difference
                else:
                    untested[pair] = Verdict(difference)
        tests = compare_pairs(differences, EQUIVALENCE_MARGIN)
        found = []
        for claim, pair in zip(claims, pairs, strict=True):
            if not claim.covers_tasks(group):
                found.append((claim, Verdict("other tasks")))
            elif pair in tests:
                found.append((claim, to_verdict(tests[pair], claim.relation)))
            else:
                found.append((claim, untested[pair]))
        return found

    def _pair(self, claim: Claim) -> RowPair:
        """Return the canonical names of a claim's better row and its worse row."""
        return self.canonical_name(claim.better), self.canonical_name(claim.worse)

    def outlying_seeds(self) -> list[RunKey]:
        """Return (row, seed) of each run whose combined score in any group is far from its row's median."""
        found: dict[RunKey, None] = {}
        for group in self.groups:
            rows = {name: self.combined_scores(name, group) for name in self.budget_curves}
            found |= dict.fromkeys(outlying_seeds(rows))
        return [*found]


def typical_noise(comparisons: Sequence[Comparison]) -> dict[str, MetricNoise]:
    """Return metric -> the noise of its value over new seeds and new examples.

    The variance over seeds is that within the median row of all tables; an experiment that is a row of
    several tables counts once. Rows that have not left the unigram plateau are excluded, unless no row has
    left it. The mean variance over resamples of the examples is added: it keeps a metric whose few seeds
    happen to agree from getting all the weight.
    """
    is_any_learning = any(map(_has_learning_row, comparisons))
    values: dict[str, dict[Experiment, list[float]]] = {}
    example_variances: dict[str, dict[Experiment, list[float]]] = {}
    for comparison in comparisons:
        for metric in comparison.metrics:
            rows = values.setdefault(metric.name, {})
            variances = example_variances.setdefault(metric.name, {})
            deltas = comparison._bootstrap_deltas[metric.name]
            for name, by_seed in comparison.values_by_seed(metric).items():
                experiment = comparison.experiments.get(name)
                if experiment is None:  # it cannot be built, and has no values
                    continue
                if is_any_learning and not comparison.has_left_plateau(name):
                    continue
                if experiment not in rows:
                    rows[experiment] = [*by_seed.values()]
                    variances[experiment] = [float(np.var(x)) for x in deltas.get(name, {}).values()]
    noise = {}
    for metric_name, rows in values.items():
        known = [*chain.from_iterable(example_variances[metric_name].values())]
        noise[metric_name] = MetricNoise(typical_std(rows.values()), sqrt(mean(known or [0.0])))
    return noise


def _has_learning_row(comparison: Comparison) -> bool:
    """Return whether any row, or the baseline, has finished and has left the unigram plateau."""
    names = comparison.canonical_names
    return any(comparison.runs[name] and comparison.has_left_plateau(name) for name in names)


def share_noise(comparisons: Sequence[Comparison]) -> None:
    """Give all tables one unit per metric, that of their median row, before anything depends on it."""
    noise = typical_noise(comparisons)
    for comparison in comparisons:
        comparison.noise = noise


def to_verdict(test: PairedTest, relation: Relation = "better") -> Verdict:
    """Return the verdict on a claim from the test of its better row against its worse row.

    A claim that two rows are equivalent is confirmed if they are, and contradicted if one of them is
    significantly better, however little.
    """
    if relation == "equivalent":
        if test.sign:
            return Verdict("contradicted", test)
        return Verdict("confirmed" if test.is_equivalent else "undecided", test)
    if test.sign > 0:
        return Verdict("confirmed", test)
    if test.sign < 0:
        return Verdict("contradicted", test)
    return Verdict("equivalent" if test.is_equivalent else "undecided", test)


def to_baseline_verdict(test: PairedTest) -> BaselineVerdict:
    """Return the verdict on a row from its test against the baseline."""
    if test.sign > 0:
        return "better"
    if test.sign < 0:
        return "worse"
    return "equivalent" if test.is_equivalent else "undecided"


def example_bootstrap_deltas(comparison: Comparison, metric: Metric) -> dict[str, dict[int, np.ndarray]]:
    """Return row -> seed -> the bootstrap deltas of a metric over its examples, [NUM_RESAMPLES].

    This covers only metrics of one task that are means over examples, or bits of all of them per byte, for
    runs that kept the values of single examples; {} for others. All runs get the same resamples. Runs whose
    examples differ from those of most runs in number or size are left out, with a warning.
    """
    if metric.is_held_out or len(metric.tasks) > 1:
        return {}
    sums: dict[RunKey, tuple[np.ndarray, np.ndarray]] = {}
    missing: list[RunKey] = []
    for name in comparison.names_with_control:
        for run in comparison.runs[name][:MAX_RESAMPLED_SEEDS]:
            try:
                values = metric.per_example_sums(run.example_values(metric.tasks[0]))
            except (SettingError, OSError) as error:
                comparison.warn(f"{error}; its examples are not resampled")
                continue
            if values is not None and len(values[0]):
                sums[name, run.seed] = values
            elif metric.value(comparison.scores(run)) is not None:
                missing.append((name, run.seed))
    deltas = bootstrap_deltas(sums)
    for name, seed in sums:
        if (name, seed) not in deltas:
            comparison.warn(f"{name} seed {seed}: its examples of {metric.name} are not those of most runs")
    if sums:  # else no run of the table keeps the values of examples
        for name, seed in missing:
            comparison.warn(
                f"{name} seed {seed}: the values of its examples of {metric.name} are missing; not resampled"
            )
    rows: dict[str, dict[int, np.ndarray]] = {}
    for (name, seed), run_deltas in deltas.items():
        rows.setdefault(name, {})[seed] = run_deltas
    return rows

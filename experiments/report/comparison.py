"""Compares the finished runs of a table: which metrics count, how each row differs from the baseline, and the
verdict on each claim at equal budgets.
"""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from math import hypot, inf, sqrt
from statistics import mean
from typing import Literal, get_args

import numpy as np

from experiments.report.metrics import (
    BITS_PER_BYTE,
    BUDGETS,
    HELD_OUT_LOSS,
    Budget,
    BudgetCurve,
    Metric,
    TaskScores,
    budget_curve,
    find_metrics,
    has_plateau,
    has_same_targets,
    pooled_std,
    run_scores,
)
from experiments.report.statistics import (
    RELATIVE_TOLERANCE,
    PairedDifference,
    PairedTest,
    RowPair,
    RunKey,
    bootstrap_difference,
    bootstrap_errors,
    compare_pairs,
    outlying_seeds,
)
from experiments.runs.result import Result
from experiments.study.claims import SIGNIFICANT, Claim, claims
from experiments.study.experiment import Experiment
from experiments.study.registry import REGISTRY
from experiments.study.table import Row, Table
from lm.config.base import SettingError

# A metric is averaged if its rows' means range over so many deviations of a replication ...
MIN_SIGNAL = 3.0
# ... and its baseline is so many standard errors from chance.
MIN_FROM_CHANCE = 3.0
# The smallest mean difference over its seven columns that the T5 paper calls significant: rows that differ by
# less are equivalent [deviations of a replication].
EQUIVALENCE_MARGIN = SIGNIFICANT * sqrt(2 / 7)
MAX_RESAMPLED_SEEDS = 20  # per row, whose examples are resampled; more would not narrow an interval
Uncompared = Literal["not yet learning", "out of range", "no common seed", "different targets"]
VerdictWord = Literal["confirmed", "contradicted", "equivalent", "undecided", Uncompared]
BaselineVerdict = Literal["better", "worse", "equivalent", "undecided"]
UNCOMPARED: tuple[Uncompared, ...] = get_args(Uncompared)
Warn = Callable[[str], object]  # is called with each thing that does not count, and why


@dataclass(frozen=True)
class Verdict:
    """What runs say about a claim at one budget. Only "confirmed" and "contradicted" decide it."""

    word: VerdictWord
    test: PairedTest | None = None  # of better - worse, in deviations of a replication


@dataclass(frozen=True)
class BaselineDifference:
    """A row's difference from the baseline in one metric, in its own unit."""

    mean: float
    low: float  # ends of the 95 % confidence interval, infinite where seeds do not tell
    high: float
    verdict: BaselineVerdict
    test: PairedTest  # in deviations of a replication; more is better


Verdicts = Mapping[Budget, Sequence[tuple[Claim, Verdict]]]


class Comparison:
    """The finished runs of a table, and what they say.

    Rows that are the same experiment share their runs. Everything is computed under the name of the first of
    these rows in the table, which ``key`` returns.
    """

    def __init__(
        self,
        table: Table,
        runs: Mapping[str, Sequence[Result]],
        experiments: Mapping[str, Experiment],
        warn: Warn,
        mismatches: Mapping[str, list[str]] | None = None,
    ):
        """Compare ``runs`` (row -> its finished seeds) of the table's rows and its baseline.

        ``experiments``: the settings of each of these rows. ``mismatches``: row -> how its provenance differs
        from that of the other rows. ``warn`` is called with each damaged file and each run that lacks what
        others have.
        """
        self.table, self.runs, self.experiments, self.warn = table, runs, experiments, warn
        self.mismatches = mismatches or {}
        self.baseline = REGISTRY[table.baseline]
        self._scores: dict[int, TaskScores] = {}
        self._samples: dict[str, dict[str, dict[int, float]]] = {}
        self._differences: dict[str, dict[str, BaselineDifference]] = {}

    # ---- rows and runs

    @cached_property
    def _keys(self) -> dict[str, str]:
        """Name of each row -> name of the first row with the same experiment."""
        first: dict[Experiment, str] = {}
        names = [row.name for row in (*self.table.rows, self.baseline)]
        return {name: first.setdefault(self.experiments[name], name) for name in names}

    def key(self, row: Row) -> str:
        """Return the name of the first row that is the same experiment as ``row``."""
        return self._keys[row.name]

    @property
    def keys(self) -> list[str]:
        """The names of all different experiments, the baseline's included."""
        return list(dict.fromkeys(self._keys.values()))

    @property
    def baseline_key(self) -> str:
        """The name under which the baseline's runs are compared."""
        return self.key(self.baseline)

    def runs_of(self, row: Row) -> Sequence[Result]:
        """Return the finished seeds of a row."""
        return self.runs[row.name]

    @property
    def trained_rows(self) -> list[Row]:
        """The rows of the table with a finished seed."""
        return [row for row in self.table.rows if self.runs_of(row)]

    def scores(self, run: Result) -> TaskScores:
        """Return what a run scored on tasks and on held-out text."""
        if id(run) not in self._scores:
            self._scores[id(run)] = run_scores(run)
        return self._scores[id(run)]

    def is_learning(self, key: str, updates: Mapping[int, float] | None = None) -> bool:
        """Return whether most of a row's seeds have left the unigram plateau, or never had one.

        ``updates``: seed -> after how many updates to look, for these seeds only; by default all seeds are
        looked at after all of their pre-training.
        """
        if not has_plateau(self.experiments[key]):
            return True
        runs = [run for run in self.runs[key] if updates is None or run.seed in updates]
        num_stuck = 0
        for run in runs:
            limit = inf if updates is None else updates[run.seed] * (1 + RELATIVE_TOLERANCE)
            has_left = run.exit_step is not None and run.exit_step <= limit
            num_stuck += run.content_loss is not None and not has_left
        return 2 * num_stuck < len(runs) or not runs

    # ---- metrics

    @cached_property
    def metrics(self) -> list[Metric]:
        """The metrics in which any row of the table is scored."""
        return find_metrics((run for row in self.table.rows for run in self.runs_of(row)), self.table.paper)

    @property
    def has_tasks(self) -> bool:
        """Whether any row of the table is scored on a task."""
        return any(not metric.is_held_out for metric in self.metrics)

    def samples(self, metric: Metric) -> dict[str, dict[int, float]]:
        """Return the value of each row and seed: row -> seed -> value, the baseline's included."""
        if metric.name not in self._samples:
            self._samples[metric.name] = {
                key: {
                    run.seed: value
                    for run in self.runs[key]
                    if (value := metric.value(self.scores(run))) is not None
                }
                for key in self.keys
            }
        return self._samples[metric.name]

    def std(self, metric: Metric) -> float:
        """Return the standard deviation over seeds, pooled over rows; 0 if unknown."""
        return pooled_std([*seeds.values()] for seeds in self.samples(metric).values())

    @cached_property
    def units(self) -> dict[str, float]:
        """Metric -> its standard deviation if both seeds and examples were new; 1 if unknown.

        Seeds are too few to weigh metrics by them alone: one that happens to repeat well would decide all.
        """
        units = {}
        for metric in self.metrics:
            errors = self._example_errors[metric.name].values()
            variances = [np.var(error) for seeds in errors for error in seeds.values()]
            units[metric.name] = hypot(self.std(metric), sqrt(np.mean(variances or [0.0]))) or 1.0
        return units

    @cached_property
    def signals(self) -> dict[str, float | None]:
        """Metric -> range of its rows' means over its unit; None if unknown.

        Only rows with two seeds or more count: noise alone takes the mean of one seed far from the others.
        """
        signals: dict[str, float | None] = {}
        for metric in self.metrics:
            means = [mean(seeds.values()) for seeds in self.samples(metric).values() if len(seeds) > 1]
            is_known = len(means) > 1 and self.std(metric) > 0
            signals[metric.name] = float(np.ptp(means)) / self.units[metric.name] if is_known else None
        return signals

    @cached_property
    def averaged(self) -> list[Metric]:
        """The metrics that claims are judged by, averaged in units of their noise.

        These are the tasks that distinguish the rows and whose baseline does not guess. In a table without
        tasks it is held-out text: bits per byte of documents, if they were scored, else held-out loss.
        """
        if not self.has_tasks:
            by_name = {metric.name: metric for metric in self.metrics}
            primary = by_name.get(BITS_PER_BYTE) or by_name.get(HELD_OUT_LOSS)
            return [primary] if primary else []
        return [metric for metric in self.metrics if not metric.is_held_out and self._is_informative(metric)]

    def _is_informative(self, metric: Metric) -> bool:
        from_chance = self.from_chance(metric)
        is_learned = from_chance is None or from_chance >= MIN_FROM_CHANCE
        return is_learned and (self.signals[metric.name] or 0.0) >= MIN_SIGNAL

    def from_chance(self, metric: Metric) -> float | None:
        """Return how much better than chance the baseline is, in standard errors over seeds and examples."""
        values = self.samples(metric)[self.baseline_key]
        errors = self._example_errors[metric.name].get(self.baseline_key, {})
        by_examples = np.var(np.mean([*errors.values()], axis=0)) if errors else 0.0
        by_seeds = np.var([*values.values()], ddof=1) / len(values) if len(values) > 1 else 0.0
        error = float(np.sqrt(by_examples + by_seeds))
        if metric.chance is None or not values or not error:
            return None
        return metric.sign * (mean(values.values()) - metric.chance) / error

    def is_comparable(self, metric: Metric, a: str, b: str) -> bool:
        """Return whether two rows have the same targets in a metric."""
        return has_same_targets(metric, self.experiments[a], self.experiments[b])

    @cached_property
    def _example_errors(self) -> dict[str, dict[str, dict[int, np.ndarray]]]:
        """Metric -> row -> seed -> bootstrap error of its value over examples, where runs kept them."""
        return {metric.name: example_errors(self, metric) for metric in self.metrics}

    # ---- differences from the baseline

    def differences(self, metric: Metric) -> dict[str, BaselineDifference]:
        """Return the difference of each row from the baseline in one metric, tested as a family.

        Rows that share no seed with the baseline are left out, and those with other targets.
        """
        if metric.name not in self._differences:
            self._differences[metric.name] = self._compare_with_baseline(metric)
        return self._differences[metric.name]

    def _compare_with_baseline(self, metric: Metric) -> dict[str, BaselineDifference]:
        samples, base = self.samples(metric), self.baseline_key
        unit, pairs = metric.sign / self.units[metric.name], {}
        for key in samples:
            seeds = sorted(samples[key].keys() & samples[base].keys())
            if key == base or not seeds or not self.is_comparable(metric, key, base):
                continue
            by_seed = unit * np.array([samples[key][seed] - samples[base][seed] for seed in seeds])
            by_examples = bootstrap_difference(self._example_errors[metric.name], key, base, seeds)
            pairs[key, base] = PairedDifference(by_seed, None if by_examples is None else unit * by_examples)
        tests = compare_pairs(pairs, EQUIVALENCE_MARGIN)
        scale = metric.sign * self.units[metric.name]
        found = {}
        for (key, _), test in tests.items():
            low, high = sorted((scale * test.low, scale * test.high))
            found[key] = BaselineDifference(scale * test.mean, low, high, to_baseline_verdict(test), test)
        return found

    # ---- the mean z-score, and claims

    @cached_property
    def budget_curves(self) -> dict[str, dict[int, BudgetCurve]]:
        """Row -> seed -> its scores against what it spent; runs that lack an averaged metric are left out."""
        rows: dict[str, dict[int, BudgetCurve]] = {}
        for key in self.keys if self.averaged else ():
            rows[key] = {}
            for run in self.runs[key]:
                scores = self.scores(run)
                missing = [metric.name for metric in self.averaged if metric.value(scores) is None]
                if missing:
                    lacks = f"has no score in {', '.join(missing)}"
                    self.warn(f"{key} seed {run.seed} {lacks}: it is in no mean z-score")
                else:
                    rows[key][run.seed] = budget_curve(run, self.averaged, self.experiments[key])
        return rows

    def average(self, values: Mapping[str, float]) -> float:
        """Return the mean over the averaged metrics, each in deviations of a replication; more is better."""
        parts = [metric.sign * values[metric.name] / self.units[metric.name] for metric in self.averaged]
        return sum(parts) / len(parts)

    def mean_z(self, key: str) -> dict[int, float]:
        """Return a row's average less the baseline's at the end of training, by seed.

        The baseline's is its mean over the seeds that the row has too, so that what a seed does to all rows
        cancels; over all of its seeds if the row has none of them.
        """
        zero = self._baseline_average(key)
        if zero is None or not self._has_baseline_targets(key):
            return {}
        curves = self.budget_curves.get(key, {})
        return {seed: self._final_average(curve) - zero for seed, curve in curves.items()}

    def mean_z_by_budget(self, key: str, budget: Budget) -> list[dict[float, float]]:
        """Return a row's average less the baseline's final one by what was spent, one mapping per seed."""
        zero, seeds = self._baseline_average(key) or 0.0, []
        for curve in self.budget_curves.get(key, {}).values():
            points = zip(*(curve.values[metric.name] for metric in self.averaged), strict=True)
            z = [self.average(dict(zip(curve.values, point, strict=True))) - zero for point in points]
            seeds.append(dict(zip(curve.spent[budget].tolist(), z, strict=True)))
        return seeds

    def _has_baseline_targets(self, key: str) -> bool:
        return all(self.is_comparable(metric, key, self.baseline_key) for metric in self.averaged)

    def _baseline_average(self, key: str) -> float | None:
        """Return the baseline's average that a row's is compared with; None if no baseline has finished."""
        base = self.budget_curves.get(self.baseline_key, {})
        shared = self.budget_curves.get(key, {}).keys() & base.keys()
        return mean(self._final_average(base[seed]) for seed in shared or base) if base else None

    def _final_average(self, curve: BudgetCurve) -> float:
        return self.average({metric.name: float(curve.values[metric.name][-1]) for metric in self.averaged})

    def difference(self, a: str, b: str, budget: Budget) -> PairedDifference | Uncompared:
        """Return row a's average less row b's where both had spent the same, or why they are not compared.

        They are compared where the cheaper one ends; for the budget "updates" each at its own end, as in the
        paper. The error over examples is that at the end.
        """
        if not all(self.is_comparable(metric, a, b) for metric in self.averaged):
            return "different targets"
        curves_a, curves_b = self.budget_curves.get(a, {}), self.budget_curves.get(b, {})
        seeds = sorted(curves_a.keys() & curves_b.keys())
        if not seeds:
            return "no common seed"
        averages = []
        for row, curves, others in ((a, curves_a, curves_b), (b, curves_b, curves_a)):
            spent = {seed: curves[seed].total(budget) for seed in seeds}
            if budget != "updates":
                spent = {seed: min(spent[seed], others[seed].total(budget)) for seed in seeds}
            values = [self._average_at(curves[seed], budget, spent[seed]) for seed in seeds]
            if None in values:
                return "out of range"
            updates = {seed: curves[seed].updates_at(budget, spent[seed]) for seed in seeds}
            if not self.is_learning(row, updates):
                return "not yet learning"
            averages.append(np.array(values, np.float64))
        return PairedDifference(averages[0] - averages[1], self._example_difference(a, b, seeds))

    def _average_at(self, curve: BudgetCurve, budget: Budget, spent: float) -> float | None:
        """Return a run's average where it had spent so much; None outside the measured range."""
        if budget == "updates":  # a row without pre-training spent none
            return self._final_average(curve)
        values = {}
        for metric in self.averaged:
            value = curve.score_at(budget, spent, metric.name)
            if value is None or np.isnan(value):
                return None
            values[metric.name] = value
        return self.average(values)

    def _example_difference(self, a: str, b: str, seeds: Sequence[int]) -> np.ndarray | None:
        """Return the bootstrap error of two rows' difference over examples, by the metrics known of both."""
        parts = []
        for metric in self.averaged:
            errors = bootstrap_difference(self._example_errors[metric.name], a, b, seeds)
            if errors is not None:
                parts.append(errors * metric.sign / self.units[metric.name])
        return np.sum(parts, axis=0) / len(self.averaged) if parts else None

    def verdicts(self) -> Verdicts:
        """Return the verdict on each claim about two rows that have finished, at each budget."""
        judged = [
            claim
            for claim in claims(self.table)
            if self.runs.get(self.key(claim.better)) and self.runs.get(self.key(claim.worse))
        ]
        return {budget: self._judge(judged, budget) for budget in BUDGETS}

    def _judge(self, judged: Sequence[Claim], budget: Budget) -> list[tuple[Claim, Verdict]]:
        pairs = [(self.key(claim.better), self.key(claim.worse)) for claim in judged]
        verdicts: dict[RowPair, Verdict] = {}
        differences: dict[RowPair, PairedDifference] = {}
        for pair in pairs:
            if not all(map(self.is_learning, pair)):
                verdicts[pair] = Verdict("not yet learning")
            elif not self.averaged:
                verdicts[pair] = Verdict("undecided")
            else:
                difference = self.difference(*pair, budget)
                if isinstance(difference, PairedDifference):
                    differences[pair] = difference
                else:
                    verdicts[pair] = Verdict(difference)
        tests = compare_pairs(differences, EQUIVALENCE_MARGIN)
        verdicts |= {pair: to_verdict(test) for pair, test in tests.items()}
        return [(claim, verdicts[pair]) for claim, pair in zip(judged, pairs, strict=True)]

    def outlying_seeds(self) -> list[RunKey]:
        """Return (row, seed) of each run whose mean z-score is far from that of the row's other seeds."""
        return outlying_seeds({key: self.mean_z(key) for key in self.budget_curves})


def to_verdict(test: PairedTest) -> Verdict:
    """Return the verdict on a claim from the test of its better row against its worse row."""
    if test.sign > 0:
        return Verdict("confirmed", test)
    if test.sign < 0:
        return Verdict("contradicted", test)
    return Verdict("equivalent" if test.is_equivalent else "undecided", test)


def to_baseline_verdict(test: PairedTest) -> BaselineVerdict:
    """Return what the test of a row against the baseline says about the row."""
    if test.sign > 0:
        return "better"
    if test.sign < 0:
        return "worse"
    return "equivalent" if test.is_equivalent else "undecided"


def example_errors(comparison: Comparison, metric: Metric) -> dict[str, dict[int, np.ndarray]]:
    """Return row -> seed -> bootstrap error of a metric over its examples, for runs that kept their values.

    All runs see the same resamples. Runs scored on other examples than most are left out.
    """
    if metric.is_held_out or len(metric.tasks) > 1:
        return {}
    sums: dict[RunKey, tuple[np.ndarray, np.ndarray]] = {}
    missing: list[RunKey] = []
    for key in comparison.keys:
        for run in comparison.runs[key][:MAX_RESAMPLED_SEEDS]:
            try:
                values = metric.example_sums(run.example_values(metric.tasks[0]))
            except (SettingError, OSError) as error:
                comparison.warn(f"{error}; its examples are not resampled")
                continue
            if values is not None and len(values[0]):
                sums[key, run.seed] = values
            elif metric.value(comparison.scores(run)) is not None:
                missing.append((key, run.seed))
    errors = bootstrap_errors(sums)
    for key, seed in (run for run in sums if run not in errors):
        comparison.warn(f"{key} seed {seed}: its examples of {metric.name} are not those of most runs")
    for key, seed in missing if sums else ():
        comparison.warn(
            f"{key} seed {seed}: the values of its examples of {metric.name} are missing; not resampled"
        )
    rows: dict[str, dict[int, np.ndarray]] = {}
    for (key, seed), resampled in errors.items():
        rows.setdefault(key, {})[seed] = resampled
    return rows

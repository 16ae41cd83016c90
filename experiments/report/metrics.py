"""The metrics that rows are compared by (task scores, held-out loss, bits per byte), and budgets.

A budget is what training spends: updates, FLOPs or content tokens (targets that are no sentinel, no EOS and
no token that the inputs show at the same place). Tasks are in two halves of equal weight: those that cannot
be answered without reading the input, and those that ask how well a model knows the language. Claims are
judged on each half and on both.
"""

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from math import exp, inf, log, sqrt
from statistics import mean, median
from typing import Any, Literal, TypeVar

import numpy as np

from experiments.figures.panels import Score
from experiments.report.statistics import expected_median_variance, sample_variance
from experiments.runs.result import Result, likelihood_of
from experiments.runs.task_scores import chance_score
from experiments.study.claims import compared_columns
from experiments.study.experiment import Experiment
from experiments.study.table import Table
from lm.data.tasks.task import LOWER_IS_BETTER, TaskHalf

Key = TypeVar("Key")
TaskScores = Mapping[str, Mapping[str, Any]]  # task -> scores of its best checkpoint, as in scores.json
# what training spends; two rows can be compared where they have spent equal amounts of it
Budget = Literal["updates", "FLOP", "content tokens"]
BUDGETS: tuple[Budget, ...] = ("updates", "FLOP", "content tokens")
# Claims are judged at these budgets. Content tokens are only plotted: an objective that predicts every word
# spends, early in its training, the number of content tokens that other objectives spend in all. Its score
# there would be interpolated between two distant checkpoints.
JUDGED_BUDGETS: tuple[Budget, ...] = ("updates", "FLOP")
# Amounts spent that differ by no more than this fraction count as equal: rows that are meant to spend equal
# FLOPs do not quite, since their widths are rounded.
BUDGET_TOLERANCE = 0.01
# The metrics that are averaged into one score: those of one half of the tasks, of both halves with equal
# weight, or, in a table without tasks, one of held-out text.
Group = Literal["reading", "language", "both", "held-out text"]
GROUP_TITLES: dict[Group, str] = {
    "reading": "reading",  # tasks that cannot be answered without their input
    "language": "language",  # how well a model knows the language of the text
    "both": "both halves",
    "held-out text": "held-out text",
}
HELD_OUT_LOSS, BITS_PER_BYTE = "held-out loss", "bits per byte"
HELD_OUT = (HELD_OUT_LOSS, BITS_PER_BYTE)  # metrics of held-out text
# measure of a task -> its unit in headings
UNITS = {"bits_above_chance": "bits above chance", "bits_per_byte": "bits per byte ↓"}
# heading of a column on held-out documents -> property of ``Likelihood``, and its digits
LIKELIHOODS = {
    "word perplexity": ("word_perplexity", 1),
    "token perplexity": ("perplexity", 1),
    BITS_PER_BYTE: ("bits_per_byte", 3),
}
# settings of data on which the tokens of held-out loss depend: those of the vocabulary, and others
VOCABULARY_SETTINGS = ("vocabulary", "vocabulary_texts", "vocabulary_size", "unknown")
OTHER_TARGET_SETTINGS = ("corpus", "sentinels", "inputs_length")


@dataclass(frozen=True)
class Metric:
    """A column of results: a task, the tasks of one column of the paper, or a measure of held-out text."""

    name: str
    tasks: tuple[str, ...]
    # how the tasks are scored: "bits_above_chance", "bits_per_byte" or "score" (the mean of a task's own
    # metrics, such as F1 and exact match); for held-out text a name in HELD_OUT
    measure: str
    paper_column: str | None = None  # the paper's column that is printed beside this one
    chance: float | None = None  # value for random guesses; None if unknown
    # the tasks' own metrics, such as "f1" and "exact_match", by their names in scores.json
    task_metrics: tuple[str, ...] = ()
    half: TaskHalf = ""  # of the tasks; "" for held-out text

    @property
    def title(self) -> str:
        """Return the heading of the column."""
        return f"{self.name} [{UNITS[self.measure]}]" if self.measure in UNITS else self.name

    @property
    def is_held_out(self) -> bool:
        """Return whether it measures held-out text, which compares only rows with the same targets."""
        return self.measure in HELD_OUT

    @property
    def sign(self) -> int:
        """Return 1 if higher is better, -1 if lower is better."""
        return -1 if self.is_held_out or self.measure in LOWER_IS_BETTER else 1

    @property
    def digits(self) -> int:
        """Return how many decimals to show: two for scores out of 100, three for bits and nats."""
        return 3 if self.is_held_out or self.measure in UNITS else 2

    def value(self, scores: TaskScores) -> float | None:
        """Return the mean over the metric's tasks; None if a task is missing or its score is undefined."""
        if not scores.keys() >= set(self.tasks):
            return None
        values = [scores[name]["metrics"].get(self.measure, scores[name]["score"]) for name in self.tasks]
        return None if None in values else mean(values)

    def per_example_sums(self, values: Mapping[str, np.ndarray]) -> tuple[np.ndarray, np.ndarray] | None:
        """Return numerators [N] and denominators [N], one per example of the metric's task.

        The sum of numerators over the sum of denominators is the metric's value, so it can be recomputed on
        resampled examples. None unless ``values`` (name -> [N], as the run saved them) has what the metric is
        made of: the bits of each example, or the score of each.
        """
        if self.measure == "score" and "score" in values:
            return values["score"], np.ones(len(values["score"]))
        if self.measure not in UNITS or "bits" not in values:
            return None
        bits = values["bits"]
        ones = np.ones(len(bits))
        if self.measure in LOWER_IS_BETTER:  # bits per byte
            return bits, values.get("bytes", ones)
        return bits, ones


def run_scores(run: Result) -> TaskScores:
    """Return the scores of a run on tasks and on held-out text."""
    likelihood = run.likelihood()
    held_out = {
        HELD_OUT_LOSS: run.held_out_loss,
        BITS_PER_BYTE: None if likelihood is None else likelihood.bits_per_byte,
    }
    known = {name: value for name, value in held_out.items() if value is not None}
    return {
        **run.tasks,
        **{name: {"measure": name, "score": value, "metrics": {}} for name, value in known.items()},
    }


def find_metrics(runs: Iterable[Result], table: Table) -> list[Metric]:
    """Return the metrics that any of ``runs`` has: the paper's columns, other tasks, held-out text."""
    tasks: dict[str, dict[str, Mapping[str, Any]]] = {}
    held_out = set()
    for run in runs:
        for name, best in run_scores(run).items():
            if name in HELD_OUT:
                held_out.add(name)
            else:
                tasks.setdefault(best["column"], {}).setdefault(name, best)
    published = [column.name for column in table.paper.columns] if table.paper else []
    names = sorted(tasks, key=lambda name: published.index(name) if name in published else len(published))
    metrics = [_task_metric(name, tasks[name], published) for name in names]
    loss_column = next((column.name for column in compared_columns(table) if column.held_out), None)
    for name in HELD_OUT:
        if name in held_out:
            paper_column = loss_column if name == HELD_OUT_LOSS else None
            metrics.append(Metric(name, (name,), name, paper_column=paper_column))
    return metrics


def _task_metric(name: str, tasks: TaskScores, published: Sequence[str]) -> Metric:
    """Return the metric of a column from the scores of its tasks; the first decides what they share.

    published: names of the paper's columns. A column that is none of them is shown beside the one that is
    most like it, which the scores name as "like".
    """
    first = next(iter(tasks.values()))
    chances = [chance_score(task, best) for task, best in tasks.items()]
    known_chances = [chance for chance in chances if chance is not None]
    paper_column = name if name in published else first.get("like")
    task_metrics: dict[str, None] = {}  # each once
    for best in tasks.values():
        task_metrics |= dict.fromkeys(best["metric"].split(" and "))
    return Metric(
        name,
        tuple(tasks),
        first.get("measure", "score"),
        paper_column=paper_column if paper_column in published else None,
        chance=mean(known_chances) if len(known_chances) == len(tasks) else None,
        task_metrics=tuple(task_metrics),
        # "" of tasks of papers and benchmarks: they cannot be answered without their input
        half=first.get("half") or "reading",
    )


def metric_groups(metrics: Iterable[Metric]) -> dict[Group, dict[str, float]]:
    """Return group -> metric -> its weight in the group's score; the first group is judged first.

    Within a half metrics have equal weight, and in "both" the halves have. A half without tasks is left out.
    Without tasks there is one group of one metric: bits per byte or, if no documents were scored, held-out
    loss.
    """
    names: dict[TaskHalf, list[str]] = {"reading": [], "language": []}
    held_out = []
    for metric in metrics:
        if metric.is_held_out:
            held_out.append(metric.name)
        else:
            names[metric.half].append(metric.name)
    halves: dict[Group, dict[str, float]] = {}
    for group in ("reading", "language"):
        if names[group]:
            halves[group] = {name: 1 / len(names[group]) for name in names[group]}
    if len(halves) == 2:
        weights = halves["reading"] | halves["language"]
        halves["both"] = {name: weight / 2 for name, weight in weights.items()}
    if not halves and held_out:
        return {"held-out text": {BITS_PER_BYTE if BITS_PER_BYTE in held_out else HELD_OUT_LOSS: 1.0}}
    return halves


def has_same_targets(metric: Metric, a: Experiment, b: Experiment, has_same_vocabulary: bool = False) -> bool:
    """Return whether a metric measures both experiments on the same evaluation tokens or bytes.

    Only metrics of held-out text can differ in them. Batch sizes that do not divide the number of held-out
    sequences round it up differently; this is tolerated. ``has_same_vocabulary``: the runs of both were
    trained with one vocabulary, which their settings may call by two names.
    """
    if metric.measure == BITS_PER_BYTE:
        return (a.data.corpus, a.data.held_out_documents) == (b.data.corpus, b.data.held_out_documents)
    if metric.measure == HELD_OUT_LOSS:
        names = OTHER_TARGET_SETTINGS + (() if has_same_vocabulary else VOCABULARY_SETTINGS)
        same_data = all(getattr(a.data, name) == getattr(b.data, name) for name in names)
        return same_data and a.objective == b.objective and _target_layout(a) == _target_layout(b)
    return True


def _target_layout(experiment: Experiment) -> str:
    """Return the architecture; both kinds of encoder-decoder are one, since they predict the same tokens."""
    architecture = experiment.model.architecture
    return "encoder-decoder" if architecture == "shared-encoder-decoder" else architecture


# ---- scores by the budget spent


@dataclass(frozen=True)
class BudgetCurve:
    """The scores of a run at P points of its pre-training, in rising order.

    The points are its branches (intermediate checkpoints that were fine-tuned too) and the end.
    """

    spent: Mapping[Budget, np.ndarray]  # budget -> amount spent [P]
    values: Mapping[str, np.ndarray]  # metric -> value [P]

    def total(self, budget: Budget) -> float:
        """Return the amount that the whole pre-training spent."""
        return float(self.spent[budget][-1])

    def updates_at(self, budget: Budget, spent: float) -> float:
        """Return the number of updates after which the amount ``spent`` was spent, interpolated."""
        return float(np.interp(spent, self.spent[budget], self.spent["updates"]))

    def score_at(self, budget: Budget, spent: float, metric: str) -> float | None:
        """Return a metric at the amount ``spent``, interpolated linearly in log(spent) between points.

        None if ``spent`` is outside of the measured range by more than BUDGET_TOLERANCE, or if nothing was
        spent at the first point. Within this tolerance the value is that of the nearest end.
        """
        points = self.spent[budget]
        least, most = points[0] * (1 - BUDGET_TOLERANCE), points[-1] * (1 + BUDGET_TOLERANCE)
        if points[0] <= 0 or not least <= spent <= most:
            return None
        return float(np.interp(log(spent), np.log(points), self.values[metric]))


def budget_curve(run: Result, metrics: Sequence[Metric], experiment: Experiment) -> BudgetCurve:
    """Return a run's scores at all branches that have all ``metrics``, and at the end.

    Branches (``tuning.branches``) are intermediate checkpoints of pre-training that were fine-tuned too.
    Within a phase of pre-training, FLOPs and content tokens are proportional to the updates.
    """
    num_updates = experiment.pretraining.steps
    points: dict[int, dict[str, Mapping[str, Any]]] = {}
    for task, branches in run.branches.items():
        for name, best in branches.items():
            points.setdefault(int(name), {})[task] = best
    scores: dict[int, TaskScores] = {}
    for updates, task_scores in sorted(points.items()):
        is_complete = all(metric.value(task_scores) is not None for metric in metrics)
        if updates < num_updates and is_complete:
            scores[updates] = task_scores
    scores[num_updates] = run_scores(run)
    branch_updates = np.array(list(scores), float)
    # The start, a short pre-training that rows share, is spent before the first update of the row's own.
    spent: dict[Budget, np.ndarray] = {
        "updates": branch_updates,
        "FLOP": _spent_after(branch_updates, run, "flops", run.start_flops, run.flops),
        "content tokens": _spent_after(
            branch_updates, run, "content_tokens", run.start_tokens, run.content_tokens
        ),
    }
    values = {metric.name: np.array([*map(metric.value, scores.values())], float) for metric in metrics}
    return BudgetCurve(spent, values)


def _spent_after(updates: np.ndarray, run: Result, name: str, start: float, total: float) -> np.ndarray:
    """Return the amount that a run has spent after each number of ``updates``, both [P].

    updates: in rising order; the last is the end of pre-training.
    name: "flops" or "content_tokens".
    start, total: the amounts before the first and after the last update.
    """
    points = {0: start}
    for end in sorted(map(int, run.phase_costs)):
        points[end] = points[max(points)] + run.phase_costs[str(end)][name]
    points[int(updates[-1])] = total
    return np.interp(updates, list(points), list(points.values()))


# ---- language modeling


def likelihood_score(seeds: Iterable[Result], measure: str, seconds: float = inf) -> Score | None:
    """Return a property of the likelihood of held-out documents over seeds.

    seconds: after so much training time, by default at the end.
    """
    likelihoods = (run.likelihood(seconds) for run in seeds)
    return Score.of(getattr(likelihood, measure) for likelihood in likelihoods if likelihood is not None)


def shortest_training(rows: Iterable[Sequence[Result]]) -> float | None:
    """Return the training time of the fastest row that was evaluated during training, or None [s]."""
    times = []
    for seeds in rows:
        ends = [run.likelihoods[-1]["seconds"] for run in seeds if len(run.likelihoods) > 1]
        if ends:
            times.append(max(ends))
    return min(times, default=None)


def bits_per_byte_curve(run: Result) -> dict[float, float]:
    """Return bits per byte of held-out documents by seconds of training."""
    return {each["seconds"]: likelihood_of(each).bits_per_byte for each in run.likelihoods}


def perplexity_by_length(runs: Iterable[Result]) -> dict[int, Score]:
    """Return the perplexity of held-out text over seeds, by sequence length as a multiple of training's."""
    return _scores_over_seeds(map(_perplexities, runs))


def _perplexities(run: Result) -> dict[int, float]:
    return {int(multiple): exp(loss) for multiple, loss in run.length_losses.items()}


def denoiser_losses(runs: Iterable[Result]) -> dict[str, Score]:
    """Return the held-out loss of each denoiser of a mixture over seeds, by name."""
    return _scores_over_seeds(run.denoiser_losses for run in runs)


def _scores_over_seeds(seeds: Iterable[Mapping[Key, float]]) -> dict[Key, Score]:
    """Return the score of each key over the seeds that have it."""
    values: dict[Key, list[float]] = {}
    for by_key in seeds:
        for key, value in by_key.items():
            values.setdefault(key, []).append(value)
    return {key: score for key, found in values.items() if (score := Score.of(found))}


def typical_std(rows: Iterable[Sequence[float]]) -> float:
    """Return the standard deviation within the median row; 0 if none has two values that differ.

    It is the square root of the median of the rows' variances, after this median is divided by the one that
    as many rows and seeds have on average if the true variance is 1 (``expected_median_variance``). This
    removes its bias; the median of one or two variances is their mean, and has none. The median hardly
    changes with a row that some seeds learn and others do not. Rows whose runs are all equal, such as n-gram
    models, are left out.
    """
    varied = [row for row in rows if sample_variance(row) > 0]
    if not varied:
        return 0.0
    dof = tuple(sorted(len(row) - 1 for row in varied))
    return sqrt(median(map(sample_variance, varied)) / expected_median_variance(dof))


def pooled_std(rows: Iterable[Sequence[float]]) -> float:
    """Return the standard deviation within rows; 0 if none has two values."""
    repeated = [row for row in rows if len(row) > 1]
    dof = sum(len(row) - 1 for row in repeated)
    if not dof:
        return 0.0
    return sqrt(sum(sample_variance(row) * (len(row) - 1) for row in repeated) / dof)

"""The history of language models as a picture, drawn from the runs of ``history`` and ``history-budgets``.

N-grams and networks read the same text and are scored on the same held-out documents, in bits per byte. Of
networks the interval over seeds is drawn; counts have no chance in them.
"""

import json
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from math import sqrt
from pathlib import Path
from statistics import mean, stdev
from typing import TYPE_CHECKING

import tyro

from experiments.figures.draw import draw_plots
from experiments.figures.panels import Curve, Plot, PlotGrid, tick_labels
from experiments.figures.spec import FigureSpec
from experiments.runs.result import Result, check_settings, read_result
from experiments.study.paths import run_folder, seed_folders
from experiments.study.registry import TABLES, build
from experiments.study.scales import SCALES
from lm.config.base import SettingError, did_you_mean

if TYPE_CHECKING:
    from matplotlib.figure import Figure

HISTORY, BUDGETS = "history", "history-budgets"  # tables
NGRAMS = "n-grams"
BITS = "bits per byte of held-out documents"
CONFIDENCE = 0.95  # of intervals, two-sided


@dataclass(frozen=True)
class ModelScore:
    """Holds the scores of the finished seeds of a row on held-out documents."""

    label: str
    order: int  # of an n-gram model; 0 for a network
    parameters: int  # of counts, the numbers that are stored
    updates: int  # of a network; of an n-gram model, those of the networks that read as much
    bits: float  # mean over seeds [bits per byte]
    interval: float  # half of Student's 95 % interval of the mean over seeds; 0 with one [bits per byte]
    seeds: int


def read_scores(runs: Path, scale: str, table: str) -> list[ModelScore]:
    """Return the scores of a table's rows over all finished seeds, in the order of the table.

    Raises SettingError for a run that was trained with other settings than its row has now.
    """
    scores = []
    for row in TABLES[table].rows:
        experiment = build(row.name, scale)
        results = []
        for folder in seed_folders(run_folder(runs, scale, row.name, 0, {}).parent):
            seed = int(folder.name.removeprefix("seed-"))
            check_settings(replace(experiment, seed=seed), folder)
            result = read_result(folder, runs / scale)
            if result is not None and result.likelihoods:
                results.append(result)
        if results:
            order = 0 if experiment.counts.model == "none" else experiment.counts.order
            scores.append(score_of(row.label, order, experiment.pretraining.steps, results))
    return scores


def score_of(label: str, order: int, updates: int, results: Sequence[Result]) -> ModelScore:
    """Return the mean over seeds of the bits per byte at the end of training, with its interval."""
    likelihoods = [result.likelihood() for result in results]
    bits = [likelihood.bits_per_byte for likelihood in likelihoods if likelihood is not None]
    return ModelScore(
        label, order, results[0].parameters, updates, mean(bits), half_interval(bits), len(bits)
    )


def half_interval(values: Sequence[float]) -> float:
    """Return half the width of Student's 95 % interval of a mean; 0 for a single value.

    >>> round(half_interval([1.0, 2.0, 3.0]), 2)
    2.48
    """
    if len(values) < 2:
        return 0.0
    from scipy.stats import t  # takes a while to import

    quantile = float(t.ppf((1 + CONFIDENCE) / 2, len(values) - 1))
    return quantile * stdev(values) / sqrt(len(values))


def history_plots(models: Sequence[ModelScore], budgets: Sequence[ModelScore]) -> PlotGrid:
    """Return bits per byte by model, by number of parameters and, if there are any, by number of updates."""
    index_of = {model.label: index for index, model in enumerate(models)}
    ngrams = sorted((model for model in models if model.order), key=lambda model: model.order)
    networks = [model for model in models if not model.order]
    by_model: dict[str, Curve] = {}
    by_size: dict[str, Curve] = {}
    if ngrams:
        by_model[NGRAMS] = _curve([index_of[model.label] for model in ngrams], ngrams)
        by_size[NGRAMS] = _curve([model.parameters for model in ngrams], ngrams)
    for model in networks:
        by_model[model.label] = _curve([index_of[model.label]], [model])
        by_size[model.label] = _curve([model.parameters], [model])
    best = min(ngrams, key=lambda model: model.bits, default=None)
    reference = None if best is None else best.bits
    ticks: dict[float, str] = {index: label for label, index in index_of.items()}
    panels = [
        Plot("equal tokens; bars: 95 % intervals", "", BITS, by_model, x_ticks=ticks, reference=reference),
        Plot(
            "by size; dotted: the best n-gram",
            "parameters; of n-grams, counts that are stored",
            BITS,
            by_size,
            log="x",
            x_ticks=size_ticks([model.parameters for model in models]),
            reference=reference,
        ),
    ]
    if budgets:
        panels.append(
            Plot(
                "by budget",
                "updates; n-grams count the same text",
                BITS,
                budget_curves(budgets),
                log="x",
                x_ticks=tick_labels(sorted({float(score.updates) for score in budgets})),
            )
        )
    return PlotGrid(panels, panel_size=(5.4, 4.4), has_shared_legend=True)


def size_ticks(sizes: Sequence[int]) -> dict[float, str]:
    """Return the multiples 1, 3, 10, 30, ... million or thousand that lie among ``sizes``, with labels.

    >>> size_ticks([250_000, 4_000_000])
    {300000.0: '0.3 M', 1000000.0: '1 M', 3000000.0: '3 M'}
    """
    steps = [first * 10.0**power for power in range(12) for first in (1, 3)]
    return {step: f"{step / 1e6:g} M" for step in steps if min(sizes) <= step <= max(sizes)}


def budget_curves(budgets: Sequence[ModelScore]) -> Mapping[str, Curve]:
    """Return bits per byte over the number of updates, a curve per kind of model."""
    kinds: dict[str, list[ModelScore]] = {}
    for score in budgets:
        kinds.setdefault(score.label.rpartition("-x")[0], []).append(score)
    return {kind: _curve([score.updates for score in scores], scores) for kind, scores in kinds.items()}


def first_better(budgets: Sequence[ModelScore]) -> Mapping[str, int | None]:
    """Return for each kind of network the least number of updates from which it is better than the 5-gram.

    Better is an interval that lies below the 5-gram of the same text, there and at all larger numbers; one
    seed has none. None: at no number that was trained.
    """
    ngram_bits = {score.updates: score.bits for score in budgets if score.order}  # by number of updates
    is_better: dict[str, dict[int, bool]] = {}  # kind -> number of updates -> whether it beats the 5-gram
    for score in budgets:
        if not score.order and score.updates in ngram_bits:
            by_updates = is_better.setdefault(score.label.rpartition("-x")[0], {})
            upper_end = score.bits + score.interval
            by_updates[score.updates] = score.seeds > 1 and upper_end < ngram_bits[score.updates]
    passed: dict[str, int | None] = {}
    for kind, by_updates in is_better.items():
        passed[kind] = None
        for updates in sorted(ngram_bits, reverse=True):
            if updates > max(by_updates):  # this kind was not trained for so long
                continue
            if not by_updates.get(updates, False):
                break
            passed[kind] = updates
    return passed


def _curve(x: Sequence[float], scores: Sequence[ModelScore]) -> Curve:
    return Curve(x, [score.bits for score in scores], [score.interval for score in scores])


@dataclass(frozen=True, kw_only=True)
class HistoryFigure(FigureSpec):
    """Bits per byte of n-grams and networks by model, size and budget, from runs of lm sweep 'history*'."""

    runs: tyro.conf.Positional[Path] = Path("runs")  # folder of the runs
    scale: str = "mini"  # size of the study

    def scores(self) -> tuple[list[ModelScore], list[ModelScore]]:
        """Return the scores of the tables history and history-budgets; SettingError if no run is finished."""
        if self.scale not in SCALES:
            raise SettingError(f"--scale={self.scale!r} is unknown{did_you_mean(self.scale, SCALES)}")
        models = read_scores(self.runs, self.scale, HISTORY)
        if not models:
            raise SettingError(
                f"{self.runs} has no finished run of {HISTORY} at scale {self.scale}: "
                f"lm sweep {HISTORY} --scale {self.scale} --runs {self.runs} trains them"
            )
        return models, read_scores(self.runs, self.scale, BUDGETS)

    def description(self) -> str:
        """Return the numbers as JSON, with the updates from which each network passes the 5-gram."""
        models, budgets = self.scores()
        tables = {HISTORY: models, BUDGETS: budgets}
        numbers = {name: [asdict(score) for score in scores] for name, scores in tables.items()}
        return json.dumps({"scale": self.scale, **numbers, "better from": first_better(budgets)})

    def figure(self) -> "Figure":
        return draw_plots(history_plots(*self.scores()))

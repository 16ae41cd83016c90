"""The figure of training: losses and scores over steps, as means over seeds with standard deviations."""

from collections.abc import Iterable, Mapping
from math import isnan

from experiments.figures.panels import Curve, Plot, PlotGrid, Score
from experiments.runs.curves import Curves


def training_figure(rows: Mapping[str, Curves], title: str = "") -> PlotGrid:
    """Return a panel per loss and score over steps, one curve per row: the mean over seeds and members."""
    metrics = dict.fromkeys(metric for curves in rows.values() for metric in curves)
    panels = []
    for metric in metrics:
        curves = {
            label: mean_curve(map(dict, by_metric[metric]))
            for label, by_metric in rows.items()
            if metric in by_metric
        }
        panels.append(Plot(metric, "step", "", curves))
    return PlotGrid(panels, title, panel_size=(3.7, 3.0), has_shared_legend=True)


def score_curve(scores: Mapping[float, Score | None]) -> Curve:
    """Return means over x with their standard deviations, 0 for one seed; missing scores are left out."""
    known = {x: score for x, score in sorted(scores.items()) if score and not isnan(score.mean)}
    means = tuple(float(score.mean) for score in known.values())
    return Curve(tuple(known), means, tuple(float(score.std or 0.0) for score in known.values()))


def mean_curve(seeds: Iterable[Mapping[float, float]]) -> Curve:
    """Return the mean over seeds at each x that any of them has."""
    values: dict[float, list[float]] = {}
    for seed in seeds:
        for x, y in seed.items():
            values.setdefault(x, []).append(y)
    return score_curve({x: Score.of(each) for x, each in values.items()})

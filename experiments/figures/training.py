"""The figure of training: losses and scores over steps, as means over seeds with standard deviations."""

from collections.abc import Collection, Iterable, Mapping
from dataclasses import replace
from itertools import chain
from math import inf, isnan
from statistics import mean

from experiments.figures.panels import Curve, Plot, PlotGrid, Score
from experiments.runs.curves import CONTENT_LOSS, HELD_OUT_LOSS, UNIGRAM_LOSS, Curves

UNIGRAM_MODEL = "unigram model"  # label of the level that its loss is
SAME_LINE = 0.02  # losses that differ by less are one line, in a picture and in a summary [nats]


def training_figure(rows: Mapping[str, Curves], title: str = "") -> PlotGrid:
    """Return a panel per loss and score over steps, one curve per row: the mean over seeds and members.

    Phases of pre-training before the last have panels of their own, since each may have another objective.
    The content loss of a phase has a panel only where it differs from the held-out loss. The unigram loss,
    which training does not change, is a line in the panel of the loss that it is compared with: one for all
    rows, or a dotted one per row where rows differ in it.
    """
    metrics = dict.fromkeys(metric for curves in rows.values() for metric in curves)
    left_out = set[str]()
    unigram_losses: dict[str, dict[str, float]] = {}  # metric that they are compared with -> those of rows
    for phase in _phases(metrics):
        left_out.add(phase + UNIGRAM_LOSS)
        compared = phase + CONTENT_LOSS
        if all(_has_equal_losses(curves, phase) for curves in rows.values()):
            left_out.add(compared)
            compared = phase + HELD_OUT_LOSS
        unigram_losses[compared] = _unigram_losses(rows, phase)
    panels = []
    for metric in metrics:
        if metric in left_out:
            continue
        curves = {
            label: mean_curve(map(dict, by_metric[metric]))
            for label, by_metric in rows.items()
            if metric in by_metric
        }
        panel = Plot(metric, "step", "", curves)
        if unigram := unigram_losses.get(metric, {}):
            if max(unigram.values()) - min(unigram.values()) < SAME_LINE:
                panel = replace(panel, levels={UNIGRAM_MODEL: mean(unigram.values())})
            else:
                panel = replace(panel, title=f"{metric}\n(dotted: unigram model)", dotted=unigram)
        panels.append(panel)
    return PlotGrid(panels, title, panel_size=(3.7, 3.0), has_shared_legend=True)


def _phases(metrics: Iterable[str]) -> Collection[str]:
    """Return what the titles of losses begin with, once per phase: "phase-1: ", and "" for the last one."""
    found: dict[str, None] = {}
    for metric in metrics:
        for name in (HELD_OUT_LOSS, CONTENT_LOSS, UNIGRAM_LOSS):
            if metric.endswith(name):
                found[metric.removesuffix(name)] = None
    return found


def _has_equal_losses(curves: Curves, phase: str) -> bool:
    """Return whether the content loss of a row is its held-out loss, since nearly all targets are content."""
    content, held_out = (
        dict(enumerate(curves.get(phase + name, ()))) for name in (CONTENT_LOSS, HELD_OUT_LOSS)
    )
    if content.keys() != held_out.keys():
        return not content
    for index, seed in content.items():
        by_step = dict(held_out[index])
        if not all(abs(loss - by_step.get(step, inf)) < SAME_LINE for step, loss in seed):
            return False
    return True


def _unigram_losses(rows: Mapping[str, Curves], phase: str) -> dict[str, float]:
    """Return the mean unigram loss of each row that has one in a phase."""
    losses = {}
    for label, curves in rows.items():
        known = [loss for _, loss in chain.from_iterable(curves.get(phase + UNIGRAM_LOSS, ()))]
        if known:
            losses[label] = mean(known)
    return losses


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

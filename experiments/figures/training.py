"""The figure of training: losses and scores over steps, as means over seeds with standard deviations."""

from collections.abc import Iterable, Mapping
from dataclasses import replace
from math import inf, isnan
from statistics import mean

from experiments.figures.panels import Curve, Plot, PlotGrid, Score
from experiments.runs.curves import CONTENT_LOSS, HELD_OUT_LOSS, UNIGRAM_LOSS, Curves

UNIGRAM_MODEL = "unigram model"  # label of the level that its loss is
SAME_LINE = 0.02  # losses that differ by less are one line, in a picture and in a summary [nats]


def training_figure(rows: Mapping[str, Curves], title: str = "") -> PlotGrid:
    """Return a panel per loss and score over steps, one curve per row: the mean over seeds and members.

    The content loss has a panel only where it differs from the held-out loss. The unigram loss, which
    training does not change, is a line in the panel of the loss that it is compared with: one for all rows,
    or a dotted one per row where rows differ in it.
    """
    left_out = {UNIGRAM_LOSS}
    compared = CONTENT_LOSS
    if all(map(_has_equal_losses, rows.values())):
        left_out.add(CONTENT_LOSS)
        compared = HELD_OUT_LOSS
    unigram = _unigram_losses(rows)
    is_one_level = bool(unigram) and max(unigram.values()) - min(unigram.values()) < SAME_LINE
    metrics = dict.fromkeys(metric for curves in rows.values() for metric in curves)
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
        if metric == compared and is_one_level:
            panel = replace(panel, levels={UNIGRAM_MODEL: mean(unigram.values())})
        elif metric == compared and unigram:
            panel = replace(panel, title=f"{metric}\n(dotted: unigram model)", dotted=unigram)
        panels.append(panel)
    return PlotGrid(panels, title, panel_size=(3.7, 3.0), has_shared_legend=True)


def _has_equal_losses(curves: Curves) -> bool:
    """Return whether the content loss of a row is its held-out loss, since nearly all targets are content."""
    content, held_out = (dict(enumerate(curves.get(name, ()))) for name in (CONTENT_LOSS, HELD_OUT_LOSS))
    if content.keys() != held_out.keys():
        return not content
    for place, seed in content.items():
        by_step = dict(held_out[place])
        if not all(abs(loss - by_step.get(step, inf)) < SAME_LINE for step, loss in seed):
            return False
    return True


def _unigram_losses(rows: Mapping[str, Curves]) -> dict[str, float]:
    """Return the mean unigram loss of each row that has one."""
    losses = {
        label: [loss for seed in curves.get(UNIGRAM_LOSS, ()) for _, loss in seed]
        for label, curves in rows.items()
    }
    return {label: mean(known) for label, known in losses.items() if known}


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

"""The picture of ladders: loss over compute, the fitted laws, and what the smaller sizes predicted."""

from collections.abc import Mapping

import numpy as np
from matplotlib.axes import Axes
from matplotlib.figure import Figure

from experiments.report.ladder import next_flops, prediction_of
from experiments.report.scaling import Ladder

INCHES = (6.4, 4.2)
MARKERS = "osD^vP"


def ladder_figure(found: Mapping[str, Ladder]) -> Figure:
    """Draw each kind's mean losses as dots, its law as a line, and the prediction of its largest size.

    The line goes on to the next size; its band is the 95 % interval. The prediction, by the law of the
    smaller sizes, is the hollow dot, with its interval as a bar if these have several seeds.
    """
    figure = Figure(figsize=INCHES, layout="constrained")
    axes = figure.subplots()
    for number, (kind, ladder) in enumerate(found.items()):
        _draw_ladder(axes, kind, ladder, f"C{number}", MARKERS[number % len(MARKERS)])
    axes.set_xscale("log")
    axes.set_xlabel("FLOP of training a model")
    axes.set_ylabel("bits per byte of held-out documents")
    axes.grid(alpha=0.3)
    axes.legend(frameon=False)
    return figure


def _draw_ladder(axes: Axes, kind: str, ladder: Ladder, color: str, marker: str) -> None:
    flops = np.array([rung.flops for rung in ladder.rungs])
    axes.plot(flops, [rung.mean for rung in ladder.rungs], marker, color=color, label=kind)
    line = np.geomspace(flops[0], next_flops(ladder), 100)
    predicted = np.array([ladder.predicted(each) for each in line])  # value, low and high
    axes.plot(line, predicted[:, 0], color=color, lw=1, ls="-")
    axes.fill_between(line, predicted[:, 1], predicted[:, 2], color=color, alpha=0.15, lw=0)
    largest = len(flops) - 1
    if (interval := prediction_of(ladder, largest)) is not None:
        value, low, high = interval
        spread = [[value - low], [high - value]] if ladder.smallest(largest).degrees_of_freedom else None
        axes.errorbar(flops[-1] * 1.06, value, spread, fmt=marker, mfc="white", color=color, capsize=3)

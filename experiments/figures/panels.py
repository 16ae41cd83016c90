"""Holds what figures show as plain values: panels of curves and of colors.

``draw`` draws them with matplotlib.

Nothing here imports matplotlib or knows a model, so that a report can compare a figure with the one that it
drew before, and leave it as it is.
"""

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from math import isfinite
from statistics import mean, stdev
from typing import Literal, NamedTuple

import numpy as np

Values = Sequence[float] | np.ndarray


class Scale(NamedTuple):
    """Says which values the colors of a heat map stand for."""

    label: str  # with its unit
    low: float
    high: float
    colormap: str = "Blues"
    categories: tuple[str, str] | None = None  # names of low and high, if there is nothing between them


class HeatMap(NamedTuple):
    """A matrix as colors, its first row at the top; values that are not finite are gray."""

    title: str
    values: np.ndarray  # [rows, columns]
    scale: Scale
    row_labels: Sequence[str] = ()  # by default rows are counted from 0
    column_labels: Sequence[str] = ()
    annotations: np.ndarray | None = None  # str [rows, columns], written into the cells


class Curve(NamedTuple):
    """Values y over x, with their standard deviations if they are means."""

    x: Values
    y: Values
    deviations: Values | None = None


@dataclass(frozen=True)
class Score:
    """Mean and sample standard deviation over seeds; the latter is None for one seed or an infinite mean."""

    mean: float
    std: float | None

    @classmethod
    def of(cls, values: Iterable[float | None]) -> "Score | None":
        """Return the score over the values that are not None, or None if all are."""
        known = [value for value in values if value is not None]
        if not known:
            return None
        return cls(mean(known), stdev(known) if len(known) > 1 and all(map(isfinite, known)) else None)


@dataclass(frozen=True)
class Plot:
    """A panel of curves."""

    title: str
    x_label: str  # with its unit
    y_label: str
    curves: Mapping[str, Curve]  # label -> curve
    log: Literal["", "x", "y", "xy"] = ""  # axes with a logarithmic scale
    y_range: tuple[float, float] | None = None  # by default what the curves need
    x_ticks: Mapping[float, str] = field(default_factory=dict)  # x -> label; by default matplotlib's
    max_x_intervals: int | None = None  # between the ticks of x; by default matplotlib's number
    levels: Mapping[str, float] = field(default_factory=dict)  # label -> y of a horizontal line
    dotted: Mapping[str, float] = field(default_factory=dict)  # a curve's label -> y of a dotted line like it
    reference: float | None = None  # y of a dotted line, such as what chance gives
    color: str | None = None  # of all curves; by default each label has its own
    is_categorical: bool = False  # x are numbers of categories, listed downwards; no line joins them


@dataclass(frozen=True)
class PlotGrid:
    """Panels of curves side by side, as one figure."""

    panels: Sequence[Plot]
    title: str = ""
    x_label: str = ""  # below all panels
    columns: int = 3
    panel_size: tuple[float, float] = (4.6, 3.6)  # width and height [inches]
    has_shared_legend: bool = False  # one for all panels, at the right


def tick_labels(values: Values) -> dict[float, str]:
    """Return a label for each of these places on an axis."""
    return {float(value): f"{value:.3g}" if value < 1000 else f"{value:,.0f}" for value in values}

"""Figures of arrays: panels of colours and panels of curves; nothing here knows a model."""

import abc
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from io import BytesIO
from itertools import cycle, zip_longest
from pathlib import Path
from typing import Any, Literal, NamedTuple

import numpy as np
from matplotlib import colormaps
from matplotlib.colors import ListedColormap
from matplotlib.figure import Figure  # without pyplot nothing looks for a display

from lm.config.base import SettingError
from lm.files import write

Heights = Sequence[float] | np.ndarray
ENDINGS = (".png", ".svg", ".pdf")  # of pictures
LONGEST_LABELLED = 40  # most rows or columns with a label each
DASHES = ("-", "--", "-.", ":")
NOTHING = "lightgray"  # the colour of cells without a number
WIDEST = 48.0  # picture [inches]
DPI = 100  # of pictures in pixels


class Scale(NamedTuple):
    """What colours mean."""

    label: str  # with its unit
    low: float
    high: float
    colors: str = "Blues"
    two: tuple[str, str] | None = None  # names of low and high, where there is nothing between them


class Heat(NamedTuple):
    """A panel of colours, its first row at the top."""

    title: str
    values: np.ndarray  # [rows,columns]; what is not finite is gray
    scale: Scale
    rows: Sequence[str] = ()  # labels; none: rows are counted from 0
    columns: Sequence[str] = ()
    words: np.ndarray | None = None  # str [rows,columns], written into the cells


class Plot(NamedTuple):
    """A panel of curves."""

    title: str
    x: str  # with its unit
    y: str
    lines: Mapping[str, tuple[Heights, Heights]]  # label -> places and heights
    log: Literal["", "y", "xy"] = ""  # which axes are logarithmic
    span: tuple[float, float] | None = None  # of y; None: what the lines need
    ticks: Sequence[str] = ()  # names of places 0, 1, ...


@dataclass(frozen=True, kw_only=True)
class Picture(abc.ABC):
    """What ``lm draw`` draws: the fields of a subclass are its options."""

    out: Path | None = None  # where to write it, .png, .svg or .pdf; by default the picture's name .png

    def description(self) -> str:
        """Return the numbers that are drawn, which a file keeps beside the picture; nothing by default."""
        return ""

    @abc.abstractmethod
    def figure(self) -> Figure:
        """Drawn; SettingError for options, or a run, of which there is no such picture."""


def check_ending(out: Path) -> None:
    """SettingError unless a picture can be written to ``out``."""
    if out.suffix.lower() not in ENDINGS:
        choices = f"{', '.join(ENDINGS[:-1])} or {ENDINGS[-1]}"
        raise SettingError(f"--out {out} should be a picture that ends in {choices}")


def save_figure(figure: Figure, out: Path, description: str = "") -> None:
    """Write a figure in the format that the ending of ``out`` names, with a description in the file."""
    picture, kind = BytesIO(), out.suffix.lower()[1:]
    metadata = {"Subject" if kind == "pdf" else "Description": description} if description else None
    figure.savefig(picture, format=kind, dpi=DPI, metadata=metadata)
    out.parent.mkdir(parents=True, exist_ok=True)
    write(out, picture.getvalue())


def heatmaps(panels: Sequence[Heat], x: str, y: str, wide: int = 4) -> Figure:
    """Panels of colours, ``wide`` beside each other; those that share a colour scale show it once."""
    wide = min(wide, len(panels))
    tall, shared = -(-len(panels) // wide), len({panel.scale for panel in panels}) == 1
    widths, heights = zip(*map(_inches, panels), strict=True)
    bars = [not shared and _ends_scale(panels, i, wide) for i in range(len(panels))]
    size = max(widths) + 0.8 * sum(bars[:wide]) / wide, max(heights) + 0.3
    fit = min(1.0, WIDEST / (wide * size[0]), WIDEST / (tall * size[1]))
    inches = (max(wide * size[0] * fit + 1.3, 4.2), max(tall * size[1] * fit + 0.6, 2.8))
    figure = Figure(figsize=inches, layout="constrained")
    grid = figure.subplots(tall, wide, squeeze=False)
    for axis in grid.flat[len(panels) :]:
        axis.set_visible(False)
    for axis, panel, bar in zip(grid.flat, panels, bars, strict=False):
        image = _draw_heat(axis, panel)
        if bar:
            _color_bar(figure, image, axis, panel.scale)
    if shared:
        _color_bar(figure, image, grid.ravel().tolist(), panels[0].scale)
    figure.supxlabel(x, fontsize="medium")
    figure.supylabel(y, fontsize="medium")
    return figure


def _ends_scale(panels: Sequence[Heat], i: int, wide: int) -> bool:
    """Whether the panel to the right of panel ``i`` in its line is missing or has another colour scale."""
    last = (i + 1) % wide == 0 or i + 1 == len(panels)
    return last or panels[i + 1].scale != panels[i].scale


def _inches(panel: Heat) -> tuple[float, float]:
    """Width and height of a panel, so that what is written in it and beside it can be read."""
    tall, wide = panel.values.shape
    if panel.words is not None:
        longest = max(map(len, panel.words.ravel()))
        return 0.8 + wide * (0.12 + 0.065 * longest), 0.9 + 0.26 * tall
    cells = ((wide, panel.columns), (tall, panel.rows))
    sizes = [(0.15 if labels else 0.06) * min(count, LONGEST_LABELLED) for count, labels in cells]
    return max(1.8, 0.8 + sizes[0]), max(1.8, 0.6 + sizes[1])


def _draw_heat(axis: Any, panel: Heat) -> Any:
    scale, (tall, wide) = panel.scale, panel.values.shape
    colors = colormaps[scale.colors].with_extremes(bad=NOTHING)
    if scale.two is not None:
        colors = ListedColormap([colors(0.0), colors(0.8)])
    seen = np.ma.masked_invalid(np.asarray(panel.values, float))
    image = axis.imshow(seen, cmap=colors, vmin=scale.low, vmax=scale.high, aspect="auto")
    axis.set_title(panel.title, fontsize="small")
    axis.tick_params(labelsize="x-small")
    for labels, count, name in ((panel.columns, wide, "x"), (panel.rows, tall, "y")):
        if labels and count <= LONGEST_LABELLED:
            ticks = {"rotation": 90} if name == "x" and panel.words is None else {}
            axis.set(**{f"{name}ticks": range(count)})
            getattr(axis, f"set_{name}ticklabels")(labels, **ticks)
        else:
            getattr(axis, f"{name}axis").get_major_locator().set_params(integer=True)
    if panel.words is not None:
        for (row, column), word in np.ndenumerate(panel.words):
            value = panel.values[row, column]
            dark = np.isfinite(value) and _luminance(image.cmap(image.norm(value))) < 0.5
            color = "white" if dark else "black"
            axis.text(column, row, word, ha="center", va="center", fontsize="x-small", color=color)
    return image


def _luminance(color: tuple[float, float, float, float]) -> float:
    """How bright red, green, blue and opacity look, from 0 to 1 (ITU-R BT.709)."""
    return float(np.dot(color[:3], (0.2126, 0.7152, 0.0722)))


def _color_bar(figure: Figure, image: Any, axes: Any, scale: Scale) -> None:
    bar = figure.colorbar(image, ax=axes, label=scale.label, shrink=0.8, aspect=30)
    bar.ax.tick_params(labelsize="small")
    if scale.two is not None:
        span = scale.high - scale.low
        bar.set_ticks([scale.low + span / 4, scale.high - span / 4], labels=list(scale.two))


def plots(panels: Sequence[Plot], wide: int = 3) -> Figure:
    """Panels of curves, ``wide`` beside each other, each with its own axes and legend."""
    wide = min(wide, len(panels))
    tall = -(-len(panels) // wide)
    figure = Figure(figsize=(4.6 * wide, 3.6 * tall), layout="constrained")
    for axis, panel in zip_longest(figure.subplots(tall, wide, squeeze=False).flat, panels):
        axis.set_visible(panel is not None)
        if panel is not None:
            _draw_curves(axis, panel)
    return figure


def _draw_curves(axis: Any, panel: Plot) -> None:
    few = max(len(places) for places, _ in panel.lines.values()) <= LONGEST_LABELLED
    # Broken differently, so that lines that lie on each other are all seen.
    for (label, line), marker, dash in zip(
        panel.lines.items(), cycle("osv^DP*X"), cycle(DASHES), strict=False
    ):
        axis.plot(*line, dash, label=label, marker=marker if few else None, markersize=4)
    axis.set_title(panel.title, fontsize="medium")
    axis.set_xlabel(panel.x)
    axis.set_ylabel(panel.y)
    if panel.span is not None:
        axis.set_ylim(*panel.span)
    if "y" in panel.log:
        axis.set_yscale("log")
    if "x" in panel.log:
        axis.set_xscale("log")
        places = sorted({place for line, _ in panel.lines.values() for place in line})
        axis.set_xticks(places, [f"{place:,}" for place in places])
        axis.xaxis.minorticks_off()
    if panel.ticks:
        axis.set_xticks(range(len(panel.ticks)), panel.ticks)
    axis.grid(alpha=0.3)
    if len(panel.lines) > 1:
        axis.legend(fontsize="x-small")

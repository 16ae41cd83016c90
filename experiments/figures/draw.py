"""Draws panels with matplotlib, without pyplot, which would look for a display."""

from collections.abc import Iterable, Sequence
from io import BytesIO
from itertools import zip_longest
from pathlib import Path
from textwrap import fill
from typing import Any

import numpy as np
from matplotlib import colormaps
from matplotlib.artist import Artist
from matplotlib.axes import Axes
from matplotlib.axis import Axis
from matplotlib.colors import ListedColormap
from matplotlib.figure import Figure
from matplotlib.image import AxesImage
from matplotlib.ticker import LogFormatter, LogFormatterSciNotation, MaxNLocator

from experiments.figures.panels import HeatMap, Plot, PlotGrid, Scale
from lm.config.base import SettingError
from lm.files import write

FORMATS = (".png", ".svg", ".pdf")
MAX_ERROR_BARS = 6  # points of a curve that have error bars; more have a band
MAX_LABELS_INSIDE = 12  # labels of a panel whose legend lies on its curves
MAX_LABELS = 40  # rows, columns or points of a panel that are labelled or marked one by one
DASHES = ("-", "--", "-.", ":")  # so that curves that lie on each other are all visible
MARKERS = "osv^DP*X"
LABEL_CHARACTERS = 32  # in a line of a row's label
TITLE_CHARACTERS = 40  # in a line of a panel's title
TITLE_CHARACTERS_PER_INCH = 8  # in a line of a figure's title
TITLE_LINE_INCHES = 0.25  # height of such a line
LINE_INCHES = 0.19  # height of such a line
LEGEND_MARGIN = 4  # lines above and below a legend
MISSING_COLOR = "lightgray"  # of cells without a number
MAX_INCHES = 48.0  # width and height of a figure
MIN_REFERENCE_MARGIN = 0.05  # shown on both sides of a reference line at least, in units of y


def check_format(out: Path) -> None:
    """Raise SettingError unless a figure can be written to ``out``."""
    if out.suffix.lower() not in FORMATS:
        formats = f"{', '.join(FORMATS[:-1])} or {FORMATS[-1]}"
        raise SettingError(f"--out {out} should be a file name that ends in {formats}, such as picture.png")


def save_figure(figure: Figure, out: Path, description: str = "", dpi: int = 100) -> None:
    """Write a figure in the format that the suffix of ``out`` names, with a description in the file."""
    contents, kind = BytesIO(), out.suffix.lower()[1:]
    metadata = {"Subject" if kind == "pdf" else "Description": description} if description else None
    figure.savefig(contents, format=kind, dpi=dpi, metadata=metadata)
    out.parent.mkdir(parents=True, exist_ok=True)
    write(out, contents.getvalue())


# ---- curves


def draw_plots(grid: PlotGrid) -> Figure:
    """Draw panels of curves side by side; a label has the same style in all of them."""
    columns = min(grid.columns, len(grid.panels))
    rows = -(-len(grid.panels) // columns)
    width, height = grid.panel_size
    if grid.panels[0].is_categorical:
        height = max(height, _list_inches(grid.panels[0].x_ticks.values()))
    labels = _labels(grid.panels)
    if grid.has_shared_legend:
        inches = max(rows * height, _list_inches(labels))
    else:
        beside = (_list_inches(_labels([panel])) for panel in grid.panels if _is_crowded(panel))
        inches = rows * max([height, *beside])
    title = fill(grid.title, int(TITLE_CHARACTERS_PER_INCH * columns * width))
    inches += TITLE_LINE_INCHES * title.count("\n")
    figure = Figure(figsize=(columns * width, inches), layout="constrained")
    every_axes = figure.subplots(rows, columns, squeeze=False)
    styles = {label: i for i, label in enumerate(labels)}
    for index, (axes, panel) in enumerate(zip_longest(every_axes.flat, grid.panels)):
        if panel is None:
            axes.set_visible(False)
            continue
        draw_means(axes, panel, styles)
        if not grid.has_shared_legend and _is_crowded(panel):
            axes.legend(fontsize="x-small", loc="upper left", bbox_to_anchor=(1, 1))
        elif not grid.has_shared_legend and len(_labels([panel])) > 1:
            axes.legend(fontsize="x-small")
        if panel.is_categorical and index % columns > 0:  # the first panel of a line names the categories
            axes.tick_params(labelleft=False)
    figure.suptitle(title)
    figure.supxlabel(grid.x_label, fontsize="medium")
    if grid.has_shared_legend:
        _draw_shared_legend(figure)
    return figure


def wrapped(label: str) -> str:
    """Return a label of a row in lines that leave room for a panel."""
    return fill(label, LABEL_CHARACTERS, break_on_hyphens=False)


def _list_inches(labels: Iterable[str]) -> float:
    """Return the height of labels of rows that stand below each other, with a margin [inches]."""
    lines = sum(1 + wrapped(label).count("\n") for label in labels)
    return LINE_INCHES * (lines + LEGEND_MARGIN)


def _is_crowded(panel: Plot) -> bool:
    """Return whether a panel has so many labels that a legend would hide its curves."""
    return len(_labels([panel])) > MAX_LABELS_INSIDE


def _labels(panels: Iterable[Plot]) -> list[str]:
    """Return the labels of all panels, each once."""
    return list(dict.fromkeys(label for panel in panels for label in (*panel.curves, *panel.levels)))


def draw_means(axes: Axes, panel: Plot, styles: dict[str, int]) -> None:
    """Draw means over x with their deviations as error bars, or as a band if there are many points.

    ``styles`` numbers the labels of all panels of a figure; the number chooses color, marker and dashes.
    """
    for label, curve in panel.curves.items():
        i = styles[label]
        color = panel.color or f"C{i % 10}"
        style: dict[str, Any] = {"color": color, "ls": DASHES[i % len(DASHES)], "label": label}
        if len(curve.x) <= MAX_LABELS:
            style |= {"marker": MARKERS[i % len(MARKERS)], "markersize": 4}
        if panel.is_categorical:
            style |= {"ls": ""}
            axes.errorbar(curve.y, curve.x, xerr=curve.deviations, capsize=3, **style)
        elif curve.deviations is None or len(curve.x) <= MAX_ERROR_BARS:
            axes.errorbar(curve.x, curve.y, yerr=curve.deviations, capsize=3, **style)
        else:
            y, deviations = np.asarray(curve.y), np.asarray(curve.deviations)
            axes.plot(curve.x, y, **style)
            axes.fill_between(curve.x, y - deviations, y + deviations, color=color, alpha=0.15, lw=0)
    for label, level in panel.levels.items():
        i = styles[label]
        axes.axhline(level, color=f"C{i % 10}", linestyle=DASHES[1 + i % 3], label=label)
    for label, level in panel.dotted.items():
        axes.axhline(level, color=f"C{styles[label] % 10}", linestyle=":")
    _draw_axes(axes, panel)


def _draw_axes(axes: Axes, panel: Plot) -> None:
    """Set labels, scales, ticks and the reference line of a panel whose curves are drawn."""
    lines = (fill(line, TITLE_CHARACTERS, break_on_hyphens=False) for line in panel.title.splitlines())
    axes.set_title("\n".join(lines), fontsize="medium")
    axes.set_xlabel(panel.x_label)
    axes.set_ylabel(panel.y_label)
    if panel.y_range is not None:
        axes.set_ylim(*panel.y_range)
    if "x" in panel.log:
        axes.set_xscale("log")
    if "y" in panel.log:
        axes.set_yscale("log")
        _label_logarithms(axes.yaxis, axes.get_ylim())
    if panel.is_categorical:
        axes.set_yticks(list(panel.x_ticks), [*map(wrapped, panel.x_ticks.values())], fontsize="small")
        axes.set_ylim(max(panel.x_ticks) + 0.5, min(panel.x_ticks) - 0.5)
        axes.margins(x=0.1)
        if "x" in panel.log:
            _label_logarithms(axes.xaxis, axes.get_xlim())
        else:
            axes.locator_params(axis="x", nbins=4)
    elif panel.x_ticks:
        axes.set_xticks(list(panel.x_ticks), list(panel.x_ticks.values()))
        if len(panel.x_ticks) > 4 and max(map(len, panel.x_ticks.values())) > 3:
            axes.tick_params(axis="x", labelrotation=45)
            for text in axes.get_xticklabels():
                text.set_horizontalalignment("right")
        axes.xaxis.minorticks_off()
    elif panel.max_x_intervals is not None:
        axes.locator_params(axis="x", nbins=panel.max_x_intervals)
    if panel.reference is not None:
        _draw_reference(axes, panel.reference, panel.is_categorical)
    axes.grid(alpha=0.3)


def _label_logarithms(axis: Axis, ends: tuple[float, float]) -> None:
    """Label a logarithmic axis with plain numbers, or powers of ten where it spans more than five of them."""
    low, high = ends
    axis.set_major_formatter(LogFormatterSciNotation() if high > 1e5 * low else LogFormatter())
    # labels between powers of ten too, if all values lie within one
    axis.set_minor_formatter(LogFormatter(labelOnlyBase=False, minor_thresholds=(1, 0.5)))


def _draw_reference(axes: Axes, y: float, is_categorical: bool) -> None:
    """Draw a dotted line at ``y``, with some room on both sides of it."""
    ends = (y - MIN_REFERENCE_MARGIN, y + MIN_REFERENCE_MARGIN)
    if is_categorical:
        axes.axvline(y, color="gray", linestyle=":")
        axes.update_datalim([(end, 0) for end in ends], updatey=False)
        axes.autoscale_view(scaley=False)
    else:
        axes.axhline(y, color="gray", linestyle=":")
        axes.update_datalim([(1, end) for end in ends], updatex=False)
        axes.autoscale_view(scalex=False)


def _draw_shared_legend(figure: Figure) -> None:
    """Draw one legend for all panels, with each label once."""
    handles: dict[str, Artist] = {}
    for axes in figure.axes:
        for handle, label in zip(*axes.get_legend_handles_labels(), strict=True):
            handles.setdefault(label, handle)
    if handles:
        figure.legend(
            handles=list(handles.values()), labels=[*map(wrapped, handles)], loc="outside right center"
        )


# ---- heat maps


def draw_heat_maps(panels: Sequence[HeatMap], x_label: str, y_label: str, columns: int = 4) -> Figure:
    """Draw matrices side by side; neighbours with the same color scale share a color bar."""
    columns = min(columns, len(panels))
    rows = -(-len(panels) // columns)
    is_one_scale = len({panel.scale for panel in panels}) == 1
    widths, heights = zip(*map(_inches, panels), strict=True)
    has_bar = [not is_one_scale and _ends_scale(panels, i, columns) for i in range(len(panels))]
    width, height = max(widths) + 0.8 * sum(has_bar[:columns]) / columns, max(heights) + 0.3
    shrink = min(1.0, MAX_INCHES / (columns * width), MAX_INCHES / (rows * height))
    inches = (max(columns * width * shrink + 1.3, 4.2), max(rows * height * shrink + 0.6, 2.8))
    figure = Figure(figsize=inches, layout="constrained")
    every_axes = figure.subplots(rows, columns, squeeze=False)
    for axes in every_axes.flat[len(panels) :]:
        axes.set_visible(False)
    for axes, panel, bar in zip(every_axes.flat, panels, has_bar, strict=False):
        image = _draw_heat_map(axes, panel)
        if bar:
            _draw_color_bar(figure, image, [axes], panel.scale)
    if is_one_scale:
        _draw_color_bar(figure, image, every_axes.ravel().tolist(), panels[0].scale)
    figure.supxlabel(x_label, fontsize="medium")
    figure.supylabel(y_label, fontsize="medium")
    return figure


def _ends_scale(panels: Sequence[HeatMap], i: int, columns: int) -> bool:
    """Return whether the panel to the right of panel ``i`` is missing or has another color scale."""
    is_last = (i + 1) % columns == 0 or i + 1 == len(panels)
    return is_last or panels[i + 1].scale != panels[i].scale


def _inches(panel: HeatMap) -> tuple[float, float]:
    """Return the width and height at which all text in and beside a panel is readable."""
    rows, columns = panel.values.shape
    if panel.annotations is not None:
        longest = max(map(len, panel.annotations.ravel()))
        return 0.8 + columns * (0.12 + 0.065 * longest), 0.9 + 0.26 * rows
    width = (0.15 if panel.column_labels else 0.06) * min(columns, MAX_LABELS)
    height = (0.15 if panel.row_labels else 0.06) * min(rows, MAX_LABELS)
    return max(1.8, 0.8 + width), max(1.8, 0.6 + height)


def _draw_heat_map(axes: Axes, panel: HeatMap) -> AxesImage:
    scale, (rows, columns) = panel.scale, panel.values.shape
    colors = colormaps[scale.colormap].with_extremes(bad=MISSING_COLOR)
    if scale.categories is not None:
        colors = ListedColormap([colors(0.0), colors(0.8)])
    values = np.ma.masked_invalid(np.asarray(panel.values, float))
    image = axes.imshow(values, cmap=colors, vmin=scale.low, vmax=scale.high, aspect="auto")
    axes.set_title(panel.title, fontsize="small")
    axes.tick_params(labelsize="x-small")
    if panel.column_labels and columns <= MAX_LABELS:
        rotation = 90 if panel.annotations is None else 0
        axes.set_xticks(range(columns), panel.column_labels, rotation=rotation)
    else:
        axes.xaxis.set_major_locator(MaxNLocator("auto", steps=[1, 2, 5, 10], integer=True))
    if panel.row_labels and rows <= MAX_LABELS:
        axes.set_yticks(range(rows), panel.row_labels)
    else:
        axes.yaxis.set_major_locator(MaxNLocator("auto", steps=[1, 2, 5, 10], integer=True))
    if panel.annotations is not None:
        for (row, column), text in np.ndenumerate(panel.annotations):
            value = panel.values[row, column]
            is_dark = np.isfinite(value) and _luminance(image.cmap(image.norm(value))) < 0.5
            color = "white" if is_dark else "black"
            axes.text(column, row, text, ha="center", va="center", fontsize="x-small", color=color)
    return image


def _luminance(rgba: Any) -> float:
    """Return the luminance of a color, from 0 to 1 (ITU-R BT.709)."""
    return float(np.dot(rgba[:3], (0.2126, 0.7152, 0.0722)))


def _draw_color_bar(figure: Figure, image: AxesImage, axes: Sequence[Axes], scale: Scale) -> None:
    label = fill(scale.label, 24)  # as long as the bar of a low figure
    bar = figure.colorbar(image, ax=axes, label=label, shrink=0.8, aspect=30)
    bar.ax.tick_params(labelsize="small")
    if scale.categories is not None:
        quarter = (scale.high - scale.low) / 4
        bar.set_ticks([scale.low + quarter, scale.high - quarter], labels=list(scale.categories))

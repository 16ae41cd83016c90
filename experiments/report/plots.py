"""Pictures of reports."""

from collections.abc import Mapping, Sequence
from functools import partial
from io import BytesIO
from itertools import cycle, zip_longest
from math import inf, isnan
from pathlib import Path
from statistics import mean
from typing import Any, NamedTuple

from matplotlib import colormaps
from matplotlib.axes import Axes
from matplotlib.figure import Figure  # without pyplot nothing looks for a display
from matplotlib.ticker import LogFormatter

from experiments.report.columns import Score
from experiments.report.comparison import Curves, Evidence
from experiments.report.likelihoods import learning_curve, likelihood_score, perplexities, quickest
from experiments.runs.result import Result
from experiments.study.claims import standardized
from experiments.study.experiment import Experiment
from experiments.study.names import file_name
from experiments.study.table import Paper, Row, Table
from lm.config.base import leaves
from lm.files import write

COMBINED = "combined [deviations of a repeat]"
PANELS_WIDE = 4  # at most


def draw_figures(evidence: Evidence, curves: Mapping[str, Curves]) -> dict[str, Figure]:
    """Every picture that the table has results for, by the name of its file without an ending."""
    finished, figures = evidence.finished, {}
    table = finished.table
    name, rows = file_name(table.name), finished.trained
    if finished.columns:
        figures[name] = panels(evidence, rows, axis_of(table, finished.settings))
    if lines := {row.label: evidence.curve(finished.key(row), "content tokens") for row in rows}:
        lines = {
            label: curve for label, curve in lines.items() if any(x > 0 for line in curve for x, _ in line)
        }
        if any(len(line) > 1 for curve in lines.values() for line in curve):
            figures[f"{name}-crossing"] = crossing(lines)
    if any(perplexities(finished.of(row)) for row in rows):
        figures[f"{name}-lengths"] = extrapolation(
            {row.label: scores for row in rows if (scores := perplexities(finished.of(row)))}
        )
    asked = {row.label: finished.of(row) for row in rows if any(x.likelihoods for x in finished.of(row))}
    if asked:
        figures[f"{name}-road"] = road(asked)
    if any(curves.values()):
        figures[f"{name}-curves"] = training(rows, curves)
    for file, figure in figures.items():
        title = f"{table.title} ({table.name})" if table.title else table.name
        figure.suptitle(title + ": training" * file.endswith("-curves"))
    return figures


def save_figures(figures: Mapping[str, Figure], folder: Path, kind: str) -> None:
    """Write pictures into ``folder`` under their names, as ``kind``: png, svg or pdf."""
    for name, figure in figures.items():
        picture = BytesIO()
        figure.savefig(picture, format=kind, dpi=130)
        write(folder / f"{name}.{kind}", picture.getvalue())


def axis_of(table: Table, settings: Mapping[str, Experiment]) -> dict[str, float]:
    """Row -> the setting on the table's axis, in rising order; empty if it has no axis.

    On it are the rows that differ in this setting and in nothing else: the most that do. A row where the
    setting is 0, which leaves out what it is of, is not on it: the axis is logarithmic.
    """
    path = table.axis.setting if table.axis else ""
    alike: dict[Any, dict[str, float]] = {}  # all other settings -> row -> this one
    for row in (row for row in table.rows if path and row.name in settings):
        values = dict(leaves(settings[row.name]))
        if (value := values.pop(path)) > 0:
            alike.setdefault(tuple(values.items()), {})[row.name] = value
    most = max(alike.values(), key=len, default={})
    return dict(sorted(most.items(), key=lambda item: item[1])) if len(set(most.values())) > 1 else {}


NEAR_CHANCE = 0.05  # on both sides of chance, at least so much is shown [bits]


class Panel(NamedTuple):
    """Scores of rows that are drawn beside each other."""

    title: str
    color: str
    scores: Sequence[tuple[Row, Score]]
    chance: float | None = None


def panels(evidence: Evidence, rows: Sequence[Row], setting: Mapping[str, float]) -> Figure:
    """A panel for the combined score and for each column, then the paper's of the same kinds.

    They are drawn against the ``setting`` of rows, or with the rows below each other if it is empty. A dotted
    line is chance.
    """
    drawn = [panel for panel in (*_measured(evidence, rows), *_published(evidence, rows)) if panel.scores]
    wide = min(PANELS_WIDE, len(drawn))
    tall = -(-len(drawn) // wide)
    size = (2.9 * wide + 1.6, tall * (2.6 if setting else 0.9 + 0.26 * len(rows)) + 0.5)
    figure = Figure(figsize=size, layout="constrained")
    grid = figure.subplots(tall, wide, squeeze=False, sharey="none" if setting else "all")
    for axis, panel in zip_longest(grid.flat, drawn):
        axis.set_visible(panel is not None)
        if panel is not None:
            (_draw_against(axis, panel, setting) if setting else _draw_below(axis, panel, rows))
            axis.set_title(panel.title, fontsize="medium")
            axis.grid(alpha=0.3)
    drawn_axis = evidence.finished.table.axis
    figure.supxlabel(drawn_axis.label if setting and drawn_axis else "", fontsize="medium")
    _legend(figure)
    return figure


def _measured(evidence: Evidence, rows: Sequence[Row]) -> list[Panel]:
    finished = evidence.finished

    def panel(title: str, values: Mapping[str, Mapping[int, float]], chance: float | None = None) -> Panel:
        scores = [(row, Score.of(values.get(finished.key(row), {}).values())) for row in rows]
        return Panel(title, "tab:blue", [(row, score) for row, score in scores if score], chance)

    combined = {key: evidence.combined(key) for key in finished.keys}
    columns = [panel(c.title, finished.samples(c), c.chance) for c in finished.columns]
    return [*[panel(COMBINED, combined)] * bool(evidence.kept), *columns]


def _published(evidence: Evidence, rows: Sequence[Row]) -> list[Panel]:
    paper = evidence.finished.table.paper
    if paper is None or not evidence.finished.baseline.published:
        return []
    likes = dict.fromkeys(column.like for column in evidence.finished.columns if column.like)
    base = evidence.finished.baseline
    values = {
        f"mean of {len(paper.columns)} columns [deviations]": partial(paper_mean, base=base, paper=paper)
    }
    values |= {like: partial(_paper, column=like) for like in likes}
    return [
        Panel(
            f"{name}\n({paper.citation})",
            "tab:orange",
            [(row, Score(value(row), None)) for row in rows if row.published],
        )
        for name, value in values.items()
    ]


def _paper(row: Row, column: str) -> float:
    return row.published[column]


def paper_mean(row: Row, base: Row, paper: Paper) -> float:
    """Over all columns, less the baseline's, in deviations: that by which the paper's claims are made."""
    return float((standardized(row, paper) - standardized(base, paper)).mean())


def _draw_below(axis: Axes, panel: Panel, rows: Sequence[Row]) -> None:
    """Means and deviations over seeds, a line a row, the first at the top."""
    places = {row.name: place for place, row in enumerate(rows)}
    lines = [places[row.name] for row, _ in panel.scores]
    means, deviations = zip(*((score.mean, score.std or 0.0) for _, score in panel.scores), strict=True)
    axis.errorbar(means, lines, xerr=deviations, marker="o", capsize=3, color=panel.color, linestyle="")
    axis.set_yticks(range(len(rows)), [row.label for row in rows], fontsize="small")
    axis.set_ylim(len(rows) - 0.5, -0.5)
    axis.margins(x=0.1)
    if panel.chance is not None:
        axis.axvline(panel.chance, color="gray", linestyle=":")
        axis.update_datalim([(panel.chance + side, 0) for side in (-NEAR_CHANCE, NEAR_CHANCE)])
        axis.autoscale_view(scaley=False)


def _draw_against(axis: Axes, panel: Panel, setting: Mapping[str, float]) -> None:
    """Means and deviations over seeds against the setting of rows; rows without one are horizontal lines."""
    points = sorted(
        (setting[row.name], x.mean, x.std or 0.0) for row, x in panel.scores if row.name in setting
    )
    if points:
        places, means, deviations = zip(*points, strict=True)
        axis.errorbar(places, means, yerr=deviations, marker="o", capsize=3, color=panel.color)
    for i, (row, score) in enumerate(x for x in panel.scores if x[0].name not in setting):
        axis.axhline(score.mean, color=f"C{2 + i}", linestyle=("--", ":", "-.")[i % 3], label=row.label)
    if panel.chance is not None:
        axis.axhline(panel.chance, color="gray", linestyle=":")
        axis.update_datalim([(1, panel.chance + side) for side in (-NEAR_CHANCE, NEAR_CHANCE)], updatex=False)
    ticks = list(setting.values())
    axis.set_xscale("log")
    axis.set_xticks(ticks, [f"{x:.3g}" if x < 1000 else f"{x:,}" for x in ticks], rotation=45)
    axis.minorticks_off()


def crossing(lines: Mapping[str, Sequence[Sequence[tuple[float, float]]]]) -> Figure:
    """Combined score against content tokens of pre-training, a curve a row; bands: deviation over seeds."""
    figure = Figure(figsize=(7.4, 4.4), layout="constrained")
    axis = figure.subplots()
    for (label, seeds), marker in zip(lines.items(), cycle("osv^DP*X"), strict=False):
        points = zip(*seeds, strict=True) if len(set(map(len, seeds))) == 1 else iter([])
        merged = [(mean(x for x, _ in some), Score.of(y for _, y in some)) for some in points]
        known = [(x, score.mean, score.std or 0.0) for x, score in merged if score and not isnan(score.mean)]
        if known:
            x, means, deviations = zip(*known, strict=True)
            axis.errorbar(x, means, yerr=deviations, marker=marker, capsize=3, label=label)
    axis.set(xscale="log", xlabel="content tokens of pre-training")
    axis.set_ylabel("combined score less the baseline's [deviations]")
    axis.axhline(0, color="gray", linestyle=":")
    axis.grid(alpha=0.3)
    _legend(figure)
    return figure


def extrapolation(lines: Mapping[str, Mapping[int, Score]]) -> Figure:
    """Perplexity of held-out text against the length of its rows, a line a row (Press et al. 2022)."""
    figure = Figure(figsize=(6.4, 4.2), layout="constrained")
    axis = figure.subplots()
    for (label, scores), marker in zip(lines.items(), cycle("osv^DP*X"), strict=False):
        means = [score.mean for score in scores.values()]
        deviations = [score.std or 0.0 for score in scores.values()]
        axis.errorbar(list(scores), means, yerr=deviations, marker=marker, capsize=3, label=label)
    times = next(iter(lines.values()))
    axis.set(xscale="log", yscale="log", xlabel="length of rows, over that of training")
    axis.set_xticks(list(times), [f"{n} ×" for n in times])
    axis.xaxis.minorticks_off()
    axis.yaxis.set_major_formatter(LogFormatter())
    # labels between powers of ten too: perplexities may span less than one
    axis.yaxis.set_minor_formatter(LogFormatter(labelOnlyBase=False, minor_thresholds=(1, 0.5)))
    axis.set_ylabel("perplexity of held-out text")
    axis.grid(alpha=0.3, which="both")
    axis.legend()
    return figure


def road(asked: Mapping[str, Sequence[Result]]) -> Figure:
    """Held-out documents: perplexity over the models in their order and, of networks, bits a byte over time.

    Bars are deviations over seeds.
    """
    seconds = quickest(asked.values())
    wide = 1 if seconds is None else 2
    figure = Figure(figsize=(1 + 5.2 * wide, 4.4), layout="constrained")
    first, *others = figure.subplots(1, wide, squeeze=False)[0]
    frames = {"end of training": inf} | ({} if seconds is None else {f"after {seconds:.0f} s": seconds})
    _draw_perplexities(first, asked, frames)
    first.legend()
    for axis in others:
        for number, (label, runs) in enumerate(asked.items()):
            lines = [learning_curve(run) for run in runs if run.likelihoods]
            for line, name in zip_longest(lines, [label]):
                marker = "*" if len(line) == 1 else "."  # counts are there at once
                axis.plot(*zip(*line, strict=True), label=name, marker=marker, color=f"C{number}", alpha=0.8)
        axis.set(xscale="log", xlabel="time of training [s]", ylabel="bits a byte of held-out documents")
        axis.legend(fontsize="small")
    for axis in figure.axes:
        axis.grid(alpha=0.3, which="both")
    return figure


def _draw_perplexities(
    axis: Axes, asked: Mapping[str, Sequence[Result]], frames: Mapping[str, float]
) -> None:
    """Perplexity of a word for each row, within each of the ``frames`` [s]."""
    for (label, within), marker in zip(frames.items(), "o^", strict=False):
        scores = [likelihood_score(runs, "word_perplexity", within) for runs in asked.values()]
        known = [(place, x.mean, x.std or 0.0) for place, x in enumerate(scores) if x]
        places, means, deviations = zip(*known, strict=True)
        axis.errorbar(places, means, yerr=deviations, marker=marker, capsize=3, linestyle=":", label=label)
    axis.set_xticks(range(len(asked)), list(asked), rotation=45, ha="right")
    axis.set(yscale="log", ylabel="perplexity of a word of held-out documents")
    axis.yaxis.set_major_formatter(LogFormatter())
    axis.yaxis.set_minor_formatter(LogFormatter(labelOnlyBase=False, minor_thresholds=(1, 0.5)))


def training(rows: Sequence[Row], curves: Mapping[str, Curves]) -> Figure:
    """A panel for each loss and score that was recorded over steps, a color a row, a line a seed."""
    kinds = list(dict.fromkeys(kind for lines in curves.values() for kind in lines))
    colors = [colormaps["tab20"](number) for number in (*range(0, 20, 2), *range(1, 20, 2))]
    shape = (-(-len(kinds) // 3), 3)
    figure = Figure(figsize=(11, 3 * shape[0]), layout="constrained")
    for panel, kind in zip_longest(figure.subplots(*shape, squeeze=False).flat, kinds):
        panel.set_visible(kind is not None)
        for row, color in zip(rows, cycle(colors), strict=False):
            for j, line in enumerate(curves[row.name].get(kind, ())):
                label = row.label if j == 0 else None
                panel.plot(*zip(*line, strict=True), color=color, linewidth=1, alpha=0.8, label=label)
        panel.set(title=kind, xlabel="step")
        panel.grid(alpha=0.3)
    _legend(figure)
    return figure


def _legend(figure: Figure) -> None:
    """One legend for all panels, with each label once."""
    pairs = [axis.get_legend_handles_labels() for axis in figure.axes]
    handles = {label: handle for some, labels in pairs for handle, label in zip(some, labels, strict=True)}
    if handles:
        figure.legend(list(handles.values()), list(handles), loc="outside right center")

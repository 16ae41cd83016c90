"""Figures of reports, as panels of means over seeds with their standard deviations."""

import hashlib
from collections import Counter
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from importlib.metadata import version
from math import inf
from pathlib import Path
from typing import Any

from experiments.figures.panels import Curve, Plot, PlotGrid, Score, tick_labels
from experiments.figures.training import mean_curve, score_curve, training_figure
from experiments.report.comparison import Comparison
from experiments.report.metrics import (
    GROUP_TITLES,
    HELD_OUT_LOSS,
    Group,
    Metric,
    bits_per_byte_curve,
    likelihood_score,
    perplexity_by_length,
    shortest_training,
)
from experiments.report.text import mean_z_title
from experiments.runs.curves import Curves
from experiments.runs.result import Result
from experiments.study.claims import has_noise, published_rows, standardized
from experiments.study.experiment import Experiment
from experiments.study.names import file_name
from experiments.study.table import Row, Table
from lm.config.base import SettingError, leaves
from lm.files import json_with_checksum, parse_with_checksum, write

DRAWN_FILE = "figures.json"  # what the figures in a report's folder were drawn from
DPI = 130
OUR_COLOR, PAPER_COLOR = "tab:blue", "tab:orange"
CONTENT_TOKENS = "content tokens of pre-training"
MEAN_Z = "mean z-score: difference from the baseline\n[standard deviations of a run]"


def table_figures(comparison: Comparison, curves: Mapping[str, Curves]) -> dict[str, PlotGrid]:
    """Return every figure that a table has results for, by the name of its file without a suffix.

    ``curves``: training curves by the keys of the comparison's rows.
    """
    table, rows = comparison.table, _with_distinct_labels(comparison.trained_rows)
    name = file_name(table.name)
    title = f"{table.title} ({table.name})" if table.title else table.name
    likelihoods, training = {}, {}  # by the labels of rows
    for row in rows:
        runs = comparison.runs_of(row)
        if any(run.likelihoods for run in runs):
            likelihoods[row.label] = runs
        if of_row := curves[comparison.canonical_name(row)]:
            training[row.label] = of_row
    figures = {
        name: scores_figure(comparison, rows, axis_values(table, comparison.experiments), title),
        f"{name}-crossing": score_vs_tokens_figure(comparison, rows, title),
        f"{name}-lengths": length_extrapolation_figure(comparison, rows, title),
        f"{name}-road": perplexity_figure(likelihoods, title) if likelihoods else None,
        f"{name}-curves": training_figure(training, f"{title}: training") if training else None,
    }
    return {file: grid for file, grid in figures.items() if grid is not None}


def _with_distinct_labels(rows: Sequence[Row]) -> list[Row]:
    """Return the rows with their keys behind those labels that several of them have."""
    counts = Counter(row.label for row in rows)
    distinct = []
    for row in rows:
        is_alone = counts[row.label] == 1
        distinct.append(row if is_alone else replace(row, label=f"{row.label} ({row.key})"))
    return distinct


def save_figures(figures: Mapping[str, PlotGrid], folder: Path, kind: str = "png") -> None:
    """Write figures into ``folder`` as png, svg or pdf, except those that are there with the same panels."""
    drawn = _read_drawn(folder / DRAWN_FILE)
    to_draw = {}
    for name, grid in figures.items():
        file = f"{name}.{kind}"
        digest = _digest(grid)
        if drawn.get(file) != digest or not (folder / file).exists():
            to_draw[file] = grid
            drawn[file] = digest
    if not to_draw:
        return
    from experiments.figures.draw import draw_plots, save_figure  # with matplotlib, which is slow to import

    for file, grid in to_draw.items():
        save_figure(draw_plots(grid), folder / file, dpi=DPI)
    write(folder / DRAWN_FILE, json_with_checksum(drawn))


def remove_outdated_figures(figures: Mapping[str, PlotGrid], folder: Path) -> None:
    """Remove the pictures in ``folder`` that an earlier report drew and that ``figures`` no longer are.

    These are figures without results now, and, in a format that this report was not asked for, figures whose
    panels have changed since.
    """
    drawn = _read_drawn(folder / DRAWN_FILE)
    digests = {name: _digest(grid) for name, grid in figures.items()}
    outdated = [file for file, digest in drawn.items() if digests.get(file.rpartition(".")[0]) != digest]
    if not outdated:
        return
    for file in outdated:
        (folder / file).unlink(missing_ok=True)
        del drawn[file]
    write(folder / DRAWN_FILE, json_with_checksum(drawn))


def _digest(grid: PlotGrid) -> str:
    """Return a digest of a figure's panels and of the code that draws them."""
    code = Path(__file__).parents[1] / "figures" / "draw.py"
    parts = (repr(grid), code.read_text("utf-8"), version("matplotlib"))
    return hashlib.sha256("\0".join(parts).encode(errors="backslashreplace")).hexdigest()


def _read_drawn(path: Path) -> dict[str, Any]:
    """Return file -> digest of the figure it was drawn from; empty if that is not known."""
    try:
        return parse_with_checksum(path.read_bytes(), path)
    except (OSError, SettingError):
        return {}


# ---- panels


def mean_point_curve(seeds: Iterable[Mapping[float, float]]) -> Curve:
    """Return the mean over seeds of x and y, point by point: their x, such as times, differ a little."""
    scores = {}
    for points in zip(*(seed.items() for seed in seeds), strict=True):
        x, y = zip(*points, strict=True)
        scores[sum(x) / len(x)] = Score.of(y)
    return score_curve(scores)


def axis_values(table: Table, experiments: Mapping[str, Experiment]) -> dict[str, float]:
    """Return the rows on the table's axis with their values, in rising order; empty without an axis.

    These are the rows that differ in the axis' setting and in nothing else: the largest such group. A
    logarithmic axis has no place for a value of 0.
    """
    if table.axis is None:
        return {}
    groups: dict[Any, dict[str, float]] = {}  # all other settings -> row -> value of the axis' setting
    for row in table.rows:
        if row.name not in experiments:
            continue
        settings = dict(leaves(experiments[row.name]))
        value = settings.pop(table.axis.setting)
        if value is not None and (value > 0 or not table.axis.log):
            groups.setdefault(tuple(settings.items()), {})[row.name] = value
    largest = max(groups.values(), key=len, default={})
    if len(set(largest.values())) < 2:
        return {}
    return dict(sorted(largest.items(), key=lambda item: item[1]))


def scores_figure(
    comparison: Comparison, rows: Sequence[Row], axis: Mapping[str, float], title: str
) -> PlotGrid | None:
    """Return a panel per metric, with the mean z-scores first and the paper's columns of the same kinds last.

    Scores are drawn over the ``axis`` (row -> value), or if it is empty with the rows listed downwards. A
    dotted line is chance. None if no row is scored.
    """
    quantities = [*_our_scores(comparison), *_published_scores(comparison)]
    rows = [row for row in rows if any(each.score(row) is not None for each in quantities)]
    panels = []
    for each in quantities:
        panel = _scores_panel(comparison.table, rows, axis, each)
        if panel.curves or panel.levels:
            panels.append(panel)
    if not panels:
        return None
    columns = min(4, len(panels))
    width = 2.9 + 1.6 / columns  # with room for the names of rows
    height = 2.6 if axis else 0.9 + 0.26 * len(rows)
    label = comparison.table.axis.label if axis and comparison.table.axis else ""
    return PlotGrid(panels, title, label, columns, (width, height), has_shared_legend=True)


@dataclass(frozen=True)
class Quantity:
    """Holds what one panel shows of each row."""

    title: str
    score: Callable[[Row], Score | None]
    color: str
    chance: float | None = None  # value for random guesses; None if unknown


def _our_scores(comparison: Comparison) -> list[Quantity]:
    """Return the quantities of our runs: the mean z-scores, then each metric."""
    quantities = []
    for group in comparison.groups if comparison.has_tasks else ():

        def combined_score(row: Row, group: Group = group) -> Score | None:
            name = comparison.canonical_name(row)
            if not comparison.has_left_plateau(name):
                return None  # the sheet of scores says "not yet learning"
            return Score.of(comparison.combined_scores(name, group).values())

        title = f"{mean_z_title(group)}\n[standard deviations of a run]"
        quantities.append(Quantity(title, combined_score, OUR_COLOR))
    for metric in comparison.metrics:
        samples = comparison.values_by_seed(metric)
        if comparison.has_tasks and not _compares_rows(comparison, metric):
            continue

        def score(
            row: Row, metric: Metric = metric, samples: Mapping[str, Mapping[int, float]] = samples
        ) -> Score | None:
            name = comparison.canonical_name(row)
            if not comparison.is_comparable(metric, name, comparison.canonical_baseline):
                return None  # its held-out loss is that of other tokens
            return Score.of(samples[name].values())

        unit = "\n[nats per token]" * (metric.measure == HELD_OUT_LOSS)  # titles of other metrics have theirs
        quantities.append(Quantity(f"{metric.title}{unit}", score, OUR_COLOR, metric.chance))
    return quantities


def _compares_rows(comparison: Comparison, metric: Metric) -> bool:
    """Return whether any row beside the baseline is measured on the same tokens as the baseline."""
    baseline = comparison.canonical_baseline
    measured = {comparison.canonical_name(row) for row in comparison.trained_rows} - {baseline}
    return any(comparison.is_comparable(metric, name, baseline) for name in measured)


def _published_scores(comparison: Comparison) -> list[Quantity]:
    """Return the quantities of the paper: the mean z-score, then each column that a metric of ours has."""
    paper, baseline = comparison.table.paper, comparison.baseline
    if paper is None or not baseline.published:
        return []
    quantities = []
    table = comparison.table
    complete = {row.name for row in published_rows(replace(table, rows=(*table.rows, baseline)))}
    if has_noise(table) and baseline.name in complete:

        def difference(row: Row) -> Score | None:
            if row.name not in complete:
                return None
            return Score.of([published_standardized_difference(row, baseline, table)])

        title = f"mean z-score of {len(table.columns)} columns\n({paper.citation})"
        quantities.append(Quantity(title, difference, PAPER_COLOR))
    for column in dict.fromkeys(metric.paper_column for metric in comparison.metrics):
        if column is not None:
            title = f"{column}\n({paper.citation})"
            quantities.append(Quantity(title, partial(_published_score, column), PAPER_COLOR))
    return quantities


def _published_score(column: str, row: Row) -> Score | None:
    return Score.of([row.published.get(column)])


def published_standardized_difference(row: Row, baseline: Row, table: Table) -> float:
    """Return a row's published mean over the columns that its paper compares rows by, less the baseline's.

    It is in deviations of the paper's baseline.
    """
    return float((standardized(row, table) - standardized(baseline, table)).mean())


def _scores_panel(table: Table, rows: Sequence[Row], axis: Mapping[str, float], quantity: Quantity) -> Plot:
    """Return the panel of a quantity over the ``axis`` or, if it is empty, with the rows listed downwards.

    A row that is not on the axis is a horizontal line.
    """
    scores = {row.name: quantity.score(row) for row in rows}
    if not axis:
        curve = score_curve(dict(enumerate(scores.values())))
        return Plot(
            quantity.title,
            "",
            "",
            {"": curve} if curve.x else {},
            x_ticks={index: row.label for index, row in enumerate(rows)},
            reference=quantity.chance,
            color=quantity.color,
            is_categorical=True,
        )
    curve = score_curve({axis[name]: score for name, score in scores.items() if name in axis})
    labels = {row.name: row.label for row in rows}
    levels = {labels[name]: score.mean for name, score in scores.items() if score and name not in axis}
    return Plot(
        quantity.title,
        "",
        "",
        {"": curve} if curve.x else {},
        log="x" if table.axis is not None and table.axis.log else "",
        x_ticks=tick_labels(list(dict.fromkeys(axis.values()))),
        levels=levels,
        reference=quantity.chance,
        color=quantity.color,
    )


def score_vs_tokens_figure(comparison: Comparison, rows: Sequence[Row], title: str) -> PlotGrid | None:
    """Return mean z-scores over content tokens, a panel per group of metrics and a curve per row.

    It is a diagnostic of how far an objective's lead comes from the number of tokens it predicts. Rows that
    are still on the unigram plateau are left out, as in the other figures. None without branches.
    """
    panels = []
    for group in comparison.groups:
        curves = {}
        for row in rows:
            name = comparison.canonical_name(row)
            if not comparison.has_left_plateau(name):
                continue
            seeds = comparison.scores_by_content_tokens(name, group)
            if len(set(map(len, seeds))) == 1 and max(map(max, seeds)) > 0:
                curves[row.label] = mean_point_curve(seeds)
        if any(len(curve.x) > 1 for curve in curves.values()):
            panels.append(Plot(GROUP_TITLES[group], CONTENT_TOKENS, MEAN_Z, curves, log="x", reference=0.0))
    if not panels:
        return None
    title = f"{title}: mean z-score over content tokens"
    return PlotGrid(panels, title, panel_size=(5.4, 4.4), has_shared_legend=True)


def length_extrapolation_figure(comparison: Comparison, rows: Sequence[Row], title: str) -> PlotGrid | None:
    """Return perplexity over the length of held-out sequences, one curve per row (Press et al. 2022)."""
    curves, multiples = {}, set[float]()
    for row in rows:
        scores = {float(x): score for x, score in perplexity_by_length(comparison.runs_of(row)).items()}
        if scores:
            curves[row.label] = score_curve(scores)
            multiples |= scores.keys()
    if not curves:
        return None
    panel = Plot(
        "",
        "length of sequences, as a multiple of training's",
        "perplexity of held-out text",
        curves,
        log="xy",
        x_ticks={multiple: f"{multiple:g} ×" for multiple in sorted(multiples)},
    )
    return PlotGrid([panel], title, panel_size=(6.4, 4.2))


def perplexity_figure(rows: Mapping[str, Sequence[Result]], title: str = "") -> PlotGrid:
    """Return word perplexity of held-out documents by model and, for networks, bits per byte over time.

    ``rows``: label of a row -> its seeds.
    """
    seconds = shortest_training(rows.values())
    limits = {"end of training": inf}
    if seconds is not None:
        limits[f"after {seconds:.0f} s"] = seconds
    perplexities = {}
    for label, limit in limits.items():
        scores = [likelihood_score(seeds, "word_perplexity", limit) for seeds in rows.values()]
        perplexities[label] = score_curve(dict(enumerate(scores)))
    x_label = "word perplexity of held-out documents"
    panels = [
        Plot("", x_label, "", perplexities, log="x", x_ticks=dict(enumerate(rows)), is_categorical=True)
    ]
    if seconds is not None:
        over_time: dict[str, Curve] = {}
        for label, seeds in rows.items():
            over_time |= _seed_curves(label, seeds)
        y_label = "bits per byte of held-out documents"
        panels.append(Plot("", "training time [s]", y_label, over_time, log="x"))
    return PlotGrid(panels, title, panel_size=(5.7, 4.4))


def _seed_curves(label: str, seeds: Sequence[Result]) -> dict[str, Curve]:
    """Return one curve for seeds that were evaluated at the same times, else one for each."""
    by_seed = {run.seed: bits_per_byte_curve(run) for run in seeds if run.likelihoods}
    if len(set(map(len, by_seed.values()))) != 1:
        return {f"{label}, seed {seed}": mean_curve([curve]) for seed, curve in by_seed.items()}
    return {label: mean_point_curve(by_seed.values())}

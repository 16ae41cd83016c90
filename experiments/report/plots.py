"""Pictures of reports."""

from collections.abc import Mapping, Sequence
from io import BytesIO
from itertools import cycle, zip_longest
from pathlib import Path
from statistics import mean

from matplotlib import colormaps
from matplotlib.figure import Figure  # without pyplot nothing looks for a display
from matplotlib.ticker import LogFormatter

from experiments.report.results import Curves, Score, lengths
from experiments.report.sheets import Finished, base_of, columns_of
from experiments.study.experiment import Row, Table
from experiments.study.registry import build
from lm.files import write
from lm.settings import leaves

PAPER = "Raffel et al. 2020"
LOSS, AVERAGE = "loss on tasks [nats/token]", "mean of seven columns"  # ours, and what stands below it
# table -> the setting that these of its rows differ in and in nothing else, and what a picture calls it
AXES = {
    "t5/6-corruption-rate": ("objective.rate", "corruption rate", ("10", "15", "25", "50")),
    "t5/7-span-length": (
        "objective.mean_span_length",
        "mean length of a span [tokens]",
        ("2", "3", "5", "10"),
    ),
    "t5/9-repeats": ("data.repeats", "times that the same data are seen", ("64", "256", "1024", "4096")),
    "t5/10-fine-tuning": (
        "tuning.adapters",
        "width of adapters, over that of the model",
        ("adapters-32", "adapters-128", "adapters-512", "adapters-2048"),
    ),
    "t5/11-mixing": ("mixing.limit", "limit K [examples]", ("k16", "k17", "k18", "k19", "k20", "k21")),
}


def draw(table: Table, found: Finished, lines: Mapping[str, Curves], scale: str, folder: Path) -> list[str]:
    """Write every picture that ``table`` has results for into ``folder``; their names."""
    name, rows, figures = table.name.replace("/", "-"), [row for row in table.rows if found[row.name]], {}
    if columns_of(table, found):
        figures[name] = panels(table, rows, found, axis_of(table, scale))
    if any(lengths(found[row.name]) for row in rows):
        figures[f"{name}-lengths"] = extrapolation(rows, found)
    if any(lines.values()):
        figures[f"{name}-curves"] = training(rows, lines)
    for file, figure in figures.items():
        figure.suptitle(f"{table.title} ({table.name})" + ": training" * file.endswith("-curves"))
        written = BytesIO()
        figure.savefig(written, dpi=130)
        write(folder / f"{file}.png", written.getvalue())
    return [f"{file}.png" for file in figures]


def axis_of(table: Table, scale: str) -> dict[str, float]:
    """The rows of ``table`` that lie on its axis, and where; none if it has none."""
    path, _, keys = AXES.get(table.name, ("", "", ()))
    return {f"{table.name}/{key}": dict(leaves(build(f"{table.name}/{key}", scale)))[path] for key in keys}


def panels(table: Table, rows: Sequence[Row], found: Finished, at: Mapping[str, float]) -> Figure:
    """A panel a column, ours above and the paper's below, against the setting ``at`` or with the rows side by
    side.
    """
    values_of = {column: (lambda run, c=column: run.columns.get(c)) for column in columns_of(table, found)}
    if any(run.task_loss is not None for row in rows for run in found[row.name]):
        values_of = {LOSS: lambda run: run.task_loss} | values_of
    sides = {"ours": lambda row, c: map(values_of[c], found[row.name])}
    if base_of(table).paper:
        sides[PAPER] = lambda row, c: [row.paper[c]] if c in row.paper else [mean(row.paper.values())]
    columns, shape = list(values_of), (len(sides), len(values_of))
    figure = Figure(figsize=(2.9 * shape[1] + 1.6, 2.4 * shape[0] + 1.2), layout="constrained")
    grid = figure.subplots(*shape, squeeze=False, sharex="all")
    for (who, values), line, color in zip(sides.items(), grid, ("tab:blue", "tab:orange"), strict=False):
        for column, panel in zip(columns, line, strict=True):
            scores = [(row, score) for row in rows if (score := Score.of(values(row, column)))]
            _scores(
                panel,
                scores,
                at or {row.name: place for place, row in enumerate(rows)},
                color,
                "-" if at else "",
            )
            panel.set_title(AVERAGE if (who, column) == (PAPER, LOSS) else column)
        line[0].set_ylabel(who, fontweight="bold")
    for panel in grid[-1]:
        if at:
            panel.set_xscale("log")
            panel.set_xticks(
                list(at.values()), [f"{x:.3g}" if x < 1000 else f"{x:,}" for x in at.values()], rotation=45
            )
            panel.minorticks_off()
        else:
            panel.set_xticks(
                range(len(rows)), [row.label for row in rows], rotation=60, ha="right", fontsize="small"
            )
    figure.supxlabel(AXES[table.name][1] if at else "", fontsize="medium")
    _legend(figure)
    return figure


def _scores(
    panel, scores: Sequence[tuple[Row, Score]], at: Mapping[str, float], color: str, line: str
) -> None:
    """Means and deviations over seeds; rows that do not lie on the axis are horizontal lines."""
    on = [(at[row.name], score.mean, score.std or 0.0) for row, score in scores if row.name in at]
    if on:
        x, mean, std = zip(*on, strict=True)
        panel.errorbar(x, mean, yerr=std, marker="o", linestyle=line, color=color, capsize=3)
    for i, (row, score) in enumerate((row, score) for row, score in scores if row.name not in at):
        panel.axhline(score.mean, color=f"C{2 + i}", linestyle=("--", ":", "-.")[i % 3], label=row.label)
    panel.grid(alpha=0.3)


def extrapolation(rows: Sequence[Row], found: Finished) -> Figure:
    """Perplexity of held-out text against the length of its rows, a line a row of the table (Press et al.
    2022).
    """
    figure = Figure(figsize=(6.4, 4.2), layout="constrained")
    axis = figure.subplots()
    at = {row.label: points for row in rows if (points := lengths(found[row.name]))}
    for (label, points), marker in zip(at.items(), cycle("osv^DP*X"), strict=False):
        means, spread = [s.mean for s in points.values()], [s.std or 0.0 for s in points.values()]
        axis.errorbar(list(points), means, yerr=spread, marker=marker, capsize=3, label=label)
    times = next(iter(at.values()))
    axis.set(xscale="log", yscale="log", xlabel="length of rows, over that of training")
    axis.set_xticks(list(times), [f"{n} ×" for n in times])
    axis.xaxis.minorticks_off()
    axis.yaxis.set_major_formatter(LogFormatter())
    # not 10^2 alone
    axis.yaxis.set_minor_formatter(LogFormatter(labelOnlyBase=False, minor_thresholds=(1, 0.5)))
    axis.set_ylabel("perplexity of held-out text")
    axis.grid(alpha=0.3, which="both")
    axis.legend()
    return figure


def training(rows: Sequence[Row], lines: Mapping[str, Curves]) -> Figure:
    """A panel for each loss and score that was watched over steps, a color a row, a line a seed."""
    kinds, colors = (
        list(dict.fromkeys(kind for drawn in lines.values() for kind in drawn)),
        colormaps["tab20"].colors,
    )
    shape = (-(-len(kinds) // 3), 3)
    figure = Figure(figsize=(11, 3 * shape[0]), layout="constrained")
    for panel, kind in zip_longest(figure.subplots(*shape, squeeze=False).flat, kinds):
        panel.set_visible(kind is not None)
        for row, color in zip(rows, cycle([*colors[::2], *colors[1::2]]), strict=False):
            for j, line in enumerate(lines[row.name].get(kind, ())):
                label = row.label if j == 0 else None
                panel.plot(*zip(*line, strict=True), color=color, linewidth=1, alpha=0.8, label=label)
        panel.set(title=kind, xlabel="step")
        panel.grid(alpha=0.3)
    _legend(figure)
    return figure


def _legend(figure: Figure) -> None:
    """What is labelled in any panel, once."""
    pairs = [axis.get_legend_handles_labels() for axis in figure.axes]
    named = {
        label: handle for handles, labels in pairs for handle, label in zip(handles, labels, strict=True)
    }
    if named:
        figure.legend(named.values(), named, loc="outside right")

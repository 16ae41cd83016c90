"""Pictures of reports."""

from collections import Counter
from collections.abc import Iterable, Mapping
from io import BytesIO
from itertools import cycle, zip_longest
from pathlib import Path

from experiments.experiment import Row, Table
from experiments.registry import REGISTRY, baseline_of, build
from experiments.results import Curves, Score, lengths, scores
from experiments.sheets import Finished, columns_of
from experiments.t5.tables import BASELINE_STD
from lm.config import diff, leaves

PAPER = "Raffel et al. 2020"


def draw(table: Table, found: Finished, lines: Mapping[str, Curves], scale: str, folder: Path) -> list[str]:
    """Write every picture that ``table`` has results for into ``folder``; their names."""
    name, axis = table.name.replace("/", "-"), axis_of(table, scale)
    kinds = {}
    if columns_of(table, found):
        kinds[name] = _panels(table, found, None)
        if axis and sum(bool(found[row]) for row in axis[1]) > 1:
            kinds[f"{name}-axis"] = _panels(table, found, axis)
    if any(lengths(found[row.name]) for row in table.rows):
        kinds[f"{name}-lengths"] = extrapolation(table, found)
    if any(lines.values()):
        kinds[f"{name}-curves"] = training(table, lines)
    for file, figure in kinds.items():
        written = BytesIO()
        figure.savefig(written, dpi=130)
        _pyplot().close(figure)
        (folder / f"{file}.png").write_bytes(written.getvalue())
    return [f"{file}.png" for file in kinds]


def _pyplot():
    import matplotlib  # slow to import, and only reports need it

    matplotlib.use("Agg")
    from matplotlib import pyplot

    return pyplot


def axis_of(table: Table, scale: str) -> tuple[str, dict[str, float]] | None:
    """The setting that most rows differ in and in nothing else, if it is a number, and each such row's value of it."""
    base = build(baseline_of(table.rows[0].name), scale)
    built = {row.name: build(row.name, scale) for row in table.rows}
    changed = {name: {p: new for p, (_, new) in diff(base, e).items()} for name, e in built.items()}
    numbers = {path for new in changed.values() for path, value in new.items() if type(value) in (int, float)}
    best: tuple[str, dict[str, float]] = ("", {})
    for path in sorted(numbers):
        rest = {n: tuple((p, v) for p, v in new.items() if p != path) for n, new in changed.items()}
        common = Counter(rest[n] for n, new in changed.items() if path in new).most_common(1)[0][0]
        at = {n: dict(leaves(built[n]))[path] for n in built if rest[n] == common}
        if len(set(at.values())) > max(2, len(set(best[1].values()))):
            best = (path, at)
    if not best[0]:
        return None
    return best[0], {n: x for n, x in best[1].items() if x > 0 or not _logarithmic(best[1].values())}


def _logarithmic(values: Iterable[float]) -> bool:
    positive = [value for value in values if value > 0]
    return max(positive) >= 8 * min(positive)


def _panels(table: Table, found: Finished, axis: tuple[str, dict[str, float]] | None):
    """A panel a column, ours above and the paper's below; against a setting, or all rows one under another."""
    pyplot, columns = _pyplot(), columns_of(table, found)
    base = REGISTRY[baseline_of(table.rows[0].name)]
    who = ("ours", PAPER) if base.paper else ("ours",)
    high = 2.4 if axis else 0.8 + 0.32 * len(table.rows)
    figure, axes = pyplot.subplots(
        len(who), len(columns), figsize=(2.9 * len(columns) + 1.6, len(who) * high + 0.6), squeeze=False,
        sharey=not axis, sharex="all" if axis else False, layout="constrained",
    )  # fmt: skip
    for column, panels in zip(columns, axes.T, strict=True):
        ours = {r.name: [run.columns[column] for run in found[r.name] if column in run.columns] for r in table.rows}
        theirs = {row.name: [row.paper[column]] for row in table.rows if column in row.paper}
        baselines = (scores(found[base.name]).get(column), Score(base.paper.get(column, 0.0), BASELINE_STD[column]))
        panels[0].set_title(column)
        for panel, values, baseline, color in zip(
            panels, (ours, theirs), baselines, ("tab:blue", "tab:orange"), strict=False
        ):
            values = {row.name: values[row.name] for row in table.rows if values.get(row.name)}
            if axis:
                _against(panel, table, axis, values, color)
            else:
                _dots(panel, table.rows, values, baseline, color)
    for panel, whose in zip(axes[:, 0], who, strict=True):
        panel.set_ylabel(whose, fontweight="bold")
        if not axis:
            panel.set_yticks(range(len(table.rows)), [row.label for row in table.rows])
            panel.set_ylim(len(table.rows) - 0.4, -0.6)
    if axis:
        figure.supxlabel(axis[0], fontsize="medium")
        _legend(figure)
    figure.suptitle(f"{table.title} ({table.name})")
    return figure


def _dots(panel, rows: tuple[Row, ...], values: Mapping[str, list[float]], baseline: Score | None, color: str) -> None:
    """Every seed as a faint dot, the mean as a full one with its deviation; a line and a band mark the baseline."""
    for place, row in enumerate(rows):
        if seeds := values.get(row.name):
            score = Score.of(seeds)
            panel.scatter(seeds, [place] * len(seeds), color=color, s=14, alpha=0.35)
            panel.errorbar(score.mean, place, xerr=score.std, fmt="o", color=color, capsize=3)
    panel.grid(axis="x", alpha=0.3)
    if baseline is not None:
        panel.axvline(baseline.mean, color="grey", linewidth=1, linestyle="--")
        band = 2 * (baseline.std or 0.0)
        panel.axvspan(baseline.mean - band, baseline.mean + band, color="grey", alpha=0.12, linewidth=0)


def _against(
    panel, table: Table, axis: tuple[str, Mapping[str, float]], values: Mapping[str, list[float]], color: str
) -> None:
    """Scores against a setting; rows that do not lie on its axis are horizontal lines."""
    at = axis[1]
    on = [(at[name], Score.of(values[name])) for name in sorted(at, key=at.get) if name in values]
    means, spread = [score.mean for _, score in on], [score.std or 0.0 for _, score in on]
    panel.errorbar([x for x, _ in on], means, yerr=spread, marker="o", color=color, capsize=3)
    for i, row in enumerate(row for row in table.rows if row.name not in at):
        if row.name in values:
            mean = Score.of(values[row.name]).mean
            panel.axhline(mean, color=f"C{2 + i}", linestyle=("--", ":", "-.")[i % 3], label=row.label)
    if _logarithmic(at.values()):
        panel.set_xscale("log", base=2)
    panel.grid(alpha=0.3)


def extrapolation(table: Table, found: Finished):
    """Perplexity of held-out text against the length of its rows, a line a row of the table (Press et al. 2022)."""
    figure, axis = _pyplot().subplots(figsize=(6.4, 4.2), layout="constrained")
    at = {row.label: lengths(found[row.name]) for row in table.rows}
    for (label, points), marker in zip(at.items(), cycle("osv^DP*X"), strict=False):
        if points:
            means, spread = [s.mean for s in points.values()], [s.std or 0.0 for s in points.values()]
            axis.errorbar(list(points), means, yerr=spread, marker=marker, capsize=3, label=label)
    times = next(filter(None, at.values()))
    axis.set_xscale("log", base=2)
    axis.set_xticks(list(times), [f"{n} ×" for n in times])
    axis.set_yscale("log")
    axis.set_xlabel("length of rows, over that of training")
    axis.set_ylabel("perplexity of held-out text")
    axis.grid(alpha=0.3, which="both")
    axis.legend()
    figure.suptitle(f"{table.title} ({table.name})")
    return figure


def _legend(figure) -> None:
    """What is labelled in any panel, once."""
    pairs = [axis.get_legend_handles_labels() for axis in figure.axes]
    named = {label: handle for handles, labels in pairs for handle, label in zip(handles, labels, strict=True)}
    if named:
        figure.legend(named.values(), named, loc="outside right")


def training(table: Table, lines: Mapping[str, Curves]):
    """A panel for each loss and score that was watched over steps, a color a row, a line a seed."""
    kinds = list(dict.fromkeys(kind for drawn in lines.values() for kind in drawn))
    shape = (-(-len(kinds) // 3), 3)
    figure, axes = _pyplot().subplots(*shape, figsize=(11, 3 * shape[0]), squeeze=False, layout="constrained")
    for panel, kind in zip_longest(axes.flat, kinds):
        panel.set_visible(kind is not None)
        for i, row in enumerate(table.rows):
            for j, line in enumerate(lines[row.name].get(kind, ())):
                label = row.label if j == 0 else None
                panel.plot(*zip(*line, strict=True), color=f"C{i % 10}", linewidth=1, alpha=0.8, label=label)
        panel.set(title=kind, xlabel="step")
        panel.grid(alpha=0.3)
    _legend(figure)
    figure.suptitle(f"{table.title} ({table.name}): training")
    return figure

"""Pictures of reports."""

from collections.abc import Mapping
from pathlib import Path

from experiments.experiment import Row, Table
from experiments.registry import REGISTRY, baseline_of
from experiments.results import Result, Score, lengths, scores
from experiments.t5.tables import BASELINE_STD, COLUMNS


def _pyplot():
    import matplotlib  # slow to import, and only reports need it

    matplotlib.use("Agg")
    from matplotlib import pyplot

    return pyplot


def plot(table: Table, found: Mapping[str, list[Result]], path: Path) -> None:
    """A dot plot: rows down, one panel a column, ours above and the paper's below; a line marks the baseline."""
    pyplot = _pyplot()
    rows = list(reversed(table.rows))
    ours = [scores(found[row.name]) for row in rows]
    columns = [c for c in COLUMNS if any(c in score for score in ours)]
    height = 1.1 + 0.32 * len(rows)
    base = REGISTRY[baseline_of(rows[0].name)]
    who = ("ours", "Raffel et al. 2020") if base.paper else ("ours",)
    figure, axes = pyplot.subplots(
        len(who),
        len(columns),
        figsize=(2.9 * len(columns) + 1.6, len(who) * height),
        sharey=True,
        squeeze=False,
        layout="constrained",
    )
    for column, (top, *bottom) in zip(columns, axes.T, strict=True):
        _dots(top, found, rows, column)
        _line(top, scores(found[base.name]).get(column))
        for axis in bottom:
            axis.scatter([row.paper[column] for row in rows], range(len(rows)), marker="D", color="tab:orange", s=28)
            _line(axis, Score(base.paper[column], BASELINE_STD[column]))
        top.set_title(column)
        for axis in (top, *bottom):
            axis.grid(axis="x", alpha=0.3)
            axis.set_ylim(-0.6, len(rows) - 0.4)
    for axis, whose in zip(axes[:, 0], who, strict=True):
        axis.set_yticks(range(len(rows)), [row.label for row in rows])
        axis.set_ylabel(whose, fontweight="bold")
    figure.suptitle(f"{table.title} ({table.name})")
    figure.savefig(path, dpi=130)
    pyplot.close(figure)


def _dots(axis, found: Mapping[str, list[Result]], rows: list[Row], column: str) -> None:
    """Every seed as a faint dot, the mean as a full one with its deviation."""
    for place, row in enumerate(rows):
        seeds = [result.columns[column] for result in found[row.name]]
        if seeds:
            score = Score.of(seeds)
            axis.scatter(seeds, [place] * len(seeds), color="tab:blue", s=14, alpha=0.35)
            axis.errorbar(score.mean, place, xerr=score.std, fmt="o", color="tab:blue", capsize=3)


def _line(axis, baseline: Score | None) -> None:
    """The baseline's score, with a band of two standard deviations where it is known."""
    if baseline is not None:
        axis.axvline(baseline.mean, color="grey", linewidth=1, linestyle="--")
        if baseline.std:
            axis.axvspan(
                baseline.mean - 2 * baseline.std,
                baseline.mean + 2 * baseline.std,
                color="grey",
                alpha=0.12,
                linewidth=0,
            )


def extrapolation(table: Table, found: Mapping[str, list[Result]], path: Path) -> None:
    """Perplexity of held-out text against the length of its rows, a line a row of the table (Press et al. 2022)."""
    pyplot = _pyplot()
    figure, axis = pyplot.subplots(figsize=(6.4, 4.2), layout="constrained")
    for row, marker in zip(table.rows, "osv^DP*X", strict=False):
        at = lengths(found[row.name])
        if at:
            means = [score.mean for score in at.values()]
            spread = [score.std or 0.0 for score in at.values()]
            axis.errorbar(list(at), means, yerr=spread, marker=marker, capsize=3, label=row.label)
    axis.set_xscale("log", base=2)
    axis.set_xticks(list(at := next(filter(None, (lengths(found[row.name]) for row in table.rows)))))
    axis.set_xticklabels([f"{times} ×" for times in at])
    axis.set_yscale("log")
    axis.set_xlabel("length of rows, over that of training")
    axis.set_ylabel("perplexity of held-out text")
    axis.grid(alpha=0.3, which="both")
    axis.legend()
    figure.suptitle(f"{table.title} ({table.name})")
    figure.savefig(path, dpi=130)
    pyplot.close(figure)

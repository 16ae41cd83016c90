"""Finished runs as the paper's tables: ours beside the paper's, as Markdown and as a plot."""

from collections.abc import Mapping
from pathlib import Path

from experiments.experiment import Row, Table
from experiments.registry import BASELINE_ROW, REGISTRY, build
from experiments.results import Result, Score, losses, results, scores
from experiments.t5.tables import BASELINE_STD, COLUMNS
from lm.config import SettingError, diff


def write_report(tables: list[Table], scale: str, runs: Path) -> Path:
    """Write ``report.md`` and one plot a table into ``runs/scale``; SettingError if no row has finished."""
    found = {row.name: results(row, scale, runs) for table in tables for row in table.rows}
    found[BASELINE_ROW] = results(REGISTRY[BASELINE_ROW], scale, runs)
    if not any(found[row.name] for table in tables for row in table.rows):
        raise SettingError(
            f"no run of {', '.join(table.name for table in tables)} at scale {scale} has finished under {runs}; "
            f"train them with: lm sweep '{tables[0].name}' --scale {scale}"
        )
    name = tables[0].name.replace("/", "-") if len(tables) == 1 else "t5"
    folder = runs / scale / "reports" / name
    folder.mkdir(parents=True, exist_ok=True)
    sections = [_HEADER.format(scale=scale, setup=_setup(scale), note=_stand_ins(found))]
    for table in tables:
        picture = folder / f"{table.name.replace('/', '-')}.png"
        sections.append(section(table, found, scale, picture.name))
        if any(found[row.name] for row in table.rows):
            plot(table, found, picture)
    path = folder / "report.md"
    path.write_text("\n\n".join(sections) + "\n")
    return path


_HEADER = """# The T5 study at scale `{scale}`

{setup}

Each cell: ours, mean ± standard deviation over seeds (difference to the baseline) │ the paper's (difference to its
baseline). Within a column of ours, **bold** marks the scores within two standard deviations of the best. The held-out
loss is that of pre-training, in nats a target token: other objectives predict other targets, so compare like with like.

{note}"""


def _setup(scale: str) -> str:
    e = build(BASELINE_ROW, scale)
    return (
        f"Baseline: {e.model.num_encoder_layers}+{e.model.num_decoder_layers} layers of width {e.model.d_model}, "
        f"{e.pretraining.steps:,} steps of {e.pretraining.batch_size} × {e.data.inputs_length} tokens on "
        f"`{e.data.corpus}`, then {e.finetuning.steps:,} steps of fine-tuning on {', '.join(e.tuning.mixtures)}."
    )


def _stand_ins(found: Mapping[str, list[Result]]) -> str:
    """Which task stands under which of the paper's columns."""
    result = next(runs[0] for runs in found.values() if runs)
    lines = [
        f"- **{column}**, {', '.join(f'`{t}`' for t, best in result.tasks.items() if best['column'] == column)}: "
        f"{', '.join(sorted({best['metric'] for best in result.tasks.values() if best['column'] == column}))}; "
        f"the paper's: {COLUMNS[column]}"
        for column in COLUMNS
        if column in result.columns
    ]
    return "What stands under each column:\n" + "\n".join(lines)


def section(table: Table, found: Mapping[str, list[Result]], scale: str, picture: str) -> str:
    """One table as Markdown."""
    rows = [(row, scores(found[row.name])) for row in table.rows]
    columns = [c for c in COLUMNS if any(c in ours for _, ours in rows)]
    baseline, baseline_paper = scores(found[BASELINE_ROW]), REGISTRY[BASELINE_ROW].paper
    best = {c: _threshold([ours[c] for _, ours in rows if c in ours]) for c in columns}
    lines = [
        f"## {table.name}: {table.title}",
        "",
        "| row | changes | " + " | ".join(columns) + " | held-out loss | seeds | cost a run |",
        "|---" * (len(columns) + 5) + "|",
    ]
    for row, ours in rows:
        cells = [
            f"{_ours(ours.get(c), baseline.get(c), best[c])} │ "
            f"{row.paper[c]:.2f}{_delta(row.paper[c], baseline_paper[c])}"
            for c in columns
        ]
        lines.append(
            f"| {row.label} | {_changes(row, scale)} | {' | '.join(cells)} | "
            f"{_plain(losses(found[row.name]))} | {len(found[row.name])} | "
            f"{_cost(found[row.name])} |"
        )
    yardstick = ", ".join(f"{c} {BASELINE_STD[c]}" for c in columns)
    lines += ["", f"The paper's standard deviation over ten baseline runs: {yardstick}.", ""]
    return "\n".join(lines + [f"![{table.title}]({picture})"] * any(ours for _, ours in rows))


def _changes(row: Row, scale: str) -> str:
    changed = diff(build(BASELINE_ROW, scale), build(row.name, scale))
    return "<br>".join(f"`{path}={new}`" for path, (_, new) in changed.items()) or "(the baseline)"


def _threshold(values: list[Score]) -> float:
    """The least score that is not significantly below the best; with one seed a run, the best itself."""
    top = max(values, key=lambda score: score.mean)
    if top.mean == min(score.mean for score in values):
        return float("inf")  # all alike: none stands out
    return top.mean - 2 * (top.std or 0.0)


def _ours(score: Score | None, baseline: Score | None, threshold: float) -> str:
    if score is None:
        return "–"
    text = f"{score.mean:.2f}" + (f" ± {score.std:.2f}" if score.std is not None else "")
    text = f"**{text}**" if score.mean >= threshold else text
    return text + (_delta(score.mean, baseline.mean) if baseline else "")


def _plain(score: Score | None) -> str:
    if score is None:
        return "–"
    return f"{score.mean:.3f}" + (f" ± {score.std:.3f}" if score.std is not None else "")


def _delta(value: float, baseline: float) -> str:
    return f" ({value - baseline:+.2f})" if value != baseline else ""


def _cost(found: list[Result]) -> str:
    if not found:
        return "–"
    seconds = sum(result.seconds for result in found) / len(found)
    tokens = sum(result.tokens for result in found) / len(found)
    return f"{seconds / 60:.1f} min, {tokens / 1e6:.1f} M tokens"


def plot(table: Table, found: Mapping[str, list[Result]], path: Path) -> None:
    """A dot plot: rows down, one panel a column, ours above and the paper's below; a line marks the baseline."""
    import matplotlib  # slow to import, and only reports need it

    matplotlib.use("Agg")
    from matplotlib import pyplot

    rows = list(reversed(table.rows))
    ours = [scores(found[row.name]) for row in rows]
    columns = [c for c in COLUMNS if any(c in score for score in ours)]
    height = 1.1 + 0.32 * len(rows)
    figure, axes = pyplot.subplots(
        2,
        len(columns),
        figsize=(2.9 * len(columns) + 1.6, 2 * height),
        sharey=True,
        squeeze=False,
        layout="constrained",
    )
    for column, (top, bottom) in zip(columns, axes.T, strict=True):
        _dots(top, found, rows, column)
        _line(top, scores(found[BASELINE_ROW]).get(column))
        bottom.scatter([row.paper[column] for row in rows], range(len(rows)), marker="D", color="tab:orange", s=28)
        _line(bottom, Score(REGISTRY[BASELINE_ROW].paper[column], BASELINE_STD[column]))
        top.set_title(column)
        for axis in (top, bottom):
            axis.grid(axis="x", alpha=0.3)
            axis.set_ylim(-0.6, len(rows) - 0.4)
    for axis, who in zip(axes[:, 0], ("ours", "Raffel et al. 2020"), strict=True):
        axis.set_yticks(range(len(rows)), [row.label for row in rows])
        axis.set_ylabel(who, fontweight="bold")
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

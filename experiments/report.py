"""Finished runs as the paper's tables: ours beside the paper's, as Markdown and as a plot."""

from collections.abc import Mapping
from pathlib import Path

from experiments.experiment import Row, Table
from experiments.plots import extrapolation, plot
from experiments.registry import REGISTRY, baseline_of, build
from experiments.results import Result, Score, lengths, losses, results, scores
from experiments.t5.tables import BASELINE_STD, COLUMNS
from lm.config import SettingError, diff


def write_report(tables: list[Table], scale: str, runs: Path) -> Path:
    """Write ``report.md`` and one plot a table into ``runs/scale``; SettingError if no row has finished."""
    found = {row.name: results(row, scale, runs) for table in tables for row in table.rows}
    for name in {baseline_of(table.rows[0].name) for table in tables}:
        found[name] = results(REGISTRY[name], scale, runs)
    if not any(found[row.name] for table in tables for row in table.rows):
        raise SettingError(
            f"no run of {', '.join(table.name for table in tables)} at scale {scale} has finished under {runs}; "
            f"train them with: lm sweep '{tables[0].name}' --scale {scale}"
        )
    name = tables[0].name.replace("/", "-") if len(tables) == 1 else tables[0].name.split("/")[0]
    folder = runs / scale / "reports" / name
    folder.mkdir(parents=True, exist_ok=True)
    baselines = dict.fromkeys(baseline_of(table.rows[0].name) for table in tables)
    setup = "\n".join(_setup(name, scale) for name in baselines)
    kind, beside = "Classic models", ""
    if tables[0].name.startswith("t5/"):
        kind, beside = "The T5 study", " │ the paper's (difference to its baseline)"
    sections = [_HEADER.format(kind=kind, beside=beside, scale=scale, setup=setup, note=stand_ins(tables, found))]
    for table in tables:
        picture = folder / f"{table.name.replace('/', '-')}.png"
        sections.append(section(table, found, scale, picture.name))
        if any(found[row.name] for row in table.rows):
            draw = extrapolation if any(lengths(found[row.name]) for row in table.rows) else plot
            draw(table, found, picture)
    path = folder / "report.md"
    path.write_text("\n\n".join(sections) + "\n")
    return path


_HEADER = """# {kind} at scale `{scale}`

{setup}

Each cell: ours, mean ± standard deviation over seeds (difference to the baseline){beside}.
Within a column of ours, **bold** marks the scores within two standard deviations of the best. The held-out
loss is that of pre-training, in nats a target token: other objectives predict other targets, so compare like with like.

{note}"""


def _setup(baseline: str, scale: str) -> str:
    e = build(baseline, scale)
    layers = [e.model.num_encoder_layers] * e.model.has_encoder + [e.model.num_decoder_layers] * e.model.has_decoder
    return (
        f"Baseline `{baseline}`: {'+'.join(map(str, layers))} layers of width {e.model.d_model}, "
        f"{e.pretraining.steps:,} steps of {e.pretraining.batch_size} × {e.data.inputs_length} tokens on "
        f"`{e.data.corpus}`, then {e.finetuning.steps:,} steps of fine-tuning on "
        f"{', '.join(e.tuning.mixtures + e.tuning.heads) or 'nothing'}."
    )


def stand_ins(tables: list[Table], found: Mapping[str, list[Result]]) -> str:
    """Which task stands under which of the paper's columns."""
    paper = any(row.paper for table in tables for row in table.rows)
    result = next(runs[0] for runs in found.values() if runs)
    lines = [
        f"- **{column}**, {', '.join(f'`{t}`' for t, best in result.tasks.items() if best['column'] == column)}: "
        f"{', '.join(sorted({best['metric'] for best in result.tasks.values() if best['column'] == column}))}"
        + f"; the paper's: {COLUMNS[column]}"
        * paper
        for column in COLUMNS
        if column in result.columns
    ]
    return "\n".join(["What stands under each column:", *lines]) if lines else ""


def section(table: Table, found: Mapping[str, list[Result]], scale: str, picture: str) -> str:
    """One table as Markdown."""
    rows = [(row, scores(found[row.name])) for row in table.rows]
    columns = [c for c in COLUMNS if any(c in ours for _, ours in rows)]
    longer = next((list(lengths(found[row.name])) for row, _ in rows if lengths(found[row.name])), [])
    base = REGISTRY[baseline_of(table.rows[0].name)]
    baseline = scores(found[base.name])
    best = {c: _threshold([ours[c] for _, ours in rows if c in ours]) for c in columns}
    perplexities = [f"perplexity at {times} ×" for times in longer]
    heads = ["row", "changes", *columns, *perplexities, "held-out loss", "seeds", "cost a run"]
    lines = [
        f"## {table.name}: {table.title}",
        "",
        f"| {' | '.join(heads)} |",
        "|---" * len(heads) + "|",
    ]
    for row, ours in rows:
        cells = [
            _ours(ours.get(c), baseline.get(c), best[c])
            + (f" │ {row.paper[c]:.2f}{_delta(row.paper[c], base.paper[c])}" if row.paper else "")
            for c in columns
        ]
        perplexity = lengths(found[row.name])
        cells += [_plain(perplexity.get(n)) for n in longer]
        lines.append(
            f"| {row.label} | {_changes(row, scale)} | {' | '.join(cells)} | "
            f"{_plain(losses(found[row.name]))} | {len(found[row.name])} | "
            f"{_cost(found[row.name])} |"
        )
    yardstick = ", ".join(f"{c} {BASELINE_STD[c]}" for c in columns)
    lines += ["", f"The paper's standard deviation over ten baseline runs: {yardstick}." * bool(base.paper), ""]
    return "\n".join(lines + [f"![{table.title}]({picture})"] * any(found[row.name] for row, _ in rows))


def _changes(row: Row, scale: str) -> str:
    changed = diff(build(baseline_of(row.name), scale), build(row.name, scale))
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

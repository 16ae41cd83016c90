"""Finished runs as the paper's tables: ours beside the paper's, as Markdown, CSV, pictures and a page for a browser."""

import csv
import re
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from io import StringIO
from pathlib import Path

from experiments.experiment import Table
from experiments.findings import differences, orders
from experiments.page import REFRESH, Section, details, page
from experiments.plots import draw
from experiments.registry import REGISTRY, baseline_of, build
from experiments.results import Result, Runs, curves, results, roots, run_folder
from experiments.sheets import Finished, Sheet, markdown, scoreboard
from experiments.t5.tables import COLUMNS
from lm.config import SettingError


@dataclass(frozen=True)
class Report:
    """What was written, and what a terminal shows of it."""

    path: Path  # of report.md
    sheets: Mapping[str, list[Sheet]]  # table -> its scores, places and rank correlations
    left_out: list[str]  # why, a run each


def collect(tables: list[Table], scale: str, runs: Runs) -> tuple[Finished, list[str]]:
    """The finished runs of every row and baseline of ``tables``, and what is said of those that do not count."""
    left_out: dict[str, None] = {}
    names = dict.fromkeys(row.name for table in tables for row in table.rows)
    names |= {baseline_of(name): None for name in names}
    for name in names:
        build(name, scale)
    try:
        there = [root for root in roots(runs) if root.is_dir()]
    except (ImportError, OSError) as error:  # of a bucket
        raise SettingError(f"--runs: {' '.join(map(str, roots(runs)))} cannot be read ({error})") from error
    left_out |= {f"--runs: there is no folder {root}": None for root in roots(runs) if root not in there}
    found = {name: results(REGISTRY[name], scale, there, lambda text: left_out.setdefault(text)) for name in names}
    if not any(found[row.name] for table in tables for row in table.rows):
        why = "".join(f"\n- {line}" for line in left_out)
        raise SettingError(
            f"no run of {', '.join(table.name for table in tables)} at scale {scale} has finished under "
            f"{', '.join(map(str, roots(runs)))}; train them with: lm sweep '{tables[0].name}' --scale {scale}{why}"
        )
    return found, list(left_out)


def write_report(tables: list[Table], scale: str, runs: Runs, refresh: float = 0) -> Report:
    """Write the report into the first folder of ``runs``; SettingError if no row has finished.

    The page for a browser loads itself anew every ``refresh`` seconds; 0: never.
    """
    found, left_out = collect(tables, scale, runs)
    name = tables[0].name.replace("/", "-") if len(tables) == 1 else tables[0].name.split("/")[0]
    folder = roots(runs)[0] / scale / "reports" / name
    folder.mkdir(parents=True, exist_ok=True)
    top, sections, sheets = header(tables, found, scale, left_out), [], {}
    for table in tables:
        places, note = orders(table, found) if any(row.paper for row in table.rows) else ([], "")
        sheets[table.name] = [scoreboard(table, found, scale), *places]
        lines = {row.name: curves(found[row.name]) for row in table.rows}
        pictures = draw(table, found, lines, scale, folder)
        text = section(table, sheets[table.name], note, differences(table, found), pictures)
        rows = [details(row, found[row.name], lines[row.name], scale) for row in table.rows if found[row.name]]
        sections.append(Section(table.name, text, rows))
    path = folder / "report.md"
    _write(path, "\n\n".join([top, *(each.markdown for each in sections)]) + "\n")
    _write(path.with_suffix(".csv"), table_csv(tables, found))
    _write(path.with_suffix(".html"), page(top, sections, lambda file: (folder / file).read_bytes(), refresh))
    return Report(path, sheets, left_out)


def header(tables: list[Table], found: Finished, scale: str, left_out: list[str]) -> str:
    """What stands above all tables."""
    baselines = dict.fromkeys(baseline_of(table.rows[0].name) for table in tables)
    paper = any(row.paper for table in tables for row in table.rows)
    lines = [f"# {'The T5 study' if paper else 'Classic models'} at scale `{scale}`"]
    lines += ["\n".join(_setup(name, scale) for name in baselines), _LEGEND, stand_ins(tables, found)]
    if left_out:
        shown = [line.splitlines() for line in left_out]
        lines += ["Not counted:\n\n" + "\n".join(f"- `{'; '.join(map(str.strip, each))}`" for each in shown)]
    return "\n\n".join(filter(None, lines))


_LEGEND = """Each cell: mean ± standard deviation over seeds (difference to the baseline). Within a column of ours, \
**bold** marks the scores within two standard deviations of the best. The held-out loss is that of pre-training, \
in nats a target token: other objectives predict other targets, so compare like with like."""


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
    return "\n".join(["What stands under each column:\n", *lines]) if lines else ""


def section(table: Table, sheets: list[Sheet], order: str, differing: str, pictures: list[str]) -> str:
    """One table as Markdown: its scores, which of them differ, the order of its rows, and its pictures."""
    scores, *places = map(markdown, sheets)
    parts = [f"## {table.name}: {table.title}", scores, differing, *places, order]
    return "\n\n".join(filter(None, [*parts, *(f"![{table.title}]({picture})" for picture in pictures)]))


def table_csv(tables: list[Table], found: Finished) -> str:
    """A line for every row, seed and column."""
    written = StringIO()
    out = csv.writer(written, lineterminator="\n")
    out.writerow("table row label seed column score paper held_out_loss seconds tokens".split())
    for table, row in [(each, row) for each in tables for row in each.rows]:
        for run in found[row.name]:
            cost = (run.held_out_loss, round(run.seconds, 3), run.tokens)
            for column, score in run.columns.items() or [("", "")]:
                paper = row.paper.get(column)
                out.writerow([table.name, row.name, row.label, run.seed, column, score, paper, *cost])
    return written.getvalue()


POLL = 5.0  # between looks at the folders of runs [s]


def watch(tables: list[Table], scale: str, runs: Runs, say: Callable[[str], object]) -> None:
    """Write the report whenever a run or its metrics have changed, until interrupted.

    It takes a tenth of a core at most, so that trainings beside it keep theirs.
    """
    seen, wait, page = None, POLL, None
    try:
        while True:
            began, now = time.process_time(), _stamps(tables, scale, runs)
            if now != seen:
                seen = now
                try:
                    page = write_report(tables, scale, runs, refresh=wait).path.with_suffix(".html")
                    said = f"wrote {page}"
                except SettingError as error:  # nothing has finished yet
                    said = str(error)
                say(f"{time.strftime('%H:%M:%S')} {said}")
            wait = max(POLL, 9 * (time.process_time() - began))
            time.sleep(wait)
    except KeyboardInterrupt:
        if page is not None:
            _write(page, re.sub(REFRESH.format(r"\d+"), "", page.read_text(), count=1))
        say("no longer watching")


def _write(path: Path, text: str) -> None:
    """Write all or nothing: a browser never reads half a page."""
    new = path.with_name(path.name + ".new")
    new.write_text(text)
    new.replace(path)


def _stamps(tables: list[Table], scale: str, runs: Runs) -> dict[str, int]:
    """The size of every file that a report is made of."""
    inside = ("settings.json", "scores.json", "finetuning/*/metrics.jsonl", "finetuning/*/*/metrics.jsonl")
    names = {name for table in tables for row in table.rows for name in (row.name, baseline_of(row.name))}
    rows = {run_folder(Path(), scale, name, 0, {}).parent for name in names}
    patterns = [f"{scale}/pretraining/*/metrics.jsonl", *(f"{row}/seed-*/{file}" for row in rows for file in inside)]
    return {str(path): path.stat().length for root in roots(runs) for each in patterns for path in root.glob(each)}

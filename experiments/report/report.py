"""Finished runs as the paper's tables: ours beside the paper's, as Markdown, CSV, pictures and a page for a
browser.
"""

import csv
import re
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from io import StringIO
from itertools import groupby
from pathlib import Path

from experiments.console import CONSOLE, Sheet, markdown, show_sheet
from experiments.report.comparison import DRAWS, LEVEL
from experiments.report.findings import differences, orders
from experiments.report.page import REFRESH, Section, details, page
from experiments.report.plots import draw
from experiments.report.results import Runs, curves, results, roots
from experiments.report.sheets import Finished, base_of, scoreboard
from experiments.report.unlike import marked, note, unlike
from experiments.runs.result import Result
from experiments.study.experiment import Changes, Table
from experiments.study.registry import REGISTRY, TABLES, baseline_of, build, with_overrides
from experiments.study.t5.tables import COLUMNS
from lm.files import write
from lm.settings import SettingError


@dataclass(frozen=True)
class Report:
    """What was written, and what a terminal shows of it."""

    path: Path  # of report.md
    sheets: Mapping[str, list[Sheet]]  # table -> its scores and, from three rows on, their places
    notes: Mapping[str, list[str]]  # table -> what is said below
    left_out: list[str]  # what does not count, and why


def collect(
    tables: list[Table], scale: str, runs: Runs, given: Changes | None = None
) -> tuple[Finished, list[str]]:
    """The finished runs of every row and baseline of ``tables``, and what is said of those that do not
    count.
    """
    names = dict.fromkeys(row.name for table in tables for row in table.rows)
    names |= {baseline_of(name): None for name in names}
    for name in names:
        build(name, scale, given)
    there = [root for root in roots(runs) if root.is_dir()]
    left_out = {f"--runs: there is no folder {root}": None for root in roots(runs) if root not in there}
    found = {name: results(REGISTRY[name], scale, there, left_out.setdefault, given) for name in names}
    if not any(found[row.name] for table in tables for row in table.rows):
        why = "".join(f"\n- {line}" for line in left_out)
        raise SettingError(
            f"no run of {', '.join(table.name for table in tables)} at scale {scale} has finished under "
            f"{', '.join(map(str, roots(runs)))}; train them with: lm sweep '{tables[0].name}' --scale "
            f"{scale}{why}"
        )
    return found, list(left_out)


def write_report(
    tables: list[Table], scale: str, runs: Runs, refresh: float = 0, given: Changes | None = None
) -> Report:
    """Write the report into the first folder of ``runs``; SettingError if no row has finished.

    The page for a browser loads itself anew every ``refresh`` seconds; 0: never. ``given`` as of ``results``.
    """
    found, left_out = collect(tables, scale, runs, given)
    folder = roots(runs)[0] / scale / "reports" / with_overrides(name_of(tables), given or {})
    folder.mkdir(parents=True, exist_ok=True)
    sections, sheets, notes, damaged = [], {}, {}, dict.fromkeys(left_out)
    for table in begun(tables, found):
        sheet, notes[table.name], places = scoreboard(table, found), [], []
        if base_of(table).paper:
            order, alike = orders(table, found)
            places, notes[table.name] = [order] * bool(order), [differences(table, found), alike]
        others = unlike(table, found, scale)
        labels = {row.label for row in table.rows if row.name in others}
        sheet, *places = sheets[table.name] = [marked(each, labels) for each in (sheet, *places)]
        notes[table.name] += [note(others)] * bool(others)
        lines = {row.name: curves(found[row.name], damaged.setdefault) for row in table.rows}
        shown = [f"Places of the rows, the paper's in brackets:\n\n{markdown(each)}" for each in places]
        pictures = [f"![{table.title}]({file})" for file in draw(table, found, lines, scale, folder)]
        said = [f"## {table.name}: {table.title}", markdown(sheet), *notes[table.name], *shown, *pictures]
        rows = [
            details(row, found[row.name], lines[row.name], scale) for row in table.rows if found[row.name]
        ]
        sections.append(Section(table.name, "\n\n".join(said), rows))
    waiting, left_out = [table.name for table in tables if table.name not in sheets], list(damaged)
    top, path = header(tables, found, scale, left_out, waiting), folder / "report.md"
    if given:
        top += "\n\nIn every row: " + ", ".join(f"`{name}={value}`" for name, value in given.items()) + "."
    write(path, "\n\n".join([top, *(each.markdown for each in sections)]) + "\n")
    write(path.with_suffix(".csv"), table_csv(tables, found))
    write(path.with_suffix(".html"), page(top, sections, lambda file: (folder / file).read_bytes(), refresh))
    return Report(path, sheets, notes, left_out)


def name_of(tables: list[Table]) -> str:
    """What a report on ``tables`` is called, every set of them otherwise: t5-1-baseline, t5-1+2+4, t5,
    bert+gpt.
    """
    if len(tables) == 1:
        return tables[0].name.replace("/", "-")
    parts = []
    for group, some in groupby((table.name for table in tables), _group):
        asked, whole = list(some), [table.name for table in TABLES if _group(table.name) == group]
        numbers = [] if asked == whole else [name.split("/")[1].split("-")[0] for name in asked]
        parts.append(f"{group}-{'+'.join(numbers)}" if numbers else group)
    return "+".join(parts)


def _group(name: str) -> str:
    return name.split("/")[0]


def begun(tables: list[Table], found: Finished) -> list[Table]:
    """Those with more than their baseline; if there is none, the first that has it."""
    changed = [[row for row in each.rows if row.changes != base_of(each).changes] for each in tables]
    more = [each for each, rows in zip(tables, changed, strict=True) if any(found[row.name] for row in rows)]
    return more or [next(each for each in tables if any(found[row.name] for row in each.rows))]


SCORES = f"""Each row of a table is a change to the baseline; `lm list TABLE` says which. Scores are means \
± standard deviations over seeds{{paper}}. ▲ ▼: above or below the baseline by more than chance explains \
(Student's t test at {1 - LEVEL:.0%} of the two means, with the noise of all rows of the table; rows with \
the same seeds are compared seed by seed). **Bold**: the best row and those that cannot be told from it, \
where others can. One seed cannot be told from noise and gets no mark, and of rows that do not differ one \
in {1 / LEVEL:.0f} gets one by chance. {{rule}}Losses are in nats a target token. That on tasks is of their \
right answers, after fine-tuning: lower is better, and ▲ marks what is better. The held-out loss is of \
pre-training: objectives differ in their targets, so compare it within one objective only."""
ORDER = f"""Kendall's τ (tau-b) tells how alike two orders are: 1 the same, 0 unrelated, -1 reversed; rows \
with the same score share their place. With three rows, one order in six matches the paper's by chance. Its \
interval is of {DRAWS:,} bootstrap draws of seeds: what other seeds of these rows may give; with one seed \
there is none. The average is over columns, each divided by its deviation; the order of the loss on tasks \
is compared with it too."""


def header(tables: list[Table], found: Finished, scale: str, left_out: list[str], waiting: list[str]) -> str:
    """What stands above all tables."""
    paper = any(base_of(table).paper for table in tables)
    texts = (
        (
            ", out of 100, beside the paper's",
            "The paper's marks are by its own rule: two deviations of its baseline. ",
        )
        if paper
        else ("", "")
    )
    lines = [f"# {'The T5 study' if paper else 'Classic models'} at scale `{scale}`"]
    lines += [
        "\n".join(_setup(name, scale) for name in dict.fromkeys(base_of(table).name for table in tables))
    ]
    lines += [stand_ins(tables, found), SCORES.format(paper=texts[0], rule=texts[1]), ORDER * paper]
    if waiting:
        lines += [f"Nothing but the baseline has finished of: {', '.join(waiting)}."]
    if left_out:
        shown = ("; ".join(map(str.strip, line.splitlines())) for line in left_out)
        lines += ["Not counted:\n\n" + "\n".join(f"- `{line}`" for line in shown)]
    return "\n\n".join(filter(None, lines))


def _setup(baseline: str, scale: str) -> str:
    e = build(baseline, scale)
    layers = [e.model.num_encoder_layers] * e.model.has_encoder + [
        e.model.num_decoder_layers
    ] * e.model.has_decoder
    return (
        f"Baseline `{baseline}`: {'+'.join(map(str, layers))} layers of width {e.model.d_model}, "
        "pre-trained on "
        f"`{e.data.corpus}` for {e.pretraining.steps:,} steps of {e.pretraining.batch_size} texts of up to "
        f"{e.data.inputs_length} tokens, then fine-tuned for {e.finetuning.steps:,} steps on each of "
        f"{', '.join(e.tuning.mixtures + e.tuning.heads) or 'no task'}."
    )


def stand_ins(tables: list[Table], found: Mapping[str, list[Result]]) -> str:
    """Which task stands under which of the paper's columns."""
    paper = any(row.paper for table in tables for row in table.rows)
    result, lines = next(runs[0] for runs in found.values() if runs), []
    for column in filter(result.columns.__contains__, COLUMNS):
        under = {name: best["metric"] for name, best in result.tasks.items() if best["column"] == column}
        metrics = ", ".join(sorted({metric.replace("_", " ") for metric in under.values()}))
        theirs = f"; the paper's: {COLUMNS[column]}" * paper
        lines.append(f"- **{column}**: {', '.join(f'`{name}`' for name in under)} ({metrics}){theirs}")
    head = (
        "What is scored in each column"
        + "; of other tasks only the order of rows compares with the paper's" * paper
    )
    return "\n".join([f"{head}:\n", *lines]) if lines else ""


def table_csv(tables: list[Table], found: Finished) -> str:
    """A line for every row, seed and column."""
    written = StringIO()
    out = csv.writer(written, lineterminator="\n")
    out.writerow("table row label seed column score paper task_loss held_out_loss seconds tokens".split())
    for table, row in [(each, row) for each in tables for row in each.rows]:
        for run in found[row.name]:
            cost = (run.task_loss, run.held_out_loss, round(run.seconds, 3), run.tokens)
            for column, score in run.columns.items() or [("", "")]:
                paper = row.paper.get(column)
                out.writerow([table.name, row.name, row.label, run.seed, column, score, paper, *cost])
    return written.getvalue()


def print_report(
    wanted: list[Table], scale: str, runs: tuple[str, ...], given: Changes | None = None
) -> None:
    """Write the report on tables, and print what a terminal shows of it; ``given`` as of ``results``."""
    written = write_report(wanted, scale, runs, given=given)
    titles = {table.name: table.title for table in wanted}
    for name, (scores, *places) in written.sheets.items():
        show_sheet(f"{name}: {titles[name]} (scale {scale})", scores)
        for sheet in places:
            show_sheet("Places: ours (the paper's)", sheet)
        for line in written.notes[name]:
            _say(line)
    for line in written.left_out:
        _say(f"not counted: {line}")
    _say(f"Report: {written.path.parent}/report.md, .html, .csv")


def _say(text: str) -> None:
    CONSOLE.print(text, highlight=False, markup=False, soft_wrap=True)


POLL = 5.0  # between looks at the folders of runs [s]


def watch(tables: list[Table], scale: str, runs: Runs, say: Callable[[str], object] = _say) -> None:
    """Write the report whenever other runs count than before, until interrupted.

    It takes a tenth of a core at most, so that trainings beside it keep theirs.
    """
    roots(runs)  # what cannot be read now will not be readable later
    seen, wait, page = None, POLL, None
    try:
        while True:
            began = time.process_time()
            try:
                if (now := collect(tables, scale, runs)) != seen:
                    page = write_report(tables, scale, runs, refresh=wait).path.with_suffix(".html")
                    said = f"wrote {page}"
            except SettingError as error:  # nothing has finished yet
                said = now = str(error)
            if now != seen:
                say(f"{time.strftime('%H:%M:%S')} {said}")
            seen, wait = now, max(POLL, 9 * (time.process_time() - began))
            time.sleep(wait)
    except KeyboardInterrupt:
        if page is not None:
            write(page, re.sub(REFRESH.format(r"\d+"), "", page.read_text("utf-8"), count=1))
        say("no longer watching")

"""Finished runs as the paper's tables: Markdown, CSV, pictures and a page for a browser."""

import csv
import re
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from io import StringIO
from itertools import groupby
from pathlib import Path

from experiments.console import Sheet, markdown, print_line, show_sheet
from experiments.report.comparison import DRAWS, LEVEL, Finished
from experiments.report.page import REFRESH, Section, details, page
from experiments.report.plots import draw_figures
from experiments.report.results import Folders, curves, results, roots, unlike
from experiments.report.scoreboard import UNLIKE, differences, marked, ranks, scoreboard
from experiments.runs.result import Result
from experiments.study.experiment import Changes, Table
from experiments.study.registry import REGISTRY, TABLES, baseline_of, build, with_overrides
from experiments.study.t5.tables import COLUMNS
from lm.files import write
from lm.settings import SettingError

LOOK_EVERY = 5.0  # between looks at the folders of runs [s]

ABOUT_SCORES = f"""Each row of a table is a change to the baseline; `lm list TABLE` shows which. Scores are \
means ± standard deviations over seeds{{paper}}. ▲ ▼: above or below the baseline by more than chance \
explains (Student's t test at {1 - LEVEL:.0%} of the two means, with the noise of all rows of the table; \
rows with the same seeds are compared seed by seed). **Bold**: the best row and those that cannot be told \
from it, if any row can. One seed cannot be told from noise and gets no mark, and of rows that do not \
differ one in {1 / LEVEL:.0f} gets one by chance. {{rule}}Losses are in nats per target token. The loss on \
tasks is that of their correct answers after fine-tuning: lower is better, and ▲ marks what is better. The \
held-out loss is that of pre-training: objectives differ in their targets, so compare it within one \
objective only."""
ABOUT_ORDER = f"""Kendall's τ (tau-b) measures how alike two orders are: 1 the same, 0 unrelated, -1 \
reversed; rows with the same score share their rank. With three rows, one order in six matches the paper's \
by chance. Its interval comes from {DRAWS:,} bootstrap draws of seeds: it shows what other seeds of these \
rows may give; with one seed there is none. The average is over columns, each divided by its deviation; the \
order by the loss on tasks is compared with it too."""


@dataclass(frozen=True)
class Report:
    """What was written, and what a terminal shows of it."""

    path: Path  # of report.md
    sheets: Mapping[str, list[Sheet]]  # table -> its scores and, from three rows on, the ranks of its rows
    notes: Mapping[str, list[str]]  # table -> the sentences below it
    left_out: list[str]  # what does not count, and why


def collect(
    tables: list[Table], scale: str, runs: Folders, overrides: Changes | None = None
) -> tuple[dict[str, list[Result]], list[str]]:
    """Row -> its finished runs, for ``tables`` and their baselines; and why other runs do not count."""
    names = dict.fromkeys(row.name for table in tables for row in table.rows)
    names |= {baseline_of(name): None for name in names}
    for name in names:
        build(name, scale, overrides)
    folders = [root for root in roots(runs) if root.is_dir()]
    left_out = {f"--runs: there is no folder {root}": None for root in roots(runs) if root not in folders}
    finished = {
        name: results(REGISTRY[name], scale, folders, left_out.setdefault, overrides) for name in names
    }
    if not any(finished[row.name] for table in tables for row in table.rows):
        why = "".join(f"\n- {line}" for line in left_out)
        raise SettingError(
            f"no run of {', '.join(table.name for table in tables)} at scale {scale} has finished under "
            f"{', '.join(map(str, roots(runs)))}; train them with: lm sweep '{tables[0].name}' --scale "
            f"{scale}{why}"
        )
    return finished, list(left_out)


def write_report(
    tables: list[Table], scale: str, runs: Folders, refresh: float = 0, overrides: Changes | None = None
) -> Report:
    """Write the report into the first folder of ``runs``; SettingError if no row has finished.

    The page for a browser reloads itself every ``refresh`` seconds; 0: never.
    """
    all_runs, left_out = collect(tables, scale, runs, overrides)
    folder = roots(runs)[0] / scale / "reports" / with_overrides(name_of(tables), overrides or {})
    folder.mkdir(parents=True, exist_ok=True)
    all_finished = [Finished(table, REGISTRY[baseline_of(table.rows[0].name)], all_runs) for table in tables]
    sections, sheets, notes, damaged = [], {}, {}, dict.fromkeys(left_out)
    for finished in shown_tables(all_finished):
        table = finished.table
        sheets[table.name], notes[table.name] = _sheets(finished, scale)
        lines = {row.name: curves(finished.of(row), damaged.setdefault) for row in table.rows}
        scores, *rankings = map(markdown, sheets[table.name])
        text = [f"## {table.name}: {table.title}", scores, *notes[table.name]]
        text += [f"Ranks of the rows, the paper's in brackets:\n\n{ranking}" for ranking in rankings]
        text += [f"![{table.title}]({file})" for file in draw_figures(finished, lines, scale, folder)]
        rows = [row for row in table.rows if finished.of(row)]
        folded = [details(row, finished.of(row), lines[row.name], scale) for row in rows]
        sections.append(Section(table.name, "\n\n".join(text), folded))
    waiting, left_out = [table.name for table in tables if table.name not in sheets], list(damaged)
    top, path = header(all_finished, scale, left_out, waiting), folder / "report.md"
    if overrides:
        top += (
            "\n\nIn every row: " + ", ".join(f"`{name}={value}`" for name, value in overrides.items()) + "."
        )
    write(path, "\n\n".join([top, *(section.markdown for section in sections)]) + "\n")
    write(path.with_suffix(".csv"), table_csv(all_finished))
    write(path.with_suffix(".html"), page(top, sections, lambda file: (folder / file).read_bytes(), refresh))
    return Report(path, sheets, notes, left_out)


def _sheets(finished: Finished, scale: str) -> tuple[list[Sheet], list[str]]:
    """The scores of a table and the ranks of its rows, and the notes below them."""
    sheets, notes = [scoreboard(finished)], []
    if finished.baseline.paper:
        ranking, agreement = ranks(finished)
        sheets += [ranking] if ranking else []
        notes = [differences(finished), agreement]
    if differing := unlike(finished, scale):
        labels = {row.label for row in finished.table.rows if row.name in differing}
        sheets = [marked(sheet, labels) for sheet in sheets]
        lines = "".join(f"\n- {line}" for of_row in differing.values() for line in of_row)
        notes.append(
            f"{UNLIKE}: made of other things than the rows beside it, which may be why its scores differ."
            f"\n{lines}"
        )
    return sheets, notes


def name_of(tables: list[Table]) -> str:
    """What a report on ``tables`` is called, each set otherwise: t5-1-baseline, t5-1+2+4, t5, bert+gpt."""
    if len(tables) == 1:
        return tables[0].name.replace("/", "-")
    parts = []
    for study, some in groupby((table.name for table in tables), _study):
        names, complete = list(some), [table.name for table in TABLES if _study(table.name) == study]
        numbers = [] if names == complete else [name.split("/")[1].split("-")[0] for name in names]
        parts.append(f"{study}-{'+'.join(numbers)}" if numbers else study)
    return "+".join(parts)


def _study(name: str) -> str:
    return name.split("/")[0]


def shown_tables(tables: list[Finished]) -> list[Finished]:
    """Those of which more than the baseline has finished; if there is none, the first of which that has."""
    changed = [[row for row in t.table.rows if row.changes != t.baseline.changes] for t in tables]
    compared = [t for t, rows in zip(tables, changed, strict=True) if any(map(t.of, rows))]
    return compared or [next(t for t in tables if any(map(t.of, t.table.rows)))]


def header(tables: list[Finished], scale: str, left_out: list[str], waiting: list[str]) -> str:
    """What stands above all tables."""
    paper = any(finished.baseline.paper for finished in tables)
    beside = ", out of 100, beside the paper's" * paper
    rule = "The paper's marks follow its own rule: two deviations of its baseline. " * paper
    baselines = dict.fromkeys(finished.baseline.name for finished in tables)
    lines = [
        f"# {'The T5 study' if paper else 'Classic models'} at scale `{scale}`",
        "\n".join(_setup(name, scale) for name in baselines),
        stand_ins(tables),
        ABOUT_SCORES.format(paper=beside, rule=rule),
        ABOUT_ORDER * paper,
    ]
    if waiting:
        lines += [f"Nothing but the baseline has finished of: {', '.join(waiting)}."]
    if left_out:
        reasons = ("; ".join(map(str.strip, line.splitlines())) for line in left_out)
        lines += ["Not counted:\n\n" + "\n".join(f"- `{line}`" for line in reasons)]
    return "\n\n".join(filter(None, lines))


def _setup(baseline: str, scale: str) -> str:
    e = build(baseline, scale)
    layers = [str(e.model.num_encoder_layers)] * e.model.has_encoder
    layers += [str(e.model.num_decoder_layers)] * e.model.has_decoder
    return (
        f"Baseline `{baseline}`: {'+'.join(layers)} layers of width {e.model.d_model}, pre-trained on "
        f"`{e.data.corpus}` for {e.pretraining.steps:,} steps of {e.pretraining.batch_size} texts of up to "
        f"{e.data.inputs_length} tokens, then fine-tuned for {e.finetuning.steps:,} steps on each of "
        f"{', '.join(e.tuning.mixtures + e.tuning.heads) or 'no task'}."
    )


def stand_ins(tables: list[Finished]) -> str:
    """Which task stands under which of the paper's columns."""
    paper = any(row.paper for finished in tables for row in finished.table.rows)
    result, lines = next(runs[0] for runs in tables[0].runs.values() if runs), []
    for column in filter(result.columns.__contains__, COLUMNS):
        metrics = {name: best["metric"] for name, best in result.tasks.items() if best["column"] == column}
        names = ", ".join(f"`{name}`" for name in metrics)
        scores = ", ".join(sorted({metric.replace("_", " ") for metric in metrics.values()}))
        lines.append(f"- **{column}**: {names} ({scores})" + f"; the paper's: {COLUMNS[column]}" * paper)
    warning = "; of other tasks only the order of rows compares with the paper's" * paper
    return "\n".join([f"What is scored in each column{warning}:\n", *lines]) if lines else ""


def table_csv(tables: list[Finished]) -> str:
    """A line for every row, seed and column."""
    text = StringIO()
    out = csv.writer(text, lineterminator="\n")
    out.writerow("table row label seed column score paper task_loss held_out_loss seconds tokens".split())
    for finished in tables:
        for row in finished.table.rows:
            for run in finished.of(row):
                cost = (run.task_loss, run.held_out_loss, round(run.seconds, 3), run.tokens)
                for column, score in run.columns.items() or [("", "")]:
                    names = (row.table, row.name, row.label, run.seed)
                    out.writerow([*names, column, score, row.paper.get(column), *cost])
    return text.getvalue()


def print_report(
    tables: list[Table], scale: str, runs: Sequence[str], overrides: Changes | None = None
) -> None:
    """Write the report on tables, and print what a terminal shows of it."""
    report = write_report(tables, scale, runs, overrides=overrides)
    titles = {table.name: table.title for table in tables}
    for name, (scores, *rankings) in report.sheets.items():
        show_sheet(f"{name}: {titles[name]} (scale {scale})", scores)
        for sheet in rankings:
            show_sheet("Ranks: ours (the paper's)", sheet)
        for line in report.notes[name]:
            print_line(line)
    for line in report.left_out:
        print_line(f"not counted: {line}")
    print_line(f"Report: {report.path.parent}/report.md, .html, .csv")


def watch(tables: list[Table], scale: str, runs: Folders, say: Callable[[str], object] = print_line) -> None:
    """Write the report whenever different runs count than before, until interrupted.

    It uses a tenth of a core at most, and leaves the rest to runs that train beside it.
    """
    roots(runs)  # if they cannot be read now, they cannot be read later
    seen: object = None
    current: object
    wait, browser = LOOK_EVERY, None
    try:
        while True:
            began = time.process_time()
            try:
                if (current := collect(tables, scale, runs)) != seen:
                    browser = write_report(tables, scale, runs, refresh=wait).path.with_suffix(".html")
                    news = f"wrote {browser}"
            except SettingError as error:  # nothing has finished yet
                news = current = str(error)
            if current != seen:
                say(f"{time.strftime('%H:%M:%S')} {news}")
            seen, wait = current, max(LOOK_EVERY, 9 * (time.process_time() - began))
            time.sleep(wait)
    except KeyboardInterrupt:
        if browser is not None:
            write(browser, re.sub(REFRESH.format(r"\d+"), "", browser.read_text("utf-8"), count=1))
        say("no longer watching")

"""Finished runs as the paper's tables: Markdown, CSV, pictures and a page for a browser."""

import re
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from matplotlib.figure import Figure

from experiments.console import Sheet, latex, markdown, print_line, show_sheet
from experiments.report.columns import FRAMES
from experiments.report.comparison import FROM_CHANCE, MARGIN, SIGNAL, Evidence, Finished, Verdicts
from experiments.report.page import REFRESH, Section, details, page
from experiments.report.plots import draw_figures, save_figures
from experiments.report.records import sheet_csv, table_csv, table_data
from experiments.report.results import Folders, curves, results, roots, unlike
from experiments.report.scoreboard import (
    UNLIKE,
    about_documents,
    about_undefined,
    conclusions,
    count_verdicts,
    decision_accuracy,
    marked,
    measures,
    scoreboard,
    verdict_sheet,
)
from experiments.report.statistics import DRAWS, LEVEL
from experiments.runs.result import Result
from experiments.study.changes import Overrides
from experiments.study.claims import Counts, simulate_replication
from experiments.study.names import file_name
from experiments.study.overrides import named_changes
from experiments.study.paths import report_folder
from experiments.study.registry import REGISTRY, baseline_of, build
from experiments.study.table import Table
from lm.config.base import SettingError
from lm.files import json_with_checksum, write

LOOK_EVERY = 5.0  # between looks at the folders of runs [s]

MEASURES, CLAIMS = "What the columns measure", "Claims of the paper, in deviations of a repeat"
HOW_TO_READ = "explanations"  # name of the section that explains the others
ABOUT_SCORES = f"""A row is the baseline with one change (`lm list TABLE`). A column is a \
task, named by what it measures (↓: less is better); numbers are means ± deviations over seeds. ▲ ▼: better, \
worse than the baseline, seed by seed, beyond noise ({1 - LEVEL:.0%}, Holm's rule over the column); one seed \
cannot be told from noise. Compare held-out losses within one objective only: in a table without tasks they \
are marked, with intervals of 95 % over the seeds, where objective, text and vocabulary are the baseline's."""
ABOUT_PAPER = """The paper's column of the same kind stands beside ours, with the paper's own marks (two \
deviations of its baseline): of other tasks only the order of rows compares."""
ABOUT_CLAIMS = f"""*Combined* is the mean over columns of the difference from the baseline, in deviations of \
a repeat with other seeds and other examples; columns with a signal-to-noise below {SIGNAL:g}, or with a \
baseline within {FROM_CHANCE:g} standard errors of chance, are left out. A claim is a pair of rows that the \
paper tells apart by its own noise (z, over all its columns). Ours confirms or contradicts it if the \
difference of combined scores is beyond noise: by Student's t ({1 - LEVEL:.0%}, Holm's rule over the table) \
and by {DRAWS:,} draws of seeds and examples; else it is undecided, or equivalent if the rows are less than \
{MARGIN:.2g} deviations apart. Rows are compared after equal updates, which means after all of their \
training as in the paper, and where both spent equal FLOP or content tokens of pre-training, if both were \
scored there (else: out of range) and had left the plateau (else: not yet learning), in the seeds that both \
have. Combined scores of different tables have different units. *Content tokens* are predicted words, \
without sentinels, ends and copies; the *exit step* is where their loss falls 0.2 nats below what is reached \
without context, of rows that learn neither tasks beside the corpus nor a few texts by heart."""


@dataclass(frozen=True)
class Report:
    """What was written, and what a terminal shows of it."""

    path: Path  # of report.md
    sheets: Mapping[str, dict[str, Sheet]]  # table -> what is above a sheet -> the sheet
    notes: Mapping[str, list[str]]  # table -> the sentences below it
    left_out: list[str]  # what does not count, and why
    figures: Mapping[str, Figure]  # name of its file, without an ending -> picture
    titles: Mapping[str, str]  # table -> what it is about


def collect(
    tables: list[Table], scale: str, runs: Folders, overrides: Overrides | None = None
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
        why = "".join(f"\n- {line}" for line in left_out) if len(left_out) > 1 else f" ({''.join(left_out)})"
        raise SettingError(
            f"no run of {', '.join(table.name for table in tables)} at scale {scale} has finished under "
            f"{', '.join(map(str, roots(runs)))}; train them with: lm sweep '{tables[0].name}' --scale "
            f"{scale}{why.replace(' ()', '')}"
        )
    return finished, list(left_out)


def write_report(
    tables: list[Table],
    scale: str,
    runs: Folders,
    refresh: float = 0,
    overrides: Overrides | None = None,
    command: str = "",
) -> Report:
    """Write the report into the first folder of ``runs``; SettingError if no row has finished.

    The page for a browser reloads itself every ``refresh`` seconds; 0: never. ``command`` made the report.
    """
    all_runs, left_out = collect(tables, scale, runs, overrides)
    given = named_changes(overrides or {})
    folder = report_folder(roots(runs)[0], scale, tables, given)
    folder.mkdir(parents=True, exist_ok=True)
    settings = {name: build(name, scale, overrides) for name in all_runs}
    all_finished = [
        Finished(table, REGISTRY[baseline_of(table.rows[0].name)], all_runs, settings) for table in tables
    ]
    sections, damaged = [], dict.fromkeys(left_out)
    sheets, notes, data, found = {}, {}, {}, []
    figures: dict[str, Figure] = {}
    for finished in shown_tables(all_finished):
        table, evidence = finished.table, Evidence(finished, damaged.setdefault, unlike(finished, scale))
        verdicts = evidence.verdicts()
        found.append(verdicts)
        sheets[table.name], notes[table.name] = _sheets(evidence, verdicts)
        data[table.name] = table_data(evidence, verdicts)
        lines = {row.name: curves(finished.of(row), damaged.setdefault) for row in table.rows}
        text = [f"## {title_of(table)}"]
        for title, sheet in sheets[table.name].items():
            text += [f"{title}:", markdown(sheet)] if title else [markdown(sheet)]
        text += notes[table.name]
        figures |= (drawn := draw_figures(evidence, lines))
        text += [f"![{title_of(table)}]({file}.png)" for file in drawn]
        folded = [details(row, finished.of(row), lines[row.name], scale) for row in finished.trained]
        sections.append(Section(table.name, "\n\n".join(text), folded))
    sections.append(explanation(all_finished))
    waiting, left_out = [table.name for table in tables if table.name not in sheets], list(damaged)
    top, path = header(all_finished, scale, left_out, waiting, given), folder / "report.md"
    top += all_claims(found, [table for table in tables if table.name in sheets])
    save_figures(figures, folder, "png")
    write(path, "\n\n".join([top, *(section.markdown for section in sections)]) + "\n")
    write(path.with_suffix(".html"), page(top, sections, lambda file: (folder / file).read_bytes(), refresh))
    for name, shown in sheets.items():
        write(folder / f"{file_name(name)}.csv", sheet_csv(shown[""]))
    write(path.with_suffix(".csv"), table_csv(all_finished))
    write(folder / "results.json", json_with_checksum({"command": command, "scale": scale, "tables": data}))
    titles = {table.name: table.title for table in tables}
    return Report(path, sheets, notes, left_out, figures, titles)


def _sheets(evidence: Evidence, verdicts: Verdicts) -> tuple[dict[str, Sheet], list[str]]:
    """What is above a sheet of a table -> the sheet; and the notes below them."""
    finished, notes = evidence.finished, conclusions(evidence, verdicts)
    notes += about_documents(finished) + about_undefined(finished)
    sheets = {"": scoreboard(evidence)}
    if differing := evidence.unlike:
        labels = {row.label for row in finished.table.rows if row.name in differing}
        sheets[""] = marked(sheets[""], labels)
        lines = "".join(f"\n- {line}" for of_row in differing.values() for line in of_row)
        notes.append(
            f"{UNLIKE}: made of other things than the rows beside it, which may be why its scores differ."
            f"\n{lines}"
        )
    if finished.has_tasks:
        sheets[MEASURES] = measures(evidence)
    if (claimed := verdict_sheet(verdicts, evidence.unlike)) is not None:
        sheets[CLAIMS] = claimed
    return sheets, notes


def all_claims(found: Sequence[Verdicts], tables: Sequence[Table]) -> str:
    """The verdicts of all tables together, beside what a repeat of the paper would find; empty for one."""
    if sum(bool(verdicts["updates"]) for verdicts in found) < 2:
        return ""
    lines = []
    for frame in FRAMES:
        counts = [count_verdicts(verdicts[frame]) for verdicts in found]
        lines.append(f"- equal {frame}: {decision_accuracy(Counts(*map(sum, zip(*counts, strict=True))))}")
    ceiling = Counts(*map(sum, zip(*map(simulate_replication, tables), strict=True)))
    lines.append(f"- a repeat of the paper: {decision_accuracy(ceiling)}")
    return "\n\nThe claims of all tables below:\n\n" + "\n".join(lines)


def shown_tables(tables: list[Finished]) -> list[Finished]:
    """Those of which more than the baseline has finished; if there is none, the first of which that has."""
    changed = [[row for row in t.table.rows if t.key(row) != t.key(t.baseline)] for t in tables]
    compared = [t for t, rows in zip(tables, changed, strict=True) if any(map(t.of, rows))]
    return compared or [next(t for t in tables if any(map(t.of, t.table.rows)))]


def header(
    tables: list[Finished], scale: str, left_out: list[str], waiting: list[str], given: Overrides
) -> str:
    """What stands above all tables."""
    baselines = dict.fromkeys(finished.baseline.name for finished in tables)
    lines = [
        f"# {heading([finished.table for finished in tables])} at scale `{scale}`",
        "\n".join(_setup(name, scale) for name in baselines),
        f"▲ ▼: better, worse than the baseline beyond noise; ±: deviation over seeds; ↓: less is better "
        f"([how to read this](#{HOW_TO_READ})).",
    ]
    if waiting:
        lines += [f"Nothing but the baseline has finished of: {', '.join(waiting)}."]
    if left_out:
        reasons = ("; ".join(map(str.strip, line.splitlines())) for line in left_out)
        lines += ["Not counted:\n\n" + "\n".join(f"- `{line}`" for line in reasons)]
    if given:
        lines += [f"In every row: {', '.join(f'`{name}={value}`' for name, value in given.items())}."]
    return "\n\n".join(filter(None, lines))


def title_of(table: Table) -> str:
    """Return the name of a table, with its title if it has one."""
    return f"{table.name}: {table.title}" if table.title else table.name


def heading(tables: Sequence[Table]) -> str:
    """Return what a report on these tables is called."""
    papers = {table.paper for table in tables}
    if len(papers) == 1 and (paper := papers.pop()) is not None:
        return f"The {paper.name} study"
    if len(tables) == 1:
        return tables[0].title or tables[0].name
    *others, last = (table.name for table in tables)
    return f"Tables {', '.join(others)} and {last}"


def explanation(tables: list[Finished]) -> Section:
    """What stands below all tables."""
    paper = any(finished.baseline.published for finished in tables)
    text = ["## How to read this", ABOUT_SCORES, *[ABOUT_PAPER, ABOUT_CLAIMS] * paper]
    return Section(HOW_TO_READ, "\n\n".join(text), [])


def _setup(baseline: str, scale: str) -> str:
    e = build(baseline, scale)
    if e.counts.model != "none":
        of = f"{e.counts.order}-grams" if e.counts.model == "ngram" else "a tagger"
        return f"Baseline `{baseline}`: counts ({of}); see `lm show ROW --diff` for what other rows change."
    layers = [str(e.model.num_encoder_layers)] * e.model.has_encoder
    layers += [str(e.model.num_decoder_layers)] * e.model.has_decoder
    return (
        f"Baseline `{baseline}`: {'+'.join(layers)} layers of width {e.model.d_model}, pre-trained on "
        f"`{e.data.corpus}` for {e.pretraining.steps:,} steps of {e.pretraining.batch_size} texts of up to "
        f"{e.data.inputs_length} tokens, then fine-tuned for {e.finetuning.steps:,} steps on each of "
        f"{', '.join(e.tuning.mixtures + e.tuning.heads) or 'no task'}."
    )


def print_report(
    tables: list[Table],
    scale: str,
    runs: Sequence[str],
    overrides: Overrides | None = None,
    command: str = "",
) -> Report:
    """Write the report on tables, print what a terminal shows of it, and return it."""
    report = write_report(tables, scale, runs, overrides=overrides, command=command)
    shown = {table.name: title_of(table) for table in tables}
    for name, sheets in report.sheets.items():
        for about, sheet in sheets.items():
            show_sheet(about or f"{shown[name]} (scale {scale})", sheet)
            if signs := legend(sheet) if not about else "":
                print_line(signs)
        for line in report.notes[name]:
            print_line(line)
    for line in report.left_out:
        print_line(f"not counted: {line}")
    files = ", ".join(f"{file_name(name)}.csv" for name in report.sheets)
    print_line(f"Report: {report.path.parent}/report.md, .html, .csv (every seed), {files}, results.json")
    return report


def legend(sheet: Sheet) -> str:
    """What the signs mean that a table of scores has, in a line; empty if it has none."""
    text = "".join(cell.text for cells in sheet.values() for cell in cells)
    arrows = "▲ ▼ better, worse than the baseline beyond noise" * any(sign in text for sign in "▲▼")
    return "; ".join(filter(None, [arrows, "± deviation over seeds" * ("±" in text)]))


def write_pictures(report: Report, kind: str) -> list[str]:
    """Write every picture of a report once more, as ``svg`` or ``pdf``; their names."""
    save_figures(report.figures, report.path.parent, kind)
    return [f"{name}.{kind}" for name in report.figures]


def write_latex(report: Report) -> Path:
    """Every table of a report, with all columns that it shows, as tables of LaTeX beside it."""
    suffixes, tables = {"": "", MEASURES: "-columns", CLAIMS: "-claims"}, []
    for name, sheets in report.sheets.items():
        label = "tab:" + re.sub(r"[^\w.:+-]", "-", file_name(name))
        for about, sheet in sheets.items():
            caption = ": ".join(filter(None, (report.titles[name] or name, about)))
            tables.append(latex(caption, label + suffixes[about], sheet if about else _trained(sheet)))
    path = report.path.with_suffix(".tex")
    write(path, "\n".join(tables))
    return path


def _trained(sheet: Sheet) -> Sheet:
    """The scoreboard without the rows of which no seed has finished."""
    kept = [cell.value != 0 for cell in sheet["seeds"]]
    return {
        head: [cell for cell, keep in zip(cells, kept, strict=True) if keep] for head, cells in sheet.items()
    }


def watch(
    tables: list[Table],
    scale: str,
    runs: Folders,
    say: Callable[[str], object] = print_line,
    overrides: Overrides | None = None,
) -> None:
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
                if (current := collect(tables, scale, runs, overrides)) != seen:
                    written = write_report(tables, scale, runs, refresh=wait, overrides=overrides)
                    browser = written.path.with_suffix(".html")
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

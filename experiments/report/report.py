"""Writes finished runs as the tables of a paper: Markdown, HTML, CSV, JSON, LaTeX and pictures."""

import re
import shlex
import time
from collections import Counter
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from itertools import chain, product
from pathlib import Path
from urllib.parse import quote

from experiments.console import (
    CONSOLE,
    RUNS,
    Cell,
    Sheet,
    escape_markdown,
    markdown,
    narrowed,
    print_line,
    show_sheet,
)
from experiments.figures.panels import PlotGrid
from experiments.report import text
from experiments.report.comparison import Comparison, Verdicts, Warn, share_noise
from experiments.report.export import predictions_data, report_data, seeds_csv, sheet_csv
from experiments.report.figures import remove_outdated_figures, save_figures, table_figures
from experiments.report.latex import bibtex, latex_tables
from experiments.report.metrics import GROUP_TITLES, HELD_OUT, Group
from experiments.report.order import ScalePrediction
from experiments.report.page import REFRESH, Section, html_page, row_details
from experiments.report.prediction import combined_scores, predictions, read_combined_scores
from experiments.report.results import Folders, find_results, provenance_mismatches, run_roots
from experiments.runs.curves import read_curves
from experiments.runs.provenance import other_modules_note
from experiments.runs.result import Result
from experiments.study.changes import Overrides
from experiments.study.claims import contradicted_conclusions
from experiments.study.experiment import Experiment
from experiments.study.names import file_name
from experiments.study.overrides import command_line_overrides, explicit_overrides
from experiments.study.paths import changed_runs, report_folder, run_folder
from experiments.study.plugins import plugin_arguments
from experiments.study.registry import REGISTRY, TABLES, build, none_buildable_text
from experiments.study.scales import NOT_AVERAGED, SCALES
from experiments.study.start import START_ONLY_ROW
from experiments.study.table import SECOND_HAND, UNSURE, Row, Table
from experiments.study.words import setting_arguments
from lm.config.base import SettingError, did_you_mean
from lm.files import json_with_checksum, write

POLL_SECONDS = 5.0  # between looks at the folders of runs
MAX_PLOTTED_SEEDS = 20  # per row, whose training curves are averaged; more would not move the mean visibly
SCORES = ""  # key of the sheet of scores, which is printed under "Scores"
EXPLANATIONS = "how-to-read-this"  # name of the section that explains the others
SUMMARY = "Order of rows, then claims after training"  # heading of the sheet on all tables


@dataclass(frozen=True)
class TableReport:
    """Holds the comparison, verdicts, sheets, notes and figures of one table."""

    comparison: Comparison
    verdicts: Verdicts
    sheets: Mapping[str, Sheet]  # heading -> sheet
    notes: Sequence[str]  # paragraphs below the sheets
    figures: Mapping[str, PlotGrid]  # name of its file, without a suffix -> figure


@dataclass(frozen=True)
class Report:
    """Holds what was written, by the names of its tables."""

    path: Path  # of report.md
    summary: Sheet  # a line per table and group of metrics
    prediction: Sheet  # likewise, of the order at another scale; empty if none was asked for
    tables: Mapping[str, TableReport]
    left_out: Sequence[str]  # what does not count, and why


def collect_runs(
    tables: Sequence[Table], scale: str, runs: Folders, overrides: Overrides | None = None
) -> tuple[dict[str, list[Result]], list[str]]:
    """Return row -> its finished runs, and a line for each run or folder that is left out, with the reason.

    The rows are those of ``tables``, their baselines and the control (START_ONLY_ROW). Rows that are the same
    experiment have the same runs, which are read once. SettingError if no row of the tables has a finished
    run.
    """
    rows = _rows_of(tables)
    names = dict.fromkeys(row.name for row in rows)
    names |= dict.fromkeys(table.baseline for table in tables)
    if START_ONLY_ROW in REGISTRY:
        names[START_ONLY_ROW] = None
    # Rows that need a feature which this code lacks (``Row.needs``) cannot be built, and have no runs.
    experiments = {name: build(name, scale, overrides) for name in names if not REGISTRY[name].needs}
    folders = [root for root in run_roots(runs) if root.is_dir()]
    # The keys are the lines on what is left out; a dict keeps each once, in the order in which they were
    # found. Its method ``setdefault`` adds a line, so it is the callback of ``find_results``.
    left_out = {f"--runs: there is no folder {root}": None for root in run_roots(runs) if root not in folders}
    by_experiment: dict[object, list[Result]] = {}
    results: dict[str, list[Result]] = {name: [] for name in names}
    for name, experiment in experiments.items():
        if experiment not in by_experiment:
            by_experiment[experiment] = find_results(
                REGISTRY[name], scale, folders, left_out.setdefault, overrides
            )
        results[name] = by_experiment[experiment]
    if not any(results[row.name] for row in rows):
        if not any(table.can_be_built for table in tables):
            raise SettingError(f"there is nothing to report: {none_buildable_text(rows)}")
        raise SettingError(_nothing_finished(tables, scale, runs, list(left_out), overrides or {}))
    return results, list(left_out)


def _rows_of(tables: Iterable[Table]) -> list[Row]:
    return [*chain.from_iterable(table.rows for table in tables)]


def _nothing_finished(
    tables: Sequence[Table], scale: str, runs: Folders, left_out: Sequence[str], overrides: Overrides
) -> str:
    """Return the error message for tables without a finished run.

    It gives the command that trains the first of them, the scales that have runs without ``overrides``,
    whether rows have runs with other settings, and what was left out.
    """
    names = ", ".join(table.name for table in tables)
    roots = ", ".join(map(str, run_roots(runs)))
    trained = "them" if len(tables) == 1 else "the first table"
    message = f"no run of {names} at scale {scale} has finished under {roots}; train {trained} with "
    if tables[0].name in TABLES and "start.model" not in overrides:
        command = ["lm", *plugin_arguments(), "sweep", tables[0].name, "--scale", scale]
        command += setting_arguments(command_line_overrides(overrides))
        if (first := run_roots(runs)[0]) != RUNS:
            command += ["--runs", str(first)]
        message += shlex.join(command)
    else:
        message += "lm sweep and the same settings, --start and --grid"
    for other in scales_with_runs(tables, runs):
        if overrides:
            message += f"; runs without these settings have finished at scale {other}"
        elif other != scale:
            message += f"; scale {other} has finished runs: add --scale {other}"
    pairs = product(run_roots(runs), _rows_of(tables))
    if any(changed_runs(root, scale, row.name) for root, row in pairs):
        message += (
            "; runs with settings of your own have finished: give the same settings, which --variants shows"
        )
    if len(left_out) == 1:
        return f"{message} ({left_out[0]})"
    return message + "".join(f"\n- {line}" for line in left_out)


def scales_with_runs(tables: Sequence[Table], runs: Folders) -> list[str]:
    """Return the scales at which any row of the tables has a finished run without overrides."""
    rows = [row for row in _rows_of(tables) if not row.needs]
    scales = []
    for scale in SCALES:
        roots = [root for root in run_roots(runs) if (root / scale).is_dir()]
        if any(_has_finished(root, scale, row) for root, row in product(roots, rows)):
            scales.append(scale)
    return scales


def _has_finished(root: Path, scale: str, row: Row) -> bool:
    """Return whether any seed of a row has finished without overrides in one folder of runs."""
    return any(run_folder(root, scale, row.name, 0, {}).parent.glob("seed-*/scores.json"))


def write_report(
    tables: Sequence[Table],
    scale: str,
    runs: Folders,
    refresh: float = 0,
    overrides: Overrides | None = None,
    command: str = "",
    against: str = "",
) -> Report:
    """Write the report on ``tables`` into the first folder of ``runs``; SettingError if no row has finished.

    against: another scale, or results.json of another report, whose order of rows this scale's should
    predict. refresh: how often the page for a browser reloads itself [s]; 0: never.
    command: what the user called, which is recorded in results.json.
    """
    if against and not against.endswith(".json") and against not in SCALES:
        like = did_you_mean(against, SCALES)
        raise SettingError(f"--against {against} should be a scale or the results.json of a report{like}")
    warnings: dict[str, None] = {}  # each line once, as in ``collect_runs``
    comparisons = compare_tables(tables, scale, runs, overrides, warnings.setdefault)
    reported = shown_comparisons(comparisons)
    predicted = predict_other(reported, against, runs, overrides, warnings.setdefault) if against else {}
    shown = {each.table.name: report_table(each, warnings.setdefault) for each in reported}
    overridden = explicit_overrides(overrides or {})  # without those that follow from --start
    folder = report_folder(run_roots(runs)[0], scale, tables, overridden)
    folder.mkdir(parents=True, exist_ok=True)
    path = folder / "report.md"
    for table_report in shown.values():
        save_figures(table_report.figures, folder)
    figures = {name: grid for table_report in shown.values() for name, grid in table_report.figures.items()}
    remove_outdated_figures(figures, folder)
    header = report_header(comparisons, scale, shown, list(warnings), overridden)
    verdicts = [each.verdicts for each in shown.values()]
    summary = text.summary_sheet(reported, verdicts)
    if len(shown) > 1 and summary["table"]:
        header = f"{header}\n\n{SUMMARY}:\n\n{markdown(summary)}"
    header = "\n\n".join(filter(None, [header, text.all_claims_note(verdicts, reported)]))
    if against:
        header += f"\n\n{_prediction_title(scale, against)}:\n\n{markdown(text.prediction_sheet(predicted))}"
    sections = [*map(_section, shown.values()), explanations(comparisons)]
    write(path, "\n\n".join([header, *(section.markdown for section in sections)]) + "\n")
    html = html_page(header, sections, lambda file: (folder / file).read_bytes(), refresh)
    write(path.with_suffix(".html"), html)
    for name, table_report in shown.items():
        write(folder / f"{file_name(name)}.csv", sheet_csv(table_report.sheets[SCORES]))
    if summary["table"]:
        write(folder / "order.csv", sheet_csv(summary))
    else:
        (folder / "order.csv").unlink(missing_ok=True)  # of an earlier report
    for table in tables:
        if table.name not in shown:
            (folder / f"{file_name(table.name)}.csv").unlink(missing_ok=True)
    write(path.with_suffix(".csv"), seeds_csv(comparisons))
    data = report_data(reported, verdicts, command, scale)
    if against:
        data["prediction"] = {"of": against, "tables": predictions_data(predicted)}
    write(folder / "results.json", json_with_checksum(data))
    return Report(path, summary, text.prediction_sheet(predicted), shown, list(warnings))


def _prediction_title(scale: str, against: str) -> str:
    return f"How far the order of rows at scale `{scale}` predicts that of `{against}`"


def compare_tables(
    tables: Sequence[Table], scale: str, runs: Folders, overrides: Overrides | None, warn: Warn
) -> list[Comparison]:
    """Return a comparison of the finished runs of each table, with one unit per metric for all tables.

    SettingError if no row has finished. warn: called with a line on each run that does not count.
    """
    results, left_out = collect_runs(tables, scale, runs, overrides)
    for line in left_out:
        warn(line)
    experiments = {name: build(name, scale, overrides) for name in results if not REGISTRY[name].needs}
    comparisons = [
        Comparison(
            table,
            results,
            experiments,
            warn,
            provenance_mismatches(_with_baseline(table, results), experiments),
            NOT_AVERAGED.get(scale, {}),
        )
        for table in tables
    ]
    share_noise(comparisons)
    return comparisons


def predict_other(
    comparisons: Sequence[Comparison], against: str, runs: Folders, overrides: Overrides | None, warn: Warn
) -> dict[str, dict[Group, ScalePrediction]]:
    """Return how far the order of rows predicts that at the scale, or in the results.json, ``against``."""
    if against.endswith(".json"):
        return predictions(comparisons, read_combined_scores(Path(against)))
    tables = [comparison.table for comparison in comparisons]
    others = compare_tables(tables, against, runs, overrides, warn)
    return predictions(comparisons, {each.table.name: combined_scores(each) for each in others})


def _with_baseline(table: Table, results: Mapping[str, Sequence[Result]]) -> dict[str, Sequence[Result]]:
    """Return the runs of a table's baseline, then of its rows."""
    names = [table.baseline, *(row.name for row in table.rows)]
    return {name: results[name] for name in names}


def report_table(comparison: Comparison, warn: Warn) -> TableReport:
    """Return the sheets, notes and figures of one table."""
    verdicts = comparison.verdicts()
    notes = [
        *text.noise_notes(comparison),
        *text.claims_notes(comparison, verdicts),
        *text.start_notes(comparison),
        *text.document_notes(comparison),
    ]
    plain = [  # they have labels of rows and names of files, which are no Markdown
        *contradicted_conclusions(comparison.table),
        *text.text_notes(comparison),
        *text.rows_notes(comparison),
        *text.undefined_notes(comparison),
    ]
    if comparison.mismatches:
        plain.append(text.mismatch_note(comparison))
    notes += map(escape_markdown, plain)
    sheets = {
        text.ORDER: text.order_sheet(comparison),
        text.CONCLUSIONS: text.conclusions_sheet(verdicts, comparison.mismatches),
        SCORES: text.scores_sheet(comparison),
        text.DIFFERENCES: text.differences_sheet(comparison),
        text.METRICS: text.metrics_sheet(comparison) if comparison.has_tasks else None,
        text.DENOISERS: text.denoisers_sheet(comparison),
    }
    for budget, heading in text.CLAIMS.items():
        sheets[heading] = text.claims_sheet(verdicts, budget, comparison.mismatches)
    names = dict.fromkeys(map(comparison.canonical_name, comparison.table.rows))
    curves = {name: read_curves(comparison.runs[name][:MAX_PLOTTED_SEEDS], warn) for name in names}
    figures = table_figures(comparison, curves)
    known = {heading: sheet for heading, sheet in sheets.items() if sheet is not None}
    return TableReport(comparison, verdicts, known, notes, figures)


def _section(table_report: TableReport) -> Section:
    comparison = table_report.comparison
    title = table_title(comparison.table)
    parts = [f"## {title}"]
    labels = Counter(row.label for row in comparison.table.rows)
    named = [row for row in text.rows_of_claims(table_report.verdicts) if labels[row.label] == 1]
    for heading, sheet in table_report.sheets.items():
        parts += [f"{heading or 'Scores'}:", markdown(text.with_keys(sheet, named))]
    parts += table_report.notes
    for file, grid in table_report.figures.items():
        picture_title = escape_markdown(grid.title).replace("]", r"\]")
        parts.append(f"![{picture_title}]({quote(file)}.png)")
    baseline = comparison.experiments[comparison.baseline.name]
    details = [
        row_details(row, comparison.runs_of(row), comparison.experiments[row.name], baseline)
        for row in comparison.trained_rows
    ]
    return Section(comparison.table.name, "\n\n".join(parts), details)


def shown_comparisons(comparisons: Sequence[Comparison]) -> list[Comparison]:
    """Return the tables of which more than the baseline has finished; if none, the first with a run."""
    shown = []
    for comparison in comparisons:
        trained = {comparison.canonical_name(row) for row in comparison.trained_rows}
        if trained - {comparison.canonical_baseline}:
            shown.append(comparison)
    return shown or [next(comparison for comparison in comparisons if comparison.trained_rows)]


def outcomes(shown: Mapping[str, TableReport]) -> list[str]:
    """Return a line for each table that says what came out of its claims and its order."""
    sentences = {name: text.verdict_sentence(each.comparison, each.verdicts) for name, each in shown.items()}
    return [f"- **{name}**: {sentence}" for name, sentence in sentences.items() if sentence]


def report_header(
    comparisons: Sequence[Comparison],
    scale: str,
    shown: Mapping[str, TableReport],
    left_out: Sequence[str],
    overridden: Overrides,
) -> str:
    """Return what is written above all tables, of which the ``shown`` are reported."""
    tables = [comparison.table for comparison in comparisons]
    baselines = {
        each.baseline.name: each.experiments[each.baseline.name]
        for each in comparisons
        if not each.baseline.needs
    }
    lines = [
        f"# {report_title(tables)} at scale `{scale}`",
        "\n".join(outcomes(shown)),
        "\n".join(baseline_setup(name, experiment) for name, experiment in baselines.items()),
        f"▲ ▼: significantly better, worse than the baseline; ±: standard deviation over seeds; ↓: lower is "
        f"better ([how to read this](#{EXPLANATIONS})).",
    ]
    not_shown = [table for table in tables if table.name not in shown]
    if waiting := [table.name for table in not_shown if table.can_be_built]:
        lines += [f"Nothing but the baseline has finished of: {', '.join(waiting)}."]
    if lacking := [table.name for table in not_shown if not table.can_be_built]:
        lines += [f"This code lacks what the rows need of: {', '.join(lacking)}."]
    if left_out:
        reasons = ("; ".join(map(str.strip, line.splitlines())) for line in left_out)
        lines += ["Not counted:\n\n" + "\n".join(f"- `{line}`" for line in reasons)]
    if overridden:
        lines += [f"In every row: {', '.join(f'`{name}={value}`' for name, value in overridden.items())}."]
    return "\n\n".join(filter(None, lines))


def table_title(table: Table) -> str:
    """Return the name of a table, with its title if it has one."""
    return f"{table.name}: {table.title}" if table.title else table.name


def report_title(tables: Sequence[Table]) -> str:
    """Return what a report on these tables is called."""
    papers = {table.paper.name if table.paper else None for table in tables}
    if len(papers) == 1 and (paper := papers.pop()) is not None:
        return f"The {paper} study"
    if len(tables) == 1:
        return tables[0].title or tables[0].name
    *others, last = (table.name for table in tables)
    return f"Tables {', '.join(others)} and {last}"


def explanations(comparisons: Sequence[Comparison]) -> Section:
    """Return what is written below all tables."""
    parts = ["## How to read this", text.ABOUT_SCORES]
    tables = [comparison.table for comparison in comparisons]
    if any(row.published for row in _rows_of(tables)):
        parts.append(text.ABOUT_PAPER)
    if any(table.paper or table.conclusions for table in tables):
        parts.append(text.ABOUT_CLAIMS)
    return Section(EXPLANATIONS, "\n\n".join(parts), [])


def baseline_setup(name: str, experiment: Experiment) -> str:
    """Return a sentence on the model, data and steps of the baseline ``name``."""
    model = experiment.model
    if experiment.counts.model != "none":
        kind = f"{experiment.counts.order}-grams" if experiment.counts.model == "ngram" else "a tagger"
        return f"Baseline `{name}`: counts ({kind}); see `lm show ROW --diff` for what other rows change."
    layers = [str(model.num_encoder_layers)] if model.has_encoder else []
    layers += [str(model.num_decoder_layers)] if model.has_decoder else []
    sentence = f"Baseline `{name}`: {'+'.join(layers)} layers of width {model.d_model}, "
    if experiment.pretraining.steps:
        sentence += (
            f"pre-trained on `{experiment.data.corpus}` for {experiment.pretraining.steps:,} steps of "
            f"{experiment.pretraining.batch_size} texts of up to {experiment.data.inputs_length} tokens"
        )
    else:
        sentence += "not pre-trained here"
    tasks = ", ".join(experiment.tuning.mixtures + experiment.tuning.heads)
    if tasks and experiment.finetuning.steps:
        sentence += f", then fine-tuned for {experiment.finetuning.steps:,} steps on each of {tasks}"
    return f"{sentence}."


# ---- for the command line


def print_report(
    tables: Sequence[Table],
    scale: str,
    runs: Sequence[str],
    overrides: Overrides | None = None,
    command: str = "",
    against: str = "",
) -> Report:
    """Write the report on tables, print what a terminal shows of it, and return it."""
    report = write_report(tables, scale, runs, overrides=overrides, command=command, against=against)
    for table_report in report.tables.values():
        comparison = table_report.comparison
        _print_wrapped([text.verdict_sentence(comparison, table_report.verdicts)])
        shown = comparison.including_baseline()
        sheet, left_out = _terminal_sheet(shown)
        show_sheet(f"{table_title(comparison.table)} (scale {scale})", sheet)
        if left_out:
            _print_wrapped([f"on the page alone: {', '.join(left_out)}"])
        _print_wrapped([brief_legend(sheet), *text.noise_notes(shown)])
        _print_wrapped(text.brief_conclusions(comparison, table_report.verdicts))
        _print_wrapped(contradicted_conclusions(comparison.table))
        _print_wrapped([*text.rows_notes(comparison), text.plateau_note(comparison)])
        if comparison.mismatches:
            print_line(text.mismatch_note(comparison))
        if note := other_modules_note(comparison.finished_runs):
            print_line(note)
    if len(report.tables) > 1 and report.summary["table"]:
        show_sheet(SUMMARY, text.brief_summary_sheet(report.summary))
    if against:
        title = _prediction_title(scale, against).replace("`", "")
        if report.prediction["table"]:
            show_sheet(title, text.brief_prediction_sheet(report.prediction))
        else:
            print_line(f"{title}: not known, since no two learning rows of a table have runs in both")
    for line in report.left_out:
        print_line(f"not counted: {line}")
    print_line(
        f"Every task, claim, difference and picture: {report.path.with_suffix('.html')} (or .md, .csv)"
    )
    return report


def _print_wrapped(lines: Iterable[str]) -> None:
    """Print those of the lines that are not empty, wrapped at words; brackets in labels are no markup."""
    for line in filter(None, lines):
        CONSOLE.print(line, highlight=False, markup=False)


def _terminal_sheet(comparison: Comparison) -> tuple[Sheet, list[str]]:
    """Return what the terminal shows of a table's scores, and the headings of the columns left to the page.

    If the table of ``brief_sheet`` has no mean distance in the paper, the paper's own column is shown beside
    it, if there is exactly one and it fits. One of several columns would say little.
    """
    scores = text.scores_sheet(comparison)
    brief = text.brief_sheet(comparison, scores)
    published = [] if "paper" in brief else text.published_titles(comparison, scores)
    sheet = dict(brief)
    if len(published) == 1:
        seeds = sheet.pop("seeds")
        sheet |= {published[0]: text.trained_cells(comparison, scores[published[0]]), "seeds": seeds}
    metrics = [metric.title for metric in comparison.metrics if metric.title in sheet]
    sheet = narrowed(narrowed(sheet, ["row", *published]), metrics)
    return sheet, [head for head in (*brief, *published) if head not in sheet]


def brief_legend(sheet: Sheet) -> str:
    """Return what the signs and numbers in a sheet for the terminal mean."""
    ours: list[str] = []
    published: list[Cell] = []
    for title, cells in sheet.items():
        if title.startswith(text.published_title("")):
            published += cells
        elif title != "row":
            ours += [cell.text for cell in cells]
    halves = [title for title in GROUP_TITLES.values() if title in sheet]
    parts = []
    if halves:
        distance = "mean distance from the baseline over the tasks, in standard deviations of a run"
        parts += [f"{', '.join(halves)}: {distance}"]
    if losses := [title for title in HELD_OUT if title in sheet]:
        parts += [f"{', '.join(losses)}: lower is better, among rows that predict the same"]
    if "paper" in sheet:
        distance = "distance of the published scores from the baseline, in standard deviations of a run"
        above = ", positive if better"
        parts += ["paper: the same of the published scores" if halves else f"paper: {distance}{above}"]
    if any(score.endswith(("▲", "▼")) for score in ours):
        parts += ["▲ ▼: significantly better, worse than the baseline"]
    if any(score.endswith(text.OTHER_TARGETS) for score in ours):
        parts += [f"{text.OTHER_TARGETS}: predicts other tokens than the baseline, so not compared with it"]
    if any("±" in score for score in ours):
        parts += ["±: standard deviation over seeds"]
    if any(cell.bold for cell in published):
        parts += ["bold: best published score, or within two of its standard deviations of the best"]
    meanings = {
        "±": "± of published scores: the interval that the paper prints",
        text.DOUBTS[SECOND_HAND]: f"{text.DOUBTS[SECOND_HAND]}: published score from a secondary source",
        text.DOUBTS[UNSURE]: f"{text.DOUBTS[UNSURE]}: published score that may have been misread",
    }
    signs = "".join(cell.text for cell in published)
    parts += [said for sign, said in meanings.items() if sign in signs]
    return "; ".join(parts)


def write_pictures(report: Report, kind: str) -> list[str]:
    """Write every picture of a report as ``svg`` or ``pdf`` too, and return their names."""
    names = []
    for table_report in report.tables.values():
        save_figures(table_report.figures, report.path.parent, kind)
        names += [f"{name}.{kind}" for name in table_report.figures]
    return names


def write_latex(report: Report, scale: str, overrides: Overrides | None = None) -> list[Path]:
    """Write narrow tables of a report as LaTeX beside it, and the papers that they cite as BibTeX.

    Return the files; without a paper there is no second one. ``overrides``: settings of every row, which the
    captions give.
    """
    tables, papers = [], []
    for name, table_report in report.tables.items():
        label = "tab:" + re.sub(r"[^\w.:+-]", "-", file_name(name))
        comparison = table_report.comparison
        scores = text.scores_sheet(comparison.including_baseline())
        made = latex_tables(comparison, table_report.verdicts, scores, _setup_text(scale, overrides))
        tables += [table.text(label) for table in made]
        papers += [comparison.table.paper] if comparison.table.paper else []
    files = {report.path.with_suffix(".tex"): "\n".join(tables)}
    if papers:
        files[report.path.with_suffix(".bib")] = bibtex(papers)
    for path, contents in files.items():
        write(path, contents)
    return [*files]


def _setup_text(scale: str, overrides: Overrides | None) -> str:
    """Return the scale, and the settings that were given to every row, in words."""
    given = ", ".join(f"{name}={value}" for name, value in explicit_overrides(overrides or {}).items())
    return f"scale {scale}; in every row {given}" if given else f"scale {scale}"


def watch(
    tables: Sequence[Table],
    scale: str,
    runs: Folders,
    log: Callable[[str], object] = print_line,
    overrides: Overrides | None = None,
) -> None:
    """Write the report whenever its runs change, until interrupted.

    It uses a tenth of a core at most, and leaves the rest to runs that train at the same time.
    """
    run_roots(runs)  # if they cannot be read now, they cannot be read later
    last: object = None
    current: object
    wait, page = POLL_SECONDS, None
    try:
        while True:
            start = time.process_time()
            try:
                current = collect_runs(tables, scale, runs, overrides)
                if current != last:
                    report = write_report(tables, scale, runs, refresh=wait, overrides=overrides)
                    page = report.path.with_suffix(".html")
                    news = f"wrote {page}"
            except SettingError as error:  # nothing has finished yet
                news = current = str(error)
            if current != last:
                log(f"{time.strftime('%H:%M:%S')} {news}")
            last, wait = current, max(POLL_SECONDS, 9 * (time.process_time() - start))
            time.sleep(wait)
    except KeyboardInterrupt:
        if page is not None and page.exists():
            write(page, re.sub(REFRESH.format(r"\d+"), "", page.read_text("utf-8"), count=1))
        log("no longer watching")

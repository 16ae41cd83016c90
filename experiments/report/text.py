"""Makes the text of a report on a table: sheets of scores, differences, metrics and verdicts, and notes."""

import re
from collections import Counter
from collections.abc import Collection, Iterable, Mapping, Sequence
from contextlib import suppress
from dataclasses import replace
from itertools import chain
from math import inf, isfinite, isnan
from pathlib import Path
from statistics import mean

from experiments.console import MISSING, Cell, Sheet
from experiments.figures.panels import Score
from experiments.report.comparison import (
    EQUIVALENCE_MARGIN,
    MIN_ABOVE_CHANCE,
    UNCOMPARED,
    BaselineDifference,
    BaselineVerdict,
    Comparison,
    Uncompared,
    Verdict,
    Verdicts,
    to_baseline_verdict,
)
from experiments.report.metrics import (
    BITS_PER_BYTE,
    GROUP_TITLES,
    HELD_OUT_LOSS,
    JUDGED_BUDGETS,
    LIKELIHOODS,
    UNITS,
    Budget,
    Group,
    Metric,
    denoiser_losses,
    likelihood_score,
    perplexity_by_length,
    shortest_training,
)
from experiments.report.order import PaperOrder, ScalePrediction
from experiments.report.power import measure_noise
from experiments.report.statistics import ALPHA, NUM_RESAMPLES, POWER, RELATIVE_TOLERANCE, PairedTest
from experiments.runs import provenance
from experiments.runs.plateau import has_plateau
from experiments.runs.result import Result
from experiments.study.claims import (
    Claim,
    VerdictCounts,
    compared_columns,
    has_noise,
    is_tested,
    published_rows,
    simulate_replication,
    standardized,
)
from experiments.study.registry import REGISTRY
from experiments.study.start import START_ONLY_ROW
from experiments.study.table import SECOND_HAND, UNSURE, Row
from lm.config.base import SettingError
from lm.data.corpus.spec import corpus_parts, is_documentation

NBSP = "\N{NO-BREAK SPACE}"
ARROWS = {1: f"{NBSP}▲", 0: "", -1: f"{NBSP}▼"}
NOT_LEARNING: Uncompared = "not yet learning"  # in the place of a verdict
MISMATCH = "≠"  # follows the label of a row with another provenance than the others
MAX_DETECTABLE = 30  # larger than any difference seen between learning rows [standard deviations of a run]
BUDGET_TITLES: dict[Budget, str] = {"updates": "after training", "FLOP": "compute-matched"}
COUNTED = ("confirmed", "contradicted", "undecided", "not compared")  # what the fields of VerdictCounts count
SHORT_TITLES: dict[str, str] = {  # of groups, for lines of 80 columns
    GROUP_TITLES["both"]: "both",
    GROUP_TITLES["held-out text"]: "held-out",
}
TAU, P_VALUE = "+z.2f", ".2g"  # formats of Kendall's tau and of p-values
PREDICTION_TITLES = (  # of columns
    "table",
    "tasks",
    "rows",
    "decision accuracy",
    "its 95 % interval",
    "tau",
    "its interval",
    "p",
)
HELD_OUT_UNITS = {BITS_PER_BYTE: "bits per byte", HELD_OUT_LOSS: "nats per token"}
ORDER = "Order of rows beside the paper's"
CONCLUSIONS = "Conclusions stated in the table's file"
DIFFERENCES = "Difference from the baseline, with its 95 % confidence interval"
METRICS = "What the columns measure"
DENOISERS = "Held-out loss of each denoiser, in nats per target token"
CLAIMS: dict[Budget, str] = {
    budget: f"Claims {title}, in standard deviations of a run" for budget, title in BUDGET_TITLES.items()
}

ABOUT_SCORES = f"""A row is the baseline with one change (`lm list TABLE`). A column is a metric: a task, \
named by what it measures, or held-out text (↓, and all losses: lower is better). Numbers are means ± \
standard deviations over seeds. ▲ ▼: significantly better, worse than the baseline, in a paired t test over \
seeds (family-wise error rate {ALPHA:g} over the column, by Holm's method) and by {NUM_RESAMPLES:,} \
bootstrap resamples of seeds and examples. One seed is never significant. A difference is equivalent if it \
is significantly smaller than {EQUIVALENCE_MARGIN:.2g} standard deviations of a run (of its score with new \
seeds and new examples), and otherwise undecided. Rows that have learned no more than how often tokens occur \
(not yet learning) have neither sign nor verdict. Each interval is for one difference on its own, so it may \
exclude 0 although the difference is undecided after the correction for many tests. Bits above chance grow \
with the probability of the right answer: 0 is that of a guess. A model that is sure of its wrong answers is \
below 0, even if it ranks most of the right ones first. Held-out loss is compared only where objective, kind \
of model, text, vocabulary and sequence length are the baseline's (else: different targets, and * behind the \
score)."""
ABOUT_PAPER = """The paper's column of the same kind is printed beside ours. Its best score is bold, and so \
is each score within two standard deviations (of the paper's baseline) of the best. The tasks differ, so \
compare only the order of rows. † marks scores from a secondary source, and ? those that may have been \
misread. ± behind a published score is the interval that the paper prints."""
START_VERDICTS: dict[BaselineVerdict, str] = {  # what follows a row's gain over the start alone
    "better": "",
    "worse": ", worse",
    "equivalent": ", adds nothing",
    "undecided": ", undecided",
}
OTHER_TARGETS = "*"  # behind a score on other tokens than the baseline's
DOUBTS = {SECOND_HAND: "†", UNSURE: "?"}
ABOUT_CLAIMS = """**Order before counts.** Kendall's tau compares the order of our rows with that of the \
paper's, by means over columns: 1 is the same order, 0 none, -1 the opposite. p is the probability of a tau \
as far from 0 if all orders were equally likely; its interval resamples seeds and examples. Beside it is the \
tau that a repeat of the paper would reach on average, given the noise of its printed scores.

A *claim* is a pair of rows that the paper's own noise tells apart (z, over all its columns), or a \
conclusion in the table's file, written before the rows are run. A conclusion may also say that two rows are \
as good as each other (≈): it is confirmed if they are equivalent, contradicted if one is significantly \
better, and otherwise undecided. The *mean z-score* is the mean over columns of the difference from the \
baseline, each in standard deviations of a run, which are those of the median row of all tables of the \
report. Where these are unknown, as of held-out text with one seed, differences keep the metric's own \
unit. The columns are fixed and in two halves of equal weight: *reading* (cannot be answered without the \
input; the paper's own columns are of this kind, so claims are judged on this half first) and *language* \
(how well the model knows the text's language). A column at chance counts too. A table without tasks is \
judged by its held-out text instead. Our runs confirm or contradict a claim if the difference is significant \
by the tests above. Rows are compared after all of their training, as in the paper, and where both had spent \
the same FLOP on pre-training (compute-matched), if both were scored there (else: out of range) and had left \
the unigram plateau (else: not yet learning), by the seeds that both have. The curve over *content tokens* \
(predicted words, without sentinels, ends and copies) is a diagnostic and has no verdict. The noise of a \
difference is partly pooled over the differences that are tested together, so the same two rows have \
slightly different intervals among the claims and among the differences from the baseline. A run *leaves the \
unigram plateau* at the step where its loss of content tokens is 0.2 nats below that of a unigram model."""


# ---- scores


def scores_sheet(comparison: Comparison) -> Sheet:
    """Return a line per row: its score in each metric, beside it the paper's, and what training cost.

    ≠ marks the rows that were trained with other data or code than most.
    """
    rows = comparison.table.rows
    sheet = {"row": [Cell(row.label + _mismatch_mark([row.name], comparison.mismatches)) for row in rows]}
    for metric in comparison.metrics:
        sheet[metric.title] = _metric_cells(comparison, metric)
        if metric.paper_column:
            _add_published(sheet, comparison, metric.paper_column)
    if not any(metric.paper_column for metric in comparison.metrics):  # none of ours matches a column
        for column in compared_columns(comparison.table):
            _add_published(sheet, comparison, column.name)
    if comparison.has_tasks:
        for group in comparison.groups:
            cells = [_mean_z_cell(comparison, row, group) for row in rows]
            if _is_filled(cells):  # without a run of the baseline no row has one
                sheet[mean_z_title(group)] = cells
    if comparison.has_tasks and comparison.control is not None:
        for group in comparison.groups:
            sheet[f"over the start alone, {GROUP_TITLES[group]}"] = _start_cells(comparison, group)
    by_length = [perplexity_by_length(comparison.runs_of(row)) for row in rows]
    for multiple in sorted(set[int]().union(*by_length)):
        sheet[f"perplexity at {multiple} ×"] = [score_cell(2, scores.get(multiple)) for scores in by_length]
    others = _document_cells(comparison) | _training_cells(comparison)
    for title, cells in others.items():
        # Bits per byte of held-out text is a metric and one of the likelihoods. Both make a column of this
        # name; that of the metric, which has arrows, is kept.
        sheet.setdefault(title, cells)
    return sheet


def trained_cells(comparison: Comparison, cells: Sequence[Cell]) -> list[Cell]:
    """Return those cells of a column, which has one per row of the table, that are of trained rows."""
    rows = comparison.table.rows
    return [cell for row, cell in zip(rows, cells, strict=True) if comparison.runs_of(row)]


def add_line(sheet: Sheet, line: Mapping[str, Cell]) -> None:
    """Add a cell to each column of a sheet; columns that it lacks are begun."""
    for title, cell in line.items():
        sheet.setdefault(title, []).append(cell)


def _is_filled(cells: Iterable[Cell]) -> bool:
    """Return whether any cell of a column has something in it."""
    return any(cell != Cell() for cell in cells)


def brief_sheet(comparison: Comparison, scores: Sheet) -> Sheet:
    """Return a narrow version of ``scores`` for a terminal of 80 characters: a line per trained row.

    scores: the sheet of ``scores_sheet``. The columns are the mean z-score of each half of the tasks (or each
    metric, of a table without tasks or without a run of the baseline), the row's mean distance from the
    baseline in the paper, and the number of seeds.
    """
    halves = [group for group in comparison.groups if group != "both" and mean_z_title(group) in scores]
    columns = {GROUP_TITLES[group]: mean_z_title(group) for group in halves}  # title -> title in ``scores``
    if not columns:  # without tasks, or without a run of the baseline
        columns = {metric.title: metric.title for metric in comparison.metrics}
    columns = {"row": "row", **columns, "seeds": "seeds"}
    sheet = {title: trained_cells(comparison, scores[column]) for title, column in columns.items()}
    if published := _published_distances(comparison, comparison.trained_rows):
        sheet |= {"paper": published, "seeds": sheet.pop("seeds")}
    return sheet


def _published_distances(comparison: Comparison, rows: Sequence[Row]) -> list[Cell]:
    """Return each row's mean distance from the baseline in the paper, in standard deviations of one run.

    It is positive if the row is better. Empty if the paper compares these rows in no column, if the noise of
    its scores is unknown, or if it lacks a score of the baseline. The cell of a row that lacks one is empty.
    """
    table, baseline = comparison.table, comparison.baseline
    complete = published_rows(replace(table, rows=(baseline, *rows)))
    if not has_noise(table) or baseline not in complete:
        return []
    baseline_mean = standardized(baseline, table).mean()
    distances = {row.name: float(standardized(row, table).mean() - baseline_mean) for row in complete}
    return [_number_cell(distances.get(row.name), "+z.1f") for row in rows]


def verdict_sentence(comparison: Comparison, verdicts: Verdicts) -> str:
    """Return what came out of a table: its claims by the first group of tasks, and the order of its rows.

    It also says if one seed is too few to decide or, without claims, that no row differs from the baseline.
    """
    sentences = _claims_sentences(comparison, verdicts)
    num_seeds = [len(comparison.runs[name]) for name in comparison.canonical_names]
    if max(num_seeds) == 1 and num_seeds.count(1) > 1:
        sentences.append("One seed decides nothing: train more with --seeds.")
    elif not sentences:
        found = set[BaselineVerdict]()
        for metric in comparison.metrics:
            differences = _judged_differences(comparison, metric).values()
            found.update(difference.verdict for difference in differences)
        if found and not found & {"better", "worse"}:
            sentences.append("No row differs significantly from the baseline.")
    return " ".join(sentences)


def _claims_sentences(comparison: Comparison, verdicts: Verdicts) -> list[str]:
    """Return what came out of the claims by the first group of tasks; empty if no claim is judged by it."""
    group = comparison.main_group
    if group is None:
        return []
    main = verdicts[group]["updates"]
    counts = count_verdicts(main)
    if not counts.total:
        return []
    judges = group if group == "held-out text" else f"the {GROUP_TITLES[group]} tasks"
    sentences = [f"{_counted(round(counts.total), 'claim')} judged by {judges}: {_verdict_words(counts)}."]
    if num_equivalent := sum(verdict.word == "equivalent" for _, verdict in main):
        verb = "is" if num_equivalent == 1 else "are"
        sentences.append(f"Of the undecided {num_equivalent} {verb} equivalent.")
    if group == "reading" and "language" in verdicts:
        by_language = count_verdicts(verdicts["language"]["updates"])
        decided = by_language.confirmed, by_language.contradicted
        if any(decided) and decided != (counts.confirmed, counts.contradicted):
            sentences.append(f"By the tasks on language: {_verdict_words(by_language)}.")
    if any(verdict.word == NOT_LEARNING for _, verdict in main):
        sentences.append("A row had not left the unigram plateau (not yet learning): train longer.")
    if (order := comparison.paper_orders.get(group)) is not None:
        sentences.append(f"Kendall's tau with the paper's order: {order.tau:+z.2f} (p = {order.p:.2g}).")
    return sentences


def _verdict_words(counts: VerdictCounts) -> str:
    """Return how many claims have each verdict, as "1 confirmed, 2 undecided"."""
    return ", ".join(f"{number:.0f} {word}" for word, number in zip(COUNTED, counts, strict=True) if number)


def plateau_note(comparison: Comparison) -> str:
    """Return which rows learned no more than how often tokens occur; "" if all learned more."""
    stuck = [
        row.label
        for row in comparison.trained_rows
        if not comparison.has_left_plateau(comparison.canonical_name(row))
    ]
    if not stuck:
        return ""
    return f"Not below the unigram loss yet, so that differences say little: {'; '.join(stuck)}."


def noise_notes(comparison: Comparison) -> list[str]:
    """Return notes on the unit of mean z-scores, in a table with tasks: on what of the noise is unknown.

    The noise over seeds is unknown if no learning row of the report has two seeds, and that of a metric if
    its examples were not kept either.
    """
    if not comparison.has_tasks or len(comparison.trained_rows) < 2:
        return []
    noises = {metric.name: comparison.noise[metric.name] for metric in comparison.judging_metrics}
    notes = []
    if any(noise.examples for noise in noises.values()) and not any(noise.seeds for noise in noises.values()):
        notes.append(
            "Without a second seed of any learning row, a standard deviation of a run is here that of its "
            "examples alone. It lacks the noise over seeds: with more seeds it grows, and mean z-scores "
            "shrink."
        )
    if unknown := [name for name, noise in noises.items() if not noise.is_known]:
        notes.append(
            f"The noise of {', '.join(unknown)} is unknown: no learning row has seeds that differ, and no "
            "examples were kept. In mean z-scores such a metric counts in its own unit, so do not compare "
            "them."
        )
    return notes


def equal_rows_note(comparison: Comparison) -> str:
    """Return which rows are the same experiment as another of the table, and share its runs; "" if none."""
    first_rows: dict[str, Row] = {}  # canonical name -> first row of this name
    equal = []
    for row in comparison.trained_rows:
        first = first_rows.setdefault(comparison.canonical_name(row), row)
        if first is not row:
            equal.append(f"{row.label} (as {first.label})")
    if not equal:
        return ""
    return f"The same experiment as another row, with the same runs: {'; '.join(equal)}."


def unlike_rows_note(comparison: Comparison) -> str:
    """Return a note on rows whose held-out text is scored on other tokens than the baseline's.

    "" if there are none, or if the table has tasks. If the baseline has no run, the first row that has one
    takes its place.
    """
    metric = next((metric for metric in comparison.metrics if metric.is_held_out), None)
    rows = comparison.trained_rows
    if comparison.has_tasks or metric is None or not rows:
        return ""
    has_baseline = bool(comparison.runs.get(comparison.canonical_baseline))
    reference = comparison.baseline if has_baseline else rows[0]
    name = comparison.canonical_name(reference)
    unlike = [
        row.label
        for row in rows
        if not comparison.is_comparable(metric, comparison.canonical_name(row), name)
    ]
    if not unlike:
        return ""
    reason = "whose objective, kind of model, text, vocabulary or sequence length is another"
    return f"Not comparable in {metric.title} with {reference.label}, {reason}: {'; '.join(unlike)}."


def rows_notes(comparison: Comparison) -> list[str]:
    """Return sentences about rows that cannot be compared: equal ones, and those of unlike held-out text."""
    return [*filter(None, (equal_rows_note(comparison), unlike_rows_note(comparison)))]


def _number_cell(value: float | None, spec: str, unit: str = "") -> Cell:
    """Return a number in the format ``spec``, with its unit; an empty cell for None and nan."""
    if value is None or isnan(value):
        return Cell()
    return Cell(f"{value:{spec}}{unit}", value=value)


def score_cell(
    digits: int, score: Score | None, mark: str = "", sign_format: str = "", prefix: str = ""
) -> Cell:
    """Return mean ± standard deviation with so many decimals, between a prefix such as "≤" and a mark.

    sign_format: how Python formats the sign. "+z" writes + before positive numbers, and never -0.0.
    """
    if score is None:
        return Cell()
    text = f"{score.mean:{sign_format}.{digits}f}"
    if score.std is not None:
        text += f"{NBSP}±{NBSP}{score.std:.{digits}f}"
    if prefix:
        text = f"{prefix}{NBSP}{text}"
    return Cell(text + mark, value=score.mean, deviation=score.std)


def _metric_cells(comparison: Comparison, metric: Metric) -> list[Cell]:
    """Return each row's score, with an arrow if it is significantly better or worse than the baseline.

    A score on other tokens than the baseline's has OTHER_TARGETS behind it. Rows on the unigram plateau have
    no arrow, as they have no verdict in claims.
    """
    values, differences = comparison.values_by_seed(metric), _judged_differences(comparison, metric)
    baseline, experiments = comparison.canonical_baseline, comparison.experiments
    cells = []
    for row in comparison.table.rows:
        name = comparison.canonical_name(row)
        mark = prefix = ""
        if name in differences:
            mark = ARROWS[differences[name].test.sign]
        elif {name, baseline} <= experiments.keys() and not comparison.is_comparable(metric, name, baseline):
            mark = OTHER_TARGETS
        if metric.measure == BITS_PER_BYTE:
            prefix = bound_sign(comparison.runs_of(row))
        cells.append(score_cell(metric.digits, Score.of(values[name].values()), mark, prefix=prefix))
    return cells


def _judged_differences(comparison: Comparison, metric: Metric) -> dict[str, BaselineDifference]:
    """Return the differences from the baseline of rows that are judged: both have left the plateau."""
    found = comparison.differences(metric)
    return {name: found[name] for name in found if _is_judged(comparison, name)}


def _is_judged(comparison: Comparison, name: str) -> bool:
    """Return whether a row and the baseline have left the unigram plateau, as both rows of a claim must."""
    return all(map(comparison.has_left_plateau, (name, comparison.canonical_baseline)))


def bound_sign(runs: Iterable[Result]) -> str:
    """Return "≤" if only an upper bound of perplexity and bits per byte is known, as for masked diffusion."""
    likelihoods = filter(None, (run.likelihood() for run in runs))
    return "≤" if any(likelihood.is_bound for likelihood in likelihoods) else ""


def mean_z_title(group: Group) -> str:
    """Return the title of the column of a group's combined scores."""
    return f"mean z-score, {GROUP_TITLES[group]}"


def _mean_z_cell(comparison: Comparison, row: Row, group: Group) -> Cell:
    name = comparison.canonical_name(row)
    score = Score.of(comparison.combined_scores(name, group).values())
    if score is not None and not comparison.has_left_plateau(name):
        return Cell(NOT_LEARNING)
    return score_cell(1, score, sign_format="+z")


def _start_cells(comparison: Comparison, group: Group) -> list[Cell]:
    """Return how far each row's combined score is above that of the control, which has only the start."""
    tests, cells = comparison.gains_over_start(group), []
    for row in comparison.table.rows:
        test = tests.get(comparison.canonical_name(row))
        if test is None:
            cells.append(Cell())
        else:
            interval = interval_text(test.low, test.high, 1)
            verdict = START_VERDICTS[to_baseline_verdict(test)]
            cells.append(Cell(f"{test.mean:+z.1f}{interval}{verdict}", value=test.mean))
    return cells


def published_title(column: str) -> str:
    """Return the title over a column of the paper."""
    return f"paper's {column}"


def published_titles(comparison: Comparison, sheet: Sheet) -> list[str]:
    """Return the titles of the paper's columns in a sheet."""
    paper = comparison.table.paper
    if paper is None:
        return []
    titles = [published_title(column.name) for column in paper.columns]
    return [title for title in titles if title in sheet]


def _add_published(sheet: Sheet, comparison: Comparison, column: str) -> None:
    """Add a column of the paper to ``sheet``, if a row of the table has a score in it, and only once."""
    title = published_title(column)
    if title not in sheet and any(column in row.published for row in comparison.table.rows):
        sheet[title] = _published_cells(comparison, column)


def _published_cells(comparison: Comparison, name: str) -> list[Cell]:
    """Return the paper's scores by its own rule: bold within two deviations of the best, and arrows."""
    assert comparison.table.paper is not None, "rows with published scores have a paper"
    column = comparison.table.paper.column(name)
    better = 1 if column.higher_is_better else -1
    scores = [row.published[name] for row in comparison.table.rows if name in row.published]
    best = max(better * score for score in scores)
    baseline = comparison.baseline.published.get(name)
    digits = 2 if all(round(score, 2) == score for score in scores) else 3
    cells = []
    for row in comparison.table.rows:
        if name not in row.published:
            cells.append(Cell())
            continue
        score = row.published[name]
        text = f"{score:.{digits}f}"
        if name in row.intervals:
            text += f"{NBSP}±{NBSP}{row.intervals[name]:.{digits}f}"
        text += DOUBTS.get(row.doubts.get(name, ""), "")
        text += ARROWS[better * _published_sign(score, baseline, column.std)]
        is_best = not _exceeds_noise(best - better * score, column.std or 0.0)
        cells.append(Cell(text, bold=is_best, value=score))
    return cells


def _published_sign(score: float, baseline: float | None, std: float | None) -> int:
    """Return 1, -1 if a score is above, below the baseline's by more than two standard deviations, else 0."""
    if baseline is None or std is None or not _exceeds_noise(abs(score - baseline), std):
        return 0
    return 1 if score > baseline else -1


def _exceeds_noise(difference: float, std: float) -> bool:
    """Return whether a difference is more than two standard deviations, by more than rounding."""
    return difference > 2 * std * (1 + RELATIVE_TOLERANCE)


def _document_cells(comparison: Comparison) -> Sheet:
    """Return the likelihood of held-out documents, at the end and after equal time; empty without any."""
    if not any(run.likelihoods for run in comparison.finished_runs):
        return {}
    rows = [comparison.runs_of(row) for row in comparison.table.rows]

    def cells(measure: str, digits: int, seconds: float = inf) -> list[Cell]:
        return [
            score_cell(digits, likelihood_score(runs, measure, seconds), prefix=bound_sign(runs))
            for runs in rows
        ]

    sheet = {title: cells(measure, digits) for title, (measure, digits) in LIKELIHOODS.items()}
    seconds = shortest_training(rows)
    if seconds is not None:
        for title, (measure, digits) in LIKELIHOODS.items():
            if measure != "perplexity":
                sheet[f"{title} in {seconds:.0f} s"] = cells(measure, digits, seconds)
    sheet["parameters"] = [_number_cell(runs[0].parameters, ",") if runs else Cell() for runs in rows]
    return sheet


def _training_cells(comparison: Comparison) -> Sheet:
    """Return what pre-training reached and cost; counters that no run has are left out."""
    has_content_loss = any(run.content_loss is not None for run in comparison.finished_runs)
    sheet: Sheet = {}
    for row in comparison.table.rows:
        runs = comparison.runs_of(row)
        line = {"seeds": _seeds_cell(row, comparison)}
        if has_content_loss:
            share = Score.of(run.top_ten_share for run in runs)
            line["content tokens"] = _content_tokens_cell(runs)
            line["content loss"] = score_cell(3, Score.of(run.content_loss for run in runs))
            line["unigram loss"] = score_cell(3, Score.of(run.reference_loss for run in runs))
            line["left plateau at step"] = _exit_step_cell(comparison, row)
            line["share of predictions among the 10 commonest tokens"] = _mean_cell(share, ".0%")
        minutes = Score.of(run.seconds / 60 for run in runs)
        add_line(sheet, line | {"minutes": _mean_cell(minutes, ".1f")})
    return sheet


def _seeds_cell(row: Row, comparison: Comparison) -> Cell:
    """Return how many seeds of a row have finished, or what it needs before it can be run."""
    if row.needs:
        return Cell(f"not run: needs {', '.join(row.needs)}", value=0)
    seeds = len(comparison.runs_of(row))
    return Cell(str(seeds), value=seeds)


def _content_tokens_cell(runs: Sequence[Result]) -> Cell:
    if not any(run.content_tokens for run in runs):
        return Cell()
    tokens = mean(run.content_tokens for run in runs)
    return Cell(f"{tokens / 1e6:.2f}{NBSP}M", value=tokens)


def _mean_cell(score: Score | None, spec: str) -> Cell:
    """Return the mean of a score in the format ``spec``; its deviation is in the CSV alone."""
    return Cell() if score is None else Cell(f"{score.mean:{spec}}", value=score.mean, deviation=score.std)


def _exit_step_cell(comparison: Comparison, row: Row) -> Cell:
    """Return the mean step at which seeds left the unigram plateau, and how many did not.

    The cell has a value only if all seeds left it: a mean over some of them says too little.
    """
    if row.needs or not has_plateau(comparison.experiments[row.name]):
        return Cell()
    pretrained = [run for run in comparison.runs_of(row) if run.content_loss is not None]
    if not pretrained:
        return Cell()
    steps = [run.exit_step for run in pretrained if run.exit_step is not None]
    if len(steps) == len(pretrained):
        return _number_cell(mean(steps), ",.0f")
    not_left = f"{len(pretrained) - len(steps)} of {len(pretrained)} not left"
    return Cell(f"{mean(steps):,.0f}, {not_left}" if steps else not_left)


def with_keys(sheet: Sheet, rows: Iterable[Row]) -> Sheet:
    """Return the sheet with the key of each of ``rows`` in brackets behind its label, as in "2^29 (64)".

    A row's label is its name in the paper; its key is its name in commands and claims. A key whose words are
    all in the label is not added.
    """
    if "row" not in sheet:
        return sheet
    keys = {row.label: row.key for row in rows if not _words(row.key) <= _words(row.label)}
    named = []
    for cell in sheet["row"]:
        label, mark, _ = cell.text.partition(f" {MISMATCH}")
        key = f" ({keys[label]})" if label in keys else ""
        named.append(cell._replace(text=f"{label}{key}{mark}"))
    return sheet | {"row": named}


def _words(text: str) -> set[str]:
    return {*re.findall(r"\w+", text.casefold())}


def _mismatch_mark(names: Iterable[str], mismatched: Collection[str]) -> str:
    """Return " ≠", to follow a text about the rows ``names``, if one of them is mismatched; else ""."""
    return "" if set(names).isdisjoint(mismatched) else f" {MISMATCH}"


# ---- differences from the baseline


def differences_sheet(comparison: Comparison) -> Sheet | None:
    """Return each row's difference from the baseline in each metric; None if no other row has finished."""
    rows = [
        row
        for row in comparison.trained_rows
        if comparison.canonical_name(row) != comparison.canonical_baseline
    ]
    if not rows or not comparison.runs[comparison.canonical_baseline]:
        return None
    sheet = {"row": [Cell(row.label) for row in rows]}
    for metric in comparison.metrics:
        sheet[metric.title] = _difference_cells(comparison, metric, rows)
    return sheet


def _difference_cells(comparison: Comparison, metric: Metric, rows: Sequence[Row]) -> list[Cell]:
    differences, values = comparison.differences(metric), comparison.values_by_seed(metric)
    digits, cells = metric.digits, []
    for row in rows:
        name = comparison.canonical_name(row)
        if name in differences:
            difference = differences[name]
            interval = interval_text(difference.low, difference.high, digits)
            verdict = difference.verdict if _is_judged(comparison, name) else NOT_LEARNING
            text = f"{difference.mean:+z.{digits}f}{interval} {verdict}"
            cells.append(Cell(text, value=difference.mean))
        elif values[name] and not comparison.is_comparable(metric, name, comparison.canonical_baseline):
            cells.append(Cell("different targets"))
        else:
            cells.append(Cell())
    return cells


def interval_text(low: float, high: float, digits: int) -> str:
    """Return " (-0.2, +1.4)" for an interval with so many decimals; "" for one that is not known."""
    if not isfinite(low):
        return ""
    return f" ({low:+z.{digits}f}, {high:+z.{digits}f})"


# ---- metrics


def metrics_sheet(comparison: Comparison) -> Sheet:
    """Return a line per metric: its tasks, what guessing scores, the baseline's answers, signal-to-noise."""
    sheet: Sheet = {}
    for metric in comparison.metrics:
        if not metric.is_held_out:
            add_line(sheet, _metric_line(comparison, metric))
    if not comparison.baseline.published:
        del sheet["paper's column"]
    if not any(cell.value is not None for cell in sheet["baseline, inputs shuffled"]):
        del sheet["baseline, inputs shuffled"]
    return sheet


def _metric_line(comparison: Comparison, metric: Metric) -> dict[str, Cell]:
    return {
        "column": Cell(metric.title),
        "tasks": Cell(_task_names(metric)),
        "half": Cell(metric.half),
        "paper's column": Cell(_paper_column(comparison, metric)),
        "chance": _number_cell(metric.chance, "g"),
        "baseline above chance": _baseline_above_chance_cell(comparison, metric),
        "rows above chance": _rows_above_chance_cell(comparison, metric),
        "baseline, inputs shuffled": _shuffled_cell(comparison, metric),
        "baseline ranks right": _baseline_metric_cell(comparison, metric, "ranked_accuracy", "%"),
        "baseline answers": _baseline_answers_cell(comparison, metric),
        "signal-to-noise": Cell(_signal_text(comparison, metric)),
    }


def _task_names(metric: Metric) -> str:
    names = ", ".join(metric.tasks)
    if metric.measure in UNITS:
        return names
    *others, last = (name.replace("_", " ") for name in metric.task_metrics)
    if others:
        last = f"{', '.join(others)} and {last}"
    return f"{names} ({last})"


def _paper_column(comparison: Comparison, metric: Metric) -> str:
    if metric.paper_column is None or comparison.table.paper is None:
        return "–"
    return f"{metric.paper_column} ({comparison.table.paper.column(metric.paper_column).unit})"


def _signal_text(comparison: Comparison, metric: Metric) -> str:
    """Return a metric's signal-to-noise ratio and, if it is in no average, the reason."""
    signal = comparison.signal_to_noise[metric.name]
    ratio = "unknown" if signal is None else f"{signal:.1f}"
    if metric in comparison.judging_metrics:
        return ratio
    reasons = sorted({comparison.not_averaged[task] for task in metric.tasks})
    return f"{ratio}, not averaged: {'; '.join(reasons)}"


def _baseline_answers_cell(comparison: Comparison, metric: Metric) -> Cell:
    """Return the baseline's means of the tasks' own metrics, as "50.5 f1, 30.5 exact match"."""
    cells = [
        _baseline_metric_cell(comparison, metric, name, f" {name.replace('_', ' ')}")
        for name in metric.task_metrics
    ]
    return Cell(", ".join(cell.text for cell in cells if cell != Cell()) or MISSING)


def _baseline_metric_cell(comparison: Comparison, metric: Metric, recorded_metric: str, unit: str) -> Cell:
    """Return the baseline's mean of a metric that scores.json has beside the score, over seeds and tasks.

    Empty if the tasks are not scored in bits, or if none has ``recorded_metric``.
    """
    if metric.measure not in UNITS:
        return Cell()
    known = []
    for run in comparison.runs_of(comparison.baseline):
        for task in metric.tasks:
            metrics = run.tasks[task]["metrics"] if task in run.tasks else {}
            if metrics.get(recorded_metric) is not None:
                known.append(metrics[recorded_metric])
    return _number_cell(mean(known), ".1f", unit) if known else Cell()


def _baseline_above_chance_cell(comparison: Comparison, metric: Metric) -> Cell:
    errors = comparison.standard_errors_above_chance(metric, comparison.canonical_baseline)
    return _number_cell(errors, "+z.1f", " s.e.")


def _rows_above_chance_cell(comparison: Comparison, metric: Metric) -> Cell:
    """Return how many rows are above chance, or "none: at chance". A metric without any still counts."""
    counts = comparison.rows_above_chance(metric)
    if counts is None:
        return Cell()
    above, known = counts
    return Cell(f"{above} of {known}" if above else "none: at chance")


def _shuffled_cell(comparison: Comparison, metric: Metric) -> Cell:
    """Return the baseline's score with inputs shuffled between examples, and the share of it that is lost.

    The share is of the score's distance from chance; it is left out where the score is at chance. Both scores
    are means over the seeds that have both.
    """
    values, pairs = comparison.values_by_seed(metric)[comparison.canonical_baseline], []
    for run in comparison.runs_of(comparison.baseline):
        scores = {}
        for task, best in run.tasks.items():
            if best.get("shuffled"):
                scores[task] = {"metrics": {}, **best["shuffled"]}
        shuffled = metric.value(scores)
        if shuffled is not None and run.seed in values:
            pairs.append((values[run.seed], shuffled))
    if not pairs:
        return Cell()
    score, shuffled = map(mean, zip(*pairs, strict=True))
    text = f"{shuffled:.{metric.digits}f}"
    errors = comparison.standard_errors_above_chance(metric, comparison.canonical_baseline)
    is_at_chance = errors is not None and errors < MIN_ABOVE_CHANCE  # a share of nothing
    if metric.chance is not None and score != metric.chance and not is_at_chance:
        text += f", loses {(score - shuffled) / (score - metric.chance):.0%}"
    return Cell(text, value=shuffled)


# ---- losses of denoisers


def denoisers_sheet(comparison: Comparison) -> Sheet | None:
    """Return a line per row of the table and denoiser of its mixture; None without any.

    It has the share of training sequences that this denoiser makes, and its held-out loss.
    """
    sheet: Sheet = {}
    for row in comparison.trained_rows:
        losses = denoiser_losses(comparison.runs_of(row))
        denoisers = comparison.experiments[row.name].objective.denoisers
        total = sum(denoiser.weight for denoiser in denoisers)
        for denoiser in denoisers:
            if denoiser.name in losses:
                line = {"row": Cell(row.label), "denoiser": Cell(denoiser.name)}
                line["share of sequences"] = _number_cell(denoiser.weight / total, ".1%")
                line["held-out loss"] = score_cell(3, losses[denoiser.name])
                add_line(sheet, line)
    return sheet or None


# ---- the order of rows


def order_sheet(comparison: Comparison) -> Sheet | None:
    """Return a line per group of metrics: Kendall's tau with the paper's order; None if it has no order."""
    sheet: Sheet = {}
    for group, order in comparison.paper_orders.items():
        add_line(sheet, {"tasks": Cell(GROUP_TITLES[group])} | _order_line(order))
    return sheet or None


def _order_line(order: PaperOrder) -> dict[str, Cell]:
    return {
        "rows": _number_cell(len(order.rows), "d"),
        "tau": _number_cell(order.tau, TAU),
        "95 % interval": _interval_cell(order.interval, TAU),
        "p": _number_cell(order.p, P_VALUE),
        "a repeat of the paper": _number_cell(order.replication, TAU),
    }


def _interval_cell(interval: tuple[float, float] | None, spec: str) -> Cell:
    if interval is None:
        return Cell()
    low, high = interval
    return Cell(f"{low:{spec}} to {high:{spec}}")


def prediction_sheet(predictions: Mapping[str, Mapping[Group, ScalePrediction]]) -> Sheet:
    """Return a line per table and group of metrics: how far one scale predicts the order at another."""
    sheet: Sheet = {title: [] for title in PREDICTION_TITLES}
    for table, by_group in predictions.items():
        for group, prediction in by_group.items():
            line = (
                Cell(table),
                Cell(GROUP_TITLES[group]),
                _number_cell(len(prediction.rows), "d"),
                _number_cell(prediction.accuracy, ".0%"),
                _interval_cell(prediction.accuracy_interval, ".0%"),
                _number_cell(prediction.tau, TAU),
                _interval_cell(prediction.tau_interval, TAU),
                _number_cell(prediction.p, P_VALUE),
            )
            add_line(sheet, dict(zip(PREDICTION_TITLES, line, strict=True)))
    return sheet


def brief_prediction_sheet(prediction: Sheet) -> Sheet:
    """Return what 80 columns hold of the sheet of ``prediction_sheet``: the estimates, without intervals."""
    estimates = ("table", "tasks", "rows", "decision accuracy", "tau", "p")
    return {title: prediction[title] for title in estimates} | {"tasks": _short_titles(prediction["tasks"])}


def _short_titles(groups: Iterable[Cell]) -> list[Cell]:
    return [Cell(SHORT_TITLES.get(group.text, group.text)) for group in groups]


def summary_sheet(comparisons: Sequence[Comparison], verdicts: Sequence[Verdicts]) -> Sheet:
    """Return a line per table and group of metrics: the order of its rows, then the verdicts on its claims.

    Tables are left out that have neither.
    """
    order_titles = ("rows", "tau", "95 % interval", "p", "a repeat of the paper")
    titles = ("table", "tasks", *order_titles, "claims", *COUNTED, "share confirmed")
    sheet: Sheet = {title: [] for title in titles}
    for comparison, by_group in zip(comparisons, verdicts, strict=True):
        for group, by_budget in by_group.items():
            counts = count_verdicts(by_budget["updates"])
            cells = {"table": Cell(comparison.table.name), "tasks": Cell(GROUP_TITLES[group])}
            if group in comparison.paper_orders:
                cells |= _order_line(comparison.paper_orders[group])
            elif not counts.total:
                continue
            if counts.total:
                for title, number in zip(("claims", *COUNTED), (counts.total, *counts), strict=True):
                    cells[title] = _number_cell(number, ".0f")
                cells["share confirmed"] = _number_cell(counts.share_confirmed, ".0%")
            add_line(sheet, dict.fromkeys(titles, Cell()) | cells)
    return sheet


def brief_summary_sheet(summary: Sheet) -> Sheet:
    """Return what 80 columns hold of the sheet of ``summary_sheet``: tau, its p-value, and decided claims."""
    sheet = {
        "table": summary["table"],
        "tasks": _short_titles(summary["tasks"]),
        "tau": summary["tau"],
        "p": summary["p"],
        "confirmed": [_out_of(*cells) for cells in zip(summary["confirmed"], summary["claims"], strict=True)],
        "contradicted": summary["contradicted"],
    }
    return {title: cells for title, cells in sheet.items() if _is_filled(cells)}


def _out_of(part: Cell, whole: Cell) -> Cell:
    return part if whole == Cell() else part._replace(text=f"{part.text} of {whole.text}")


# ---- claims


def claims_sheet(verdicts: Verdicts, budget: Budget, mismatched: Collection[str]) -> Sheet | None:
    """Return a line per claim, with its verdict by each group of metrics; None without claims.

    ≠ marks the claims about ``mismatched`` rows.
    """
    claims = _claims_of(verdicts)
    if not claims:
        return None
    sheet: Sheet = {"claim": [Cell(_claim_text(claim, mismatched)) for claim in claims]}
    if any(claim.z is not None for claim in claims):
        sheet["z"] = [_number_cell(claim.z, ".1f") for claim in claims]
    for group, by_budget in verdicts.items():
        sheet[GROUP_TITLES[group]] = [_verdict_cell(verdict) for _, verdict in by_budget[budget]]
    return sheet | {"conclusion": [Cell(claim.conclusion) for claim in claims]}


def conclusions_sheet(verdicts: Verdicts, mismatched: Collection[str]) -> Sheet | None:
    """Return a line per conclusion of the table's file, with its verdicts; None if there are none."""
    stated = {index: claim for index, claim in enumerate(_claims_of(verdicts)) if claim.conclusion}
    if not stated:
        return None
    claims = stated.values()
    sheet: Sheet = {
        "conclusion": [Cell(claim.conclusion) for claim in claims],
        "claim": [Cell(_claim_text(claim, mismatched)) for claim in claims],
    }
    for group, by_budget in verdicts.items():
        for budget, judged in by_budget.items():
            words = [judged[index][1].word for index in stated]
            title = f"{GROUP_TITLES[group]}, {BUDGET_TITLES[budget]}"
            sheet[title] = [Cell(word, bold=word == "contradicted") for word in words]
    return sheet


def brief_conclusions(comparison: Comparison, verdicts: Verdicts) -> list[str]:
    """Return a line per conclusion of a table's file: its verdict after training, with the difference.

    Each is judged by the half of the tasks that it is about or, if it is about all, by the main group. Empty
    if any claim of the table is not a conclusion; the report's page lists all claims.
    """
    claims, main_group = _claims_of(verdicts), comparison.main_group
    if main_group is None or not all(claim.conclusion for claim in claims):
        return []
    unit = _raw_unit(comparison)
    lines = []
    for index, claim in enumerate(claims):
        group = claim.tasks or main_group
        if group not in verdicts:
            said = f"no tasks of {GROUP_TITLES[group]} to judge by"
        else:
            _, verdict = verdicts[group]["updates"][index]
            said = _verdict_cell(verdict).text
            if unit and verdict.test is not None:
                said += f" ({unit}, positive: better)"
            if group != main_group:
                said += f", by {GROUP_TITLES[group]}"
        lines.append(f"- {said}: {claim.conclusion} ({claim.pair})")
    return lines


def _raw_unit(comparison: Comparison) -> str:
    """Return the unit of differences that are not divided by a noise standard deviation; "" if they are.

    Only a table that is judged by held-out text has such differences, as long as that deviation is unknown:
    no row has two seeds with different values.
    """
    if comparison.main_group != "held-out text":
        return ""
    (metric,) = comparison.judging_metrics
    if comparison.noise[metric.name].is_known:
        return ""
    return HELD_OUT_UNITS[metric.measure]


def _claims_of(verdicts: Verdicts) -> list[Claim]:
    """Return the claims, which are the same for all groups and budgets."""
    by_budget = next(iter(verdicts.values()))
    return [claim for claim, _ in by_budget["updates"]]


def rows_of_claims(verdicts: Verdicts) -> list[Row]:
    """Return the rows that the claims are about."""
    rows: dict[Row, None] = {}  # each once
    for claim in _claims_of(verdicts):
        rows |= dict.fromkeys((claim.better, claim.worse))
    return [*rows]


def _claim_text(claim: Claim, mismatched: Collection[str]) -> str:
    return claim.pair + _mismatch_mark(claim.names, mismatched)


def _verdict_cell(verdict: Verdict) -> Cell:
    text: str = verdict.word
    if (test := verdict.test) is not None:
        text += f" {test.mean:+z.1f}{interval_text(test.low, test.high, 1)}"
    return Cell(text, bold=verdict.word == "contradicted")


def count_verdicts(verdicts: Iterable[tuple[Claim, Verdict]]) -> VerdictCounts:
    """Count the claims that are confirmed, contradicted, undecided, and not compared.

    Claims about other tasks do not count.
    """
    words = Counter(verdict.word for _, verdict in verdicts if verdict.word != "other tasks")
    confirmed, contradicted = words["confirmed"], words["contradicted"]
    uncompared = sum(words[word] for word in UNCOMPARED)
    undecided = words.total() - confirmed - contradicted - uncompared
    return VerdictCounts(confirmed, contradicted, undecided, uncompared)


def counts_text(counts: VerdictCounts) -> str:
    """Return counts of verdicts as text, with the share that is confirmed of those decided."""
    decided = counts.confirmed + counts.contradicted
    share = f"{counts.confirmed / decided:.0%} of those decided" if decided else "none decided"
    digits = 0 if all(float(number).is_integer() for number in counts) else 1
    numbers = dict(zip(COUNTED, counts, strict=True))
    if not counts.uncompared:
        del numbers["not compared"]
    return ", ".join(f"{number:.{digits}f} {word}" for word, number in numbers.items()) + f" ({share})"


def claims_notes(comparison: Comparison, verdicts: Verdicts) -> list[str]:
    """Return paragraphs on verdicts: their counts, a simulated replication's, power, and outlying seeds."""
    claims = _claims_of(verdicts)
    if not claims:
        return []
    lines = []
    for group, by_budget in verdicts.items():
        titles: dict[str, list[str]] = {}  # counts as text -> the budgets at which they are the same
        for budget, judged in by_budget.items():
            counts = count_verdicts(judged)
            if counts.total:  # else all claims are about other tasks
                titles.setdefault(counts_text(counts), []).append(BUDGET_TITLES[budget])
        for said, budgets in titles.items():
            lines.append(f"- {GROUP_TITLES[group]}, {' and '.join(budgets)}: {said}")
    replication = simulate_replication(comparison.table)
    if replication.total:
        lines.append(f"- simulated replication of the paper: {counts_text(replication)}")
    group, by_budget = next(iter(verdicts.items()))
    main = by_budget["updates"]
    rows = set[str]().union(*(claim.names for claim in claims))
    if not rows.isdisjoint(comparison.mismatches):
        matched = [each for each in main if each[0].names.isdisjoint(comparison.mismatches)]
        said = counts_text(count_verdicts(matched))
        title = f"{GROUP_TITLES[group]}, {BUDGET_TITLES['updates']}"
        lines.append(f"- {title}, not counting claims about rows with {MISMATCH}: {said}")
    number = f"{_counted(len(claims), 'claim')} about these rows"
    if lines:
        notes = [f"{number}:\n\n" + "\n".join(lines)]
    else:
        notes = [f"{number}, judged by tasks that they do not have."]
    notes += _conclusion_notes(comparison, claims)
    if num_equivalent := sum(verdict.word == "equivalent" for _, verdict in main):
        margin = f"less than {EQUIVALENCE_MARGIN:.2g} standard deviations of a run apart"
        notes.append(f"{num_equivalent} of the undecided ({GROUP_TITLES[group]}) are equivalent: {margin}.")
    tested = {}
    for claim, verdict in main:
        if verdict.test and verdict.test.degrees_of_freedom:
            tested[claim] = verdict.test
    if tested:
        notes.append(_power_note(comparison, tested, group))
    elif min(len(comparison.runs[name]) for name in rows) < 2:
        note = "A row with one seed decides nothing; train more with --seeds."
        if unit := _raw_unit(comparison):
            note += f" Until then differences are in {unit}, positive: better."
        notes.append(note)
    if any(verdict.word == "out of range" for _, verdict in chain.from_iterable(by_budget.values())):
        notes.append(
            "Out of range: one of the rows was never scored after so little training. A sweep with "
            "`--tuning.branches 0.25 0.5 1.0` scores each row on the way."
        )
    if outliers := comparison.outlying_seeds():
        names = ", ".join(f"{row} seed {seed}" for row, seed in outliers)
        notes.append(f"Outlying seeds (mean z-score far from the row's others, and counted): {names}.")
    return notes


def _conclusion_notes(comparison: Comparison, claims: Sequence[Claim]) -> list[str]:
    """Return how many conclusions the table's file states and how many lack runs, and what others are."""
    stated = comparison.table.conclusions
    if not stated:
        return []
    note = f"The table's file states {_counted(len(stated), 'conclusion')}"
    num_judged = sum(bool(claim.conclusion) for claim in claims)
    num_untestable = sum(not is_tested(each, comparison.table) for each in stated)
    if num_waiting := len(stated) - num_judged - num_untestable:
        verb = "waits" if num_waiting == 1 else "wait"
        note += f"; {num_waiting} of them {verb} for runs of both rows"
    if num_untestable:
        note += f"; {num_untestable} cannot be tested here, in columns that our runs do not measure"
    note += "."
    if num_others := len(claims) - num_judged:
        note += f" The other claims ({num_others}) are pairs of rows that the paper's own noise tells apart."
    return [note]


def _counted(count: int, noun: str) -> str:
    """Return "1 claim" or "3 claims"."""
    return f"1 {noun}" if count == 1 else f"{count} {noun}s"


def _power_note(comparison: Comparison, tested: Mapping[Claim, PairedTest], group: Group) -> str:
    """Return a sentence on the smallest true difference that the tests of a group find with power POWER.

    It is computed as by ``lm power``: the correction for many tests counts all claims of the table, including
    those whose rows have no runs yet.
    """
    counts = {len(test.by_seed) for test in tested.values()}
    fewest, most = min(counts), max(counts)
    seeds = f"{fewest} seeds" if fewest == most else f"{fewest} to {most} seeds"
    noise = measure_noise(comparison, group)
    smallest = noise.smallest_difference(fewest)
    name = comparison.canonical_name
    tested_pairs = {(name(claim.better), name(claim.worse)) for claim in tested}
    if len(tested_pairs) == len(noise.pairs):
        tests = f"{_counted(len(tested), 'claim')} of this table"
    else:
        all_pairs = f"all {len(noise.pairs)} pairs of rows in this table's claims"
        tests = f"{all_pairs} ({len(tested_pairs)} of them tested here)"
    design = f"With {seeds} per pair and {tests}"
    if smallest > MAX_DETECTABLE:
        return f"{design} hardly any difference is significant; train more with --seeds."
    return (
        f"{design}, a difference of {smallest:.1f} standard deviations of a run in {GROUP_TITLES[group]} is "
        f"found with a power of {100 * POWER:g} %, at the strictest step of Holm's method."
    )


def all_claims_note(verdicts: Sequence[Verdicts], comparisons: Sequence[Comparison]) -> str:
    """Return the mean share of confirmed claims over tables, beside raw counts.

    "" if fewer than two tables have claims, or if nothing was scored that these are about.
    """
    claimed = [pair for pair in zip(verdicts, comparisons, strict=True) if _claims_of(pair[0])]
    if len(claimed) < 2:
        return ""
    lines = []
    for group in dict.fromkeys(chain.from_iterable(by_group for by_group, _ in claimed)):
        titles: dict[str, list[str]] = {}  # share as text -> the budgets at which it is the same
        for budget in JUDGED_BUDGETS:
            if said := _mean_share_text(
                count_verdicts(by_group[group][budget]) for by_group, _ in claimed if group in by_group
            ):
                titles.setdefault(said, []).append(BUDGET_TITLES[budget])
        for said, budgets in titles.items():
            lines.append(f"- {GROUP_TITLES[group]}, {' and '.join(budgets)}: {said}")
    if said := _mean_share_text(simulate_replication(comparison.table) for _, comparison in claimed):
        lines.append(f"- simulated replication of the paper: {said}")
    if not lines:
        return ""
    return "Share of a table's claims that are confirmed, as a mean over tables:\n\n" + "\n".join(lines)


def _mean_share_text(counts: Iterable[VerdictCounts]) -> str:
    """Return the mean share over tables, each with the same weight, and the counts of all claims.

    Tables without a claim that counts are left out; "" if none is left.
    """
    known = [each for each in counts if each.total]
    if not known:
        return ""
    share = mean(each.share_confirmed for each in known)
    total = VerdictCounts(*map(sum, zip(*known, strict=True)))
    return f"{share:.0%} of {_counted(len(known), 'table')}; in all {counts_text(total)}"


# ---- other notes


def document_notes(comparison: Comparison) -> list[str]:
    """Return a sentence on the held-out documents whose likelihood is shown; none if there are none."""
    known = [*filter(None, (run.likelihood() for run in comparison.finished_runs))]
    notes = []
    for tokens, words, size in dict.fromkeys((each.tokens, each.words, each.bytes) for each in known):
        notes.append(
            f"Likelihoods are those of whole held-out documents of {tokens:,} tokens (ends included), "
            f"{words:,} words and {size:,} bytes. Equal time is the training time of the fastest network, "
            "without compilation and evaluation; between evaluations values are interpolated in the "
            "logarithm of time."
        )
    if intervals := [each.bits_per_byte_interval for each in known if each.is_bound]:
        notes.append(
            "≤ marks an upper bound: masked diffusion gives a text no probability that could be computed. It "
            "is estimated from random masks; the 95 % interval of a run's bits per byte is "
            f"± {max(intervals):.3f} or less."
        )
    return notes


def start_notes(comparison: Comparison) -> list[str]:
    """Return a sentence on the control that has the start alone; none where rows have no such start.

    The control is an encoder-decoder; encoders have no start, and decoders one of their own.
    """
    baseline = comparison.experiments[comparison.baseline.name]
    has_start = baseline.start.steps > 0 and baseline.model.architecture == "encoder-decoder"
    if not has_start or START_ONLY_ROW not in REGISTRY:
        return []
    if comparison.control is None:
        return [
            f"No control was trained ({START_ONLY_ROW}: the start alone, then fine-tuned), so it is not "
            "known what a row's own objective adds to its start."
        ]
    return [
        f"Over the start alone: less `{START_ONLY_ROW}`, which has the start that rows share, and is "
        "fine-tuned; in brackets the 95 % interval. A row adds nothing if it is equivalent to the start "
        f"alone: significantly closer to it than {EQUIVALENCE_MARGIN:.2g} standard deviations of a run. "
        "It is undecided if it is neither equivalent nor significantly better or worse. Rows of another "
        "model than the baseline's have a start of their own, and are not compared."
    ]


def text_notes(comparison: Comparison) -> list[str]:
    """Return which corpora the runs read and, for the built-in text, the digests in their records."""
    folders = set[Path]()
    for run in comparison.finished_runs:
        folders.update(run.stage_folders().values())
    digests = set[str]()
    for folder in folders:
        with suppress(SettingError, OSError):  # reported with the mismatches
            digests.add(provenance.read(folder)["data"].get("documentation", ""))
    notes = [
        f"Text of {'; '.join(labels)}: {corpus}." for corpus, labels in _other_corpora(comparison).items()
    ]
    for digest in sorted(digests - {""}):
        if digest == "installed":
            notes.append("Text: the documentation of installed packages, which differs by machine.")
        else:
            notes.append(f"Text: the built-in documentation, digest {digest[:12]}.")
    return notes


def _other_corpora(comparison: Comparison) -> dict[str, list[str]]:
    """Return corpus -> labels of the rows that read it, without the built-in documentation."""
    found: dict[str, list[str]] = {}
    for row in comparison.trained_rows:
        corpus = comparison.experiments[comparison.canonical_name(row)].data.corpus
        if not all(map(is_documentation, corpus_parts(corpus))):
            found.setdefault(corpus, []).append(row.label)
    return found


def undefined_notes(comparison: Comparison) -> list[str]:
    """Return a sentence for each score that is undefined, with the reason."""
    first_rows: dict[str, Row] = {}  # canonical name -> first row of this name; they share their runs
    for row in (*comparison.table.rows, comparison.baseline):
        first_rows.setdefault(comparison.canonical_name(row), row)
    notes = []
    for row in first_rows.values():
        for run in comparison.runs_of(row):
            for column in run.columns:
                for task, reason in run.undefined(column).items():
                    score = f"{row.label}, seed {run.seed}: {column}"
                    notes.append(f"{score} is undefined ({task}: {reason}); it is in no mean.")
    return notes


def mismatch_note(comparison: Comparison) -> str:
    """Return which runs have other data, code, packages or shared pre-training than most, by what differs."""
    seeds: dict[str, dict[str, list[str]]] = {}  # reason -> row -> its seeds
    for mismatches in comparison.mismatches.values():
        for mismatch in mismatches:
            by_row = seeds.setdefault(mismatch.reason, {})
            by_row.setdefault(mismatch.row, []).append(str(mismatch.seed))
    lines = []
    for reason, by_row in seeds.items():
        runs = []
        for row, numbers in by_row.items():
            noun = "seed" if len(numbers) == 1 else "seeds"
            runs.append(f"{row} {noun} {', '.join(numbers)}")
        lines.append(f"\n- {'; '.join(runs)}: {reason}")
    return (
        f"{MISMATCH}: trained with different data, code or packages than most rows, or from other copies of "
        f"shared pre-training, which may be why its scores differ.\n{''.join(lines)}"
    )

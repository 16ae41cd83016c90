"""Makes the text of a report on a table: sheets of scores, differences, metrics and verdicts, and notes."""

import re
from collections import Counter
from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import replace
from math import isfinite
from statistics import mean

from experiments.console import MISSING, Cell, Sheet
from experiments.figures.panels import Score
from experiments.report.comparison import (
    EQUIVALENCE_MARGIN,
    MIN_ABOVE_CHANCE,
    UNCOMPARED,
    UNKNOWN_NOISE,
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
from experiments.report.order import ScalePrediction
from experiments.report.power import measure_noise
from experiments.report.statistics import ALPHA, NUM_RESAMPLES, POWER, PairedTest
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
SHORT_TITLES: dict[str, str] = {  # of groups, for lines of 80 columns
    GROUP_TITLES["both"]: "both",
    GROUP_TITLES["held-out text"]: "held-out",
}
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
ABOUT_PAPER = """The paper's column of the same kind is printed beside ours, with the paper's own marks (two \
standard deviations of its baseline). The tasks differ, so compare only the order of rows. † marks scores \
from a secondary source, and ? those that may have been misread."""
START_VERDICTS: dict[BaselineVerdict, str] = {
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
    """Return a line per row: its score in each metric, beside it the paper's, and what training cost."""
    rows = comparison.table.rows
    sheet = {"row": [Cell(row.label) for row in rows]}
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
            if any(cell != Cell() for cell in cells):  # without a run of the baseline no row has one
                sheet[mean_z_title(group)] = cells
    if comparison.has_tasks and comparison.control is not None:
        for group in comparison.groups:
            sheet[f"over the start alone, {GROUP_TITLES[group]}"] = _start_cells(comparison, group)
    by_length = [perplexity_by_length(comparison.runs_of(row)) for row in rows]
    for multiple in dict.fromkeys(multiple for scores in by_length for multiple in scores):
        sheet[f"perplexity at {multiple} ×"] = [score_cell(2, scores.get(multiple)) for scores in by_length]
    others = _document_cells(comparison) | _training_cells(comparison)
    # Bits per byte of held-out text is a metric and one of the likelihoods. Both make a column of this name;
    # that of the metric, which has arrows, is kept.
    return sheet | {head: cells for head, cells in others.items() if head not in sheet}


def brief_sheet(comparison: Comparison, scores: Sheet) -> Sheet:
    """Return a narrow version of ``scores`` for a terminal of 80 characters: a line per trained row.

    scores: the sheet of ``scores_sheet``. The columns are the mean z-score of each half of the tasks (or each
    metric, of a table without tasks or without a run of the baseline), the row's mean distance from the
    baseline in the paper, and the number of seeds.
    """
    rows = comparison.trained_rows
    indices = [comparison.table.rows.index(row) for row in rows]
    halves = [group for group in comparison.groups if group != "both"]
    titles = {mean_z_title(group): GROUP_TITLES[group] for group in halves}  # column of scores -> its title
    titles = {column: title for column, title in titles.items() if column in scores}
    if not titles:  # without tasks, or without a run of the baseline
        titles = {metric.title: metric.title for metric in comparison.metrics}
    titles = {"row": "row"} | titles
    sheet = {title: [scores[column][index] for index in indices] for column, title in titles.items()}
    if published := _published_distances(comparison, rows):
        sheet["paper"] = published
    return sheet | {"seeds": [scores["seeds"][index] for index in indices]}


def _published_distances(comparison: Comparison, rows: Sequence[Row]) -> list[Cell]:
    """Return each row's mean distance from the baseline in the paper, in standard deviations of one run.

    It is positive if the row is better. Empty if the paper compares these rows in no column, if the noise of
    its scores is unknown, or if it lacks a score of the baseline. The cell of a row that lacks one is empty.
    """
    table, baseline = comparison.table, comparison.baseline
    complete = published_rows(replace(table, rows=(baseline, *rows)))
    if not has_noise(table) or baseline not in complete:
        return []
    means = {row.name: standardized(row, table).mean() for row in complete}
    cells = []
    for row in rows:
        if row.name in means:
            distance = float(means[row.name] - means[baseline.name])
            cells.append(Cell(f"{distance:+z.1f}", value=distance))
        else:
            cells.append(Cell())
    return cells


def verdict_sentence(comparison: Comparison, verdicts: Verdicts) -> str:
    """Return what came out of a table: its claims by the first group of tasks, and the order of its rows.

    It also says if one seed is too few to decide or, without claims, that no row differs from the baseline.
    """
    sentences = _claims_sentences(comparison, verdicts)
    trained = comparison.trained_rows
    if len(trained) > 1 and max(len(comparison.runs_of(row)) for row in trained) < 2:
        sentences.append("One seed decides nothing: train more with --seeds.")
    elif not sentences:
        judged = (_judged_differences(comparison, metric) for metric in comparison.metrics)
        found = [each for differences in judged for each in differences.values()]
        if found and not {"better", "worse"} & {each.verdict for each in found}:
            sentences.append("No row differs significantly from the baseline.")
    return " ".join(sentences)


def _claims_sentences(comparison: Comparison, verdicts: Verdicts) -> list[str]:
    claims = _claims_of(verdicts) if verdicts else []
    group = comparison.main_group
    if not claims or group is None:
        return []
    main = verdicts[group]["updates"]
    counts = count_verdicts(main)
    if not counts.total:
        return []
    judges = "held-out text" if group == "held-out text" else f"the {GROUP_TITLES[group]} tasks"
    sentences = [f"{_count_text(round(counts.total))} judged by {judges}: {_verdict_words(counts)}."]
    if num_equivalent := sum(verdict.word == "equivalent" for _, verdict in main):
        sentences.append(
            f"Of the undecided {num_equivalent} {'is' if num_equivalent == 1 else 'are'} equivalent."
        )
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
    words = {
        "confirmed": counts.confirmed,
        "contradicted": counts.contradicted,
        "undecided": counts.undecided,
        "not compared": counts.uncompared,
    }
    return ", ".join(f"{number:.0f} {word}" for word, number in words.items() if number)


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
    """Return a note if the unit of mean z-scores holds the noise of examples and none over seeds.

    So it is if no learning row of the report has two seeds, in tables with tasks.
    """
    if not comparison.has_tasks or len(comparison.trained_rows) < 2:
        return []
    noises = [comparison.noise[metric.name] for metric in comparison.judging_metrics]
    if any(noise.seeds for noise in noises) or not any(noise.examples for noise in noises):
        return []
    return [
        "Without a second seed of any learning row, a standard deviation of a run is here that of its "
        "examples alone. It lacks the noise over seeds: with more seeds it grows, and mean z-scores shrink."
    ]


def equal_rows_note(comparison: Comparison) -> str:
    """Return which rows are the same experiment as another of the table, and share its runs; "" if none."""
    first: dict[str, str] = {}
    equal = []
    for row in comparison.trained_rows:
        label = first.setdefault(comparison.canonical_name(row), row.label)
        if label != row.label:
            equal.append(f"{row.label} (as {label})")
    return f"The same experiment as another row, with the same runs: {'; '.join(equal)}." if equal else ""


def unlike_rows_note(comparison: Comparison) -> str:
    """Return a note on rows whose held-out text is scored on other tokens than the baseline's.

    "" if there are none, or if the table has tasks. If the baseline has no run, the first row that has one
    takes its place.
    """
    metric = next((metric for metric in comparison.metrics if metric.is_held_out), None)
    rows = comparison.trained_rows
    if comparison.has_tasks or metric is None or not rows:
        return ""
    first = comparison.baseline if comparison.runs.get(comparison.canonical_baseline) else rows[0]
    reference = comparison.canonical_name(first)
    others = "; ".join(
        row.label
        for row in rows
        if not comparison.is_comparable(metric, comparison.canonical_name(row), reference)
    )
    if not others:
        return ""
    reason = "whose objective, kind of model, text, vocabulary or sequence length is another"
    return f"Not comparable in {metric.title} with {first.label}, {reason}: {others}."


def rows_notes(comparison: Comparison) -> list[str]:
    """Return sentences about rows that cannot be compared: equal ones, and those of unlike held-out text."""
    return [*filter(None, (equal_rows_note(comparison), unlike_rows_note(comparison)))]


def score_cell(
    digits: int, score: Score | None, mark: str = "", sign_format: str = "", prefix: str = ""
) -> Cell:
    """Return mean ± standard deviation with so many decimals, behind a ``prefix`` such as "≤".

    ``sign_format`` is how Python formats the sign: "+z" writes + too, and no -0.0.
    """
    if score is None:
        return Cell()
    deviation = "" if score.std is None else f"{NBSP}±{NBSP}{score.std:.{digits}f}"
    before = f"{prefix}{NBSP}" if prefix else ""
    text = f"{before}{score.mean:{sign_format}.{digits}f}{deviation}{mark}"
    return Cell(text, value=score.mean, deviation=score.std)


def _metric_cells(comparison: Comparison, metric: Metric) -> list[Cell]:
    """Return each row's score, with an arrow if it is significantly better or worse than the baseline.

    A score on other tokens than the baseline's has OTHER_TARGETS behind it. Rows on the unigram plateau have
    no arrow, as they have no verdict in claims.
    """
    samples, differences = comparison.values_by_seed(metric), _judged_differences(comparison, metric)
    baseline = comparison.canonical_baseline
    has_baseline = baseline in comparison.experiments
    cells = []
    for row in comparison.table.rows:
        name = comparison.canonical_name(row)
        sign = differences[name].test.sign if name in differences else 0
        prefix = bound_sign(comparison.runs_of(row)) if metric.measure == BITS_PER_BYTE else ""
        is_unlike = name in comparison.experiments and not comparison.is_comparable(metric, name, baseline)
        mark = OTHER_TARGETS if is_unlike and has_baseline else ARROWS[sign]
        score = Score.of(samples[name].values())
        cells.append(score_cell(metric.digits, score, mark, prefix=prefix))
    return cells


def _judged_differences(comparison: Comparison, metric: Metric) -> dict[str, BaselineDifference]:
    """Return the differences from the baseline of rows that are judged: both have left the plateau."""
    found = comparison.differences(metric)
    return {name: found[name] for name in found if _is_judged(comparison, name)}


def _is_judged(comparison: Comparison, name: str) -> bool:
    """Return whether a row and the baseline have left the unigram plateau, as claims need it of two rows."""
    return all(map(comparison.has_left_plateau, (name, comparison.canonical_baseline)))


def bound_sign(runs: Iterable[Result]) -> str:
    """Return "≤" if only an upper bound of perplexity and bits per byte is known, as for masked diffusion."""
    likelihoods = (run.likelihood() for run in runs)
    return "≤" if any(x is not None and x.is_bound for x in likelihoods) else ""


def mean_z_title(group: Group) -> str:
    """Return the heading of the combined scores of a group of metrics."""
    return f"mean z-score, {GROUP_TITLES[group]}"


def _mean_z_cell(comparison: Comparison, row: Row, group: Group) -> Cell:
    name = comparison.canonical_name(row)
    score = Score.of(comparison.combined_scores(name, group).values())
    if score is not None and not comparison.has_left_plateau(name):
        return Cell(NOT_LEARNING)
    return score_cell(1, score, sign_format="+z")


def _start_cells(comparison: Comparison, group: Group) -> list[Cell]:
    """Return what each row's own objective adds to the combined score of a model that has the start alone."""
    tests, cells = comparison.gains_over_start(group), []
    for row in comparison.table.rows:
        test = tests.get(comparison.canonical_name(row))
        if test is not None:
            interval = interval_text(test.low, test.high, 1)
            verdict = START_VERDICTS[to_baseline_verdict(test)]
            cells.append(Cell(f"{test.mean:+z.1f}{interval}{verdict}", value=test.mean))
        else:
            cells.append(Cell())
    return cells


def published_title(column: str) -> str:
    """Return the heading of a column of the paper."""
    return f"paper's {column}"


def published_titles(comparison: Comparison, sheet: Sheet) -> list[str]:
    """Return the headings of the paper's columns in a sheet."""
    paper = comparison.table.paper
    titles = [published_title(column.name) for column in paper.columns] if paper else []
    return [title for title in titles if title in sheet]


def _add_published(sheet: Sheet, comparison: Comparison, column: str) -> None:
    """Add a column of the paper to ``sheet``, if a row of the table has a score in it, and only once."""
    head = published_title(column)
    if head not in sheet and any(column in row.published for row in comparison.table.rows):
        sheet[head] = _published_cells(comparison, column)


def _published_cells(comparison: Comparison, column: str) -> list[Cell]:
    """Return the paper's scores by its own rule: bold within two deviations of the best, and arrows."""
    assert comparison.table.paper is not None, "rows with published scores have a paper"
    std = comparison.table.paper.column(column).std
    sign = 1 if comparison.table.paper.column(column).higher_is_better else -1
    scores = [row.published.get(column) for row in comparison.table.rows]
    best = max((sign * score for score in scores if score is not None), default=0.0)
    baseline = comparison.baseline.published.get(column)
    digits = 2 if all(score is None or round(score, 2) == score for score in scores) else 3
    cells = []
    for row, score in zip(comparison.table.rows, scores, strict=True):
        if score is None:
            cells.append(Cell())
        else:
            arrow = ARROWS[sign * published_sign(score, baseline, std)]
            doubt = DOUBTS.get(row.doubts.get(column, ""), "")
            is_best = sign * score >= best - 2 * (std or 0.0)
            width = row.intervals.get(column)
            interval = "" if width is None else f"{NBSP}±{NBSP}{width:.{digits}f}"
            cells.append(Cell(f"{score:.{digits}f}{interval}{doubt}{arrow}", bold=is_best, value=score))
    return cells


def published_sign(score: float, baseline: float | None, std: float | None) -> int:
    """Return 1, -1 if a score is above, below the baseline's by more than two standard deviations, else 0."""
    if baseline is None or std is None or abs(score - baseline) <= 2 * std:
        return 0
    return 1 if score > baseline else -1


def _document_cells(comparison: Comparison) -> Sheet:
    """Return the likelihood of held-out documents, at the end and after equal time; empty without any."""
    rows = [comparison.runs_of(row) for row in comparison.table.rows]
    if not any(run.likelihoods for runs in rows for run in runs):
        return {}
    sheet = {
        head: [score_cell(digits, likelihood_score(runs, measure), prefix=bound_sign(runs)) for runs in rows]
        for head, (measure, digits) in LIKELIHOODS.items()
    }
    seconds = shortest_training(rows)
    if seconds is not None:
        for head, (measure, digits) in LIKELIHOODS.items():
            if measure != "perplexity":
                sheet[f"{head} in {seconds:.0f} s"] = [
                    score_cell(digits, likelihood_score(runs, measure, seconds), prefix=bound_sign(runs))
                    for runs in rows
                ]
    sizes = [runs[0].parameters if runs else None for runs in rows]
    sheet["parameters"] = [Cell() if size is None else Cell(f"{size:,}", value=size) for size in sizes]
    return sheet


def _training_cells(comparison: Comparison) -> Sheet:
    """Return what pre-training reached and cost; counters that no run has are left out."""
    rows = [comparison.runs_of(row) for row in comparison.table.rows]
    sheet: Sheet = {"seeds": [_seeds_cell(row, comparison) for row in comparison.table.rows]}
    if any(run.content_loss is not None for runs in rows for run in runs):
        content = [Score.of(run.content_loss for run in runs) for runs in rows]
        unigram = [Score.of(run.reference_loss for run in runs) for runs in rows]
        sheet["content tokens"] = [_content_tokens_cell(runs) for runs in rows]
        sheet["content loss"] = [score_cell(3, score) for score in content]
        sheet["unigram loss"] = [score_cell(3, score) for score in unigram]
        sheet["left plateau at step"] = [_exit_step_cell(comparison, row) for row in comparison.table.rows]
        sheet["share of predictions among the 10 commonest tokens"] = [_top_ten_cell(runs) for runs in rows]
    minutes = [Score.of(run.seconds / 60 for run in runs) for runs in rows]
    sheet["minutes"] = [
        Cell(f"{score.mean:.1f}", value=score.mean, deviation=score.std) if score else Cell()
        for score in minutes
    ]
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


def _top_ten_cell(runs: Sequence[Result]) -> Cell:
    score = Score.of(run.top_ten_share for run in runs)
    return Cell() if score is None else Cell(f"{score.mean:.0%}", value=score.mean, deviation=score.std)


def _exit_step_cell(comparison: Comparison, row: Row) -> Cell:
    """Return the mean step at which seeds left the unigram plateau, and how many did not."""
    if row.needs or not has_plateau(comparison.experiments[row.name]):
        return Cell()
    pretrained = [run for run in comparison.runs_of(row) if run.content_loss is not None]
    if not pretrained:
        return Cell()
    steps = [run.exit_step for run in pretrained if run.exit_step is not None]
    parts = [f"{mean(steps):,.0f}"] if steps else []
    if len(steps) < len(pretrained):
        parts.append(f"{len(pretrained) - len(steps)} of {len(pretrained)} not left")
    return Cell(", ".join(parts))


def with_keys(sheet: Sheet, rows: Iterable[Row]) -> Sheet:
    """Return the sheet with the key of each of ``rows`` in brackets behind its label, as in "2^29 (64)".

    A row's label is its name in the paper; its key is its name in commands and claims. A key whose words are
    all in the label is not added.
    """
    if "row" not in sheet:
        return sheet
    keys = {row.label: row.key for row in rows if not _words(row.key) <= _words(row.label)}

    def named(cell: Cell) -> Cell:
        label, flag, _ = cell.text.partition(f" {MISMATCH}")
        return cell._replace(text=f"{label} ({keys[label]}){flag}") if label in keys else cell

    return sheet | {"row": [*map(named, sheet["row"])]}


def _words(text: str) -> set[str]:
    return {*re.findall(r"\w+", text.casefold())}


def flag_rows(sheet: Sheet, labels: Iterable[str]) -> Sheet:
    """Return the sheet with ≠ behind the rows of these ``labels``."""
    flagged = {label: f"{label} {MISMATCH}" for label in labels}
    return sheet | {"row": [cell._replace(text=flagged.get(cell.text, cell.text)) for cell in sheet["row"]]}


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
    differences, samples = comparison.differences(metric), comparison.values_by_seed(metric)
    digits, cells = metric.digits, []
    for row in rows:
        name = comparison.canonical_name(row)
        if name in differences:
            x = differences[name]
            interval = interval_text(x.low, x.high, digits)
            verdict = x.verdict if _is_judged(comparison, name) else NOT_LEARNING
            cells.append(Cell(f"{x.mean:+z.{digits}f}{interval} {verdict}", value=x.mean))
        elif samples[name] and not comparison.is_comparable(metric, name, comparison.canonical_baseline):
            cells.append(Cell("different targets"))
        else:
            cells.append(Cell())
    return cells


def interval_text(low: float, high: float, digits: int) -> str:
    """Return " (-0.2, +1.4)" for an interval with so many decimals; "" for one that is not known."""
    return f" ({low:+z.{digits}f}, {high:+z.{digits}f})" if isfinite(low) else ""


# ---- metrics


def metrics_sheet(comparison: Comparison) -> Sheet:
    """Return a line per metric: its tasks, what guessing scores, the baseline's answers, signal-to-noise."""
    metrics = [metric for metric in comparison.metrics if not metric.is_held_out]
    sheet = {
        "column": [Cell(metric.title) for metric in metrics],
        "tasks": [Cell(_task_names(metric)) for metric in metrics],
        "half": [Cell(metric.half) for metric in metrics],
        "paper's column": [Cell(_paper_column(comparison, metric)) for metric in metrics],
        "chance": [Cell() if metric.chance is None else Cell(f"{metric.chance:g}") for metric in metrics],
        "baseline above chance": [_baseline_above_chance_cell(comparison, metric) for metric in metrics],
        "rows above chance": [_rows_above_chance_cell(comparison, metric) for metric in metrics],
        "baseline, inputs shuffled": [_shuffled_cell(comparison, metric) for metric in metrics],
        "baseline ranks right": [
            _baseline_metric_cell(comparison, metric, "ranked_accuracy", "%") for metric in metrics
        ],
        "baseline answers": [_baseline_answers_cell(comparison, metric) for metric in metrics],
        "signal-to-noise": [Cell(_signal_text(comparison, metric)) for metric in metrics],
    }
    if not comparison.baseline.published:
        del sheet["paper's column"]
    if not any(cell.value is not None for cell in sheet["baseline, inputs shuffled"]):
        del sheet["baseline, inputs shuffled"]
    return sheet


def _task_names(metric: Metric) -> str:
    names = ", ".join(metric.tasks)
    if metric.measure in UNITS:
        return names
    *others, last = (name.replace("_", " ") for name in metric.task_metrics)
    return f"{names} ({', '.join(others)} and {last})" if others else f"{names} ({last})"


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
    known = [cell for cell in cells if cell != Cell()]
    return known[0] if len(known) == 1 else Cell(", ".join(cell.text for cell in known) or MISSING)


def _baseline_metric_cell(comparison: Comparison, metric: Metric, recorded_metric: str, unit: str) -> Cell:
    """Return the baseline's mean of a metric that scores.json has beside the score, over seeds and tasks.

    Empty if the tasks are not scored in bits, or if none has ``recorded_metric``.
    """
    if metric.measure not in UNITS:
        return Cell()
    runs = comparison.runs_of(comparison.baseline)
    tasks = [run.tasks[task]["metrics"] for run in runs for task in metric.tasks if task in run.tasks]
    known = [metrics[recorded_metric] for metrics in tasks if metrics.get(recorded_metric) is not None]
    return Cell(f"{mean(known):.1f}{unit}", value=mean(known)) if known else Cell()


def _baseline_above_chance_cell(comparison: Comparison, metric: Metric) -> Cell:
    errors = comparison.standard_errors_above_chance(metric, comparison.canonical_baseline)
    return Cell() if errors is None else Cell(f"{errors:+z.1f} s.e.")


def _rows_above_chance_cell(comparison: Comparison, metric: Metric) -> Cell:
    """Return how many rows are above chance; "none: at chance" if no row is: such a metric still counts."""
    rows = comparison.rows_above_chance(metric)
    if rows is None:
        return Cell()
    above, known = rows
    return Cell(f"{above} of {known}" if above else "none: at chance")


def _shuffled_cell(comparison: Comparison, metric: Metric) -> Cell:
    """Return the baseline's score with inputs shuffled between examples, and the share of it that is lost.

    The share is of the score's distance from chance; it is left out where the score is at chance.
    """
    runs = comparison.runs_of(comparison.baseline)
    shuffled = [run.tasks[task].get("shuffled") for run in runs for task in metric.tasks if task in run.tasks]
    known = [each["score"] for each in shuffled if each is not None and each["score"] is not None]
    values = comparison.values_by_seed(metric)[comparison.canonical_baseline].values()
    if not known or not values:
        return Cell()
    score, own, lost = mean(known), mean(values), ""
    above = comparison.standard_errors_above_chance(metric, comparison.canonical_baseline)
    is_at_chance = above is not None and above < MIN_ABOVE_CHANCE  # a share of nothing
    if metric.chance is not None and own != metric.chance and not is_at_chance:
        lost = f", loses {(own - score) / (own - metric.chance):.0%}"
    return Cell(f"{score:.{metric.digits}f}{lost}", value=score)


# ---- losses of denoisers


def denoisers_sheet(comparison: Comparison) -> Sheet | None:
    """Return a line per row of the table and denoiser of its mixture; None without any.

    It has the share of training sequences that this denoiser makes, and its held-out loss.
    """
    cells: dict[str, list[Cell]] = {"row": [], "denoiser": [], "share of sequences": [], "held-out loss": []}
    for row in comparison.trained_rows:
        losses = denoiser_losses(comparison.runs_of(row))
        denoisers = comparison.experiments[row.name].objective.denoisers
        total = sum(denoiser.weight for denoiser in denoisers)
        for denoiser in denoisers:
            if denoiser.name in losses:
                share = denoiser.weight / total
                cells["row"].append(Cell(row.label))
                cells["denoiser"].append(Cell(denoiser.name))
                cells["share of sequences"].append(Cell(f"{share:.1%}", value=share))
                cells["held-out loss"].append(score_cell(3, losses[denoiser.name]))
    return cells if cells["row"] else None


# ---- the order of rows


def order_sheet(comparison: Comparison) -> Sheet | None:
    """Return a line per group of metrics: Kendall's tau with the paper's order; None if it has no order."""
    known = comparison.paper_orders
    if not known:
        return None
    return {
        "tasks": [Cell(GROUP_TITLES[group]) for group in known],
        "rows": [Cell(str(len(order.rows)), value=len(order.rows)) for order in known.values()],
        "tau": [Cell(f"{order.tau:+z.2f}", value=order.tau) for order in known.values()],
        "95 % interval": [_interval_cell(order.interval) for order in known.values()],
        "p": [Cell(f"{order.p:.2g}", value=order.p) for order in known.values()],
        "a repeat of the paper": [_replication_cell(order.replication) for order in known.values()],
    }


def _replication_cell(tau: float | None) -> Cell:
    return Cell() if tau is None else Cell(f"{tau:+.2f}", value=tau)


def _interval_cell(interval: tuple[float, float] | None) -> Cell:
    return Cell() if interval is None else Cell(f"{interval[0]:+z.2f} to {interval[1]:+z.2f}")


def prediction_sheet(predictions: Mapping[str, Mapping[Group, ScalePrediction]]) -> Sheet:
    """Return a line per table and group of metrics: how far one scale predicts the order at another."""
    lines = [
        (table, group, prediction)
        for table, by_group in predictions.items()
        for group, prediction in by_group.items()
    ]
    return {
        "table": [Cell(table) for table, _, _ in lines],
        "tasks": [Cell(GROUP_TITLES[group]) for _, group, _ in lines],
        "rows": [Cell(str(len(each.rows)), value=len(each.rows)) for _, _, each in lines],
        "decision accuracy": [Cell(f"{each.accuracy:.0%}", value=each.accuracy) for _, _, each in lines],
        "its 95 % interval": [_share_interval_cell(each.accuracy_interval) for _, _, each in lines],
        "tau": [Cell(f"{each.tau:+z.2f}", value=each.tau) for _, _, each in lines],
        "its interval": [_interval_cell(each.tau_interval) for _, _, each in lines],
        "p": [Cell(f"{each.p:.2g}", value=each.p) for _, _, each in lines],
    }


def brief_prediction_sheet(prediction: Sheet) -> Sheet:
    """Return what 80 columns hold of the sheet of ``prediction_sheet``: the estimates, without intervals."""
    groups = [SHORT_TITLES.get(cell.text, cell.text) for cell in prediction["tasks"]]
    return {
        "table": prediction["table"],
        "tasks": [Cell(group) for group in groups],
        "rows": prediction["rows"],
        "decision accuracy": prediction["decision accuracy"],
        "tau": prediction["tau"],
        "p": prediction["p"],
    }


def _share_interval_cell(interval: tuple[float, float] | None) -> Cell:
    return Cell() if interval is None else Cell(f"{interval[0]:.0%} to {interval[1]:.0%}")


def summary_sheet(comparisons: Sequence[Comparison], verdicts: Sequence[Verdicts]) -> Sheet:
    """Return a line per table and group of metrics: the order of its rows, then the verdicts on its claims.

    Tables are left out that have neither.
    """
    order_titles = ("rows", "tau", "95 % interval", "p", "a repeat of the paper")
    count_titles = ("claims", "confirmed", "contradicted", "undecided", "not compared")
    titles = ("table", "tasks", *order_titles, *count_titles, "share confirmed")
    sheet: Sheet = {title: [] for title in titles}
    for comparison, by_group in zip(comparisons, verdicts, strict=True):
        order = order_sheet(comparison)
        for group, by_budget in by_group.items():
            counts = count_verdicts(by_budget["updates"])
            cells = {"table": Cell(comparison.table.name), "tasks": Cell(GROUP_TITLES[group])}
            ordered_groups = [cell.text for cell in order["tasks"]] if order else []
            if order and GROUP_TITLES[group] in ordered_groups:
                line = ordered_groups.index(GROUP_TITLES[group])
                cells |= {title: column[line] for title, column in order.items()}
            elif not counts.total:
                continue
            if counts.total:
                numbers = zip(count_titles, (counts.total, *counts), strict=True)
                cells |= {title: Cell(f"{number:.0f}", value=number) for title, number in numbers}
                share = counts.share_confirmed
                cells["share confirmed"] = Cell(f"{share:.0%}", value=share)
            for title in titles:
                sheet[title].append(cells.get(title, Cell()))
    return sheet


def brief_summary_sheet(summary: Sheet) -> Sheet:
    """Return what 80 columns hold of the sheet of ``summary_sheet``: tau, its p-value, and decided claims."""
    groups = [SHORT_TITLES.get(cell.text, cell.text) for cell in summary["tasks"]]
    sheet = {
        "table": summary["table"],
        "tasks": [Cell(group) for group in groups],
        "tau": summary["tau"],
        "p": summary["p"],
        "confirmed": [_out_of(*cells) for cells in zip(summary["confirmed"], summary["claims"], strict=True)],
        "contradicted": summary["contradicted"],
    }
    return {head: cells for head, cells in sheet.items() if any(cell != Cell() for cell in cells)}


def _out_of(part: Cell, whole: Cell) -> Cell:
    return Cell() if whole == Cell() else Cell(f"{part.text} of {whole.text}", value=part.value)


# ---- claims


def claims_sheet(verdicts: Verdicts, budget: Budget, mismatched: Collection[str]) -> Sheet | None:
    """Return each claim and its verdicts by group of metrics, with ≠ if about ``mismatched`` rows.

    None without claims.
    """
    claims = _claims_of(verdicts)
    if not claims:
        return None
    sheet: Sheet = {"claim": [Cell(_claim_text(claim, mismatched)) for claim in claims]}
    if any(claim.z is not None for claim in claims):
        sheet["z"] = [_z_cell(claim) for claim in claims]
    for group, by_budget in verdicts.items():
        sheet[GROUP_TITLES[group]] = [_verdict_cell(verdict) for _, verdict in by_budget[budget]]
    return sheet | {"conclusion": [Cell(claim.conclusion) for claim in claims]}


def conclusions_sheet(verdicts: Verdicts, mismatched: Collection[str]) -> Sheet | None:
    """Return exactly the conclusions of the table's file, with their verdicts; None if there are none."""
    indices = [index for index, claim in enumerate(_claims_of(verdicts)) if claim.conclusion]
    if not indices:
        return None
    claims = [_claims_of(verdicts)[index] for index in indices]
    sheet: Sheet = {
        "conclusion": [Cell(claim.conclusion) for claim in claims],
        "claim": [Cell(_claim_text(claim, mismatched)) for claim in claims],
    }
    for group, by_budget in verdicts.items():
        for budget, judged in by_budget.items():
            words = [judged[index][1].word for index in indices]
            title = f"{GROUP_TITLES[group]}, {BUDGET_TITLES[budget]}"
            sheet[title] = [Cell(word, bold=word == "contradicted") for word in words]
    return sheet


def brief_conclusions(comparison: Comparison, verdicts: Verdicts) -> list[str]:
    """Return a line per conclusion of a table's file: its verdict after training, with the difference.

    Each is judged by the half of the tasks that it is about or, if it is about all, by the main group. Empty
    if any claim of the table is not a conclusion; the report's page lists all claims.
    """
    claims, group = _claims_of(verdicts) if verdicts else [], comparison.main_group
    if group is None or not all(claim.conclusion for claim in claims):
        return []
    lines = []
    for index, claim in enumerate(claims):
        judge = claim.tasks or group  # the half that the claim is about, if it is about one
        if judge in verdicts:
            _, verdict = verdicts[judge]["updates"][index]
            verdict_text = _verdict_cell(verdict).text
            if verdict.test is not None and (unit := unit_of_raw_differences(comparison)):
                verdict_text += f" ({unit}, positive: better)"
            if judge != group:
                verdict_text += f", by {GROUP_TITLES[judge]}"
        else:
            verdict_text = f"no tasks of {GROUP_TITLES[judge]} to judge by"
        lines.append(f"- {verdict_text}: {claim.conclusion} ({claim.pair})")
    return lines


def unit_of_raw_differences(comparison: Comparison) -> str:
    """Return the unit of differences that are not divided by a noise standard deviation; "" if they are.

    Only a table that is judged by held-out text has such differences, as long as that deviation is unknown:
    no row has two seeds with different values.
    """
    if comparison.main_group != "held-out text":
        return ""
    (metric,) = comparison.judging_metrics
    is_unknown = comparison.noise_std[metric.name] == UNKNOWN_NOISE
    return HELD_OUT_UNITS[metric.measure] if is_unknown else ""


def _claims_of(verdicts: Verdicts) -> list[Claim]:
    """Return the claims, which are the same for all groups and budgets."""
    by_budget = next(iter(verdicts.values()))
    return [claim for claim, _ in by_budget["updates"]]


def rows_of_claims(verdicts: Verdicts) -> list[Row]:
    """Return the rows that the claims are about."""
    claims = _claims_of(verdicts) if verdicts else []
    return [*dict.fromkeys(row for claim in claims for row in (claim.better, claim.worse))]


def _claim_text(claim: Claim, mismatched: Collection[str]) -> str:
    mark = "" if claim.names.isdisjoint(mismatched) else f" {MISMATCH}"
    return f"{claim.pair}{mark}"


def _z_cell(claim: Claim) -> Cell:
    return Cell() if claim.z is None else Cell(f"{claim.z:.1f}", value=claim.z)


def _verdict_cell(verdict: Verdict) -> Cell:
    test, number = verdict.test, ""
    if test is not None:
        number = f" {test.mean:+z.1f}{interval_text(test.low, test.high, 1)}"
    return Cell(verdict.word + number, bold=verdict.word == "contradicted")


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
    accuracy = f"{counts.confirmed / decided:.0%} of those decided" if decided else "none decided"
    digits = 0 if all(float(number).is_integer() for number in counts) else 1
    words = {
        "confirmed": counts.confirmed,
        "contradicted": counts.contradicted,
        "undecided": counts.undecided,
        "not compared": counts.uncompared,
    }
    if not counts.uncompared:
        del words["not compared"]
    return ", ".join(f"{number:.{digits}f} {word}" for word, number in words.items()) + f" ({accuracy})"


def claims_notes(comparison: Comparison, verdicts: Verdicts) -> list[str]:
    """Return sentences on verdicts: counts per group and budget, a replication's, power, outlying seeds."""
    claims = _claims_of(verdicts)
    if not claims:
        return []
    lines = [
        f"- {GROUP_TITLES[group]}, {BUDGET_TITLES[budget]}: {counts_text(count_verdicts(judged))}"
        for group, by_budget in verdicts.items()
        for budget, judged in by_budget.items()
        if count_verdicts(judged).total  # else all claims are about other tasks
    ]
    replication = simulate_replication(comparison.table)
    if replication.total:
        lines.append(f"- simulated replication of the paper: {counts_text(replication)}")
    group, by_budget = next(iter(verdicts.items()))
    main = by_budget["updates"]
    rows = {name for claim in claims for name in claim.names}
    if not rows.isdisjoint(comparison.mismatches):
        matched = [(c, verdict) for c, verdict in main if c.names.isdisjoint(comparison.mismatches)]
        counts = counts_text(count_verdicts(matched))
        title = f"{GROUP_TITLES[group]}, {BUDGET_TITLES['updates']}"
        lines.append(f"- {title}, not counting claims about rows with {MISMATCH}: {counts}")
    notes = [f"{_count_text(len(claims))} about these rows:\n\n" + "\n".join(lines)]
    notes += _conclusion_note(comparison, claims)
    num_equivalent = sum(verdict.word == "equivalent" for _, verdict in main)
    if num_equivalent:
        margin = f"less than {EQUIVALENCE_MARGIN:.2g} standard deviations of a run apart"
        notes.append(f"{num_equivalent} of the undecided ({GROUP_TITLES[group]}) are equivalent: {margin}.")
    tested = [(claim, v.test) for claim, v in main if v.test and v.test.degrees_of_freedom]
    if tested:
        notes.append(_power_note(comparison, tested, group))
    elif min(len(comparison.runs[name]) for name in rows) < 2:
        note = "A row with one seed decides nothing; train more with --seeds."
        if unit := unit_of_raw_differences(comparison):
            note += f" Until then differences are in {unit}, positive: better."
        notes.append(note)
    if any(verdict.word == "out of range" for judged in by_budget.values() for _, verdict in judged):
        notes.append(
            "Out of range: one of the rows was never scored after so little training. A sweep with "
            "`--tuning.branches 0.25 0.5 1.0` scores each row on the way."
        )
    outliers = comparison.outlying_seeds()
    if outliers:
        names = ", ".join(f"{row} seed {seed}" for row, seed in outliers)
        notes.append(f"Outlying seeds (mean z-score far from the row's others, and counted): {names}.")
    return notes


def _conclusion_note(comparison: Comparison, claims: Sequence[Claim]) -> list[str]:
    """Return how many conclusions the table's file states and how many lack runs, and what others are."""
    stated = len(comparison.table.conclusions)
    if not stated:
        return []
    judged = sum(bool(claim.conclusion) for claim in claims)
    untestable = sum(not is_tested(each, comparison.table) for each in comparison.table.conclusions)
    missing = stated - judged - untestable
    verb = "waits" if missing == 1 else "wait"
    waiting = f"; {missing} of them {verb} for runs of both rows" if missing else ""
    conclusions = "1 conclusion" if stated == 1 else f"{stated} conclusions"
    others = len(claims) - judged
    if untestable:
        waiting += f"; {untestable} cannot be tested here, in columns that our runs do not measure"
    note = f"The table's file states {conclusions}{waiting}."
    if others:
        note += f" The other claims ({others}) are pairs of rows that the paper's own noise tells apart."
    return [note]


def _count_text(count: int) -> str:
    return "1 claim" if count == 1 else f"{count} claims"


def _power_note(comparison: Comparison, tested: Sequence[tuple[Claim, PairedTest]], group: Group) -> str:
    """Return a sentence on the smallest true difference that the tests of a group find with power POWER.

    It is computed as by ``lm power``: the correction for many tests counts all claims of the table, including
    those whose rows have no runs yet.
    """
    counts = sorted({len(test.by_seed) for _, test in tested})
    seeds = " to ".join(str(count) for count in dict.fromkeys((counts[0], counts[-1])))
    noise = measure_noise(comparison, group)
    smallest = noise.smallest_difference(counts[0])
    canonical_name = comparison.canonical_name
    tested_pairs = {(canonical_name(claim.better), canonical_name(claim.worse)) for claim, _ in tested}
    if len(tested_pairs) == len(noise.pairs):
        tests = f"{_count_text(len(tested))} of this table"
    else:
        all_pairs = f"all {len(noise.pairs)} pairs of rows in this table's claims"
        tests = f"{all_pairs} ({len(tested_pairs)} of them tested here)"
    design = f"With {seeds} seeds per pair and {tests}"
    if smallest > MAX_DETECTABLE:
        return f"{design} hardly any difference is significant; train more with --seeds."
    return (
        f"{design}, a difference of {smallest:.1f} standard deviations of a run in {GROUP_TITLES[group]} is "
        f"found with a power of {100 * POWER:g} %, at the strictest step of Holm's method."
    )


def all_claims_note(verdicts: Sequence[Verdicts], comparisons: Sequence[Comparison]) -> str:
    """Return the mean share of confirmed claims over tables, beside raw counts; "" for one table."""
    with_claims = [
        (each, comparison.table)
        for each, comparison in zip(verdicts, comparisons, strict=True)
        if _claims_of(each)
    ]
    if len(with_claims) < 2:
        return ""
    lines = []
    for group in dict.fromkeys(group for each, _ in with_claims for group in each):
        for budget in JUDGED_BUDGETS:
            counts = [count_verdicts(each[group][budget]) for each, _ in with_claims if group in each]
            counts = [each for each in counts if each.total]  # a table's claims may all be about other tasks
            if not counts:
                continue
            lines.append(f"- {GROUP_TITLES[group]}, {BUDGET_TITLES[budget]}: {_mean_share_text(counts)}")
    replications = [simulate_replication(table) for _, table in with_claims]
    known = [counts for counts in replications if counts.total]
    if known:
        lines.append(f"- simulated replication of the paper: {_mean_share_text(known)}")
    return "Share of a table's claims that are confirmed, as a mean over tables:\n\n" + "\n".join(lines)


def _mean_share_text(counts: Sequence[VerdictCounts]) -> str:
    """Return the mean share over tables, each with the same weight, and the counts of all claims."""
    share = mean(each.share_confirmed for each in counts)
    tables = "1 table" if len(counts) == 1 else f"{len(counts)} tables"
    return f"{share:.0%} of {tables}; in all {counts_text(_total(counts))}"


def _total(counts: Iterable[VerdictCounts]) -> VerdictCounts:
    return VerdictCounts(*(sum(numbers) for numbers in zip(*counts, strict=True)))


# ---- other notes


def document_notes(comparison: Comparison) -> list[str]:
    """Return a sentence on the held-out documents whose likelihood is shown; none if there are none."""
    runs = [run for row in comparison.table.rows for run in comparison.runs_of(row)]
    known = [x for run in runs if (x := run.likelihood()) is not None]
    sizes = dict.fromkeys((x.tokens, x.words, x.bytes) for x in known)
    widest = max((x.bits_per_byte_interval for x in known if x.is_bound), default=None)
    bounds = []
    if widest is not None:
        bounds.append(
            "≤ marks an upper bound: masked diffusion gives a text no probability that could be computed. It "
            "is estimated from random masks; the 95 % interval of a run's bits per byte is "
            f"± {widest:.3f} or less."
        )
    return [
        f"Likelihoods are those of whole held-out documents of {tokens:,} tokens (ends included), {words:,} "
        f"words and {size:,} bytes. Equal time is the training time of the fastest network, without "
        "compilation and evaluation; between evaluations values are interpolated in the logarithm of time."
        for tokens, words, size in sizes
    ] + bounds


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
    runs = [run for row in comparison.trained_rows for run in comparison.runs_of(row)]
    digests: set[str] = set()
    for folder in {folder for run in runs for folder in run.stage_folders().values()}:
        try:
            digests.add(provenance.read(folder)["data"].get("documentation", ""))
        except SettingError:  # reported with the mismatches
            continue
    notes = [
        f"Text of {'; '.join(labels)}: {corpus}." for corpus, labels in _other_corpora(comparison).items()
    ]
    for digest in sorted(filter(None, digests)):
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
    rows = {row.name: row for row in (*comparison.table.rows, comparison.baseline)}
    return [
        f"{row.label}, seed {run.seed}: {column} is undefined ({task}: {reason}); it is in no mean."
        for row in rows.values()
        for run in comparison.runs_of(row)
        for column in run.columns
        for task, reason in run.undefined(column).items()
    ]


def mismatch_note(comparison: Comparison) -> str:
    """Return which rows have other data, code, packages or shared pre-training than most, and which ones."""
    seeds: dict[str, dict[str, list[str]]] = {}  # reason -> row -> its seeds
    for of_row in comparison.mismatches.values():
        for mismatch in of_row:
            of_reason = seeds.setdefault(mismatch.reason, {})
            of_reason.setdefault(mismatch.row, []).append(str(mismatch.seed))
    lines = []
    for reason, by_row in seeds.items():
        runs = [f"{row} seed{'s' * (len(own) > 1)} {', '.join(own)}" for row, own in by_row.items()]
        lines.append(f"\n- {'; '.join(runs)}: {reason}")
    return (
        f"{MISMATCH}: trained with different data, code or packages than most rows, or from other copies of "
        f"shared pre-training, which may be why its scores differ.\n{''.join(lines)}"
    )

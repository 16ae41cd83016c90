"""What a report says about a table: sheets of scores, differences, metrics and verdicts, and notes."""

from collections import Counter
from collections.abc import Collection, Iterable, Sequence
from math import isfinite
from statistics import mean, median

import numpy as np

from experiments.console import Cell, Sheet
from experiments.report.comparison import (
    EQUIVALENCE_MARGIN,
    MIN_FROM_CHANCE,
    MIN_SIGNAL,
    UNCOMPARED,
    Comparison,
    Verdict,
    Verdicts,
)
from experiments.report.metrics import (
    BUDGETS,
    LIKELIHOODS,
    UNITS,
    Budget,
    Metric,
    Score,
    has_plateau,
    likelihood_score,
    perplexity_by_length,
    shortest_training,
)
from experiments.report.statistics import ALPHA, NUM_RESAMPLES, PairedTest, t_test_power
from experiments.runs import provenance
from experiments.runs.result import Result
from experiments.study.claims import Claim, Counts, simulate_replication
from experiments.study.table import Row
from lm.config.base import SettingError

NBSP = "\N{NO-BREAK SPACE}"
ARROWS = {1: f"{NBSP}▲", 0: "", -1: f"{NBSP}▼"}
MISMATCH = "≠"  # follows the label of a row with another provenance than the others
MAX_DETECTABLE = 30  # larger than any difference of two rows that learn [deviations of a replication]
MATCHED: dict[Budget, str] = {  # budget -> how verdicts at it are headed
    "updates": "after training",
    "FLOP": "compute-matched",
    "content tokens": "token-matched",
}
DIFFERENCES = "Difference from the baseline, with its 95 % confidence interval"
METRICS, CLAIMS = "What the columns measure", "Claims, in deviations of a replication"

ABOUT_SCORES = f"""A row is the baseline with one change (`lm list TABLE`). A column is a metric: a task, \
named by what it measures, or held-out text (↓, and all losses: lower is better). Numbers are means ± \
standard deviations over seeds. ▲ ▼: significantly better, worse than the baseline, in a paired t test \
over seeds (family-wise error rate {ALPHA:g} over the column, by Holm's method) and by {NUM_RESAMPLES:,} \
bootstrap resamples of seeds and examples. One seed is never significant. A difference is equivalent if it \
is significantly smaller than {EQUIVALENCE_MARGIN:.2g} deviations of a replication (the standard deviation \
with new seeds and new examples), and otherwise undecided. Held-out loss is compared only where objective, \
kind of model, text and vocabulary are the baseline's (else: different targets)."""
ABOUT_PAPER = """The paper's column of the same kind is printed beside ours, with the paper's own marks \
(two standard deviations of its baseline). The tasks differ, so compare only the order of rows."""
ABOUT_CLAIMS = f"""A claim is a pair of rows that the paper's own noise tells apart (z, over all its \
columns), or a conclusion of the table. The *mean z-score* is the mean over columns of the difference from \
the baseline, each in deviations of a replication; columns are left out if their signal-to-noise is below \
{MIN_SIGNAL:g} or their baseline within {MIN_FROM_CHANCE:g} standard errors of chance. A table without \
tasks is judged by its held-out text instead. Our runs confirm or contradict a claim if the difference is \
significant by the tests above. Rows are compared after all of their training, as in the paper, and where \
both had spent the same FLOP (compute-matched) or the same content tokens (token-matched) on pre-training, \
if both were scored there (else: out of range) and had left the unigram plateau (else: not yet learning), \
by the seeds that both have. Scores of different tables have different units. *Content tokens* are \
predicted words, without sentinels, ends and copies. A run *leaves the unigram plateau* at the step where \
its loss of content tokens is 0.2 nats below that of a unigram model."""


# ---- scores


def scores_sheet(comparison: Comparison) -> Sheet:
    """Return a line per row: its score in each metric, beside it the paper's, and what training cost."""
    rows = comparison.table.rows
    sheet = {"row": [Cell(row.label) for row in rows]}
    for metric in comparison.metrics:
        sheet[metric.title] = _metric_cells(comparison, metric)
        paper_head = f"paper's {metric.paper_column}"
        if metric.paper_column and comparison.baseline.published and paper_head not in sheet:
            sheet[paper_head] = _published_cells(comparison, metric.paper_column)
    if comparison.averaged and comparison.has_tasks:
        sheet["mean z-score"] = [_mean_z_cell(comparison, row) for row in rows]
    by_length = [perplexity_by_length(comparison.runs_of(row)) for row in rows]
    for multiple in dict.fromkeys(multiple for scores in by_length for multiple in scores):
        sheet[f"perplexity at {multiple} ×"] = [score_cell(2, scores.get(multiple)) for scores in by_length]
    others = _document_cells(comparison) | _training_cells(comparison)
    return sheet | {head: cells for head, cells in others.items() if head not in sheet}


def score_cell(digits: int, score: Score | None, mark: str = "", sign: str = "") -> Cell:
    """Return mean ± standard deviation with so many decimals."""
    if score is None:
        return Cell()
    deviation = "" if score.std is None else f"{NBSP}±{NBSP}{score.std:.{digits}f}"
    return Cell(f"{score.mean:{sign}.{digits}f}{deviation}{mark}", value=score.mean, deviation=score.std)


def _metric_cells(comparison: Comparison, metric: Metric) -> list[Cell]:
    """Return each row's score, with an arrow if it is significantly better or worse than the baseline."""
    samples, differences = comparison.values_by_seed(metric), comparison.differences(metric)
    cells = []
    for row in comparison.table.rows:
        key = comparison.canonical_name(row)
        sign = differences[key].test.sign if key in differences else 0
        cells.append(score_cell(metric.digits, Score.of(samples[key].values()), ARROWS[sign]))
    return cells


def _mean_z_cell(comparison: Comparison, row: Row) -> Cell:
    key = comparison.canonical_name(row)
    if not comparison.has_left_plateau(key):
        return Cell("not yet learning")
    return score_cell(1, Score.of(comparison.mean_standardized_difference(key).values()), sign="+z")


def _published_cells(comparison: Comparison, column: str) -> list[Cell]:
    """Return the paper's scores by its own rule: bold within two deviations of the best, and arrows."""
    assert comparison.table.paper is not None, "rows with published scores have a paper"
    std = comparison.table.paper.column(column).std
    scores = [row.published.get(column) for row in comparison.table.rows]
    best = max((score for score in scores if score is not None), default=0.0)
    baseline = comparison.baseline.published.get(column)
    cells = []
    for score in scores:
        if score is None:
            cells.append(Cell())
        else:
            arrow = ARROWS[published_sign(score, baseline, std)]
            cells.append(Cell(f"{score:.2f}{arrow}", score >= best - 2 * (std or 0.0), score))
    return cells


def published_sign(score: float, baseline: float | None, std: float | None) -> int:
    """Return 1, -1 if a score is above, below the baseline's by more than two standard deviations, else 0."""
    if baseline is None or std is None or abs(score - baseline) <= 2 * std:
        return 0
    return 1 if score > baseline else -1


def _document_cells(comparison: Comparison) -> Sheet:
    """Return the likelihood of held-out documents, at the end and after equal time; empty without any."""
    rows = [comparison.runs_of(row) for row in comparison.table.rows]
    if not any(run.likelihoods for seeds in rows for run in seeds):
        return {}
    sheet = {
        head: [score_cell(digits, likelihood_score(seeds, measure)) for seeds in rows]
        for head, (measure, digits) in LIKELIHOODS.items()
    }
    seconds = shortest_training(rows)
    if seconds is not None:
        for head, (measure, digits) in LIKELIHOODS.items():
            if measure != "perplexity":
                scores = [likelihood_score(seeds, measure, seconds) for seeds in rows]
                sheet[f"{head} in {seconds:.0f} s"] = [score_cell(digits, score) for score in scores]
    sizes = [seeds[0].parameters if seeds else None for seeds in rows]
    sheet["parameters"] = [Cell() if size is None else Cell(f"{size:,}", value=size) for size in sizes]
    return sheet


def _training_cells(comparison: Comparison) -> Sheet:
    """Return what pre-training reached and cost; counters that no run has are left out."""
    rows = [comparison.runs_of(row) for row in comparison.table.rows]
    sheet: Sheet = {"seeds": [Cell(str(len(seeds)), value=len(seeds)) for seeds in rows]}
    if any(run.content_loss is not None for seeds in rows for run in seeds):
        content = [Score.of(run.content_loss for run in seeds) for seeds in rows]
        unigram = [Score.of(run.reference_loss for run in seeds) for seeds in rows]
        sheet["content tokens"] = [_content_tokens_cell(seeds) for seeds in rows]
        sheet["content loss"] = [score_cell(3, score) for score in content]
        sheet["unigram loss"] = [score_cell(3, score) for score in unigram]
        sheet["left plateau at step"] = [_exit_step_cell(comparison, row) for row in comparison.table.rows]
        sheet["share of top-10 predictions"] = [_top_ten_cell(seeds) for seeds in rows]
    minutes = [Score.of(run.seconds / 60 for run in seeds) for seeds in rows]
    sheet["minutes"] = [
        Cell(f"{score.mean:.1f}", value=score.mean, deviation=score.std) if score else Cell()
        for score in minutes
    ]
    return sheet


def _content_tokens_cell(seeds: Sequence[Result]) -> Cell:
    if not any(run.content_tokens for run in seeds):
        return Cell()
    tokens = mean(run.content_tokens for run in seeds)
    return Cell(f"{tokens / 1e6:.2f}{NBSP}M", value=tokens)


def _top_ten_cell(seeds: Sequence[Result]) -> Cell:
    score = Score.of(run.top_ten_share for run in seeds)
    return Cell() if score is None else Cell(f"{score.mean:.0%}", value=score.mean, deviation=score.std)


def _exit_step_cell(comparison: Comparison, row: Row) -> Cell:
    """Return the mean step at which seeds left the unigram plateau, and how many did not."""
    if not has_plateau(comparison.experiments[row.name]):
        return Cell()
    pretrained = [run for run in comparison.runs_of(row) if run.content_loss is not None]
    if not pretrained:
        return Cell()
    steps = [run.exit_step for run in pretrained if run.exit_step is not None]
    parts = [f"{mean(steps):,.0f}"] if steps else []
    if len(steps) < len(pretrained):
        parts.append(f"{len(pretrained) - len(steps)} of {len(pretrained)} not left")
    return Cell(", ".join(parts))


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
        key = comparison.canonical_name(row)
        if key in differences:
            x = differences[key]
            interval = f" ({x.low:+z.{digits}f}, {x.high:+z.{digits}f})" if isfinite(x.low) else ""
            cells.append(Cell(f"{x.mean:+z.{digits}f}{interval} {x.verdict}", value=x.mean))
        elif samples[key] and not comparison.is_comparable(metric, key, comparison.canonical_baseline):
            cells.append(Cell("different targets"))
        else:
            cells.append(Cell())
    return cells


# ---- metrics


def metrics_sheet(comparison: Comparison) -> Sheet:
    """Return a line per metric: its tasks, what guessing scores, the baseline's answers, signal-to-noise."""
    metrics = [metric for metric in comparison.metrics if not metric.is_held_out]
    sheet = {
        "column": [Cell(metric.title) for metric in metrics],
        "tasks": [Cell(_task_names(metric)) for metric in metrics],
        "paper's column": [Cell(_paper_column(comparison, metric)) for metric in metrics],
        "chance": [Cell() if metric.chance is None else Cell(f"{metric.chance:g}") for metric in metrics],
        "baseline from chance": [_from_chance_cell(comparison, metric) for metric in metrics],
        "baseline ranks right": [_baseline_cell(comparison, m, "ranked_accuracy", "%") for m in metrics],
        "baseline answers": [
            _baseline_cell(comparison, m, m.task_metric.replace(" ", "_"), f" {m.task_metric}")
            for m in metrics
        ],
        "signal-to-noise": [Cell(_signal_text(comparison, metric)) for metric in metrics],
    }
    if not comparison.baseline.published:
        del sheet["paper's column"]
    return sheet


def _task_names(metric: Metric) -> str:
    names = ", ".join(metric.tasks)
    return names if metric.measure in UNITS else f"{names} ({metric.task_metric})"


def _paper_column(comparison: Comparison, metric: Metric) -> str:
    if metric.paper_column is None or comparison.table.paper is None:
        return "–"
    return f"{metric.paper_column} ({comparison.table.paper.column(metric.paper_column).unit})"


def _signal_text(comparison: Comparison, metric: Metric) -> str:
    signal = comparison.signal_to_noise[metric.name]
    if signal is None:
        return "unknown"
    if metric in comparison.averaged:
        return f"{signal:.1f}"
    if signal < MIN_SIGNAL:
        return f"{signal:.1f}, below {MIN_SIGNAL:g}: not averaged"
    return f"{signal:.1f}, within {MIN_FROM_CHANCE:g} s.e. of chance: not averaged"


def _baseline_cell(comparison: Comparison, metric: Metric, task_metric: str, unit: str) -> Cell:
    """Return another metric of the baseline's answers, for tasks that count as bits."""
    if metric.measure not in UNITS:
        return Cell()
    runs = comparison.runs_of(comparison.baseline)
    tasks = [run.tasks[task]["metrics"] for run in runs for task in metric.tasks if task in run.tasks]
    known = [metrics[task_metric] for metrics in tasks if metrics.get(task_metric) is not None]
    return Cell(f"{mean(known):.1f}{unit}", value=mean(known)) if known else Cell()


def _from_chance_cell(comparison: Comparison, metric: Metric) -> Cell:
    from_chance = comparison.from_chance(metric)
    return Cell() if from_chance is None else Cell(f"{from_chance:+z.1f} s.e.")


# ---- claims


def claims_sheet(verdicts: Verdicts, mismatched: Collection[str]) -> Sheet | None:
    """Return each claim and its verdicts, with ≠ if about ``mismatched`` rows; None without claims."""
    claims: list[Claim] = [claim for claim, _ in verdicts["updates"]]
    if not claims:
        return None
    names = []
    for claim in claims:
        mark = "" if claim.names.isdisjoint(mismatched) else f" {MISMATCH}"
        names.append(f"{claim.better.key} > {claim.worse.key}{mark}")
    sheet: Sheet = {"claim": [Cell(name) for name in names]}
    if any(claim.z is not None for claim in claims):
        sheet["z"] = [Cell() if claim.z is None else Cell(f"{claim.z:.1f}") for claim in claims]
    for budget in BUDGETS:
        sheet[MATCHED[budget]] = [_verdict_cell(verdict) for _, verdict in verdicts[budget]]
    return sheet | {"conclusion": [Cell(claim.conclusion) for claim in claims]}


def _verdict_cell(verdict: Verdict) -> Cell:
    test, number = verdict.test, ""
    if test is not None:
        interval = f" ({test.low:+z.1f}, {test.high:+z.1f})" if isfinite(test.low) else ""
        number = f" {test.mean:+z.1f}{interval}"
    return Cell(verdict.word + number, best=verdict.word == "contradicted")


def count_verdicts(verdicts: Iterable[tuple[Claim, Verdict]]) -> Counts:
    """Count the claims that are confirmed, contradicted, undecided, and not compared."""
    words = Counter(verdict.word for _, verdict in verdicts)
    confirmed, contradicted = words["confirmed"], words["contradicted"]
    uncompared = sum(words[word] for word in UNCOMPARED)
    return Counts(confirmed, contradicted, words.total() - confirmed - contradicted - uncompared, uncompared)


def counts_text(counts: Counts) -> str:
    """Return counts of verdicts as text, with the decision accuracy: the share confirmed of those decided."""
    decided = counts.confirmed + counts.contradicted
    accuracy = f"decision accuracy {counts.confirmed / decided:.0%}" if decided else "none decided"
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
    """Return sentences on verdicts: counts per budget beside a replication's, power, outlying seeds."""
    claims = verdicts["updates"]
    if not claims:
        return []
    lines = [f"- {MATCHED[budget]}: {counts_text(count_verdicts(verdicts[budget]))}" for budget in BUDGETS]
    replication = simulate_replication(comparison.table)
    if any(replication):
        lines.append(f"- simulated replication of all claims in this table: {counts_text(replication)}")
    rows = {name for claim, _ in claims for name in claim.names}
    if not rows.isdisjoint(comparison.mismatches):
        matched = [(c, verdict) for c, verdict in claims if c.names.isdisjoint(comparison.mismatches)]
        counts = counts_text(count_verdicts(matched))
        lines.append(f"- {MATCHED['updates']}, not counting claims about rows with {MISMATCH}: {counts}")
    notes = [f"{_claims(len(claims))} about these rows:\n\n" + "\n".join(lines)]
    num_equivalent = sum(verdict.word == "equivalent" for _, verdict in claims)
    if num_equivalent:
        margin = f"less than {EQUIVALENCE_MARGIN:.2g} deviations of a replication apart"
        notes.append(f"{num_equivalent} of the undecided are equivalent: {margin}.")
    tests = [v.test for _, v in claims if v.test and v.test.degrees_of_freedom]
    if tests:
        notes.append(_power_note(tests))
    elif min(len(comparison.runs[name]) for name in rows) < 2:
        notes.append("A row with one seed decides nothing; train more with --seeds.")
    elif not comparison.averaged:
        notes.append("No column distinguishes these rows, so no claim is decided.")
    outliers = comparison.outlying_seeds()
    if outliers:
        names = ", ".join(f"{row} seed {seed}" for row, seed in outliers)
        notes.append(f"Outlying seeds (mean z-score far from the row's others, and counted): {names}.")
    return notes


def _claims(count: int) -> str:
    return "1 claim" if count == 1 else f"{count} claims"


def _power_note(tests: Sequence[PairedTest]) -> str:
    """Return the smallest difference with a power of 0.8, at the strictest step of Holm's method.

    It is that of a pair with the median standard error and degrees of freedom.
    """
    error = median(test.standard_error for test in tests)
    freedom = median(test.degrees_of_freedom for test in tests)
    alpha = ALPHA / len(tests)
    effects = (np.geomspace(0.01, 1000, 600) * error).tolist()
    found = (effect for effect in effects if t_test_power(effect, error, freedom, alpha) > 0.8)
    smallest = next(found, effects[-1])
    counts = sorted({len(test.by_seed) for test in tests})
    seeds = " to ".join(str(count) for count in dict.fromkeys((counts[0], counts[-1])))
    design = f"With {seeds} seeds per pair and {_claims(len(tests))}"
    if smallest > MAX_DETECTABLE:
        return f"{design} hardly any difference is significant; train more with --seeds."
    return f"{design}, a difference of {smallest:.1f} deviations is found with a power of 80 %."


def all_claims_note(verdicts: Sequence[Verdicts], comparisons: Sequence[Comparison]) -> str:
    """Return the counts of verdicts over all tables, beside a simulated replication's; "" for one table."""
    if sum(bool(each["updates"]) for each in verdicts) < 2:
        return ""
    lines = []
    for budget in BUDGETS:
        total = _total(count_verdicts(each[budget]) for each in verdicts)
        lines.append(f"- {MATCHED[budget]}: {counts_text(total)}")
    replication = _total(simulate_replication(comparison.table) for comparison in comparisons)
    lines.append(f"- simulated replication of the paper: {counts_text(replication)}")
    return "The claims of all tables below:\n\n" + "\n".join(lines)


def _total(counts: Iterable[Counts]) -> Counts:
    return Counts(*(sum(numbers) for numbers in zip(*counts, strict=True)))


# ---- other notes


def document_notes(comparison: Comparison) -> list[str]:
    """Return a sentence on the held-out documents whose likelihood is shown; none if there are none."""
    runs = [run for row in comparison.table.rows for run in comparison.runs_of(row)]
    sizes = dict.fromkeys(x[1:] for run in runs if (x := run.likelihood()) is not None)
    return [
        f"Likelihoods are those of whole held-out documents of {tokens:,} tokens (ends included), {words:,} "
        f"words and {size:,} bytes. Equal time is the training time of the fastest network, without "
        "compilation and evaluation; between evaluations values are interpolated in the logarithm of time."
        for tokens, words, size in sizes
    ]


def built_in_text_notes(comparison: Comparison) -> list[str]:
    """Return which text of the documentation the runs read, by the records of their stages."""
    runs = [run for row in comparison.trained_rows for run in comparison.runs_of(row)]
    digests: set[str] = set()
    for folder in {folder for run in runs for folder in run.stage_folders().values()}:
        try:
            digests.add(provenance.read(folder)["data"].get("documentation", ""))
        except SettingError:  # reported with the mismatches
            continue
    notes = []
    for digest in sorted(filter(None, digests)):
        if digest == "installed":
            notes.append("Text: the documentation of installed packages, which differs by machine.")
        else:
            notes.append(f"Text: the built-in documentation, digest {digest[:12]}.")
    return notes


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
    """Return which rows were trained with different data or code, and in what they differ."""
    lines = "".join(f"\n- {line}" for of_row in comparison.mismatches.values() for line in of_row)
    return (
        f"{MISMATCH}: trained with different data, code or packages than most rows, which may be why its "
        f"scores differ.\n{lines}"
    )

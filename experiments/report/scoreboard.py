"""What a report says of a table: scores beside the paper's, what was measured how, the verdicts on claims."""

from collections import Counter
from collections.abc import Collection, Iterable, Sequence
from math import isfinite
from statistics import mean, median

import numpy as np

from experiments.console import Cell, Sheet
from experiments.report.columns import FRAMES, UNITS, Measured, Score, has_plateau
from experiments.report.comparison import (
    FROM_CHANCE,
    MARGIN,
    SIGNAL,
    UNCOMPARED,
    Evidence,
    Finished,
    Verdict,
    Verdicts,
)
from experiments.report.likelihoods import MEASURES, likelihood_score, perplexities, quickest
from experiments.report.statistics import LEVEL, Judged, power
from experiments.runs.result import Result
from experiments.study.claims import Claim, Counts, simulate_replication
from experiments.study.table import Row

HARD = "\N{NO-BREAK SPACE}"
ARROWS = {1: f"{HARD}▲", 0: "", None: "", -1: f"{HARD}▼"}
UNLIKE = "≠"  # behind the name of a row whose runs were made of other things than those beside it
UNLEARNT = "not yet learning"
OTHER_TARGETS = "other targets"  # of a row whose loss is not of the tokens that the baseline predicts
HARDLY = 30  # a difference that no two rows that have learnt have [deviations]
_PARTS = ("confirmed", "contradicted", "undecided", "not compared")


def scoreboard(evidence: Evidence) -> Sheet:
    """Every row: its score in every column, beside it the paper's of the same kind, and all as one."""
    finished = evidence.finished
    rows, shown = finished.table.rows, set()
    sheet = {"row": [Cell(row.label) for row in rows]}
    for column in finished.columns:
        sheet[column.title] = _scores(evidence, column)
        if column.is_held_out:
            sheet[f"{column.title}, less the baseline's"] = _less_baseline(evidence, column)
        if column.like and finished.baseline.published and column.like not in shown:
            sheet[f"paper's {column.like}"] = _published(finished, column.like)
            shown.add(column.like)
    if evidence.kept:
        sheet["combined"] = [_combined(evidence, row) for row in rows]
    by_length = [perplexities(finished.of(row)) for row in rows]
    for times in dict.fromkeys(times for scores in by_length for times in scores):
        sheet[f"perplexity at {times} ×"] = [_cell(2, scores.get(times)) for scores in by_length]
    others = _documents(finished) | _training(finished)
    return sheet | {head: cells for head, cells in others.items() if head not in sheet}


def _documents(finished: Finished) -> Sheet:
    """How likely held-out documents are, in the end and after equal time; empty if no run was asked."""
    runs = [finished.of(row) for row in finished.table.rows]
    if not any(run.likelihoods for seeds in runs for run in seeds):
        return {}
    sheet = {
        title: [_cell(digits, likelihood_score(seeds, name)) for seeds in runs]
        for title, (name, digits) in MEASURES.items()
    }
    if (seconds := quickest(runs)) is not None:
        for title, (name, digits) in MEASURES.items():
            if title != "perplexity a token":
                cells = [_cell(digits, likelihood_score(seeds, name, seconds)) for seeds in runs]
                sheet[f"{title} in {seconds:.0f} s"] = cells
    sizes = [seeds[0].parameters if seeds else None for seeds in runs]
    sheet["parameters"] = [Cell() if n is None else Cell(f"{n:,}", value=n) for n in sizes]
    return sheet


def about_documents(finished: Finished) -> list[str]:
    """A sentence on what the likelihood is of; none if no run was asked about documents."""
    runs = [run for row in finished.table.rows for run in finished.of(row)]
    texts = dict.fromkeys(x[1:] for run in runs if (x := run.likelihood()) is not None)
    return [
        f"Likelihood: of whole held-out documents of {tokens:,} tokens (ends included), {words:,} words and "
        f"{size:,} bytes. In equal time: after as many seconds as the quickest network took for all of its "
        "steps, compilation and evaluation left out; between evaluations by the logarithm of time."
        for tokens, words, size in texts
    ]


def about_undefined(finished: Finished) -> list[str]:
    """A sentence for each score that has no value, with the reason."""
    rows = {row.name: row for row in (*finished.table.rows, finished.baseline)}
    return [
        f"{row.label}, seed {run.seed}: {column} is undefined ({task}: {reason}); it is in no mean."
        for row in rows.values()
        for run in finished.of(row)
        for column in run.columns
        for task, reason in run.undefined(column).items()
    ]


def _training(finished: Finished) -> Sheet:
    """What pre-training came to and cost; counters that no run has are left out."""
    runs = [finished.of(row) for row in finished.table.rows]
    sheet: Sheet = {"seeds": [Cell(str(len(seeds)), value=len(seeds)) for seeds in runs]}
    if any(run.content_loss is not None for seeds in runs for run in seeds):
        sheet["content tokens"] = [_millions(seeds) for seeds in runs]
        sheet["content loss"] = [_cell(3, Score.of(run.content_loss for run in seeds)) for seeds in runs]
        sheet["no context"] = [_cell(3, Score.of(run.reference_loss for run in seeds)) for seeds in runs]
        sheet["exit step"] = [_exit(finished, row) for row in finished.table.rows]
        sheet["frequent"] = [_share(seeds) for seeds in runs]
    minutes = [Score.of(run.seconds / 60 for run in seeds) for seeds in runs]
    return sheet | {
        "held-out loss": [_cell(3, Score.of(run.held_out_loss for run in seeds)) for seeds in runs],
        "minutes": [Cell(f"{x.mean:.1f}", value=x.mean, deviation=x.std) if x else Cell() for x in minutes],
    }


def _millions(runs: Sequence[Result]) -> Cell:
    if not any(run.content_tokens for run in runs):
        return Cell()
    tokens = mean(run.content_tokens for run in runs)
    return Cell(f"{tokens / 1e6:.2f}{HARD}M", value=tokens)


def _share(runs: Sequence[Result]) -> Cell:
    """How many of the predictions are one of the ten most frequent pieces."""
    score = Score.of(run.top_ten_share for run in runs)
    return Cell() if score is None else Cell(f"{score.mean:.0%}", value=score.mean, deviation=score.std)


def _exit(finished: Finished, row: Row) -> Cell:
    """At which update seeds left the plateau, on average, and how many did not; of rows that have one."""
    has_one = has_plateau(finished.settings[row.name])
    pretrained = [run for run in finished.of(row) if has_one and run.content_loss is not None]
    steps = [run.exit_step for run in pretrained if run.exit_step is not None]
    if not pretrained:
        return Cell()
    stuck = f"{len(pretrained) - len(steps)} of {len(pretrained)} not left" * (len(steps) < len(pretrained))
    return Cell(", ".join(filter(None, [f"{mean(steps):,.0f}" if steps else "", stuck])))


def _scores(evidence: Evidence, column: Measured) -> list[Cell]:
    """A column of the runs, with an arrow where rows are better or worse than the baseline beyond noise."""
    finished, marks = evidence.finished, evidence.marks(column)
    values = finished.samples(column)
    cells = []
    for row in finished.table.rows:
        key = finished.key(row)
        score = Score.of(values[key].values())
        arrow = ARROWS[marks.get(key)]
        cells.append(_cell(column.digits, score, arrow))
    return cells


def _less_baseline(evidence: Evidence, column: Measured) -> list[Cell]:
    """The difference from the baseline with its interval; of rows with other targets there is none."""
    finished, differences = evidence.finished, evidence.less_baseline(column)
    base, samples = finished.key(finished.baseline), finished.samples(column)
    cells = []
    for row in finished.table.rows:
        key = finished.key(row)
        if key in differences:
            mean, low, high = differences[key]
            sides = f" ({low:+.3f}, {high:+.3f})" if isfinite(low) else ""
            cells.append(Cell(f"{round(mean, 3) + 0.0:+.3f}{sides}", value=mean))  # no -0.000
        elif samples[key] and not finished.comparable(column, key, base):
            cells.append(Cell(OTHER_TARGETS))
        else:
            cells.append(Cell())
    return cells


def _combined(evidence: Evidence, row: Row) -> Cell:
    key = evidence.finished.key(row)
    if not evidence.finished.learning(key):
        return Cell(UNLEARNT)
    score = Score.of(evidence.combined(key).values())
    if score is None:
        return Cell()
    return Cell(_text(1, score, "+z"), value=score.mean, deviation=score.std)


def _published(finished: Finished, column: str) -> list[Cell]:
    """The paper's rows, by its rule: arrows beyond two deviations of the base, bold within two of best."""
    scores = [row.published.get(column) for row in finished.table.rows]
    best = max((score for score in scores if score is not None), default=0.0)
    std = _published_std(finished, column) or 0.0
    cells = []
    for row, score in zip(finished.table.rows, scores, strict=True):
        if score is None:
            cells.append(Cell())
        else:
            arrow = ARROWS[published_sign(finished, row, column)]
            cells.append(Cell(f"{score:.2f}{arrow}", score >= best - 2 * std, score))
    return cells


def published_sign(finished: Finished, row: Row, column: str) -> int | None:
    """The paper's rule: 1, -1 above, below the baseline by more than two deviations of a run; 0: neither.

    None where the paper has no score. The deviation is that of ten runs of the baseline.
    """
    score, baseline = row.published.get(column), finished.baseline.published.get(column)
    std = _published_std(finished, column)
    if score is None or baseline is None or std is None:
        return None
    delta = score - baseline
    return int(abs(delta) > 2 * std) * (1 if delta > 0 else -1)


def _published_std(finished: Finished, column: str) -> float | None:
    """Return the standard deviation that the table's paper gives for its baseline in a column."""
    return finished.table.paper.column(column).std if finished.table.paper else None


def _text(digits: int, score: Score, sign: str = "") -> str:
    deviation = "" if score.std is None else f"{HARD}±{HARD}{score.std:.{digits}f}"
    return f"{score.mean:{sign}.{digits}f}{deviation}"


def _cell(digits: int, score: Score | None, mark: str = "") -> Cell:
    if score is None:
        return Cell()
    return Cell(_text(digits, score) + mark, value=score.mean, deviation=score.std)


def measures(evidence: Evidence) -> Sheet:
    """Every column: its tasks, what guessing gives, how far the baseline is from it, and its signal."""
    columns, paper = evidence.finished.columns, evidence.finished.baseline.published
    sheet = {
        "column": [Cell(column.title) for column in columns],
        "tasks": [Cell(", ".join(c.tasks) + f" ({c.metric})" * (c.measure not in UNITS)) for c in columns],
        "paper's column": [Cell(_paper_column(evidence.finished, c)) for c in columns],
        "chance": [Cell() if c.chance is None else Cell(f"{c.chance:g}") for c in columns],
        "baseline from chance": [_from_chance(evidence, column) for column in columns],
        "baseline ranks right": [_beside(evidence, column, "ranked_accuracy") for column in columns],
        "baseline answers": [_beside(evidence, column, None) for column in columns],
        "signal-to-noise": [_signal(evidence, column) for column in columns],
    }
    return sheet if paper else {name: cells for name, cells in sheet.items() if "paper" not in name}


def _paper_column(finished: Finished, column: Measured) -> str:
    """Return the name and unit of the paper's column that a column is like."""
    if column.like is None or finished.table.paper is None:
        return "–"
    return f"{column.like} ({finished.table.paper.column(column.like).unit})"


def _signal(evidence: Evidence, column: Measured) -> Cell:
    signal = evidence.signals[column.name]
    if signal is None:
        return Cell("unknown")
    if column in evidence.kept:
        return Cell(f"{signal:.1f}")
    why = f"below {SIGNAL:g}" if signal < SIGNAL else f"within {FROM_CHANCE:g} s.e. of chance"
    return Cell(f"{signal:.1f}, {why}: not averaged")


def _beside(evidence: Evidence, column: Measured, metric: str | None) -> Cell:
    """A metric of the baseline beside what counts, of out of 100; None: the task's own, of greedy answers."""
    if column.measure not in UNITS:
        return Cell()
    name = (metric or column.metric).replace(" ", "_")
    runs = evidence.finished.of(evidence.finished.baseline)
    tasks = [run.tasks[task]["metrics"] for run in runs for task in column.tasks if task in run.tasks]
    known = [metrics[name] for metrics in tasks if metrics.get(name) is not None]
    unit = "%" if metric else f" {column.metric}"
    return Cell(f"{mean(known):.1f}{unit}", value=mean(known)) if known else Cell()


def _from_chance(evidence: Evidence, column: Measured) -> Cell:
    from_chance = evidence.from_chance(column)
    return Cell() if from_chance is None else Cell(f"{from_chance:+z.1f} s.e.")


def verdict_sheet(verdicts: Verdicts, unlike: Collection[str]) -> Sheet | None:
    """Every claim, with what each frame says of it; ≠: of one of the ``unlike`` rows. None without claims."""
    claims: list[Claim] = [claim for claim, _ in verdicts["updates"]]
    if not claims:
        return None
    names = [
        f"{_last(c.better)} > {_last(c.worse)}" + f" {UNLIKE}" * (not c.names.isdisjoint(unlike))
        for c in claims
    ]
    sheet: Sheet = {
        "claim": [Cell(name) for name in names],
        "z": [Cell() if claim.z is None else Cell(f"{claim.z:.1f}") for claim in claims],
    }
    for frame in FRAMES:
        sheet[f"equal {frame}"] = [_verdict(verdict) for _, verdict in verdicts[frame]]
    return sheet | {"conclusion": [Cell(claim.conclusion) for claim in claims]}


def _last(row: Row) -> str:
    return row.name.rpartition("/")[2]


def _verdict(verdict: Verdict) -> Cell:
    judged, number = verdict.judged, ""
    if judged is not None:
        sides = f" ({judged.low:+z.1f}, {judged.high:+z.1f})" * isfinite(judged.low)
        number = f" {judged.mean:+z.1f}{sides}"
    return Cell(verdict.word + number, best=verdict.word == "contradicted")


def count_verdicts(verdicts: Iterable[tuple[Claim, Verdict]]) -> Counts:
    """How many claims are confirmed, contradicted, undecided, and not compared."""
    words = Counter(verdict.word for _, verdict in verdicts)
    confirmed, contradicted = words["confirmed"], words["contradicted"]
    uncompared = sum(words[word] for word in UNCOMPARED)
    return Counts(confirmed, contradicted, words.total() - confirmed - contradicted - uncompared, uncompared)


def decision_accuracy(found: Counts) -> str:
    """What came of claims, in words: the decision accuracy is that of those which were decided."""
    decided = found.confirmed + found.contradicted
    share = f"decision accuracy {found.confirmed / decided:.0%}" if decided else "none decided"
    digits = 0 if all(float(number).is_integer() for number in found) else 1
    numbers = zip(found if found.uncompared else found[:-1], _PARTS, strict=False)
    return ", ".join(f"{number:.{digits}f} {part}" for number, part in numbers) + f" ({share})"


def conclusions(evidence: Evidence, verdicts: Verdicts) -> list[str]:
    """Sentences below a table: verdicts in each frame beside the paper's ceiling, power, outlying seeds."""
    claims = verdicts["updates"]
    if not claims:
        return []
    lines = [f"- equal {frame}: {decision_accuracy(count_verdicts(verdicts[frame]))}" for frame in FRAMES]
    ceiling = simulate_replication(evidence.finished.table)
    if any(ceiling):
        lines += [f"- a repeat of the paper, of all its claims in this table: {decision_accuracy(ceiling)}"]
    rows = {name for claim, _ in claims for name in claim.names}
    if not rows.isdisjoint(evidence.unlike):
        alike = [(c, v) for c, v in claims if c.names.isdisjoint(evidence.unlike)]
        found = decision_accuracy(count_verdicts(alike))
        lines += [f"- equal updates, not counting claims about rows with {UNLIKE}: {found}"]
    text = [f"{_claims(len(claims))} of the paper about these rows:\n\n" + "\n".join(lines)]
    equivalent = sum(verdict.word == "equivalent" for _, verdict in claims)
    if equivalent:
        near = f"less than {MARGIN:.2g} deviations of a repeat apart"
        text.append(f"{equivalent} of the undecided are equivalent: {near}.")
    judged = [verdict.judged for _, verdict in claims if verdict.judged and verdict.judged.freedom]
    if judged:
        text.append(_power(judged))
    elif min(len(evidence.finished.runs[name]) for name in rows) < 2:
        text.append("A row with one seed claims nothing; train more with --seeds.")
    elif not evidence.kept:
        text.append("No column tells these rows apart, so no claim is decided.")
    if named := evidence.outlying_seeds():
        listed = ", ".join(f"{row} seed {seed}" for row, seed in named)
        text.append(f"Outlying seeds (combined score far from the row's others, and counted): {listed}.")
    return text


def _claims(count: int) -> str:
    return f"{count} claim{'s' * (count != 1)}"


def _power(judged: Sequence[Judged]) -> str:
    """Which difference such a table finds four times of five, at the strictest step of Holm's rule.

    Of a pair whose error, and what is known of it, are as those of most.
    """
    error, freedom = median(x.error for x in judged), median(x.freedom for x in judged)
    effects = (np.geomspace(0.01, 1000, 600) * error).tolist()
    least = next((x for x in effects if power(x, error, freedom, LEVEL / len(judged)) > 0.8), effects[-1])
    counts = sorted({len(x.by_seed) for x in judged})
    seeds = f"With {' to '.join(map(str, dict.fromkeys((counts[0], counts[-1]))))} seeds a pair"
    if least > HARDLY:
        return f"{seeds} and {_claims(len(judged))} hardly a difference shows; train more with --seeds."
    many = _claims(len(judged))
    return f"{seeds} and {many}, a difference of {least:.1f} deviations is found four times of five."


def marked(sheet: Sheet, labels: Iterable[str]) -> Sheet:
    """The sheet with the mark ≠ behind the rows of these ``labels``."""
    marks = {label: f"{label} {UNLIKE}" for label in labels}
    return sheet | {"row": [cell._replace(text=marks.get(cell.text, cell.text)) for cell in sheet["row"]]}

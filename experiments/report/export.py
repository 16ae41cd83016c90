"""Exports a report's numbers: CSV of every seed and of each table as it is shown, JSON with every verdict."""

import csv
from collections.abc import Iterable, Mapping, Sequence
from io import StringIO
from math import isfinite
from typing import Any

from experiments.console import MISSING, Cell, Sheet
from experiments.report.comparison import (
    BaselineDifference,
    Comparison,
    Verdict,
    Verdicts,
    to_baseline_verdict,
)
from experiments.report.metrics import Group, Metric
from experiments.report.order import PaperOrder, ScalePrediction
from experiments.report.statistics import PairedTest, seed_intervals
from experiments.report.text import COUNTED, count_verdicts
from experiments.runs.plateau import has_plateau
from experiments.runs.result import UNDEFINED, Result
from experiments.study.claims import Claim, compared_columns
from experiments.study.table import Row, Table

COUNTERS = (  # fields of Result
    "content_tokens",
    "content_loss",
    "reference_loss",
    "top_ten_share",
    "exit_step",
    "flops",
    "held_out_loss",
    "parameters",
    "seconds",
    "tokens",
)


def seeds_csv(comparisons: Iterable[Comparison]) -> str:
    """Return a line per row, seed and metric; a run without any metric has one line."""
    titles = ["table", "row", "label", "seed", "column", "measure", "score", "paper", *COUNTERS, "undefined"]
    lines: list[list[Any]] = [titles]
    for comparison in comparisons:
        for row in comparison.table.rows:
            for run in comparison.runs_of(row):
                lines += _seed_lines(comparison, row, run)
    return _csv(lines)


def _seed_lines(comparison: Comparison, row: Row, run: Result) -> list[list[Any]]:
    names = [row.table, row.name, row.label, run.seed]
    counters = [getattr(run, name) for name in COUNTERS]
    lines = []
    for metric in comparison.metrics:
        score = metric.value(comparison.scores(run))
        published = row.published.get(metric.paper_column or "")
        reasons = "; ".join(f"{task}: {reason}" for task, reason in run.undefined(metric.name).items())
        lines.append([*names, metric.name, metric.measure, score, published, *counters, reasons])
    return lines or [[*names, "", "", "", "", *counters, ""]]


def sheet_csv(sheet: Sheet) -> str:
    """Return a table as it is shown, but with unrounded numbers, and with no other signs beside them than ▲▼.

    A column is followed by the standard deviations over seeds (``±``) and the arrows of significant
    differences (``▲▼``), if any of its cells has them.
    """
    columns: dict[str, list[Any]] = {}
    for title, cells in sheet.items():
        columns[title] = [_value(cell) for cell in cells]
        if any(cell.deviation is not None for cell in cells):
            columns[f"{title} ±"] = [cell.deviation for cell in cells]
        arrows = [cell.text[-1] if cell.text.endswith(("▲", "▼")) else "" for cell in cells]
        if any(arrows):
            columns[f"{title} ▲▼"] = arrows
    return _csv([[*columns], *zip(*columns.values(), strict=True)])


def _value(cell: Cell) -> Any:
    if cell.value is not None:
        return cell.value
    return "" if cell.text == MISSING else cell.text


def _csv(lines: Iterable[Sequence[Any]]) -> str:
    text = StringIO()
    csv.writer(text, lineterminator="\n").writerows(lines)
    return text.getvalue()


def report_data(
    comparisons: Sequence[Comparison], verdicts: Sequence[Verdicts], command: str, scale: str
) -> dict[str, Any]:
    """Return ``results.json``: the order of rows and the claims of each table, and the claims of all tables.

    Everything is in it that a verdict follows from, but for the scores of single examples.
    """
    pairs = zip(comparisons, verdicts, strict=True)
    tables = {comparison.table.name: table_data(comparison, by_group) for comparison, by_group in pairs}
    return {"command": command, "scale": scale, "claims of all tables": _all_claims(tables), "tables": tables}


def predictions_data(predictions: Mapping[str, Mapping[Group, ScalePrediction]]) -> dict[str, Any]:
    """Return table -> group -> how far the order of its rows predicts that at another scale."""
    data: dict[str, Any] = {}
    for table, by_group in predictions.items():
        data[table] = {group: _prediction_data(prediction) for group, prediction in by_group.items()}
    return data


def _prediction_data(prediction: ScalePrediction) -> dict[str, Any]:
    return {
        "decision accuracy": prediction.accuracy,
        "interval": prediction.accuracy_interval,
        "tau": _finite(prediction.tau),
        "tau's interval": prediction.tau_interval,
        "p": prediction.p,
        "rows": list(prediction.rows),
    }


def _all_claims(tables: Mapping[str, Any]) -> dict[str, Any]:
    """Return group -> budget -> the mean share of confirmed claims over tables, and raw counts."""
    found: dict[str, dict[str, list[Mapping[str, Any]]]] = {}
    for table in tables.values():
        for group, by_budget in table["claim counts"].items():
            for budget, counts in by_budget.items():
                if counts["claims"]:
                    of_group = found.setdefault(group, {})
                    of_group.setdefault(budget, []).append(counts)
    data: dict[str, Any] = {}
    for group, of_group in found.items():
        data[group] = {budget: _total_counts(of_tables) for budget, of_tables in of_group.items()}
    return data


def _total_counts(counts: Sequence[Mapping[str, Any]]) -> dict[str, Any]:
    """Return the mean share of confirmed claims over tables, and the sums of their counts."""
    shares = [each["share confirmed"] for each in counts]
    total: dict[str, Any] = {"tables": len(counts), "mean share confirmed": sum(shares) / len(shares)}
    for word in ("claims", *COUNTED):
        total[word] = sum(each[word] for each in counts)
    return total


def _paper_data(table: Table) -> dict[str, Any] | None:
    """Return what the paper says of the columns by which it compares rows; None without a paper."""
    if table.paper is None:
        return None
    return {
        column.name: {"deviation": column.std, "higher is better": column.higher_is_better}
        for column in compared_columns(table)
    }


def table_data(comparison: Comparison, verdicts: Verdicts) -> dict[str, Any]:
    """Return a table of ``results.json``: the order of its rows, its metrics, rows with seeds, and claims."""
    counts, over_start = {}, {}
    for group, by_budget in verdicts.items():
        counts[group] = {budget: _counts_data(judged) for budget, judged in by_budget.items()}
    for group in comparison.groups:
        tests = comparison.gains_over_start(group)
        over_start[group] = {row: _test_data(test) for row, test in tests.items()}
    return {
        "order": {group: _order_data(order) for group, order in comparison.paper_orders.items()},
        "claim counts": counts,
        "baseline run": _experiment_data(comparison, comparison.canonical_baseline),
        "paper": _paper_data(comparison.table),
        # only where it is another one: in files without the key, any pair of rows may be a claim
        **({} if comparison.table.pairs == "all" else {"pairs": comparison.table.pairs}),
        "weights": comparison.groups,
        "over the start alone": {
            "row": comparison.control,
            "seeds": _run_folders(comparison, comparison.control),
            "rows": over_start,
        },
        "columns": {metric.name: _metric_data(comparison, metric) for metric in comparison.metrics},
        "rows": {row.name: _row_data(comparison, row) for row in comparison.table.rows},
        "claims": _claims_data(verdicts),
    }


def _metric_data(comparison: Comparison, metric: Metric) -> dict[str, Any]:
    return {
        "measure": metric.measure,
        "tasks": list(metric.tasks),
        "half": metric.half,
        "paper's column": metric.paper_column,
        "chance": metric.chance,
        "deviation": comparison.std(metric),
        "unit": comparison.noise_std[metric.name],
        "signal-to-noise": comparison.signal_to_noise[metric.name],
        "rows above chance": comparison.rows_above_chance(metric),
        "judged": metric in comparison.judging_metrics,
        "higher is better": metric.sign == 1,
    }


def _order_data(order: PaperOrder) -> dict[str, Any]:
    return {
        "tau": _finite(order.tau),
        "p": order.p,
        "interval": order.interval,
        "a repeat of the paper": None if order.replication is None else _finite(order.replication),
        "rows": list(order.rows),
    }


def _finite(value: float) -> float | None:
    return value if isfinite(value) else None


def _counts_data(judged: Sequence[tuple[Claim, Verdict]]) -> dict[str, Any]:
    counts = count_verdicts(judged)
    return {
        "claims": counts.total,
        **dict(zip(COUNTED, counts, strict=True)),
        "share confirmed": _finite(counts.share_confirmed),
    }


def _claims_data(verdicts: Verdicts) -> list[dict[str, Any]]:
    """Return each claim with its verdicts: group -> budget -> verdict."""
    claims = [claim for claim, _ in next(iter(verdicts.values()))["updates"]]
    data = []
    for index, claim in enumerate(claims):
        each: dict[str, Any] = {
            "better": claim.better.name,
            "worse": claim.worse.name,
            "z": claim.z,
            "conclusion": claim.conclusion,
        }
        # only where they are others: in files without the keys, claims are of a better row and of all tasks
        if claim.relation != "better":
            each["relation"] = claim.relation
        if claim.tasks is not None:
            each["tasks"] = claim.tasks
        of_claim = each["verdicts"] = {}
        for group, by_budget in verdicts.items():
            of_claim[group] = {budget: _verdict_data(by_budget[budget][index][1]) for budget in by_budget}
        data.append(each)
    return data


def _row_data(comparison: Comparison, row: Row) -> dict[str, Any]:
    name = comparison.canonical_name(row)
    differences, combined = {}, {}
    for metric in comparison.metrics:
        difference = comparison.differences(metric).get(name)
        if difference is not None:
            differences[metric.name] = _difference_data(difference)
    for group in comparison.groups:
        scores = comparison.combined_scores(name, group)
        combined[group] = {str(seed): score for seed, score in scores.items()}
    experiment = comparison.experiments.get(row.name)  # None: the row needs what this code lacks
    return {
        "label": row.label,
        "same experiment as": name,
        "published": dict(row.published),
        "published runs": row.published_runs,
        "unlike": [str(mismatch) for mismatch in comparison.mismatches.get(row.name, [])],
        "needs": list(row.needs),
        "has plateau": experiment is not None and has_plateau(experiment),
        "updates": None if experiment is None else experiment.pretraining.steps,
        "seeds": {str(run.seed): _run_data(comparison, run) for run in comparison.runs_of(row)},
        "less the baseline's": differences,
        "combined": combined,
    }


def _run_data(comparison: Comparison, run: Result) -> dict[str, Any]:
    scores = comparison.scores(run)
    undefined = {metric.name: run.undefined(metric.name) for metric in comparison.metrics}
    return {
        "folder": _folder_in_scale(run),
        "scores": {metric.name: metric.value(scores) for metric in comparison.metrics},
        UNDEFINED: {name: reasons for name, reasons in undefined.items() if reasons},
        **{name: getattr(run, name) for name in COUNTERS},
        "likelihoods": list(run.likelihoods),
    }


def _experiment_data(comparison: Comparison, name: str) -> dict[str, Any]:
    """Return where the runs of an experiment lie, and what its verdicts depend on."""
    experiment = comparison.experiments[name]
    return {
        "row": name,
        "has plateau": has_plateau(experiment),
        "updates": experiment.pretraining.steps,
        "seeds": _run_folders(comparison, name),
    }


def _run_folders(comparison: Comparison, name: str | None) -> dict[str, str]:
    """Return seed -> folder of each finished run of a row; empty for no row."""
    runs = comparison.runs[name] if name else ()
    return {str(run.seed): _folder_in_scale(run) for run in runs}


def _folder_in_scale(run: Result) -> str:
    """Return the folder of a run, from that of its scale."""
    return str(run.folder).removeprefix(f"{run.scale}/")


def _difference_data(difference: BaselineDifference) -> dict[str, Any]:
    """Return a row's difference from the baseline in the metric's own unit."""
    return {
        "verdict": difference.verdict,
        "difference": difference.mean,
        "interval": _interval(difference),
        "p": difference.test.p,
        "p that not equivalent": difference.test.p_not_equivalent,
        "seeds": len(difference.test.by_seed),
    }


def _interval(x: BaselineDifference | PairedTest) -> list[float] | None:
    """Return the ends of the 95 % confidence interval; None if it is not known."""
    return [x.low, x.high] if isfinite(x.low) else None


def _test_data(test: PairedTest) -> dict[str, Any]:
    """Return what a row adds to the start, in standard deviations of a run."""
    return {
        "verdict": to_baseline_verdict(test),
        "difference": test.mean,
        "interval": _interval(test),
        "p": test.p,
        "p that not equivalent": test.p_not_equivalent,
    }


def _verdict_data(verdict: Verdict) -> dict[str, Any]:
    """Return a verdict with the difference of its two rows, in standard deviations of a run."""
    test = verdict.test
    if test is None:
        return {"verdict": verdict.word, "difference": None}
    if not isfinite(test.low):
        return {"verdict": verdict.word, "difference": test.mean}
    return {
        "verdict": verdict.word,
        "difference": test.mean,
        "interval": _interval(test),
        "multi-bootstrap": list(test.bootstrap),
        "by seeds alone": seed_intervals(test.by_seed),
        "p": test.p,
        "p that not equivalent": test.p_not_equivalent,
        "seeds": list(test.by_seed),
    }

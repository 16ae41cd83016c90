"""Exports a report's numbers: CSV of every seed and of each table as it is shown, JSON with every verdict."""

import csv
from collections.abc import Iterable, Sequence
from io import StringIO
from math import isfinite
from typing import Any

from experiments.console import Cell, Sheet
from experiments.report.comparison import BaselineDifference, Comparison, Verdict, Verdicts
from experiments.report.statistics import PairedTest, seed_intervals
from experiments.runs.result import UNDEFINED, Result
from experiments.study.table import Row

COUNTERS = (
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
    """Return a line per row, seed and metric."""
    head = ["table", "row", "label", "seed", "column", "measure", "score", "paper", *COUNTERS, "undefined"]
    lines: list[list[Any]] = [head]
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
    """Return a table as it is shown, with its numbers unrounded.

    A column is followed by the standard deviations over seeds (``±``) and the arrows of significant
    differences (``▲▼``), if any of its cells has them.
    """
    columns: dict[str, list[Any]] = {}
    for head, cells in sheet.items():
        columns[head] = [_value(cell) for cell in cells]
        if any(cell.deviation is not None for cell in cells):
            columns[f"{head} ±"] = ["" if cell.deviation is None else cell.deviation for cell in cells]
        arrows = [cell.text[-1] if cell.text.endswith(("▲", "▼")) else "" for cell in cells]
        if any(arrows):
            columns[f"{head} ▲▼"] = arrows
    return _csv([[*columns], *zip(*columns.values(), strict=True)])


def _value(cell: Cell) -> Any:
    if cell.value is not None:
        return cell.value
    return "" if cell.text == Cell().text else cell.text


def _csv(lines: Iterable[Sequence[Any]]) -> str:
    text = StringIO()
    csv.writer(text, lineterminator="\n").writerows(lines)
    return text.getvalue()


def table_data(comparison: Comparison, verdicts: Verdicts) -> dict[str, Any]:
    """Return a table of ``results.json``: its metrics, its rows with their seeds, and its claims."""
    return {
        "columns": {
            metric.name: {
                "measure": metric.measure,
                "tasks": list(metric.tasks),
                "paper's column": metric.paper_column,
                "chance": metric.chance,
                "deviation": comparison.std(metric),
                "unit": comparison.noise_std[metric.name],
                "signal-to-noise": comparison.signal_to_noise[metric.name],
                "averaged": metric in comparison.averaged,
                "higher is better": metric.sign == 1,
            }
            for metric in comparison.metrics
        },
        "rows": {row.name: _row_data(comparison, row) for row in comparison.table.rows},
        "claims": [
            {
                "better": claim.better.name,
                "worse": claim.worse.name,
                "z": claim.z,
                "conclusion": claim.conclusion,
                "equal": {budget: _verdict_data(verdicts[budget][i][1]) for budget in verdicts},
            }
            for i, (claim, _) in enumerate(verdicts["updates"])
        ],
    }


def _row_data(comparison: Comparison, row: Row) -> dict[str, Any]:
    key = comparison.canonical_name(row)
    differences = {metric.name: comparison.differences(metric).get(key) for metric in comparison.metrics}
    return {
        "label": row.label,
        "unlike": comparison.mismatches.get(row.name, []),  # how its provenance differs
        "seeds": {str(run.seed): _run_data(comparison, run) for run in comparison.runs_of(row)},
        "less the baseline's": {
            name: _difference_data(x) for name, x in differences.items() if x is not None
        },
        "combined": {str(seed): z for seed, z in comparison.mean_standardized_difference(key).items()},
    }


def _run_data(comparison: Comparison, run: Result) -> dict[str, Any]:
    scores = comparison.scores(run)
    undefined = {metric.name: run.undefined(metric.name) for metric in comparison.metrics}
    return {
        "scores": {metric.name: metric.value(scores) for metric in comparison.metrics},
        UNDEFINED: {name: reasons for name, reasons in undefined.items() if reasons},
        **{name: getattr(run, name) for name in COUNTERS},
        "likelihoods": list(run.likelihoods),
    }


def _difference_data(x: BaselineDifference) -> dict[str, Any]:
    """Return a row's difference from the baseline in the metric's own unit."""
    return {
        "verdict": x.verdict,
        "difference": x.mean,
        "interval": [x.low, x.high] if isfinite(x.low) else None,
        "p": x.test.p,
        "p that not equivalent": x.test.p_not_equivalent,
        "seeds": len(x.test.by_seed),
    }


def _verdict_data(verdict: Verdict) -> dict[str, Any]:
    """Return a verdict with the difference of its two rows, in deviations of a replication."""
    test: PairedTest | None = verdict.test
    if test is None or not isfinite(test.low):
        return {"verdict": verdict.word, "difference": test.mean if test else None}
    return {
        "verdict": verdict.word,
        "difference": test.mean,
        "interval": [test.low, test.high],
        "multi-bootstrap": list(test.bootstrap),
        "by seeds alone": seed_intervals(test.by_seed),
        "p": test.p,
        "p that not equivalent": test.p_not_equivalent,
        "seeds": list(test.by_seed),
    }

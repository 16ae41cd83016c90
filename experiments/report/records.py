"""A report's numbers as data: CSV of each score and of each table as it is shown, and JSON with every verdict
and its intervals.
"""

import csv
from collections.abc import Mapping, Sequence
from io import StringIO
from math import isfinite
from typing import Any

from experiments.console import Cell, Sheet
from experiments.report.comparison import Evidence, Finished, Verdict, Verdicts
from experiments.report.statistics import intervals
from experiments.runs.result import UNDEFINED, Result

_COUNTED = """content_tokens content_loss reference_loss top_ten_share exit_step flops held_out_loss
    parameters seconds tokens""".split()


def table_csv(tables: Sequence[Finished]) -> str:
    """A line for every row, seed and column."""
    text = StringIO()
    out = csv.writer(text, lineterminator="\n")
    out.writerow(
        ["table", "row", "label", "seed", "column", "measure", "score", "paper", *_COUNTED, "undefined"]
    )
    for finished in tables:
        for row in finished.table.rows:
            for run in finished.of(row):
                cost = [getattr(run, name) for name in _COUNTED]
                names = (row.table, row.name, row.label, run.seed)
                for column in finished.columns:
                    score, paper = column.value(finished.tasks(run)), row.published.get(column.like or "")
                    why = "; ".join(f"{task}: {x}" for task, x in run.undefined(column.name).items())
                    out.writerow([*names, column.name, column.measure, score, paper, *cost, why])
                if not finished.columns:
                    out.writerow([*names, "", "", "", "", *cost, ""])
    return text.getvalue()


def sheet_csv(sheet: Sheet) -> str:
    """A table as it is shown, with its numbers unrounded: behind a heading, if any of its cells has them, the
    deviation over seeds (``±``) and the arrow of a difference beyond noise (``▲▼``).
    """
    columns: dict[str, list[Any]] = {}
    for head, cells in sheet.items():
        columns[head] = [
            ("" if cell.text == Cell().text else cell.text) if cell.value is None else cell.value
            for cell in cells
        ]
        if any(cell.deviation is not None for cell in cells):
            columns[f"{head} ±"] = ["" if cell.deviation is None else cell.deviation for cell in cells]
        arrows = [cell.text[-1] if cell.text.endswith(("▲", "▼")) else "" for cell in cells]
        if any(arrows):
            columns[f"{head} ▲▼"] = arrows
    text = StringIO()
    out = csv.writer(text, lineterminator="\n")
    out.writerows([columns, *zip(*columns.values(), strict=True)])
    return text.getvalue()


def table_data(evidence: Evidence, verdicts: Verdicts) -> dict[str, Any]:
    """A table of ``results.json``: its columns, the runs of its rows, and the verdicts on its claims."""
    finished = evidence.finished
    columns = {
        c.name: {
            "measure": c.measure,
            "tasks": list(c.tasks),
            "paper's column": c.like,
            "chance": c.chance,
            "deviation": finished.deviation(c),
            "unit": evidence.units[c.name],
            "signal-to-noise": evidence.signals[c.name],
            "averaged": c in evidence.kept,
        }
        for c in finished.columns
    }
    rows = {
        row.name: {
            "label": row.label,
            "unlike": evidence.unlike.get(row.name, []),  # in what it was made of
            "seeds": {str(run.seed): _run(evidence, run) for run in finished.of(row)},
        }
        for row in finished.table.rows
    }
    less = {c.name: _finite(evidence.less_baseline(c)) for c in finished.columns if c.is_held_out}
    for row in finished.table.rows:
        if not finished.has_tasks:
            rows[row.name]["less the baseline's"] = {
                c: x[finished.key(row)] for c, x in less.items() if finished.key(row) in x
            }
        rows[row.name]["combined"] = {str(k): x for k, x in evidence.combined(finished.key(row)).items()}
    claims = [
        {
            "better": claim.better.name,
            "worse": claim.worse.name,
            "z": claim.z,  # None: the noise of the published scores is not known
            "conclusion": claim.conclusion,
            "equal": {frame: _verdict(verdicts[frame][place][1]) for frame in verdicts},
        }
        for place, (claim, _) in enumerate(verdicts["updates"])
    ]
    return {"columns": columns, "rows": rows, "claims": claims}


def _finite(differences: Mapping[str, tuple[float, float, float]]) -> dict[str, dict[str, Any]]:
    """Row -> a difference and its interval, where that is known."""
    return {
        row: {"difference": mean, "interval": [low, high] if isfinite(low) else None}
        for row, (mean, low, high) in differences.items()
    }


def _run(evidence: Evidence, run: Result) -> dict[str, Any]:
    tasks = evidence.finished.tasks(run)
    scores = {column.name: column.value(tasks) for column in evidence.finished.columns}
    counted = {name: getattr(run, name) for name in _COUNTED}
    undefined = {name: reasons for name in scores if (reasons := run.undefined(name))}
    return {"scores": scores, UNDEFINED: undefined, **counted, "likelihoods": list(run.likelihoods)}


def _verdict(verdict: Verdict) -> dict[str, Any]:
    """A difference of two rows, in deviations of a repeat."""
    judged = verdict.judged
    if judged is None or not isfinite(judged.low):
        return {"verdict": verdict.word, "difference": judged.mean if judged else None}
    return {
        "verdict": verdict.word,
        "difference": judged.mean,
        "interval": [judged.low, judged.high],
        "multi-bootstrap": list(judged.drawn),
        "by seeds alone": intervals(judged.by_seed),
        "p": judged.p,
        "p that not equivalent": judged.p_apart,
        "seeds": list(judged.by_seed),
    }

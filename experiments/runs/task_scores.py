"""Reads and writes what the models of a stage score on a task."""

import hashlib
import io
from collections.abc import Mapping
from math import inf
from pathlib import Path
from typing import Any

import numpy as np

from experiments.runs.result import UNDEFINED
from lm.data.tasks.benchmarks import TASKS
from lm.data.tasks.labelled import LABELLED
from lm.data.tasks.task import BaseTask
from lm.files import json_with_checksum, parse_with_checksum, write
from lm.metrics import Undefined, Value, defined_values, undefined_reasons
from lm.train.runtime.records import records

BITS = "bits_per_byte"  # of the right answers of a task: decides between equal scores


def best_of(task: BaseTask, folder: Path, step: int | None = None) -> dict[str, Any]:
    """Return the best evaluation of a task, as the paper reports it: every task by its own checkpoint.

    Of several with the same score it is the one with the likeliest right answers, else the last.
    step: if given, the evaluation after this step is returned.
    """
    name = task.name
    evaluations = [r for r in records(folder) if f"{name}/score" in r or f"{name}/{UNDEFINED}" in r]
    evaluations = [record for record in evaluations if step in (None, record["step"])]

    def rank(record: Mapping[str, Any]) -> tuple[float, float, int]:
        return record.get(f"{name}/score", -inf), -record.get(f"{name}/{BITS}", inf), record["step"]

    best = max(evaluations, key=rank)
    metrics = {key.removeprefix(f"{name}/"): x for key, x in best.items() if key.startswith(f"{name}/")}
    undefined = {metric: Undefined(reason) for metric, reason in metrics.pop(UNDEFINED, {}).items()}
    if "score" in metrics:
        metrics["score"] *= task.direction  # recorded so that more is better
    return task_score(task, best["step"], metrics | undefined)


def score_values(task: BaseTask, metrics: Mapping[str, Value]) -> dict[str, Any]:
    """Return what the records of a stage say of a task: its metrics, and why others are undefined.

    The score is recorded so that more is better.
    """
    values: dict[str, Any] = defined_values(metrics)
    if "score" in values:
        values["score"] *= task.direction
    if undefined := undefined_reasons(metrics):
        values[UNDEFINED] = undefined
    return {f"{task.name}/{name}": value for name, value in values.items()}


def task_score(task: BaseTask, step: int, metrics: Mapping[str, Value]) -> dict[str, Any]:
    """Return what ``scores.json`` says of a task, but for the number of its rows; None where undefined."""
    known, undefined = defined_values(metrics), undefined_reasons(metrics)
    return {
        "column": task.column,
        "like": task.paper_column,
        "half": task.half,
        "metric": " and ".join(metric for metric in task.metrics if metric not in task.unscored_metrics),
        "measure": task.measure,
        "chance": task.chance,
        "step": step,
        "score": known.get("score"),
        "metrics": {name: known.get(name) for name in metrics if name != "score"},
        **({UNDEFINED: undefined} if undefined else {}),
    }


def chance_score(task: str, best: Mapping[str, Any]) -> float | None:
    """Return what guessing scores on a task; None where it is unknown.

    best: what ``scores.json`` says of the task. If it lacks the value, a built-in task of this name has it.
    """
    if best.get("chance") is not None:
        return best["chance"]
    for known in (LABELLED.get(task), TASKS.get(task)):
        if known is not None and known.measure == best.get("measure", "score"):
            return known.chance
    return None


def read_report_scores(folder: Path) -> dict[str, Any]:
    """Return the scores of a stage on report rows: ``step``, ``trained`` and ``tasks``; {} before they exist.

    ``trained`` is when training reached the step; old scores lack it. DataError if the file is damaged.
    """
    path = folder / "report" / "scores.json"
    return parse_with_checksum(path.read_bytes(), path, "delete it") if path.exists() else {}


def write_report_scores(folder: Path, scores: dict[str, Any]) -> None:
    """Write what ``read_report_scores`` reads."""
    write(folder / "report" / "scores.json", json_with_checksum(scores))


def write_example_values(folder: Path, task: str, values: Mapping[str, np.ndarray]) -> str:
    """Write ``report/TASK.npy``, the values of each report row of a task by name; return its SHA-256."""
    file = io.BytesIO()
    rows = np.empty(len(next(iter(values.values()))), [(name, np.float64) for name in values])
    for name, value in values.items():
        rows[name] = value
    np.save(file, rows)
    write(folder / "report" / f"{task}.npy", file.getvalue())
    return hashlib.sha256(file.getvalue()).hexdigest()

"""What a run scored and cost, from the records of its stages."""

import hashlib
import io
import os
from collections.abc import Mapping, Sequence
from math import inf
from pathlib import Path
from typing import Any

import numpy as np

from experiments.runs.result import DOCUMENTS, UNDEFINED, likelihood_of, write_result
from experiments.runs.stages import Stage
from lm.data.tasks.task import BaseTask
from lm.files import json_with_checksum, parse_with_checksum, write
from lm.metrics import Undefined, Value, defined_values, undefined_reasons
from lm.train.runtime.log import records

BITS = "bits_per_byte"  # of the right answers of a task: decides between equal scores
EXIT = 0.2  # below a model without context: one that has left the plateau [nats a content token]


def best_of(task: BaseTask, folder: Path, step: int | None = None) -> dict[str, Any]:
    """The best evaluation of a task, as the paper reports it: every task by its own checkpoint.

    Of several with the same score it is the one with the likeliest right answers, else the last: as of
    checkpoints. With ``step`` it is the evaluation of that.
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
    """What the records of a stage say of a task: its metrics, and why others are undefined.

    The score is recorded so that more is better.
    """
    values: dict[str, Any] = defined_values(metrics)
    if "score" in values:
        values["score"] *= task.direction
    if undefined := undefined_reasons(metrics):
        values[UNDEFINED] = undefined
    return {f"{task.name}/{name}": value for name, value in values.items()}


def task_score(task: BaseTask, step: int, metrics: Mapping[str, Value]) -> dict[str, Any]:
    """What ``scores.json`` says of a task, but for the number of its rows; None where it is undefined."""
    known, undefined = defined_values(metrics), undefined_reasons(metrics)
    return {
        "column": task.column,
        "like": task.paper_column,
        "metric": " and ".join(metric for metric in task.metrics if metric not in task.unscored_metrics),
        "measure": task.measure,
        "chance": 0.0 if task.measure == "bits_above_chance" else None,
        "step": step,
        "score": known.get("score"),
        "metrics": {name: known.get(name) for name in metrics if name != "score"},
        **({UNDEFINED: undefined} if undefined else {}),
    }


def reported(folder: Path) -> dict[str, Any]:
    """What the model of a stage came to on the report halves: ``step`` and ``tasks``; nothing if not yet.

    DataError if it is damaged.
    """
    path = folder / "report" / "scores.json"
    return parse_with_checksum(path.read_bytes(), path, "delete it") if path.exists() else {}


def write_reported(folder: Path, scores: dict[str, Any]) -> None:
    """What ``reported`` reads."""
    write(folder / "report" / "scores.json", json_with_checksum(scores))


def write_example_values(folder: Path, task: str, values: Mapping[str, np.ndarray]) -> str:
    """``report/TASK.npy``: what each row of a task's report half came to, by name; the file's SHA-256."""
    file = io.BytesIO()
    rows = np.empty(len(next(iter(values.values()))), [(name, np.float64) for name in values])
    for name, value in values.items():
        rows[name] = value
    np.save(file, rows)
    write(folder / "report" / f"{task}.npy", file.getvalue())
    return hashlib.sha256(file.getvalue()).hexdigest()


def columns(best: dict[str, dict]) -> dict[str, float | None]:
    """The paper's columns: the mean over the tasks of each; None where the score of one is undefined."""
    scores: dict[str, list[float | None]] = {}
    for task in best.values():
        scores.setdefault(task["column"], []).append(task["score"])
    known = {column: [x for x in values if x is not None] for column, values in scores.items()}
    return {
        column: sum(known[column]) / len(values) if len(known[column]) == len(values) else None
        for column, values in scores.items()
    }


def held_out(stages: Sequence[Stage]) -> dict[str, float | None]:
    """The losses on held-out text after pre-training, and the step at which it left the plateau, if it did.

    Of the first of several pre-trainings, and not of its start. None: never, or no pre-training.
    """
    folders = [stage.folder for stage in stages if stage.kind == "pretrain" and not stage.is_start]
    lines = records(folders[0]) if folders else []
    evaluations = [line for line in lines if line["kind"] == "eval"]
    last = evaluations[-1] if evaluations else {}
    values = {name: last.get(name) for name in ("content_loss", "reference_loss", "top_ten_share")}
    left = (line["step"] for line in evaluations if "content_loss" in line and has_left(line))
    return {"held_out_loss": last.get("loss"), **values, "exit_step": next(left, None)}


def likelihoods(stages: Sequence[Stage]) -> list[dict[str, float]]:
    """Of held-out documents at each evaluation of the language model, with the seconds of training up to it.

    Of the first of several pre-trainings; empty if none was asked about them.
    """
    models = [stage for stage in stages if stage.kind in ("pretrain", "count") and not stage.is_start]
    lines = records(models[0].folder) if models else []
    found = []
    for line in lines:
        if line["kind"] == "eval" and f"{DOCUMENTS}nats" in line:
            seconds = total(models[0].folder, "seconds_per_step", line["step"])
            numbers = likelihood_of(line, DOCUMENTS)._asdict()
            found.append({"step": line["step"], "seconds": seconds} | numbers)
    return found


def has_left(evaluation: Mapping[str, float]) -> bool:
    """Whether the model uses its context: it is better by EXIT than one that has none."""
    return evaluation["content_loss"] <= evaluation["reference_loss"] - EXIT


def cost(folders: Sequence[Path]) -> dict[str, float]:
    """Seconds of training, compilation and evaluation left out, and the target tokens learnt from."""
    seconds = sum(total(folder, "seconds_per_step") for folder in folders)
    return {"seconds": seconds, "tokens": int(sum(total(folder, "tokens") for folder in folders))}


def total(folder: Path, name: str, until: float = inf) -> float:
    """The sum over the steps of a stage: a line of its metrics stands for the steps since the one before."""
    lines = [record for record in records(folder) if record["kind"] == "train"]
    before = [0, *(line["step"] for line in lines[:-1])]
    pairs = zip(lines, before, strict=False)
    return sum(line.get(name, 0.0) * max(min(line["step"], until) - step, 0) for line, step in pairs)


def write_scores(folder: Path, home: Path, stages: Sequence[Stage], values: Mapping[str, Any]) -> None:
    """Write what the run scored and cost, and where its stages lie, from the scale's folder.

    ``values``: the ``tasks``, ``branches``, ``length_losses``, ``flops``, ``start_flops`` and ``parameters``.
    """
    folders = {stage.name: stage.folder for stage in stages}
    pretrained = [stage.folder for stage in stages if stage.kind == "pretrain"]
    result = {
        **values,
        "columns": columns(values["tasks"]),
        **held_out(stages),
        "likelihoods": likelihoods(stages),
        "content_tokens": int(sum(total(path, "content_tokens") for path in pretrained)),
        "start_tokens": int(sum(total(s.folder, "content_tokens") for s in stages if s.is_start)),
        **cost(list(dict.fromkeys(folders.values()))),
        "phases": {name: os.path.relpath(path.resolve(), home) for name, path in folders.items()},
        "records": {name: len(records(path)) for name, path in folders.items()},
    }
    write_result(folder, result)

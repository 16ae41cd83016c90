"""Collect what a run scored and cost from the records of its stages."""

import os
from collections.abc import Mapping, Sequence
from math import inf
from pathlib import Path
from typing import Any

from experiments.runs.kinds.stage import Stage
from experiments.runs.paths import STAGES
from experiments.runs.plateau import PLATEAU_MARGIN, has_plateau
from experiments.runs.result import (
    DENOISERS,
    DOCUMENTS,
    likelihood_numbers,
    likelihood_of,
    write_result,
)
from lm.train.runtime.records import records


def columns(best: dict[str, dict]) -> dict[str, float | None]:
    """Return the paper's columns: the mean over the tasks of each; None where a score is undefined."""
    scores: dict[str, list[float | None]] = {}
    for task in best.values():
        scores.setdefault(task["column"], []).append(task["score"])
    means: dict[str, float | None] = {}
    for column, values in scores.items():
        known = [value for value in values if value is not None]
        means[column] = sum(known) / len(known) if len(known) == len(values) else None
    return means


def held_out(*phases: Path) -> dict[str, Any]:
    """Return the losses on held-out text after pre-training, and the step at which it left the plateau.

    phases: folders of the phases of pre-training, in order, each with losses of its own objective; none
    without pre-training.
    A loss that was not measured is None, and so is ``exit_step`` of a model that stayed on the plateau of its
    last phase. ``denoiser_losses`` has a loss per denoiser of a mixture.
    """
    last: dict[str, Any] = {}
    exits: list[int] = []  # steps of evaluations at which the model used its context
    has_left_last = False
    for folder in phases:
        evaluations = [record for record in records(folder) if record["kind"] == "eval"]
        last = evaluations[-1] if evaluations else {}
        left = [line["step"] for line in evaluations if "content_loss" in line and has_left(line)]
        exits += left
        has_left_last = bool(left)
    values = {name: last.get(name) for name in ("content_loss", "reference_loss", "top_ten_share")}
    by_denoiser = {
        name.removeprefix(DENOISERS): loss for name, loss in last.items() if name.startswith(DENOISERS)
    }
    losses = {"held_out_loss": last.get("loss")} | ({"denoiser_losses": by_denoiser} if by_denoiser else {})
    return {**losses, **values, "exit_step": exits[0] if has_left_last else None}


def likelihoods(folder: Path, first_step: int) -> list[dict[str, float]]:
    """Return the likelihood of held-out documents at each evaluation of the language model in ``folder``.

    Each has the seconds of training from ``first_step`` up to it; [] if no documents were scored.
    """
    found = []
    for line in records(folder):
        if line["kind"] == "eval" and f"{DOCUMENTS}nats" in line:
            seconds = total(folder, "seconds_per_step", first_step, line["step"])
            numbers = likelihood_numbers(likelihood_of(line, DOCUMENTS))
            found.append({"step": line["step"], "seconds": seconds} | numbers)
    return found


def has_left(evaluation: Mapping[str, float]) -> bool:
    """Return whether the model uses its context: it is better by PLATEAU_MARGIN than one that has none."""
    return evaluation["content_loss"] <= evaluation["reference_loss"] - PLATEAU_MARGIN


def cost(first_steps: Mapping[Path, int]) -> dict[str, float]:
    """Return seconds of training, without compilation and evaluation, and the target tokens learnt from.

    first_steps: folder of a stage -> the step that its training begins with.
    """
    seconds = sum(total(folder, "seconds_per_step", first) for folder, first in first_steps.items())
    tokens = sum(total(folder, "tokens", first) for folder, first in first_steps.items())
    return {"seconds": seconds, "tokens": round(tokens)}


def total(folder: Path, name: str, first_step: int, until: float = inf) -> float:
    """Return the sum over the steps of a stage of a value per step.

    Each record stands for the steps since the one before. One without the value, as that of a single step
    after compiling, saving or evaluating, counts as the mean of the others.
    """
    lines = [record for record in records(folder) if record["kind"] == "train"]
    known = [line[name] for line in lines if name in line]
    mean = sum(known) / max(len(known), 1)
    before = [first_step, *(line["step"] for line in lines[:-1])]
    pairs = zip(lines, before, strict=False)
    return sum(line.get(name, mean) * max(min(line["step"], until) - step, 0) for line, step in pairs)


def phases_to(stage: Stage) -> list[Path]:
    """Return the folders of the phases up to the last, in order; earlier ones that have a plateau alone."""
    folders = [stage.folder]
    while stage.parent is not None and stage.parent.is_pretraining and not stage.parent.is_start_pretraining:
        stage = stage.parent
        if has_plateau(stage.settings):
            folders.append(stage.folder)
    return folders[::-1]


def write_scores(folder: Path, scale: Path, stages: Sequence[Stage], values: Mapping[str, Any]) -> None:
    """Write what the run in ``folder`` scored and cost, and where its stages lie in the folder of its scale.

    ``values``: the ``tasks``, ``branches``, ``length_losses``, ``parameters``, and as ``flops`` those of each
    pre-training by its name. Of several pre-trainings the first is measured.
    """
    folders = {stage.name: stage.folder for stage in stages}
    pretrainings = [stage for stage in stages if stage.is_pretraining]
    measured = [stage for stage in pretrainings if stage.is_compared]
    scored = measured or [stage for stage in stages if stage.is_count_based]
    content = {stage.name: total(stage.folder, "content_tokens", stage.first_step) for stage in pretrainings}
    flops: Mapping[str, float] = values["flops"]
    starts = [stage for stage in pretrainings if stage.is_start_pretraining]
    phase_costs: dict[str, dict[str, float]] = {}
    for stage in pretrainings:
        if not stage.is_start_pretraining:
            # Pre-trainings for different tasks have the same phases, whose costs add up.
            costs = phase_costs.setdefault(str(stage.training.steps), {"flops": 0.0, "content_tokens": 0})
            costs["flops"] += flops[stage.name]
            costs["content_tokens"] += round(content[stage.name])
    result = {
        **values,
        "columns": columns(values["tasks"]),
        **held_out(*(phases_to(measured[0]) if measured else ())),
        "likelihoods": likelihoods(scored[0].folder, scored[0].first_step) if scored else [],
        "flops": sum(flops.values()),
        "start_flops": sum(flops[stage.name] for stage in starts),
        "content_tokens": round(sum(content.values())),
        "start_tokens": round(sum(content[stage.name] for stage in starts)),
        "phase_costs": phase_costs,
        **cost({stage.folder: stage.first_step for stage in stages}),
        STAGES: {name: os.path.relpath(path.resolve(), scale) for name, path in folders.items()},
        "records": {name: len(records(path)) for name, path in folders.items()},
    }
    write_result(folder, result)

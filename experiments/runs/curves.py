"""Reads the training curves of finished runs: losses and scores over steps."""

from collections.abc import Callable, Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

from experiments.runs.paths import base_name, is_compared, is_earlier_phase, is_pretraining
from experiments.runs.result import Result
from lm.config.base import DataError, SettingError
from lm.train.runtime.records import records

SeedCurve = list[tuple[float, float]]  # (step, value) of one seed or ensemble member
Curves = Mapping[str, Sequence[SeedCurve]]  # plotted metric -> curves
# plotted metrics of pre-training: of all held-out targets, of content tokens, and of the latter by a unigram
# model
TRAINING_LOSS = "pre-training loss [nats/token]"
HELD_OUT_LOSS = "held-out loss [nats/token]"
CONTENT_LOSS = "content loss [nats/token]"
UNIGRAM_LOSS = "unigram loss [nats/token]"
RISE = 0.05  # of the held-out loss above its lowest value, from which a model memorises [nats per token]
MAX_PLOTTED = 1e30  # larger values are not plotted


def read_curves(runs: Iterable[Result], warn: Callable[[str], object]) -> Curves:
    """Return losses of pre-training and scores of fine-tuning over steps, one curve per seed and member.

    A value that was recorded only once has no curve. warn: called with a line on each damaged file.
    """
    curves: dict[str, list[SeedCurve]] = {}
    for run in runs:
        for stage, folder in run.stage_folders().items():
            metrics = plotted_metrics(stage)
            if not metrics:
                continue
            try:
                lines = read_records(folder, run.records.get(stage, 0))
            except (SettingError, OSError) as error:
                warn(f"{error}; its curves are not shown")
                continue
            for title, (kind, name) in metrics.items():
                curve = [
                    (record["step"], record[name])
                    for record in lines
                    if record.get("kind") == kind
                    and _is_plotted(record.get("step"))
                    and _is_plotted(record.get(name))
                ]
                if len(curve) > 1:
                    curves.setdefault(title, []).append(curve)
    return curves


def lowest_before_memorising(curves: Curves) -> tuple[float, float] | None:
    """Return the step and value of the lowest held-out loss, if it rose while the training loss fell.

    curves: of one run, from ``read_curves``. None if the held-out loss did not rise, or if both did.
    """
    if HELD_OUT_LOSS not in curves or TRAINING_LOSS not in curves:
        return None
    held_out, training = curves[HELD_OUT_LOSS][0], curves[TRAINING_LOSS][0]
    (_, last), (_, now) = held_out[-1], training[-1]
    step, lowest = min(held_out, key=lambda point: point[1])
    _, then = min(training, key=lambda point: abs(point[0] - step))
    return None if last < lowest + RISE or now > then else (step, lowest)


def plotted_metrics(stage: str) -> dict[str, tuple[str, str]]:
    """Return the plots of a stage: title -> (kind of its records, name of the value in them).

    Phases of pre-training before the last one have plots of their own, whose titles begin with the phase.
    Other stages by which rows are not compared have none.
    """
    if is_earlier_phase(stage):
        return {
            f"{base_name(stage)}: loss [nats/token]": ("train", "loss"),
            f"{base_name(stage)}: {HELD_OUT_LOSS}": ("eval", "loss"),
            f"{base_name(stage)}: {CONTENT_LOSS}": ("eval", "content_loss"),
            f"{base_name(stage)}: {UNIGRAM_LOSS}": ("eval", "reference_loss"),
        }
    if not is_compared(stage):
        return {}
    if not is_pretraining(stage):
        return {f"{base_name(stage)}: mean of scores": ("eval", "score")}
    return {
        TRAINING_LOSS: ("train", "loss"),
        HELD_OUT_LOSS: ("eval", "loss"),
        CONTENT_LOSS: ("eval", "content_loss"),
        UNIGRAM_LOSS: ("eval", "reference_loss"),
        "share of predictions among the 10 commonest tokens": ("eval", "top_ten_share"),
    }


def read_records(folder: Path, count: int) -> list[dict[str, Any]]:
    """Return the records of a stage of a finished run.

    Raise DataError if the file is damaged or has fewer than ``count`` lines.
    """
    found = records(folder)
    if len(found) < count:
        raise DataError(
            f"{folder}/metrics.jsonl has lost its end: it has {len(found)} of {count} lines; put back an "
            "undamaged copy"
        )
    return found


def _is_plotted(value: Any) -> bool:
    return isinstance(value, int | float) and -MAX_PLOTTED < value < MAX_PLOTTED

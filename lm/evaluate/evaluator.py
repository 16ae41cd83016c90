"""Evaluates a model on a task: the metrics of its answers, and the likelihood of the right ones."""

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import jax
import numpy as np
from jax import Array
from jax.experimental import multihost_utils

from lm import files
from lm.batch import Batch
from lm.data.tasks.choices import Choices
from lm.data.tasks.labelled import AnyTask
from lm.data.tasks.task import Row
from lm.evaluate.ranked_choice import ExampleValues, GoldLikelihoods, gold_likelihoods
from lm.metrics import Value


@dataclass(frozen=True)
class EvalTask:
    """The rows of a task to evaluate on, as batches that are made once and used at every checkpoint."""

    task: AnyTask
    rows: Sequence[Row]  # to predict; may be fewer than those of ``choices``
    batches: Sequence[Batch]  # of ``rows``: this process's parts of the global batches
    predict_batch: Callable[[Any, Any], Array]  # (model, batch) -> tokens, or outputs of a head, of each row
    postprocess_output: Callable[[Row, np.ndarray], Any]  # (row, its output) -> prediction
    choices: Choices | None = None  # answers whose likelihood is measured; None: no likelihood is measured
    calibration: Choices | None = None  # rows to fit the inverse temperature on; None: ``choices``
    # rows of ``choices``, each with the inputs of another (``lm.data.tasks.choices.shuffle_inputs``): a
    # baseline that shows how well the model guesses without a row's own inputs; None: none is measured
    shuffled: Choices | None = None

    @property
    def num_rows(self) -> int:
        """Return the number of rows whose likelihood is measured or that are predicted."""
        return max(len(self.rows), len(self.choices.gold) if self.choices else 0)


@dataclass(frozen=True)
class TaskEvaluation:
    """Holds what a model answered on a task, and its metrics."""

    task: AnyTask
    rows: Sequence[Row]  # those that were predicted
    predictions: Sequence[Any]  # of ``rows``
    likelihoods: GoldLikelihoods | None  # of the right answers; None: they were not measured
    metrics: dict[str, Value]  # ``score`` is the one that ``task.measure`` names

    def example_values(self) -> ExampleValues:
        """Return what the score is made of, row by row; empty if it is not made of values of rows.

        These are the scores of rows if the score is their mean, or else the likelihoods of right answers
        (``GoldLikelihoods.example_values``). Scoring rows one by one takes longer than scoring all.
        """
        if self.task.measure == "score" and self.rows:
            scores = self.task.example_scores(self.rows, self.predictions)
            if scores is not None:
                return {"score": scores}
        return {} if self.likelihoods is None else self.likelihoods.example_values()


def predict(model: Any, eval_task: EvalTask, shard_batch: Callable) -> list[Any]:
    """Return the model's prediction for every row, in order.

    ``shard_batch`` places this process's part of a batch on its devices.
    """
    outputs: list[np.ndarray] = []
    for batch in map(shard_batch, eval_task.batches):
        mesh = jax.tree.leaves(batch)[0].sharding.mesh
        with jax.set_mesh(mesh):  # models shard their activations by it
            output = eval_task.predict_batch(model, batch)
            outputs.extend(multihost_utils.process_allgather(output, tiled=True))
    pairs = zip(eval_task.rows, outputs, strict=False)  # the last batch ends with rows of padding
    return [eval_task.postprocess_output(row, np.asarray(output)) for row, output in pairs]


def score_task(model: Any, eval_task: EvalTask, shard_batch: Callable, path: Path | None) -> TaskEvaluation:
    """Evaluate a model on a task.

    The metrics are those of the model's predictions, which are written to ``path``, and those of the right
    answers' likelihood.
    """
    task, metrics = eval_task.task, dict[str, Value]()
    predictions: list[Any] = []
    if eval_task.rows:
        predictions = predict(model, eval_task, shard_batch)
        if path is not None:
            write_predictions(path, task, eval_task.rows, predictions)
        metrics = task.evaluate(eval_task.rows, predictions)
    likelihoods = None
    if eval_task.choices is not None:
        likelihoods = gold_likelihoods(model, eval_task.choices, shard_batch, eval_task.calibration)
        metrics |= likelihoods.metrics()
    if task.measure != "score":
        metrics["score"] = metrics[task.measure]
    return TaskEvaluation(task, eval_task.rows, predictions, likelihoods, metrics)


def score_shuffled(model: Any, eval_task: EvalTask, shard_batch: Callable) -> dict[str, float]:
    """Return the measure of a task when each row has the inputs of another, and the number of rows.

    Empty if there are no such rows, or if the task is not measured by likelihood. The inverse temperature is
    fitted on these rows: it falls to 0 for a model that wrong inputs mislead, whose measure is then chance.
    """
    choices, measure = eval_task.shuffled, eval_task.task.measure
    if choices is None or measure == "score":
        return {}
    metrics = gold_likelihoods(model, choices, shard_batch).metrics()
    return {"score": metrics[measure], "rows": len(choices.gold)}


def write_predictions(path: Path, task: AnyTask, rows: Iterable[Row], predictions: Iterable[Any]) -> None:
    """Write predictions as JSON lines, in the first process.

    Each line has a checksum of itself and of the line before.
    """
    if jax.process_index() == 0:
        lines: list[dict[str, Any]] = []
        for row, prediction in zip(rows, predictions, strict=True):
            inputs, target = task.to_text(row)
            lines.append({"inputs": inputs, "target": target, "prediction": prediction})
        files.write(path, files.lines_with_checksum(lines))

"""Evaluates a model on a task: metrics of its answers, and of how likely it finds the right ones."""

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
from lm.evaluate.ranked_choice import Values, example_values, likelihood_metrics, likelihood_values
from lm.metrics import Value


@dataclass(frozen=True)
class EvalTask:
    """The examples of a task to evaluate on, as batches that are made once and used at every checkpoint."""

    task: AnyTask
    rows: Sequence[Row]  # to answer; may be fewer than those of ``choices``
    batches: Sequence[Batch]  # this process's parts of the global batches
    output: Callable[[Any, Any], Array]  # model, batch -> tokens or a head's outputs of each row
    answer: Callable[[Row, np.ndarray], Any]  # row, its output -> prediction
    choices: Choices | None = None  # the right answers in words whose likelihood is measured; None: none
    fit: Choices | None = None  # rows to find the sharpness of choices on; None: ``choices``

    @property
    def size(self) -> int:
        """Return the number of rows that are measured or answered."""
        return max(len(self.rows), len(self.choices.right) if self.choices else 0)


def predict(model: Any, questions: EvalTask, put: Callable) -> list[Any]:
    """Return the model's prediction for every row, in order.

    ``put`` places this process's part of a batch.
    """
    outputs: list[np.ndarray] = []
    for batch in map(put, questions.batches):
        with jax.set_mesh(jax.tree.leaves(batch)[0].sharding.mesh):  # a model shards activations by it
            outputs.extend(multihost_utils.process_allgather(questions.output(model, batch), tiled=True))
    pairs = zip(questions.rows, outputs, strict=False)  # the last batch is filled up with rows of padding
    return [questions.answer(row, np.asarray(output)) for row, output in pairs]


def score_task(
    model: Any, questions: EvalTask, put: Callable, path: Path | None
) -> tuple[dict[str, Value], Values]:
    """Return the metrics of a task, and the values of each row that are behind them.

    The metrics are of the model's answers, which are written to ``path``, and of the right answers; the
    values are of the right answers. ``score`` is the task's main metric, its ``measure``.
    """
    task, metrics, values = questions.task, dict[str, Value](), Values()
    if questions.rows:
        predictions = predict(model, questions, put)
        if path is not None:
            write_predictions(path, task, questions.rows, predictions)
        metrics = task.evaluate(questions.rows, predictions)
    if questions.choices is not None:
        values = likelihood_values(model, questions.choices, put, questions.fit)
        metrics |= likelihood_metrics(values)
        values = example_values(values)
    return metrics | ({} if task.measure == "score" else {"score": metrics[task.measure]}), values


def write_predictions(path: Path, task: AnyTask, rows: Iterable[Row], predictions: Iterable[Any]) -> None:
    """Write predictions as JSON lines, in the first process.

    Each line has a checksum of itself and of the line before.
    """
    if jax.process_index() == 0:
        pairs = zip(map(task.to_text, rows), predictions, strict=True)
        lines = ({"inputs": text, "target": target, "prediction": answer} for (text, target), answer in pairs)
        files.write(path, files.lines_with_checksum(lines))

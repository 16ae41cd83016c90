"""Task -> a model's answers -> metrics."""

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import jax
import numpy as np
from jax.experimental import multihost_utils

from lm import files
from lm.data.tasks.task import Row, Scored

HostBatch = dict[str, np.ndarray]


@dataclass(frozen=True)
class Questions:
    """The examples of a task to evaluate on, as batches that are made once and used at every checkpoint."""

    task: Scored
    rows: Sequence[Row]
    batches: Sequence[HostBatch]  # this process's parts of the global batches
    # model, batch -> of each row the tokens it writes, or what its head gives
    output: Callable[[Any, Any], jax.Array]
    read: Callable[[Row, np.ndarray], Any]  # row, its output -> prediction


def predict(model: Any, asked: Questions, put: Callable) -> list[Any]:
    """The model's prediction for every row, in order; ``put`` places this process's part of a batch."""
    outputs: list[np.ndarray] = []
    for batch in map(put, asked.batches):
        # by which a model places what it computes
        with jax.set_mesh(next(iter(batch.values())).sharding.mesh):
            outputs.extend(multihost_utils.process_allgather(asked.output(model, batch), tiled=True))
    # The last batch is filled up with rows of padding.
    return [asked.read(row, np.asarray(output)) for row, output in zip(asked.rows, outputs, strict=False)]


def score(model: Any, asked: Questions, put: Callable, path: Path | None) -> dict[str, float]:
    """The metrics of the model's answers, 0 to 100, and ``score``, the task's one number; answers go to
    ``path``.
    """
    predictions = predict(model, asked, put)
    if path is not None:
        write(path, asked.task, asked.rows, predictions)
    return asked.task.evaluate(asked.rows, predictions)


def write(path: Path, task: Scored, rows: Iterable[Row], predictions: Iterable[Any]) -> None:
    """As JSON lines, each of which follows from the one before by a checksum, by the first process."""
    if jax.process_index() == 0:
        pairs = zip(map(task.to_text, rows), predictions, strict=True)
        lines = ({"inputs": inputs, "target": target, "prediction": made} for (inputs, target), made in pairs)
        files.write(path, files.seal_lines(lines))

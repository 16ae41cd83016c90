"""Task -> decode -> metrics."""

import json
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path

import jax
import numpy as np
from jax.experimental import multihost_utils

from lm.data.tasks.task import Row, Task
from lm.evaluate.decode import greedy
from lm.nn.transformer import Transformer

HostBatch = dict[str, np.ndarray]


@dataclass(frozen=True)
class Questions:
    """The validation rows of a task and their inputs as batches, made once and asked at every checkpoint."""

    task: Task
    rows: Sequence[Row]
    batches: Sequence[HostBatch]  # this process's parts of the global batches
    max_length: int  # of an answer [tokens]


def answers(
    model: Transformer, batches: Iterable[HostBatch], put: Callable, decode: Callable, *, max_length: int
) -> list[str]:
    """The texts that the model writes, greedily, for every row of ``batches``, in order; ``decode``: ids -> text."""
    found = []
    for batch in batches:
        tokens = greedy(model, put(batch), max_length=max_length)
        found.extend(decode(ids) for ids in multihost_utils.process_allgather(tokens, tiled=True))
    return found


def score(model: Transformer, asked: Questions, put: Callable, decode: Callable, path: Path | None) -> dict[str, float]:
    """The metrics of the model's answers, 0 to 100, and ``score``, the task's one number; answers go to ``path``."""
    predictions = answers(model, asked.batches, put, decode, max_length=asked.max_length)[: len(asked.rows)]
    if path is not None and jax.process_index() == 0:
        path.parent.mkdir(parents=True, exist_ok=True)
        with path.open("w") as file:
            for row, prediction in zip(asked.rows, predictions, strict=True):
                inputs, target = asked.task.to_text(row)
                file.write(json.dumps({"inputs": inputs, "target": target, "prediction": prediction}) + "\n")
    return asked.task.evaluate(asked.rows, predictions)

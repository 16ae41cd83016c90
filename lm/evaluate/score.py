"""Task -> decode -> metrics."""

import json
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import jax
import numpy as np
from jax.experimental import multihost_utils

from lm.data.tasks.labelled import LabelledTask
from lm.data.tasks.task import Row, Task
from lm.evaluate.decode import greedy
from lm.nn.transformer import Transformer
from lm.nn.tuned import Tuned

HostBatch = dict[str, np.ndarray]


@dataclass(frozen=True)
class Questions:
    """The validation rows of a task and their inputs as batches, made once and asked at every checkpoint."""

    task: Task
    rows: Sequence[Row]
    batches: Sequence[HostBatch]  # this process's parts of the global batches
    max_length: int  # of an answer [tokens]


@dataclass(frozen=True)
class LabelledQuestions:
    """The validation rows of a labelled task and their features as batches."""

    task: LabelledTask
    rows: Sequence[Row]
    batches: Sequence[HostBatch]  # this process's parts of the global batches
    answer: Callable[[Row, np.ndarray], Any]  # of a row and what the head gives for it


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
    texts = (asked.task.to_text(row) for row in asked.rows)
    _write(path, ({"inputs": i, "target": t, "prediction": p} for (i, t), p in zip(texts, predictions, strict=True)))
    return asked.task.evaluate(asked.rows, predictions)


def score_labels(model: Tuned, asked: LabelledQuestions, put: Callable, path: Path | None) -> dict[str, float]:
    """As ``score``, of what the model's head says."""
    outputs = []
    for batch in asked.batches:
        outputs.extend(multihost_utils.process_allgather(_outputs(model, put(batch)), tiled=True))
    found = [asked.answer(row, np.asarray(output)) for row, output in zip(asked.rows, outputs, strict=False)]
    targets = [asked.task.target(row) for row in asked.rows]
    _write(path, ({"target": target, "prediction": answer} for target, answer in zip(targets, found, strict=True)))
    return asked.task.evaluate(asked.rows, found)


_outputs = jax.jit(Tuned.__call__)


def _write(path: Path | None, lines: Iterable[Mapping[str, Any]]) -> None:
    """As JSON lines, by the first process."""
    if path is not None and jax.process_index() == 0:
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text("".join(json.dumps(line) + "\n" for line in lines))

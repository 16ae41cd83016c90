"""Predict by a fine-tuned head, and make vectors of texts, in Python (docs/notebook.md)."""

import warnings
from collections.abc import Callable, Sequence
from contextlib import nullcontext
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

import jax
import numpy as np
from scipy.special import softmax

from lm import sharding
from lm.batch import Batch
from lm.config.base import SettingError
from lm.config.model import Pool
from lm.data.classification import MIN_ROW_LENGTH, Reader
from lm.data.tasks.task import LabelledTask, Row
from lm.nn.attention_inputs import segments_of
from lm.nn.finetune import ModelWithHead, pool_texts
from lm.nn.transformer import Transformer

MAX_ROWS = 32  # texts that are read together [rows]
EXPECTED = {  # what ``predict`` takes for each text, by the kind of the head
    "classes": "a text or a pair of texts",
    "regression": "a text or a pair of texts",
    "tokens": "a list of words",
    "span": "a pair of a question and a context",
    "choice": "a list of candidates, each a text or a pair of texts",
}
READS_TEXTS = ("classes", "regression")  # kinds of heads for which a text may be a string
# A task that reads texts and asks for nothing.
TEXTS = LabelledTask("texts", "", None, lambda row: None, {}, "classes", lambda row: (row["text"],))


@dataclass(frozen=True)
class Classification:
    """The likeliest class of a text, and the probability of each."""

    label: str
    probabilities: dict[str, float]


@dataclass(frozen=True)
class Choice:
    """The index of the likeliest candidate, and the probability of each."""

    index: int
    probabilities: list[float]


@dataclass(frozen=True)
class TextHead:
    """A model with a head, or a bare one with a pooling, and how it reads texts."""

    model: ModelWithHead | Transformer
    reader: Reader
    pool: Pool
    shard_batch: Callable[[Batch], Batch]

    def predict(self, texts: Sequence[Any]) -> list[Any]:
        """Return what the head says of each text; SettingError for a model without one.

        - classes: a text or a pair -> ``Classification``
        - regression: a text or a pair -> a number
        - tokens: a list of words -> a list of labels, None for words that do not fit
        - span: (question, context) -> the answer, "" for none
        - choice: a list of candidates, each a text or a pair -> ``Choice``

        Texts that are longer than in training are cut off as there, with a warning.
        """
        if not isinstance(self.model, ModelWithHead):
            raise SettingError(
                "this model has no head that predicts: load a run that was tuned with tuning.heads, and name "
                "its task if the run has several"
            )
        kind, task = self.reader.task.kind, self.reader.task
        unlabelled = replace(task, target=lambda _: None, texts=_row_texts, answer_span=None)
        reader = replace(self.reader, task=unlabelled)
        rows = [_as_row(text, kind) for text in _as_list(texts)]
        return [
            _prediction(reader, row, output)
            for row, output in zip(rows, self._outputs(reader, rows, _head_output), strict=True)
        ]

    def embed(self, texts: Sequence[Any]) -> np.ndarray:
        """Return a vector for each text or pair of texts, float32 [N,D], by the pooling of the head.

        It is what a head on whole texts reads: the first, last, mean or maximum of the last states, the first
        through the pooler if the model has one.
        """
        reader = replace(self.reader, task=replace(TEXTS, texts=_row_texts))
        rows = [_as_row(text, "classes") for text in _as_list(texts)]
        pooled: Callable[[Any, Batch], jax.Array] = _pooled_below_head
        if not isinstance(self.model, ModelWithHead):
            pooled = partial(_pooled, pool=self.pool)
        vectors = self._outputs(reader, rows, pooled)
        width = self.model.config.feature_width
        return np.stack(vectors) if vectors else np.zeros((0, width), np.float32)

    def _outputs(
        self, reader: Reader, rows: Sequence[Row], output: Callable[[Any, Batch], jax.Array]
    ) -> list[np.ndarray]:
        """Return the output for each row, in order; rows of similar length are read together."""
        candidates = [reader.example(row).rows for row in rows]  # several of a row in multiple choice
        num_cut = sum(any(candidate.is_cut for candidate in each) for each in candidates)
        if num_cut:
            room = f"the {reader.length} tokens that the model reads"
            warnings.warn(
                f"{num_cut:,} of {len(rows):,} texts are longer than {room}, and were cut", stacklevel=4
            )
        num_candidates = [len(each) for each in candidates]
        lengths = [max(len(candidate.tokens) for candidate in each) for each in candidates]
        order = sorted(range(len(rows)), key=lambda index: (num_candidates[index], lengths[index]))
        mesh = sharding.mesh_of(self.model)
        shards = 1 if mesh is None else sharding.batch_shards(mesh.shape)
        outputs: dict[int, np.ndarray] = {}
        for batch in _batches(order, num_candidates):
            longest = max(lengths[index] for index in batch)
            row_length = min(reader.length, _power_of_two(longest, MIN_ROW_LENGTH))
            batch_size = _power_of_two(-(-len(batch) // shards), 1) * shards
            host_batch = replace(reader, length=row_length).batch([rows[i] for i in batch], batch_size)
            with nullcontext() if mesh is None else jax.set_mesh(mesh):
                found = np.asarray(output(self.model, self.shard_batch(host_batch)), np.float32)
            # the rows that fill up the batch have no index
            outputs |= dict(zip(batch, found, strict=False))
        return [outputs[index] for index in range(len(rows))]


_head_output = jax.jit(ModelWithHead.__call__)


_pooled_below_head = jax.jit(ModelWithHead.pooled)


def _pool_features(model: Transformer, batch: Batch, pool: Pool) -> jax.Array:
    side = "decoder" if model.config.has_decoder else "encoder"
    return pool_texts(model, pool, model.features(batch), segments_of(batch.side(side)))


_pooled = jax.jit(_pool_features, static_argnames="pool")


def _row_texts(row: Row) -> Any:
    return row["texts"]


def _as_list(texts: Sequence[Any]) -> Sequence[Any]:
    """Return texts; SettingError for a single one, whose letters would be read as so many texts."""
    if isinstance(texts, str):
        raise SettingError(f"predict and embed take a list of texts, not the text {texts!r:.40}: give [text]")
    return texts


def _is_list(text: Any) -> bool:
    return isinstance(text, Sequence) and not isinstance(text, str)


def _as_row(text: Any, kind: str) -> Row:
    """Return a text as the row of a task of this kind; SettingError for anything else."""
    texts = _texts_of_kind(text, kind)
    if texts is None:
        raise SettingError(f"predict expects {EXPECTED[kind]} for each text, not {text!r:.80}")
    return {"texts": texts}


def _texts_of_kind(text: Any, kind: str) -> tuple[Any, ...] | None:
    """Return a text as a task of this kind returns its ``texts``; None for what such a head does not read."""
    if kind in READS_TEXTS:
        return _as_texts(text)
    if kind == "span":
        pair = _as_texts(text)
        return pair if pair is not None and len(pair) == 2 else None
    if not _is_list(text):
        return None
    if kind == "tokens":
        return (list(text),) if all(isinstance(word, str) for word in text) else None
    candidates = tuple(map(_as_texts, text))
    return None if not candidates or None in candidates else candidates


def _as_texts(text: Any) -> tuple[str, ...] | None:
    """Return one text or a pair of texts as a tuple; None for anything else."""
    if isinstance(text, str):
        return (text,)
    if isinstance(text, list | tuple) and len(text) == 2 and all(isinstance(part, str) for part in text):
        return tuple(text)
    return None


def _prediction(reader: Reader, row: Row, output: np.ndarray) -> Any:
    """Return what the output of a head for a row means."""
    task = reader.task
    if task.kind == "classes":
        shares = softmax(output.astype(np.float64))
        labels = task.labels or tuple(map(str, range(len(shares))))
        return Classification(labels[int(shares.argmax())], dict(zip(labels, shares.tolist(), strict=True)))
    if task.kind == "choice":
        shares = softmax(output.astype(np.float64))
        return Choice(int(shares.argmax()), shares.tolist())
    answer = reader.answer(row, output)
    if task.kind == "tokens":
        return [task.labels[label] if label >= 0 else None for label in answer]
    return answer


def _batches(order: Sequence[int], num_candidates: Sequence[int]) -> list[list[int]]:
    """Return the indices in batches of at most MAX_ROWS, each of rows with equally many candidates."""
    batches: list[list[int]] = []
    for index in order:
        last = batches[-1] if batches else []
        if last and len(last) < MAX_ROWS and num_candidates[last[0]] == num_candidates[index]:
            last.append(index)
        else:
            batches.append([index])
    return batches


def _power_of_two(number: int, least: int) -> int:
    """Return the least power of two that is at least ``number``, and at least ``least``, itself one."""
    return max(least, 1 << (number - 1).bit_length())

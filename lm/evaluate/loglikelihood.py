"""Log-probabilities of texts under a model: of continuations, of candidates, of a long text by windows.

Texts are token ids. Only what the caller passes is scored: an EOS belongs to a continuation whose end counts.
The start token of a decoder, and what frames an encoder's row, are added here. A prefix decoder sees the
context both ways, an encoder-decoder reads it in the encoder. An encoder has no probability of a text: each
token of the continuation is masked in turn, and predicted from all others (pseudo-likelihood: Salazar et al.
2020).

Questions are answered in batches of few shapes (``lm.evaluate.bucketing``), which ``put`` places as that of a
``Steps`` does; answers are in the order of the questions. Logits are computed of scored positions only.
"""

from collections.abc import Callable, Iterator, Sequence
from contextlib import nullcontext
from functools import partial
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax import Array
from jax.experimental import multihost_utils

from lm import sharding
from lm.batch import Batch, Side
from lm.config.base import SettingError
from lm.config.model import ModelConfig
from lm.evaluate.bucketing import BucketBatch, batches_by_length
from lm.evaluate.generate import Model
from lm.nn.ensemble import Ensemble

TokenIds = Sequence[int] | np.ndarray
Continuation = tuple[TokenIds, TokenIds]  # a context, and what continues it
Put = Callable[[Any], Any]  # places a tree of rows, such as a batch


class Masking(NamedTuple):
    """The ids with which an encoder reads a text and the mask that it shall predict."""

    mask: int  # the id that hides a token
    begin: tuple[int, ...] = ()  # ids in front of every row, such as [CLS]
    end: tuple[int, ...] = ()  # ids behind it, such as [SEP]


class Window(NamedTuple):
    """A sliding window, which cuts a text that may be longer than a row."""

    length: int  # tokens of a row, scored or context
    stride: int  # tokens that each row but the first scores; the others before them are their context


class _Targets(NamedTuple):
    """The tokens whose probability is asked for, of each row of a batch."""

    tokens: Any  # int32 [B,T], or [B,C,T] of C candidates
    lengths: Any  # int32 [B] or [B,C]
    place: Any  # int32 [B]: position that predicts the first token


class _Row(NamedTuple):
    """The inputs of a model in one row, and the tokens whose probability is then asked for."""

    encoder: TokenIds  # read by the encoder
    decoder: TokenIds  # read by the decoder, up to what it is asked about: the prompt
    asked: tuple[TokenIds, ...]  # candidates that may follow; of an encoder the masked token
    place: int = 0  # position of an encoder's mask
    question: int = 0  # index of the question that the answer is added to


def continuation_log_probs(
    model: Model, pairs: Sequence[Continuation], put: Put, masking: Masking | None = None
) -> np.ndarray:
    """Return the log-probability of each continuation given its context, float64 [N] nats.

    Encoders need ``masking``. Raises SettingError for a row that is too long for the model, or a first token
    that nothing comes before.
    """
    return score_continuations(model, pairs, put, masking)[0]


def score_continuations(
    model: Model, pairs: Sequence[Continuation], put: Put, masking: Masking | None = None
) -> tuple[np.ndarray, np.ndarray]:
    """Return ``continuation_log_probs``, and bool [N]: whether every token is the likeliest in its place."""
    rows = [
        row
        for number, (context, continuation) in enumerate(pairs)
        for row in _rows(model.config, context, (continuation,), number, masking)
    ]
    totals, greedy = np.zeros(len(pairs)), np.ones(len(pairs), bool)
    sizes = np.array([[len(row.encoder), len(row.decoder), len(row.asked[0])] for row in rows], np.int64)
    sizes = sizes.reshape(-1, 3)
    if model.config.has_decoder:
        sizes[:, 1] += np.maximum(sizes[:, 2] - 1, 0)
    for row, answer in zip(rows, _asked(_log_probs, model, rows, sizes, put), strict=True):
        totals[row.question] += answer[0]
        greedy[row.question] &= answer[1] == 0
    return totals, greedy


def candidate_log_probs(
    model: Model,
    contexts: Sequence[TokenIds],
    candidates: Sequence[Sequence[TokenIds]],
    put: Put,
    masking: Masking | None = None,
) -> list[np.ndarray]:
    """Return ``continuation_log_probs`` of each context's C candidates: for each context float64 [C] nats.

    A model with a decoder reads the context once for all of them.
    """
    if not model.config.has_decoder or model.config.sparsity.random_blocks or isinstance(model, Ensemble):
        pairs = [(context, one) for context, all in zip(contexts, candidates, strict=True) for one in all]
        ends = np.cumsum([len(all) for all in candidates])
        return np.split(continuation_log_probs(model, pairs, put, masking), ends[:-1])
    rows = [
        row
        for number, (context, all) in enumerate(zip(contexts, candidates, strict=True))
        for row in _rows(model.config, context, tuple(all), number, masking)
    ]
    lengths = [max(map(len, row.asked), default=0) for row in rows]
    sizes = [
        (len(row.encoder), len(row.decoder), len(row.asked), length)
        for row, length in zip(rows, lengths, strict=True)
    ]
    answers = _asked(_candidate_log_probs, model, rows, np.array(sizes, np.int64).reshape(-1, 4), put)
    return [answer[: len(row.asked)] for row, answer in zip(rows, answers, strict=True)]


def text_log_prob(
    model: Model, ids: TokenIds, window: Window, put: Put, masking: Masking | None = None
) -> tuple[float, int]:
    """Return the log-probability of a text by ``windows`` [nats], and how many of its tokens were scored."""
    pairs = list(windows(ids, window, model.config))
    log_probs = continuation_log_probs(model, pairs, put, masking)
    return float(log_probs.sum()), sum(len(scored) for _, scored in pairs)


def documents_log_prob(
    model: Model, documents: Sequence[Sequence[int]], window: Window, eos: int, put: Put
) -> float:
    """Return the log-probability of whole documents by ``windows`` [nats].

    Each is read behind an ``eos``, which is not scored: so documents begin where models of running text read
    them, behind the end of another.
    """
    pairs: list[Continuation] = []
    for ids in documents:
        text = [eos, *ids]
        for context, scored in windows(text, window, model.config):
            pairs.append((context, scored) if len(context) else (text[:1], scored[1:]))
    return float(continuation_log_probs(model, pairs, put).sum())


def windows(ids: TokenIds, window: Window, config: ModelConfig) -> Iterator[Continuation]:
    """Yield (context, continuation) pairs in which every token of a text is scored once.

    A first token that nothing comes before is not scored. Raises SettingError for a stride that is not from 1
    to the length of the window.
    """
    if not 0 < window.stride <= window.length:
        raise SettingError(f"a window of {window.length} tokens cannot be moved by {window.stride}")
    begin, end = 0, window.length
    if config.special.start is None and not config.has_encoder:
        begin = 1
    while begin < len(ids):
        yield ids[max(end - window.length, 0) : begin], ids[begin:end]
        begin, end = end, end + window.stride


def _rows(
    config: ModelConfig,
    context: TokenIds,
    asked: tuple[TokenIds, ...],
    question: int,
    masking: Masking | None,
) -> Iterator[_Row]:
    """Yield the row of a context and what is asked about it; for an encoder, one row for each token."""
    check_mask(config)
    start = [] if config.special.start is None else [config.special.start]
    if config.architecture == "encoder":
        if masking is None:
            raise SettingError("an encoder predicts masks: masking should name their id")
        (continuation,) = asked
        text = [*masking.begin, *context, *continuation, *masking.end]
        _check_length(config, len(text))
        for place, token in enumerate(continuation, len(masking.begin) + len(context)):
            yield _Row([*text[:place], masking.mask, *text[place + 1 :]], (), ([token],), place, question)
        return
    prompt = start if config.has_encoder else [*start, *context]
    if not prompt:
        what = "an encoder-decoder needs it" if config.has_encoder else "a text without a context needs it"
        raise SettingError(f"model.special.start=None: {what}, to give its first token a probability")
    encoder = context if config.has_encoder else ()
    _check_length(config, max(len(encoder), len(prompt) + max(map(len, asked), default=0) - 1))
    yield _Row(encoder, prompt, asked, question=question)


def check_mask(config: ModelConfig) -> None:
    """Raise SettingError if a model reads the very tokens whose probability is asked for."""
    if config.attention.mask == "none":
        raise SettingError(
            "model.attention.mask='none' reads the tokens whose likelihood it should tell: choose "
            "'causal', or generate"
        )


def _check_length(config: ModelConfig, length: int) -> None:
    if length > (most := _longest(config)):
        raise SettingError(f"a row of {length} tokens exceeds model.positions.max_length={most}")


def _longest(config: ModelConfig) -> int:
    """Return the length of the longest row that a model reads [tokens]."""
    bounded = config.positions.kind == "learned" or config.sparsity.random_blocks
    return config.positions.max_length if bounded else 2**31


def _asked(
    program: Callable, model: Model, rows: list[_Row], sizes: np.ndarray, put: Put
) -> list[np.ndarray]:
    """Return ``program``'s answer for each row, float64, in order, computed in batches of few shapes.

    ``sizes`` int [N,...] are the lengths of each row.
    """
    config, mesh = model.config, getattr(jax.tree.leaves(model)[0].sharding, "mesh", None)
    multiple = 1 if mesh is None else sharding.batch_shards(mesh.shape)
    parts = batches_by_length(sizes, partial(_cost, config), multiple, _longest(config))
    outputs = []
    for part in parts:
        rows_and_asked = _batch(config, [rows[k] for k in part.questions], part)
        if mesh is not None:
            mine = np.concatenate([np.arange(part.rows)[s] for s in sharding.process_rows(mesh, part.rows)])
            rows_and_asked = jax.tree.map(lambda values, mine=mine: values[mine], rows_and_asked)
        with nullcontext() if mesh is None else jax.set_mesh(mesh):
            outputs.append(program(model, *put(rows_and_asked)))
    answers: list[Any] = [None] * len(rows)
    for part, output in zip(parts, outputs, strict=True):
        values = np.asarray(multihost_utils.process_allgather(output, tiled=True), np.float64)
        for number, value in zip(part.questions, values, strict=False):  # the last rows are padding
            answers[number] = value
    return answers


def _cost(config: ModelConfig, lengths: np.ndarray) -> np.ndarray:
    """Return what a row of these lengths [...,3|4] costs [tokens]; logits count by the memory they take."""
    logit = 1 + config.vocab_size / (16 * config.d_model)
    encoder, decoder, *candidates, asked = np.moveaxis(lengths, -1, 0)
    if not candidates:
        return encoder + decoder + logit * asked
    return encoder + decoder + (1 + logit) * asked * candidates[0]


def _batch(config: ModelConfig, rows: Sequence[_Row], part: BucketBatch) -> tuple[Batch, _Targets]:
    """Return the batch of ``part.rows`` rows, those behind ``rows`` being padding, and what is asked of them.

    The decoder also reads what is asked where each row has one continuation.
    """
    source, target, *candidates, length = part.lengths
    encoder = decoder = None
    if config.has_encoder:
        tokens, lengths = _padded([row.encoder for row in rows], (part.rows, source))
        segments = np.arange(source)[None] < lengths[:, None]
        encoder = Side(tokens=tokens, segment_ids=segments.astype(np.int32))
    prompts = np.zeros(part.rows, np.int32)
    prompts[: len(rows)] = [len(row.decoder) for row in rows]
    if config.has_decoder:
        read = [row.decoder if candidates else [*row.decoder, *row.asked[0][:-1]] for row in rows]
        tokens, _ = _padded(read, (part.rows, target))
        visible = (np.arange(target)[None] < prompts[:, None]).astype(np.int32)
        prompt_segments = visible if candidates else None
        prefix = visible if config.architecture == "prefix-decoder" else None
        decoder = Side(tokens=tokens, segment_ids=prompt_segments, causal_attention=prefix)
    count = candidates[0] if candidates else 1
    asked = [row.asked[k] if k < len(row.asked) else () for row in rows for k in range(count)]
    tokens, lengths = _padded(asked, (part.rows * count, length))
    if candidates:
        tokens, lengths = tokens.reshape(part.rows, count, length), lengths.reshape(part.rows, count)
    place = np.maximum(prompts - 1, 0)
    if not config.has_decoder:
        place[: len(rows)] = [row.place for row in rows]
    return Batch(encoder=encoder, decoder=decoder), _Targets(tokens, lengths, place)


def _padded(texts: Sequence[TokenIds], shape: tuple[int, int]) -> tuple[np.ndarray, np.ndarray]:
    """Return texts as left-aligned rows int32 [B,L], padded with 0, and their lengths int32 [B]."""
    tokens, lengths = np.zeros(shape, np.int32), np.zeros(shape[0], np.int32)
    for number, text in enumerate(texts):
        tokens[number, : len(text)], lengths[number] = text, len(text)
    return tokens, lengths


@jax.jit
def _log_probs(model, batch, question):
    """Return float32 [B,2]: the log-probability of the asked tokens, and how many are not the likeliest."""
    asked, lengths = question.tokens, question.lengths
    places = jnp.arange(asked.shape[1])[None] + question.place[:, None]

    def logits(member):
        x = member.features(batch)
        places_in = jnp.minimum(places, x.shape[1] - 1)[:, :, None]
        return member.logits(jnp.take_along_axis(x, places_in, axis=1))

    members = model.members if isinstance(model, Ensemble) else [model]
    found = sum(map(logits, members)) / len(members)
    others = (found.argmax(-1) != asked) & (jnp.arange(asked.shape[1])[None] < lengths[:, None])
    return jnp.stack([_sums(found, asked, lengths), others.sum(-1).astype(jnp.float32)], axis=-1)


@jax.jit
def _candidate_log_probs(model, batch, question):
    """Return the log-probability of each candidate's tokens [B,C,T], float32 [B,C]; a prompt is read once."""
    asked, lengths = question.tokens, question.lengths
    rows, count, length = asked.shape
    first, cache = model.prefill(batch, batch.side("decoder").tokens.shape[1] + length - 1)
    first = jax.nn.log_softmax(first)
    total = jnp.where(lengths > 0, jnp.take_along_axis(first, asked[:, :, 0], axis=1), 0.0)
    if length > 1:
        asked, lengths = asked.reshape(-1, length), jnp.maximum(lengths.reshape(-1) - 1, 0)
        x, _ = model.extend(asked[:, :-1], cache.repeat_beams(count), lengths)
        total += _sums(model.logits(x), asked[:, 1:], lengths).reshape(rows, count)
    return total


def _sums(logits: Array, targets: Array, lengths: Array) -> Array:
    """Return the summed log-probabilities of the first ``lengths`` [B] targets [B,T], float32 [B].

    ``logits`` are [B,T,V].
    """
    target = jnp.take_along_axis(logits, targets[:, :, None], axis=-1)[:, :, 0]
    log_probs = target - jax.nn.logsumexp(logits, axis=-1)
    return jnp.where(jnp.arange(targets.shape[1])[None] < lengths[:, None], log_probs, 0.0).sum(-1)

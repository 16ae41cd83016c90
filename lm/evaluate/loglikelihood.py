"""Log-probabilities of texts: of continuations given contexts, of candidates, and of long texts by windows.

Texts are token ids. Only the given tokens are scored: include an EOS in a continuation whose end counts. The
start token of a decoder and the special tokens around an encoder's text are added here.

- A decoder reads context and continuation; a prefix decoder reads the context without a causal mask.
- An encoder-decoder reads the context in the encoder and the continuation in the decoder.
- An encoder gives no probability of a text, but a pseudo-likelihood: each token of the continuation is masked
  in turn and predicted from all others (Salazar et al. 2020). If it was trained by masked diffusion it also
  gives a bound: ``lm.evaluate.likelihood_bound``.

Requests are batched into few shapes (``lm.evaluate.bucketing``). ``shard_batch`` places this process's part
of a batch on its devices (``Steps.shard_batch``). Logits are computed only at scored positions.
"""

from collections.abc import Callable, Iterator, Sequence
from contextlib import nullcontext
from dataclasses import replace
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
from lm.ops.losses import in_range
from lm.tokenizers.tokenizer import Tokenizer

TokenIds = Sequence[int] | np.ndarray
MAX_CANDIDATES = 2**31  # a context may have any number of candidates; only lengths are limited
# A rough count of the vectors [d_model] that a token's activations take in memory, beside its logits.
HIDDEN_VECTORS_PER_TOKEN = 16
Request = tuple[TokenIds, TokenIds]  # a context and its continuation, which is scored
ShardBatch = Callable[[Any], Any]


class Masking(NamedTuple):
    """The special tokens of an encoder: one that masks a token, and those around a text."""

    mask: int  # hides a token that is to be predicted
    begin: tuple[int, ...] = ()  # ids before every text, such as [CLS]
    end: tuple[int, ...] = ()  # ids after it, such as [SEP]

    @classmethod
    def of(cls, tokenizer: Tokenizer) -> "Masking":
        """Return the special tokens by which an encoder with this tokenizer was trained."""
        begin = () if tokenizer.cls is None else (tokenizer.cls,)
        end = () if tokenizer.sep is None else (tokenizer.sep,)
        return cls(tokenizer.mask, begin, end)


class Window(NamedTuple):
    """A window that slides over a text which exceeds the model's length, to score it piece by piece."""

    length: int  # context and scored tokens
    stride: int  # tokens scored in each window but the first; the others before them are context


class ContinuationScores(NamedTuple):
    """The scores of N continuations."""

    log_probs: np.ndarray  # float64 [N]: log P(continuation | context) [nats]
    is_greedy: np.ndarray  # bool [N]: whether each token is the likeliest at its position


# ---- scores of continuations and candidates


def score_continuations(
    model: Model, requests: Sequence[Request], shard_batch: ShardBatch, masking: Masking | None = None
) -> ContinuationScores:
    """Return the log-probability of each continuation given its context, and whether it is greedy.

    Encoders need ``masking``. Raises SettingError for a text that is too long for the model, or a first token
    that is scored without anything before it.
    """
    rows: list[_Row] = []
    for number, (context, continuation) in enumerate(requests):
        rows += _make_rows(model.config, context, (continuation,), number, masking)
    lengths = np.zeros((len(rows), 3), np.int64)  # of encoder, decoder and targets
    for index, row in enumerate(rows):
        lengths[index] = len(row.encoder), len(row.prompt), len(row.candidates[0])
    if model.config.has_decoder:  # the decoder also reads the targets but the last
        lengths[:, 1] += np.maximum(lengths[:, 2] - 1, 0)
    log_probs, is_greedy = np.zeros(len(requests)), np.ones(len(requests), bool)
    outputs = run_batched(_continuation_log_probs, model, rows, lengths, shard_batch, _make_batch)
    for row, (log_prob, not_likeliest) in zip(rows, outputs, strict=True):
        log_probs[row.request] += log_prob
        is_greedy[row.request] &= not_likeliest == 0
    return ContinuationScores(log_probs, is_greedy)


def continuation_log_probs(
    model: Model, requests: Sequence[Request], shard_batch: ShardBatch, masking: Masking | None = None
) -> np.ndarray:
    """Return the log-probability of each continuation given its context, float64 [N] nats."""
    return score_continuations(model, requests, shard_batch, masking).log_probs


def candidate_log_probs(
    model: Model,
    contexts: Sequence[TokenIds],
    candidates: Sequence[Sequence[TokenIds]],
    shard_batch: ShardBatch,
) -> list[np.ndarray]:
    """Return the log-probability of each of C candidates given their context, float64 [C] nats per context.

    The model has a decoder, which reads the context once for all of them.
    """
    config = model.config
    if not contexts:
        return []
    # Here the context is read again with each candidate: an ensemble has no ``extend``, and random blocks
    # (BigBird) are drawn for whole rows.
    if config.sparsity.random_blocks or isinstance(model, Ensemble):
        requests: list[Request] = []
        for context, its_candidates in zip(contexts, candidates, strict=True):
            requests += [(context, candidate) for candidate in its_candidates]
        ends = np.cumsum([len(its_candidates) for its_candidates in candidates])
        return np.split(continuation_log_probs(model, requests, shard_batch), ends[:-1])
    rows: list[_Row] = []
    for number, (context, its_candidates) in enumerate(zip(contexts, candidates, strict=True)):
        rows += _make_rows(config, context, tuple(its_candidates), number, None)
    lengths = np.zeros((len(rows), 4), np.int64)  # of encoder, prompt, number of candidates, targets
    for index, row in enumerate(rows):
        targets_length = max(map(len, row.candidates), default=0)
        lengths[index] = len(row.encoder), len(row.prompt), len(row.candidates), targets_length
    outputs = run_batched(_candidate_log_probs, model, rows, lengths, shard_batch, _make_batch)
    return [output[: len(row.candidates)] for row, output in zip(rows, outputs, strict=True)]


def without_start(ids: list[int], config: ModelConfig) -> list[int]:
    """Return the ids of a context without a decoder's start token, which scoring adds itself.

    The context of an encoder-decoder is the encoder's text and is returned as it is.
    """
    start = config.special.start
    if not config.has_encoder and start is not None and ids[:1] == [start]:
        return ids[1:]
    return ids


# ---- long texts


def documents_log_prob(
    model: Model, documents: Sequence[Sequence[int]], window: Window, eos: int, shard_batch: ShardBatch
) -> float:
    """Return the log-probability of whole documents by ``windows`` [nats].

    Each is read after an ``eos``, which is not scored: in running text, as the model was trained on it, a
    document follows the end of another.
    """
    requests = document_requests(documents, [eos], window, model.config)
    return float(continuation_log_probs(model, requests, shard_batch).sum())


def document_requests(
    documents: Sequence[Sequence[int]], before: Sequence[int], window: Window, config: ModelConfig
) -> list[Request]:
    """Return the requests by ``windows`` of each document after the ids ``before``, which are not scored."""
    requests: list[Request] = []
    for ids in documents:
        text = [*before, *ids]
        for number, request in enumerate(windows(text, window, config)):
            if number == 0:  # ``windows`` may score ``before``, which is the context instead
                requests.append((text[: len(before)], text[len(before) : window.length]))
            else:
                requests.append(request)
    return requests


def windows(ids: TokenIds, window: Window, config: ModelConfig) -> Iterator[Request]:
    """Yield requests that together score every token of a text once.

    A decoder without a start token cannot score the first token of the text, and keeps at least one token of
    context in each window, whatever the stride. Raises SettingError for a stride that is not from 1 to the
    length of the window, and for a window of one token if that token has to be context.
    """
    needs_context = config.special.start is None and not config.has_encoder
    if not 0 < window.stride <= window.length:
        raise SettingError(f"a window of {window.length} tokens cannot be moved by {window.stride}")
    if window.length <= needs_context:
        raise SettingError(
            "a window of 1 token has no room for the context that a model without a start token needs: "
            "choose a length of at least 2"
        )
    stride = min(window.stride, window.length - needs_context)
    begin, end = int(needs_context), window.length
    while begin < len(ids):
        yield ids[max(end - window.length, 0) : begin], ids[begin:end]
        begin, end = end, end + stride


# ---- from requests to rows of a batch


class _Row(NamedTuple):
    """The tokens that a model reads in one row of a batch, and those that are then scored."""

    encoder: TokenIds  # read by the encoder; the rows of an encoder's text share it
    prompt: TokenIds  # read by the decoder before the scored tokens
    candidates: tuple[TokenIds, ...]  # scored: one or several continuations; for an encoder the masked token
    request: int  # index of the request that the row belongs to
    mask_position: int = 0  # for an encoder: where it reads ``mask`` in place of the text's token
    mask: int | None = None  # for an encoder


class _Targets(NamedTuple):
    """The scored tokens of a batch of B rows."""

    tokens: Any  # int32 [B,T], or [B,C,T] for C candidates
    lengths: Any  # int32 [B] or [B,C]
    first_position: Any  # int32 [B]: position whose logits predict the first token


def _make_rows(
    config: ModelConfig,
    context: TokenIds,
    candidates: tuple[TokenIds, ...],
    request: int,
    masking: Masking | None,
) -> Iterator[_Row]:
    """Yield the row of a request; for an encoder, one row for each token of the continuation."""
    check_attention_mask(config)
    start = [] if config.special.start is None else [config.special.start]
    if config.architecture == "encoder":
        if masking is None:
            raise SettingError("an encoder predicts masks: masking should name their id")
        (continuation,) = candidates
        text = [*masking.begin, *context, *continuation, *masking.end]
        check_length(config, len(text))
        for position, token in enumerate(continuation, len(masking.begin) + len(context)):
            yield _Row(text, (), ([token],), request, position, masking.mask)
        return
    prompt = start if config.has_encoder else [*start, *context]
    if not prompt:
        what = "an encoder-decoder needs it" if config.has_encoder else "a text without a context needs it"
        raise SettingError(f"model.special.start=None: {what}, to give its first token a probability")
    encoder = context if config.has_encoder else ()
    targets_length = max(map(len, candidates), default=0)
    num_read = max(targets_length - 1, 0)  # the last token is not read
    check_length(config, max(len(encoder), len(prompt) + num_read))
    yield _Row(encoder, prompt, candidates, request)


def check_attention_mask(config: ModelConfig) -> None:
    """Raise SettingError for a decoder that reads what it should predict, and for an encoder that does not.

    A decoder without a causal mask reads the tokens whose likelihood it should tell. An encoder with one
    predicts no token from all others.
    """
    if config.attention.mask == "none":
        raise SettingError(
            "model.attention.mask='none' reads the tokens whose likelihood it should tell: choose "
            "'causal', or generate"
        )
    if config.is_causal_encoder:
        raise SettingError(
            "model.attention.encoder_mask='causal' hides the tokens after a mask, from which an encoder "
            "should predict it: score an encoder without this mask, or a decoder"
        )


def check_length(config: ModelConfig, length: int) -> None:
    """Raise SettingError if a row is too long for the model."""
    max_length = _max_length(config)
    if length > max_length:
        raise SettingError(f"a row of {length} tokens exceeds model.positions.max_length={max_length}")


def _max_length(config: ModelConfig) -> int:
    """Return the length of the longest row that a model can read [tokens]."""
    return config.positions.max_length if config.has_max_length else 2**31


def _make_batch(config: ModelConfig, rows: Sequence[_Row], bucket: BucketBatch) -> tuple[Batch, _Targets]:
    """Return the batch of ``rows``, padded to ``bucket.rows`` rows, and its targets.

    Without a number of candidates in ``bucket.lengths`` each row has one continuation, and the decoder reads
    the prompt and all of it but its last token. Else the decoder reads the prompt alone, and each candidate
    continues its cache (``_candidate_log_probs``).
    """
    encoder_length, decoder_length, *candidate_counts, targets_length = bucket.lengths
    num_candidates = candidate_counts[0] if candidate_counts else None
    encoder = decoder = None
    if config.has_encoder:
        tokens, lengths = pad_to_shape([row.encoder for row in rows], (bucket.rows, encoder_length))
        for index, row in enumerate(rows):
            if row.mask is not None:
                tokens[index, row.mask_position] = row.mask
        is_text = (np.arange(encoder_length)[None] < lengths[:, None]).astype(np.int32)
        encoder = Side(tokens=tokens, segment_ids=is_text)
        if "query-stream" in config.heads:  # which predicts masks without having read them (XLNet)
            encoder = replace(encoder, prediction_order=(tokens == rows[0].mask).astype(np.int32))
    prompt_lengths = np.zeros(bucket.rows, np.int32)
    prompt_lengths[: len(rows)] = [len(row.prompt) for row in rows]
    if config.has_decoder:
        if num_candidates is None:
            read = [[*row.prompt, *row.candidates[0][:-1]] for row in rows]
        else:
            read = [[*row.prompt] for row in rows]
        tokens, _ = pad_to_shape(read, (bucket.rows, decoder_length))
        is_prompt = (np.arange(decoder_length)[None] < prompt_lengths[:, None]).astype(np.int32)
        # ``prefill`` needs to know where each prompt ends; in a whole row the causal mask hides the padding.
        prompt_segments = None if num_candidates is None else is_prompt
        # ``causal_attention`` is T5X's name for what marks the prefix, in which attention is bidirectional.
        prefix = is_prompt if config.architecture == "prefix-decoder" else None
        decoder = Side(tokens=tokens, segment_ids=prompt_segments, causal_attention=prefix)
        first_position = np.maximum(prompt_lengths - 1, 0)
    else:
        first_position = np.zeros(bucket.rows, np.int32)
        first_position[: len(rows)] = [row.mask_position for row in rows]
    count = 1 if num_candidates is None else num_candidates
    targets: list[TokenIds] = []
    for row in rows:
        num_missing = count - len(row.candidates)
        targets += row.candidates
        targets += [()] * num_missing
    tokens, lengths = pad_to_shape(targets, (bucket.rows * count, targets_length))
    if num_candidates is not None:
        tokens = tokens.reshape(bucket.rows, count, targets_length)
        lengths = lengths.reshape(bucket.rows, count)
    return Batch(encoder=encoder, decoder=decoder), _Targets(tokens, lengths, first_position)


def pad_to_shape(texts: Sequence[TokenIds], shape: tuple[int, int]) -> tuple[np.ndarray, np.ndarray]:
    """Return texts as left-aligned rows int32 [B,T], padded with 0, and their lengths int32 [B]."""
    tokens, lengths = np.zeros(shape, np.int32), np.zeros(shape[0], np.int32)
    for index, text in enumerate(texts):
        tokens[index, : len(text)], lengths[index] = text, len(text)
    return tokens, lengths


# ---- from rows to log-probabilities


def run_batched(
    score_batch: Callable,
    model: Model,
    rows: Sequence[Any],
    lengths: np.ndarray,
    shard_batch: ShardBatch,
    make_batch: Callable[[ModelConfig, Sequence[Any], BucketBatch], tuple],
) -> list[np.ndarray]:
    """Return the output of ``score_batch`` for each row, float64, in order; batches have few shapes.

    ``lengths`` int [N,3] are the lengths of each row in encoder, decoder and targets. In [N,4] the third
    column is the row's number of candidates, and the last one the length of its longest candidate.
    ``make_batch`` builds, for some of the rows, the arguments of ``score_batch`` other than the model.
    """
    config = model.config
    mesh = sharding.mesh_of(model)
    row_multiple = 1 if mesh is None else sharding.batch_shards(mesh.shape)
    max_lengths = [_max_length(config)] * lengths.shape[1]
    if lengths.shape[1] == 4:  # encoder, decoder, number of candidates, targets
        max_lengths[2] = MAX_CANDIDATES
    buckets = batches_by_length(lengths, partial(_row_cost, config), row_multiple, max_lengths)
    outputs = []
    for bucket in buckets:
        batch = make_batch(config, [rows[index] for index in bucket.examples], bucket)
        if mesh is not None:
            slices = sharding.process_rows(mesh, bucket.rows)
            process_rows = np.concatenate([np.arange(bucket.rows)[part] for part in slices])
            batch = jax.tree.map(lambda values, indices=process_rows: values[indices], batch)
        with nullcontext() if mesh is None else jax.set_mesh(mesh):
            outputs.append(score_batch(model, *shard_batch(batch)))
    by_row: list[Any] = [None] * len(rows)
    for bucket, output in zip(buckets, outputs, strict=True):  # read last, so that devices need not wait
        values = np.asarray(multihost_utils.process_allgather(output, tiled=True), np.float64)
        for index, value in zip(bucket.examples, values, strict=False):  # the last rows are padding
            by_row[index] = value
    return by_row


def _row_cost(config: ModelConfig, lengths: np.ndarray) -> np.ndarray:
    """Return the cost of a row with these lengths [...,3] or [...,4], counted in tokens [...].

    Reading a token costs 1. Scoring one costs 1 too, and its logits in proportion to the memory they take.
    The length of the decoder includes the targets that it reads, except for those of candidates.
    """
    scored_token_cost = 1 + config.vocab_size / (HIDDEN_VECTORS_PER_TOKEN * config.d_model)
    encoder, decoder, *candidates, targets = np.moveaxis(lengths, -1, 0)
    if not candidates:
        return encoder + decoder + scored_token_cost * targets
    return encoder + decoder + (1 + scored_token_cost) * targets * candidates[0]


@jax.jit
def _continuation_log_probs(model, batch, targets):
    """Return float32 [B,2]: the targets' log-probability, and how many of them are not the likeliest."""
    tokens, lengths = targets.tokens, targets.lengths
    offsets = jnp.arange(tokens.shape[1])[None]
    positions = offsets + targets.first_position[:, None]

    def target_logits(member):
        x = member.features(batch)
        x = jnp.take_along_axis(x, jnp.minimum(positions, x.shape[1] - 1)[:, :, None], axis=1)
        return member.logits(x)

    members = model.members if isinstance(model, Ensemble) else [model]
    logits = sum(map(target_logits, members)) / len(members)
    not_likeliest = (logits.argmax(-1) != tokens) & (offsets < lengths[:, None])
    counts = not_likeliest.sum(-1).astype(jnp.float32)
    return jnp.stack([_sum_log_probs(logits, tokens, lengths), counts], axis=-1)


@jax.jit
def _candidate_log_probs(model, batch, targets):
    """Return the log-probability of each candidate [B,C,T], float32 [B,C]; the prompt is read once."""
    tokens, lengths = targets.tokens, targets.lengths
    rows, count, length = tokens.shape
    logits, cache = model.prefill(batch, batch.side("decoder").tokens.shape[1] + length - 1)
    first = jnp.take_along_axis(jax.nn.log_softmax(logits), tokens[:, :, 0], axis=1)
    first = jnp.where(in_range(tokens[:, :, 0], logits.shape[-1]), first, jnp.nan)
    total = jnp.where(lengths > 0, first, 0.0)
    if length > 1:
        tokens, lengths = tokens.reshape(-1, length), jnp.maximum(lengths.reshape(-1) - 1, 0)
        # Candidates continue one prompt, as the beams of a search do.
        x, _ = model.extend(tokens[:, :-1], cache.repeat_beams(count), lengths)
        total += _sum_log_probs(model.logits(x), tokens[:, 1:], lengths).reshape(rows, count)
    return total


def _sum_log_probs(logits: Array, targets: Array, lengths: Array) -> Array:
    """Return the summed log-probabilities of the first ``lengths`` [B] targets [B,T], float32 [B].

    ``logits`` are [B,T,V].
    """
    log_probs = token_log_probs(logits, targets)
    return jnp.where(jnp.arange(targets.shape[1])[None] < lengths[:, None], log_probs, 0.0).sum(-1)


def token_log_probs(logits: Array, tokens: Array) -> Array:
    """Return the log-probability of each token [B,T] under logits [B,T,V], float32 [B,T].

    It is NaN for an id outside of [0, V): indexing would count a negative one from the end.
    """
    chosen = jnp.take_along_axis(logits, tokens[:, :, None], axis=-1)[:, :, 0]
    log_probs = chosen - jax.nn.logsumexp(logits, axis=-1)
    return jnp.where(in_range(tokens, logits.shape[-1]), log_probs, jnp.nan)

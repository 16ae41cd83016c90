"""Upper bounds of minus the log-probability of texts, by encoders trained by masked diffusion.

A masked diffusion model gives a text x of n tokens after a context c no probability that could be computed,
but a bound: the negative evidence lower bound (NELBO). With a mask for each token of a set S,

    -log p(x | c)  <=  E_k E_S [ n/k  sum over i in S of  -log p(x_i | c, tokens of x outside S) ],

where k is uniform in 1..n and S is any set of k tokens (Hoogeboom et al. 2022, equation 4). It is the bound
of Sahoo et al. 2024 (MDLM, equation 11), where each token is masked with probability t, t is uniform in (0,
1], and the weight is 1/t (Ou et al. 2024; Nie et al. 2025, appendix A: this form has the lower variance). The
bound is the mean, over all orders of the tokens, of minus the log-probability of predicting them one by one
in that order; if the predictions are the conditional probabilities of one distribution, it equals
-log p(x | c).

The expectation is estimated: k is stratified, with two sets in each stratum, whose difference tells the
variance of the estimate. The probability of the mask itself is set to 0 before the softmax (Sahoo et al.
2024, section 3.2.3).
"""

from collections.abc import Iterator, Sequence
from functools import partial
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax import Array

from lm.batch import Batch, Side
from lm.config.base import SettingError
from lm.config.model import ModelConfig
from lm.evaluate.bucketing import BucketBatch
from lm.evaluate.generate import Model
from lm.evaluate.loglikelihood import (
    Masking,
    Request,
    ShardBatch,
    Window,
    check_length,
    document_requests,
    pad_to_shape,
    run_batched,
    token_log_probs,
)

REQUESTS_AT_ONCE = 1_024  # whose masked rows are in memory together


class Bounds(NamedTuple):
    """Estimates of upper bounds of minus the log-probability of N continuations."""

    nats: np.ndarray  # float64 [N]
    variances: np.ndarray  # float64 [N]: of ``nats``, by the random choice of masks

    def total(self) -> tuple[float, float]:
        """Return the bound of all continuations together [nats], and the variance of its estimate."""
        return float(self.nats.sum()), float(self.variances.sum())


def continuation_bounds(
    model: Model, requests: Sequence[Request], shard_batch: ShardBatch, masking: Masking, draws: int
) -> Bounds:
    """Return the bound of each continuation given its context, of an encoder, from ``draws`` sets of masks.

    The sets depend on the position of a request among ``requests`` and on its length alone, so that all
    models are asked the same. SettingError for a number of draws that is not even, a text that is too long,
    or a continuation that holds the mask, whose probability is 0.
    """
    if draws < 2 or draws % 2:
        raise SettingError(f"draws={draws} of masks should be an even number of at least 2, such as 16")
    if any(masking.mask in continuation for _, continuation in requests):
        raise SettingError(
            "a text to score holds the mask token, such as [MASK], which masked diffusion never predicts, so "
            "that its probability is 0; leave the mask out, or put it into the context"
        )
    num_ends = len(masking.begin) + len(masking.end)
    for context, continuation in requests:  # all of them before the first is scored
        check_length(model.config, num_ends + len(context) + len(continuation))
    nats, variances = np.zeros(len(requests)), np.zeros(len(requests))
    for first in range(0, len(requests), REQUESTS_AT_ONCE):
        numbers = range(first, min(first + REQUESTS_AT_ONCE, len(requests)))
        rows: list[_MaskedRow] = []
        for number in numbers:
            rows += _masked_rows(requests[number], number, masking, draws)
        lengths = np.zeros((len(rows), 3), np.int64)  # of encoder, decoder and targets
        for index, row in enumerate(rows):
            lengths[index] = len(row.tokens), 0, len(row.tokens)
        score_batch = partial(_weighted_losses, mask=masking.mask)
        losses = np.array(run_batched(score_batch, model, rows, lengths, shard_batch, _make_batch))
        pairs = losses.reshape(len(numbers), draws // 2, 2)
        nats[first : numbers.stop] = pairs.mean(axis=(1, 2))
        # The variance of the mean of a pair is estimated by (a - b)^2 / 4. The mean over m strata has the sum
        # of these divided by m^2.
        differences = pairs[:, :, 0] - pairs[:, :, 1]
        variances[first : numbers.stop] = (differences**2).sum(1) / 4 / (draws // 2) ** 2
    return Bounds(nats, variances)


def documents_bound(
    model: Model,
    documents: Sequence[Sequence[int]],
    window: Window,
    shard_batch: ShardBatch,
    masking: Masking,
    draws: int,
) -> Bounds:
    """Return the bounds of whole documents by ``windows``, one for each window.

    Each document is read after ``masking.end``, as if another document had ended there; these ids are context
    and are not scored. ``documents_log_prob`` does the same with an EOS.
    """
    requests = document_requests(documents, masking.end, window, model.config)
    return continuation_bounds(model, requests, shard_batch, masking, draws)


class _MaskedRow(NamedTuple):
    """A text with masks, the text itself, and the weight of each token's loss; all as long as the text."""

    tokens: np.ndarray  # int32
    targets: np.ndarray  # int32
    weights: np.ndarray  # float32


def _masked_rows(request: Request, number: int, masking: Masking, draws: int) -> Iterator[_MaskedRow]:
    """Yield the rows of a request, two for each stratum of the number of masks, one after the other."""
    context, continuation = request
    first, count = len(masking.begin) + len(context), len(continuation)
    text = np.array([*masking.begin, *context, *continuation, *masking.end], np.int32)
    random = np.random.Generator(np.random.Philox(key=[0, number]))
    strata = np.arange(draws) // 2
    num_masks = 1 + ((strata + random.random(draws)) / (draws // 2) * count).astype(np.int64)
    ranks = random.random((draws, count)).argsort(axis=1).argsort(axis=1)
    for size, rank in zip(np.minimum(num_masks, count), ranks, strict=True):
        masked = np.zeros(len(text), bool)
        masked[first : first + count] = rank < size
        weights = masked * np.float32(count / max(size, 1))
        yield _MaskedRow(np.where(masked, np.int32(masking.mask), text), text, weights)


def _make_batch(_config: ModelConfig, rows: Sequence[_MaskedRow], bucket: BucketBatch) -> tuple[Batch]:
    """Return the batch of ``rows``, padded to ``bucket.rows`` rows."""
    shape = bucket.rows, bucket.lengths[0]
    tokens, lengths = pad_to_shape([row.tokens for row in rows], shape)
    targets, _ = pad_to_shape([row.targets for row in rows], shape)
    weights = np.zeros(shape, np.float32)
    for index, row in enumerate(rows):
        weights[index, : len(row.weights)] = row.weights
    is_text = (np.arange(shape[1])[None] < lengths[:, None]).astype(np.int32)
    side = Side(tokens=tokens, segment_ids=is_text, targets=targets, loss_weights=weights)
    return (Batch(encoder=side),)


@partial(jax.jit, static_argnames="mask")
def _weighted_losses(model: Any, batch: Batch, *, mask: int) -> Array:
    """Return the sum of the weighted losses of each row's masked tokens, float32 [B] nats."""
    side = batch.side("encoder")
    logits = model(batch).at[:, :, mask].set(-jnp.inf)
    losses = -token_log_probs(logits, side.targets)
    return jnp.where(side.loss_weights > 0, losses * side.loss_weights, 0.0).sum(-1)

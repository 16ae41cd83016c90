"""Losses: functions (model, batch, key, settings) -> a sum to minimise, and sums to report.

Every term is weighted by one of the batch's arrays of loss weights. The step first divides each of these
arrays by its total over the whole batch, so that micro-batches, hosts and terms of different weight simply
add up. Reported are pairs (sum, sum of weights) by name, which ``Steps.evaluate`` adds up over batches and
divides. Batches with ``frequent_tokens`` int [B,10], such as those of held-out text, are also reported on
their content tokens. Without a key nothing is dropped out.
"""

from collections.abc import Callable
from math import ceil
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import optax
from jax import Array

from lm.batch import Batch, Side
from lm.config.training import LossConfig
from lm.nn.cache import Carry
from lm.ops.losses import accuracy, cross_entropy, is_known

Sums = dict[str, tuple[Array, Array]]
LossAndSums = tuple[Array, Sums]
Key = Array | None
Loss = Callable[[Any, Batch, Key, LossConfig], LossAndSums]

# Weight of the discriminator's loss beside the generator's (Clark et al. 2020, section 3.1).
DISCRIMINATOR_WEIGHT = 50.0

# Logits are computed for this share of a row's positions, or for all if a row of the batch predicts more.
# With 15 % of tokens masked at random it is 8 standard deviations above the mean in rows of 512 tokens, 4 in
# rows of 128.
MAX_PREDICTED_SHARE = 0.28


def language_model(model: Any, batch: Batch, key: Key, config: LossConfig) -> LossAndSums:
    """Return the cross-entropy of the decoder's targets [B,T]."""
    return _token_loss(model(batch, key), batch.side("decoder"), batch.frequent_tokens, config)


class CarriedLoss(NamedTuple):
    """The loss of rows that continue from a recurrent state."""

    loss: Array  # to minimise
    sums: Sums  # reported
    carry: Carry  # the states [layers,B,h] after the rows


def carried_language_model(
    model: Any, batch: Batch, carry: Carry, key: Key, config: LossConfig
) -> CarriedLoss:
    """Return ``language_model`` of rows that continue from the recurrent states ``carry`` [layers,B,h]."""
    x, carry = model.features_from_carry(batch, carry, key)
    loss, sums = _token_loss(model.logits(x), batch.side("decoder"), batch.frequent_tokens, config)
    return CarriedLoss(loss, sums, carry)


def both_directions(model: Any, batch: Batch, key: Key, config: LossConfig) -> LossAndSums:
    """Return the mean cross-entropy of the decoder's targets [B,T], read forward and backward."""
    side, frequent = batch.side("decoder"), batch.frequent_tokens
    losses = [_token_loss(logits, side, frequent, config) for logits in model(batch, key)]
    return jax.tree.map(lambda forward, backward: (forward + backward) / 2, *losses)


def masked_lm(model: Any, batch: Batch, key: Key, config: LossConfig) -> LossAndSums:
    """Return the cross-entropy of the encoder's targets [B,S] and, for pairs, of ``sentence_labels`` [B]."""
    x = model.features(batch, key)
    loss, sums = _masked_token_loss(model, x, batch, config)
    if batch.sentence_labels is None:
        return loss, sums
    head = model.next_sentence if model.sentence_order is None else model.sentence_order
    pair, pair_sums = _class_loss(head(model.pooled(x)), batch.sentence_labels, batch.sentence_loss_weights)
    return loss + pair, sums | {f"sentence_{name}": value for name, value in pair_sums.items()}


def replaced_tokens(model: Any, batch: Batch, key: Key, config: LossConfig) -> LossAndSums:
    """Return ELECTRA's loss: the generator's masked LM, and the discriminator's for all tokens."""
    # Every evaluation draws the same samples.
    sample, key = (jax.random.key(0), None) if key is None else jax.random.split(key)
    logits, tokens, replaced = model(batch, sample, key)
    side = batch.side("encoder")
    loss, sums = _token_loss(logits, side, batch.frequent_tokens, config)
    weights, is_replaced = batch.discriminator_loss_weights, tokens != side.targets
    discrimination = (optax.sigmoid_binary_cross_entropy(replaced, is_replaced) * weights).sum()
    right = (((replaced > 0) == is_replaced) * weights).sum()
    sums |= {"replaced_loss": (discrimination, weights.sum()), "replaced_accuracy": (right, weights.sum())}
    return loss + DISCRIMINATOR_WEIGHT * discrimination, sums


def labelled(model: Any, batch: Batch, key: Key, _config: LossConfig) -> LossAndSums:
    """Return the loss of a head for ``labels``: classes [B] or [B,L], numbers [B], or spans [B,2]."""
    outputs, labels, weights = model(batch, key), batch.labels, batch.label_loss_weights
    kind = model.settings.kind
    if kind == "regression":
        loss = (jnp.square(outputs - labels) * weights).sum()
        return loss, {"loss": (loss, weights.sum())}
    if kind == "span":
        weights = weights[:, None] / 2 * jnp.ones(2)[None, :]
    return _class_loss(outputs, labels, weights)


def _masked_token_loss(model: Any, x: Array, batch: Batch, config: LossConfig) -> LossAndSums:
    """Return the loss of an encoder's states x [B,T,D].

    Logits are computed where something is predicted alone, if these positions are few.
    """
    side, weights = batch.side("encoder"), batch.side("encoder").loss_weights
    max_predicted = ceil(MAX_PREDICTED_SHARE * weights.shape[1])

    @jax.checkpoint  # otherwise the logits of both branches would be saved for the backward pass
    def token_loss(x: Array, side: Side) -> LossAndSums:
        return _token_loss(model.logits(x), side, batch.frequent_tokens, config)

    def predicted_loss(x: Array, side: Side) -> LossAndSums:
        positions = jax.lax.top_k(weights, max_predicted)[1]  # slots left over point at positions of weight 0
        few = side.map(lambda array: jnp.take_along_axis(array, positions, axis=1))
        return token_loss(jnp.take_along_axis(x, positions[:, :, None], axis=1), few)

    few_predicted = ((weights > 0).sum(1) <= max_predicted).all()
    return jax.lax.cond(few_predicted, predicted_loss, token_loss, x, side)


def _token_loss(logits: Array, side: Side, frequent: Array | None, config: LossConfig) -> LossAndSums:
    """Return the cross-entropy of logits [B,T,V] for the targets of a side."""
    targets, weights = side.targets, side.loss_weights
    loss, total, z_loss = cross_entropy(
        logits, targets, weights, z_loss=config.z_loss, label_smoothing=config.label_smoothing
    )
    right, _ = accuracy(logits, targets, weights)
    sums = {"loss": (loss - z_loss, total), "z_loss": (z_loss, total), "accuracy": (right, total)}
    if frequent is not None:
        sums |= _content_metrics(logits, targets, side.content, frequent)
    return loss, sums


def _content_metrics(logits: Array, targets: Array, content: Array, frequent: Array) -> Sums:
    """Return the loss of content tokens, and how often the likeliest token is one of ``frequent``."""
    loss, total, _ = cross_entropy(logits, targets, content, z_loss=0.0, label_smoothing=0.0)
    # The loss computes the same maximum. XLA's argmax would take as long on CPUs as the whole evaluation.
    of_frequent = jnp.take_along_axis(logits, jnp.maximum(frequent, 0)[:, None, :], axis=-1)
    is_frequent = ((of_frequent >= logits.max(-1, keepdims=True)) & (frequent >= 0)[:, None, :]).any(-1)
    return {"content_loss": (loss, total), "top_ten_share": ((is_frequent & content).sum(), total)}


def _class_loss(logits: Array, labels: Array, weights: Array) -> LossAndSums:
    """Return the cross-entropy for labels from 0 on; an unknown label gives NaN unless its weight is 0."""
    labels = jnp.where(weights == 0, 0, labels)
    known = is_known(labels, logits.shape[-1])
    each = optax.softmax_cross_entropy_with_integer_labels(logits, labels)
    loss = (jnp.where(known, each, jnp.nan) * weights).sum()
    right = (jnp.where(known, logits.argmax(-1) == labels, jnp.nan) * weights).sum()
    return loss, {"loss": (loss, weights.sum()), "accuracy": (right, weights.sum())}

"""What training makes small: (model, batch, key, settings) -> a sum to minimise, and what is reported.

Every term is a sum over one of the batch's arrays of loss weights; the step divides each
array by its total over the whole batch first, so that micro-batches, hosts and terms of different weight
simply add up. Reported are (sum, sum of weights) by name, which ``Steps.evaluate`` adds up over batches and
divides; content too, of batches with ``frequent_pieces`` int [B,10], as those of held-out text have them. No
key: no dropout.
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

# weight of the discriminator's loss beside the generator's [Clark et al. 2020, section 3.1]
DISCRIMINATION = 50.0

# Of a row more than 15 percent are hardly ever: 8 deviations above in rows of 512 tokens, 4 in
# rows of 128. Where a row of a batch has more to predict, all logits of the batch are computed.
FEW = 0.28


def language_model(model: Any, batch: Batch, key: Key, config: LossConfig) -> LossAndSums:
    """Cross-entropy of the decoder's targets [B,T]."""
    return _tokens(model(batch, key), batch.side("decoder"), batch.frequent_pieces, config)


class CarriedLoss(NamedTuple):
    """The loss of rows that each go on from a recurrent state."""

    loss: Array  # to minimise
    sums: Sums  # reported
    carry: Carry  # the states [layers,B,h] after the rows


def carried_language_model(
    model: Any, batch: Batch, carry: Carry, key: Key, config: LossConfig
) -> CarriedLoss:
    """Return ``language_model`` of rows that go on from the recurrent states ``carry`` [layers,B,h]."""
    x, carry = model.features_from_carry(batch, carry, key)
    loss, sums = _tokens(model.logits(x), batch.side("decoder"), batch.frequent_pieces, config)
    return CarriedLoss(loss, sums, carry)


def both_directions(model: Any, batch: Batch, key: Key, config: LossConfig) -> LossAndSums:
    """The mean of the cross-entropies of the decoder's targets [B,T] read from either end."""
    side, frequent = batch.side("decoder"), batch.frequent_pieces
    losses = [_tokens(logits, side, frequent, config) for logits in model(batch, key)]
    return jax.tree.map(lambda forward, backward: (forward + backward) / 2, *losses)


def masked_lm(model: Any, batch: Batch, key: Key, config: LossConfig) -> LossAndSums:
    """Cross-entropy of the encoder's targets [B,S] and, of pairs, of their ``sentence_labels`` [B]."""
    x = model.features(batch, key)
    loss, sums = _predicted(model, x, batch, config)
    if batch.sentence_labels is None:
        return loss, sums
    head = model.next_sentence if model.sentence_order is None else model.sentence_order
    pair, pair_sums = _classes(head(model.pooled(x)), batch.sentence_labels, batch.sentence_loss_weights)
    return loss + pair, sums | {f"sentence_{name}": value for name, value in pair_sums.items()}


def replaced_tokens(model: Any, batch: Batch, key: Key, config: LossConfig) -> LossAndSums:
    """ELECTRA: the generator's masked LM, and the discriminator's cross-entropy over all of the text."""
    # evaluation always draws alike
    sample, key = (jax.random.key(0), None) if key is None else jax.random.split(key)
    logits, tokens, replaced = model(batch, sample, key)
    side = batch.side("encoder")
    loss, sums = _tokens(logits, side, batch.frequent_pieces, config)
    weights, is_replaced = batch.text_loss_weights, tokens != side.targets
    discrimination = (optax.sigmoid_binary_cross_entropy(replaced, is_replaced) * weights).sum()
    right = (((replaced > 0) == is_replaced) * weights).sum()
    sums |= {"replaced_loss": (discrimination, weights.sum()), "replaced_accuracy": (right, weights.sum())}
    return loss + DISCRIMINATION * discrimination, sums


def labelled(model: Any, batch: Batch, key: Key, _config: LossConfig) -> LossAndSums:
    """Of a head's outputs for ``labels``: classes [B] or [B,L], numbers [B], or spans [B,2]."""
    outputs, labels, weights = model(batch, key), batch.labels, batch.label_loss_weights
    kind = model.settings.kind
    if kind == "regression":
        loss = (jnp.square(outputs - labels) * weights).sum()
        return loss, {"loss": (loss, weights.sum())}
    if kind == "span":
        weights = weights[:, None] / 2 * jnp.ones(2)[None, :]
    return _classes(outputs, labels, weights)


def _predicted(model: Any, x: Array, batch: Batch, config: LossConfig) -> LossAndSums:
    """As ``_tokens`` of an encoder's states x [B,T,D]; logits of what is predicted alone, if that is FEW."""
    side, weights = batch.side("encoder"), batch.side("encoder").loss_weights
    room = ceil(FEW * weights.shape[1])

    @jax.checkpoint  # else the choice would remember the logits of both
    def of(x: Array, side: Side) -> LossAndSums:
        return _tokens(model.logits(x), side, batch.frequent_pieces, config)

    def of_few(x: Array, side: Side) -> LossAndSums:
        places = jax.lax.top_k(weights, room)[1]  # the others of these have no weight
        few = side.map(lambda array: jnp.take_along_axis(array, places, axis=1))
        return of(jnp.take_along_axis(x, places[:, :, None], axis=1), few)

    return jax.lax.cond(((weights > 0).sum(1) <= room).all(), of_few, of, x, side)


def _tokens(logits: Array, side: Side, frequent: Array | None, config: LossConfig) -> LossAndSums:
    targets, weights = side.targets, side.loss_weights
    loss, total, z_loss = cross_entropy(
        logits, targets, weights, z_loss=config.z_loss, label_smoothing=config.label_smoothing
    )
    right, _ = accuracy(logits, targets, weights)
    sums = {"loss": (loss - z_loss, total), "z_loss": (z_loss, total), "accuracy": (right, total)}
    if frequent is not None:
        sums |= _content(logits, targets, side.content, frequent)
    return loss, sums


def _content(logits: Array, targets: Array, content: Array, frequent: Array) -> Sums:
    """The loss of content tokens, and for how many of them one of the ``frequent`` pieces is likeliest."""
    loss, total, _ = cross_entropy(logits, targets, content, z_loss=0.0, label_smoothing=0.0)
    # The maximum is that of the loss; XLA's argmax takes as long on CPUs as all else of an evaluation.
    of_frequent = jnp.take_along_axis(logits, jnp.maximum(frequent, 0)[:, None, :], axis=-1)
    is_frequent = ((of_frequent >= logits.max(-1, keepdims=True)) & (frequent >= 0)[:, None, :]).any(-1)
    return {"content_loss": (loss, total), "top_ten_share": ((is_frequent & content).sum(), total)}


def _classes(logits: Array, labels: Array, weights: Array) -> LossAndSums:
    """As ``_tokens``, of labels from 0 on: another is NaN in both sums, or nothing where it has no weight."""
    labels = jnp.where(weights == 0, 0, labels)
    known = is_known(labels, logits.shape[-1])
    each = optax.softmax_cross_entropy_with_integer_labels(logits, labels)
    loss = (jnp.where(known, each, jnp.nan) * weights).sum()
    right = (jnp.where(known, logits.argmax(-1) == labels, jnp.nan) * weights).sum()
    return loss, {"loss": (loss, weights.sum()), "accuracy": (right, weights.sum())}

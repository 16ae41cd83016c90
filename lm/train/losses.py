"""Losses: functions (model, batch, key, config) -> a loss to minimise, and sums to report.

The loss of a batch is the sum of the losses of its targets, each multiplied by its loss weight. The loss of a
target is its cross-entropy with the predictions, unless ``LossConfig.name`` chooses another loss. Before a
training step, each array of loss weights is divided by its sum over the whole batch: the sums are then
means, and those of micro-batches and hosts add up.

Masked diffusion weighs tokens by 1/t and divides by the number of tokens that may be masked
(``Batch.num_loss_tokens``), so that its loss is an upper bound of minus the log-probability [nats per token].

Metrics are returned by name as pairs (weighted sum, sum of weights). ``Steps.evaluate`` adds up both over
batches, and divides the first by the second. A batch with ``frequent_tokens``, the 10 most frequent content
tokens of held-out data, gets metrics of its content tokens too: the targets that are no sentinel and no EOS,
and that the inputs do not show at the same position (``lm.data.content``).

A side of a batch holds the arrays of either the encoder or the decoder. Without a key there is no dropout.

With a teacher the loss of the targets is a weighted sum of three: the objective's own, the cross-entropy with
the teacher's predictions, and the cosine distance of the last hidden states (Sanh et al. 2019). The metrics
"loss" and "accuracy" are those of the objective's own loss, as without a teacher.
"""

from collections.abc import Callable
from math import ceil
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import optax
from jax import Array

from lm.batch import Batch, Side
from lm.config.model import ModelConfig
from lm.config.training import DistillationConfig, LossConfig
from lm.nn.cache import Carry
from lm.nn.experts import RouterStatistics
from lm.ops.losses import (
    accuracy,
    copy_cross_entropy,
    cosine_distance,
    cross_entropy,
    in_range,
    soft_cross_entropy,
    token_loss_sums,
)
from lm.train.chunks import sum_over_chunks

Sums = dict[str, tuple[Array, Array]]  # metric -> (weighted sum, sum of weights), float32 []
LossAndSums = tuple[Array, Sums]  # the loss to minimise, float32 [], and the metrics to report
Key = Array | None  # of dropout
Loss = Callable[..., LossAndSums]  # of the model, a Batch, a Key and a LossConfig; for some, of a Teacher
# last hidden states [B,T,D] of a model and, if the loss depends on them, those of its teacher
HiddenStates = tuple[Array, ...]

# losses of target tokens other than the cross-entropy, by name: functions of logits float32 [B,T,V] and
# targets int [B,T] that return losses [B,T]. Study modules add theirs.
TOKEN_LOSSES: dict[str, Callable[[Array, Array], Array]] = {}

# Weight of the loss of ELECTRA's discriminator; that of its generator is 1 (Clark et al. 2020, section 3.1).
DISCRIMINATOR_WEIGHT = 50.0

# A masked LM computes logits for this share of a row's positions, or for all if any row of the batch has more
# masked positions. With 15 % of tokens masked at random it is 8 standard deviations above the mean in rows of
# 512 tokens, 4 in rows of 128.
MAX_MASKED_SHARE = 0.28


class Teacher(NamedTuple):
    """A trained model whose predictions the student learns to match; it runs without dropout."""

    model: Any
    config: DistillationConfig


def language_model(
    model: Any, batch: Batch, key: Key, config: LossConfig, teacher: Teacher | None = None
) -> LossAndSums:
    """Return the loss of the decoder's targets; with a teacher, the loss of distillation."""
    return _language_model(model, batch, "decoder", key, config, teacher)


class CarriedLoss(NamedTuple):
    """The loss of rows that continue from a recurrent state."""

    loss: Array
    sums: Sums
    carry: Carry  # the states [layers,B,h] after the rows


def carried_language_model(
    model: Any, batch: Batch, carry: Carry, key: Key, config: LossConfig
) -> CarriedLoss:
    """Return ``language_model`` of rows that continue from the recurrent states ``carry`` [layers,B,h]."""
    x, carry, router, _ = model.outputs_from_carry(batch, carry, key)
    side = batch.side("decoder")
    loss, sums = _loss_from_hidden_states(model, (x,), side, batch.frequent_tokens, config, None)
    loss, sums = _add_router_losses(model, router, side.loss_weights, loss, sums)
    return CarriedLoss(loss, sums, carry)


def both_directions(model: Any, batch: Batch, key: Key, config: LossConfig) -> LossAndSums:
    """Return the mean of the losses of a ``BidirectionalLM``, whose two directions share targets."""
    side = batch.side("decoder")
    forward_logits, backward_logits = model(batch, key)
    forward = _loss_from_logits(forward_logits, side, batch.frequent_tokens, config)
    backward = _loss_from_logits(backward_logits, side, batch.frequent_tokens, config)
    return jax.tree.map(lambda one, other: (one + other) / 2, forward, backward)


def masked_lm(
    model: Any, batch: Batch, key: Key, config: LossConfig, teacher: Teacher | None = None
) -> LossAndSums:
    """Return the loss of masked tokens; for sentence pairs, plus the cross-entropy of ``sentence_labels``.

    With a teacher return the loss of distillation; its weight ``hard`` multiplies the loss of pairs too.
    """
    x, router = _hidden_states_and_router(model, batch, key)
    loss, sums = _masked_token_loss(model, x, batch, config, teacher)
    row_weights = batch.side("encoder").loss_weights
    if batch.num_loss_tokens is not None:  # the weights of a bound add up to this number only on average
        row_weights = batch.num_loss_tokens
    loss, sums = _add_router_losses(model, router, row_weights, loss, sums)
    if batch.sentence_labels is None:
        return loss, sums
    head = model.next_sentence if model.sentence_order is None else model.sentence_order
    logits = head(model.pooled(x))
    pair_loss, pair_sums = _class_loss(logits, batch.sentence_labels, batch.sentence_loss_weights)
    if teacher is not None:
        pair_loss *= teacher.config.hard
    return loss + pair_loss, sums | {f"sentence_{name}": value for name, value in pair_sums.items()}


def causal_encoder(
    model: Any, batch: Batch, key: Key, config: LossConfig, teacher: Teacher | None = None
) -> LossAndSums:
    """Return the loss of the next tokens that an encoder with a causal mask predicts.

    With a teacher return the loss of distillation.
    """
    return _language_model(model, batch, "encoder", key, config, teacher)


DISTILLED = (language_model, masked_lm, causal_encoder)  # losses that take a teacher


def replaced_token_detection(model: Any, batch: Batch, key: Key, config: LossConfig) -> LossAndSums:
    """Return ELECTRA's loss: the generator's on masked tokens plus the discriminator's.

    The discriminator's is a sum over the tokens of ``batch.discriminator_loss_weights``: all, or those that
    were masked. ``config`` applies to the generator's loss only.
    """
    sample_key, key = _sample_key(key)
    outputs, side = model(batch, sample_key, key), batch.side("encoder")
    loss, sums = _loss_from_logits(outputs.generator_logits, side, batch.frequent_tokens, config)
    weights, is_replaced = batch.discriminator_loss_weights, outputs.tokens != side.targets
    token_losses = optax.sigmoid_binary_cross_entropy(outputs.replaced_logits, is_replaced)
    discriminator_loss = (token_losses * weights).sum()
    num_right = (((outputs.replaced_logits > 0) == is_replaced) * weights).sum()
    total = weights.sum()
    sums |= {"replaced_loss": (discriminator_loss, total), "replaced_accuracy": (num_right, total)}
    return loss + DISCRIMINATOR_WEIGHT * discriminator_loss, sums


def restored_tokens(model: Any, batch: Batch, key: Key, config: LossConfig) -> LossAndSums:
    """Return the generator's loss on masked tokens plus that of a discriminator that restores the text.

    Both have weight 1: for "replace MLM" and "all-tokens MLM" Clark et al. 2020 (ELECTRA) give no weights.
    ``config`` applies to the generator's loss only.
    """
    sample_key, key = _sample_key(key)
    outputs, side = model(batch, sample_key, key), batch.side("encoder")
    loss, sums = _loss_from_logits(outputs.generator_logits, side, batch.frequent_tokens, config)
    weights = batch.discriminator_loss_weights
    if outputs.copy_logits is None:  # "replace MLM"
        restored_loss = cross_entropy(
            outputs.logits, side.targets, weights, z_loss=0.0, label_smoothing=0.0
        ).loss
        num_right, total = accuracy(outputs.logits, side.targets, weights)
    else:  # "all-tokens MLM": the discriminator may also copy the token that it reads
        restored_loss, total, num_right = copy_cross_entropy(
            outputs.logits, outputs.copy_logits, outputs.tokens, side.targets, weights
        )
    sums |= {"restored_loss": (restored_loss, total), "restored_accuracy": (num_right, total)}
    return loss + restored_loss, sums


def _sample_key(key: Key) -> tuple[Array, Key]:
    """Return a key for the generator's samples, the same in every evaluation, and one for dropout."""
    if key is None:
        return jax.random.key(0), None
    sample_key, key = jax.random.split(key)
    return sample_key, key


def supervised_loss(model: Any, batch: Batch, key: Key, _config: LossConfig) -> LossAndSums:
    """Return the loss of a ``ModelWithHead``: the squared error for regression, else the cross-entropy.

    ``batch.labels`` are numbers [B] for regression. Otherwise they are classes [B], classes of tokens [B,T],
    correct candidates [B], or the first and last position of spans [B,2].
    """
    labels, weights = batch.labels, batch.label_loss_weights
    router = None
    if _has_experts(model):
        outputs, router = model.outputs_and_router(batch, key)
    else:
        outputs = model(batch, key)
    kind = model.settings.kind
    if kind == "regression":
        errors = jnp.where(weights == 0, 0.0, outputs - labels)  # whatever number stands for "ignore"
        loss = (jnp.square(errors) * weights).sum()
        sums = {"loss": (loss, weights.sum())}
        return _add_router_losses(model, router, weights, loss, sums)
    label_weights = weights
    if kind == "span":  # the mean of the losses of a span's start and of its end
        label_weights = weights[:, None] / 2 * jnp.ones(2)[None, :]
    return _add_router_losses(model, router, weights, *_class_loss(outputs, labels, label_weights))


def _transformer_config(model: Any) -> ModelConfig:
    """Return the settings of a Transformer; the defaults for a model without such settings."""
    config = getattr(model, "config", None)
    return config if isinstance(config, ModelConfig) else ModelConfig()


def _has_experts(model: Any) -> bool:
    """Return whether layers of a model have experts."""
    return _transformer_config(model).experts.count > 0


def _loss_chunks(model: Any) -> int:
    """Return in how many chunks of a row the logits of a model and their loss are computed."""
    return _transformer_config(model).compile.loss_chunks


def _hidden_states_and_router(model: Any, batch: Batch, key: Key) -> tuple[Array, RouterStatistics | None]:
    """Return a model's last hidden states [B,T,D], and the statistics of its routers if it has any."""
    if not _has_experts(model):
        return model.features(batch, key), None
    outputs = model.outputs(batch, key)
    return outputs.x, outputs.router


def _language_model(
    model: Any, batch: Batch, name: str, key: Key, config: LossConfig, teacher: Teacher | None
) -> LossAndSums:
    """Return the loss of the targets of a side, plus the losses of the model's routers."""
    side = batch.side(name)
    if teacher is None and not _has_experts(model) and _loss_chunks(model) == 1:
        # This path serves any model whose call returns logits: it needs no ``features`` and ``logits``.
        return _loss_from_logits(model(batch, key), side, batch.frequent_tokens, config)
    x, router = _hidden_states_and_router(model, batch, key)
    hidden_states = _with_teacher_states(x, batch, teacher)
    loss, sums = _loss_from_hidden_states(model, hidden_states, side, batch.frequent_tokens, config, teacher)
    return _add_router_losses(model, router, side.loss_weights, loss, sums)


def _add_router_losses(
    model: Any, router: RouterStatistics | None, weights: Array, loss: Array, sums: Sums
) -> LossAndSums:
    """Return the loss plus the losses of all routers, and the metrics plus those of the routers.

    Each row is weighted by the sum of its ``weights``, [B] or [B,T], so that these sums, too, add up over
    micro-batches, hosts and evaluation batches. The loss gets the sums over layers (Fedus et al. 2021),
    multiplied by ``experts.balance_loss`` and ``experts.z_loss``. The metrics are means over layers, without
    these factors: ``balance_loss`` is 1 if all experts get the same number of tokens, and the number of
    experts if one of them gets all tokens with probability 1.
    """
    if router is None:
        return loss, sums
    config: ModelConfig = model.config
    row_weights = jnp.asarray(weights, jnp.float32).reshape(len(weights), -1).sum(1)
    total = row_weights.sum()
    balance_loss = (router.balance_loss * row_weights).sum()
    z_loss = (router.z_loss * row_weights).sum()
    dropped = (router.dropped * row_weights).sum()
    loss = loss + config.experts.balance_loss * balance_loss + config.experts.z_loss * z_loss
    layers = config.num_expert_layers
    metrics = {"balance_loss": balance_loss, "router_z_loss": z_loss, "dropped_tokens": dropped}
    return loss, sums | {name: (value / layers, total) for name, value in metrics.items()}


def _masked_token_loss(
    model: Any, x: Array, batch: Batch, config: LossConfig, teacher: Teacher | None
) -> LossAndSums:
    """Return the loss of masked tokens, from an encoder's last hidden states x [B,T,D].

    Logits are computed at the share MAX_MASKED_SHARE of each row's positions, the masked ones among them. If
    any row of the batch has more masked positions, they are computed at all positions. The loss, z-loss and
    accuracy of an objective that bounds the likelihood are per token of the text, not per masked token
    (``Batch.num_loss_tokens``).
    """
    side, weights = batch.side("encoder"), batch.side("encoder").loss_weights
    max_masked = ceil(MAX_MASKED_SHARE * weights.shape[1])

    def loss_everywhere(hidden_states: HiddenStates, side: Side) -> LossAndSums:
        return _loss_from_hidden_states(model, hidden_states, side, batch.frequent_tokens, config, teacher)

    # Without checkpointing, ``lax.cond`` would save the logits of both branches for the backward pass; the
    # chunked loss saves none.
    if _loss_chunks(model) == 1:
        loss_everywhere = jax.checkpoint(loss_everywhere)

    def loss_where_masked(hidden_states: HiddenStates, side: Side) -> LossAndSums:
        # The positions of the largest weights: all masked ones, and unmasked ones of weight 0 to fill up.
        positions = jax.lax.top_k(weights, max_masked)[1]
        masked = side.map(lambda array: jnp.take_along_axis(array, positions, axis=1))
        masked_states = tuple(jnp.take_along_axis(x, positions[:, :, None], axis=1) for x in hidden_states)
        return loss_everywhere(masked_states, masked)

    fits_max_masked = ((weights > 0).sum(1) <= max_masked).all()
    hidden_states = _with_teacher_states(x, batch, teacher)
    loss, sums = jax.lax.cond(fits_max_masked, loss_where_masked, loss_everywhere, hidden_states, side)
    if batch.num_loss_tokens is not None:
        total = batch.num_loss_tokens.sum(dtype=jnp.float32)
        sums |= {name: (sums[name][0], total) for name in ("loss", "z_loss", "accuracy")}
    return loss, sums


def _with_teacher_states(x: Array, batch: Batch, teacher: Teacher | None) -> HiddenStates:
    """Return (x,) or, if the loss depends on them, (x, the teacher's last hidden states), all [B,T,D]."""
    if teacher is None or not teacher.config.needs_teacher_forward:
        return (x,)
    return x, jax.lax.stop_gradient(teacher.model.features(batch))


def _loss_from_hidden_states(
    model: Any,
    hidden_states: HiddenStates,
    side: Side,
    frequent_tokens: Array | None,
    config: LossConfig,
    teacher: Teacher | None,
) -> LossAndSums:
    """Return the loss of the targets of a side, from last hidden states [B,T,D]."""

    def loss_of(hidden_states: HiddenStates, side: Side, frequent_tokens: Array | None) -> LossAndSums:
        x, *teacher_states = hidden_states
        logits, weights = model.logits(x), side.loss_weights
        loss, sums = _loss_from_logits(logits, side, frequent_tokens, config)
        if teacher is None:
            return loss, sums
        distillation = teacher.config
        loss = distillation.hard * loss
        if not distillation.needs_teacher_forward:
            return loss, sums
        (teacher_x,) = teacher_states
        if distillation.soft:
            teacher_logits = teacher.model.logits(teacher_x)
            soft_loss, total = soft_cross_entropy(
                logits, teacher_logits, weights, temperature=distillation.temperature
            )
            loss += distillation.soft * soft_loss
            sums |= {"soft_loss": (soft_loss, total)}
        if distillation.cosine:
            distance, total = cosine_distance(x, teacher_x, weights)
            loss += distillation.cosine * distance
            sums |= {"cosine_distance": (distance, total)}
        return loss, sums

    chunks = _loss_chunks(model)
    if chunks == 1:
        return loss_of(hidden_states, side, frequent_tokens)
    return sum_over_chunks(loss_of, hidden_states, side, frequent_tokens, chunks)


def _loss_from_logits(
    logits: Array, side: Side, frequent_tokens: Array | None, config: LossConfig
) -> LossAndSums:
    """Return the loss of logits [B,T,V] for the targets of a side: their cross-entropy, or another."""
    targets, weights = side.targets, side.loss_weights
    name: str = config.name  # besides the choices of the type, one that a study module has added
    if name == "cross-entropy":
        loss, total, z_loss = cross_entropy(
            logits, targets, weights, z_loss=config.z_loss, label_smoothing=config.label_smoothing
        )
    else:
        token_loss = TOKEN_LOSSES[name]
        loss, total, z_loss = token_loss_sums(token_loss, logits, targets, weights, z_loss=config.z_loss)
    num_right, _ = accuracy(logits, targets, weights)
    sums = {"loss": (loss - z_loss, total), "z_loss": (z_loss, total), "accuracy": (num_right, total)}
    if frequent_tokens is not None:
        sums |= _content_metrics(logits, targets, side.content, frequent_tokens)
    return loss, sums


def _content_metrics(logits: Array, targets: Array, content: Array, frequent_tokens: Array) -> Sums:
    """Return the metrics of targets where ``content`` bool [B,T] is True.

    ``content_loss`` is their cross-entropy. ``top_ten_share`` is the share of their predictions, the tokens
    with the highest logits, that are among ``frequent_tokens`` int [B,10]: the 10 most frequent content
    tokens of held-out data, padded with -1. Content leaves out sentinels, EOS, and targets that the inputs
    show at the same position.
    """
    loss, total, _ = cross_entropy(logits, targets, content, z_loss=0.0, label_smoothing=0.0)
    # The loss computes this maximum anyway. On CPUs, XLA's argmax would take as long as the whole evaluation.
    is_token = (frequent_tokens >= 0)[:, None, :]
    frequent_logits = jnp.take_along_axis(logits, jnp.maximum(frequent_tokens, 0)[:, None, :], axis=-1)
    is_argmax = frequent_logits >= logits.max(-1, keepdims=True)
    is_frequent = (is_argmax & is_token).any(-1)
    return {"content_loss": (loss, total), "top_ten_share": ((is_frequent & content).sum(), total)}


def _class_loss(logits: Array, labels: Array, weights: Array) -> LossAndSums:
    """Return the cross-entropy of class labels [...], given logits [...,classes].

    A label outside [0, classes) makes the loss NaN, unless its weight is 0.
    """
    labels = jnp.where(weights == 0, 0, labels)
    is_class = in_range(labels, logits.shape[-1])
    losses = optax.softmax_cross_entropy_with_integer_labels(logits, labels)
    loss = (jnp.where(is_class, losses, jnp.nan) * weights).sum()
    num_right = (jnp.where(is_class, logits.argmax(-1) == labels, jnp.nan) * weights).sum()
    return loss, {"loss": (loss, weights.sum()), "accuracy": (num_right, weights.sum())}

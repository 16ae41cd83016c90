"""Sum losses over targets, so that micro-batches and hosts add up; divide by the total weight afterwards."""

from collections.abc import Callable
from functools import partial
from math import log
from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax import Array
from jaxtyping import Bool, Float, Float32, Int, Shaped

MIN_SQUARED_NORM = 1e-16  # of a vector that is divided by its length; a smaller one is raised to it


class LossSums(NamedTuple):
    """Sums over targets, each multiplied by its weight."""

    loss: Float32[Array, ""]  # includes the z-loss
    total_weight: Float32[Array, ""]
    z_loss: Float32[Array, ""]  # to report: ``loss`` has its gradient


class CopyLossSums(NamedTuple):
    """Sums over targets, each multiplied by its weight."""

    loss: Float32[Array, ""]
    total_weight: Float32[Array, ""]
    num_right: Float32[Array, ""]  # targets that no token is likelier than


def cross_entropy(
    logits: Float[Array, "B T V"],
    targets: Int[Array | np.ndarray, "B T"],
    weights: Shaped[Array | np.ndarray, "B T"],
    *,
    z_loss: float,
    label_smoothing: float,
) -> LossSums:
    """Return the loss summed over targets.

    ``logits`` are [B,T,V], ``targets`` int [B,T] and ``weights`` [B,T]. The z-loss, ``z_loss`` times the
    squared log-partition function, keeps logits from drifting; the loss includes it. ``label_smoothing`` is
    spread evenly over the V - 1 wrong tokens, and the entropy of the smoothed target is subtracted, so that
    the cross-entropy of a perfect prediction is 0.

    A target outside of [0, V) gives NaN, in the loss and its gradient, where its weight is not 0; with weight
    0 it gives exactly 0 in both, whatever number stands for "ignore". Logits have to be finite everywhere.
    """
    weights = jnp.asarray(weights, jnp.float32)
    targets = jnp.where(weights == 0, 0, targets)
    loss, log_z = _token_loss(logits, targets, z_loss, label_smoothing)
    return LossSums((loss * weights).sum(), weights.sum(), z_loss * (jnp.square(log_z) * weights).sum())


def token_loss_sums(
    token_loss: Callable[[Array, Array], Array],
    logits: Float[Array, "B T V"],
    targets: Int[Array | np.ndarray, "B T"],
    weights: Shaped[Array | np.ndarray, "B T"],
    *,
    z_loss: float,
) -> LossSums:
    """Return a loss other than the cross-entropy, summed over targets.

    ``token_loss`` maps logits float32 [B,T,V] and targets int [B,T] to losses [B,T]. The z-loss is that of
    ``cross_entropy``. A target outside of [0, V) gives NaN where its weight is not 0. Where
    it is 0, ``token_loss`` reads zeros, and whatever it returns changes no sum and no gradient.
    """
    weights = jnp.asarray(weights, jnp.float32)
    counts = weights != 0
    # Selected on both sides of the loss: 0 times NaN would be NaN, in the sum and in the gradient.
    logits = jnp.where(counts[..., None], logits.astype(jnp.float32), 0.0)
    targets = jnp.where(counts, targets, 0)
    losses = jnp.where(in_range(targets, logits.shape[-1]), token_loss(logits, targets), jnp.nan)
    losses = jnp.where(counts, losses, 0.0)
    z_losses = z_loss * jnp.square(jax.nn.logsumexp(logits, axis=-1))
    return LossSums(((losses + z_losses) * weights).sum(), weights.sum(), (z_losses * weights).sum())


def accuracy(
    logits: Float[Array, "B T V"],
    targets: Int[Array | np.ndarray, "B T"],
    weights: Shaped[Array | np.ndarray, "B T"],
) -> tuple[Float32[Array, ""], Float32[Array, ""]]:
    """Return the sum of weights where no token is likelier than the target, and the sum of all weights.

    ``logits`` are [B,T,V], ``targets`` int [B,T] and ``weights`` [B,T]. A target outside of [0, V) gives NaN
    where its weight is not 0.
    """
    weights = jnp.asarray(weights, jnp.float32)
    targets = jnp.where(weights == 0, 0, targets)
    is_valid = in_range(targets, logits.shape[-1])
    target = jnp.take_along_axis(logits, targets[..., None], axis=-1)[..., 0]
    right = target >= logits.max(-1)  # the loss needs this maximum anyway
    return (jnp.where(is_valid, right, jnp.nan) * weights).sum(), weights.sum()


def copy_cross_entropy(
    logits: Float[Array, "B T V"],
    copy_logits: Float[Array, "B T"],
    inputs: Int[Array | np.ndarray, "B T"],
    targets: Int[Array | np.ndarray, "B T"],
    weights: Shaped[Array | np.ndarray, "B T"],
) -> CopyLossSums:
    """Return the loss, summed over targets, of a model that may copy its input.

    The probability of a token is g [token = input] + (1 - g) softmax(logits), where the gate g is the sigmoid
    of ``copy_logits`` (Clark et al. 2020, section 3.5). A target outside of [0, V) gives NaN where its weight
    is not 0.
    """
    weights = jnp.asarray(weights, jnp.float32)
    targets, inputs = jnp.where(weights == 0, 0, targets), jnp.where(weights == 0, 0, inputs)
    log_probs = jax.nn.log_softmax(logits.astype(jnp.float32), axis=-1)
    log_copy = jax.nn.log_sigmoid(copy_logits.astype(jnp.float32))
    log_predict = jax.nn.log_sigmoid(-copy_logits.astype(jnp.float32))

    def predicted(tokens: Array) -> Array:
        return log_predict + jnp.take_along_axis(log_probs, tokens[..., None], axis=-1)[..., 0]

    of_input = jnp.logaddexp(log_copy, predicted(inputs))
    of_target = jnp.where(inputs == targets, of_input, predicted(targets))
    of_target = jnp.where(in_range(targets, logits.shape[-1]), of_target, jnp.nan)
    likeliest = jnp.maximum(of_input, log_predict + log_probs.max(-1))
    right = jnp.where(jnp.isnan(of_target), jnp.nan, of_target >= likeliest)
    return CopyLossSums(-(of_target * weights).sum(), weights.sum(), (right * weights).sum())


def soft_cross_entropy(
    logits: Float[Array, "B T V"],
    teacher_logits: Float[Array, "B T V"],
    weights: Shaped[Array | np.ndarray, "B T"],
    *,
    temperature: float,
) -> tuple[Float32[Array, ""], Float32[Array, ""]]:
    """Return the sums of the loss of a student's predictions against a teacher's, and of the weights.

    ``logits`` and ``teacher_logits`` are [B,T,V], ``weights`` [B,T]. The loss is T^2 times the cross-entropy
    of softmax(logits / T) with softmax(teacher_logits / T), where T is the temperature. The factor keeps the
    size of gradients as T grows (Hinton et al. 2015, section 2). No gradient reaches the teacher.
    """
    weights = jnp.asarray(weights, jnp.float32)
    teacher_logits = jax.lax.stop_gradient(teacher_logits).astype(jnp.float32)
    probabilities = jax.nn.softmax(teacher_logits / temperature, axis=-1)
    log_probs = jax.nn.log_softmax(logits.astype(jnp.float32) / temperature, axis=-1)
    losses = -(probabilities * log_probs).sum(-1)
    return temperature**2 * (losses * weights).sum(), weights.sum()


def cosine_distance(
    x: Float[Array, "B T D"],
    teacher_x: Float[Array, "B T D"],
    weights: Shaped[Array | np.ndarray, "B T"],
) -> tuple[Float32[Array, ""], Float32[Array, ""]]:
    """Return the sums of 1 - cos(x, teacher_x) and of the weights, for vectors [B,T,D] and weights [B,T].

    The distance of a zero vector is 1, and its gradient 0. No gradient reaches the teacher.
    """
    weights = jnp.asarray(weights, jnp.float32)
    teacher_direction = _direction(jax.lax.stop_gradient(teacher_x))
    cosines = (_direction(x) * teacher_direction).sum(-1)
    return ((1 - cosines) * weights).sum(), weights.sum()


def _direction(x: Array) -> Array:
    """Return vectors [...,D] over their lengths, in float32; of a zero vector 0, with gradient 0."""
    x = x.astype(jnp.float32)
    squared_norm = jnp.square(x).sum(-1, keepdims=True)
    direction = x * jax.lax.rsqrt(jnp.maximum(squared_norm, MIN_SQUARED_NORM))
    # Without this the gradient at 0 would be the teacher's direction times MIN_SQUARED_NORM^-0.5, 1e8.
    return jnp.where(squared_norm == 0, 0.0, direction)


def in_range(targets: Int[Array, "*shape"], classes: int) -> Bool[Array, "*shape"]:
    """Return whether each target lies in [0, classes), bool.

    This has to be checked for negative ones too: indexing would count them from the end.
    """
    return (targets >= 0) & (targets < classes)


# Written with its gradient: differentiating the formula would save a second [B,T,V] array and
# scatter into a third.
@partial(jax.custom_vjp, nondiff_argnums=(2, 3))
def _token_loss(logits, targets, z_loss, label_smoothing):
    return _token_loss_forward(logits, targets, z_loss, label_smoothing)[0]


def _token_loss_forward(logits, targets, z_loss, label_smoothing):
    vocabulary = logits.shape[-1]
    log_z = jax.nn.logsumexp(logits.astype(jnp.float32), axis=-1)
    right, wrong = _smoothed(vocabulary, label_smoothing)
    target = jnp.take_along_axis(logits, targets[..., None], axis=-1)[..., 0].astype(jnp.float32)
    target = jnp.where(in_range(targets, vocabulary), target, jnp.nan)
    loss = log_z - (right - wrong) * target + z_loss * jnp.square(log_z)
    if label_smoothing:
        entropy = -right * log(right) - (vocabulary - 1) * wrong * log(wrong)
        loss -= wrong * logits.sum(-1, dtype=jnp.float32) + entropy
    return (loss, log_z), (logits, targets, log_z)


def _token_loss_backward(z_loss, label_smoothing, saved, gradients):
    logits, targets, log_z = saved
    # the log-partition function is only reported
    gradient = jnp.where(in_range(targets, logits.shape[-1]), gradients[0], jnp.nan)
    right, wrong = _smoothed(logits.shape[-1], label_smoothing)
    softmax = jnp.exp(logits.astype(jnp.float32) - log_z[..., None])
    slope = (gradient * (1 + 2 * z_loss * log_z))[..., None]
    is_target = jnp.arange(logits.shape[-1])[None, None, :] == targets[..., None]
    d_logits = slope * softmax - gradient[..., None] * jnp.where(is_target, right, wrong)
    return d_logits.astype(logits.dtype), None


_token_loss.defvjp(_token_loss_forward, _token_loss_backward)


def _smoothed(vocabulary, label_smoothing):
    """Return the probabilities that a smoothed target gives to the right token and to each wrong one."""
    return 1 - label_smoothing, label_smoothing / (vocabulary - 1)

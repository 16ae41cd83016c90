"""Dropout, with one draw of random bits for all masks of a model."""

from itertools import accumulate
from math import prod

import jax
import jax.numpy as jnp
from jax import Array
from jaxtyping import Bool, Float, Float32

from lm.sharding import constrain

DropoutMasks = dict[str, Array]  # name of what is dropped -> mask bool [B,...]; empty when evaluating
Shapes = dict[str, tuple[int, ...]]  # the same names -> shape of a row's mask


def draw_dropout_masks(key: Array, rate: float, rows: int, shapes: Shapes) -> DropoutMasks:
    """Return masks bool [rows,*shape], True (keep) with probability 1 - rate.

    All come from one draw: a random generator is the costliest thing to compile in a training step. No mask
    has the queries' length as an axis: all positions of a row drop the same features, as in T5.
    """
    sizes = [prod(shape) for shape in shapes.values()]
    bits = constrain(jax.random.bernoulli(key, 1 - rate, (rows, sum(sizes))), "batch", "dropped")
    masks = jnp.split(bits, list(accumulate(sizes))[:-1], axis=1)
    return {name: mask.reshape(rows, *shapes[name]) for name, mask in zip(shapes, masks, strict=True)}


def dropout(
    x: Float[Array, "*shape"], mask: Bool[Array, "..."] | None, rate: float
) -> Float[Array, "*shape"]:
    """Return x where ``mask``, else 0, scaled to the same mean; x itself without a mask."""
    return x if mask is None else x * dropout_factors(mask, rate).astype(x.dtype)


def dropout_factors(mask: Bool[Array, "*shape"], rate: float) -> Float32[Array, "*shape"]:
    """Return float32: 1 / (1 - rate) where ``mask``, else 0."""
    return mask / jnp.float32(1 - rate)


def split_key(key: Array | None, count: int) -> list[Array | None]:
    """Return ``count`` keys, or ``count`` times None: without a key nothing is dropped."""
    return [None] * count if key is None else list(jax.random.split(key, count))

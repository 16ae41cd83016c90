"""Dropout, with one draw of random bits for all masks of a model."""

from itertools import accumulate
from math import prod

import jax
import jax.numpy as jnp
from jax import Array

from lm.sharding import constrain

DropoutMasks = dict[str, Array]  # bool [B,...] by the place where it applies; empty when evaluating
Shapes = dict[str, tuple[int, ...]]


def draw_dropout_masks(key: Array, rate: float, rows: int, shapes: Shapes) -> DropoutMasks:
    """Return masks bool [B,*shape], True (kept) with probability 1 - rate.

    All come from one draw: a random generator is the costliest thing to compile in a training step. No mask
    has the queries' length as an axis: all positions of a row drop the same features, as in T5.
    """
    sizes = [prod(shape) for shape in shapes.values()]
    bits = constrain(jax.random.bernoulli(key, 1 - rate, (rows, sum(sizes))), "batch", "dropped")
    parts = jnp.split(bits, list(accumulate(sizes))[:-1], axis=1)
    return {name: part.reshape(rows, *shapes[name]) for name, part in zip(shapes, parts, strict=True)}


def dropout(x: Array, mask: Array | None, rate: float) -> Array:
    """Return x where ``mask``, else 0, scaled to the same mean; x itself without a mask."""
    return x if mask is None else x * dropout_factors(mask, rate).astype(x.dtype)


def dropout_factors(mask: Array, rate: float) -> Array:
    """Return float32: 1 / (1 - rate) where ``mask``, else 0."""
    return mask / jnp.float32(1 - rate)


def split_key(key: Array | None, count: int) -> list[Array | None]:
    """Return ``count`` keys, or as many times None: without a key nothing is dropped."""
    return [None] * count if key is None else list(jax.random.split(key, count))

"""Positions as attention sees them."""

import jax
import jax.numpy as jnp


def relative_position_bucket(
    relative_position: jax.Array, *, bidirectional: bool, num_buckets: int, max_distance: int
) -> jax.Array:
    """Bucket int32, same shape, of key position minus query position (Raffel et al. 2020, section 2.1).

    Half of the buckets hold one distance each, the others logarithmically growing ranges up to ``max_distance``.
    Bidirectional: the upper half of all buckets is for keys after the query. Otherwise those fall into bucket 0.
    """
    offset = jnp.zeros_like(relative_position)
    if bidirectional:
        num_buckets //= 2
        offset = jnp.where(relative_position > 0, num_buckets, 0)
        distance = jnp.abs(relative_position)
    else:
        distance = jnp.maximum(-relative_position, 0)
    starts = _logarithmic_starts(num_buckets, max_distance)
    exact = num_buckets - len(starts)
    beyond = sum((distance >= start).astype(jnp.int32) for start in starts)
    return offset + jnp.minimum(distance, exact - 1) + beyond


def _logarithmic_starts(num_buckets: int, max_distance: int) -> list[int]:
    """The least distance in each logarithmic bucket: exact + j is reached at exact * (max / exact) ** (j / many).

    In integers, so that no rounding of a logarithm decides on a bucket.
    """
    exact = num_buckets // 2
    many = num_buckets - exact
    starts, distance = [], exact
    for j in range(many):
        while distance**many < exact ** (many - j) * max_distance**j:
            distance += 1
        starts.append(distance)
    return starts

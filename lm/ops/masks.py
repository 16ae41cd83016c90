"""Who sees whom: bool [B|1,T,S], True where query t sees key s; combine with ``&`` and ``|``.

A distance is int32 [B|1,T,S], the key's position minus the query's. Positions within a segment do as well as places in
a row: other segments are hidden by ``same_segment``.
"""

import jax
import jax.numpy as jnp
import numpy as np


def distances(length: int, key_length: int) -> jax.Array:
    """int32 [1,T,S]: the key's place minus the query's, of rows that both begin at 0."""
    return (jnp.arange(key_length)[None, :] - jnp.arange(length)[:, None])[None]


def fully_visible(length: int, key_length: int) -> jax.Array:
    """[1,T,S]: every query sees every key."""
    return jnp.ones((1, length, key_length), bool)


def causal(distance: jax.Array) -> jax.Array:
    """[B|1,T,S]: a query sees itself and everything before it."""
    return distance <= 0


def sliding_window(distance: jax.Array, *, behind: int, ahead: int) -> jax.Array:
    """[B|1,T,S]: a query sees itself, ``behind`` positions before it and ``ahead`` after it."""
    return (distance >= -behind) & (distance <= ahead)


def dilated(distance: jax.Array, *, window: int, dilation: int) -> jax.Array:
    """[B|1,T,S]: itself and, to each side, ``window`` positions that are ``dilation`` apart (Beltagy et al. 2020)."""
    near = sliding_window(distance, behind=window * dilation, ahead=window * dilation)
    return near & (distance % dilation == 0)


def prefix(member: jax.Array) -> jax.Array:
    """[B,T,T] from ``member`` [B,T], non-zero in the prefix: the positions of the prefix see one another."""
    member = member > 0
    return member[:, :, None] & member[:, None, :]


def same_segment(query_segments: jax.Array, key_segments: jax.Array) -> jax.Array:
    """[B,T,S] from segment ids [B,T] and [B,S]: equal segments see one another; segment 0, padding, nobody."""
    return (query_segments[:, :, None] == key_segments[:, None, :]) & (key_segments > 0)[:, None, :]


def global_tokens(member: jax.Array, key_member: jax.Array) -> jax.Array:
    """[B,T,S] from [B,T] and [B,S], non-zero where a position is global: it sees all and is seen by all."""
    return (member > 0)[:, :, None] | (key_member > 0)[:, None, :]


def random_blocks(
    query_position: jax.Array, key_position: jax.Array, *, block: int, count: int, blocks: int, seed: int
) -> jax.Array:
    """[B|1,T,S] from positions [B|1,T] and [B|1,S]: each block of queries sees ``count`` of ``blocks`` blocks of keys.

    They are drawn without replacement and always the same for one seed (Zaheer et al. 2020).
    """
    seen, generator = np.zeros((blocks, blocks), bool), np.random.default_rng(seed)
    for row in seen:
        row[generator.permutation(blocks)[:count]] = True
    return jnp.asarray(seen)[(query_position // block)[:, :, None], (key_position // block)[:, None, :]]


def sparse(
    query_position: jax.Array,
    key_position: jax.Array,
    *,
    window: int | None,
    dilation: int,
    global_tokens: int,
    block: int,
    random_blocks: int,
    length: int,
) -> jax.Array:
    """[B|1,T,S] from positions [B|1,T] and [B|1,S]: a window, the first tokens and random ones, counted in blocks.

    Longformer: blocks of one position. BigBird: of 64, so that a block of queries sees whole blocks of keys. ``length``
    is that of the longest row. A ``window`` of None sees everything.
    """
    query, key = query_position // block, key_position // block
    distance = key[:, None, :] - query[:, :, None]
    if window is None:
        return jnp.ones_like(distance, bool)
    seen = dilated(distance, window=window, dilation=dilation)
    seen |= _GLOBAL(query < global_tokens, key < global_tokens)
    if random_blocks:
        seen |= _RANDOM(query, key, block=1, count=random_blocks, blocks=-(-length // block), seed=0)
    return seen


_GLOBAL, _RANDOM = global_tokens, random_blocks  # in ``sparse`` these names are settings

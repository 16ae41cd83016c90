"""Who sees whom: bool [B|1,T,S], True where query t sees key s; combine with ``&`` and ``|``."""

import jax
import jax.numpy as jnp


def fully_visible(length: int, key_length: int) -> jax.Array:
    """[1,T,S]: every query sees every key."""
    return jnp.ones((1, length, key_length), bool)


def causal(length: int) -> jax.Array:
    """[1,T,T]: a query sees itself and everything before it."""
    position = jnp.arange(length)
    return (position[:, None] >= position[None, :])[None]


def prefix(member: jax.Array) -> jax.Array:
    """[B,T,T] from ``member`` [B,T], non-zero in the prefix: the positions of the prefix see one another."""
    member = member > 0
    return member[:, :, None] & member[:, None, :]


def same_segment(query_segments: jax.Array, key_segments: jax.Array) -> jax.Array:
    """[B,T,S] from segment ids [B,T] and [B,S]: equal segments see one another; segment 0, padding, nobody."""
    return (query_segments[:, :, None] == key_segments[:, None, :]) & (key_segments > 0)[:, None, :]

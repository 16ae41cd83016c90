"""Chooses the next token from its logits."""

import jax
import jax.numpy as jnp
from jax import Array

from lm.config.decoding import Decoding


def next_token(decoding: Decoding, logits: Array, key: Array | None) -> Array:
    """Return the likeliest token of logits [B,V], or with a temperature a sampled one: int32 [B].

    Sampling needs a ``key``.
    """
    if not decoding.temperature:
        return logits.argmax(-1).astype(jnp.int32)
    assert key is not None, "sampling needs a key"
    return jax.random.categorical(key, warp(decoding, logits)).astype(jnp.int32)


def warp(decoding: Decoding, logits: Array) -> Array:
    """Divide logits [B,V] by the temperature, and mask those of tokens that are not to be sampled with -inf.

    ``top_k`` tokens stay (0: all), and of these as many of the likeliest as it takes to reach the share
    ``top_p`` of their probability, the one that crosses it included (nucleus sampling: Holtzman et al. 2020).
    Tokens as likely as the last one stay too.
    """
    logits = logits / decoding.temperature
    if decoding.top_k or decoding.top_p < 1:
        size = logits.shape[-1]
        ranked = jax.lax.top_k(logits, min(decoding.top_k or size, size))[0]
        if decoding.top_p < 1:
            probabilities = jax.nn.softmax(ranked)
            before = jnp.cumsum(probabilities, axis=-1) - probabilities
            ranked = jnp.where(before < decoding.top_p, ranked, jnp.inf)
        logits = jnp.where(logits < ranked.min(-1, keepdims=True), -jnp.inf, logits)
    return logits

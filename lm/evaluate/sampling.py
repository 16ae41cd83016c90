"""Chooses the next token from its logits."""

import jax
import jax.numpy as jnp
from jax import Array

from lm.config.decoding import Decoding


def next_token(decoding: Decoding, logits: Array, key: Array | None) -> Array:
    """Return the likeliest token from logits [B,V], or a sampled one if there is a temperature: int32 [B].

    Sampling needs a ``key``.
    """
    if not decoding.temperature:
        return logits.argmax(-1).astype(jnp.int32)
    assert key is not None, "sampling needs a key"
    return jax.random.categorical(key, warp_logits(decoding, logits)).astype(jnp.int32)


def warp_logits(decoding: Decoding, logits: Array) -> Array:
    """Divide logits [B,V] by the temperature, and set those of tokens that are not to be sampled to -inf.

    The ``top_k`` likeliest tokens are kept (0: all), and of these the likeliest ones until their summed
    probability reaches ``top_p`` (nucleus sampling: Holtzman et al. 2020). Tokens as likely as the last one
    are kept too.
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

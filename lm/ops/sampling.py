"""From the logits of the next token to the token."""

import jax
import jax.numpy as jnp


def greedy(logits: jax.Array, key: jax.Array | None) -> jax.Array:
    """int32 [B], the likeliest token of logits [B,V]; draws nothing from ``key``."""
    return logits.argmax(-1).astype(jnp.int32)

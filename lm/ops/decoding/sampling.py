"""From the logits of the next token to the token."""

from dataclasses import dataclass

import jax
import jax.numpy as jnp

from lm.settings import SettingError


def greedy(logits: jax.Array, key: jax.Array | None) -> jax.Array:
    """int32 [B], the likeliest token of logits [B,V]; draws nothing from ``key``."""
    return logits.argmax(-1).astype(jnp.int32)


def warp(logits: jax.Array, *, temperature: float, top_k: int, top_p: float) -> jax.Array:
    """[B,V]: logits [B,V] over ``temperature``, minus infinity where a token is not to be drawn.

    ``top_k`` tokens stay (0: all), and of these as many of the likeliest as it takes to reach the share
    ``top_p`` of their probability, the one that crosses it included (Holtzman et al. 2020). Equals of the
    last one stay too.
    """
    logits = logits / temperature
    if top_k or top_p < 1:
        ranked = jax.lax.top_k(logits, min(top_k or logits.shape[-1], logits.shape[-1]))[0]
        if top_p < 1:
            probabilities = jax.nn.softmax(ranked)
            before = jnp.cumsum(probabilities, axis=-1) - probabilities
            ranked = jnp.where(before < top_p, ranked, jnp.inf)
        logits = jnp.where(logits < ranked.min(-1, keepdims=True), -jnp.inf, logits)
    return logits


@dataclass(frozen=True)
class Sampling:
    """How tokens are drawn; a value to call as ``choose(logits, key)``."""

    temperature: float = 1.0  # logits are divided by it; 0 takes the likeliest token
    top_k: int = 0  # likeliest tokens to draw from; 0: all [tokens]
    top_p: float = 1.0  # share of the probability to draw from, that of the likeliest tokens

    def __post_init__(self):
        if not self.temperature >= 0:
            raise SettingError(f"temperature={self.temperature} should be 0 or more, such as 0.8")
        if self.top_k < 0:
            raise SettingError(f"top_k={self.top_k} should be 0 or more; 0 keeps all tokens")
        if not 0 < self.top_p <= 1:
            raise SettingError(f"top_p={self.top_p} should be above 0 and at most 1, which keeps all tokens")

    def __call__(self, logits: jax.Array, key: jax.Array | None) -> jax.Array:
        """int32 [B], a token for each row of logits [B,V]."""
        if not self.temperature:
            return greedy(logits, key)
        warped = warp(logits, temperature=self.temperature, top_k=self.top_k, top_p=self.top_p)
        return jax.random.categorical(key, warped).astype(jnp.int32)

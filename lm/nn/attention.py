"""Attention with its projections, and what all attention layers of a stack share."""

from collections.abc import Callable
from dataclasses import asdict
from typing import NamedTuple

import jax
import jax.numpy as jnp
from flax import nnx

from lm.nn.cache import KeyValue
from lm.nn.config import ModelConfig
from lm.nn.layers import Linear, RelativeBias, normal, param, scaled
from lm.ops.attention import SCALES, attention_weights, bilinear, dot_product_attention
from lm.ops.positions import rotary_frequencies, rotate
from lm.sharding import constrain


class View(NamedTuple):
    """What all blocks of a stack see alike, made once. The default sees everything and tells no position apart."""

    mask: jax.Array | None = None  # bool [B|1,T,S]; None: everything is visible
    bias: jax.Array | None = None  # float32 [B|1,N,T,S]
    positions: jax.Array | None = None  # int32 [B|1,T] of queries and keys
    layer_bias: Callable[[RelativeBias], jax.Array] | None = None  # the bias of a block that has a table of its own
    everywhere: jax.Array | None = None  # bool [B,T]: global positions, with projections of their own
    everything: jax.Array | None = None  # bool [B|1,T,S]: what they see
    encoded: jax.Array | None = None  # the encoder's output [B,S,D], for cross-attention
    cross_mask: jax.Array | None = None  # bool [B,T,S] of cross-attention
    slot: jax.Array | None = None  # int32 [B]: the first slot of the cache to write; None: nothing is cached


class Projections(nnx.Module):
    """Queries, keys and values of multi-head, grouped-query and multi-query attention."""

    def __init__(self, config: ModelConfig, rngs: nnx.Rngs):
        self.config = config
        d_model, heads, groups = config.d_model, config.num_heads * config.d_kv, config.key_value_heads * config.d_kv
        # T5 does not scale the scores by H^-0.5 but the initial queries.
        std = (d_model * config.d_kv) ** -0.5 if config.scores == "dot" else d_model**-0.5
        self.query = Linear(config, rngs, (d_model, heads), ("embed", "heads"), std)
        self.key = Linear(config, rngs, (d_model, groups), ("embed", self._key_axis), d_model**-0.5)
        self.value = Linear(config, rngs, (d_model, groups), ("embed", self._key_axis), d_model**-0.5)

    def queries(self, x: jax.Array, positions: jax.Array | None) -> jax.Array:
        """[B,T,N,H] of x [B,T,D]."""
        return self._turn(self._heads(self.query(x), "heads"), positions)

    def key_value(self, x: jax.Array, positions: jax.Array | None) -> KeyValue:
        """Keys and values [B,S,K,H] of x [B,S,D]; without positions they are not told apart, as in cross-attention."""
        key, value = (self._heads(layer(x), self._key_axis) for layer in (self.key, self.value))
        return KeyValue(self._turn(key, positions), value)

    @property
    def _key_axis(self) -> str:
        # Few heads of keys may not divide over as many devices as there are for heads of queries.
        return "heads" if self.config.num_key_value_heads is None else "kv_heads"

    def _heads(self, x: jax.Array, axis: str) -> jax.Array:
        x = constrain(x, "batch", "length", axis)
        return x.reshape(*x.shape[:-1], -1, self.config.d_kv)

    def _turn(self, x: jax.Array, positions: jax.Array | None) -> jax.Array:
        if self.config.positions != "rotary" or positions is None:
            return x
        settings = asdict(self.config.rotary)
        del settings["fraction"]
        frequencies, factor = rotary_frequencies(self.config.rotary_width, **settings)
        return rotate(x, positions, frequencies, factor)


class Attention(Projections):
    """Multi-head attention of a sequence to itself, or of a decoder to the encoder's output."""

    def __init__(self, config: ModelConfig, rngs: nnx.Rngs, crosses: bool):
        super().__init__(config, rngs)
        heads, width = config.num_heads, config.d_kv
        self.out = Linear(config, rngs, (heads * width, config.d_model), ("heads", "embed"), (heads * width) ** -0.5)
        weight = normal(rngs, (heads, width, width), width**-0.5) if config.scores == "bilinear" else None
        self.bilinear = None if weight is None else param(weight, "bias_heads", "kv", "kv")
        separate = config.sparsity.projections == "separate" and not crosses
        self.globals = Projections(config, rngs) if separate else None

    def __call__(self, x: jax.Array, seen: KeyValue, view: View, keep: jax.Array | None) -> jax.Array:
        """[B,T,D] from x [B,T,D] and the keys and values that it sees."""
        query = self._query(self, x, view)
        keep = None if keep is None else scaled(keep, self.config.dropout)
        out = dot_product_attention(query, seen.key, seen.value, view.mask, view.bias, scale=self._scale, keep=keep)
        if self._apart(view):
            query, seen = self._query(self.globals, x, view), self.globals.key_value(x, view.positions)
            found = dot_product_attention(
                query, seen.key, seen.value, view.everything, view.bias, scale=self._scale, keep=keep
            )
            out = jnp.where(view.everywhere[:, :, None, None], found, out)
        return self.out(out.reshape(*x.shape[:-1], -1))

    def weights(self, x: jax.Array, seen: KeyValue, view: View) -> jax.Array:
        """float32 [B,N,T,S]: how much each head of x [B,T,D] takes from what it sees."""
        local = attention_weights(self._query(self, x, view), seen.key, view.mask, view.bias, scale=self._scale)
        if not self._apart(view):
            return local
        query, seen = self._query(self.globals, x, view), self.globals.key_value(x, view.positions)
        found = attention_weights(query, seen.key, view.everything, view.bias, scale=self._scale)
        return jnp.where(view.everywhere[:, None, :, None], found, local)

    def _apart(self, view: View) -> bool:
        """Whether there are global positions with projections of their own."""
        return self.globals is not None and view.everywhere is not None

    @property
    def _scale(self) -> float:
        return SCALES[self.config.scores](self.config.d_kv)

    def _query(self, projections: Projections, x: jax.Array, view: View) -> jax.Array:
        query = projections.queries(x, view.positions)
        return query if self.bilinear is None else bilinear(query, self.bilinear[...].astype(x.dtype))

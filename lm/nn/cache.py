"""The cache of decoding: a pytree in and a pytree out.

In attention, index s of the cache holds position s of its row. A row's prompt fills the first indices; the
tokens after it overwrite its padding, so that rows of different lengths need no shifting and a query attends
to exactly the positions up to its own.
"""

from dataclasses import dataclass, field, replace
from functools import partial
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax import Array
from jaxtyping import Int, Int32

from lm.ops.masks import AnyMask


class KeyValue(NamedTuple):
    """Keys [B,S,K,H] and values [B,S,K,Hv] of a layer; of a stack [layers,B,S,K,H]."""

    key: Array
    value: Array


class LayerCache(NamedTuple):
    """Keys and values [B,K,S,H] of a layer, stored for decoding: those of one head are contiguous.

    Attention multiplies them head by head, for which [B,S,K,H] would be transposed at every token.
    """

    key: Array
    value: Array

    @classmethod
    def from_key_value(cls, kv: KeyValue) -> "LayerCache":
        """Return the cache of keys and values [...,S,K,H]."""
        return cls(kv.key.swapaxes(-3, -2), kv.value.swapaxes(-3, -2))

    def key_value(self) -> KeyValue:
        """Return keys and values [...,S,K,H], as attention takes them; the compiler copies nothing."""
        return KeyValue(self.key.swapaxes(-3, -2), self.value.swapaxes(-3, -2))

    def write(self, kv: KeyValue, index: Int32[Array, " B"]) -> "LayerCache":
        """Return the cache with ``kv`` [B,T,K,H] written from ``index`` int32 [B] on.

        A row whose tokens do not fit there gets NaN in place of them: XLA would move them back, over the keys
        and values of other tokens.
        """
        new = LayerCache.from_key_value(kv)
        fits = index + new.key.shape[2] <= self.key.shape[2]

        def update(old: Array, new: Array) -> Array:
            new = jnp.where(fits[:, None, None, None], new, jnp.nan)
            return jax.vmap(partial(jax.lax.dynamic_update_slice_in_dim, axis=1))(old, new, index)

        return LayerCache(update(self.key, new.key), update(self.value, new.value))


Carry = Any  # a mixer's memory between tokens, a KV cache or a recurrent state: a pytree, leaves [B,...]


@jax.tree_util.register_dataclass
@dataclass(frozen=True)
class Cache:
    """The state of decoding between two calls of ``Transformer.step``."""

    # The carries of all layers, leaves [layers,B,...]; unstacked: a tuple by layer, leaves [B,...].
    carry: Carry
    length: Array  # int32 [B]: number of tokens in the cache, which is the position of the next token
    # Keys and values of the encoder's output, a ``LayerCache`` [layers,B,K,S,H] that a row's beams share;
    # unstacked: a tuple by layer; None without cross-attention.
    encoder_kv: Any
    cross_mask: AnyMask  # bool [B,1,1,S]: False for the padding of the encoder's output
    max_length: int = field(metadata={"static": True})  # longest row that fits, its prompt included [tokens]
    # int32 [B|1,1]: added to the decoder's positions where they go on after the encoder's
    position_offset: Array | None = None

    @property
    def encoded_length(self) -> int:
        """Return the number of positions S of the encoder's output, which ``encoder_kv`` holds."""
        return jax.tree.leaves(self.encoder_kv)[0].shape[-2]

    def repeat_beams(self, beams: int) -> "Cache":
        """Return a stacked cache with each row ``beams`` times; its beams share the encoder's output."""
        carry = jax.tree.map(lambda x: jnp.repeat(x, beams, axis=1), self.carry)
        offset = self.position_offset
        if offset is not None and len(offset) > 1:
            offset = jnp.repeat(offset, beams, axis=0)
        return replace(self, carry=carry, length=jnp.repeat(self.length, beams), position_offset=offset)

    def reorder(self, rows: Int[Array | np.ndarray, " B"]) -> "Cache":
        """Return an unstacked cache whose row i continues row ``rows[i]``, a beam of the same row.

        Beams of a row share their length and the encoder's output.
        """
        return replace(self, carry=jax.tree.map(lambda x: jnp.take(x, rows, axis=0), self.carry))

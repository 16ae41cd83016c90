"""The cache of decoding: a pytree in and a pytree out.

In attention, index s of the cache holds position s of its row. A row's prompt fills the first indices; the
tokens after it overwrite its padding, so that rows of different lengths need no shifting and a query attends
to exactly the positions up to its own.
"""

from dataclasses import dataclass, field, replace
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax import Array

from lm.ops.masks import AnyMask


class KeyValue(NamedTuple):
    """Keys and values [B,S,K,H] of a layer, each of a width of its own; of a stack [layers,B,S,K,H]."""

    key: Array
    value: Array


class LayerCache(NamedTuple):
    """Keys and values [B,K,S,H] of a layer, laid out for decoding: those of one head lie together.

    Attention multiplies them head by head, for which [B,S,K,H] would be transposed at every token.
    """

    key: Array
    value: Array

    @classmethod
    def from_key_value(cls, kv: KeyValue) -> "LayerCache":
        """Return the cache of keys and values [...,S,K,H]."""
        return cls(kv.key.swapaxes(-3, -2), kv.value.swapaxes(-3, -2))

    def key_value(self) -> KeyValue:
        """Return what attention reads, [...,S,K,H]; the compiler moves nothing."""
        return KeyValue(self.key.swapaxes(-3, -2), self.value.swapaxes(-3, -2))

    def write(self, kv: KeyValue, index: Array) -> "LayerCache":
        """Return the cache with ``kv`` [B,T,K,H] written from ``index`` int32 [B] on."""
        update = jax.vmap(
            lambda old, new, start: jax.lax.dynamic_update_slice_in_dim(old, new, start, axis=1)
        )
        new = LayerCache.from_key_value(kv)
        return LayerCache(update(self.key, new.key, index), update(self.value, new.value, index))


Carry = Any  # what a mixer remembers from token to token: a pytree with leaves [B,...]


@jax.tree_util.register_dataclass
@dataclass(frozen=True)
class Cache:
    """The state of decoding between two calls of ``Transformer.step``."""

    # Of the mixers of all layers, leaves [layers,B,...]; unstacked: a tuple by layer, leaves [B,...].
    carry: Carry
    length: Array  # int32 [B]: positions held, which is the position of the next token
    # Keys and values of the encoder's output, a ``LayerCache`` [layers,B,K,S,H] that a row's beams share;
    # unstacked: a tuple by layer; None without cross-attention.
    encoder_kv: Any
    cross_mask: AnyMask  # bool [B,1,1,S]: the positions of the encoder's output that are no padding
    max_length: int = field(metadata={"static": True})  # longest row that fits, its prompt included [tokens]

    def repeat_beams(self, beams: int) -> "Cache":
        """Return a stacked cache with each row ``beams`` times; its beams share the encoder's output."""
        carry = jax.tree.map(lambda x: jnp.repeat(x, beams, axis=1), self.carry)
        return replace(self, carry=carry, length=jnp.repeat(self.length, beams))

    def reorder(self, rows: Array) -> "Cache":
        """Return an unstacked cache whose row i carries on from row ``rows[i]``, a beam of the same row.

        Beams of a row share their length and the encoder's output.
        """
        return replace(self, carry=jax.tree.map(lambda x: jnp.take(x, rows, axis=0), self.carry))

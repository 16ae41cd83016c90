"""What decoding remembers: keys and values, a pytree in and a pytree out.

Slot s holds position s of its row. A row's prompt fills the first slots; what follows it overwrites the slots
of its padding, so that rows of different lengths need no shifting and a query sees exactly the slots up to
its own.
"""

from typing import NamedTuple

import jax
import jax.numpy as jnp


class KeyValue(NamedTuple):
    """Keys and values [B,S,K,H] of a layer; with a leading axis, of a stack."""

    key: jax.Array
    value: jax.Array

    def write(self, new: "KeyValue", position: jax.Array) -> "KeyValue":
        """Self with ``new`` [B,T,K,H] in the slots from ``position`` [B] on."""
        put = jax.vmap(lambda old, new, start: jax.lax.dynamic_update_slice_in_dim(old, new, start, axis=0))
        return KeyValue(put(self.key, new.key, position), put(self.value, new.value, position))


class Cache(NamedTuple):
    """The state of decoding between two calls of ``Transformer.step``."""

    self_attention: KeyValue  # [layers,B,S,K,H]
    length: jax.Array  # int32 [B]: positions held, which is the position of the next token
    cross_attention: KeyValue | None  # of the encoder's output, [layers,B,S,K,H]
    cross_mask: jax.Array | None  # bool [B,1,S]: the slots of the encoder's output that are no padding


def empty(layers: int, batch: int, size: int, heads: int, width: int, dtype: str) -> KeyValue:
    shape = (layers, batch, size, heads, width)
    return KeyValue(jnp.zeros(shape, dtype), jnp.zeros(shape, dtype))

"""The cache of decoding: a pytree in and a pytree out.

In attention, slot s holds position s of its row. A row's prompt fills the first slots; the tokens after it
overwrite its padding, so that rows of different lengths need no shifting and a query sees exactly the slots
up to its own.
"""

from dataclasses import dataclass, field, replace
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax import Array

from lm.ops.masks import AnyMask


class KeyValue(NamedTuple):
    """Keys and values [B,S,K,H] of a layer, each of a width of its own; with a leading axis, of a stack."""

    key: Array
    value: Array

    def write(self, new: "KeyValue", position: Array) -> "KeyValue":
        """Self with ``new`` [B,T,K,H] in the slots from ``position`` [B] on."""
        put = jax.vmap(lambda old, new, start: jax.lax.dynamic_update_slice_in_dim(old, new, start, axis=0))
        return KeyValue(put(self.key, new.key, position), put(self.value, new.value, position))


Carry = Any  # what a mixer remembers from token to token: a pytree with leaves [B,...]


@jax.tree_util.register_dataclass
@dataclass(frozen=True)
class Cache:
    """The state of decoding between two calls of ``Transformer.step``."""

    carry: Carry  # of the mixers of all layers, leaves [layers,B,...]
    length: Array  # int32 [B]: positions held, which is the position of the next token
    crossed: KeyValue | None  # of the encoder's output, [layers,B,S,K,H]
    cross_mask: AnyMask  # bool [B,1,S]: the slots of the encoder's output that are no padding
    slots: int = field(metadata={"static": True})  # longest row that fits, with its prompt [tokens]

    def repeated(self, beams: int) -> "Cache":
        """The cache with each row ``beams`` times."""
        layers = jax.tree.map(lambda x: jnp.repeat(x, beams, axis=1), (self.carry, self.crossed))
        length, mask = jax.tree.map(lambda x: jnp.repeat(x, beams, axis=0), (self.length, self.cross_mask))
        return Cache(layers[0], length, layers[1], mask, self.slots)

    def reordered(self, rows: Array) -> "Cache":
        """The carry of ``rows``, one for each; a row's beams share lengths and the encoder's output."""
        return replace(self, carry=jax.tree.map(lambda x: jnp.take(x, rows, axis=1), self.carry))

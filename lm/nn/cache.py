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


class Slots(NamedTuple):
    """Keys and values [B,K,S,H] of a layer as decoding holds them: a head's lie together.

    Attention multiplies them head by head, for which every token of the other layout would be moved again.
    """

    key: Array
    value: Array

    @classmethod
    def of(cls, seen: KeyValue) -> "Slots":
        return cls(*(x.swapaxes(-3, -2) for x in seen))

    def seen(self) -> KeyValue:
        """What attention reads; the compiler moves nothing."""
        return KeyValue(*(x.swapaxes(-3, -2) for x in self))

    def write(self, new: KeyValue, position: Array) -> "Slots":
        """Self with ``new`` [B,T,K,H] in the slots from ``position`` [B] on."""
        put = jax.vmap(lambda old, new, start: jax.lax.dynamic_update_slice_in_dim(old, new, start, axis=1))
        return Slots(*(put(old, x, position) for old, x in zip(self, Slots.of(new), strict=True)))


Carry = Any  # what a mixer remembers from token to token: a pytree with leaves [B,...]


@jax.tree_util.register_dataclass
@dataclass(frozen=True)
class Cache:
    """The state of decoding between two calls of ``Transformer.step``."""

    carry: Carry  # of the mixers of all layers, leaves [layers,B,...]; unstacked: a tuple by layer, [B,...]
    length: Array  # int32 [B]: positions held, which is the position of the next token
    # ``Slots`` of the encoder's output, [layers,B,K,S,H], one for a row's beams; unstacked: a tuple; or None
    crossed: Any
    cross_mask: AnyMask  # bool [B,1,S]: the slots of the encoder's output that are no padding
    slots: int = field(metadata={"static": True})  # longest row that fits, with its prompt [tokens]

    def repeated(self, beams: int) -> "Cache":
        """The cache with each row ``beams`` times, which share the encoder's output; of a stacked one."""
        carry = jax.tree.map(lambda x: jnp.repeat(x, beams, axis=1), self.carry)
        return replace(self, carry=carry, length=jnp.repeat(self.length, beams))

    def reordered(self, rows: Array) -> "Cache":
        """The carry of ``rows``, one for each; a row's beams share lengths and the encoder's output.

        Of an unstacked cache.
        """
        return replace(self, carry=jax.tree.map(lambda x: jnp.take(x, rows, axis=0), self.carry))

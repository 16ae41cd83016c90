"""Who sees whom: bool [B|1,T,S], True where query t sees key s; combine with ``&`` and ``|``.

A distance is int32 [B|1,T,S], the key's position minus the query's. Positions within a segment do as well as
places in a row: other segments are hidden by ``same_segment``. A ``Mask`` is one that is not laid out.
"""

from collections.abc import Container
from dataclasses import dataclass, field
from functools import reduce
from operator import and_
from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np


def distances(length: int, key_length: int) -> jax.Array:
    """int32 [1,T,S]: the key's place minus the query's, of rows that both begin at 0."""
    return (jnp.arange(key_length)[None, :] - jnp.arange(length)[:, None])[None]


def fully_visible(length: int, key_length: int) -> jax.Array:
    """[1,T,S]: every query sees every key."""
    return jnp.ones((1, length, key_length), bool)


def causal(distance: jax.Array) -> jax.Array:
    """[B|1,T,S]: a query sees itself and everything before it."""
    return distance <= 0


def sliding_window(distance: jax.Array, *, behind: int, ahead: int) -> jax.Array:
    """[B|1,T,S]: a query sees itself, ``behind`` positions before it and ``ahead`` after it."""
    return (distance >= -behind) & (distance <= ahead)


def dilated(distance: jax.Array, *, window: int, dilation: int) -> jax.Array:
    """[B|1,T,S]: itself and, to each side, ``window`` positions that are ``dilation`` apart (Beltagy et al.
    2020).
    """
    near = sliding_window(distance, behind=window * dilation, ahead=window * dilation)
    return near & (distance % dilation == 0)


def prefix(member: jax.Array) -> jax.Array:
    """[B,T,T] from ``member`` [B,T], non-zero in the prefix: the positions of the prefix see one another."""
    member = member > 0
    return member[:, :, None] & member[:, None, :]


def same_segment(query_segments: jax.Array, key_segments: jax.Array) -> jax.Array:
    """[B,T,S] from segment ids [B,T] and [B,S]: equal segments see one another; segment 0, padding,
    nobody.
    """
    return (query_segments[:, :, None] == key_segments[:, None, :]) & (key_segments > 0)[:, None, :]


def global_tokens(member: jax.Array, key_member: jax.Array) -> jax.Array:
    """[B,T,S] from [B,T] and [B,S], non-zero where a position is global: it sees all and is seen by all."""
    return (member > 0)[:, :, None] | (key_member > 0)[:, None, :]


def random_blocks(
    query_position: jax.Array, key_position: jax.Array, *, block: int, count: int, blocks: int, seed: int
) -> jax.Array:
    """[B|1,T,S] from positions [B|1,T] and [B|1,S]: each block of queries sees ``count`` of ``blocks`` blocks
    of keys.

    They are drawn without replacement and always the same for one seed (Zaheer et al. 2020).
    """
    seen, generator = np.zeros((blocks, blocks), bool), np.random.default_rng(seed)
    for row in seen:
        row[generator.permutation(blocks)[:count]] = True
    return jnp.asarray(seen)[(query_position // block)[:, :, None], (key_position // block)[:, None, :]]


def sparse(
    query_position: jax.Array,
    key_position: jax.Array,
    *,
    window: int | None,
    dilation: int,
    global_tokens: int,
    block: int,
    random_blocks: int,
    length: int,
) -> jax.Array:
    """[B|1,T,S] from positions [B|1,T] and [B|1,S]: a window, the first tokens and random ones, counted in
    blocks.

    Longformer: blocks of one position. BigBird: of 64, so that a block of queries sees whole blocks of keys.
    ``length`` is that of the longest row. A ``window`` of None sees everything.
    """
    query, key = query_position // block, key_position // block
    distance = key[:, None, :] - query[:, :, None]
    if window is None:
        return jnp.ones_like(distance, bool)
    seen = dilated(distance, window=window, dilation=dilation)
    seen |= _GLOBAL(query < global_tokens, key < global_tokens)
    if random_blocks:
        seen |= _RANDOM(query, key, block=1, count=random_blocks, blocks=-(-length // block), seed=0)
    return seen


_GLOBAL, _RANDOM = global_tokens, random_blocks  # in ``sparse`` these names are settings


Numbers = dict[str, jax.Array]  # what is known of positions, by name: int32


class Rule(NamedTuple):
    """Who sees whom, by places in a row and by what is known of a query and a key: all of these rules that
    apply.

    Numbers: "segment", the same for both, and -1 of padded keys; "position", by which a window goes instead
    of by places; "prefix" and "everywhere", 1 or 0.
    """

    causal: bool = False  # a query sees itself, what is before it and, in the prefix, all of the prefix
    # how far behind and ahead, and in which steps; "everywhere": all
    window: tuple[int, int, int] | None = None

    def seen(self, distance: jax.Array, query: Numbers, key: Numbers) -> jax.Array:
        """bool of distances in places and of numbers, all of shapes that broadcast."""
        found = []
        if self.causal:
            before = causal(distance)
            found.append(before | (query["prefix"] * key["prefix"] > 0) if "prefix" in key else before)
        if self.window is not None:
            behind, ahead, step = self.window
            away = key["position"] - query["position"] if "position" in key else distance
            near = sliding_window(away, behind=behind, ahead=ahead)
            near = near & (jax.lax.rem(jnp.abs(away), jnp.int32(step)) == 0) if step > 1 else near
            found.append(
                near | (query["everywhere"] + key["everywhere"] > 0) if "everywhere" in key else near
            )
        if "segment" in key:
            found.append(query["segment"] == key["segment"])
        return reduce(and_, found)

    def reach(self, names: Container[str]) -> tuple[int | None, int | None]:
        """How many places behind and ahead of a query the keys are that it may see; None: anywhere."""
        by_place = self.window is not None and "position" not in names and "everywhere" not in names
        behind, ahead = self.window[:2] if by_place else (None, None)
        return behind, 0 if self.causal and "prefix" not in names else ahead

    def meets(self, query: Numbers, key: Numbers) -> jax.Array:
        """bool scalar: False where, by their least and greatest numbers, none of the queries sees any of the
        keys.
        """
        found = jnp.bool_(True)
        if "segment" in key:
            found &= _overlap(query["segment"], key["segment"], 0, 0)
        if self.window is not None and "position" in key and "everywhere" not in key:
            found &= _overlap(query["position"], key["position"], *self.window[:2])
        return found


def _overlap(query, key, behind, ahead):
    return (key.max() >= query.min() - behind) & (key.min() <= query.max() + ahead)


@jax.tree_util.register_dataclass
@dataclass(frozen=True)
class Mask:
    """A mask that is not laid out: a rule and the numbers [B|1,T] of queries and [B|1,S] of keys that it goes
    by.
    """

    query: Numbers
    key: Numbers
    rule: Rule = field(metadata={"static": True})

    def dense(self, length: int, key_length: int) -> jax.Array:
        """bool [B|1,T,S]."""
        query = {name: x[:, :, None] for name, x in self.query.items()}
        key = {name: x[:, None, :] for name, x in self.key.items()}
        return self.rule.seen(distances(length, key_length), query, key)


def segments(key: jax.Array) -> Numbers:
    """The numbers of keys of segment ids [B,S], 0 for padding, which nobody sees."""
    return {"segment": jnp.where(key > 0, key, -1)}

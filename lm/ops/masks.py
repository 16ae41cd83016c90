"""Attention masks: which keys each query may attend to.

An ``AttentionMask`` holds a static ``MaskSpec`` and, per position, the ids that the spec compares.
``materialize`` turns it into a boolean array; a kernel that never stores [T,S] evaluates it tile by tile.

A relative position is the key's index in its row minus the query's, as in T5.
"""

from collections.abc import Container
from dataclasses import dataclass, field
from functools import reduce
from operator import and_
from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax import Array
from jaxtyping import Bool, Int, Int32

PositionIds = dict[str, Array]  # int32 or bool, by name; see ``MaskSpec``
NO_BOUNDS = (None, None)


def relative_positions(length: int, key_length: int) -> Int32[Array, "1 {length} {key_length}"]:
    """Return int32 [1,T,S]: each key's index minus each query's; both sequences start at index 0.

    >>> relative_positions(2, 3)[0].tolist()
    [[0, 1, 2], [-1, 0, 1]]
    """
    return (jnp.arange(key_length)[None, :] - jnp.arange(length)[:, None])[None]


class Window(NamedTuple):
    """A sliding window, dilated if ``step`` is above 1 (Longformer, Beltagy et al. 2020)."""

    behind: int  # a query attends this far back [positions, or blocks where "position" ids count blocks]
    ahead: int  # and this far forward [likewise]
    step: int = 1  # the dilation: of this range, only every step-th position is attended to


class RandomBlocks(NamedTuple):
    """Random blocks before its window that a block of queries attends to (BigBird, Zaheer et al. 2020).

    Unless the mask is causal, attention is symmetric: a drawn block also attends to the block that drew it.
    """

    per_query_block: int  # how many are drawn for each block of queries
    num_blocks: int  # number of blocks of a row
    window: int  # how far the window reaches back; none of it is drawn [blocks]
    num_global_blocks: int  # blocks at the start that all attend to anyway; none of them is drawn


class MaskSpec(NamedTuple):
    """The static part of a mask: a query attends to a key only if all conditions hold.

    The conditions read ids of queries and of keys by name:

    - "segment" must be equal; -1, the id of padding keys, equals none;
    - "prefix" is 1 inside a prefix, within which attention is not causal;
    - "position" is what a window compares in place of indices in the row;
    - "global" is 1 where a position attends to all, and all to it, whatever the window.
    """

    causal: bool = False
    window: Window | None = None
    random_blocks: RandomBlocks | None = None

    def evaluate(self, relative_position: Array, query: PositionIds, key: PositionIds) -> Array:
        """Return bool, of shapes that broadcast: whether each query attends to each key."""
        conditions = []
        if self.causal:
            not_after = relative_position <= 0
            if "prefix" in key:
                not_after = not_after | (query["prefix"] * key["prefix"] > 0)
            conditions.append(not_after)
        if self.window is not None:
            conditions.append(self._in_window(self.window, relative_position, query, key))
        if "segment" in key:
            conditions.append(query["segment"] == key["segment"])
        return reduce(and_, conditions)

    def _in_window(
        self, window: Window, relative_position: Array, query: PositionIds, key: PositionIds
    ) -> Array:
        if "position" in key:
            relative_position = key["position"] - query["position"]
        inside = (relative_position >= -window.behind) & (relative_position <= window.ahead)
        if window.step > 1:
            inside = inside & (jax.lax.rem(jnp.abs(relative_position), jnp.int32(window.step)) == 0)
        if "global" in key:
            inside = inside | (query["global"] + key["global"] > 0)
        if self.random_blocks is not None:
            drawn = draw_random_blocks(self.random_blocks)
            inside = inside | jnp.asarray(drawn | drawn.T)[query["position"], key["position"]]
        return inside

    def window_bounds(self, id_names: Container[str]) -> tuple[int | None, int | None]:
        """Return how far behind and ahead of a query its visible keys can lie [indices]; None: no bound.

        ``id_names`` are the names of the ids in use. Kernels skip the tiles outside of these bounds.
        """
        behind, ahead = NO_BOUNDS
        if self.window is not None and "position" not in id_names and "global" not in id_names:
            behind, ahead = self.window.behind, self.window.ahead
        if self.causal and "prefix" not in id_names:
            ahead = 0
        return behind, ahead

    def tile_is_visible(self, query: PositionIds, key: PositionIds) -> Array:
        """Return bool []: False if the least and greatest ids of a tile show that all of it is masked."""
        visible = jnp.bool_(True)
        if "segment" in key:
            visible &= _ranges_meet(query["segment"], key["segment"], behind=0, ahead=0)
        has_exceptions = "global" in key or self.random_blocks is not None
        if self.window is not None and "position" in key and not has_exceptions:
            behind, ahead, _ = self.window
            visible &= _ranges_meet(query["position"], key["position"], behind=behind, ahead=ahead)
        return visible


def _ranges_meet(query: Array, key: Array, *, behind: int, ahead: int) -> Array:
    """Return bool []: False if all key ids of a tile are too far behind all query ids, or too far ahead."""
    return (key.max() >= query.min() - behind) & (key.min() <= query.max() + ahead)


def draw_random_blocks(blocks: RandomBlocks) -> Bool[np.ndarray, "blocks blocks"]:
    """Return bool [blocks,blocks]: which earlier blocks are drawn for each block of queries.

    The draw is deterministic, and the same for the first blocks of a longer row. Early blocks have fewer to
    draw from.
    """
    drawn = np.zeros((blocks.num_blocks, blocks.num_blocks), bool)
    for query, row in enumerate(drawn):
        end = max(blocks.num_global_blocks, query - blocks.window)
        candidates = np.arange(blocks.num_global_blocks, end)
        row[np.random.default_rng(query).permutation(candidates)[: blocks.per_query_block]] = True
    return drawn


@jax.tree_util.register_dataclass
@dataclass(frozen=True)
class AttentionMask:
    """A mask that is not materialised yet: a spec, and the ids [B|1,T] of queries and [B|1,S] of keys."""

    query: PositionIds
    key: PositionIds
    spec: MaskSpec = field(metadata={"static": True})

    def materialize(self, length: int, key_length: int) -> Bool[Array, "_ 1 {length} {key_length}"]:
        """Return bool [B|1,1,T,S], True where a query attends to a key; both rows start at index 0.

        >>> CAUSAL.materialize(2, 3)[0, 0].tolist()
        [[True, False, False], [True, True, False]]
        """
        return self.evaluate(relative_positions(length, key_length))

    def evaluate(self, relative_position: Int32[Array, "_ T S"]) -> Bool[Array, "_ 1 T S"]:
        """Return bool [B|1,1,T,S] of queries and keys at relative positions int32 [B|1,T,S]."""
        query = {name: ids[:, :, None] for name, ids in self.query.items()}
        key = {name: ids[:, None, :] for name, ids in self.key.items()}
        return self.spec.evaluate(relative_position, query, key)[:, None]


def two_stream_masks(order: Int[Array, "B T"]) -> Bool[Array, "_ 1 T T"]:
    """Return bool [2B,1,T,T]: which keys the content stream and the query stream of each row attend to.

    Both attend to tokens that are not predicted, ``order`` 0, and to those that are predicted before their
    own. The content stream also attends to its own token (Yang et al. 2019, section 2.3). The two streams of
    a row are adjacent.

    >>> two_stream_masks(jnp.array([[2, 0, 1]]))[:, 0].astype(int).tolist()
    [[[1, 1, 1], [0, 1, 0], [0, 1, 1]], [[0, 1, 1], [0, 1, 0], [0, 1, 0]]]
    """
    key_order, query_order = order[:, None, :], order[:, :, None]
    query_stream = (key_order == 0) | (key_order < query_order)
    content_stream = query_stream | jnp.eye(order.shape[1], dtype=bool)[None]
    return jnp.stack([content_stream, query_stream], axis=1).reshape(-1, 1, *query_stream.shape[1:])


AnyMask = Array | AttentionMask | None  # bool [B|1,1|N,T,S]; None: all is visible
CAUSAL = AttentionMask({}, {}, MaskSpec(causal=True))


def materialize_mask(mask: AnyMask, length: int, key_length: int) -> Array | None:
    """Return the mask as an array bool [B|1,1|N,T,S]; an array is returned as it is."""
    return mask.materialize(length, key_length) if isinstance(mask, AttentionMask) else mask


def key_segments(segments: Int[Array | np.ndarray, "B S"]) -> Int[Array, "B S"]:
    """Return segment ids int32 [B,S] for the key side: padding, id 0, becomes -1, which no query has."""
    return jnp.where(segments > 0, segments, -1)

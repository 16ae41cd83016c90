"""Attention masks, True where query t sees key s: a ``Mask`` is a rule and the numbers it compares.

It becomes bool [B|1,T,S] where scores are explicit (``dense``); a kernel computes its tiles when needed.
A distance is the key's place in its row minus the query's.
"""

from collections.abc import Container, Sequence
from dataclasses import dataclass, field
from functools import reduce
from operator import and_
from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax import Array

Numbers = dict[str, Array]  # int32 or bool, what a rule compares of each position, by name


def distances(length: int, key_length: int) -> Array:
    """int32 [1,T,S] of rows that both begin at place 0."""
    return (jnp.arange(key_length)[None, :] - jnp.arange(length)[:, None])[None]


class Rule(NamedTuple):
    """All conditions that are set must hold for a query to see a key.

    Numbers, each for queries and for keys: "segment", which must be equal (-1 of padded keys equals none);
    "prefix", 1 where a position belongs to the prefix; "position", which a window compares instead of places;
    "everywhere", 1 where a position sees all and is seen by all, whatever the window.
    """

    causal: bool = False  # a query sees itself and what is before it; within the prefix all see one another
    window: tuple[int, int, int] | None = None  # how far behind and ahead, and in which steps
    random: tuple[int, int] | None = None  # besides the window: so many random blocks, of so many in a row

    def seen(self, distance: Array, query: Numbers, key: Numbers) -> Array:
        """bool of distances and of numbers, all of shapes that broadcast."""
        conditions = []
        if self.causal:
            before = distance <= 0
            conditions.append(before | (query["prefix"] * key["prefix"] > 0) if "prefix" in key else before)
        if self.window is not None:
            conditions.append(self._near(self.window, distance, query, key))
        if "segment" in key:
            conditions.append(query["segment"] == key["segment"])
        return reduce(and_, conditions)

    def _near(self, window: tuple[int, int, int], distance: Array, query: Numbers, key: Numbers) -> Array:
        behind, ahead, step = window
        away = key["position"] - query["position"] if "position" in key else distance
        near = (away >= -behind) & (away <= ahead)
        if step > 1:
            near = near & (jax.lax.rem(jnp.abs(away), jnp.int32(step)) == 0)
        if "everywhere" in key:
            near = near | (query["everywhere"] + key["everywhere"] > 0)
        if self.random is not None:
            near = near | jnp.asarray(random_blocks(*self.random))[query["position"], key["position"]]
        return near

    def reach(self, names: Container[str]) -> tuple[int | None, int | None]:
        """How many places behind and ahead of a query the keys are that it may see; None: anywhere."""
        behind, ahead = None, None
        if self.window is not None and "position" not in names and "everywhere" not in names:
            behind, ahead, _ = self.window
        return behind, 0 if self.causal and "prefix" not in names else ahead

    def meets(self, query: Numbers, key: Numbers) -> Array:
        """bool scalar: False if, by their least and greatest numbers, no query of a tile sees a key."""
        possible = jnp.bool_(True)
        if "segment" in key:
            possible &= _overlap(query["segment"], key["segment"], 0, 0)
        if self.window is not None and "position" in key and "everywhere" not in key:
            possible &= _overlap(query["position"], key["position"], *self.window[:2])
        return possible


def _overlap(query: Array, key: Array, behind: int, ahead: int) -> Array:
    return (key.max() >= query.min() - behind) & (key.min() <= query.max() + ahead)


def random_blocks(count: int, blocks: int) -> np.ndarray:
    """bool [blocks,blocks]: which ``count`` blocks of keys each block of queries sees (Zaheer et al. 2020).

    They are drawn without replacement and are the same every time.
    """
    seen, generator = np.zeros((blocks, blocks), bool), np.random.default_rng(0)
    for row in seen:
        row[generator.permutation(blocks)[:count]] = True
    return seen


@jax.tree_util.register_dataclass
@dataclass(frozen=True)
class Mask:
    """A rule and the numbers [B|1,T] of queries and [B|1,S] of keys that it compares."""

    query: Numbers
    key: Numbers
    rule: Rule = field(metadata={"static": True})

    def dense(self, length: int, key_length: int) -> Array:
        """bool [B|1,T,S] of rows that both begin at place 0."""
        return self.at(distances(length, key_length))

    def at(self, distance: Array) -> Array:
        """bool [B|1,T,S] of queries and keys at distances int32 [B|1,T,S]."""
        query = {name: x[:, :, None] for name, x in self.query.items()}
        return self.rule.seen(distance, query, {name: x[:, None, :] for name, x in self.key.items()})


AnyMask = Array | Mask | None  # bool [B|1,T,S], or not laid out; None: everything is visible
CAUSAL = Mask({}, {}, Rule(causal=True))


def periods(layers: Sequence[int | None]) -> list[tuple[tuple[int | None, ...], int]]:
    """(pattern, how often in a row) of values that, one pattern after the other, are those of ``layers``.

    From each place on, the repeated pattern that covers most layers, and of equals the shortest: a loop over
    repetitions has to compile a pattern only once.
    """
    found, start = [], 0
    while start < len(layers):
        rest = tuple(layers[start:])

        def repeats(width, rest=rest):
            return next(k for k in range(1, len(rest) + 1) if rest[k * width :][:width] != rest[:width])

        width = max(range(1, len(rest) + 1), key=lambda width: (repeats(width) > 1) * width * repeats(width))
        found.append((rest[:width], repeats(width)))
        start += width * repeats(width)
    return found


def key_segments(segments: Array) -> Array:
    """int32 [B,S] as a mask compares them: segment 0 is padding, which nobody sees."""
    return jnp.where(segments > 0, segments, -1)

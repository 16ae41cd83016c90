"""Biases that are not laid out: the few numbers that they are made of, and how those go by distance.

A distance is a key's place minus its query's. ``numbers`` float32 [N,R] of a bias are all that attention
kernels read of it; its ``form`` is static and makes the bias of a tile of scores from the numbers of one
head.
"""

from collections.abc import Callable
from dataclasses import dataclass, field

import jax
import jax.numpy as jnp
import numpy as np

from lm.ops.masks import distances
from lm.ops.positions import logarithmic_starts, relative_position_bucket

Number = Callable[[int], jax.Array]  # the r-th number of a head
STATIC = {"static": True}


@dataclass(frozen=True)
class Steps:
    """Number r from the distance ``starts[r - 1]`` on: constant but near the diagonal, where tiles cost
    more.
    """

    starts: tuple[int, ...]

    def tile(self, distance: jax.Array, number: Number, low: jax.Array, high: jax.Array) -> jax.Array:
        """float32 [S,T] of distances int32 [S,T], which lie in [low, high]."""

        def near():
            value = jnp.full(distance.shape, number(0))
            for r, start in enumerate(self.starts, 1):
                value = jnp.where(distance >= start, number(r), value)
            return value

        def far():
            return jnp.full(distance.shape, jnp.where(self._right(low), number(len(self.starts)), number(0)))

        return jax.lax.cond(self._constant(low, high), far, near)

    def gradient(self, scores: jax.Array, distance: jax.Array, low: jax.Array, high: jax.Array, r: jax.Array):
        """float32 [R,1], the gradient of the numbers int32 ``r`` [R,1], from that of a tile of scores
        [S,T].
        """

        def near():
            after = [distance >= start for start in self.starts]
            inside = [~after[0], *(a & ~b for a, b in zip(after, after[1:], strict=False)), after[-1]]
            return sum(
                jnp.where(r == i, jnp.where(here, scores, 0.0).sum(), 0.0) for i, here in enumerate(inside)
            )

        def far():
            return jnp.where(r == self._right(low).astype(jnp.int32) * len(self.starts), scores.sum(), 0.0)

        return jax.lax.cond(self._constant(low, high), far, near)

    def _right(self, low):
        return low >= self.starts[-1]

    def _constant(self, low, high):
        return self._right(low) | (high < self.starts[0])


@dataclass(frozen=True)
class Slope:
    """Minus the distance times the one number."""

    def tile(self, distance: jax.Array, number: Number, low: jax.Array, high: jax.Array) -> jax.Array:
        """float32 [S,T] of distances int32 [S,T]."""
        return -jnp.abs(distance).astype(jnp.float32) * number(0)

    def gradient(self, scores: jax.Array, distance: jax.Array, low: jax.Array, high: jax.Array, r: jax.Array):
        """float32 [R,1], the gradient of the numbers int32 ``r`` [R,1], from that of a tile of scores
        [S,T].
        """
        return jnp.where(r == 0, (-jnp.abs(distance).astype(jnp.float32) * scores).sum(), 0.0)


@jax.tree_util.register_dataclass
@dataclass(frozen=True)
class Relative:
    """T5's: a learnt number for each head and bucket of distances."""

    table: jax.Array  # float32 [buckets,N]
    bidirectional: bool = field(metadata=STATIC)
    max_distance: int = field(metadata=STATIC)

    def at(self, distance: jax.Array) -> jax.Array:
        """float32 [N,...] of distances of any shape [...]."""
        # A product with one-hot rows, not a look-up: its gradient is a product too and no scatter-add.
        one_hot = jax.nn.one_hot(self._bucket(distance).reshape(-1), len(self.table), dtype=jnp.float32)
        return (one_hot @ self.table).T.reshape(-1, *distance.shape)

    def dense(self, length: int, key_length: int) -> jax.Array:
        """float32 [1,N,T,S]: as many different numbers for each head as distances, laid out along the
        diagonals.
        """
        # With a period of one more than the row length, the rows of a repeated sequence slide by one to the
        # right.
        side = max(length, key_length)
        period = 2 * side
        distance = jnp.arange(period)
        bias = self.at(jnp.where(distance < side, distance, distance - period))
        heads = bias.shape[0]
        rows = jnp.broadcast_to(bias[:, None, :], (heads, side, period)).reshape(heads, -1)
        rows = rows[:, : side * (period - 1)].reshape(heads, side, period - 1)
        return rows[None, :, :length, :key_length]

    @property
    def numbers(self) -> jax.Array:
        """float32 [N,R]: the table's rows in the order in which their distances grow."""
        return self.table[np.array([bucket for _, bucket in self._runs()])].T

    @property
    def form(self) -> Steps:
        return Steps(tuple(start for start, _ in self._runs()[1:]))

    def _runs(self) -> list[tuple[int, int]]:
        """From which distance on there is which bucket, up to the next; none of that of the first counts."""
        side = len(self.table) // 2 if self.bidirectional else len(self.table)
        far = logarithmic_starts(side, self.max_distance)
        least = [*range(side - len(far)), *far, self.max_distance + 1]  # distance of each bucket of one side
        behind = [(1 - least[bucket + 1], bucket) for bucket in reversed(range(side))]
        return behind + [
            (max(1, least[bucket]), side + bucket) for bucket in range(side) if self.bidirectional
        ]

    def _bucket(self, distance: jax.Array) -> jax.Array:
        return relative_position_bucket(
            distance,
            bidirectional=self.bidirectional,
            num_buckets=len(self.table),
            max_distance=self.max_distance,
        )


@jax.tree_util.register_dataclass
@dataclass(frozen=True)
class Alibi:
    """The farther, the less: a slope for each head (Press et al. 2022)."""

    slopes: jax.Array  # float32 [N]

    def dense(self, length: int, key_length: int) -> jax.Array:
        """float32 [1,N,T,S]."""
        return -jnp.abs(distances(length, key_length))[:, None] * self.slopes[None, :, None, None]

    @property
    def numbers(self) -> jax.Array:
        """float32 [N,1]."""
        return self.slopes[:, None]

    @property
    def form(self) -> Slope:
        return Slope()


Bias = Relative | Alibi

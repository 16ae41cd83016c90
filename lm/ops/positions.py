"""Position encodings: sinusoids, rotary ones, and biases of attention scores by distance.

A distance is a key's place minus its query's. A bias is stored by its ``numbers`` float32 [N,R], which are
all that attention kernels read; its static ``form`` makes the bias of a tile of scores from a head's numbers.
"""

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax import Array

from lm.ops.masks import distances


def relative_position_bucket(
    relative_position: Array, *, bidirectional: bool, num_buckets: int, max_distance: int
) -> Array:
    """Bucket int32, same shape, of key position minus query position (Raffel et al. 2020, section 2.1).

    Half of the buckets hold one distance each, the others logarithmically growing ranges up to
    ``max_distance``. Bidirectional: the upper half of all buckets is for keys after the query. Otherwise
    those fall into bucket 0.
    """
    offset = jnp.zeros_like(relative_position)
    if bidirectional:
        num_buckets //= 2
        offset = jnp.where(relative_position > 0, num_buckets, 0)
        distance = jnp.abs(relative_position)
    else:
        distance = jnp.maximum(-relative_position, 0)
    starts = logarithmic_starts(num_buckets, max_distance)
    exact = num_buckets - len(starts)
    beyond = sum((distance >= start).astype(jnp.int32) for start in starts)
    return offset + jnp.minimum(distance, exact - 1) + beyond


def logarithmic_starts(num_buckets: int, max_distance: int) -> list[int]:
    """The least distance in each logarithmic bucket: exact + j begins at exact * (max / exact) ** (j / many).

    Computed in integers, so that no rounding of a logarithm decides on a bucket.
    """
    exact = num_buckets // 2
    many = num_buckets - exact
    starts, distance = [], exact
    for j in range(many):
        while distance**many < exact ** (many - j) * max_distance**j:
            distance += 1
        starts.append(distance)
    return starts


# Of each layout: the divisor of i in the wavelengths 2 pi 10,000^(i / divisor), and the axis on which sines
# and cosines [..., D/2] are stacked: -1 alternates them, -2 puts all sines before all cosines.
_SINUSOIDS: dict[str, tuple[Callable[[int], int], int]] = {
    "interleaved": (lambda half: half, -1),  # Vaswani et al. 2017
    "halves": (lambda half: half, -2),  # Marian
    "tensor2tensor": (lambda half: max(half - 1, 1), -2),  # its longest wavelength is 10,000 itself
}


def sinusoids(positions: Array, width: int, *, layout: str) -> Array:
    """float32 [B|1,T,D] of positions int [B|1,T]: sines and cosines of wavelengths 2 pi to 20,000 pi."""
    divisor, axis = _SINUSOIDS[layout]
    angles = _angles(positions, 10_000.0 ** -(np.arange(width // 2) / divisor(width // 2)))
    return jnp.stack((jnp.sin(angles), jnp.cos(angles)), axis).reshape(*positions.shape, width)


# Of each layout of rotary positions: on which axis of [...,2,R/2] or [...,R/2,2] the features of a pair lie.
_PAIR_AXES = {"halves": -2, "pairs": -1}


def rotate(x: Array, positions: Array, frequencies: np.ndarray, factor: float, layout: str) -> Array:
    """x [B,T,N,H] with its first R features turned by positions [B|1,T] times ``frequencies`` [R/2].

    Rotary positions of Su et al. 2021. Feature i turns with feature i + R/2 where ``layout`` is "halves",
    feature 2i with 2i + 1 where it is "pairs": the same scores once the features are permuted.
    """
    half, axis = len(frequencies), _PAIR_AXES[layout]
    angles = _angles(positions, frequencies)[:, :, None, :]
    cos, sin = factor * jnp.cos(angles), factor * jnp.sin(angles)
    turning, rest = jnp.split(x, (2 * half,), axis=-1)
    by_pair = turning.reshape(*x.shape[:-1], *((2, half) if axis == -2 else (half, 2)))
    first, second = jnp.unstack(by_pair, axis=axis)
    turned = jnp.stack((first * cos - second * sin, second * cos + first * sin), axis).astype(x.dtype)
    return jnp.concatenate([turned.reshape(turning.shape), rest], axis=-1)


def _angles(positions: Array, frequencies: np.ndarray) -> Array:
    """float32 [..., F] of positions [...] and frequencies [F]; in bfloat16 positions above 256 collide."""
    positions = jnp.asarray(positions, jnp.float32)
    return positions[..., None] * jnp.asarray(frequencies, jnp.float32).reshape(*(1,) * positions.ndim, -1)


def alibi_slopes(heads: int) -> np.ndarray:
    """float32 [N]: 2^(-8/N), its square, its cube, ... (Press et al. 2022).

    If N is no power of two: those of the power below it, then every second one of the power above it.
    """
    power = 1 << heads.bit_length() - 1

    def slopes(count):
        return 2.0 ** (-8 / count * np.arange(1, count + 1))

    return np.concatenate([slopes(power), slopes(2 * power)[::2]])[:heads].astype(np.float32)


def starting_slopes(heads: int) -> np.ndarray:
    """float32 [N]: 1, 1/2, 1/4, ..., or more closely where more than 8 heads have to end at about 2^-8."""
    return (2.0 ** (-8 / max(heads, 8) * np.arange(heads))).astype(np.float32)


Number = Callable[[int], Array]  # the r-th number of a head
STATIC = {"static": True}


class Distances(NamedTuple):
    """Those of a tile of scores, keys by queries."""

    each: Array  # int32 [S,T]
    low: Array  # the least of them
    high: Array  # the greatest


@dataclass(frozen=True)
class Buckets:
    """Number r holds from distance ``starts[r - 1]`` on; a tile far from the diagonal has a single number."""

    starts: tuple[int, ...]

    def tile(self, distances: Distances, number: Number) -> Array:
        """float32 [S,T], the bias of a tile."""
        shape = distances.each.shape

        def near():
            value = jnp.full(shape, number(0))
            for r, start in enumerate(self.starts, 1):
                value = jnp.where(distances.each >= start, number(r), value)
            return value

        def far():
            return jnp.full(shape, jnp.where(self._right(distances), number(len(self.starts)), number(0)))

        return jax.lax.cond(self._constant(distances), far, near)

    def gradient(self, scores: Array, distances: Distances, r: Array) -> Array:
        """float32 [R,1], the gradient of numbers int32 ``r`` [R,1], from that of a tile of scores [S,T]."""

        def near():
            after = [distances.each >= start for start in self.starts]
            inside = [~after[0], *(a & ~b for a, b in zip(after, after[1:], strict=False)), after[-1]]
            sums = (jnp.where(bucket, scores, 0.0).sum() for bucket in inside)
            return sum(jnp.where(r == i, total, 0.0) for i, total in enumerate(sums))

        def far():
            last = self._right(distances).astype(jnp.int32) * len(self.starts)
            return jnp.where(r == last, scores.sum(), 0.0)

        return jax.lax.cond(self._constant(distances), far, near)

    def _right(self, distances: Distances) -> Array:
        return distances.low >= self.starts[-1]

    def _constant(self, distances: Distances) -> Array:
        return self._right(distances) | (distances.high < self.starts[0])


@dataclass(frozen=True)
class Slope:
    """Minus the distance times the one number."""

    def tile(self, distances: Distances, number: Number) -> Array:
        """float32 [S,T], the bias of a tile."""
        return -jnp.abs(distances.each).astype(jnp.float32) * number(0)

    def gradient(self, scores: Array, distances: Distances, r: Array) -> Array:
        """float32 [R,1], the gradient of numbers int32 ``r`` [R,1], from that of a tile of scores [S,T]."""
        return jnp.where(r == 0, (-jnp.abs(distances.each).astype(jnp.float32) * scores).sum(), 0.0)


@jax.tree_util.register_dataclass
@dataclass(frozen=True)
class Relative:
    """T5's: a learnt number for each head and bucket of distances."""

    table: Array  # float32 [buckets,N]
    bidirectional: bool = field(metadata=STATIC)
    max_distance: int = field(metadata=STATIC)

    def at(self, distance: Array) -> Array:
        """float32 [B|1,N,T,S] of distances int32 [B|1,T,S]."""
        return self._by_head(distance).swapaxes(0, 1)

    def dense(self, length: int, key_length: int) -> Array:
        """float32 [1,N,T,S]: as many different numbers for each head as distances, along the diagonals."""
        # In a sequence of period P, read as rows of length P - 1, each row slides by one to the right.
        side = max(length, key_length)
        period = 2 * side
        distance = jnp.arange(period)
        bias = self._by_head(jnp.where(distance < side, distance, distance - period))
        heads = bias.shape[0]
        rows = jnp.broadcast_to(bias[:, None, :], (heads, side, period)).reshape(heads, -1)
        rows = rows[:, : side * (period - 1)].reshape(heads, side, period - 1)
        return rows[None, :, :length, :key_length]

    @property
    def numbers(self) -> Array:
        """float32 [N,R]: the table's rows in the order in which their distances grow."""
        return self.table[np.array([bucket for _, bucket in self._runs()])].T

    @property
    def form(self) -> Buckets:
        return Buckets(tuple(start for start, _ in self._runs()[1:]))

    @property
    def mean_distances(self) -> np.ndarray:
        """float32 [buckets]: the mean of the distances in each, up to the maximum; 0 of a bucket of none."""
        starts, buckets = zip(*self._runs(), strict=True)
        ends = *starts[1:], self.max_distance + 1 if self.bidirectional else 1
        means = np.zeros(len(self.table), np.float32)
        for bucket, start, end in zip(buckets, starts, ends, strict=True):
            means[bucket] = np.abs(np.arange(start, end)).mean() if start < end else 0
        return means

    def _by_head(self, distance: Array) -> Array:
        """float32 [N,...] of distances of any shape [...]."""
        count = len(self.table)
        bucket = relative_position_bucket(
            distance, bidirectional=self.bidirectional, num_buckets=count, max_distance=self.max_distance
        )
        # A product with one-hot rows, not a look-up: its gradient is a product too and no scatter-add.
        one_hot = jax.nn.one_hot(bucket.reshape(-1), count, dtype=jnp.float32)
        return (one_hot @ self.table).T.reshape(-1, *distance.shape)

    def _runs(self) -> list[tuple[int, int]]:
        """(first distance, bucket) of each run of distances in one bucket; the first's does not count."""
        side = len(self.table) // 2 if self.bidirectional else len(self.table)
        far = logarithmic_starts(side, self.max_distance)
        least = [*range(side - len(far)), *far, self.max_distance + 1]  # distance of each bucket of one side
        behind = [(1 - least[bucket + 1], bucket) for bucket in reversed(range(side))]
        ahead = [(max(1, least[bucket]), side + bucket) for bucket in range(side)]
        return behind + ahead if self.bidirectional else behind


@jax.tree_util.register_dataclass
@dataclass(frozen=True)
class Alibi:
    """The farther, the less: a slope for each head (Press et al. 2022)."""

    slopes: Array  # float32 [N]

    def at(self, distance: Array) -> Array:
        """float32 [B|1,N,T,S] of distances int32 [B|1,T,S]."""
        return -jnp.abs(distance)[:, None] * self.slopes[None, :, None, None]

    def dense(self, length: int, key_length: int) -> Array:
        """float32 [1,N,T,S]."""
        return self.at(distances(length, key_length))

    @property
    def numbers(self) -> Array:
        """float32 [N,1]."""
        return self.slopes[:, None]

    @property
    def form(self) -> Slope:
        return Slope()


Bias = Relative | Alibi
AnyBias = Array | Bias | None  # float32 [B|1,N,T,S], or not laid out

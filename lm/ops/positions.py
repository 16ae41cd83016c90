"""Position encodings: sinusoids, rotary embeddings, and biases of attention logits by relative position.

A relative position is a key's index in its row minus the query's. A bias is an array [B|1,N|1,T,S], or an
object (``BucketedBias``, ``AlibiBias``) that kernels evaluate tile by tile. Such an object has
``coefficients``, float32 [N,R], R numbers for each head, and a ``function``, which maps relative positions
and the coefficients of a head to its bias.

Shapes: B rows, T queries, S keys, N heads of width H; P = T + S - 1 relative positions.
"""

from collections.abc import Callable
from dataclasses import dataclass, field, replace
from itertools import pairwise
from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax import Array
from jaxtyping import Float, Float32, Int, Int32

from lm.ops.masks import key_segments, relative_positions


def relative_position_bucket(
    relative_position: Int32[Array, "*shape"], *, bidirectional: bool, num_buckets: int, max_distance: int
) -> Int32[Array, "*shape"]:
    """Return the bucket of each relative position, int32 of the same shape (Raffel et al. 2020, section 2.1).

    Half of the buckets hold one distance each, the others logarithmically growing ranges up to
    ``max_distance``. Bidirectional: the upper half of all buckets is for keys after the query; otherwise
    those fall into bucket 0.

    >>> options = {"bidirectional": True, "num_buckets": 8, "max_distance": 16}
    >>> relative_position_bucket(jnp.array([-20, -4, -1, 0, 1, 4, 20]), **options).tolist()
    [3, 2, 1, 0, 5, 6, 7]
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


def relative_key_bias(
    query: Float[Array, "B T N H"], vectors: Float[Array, "N H R"], buckets: Int32[Array, "#B T S"]
) -> Float32[Array, "B N T S"]:
    """Return the product of each query and the vector of each relative position (Shaw et al. 2018).

    query [B,T,N,H], vectors [N,H,R] of R buckets, buckets int32 [B|1,T,S] -> float32 [B,N,T,S].
    """
    products = jnp.einsum("btnh,nhr->btnr", query, vectors, preferred_element_type=jnp.float32)
    # A product with one-hot rows in place of a look-up: its gradient is a product too, no scatter-add.
    one_hot = jax.nn.one_hot(buckets, vectors.shape[-1], dtype=jnp.float32)
    if len(buckets) == 1:
        return jnp.einsum("btnr,tsr->bnts", products, one_hot[0])
    return jnp.einsum("btnr,btsr->bnts", products, one_hot)


def signed_position_bucket(
    relative_position: Int[np.ndarray, "*shape"], *, num_buckets: int, max_distance: int
) -> Int[np.ndarray, "*shape"]:
    """Return the bucket of each relative position, of the same shape, as DeBERTa numbers them.

    With k = num_buckets / 2, a key that lies d before the query is in bucket k + b(d), one d after it in
    k - b(d), and both ends are cut to 0 and 2k - 1: delta(i, j) of He et al. 2021, section 3.1. b(d) is d
    itself if ``max_distance`` is k. Otherwise it is d up to k / 2, and grows with the logarithm of d from
    there to k - 1 at max_distance - 1, as in the program released with version 2.

    >>> far = np.array([-9, -8, -7, -3, -2, -1, 0, 1, 2, 3, 7, 8])
    >>> signed_position_bucket(far, num_buckets=8, max_distance=8).tolist()
    [7, 7, 7, 7, 6, 5, 4, 3, 2, 1, 1, 0]
    >>> signed_position_bucket(far, num_buckets=16, max_distance=8).tolist()
    [15, 15, 15, 11, 10, 9, 8, 7, 6, 5, 1, 0]
    """
    span = num_buckets // 2
    distance = np.abs(relative_position)
    if max_distance > span:
        exact = span // 2
        beyond = np.searchsorted(_signed_starts(exact, max_distance), distance, side="right")
        distance = np.minimum(distance, exact) + beyond
    return np.clip(span - np.sign(relative_position) * distance, 0, num_buckets - 1)


def _signed_starts(exact: int, max_distance: int) -> list[int]:
    """Return the least distance d for which b(d) of ``signed_position_bucket`` is exact + 1, exact + 2, ...

    With L = exact - 1 logarithmic buckets, b(d) = exact + ceil(L log(d / exact) / log((max - 1) / exact)). It
    is compared in integers, so that no rounding of a logarithm decides on a bucket.
    """
    logarithmic, starts, distance = exact - 1, [], exact
    for j in range(exact):
        while distance**logarithmic <= exact ** (logarithmic - j) * (max_distance - 1) ** j:
            distance += 1
        starts.append(distance)
    return starts


def disentangled_bias(
    query: Float[Array, "B T N H"],
    key: Float[Array, "B S N H"],
    position_keys: Float[Array, "P N H"] | None,
    position_queries: Float[Array, "P N H"] | None,
) -> Float32[Array, "B N T S"]:
    """Return what disentangled attention adds to the products of queries and keys (He et al. 2021).

    The score of query i and key j is, before it is divided by the root of 3H (section 3.1, equation 4),

        q_i . k_j  +  q_i . k^r_ij  +  k_j . q^r_ij

    content to content, content to position and position to content. Returned are the last two sums, float32
    [B,N,T,S]; one of them alone if the other's vectors are None. Row p of the position keys k^r and queries
    q^r, [P,N,H] with P = T + S - 1, belongs to the relative position p - (T - 1). Both sums read the vector
    of the same relative position, as the released program does; the paper's last one has that of the opposite
    sign.
    """
    length, key_length = query.shape[1], key.shape[1]
    bias = jnp.zeros((1, 1, length, key_length), jnp.float32)
    if position_keys is not None:
        products = jnp.einsum("btnh,pnh->bntp", query, position_keys, preferred_element_type=jnp.float32)
        bias = bias + _relative_shift(products)
    if position_queries is not None:
        # Seen from the keys, relative positions have the opposite sign, and come in the opposite order.
        reverse = position_queries[::-1]
        products = jnp.einsum("bsnh,pnh->bnsp", key, reverse, preferred_element_type=jnp.float32)
        bias = bias + _relative_shift(products).swapaxes(-1, -2)
    return bias


def relative_type_bias(
    query: Float[Array, "B T N H"],
    type_keys: Float[Array, "2 N H"],
    types: Int[Array | np.ndarray, "B T"],
) -> Float32[Array, "B N T T"]:
    """Return the product of each query and the first key where types are equal, else the second: [B,N,T,T].

    query [B,T,N,H], keys [2,N,H] of equal and of different token types, types int [B,T]. These are XLNet's
    relative segment encodings (Yang et al. 2019, section 2.5).
    """
    products = jnp.einsum("btnh,cnh->bntc", query, type_keys, preferred_element_type=jnp.float32)
    is_other = types[:, None, :, None] != types[:, None, None, :]
    return jnp.where(is_other, products[..., 1:], products[..., :1])


def _relative_shift(products: Float32[Array, "B N T P"]) -> Float32[Array, "B N T S"]:
    """Return [B,N,T,S] from products by relative position [B,N,T,P], P = T + S - 1: [i,j] is [i, j-i+T-1].

    The relative shift of Dai et al. 2019, appendix B: row i begins at element T - 1 - i, so rows are padded
    to P + 1 elements, joined, and cut again into rows of P from element T - 1 on. Neither this nor its
    gradient gathers anything.
    """
    batch, heads, length, count = products.shape
    flat = jnp.pad(products, ((0, 0), (0, 0), (0, 0), (0, 1))).reshape(batch, heads, -1)
    moved = flat[:, :, length - 1 :][:, :, : length * count]
    return moved.reshape(batch, heads, length, count)[..., : count - length + 1]


def logarithmic_starts(num_buckets: int, max_distance: int) -> list[int]:
    """Return the least distance of each logarithmic bucket.

    With E buckets of one distance and L logarithmic ones, bucket E + j starts at E * (max / E) ** (j / L). It
    is computed in integers, so that no rounding of a logarithm decides on a bucket.
    """
    exact = num_buckets // 2
    logarithmic = num_buckets - exact
    starts, distance = [], exact
    for j in range(logarithmic):
        while distance**logarithmic < exact ** (logarithmic - j) * max_distance**j:
            distance += 1
        starts.append(distance)
    return starts


# By layout: the divisor of i in the wavelengths 2 pi 10,000^(i / divisor), and the axis on which sines and
# cosines [..., D/2] are stacked: -1 alternates them, -2 puts all sines before all cosines.
_SINUSOIDS: dict[str, tuple[Callable[[int], int], int]] = {
    "interleaved": (lambda half: half, -1),  # Vaswani et al. 2017
    "halves": (lambda half: half, -2),  # Marian
    "tensor2tensor": (lambda half: max(half - 1, 1), -2),  # its longest wavelength is 10,000 itself
}


def sinusoids(
    positions: Int[Array, "*shape"], width: int, *, layout: str
) -> Float32[Array, "*shape {width}"]:
    """Return float32 [...,D] of positions [...]: sines and cosines of wavelengths 2 pi to 20,000 pi."""
    divisor, axis = _SINUSOIDS[layout]
    angles = _angles(positions, 10_000.0 ** -(np.arange(width // 2) / divisor(width // 2)))
    return jnp.stack((jnp.sin(angles), jnp.cos(angles)), axis).reshape(*positions.shape, width)


# By layout of rotary positions: the axis of [...,2,R/2] or [...,R/2,2] on which the features of a pair lie.
_PAIR_AXES = {"halves": -2, "pairs": -1}


class RotaryPositions(NamedTuple):
    """Positions of a layer whose rotary frequencies are its own: those of a window (ModernBERT)."""

    positions: Array | np.ndarray  # int32 [B|1,T]
    frequencies: Array | np.ndarray  # float32 [R/2], in radians a position


def rotate(
    x: Float[Array, "B T N H"],
    positions: Int[Array, "#B T"],
    frequencies: Float[Array | np.ndarray, " half"],
    attention_scaling: float,
    layout: str,
) -> Float[Array, "B T N H"]:
    """Return x [B,T,N,H], its first R features rotated by positions [B|1,T] times ``frequencies`` [R/2].

    Rotary position embeddings (Su et al. 2021). Feature i is paired with feature i + R/2 where ``layout`` is
    "halves", feature 2i with 2i + 1 where it is "pairs": the same logits once the features are permuted.
    Cosines and sines are multiplied by ``attention_scaling``, which is 1 without YaRN (Peng et al. 2023).
    """
    half, axis = len(frequencies), _PAIR_AXES[layout]
    angles = _angles(positions, frequencies)[:, :, None, :]
    cos, sin = attention_scaling * jnp.cos(angles), attention_scaling * jnp.sin(angles)
    rotated, rest = jnp.split(x, (2 * half,), axis=-1)
    pair_shape = (2, half) if axis == -2 else (half, 2)
    by_pair = rotated.reshape(*x.shape[:-1], *pair_shape)
    first, second = jnp.unstack(by_pair, axis=axis)
    pairs = jnp.stack((first * cos - second * sin, second * cos + first * sin), axis).astype(x.dtype)
    return jnp.concatenate([pairs.reshape(rotated.shape), rest], axis=-1)


def segment_lengths(
    segments: Int[Array, "B T"], memory_segments: Int[Array, "B S"], memory_positions: Int[Array, "#B S"]
) -> Int32[Array, "B T"]:
    """Return int32 [B,T]: for each position, the length of its segment in another row, the memory.

    It is one more than the last of the memory's positions [B|1,S] in that segment, 0 if there is none.

    >>> memory = jnp.array([[1, 1, 1, 2, 2, 0]]), jnp.array([[0, 1, 2, 0, 1, 0]])
    >>> segment_lengths(jnp.array([[1, 2, 2, 3, 0]]), *memory).tolist()
    [[3, 2, 2, 0, 0]]
    """
    is_same_segment = segments[:, :, None] == key_segments(memory_segments)[:, None, :]
    return jnp.where(is_same_segment, memory_positions[:, None, :] + 1, 0).max(-1)


def _angles(positions: Array, frequencies: Array | np.ndarray) -> Array:
    """Return positions [...] times frequencies [F], float32 [...,F].

    Positions become float32 before the product: bfloat16 has all integers up to 256 only.
    """
    positions = jnp.asarray(positions, jnp.float32)
    return positions[..., None] * jnp.asarray(frequencies, jnp.float32).reshape(*(1,) * positions.ndim, -1)


def alibi_slopes(heads: int) -> Float32[np.ndarray, " N"]:
    """Return float32 [N]: 2^(-8/N), its square, its cube, ... (Press et al. 2022).

    If N is no power of two: those of the power below it, then every second one of the power above it.

    >>> alibi_slopes(4).tolist()
    [0.25, 0.0625, 0.015625, 0.00390625]
    """
    power = 1 << heads.bit_length() - 1

    def slopes(count):
        return 2.0 ** (-8 / count * np.arange(1, count + 1))

    return np.concatenate([slopes(power), slopes(2 * power)[::2]])[:heads].astype(np.float32)


def initial_bias_slopes(heads: int) -> Float32[np.ndarray, " N"]:
    """Return float32 [N]: slopes with which a learned bias starts if ``relative_bias_start`` is "slopes".

    That of head n = 0, 1, ... is 2^-n for up to 8 heads, and 2^(-8n/N) for more. Unlike ALiBi's, the first
    is 1.

    >>> initial_bias_slopes(4).tolist()
    [1.0, 0.5, 0.25, 0.125]
    """
    return (2.0 ** (-8 / max(heads, 8) * np.arange(heads))).astype(np.float32)


Coefficient = Callable[[int], Array]  # the r-th coefficient of a head
STATIC = {"static": True}


class TilePositions(NamedTuple):
    """The relative positions of a tile of logits, keys by queries."""

    each: Array  # int32 [S,T]
    least: Array
    greatest: Array


@dataclass(frozen=True)
class PiecewiseConstant:
    """A bias that is coefficient r from relative position ``starts[r - 1]`` on, and coefficient 0 before."""

    starts: tuple[int, ...]

    def tile(self, positions: TilePositions, coefficient: Coefficient) -> Array:
        """Return float32 [S,T]: the bias of a tile. Far from the diagonal it is one number."""
        shape = positions.each.shape

        def near():
            value = jnp.full(shape, coefficient(0))
            for r, start in enumerate(self.starts, 1):
                value = jnp.where(positions.each >= start, coefficient(r), value)
            return value

        def far():
            last = coefficient(len(self.starts))
            return jnp.full(shape, jnp.where(self._is_last(positions), last, coefficient(0)))

        return jax.lax.cond(self._is_constant(positions), far, near)

    def coefficient_gradient(self, gradient: Array, positions: TilePositions, r: Array) -> Array:
        """Return float32 [R,1]: the gradient of coefficients int32 ``r`` [R,1], from that of a tile [S,T]."""

        def near():
            after = [positions.each >= start for start in self.starts]
            inside = [~after[0]]  # by coefficient: where the bias is that one
            for begun, ended in pairwise(after):
                inside.append(begun & ~ended)
            inside.append(after[-1])
            d_coefficients = jnp.zeros(r.shape, gradient.dtype)
            for i, is_inside in enumerate(inside):
                d_coefficients += jnp.where(r == i, jnp.where(is_inside, gradient, 0.0).sum(), 0.0)
            return d_coefficients

        def far():
            bucket = self._is_last(positions).astype(jnp.int32) * len(self.starts)
            return jnp.where(r == bucket, gradient.sum(), 0.0)

        return jax.lax.cond(self._is_constant(positions), far, near)

    def _is_last(self, positions: TilePositions) -> Array:
        return positions.least >= self.starts[-1]

    def _is_constant(self, positions: TilePositions) -> Array:
        return self._is_last(positions) | (positions.greatest < self.starts[0])


@dataclass(frozen=True)
class LinearDecay:
    """A bias that is minus the distance times coefficient 0."""

    def tile(self, positions: TilePositions, coefficient: Coefficient) -> Array:
        """Return float32 [S,T]: the bias of a tile."""
        return -jnp.abs(positions.each).astype(jnp.float32) * coefficient(0)

    def coefficient_gradient(self, gradient: Array, positions: TilePositions, r: Array) -> Array:
        """Return float32 [R,1]: the gradient of coefficients int32 ``r`` [R,1], from that of a tile [S,T]."""
        distance = jnp.abs(positions.each).astype(jnp.float32)
        return jnp.where(r == 0, (-distance * gradient).sum(), 0.0)


@jax.tree_util.register_dataclass
@dataclass(frozen=True)
class BucketedBias:
    """T5's bias: a learned number for each head and bucket of relative positions."""

    table: Array  # float32 [buckets,N]
    bidirectional: bool = field(metadata=STATIC)
    max_distance: int = field(metadata=STATIC)

    def evaluate(self, relative_position: Int32[Array, "_ T S"]) -> Float32[Array, "_ N T S"]:
        """Return float32 [B|1,N,T,S] of relative positions int32 [B|1,T,S]."""
        return self._by_head(relative_position).swapaxes(0, 1)

    def materialize(self, length: int, key_length: int) -> Float32[Array, "1 N {length} {key_length}"]:
        """Return float32 [1,N,T,S] of rows that both start at index 0.

        Along a diagonal all relative positions are equal, so T+S numbers per head make the matrix: written
        again and again in rows one shorter than their period, each row is the one above moved right by one.
        """
        period = length + key_length
        offset = jnp.arange(period)
        bias = self._by_head(jnp.where(offset < key_length, offset, offset - period))
        heads = bias.shape[0]
        rows = jnp.broadcast_to(bias[:, None, :], (heads, length, period)).reshape(heads, -1)
        rows = rows[:, : length * (period - 1)].reshape(heads, length, period - 1)
        return rows[None, :, :, :key_length]

    @property
    def coefficients(self) -> Array:
        """Return float32 [N,R]: the table's rows in the order in which their relative positions grow."""
        return self.table[np.array([bucket for _, bucket in self._runs()])].T

    @property
    def function(self) -> PiecewiseConstant:
        """Return the function of relative position that a kernel evaluates with the coefficients."""
        return PiecewiseConstant(tuple(start for start, _ in self._runs()[1:]))

    @property
    def mean_distances(self) -> np.ndarray:
        """Return float32 [buckets]: the mean distance in each bucket, 0 in one that holds none."""
        starts, buckets = zip(*self._runs(), strict=True)
        ends = *starts[1:], self.max_distance + 1 if self.bidirectional else 1
        means = np.zeros(len(self.table), np.float32)
        for bucket, start, end in zip(buckets, starts, ends, strict=True):
            if start < end:
                means[bucket] = np.abs(np.arange(start, end)).mean()
        return means

    def converted(self, bidirectional: bool) -> "BucketedBias":
        """Return the bias for a causal stack if this one's attends to both sides, or the other way round.

        Each new bucket gets this bias at the bucket's mean distance behind the query, so a new bias for both
        sides is symmetric.
        """
        new = replace(self, bidirectional=bidirectional)
        distances = jnp.asarray(np.rint(new.mean_distances), jnp.int32)
        return replace(new, table=self._by_head(-distances).T)

    def _by_head(self, relative_position: Array) -> Array:
        """Return float32 [N,...] of relative positions of any shape [...]."""
        bucket = relative_position_bucket(
            relative_position,
            bidirectional=self.bidirectional,
            num_buckets=len(self.table),
            max_distance=self.max_distance,
        )
        # A product with one-hot rows in place of a look-up: its gradient is a product too, no scatter-add.
        one_hot = jax.nn.one_hot(bucket.reshape(-1), len(self.table), dtype=jnp.float32)
        return (one_hot @ self.table).T.reshape(-1, *relative_position.shape)

    def _runs(self) -> list[tuple[int, int]]:
        """Return (start, bucket) of each run of relative positions that share a bucket, in ascending order.

        The first run has no true start: it holds all positions before the second one's.
        """
        buckets_per_side = len(self.table) // 2 if self.bidirectional else len(self.table)
        far = logarithmic_starts(buckets_per_side, self.max_distance)
        # the least distance in each bucket of one side
        least = [*range(buckets_per_side - len(far)), *far, self.max_distance + 1]
        before = [(1 - least[bucket + 1], bucket) for bucket in reversed(range(buckets_per_side))]
        after = [(max(1, least[bucket]), buckets_per_side + bucket) for bucket in range(buckets_per_side)]
        return before + after if self.bidirectional else before


@jax.tree_util.register_dataclass
@dataclass(frozen=True)
class AlibiBias:
    """ALiBi: minus the distance times a slope for each head (Press et al. 2022)."""

    slopes: Array  # float32 [N]

    def evaluate(self, relative_position: Int32[Array, "_ T S"]) -> Float32[Array, "_ N T S"]:
        """Return float32 [B|1,N,T,S] of relative positions int32 [B|1,T,S]."""
        return -jnp.abs(relative_position)[:, None] * self.slopes[None, :, None, None]

    def materialize(self, length: int, key_length: int) -> Float32[Array, "1 N {length} {key_length}"]:
        """Return float32 [1,N,T,S] of rows that both start at index 0."""
        return self.evaluate(relative_positions(length, key_length))

    @property
    def coefficients(self) -> Array:
        """Return float32 [N,1]: the slopes."""
        return self.slopes[:, None]

    @property
    def function(self) -> LinearDecay:
        """Return the function of relative position that a kernel evaluates with the coefficients."""
        return LinearDecay()


PositionBias = BucketedBias | AlibiBias
AnyBias = Array | PositionBias | None  # float32 [B|1,N|1,T,S], or an object; None: no bias


def materialize_bias(bias: AnyBias, length: int, key_length: int) -> Array | None:
    """Return the bias as an array float32 [B|1,N|1,T,S]; an array is returned as it is."""
    return bias.materialize(length, key_length) if isinstance(bias, PositionBias) else bias

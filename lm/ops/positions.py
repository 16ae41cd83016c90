"""Positions as embeddings and attention see them."""

from math import ceil, floor, log, pi

import jax
import jax.numpy as jnp
import numpy as np


def relative_position_bucket(
    relative_position: jax.Array, *, bidirectional: bool, num_buckets: int, max_distance: int
) -> jax.Array:
    """Bucket int32, same shape, of key position minus query position (Raffel et al. 2020, section 2.1).

    Half of the buckets hold one distance each, the others logarithmically growing ranges up to
    ``max_distance``.
    Bidirectional: the upper half of all buckets is for keys after the query. Otherwise those fall into bucket
    0.
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
    """The least distance in each logarithmic bucket: exact + j is reached at exact * (max / exact) ** (j /
    many).

    In integers, so that no rounding of a logarithm decides on a bucket.
    """
    exact = num_buckets // 2
    many = num_buckets - exact
    starts, distance = [], exact
    for j in range(many):
        while distance**many < exact ** (many - j) * max_distance**j:
            distance += 1
        starts.append(distance)
    return starts


# Of each layout: the exponents of 10,000 in the wavelengths, and how sines and cosines [..., D/2] are put
# together.
_SINUSOIDS = {
    "interleaved": (lambda i, half: i / half, lambda waves: jnp.stack(waves, -1)),  # Vaswani et al. 2017
    "halves": (lambda i, half: i / half, lambda waves: jnp.stack(waves, -2)),  # Marian
    # up to 10,000 itself
    "tensor2tensor": (lambda i, half: i / max(half - 1, 1), lambda waves: jnp.stack(waves, -2)),
}


def sinusoids(positions: jax.Array, width: int, *, layout: str) -> jax.Array:
    """float32 [B|1,T,D] of positions int [B|1,T]: sines and cosines of wavelengths from 2 pi to 10,000 times
    that.
    """
    exponents, join = _SINUSOIDS[layout]
    frequencies = 10_000.0 ** -exponents(np.arange(width // 2), width // 2)
    angles = _angles(positions, frequencies)
    return join((jnp.sin(angles), jnp.cos(angles))).reshape(*positions.shape, width)


def rotary_frequencies(
    width: int,
    *,
    base: float,
    scaling: str,
    factor: float,
    original_length: int,
    low_frequency_factor: float,
    high_frequency_factor: float,
    beta_fast: float,
    beta_slow: float,
) -> tuple[np.ndarray, float]:
    """float32 [R/2] radians a position of R = ``width`` turned features, and what cosines and sines are
    multiplied by.

    A scaling says which share of each frequency is kept; the rest is divided by ``factor``, so that the
    angles of ``factor`` times longer rows stay those of the rows trained on. It goes by the turns in
    ``original_length``.
    """
    frequencies = base ** -(np.arange(0, width, 2) / width)
    turns = original_length * frequencies / (2 * pi)

    def llama3():
        return (turns - low_frequency_factor) / (high_frequency_factor - low_frequency_factor)

    def yarn():  # Peng et al. 2023: linear in the number of the feature, whole features at the ends
        last, first = (width * log(turns[0] / beta) / (2 * log(base)) for beta in (beta_slow, beta_fast))
        first, last = max(floor(first), 0), min(ceil(last), width - 1)
        return 1 - (np.arange(width // 2) - first) / max(last - first, 1e-3)

    kept = {"none": lambda: 1.0, "linear": lambda: 0.0, "llama3": llama3, "yarn": yarn}[scaling]()
    frequencies *= 1 / factor + np.clip(kept, 0, 1) * (1 - 1 / factor)
    # Longer rows spread attention thinner; yarn sharpens it again.
    return frequencies.astype(np.float32), 0.1 * log(max(factor, 1)) + 1 if scaling == "yarn" else 1.0


def rotate(x: jax.Array, positions: jax.Array, frequencies: np.ndarray, factor: float) -> jax.Array:
    """x [B,T,N,H], whose first R features are turned by positions [B|1,T] times ``frequencies`` [R/2] (Su et
    al. 2021).

    Feature i turns with feature i + R/2, as in GPT-NeoX and Llama. (Su et al. pair neighbours; no family here
    does.)
    """
    half = len(frequencies)
    angles = _angles(positions, frequencies)[:, :, None, :]
    cos, sin = factor * jnp.cos(angles), factor * jnp.sin(angles)
    first, second, rest = jnp.split(x, (half, 2 * half), axis=-1)
    turned = (first * cos - second * sin, second * cos + first * sin)
    return jnp.concatenate([*(part.astype(x.dtype) for part in turned), rest], axis=-1)


def alibi_slopes(heads: int) -> np.ndarray:
    """float32 [N]: 2^(-8/N), its square, its cube, ... (Press et al. 2022).

    If N is no power of two: those of the power below it, then every second one of the power above it.
    """
    power = 1 << heads.bit_length() - 1

    def slopes(count):
        return 2.0 ** (-8 / count * np.arange(1, count + 1))

    return np.concatenate([slopes(power), slopes(2 * power)[::2]])[:heads].astype(np.float32)


def alibi(distance: jax.Array, heads: int) -> jax.Array:
    """float32 [B|1,N,T,S], the bias of distances int [B|1,T,S] for each head: the farther, the less."""
    return -jnp.abs(distance)[:, None] * alibi_slopes(heads)[None, :, None, None]


def _angles(positions: jax.Array, frequencies: np.ndarray) -> jax.Array:
    """float32 [..., F] of positions [...] and frequencies [F]: in bfloat16 positions above 256 would be
    alike.
    """
    positions = jnp.asarray(positions, jnp.float32)
    return positions[..., None] * jnp.asarray(frequencies, jnp.float32).reshape(*(1,) * positions.ndim, -1)

"""The layers of a Transformer; each parameter names its axes where it is made."""

from itertools import accumulate
from math import prod

import jax
import jax.numpy as jnp
from flax import nnx

from lm.nn.config import ModelConfig
from lm.ops.positions import relative_position_bucket
from lm.sharding import constrain

Keep = dict[str, jax.Array]  # dropout masks by where they go; none of them when evaluating


def param(value: jax.Array, *axes: str) -> nnx.Param:
    """A parameter and the names of its axes; one stacked over layers has one more axis, in front, than names."""
    if len(axes) != value.ndim:
        raise ValueError(f"a parameter of shape {value.shape} needs {value.ndim} axis names, not {axes}")
    return nnx.Param(value, axes=axes)


def normal(rngs: nnx.Rngs, shape: tuple[int, ...], std: float) -> jax.Array:
    return std * jax.random.normal(rngs.params(), shape, jnp.float32)


def draw_keep(key: jax.Array, rate: float, rows: int, shapes: dict[str, tuple[int, ...]]) -> Keep:
    """Dropout masks, bool [B,*shape] for each shape, True with probability 1 - rate.

    All come from one draw: a random generator is the costliest thing to compile in a training step. None has the
    queries' length as an axis: all positions of a row drop the same features, as in T5.
    """
    sizes = [prod(shape) for shape in shapes.values()]
    bits = constrain(jax.random.bernoulli(key, 1 - rate, (rows, sum(sizes))), "batch", "length")
    parts = jnp.split(bits, list(accumulate(sizes))[:-1], axis=1)
    return {name: part.reshape(rows, *shapes[name]) for name, part in zip(shapes, parts, strict=True)}


def dropout(x: jax.Array, keep: jax.Array | None, rate: float) -> jax.Array:
    """x where ``keep``, else 0, scaled so that the mean stays; x itself where there is no mask."""
    return x if keep is None else x * scaled(keep, rate).astype(x.dtype)


def scaled(keep: jax.Array, rate: float) -> jax.Array:
    """float32: 1 / (1 - rate) where ``keep``, else 0."""
    return keep / jnp.float32(1 - rate)


def split(key: jax.Array | None, count: int) -> list[jax.Array | None]:
    """``count`` keys, or as many times no key."""
    return [None] * count if key is None else list(jax.random.split(key, count))


class Linear(nnx.Module):
    """x [B,T,in] times a kernel [in,out], without bias, in the dtype of x."""

    def __init__(self, rngs: nnx.Rngs, shape: tuple[int, int], axes: tuple[str, str], std: float):
        self.kernel = param(normal(rngs, shape, std), *axes)

    def __call__(self, x: jax.Array) -> jax.Array:
        return x @ self.kernel[...].astype(x.dtype)


class Embed(nnx.Module):
    """Tokens [B,T] to [B,T,D] by ``table`` [V,D]."""

    def __init__(self, config: ModelConfig, rngs: nnx.Rngs):
        self.dtype = config.dtype
        self.table = param(normal(rngs, (config.vocab_size, config.d_model), 1.0), "vocab", "embed")

    def __call__(self, tokens: jax.Array) -> jax.Array:
        # A token that the table lacks gives NaN: clamping it to the last row would train on nonsense unseen.
        return self.table[...].at[tokens].get(mode="fill", fill_value=jnp.nan).astype(self.dtype)

    def logits(self, x: jax.Array) -> jax.Array:
        """float32 [B,T,V]: how well x [B,T,D] fits each row; scaled down because rows are as long as sqrt(D)."""
        x = x * x.shape[-1] ** -0.5
        return jnp.einsum("btd,vd->btv", x, self.table[...].astype(x.dtype), preferred_element_type=jnp.float32)


class RmsNorm(nnx.Module):
    """x [B,T,D] over its root mean square, times a scale [D]; no mean is subtracted and no bias added."""

    def __init__(self, config: ModelConfig):
        self.epsilon = config.norm_epsilon
        self.scale = param(jnp.ones((config.d_model,), jnp.float32), "norm")

    def __call__(self, x: jax.Array) -> jax.Array:
        mean_square = jnp.square(x.astype(jnp.float32)).mean(-1, keepdims=True)
        return (x * jax.lax.rsqrt(mean_square + self.epsilon) * self.scale[...][None, None, :]).astype(x.dtype)


ACTIVATIONS = {"relu": jax.nn.relu, "gated-gelu": lambda x: jax.nn.gelu(x, approximate=True)}  # tanh form, as T5 1.1


class Mlp(nnx.Module):
    """[B,T,D] to [B,T,D] through [B,T,F]; the gated kind multiplies the hidden layer by a second, linear one."""

    def __init__(self, config: ModelConfig, rngs: nnx.Rngs):
        self.config = config
        inward = (rngs, (config.d_model, config.d_ff), ("embed", "mlp"), config.d_model**-0.5)
        self.hidden = Linear(*inward)
        self.linear = Linear(*inward) if config.mlp.startswith("gated") else None
        self.out = Linear(rngs, (config.d_ff, config.d_model), ("mlp", "embed"), config.d_ff**-0.5)

    def __call__(self, x: jax.Array, keep: jax.Array | None) -> jax.Array:
        hidden = ACTIVATIONS[self.config.mlp](self.hidden(x))
        if self.linear is not None:
            hidden = hidden * self.linear(x)
        hidden = constrain(hidden, "batch", "length", "mlp")
        return self.out(dropout(hidden, keep, self.config.dropout))


class RelativeBias(nnx.Module):
    """A learnt number for each head and bucket of distances, added to the attention scores; ``table`` [buckets,N]."""

    def __init__(self, config: ModelConfig, rngs: nnx.Rngs):
        self.config = config
        shape = (config.relative_buckets, config.num_heads)
        self.table = param(normal(rngs, shape, config.d_model**-0.5), "buckets", "bias_heads")

    def __call__(self, relative_position: jax.Array, bidirectional: bool) -> jax.Array:
        """float32 [N, ...] for key minus query positions of any shape [...]."""
        bucket = relative_position_bucket(
            relative_position,
            bidirectional=bidirectional,
            num_buckets=self.config.relative_buckets,
            max_distance=self.config.relative_max_distance,
        )
        # A product with one-hot rows, not a look-up: its gradient is a product too and no scatter-add.
        one_hot = jax.nn.one_hot(bucket.reshape(-1), self.config.relative_buckets, dtype=jnp.float32)
        return (one_hot @ self.table[...]).T.reshape(-1, *bucket.shape)

    def full(self, length: int, bidirectional: bool) -> jax.Array:
        """float32 [1,N,T,T]: T + T - 1 different numbers for each head, laid out along the diagonals."""
        # With a period of one more than the row length, the rows of a repeated sequence slide by one to the right.
        period = 2 * length
        distance = jnp.arange(period)
        bias = self(jnp.where(distance < length, distance, distance - period), bidirectional)
        heads = bias.shape[0]
        rows = jnp.broadcast_to(bias[:, None, :], (heads, length, period)).reshape(heads, -1)
        rows = rows[:, : length * (period - 1)].reshape(heads, length, period - 1)
        return rows[None, :, :, :length]


def count(module: nnx.Module) -> int:
    """The number of parameters; of shapes alone too, as ``jax.eval_shape`` gives them."""
    return sum(prod(leaf.shape) for leaf in jax.tree.leaves(module))

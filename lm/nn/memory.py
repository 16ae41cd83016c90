"""A product-key memory in place of a block's feed-forward layer (Lample et al. 2019).

Shapes: B rows, T positions, D = d_model, N heads, K width of a half query, M keys of each half, R neighbours.
"""

import jax
import jax.numpy as jnp
from flax import nnx
from jax import Array
from jaxtyping import Float, Float32, Int32

from lm.config.model import ModelConfig
from lm.nn.costs import matmul_flops
from lm.nn.layers import LayerNorm, Linear, Module, normal, param


def nearest_pairs(
    scores: Float32[Array, "*batch 2 M"], count: int
) -> tuple[Float32[Array, "*batch {count}"], Int32[Array, "*batch {count}"]]:
    """Return the largest sums of a score of each half, and the numbers i * M + j of their pairs (i, j).

    A pair among the ``count`` largest has halves that are among the ``count`` largest themselves.
    """
    halves, keys = jax.lax.top_k(scores, count)
    sums = halves[..., 0, :, None] + halves[..., 1, None, :]
    best, index = jax.lax.top_k(sums.reshape(*sums.shape[:-2], -1), count)
    first = jnp.take_along_axis(keys[..., 0, :], index // count, axis=-1)
    second = jnp.take_along_axis(keys[..., 1, :], index % count, axis=-1)
    return best, first * scores.shape[-1] + second


class ProductKeyMemory(Module):
    """Values [M * M,D] of which each query of a token reads R, weighted by a softmax of their scores.

    A key of the memory is a pair of halves, and its score the sum of the products with the halves of the
    query. As in the code of Narang et al. 2021, queries have a layer norm, where Lample et al. have batch
    norm.
    """

    def __init__(self, config: ModelConfig, rngs: nnx.Rngs):
        self.config = config
        sizes, d_model = config.memory, config.d_model
        shape, axes = (d_model, sizes.heads * sizes.key_width), ("embed", "mlp")
        self.query = Linear(rngs, shape, axes, std=d_model**-0.5, use_bias=config.mlp_has_bias)
        half = sizes.key_width // 2
        self.norm = LayerNorm(half, config.norm.epsilon)
        keys = normal(rngs, (sizes.heads, 2, sizes.keys, half), half**-0.5)
        self.keys = param(keys, "bias_heads", "classes", "buckets", "kv")
        self.values = param(normal(rngs, (sizes.keys**2, d_model), 1.0), "memory", "embed")

    def __call__(self, x: Float[Array, "B T D"]) -> Float[Array, "B T D"]:
        """Return the sum [B,T,D] of what the queries of x [B,T,D] read."""
        sizes = self.config.memory
        query = self.norm(self.query(x).reshape(*x.shape[:2], sizes.heads, 2, -1))
        keys = self.keys[...].astype(query.dtype)
        scores = jnp.einsum("btnhk,nhmk->btnhm", query, keys, preferred_element_type=jnp.float32)
        best, index = nearest_pairs(scores, sizes.neighbours)
        weights, values = jax.nn.softmax(best, axis=-1), self.values[...]

        @jax.checkpoint  # otherwise the values of all tokens and heads would be saved for the backward pass
        def read(index: Array, weights: Array) -> Array:
            return jnp.einsum("btr,btrd->btd", weights, values[index])

        def add(total: Array, index_and_weights: tuple[Array, Array]) -> tuple[Array, None]:
            return total + read(*index_and_weights), None

        by_head = jnp.moveaxis(index, 2, 0), jnp.moveaxis(weights, 2, 0)
        total, _ = jax.lax.scan(add, jnp.zeros(x.shape, jnp.float32), by_head)
        return total.astype(x.dtype)

    def flops(self, length: int) -> int:
        """Return the FLOPs of ``length`` tokens, forward: queries, scores, and sums of values."""
        sizes = self.config.memory
        per_head = sizes.keys * sizes.key_width + sizes.neighbours * self.config.d_model
        return matmul_flops(self.query, length) + 2 * length * sizes.heads * per_head

    @property
    def inactive_parameters(self) -> int:
        """Return the number of parameters of values that a token does not read."""
        sizes = self.config.memory
        read = min(sizes.heads * sizes.neighbours, sizes.keys**2)
        return (sizes.keys**2 - read) * self.config.d_model

"""Branched attention: each head passes the feed-forward layer by itself (Ahmed et al. 2017).

Shapes: B rows, T positions, N heads with outputs of width Hv, D features.
"""

import jax
import jax.numpy as jnp
from flax import nnx
from jax import Array
from jaxtyping import Float, Float32

from lm.config.model import ModelConfig
from lm.nn.costs import matmul_flops
from lm.nn.layers import Linear, Module, broadcast_to_rank, param
from lm.nn.mlp import MLP
from lm.ops.products import dense


class Branches(Module):
    """The feed-forward layer f of the Weighted Transformer, which all heads of an attention pass.

    From the outputs o_n of the heads and their parts W_n of the output matrix it returns

        sum_n a_n f(k_n o_n W_n)

    where a (``addition_logits``) and k (``concatenation_logits``) each sum to 1, and o_n W_n includes the
    bias. They are softmaxes of parameters that start at 0; Ahmed et al. project them after each update.
    Nothing is dropped out within f.
    """

    def __init__(self, config: ModelConfig, rngs: nnx.Rngs):
        self.num_heads = config.attention.num_heads
        self.mlp = MLP(config, rngs)
        self.addition_logits = param(jnp.zeros((self.num_heads,), jnp.float32), "bias_heads")
        self.concatenation_logits = param(jnp.zeros((self.num_heads,), jnp.float32), "bias_heads")

    def __call__(self, head_outputs: Float[Array, "B T N Hv"], out: Linear) -> Float[Array, "B T D"]:
        """Return the sum [B,T,D] of all branches, given the projection of all heads' outputs."""
        by_head = jnp.moveaxis(head_outputs, 2, 0)
        kernels = out.kernel[...].astype(head_outputs.dtype).reshape(*head_outputs.shape[2:], -1)  # [N,Hv,D]

        @jax.checkpoint  # otherwise the hidden features of all heads would be saved for the backward pass
        def branch(head: Array, kernel: Array, scale: Array, weight: Array) -> Array:
            x = dense(head, kernel)
            if out.bias is not None:
                x = x + broadcast_to_rank(out.bias[...], x)
            return weight.astype(x.dtype) * self.mlp(scale.astype(x.dtype) * x, None)

        def add(total: Array, head_and_weights: tuple[Array, ...]) -> tuple[Array, None]:
            return total + branch(*head_and_weights), None

        start = jnp.zeros((*head_outputs.shape[:2], kernels.shape[-1]), head_outputs.dtype)
        inputs = by_head, kernels, self.weights(self.concatenation_logits), self.weights(self.addition_logits)
        return jax.lax.scan(add, start, inputs)[0]

    def weights(self, logits: nnx.Param) -> Float32[Array, " N"]:
        """Return the weight of each head, float32 [N]; they sum to 1."""
        return jax.nn.softmax(logits[...])

    def repeated_flops(self, length: int) -> int:
        """Return the FLOPs of ``length`` tokens in all branches but the first, forward."""
        return (self.num_heads - 1) * matmul_flops(self.mlp, length)

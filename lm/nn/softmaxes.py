"""A mixture of softmaxes as the output layer.

Shapes: B rows, T positions, K softmaxes, D = d_model, V tokens.
"""

from collections.abc import Callable

import jax
import jax.numpy as jnp
from flax import nnx
from jax import Array
from jaxtyping import Float, Float32

from lm.config.model import ModelConfig
from lm.nn.layers import Linear, Module


class SoftmaxMixture(Module):
    """log sum_k pi_k softmax(logits of tanh(W_k x)): a mixture of K softmaxes (Yang et al. 2018).

    The log-probabilities of all texts form a matrix of rank D + 1 at most with one softmax, of any rank with
    several. The output matrix is the same for all of them; the weights pi are a softmax of K products of x.
    """

    def __init__(self, config: ModelConfig, rngs: nnx.Rngs):
        width, self.count = config.d_model, config.output.softmaxes
        std = width**-0.5
        self.contexts = Linear(
            rngs, (width, self.count * width), ("embed", "mlp"), std=std, use_bias=config.bias
        )
        self.prior = Linear(rngs, (width, self.count), ("embed", "classes"), std=std, use_bias=config.bias)

    def __call__(
        self,
        x: Float[Array, "B T D"],
        logits_of: Callable[[Float[Array, "B T D"]], Float32[Array, "B T V"]],
    ) -> Float32[Array, "B T V"]:
        """Return log-probabilities float32 [B,T,V] of states x [B,T,D]; ``logits_of`` gives those of one.

        Softmaxes are added up one after another, and computed again in the backward pass, so that the logits
        of two are in memory at once. Probabilities below the least normal float32 count as that, and have no
        gradient.
        """
        weights = jax.nn.softmax(self.prior(x).astype(jnp.float32), axis=-1)
        contexts = jnp.tanh(self.contexts(x)).reshape(*x.shape[:-1], self.count, -1)
        contexts, weights = jnp.moveaxis(contexts, 2, 0), jnp.moveaxis(weights, 2, 0)

        @jax.checkpoint
        def component(context: Array, weight: Array) -> Array:
            return weight[..., None] * jax.nn.softmax(logits_of(context), axis=-1)

        def add(total: Array, context_and_weight: tuple[Array, Array]) -> tuple[Array, None]:
            return total + component(*context_and_weight), None

        first = component(contexts[0], weights[0])
        total, _ = jax.lax.scan(add, first, (contexts[1:], weights[1:]))
        return jnp.log(jnp.maximum(total, jnp.finfo(jnp.float32).tiny))

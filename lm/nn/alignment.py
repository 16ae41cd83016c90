"""Cross-attention of recurrent models, whose values are the encoder's states without a projection.

Bahdanau et al. 2015 (additive scores), Luong et al. 2015 (dot and multiplicative scores).
"""

import jax
from flax import nnx
from jax import Array
from jaxtyping import Bool, Float, Float32

from lm.config.model import ModelConfig
from lm.nn.attention_inputs import AttentionInputs
from lm.nn.cache import KeyValue
from lm.nn.costs import array_bytes, matmul_flops
from lm.nn.dropout import dropout_factors
from lm.nn.layers import Identity, Linear, Module, normal, param
from lm.ops.attention import (
    AttentionOptions,
    additive_attention,
    additive_scores,
    attention_weights,
)
from lm.ops.kernels.xla import xla_attention
from lm.ops.masks import materialize_mask
from lm.sharding import constrain


class LuongAttention(Module):
    """One head, whose score of a query s and a state h [D] is s . h ("dot") or s . W h ("multiplicative").

    Its output is a projection of the weighted mean of the states themselves. Norms make states D^0.5 long,
    so scores are scaled by D^-0.5.
    """

    num_heads = 1

    def __init__(self, config: ModelConfig, rngs: nnx.Rngs):
        self.config = config
        self.query: nnx.Module = Identity()
        self.key: nnx.Module = Identity()
        if config.cross_attention.kind == "multiplicative":
            self.key = _square_linear(config, rngs, "embed", "kv")
        self.out = _square_linear(config, rngs, "kv", "embed")

    def key_value(self, x: Float[Array, "B S D"], _positions: Array | None) -> KeyValue:
        """Return keys and values [B,S,1,D] of the encoder's states x [B,S,D]."""
        x = constrain(x, "batch", "key_length", "embed")
        return KeyValue(self.key(x)[:, :, None], x[:, :, None])

    def attend_to(
        self,
        x: Float[Array, "B T D"],
        kv: KeyValue,
        inputs: AttentionInputs,
        dropout_mask: Bool[Array, "B 1 1 S"] | None,
    ) -> Float[Array, "B T D"]:
        """Return [B,T,D] of x [B,T,D], which attends to keys and values; ``dropout_mask`` bool [B,1,1,S]."""
        factors = None if dropout_mask is None else dropout_factors(dropout_mask, self.config.dropout)
        mask = materialize_mask(inputs.mask, x.shape[1], kv.key.shape[1])
        out = self._attend(self._queries(x), kv, mask, factors)
        return self.out(out[:, :, 0])

    def weights(
        self, x: Float[Array, "B T D"], kv: KeyValue, inputs: AttentionInputs
    ) -> Float32[Array, "B 1 T S"]:
        """Return the alignment: the attention weights from x [B,T,D] to each state, float32 [B,1,T,S]."""
        mask = materialize_mask(inputs.mask, x.shape[1], kv.key.shape[1])
        return attention_weights(self._queries(x), kv.key, mask)

    def cross_flops(self, queries: int, keys: int) -> int:
        """Return the FLOPs of attention from ``queries`` positions of one row to ``keys`` of another."""
        products = matmul_flops(self.query, queries) + matmul_flops(self.key, keys)
        scores_and_mean = 2 * queries * keys * 2 * self.config.d_model
        return products + scores_and_mean + matmul_flops(self.out, queries)

    def cache_bytes(self, length: int) -> int:
        """Return the bytes of the keys and values of one row of ``length`` states."""
        x = jax.ShapeDtypeStruct((1, length, self.config.d_model), self.config.dtype)
        return array_bytes(jax.eval_shape(lambda module, x: module.key_value(x, None), self, x))

    def _attend(self, query: Array, kv: KeyValue, mask: Array | None, factors: Array | None) -> Array:
        options = AttentionOptions(dropout_factors=factors)
        return xla_attention(query, kv.key, kv.value, mask, None, options)

    def _queries(self, x: Array) -> Array:
        """Return [B,T,1,D] of x [B,T,D]."""
        return constrain(self.query(x), "batch", "length", "embed")[:, :, None]


class BahdanauAttention(LuongAttention):
    """One head, whose score of a query s and a state h [D] is v . tanh(W s + U h)."""

    def __init__(self, config: ModelConfig, rngs: nnx.Rngs):
        self.config, width = config, config.d_model
        self.query = _square_linear(config, rngs, "embed", "kv")
        self.key = _square_linear(config, rngs, "embed", "kv")
        self.vector = param(normal(rngs, (1, width), width**-0.5), "bias_heads", "kv")
        self.out = _square_linear(config, rngs, "kv", "embed")

    def weights(
        self, x: Float[Array, "B T D"], kv: KeyValue, inputs: AttentionInputs
    ) -> Float32[Array, "B 1 T S"]:
        """Return the alignment: the attention weights from x [B,T,D] to each state, float32 [B,1,T,S]."""
        scores = additive_scores(self._queries(x), kv.key, self.vector[...])
        mask = materialize_mask(inputs.mask, x.shape[1], kv.key.shape[1])
        return jax.nn.softmax(scores, axis=-1, where=mask)

    def _attend(self, query: Array, kv: KeyValue, mask: Array | None, factors: Array | None) -> Array:
        return additive_attention(query, kv.key, kv.value, self.vector[...], mask, dropout_factors=factors)


def _square_linear(config: ModelConfig, rngs: nnx.Rngs, in_axis: str, out_axis: str) -> Linear:
    """Return a linear layer [D,D], from the axis ``in_axis`` to ``out_axis``."""
    width = config.d_model
    return Linear(rngs, (width, width), (in_axis, out_axis), std=width**-0.5, use_bias=config.bias)

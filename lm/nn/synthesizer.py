"""Synthesizers: attention whose logits are not, or not only, products of queries and keys (Tay et al. 2021).

Shapes: B rows, T queries, S keys, N query heads and K value heads of width H, P = positions.max_length.
"""

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx
from jax import Array
from jax.ad_checkpoint import checkpoint_name
from jaxtyping import Bool, Float, Float32, Int

from lm.config.model import ModelConfig
from lm.nn.attention import Attention
from lm.nn.attention_inputs import AttentionInputs
from lm.nn.cache import KeyValue, LayerCache
from lm.nn.costs import matmul_flops
from lm.nn.dropout import dropout_factors
from lm.nn.layers import Linear, normal, param
from lm.ops.attention import attend_by_logits, attention_logits, repeat_heads
from lm.ops.masks import materialize_mask
from lm.ops.positions import RotaryPositions, materialize_bias


class Synthesizer(Attention):
    """Attention with logits from the query's position alone, or with logits that are parameters.

    Dense logits are relu(q) W for a query q and a matrix W [H,P] that all heads share. Random ones are a
    parameter [N,P,P], factorised ones the product of two of rank R. ``mixer.products`` adds the logits of
    attention, or mixes both with weights 1 - a and a, where a is the sigmoid of a parameter that starts at 0.
    Logits belong to positions within a text, so that packed texts have those of texts alone. Sizes and
    initial values are as in the code of Narang et al. 2021.
    """

    def __init__(self, config: ModelConfig, rngs: nnx.Rngs, _bidirectional: bool = False):
        super().__init__(config, rngs)
        form, sizes, length = config.mixer, config.attention, config.positions.max_length
        self.has_products = form.products != "none"
        if not self.has_products:
            self.key = self.key_norm = None
            if form.logits != "dense":
                self.query = self.query_norm = None
        dense = random = left = right = None
        if form.logits == "dense":
            shape = sizes.d_kv, length
            dense = Linear(rngs, shape, ("kv", "length"), std=sizes.d_kv**-0.5, use_bias=False)
        elif form.logits == "random":
            # Glorot's standard deviation where the last axis is the output: all weights start nearly alike.
            std = (2 / (length * (sizes.num_heads + length))) ** 0.5
            values = normal(rngs, (sizes.num_heads, length, length), std)
            random = param(values, "heads", "length", "length")
        else:
            std = (2 / (form.rank * (sizes.num_heads + length))) ** 0.5
            factor, axes = (sizes.num_heads, length, form.rank), ("heads", "length", "kv")
            left = param(normal(rngs, factor, std), *axes)
            right = param(normal(rngs, factor, std), *axes)
        self.dense, self.random, self.left, self.right = dense, random, left, right
        self.mixture = param(jnp.zeros((), jnp.float32)) if form.products == "mixed" else None

    def key_value(
        self, x: Float[Array, "B S D"], positions: Int[Array | np.ndarray, "#B S"] | RotaryPositions | None
    ) -> KeyValue:
        """Return keys and values [B,S,K,H] of x [B,S,D]; without products, keys have no features."""
        if self.has_products:
            return super().key_value(x, positions)
        value = self._split_heads(self.value(x), "key_length", self._key_axis)
        value = self.value_norm(checkpoint_name(value, "value_proj"))
        return KeyValue(value[..., :0], value)

    def attend_to(
        self,
        x: Float[Array, "B T D"],
        kv: KeyValue,
        inputs: AttentionInputs,
        dropout_mask: Bool[Array, "B N 1 S"] | None,
    ) -> Float[Array, "B T D"]:
        """Return the output [B,T,D] of x [B,T,D] with these values; arguments as in ``Attention``."""
        factors = None if dropout_mask is None else dropout_factors(dropout_mask, self.config.dropout)
        logits, mask = self.logits(x, kv, inputs), self._mask(x, kv, inputs)
        out = attend_by_logits(logits, kv.value, mask, dropout_factors=factors)
        return checkpoint_name(self.combine(x, checkpoint_name(out, "context")), "out_proj")

    def weights(
        self, x: Float[Array, "B T D"], kv: KeyValue, inputs: AttentionInputs
    ) -> Float32[Array, "B N T S"]:
        """Return the attention weights from x [B,T,D] to each key, float32 [B,N,T,S]."""
        weights = jax.nn.softmax(self.logits(x, kv, inputs), axis=-1, where=self._mask(x, kv, inputs))
        return jnp.broadcast_to(weights, (len(x), *weights.shape[1:]))

    def logits(
        self, x: Float[Array, "B T D"], kv: KeyValue, inputs: AttentionInputs
    ) -> Float32[Array, "#B N T S"]:
        """Return the logits float32 [B|1,N,T,S] of x [B,T,D], position biases included."""
        query = None if self.query is None else self.queries(x, None)
        positions, key_positions = inputs.positions, inputs.key_positions
        if positions is None or key_positions is None:
            positions = key_positions = jnp.arange(x.shape[1])[None]
        logits = _at_key_positions(self._by_position(query, positions), key_positions)
        no_features = jnp.zeros((*x.shape[:2], self.num_heads, 0), x.dtype)
        bias = self.score_bias(no_features if query is None else query, kv.key, inputs)
        bias = materialize_bias(bias, x.shape[1], kv.value.shape[1])
        cap = self.options.logit_cap
        if not self.has_products:
            return attention_logits(logits, bias, logit_cap=cap)
        key = repeat_heads(kv.key, self.num_heads)
        products = jnp.einsum("btnh,bsnh->bnts", query, key, preferred_element_type=jnp.float32)
        products = products * self.options.scale
        if self.mixture is None:
            return attention_logits(products + logits, bias, logit_cap=cap)
        share = jax.nn.sigmoid(self.mixture[...])
        return attention_logits((1 - share) * products + share * logits, bias, logit_cap=cap)

    def init_carry(self, rows: int, length: int) -> LayerCache:
        """Return an empty cache [B,K,S,H] for ``length`` positions; without products, of values alone."""
        cache = super().init_carry(rows, length)
        return cache if self.has_products else LayerCache(cache.key[..., :0], cache.value)

    def flops(self, length: int, visible: int, /) -> int:
        """Return the FLOPs of the forward pass over one row, as ``Attention`` does.

        Dense logits are computed for all P positions, of each head. The product of factorised logits is left
        out: it is computed once for a batch.
        """
        heads_but_one = self.num_heads - 1
        products = matmul_flops(self, length) + heads_but_one * matmul_flops(self.dense, length)
        return products + self._score_flops(length, visible)

    def _score_flops(self, queries: int, keys: int) -> int:
        sizes = self.config.attention
        width = sizes.value_width + (sizes.d_kv if self.has_products else 0)
        return 2 * queries * keys * sizes.num_heads * width

    def _mask(self, x: Array, kv: KeyValue, inputs: AttentionInputs) -> Array | None:
        return materialize_mask(inputs.mask, x.shape[1], kv.value.shape[1])

    def _by_position(self, query: Array | None, positions: Array) -> Array:
        """Return logits float32 [B|1,N,T,P] for keys at all positions, NaN for a query beyond the last."""
        if self.dense is not None:
            hidden = jax.nn.relu(query)
            return jnp.moveaxis(self.dense(hidden).astype(jnp.float32), 2, 1)
        if self.random is not None:
            table = self.random[...]
        else:
            table = jnp.einsum("ntr,nsr->nts", self.left[...], self.right[...])
        rows = table.at[:, positions].get(mode="fill", fill_value=jnp.nan)  # [N,B|1,T,P]
        return jnp.moveaxis(rows, 0, 1)


def _at_key_positions(
    logits: Float32[Array, "#B N T P"], positions: Int[Array, "#B S"]
) -> Float32[Array, "#B N T S"]:
    """Return the logits [B|1,N,T,S] for keys at positions [B|1,S]; NaN for keys beyond the last."""
    rows = max(len(logits), len(positions))
    if len(positions) == 1:
        return logits.at[..., positions[0]].get(mode="fill", fill_value=jnp.nan)
    logits = jnp.broadcast_to(logits, (rows, *logits.shape[1:]))
    return jax.vmap(lambda row, index: row.at[..., index].get(mode="fill", fill_value=jnp.nan))(
        logits, positions
    )

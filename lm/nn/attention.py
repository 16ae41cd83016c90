"""Attention as a layer: projections, positions and the KV cache around the formula of ``lm.ops.attention``.

Shapes: B rows, T queries, S keys, D features; N query heads and K key heads of width H, values of width Hv.
"""

import jax.numpy as jnp
import numpy as np
from flax import nnx
from jax import Array
from jax.ad_checkpoint import checkpoint_name
from jaxtyping import Bool, Float, Float32, Int

from lm.config.model import ModelConfig
from lm.nn.attention_dispatch import attend
from lm.nn.attention_inputs import AttentionInputs
from lm.nn.branched import Branches
from lm.nn.cache import Carry, KeyValue, LayerCache
from lm.nn.costs import TokenMixer, matmul_flops
from lm.nn.dropout import DropoutMasks, Shapes, dropout_factors
from lm.nn.layers import Identity, Linear, Module, make_norm, normal, param
from lm.nn.positions import SinusoidProducts
from lm.ops.attention import AttentionOptions, attention_weights, bilinear_query, repeat_heads
from lm.ops.masks import AnyMask, materialize_mask
from lm.ops.positions import (
    AnyBias,
    RotaryPositions,
    disentangled_bias,
    materialize_bias,
    relative_key_bias,
    rotate,
)
from lm.sharding import constrain


def attention_scale(config: ModelConfig) -> float:
    """Return the factor by which products of queries and keys are multiplied."""
    base = config.base_attention
    # T5 does not scale products: its query kernels start smaller instead.
    scale = 1.0
    if base.scores != "dot":
        # In disentangled attention a score is the sum of n = 2 or 3 products, and divided by sqrt(n H) in
        # place of sqrt(H) (He et al. 2021, equation 4). All other scores have one term.
        scale = base.product_scale * config.positions.score_terms**-0.5
    # muP divides by the width of heads, not by its root: trained queries and keys are correlated.
    return scale * (base.d_kv / config.attention.d_kv)


def make_head_norm(config: ModelConfig, width: int, is_normed: bool) -> nnx.Module:
    """Return the norm of each head's ``width`` features; Identity unless ``is_normed``."""
    return make_norm(config.norm, width, config.attention.norm_scale) if is_normed else Identity()


class Projections(Module):
    """Queries, keys and values of multi-head, grouped-query and multi-query attention."""

    def __init__(self, config: ModelConfig, rngs: nnx.Rngs):
        self.config = config
        d_model, use_bias = config.d_model, config.qkv_has_bias
        query_width = config.attention.num_heads * config.attention.d_kv
        key_width = config.attention.key_value_heads * config.attention.d_kv
        value_features = config.attention.key_value_heads * config.attention.value_width
        # This std gives queries and keys unit variance. T5 scales query kernels by H^-0.5 instead of logits.
        std = d_model**-0.5
        query_std = std * config.base_attention.d_kv**-0.5 if config.attention.scores == "dot" else std
        key_axes = ("embed", self._key_axis)
        self.query = Linear(
            rngs, (d_model, query_width), ("embed", "heads"), std=query_std, use_bias=use_bias
        )
        self.key = Linear(rngs, (d_model, key_width), key_axes, std=std, use_bias=config.key_has_bias)
        self.value = Linear(rngs, (d_model, value_features), key_axes, std=std, use_bias=use_bias)
        norms_heads_together = config.attention.qk_norm_features == "all-heads"
        widths = (query_width, key_width) if norms_heads_together else (config.attention.d_kv,) * 2
        self.query_norm = make_head_norm(config, widths[0], config.attention.qk_norm)
        self.key_norm = make_head_norm(config, widths[1], config.attention.qk_norm)
        self.value_norm = make_head_norm(config, config.attention.value_width, config.attention.value_norm)

    def queries(
        self, x: Float[Array, "B T D"], positions: Int[Array | np.ndarray, "#B T"] | RotaryPositions | None
    ) -> Float[Array, "B T N H"]:
        """Return queries [B,T,N,H] of x [B,T,D]."""
        query = self._split_heads(self.query(x), "length", "heads")
        query = checkpoint_name(query, "query_proj")
        return self._rotate(self._normed(query, self.query_norm), positions)

    def key_value(
        self, x: Float[Array, "B S D"], positions: Int[Array | np.ndarray, "#B S"] | RotaryPositions | None
    ) -> KeyValue:
        """Return keys and values [B,S,K,H] of x [B,S,D]; without ``positions`` no feature is rotated."""
        key = self._split_heads(self.key(x), "key_length", self._key_axis)
        value = self._split_heads(self.value(x), "key_length", self._key_axis)
        key, value = checkpoint_name(key, "key_proj"), checkpoint_name(value, "value_proj")
        key = self._rotate(self._normed(key, self.key_norm), positions)
        return KeyValue(key, self.value_norm(value))

    @property
    def _key_axis(self) -> str:
        # Where K differs from N it has its own logical axis: devices that divide N heads may not divide K.
        return "heads" if self.config.attention.num_key_value_heads is None else "kv_heads"

    def _split_heads(self, x: Array, length: str, axis: str) -> Array:
        sizes = self.config.attention
        num_heads = sizes.num_heads if axis == "heads" else sizes.key_value_heads
        return constrain(x.reshape(*x.shape[:-1], num_heads, -1), "batch", length, axis, "kv")

    def _normed(self, x: Array, norm: nnx.Module) -> Array:
        """Return queries or keys x [B,T,N,H] normalised, each head alone or all together."""
        if self.config.attention.qk_norm_features == "head":
            return norm(x)
        return norm(x.reshape(*x.shape[:2], -1)).reshape(x.shape)

    def _rotate(self, x: Array, positions: Array | np.ndarray | RotaryPositions | None) -> Array:
        if self.config.positions.kind != "rotary" or positions is None:
            return x
        rotary = self.config.positions.rotary
        frequencies, attention_scaling = rotary.frequencies(self.config.attention.d_kv)
        if not isinstance(positions, RotaryPositions):
            positions = RotaryPositions(positions, frequencies)
        index = jnp.asarray(positions.positions)
        return rotate(x, index, positions.frequencies, attention_scaling, rotary.layout)


class Attention(Projections, TokenMixer):
    """Multi-head attention: a token mixer, or with ``is_cross`` a decoder's attention to its encoder.

    ``_bidirectional`` is an argument of all mixers; attention ignores it, since its mask decides.
    """

    has_attention_logits = True

    def __init__(
        self, config: ModelConfig, rngs: nnx.Rngs, _bidirectional: bool = False, *, is_cross: bool = False
    ):
        super().__init__(config, rngs)
        inner = config.attention.num_heads * config.attention.value_width
        self.out = Linear(
            rngs, (inner, config.d_model), ("heads", "embed"), std=inner**-0.5, use_bias=config.bias
        )
        self.out_norm = make_head_norm(config, config.attention.value_width, config.attention.output_norm)
        if is_cross and config.cross_attention.start == "mimetic":
            self._init_queries_as_keys()
        has_vectors = config.positions.kind == "relative-keys" and not is_cross
        self.relative_keys = _relative_keys(config, rngs) if has_vectors else None
        positions = config.positions
        has_own_keys = positions.has_own_projections and positions.has_position_keys
        has_own_queries = positions.has_own_projections and positions.has_position_queries
        self.position_key = (
            _position_projection(config, rngs, self._key_axis, config.key_has_bias) if has_own_keys else None
        )
        self.position_query = (
            _position_projection(config, rngs, "heads", config.qkv_has_bias) if has_own_queries else None
        )
        has_sinusoids = positions.kind == "relative-sinusoids" and not is_cross
        self.sinusoids = SinusoidProducts(config, rngs) if has_sinusoids else None
        self.bilinear = _bilinear_weight(config, rngs) if config.attention.scores == "bilinear" else None
        has_branches = config.attention.branching == "weighted"
        self.branches = Branches(config, rngs) if has_branches else None
        # The projections of a Longformer's global positions; checkpoints call them globals.
        separate = config.sparsity.projections == "separate" and not is_cross
        self.globals = Projections(config, rngs) if separate else None

    def __call__(
        self,
        x: Float[Array, "B T D"],
        inputs: AttentionInputs,
        cache: Carry | None,
        dropout_masks: DropoutMasks,
    ) -> tuple[Float[Array, "B T D"], Carry | None]:
        """Return the output [B,T,D] of self-attention on x [B,T,D], and the updated cache.

        With a cache, keys and values of x are written to it, and x attends to the whole cache. If attention
        is merged, x also attends to the keys and values of the encoder, ``inputs.encoder_kv``.
        """
        kv = self.row_key_value(x, inputs)
        if cache is not None:
            cache = cache.write(kv, inputs.cache_index)
            kv = cache.key_value()
        kv = self.all_keys(kv, inputs)
        return self.attend_to(x, kv, inputs, dropout_masks.get("attention")), cache

    def row_key_value(self, x: Float[Array, "B S D"], inputs: AttentionInputs) -> KeyValue:
        """Return the keys and values [B,S,K,H] of each row of x [B,S,D].

        Those of a query stream are the keys and values of the row before it, its content stream.
        """
        if not inputs.has_query_stream:
            return self.key_value(x, inputs.rotary_positions)
        assert inputs.positions is not None, "all inputs of whole rows have them"
        positions = inputs.positions if len(inputs.positions) == 1 else inputs.positions[::2]
        kv = self.key_value(x[::2], inputs._replace(positions=positions).rotary_positions)
        return KeyValue(*(jnp.repeat(part, 2, axis=0) for part in kv))

    def all_keys(self, kv: KeyValue, inputs: AttentionInputs) -> KeyValue:
        """Return keys and values [B,S,K,H] of the row and, if attention is merged, those of the encoder."""
        if inputs.encoder_kv is None:
            return kv
        pairs = zip(kv, inputs.encoder_kv, strict=True)
        return KeyValue(*(jnp.concatenate(pair, axis=1) for pair in pairs))

    def attend_to(
        self,
        x: Float[Array, "B T D"],
        kv: KeyValue,
        inputs: AttentionInputs,
        dropout_mask: Bool[Array, "B N 1 S"] | None,
    ) -> Float[Array, "B T D"]:
        """Return the output [B,T,D] of attention from x [B,T,D] to keys and values.

        ``dropout_mask`` bool [B,N,1,S] is False where attention weights are dropped; None: no dropout.
        """
        options = self.options
        if dropout_mask is not None:
            factors = dropout_factors(dropout_mask, self.config.dropout)
            options = options._replace(dropout_factors=factors)
        query = self._queries(self, x, inputs)
        out = attend(self.config, query, kv, inputs.mask, self.score_bias(query, kv.key, inputs), options)
        if self._has_global_projections(inputs):
            # Both outputs are computed at all positions, and one of them is selected: shapes stay static.
            query = self._queries(self.globals, x, inputs)
            kv = self.globals.key_value(x, inputs.rotary_positions)
            bias = self.score_bias(query, kv.key, inputs)
            global_out = attend(self.config, query, kv, inputs.global_mask, bias, options)
            out = jnp.where(inputs.global_tokens[:, :, None, None], global_out, out)
        return checkpoint_name(self.combine(x, out), "out_proj")

    def combine(
        self, x: Float[Array, "B T D"], head_outputs: Float[Array, "B T N Hv"]
    ) -> Float[Array, "B T D"]:
        """Return the layer's output [B,T,D] from its input x [B,T,D] and the heads' outputs [B,T,N,Hv].

        A subclass may gate, mix or normalise the outputs of heads here.
        """
        head_outputs = self.out_norm(head_outputs)
        if self.branches is not None:
            return self.branches(head_outputs, self.out)
        return self.out(head_outputs.reshape(*x.shape[:-1], -1))

    def score_bias(
        self, query: Float[Array, "B T N _"], key: Float[Array, "B S K _"], inputs: AttentionInputs
    ) -> AnyBias:
        """Return the bias that is added to the scores of these queries and keys.

        It is float32 [B|1,N|1,T|1,S|1], an object that kernels evaluate, or None: the stack's position bias
        (``inputs.bias``) or, with vectors of relative positions, the products of queries or keys with them.
        Scores are scaled and capped before it is added. Queries and keys come normalised and rotated. In
        decoding S is the length of the cache, whose unwritten positions the mask hides.

        A subclass that adds to the result calls ``materialize_bias`` first, which makes an array of an
        object.
        """
        scale = attention_scale(self.config)
        if inputs.relative_embeddings is not None:
            key = repeat_heads(key, query.shape[2])
            if self.sinusoids is not None:
                return scale * self.sinusoids(query, key, inputs.relative_embeddings, inputs.token_types)
            return scale * disentangled_bias(query, key, *self._position_vectors(inputs.relative_embeddings))
        if self.relative_keys is None or inputs.buckets is None:
            return inputs.bias
        return relative_key_bias(query * scale, self.relative_keys[...].astype(query.dtype), inputs.buckets)

    def weights(
        self, x: Float[Array, "B T D"], kv: KeyValue, inputs: AttentionInputs
    ) -> Float32[Array, "B N T S"]:
        """Return the attention weights from x [B,T,D] to each key, float32 [B,N,T,S]."""
        query = self._queries(self, x, inputs)
        local = self._weights(query, kv, inputs.mask, self.score_bias(query, kv.key, inputs))
        if not self._has_global_projections(inputs):
            return local
        query = self._queries(self.globals, x, inputs)
        kv = self.globals.key_value(x, inputs.rotary_positions)
        bias = self.score_bias(query, kv.key, inputs)
        global_weights = self._weights(query, kv, inputs.global_mask, bias)
        return jnp.where(inputs.global_tokens[:, None, :, None], global_weights, local)

    @property
    def options(self) -> AttentionOptions:
        """Return the options of attention that the settings ask for."""
        return AttentionOptions(scale=attention_scale(self.config), logit_cap=self.config.attention.logit_cap)

    @property
    def num_heads(self) -> int:
        """Return N."""
        return self.config.attention.num_heads

    def init_carry(self, rows: int, length: int) -> Carry:
        """Return an empty KV cache [B,K,S,H] for ``length`` positions; masks hide those not yet written."""
        config, shape = self.config, (rows, self.config.attention.key_value_heads, length)
        key = jnp.zeros((*shape, config.attention.d_kv), config.dtype)
        value = jnp.zeros((*shape, config.attention.value_width), config.dtype)
        return LayerCache(key, value)

    def flops(self, length: int, visible: int, /) -> int:
        """Return the FLOPs of the forward pass over one row of ``length`` tokens.

        Each token attends to ``visible`` tokens. The products with all matrices are counted, also those that
        a subclass adds, and those with bilinear weights and with vectors of relative positions. These are not
        counted:

        - separate projections of global tokens;
        - projections of relative positions, which are computed once for all rows of a batch;
        - other arrays of rank 3 or more. A subclass that adds one overrides this method.
        """
        products = matmul_flops(self, length) - matmul_flops(self.globals, length)
        products += self._bilinear_flops(length) + self._relative_key_flops(length)
        products += self._disentangled_flops(length) + self._sinusoid_flops(length)
        products += self._branch_flops(length)
        return products + self._score_flops(length, visible)

    def cross_flops(self, queries: int, keys: int) -> int:
        """Return the FLOPs of cross-attention from ``queries`` tokens of one row to ``keys`` of another."""
        flops_per_key = matmul_flops(self.key, 1) + matmul_flops(self.value, 1)
        # those of all matrices but the keys' and values'
        query_matrices = matmul_flops(self, 1) - flops_per_key
        flops_per_query = query_matrices + self._bilinear_flops(1) + self._branch_flops(1)
        return queries * flops_per_query + self.merged_flops(queries, keys)

    def merged_flops(self, queries: int, keys: int) -> int:
        """Return the FLOPs of ``keys`` tokens of another row as further keys of ``queries`` tokens."""
        flops_per_key = matmul_flops(self.key, 1) + matmul_flops(self.value, 1)
        return keys * flops_per_key + self._score_flops(queries, keys)

    def dropout_shapes(self, key_length: int) -> Shapes:
        """Return one row's shape [N,1,S] of the mask of attention weights; all queries share it, as in T5."""
        return {"attention": (self.num_heads, 1, key_length)}

    def _weights(self, query: Array, kv: KeyValue, mask: AnyMask, bias: AnyBias) -> Array:
        lengths = query.shape[1], kv.key.shape[1]
        mask, bias = materialize_mask(mask, *lengths), materialize_bias(bias, *lengths)
        options = self.options
        return attention_weights(query, kv.key, mask, bias, scale=options.scale, logit_cap=options.logit_cap)

    def _score_flops(self, queries: int, keys: int) -> int:
        """Return the FLOPs of the logits of all heads, and of the weighted sums of values."""
        sizes = self.config.attention
        return 2 * queries * keys * sizes.num_heads * (sizes.d_kv + sizes.value_width)

    def _bilinear_flops(self, queries: int) -> int:
        """Return the FLOPs of multiplying queries by the bilinear weight [N,H,H]; 0 without one."""
        if self.bilinear is None:
            return 0
        return 2 * queries * self.config.attention.num_heads * self.config.attention.d_kv**2

    def _branch_flops(self, queries: int) -> int:
        """Return the extra FLOPs of a feed-forward layer that each branch has, not one for all; 0 without."""
        return 0 if self.branches is None else self.branches.repeated_flops(queries)

    def _relative_key_flops(self, queries: int) -> int:
        """Return the FLOPs of multiplying queries by the vectors of relative positions; 0 without them."""
        return 0 if self.relative_keys is None else 2 * queries * self.relative_keys.size

    def _disentangled_flops(self, length: int) -> int:
        """Return the FLOPs of disentangled attention over one row beyond those of other attention."""
        own_projections = matmul_flops(self.position_key, length) + matmul_flops(self.position_query, length)
        sizes, added = self.config.attention, self.config.positions.score_terms - 1
        vectors = 2 * length - 1  # one for each relative position
        return added * 2 * length * vectors * sizes.num_heads * sizes.d_kv - own_projections

    def _sinusoid_flops(self, length: int) -> int:
        """Return the FLOPs of products with sinusoids over one row beyond those of all its matrices."""
        if self.sinusoids is None:
            return 0
        return self.sinusoids.flops(length) - matmul_flops(self.sinusoids, length)

    def _position_vectors(self, embeddings: Array) -> tuple[Array | None, Array | None]:
        """Return the keys and queries [P,N,H] of relative positions with embeddings [P,D]; None if unused."""
        sizes, positions, x = self.config.attention, self.config.positions, embeddings[None]
        position_keys = position_queries = None
        if positions.has_position_keys:
            key = self.key if self.position_key is None else self.position_key
            heads = key(x).reshape(*x.shape[:2], sizes.key_value_heads, sizes.d_kv)
            position_keys = repeat_heads(self._normed(heads, self.key_norm), sizes.num_heads)[0]
        if positions.has_position_queries:
            query = self.query if self.position_query is None else self.position_query
            heads = query(x).reshape(*x.shape[:2], sizes.num_heads, sizes.d_kv)
            position_queries = self._normed(heads, self.query_norm)[0]
        return position_keys, position_queries

    def _has_global_projections(self, inputs: AttentionInputs) -> bool:
        return self.globals is not None and inputs.global_tokens is not None

    def _queries(self, projections: Projections, x: Array, inputs: AttentionInputs) -> Array:
        """Return queries [B,T,N,H], multiplied by the bilinear weight if there is one."""
        query = projections.queries(x, inputs.rotary_positions)
        if self.bilinear is None:
            return query
        return bilinear_query(query, self.bilinear[...].astype(x.dtype))

    def _init_queries_as_keys(self) -> None:
        """Initialise each head's query kernel [D,H] as its key kernel, scaled to the usual std.

        The query kernel times the transposed key kernel is then a multiple of the identity, plus noise of
        mean 0 (mimetic initialisation, Trockman and Kolter 2023). So a query tends to score the keys of
        states like its own highest.
        """
        d_model, sizes = self.config.d_model, self.config.attention
        key_kernel = self.key.kernel[...].reshape(d_model, sizes.key_value_heads, sizes.d_kv)
        kernel = jnp.repeat(key_kernel, sizes.num_heads // sizes.key_value_heads, axis=1)
        scale = self.config.base_attention.d_kv**-0.5 if sizes.scores == "dot" else 1.0
        self.query.kernel = param(scale * kernel.reshape(d_model, -1), "embed", "heads")


def _bilinear_weight(config: ModelConfig, rngs: nnx.Rngs) -> nnx.Param:
    """Return the weight [N,H,H] of bilinear scores; its columns have about unit norm."""
    shape = config.attention.num_heads, config.attention.d_kv, config.attention.d_kv
    return param(normal(rngs, shape, config.attention.d_kv**-0.5), "bias_heads", "kv", "kv")


def _relative_keys(config: ModelConfig, rngs: nnx.Rngs) -> nnx.Param:
    """Return the vectors [N,H,R] of relative positions, of each head and bucket."""
    sizes, std = config.attention, config.attention.d_kv**-0.5
    shape = sizes.num_heads, sizes.d_kv, config.positions.relative_buckets
    return param(normal(rngs, shape, std), "heads", "kv", "buckets")


def _position_projection(config: ModelConfig, rngs: nnx.Rngs, axis: str, use_bias: bool) -> Linear:
    """Return a projection of relative positions to queries, or to keys where ``axis`` is that of keys."""
    sizes = config.attention
    heads = sizes.num_heads if axis == "heads" else sizes.key_value_heads
    shape, std = (config.d_model, heads * sizes.d_kv), config.d_model**-0.5
    return Linear(rngs, shape, ("embed", axis), std=std, use_bias=use_bias)

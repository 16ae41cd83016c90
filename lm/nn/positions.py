"""Parameters of relative positions: T5's learned bias, DeBERTa's embeddings, Transformer-XL's products."""

import jax.numpy as jnp
import numpy as np
from flax import nnx
from jax import Array
from jaxtyping import Float, Float32, Int

from lm.config.model import ModelConfig
from lm.nn.layers import Identity, Linear, Module, embedding_std, make_norm, normal, param
from lm.ops.positions import (
    BucketedBias,
    disentangled_bias,
    initial_bias_slopes,
    relative_type_bias,
    signed_position_bucket,
    sinusoids,
)


class RelativePositionBias(Module):
    """A learned number per head and bucket of relative positions, added to attention logits.

    ``bidirectional``: whether the stack attends ahead too. In ``__init__`` it only decides which relative
    positions a bucket holds if the table starts as straight lines ("slopes"); a table that both stacks share
    starts as an encoder's.
    """

    def __init__(self, config: ModelConfig, rngs: nnx.Rngs, bidirectional: bool):
        self.config = config
        table = normal(
            rngs, (config.positions.relative_buckets, config.attention.num_heads), config.base_width**-0.5
        )
        if config.positions.relative_bias_start == "slopes":
            bias = BucketedBias(table, bidirectional, config.positions.relative_max_distance)
            slopes = initial_bias_slopes(config.attention.num_heads)
            table = jnp.asarray(-bias.mean_distances[:, None] * slopes)
        self.table = param(table, "buckets", "bias_heads")

    def __call__(self, bidirectional: bool) -> BucketedBias:
        """Return the bias of relative positions, with buckets for both directions or for one."""
        return BucketedBias(self.table[...], bidirectional, self.config.positions.relative_max_distance)


class RelativeEmbeddings(Module):
    """An embedding of each bucket of relative positions, which the layers of a stack share (DeBERTa).

    Each layer projects them to keys and queries.
    """

    def __init__(self, config: ModelConfig, rngs: nnx.Rngs):
        self.config = config
        shape = config.positions.relative_buckets, config.d_model
        std = embedding_std(config.output.logits, config.d_model)
        self.table = param(normal(rngs, shape, std), "buckets", "embed")
        has_norm = config.positions.relative_norm
        self.norm = make_norm(config.norm, config.d_model) if has_norm else Identity()

    def __call__(self, length: int, key_length: int) -> Float[Array, "P D"]:
        """Return the embedding of each relative position from 1 - length to key_length - 1, [P,D]."""
        buckets = signed_position_bucket(
            np.arange(1 - length, key_length),
            num_buckets=self.config.positions.relative_buckets,
            max_distance=self.config.positions.relative_max_distance,
        )
        return self.norm(self.table[...].astype(self.config.dtype))[buckets]


class RelativeSinusoids(Module):
    """The sinusoid of each relative position, which the layers of a stack share; it has no parameters."""

    def __init__(self, config: ModelConfig):
        self.config = config

    def __call__(self, length: int, key_length: int) -> Float[Array, "P D"]:
        """Return the sinusoid of each relative position from 1 - length to key_length - 1, [P,D].

        Each is that of the query's position minus the key's, as in Dai et al. 2019 and the released programs.
        """
        relative_position = jnp.arange(1 - length, key_length)
        table = sinusoids(-relative_position, self.config.d_model, layout="halves")
        return table.astype(self.config.dtype)


class SinusoidProducts(Module):
    """Computes what a layer of Transformer-XL or XLNet adds to the products of queries and keys.

    Of query i, key j, the key r_ij of their relative position, and learned vectors u, v and w of each head it
    is

        u . k_j  +  (q_i + v) . r_ij  +  (q_i + w) . s_ij

    The first two are the terms (c), (b) and (d) of Dai et al. 2019, section 3.3; (a) is q_i . k_j. In the
    last one, XLNet's alone (Yang et al. 2019, section 2.5), s_ij is one of two learned vectors: that of
    equal or that of different token types.
    """

    def __init__(self, config: ModelConfig, rngs: nnx.Rngs):
        self.config = config
        sizes = config.attention
        heads = sizes.num_heads, sizes.d_kv
        shape, std = (config.d_model, sizes.num_heads * sizes.d_kv), config.d_model**-0.5
        self.projection = Linear(rngs, shape, ("embed", "heads"), std=std, use_bias=False)

        def bias() -> nnx.Param:
            return param(jnp.zeros(heads, jnp.float32), "heads", "kv")

        self.content_bias, self.position_bias = bias(), bias()
        has_types = config.positions.relative_types
        self.type_bias = bias() if has_types else None
        type_keys = normal(rngs, (2, *heads), sizes.d_kv**-0.5) if has_types else None
        self.type_keys = None if type_keys is None else param(type_keys, "classes", "heads", "kv")

    def __call__(
        self,
        query: Float[Array, "B T N H"],
        key: Float[Array, "B S N H"],
        sinusoids: Float[Array, "P D"],
        types: Int[Array | np.ndarray, "B S"] | None,
    ) -> Float32[Array, "B N T S"]:
        """Return the sum [B,N,T,S], for the sinusoid of each relative position and the types of a row.

        Without ``types`` all tokens have one. Its term is then the same for all keys, and left out.
        """
        content_bias = self.content_bias[...].astype(key.dtype)
        of_keys = jnp.einsum("nh,bsnh->bns", content_bias, key, preferred_element_type=jnp.float32)
        position_keys = self.projection(sinusoids).reshape(len(sinusoids), *content_bias.shape)
        by_position = disentangled_bias(_plus(query, self.position_bias), key, position_keys, None)
        bias = of_keys[:, :, None, :] + by_position
        if types is None or self.type_keys is None:
            return bias
        type_keys = self.type_keys[...].astype(query.dtype)
        return bias + relative_type_bias(_plus(query, self.type_bias), type_keys, types)

    def flops(self, length: int) -> int:
        """Return the FLOPs of one row of ``length`` tokens, without the projection, which all rows share."""
        vectors = 2 * length - 1  # one for each relative position
        vectors_of_types = 0 if self.type_keys is None else len(self.type_keys)
        per_vector = 2 * length * self.config.attention.num_heads * self.config.attention.d_kv
        return per_vector * (1 + vectors + vectors_of_types)


def _plus(query: Array, bias: nnx.Param) -> Array:
    """Return queries [B,T,N,H] plus the bias of each head [N,H]."""
    return query + bias[...].astype(query.dtype)[None, None]


SharedRelative = RelativePositionBias | RelativeEmbeddings | RelativeSinusoids


def make_shared_relative(config: ModelConfig, rngs: nnx.Rngs, bidirectional: bool) -> SharedRelative | None:
    """Return what the layers of a stack share of relative positions; None if they share nothing.

    ``bidirectional`` is as in ``RelativePositionBias``.
    """
    if config.positions.kind in ("relative", "relative-and-learned"):
        return RelativePositionBias(config, rngs, bidirectional)
    if config.positions.kind == "relative-sinusoids":
        return RelativeSinusoids(config)
    return RelativeEmbeddings(config, rngs) if config.positions.kind == "relative-disentangled" else None

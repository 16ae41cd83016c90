"""Parameters of relative positions: T5's learned bias, and DeBERTa's embeddings."""

import jax.numpy as jnp
import numpy as np
from flax import nnx
from jax import Array
from jaxtyping import Float

from lm.config.model import ModelConfig
from lm.nn.layers import Identity, Module, embedding_std, make_norm, normal, param
from lm.ops.positions import BucketedBias, initial_slopes, signed_position_bucket


class RelativePositionBias(Module):
    """A learned number per head and bucket of relative positions, added to attention logits.

    ``bidirectional``: whether the stack attends ahead too. In ``__init__`` it only decides which relative
    positions a bucket holds if the table starts as ALiBi's slopes; a table that both stacks share starts as
    an encoder's.
    """

    def __init__(self, config: ModelConfig, rngs: nnx.Rngs, bidirectional: bool):
        self.config = config
        table = normal(
            rngs, (config.positions.relative_buckets, config.attention.num_heads), config.base_width**-0.5
        )
        if config.positions.relative_bias_start == "slopes":
            bias = BucketedBias(table, bidirectional, config.positions.relative_max_distance)
            table = jnp.asarray(-bias.mean_distances[:, None] * initial_slopes(config.attention.num_heads))
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

    def __call__(self, length: int, key_length: int) -> Float[Array, "R D"]:
        """Return the embedding of each relative position from 1 - length to key_length - 1, [R,D]."""
        buckets = signed_position_bucket(
            np.arange(1 - length, key_length),
            num_buckets=self.config.positions.relative_buckets,
            max_distance=self.config.positions.relative_max_distance,
        )
        return self.norm(self.table[...].astype(self.config.dtype))[buckets]


def make_shared_relative(
    config: ModelConfig, rngs: nnx.Rngs, bidirectional: bool
) -> RelativePositionBias | RelativeEmbeddings | None:
    """Return the parameters of relative positions that all layers of a stack share; None if there are none.

    ``bidirectional`` is as in ``RelativePositionBias``.
    """
    if config.positions.kind in ("relative", "relative-and-learned"):
        return RelativePositionBias(config, rngs, bidirectional)
    return RelativeEmbeddings(config, rngs) if config.positions.kind == "relative-disentangled" else None

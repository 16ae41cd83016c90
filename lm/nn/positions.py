"""T5's learned position bias."""

import jax.numpy as jnp
from flax import nnx

from lm.config.model import ModelConfig
from lm.nn.layers import Module, normal, param
from lm.ops.positions import BucketedBias, initial_slopes


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

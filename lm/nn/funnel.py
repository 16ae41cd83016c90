"""The Funnel-Transformer: an encoder whose rows get shorter (Dai et al. 2020).

Shapes: B rows, T positions, R = T / size rounded up, D features.
"""

from collections.abc import Callable
from dataclasses import replace
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import Array
from jaxtyping import Float, Int

from lm.batch import Batch, Side
from lm.config.base import SettingError
from lm.config.model import ModelConfig
from lm.nn.attention_inputs import AttentionInputs, make_attention_inputs
from lm.nn.block import remat_policy
from lm.nn.positions import SharedRelative
from lm.nn.stack import Stack, split_layers


def split_windows(x: Array | np.ndarray, size: int) -> Array:
    """Return [B,R,size,...] of x [B,T,...]: neighbouring positions together, the last filled up with 0."""
    x = jnp.asarray(x)
    padding = [(0, 0), (0, -x.shape[1] % size)] + [(0, 0)] * (x.ndim - 2)
    x = jnp.pad(x, padding)
    return x.reshape(len(x), -1, size, *x.shape[2:])


def mean_pool(
    x: Float[Array, "B T D"], segments: Int[Array | np.ndarray, "B T"] | None, size: int
) -> Float[Array, "B R D"]:
    """Return the mean [B,R,D] of each ``size`` neighbours of x [B,T,D] that are no padding.

    It is NaN where neighbours belong to two packed examples, which may not see each other.
    """
    ids = split_windows(jnp.ones(x.shape[:2], jnp.int32) if segments is None else segments, size)
    is_token, last = ids > 0, ids.max(2, keepdims=True)  # ids ascend: the greatest is the last text's
    total = jnp.where(is_token[..., None], split_windows(x, size), 0).sum(2)
    mean = total / jnp.maximum(is_token.sum(2), 1)[..., None].astype(x.dtype)
    is_mixed = (is_token & (ids != last)).any(2)
    return jnp.where(is_mixed[..., None], jnp.nan, mean).astype(x.dtype)


def pool_side(side: Side, size: int) -> Side:
    """Return an encoder's side with shorter rows: its segments, and tokens that only tell the shape.

    Positions are counted anew in the shorter rows, as in the code of Narang et al. 2021.
    """
    segments = side.segment_ids
    if segments is not None:
        segments = split_windows(segments, size).max(2)
    return Side(tokens=side.tokens[:, ::size], segment_ids=segments)


def encoder_output_side(config: ModelConfig, side: Side) -> Side:
    """Return the side whose rows are those of the encoder's output."""
    for _ in range(config.funnel.blocks - 1):
        side = pool_side(side, config.funnel.size)
    return side


def make_encoder_inputs(
    config: ModelConfig, batch: Batch, relative_module: SharedRelative | None, blocks: int
) -> AttentionInputs:
    """Return the inputs of an encoder with this many blocks of layers, 1 unless it is a funnel.

    ``pooled`` holds those of the blocks after the first. ``relative_module`` is as in
    ``make_attention_inputs``.
    """
    inputs = make_attention_inputs(config, batch, "encoder", relative_module)
    if blocks == 1:
        return inputs
    shorter = replace(batch, encoder=pool_side(batch.side("encoder"), config.funnel.size))
    return inputs._replace(pooled=make_encoder_inputs(config, shorter, relative_module, blocks - 1))


class FunnelStack(Stack):
    """An encoder in which the first layer of each block but the first makes its rows shorter.

    As in the code of Narang et al. 2021, attention reads and writes whole rows, and the sum of its input and
    output is pooled. Dai et al. pool queries and residual before attention, which is cheaper and another
    function: the attention of a mean query, not the mean of attentions.
    """

    def hidden_states(self, *_arguments: Any) -> Array:
        raise SettingError(
            f"model.funnel.blocks={self.config.funnel.blocks} gives layers rows of different lengths, whose "
            "hidden states and attention weights have no common shape: look at a model with 1"
        )

    def _run(self, run_block: Callable, x: Any, layer_args: Any, inputs: AttentionInputs) -> tuple[Any, Any]:
        """Apply ``run_block`` to block after block, as ``Stack._run`` does; layers are never scanned."""
        config, results = self.config, []
        pooling = config.funnel.pooling_layers(self.num_layers)
        args_per_layer = split_layers(layer_args, self.num_layers)
        for number, (block, args) in enumerate(zip(self._blocks_by_layer(), args_per_layer, strict=True)):
            after = inputs
            if number in pooling:
                after = inputs.pooled
                pool = partial(mean_pool, segments=inputs.segments, size=config.funnel.size)
                inputs = inputs._replace(pool=pool)

            def one_layer(block, x, args, inputs=inputs):
                return run_block(block, x, args, inputs)

            if config.compile.remat != "none":
                one_layer = jax.checkpoint(one_layer, policy=remat_policy(config.compile))
            x, result = one_layer(block, x, _cut_masks(args, x.shape[1]))
            results.append(result)
            inputs = after
        return x, jax.tree.map(lambda *leaves: jnp.stack(leaves), *results)


def _cut_masks(args: tuple, length: int) -> tuple:
    """Return a layer's (dropout masks, ...) with the mask of attention weights for ``length`` keys."""
    masks, *others = args
    if "attention" in masks:
        masks = masks | {"attention": masks["attention"][..., :length]}
    return masks, *others

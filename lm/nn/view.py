"""From a model's settings and a batch to what each position sees: masks and biases, made once a stack."""

from collections.abc import Callable
from dataclasses import asdict

import jax
import jax.numpy as jnp

from lm.config import SettingError
from lm.nn.attention import View
from lm.nn.config import ModelConfig
from lm.nn.layers import RelativeBias
from lm.ops import masks
from lm.ops.positions import alibi

Batch = dict[str, jax.Array]


def full_view(
    config: ModelConfig, batch: Batch, side: str, relative: RelativeBias | None, slots: int | None = None
) -> View:
    """What the rows of ``side``, "encoder" or "decoder", see of themselves; in a cache of ``slots``, if given."""
    length = batch[f"{side}_input_tokens"].shape[1]
    segments = batch.get(f"{side}_segment_ids")
    positions = batch.get(f"{side}_positions")
    positions = positions_of(length, segments) if positions is None else positions
    distance = masks.distances(length, length)
    mask = None if segments is None else masks.same_segment(segments, segments)
    if side == "decoder":
        seen = masks.causal(distance)
        if config.architecture == "prefix-decoder":
            seen |= masks.prefix(batch["decoder_causal_attention"])
        mask = seen if mask is None else mask & seen
    named = batch.get("encoder_global_attention") if side == "encoder" else None  # a decoder's cache knows none
    everywhere, everything = _everywhere(config, named, positions), mask
    seen = _sparse(config, positions, positions)
    if seen is not None:
        seen = seen if everywhere is None else seen | masks.global_tokens(everywhere, everywhere)
        mask = seen if mask is None else mask & seen
    bidirectional = side == "encoder" or config.architecture == "prefix-decoder"
    more = 0 if slots is None else slots - length

    def widened(x):  # to the slots of the cache that are empty yet
        return x if x is None or not more else jnp.pad(x, ((0, 0),) * (x.ndim - 1) + ((0, more),))

    def bias(table):
        return widened(table.full(length, bidirectional))

    return View(
        mask=widened(mask),
        bias=_bias(config, relative, bias, lambda: widened(alibi(distance, config.num_heads))),
        positions=positions,
        layer_bias=bias,
        everywhere=everywhere if config.sparsity.projections == "separate" else None,
        everything=everything,
    )


def step_view(config: ModelConfig, length: jax.Array, slots: int, relative: RelativeBias | None) -> View:
    """What the next token of each row sees of a cache that holds ``length`` [B] positions in ``slots`` slots."""
    slot, position = jnp.arange(slots)[None, :], length[:, None]
    distance = slot[:, None, :] - position[:, :, None]
    mask = masks.causal(distance)
    seen = _sparse(config, position, slot)
    mask = mask if seen is None else mask & seen

    def bias(table):
        return table(distance, config.architecture == "prefix-decoder").swapaxes(0, 1)

    return View(
        mask=mask,
        bias=_bias(config, relative, bias, lambda: alibi(distance, config.num_heads)),
        positions=position,
        layer_bias=bias,
    )


def _bias(config: ModelConfig, relative: RelativeBias | None, learned: Callable, fixed: Callable) -> jax.Array | None:
    """float32 [B|1,N,T,S] of the whole stack, if its positions are biases."""
    if relative is not None:
        return learned(relative)
    return fixed() if config.positions == "alibi" else None


def positions_of(length: int, segments: jax.Array | None) -> jax.Array:
    """int32 [B|1,T]: the place of each token in its segment."""
    index = jnp.arange(length, dtype=jnp.int32)[None, :]
    if segments is None:
        return index
    begins = jnp.pad(segments[:, 1:] != segments[:, :-1], ((0, 0), (1, 0)))
    return index - jax.lax.cummax(jnp.where(begins, index, 0), axis=1)


def cross_mask(segments: jax.Array | None, encoder_segments: jax.Array | None) -> jax.Array | None:
    """bool [B,T,S]; without segments of its own a decoder sees all of its row's encoder output but the padding."""
    if encoder_segments is None:
        return None
    if segments is None:
        return (encoder_segments > 0)[:, None, :]
    return masks.same_segment(segments, encoder_segments)


def _everywhere(config: ModelConfig, members: jax.Array | None, positions: jax.Array) -> jax.Array | None:
    """bool [B|1,T]: the positions that see and are seen by all, those that the batch names and the first ones."""
    first, few = config.sparsity.global_tokens * config.sparsity.block, None
    if members is not None:
        few = members > 0
    if first:
        few = positions < first if few is None else few | (positions < first)
    return few


def _sparse(config: ModelConfig, query: jax.Array, key: jax.Array) -> jax.Array | None:
    """bool [B|1,T,S] from positions [B|1,T] and [B|1,S]; None where everything is seen."""
    settings = asdict(config.sparsity)
    del settings["projections"]
    if config.sparsity.window is None:
        return None
    if config.sparsity.random_blocks and key.shape[1] > config.max_length:
        raise SettingError(f"model.max_length={config.max_length} is less than the {key.shape[1]} positions of a row")
    return masks.sparse(query, key, length=config.max_length, **settings)

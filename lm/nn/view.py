"""From a model's settings and a batch to what each position sees: masks and biases, made once a stack."""

from collections.abc import Callable
from dataclasses import asdict
from typing import Any

import jax
import jax.numpy as jnp

from lm.nn.config import ModelConfig
from lm.nn.layers import RelativeBias
from lm.nn.mixers import View, implementation
from lm.ops import masks
from lm.ops.biases import Alibi, Bias
from lm.ops.masks import Mask, Rule
from lm.ops.positions import alibi, alibi_slopes
from lm.settings import SettingError

Batch = dict[str, jax.Array]


def full_view(
    config: ModelConfig, batch: Batch, side: str, relative: RelativeBias | None, slots: int | None = None
) -> View:
    """What the rows of ``side``, "encoder" or "decoder", see of themselves; in a cache of ``slots``, if
    given.
    """
    length = batch[f"{side}_input_tokens"].shape[1]
    slots = length if slots is None else slots
    segments, given = batch.get(f"{side}_segment_ids"), batch.get(f"{side}_positions")
    positions = positions_of(length, segments) if given is None else given
    members = batch["decoder_causal_attention"] > 0 if config.architecture == "prefix-decoder" else None
    rule, known = Rule(causal=side == "decoder"), {"segment": segments, "prefix": members}
    everything = _mask(rule, known, slots)
    # a decoder's cache knows none
    named = batch.get("encoder_global_attention") if side == "encoder" else None
    everywhere, sparsity = _everywhere(config, named, positions), config.sparsity
    if sparsity.window is not None:
        # within a segment places are as far apart as positions
        by_place = given is None and sparsity.block == 1
        known |= {"position": None if by_place else positions // sparsity.block, "everywhere": everywhere}
    windows = [sparsity.window, *(window for window, _ in sparsity.spans)]
    mask, *masks_of = [_mask(_within(rule, window, sparsity.dilation), known, slots) for window in windows]
    if sparsity.random_blocks:
        seen = _sparse(config, positions, positions)
        seen = seen if everywhere is None else seen | masks.global_tokens(everywhere, everywhere)
        seen = jnp.pad(seen, ((0, 0), (0, 0), (0, slots - length)))
        mask = seen if everything is None else everything.dense(length, slots) & seen
    bidirectional = side == "encoder" or config.architecture == "prefix-decoder"
    lays = implementation(config, length, slots, mask, None) == "xla"

    def settled(x):
        """A mask or a bias, laid out once for the whole stack where attention needs it so."""
        return x.dense(length, slots) if lays and isinstance(x, Mask | Bias) else x

    def bias(table):
        return settled(table(bidirectional))

    return View(
        mask=settled(mask),
        masks=tuple(map(settled, masks_of)),
        bias=_bias(
            config, relative, bias, lambda: settled(Alibi(jnp.asarray(alibi_slopes(config.num_heads))))
        ),
        positions=positions,
        layer_bias=bias,
        everywhere=everywhere if sparsity.projections == "separate" else None,
        everything=settled(everything),
    )


def _within(rule: Rule, window: int | None, dilation: int) -> Rule:
    reach = (window or 0) * dilation
    return rule if window is None else rule._replace(window=(reach, reach, dilation))


def _mask(rule: Rule, known: dict[str, jax.Array | None], slots: int) -> Mask | None:
    """Of a rule and what is known of positions [B|1,T], which see those of a cache of ``slots``."""
    query = {name: x for name, x in known.items() if x is not None}
    if rule == Rule() and "segment" not in query:
        return None
    key = {name: jnp.pad(x, ((0, 0), (0, slots - x.shape[1]))) for name, x in query.items()}
    return Mask(query, key | (masks.segments(key["segment"]) if "segment" in key else {}), rule)


def step_view(config: ModelConfig, length: jax.Array, slots: int, relative: RelativeBias | None) -> View:
    """What the next token of each row sees of a cache that holds ``length`` [B] positions in ``slots``
    slots.
    """
    slot, position = jnp.arange(slots)[None, :], length[:, None]
    distance = slot[:, None, :] - position[:, :, None]
    mask = masks.causal(distance)
    seen = _sparse(config, position, slot)
    mask = mask if seen is None else mask & seen

    def bias(table):
        return table(config.architecture == "prefix-decoder").at(distance).swapaxes(0, 1)

    return View(
        mask=mask,
        bias=_bias(config, relative, bias, lambda: alibi(distance, config.num_heads)),
        positions=position,
        layer_bias=bias,
    )


def _bias(config: ModelConfig, relative: RelativeBias | None, learned: Callable, fixed: Callable) -> Any:
    """float32 [B|1,N,T,S], laid out or not, of the whole stack, if its positions are biases."""
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


def cross_mask(
    config: ModelConfig, length: int, segments: jax.Array | None, encoder_segments: jax.Array | None
) -> jax.Array | Mask | None:
    """What ``length`` queries with segments [B,T] or [B,1] see of the encoder's [B,S], laid out where it must
    be.

    Without segments of its own a decoder sees all of its row's encoder output but the padding.
    """
    if encoder_segments is None:
        return None
    if segments is None:
        segments, encoder_segments = (
            jnp.ones((len(encoder_segments), 1), jnp.int32),
            (encoder_segments > 0) * 1,
        )
    mask, slots = (
        Mask({"segment": segments}, masks.segments(encoder_segments), Rule()),
        encoder_segments.shape[1],
    )
    return (
        mask.dense(segments.shape[1], slots)
        if implementation(config, length, slots, mask, None) == "xla"
        else mask
    )


def _everywhere(config: ModelConfig, members: jax.Array | None, positions: jax.Array) -> jax.Array | None:
    """bool [B|1,T]: the positions that see and are seen by all, those that the batch names and the first
    ones.
    """
    first, few = config.sparsity.global_tokens * config.sparsity.block, None
    if members is not None:
        few = members > 0
    if first:
        few = positions < first if few is None else few | (positions < first)
    return few


def _sparse(config: ModelConfig, query: jax.Array, key: jax.Array) -> jax.Array | None:
    """bool [B|1,T,S] from positions [B|1,T] and [B|1,S]; None where everything is seen."""
    settings = asdict(config.sparsity)
    del settings["projections"], settings["layer_windows"]
    if config.sparsity.window is None:
        return None
    if config.sparsity.random_blocks and key.shape[1] > config.max_length:
        raise SettingError(
            f"model.max_length={config.max_length} is less than the {key.shape[1]} positions of a row"
        )
    return masks.sparse(query, key, length=config.max_length, **settings)

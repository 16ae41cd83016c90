"""Masks and biases: what each position sees, from a model's settings and a batch, computed once per stack."""

from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax import Array

from lm.nn.config import ModelConfig
from lm.nn.kernels import implementation
from lm.nn.layers import RelativeBias
from lm.ops.masks import AnyMask, Mask, Numbers, Rule, key_segments, periods
from lm.ops.positions import Alibi, AnyBias, Bias, alibi_slopes
from lm.settings import SettingError, nearest

Batch = dict[str, Array]  # features by name, such as decoder_input_tokens [B,T]

_OF_A_SIDE = "input_tokens segment_ids positions token_types target_tokens loss_weights content".split()
# All that models and losses read of a batch; a loss of one's own adds what it reads.
FEATURES = {f"{side}_{name}" for side in ("encoder", "decoder") for name in _OF_A_SIDE}
FEATURES |= {"encoder_global_attention", "decoder_causal_attention"}
FEATURES |= set("text_loss_weights sentence_labels sentence_loss_weights labels label_loss_weights".split())
FEATURES |= {"frequent_pieces", "carry"}


def check_features(batch: Batch) -> None:
    """SettingError for a feature that nothing reads, such as a misspelt one; only names are looked at."""
    for name in batch.keys() - FEATURES:
        raise SettingError(
            f"feature {name!r} of the batch is read by nothing{nearest(name, FEATURES)}; what a loss of your "
            "own reads should be added to lm.nn.view.FEATURES"
        )


def check_length(config: ModelConfig, batch: Batch, side: str) -> None:
    """SettingError for rows of more positions than are learned, unless the batch names their positions."""
    length = batch[f"{side}_input_tokens"].shape[1]
    if config.positions == "learned" and length > config.max_length and f"{side}_positions" not in batch:
        raise SettingError(
            f"rows of {length} tokens are longer than model.max_length={config.max_length}, up to which "
            f"positions are learned: cut {side}_input_tokens or, of several short texts in a row, name their "
            f"{side}_positions"
        )


class View(NamedTuple):
    """What all blocks of a stack share. By default everything is visible, and positions are unknown.

    A mask or bias is an array, or a rule from which attention kernels compute it ("not laid out").
    """

    mask: AnyMask = None
    masks: tuple[tuple[AnyMask, ...], ...] = ()  # where the layers' windows differ: of each of ``periods``
    bias: AnyBias = None
    layer_bias: Callable[[RelativeBias], Array | Bias] | None = None  # where each block has its own table
    positions: Array | None = None  # int32 [B|1,T] of queries and keys
    segments: Array | None = None  # int32 [B,T], 0: padding; None: each row is one text
    everywhere: Array | None = None  # bool [B,T]: global positions (Longformer) with their own projections
    everything: AnyMask = None  # bool [B|1,T,S]: what those see, that is, all but padding and other segments
    encoded: Array | None = None  # the encoder's output [B,S,D], for cross-attention
    cross_mask: AnyMask = None  # bool [B,T,S] of cross-attention
    context: Array | None = None  # [B,T|1,D]: the encoder's last state, from which a row starts without that
    slot: Array | None = None  # int32 [B]: where in the cache to write keys and values; None: no cache


def full_view(
    config: ModelConfig, batch: Batch, side: str, relative: RelativeBias | None, slots: int | None = None
) -> View:
    """What rows [B,T] of ``side``, "encoder" or "decoder", see of themselves, or of a cache of ``slots``.

    With a cache a decoder without a mask has one: what a token sees is what is written when it is read.
    """
    check_features(batch)
    check_length(config, batch, side)
    length, sparsity, decodes = batch[f"{side}_input_tokens"].shape[1], config.sparsity, side == "decoder"
    causal = decodes and (config.mask == "causal" or slots is not None)
    slots = length if slots is None else slots
    segments, named_positions = batch.get(f"{side}_segment_ids"), batch.get(f"{side}_positions")
    positions = positions_of(length, segments) if named_positions is None else named_positions
    prefix = batch["decoder_causal_attention"] > 0 if config.architecture == "prefix-decoder" else None
    numbers = {"segment": segments, "prefix": prefix}
    everything = _mask(Rule(causal), numbers, slots)
    # Only encoders take global positions from the batch: the cache of a decoder does not hold them.
    everywhere = _everywhere(config, positions, None if decodes else batch.get("encoder_global_attention"))
    if sparsity.has_window:
        # A window compares positions. Within a segment these differ by as much as places in the row, unless
        # the batch names them; places need no numbers, and tell a kernel which tiles it can skip.
        by_place = named_positions is None and sparsity.block == 1 and not sparsity.random_blocks
        numbers |= {"position": None if by_place else positions // sparsity.block, "everywhere": everywhere}

    def mask_of(window):
        return _mask(_rule(config, causal, window, length), numbers, slots)

    chosen = implementation(config, length, slots, mask_of(sparsity.window), None)

    def lay_out(x, *takers):
        """A mask or a bias as an array, made once for the whole stack, for what takes such in attention."""
        return x.dense(length, slots) if chosen in takers and x is not None else x

    both_ways = not decodes or config.sees_ahead
    return View(
        **_masks(config, lambda window: lay_out(mask_of(window), "xla")),
        **_biases(config, relative, both_ways, lambda bias: lay_out(bias, "xla", "rows")),
        positions=positions,
        segments=segments,
        everywhere=everywhere if sparsity.projections == "separate" else None,
        everything=lay_out(everything, "xla"),
    )


def step_view(
    config: ModelConfig, length: Array, slots: int, relative: RelativeBias | None, count: int = 1
) -> View:
    """What the next ``count`` tokens of each row see of a cache of ``slots``, ``length`` [B] of them held."""
    slot = jnp.arange(slots)[None, :]
    position = length[:, None] + jnp.arange(count, dtype=jnp.int32)[None, :]
    distance = slot[:, None, :] - position[:, :, None]
    query, key = (_window_numbers(config, places) for places in (position, slot))
    masks = _masks(config, lambda window: Mask(query, key, _rule(config, True, window, slots)).at(distance))
    biases = _biases(config, relative, config.sees_ahead, lambda bias: bias.at(distance))
    return View(**masks, positions=position, **biases)


def cross_mask(
    config: ModelConfig, length: int, segments: Array | None, encoder_segments: Array | None
) -> AnyMask:
    """What ``length`` queries with segments [B,T] or [B,1] see of the encoder's [B,S].

    Without segments of its own a decoder sees all of its row's encoder output but the padding.
    """
    if encoder_segments is None:
        return None
    if segments is None:
        segments = jnp.ones((len(encoder_segments), 1), jnp.int32)
        encoder_segments = (encoder_segments > 0) * 1
    mask = Mask({"segment": segments}, {"segment": key_segments(encoder_segments)}, Rule())
    slots = encoder_segments.shape[1]
    explicit = implementation(config, length, slots, mask, None) == "xla"
    return mask.dense(segments.shape[1], slots) if explicit else mask


def last_states(encoded: Array, segments: Array | None, encoder_segments: Array | None) -> Array:
    """[B,T|1,D]: for each position of a decoder the last of the encoder's states [B,S,D] of its segment.

    Segments [B,T] and [B,S] or None are as in ``cross_mask``. Zeros for what the encoder has no token of.
    """
    if encoder_segments is None:
        return encoded[:, -1:]
    if segments is None:
        segments = jnp.ones((len(encoded), 1), jnp.int32)
        encoder_segments = (encoder_segments > 0) * 1
    place = jnp.arange(encoded.shape[1])[None, None, :]
    same = segments[:, :, None] == key_segments(encoder_segments)[:, None, :]
    last = jnp.where(same, place, -1).max(-1)[:, :, None]
    return jnp.where(last < 0, 0, jnp.take_along_axis(encoded, jnp.maximum(last, 0), axis=1))


def positions_of(length: int, segments: Array | None) -> Array:
    """int32 [B|1,T]: the place of each token in its segment, counted from 0 where the segment id changes."""
    index = jnp.arange(length, dtype=jnp.int32)[None, :]
    if segments is None:
        return index
    begins = jnp.pad(segments[:, 1:] != segments[:, :-1], ((0, 0), (1, 0)))
    return index - jax.lax.cummax(jnp.where(begins, index, 0), axis=1)


def _rule(config: ModelConfig, causal: bool, window: int | None, length: int) -> Rule:
    """Who sees whom in rows of ``length``, with a window counted in blocks, or without one."""
    if window is None:
        return Rule(causal)
    sparsity = config.sparsity
    if sparsity.random_blocks and length > config.max_length:
        raise SettingError(
            f"model.max_length={config.max_length} is less than the {length} positions of a row"
        )
    random = sparsity.random_blocks, -(-config.max_length // sparsity.block)  # of so many blocks, rounded up
    reach = window * sparsity.dilation
    return Rule(causal, (reach, reach, sparsity.dilation), random if sparsity.random_blocks else None)


def _masks(config: ModelConfig, mask_of: Callable[[int | None], AnyMask]) -> dict[str, Any]:
    """Masks of a ``View``, by the window of each: of all layers, and of those whose windows differ."""
    sparsity = config.sparsity
    by_window = {window: mask_of(window) for window in {sparsity.window, *sparsity.layer_windows}}
    patterns = [pattern for pattern, _ in periods(sparsity.layer_windows)]
    masks = tuple(tuple(by_window[window] for window in pattern) for pattern in patterns)
    return {"mask": by_window[sparsity.window], "masks": masks}


def _mask(rule: Rule, numbers: dict[str, Array | None], slots: int) -> Mask | None:
    """Of a rule and the numbers [B|1,T] of positions, which see those of a cache of ``slots``."""
    query = {name: x for name, x in numbers.items() if x is not None}
    if rule == Rule() and "segment" not in query:
        return None
    key = {name: jnp.pad(x, ((0, 0), (0, slots - x.shape[1]))) for name, x in query.items()}
    if "segment" in key:
        key["segment"] = key_segments(key["segment"])
    return Mask(query, key, rule)


def _everywhere(config: ModelConfig, positions: Array, named: Array | None) -> Array | None:
    """bool [B|1,T]: positions that see and are seen by all: ``named`` by the batch, or first in a row."""
    first = config.sparsity.global_tokens * config.sparsity.block
    everywhere = None if named is None else named > 0
    if first:
        everywhere = positions < first if everywhere is None else everywhere | (positions < first)
    return everywhere


def _window_numbers(config: ModelConfig, positions: Array) -> Numbers:
    """What a window compares of positions [B|1,T] while decoding."""
    if not config.sparsity.has_window:
        return {}
    everywhere = _everywhere(config, positions, None)
    numbers = {} if everywhere is None else {"everywhere": everywhere}
    return numbers | {"position": positions // config.sparsity.block}


def _biases(
    config: ModelConfig,
    relative: RelativeBias | None,
    both_ways: bool,
    lay_out: Callable[[Bias], Array | Bias],
) -> dict[str, Any]:
    """Biases of a ``View``: of the stack, if its positions are biases, and of a block with its own table."""

    def learned(table: RelativeBias) -> Array | Bias:
        return lay_out(table(both_ways))

    bias = None if relative is None else learned(relative)
    if config.positions == "alibi":
        bias = lay_out(Alibi(jnp.asarray(alibi_slopes(config.num_heads))))
    return {"bias": bias, "layer_bias": learned}

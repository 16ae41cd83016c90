"""Positions, masks and biases: computed once per stack from settings and a batch, and shared by its blocks.

Shapes: B rows, T queries, S keys, N heads, K key heads of width H, D features. A side of a batch is the
arrays of one stack.
"""

from collections.abc import Callable
from functools import partial
from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax import Array
from jaxtyping import Float, Int, Int32

from lm.batch import Batch, Side
from lm.config.attention import widest_window
from lm.config.base import SettingError
from lm.config.model import ModelConfig
from lm.nn.attention_dispatch import choose_implementation
from lm.nn.cache import KeyValue
from lm.nn.positions import RelativePositionBias, SharedRelative
from lm.ops.attention import AttentionOptions
from lm.ops.masks import (
    AnyMask,
    AttentionMask,
    MaskSpec,
    PositionIds,
    RandomBlocks,
    Window,
    key_segments,
    materialize_mask,
    relative_positions,
    two_stream_masks,
)
from lm.ops.positions import (
    AlibiBias,
    AnyBias,
    PositionBias,
    RotaryPositions,
    alibi_slopes,
    relative_position_bucket,
    segment_lengths,
)


def check_row_length(config: ModelConfig, side: Side, name: str) -> None:
    """Raise SettingError for rows longer than ``positions.max_length``, unless the batch has positions.

    Only models with learned positions or a synthesizer have this limit.
    """
    length, max_length = side.tokens.shape[1], config.positions.max_length
    if config.has_max_length and length > max_length and side.positions is None:
        raise SettingError(
            f"rows of {length} tokens are longer than model.positions.max_length={max_length}: positions are "
            f"learned only up to there. Truncate the {name}'s tokens or, if a row packs several short texts, "
            "pass their positions"
        )


class LayerInputs(NamedTuple):
    """The attention inputs that may differ between layers."""

    mask: AnyMask = None  # as in ``AttentionInputs``
    frequencies: Array | np.ndarray | None = None  # likewise


class AttentionInputs(NamedTuple):
    """Inputs that all blocks of a stack share. By default everything is visible, and there are no positions.

    Masks and biases are arrays, or objects that a kernel evaluates tile by tile.
    """

    mask: AnyMask = None  # bool [B|1,1,T,S]
    # float32 [rotated features of a head / 2]: rotary frequencies of layers with a window; None: those of
    # model.positions.rotary
    frequencies: Array | np.ndarray | None = None
    # one for each layer, if their windows differ; replace ``mask`` and ``frequencies``
    layer_inputs: tuple[LayerInputs, ...] = ()
    bias: AnyBias = None  # float32 [B|1,N,T,S]
    # returns the bias of a block that has a table of its own (UMT5), given that table
    layer_bias: Callable[[RelativePositionBias], AnyBias] | None = None
    # int32 [B|1,T,S]: relative-position buckets; queries are multiplied with the vector of each bucket
    buckets: Array | None = None
    # [P,D], P = T + S - 1: embeddings of the relative positions from 1 - T to S - 1, which layers project
    # (DeBERTa), or their sinusoids (XLNet)
    relative_embeddings: Array | None = None
    token_types: Array | None = None  # int32 [B,T], if attention logits depend on them (XLNet)
    positions: Array | None = None  # int32 [B|1,T], of the queries
    # int32 [B|1,S], of the keys of self-attention: the row's, which restart in each packed text, or the
    # cache's, whose index s holds position s. None in merged attention, which also has keys of the encoder
    key_positions: Array | None = None
    segments: Array | None = None  # int32 [B,T], 0 for padding; None: each row is one text
    # whether rows alternate XLNet's content stream and query stream; both use the content stream's keys and
    # values
    has_query_stream: bool = False
    # bool [B|1,T]: Longformer's global positions, if they have separate projections
    global_tokens: Array | None = None
    global_mask: AnyMask = None  # bool [B|1,1,T,S]: the keys that global positions attend to
    # [B,S,D]: the encoder's output, from which each layer computes keys and values of cross-attention; None
    # without cross-attention, or if keys and values are computed beforehand
    encoded: Array | None = None
    encoder_positions: Array | None = None  # int32 [B|1,S], only if decoder positions continue after them
    # [B,S,K,H]: this layer's keys and values of the encoder's output, to which merged self-attention attends
    # besides its own
    encoder_kv: KeyValue | None = None
    cross_mask: AnyMask = None  # bool [B,1,T,S]
    # [B,T|1,D]: the encoder's last state, from which a recurrent decoder without cross-attention starts
    encoder_state: Array | None = None
    # in a layer that makes rows shorter (a funnel's): pools the sum of attention's input and output [B,T,D]
    # to [B,R,D], where R is T / model.funnel.size rounded up
    pool: Callable[[Array], Array] | None = None
    pooled: "AttentionInputs | None" = None  # inputs of the layers after the pooling layer
    cache_index: Array | None = None  # int32 [B]: index in the cache at which to write; None: no cache

    @property
    def rotary_positions(self) -> Array | RotaryPositions | None:
        """Return the positions by which queries and keys are rotated, with this layer's frequencies."""
        if self.positions is None or self.frequencies is None:
            return self.positions
        return RotaryPositions(self.positions, self.frequencies)

    def inputs_per_layer(self, num_layers: int) -> tuple[LayerInputs, ...]:
        """Return the inputs of each of ``num_layers`` layers that may differ between them."""
        return self.layer_inputs or (LayerInputs(self.mask, self.frequencies),) * num_layers

    def with_layer_inputs(self, layer_inputs: LayerInputs) -> "AttentionInputs":
        """Return the inputs of one layer."""
        return self._replace(mask=layer_inputs.mask, frequencies=layer_inputs.frequencies)


def make_attention_inputs(
    config: ModelConfig,
    batch: Batch,
    side: str,
    relative_module: SharedRelative | None,
    cache_length: int | None = None,
) -> AttentionInputs:
    """Return the inputs of the stack ``side``, "encoder" or "decoder", for whole rows [B,T].

    ``relative_module`` is ``Stack.relative``, the module of relative positions that the stack's layers share:
    a table of biases (T5), embeddings of relative positions (DeBERTa), or their sinusoids (XLNet); or None.

    Keys are those of the same rows or, with ``cache_length``, of a cache with that many positions, to which
    the rows are written. A decoder with a cache is always causal, even if ``model.attention.mask`` is "none":
    the keys of later tokens are not in the cache yet. ``model.attention.encoder_mask`` only changes the mask:
    the position bias of a causal encoder has buckets for both directions, so that its parameters mean the
    same with either mask.
    """
    stack_side, is_decoder = batch.side(side), side == "decoder"
    check_row_length(config, stack_side, side)
    length = stack_side.tokens.shape[1]
    causal = config.is_causal_encoder
    if is_decoder:
        causal = config.attention.mask == "causal" or cache_length is not None
    key_length = length if cache_length is None else cache_length
    segments, positions = stack_side.segment_ids, positions_of(stack_side)
    has_positions = stack_side.positions is not None

    # the ids of positions, by name, that masks compare (``MaskSpec``)
    mask_ids: dict[str, Array | None] = {"segment": segments}
    if config.architecture == "prefix-decoder":
        if stack_side.causal_attention is None:
            raise SettingError("a prefix decoder needs the causal_attention of its side: 1 in the prefix")
        mask_ids["prefix"] = stack_side.causal_attention > 0
    global_mask = _make_mask(MaskSpec(causal), mask_ids, key_length)
    # Only encoders take global positions from the batch: a decoder's cache does not hold them.
    batch_globals = None if is_decoder else stack_side.global_attention
    global_tokens = _global_tokens(config, positions, batch_globals)
    windows = config.windows(side)  # of each layer [blocks]; None: the layer attends to all positions
    window_ids: dict[str, Array | None] = {}  # further ids, which a window compares
    if config.has_window(side):
        # Unless the batch has positions, a window compares indices in the row, whose differences within a
        # segment are the same. Indices need no ids, and let a kernel skip tiles.
        sparsity = config.sparsity
        compares_indices = not has_positions and sparsity.block == 1 and not sparsity.random_blocks
        window_ids["position"] = None if compares_indices else positions // sparsity.block
        window_ids["global"] = global_tokens

    def window_mask(window: int | None) -> AttentionMask | None:
        return _make_mask(_mask_spec(config, causal, window, length), mask_ids | window_ids, key_length)

    options = AttentionOptions(logit_cap=config.attention.logit_cap)
    mask = window_mask(widest_window(windows))
    implementation = choose_implementation(config, length, key_length, mask, None, options)

    # If the implementation needs arrays, they are made once for the whole stack.
    def prepare_mask(mask: AttentionMask | None) -> AnyMask:
        if mask is None or implementation != "xla":
            return mask
        return mask.materialize(length, key_length)

    def prepare_bias(bias: PositionBias) -> AnyBias:
        return bias.materialize(length, key_length) if implementation in ("xla", "short-rows") else bias

    bidirectional = not is_decoder or config.has_non_causal_decoder
    inputs = AttentionInputs(
        positions=positions,
        key_positions=positions if cache_length is None else jnp.arange(cache_length)[None, :],
        segments=segments,
        buckets=_relative_buckets(config, partial(relative_positions, length, key_length), bidirectional),
        global_tokens=global_tokens if config.sparsity.projections == "separate" else None,
        global_mask=prepare_mask(global_mask),
    )
    inputs = _with_layer_masks(inputs, config, windows, lambda window: prepare_mask(window_mask(window)))
    if config.positions.relative_types:
        inputs = inputs._replace(token_types=stack_side.token_types)
    if relative_module is not None and not isinstance(relative_module, RelativePositionBias):
        return inputs._replace(relative_embeddings=relative_module(length, key_length))
    return _with_biases(inputs, config, relative_module, bidirectional, prepare_bias)


def make_two_stream_inputs(
    config: ModelConfig, batch: Batch, relative_module: SharedRelative | None
) -> AttentionInputs:
    """Return the inputs of an encoder for rows [2B,T], the content and the query stream of each row [B,T].

    ``prediction_order`` of the encoder's side says what each stream attends to. ``relative_module`` is as in
    ``make_attention_inputs``.
    """
    order = jnp.asarray(batch.side("encoder").prediction_order)
    both = batch.map_sides(lambda side: side.map(lambda x: jnp.repeat(jnp.asarray(x), 2, axis=0)))
    inputs = make_attention_inputs(config, both, "encoder", relative_module)
    mask, length = two_stream_masks(order), order.shape[1]
    if inputs.mask is not None:
        mask = mask & materialize_mask(inputs.mask, length, length)
    return inputs._replace(mask=mask, has_query_stream=True)


def make_decode_inputs(
    config: ModelConfig,
    cached_lengths: Int32[Array | np.ndarray, " B"],
    cache_length: int,
    relative_module: SharedRelative | None,
    count: int = 1,
) -> AttentionInputs:
    """Return the inputs for the next ``count`` tokens of rows.

    ``cached_lengths`` int32 [B] is how many tokens of each row the cache of ``cache_length`` positions holds.
    ``relative_module`` is as in ``make_attention_inputs``, but neither embeddings nor sinusoids.
    """
    assert relative_module is None or isinstance(relative_module, RelativePositionBias), (
        "the settings allow no other relative positions in decoding"
    )
    key_position = jnp.arange(cache_length)[None, :]
    position = jnp.asarray(cached_lengths)[:, None] + jnp.arange(count, dtype=jnp.int32)[None, :]
    relative_position = key_position[:, None, :] - position[:, :, None]
    query_ids, key_ids = _window_ids(config, position), _window_ids(config, key_position)

    def window_mask(window: int | None) -> Array:
        spec = _mask_spec(config, True, window, cache_length)
        return AttentionMask(query_ids, key_ids, spec).evaluate(relative_position)

    windows = config.windows("decoder")
    buckets = _relative_buckets(config, lambda: relative_position, config.has_non_causal_decoder)
    inputs = AttentionInputs(positions=position, key_positions=key_position, buckets=buckets)
    inputs = _with_layer_masks(inputs, config, windows, window_mask)
    return _with_biases(
        inputs,
        config,
        relative_module,
        config.has_non_causal_decoder,
        lambda bias: bias.evaluate(relative_position),
    )


def make_cross_mask(
    config: ModelConfig,
    length: int,
    segments: Int[Array | np.ndarray, "B _"] | None,
    encoder_segments: Int[Array | np.ndarray, "B S"] | None,
) -> AnyMask:
    """Return the mask of cross-attention from ``length`` queries to the encoder's positions [B,S].

    Queries attend to the encoder's tokens of the same segment. ``segments`` are the queries', [B,T], or [B,1]
    for all queries of a row; None: queries attend to all tokens but padding.
    """
    if encoder_segments is None:
        return None
    segments, encoder_segments = _segments_of_both(segments, encoder_segments)
    mask = AttentionMask({"segment": segments}, {"segment": key_segments(encoder_segments)}, MaskSpec())
    key_length = encoder_segments.shape[1]
    options = AttentionOptions(logit_cap=config.attention.logit_cap)
    if choose_implementation(config.cross_config, length, key_length, mask, None, options) == "xla":
        return mask.materialize(segments.shape[1], key_length)
    return mask


def _segments_of_both(
    segments: Int[Array | np.ndarray, "B _"] | None, encoder_segments: Int[Array | np.ndarray, "B S"]
) -> tuple[Int[Array, "B _"], Int[Array, "B S"]]:
    """Return the segments of a decoder and of its encoder; a row is one segment if the decoder's are None."""
    if segments is not None:
        return jnp.asarray(segments), jnp.asarray(encoder_segments)
    one = jnp.ones((len(encoder_segments), 1), jnp.int32)
    return one, (jnp.asarray(encoder_segments) > 0).astype(jnp.int32)


def continue_positions(
    inputs: AttentionInputs,
    encoder: Side,
    segments: Int[Array | np.ndarray, "B _"] | None,
) -> tuple[AttentionInputs, Int32[Array, "#B _"]]:
    """Return the inputs of a decoder whose positions go on after the encoder's, and the offset [B|1,T|1].

    Each position is shifted by an offset: the length of the encoder's text in the same segment (RedLLM, Zhang
    et al. 2025). Segments are as in ``make_cross_mask``. Self-attention with rotary positions does not depend
    on the offset.
    """
    encoder_positions, encoder_segments = positions_of(encoder), encoder.segment_ids
    if encoder_segments is None:
        offset = encoder_positions.max(-1, keepdims=True) + 1
    else:
        offset = segment_lengths(*_segments_of_both(segments, encoder_segments), encoder_positions)
    shifted = inputs._replace(
        positions=inputs.positions + offset, key_positions=inputs.key_positions + offset
    )
    return shifted._replace(encoder_positions=encoder_positions), offset


def merge_masks(
    inputs: AttentionInputs, length: int, key_length: int, encoded_length: int
) -> AttentionInputs:
    """Return the inputs of merged attention: its mask covers the decoder's own keys, then the encoder's.

    ``length`` queries attend to ``key_length`` keys of their own, those of their row or of the cache, and to
    ``encoded_length`` of the encoder.
    """

    def expanded(mask: Array | None, rows: int, keys: int) -> Array:
        """Return the mask as bool [rows,1,T,keys]."""
        if mask is None:
            mask = jnp.ones((1, 1, 1, 1), bool)
        # a row's beams, which are adjacent, share the encoder's mask
        mask = jnp.repeat(mask, rows // len(mask), axis=0)
        return jnp.broadcast_to(mask, (rows, 1, length, keys))

    def merged(mask: AnyMask) -> Array:
        own = materialize_mask(mask, length, key_length)
        cross = materialize_mask(inputs.cross_mask, length, encoded_length)
        rows = max((len(each) for each in (own, cross) if each is not None), default=1)
        both = expanded(own, rows, key_length), expanded(cross, rows, encoded_length)
        return jnp.concatenate(both, axis=-1)

    layer_inputs = tuple(each._replace(mask=merged(each.mask)) for each in inputs.layer_inputs)
    return inputs._replace(mask=merged(inputs.mask), layer_inputs=layer_inputs, key_positions=None)


def last_encoder_states(
    encoded: Float[Array, "B S D"],
    segments: Int[Array | np.ndarray, "B _"] | None,
    encoder_segments: Int[Array | np.ndarray, "B S"] | None,
) -> Float[Array, "B _ D"]:
    """Return [B,T|1,D]: for each position of a decoder, the encoder's last state [B,S,D] in its segment.

    Segments are as in ``make_cross_mask``. States are 0 where the encoder has no token of a segment.
    """
    if encoder_segments is None:
        return encoded[:, -1:]
    segments, encoder_segments = _segments_of_both(segments, encoder_segments)
    index = jnp.arange(encoded.shape[1])[None, None, :]
    is_same_segment = segments[:, :, None] == key_segments(encoder_segments)[:, None, :]
    last_index = jnp.where(is_same_segment, index, -1).max(-1)[:, :, None]
    states = jnp.take_along_axis(encoded, jnp.maximum(last_index, 0), axis=1)
    return jnp.where(last_index < 0, 0, states)


def positions_of(side: Side) -> Int32[Array, "#B T"]:
    """Return the positions of a side's tokens, int32 [B|1,T].

    They are the given ones, or else counted from the start of each segment.
    """
    if side.positions is not None:
        return jnp.asarray(side.positions)
    return positions_in_segments(side.tokens.shape[1], side.segment_ids)


def segments_of(side: Side) -> Int[Array | np.ndarray, "B T"]:
    """Return the segment of each token of a side, int32 [B,T]: 1 for all where the side has none."""
    return jnp.ones_like(side.tokens) if side.segment_ids is None else side.segment_ids


def positions_in_segments(
    length: int, segments: Int[Array | np.ndarray, "B {length}"] | None
) -> Int32[Array, "_ {length}"]:
    """Return int32 [B|1,T]: the position of each token in its segment, from 0 where the segment id changes.

    >>> positions_in_segments(5, jnp.array([[1, 1, 2, 2, 2]])).tolist()
    [[0, 1, 0, 1, 2]]
    """
    index = jnp.arange(length, dtype=jnp.int32)[None, :]
    if segments is None:
        return index
    is_start = jnp.pad(segments[:, 1:] != segments[:, :-1], ((0, 0), (1, 0)))
    return index - jax.lax.cummax(jnp.where(is_start, index, 0), axis=1)


def _mask_spec(config: ModelConfig, causal: bool, window: int | None, length: int) -> MaskSpec:
    """Return the spec of the mask of layers with this ``window`` [blocks]; None: they have no window.

    ``length`` is the number of positions of a row or of the cache, from whose blocks random ones are drawn.
    """
    if window is None:
        return MaskSpec(causal)
    sparsity = config.sparsity
    reach = window * sparsity.dilation
    spec = MaskSpec(causal, Window(behind=reach, ahead=reach, step=sparsity.dilation))
    if not sparsity.random_blocks:
        return spec
    random_blocks = RandomBlocks(
        per_query_block=sparsity.random_blocks,
        num_blocks=-(-length // sparsity.block),
        window=reach,
        num_global_blocks=sparsity.global_tokens,
    )
    return spec._replace(random_blocks=random_blocks)


def _make_mask(spec: MaskSpec, ids: dict[str, Array | None], key_length: int) -> AttentionMask | None:
    """Return the mask of positions with ids [B|1,T] that attend to a row or a cache of ``key_length``."""
    query = {name: x for name, x in ids.items() if x is not None}
    if spec == MaskSpec() and "segment" not in query:
        return None
    key = {name: jnp.pad(x, ((0, 0), (0, key_length - x.shape[1]))) for name, x in query.items()}
    if "segment" in key:
        key["segment"] = key_segments(key["segment"])
    return AttentionMask(query, key, spec)


def _with_layer_masks(
    inputs: AttentionInputs,
    config: ModelConfig,
    windows: tuple[int | None, ...],
    window_mask: Callable[[int | None], AnyMask],
) -> AttentionInputs:
    """Return the inputs with masks and rotary frequencies for layers with these windows.

    If all windows are equal, ``mask`` and ``frequencies`` are those of all layers. Otherwise they are those
    of the widest window, and ``layer_inputs`` has an entry for each layer.
    """
    rotary, width = config.positions.rotary, config.attention.d_kv
    window_frequencies = None
    if rotary.for_window_layers() != rotary and config.positions.kind == "rotary":
        window_frequencies, _ = rotary.for_window_layers().frequencies(width)

    def inputs_of(window: int | None) -> LayerInputs:
        return LayerInputs(window_mask(window), None if window is None else window_frequencies)

    by_window = {window: inputs_of(window) for window in windows}
    if len(by_window) == 1:
        return inputs.with_layer_inputs(by_window[windows[0]])
    inputs = inputs.with_layer_inputs(by_window[widest_window(windows)])
    return inputs._replace(layer_inputs=tuple(by_window[window] for window in windows))


def _with_biases(
    inputs: AttentionInputs,
    config: ModelConfig,
    bias_module: RelativePositionBias | None,
    bidirectional: bool,
    prepare: Callable[[PositionBias], AnyBias],
) -> AttentionInputs:
    """Return the inputs with the stack's position bias and ``layer_bias``."""

    def learned_bias(module: RelativePositionBias) -> AnyBias:
        return prepare(module(bidirectional))

    bias = None if bias_module is None else learned_bias(bias_module)
    if config.positions.kind == "alibi":
        bias = prepare(AlibiBias(jnp.asarray(alibi_slopes(config.attention.num_heads))))
    return inputs._replace(bias=bias, layer_bias=learned_bias)


def _relative_buckets(
    config: ModelConfig, make_relative_positions: Callable[[], Array], bidirectional: bool
) -> Array | None:
    """Return the bucket of each relative position [B|1,T,S]; None if no vectors belong to them.

    Relative positions are made only where they are needed, since they are as large as the attention logits.
    """
    positions = config.positions
    if positions.kind != "relative-keys":
        return None
    return relative_position_bucket(
        make_relative_positions(),
        bidirectional=bidirectional,
        num_buckets=positions.relative_buckets,
        max_distance=positions.relative_max_distance,
    )


def _global_tokens(config: ModelConfig, positions: Array, global_attention: Array | None) -> Array | None:
    """Return bool [B|1,T]: which positions are global; None if none can be.

    They are those with ``global_attention``, and the first blocks of each segment that the settings ask for.
    """
    count = config.sparsity.global_tokens * config.sparsity.block
    tokens = None if global_attention is None else global_attention > 0
    if not count:
        return tokens
    is_first = positions < count
    return is_first if tokens is None else tokens | is_first


def _window_ids(config: ModelConfig, positions: Array) -> PositionIds:
    """Return the ids that a window mask compares during decoding: positions and global flags."""
    if not config.has_window("decoder"):
        return {}
    ids = {"position": positions // config.sparsity.block}
    global_tokens = _global_tokens(config, positions, None)
    if global_tokens is not None:
        ids["global"] = global_tokens
    return ids

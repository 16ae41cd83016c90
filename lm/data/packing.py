"""Pack examples of different lengths into a batch, as many successive examples per row as fit.

Names and rules are those of seqio's feature converters, but every batch is a packed one: a row with a single
example has one segment. Segment ids count from 1, and 0 is padding. Positions count from 0 in each segment.
The decoder reads the targets shifted right by one within each segment. It begins with the padding id, T5's
start token; ``set_decoder_start`` replaces it by another model's start token.
"""

from collections.abc import Sequence
from dataclasses import replace
from functools import partial
from typing import NamedTuple

import numpy as np

from lm.batch import Batch, Side
from lm.config.base import SettingError
from lm.objectives.corruption import length_mask
from lm.objectives.denoising import Lengths, LossName
from lm.tokenizers.tokenizer import PAD, T5_BOUNDARY_TOKENS, BoundaryTokens

ENCODER_DECODERS = ("encoder-decoder", "shared-encoder-decoder")
DECODERS = ("decoder", "prefix-decoder")  # their rows hold both inputs and targets
ARCHITECTURES = (*ENCODER_DECODERS, *DECODERS, "encoder")


class PaddedTexts(NamedTuple):
    """Texts of different lengths, padded on the right, with their lengths and a mask of content tokens."""

    tokens: np.ndarray  # int32 [B,L]
    lengths: np.ndarray  # int32 [B]: without padding, which cannot be told from tokens by its id
    # bool [B,L]: content tokens (``lm.data.content``): no sentinel, mask token, EOS or prefix id and, in the
    # targets of denoising, only what the inputs hide
    content: np.ndarray

    @property
    def mask(self) -> np.ndarray:
        """Return bool [B,L]: True on tokens, False on padding."""
        return length_mask(self.lengths, self.tokens.shape[1])


class MarkedIds(NamedTuple):
    """Token ids without EOS, and which of them are content tokens."""

    ids: Sequence[int] | np.ndarray  # [L]
    content: np.ndarray  # bool [L]


Ids = Sequence[int] | np.ndarray | MarkedIds  # without marks, all ids are content tokens


def pad_texts(
    sequences: Sequence[Ids], max_length: int, boundary: BoundaryTokens = T5_BOUNDARY_TOKENS
) -> PaddedTexts:
    """Return the sequences as padded texts, with the prefix and EOS of ``boundary`` around each.

    A sequence longer than ``max_length``, EOS included, loses its end but keeps its EOS.
    """
    marked = [_add_prefix(ids, boundary.prefix) for ids in sequences]
    lengths = np.array([min(len(ids), max_length - 1) for ids, _ in marked], np.int32) + 1
    tokens = np.full((len(marked), int(lengths.max(initial=0))), PAD, np.int32)
    is_content = np.zeros(tokens.shape, bool)
    for row, (length, (ids, content)) in enumerate(zip(lengths - 1, marked, strict=True)):
        tokens[row, :length], tokens[row, length] = ids[:length], boundary.eos
        is_content[row, :length] = content[:length]
    return PaddedTexts(tokens, lengths, is_content)


def _add_prefix(ids: Ids, prefix: tuple[int, ...]) -> MarkedIds:
    """Return ``ids`` with the ids of ``prefix``, which are not content tokens, in front of them."""
    marked = ids if isinstance(ids, MarkedIds) else MarkedIds(ids, np.ones(len(ids), bool))
    if not prefix:
        return marked
    content = np.concatenate([np.zeros(len(prefix), bool), marked.content])
    return MarkedIds([*prefix, *marked.ids], content)


def concatenate_sides(inputs: PaddedTexts, targets: PaddedTexts) -> PaddedTexts:
    """Return the inputs [B,S] of each example followed by its targets [B,T], as one text each, [B,L]."""
    kept = np.flatnonzero(np.concatenate([inputs.mask, targets.mask], axis=1))
    lengths = inputs.lengths + targets.lengths
    shape = (len(lengths), int(lengths.max(initial=0)))
    joined = PaddedTexts(np.full(shape, PAD, np.int32), lengths, np.zeros(shape, bool))
    text = joined.mask
    joined.tokens[text] = np.concatenate([inputs.tokens, targets.tokens], axis=1).ravel()[kept]
    joined.content[text] = np.concatenate([inputs.content, targets.content], axis=1).ravel()[kept]
    return joined


def pack_examples(sizes: np.ndarray, capacity: np.ndarray) -> np.ndarray:
    """Return the index of each row's first example, and last the number of examples, int64 [rows + 1].

    ``sizes`` [examples, sides] and ``capacity`` [sides] are in tokens; the sides are encoder and decoder, or
    only the decoder. Examples stay in order: the first that does not fit on one of the sides begins the
    next row.
    SettingError if an example is longer than a row.

    >>> pack_examples(np.array([[3], [4], [2], [5]]), np.array([8])).tolist()
    [0, 2, 4]
    """
    if len(sizes) and (sizes.max(axis=0) > capacity).any():
        raise SettingError(f"an example of {sizes.max(axis=0)} tokens does not fit in a row of {capacity}")
    ends = np.concatenate([np.zeros((1, sizes.shape[1]), np.int64), np.cumsum(sizes, axis=0, dtype=np.int64)])
    # If example i began a row, example next_start[i] would begin the next one.
    next_starts = [
        np.searchsorted(side_ends, side_ends[:-1] + side_capacity, side="right") - 1
        for side_ends, side_capacity in zip(ends.T, capacity, strict=True)
    ]
    next_start = np.minimum.reduce(next_starts).tolist()
    starts = [0]
    while starts[-1] < len(sizes):
        starts.append(next_start[starts[-1]])
    return np.array(starts, np.int64)


def row_length(architecture: str, lengths: Lengths) -> int:
    """Return the length of a decoder's row: room for targets and, without an encoder, for inputs."""
    return lengths.inputs + lengths.targets if architecture in DECODERS else lengths.targets


def row_capacity(architecture: str, lengths: Lengths) -> np.ndarray:
    """Return the capacity of a row for ``pack_examples``, [sides], in tokens."""
    decoder = row_length(architecture, lengths)
    return np.array([lengths.inputs, decoder] if architecture in ENCODER_DECODERS else [decoder])


def round_up(sizes: np.ndarray, multiple: int, capacity: int) -> np.ndarray:
    """Return sizes rounded up to a multiple, but no further than ``capacity``.

    A size above ``capacity`` is returned unchanged, for ``pack_examples`` to refuse.

    >>> round_up(np.array([3, 4, 9]), 4, 10).tolist()
    [4, 4, 10]
    """
    return np.maximum(np.minimum(-(-sizes // multiple) * multiple, capacity), sizes)


def make_packed_batch(
    inputs: PaddedTexts,
    targets: PaddedTexts,
    rows: np.ndarray,
    architecture: str,
    lengths: Lengths,
    batch_size: int,
    *,
    loss: LossName = "all-tokens",
    pad_to_multiple_of: int = 1,
) -> Batch:
    """Return the batch of packed examples, with arrays [batch_size,S] and [batch_size,T].

    ``inputs`` and ``targets`` include EOS if there is one; ``rows`` [examples], ascending, is the row of each
    example. ``loss`` says which tokens of a decoder without an encoder have a loss weight. An encoder's
    examples are each padded to a multiple of ``pad_to_multiple_of`` tokens, so that they begin at such
    multiples, but none beyond the length of a whole row.
    """
    if architecture in ENCODER_DECODERS:
        packed = _pack(inputs, rows, (batch_size, lengths.inputs), pad_to_multiple_of)
        encoder = Side(tokens=packed.tokens, segment_ids=packed.segments, positions=packed.positions)
        decoder_texts = targets
    else:
        encoder = None
        # Inputs are not content in a prefix decoder, which sees them without a causal mask, nor if the loss
        # is on targets only, since they are then not predicted.
        if architecture == "prefix-decoder" or loss == "targets":
            inputs = inputs._replace(content=np.zeros_like(inputs.content))
        decoder_texts = concatenate_sides(inputs, targets)
    shape = (batch_size, row_length(architecture, lengths))
    packed = _pack(decoder_texts, rows, shape)
    is_token, causal_attention = packed.segments > 0, None
    has_loss = is_token
    if architecture not in ENCODER_DECODERS:
        # The prefix has one position more than the inputs, since decoder tokens are shifted right: at its end
        # the last input, often EOS, is read and the first target is predicted.
        prefix_end = np.zeros(shape, np.int32)  # of each token: the last position of its example's prefix
        prefix_end[is_token] = np.repeat(inputs.lengths, decoder_texts.lengths)
        # seqio's name: 1 in the prefix, where attention is not causal
        causal_attention = (is_token & (packed.positions <= prefix_end)).astype(np.int32)
        if loss == "targets":
            has_loss = is_token & (packed.positions >= prefix_end)
    decoder = Side(
        tokens=shift_right(packed.tokens, packed.segments),
        segment_ids=packed.segments,
        positions=packed.positions,
        causal_attention=causal_attention,
        targets=packed.tokens,
        loss_weights=has_loss.astype(np.float32),
        content=packed.content,
    )
    return Batch(encoder=encoder, decoder=decoder)


def pad_rows(batch: Batch, architecture: str, lengths: Lengths) -> Batch:
    """Return the batch with its rows padded on the right to the lengths of rows of ``lengths``."""
    room = {"encoder": lengths.inputs, "decoder": row_length(architecture, lengths)}
    widened = {
        name: side.map(partial(_pad_to, room[name]))
        for name, side in batch.sides.items()
        if side.tokens.shape[1] < room[name]
    }
    return replace(batch, **widened)


def _pad_to(width: int, values: np.ndarray) -> np.ndarray:
    return np.pad(values, ((0, 0), (0, width - values.shape[1])))  # with PAD, segment 0 and weight 0


def set_decoder_start(batch: Batch, start: int) -> Batch:
    """Return the batch with ``start`` as the first token that its decoder reads in each segment."""
    side = batch.side("decoder")
    first = (side.positions == 0) & (side.segment_ids > 0)
    return replace(batch, decoder=replace(side, tokens=np.where(first, np.int32(start), side.tokens)))


def shift_right(tokens: np.ndarray, segments: np.ndarray) -> np.ndarray:
    """Return tokens [B,T] shifted right by one within each segment; PAD where it begins, and in padding."""
    shifted = np.zeros_like(tokens)
    shifted[:, 1:] = tokens[:, :-1] * (segments[:, 1:] == segments[:, :-1])
    return shifted


class PackedRows(NamedTuple):
    """Rows [B,L] in which examples follow each other from the left."""

    tokens: np.ndarray  # int32
    segments: np.ndarray  # int32, from 1 in each row; 0: padding
    positions: np.ndarray  # int32, from 0 in each segment
    content: np.ndarray  # bool


def _pack(
    examples: PaddedTexts, rows: np.ndarray, shape: tuple[int, int], pad_to_multiple_of: int = 1
) -> PackedRows:
    """Return the examples packed into rows of this shape; SettingError if they do not fit.

    ``rows`` [examples], ascending, is the row of each example. Examples begin at multiples of
    ``pad_to_multiple_of``.
    """
    # A slot is an example with the padding after it.
    slot_lengths = round_up(examples.lengths, pad_to_multiple_of, shape[1])
    row_lengths = np.bincount(rows, weights=slot_lengths, minlength=shape[0]).astype(np.int64)
    if len(row_lengths) > shape[0] or (row_lengths > shape[1]).any():
        raise SettingError(f"rows of {row_lengths.max()} tokens do not fit in a batch of shape {shape}")
    destination, source = length_mask(row_lengths, shape[1]), np.flatnonzero(examples.mask)
    if pad_to_multiple_of > 1:
        # The slots of a row follow each other without gaps: ``destination`` and ``in_slot`` mark the same
        # positions in the same order. Write to the tokens of each slot and not to the padding at its end.
        width = slot_lengths.max(initial=0)
        in_slot, in_example = length_mask(slot_lengths, width), length_mask(examples.lengths, width)
        destination[destination] = in_example[in_slot]
    tokens, segments, positions = (np.zeros(shape, np.int32) for _ in range(3))
    content = np.zeros(shape, bool)
    tokens[destination] = examples.tokens.ravel()[source]
    content[destination] = examples.content.ravel()[source]
    first_of_row = np.searchsorted(rows, rows)  # the first example of the same row
    segments[destination] = np.repeat(np.arange(len(rows)) - first_of_row + 1, examples.lengths)
    starts = np.cumsum(examples.lengths) - examples.lengths
    positions[destination] = np.arange(examples.lengths.sum()) - np.repeat(starts, examples.lengths)
    return PackedRows(tokens, segments, positions, content)

"""Pack ragged examples into a batch, several examples to a row where they fit.

Names and rules are those of seqio's converters, but every batch is written as a packed one: a row with one
example is a row with one segment. Segment 0 is padding; segments count from 1, positions from 0 in each
segment; the decoder reads the targets shifted right by one within each segment, beginning with padding, T5's
start token, which ``set_decoder_start`` replaces by that of another model.
"""

from collections.abc import Sequence
from dataclasses import replace
from typing import NamedTuple

import numpy as np

from lm.batch import Batch, Side
from lm.config.base import SettingError
from lm.objectives.corruption import length_mask
from lm.objectives.denoising import Lengths
from lm.tokenizers.tokenizer import PAD, T5_BOUNDARY_TOKENS, BoundaryTokens

ENCODER_DECODERS = ("encoder-decoder", "shared-encoder-decoder")
DECODERS = ("decoder", "prefix-decoder")  # read inputs and targets in one row
ARCHITECTURES = (*ENCODER_DECODERS, *DECODERS, "encoder")


class Ragged(NamedTuple):
    """A ragged batch: sequences padded on the right; only ``lengths`` tells padding from text."""

    tokens: np.ndarray  # int32 [B,L]
    lengths: np.ndarray  # int32 [B]
    content: np.ndarray  # bool [B,L]: the tokens that are content where they are predicted

    @property
    def mask(self) -> np.ndarray:
        """Return the padding mask, bool [B,L], True on tokens that are no padding."""
        return length_mask(self.lengths, self.tokens.shape[1])


class MarkedIds(NamedTuple):
    """Token ids without EOS, and which of them are content; where only ids are given, all are."""

    ids: Sequence[int] | np.ndarray  # [L]
    content: np.ndarray  # bool [L]


Ids = Sequence[int] | np.ndarray | MarkedIds


def ragged(
    sequences: Sequence[Ids], max_length: int, boundary: BoundaryTokens = T5_BOUNDARY_TOKENS
) -> Ragged:
    """Return the sequences as a ragged batch, with the prefix and EOS of ``boundary`` around each of them.

    A sequence longer than ``max_length``, EOS included, loses its end but keeps its EOS.
    """
    marked = [_mark(ids, boundary.prefix) for ids in sequences]
    lengths = np.array([min(len(ids), max_length - 1) for ids, _ in marked], np.int32)  # without EOS
    shape = (len(marked), int(lengths.max(initial=-1)) + 1)
    tokens, content = np.full(shape, PAD, np.int32), np.zeros(shape, bool)
    for row, (length, example) in enumerate(zip(lengths, marked, strict=True)):
        tokens[row, :length] = example.ids[:length]
        tokens[row, length] = boundary.eos
        content[row, :length] = example.content[:length]
    return Ragged(tokens, lengths + 1, content)


def _mark(ids: Ids, prefix: tuple[int, ...]) -> MarkedIds:
    """Return the ids of ``prefix`` and ``ids`` with their content mask; the prefix is no content."""
    ids, content = ids if isinstance(ids, MarkedIds) else MarkedIds(ids, np.ones(len(ids), bool))
    if not prefix:
        return MarkedIds(ids, content)
    return MarkedIds([*prefix, *ids], np.concatenate([np.zeros(len(prefix), bool), content]))


def concatenate_sides(inputs: Ragged, targets: Ragged) -> Ragged:
    """Return the inputs [B,S] of each example followed by its targets [B,T], as one ragged batch [B,L]."""
    is_text = np.flatnonzero(np.concatenate([inputs.mask, targets.mask], axis=1))
    lengths = inputs.lengths + targets.lengths
    shape = (len(lengths), int(lengths.max(initial=0)))
    joined = Ragged(np.full(shape, PAD, np.int32), lengths, np.zeros(shape, bool))
    text = joined.mask
    joined.tokens[text] = np.concatenate([inputs.tokens, targets.tokens], axis=1).ravel()[is_text]
    joined.content[text] = np.concatenate([inputs.content, targets.content], axis=1).ravel()[is_text]
    return joined


def pack_examples(lengths: np.ndarray, capacity: np.ndarray) -> np.ndarray:
    """Return the first example of each row, and last the number of examples, int64 [rows + 1].

    ``lengths`` [examples, sides] and ``capacity`` [sides] are in tokens. Examples stay in order: the first
    that does not fit, on any side, begins the next row. SettingError if an example exceeds a whole row.

    >>> pack_examples(np.array([[3], [4], [2], [5]]), np.array([8])).tolist()
    [0, 2, 4]
    """
    if len(lengths) and (lengths.max(axis=0) > capacity).any():
        raise SettingError(f"an example of {lengths.max(axis=0)} tokens does not fit in a row of {capacity}")
    ends = np.zeros((len(lengths) + 1, lengths.shape[1]), np.int64)
    np.cumsum(lengths, axis=0, out=ends[1:])
    sides = zip(ends.T, capacity, strict=True)
    fitting = [np.searchsorted(end, end[:-1] + limit, side="right") - 1 for end, limit in sides]
    # a row that begins with example i ends before example following[i]
    following = np.minimum.reduce(fitting).tolist()
    starts = [0]
    while starts[-1] < len(lengths):
        starts.append(following[starts[-1]])
    return np.array(starts, np.int64)


def row_length(architecture: str, lengths: Lengths) -> int:
    """Return the length of a decoder's row: that of targets, and of inputs where no encoder reads them."""
    return lengths.inputs + lengths.targets if architecture in DECODERS else lengths.targets


def row_capacity(architecture: str, lengths: Lengths) -> np.ndarray:
    """Return the capacity of a row for ``pack_examples``, [sides], in tokens."""
    side = row_length(architecture, lengths)
    return np.array([lengths.inputs, side] if architecture in ENCODER_DECODERS else [side])


def make_packed_batch(
    inputs: Ragged, targets: Ragged, rows: np.ndarray, architecture: str, lengths: Lengths, batch_size: int
) -> Batch:
    """Return the batch of packed examples, its sides [batch_size, S or T].

    ``inputs`` and ``targets`` include EOS; ``rows`` [examples], ascending, is the row of each example.
    """
    if architecture in ENCODER_DECODERS:
        tokens, segments, positions, _ = _place_in_rows(inputs, rows, (batch_size, lengths.inputs))
        encoder = Side(tokens=tokens, segment_ids=segments, positions=positions)
    else:
        if architecture == "prefix-decoder":  # it sees the inputs that it predicts
            inputs = inputs._replace(content=np.zeros_like(inputs.content))
        targets, encoder = concatenate_sides(inputs, targets), None
    shape = (batch_size, row_length(architecture, lengths))
    tokens, segments, positions, content = _place_in_rows(targets, rows, shape)
    text, causal_attention = segments > 0, None
    if architecture not in ENCODER_DECODERS:
        # one position more than there are inputs: where their EOS is read and the first target is predicted
        prefix = np.zeros(shape, np.int32)
        prefix[text] = np.repeat(inputs.lengths, targets.lengths)
        causal_attention = (text & (positions <= prefix)).astype(np.int32)
    decoder = Side(
        tokens=shift_right(tokens, segments),
        segment_ids=segments,
        positions=positions,
        causal_attention=causal_attention,
        targets=tokens,
        loss_weights=text.astype(np.float32),
        content=content,
    )
    return Batch(encoder=encoder, decoder=decoder)


def set_decoder_start(batch: Batch, start: int) -> Batch:
    """Return the batch with ``start`` as the first token that its decoder reads in each segment."""
    side = batch.side("decoder")
    first = (side.positions == 0) & (side.segment_ids > 0)
    return replace(batch, decoder=replace(side, tokens=np.where(first, np.int32(start), side.tokens)))


def shift_right(tokens: np.ndarray, segments: np.ndarray) -> np.ndarray:
    """Return tokens [B,T] shifted right by one within each segment; PAD where one begins and in padding."""
    shifted = np.zeros_like(tokens)
    shifted[:, 1:] = tokens[:, :-1] * (segments[:, 1:] == segments[:, :-1])
    return shifted


def _place_in_rows(examples: Ragged, rows: np.ndarray, shape: tuple[int, int]) -> tuple[np.ndarray, ...]:
    """Return tokens, segment ids and positions, int32 [B,L], and content, bool [B,L], of packed rows.

    The examples of a row follow each other from the left. SettingError if they exceed ``shape``.
    """
    filled = np.bincount(rows, weights=examples.lengths, minlength=shape[0]).astype(np.int64)
    if len(filled) > shape[0] or (filled > shape[1]).any():
        raise SettingError(f"rows of {filled.max()} tokens do not fit in a batch of shape {shape}")
    text = length_mask(filled, shape[1])
    first = np.searchsorted(rows, rows)  # the first example of the same row
    begin = np.cumsum(examples.lengths) - examples.lengths
    tokens, segments, positions = (np.zeros(shape, np.int32) for _ in range(3))
    content, is_text = np.zeros(shape, bool), np.flatnonzero(examples.mask)
    tokens[text], content[text] = examples.tokens.ravel()[is_text], examples.content.ravel()[is_text]
    segments[text] = np.repeat(np.arange(len(rows)) - first + 1, examples.lengths)
    positions[text] = np.arange(examples.lengths.sum()) - np.repeat(begin, examples.lengths)
    return tokens, segments, positions, content

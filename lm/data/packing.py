"""Ragged examples -> the features of a batch, several examples to a row where they fit.

Feature names and rules are those of seqio's converters, but that every batch is written as a packed one: a
row with one example is a row with one segment. Segment 0 is padding; segments count from 1, positions from 0
in each segment; the decoder reads the targets shifted right by one within each segment, beginning with
padding (T5's start token).
"""

import numpy as np

from lm.data.objectives import Lengths, Ragged, within
from lm.data.text.vocabulary import EOS, PAD
from lm.settings import SettingError

ENCODER_DECODERS = ("encoder-decoder", "shared-encoder-decoder")
DECODERS = ("decoder", "prefix-decoder")  # read inputs and targets in one row
ARCHITECTURES = (*ENCODER_DECODERS, *DECODERS, "encoder")


def ragged(sequences: list[np.ndarray], room: int) -> Ragged:
    """Token ids without EOS -> [B,L] with EOS. What exceeds ``room`` is cut off at the end, before the
    EOS.
    """
    kept = [np.asarray(sequence, np.int32)[: room - 1] for sequence in sequences]
    lengths = np.array([len(sequence) for sequence in kept], np.int32) + 1
    tokens = np.full((len(kept), int(lengths.max(initial=0))), PAD, np.int32)
    for row, sequence in zip(tokens, kept, strict=True):
        row[: len(sequence)] = sequence
        row[len(sequence)] = EOS
    return Ragged(tokens, lengths)


def flat(examples: Ragged) -> np.ndarray:
    """[B,L] -> all tokens, one example after the other."""
    return examples.tokens.ravel()[np.flatnonzero(within(examples.lengths, examples.tokens.shape[1]))]


def join(first: Ragged, second: Ragged) -> Ragged:
    """[B,S] and [B,T] -> [B,L]: each example of the one followed by that of the other."""
    both = np.concatenate([first.tokens, second.tokens], axis=1)
    keep = np.concatenate([within(part.lengths, part.tokens.shape[1]) for part in (first, second)], axis=1)
    lengths = first.lengths + second.lengths
    tokens = np.full((len(both), int(lengths.max(initial=0))), PAD, np.int32)
    tokens[within(lengths, tokens.shape[1])] = both.ravel()[np.flatnonzero(keep)]
    return Ragged(tokens, lengths)


def fill_rows(sizes: np.ndarray, room: np.ndarray) -> np.ndarray:
    """sizes [examples, sides], room [sides] -> [rows + 1]: each row's first example, then the number of
    examples.

    In the given order, and a row is closed by the first example that no longer fits (on one side or another).
    """
    if len(sizes) and (sizes.max(axis=0) > room).any():
        raise SettingError(f"an example of {sizes.max(axis=0)} tokens does not fit in a row of {room}")
    ends = np.concatenate([np.zeros((1, sizes.shape[1]), np.int64), np.cumsum(sizes, axis=0, dtype=np.int64)])
    sides = [
        np.searchsorted(end, end[:-1] + size, side="right") - 1
        for end, size in zip(ends.T, room, strict=True)
    ]
    # the row that example i would begin ends before following[i]
    following = np.minimum.reduce(sides).tolist()
    starts = [0]
    while starts[-1] < len(sizes):
        starts.append(following[starts[-1]])
    return np.array(starts, np.int64)


def row_length(architecture: str, lengths: Lengths) -> int:
    """Tokens of a row that a decoder reads: the targets, after the inputs where there is no encoder for
    them.
    """
    return lengths.inputs + lengths.targets if architecture in DECODERS else lengths.targets


def row_room(architecture: str, lengths: Lengths) -> np.ndarray:
    """[sides]: the room of a row for ``fill_rows``."""
    side = row_length(architecture, lengths)
    return np.array([lengths.inputs, side] if architecture in ENCODER_DECODERS else [side])


def features(
    inputs: Ragged, targets: Ragged, rows: np.ndarray, *, architecture: str, lengths: Lengths, batch_size: int
) -> dict[str, np.ndarray]:
    """Examples, EOS included, with the row [examples] of each, in order -> the features [batch_size, S or
    T].
    """
    if architecture in ENCODER_DECODERS:
        encoder = _side(inputs, rows, (batch_size, lengths.inputs))
        batch = dict(
            zip(("encoder_input_tokens", "encoder_segment_ids", "encoder_positions"), encoder, strict=True)
        )
    else:
        targets, visible, batch = join(inputs, targets), inputs.lengths, {}
    shape = (batch_size, row_length(architecture, lengths))
    tokens, segments, positions = _side(targets, rows, shape)
    text = segments > 0
    batch |= {
        "decoder_input_tokens": shift_right(tokens, segments),
        "decoder_target_tokens": tokens,
        "decoder_segment_ids": segments,
        "decoder_positions": positions,
        "decoder_loss_weights": text.astype(np.float32),
    }
    if architecture not in ENCODER_DECODERS:
        # one position more than there are inputs: where their EOS is read and the first target is predicted
        prefix = np.zeros(shape, np.int32)
        prefix[text] = np.repeat(visible, targets.lengths)
        batch["decoder_causal_attention"] = (text & (positions <= prefix)).astype(np.int32)
    return batch


def shift_right(tokens: np.ndarray, segments: np.ndarray) -> np.ndarray:
    """[B,T] -> [B,T]: the token before, and PAD at the beginning of a segment and in padding."""
    shifted = np.zeros_like(tokens)
    shifted[:, 1:] = tokens[:, :-1] * (segments[:, 1:] == segments[:, :-1])
    return shifted


def _side(
    examples: Ragged, rows: np.ndarray, shape: tuple[int, int]
) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """tokens, segment ids and positions int32 [B,L]: the examples of each row side by side, from the left."""
    filled = np.bincount(rows, weights=examples.lengths, minlength=shape[0]).astype(np.int64)
    if len(filled) > shape[0] or (filled > shape[1]).any():
        raise SettingError(f"rows of {filled.max()} tokens do not fit in a batch of shape {shape}")
    text = within(filled, shape[1])
    first = np.searchsorted(rows, rows)  # the first example of the same row
    begin = np.cumsum(examples.lengths) - examples.lengths
    tokens, segments, positions = (np.zeros(shape, np.int32) for _ in range(3))
    tokens[text] = flat(examples)
    segments[text] = np.repeat(np.arange(len(rows)) - first + 1, examples.lengths)
    positions[text] = np.arange(examples.lengths.sum()) - np.repeat(begin, examples.lengths)
    return tokens, segments, positions

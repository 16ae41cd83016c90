"""Pre-training rows of models with a decoder: inputs and targets of corrupted text, packed into rows.

Shapes: B examples of at most L raw tokens. A batch is a function of (seed, row numbers) alone: random
numbers are a function of (seed, number of the example).
"""

import functools
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import NamedTuple

import numpy as np

from lm.batch import Batch
from lm.data.batches import PickledWithoutCache, uniforms
from lm.data.checks import check_architecture, check_objective
from lm.data.corpus.sampler import CorpusSampler, WindowPosition
from lm.data.masked_lm import MaskedLMRows
from lm.data.packing import (
    ENCODER_DECODERS,
    Ragged,
    make_packed_batch,
    pack_examples,
    row_capacity,
    set_decoder_start,
)
from lm.data.segments import CACHED_WINDOWS, SEGMENTS, SegmentReader, WindowRows
from lm.objectives.corruption import Drawn, cap_sentinels, length_mask, trim_targets
from lm.objectives.denoising import Lengths, Objective, compute_lengths, sizes
from lm.objectives.formatting import INPUTS, TARGETS, permutation
from lm.tokenizers.tokenizer import PAD, T5_BOUNDARY_TOKENS, BoundaryTokens, Tokenizer


def pretraining_rows(
    sampler: CorpusSampler,
    objective: Objective,
    *,
    architecture: str,
    inputs_length: int,
    batch_size: int,
    boundary: BoundaryTokens = T5_BOUNDARY_TOKENS,
) -> "DenoisingRows | MaskedLMRows":
    """Return the rows of a corpus under an objective.

    SettingError if objective, architecture and tokenizer do not fit together.
    """
    check_architecture(architecture, sampler.seed or 0)
    check_objective(objective, architecture, sampler.corpus.tokenizer)
    lengths = compute_lengths(objective, inputs_length)
    if objective.noise == "suffix" and objective.inputs == "drop" and architecture not in ENCODER_DECODERS:
        # A prefix LM has two EOS in its row, after inputs and after targets: its text is a token shorter.
        lengths = lengths._replace(raw=max(lengths.raw - 1, 1))
    reader = SegmentReader(sampler, objective, lengths, batch_size)
    if architecture == "encoder":
        return MaskedLMRows(reader)
    return DenoisingRows(reader, architecture, boundary)


def noise_mask(objective: Objective, text: Drawn, room: int) -> np.ndarray:
    """Return the corruption mask, bool [B,L], True on noise.

    Its targets take at most ``room`` tokens, EOS included.
    """
    inside = length_mask(text.lengths, text.u.shape[2])
    mask = objective.corruption.mask(objective, text) & inside
    if not objective.corruption.bounded:
        if "sentinels" in (objective.inputs, objective.targets):
            mask = cap_sentinels(mask, inside, text.u[:, 0], text.num_sentinels)
        if objective.targets in ("sentinels", "drop"):
            mask = trim_targets(mask, inside, objective.targets == "sentinels", room)
    return mask


def denoise(
    objective: Objective, text: Ragged, u: np.ndarray, tokenizer: Tokenizer, limits: Lengths
) -> tuple[Ragged, Ragged]:
    """Return inputs and targets of texts [B,L], within ``limits`` and ending with EOS.

    Of the uniform numbers u [B,draws,L] the first ones draw the corruption mask, the next one the format of
    the inputs and, if the objective permutes sentences, the last one their order. Content tokens of the
    inputs are those of the text that they show, content tokens of the targets those that inputs hide.
    """
    tokens, lengths, words = text
    eos, inside, order = None if objective.eos_between_documents else tokenizer.eos, text.mask, None
    if objective.sentences == "permuted":
        order, u = permutation(tokens, lengths, u[:, -1], tokenizer), u[:, :-1]
        tokens, words = (np.take_along_axis(side, order, axis=1) for side in (tokens, words))
    if objective.corruption.infill:
        source, keep, noise = objective.corruption.infill(objective, lengths, u)
        shown = np.where(source < 0, tokenizer.mask, np.take_along_axis(tokens, source, axis=1))
        inputs = _gather(shown, keep, (source >= 0) & np.take_along_axis(words, source, axis=1), eos)
    else:
        starts = tokenizer.word_starts[tokens] if objective.corruption.on_words else None
        noise = noise_mask(objective, Drawn(lengths, u, tokenizer.num_sentinels, starts), limits.targets)
        shown, keep = INPUTS[objective.inputs].show(tokens, noise, u[:, -1], tokenizer)
        inputs = _gather(shown, keep & inside, words & ~noise, eos if objective.has_inputs else None)
    if order is not None:  # targets keep the order of the text
        noise[np.arange(len(order))[:, None], order] = noise.copy()
    targets = TARGETS["everything" if objective.corruption.infill else objective.targets]
    predicted, keep = targets.show(text.tokens, noise, u[:, -1], tokenizer)
    return inputs, _gather(predicted, keep & inside, text.content & noise, eos)


def _gather(tokens: np.ndarray, keep: np.ndarray, content: np.ndarray, eos: int | None) -> Ragged:
    """Return the tokens to keep, moved to the left, and after them ``eos`` unless it is None."""
    counts = np.count_nonzero(keep, axis=1).astype(np.int32)
    shape = len(tokens), int(counts.max(initial=0)) + (eos is not None)
    gathered, marks = np.full(shape, PAD, np.int32), np.zeros(shape, bool)
    # 3 x as fast as [keep]
    room, kept = length_mask(counts, shape[1]), np.flatnonzero(keep)
    gathered[room], marks[room] = tokens.ravel()[kept], content.ravel()[kept]
    if eos is not None:
        gathered[np.arange(len(tokens)), counts] = eos
    return Ragged(gathered, counts + np.int32(eos is not None), marks)


def _add_prefix(text: Ragged, prefix: tuple[int, ...]) -> Ragged:
    """Return the texts [B,L] with the ids of ``prefix`` before each."""
    if not prefix:
        return text
    count, rows = len(prefix), len(text.lengths)
    tokens = np.concatenate([np.tile(np.array(prefix, np.int32), (rows, 1)), text.tokens], axis=1)
    content = np.concatenate([np.zeros((rows, count), bool), text.content], axis=1)
    return Ragged(tokens, text.lengths + np.int32(count), content)


class WindowPacking(NamedTuple):
    """Hold how the segments of a window, in the order of the epoch, are packed into rows."""

    row_starts: np.ndarray  # index of each row's first segment, and last the number of segments [rows + 1]
    first_uniforms: np.ndarray  # first random number of each segment, which decides its size [segments]


@dataclass(frozen=True)
class DenoisingRows(PickledWithoutCache):
    """Rows of pre-training for models with a decoder: inputs and targets of segments.

    If documents are concatenated, each segment fills one row. Otherwise segments are packed in the order of
    the epoch, within a window; how many fit depends on their noise.

    A call goes from row numbers to the windows that hold them, to the segments of each row (``RawExamples``),
    to ragged inputs and targets, to a ``Batch``.
    """

    reader: SegmentReader
    architecture: str
    boundary: BoundaryTokens = T5_BOUNDARY_TOKENS

    @property
    def lengths(self) -> Lengths:
        prefix, lengths = len(self.boundary.prefix), self.reader.lengths
        return lengths._replace(inputs=lengths.inputs + prefix, targets=lengths.targets + prefix)

    @property
    def objective(self) -> Objective:
        return self.reader.objective

    def __call__(self, numbers: np.ndarray) -> Batch:
        windows = self.reader.find_rows(numbers, self.count_rows, self.row_kind)
        if self.objective.concatenates:
            examples = _concatenate([self._read_rows(window, numbers) for window in windows])
        else:
            examples = _concatenate([self._read_packed_rows(window) for window in windows])
        sides = self._denoise(examples.text, examples.seeds, examples.keys, examples.first_uniforms)
        inputs, targets = (_add_prefix(side, self.boundary.prefix) for side in sides)
        batch = make_packed_batch(
            inputs, targets, examples.batch_rows, self.architecture, self.lengths, len(numbers)
        )
        return set_decoder_start(batch, self.boundary.decoder_start)

    def rows_of_epoch(self, limit: int) -> int:
        """Return the number of rows of the first epoch of a corpus in one stream, at most ``limit``."""
        return self.reader.rows_of_epoch(limit, self.count_rows, self.row_kind)

    @property
    def row_kind(self) -> str:
        """Return the name under which rows of windows are counted, which depends on the packing."""
        return SEGMENTS if self.objective.concatenates else f"packed {self.architecture}"

    def count_rows(self, position: WindowPosition) -> int:
        """Return how many rows a window fills."""
        if self.objective.concatenates:
            return self.reader.count_segments(position)
        return len(self.pack_window(position).row_starts) - 1

    def _read_rows(self, window: WindowRows, numbers: np.ndarray) -> "RawExamples":
        """Return the texts of rows that hold one segment each."""
        segments = self.reader.order(window.position)[window.rows]
        text = self._read_segments(window.position, segments)
        seeds = np.full(len(segments), self.reader.seed)
        return RawExamples(text, seeds, numbers[window.batch_rows], None, window.batch_rows)

    def _read_packed_rows(self, window: WindowRows) -> "RawExamples":
        """Return the texts of rows that hold several segments each."""
        packing = self.pack_window(window.position)
        starts, ends = packing.row_starts[window.rows], packing.row_starts[window.rows + 1]
        indices = np.concatenate([np.arange(*bounds) for bounds in zip(starts, ends, strict=True)])
        return RawExamples(
            text=self._read_segments(window.position, self.reader.order(window.position)[indices]),
            seeds=np.full(len(indices), window.position.seed(self.reader.seed)),
            keys=window.position.key + indices,
            first_uniforms=packing.first_uniforms[indices],
            batch_rows=np.repeat(window.batch_rows, ends - starts),
        )

    def _read_segments(self, position: WindowPosition, segments: np.ndarray) -> Ragged:
        window, max_length = self.reader.window(position), self.lengths.raw
        starts, lengths = window.segments.starts[segments], window.segments.lengths[segments]
        tokens = window.text.read(starts[:, None] + np.arange(max_length))
        return Ragged(tokens, lengths.astype(np.int32), tokens != window.tokenizer.eos)

    def _denoise(
        self, text: Ragged, seeds: np.ndarray | int, keys: np.ndarray, first_uniforms: np.ndarray | None
    ) -> tuple[Ragged, Ragged]:
        """Return inputs and targets of texts, with noise drawn by seed and key.

        ``first_uniforms`` replaces the first random number of each text.
        """
        u = uniforms(seeds, keys, self.objective.draws, self.lengths.raw)
        if first_uniforms is not None:
            u[:, 0, 0] = first_uniforms
        return denoise(self.objective, text, u, self.reader.tokenizer, self.reader.lengths)

    def example(self, number: int) -> tuple[Ragged, Ragged]:
        """Return example ``number`` of a mixture; streams take turns, each in the order of its segments."""
        num_streams = np.array([self.reader.sampler.num_streams])
        (window,) = self.reader.find_stream_rows(
            number % num_streams, number // num_streams, self.reader.count_segments, SEGMENTS
        )
        segments = self.reader.order(window.position)[window.rows]
        text = self._read_segments(window.position, segments)
        return self._denoise(text, self.reader.seed, np.array([number]), None)

    @functools.cached_property
    def pack_window(self) -> Callable[[WindowPosition], WindowPacking]:
        """Return the function that packs a window; the last windows are cached."""
        return functools.lru_cache(maxsize=CACHED_WINDOWS * self.reader.sampler.num_streams)(
            self._pack_window
        )

    def _pack_window(self, position: WindowPosition) -> WindowPacking:
        lengths = self.reader.window(position).segments.lengths[self.reader.order(position)]
        first_uniforms = self.reader.first_uniforms(position)
        side_lengths = np.stack(sizes(self.objective, lengths, first_uniforms), axis=1)
        side_lengths += len(self.boundary.prefix)
        if self.architecture not in ENCODER_DECODERS:
            side_lengths = side_lengths.sum(axis=1, keepdims=True)
        row_starts = pack_examples(side_lengths, row_capacity(self.architecture, self.lengths))
        return WindowPacking(row_starts, first_uniforms)


class RawExamples(NamedTuple):
    """Hold segments before noise is applied, and what their noise is drawn by."""

    text: Ragged
    seeds: np.ndarray  # of their noise, int64 [B]
    keys: np.ndarray  # of their noise under that seed, int64 [B]
    first_uniforms: np.ndarray | None  # float32 [B]; None: drawn by seed and key like all others
    batch_rows: np.ndarray  # their rows in the batch, int64 [B]


def _concatenate(parts: Sequence[RawExamples]) -> RawExamples:
    """Return all segments in the order of their rows."""
    batch_rows = np.concatenate([part.batch_rows for part in parts])
    order = np.argsort(batch_rows, kind="stable")
    text = (np.concatenate(arrays)[order] for arrays in zip(*(part.text for part in parts), strict=True))
    first_uniforms = [part.first_uniforms for part in parts if part.first_uniforms is not None]
    return RawExamples(
        text=Ragged(*text),
        seeds=np.concatenate([part.seeds for part in parts])[order],
        keys=np.concatenate([part.keys for part in parts])[order],
        first_uniforms=np.concatenate(first_uniforms)[order] if first_uniforms else None,
        batch_rows=batch_rows[order],
    )

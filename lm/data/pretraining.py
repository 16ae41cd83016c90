"""Pre-training rows of models with a decoder: inputs and targets of corrupted text, packed into rows.

Shapes: B texts of at most L raw tokens. A batch is a function of (seed, row numbers) alone: random numbers
are a function of (seed, number of the example).
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
from lm.objectives.corruption import CorruptionInputs, length_mask, limit_spans, trim_targets
from lm.objectives.denoising import Lengths, Objective, compute_lengths, corrupted_lengths
from lm.objectives.formatting import INPUTS, TARGETS, sentence_permutation
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
    """Return the rows of a corpus under an objective: ``MaskedLMRows`` for encoders, else ``DenoisingRows``.

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


# --- corruption of texts


def noise_mask(objective: Objective, texts: CorruptionInputs, max_targets: int) -> np.ndarray:
    """Return the corruption mask, bool [B,L], True on noise, reduced until it fits.

    There is a sentinel for each span, and targets have at most ``max_targets`` tokens, EOS included.
    """
    is_token = length_mask(texts.lengths, texts.uniforms.shape[2])
    noise = objective.corruption.mask(objective, texts) & is_token
    if not objective.corruption.has_bounded_targets:
        if "sentinels" in (objective.inputs, objective.targets):
            noise = limit_spans(noise, is_token, texts.uniforms[:, 0], texts.num_sentinels)
        if objective.targets in ("sentinels", "drop"):
            noise = trim_targets(noise, is_token, objective.targets == "sentinels", max_targets)
    return noise


def denoise(
    objective: Objective, text: Ragged, u: np.ndarray, tokenizer: Tokenizer, limits: Lengths
) -> tuple[Ragged, Ragged]:
    """Return inputs and targets of texts [B,L], within ``limits`` and ending with EOS.

    Of the uniform numbers u [B,R,L] the first ones draw the corruption mask, the next one the format of the
    inputs and, if the objective permutes sentences, the last one their order. Content tokens of the inputs
    are those of the text that they show, content tokens of the targets those that inputs hide.
    """
    tokens, lengths, is_content = text
    is_token, order = text.mask, None
    eos = None if objective.eos_between_documents else tokenizer.eos
    if objective.sentences == "permuted":
        order, u = sentence_permutation(tokens, lengths, u[:, -1], tokenizer), u[:, :-1]
        tokens = np.take_along_axis(tokens, order, axis=1)
        is_content = np.take_along_axis(is_content, order, axis=1)
    if objective.corruption.infill:
        source, keep, noise = objective.corruption.infill(objective, lengths, u)
        shown = np.where(source < 0, tokenizer.mask, np.take_along_axis(tokens, source, axis=1))
        shows_content = (source >= 0) & np.take_along_axis(is_content, source, axis=1)
        inputs = _keep_tokens(shown, keep, shows_content, eos)
    else:
        word_starts = tokenizer.word_starts[tokens] if objective.corruption.needs_word_starts else None
        texts = CorruptionInputs(lengths, u, tokenizer.num_sentinels, word_starts)
        noise = noise_mask(objective, texts, limits.targets)
        shown, keep = INPUTS[objective.inputs].apply(tokens, noise, u[:, -1], tokenizer)
        inputs_eos = eos if objective.has_inputs else None
        inputs = _keep_tokens(shown, keep & is_token, is_content & ~noise, inputs_eos)
    if order is not None:  # targets keep the order of the text
        noise[np.arange(len(order))[:, None], order] = noise.copy()
    targets_format = TARGETS["everything" if objective.corruption.infill else objective.targets]
    predicted, keep = targets_format.apply(text.tokens, noise, u[:, -1], tokenizer)
    return inputs, _keep_tokens(predicted, keep & is_token, text.content & noise, eos)


def _keep_tokens(tokens: np.ndarray, keep: np.ndarray, content: np.ndarray, eos: int | None) -> Ragged:
    """Return the tokens [B,L] to keep, moved to the left, and after them ``eos`` unless it is None."""
    counts = np.count_nonzero(keep, axis=1).astype(np.int32)
    shape = len(tokens), int(counts.max(initial=0)) + (eos is not None)
    kept_tokens, kept_content = np.full(shape, PAD, np.int32), np.zeros(shape, bool)
    # 3 x as fast as [keep]
    destination, source = length_mask(counts, shape[1]), np.flatnonzero(keep)
    kept_tokens[destination], kept_content[destination] = tokens.ravel()[source], content.ravel()[source]
    if eos is not None:
        kept_tokens[np.arange(len(tokens)), counts] = eos
    return Ragged(kept_tokens, counts + np.int32(eos is not None), kept_content)


def _add_prefix(text: Ragged, prefix: tuple[int, ...]) -> Ragged:
    """Return the texts [B,L] with the ids of ``prefix``, which are no content, before each."""
    if not prefix:
        return text
    count, rows = len(prefix), len(text.lengths)
    tokens = np.concatenate([np.tile(np.array(prefix, np.int32), (rows, 1)), text.tokens], axis=1)
    content = np.concatenate([np.zeros((rows, count), bool), text.content], axis=1)
    return Ragged(tokens, text.lengths + np.int32(count), content)


# --- rows of a corpus


class SegmentBatch(NamedTuple):
    """The B segments of a batch's rows, and what their random numbers are drawn from."""

    text: Ragged  # raw tokens
    seeds: np.ndarray  # int64 [B]
    keys: np.ndarray  # int64 [B]: random numbers are those of ``uniforms(seeds, keys, ...)``, except
    first_uniforms: np.ndarray | None  # float32 [B]: the first one of each packed segment, drawn before
    batch_rows: np.ndarray  # int64 [B]: the row that each segment is in


class PackedWindow(NamedTuple):
    """How the segments of a window, in the order of the epoch, are packed into rows."""

    row_starts: np.ndarray  # index in the order of each row's first segment; last the number of segments
    first_uniforms: np.ndarray  # float32 [segments], in the same order


@dataclass(frozen=True)
class DenoisingRows(PickledWithoutCache):
    """The rows of pre-training by denoising: inputs and targets of segments of a corpus.

    If documents are concatenated, each segment fills one row. Otherwise segments are packed in the order of
    the epoch, within a window; how many fit depends on their noise.

    A call goes from row numbers to the windows that hold them, to the segments of each row, to ragged inputs
    and targets, to a ``Batch``.
    """

    reader: SegmentReader
    architecture: str
    boundary: BoundaryTokens = T5_BOUNDARY_TOKENS

    @property
    def lengths(self) -> Lengths:
        prefix, lengths = len(self.boundary.prefix), self.reader.lengths
        return lengths._replace(inputs=lengths.inputs + prefix, targets=lengths.targets + prefix)

    @property
    def row_kind(self) -> str:
        """Return the name under which rows of windows are counted, which depends on the packing."""
        return SEGMENTS if self.reader.objective.concatenates else f"packed {self.architecture}"

    def __call__(self, numbers: np.ndarray) -> Batch:
        objective = self.reader.objective
        read = self._read_whole_rows if objective.concatenates else self._read_packed_rows
        windows = self.reader.find_rows(numbers, self.count_rows, self.row_kind)
        segments = _in_batch_order([read(window, numbers) for window in windows])
        u = uniforms(segments.seeds, segments.keys, objective.uniforms_per_token, self.reader.lengths.raw)
        if segments.first_uniforms is not None:
            u[:, 0, 0] = segments.first_uniforms
        inputs, targets = denoise(objective, segments.text, u, self.reader.tokenizer, self.reader.lengths)
        inputs = _add_prefix(inputs, self.boundary.prefix)
        targets = _add_prefix(targets, self.boundary.prefix)
        batch = make_packed_batch(
            inputs, targets, segments.batch_rows, self.architecture, self.lengths, len(numbers)
        )
        return set_decoder_start(batch, self.boundary.decoder_start)

    def example(self, number: int) -> tuple[Ragged, Ragged]:
        """Return inputs and targets of example ``number`` of a corpus that is one task of a mixture.

        Streams take turns, each in the order of its segments.
        """
        reader, count = self.reader, np.array([self.reader.sampler.num_streams])
        (window,) = reader.find_stream_rows(number % count, number // count, reader.count_segments, SEGMENTS)
        text = self._read_text(window.position, reader.segment_order(window.position)[window.rows])
        u = uniforms(reader.seed, np.array([number]), reader.objective.uniforms_per_token, self.lengths.raw)
        return denoise(reader.objective, text, u, reader.tokenizer, reader.lengths)

    def rows_of_epoch(self, limit: int) -> int:
        """Return the number of rows of the first epoch of a corpus in one stream, at most ``limit``."""
        return self.reader.rows_of_epoch(limit, self.count_rows, self.row_kind)

    def count_rows(self, position: WindowPosition) -> int:
        """Return how many rows a window fills."""
        if self.reader.objective.concatenates:
            return self.reader.count_segments(position)
        return len(self.pack_window(position).row_starts) - 1

    @functools.cached_property
    def pack_window(self) -> Callable[[WindowPosition], PackedWindow]:
        """Return the function that packs a window, with a cache."""

        def pack(position: WindowPosition) -> PackedWindow:
            first_uniforms = self.reader.first_uniforms(position)
            raw_lengths = self.reader.window(position).segments.lengths[self.reader.segment_order(position)]
            lengths = corrupted_lengths(self.reader.objective, raw_lengths, first_uniforms)
            sizes = np.stack(lengths, axis=1) + len(self.boundary.prefix)
            if self.architecture not in ENCODER_DECODERS:
                sizes = sizes.sum(axis=1, keepdims=True)
            row_starts = pack_examples(sizes, row_capacity(self.architecture, self.lengths))
            return PackedWindow(row_starts, first_uniforms)

        return functools.lru_cache(maxsize=CACHED_WINDOWS * self.reader.sampler.num_streams)(pack)

    def _read_whole_rows(self, window: WindowRows, numbers: np.ndarray) -> SegmentBatch:
        """Return the segments of rows that hold one segment each."""
        segments = self.reader.segment_order(window.position)[window.rows]
        seeds, keys = np.full(len(segments), self.reader.seed), numbers[window.batch_rows]
        return SegmentBatch(self._read_text(window.position, segments), seeds, keys, None, window.batch_rows)

    def _read_packed_rows(self, window: WindowRows, _numbers: np.ndarray) -> SegmentBatch:
        """Return the segments of rows that hold several segments each."""
        row_starts, first_uniforms = self.pack_window(window.position)
        starts, ends = row_starts[window.rows], row_starts[window.rows + 1]
        nth = np.concatenate([np.arange(*row) for row in zip(starts, ends, strict=True)])  # in the order
        text = self._read_text(window.position, self.reader.segment_order(window.position)[nth])
        seeds, keys = np.full(len(nth), window.position.seed(self.reader.seed)), window.position.key + nth
        batch_rows = np.repeat(window.batch_rows, ends - starts)
        return SegmentBatch(text, seeds, keys, first_uniforms[nth], batch_rows)

    def _read_text(self, position: WindowPosition, segments: np.ndarray) -> Ragged:
        """Return the raw tokens of segments of a window."""
        window = self.reader.window(position)
        starts, lengths = window.segments.starts[segments], window.segments.lengths[segments]
        tokens = window.text.read(starts[:, None] + np.arange(self.lengths.raw))
        return Ragged(tokens, lengths.astype(np.int32), tokens != window.tokenizer.eos)


def _in_batch_order(windows: Sequence[SegmentBatch]) -> SegmentBatch:
    """Return the segments of all windows in the order of their rows."""
    batch_rows = np.concatenate([window.batch_rows for window in windows])
    order = np.argsort(batch_rows, kind="stable")
    text = Ragged(
        np.concatenate([window.text.tokens for window in windows])[order],
        np.concatenate([window.text.lengths for window in windows])[order],
        np.concatenate([window.text.content for window in windows])[order],
    )
    seeds = np.concatenate([window.seeds for window in windows])[order]
    keys = np.concatenate([window.keys for window in windows])[order]
    first_uniforms = [window.first_uniforms for window in windows if window.first_uniforms is not None]
    return SegmentBatch(
        text,
        seeds,
        keys,
        np.concatenate(first_uniforms)[order] if first_uniforms else None,
        batch_rows[order],
    )

"""Pre-training rows of models with a decoder: inputs and targets of corrupted text, packed into rows.

A window is the part of a shard of the corpus that is read, shuffled and cached as one
(``lm.data.corpus.shards``). Its documents are split into segments, and each segment is one example: it is
corrupted by itself.

With a mixture of denoisers each row of a batch is made by one of them (``DenoiserMixtureRows``).

Shapes: B texts of at most L raw tokens. A batch is a function of (seed, row numbers) alone: random numbers
are a function of (seed, number of the example).
"""

import functools
from bisect import bisect
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import NamedTuple

import numpy as np

from lm.batch import Batch, concatenate
from lm.config.base import SettingError
from lm.data.batches import PickledWithoutCache, uniforms
from lm.data.checks import check_architecture, check_has_tokens, check_objective
from lm.data.collocations import Collocations
from lm.data.corpus.sampler import CorpusSampler, WindowPosition
from lm.data.masked_lm import MaskedLMRows, NextTokenRows
from lm.data.packing import (
    DECODERS,
    ENCODER_DECODERS,
    PaddedTexts,
    make_packed_batch,
    pack_examples,
    pad_rows,
    round_up,
    row_capacity,
    row_length,
    set_decoder_start,
)
from lm.data.segments import CACHED_WINDOWS, UNPACKED_ROWS, SegmentReader, WindowRows
from lm.objectives.corruption import CorruptionInputs, length_mask, limit_spans, trim_targets
from lm.objectives.denoising import (
    OBJECTIVES,
    Denoiser,
    Lengths,
    Objective,
    compute_lengths,
    corrupted_lengths,
)
from lm.objectives.formatting import (
    INPUTS,
    Formatted,
    random_tokens,
    rotation,
    sentence_permutation,
    sentence_starts,
)
from lm.tokenizers.tokenizer import PAD, T5_BOUNDARY_TOKENS, BoundaryTokens, Tokenizer


def pretraining_rows(
    sampler: CorpusSampler,
    objective: Objective,
    *,
    architecture: str,
    inputs_length: int,
    batch_size: int,
    boundary: BoundaryTokens = T5_BOUNDARY_TOKENS,
    collocations: Collocations | None = None,
    pad_to_multiple_of: int = 1,
) -> "PretrainingRows":
    """Return the source of rows of a corpus under an objective.

    It is ``DenoisingRows`` for models with a decoder, ``MaskedLMRows`` for encoders or, if their objective is
    a causal language model's, ``NextTokenRows``, and ``DenoiserMixtureRows`` for a mixture.

    ``boundary`` holds the special ids around examples: EOS, the decoder's start token and prefix ids.
    ``collocations`` are those of PMI masking. In the encoder's rows of an encoder-decoder each packed example
    is padded to a multiple of ``pad_to_multiple_of`` tokens (``FunnelConfig``); rows of an encoder alone,
    each of one segment, ignore it. SettingError if objective, architecture, tokenizer and collocations do not
    fit together.
    """
    check_architecture(architecture, sampler.seed or 0)
    tokenizer, denoisers = sampler.corpus.tokenizer, objective.denoisers
    check_objective(objective, architecture)
    check_has_tokens(objective, architecture, tokenizer)
    if objective.needs_collocations and collocations is None:
        raise SettingError(
            "objective.noise='collocations' needs the collocations of the text: pass collocations="
            "Collocations(...) of lm.data.collocations, or choose objective.noise='whole-words'"
        )
    modes = mode_tokens(denoisers, tokenizer)
    parts: list[DenoisingRows | MaskedLMRows] = []
    for denoiser, lengths in zip(
        denoisers, lengths_of_denoisers(denoisers, architecture, inputs_length), strict=True
    ):
        segmentation = segmentation_objective(denoiser.objective, architecture)
        reader = SegmentReader(sampler, segmentation, lengths, batch_size, collocations)
        if architecture == "encoder":
            parts.append(MaskedLMRows(reader) if denoiser.objective.has_inputs else NextTokenRows(reader))
        else:
            mode = modes.get(denoiser.mode)
            parts.append(DenoisingRows(reader, architecture, boundary, mode, len(modes), pad_to_multiple_of))
    return DenoiserMixtureRows(denoisers, tuple(parts)) if objective.mixture else parts[0]


# --- lengths


def pretraining_lengths(objective: Objective, architecture: str, inputs_length: int) -> Lengths:
    """Return the lengths of rows under an objective, with room for all denoisers if it is a mixture.

    The ids that some tokenizers put before each text (``BoundaryTokens.prefix``) come on top.
    """
    denoisers = objective.denoisers
    parts = lengths_of_denoisers(denoisers, architecture, inputs_length)
    with_modes = [
        _with_mode(lengths, bool(denoiser.mode)) for lengths, denoiser in zip(parts, denoisers, strict=True)
    ]
    return max_lengths(with_modes, architecture)


def lengths_of_denoisers(
    denoisers: Sequence[Denoiser], architecture: str, inputs_length: int
) -> list[Lengths]:
    """Return the lengths of each denoiser's examples, not counting the mode token, for which room is left.

    A mode token (UL2's "[R]", "[S]" or "[X]") begins the inputs and tells the model the kind of denoiser.
    Rows of an encoder have ``inputs_length`` tokens, whatever the denoiser. A row of a decoder without an
    encoder holds inputs and targets. In a mixture for such a decoder, each denoiser gets the longest text
    whose row is no longer than the longest row of any denoiser at ``inputs_length``.
    """

    def lengths_of(denoiser: Denoiser, length: int) -> Lengths:
        lengths = compute_lengths(
            segmentation_objective(denoiser.objective, architecture), length - bool(denoiser.mode)
        )
        is_prefix_lm = denoiser.objective.noise == "suffix" and denoiser.objective.inputs == "drop"
        if is_prefix_lm and architecture not in ENCODER_DECODERS:
            # With EOS a prefix LM's row is inputs, EOS, targets, EOS; the second EOS costs one token of text.
            lengths = lengths._replace(raw=max(lengths.raw - denoiser.objective.eos_after_each_example, 1))
        if denoiser.objective.corruption.targets_limited_to_inputs_length and architecture in DECODERS:
            # Inputs and targets share a row and mostly trade off, so reserve their largest sum, not both
            # maxima. The extremes of the random number, 0 and 1, have the extremes of the sum.
            sides = corrupted_lengths(denoiser.objective, np.array([lengths.raw] * 2), np.arange(2))
            lengths = lengths._replace(targets=int(np.sum(sides, axis=0).max()) - lengths.inputs)
        return lengths

    if architecture not in DECODERS or len(denoisers) == 1:
        return [lengths_of(denoiser, inputs_length) for denoiser in denoisers]

    def row_tokens(denoiser: Denoiser, length: int) -> int:
        return row_length(architecture, _with_mode(lengths_of(denoiser, length), bool(denoiser.mode)))

    longest = max(row_tokens(denoiser, inputs_length) for denoiser in denoisers)
    candidates = range(inputs_length, longest + 1)

    def longest_fitting(denoiser: Denoiser) -> Lengths:
        """Return the lengths with the most text whose row has at most ``longest`` tokens."""
        index = bisect(candidates, longest, key=partial(row_tokens, denoiser)) - 1
        return lengths_of(denoiser, candidates[index])

    return [longest_fitting(denoiser) for denoiser in denoisers]


def _with_mode(lengths: Lengths, has_mode: bool) -> Lengths:
    return lengths._replace(inputs=lengths.inputs + has_mode)


def max_lengths(lengths: Sequence[Lengths], architecture: str) -> Lengths:
    """Return lengths with room for rows of any of these ``lengths``."""
    raw, inputs, targets = (max(values) for values in zip(*lengths, strict=True))
    if architecture in DECODERS:  # inputs and targets stand in one row
        targets = max(row_length(architecture, each) for each in lengths) - inputs
    return Lengths(raw, inputs, targets)


def mode_tokens(denoisers: Sequence[Denoiser], tokenizer: Tokenizer) -> dict[str, int]:
    """Return the id of each mode token of a mixture: the last sentinels, in the order of the denoisers.

    The last sentinel has the lowest id. The first mode gets it, and each further mode the next higher id.
    Noise does not use these sentinels.
    """
    modes = dict.fromkeys(denoiser.mode for denoiser in denoisers if denoiser.mode)
    lowest_sentinel_id = tokenizer.vocab_size - tokenizer.num_sentinels
    return {mode: lowest_sentinel_id + number for number, mode in enumerate(modes)}


def segmentation_objective(objective: Objective, architecture: str) -> Objective:
    """Return the objective by which text is cut into rows.

    An encoder that predicts next tokens reads rows as it does in masked language modeling, so that phases of
    both read the same texts at the same steps.
    """
    if architecture == "encoder" and not objective.has_inputs:
        return replace(OBJECTIVES["masked-lm"], documents=objective.documents, eos=objective.eos)
    return objective


# --- corruption of texts


def noise_mask(objective: Objective, texts: CorruptionInputs, max_targets: int) -> np.ndarray:
    """Return the corruption mask, bool [B,L], True on noise, reduced until it fits.

    It fits if there is a sentinel for each span, and if targets have at most ``max_targets`` tokens. One of
    these is for EOS unless ``eos`` is "none".
    """
    is_token = length_mask(texts.lengths, texts.uniforms.shape[2])
    noise = objective.draw_noise(texts) & is_token
    if not objective.corruption.fits_without_trimming:
        if objective.targets in ("sentinels", "drop"):
            # ``trim_targets`` always reserves one token for EOS; give it back if ``eos`` is "none".
            room = max_targets + (not objective.writes_eos)
            noise = trim_targets(noise, is_token, objective.targets == "sentinels", room)
        if "sentinels" in (objective.inputs, objective.targets):
            # Afterwards, since a span that is cut at the end of a text leaves one more run of visible text.
            noise = limit_spans(noise, is_token, texts.uniforms[:, 0], texts.num_sentinels)
    return noise


def denoise(
    objective: Objective,
    text: PaddedTexts,
    random_numbers: np.ndarray,
    tokenizer: Tokenizer,
    max_targets: int,
    *,
    reserved_sentinels: int = 0,
    collocations: Collocations | None = None,
) -> tuple[PaddedTexts, PaddedTexts]:
    """Return inputs and targets of texts [B,L], each with EOS if the objective writes it.

    Noise is reduced until targets have at most ``max_targets`` tokens. Texts are short enough that
    inputs fit (``compute_lengths``).

    ``random_numbers`` float32 [B,R,L] are uniform. Axis R holds, in this order: those of the corruption mask,
    one for the format of the inputs if that is random, one for the format of the targets if that is, and one
    for the order of the inputs if it is not the text's. Noise spans use all sentinels but the last
    ``reserved_sentinels``.

    The content masks of the result mark original tokens of the text: in the inputs those that are visible, in
    the targets those that the inputs hide. Sentinels, mask tokens, EOS and random tokens are no content.
    """
    if objective.corruption.replaces_text:
        tokens = random_tokens(random_numbers[:, 0], tokenizer)
        text = text._replace(tokens=tokens, content=np.zeros_like(text.content))
    tokens, lengths, is_content = text
    is_token, order = text.mask, None
    eos = tokenizer.eos if objective.eos_after_each_example else None
    if objective.sentences != "in-order":
        if objective.sentences == "permuted":
            order = sentence_permutation(tokens, lengths, random_numbers[:, -1], tokenizer)
        else:
            order = rotation(lengths, random_numbers[:, -1])
        random_numbers = random_numbers[:, :-1]  # without those for the order
        tokens = np.take_along_axis(tokens, order, axis=1)
        is_content = np.take_along_axis(is_content, order, axis=1)
    target_uniforms = random_numbers[:, -1]  # read only if the format of the targets is random
    if objective.targets_format.uniforms_per_token:
        random_numbers = random_numbers[:, :-1]
    if objective.corruption.infill:
        # Before each token there is a slot for a mask: ``source`` and ``keep`` are [B,2L], ``noise`` [B,L].
        source, keep, noise = objective.corruption.infill(objective, lengths, random_numbers)
        shown = np.where(source < 0, tokenizer.mask, np.take_along_axis(tokens, source, axis=1))
        content_in_slots = (source >= 0) & np.take_along_axis(is_content, source, axis=1)
        inputs = _keep_tokens(shown, keep, content_in_slots, eos)
    else:
        word_starts = tokenizer.word_starts[tokens] if objective.corruption.needs_word_starts else None
        if objective.corruption.needs_collocations:
            assert word_starts is not None and collocations is not None
            breaks = ~(is_token & is_content)  # EOS, and what follows the text
            word_starts = collocations.unit_starts(tokens, word_starts, breaks, random_numbers[:, 1])
        num_sentinels = tokenizer.num_sentinels - reserved_sentinels
        sentences = None
        if objective.corruption.needs_sentence_starts:
            sentences = sentence_starts(tokens, tokenizer)
        texts = CorruptionInputs(lengths, random_numbers, num_sentinels, word_starts, sentences)
        noise = noise_mask(objective, texts, max_targets)
        inputs_format = INPUTS[objective.inputs]
        formatted = inputs_format.apply(objective, tokens, noise, random_numbers[:, -1], tokenizer)
        if objective.noise == "none" and order is not None:
            # No token is masked, but the order has changed: no target counts as visible at its own position.
            noise = np.ones_like(noise)
        inputs_eos = eos if objective.has_inputs and inputs_format.ends_with_eos else None
        inputs = _keep_formatted(formatted, is_token, is_content & ~noise, inputs_eos)
    if order is not None:  # targets keep the order of the text
        noise_in_text_order = np.empty_like(noise)
        np.put_along_axis(noise_in_text_order, order, noise, axis=1)
        noise = noise_in_text_order
    formatted = objective.targets_format.apply(objective, text.tokens, noise, target_uniforms, tokenizer)
    return inputs, _keep_formatted(formatted, is_token, text.content & noise, eos)


def _keep_formatted(
    formatted: Formatted, is_token: np.ndarray, content: np.ndarray, eos: int | None
) -> PaddedTexts:
    """Return a formatted text without the slots that it drops.

    ``is_token`` and ``content``, bool [B,L], are masks of the text. ``formatted.source`` maps slots to
    positions of the text; slots at -1 hold inserted tokens, which are not content.
    """
    tokens, keep, source = formatted
    if source is not None:
        is_inserted, position = source < 0, np.maximum(source, 0)
        is_token = is_inserted | np.take_along_axis(is_token, position, axis=1)
        content = ~is_inserted & np.take_along_axis(content, position, axis=1)
    return _keep_tokens(tokens, keep & is_token, content, eos)


def _keep_tokens(tokens: np.ndarray, keep: np.ndarray, content: np.ndarray, eos: int | None) -> PaddedTexts:
    """Return the tokens [B,L] where ``keep`` is True, moved to the left, then ``eos`` unless it is None."""
    counts = np.count_nonzero(keep, axis=1).astype(np.int32)
    shape = len(tokens), int(counts.max(initial=0)) + (eos is not None)
    kept_tokens, kept_content = np.full(shape, PAD, np.int32), np.zeros(shape, bool)
    # 3 x as fast as [keep]
    destination, source = length_mask(counts, shape[1]), np.flatnonzero(keep)
    kept_tokens[destination], kept_content[destination] = tokens.ravel()[source], content.ravel()[source]
    if eos is not None:
        kept_tokens[np.arange(len(tokens)), counts] = eos
    return PaddedTexts(kept_tokens, counts + np.int32(eos is not None), kept_content)


def _prepend_ids(text: PaddedTexts, prefix: tuple[int, ...]) -> PaddedTexts:
    """Return the texts [B,L] with the ids of ``prefix``, which are no content, in front of each."""
    if not prefix:
        return text
    count, rows = len(prefix), len(text.lengths)
    tokens = np.concatenate([np.tile(np.array(prefix, np.int32), (rows, 1)), text.tokens], axis=1)
    content = np.concatenate([np.zeros((rows, count), bool), text.content], axis=1)
    return PaddedTexts(tokens, text.lengths + np.int32(count), content)


# --- rows of a corpus


class SegmentBatch(NamedTuple):
    """The B segments of a batch's rows, and the seeds and keys of their random numbers."""

    text: PaddedTexts  # uncorrupted tokens
    seeds: np.ndarray  # int64 [B]
    keys: np.ndarray  # int64 [B]: Philox keys; the random numbers are ``uniforms(seeds, keys, ...)``
    # float32 [B]: the first random number of each segment, which decides how long it is after corruption. It
    # was drawn for packing, and replaces ``uniforms(...)[:, 0, 0]``; None if each row is one segment
    length_uniforms: np.ndarray | None
    batch_rows: np.ndarray  # int64 [B]: the row of the batch that holds each segment


class PackedWindow(NamedTuple):
    """Says how the shuffled segments of a window are packed into rows.

    Row r holds the shuffled segments ``row_starts[r]`` to ``row_starts[r + 1] - 1``.
    """

    row_starts: np.ndarray  # int64 [rows + 1]
    # float32 [segments], shuffled: the first random number of each segment, drawn before packing since it
    # decides how long the corrupted segment is
    length_uniforms: np.ndarray


@dataclass(frozen=True)
class DenoisingRows(PickledWithoutCache):
    """The rows of pre-training by denoising: inputs and targets of segments of a corpus.

    If documents are concatenated, each row holds one segment. Otherwise the shuffled segments of a window are
    packed into rows; how many fit in a row depends on their noise.
    """

    reader: SegmentReader
    architecture: str
    boundary: BoundaryTokens = T5_BOUNDARY_TOKENS
    mode_token: int | None = None  # begins the inputs of each example
    reserved_sentinels: int = 0  # mode tokens of the whole mixture, which noise does not use
    # to which each packed example is padded in the encoder's rows of an encoder-decoder [tokens]
    pad_to_multiple_of: int = 1

    @property
    def input_prefix(self) -> tuple[int, ...]:
        """Return the ids before the inputs of each example."""
        return self.boundary.prefix + (() if self.mode_token is None else (self.mode_token,))

    @property
    def lengths(self) -> Lengths:
        lengths = self.reader.lengths
        return lengths._replace(
            inputs=lengths.inputs + len(self.input_prefix),
            targets=lengths.targets + len(self.boundary.prefix),
        )

    @property
    def row_index_key(self) -> str:
        """Return the name of the row index, which stores how many rows each window has.

        The name says how segments are packed, which decides the numbers of rows: each packing has an index of
        its own (``SegmentReader.row_index``).
        """
        if self.reader.objective.concatenates:
            return UNPACKED_ROWS
        aligned = f" by {self.pad_to_multiple_of}" if self.pad_to_multiple_of > 1 else ""
        mode = " with mode" if self.mode_token is not None else ""  # a token more in each example
        return f"packed {self.architecture}{aligned}{mode}"

    def __call__(self, row_numbers: np.ndarray) -> Batch:
        """Return the batch of the rows with these numbers, int64 [B], counted from the first batch on.

        It finds the windows of the rows, reads the segments of each row, corrupts each segment to inputs and
        targets, and packs these into rows.
        """
        segments, inputs, targets = self._corrupted_segments(row_numbers)
        inputs = _prepend_ids(inputs, self.input_prefix)
        targets = _prepend_ids(targets, self.boundary.prefix)
        batch = make_packed_batch(
            inputs,
            targets,
            segments.batch_rows,
            self.architecture,
            self.lengths,
            len(row_numbers),
            loss=self.reader.objective.loss,
            pad_to_multiple_of=self.pad_to_multiple_of,
        )
        return set_decoder_start(batch, self.boundary.decoder_start)

    def hidden_share(self, row_numbers: np.ndarray) -> float:
        """Return the share of the text of these rows that is hidden, without noise that did not fit."""
        segments, _, targets = self._corrupted_segments(row_numbers)
        return float(targets.content.sum() / max(segments.text.content.sum(), 1))

    def _corrupted_segments(self, row_numbers: np.ndarray) -> tuple[SegmentBatch, PaddedTexts, PaddedTexts]:
        """Return the segments of these rows, in the order of the rows, and their inputs and targets."""
        objective = self.reader.objective
        read = self._read_whole_rows if objective.concatenates else self._read_packed_rows
        windows = self.reader.find_rows(row_numbers, self.count_rows, self.row_index_key)
        segments = _sort_by_row([read(window, row_numbers) for window in windows])
        random_numbers = uniforms(
            segments.seeds, segments.keys, objective.uniforms_per_token, self.reader.lengths.raw
        )
        if segments.length_uniforms is not None:  # corrupt with the numbers by which segments were packed
            random_numbers[:, 0, 0] = segments.length_uniforms
        inputs, targets = denoise(
            objective,
            segments.text,
            random_numbers,
            self.reader.tokenizer,
            self.reader.lengths.targets,
            reserved_sentinels=self.reserved_sentinels,
            collocations=self.reader.collocations,
        )
        return segments, inputs, targets

    def example(self, number: int) -> tuple[PaddedTexts, PaddedTexts]:
        """Return inputs and targets of example ``number``, for a corpus that is one task of a mixture.

        Example n is segment n // num_streams of stream n % num_streams, in shuffled order.
        """
        reader = self.reader
        stream_row, stream = divmod(number, reader.sampler.num_streams)
        (window,) = reader.find_stream_rows(
            np.array([stream]), np.array([stream_row]), reader.count_segments, UNPACKED_ROWS
        )
        text = self._read_text(window.position, reader.shuffle_segments(window.position)[window.rows])
        random_numbers = uniforms(
            reader.seed, np.array([number]), reader.objective.uniforms_per_token, self.lengths.raw
        )
        return denoise(
            reader.objective,
            text,
            random_numbers,
            reader.tokenizer,
            reader.lengths.targets,
            collocations=reader.collocations,
        )

    def count_epoch_rows(self, limit: int) -> int:
        """Return the number of rows in the first epoch of a single-stream corpus, at most ``limit``."""
        return self.reader.count_epoch_rows(limit, self.count_rows, self.row_index_key)

    def count_rows(self, position: WindowPosition) -> int:
        """Return how many rows a window fills."""
        if self.reader.objective.concatenates:
            return self.reader.count_segments(position)
        return len(self.pack_window(position).row_starts) - 1

    @functools.cached_property
    def pack_window(self) -> Callable[[WindowPosition], PackedWindow]:
        """Return the function that packs a window, with a cache."""

        def pack(position: WindowPosition) -> PackedWindow:
            length_uniforms = self.reader.length_uniforms(position)
            segments = self.reader.read_window(position).segments
            raw_lengths = segments.lengths[self.reader.shuffle_segments(position)]
            lengths = corrupted_lengths(self.reader.objective, raw_lengths, length_uniforms)
            # [segments,2]: the tokens of the inputs and of the targets
            sizes = np.stack(lengths, axis=1) + [len(self.input_prefix), len(self.boundary.prefix)]
            sizes[:, 0] = round_up(sizes[:, 0], self.pad_to_multiple_of, self.lengths.inputs)
            if self.architecture not in ENCODER_DECODERS:
                sizes = sizes.sum(axis=1, keepdims=True)  # [segments,1]: one row holds both
            row_starts = pack_examples(sizes, row_capacity(self.architecture, self.lengths))
            return PackedWindow(row_starts, length_uniforms)

        return functools.lru_cache(maxsize=CACHED_WINDOWS * self.reader.sampler.num_streams)(pack)

    def _read_whole_rows(self, window: WindowRows, row_numbers: np.ndarray) -> SegmentBatch:
        """Return the segments of a window's rows, where each row holds one segment."""
        segments = self.reader.shuffle_segments(window.position)[window.rows]
        seeds, keys = np.full(len(segments), self.reader.seed), row_numbers[window.batch_rows]
        return SegmentBatch(self._read_text(window.position, segments), seeds, keys, None, window.batch_rows)

    def _read_packed_rows(self, window: WindowRows, _row_numbers: np.ndarray) -> SegmentBatch:
        """Return the segments of a window's rows, where each row holds several packed segments."""
        row_starts, length_uniforms = self.pack_window(window.position)
        starts, ends = row_starts[window.rows], row_starts[window.rows + 1]
        of_rows = [np.arange(start, end) for start, end in zip(starts, ends, strict=True)]
        shuffled_indices = np.concatenate(of_rows)
        segments = self.reader.shuffle_segments(window.position)[shuffled_indices]
        text = self._read_text(window.position, segments)
        seeds = np.full(len(shuffled_indices), window.position.examples_seed(self.reader.seed))
        keys = window.position.first_example_key + shuffled_indices
        batch_rows = np.repeat(window.batch_rows, ends - starts)
        return SegmentBatch(text, seeds, keys, length_uniforms[shuffled_indices], batch_rows)

    def _read_text(self, position: WindowPosition, segments: np.ndarray) -> PaddedTexts:
        """Return the uncorrupted tokens of segments of a window."""
        window = self.reader.read_window(position)
        starts, lengths = window.segments.starts[segments], window.segments.lengths[segments]
        # All rows are ``lengths.raw`` tokens long. After a shorter segment a row holds the text that follows,
        # not padding; the lengths tell where the segment ends.
        tokens = window.text.read(starts[:, None] + np.arange(self.lengths.raw))
        return PaddedTexts(tokens, lengths.astype(np.int32), tokens != window.tokenizer.eos)


def _sort_by_row(parts: Sequence[SegmentBatch]) -> SegmentBatch:
    """Return the segments of all parts, each read from one window, in the order of the batch's rows."""
    batch_rows = np.concatenate([part.batch_rows for part in parts])
    order = np.argsort(batch_rows, kind="stable")
    texts = PaddedTexts(
        tokens=np.concatenate([part.text.tokens for part in parts])[order],
        lengths=np.concatenate([part.text.lengths for part in parts])[order],
        content=np.concatenate([part.text.content for part in parts])[order],
    )
    length_uniforms = None
    # All parts have them, or none.
    drawn = [part.length_uniforms for part in parts if part.length_uniforms is not None]
    if drawn:
        length_uniforms = np.concatenate(drawn)[order]
    return SegmentBatch(
        texts,
        seeds=np.concatenate([part.seeds for part in parts])[order],
        keys=np.concatenate([part.keys for part in parts])[order],
        length_uniforms=length_uniforms,
        batch_rows=batch_rows[order],
    )


# --- mixtures of denoisers

# Set in the seed for choosing denoisers and clear in the seed for corruption, so that the two never share
# random numbers.
CHOICE_SEED_BIT = 1 << 62


@dataclass(frozen=True)
class DenoiserMixtureRows(PickledWithoutCache):
    """The rows of a mixture: each is made by one of its denoisers, chosen at random by the weights.

    Row r chooses by a number that depends on (seed, r) alone, and is then row r of that denoiser. A denoiser
    skips the rows that chose others, so in one epoch it reads only a random subset, its share. Rows of all
    denoisers are padded to the same lengths.
    """

    denoisers: tuple[Denoiser, ...]
    parts: tuple[DenoisingRows | MaskedLMRows, ...]  # the rows of each denoiser, all of one kind

    @functools.cached_property
    def lengths(self) -> Lengths:
        return max_lengths([part.lengths for part in self.parts], self.architecture)

    @property
    def architecture(self) -> str:
        part = self.parts[0]
        return part.architecture if isinstance(part, DenoisingRows) else "encoder"

    def choose(self, row_numbers: np.ndarray) -> np.ndarray:
        """Return the index of the denoiser of each of these rows, int64 [B]."""
        weights = np.array([denoiser.weight for denoiser in self.denoisers])
        bounds = np.cumsum(weights / weights.sum())[:-1]
        u = uniforms(self.parts[0].reader.seed | CHOICE_SEED_BIT, row_numbers, 1, 1)[:, 0, 0]
        return np.searchsorted(bounds, u, side="right")

    def __call__(self, row_numbers: np.ndarray) -> Batch:
        """Return the batch of the rows with these ``row_numbers``, int64 [B]; each chooses its denoiser."""
        chosen = self.choose(row_numbers)
        rows_of_denoiser = [np.flatnonzero(chosen == index) for index in range(len(self.parts))]
        batches = []
        for index, rows in enumerate(rows_of_denoiser):
            if len(rows):
                batches.append(self.denoiser_batch(index, row_numbers[rows]))
        order = np.argsort(np.concatenate(rows_of_denoiser), kind="stable")  # back to that of ``row_numbers``
        return concatenate(batches).map(lambda values: values[order])

    def denoiser_batch(self, index: int, row_numbers: np.ndarray) -> Batch:
        """Return a batch of rows of one denoiser, padded to the lengths of the mixture's rows."""
        return pad_rows(self.parts[index](row_numbers), self.architecture, self.lengths)

    def count_epoch_rows(self, limit: int) -> int:
        """Return the number of rows in the first epoch of a single-stream corpus, at most ``limit``.

        It is the minimum over the denoisers.
        """
        return min(part.count_epoch_rows(limit) for part in self.parts)

    @property
    def longest_text_rows(self) -> DenoisingRows | MaskedLMRows:
        """Return the rows of the denoiser that reads the most text."""
        return max(self.parts, key=lambda part: part.lengths.raw)


PretrainingRows = DenoisingRows | MaskedLMRows | DenoiserMixtureRows

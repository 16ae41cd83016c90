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
from lm.data.batches import Uncached, uniforms
from lm.data.checks import check_architecture, check_objective
from lm.data.corpus.sampler import Streams, WindowPlace
from lm.data.masked_lm import Masked
from lm.data.packing import ENCODER_DECODERS, Ragged, features, fill_rows, row_room, with_start
from lm.data.segments import KEPT, SEGMENTS, CorpusReading, WindowRows
from lm.objectives.corruption import Drawn, cap_sentinels, length_mask, trim_targets
from lm.objectives.denoising import Lengths, Objective, compute_lengths, sizes
from lm.objectives.formatting import INPUTS, TARGETS, permutation
from lm.tokenizers.tokenizer import PAD, T5_BOUNDARY_TOKENS, BoundaryTokens, Tokenizer


def pretraining_rows(
    streams: Streams,
    objective: Objective,
    *,
    architecture: str,
    inputs_length: int,
    batch_size: int,
    boundary: BoundaryTokens = T5_BOUNDARY_TOKENS,
) -> "Denoised | Masked":
    """Return the rows of a corpus under an objective: ``Masked`` for encoders, ``Denoised`` for all others.

    SettingError if objective, architecture and tokenizer do not fit together.
    """
    check_architecture(architecture, streams.seed or 0)
    check_objective(objective, architecture, streams.corpus.tokenizer)
    lengths = compute_lengths(objective, inputs_length)
    if objective.noise == "suffix" and objective.inputs == "drop" and architecture not in ENCODER_DECODERS:
        # A prefix LM has two EOS in its row, after inputs and after targets: its text is a token shorter.
        lengths = lengths._replace(raw=max(lengths.raw - 1, 1))
    reading = CorpusReading(streams, objective, lengths, batch_size)
    return Masked(reading) if architecture == "encoder" else Denoised(reading, architecture, boundary)


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


def _prefixed(text: Ragged, before: tuple[int, ...]) -> Ragged:
    """Return the texts [B,L] with the ids ``before`` in front of each."""
    count, rows = len(before), len(text.lengths)
    tokens = np.concatenate([np.tile(np.array(before, np.int32), (rows, 1)), text.tokens], axis=1)
    content = np.concatenate([np.zeros((rows, count), bool), text.content], axis=1)
    return Ragged(tokens, text.lengths + np.int32(count), content) if count else text


class Packed(NamedTuple):
    """How the segments of a window, in their order, are packed into rows."""

    bounds: np.ndarray  # each row's first place in the order [rows + 1]
    draws: np.ndarray  # first random number of each place [segments]


@dataclass(frozen=True)
class Denoised(Uncached):
    """The rows of pre-training: inputs and targets of segments.

    If documents are concatenated, each segment fills one row. Otherwise segments are packed in the order of
    the epoch, within a window; how many fit depends on their noise.

    A call goes from row numbers to the windows that hold them, to the segments of each row (``Excerpts``), to
    ragged inputs and targets, to a ``Batch``.
    """

    reading: CorpusReading
    architecture: str
    boundary: BoundaryTokens = T5_BOUNDARY_TOKENS

    @property
    def lengths(self) -> Lengths:
        before, lengths = len(self.boundary.prefix), self.reading.lengths
        return lengths._replace(inputs=lengths.inputs + before, targets=lengths.targets + before)

    @property
    def objective(self) -> Objective:
        return self.reading.objective

    def __call__(self, numbers: np.ndarray) -> Batch:
        packs = not self.objective.concatenates
        found = self.reading.rows(numbers, self.rows_of, self.kind)
        parts = [self._packed_texts(rows) if packs else self._texts(rows, numbers) for rows in found]
        text, seeds, keys, draws, at = _joined(parts)
        sides = self._denoised(text, seeds, keys, draws if packs else None)
        inputs, targets = (_prefixed(side, self.boundary.prefix) for side in sides)
        batch = features(inputs, targets, at, self.architecture, self.lengths, len(numbers))
        return with_start(batch, self.boundary.decoder_start)

    def rows_of_epoch(self, most: int) -> int:
        """Return the number of rows of the first epoch of a corpus in one stream, at most ``most``."""
        return self.reading.rows_of_epoch(most, self.rows_of, self.kind)

    @property
    def kind(self) -> str:
        """Return the name under which rows of windows are counted, which depends on the packing."""
        return SEGMENTS if self.objective.concatenates else f"packed {self.architecture}"

    def rows_of(self, place: WindowPlace) -> int:
        """Return how many rows a window fills."""
        if self.objective.concatenates:
            return self.reading.segments_of(place)
        return len(self.packed(place).bounds) - 1

    def _texts(self, rows: WindowRows, numbers: np.ndarray) -> "Excerpts":
        """Return the texts of rows that hold one segment each."""
        segments = self.reading.order(rows.place)[rows.numbers]
        seeds = np.full(len(segments), self.reading.seed)
        return Excerpts(self._read(rows.place, segments), seeds, numbers[rows.at], None, rows.at)

    def _packed_texts(self, rows: WindowRows) -> "Excerpts":
        packed, order = self.packed(rows.place), self.reading.order(rows.place)
        begins, ends = packed.bounds[rows.numbers], packed.bounds[rows.numbers + 1]
        places = np.concatenate([np.arange(*pair) for pair in zip(begins, ends, strict=True)])
        keys, at = rows.place.key + places, np.repeat(rows.at, ends - begins)
        seeds = np.full(len(places), rows.place.seed(self.reading.seed))
        return Excerpts(self._read(rows.place, order[places]), seeds, keys, packed.draws[places], at)

    def _read(self, place: WindowPlace, segments: np.ndarray) -> Ragged:
        corpus, raw = self.reading.corpus(place), self.lengths.raw
        starts, counts = corpus.segments.starts[segments], corpus.segments.lengths[segments]
        tokens = corpus.text.read(starts[:, None] + np.arange(raw))
        return Ragged(tokens, counts.astype(np.int32), tokens != corpus.tokenizer.eos)

    def _denoised(
        self, text: Ragged, seeds: np.ndarray | int, keys: np.ndarray, draws: np.ndarray | None
    ) -> tuple[Ragged, Ragged]:
        """Return inputs and targets of texts, with noise drawn by seed and key, or by given first draws."""
        u = uniforms(seeds, keys, self.objective.draws, self.lengths.raw)
        if draws is not None:
            u[:, 0, 0] = draws
        return denoise(self.objective, text, u, self.reading.tokenizer, self.reading.lengths)

    def example(self, number: int) -> tuple[Ragged, Ragged]:
        """Return example ``number`` of a mixture; streams take turns, each in the order of its segments."""
        count = np.array([self.reading.streams.count])
        (rows,) = self.reading.at(number % count, number // count, self.reading.segments_of, SEGMENTS)
        segments = self.reading.order(rows.place)[rows.numbers]
        text = self._read(rows.place, segments)
        return self._denoised(text, self.reading.seed, np.array([number]), None)

    @functools.cached_property
    def packed(self) -> Callable[[WindowPlace], Packed]:
        """Return the function that packs a window, with a cache."""
        return functools.lru_cache(maxsize=KEPT * self.reading.streams.count)(self._packed)

    def _packed(self, place: WindowPlace) -> Packed:
        order = self.reading.order(place)
        draws = self.reading.first_draws(place)
        counts = self.reading.corpus(place).segments.lengths[order]
        sides = np.stack(sizes(self.objective, counts, draws), axis=1) + len(self.boundary.prefix)
        if self.architecture not in ENCODER_DECODERS:
            sides = sides.sum(axis=1, keepdims=True)
        return Packed(fill_rows(sides, row_room(self.architecture, self.lengths)), draws)


class Excerpts(NamedTuple):
    """Segments of one or more windows, and what their noise is drawn by."""

    text: Ragged
    seeds: np.ndarray  # of their noise, int64 [B]
    keys: np.ndarray  # of their noise under that seed, int64 [B]
    draws: np.ndarray | None  # the first uniforms of each, float32 [B], where they are known already
    at: np.ndarray  # their rows in the batch, int64 [B]


def _joined(parts: Sequence[Excerpts]) -> Excerpts:
    """Return all segments in the order of their rows."""
    at = np.concatenate([part.at for part in parts])
    order = np.argsort(at, kind="stable")
    text = Ragged(
        *(np.concatenate(sides)[order] for sides in zip(*(part.text for part in parts), strict=True))
    )
    draws = [part.draws for part in parts if part.draws is not None]
    seeds = np.concatenate([part.seeds for part in parts])[order]
    keys = np.concatenate([part.keys for part in parts])[order]
    return Excerpts(text, seeds, keys, np.concatenate(draws)[order] if draws else None, at[order])

"""Pre-training rows of models with a decoder: inputs and targets of noisy text, packed several to a row.

Shapes: B examples of at most L raw tokens. A batch is a function of (seed, row numbers) alone: every random
number is drawn by the number of its example.
"""

import functools
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import NamedTuple

import numpy as np

from lm.data.batches import Batch, Uncached, generator, shuffled, uniforms
from lm.data.checks import check_architecture, check_objective
from lm.data.masked import Masked
from lm.data.noise import Drawn, length_mask, limit_runs, limit_targets
from lm.data.objectives import Lengths, Objective, lengths_of, sizes
from lm.data.packing import ENCODER_DECODERS, Ragged, features, fill_rows, row_room
from lm.data.segments import Corpus
from lm.data.text.tokens import Tokens
from lm.data.text.vocabulary import PAD, Vocabulary
from lm.data.views import INPUTS, TARGETS, permutation


def pretraining_rows(
    tokens: Tokens,
    objective: Objective,
    vocabulary: Vocabulary,
    *,
    architecture: str,
    inputs_length: int,
    seed: int,
) -> "Denoised | Masked":
    """The rows of a corpus under an objective, of encoders ``Masked``; checks every setting first."""
    check_architecture(architecture, seed)
    check_objective(objective, architecture, vocabulary)
    lengths = lengths_of(objective, inputs_length)
    if objective.noise == "suffix" and objective.inputs == "drop" and architecture not in ENCODER_DECODERS:
        # A prefix LM puts inputs and targets into one row, both with an EOS: one raw token less makes room.
        lengths = lengths._replace(raw=max(lengths.raw - 1, 1))
    corpus = Corpus(tokens, objective, vocabulary, lengths.raw)
    if architecture == "encoder":
        return Masked(corpus, lengths, seed)
    return Denoised(corpus, architecture, lengths, seed)


def noise_mask(objective: Objective, text: Drawn, room: int) -> np.ndarray:
    """bool [B,L], True on noise, whose targets take at most ``room`` tokens, EOS included."""
    inside = length_mask(text.lengths, text.u.shape[2])
    mask = objective.falls.mask(objective, text) & inside
    if objective.falls.by_chance:
        if "sentinels" in (objective.inputs, objective.targets):
            mask = limit_runs(mask, inside, text.u[:, 0], text.num_sentinels)
        if objective.targets in ("sentinels", "drop"):
            mask = limit_targets(mask, inside, objective.targets == "sentinels", room)
    return mask


def denoise(
    objective: Objective, text: Ragged, u: np.ndarray, vocabulary: Vocabulary, limits: Lengths
) -> tuple[Ragged, Ragged]:
    """text [B,L], random numbers u [B,draws,L] -> inputs and targets that fit in ``limits``, ending with EOS.

    The last of the ``draws`` numbers per token orders sentences, if the objective permutes them, the one
    before it decides what inputs show, and the first ones where noise falls. Content of the inputs is what
    they show of the text, content of the targets what they do not show of it.
    """
    tokens, lengths, words = text
    eos, inside, order = None if objective.separates else vocabulary.eos, text.mask, None
    if objective.sentences == "permuted":
        order, u = permutation(tokens, lengths, u[:, -1], vocabulary), u[:, :-1]
        tokens, words = (np.take_along_axis(side, order, axis=1) for side in (tokens, words))
    if objective.falls.infill:
        source, keep, noise = objective.falls.infill(objective, lengths, u)
        shown = np.where(source < 0, vocabulary.mask, np.take_along_axis(tokens, source, axis=1))
        inputs = _gather(shown, keep, (source >= 0) & np.take_along_axis(words, source, axis=1), eos)
    else:
        starts = vocabulary.word_starts[tokens] if objective.falls.on_words else None
        noise = noise_mask(objective, Drawn(lengths, u, vocabulary.num_sentinels, starts), limits.targets)
        shown, keep = INPUTS[objective.inputs].show(tokens, noise, u[:, -1], vocabulary)
        inputs = _gather(shown, keep & inside, words & ~noise, eos if objective.has_inputs else None)
    if order is not None:  # targets keep the order of the text
        noise[np.arange(len(order))[:, None], order] = noise.copy()
    targets = TARGETS["everything" if objective.falls.infill else objective.targets]
    predicted, keep = targets.show(text.tokens, noise, u[:, -1], vocabulary)
    return inputs, _gather(predicted, keep & inside, text.content & noise, eos)


def _gather(tokens: np.ndarray, keep: np.ndarray, content: np.ndarray, eos: int | None) -> Ragged:
    """Each [B,L] -> the tokens to keep from the left and, unless it is None, ``eos``."""
    counts = np.count_nonzero(keep, axis=1).astype(np.int32)
    shape = len(tokens), int(counts.max(initial=0)) + (eos is not None)
    gathered, marks = np.full(shape, PAD, np.int32), np.zeros(shape, bool)
    # 3 x as fast as [keep]
    room, kept = length_mask(counts, shape[1]), np.flatnonzero(keep)
    gathered[room], marks[room] = tokens.ravel()[kept], content.ravel()[kept]
    if eos is not None:
        gathered[np.arange(len(tokens)), counts] = eos
    return Ragged(gathered, counts + np.int32(eos is not None), marks)


class Epoch(NamedTuple):
    """The order of an epoch's segments, the rows they fill, and random numbers that decide how many fit."""

    order: np.ndarray  # int64 [segments]
    rows: np.ndarray  # each row's first place in the order [rows + 1]
    draws: np.ndarray  # first random number of each place [segments]


@dataclass(frozen=True)
class Denoised(Uncached):
    """Every segment once an epoch, in an order and with noise of its own.

    Segments of concatenated documents fill a row each. Those of documents kept apart are packed in the order
    of the epoch. Since their noise decides how many fit, finding a row of epoch e takes all epochs before it:
    computed once per process, at about half a second per million segments.
    """

    corpus: Corpus
    architecture: str
    lengths: Lengths
    seed: int

    def __call__(self, numbers: np.ndarray) -> Batch:
        if self.corpus.objective.concatenates:
            segments = shuffled(numbers, len(self.corpus.segments.starts), self.seed)
            rows, (inputs, targets) = np.arange(len(numbers)), self.examples(segments, numbers)
        else:
            parts = self._packed(int(numbers[0]), int(numbers[-1]) + 1)
            segments, examples, draws, counts = map(np.concatenate, zip(*parts, strict=True))
            rows = np.repeat(np.arange(len(numbers)), counts)
            inputs, targets = self.examples(segments, examples, draws)
        return features(inputs, targets, rows, self.architecture, self.lengths, len(numbers))

    def examples(
        self, segments: np.ndarray, numbers: np.ndarray, draws: np.ndarray | None = None
    ) -> tuple[Ragged, Ragged]:
        """Segments [B], with noise drawn for examples ``numbers`` [B]; ``draws``: their first uniforms."""
        objective, raw = self.corpus.objective, self.lengths.raw
        starts, counts = self.corpus.segments.starts[segments], self.corpus.segments.lengths[segments]
        tokens = self.corpus.text.read(starts[:, None] + np.arange(raw))
        text = Ragged(tokens, counts.astype(np.int32), tokens != self.corpus.vocabulary.eos)
        u = uniforms(self.seed, numbers, objective.draws, raw)
        if draws is not None:
            u[:, 0, 0] = draws
        return denoise(objective, text, u, self.corpus.vocabulary, self.lengths)

    @functools.cached_property
    def epoch(self) -> Callable[[int], Epoch]:
        return functools.lru_cache(maxsize=2)(self._epoch)

    @functools.cached_property
    def rows_of_epoch(self) -> Callable[[int], int]:
        return functools.cache(lambda epoch: len(self.epoch(epoch).rows) - 1)

    def _epoch(self, epoch: int) -> Epoch:
        count, random = len(self.corpus.segments.starts), generator(self.seed, epoch)
        order, draws = random.permutation(count), random.random(count, dtype=np.float32)
        sides = np.stack(sizes(self.corpus.objective, self.corpus.segments.lengths[order], draws), axis=1)
        if self.architecture not in ENCODER_DECODERS:
            sides = sides.sum(axis=1, keepdims=True)
        return Epoch(order, fill_rows(sides, row_room(self.architecture, self.lengths)), draws)

    def _packed(self, begin: int, end: int) -> Iterator[tuple[np.ndarray, ...]]:
        """Of rows begin to end, by epoch: segments, their numbers and draws, and how many each row has."""
        epoch, count = 0, len(self.corpus.segments.starts)
        while begin < end:
            rows = self.rows_of_epoch(epoch)
            if begin < rows:
                order, bounds, draws = self.epoch(epoch)
                bounds = bounds[begin : min(end, rows) + 1]
                places = np.arange(bounds[0], bounds[-1])
                yield order[places], epoch * count + places, draws[places], np.diff(bounds)
            epoch, begin, end = epoch + 1, max(begin - rows, 0), end - rows

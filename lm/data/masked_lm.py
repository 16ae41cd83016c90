"""Rows of masked language modeling for encoders, of running text or of pairs of segments.

A row is [CLS] text [SEP], its text running on through the documents with a [SEP] between two (RoBERTa's
full sentences: Liu et al. 2019, section 4.2); or [CLS] A [SEP] B [SEP], where A and B are cut from one
document. Half of the pairs are changed, and the model classifies which: next-sentence (Devlin et al. 2019)
takes B from another document, sentence-order (Lan et al. 2020) puts B first.
"""

from dataclasses import dataclass, replace
from typing import NamedTuple

import numpy as np

from lm.batch import Batch, Side
from lm.data.batches import uniforms
from lm.data.segments import SEGMENTS, Corpus, CorpusReading, WindowRows
from lm.objectives.corruption import Drawn, length_mask
from lm.objectives.denoising import Lengths
from lm.objectives.formatting import INPUTS, split_points
from lm.tokenizers.tokenizer import PAD

CHANGED = 0.5  # probability that a pair is changed [Devlin et al. 2019, 3.1; Lan et al. 2020, 3.1]


class Pair(NamedTuple):
    """The one or two pieces of text of each row, int64 [B,2]; of a single piece, the second is empty."""

    starts: np.ndarray
    lengths: np.ndarray


class Shown(NamedTuple):
    """The texts of rows before masking."""

    text: np.ndarray  # int32 [B,raw]: the first piece, the second, and then whatever follows
    lengths: np.ndarray  # of both pieces, int64 [B,2]
    changed: np.ndarray  # bool [B]: the pair is not as in the text
    at: np.ndarray  # their indices in the batch, int64 [B]


@dataclass(frozen=True)
class Masked:
    """Rows of masked language modeling: each has one segment, and every segment comes once an epoch."""

    reading: CorpusReading

    @property
    def lengths(self) -> Lengths:
        return self.reading.lengths

    kind = SEGMENTS  # the kind of row that is counted in a window

    @property
    def paired(self) -> bool:
        return self.reading.objective.pairs != "none"

    def rows_of_epoch(self, most: int) -> int:
        """Return how many rows the first epoch has, at most ``most``; the corpus is read in one stream."""
        return self.reading.rows_of_epoch(most, self.reading.segments_of, self.kind)

    def __call__(self, numbers: np.ndarray) -> Batch:
        draws = self.reading.objective.draws + self.paired
        u = uniforms(self.reading.seed, numbers, draws, self.lengths.raw)
        found = self.reading.rows(numbers, self.reading.segments_of, self.kind)
        parts = [self._shown(rows, u) for rows in found]
        order = np.argsort(np.concatenate([part.at for part in parts]))
        shown = Shown(*(np.concatenate(values)[order] for values in zip(*parts, strict=True)))
        batch = self._features(shown, u[:, : len(u[0]) - self.paired])
        if not self.paired:
            return batch
        weights = np.ones(len(numbers), np.float32)
        labels = shown.changed.astype(np.int32)
        return replace(batch, sentence_labels=labels, sentence_loss_weights=weights)

    def _shown(self, rows: WindowRows, u: np.ndarray) -> Shown:
        segments = self.reading.order(rows.place)[rows.numbers]
        pairs = Pieces(self.reading.corpus(rows.place), self.lengths.raw)
        pair, changed = pairs.of(segments, u[rows.at, -1]) if self.paired else pairs.alone(segments)
        return Shown(pairs.read(pair), pair.lengths, changed, rows.at)

    def _noise(self, shown: Shown, u: np.ndarray) -> np.ndarray:
        """Return the corruption mask, bool [B,raw]; a [SEP] between documents is never masked."""
        objective, tokenizer, starts = self.reading.objective, self.reading.tokenizer, None
        text = shown.text
        between = text == tokenizer.sep
        if objective.corruption.on_words:  # a piece or a document begins a word, whatever comes before it
            second = np.arange(self.lengths.raw) == shown.lengths[:, :1]
            starts = tokenizer.word_starts[text] | second | between
            starts[:, 1:] |= between[:, :-1]
        lengths = shown.lengths.sum(1)
        mask = objective.corruption.mask(objective, Drawn(lengths, u, 0, starts))
        return mask & length_mask(lengths, self.lengths.raw) & ~between

    def _features(self, shown: Shown, u: np.ndarray) -> Batch:
        objective, tokenizer, paired = self.reading.objective, self.reading.tokenizer, int(self.paired)
        text, first = shown.text, shown.lengths[:, :1]
        noise = self._noise(shown, u)
        visible, _ = INPUTS[objective.inputs].show(text, noise, u[:, -1], tokenizer)
        positions = np.arange(self.lengths.inputs)
        second = paired * (positions > first + 1)
        end = shown.lengths.sum(1)[:, None] + 1 + paired  # where the last [SEP] stands
        row = positions <= end
        words = (positions > 0) & (positions < end) & ((positions != first + 1) | (not paired))
        frame = np.where(positions > 0, tokenizer.sep, tokenizer.cls) * row + PAD * ~row
        source = np.clip(positions - 1 - second, 0, self.lengths.raw - 1)
        visible, text, noise = (np.take_along_axis(side, source, axis=1) for side in (visible, text, noise))
        side = Side(
            tokens=np.where(words, visible, frame).astype(np.int32),
            segment_ids=row.astype(np.int32),
            positions=(positions * row).astype(np.int32),
            token_types=(second * row).astype(np.int32) if paired else None,
            targets=np.where(words, text, frame).astype(np.int32),
            loss_weights=(words & noise).astype(np.float32),
            content=words & noise,
        )
        # ELECTRA's discriminator judges every token of the row.
        judged = row.astype(np.float32) if objective.targets == "replaced" else None
        return Batch(encoder=side, text_loss_weights=judged)


@dataclass(frozen=True)
class Pieces:
    """Draws the one or two pieces of text of each row from the documents of one window."""

    corpus: Corpus
    raw: int

    def alone(self, segments: np.ndarray) -> tuple[Pair, np.ndarray]:
        """Return the segments [B] as single pieces, and that none is changed, bool [B]."""
        pair = Pair(*(values[segments, None] * np.array([1, 0]) for values in self.corpus.segments[:2]))
        return pair, np.zeros(len(segments), bool)

    def read(self, pair: Pair) -> np.ndarray:
        """Return the text of pairs, int32 [B,raw]: the first piece, the second, and then whatever follows."""
        positions = np.arange(self.raw)
        first, second = pair.starts[:, :1], pair.starts[:, 1:] - pair.lengths[:, :1]
        if pair.lengths[:, 1].any():
            first = np.where(positions < pair.lengths[:, :1], first, second)
        return self.corpus.text.read(first + positions)

    def _split_points(self, segments: np.ndarray, u: np.ndarray) -> np.ndarray:
        lengths = self.corpus.segments.lengths[segments]
        return split_points(self.read(self.alone(segments)[0]), lengths, u, self.corpus.tokenizer)

    def of(self, segments: np.ndarray, u: np.ndarray) -> tuple[Pair, np.ndarray]:
        """Return the pairs that the segments [B] are split into, and which of them are changed, bool [B].

        The uniform numbers u [B,4 or more] of a pair draw where the segment is split, whether the pair is
        changed, which segment replaces the second piece, and where that one is split. The label of changed
        pairs is 1; for next-sentence that is as in BERT's code, where 0 is "is next".
        """
        begin, length = self.corpus.segments.starts[segments], self.corpus.segments.lengths[segments]
        cut, changed = self._split_points(segments, u[:, 0]), u[:, 1] < CHANGED
        starts, lengths = np.stack([begin, begin + cut], axis=1), np.stack([cut, length - cut], axis=1)
        if self.corpus.objective.pairs == "sentence-order":
            swap = np.where(changed[:, None], [1, 0], [0, 1])
            swapped = (np.take_along_axis(values, swap, axis=1) for values in (starts, lengths))
            return Pair(*swapped), changed
        place, room = self._elsewhere(segments, u[:, 2:])
        starts[:, 1] = np.where(changed, place, starts[:, 1])
        # true pairs too are cut to this room, or short second pieces would give away the changed ones
        lengths[:, 1] = np.minimum(lengths[:, 1], room)
        return Pair(starts, lengths), changed

    def _elsewhere(self, segments: np.ndarray, u: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
        """Return a random position in another document, and how many of its tokens follow, both int64 [B]."""
        documents = self.corpus.segments.documents  # ascending, so that those of one document are neighbours
        low, high = (np.searchsorted(documents, documents[segments], side=side) for side in ("left", "right"))
        other = (u[:, 0] * (len(documents) - high + low)).astype(np.int64)
        other += (other >= low) * (high - low)
        start = self.corpus.segments.starts[other] + self._split_points(other, u[:, 1])
        return start, self.corpus.tokens.offsets[documents[other] + 1] - start

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
from lm.data.segments import SEGMENTS, SegmentedWindow, SegmentReader, WindowRows
from lm.objectives.corruption import CorruptionInputs, length_mask
from lm.objectives.denoising import Lengths
from lm.objectives.formatting import INPUTS, split_points
from lm.tokenizers.tokenizer import PAD

CHANGED_SHARE = 0.5  # of the pairs [Devlin et al. 2019, 3.1; Lan et al. 2020, 3.1]


class Pairs(NamedTuple):
    """The first and second piece of text of each row, int64 [B,2]; of a single piece, the second is empty."""

    starts: np.ndarray  # position of the first token in the window's text
    lengths: np.ndarray


class UnmaskedRows(NamedTuple):
    """The texts of B rows before masking."""

    text: np.ndarray  # int32 [B,raw]: the first piece, the second, and then whatever follows
    lengths: np.ndarray  # of both pieces, int64 [B,2]
    is_changed: np.ndarray  # bool [B]: the second piece is not the continuation of the first
    batch_rows: np.ndarray  # int64 [B]: their indices in the batch


@dataclass(frozen=True)
class MaskedLMRows:
    """Rows of masked language modeling: each has one segment, and every segment comes once an epoch."""

    reader: SegmentReader

    row_kind = SEGMENTS  # the name under which rows of windows are counted

    @property
    def lengths(self) -> Lengths:
        return self.reader.lengths

    @property
    def has_pairs(self) -> bool:
        return self.reader.objective.pairs != "none"

    def rows_of_epoch(self, most: int) -> int:
        """Return the number of rows of the first epoch of a corpus in one stream, at most ``most``."""
        return self.reader.rows_of_epoch(most, self.reader.count_segments, self.row_kind)

    def __call__(self, numbers: np.ndarray) -> Batch:
        objective, reader = self.reader.objective, self.reader
        # With pairs, the numbers after those of the objective draw the pairs.
        per_token = objective.uniforms_per_token + self.has_pairs
        u = uniforms(reader.seed, numbers, per_token, self.lengths.raw)
        windows = reader.find_rows(numbers, reader.count_segments, self.row_kind)
        by_window = [self._read(rows, u[rows.batch_rows, -1]) for rows in windows]
        order = np.argsort(np.concatenate([rows.batch_rows for rows in by_window]))
        rows = UnmaskedRows(*(np.concatenate(arrays)[order] for arrays in zip(*by_window, strict=True)))
        batch = self._mask(rows, u[:, : objective.uniforms_per_token])
        if not self.has_pairs:
            return batch
        weights = np.ones(len(numbers), np.float32)
        labels = rows.is_changed.astype(np.int32)
        return replace(batch, sentence_labels=labels, sentence_loss_weights=weights)

    def _read(self, rows: WindowRows, u: np.ndarray) -> UnmaskedRows:
        """Return the rows of one window; the uniform numbers u [rows,raw] draw its pairs."""
        segments = self.reader.segment_order(rows.place)[rows.indices]
        sampler = PairSampler(self.reader.window(rows.place), self.lengths.raw)
        if self.has_pairs:
            pairs, is_changed = sampler.sample_pairs(segments, u)
        else:
            pairs, is_changed = sampler.single_pieces(segments), np.zeros(len(segments), bool)
        return UnmaskedRows(sampler.read(pairs), pairs.lengths, is_changed, rows.batch_rows)

    def _noise_mask(self, rows: UnmaskedRows, u: np.ndarray) -> np.ndarray:
        """Return the corruption mask, bool [B,raw]; a [SEP] between documents is never masked."""
        objective, vocabulary, word_starts = self.reader.objective, self.reader.vocabulary, None
        is_separator = rows.text == vocabulary.sep
        if objective.corruption.needs_word_starts:
            # A second piece, and a document, begins with a word whatever comes before it.
            is_second_start = np.arange(self.lengths.raw) == rows.lengths[:, :1]
            word_starts = vocabulary.word_starts[rows.text] | is_second_start | is_separator
            word_starts[:, 1:] |= is_separator[:, :-1]
        lengths = rows.lengths.sum(1)
        mask = objective.corruption.mask(objective, CorruptionInputs(lengths, u, 0, word_starts))
        return mask & length_mask(lengths, self.lengths.raw) & ~is_separator

    def _mask(self, rows: UnmaskedRows, u: np.ndarray) -> Batch:
        """Return the batch of masked rows, each with [CLS] and [SEP] around its pieces."""
        objective, vocabulary, has_pairs = self.reader.objective, self.reader.vocabulary, int(self.has_pairs)
        noise = self._noise_mask(rows, u)
        visible, _ = INPUTS[objective.inputs].apply(rows.text, noise, u[:, -1], vocabulary)
        positions, first_length = np.arange(self.lengths.inputs), rows.lengths[:, :1]
        in_second = has_pairs * (positions > first_length + 1)
        last_separator = rows.lengths.sum(1)[:, None] + 1 + has_pairs
        in_row = positions <= last_separator
        is_text = (positions > 0) & (positions < last_separator)
        is_text &= (positions != first_length + 1) | (not has_pairs)
        special = np.where(positions > 0, vocabulary.sep, vocabulary.cls) * in_row + PAD * ~in_row
        # the index in ``rows.text`` of the token at each position
        source = np.clip(positions - 1 - in_second, 0, self.lengths.raw - 1)
        visible = np.take_along_axis(visible, source, axis=1)
        text = np.take_along_axis(rows.text, source, axis=1)
        is_masked = is_text & np.take_along_axis(noise, source, axis=1)
        side = Side(
            tokens=np.where(is_text, visible, special).astype(np.int32),
            segment_ids=in_row.astype(np.int32),
            positions=(positions * in_row).astype(np.int32),
            token_types=(in_second * in_row).astype(np.int32) if has_pairs else None,
            targets=np.where(is_text, text, special).astype(np.int32),
            loss_weights=is_masked.astype(np.float32),
            content=is_masked,
        )
        # ELECTRA's discriminator classifies every token of the row.
        weights = in_row.astype(np.float32) if objective.targets == "replaced" else None
        return Batch(encoder=side, discriminator_loss_weights=weights)


@dataclass(frozen=True)
class PairSampler:
    """Draws the one or two pieces of text of each row from the documents of one window."""

    window: SegmentedWindow
    raw: int  # the most tokens of a row's pieces together

    def single_pieces(self, segments: np.ndarray) -> Pairs:
        """Return the segments [B], each with an empty second piece."""
        starts, lengths, _ = self.window.segments
        first = np.array([1, 0])
        return Pairs(starts[segments, None] * first, lengths[segments, None] * first)

    def read(self, pairs: Pairs) -> np.ndarray:
        """Return the text of pairs, int32 [B,raw]: the first piece, the second, and then whatever follows."""
        positions = np.arange(self.raw)
        first, second = pairs.starts[:, :1], pairs.starts[:, 1:] - pairs.lengths[:, :1]
        if pairs.lengths[:, 1].any():
            first = np.where(positions < pairs.lengths[:, :1], first, second)
        return self.window.text.read(first + positions)

    def _split_points(self, segments: np.ndarray, u: np.ndarray) -> np.ndarray:
        lengths = self.window.segments.lengths[segments]
        return split_points(self.read(self.single_pieces(segments)), lengths, u, self.window.vocabulary)

    def sample_pairs(self, segments: np.ndarray, u: np.ndarray) -> tuple[Pairs, np.ndarray]:
        """Return the pairs that the segments [B] are split into, and which of them are changed, bool [B].

        Of the uniform numbers u [B,4 or more] of a pair the first draws where the segment is split, the
        second whether the pair is changed, the third which segment replaces the second piece, and the fourth
        where that one is split. The label of changed pairs is 1; for next-sentence that is as in BERT's code,
        where 0 is "is next".
        """
        start, length = self.window.segments.starts[segments], self.window.segments.lengths[segments]
        cut, is_changed = self._split_points(segments, u[:, 0]), u[:, 1] < CHANGED_SHARE
        starts, lengths = np.stack([start, start + cut], axis=1), np.stack([cut, length - cut], axis=1)
        if self.window.objective.pairs == "sentence-order":
            order = np.where(is_changed[:, None], [1, 0], [0, 1])
            starts, lengths = (np.take_along_axis(values, order, axis=1) for values in (starts, lengths))
            return Pairs(starts, lengths), is_changed
        other_start, other_length = self._sample_other_document(segments, u[:, 2:])
        starts[:, 1] = np.where(is_changed, other_start, starts[:, 1])
        # True pairs are cut to this length too, or short second pieces would give away the changed ones.
        lengths[:, 1] = np.minimum(lengths[:, 1], other_length)
        return Pairs(starts, lengths), is_changed

    def _sample_other_document(self, segments: np.ndarray, u: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
        """Return a random position in another document, and how many of its tokens follow, both int64 [B]."""
        documents = self.window.segments.documents  # ascending, so that those of one document are neighbours
        low = np.searchsorted(documents, documents[segments], side="left")
        high = np.searchsorted(documents, documents[segments], side="right")
        other = (u[:, 0] * (len(documents) - high + low)).astype(np.int64)
        other += (other >= low) * (high - low)  # skips the segments of the same document
        start = self.window.segments.starts[other] + self._split_points(other, u[:, 1])
        return start, self.window.tokens.offsets[documents[other] + 1] - start

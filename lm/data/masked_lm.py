"""Rows of encoders: for masked language modeling, on running text or on pairs, and for next-token prediction.

A row of running text is [CLS] text [SEP]. By default its text continues across documents, with a [SEP]
between them if ``Objective.eos`` is "between-documents" (RoBERTa's "full sentences": Liu et al. 2019, section
4.2). If ``Objective.documents`` is "apart" a row ends with its document.

A row of a pair is [CLS] A [SEP] B [SEP], where A and B are the two parts of one segment of a document. Half
of the pairs are changed, and the model classifies which. In next-sentence prediction (Devlin et al. 2019) B
is taken from another document, in sentence-order prediction (Lan et al. 2020) A and B are swapped. With
"next-single-sentence" A and B are one sentence each (Liu et al. 2019, section 4.2: "sentence-pair").

In permutation language modeling (Yang et al. 2019) nothing is masked: the row says in which order its targets
are predicted. The model hides each from its own prediction, from earlier ones, and from the visible text.

In masked diffusion (Sahoo et al. 2024) the share of masked tokens is drawn for each row, and the [SEP]
between documents are masked too, since the model gives the whole text a probability.
"""

from dataclasses import dataclass, replace
from typing import NamedTuple

import numpy as np

from lm.batch import Batch, Side
from lm.data.batches import evenly_spread_uniforms, uniforms
from lm.data.segments import UNPACKED_ROWS, SegmentedWindow, SegmentReader, WindowRows
from lm.objectives.corruption import CorruptionInputs, length_mask
from lm.objectives.denoising import Lengths
from lm.objectives.formatting import INPUTS, prediction_order, sentence_starts, split_points
from lm.tokenizers.tokenizer import PAD

CHANGED = 0.5  # probability that a pair is changed [Devlin et al. 2019, 3.1; Lan et al. 2020, 3.1]


class SegmentPair(NamedTuple):
    """Hold the one or two segments of each row, int64 [B,2]; in a row with one, the second is empty."""

    starts: np.ndarray
    lengths: np.ndarray


class UnmaskedRows(NamedTuple):
    """Hold the texts of rows before masking."""

    text: np.ndarray  # int32 [B,raw]: the first segment, the second, and then tokens to ignore
    lengths: np.ndarray  # of both segments, int64 [B,2]
    changed: np.ndarray  # bool [B]: whether the pair was changed
    batch_rows: np.ndarray  # int64 [B]: indices in the batch


@dataclass(frozen=True)
class MaskedLMRows:
    """Rows of masked language modeling: each holds one segment, and each segment occurs once per epoch."""

    reader: SegmentReader

    @property
    def lengths(self) -> Lengths:
        return self.reader.lengths

    row_index_key = UNPACKED_ROWS

    @property
    def paired(self) -> bool:
        return self.reader.objective.pairs != "none"

    @property
    def bounds_likelihood(self) -> bool:
        """Return whether the loss estimates a bound of the text's likelihood, as in masked diffusion."""
        return self.reader.objective.corruption.bounds_likelihood

    def count_epoch_rows(self, limit: int) -> int:
        """Return the number of rows in the first epoch of a single-stream corpus, at most ``limit``."""
        return self.reader.count_epoch_rows(limit, self.reader.count_segments, self.row_index_key)

    def __call__(self, row_numbers: np.ndarray) -> Batch:
        per_token = self.reader.objective.uniforms_per_token  # and one more for ``PairSampler.sample``
        random_numbers = uniforms(self.reader.seed, row_numbers, per_token + self.paired, self.lengths.raw)
        if self.bounds_likelihood:  # this number decides the share of masked tokens (``Noise.loss_weights``)
            random_numbers[:, 1, 0] = evenly_spread_uniforms(self.reader.seed, row_numbers)
        windows = self.reader.find_rows(row_numbers, self.reader.count_segments, self.row_index_key)
        parts = [self._read_rows(window, random_numbers) for window in windows]
        order = np.argsort(np.concatenate([part.batch_rows for part in parts]))
        rows = UnmaskedRows(*(np.concatenate(values)[order] for values in zip(*parts, strict=True)))
        batch = self._mask_rows(rows, random_numbers[:, :per_token])
        if not self.paired:
            return batch
        weights = np.ones(len(row_numbers), np.float32)
        labels = rows.changed.astype(np.int32)
        return replace(batch, sentence_labels=labels, sentence_loss_weights=weights)

    def _read_rows(self, window: WindowRows, random_numbers: np.ndarray) -> UnmaskedRows:
        segments = self.reader.shuffle_segments(window.position)[window.rows]
        pairs = PairSampler(self.reader.read_window(window.position), self.lengths.raw)
        if self.paired:
            pair, changed = pairs.sample(segments, random_numbers[window.batch_rows, -1])
        else:
            pair, changed = pairs.single(segments), np.zeros(len(segments), bool)
        return UnmaskedRows(pairs.read(pair), pair.lengths, changed, window.batch_rows)

    def _noise(self, rows: UnmaskedRows, random_numbers: np.ndarray) -> np.ndarray:
        """Return the corruption mask, bool [B,raw].

        A [SEP] between documents is not masked, unless the loss bounds the likelihood of the whole text.
        """
        objective, tokenizer = self.reader.objective, self.reader.tokenizer
        text, starts, sentences = rows.text, None, None
        is_separator = text == tokenizer.sep  # [SEP] between documents
        # Each segment and each document begins with the start of a word and of a sentence.
        begins_second = np.arange(self.lengths.raw) == rows.lengths[:, :1]  # the second segment
        if objective.corruption.needs_word_starts:
            starts = tokenizer.word_starts[text] | begins_second | is_separator
            starts[:, 1:] |= is_separator[:, :-1]
        if objective.corruption.needs_sentence_starts:
            sentences = sentence_starts(text, tokenizer) | begins_second
            sentences[:, 1:] |= is_separator[:, :-1]
        lengths = rows.lengths.sum(1)
        if objective.corruption.needs_collocations:
            assert starts is not None and self.reader.collocations is not None
            breaks = begins_second | is_separator | (np.arange(self.lengths.raw) == lengths[:, None])
            starts = self.reader.collocations.unit_starts(text, starts, breaks, random_numbers[:, 1])
        mask = objective.draw_noise(CorruptionInputs(lengths, random_numbers, 0, starts, sentences))
        if not self.bounds_likelihood:
            mask &= ~is_separator
        return mask & length_mask(lengths, self.lengths.raw)

    def _mask_rows(self, rows: UnmaskedRows, random_numbers: np.ndarray) -> Batch:
        """Return the batch of masked rows, with [CLS] and [SEP] around their segments."""
        objective, tokenizer, paired = self.reader.objective, self.reader.tokenizer, self.paired
        text, first_length = rows.text, rows.lengths[:, :1]
        noise = self._noise(rows, random_numbers)
        format_uniforms = random_numbers[:, -1]
        visible = INPUTS[objective.inputs].apply(objective, text, noise, format_uniforms, tokenizer).tokens
        positions = np.arange(self.lengths.inputs)
        in_second = paired & (positions > first_length + 1)
        end = rows.lengths.sum(1)[:, None] + 1 + paired  # position of the last [SEP]
        in_row = positions <= end
        is_middle_sep = paired & (positions == first_length + 1)
        is_text = (positions > 0) & (positions < end) & ~is_middle_sep
        special = np.where(in_row, tokenizer.sep, PAD)
        special[:, 0] = tokenizer.cls
        source = np.clip(positions - 1 - in_second, 0, self.lengths.raw - 1)  # index in the text
        order = None
        if objective.targets == "permuted":
            order = np.take_along_axis(prediction_order(noise, format_uniforms), source, axis=1) * is_text
        visible, text, noise = (np.take_along_axis(array, source, axis=1) for array in (visible, text, noise))
        loss_weights, num_loss_tokens = (is_text & noise).astype(np.float32), None
        if objective.corruption.loss_weights is not None:
            lengths = rows.lengths.sum(1)
            loss_weights *= objective.corruption.loss_weights(lengths, random_numbers)[:, None]
            num_loss_tokens = lengths.astype(np.float32)
        side = Side(
            tokens=np.where(is_text, visible, special).astype(np.int32),
            segment_ids=in_row.astype(np.int32),
            positions=(positions * in_row).astype(np.int32),
            token_types=(in_second & in_row).astype(np.int32) if paired else None,
            prediction_order=order,
            targets=np.where(is_text, text, special).astype(np.int32),
            loss_weights=loss_weights,
            content=is_text & noise & (text != tokenizer.sep),
        )
        discriminator_weights = None
        if objective.targets in ("replaced", "restored"):  # the discriminator predicts every token of the row
            discriminator_weights = in_row.astype(np.float32)
        elif objective.targets in ("replaced-at-masks", "restored-at-masks"):  # only those that were masked
            discriminator_weights = (is_text & noise).astype(np.float32)
        return Batch(
            encoder=side, discriminator_loss_weights=discriminator_weights, num_loss_tokens=num_loss_tokens
        )


@dataclass(frozen=True)
class NextTokenRows(MaskedLMRows):
    """Rows of an encoder with a causal mask: each position predicts the next token.

    The texts and their [CLS] and [SEP] are those of ``MaskedLMRows`` with the same reader, and nothing is
    hidden. A [SEP] between documents is always predicted, the closing one if EOS ends each example
    (``Objective.eos_after_each_example``).
    """

    def __call__(self, row_numbers: np.ndarray) -> Batch:
        side = super().__call__(row_numbers).side("encoder")
        eos_after_each_example = self.reader.objective.eos_after_each_example
        targets, next_segment = _shift_left(side.tokens), _shift_left(side.segment_ids)
        predicts_closing_sep = _shift_left(next_segment) == 0
        is_target = (next_segment > 0) & (eos_after_each_example | ~predicts_closing_sep)
        content = is_target & ~predicts_closing_sep & (targets != self.reader.tokenizer.sep)
        return Batch(
            encoder=replace(
                side,
                targets=np.where(is_target, targets, PAD).astype(np.int32),
                loss_weights=is_target.astype(np.float32),
                content=content,
            )
        )

    def _noise(self, rows: UnmaskedRows, _random_numbers: np.ndarray) -> np.ndarray:
        return np.zeros(rows.text.shape, bool)


def _shift_left(array: np.ndarray) -> np.ndarray:
    """Return [B,T] in which each position has the value of the next one, and the last has 0."""
    return np.pad(array[:, 1:], ((0, 0), (0, 1)))


@dataclass(frozen=True)
class PairSampler:
    """Draw the one or two segments of each row from the documents of one window."""

    window: SegmentedWindow
    max_length: int  # of both segments together [tokens]

    def single(self, segments: np.ndarray) -> SegmentPair:
        """Return pairs of the segments with these indices [B] and an empty second segment."""
        starts, lengths = self.window.segments.starts[segments], self.window.segments.lengths[segments]
        empty = np.zeros_like(starts)
        return SegmentPair(np.stack([starts, empty], axis=1), np.stack([lengths, empty], axis=1))

    def read(self, pair: SegmentPair) -> np.ndarray:
        """Return the text of pairs, int32 [B,L]: the first segment, the second, and then tokens to ignore."""
        positions = np.arange(self.max_length)
        first, second = pair.starts[:, :1], pair.starts[:, 1:] - pair.lengths[:, :1]
        if pair.lengths[:, 1].any():
            first = np.where(positions < pair.lengths[:, :1], first, second)
        return self.window.text.read(first + positions)

    def sample(self, segments: np.ndarray, pair_uniforms: np.ndarray) -> tuple[SegmentPair, np.ndarray]:
        """Return a pair made of each segment [B], and whether the pair is changed, bool [B].

        The first four ``pair_uniforms`` [B,4 or more] of a pair decide, in this order, where its segment is
        split, whether the pair is changed, which segment its second part is then taken from, and where that
        segment is split. The label of changed pairs is 1, as in BERT's code, where 0 means "is next".
        """
        if self.window.objective.pairs == "next-single-sentence":
            return self._sample_sentences(segments, pair_uniforms)
        start, length = self.window.segments.starts[segments], self.window.segments.lengths[segments]
        split = self._split_points(segments, pair_uniforms[:, 0])
        changed = pair_uniforms[:, 1] < CHANGED
        starts = np.stack([start, start + split], axis=1)
        lengths = np.stack([split, length - split], axis=1)
        if self.window.objective.pairs == "sentence-order":
            swap = changed[:, None]
            pair = SegmentPair(
                np.where(swap, starts[:, ::-1], starts), np.where(swap, lengths[:, ::-1], lengths)
            )
            return pair, changed
        random_start, length_there = self._other_document(segments, pair_uniforms[:, 2:])
        starts[:, 1] = np.where(changed, random_start, starts[:, 1])
        # Unchanged pairs are cut to this length too, or short second parts would give away changed pairs.
        lengths[:, 1] = np.minimum(lengths[:, 1], length_there)
        return SegmentPair(starts, lengths), changed

    def _sample_sentences(
        self, segments: np.ndarray, pair_uniforms: np.ndarray
    ) -> tuple[SegmentPair, np.ndarray]:
        """Return ``sample`` of segments of two sentences; too long pairs lose tokens at both ends."""
        all_segments, sentences = self.window.segments, self.window.sentences
        # of all segments of the window
        second_starts = sentences[np.searchsorted(sentences, all_segments.starts, side="right")]
        second_lengths = all_segments.starts + all_segments.lengths - second_starts
        changed = pair_uniforms[:, 1] < CHANGED
        second_from = np.where(changed, self._other_segment(segments, pair_uniforms[:, 2]), segments)
        first_start, first_end = all_segments.starts[segments], second_starts[segments]
        first_length, second_length = first_end - first_start, second_lengths[second_from]
        # The second sentence gets what the first leaves, at least half; the first then loses its beginning.
        room = np.maximum(self.max_length - first_length, self.max_length // 2)
        second_length = np.minimum(second_length, room)
        first_length = np.minimum(first_length, self.max_length - second_length)
        starts = np.stack([first_end - first_length, second_starts[second_from]], axis=1)
        return SegmentPair(starts, np.stack([first_length, second_length], axis=1)), changed

    def _other_segment(self, segments: np.ndarray, u: np.ndarray) -> np.ndarray:
        """Return a random segment of another document for each segment, int64 [B]."""
        documents = self.window.segments.documents  # ascending: the segments of a document are adjacent
        low = np.searchsorted(documents, documents[segments], side="left")  # the document's first segment
        high = np.searchsorted(documents, documents[segments], side="right")  # the next document's first
        # a number among the segments of other documents; behind ``low`` it skips those of this one
        other = (u * (len(documents) - high + low)).astype(np.int64)
        return other + (other >= low) * (high - low)

    def _split_points(self, segments: np.ndarray, u: np.ndarray) -> np.ndarray:
        lengths = self.window.segments.lengths[segments]
        return split_points(self.read(self.single(segments)), lengths, u, self.window.tokenizer)

    def _other_document(self, segments: np.ndarray, u: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
        """Return a random position in another document, and how many of its tokens follow, both int64 [B]."""
        other, documents = self._other_segment(segments, u[:, 0]), self.window.segments.documents
        start = self.window.segments.starts[other] + self._split_points(other, u[:, 1])
        return start, self.window.documents.offsets[documents[other] + 1] - start

"""Rows of an encoder: running text or pairs of pieces, some tokens of which are hidden and told in their
places.

A row reads [CLS] text [SEP], its text running on through the documents with a [SEP] between two (RoBERTa's
full
sentences: Liu et al. 2019, section 4.2); or [CLS] A [SEP] B [SEP], where A and B are cut from one document,
unless the pair is to be told from others: next-sentence (Devlin et al. 2019) takes B from another document,
sentence-order (Lan et al. 2020) puts B first.
"""

import functools
from dataclasses import dataclass, fields
from typing import Any, NamedTuple

import numpy as np

from lm.data.objectives import INPUTS, Lengths, Objective, noise_mask, uniforms
from lm.data.segments import Running, Segments, even, full, running, shuffled
from lm.data.sentences import cuts
from lm.data.text.tokens import Tokens
from lm.data.text.vocabulary import PAD, Vocabulary
from lm.settings import SettingError

Batch = dict[str, np.ndarray]

CHANGED = 0.5  # share of pairs that are not as in the text [Devlin et al. 2019, 3.1; Lan et al. 2020, 3.1]
CHOICES = 4  # random numbers of a pair: where it is cut, whether it is changed, what by, where that is cut
SHORTEST = CHOICES + 3  # of a row [tokens]


class Pieces(NamedTuple):
    """Of each row, two stretches of the flat array of tokens, int64 [B,2]; the second is empty where there is
    one.
    """

    starts: np.ndarray
    lengths: np.ndarray


def masked_lengths(objective: Objective, inputs_length: int) -> Lengths:
    """All but [CLS] and the [SEP] of each piece is text."""
    if inputs_length < SHORTEST:
        raise SettingError(f"data.inputs_length={inputs_length} should be at least {SHORTEST}, such as 512")
    return Lengths(inputs_length - (2 if objective.pairs == "none" else 3), inputs_length, 0)


@dataclass(frozen=True)
class Masked:
    """The batch function of pre-training an encoder: every segment once an epoch, one a row."""

    tokens: Tokens
    objective: Objective
    vocabulary: Vocabulary
    limits: Lengths
    batch_size: int
    seed: int

    def __getstate__(self) -> dict[str, Any]:
        return {field.name: getattr(self, field.name) for field in fields(self)}

    def __call__(self, step: int, rows: slice) -> Batch:
        numbers = np.arange(step * self.batch_size, (step + 1) * self.batch_size)[rows]
        segments = shuffled(numbers, len(self.segments.starts), self.seed)
        paired = self.objective.pairs != "none"
        u = uniforms(self.seed, numbers, self.objective.draws + paired, self.limits.raw)
        if not paired:
            return self._features(self._whole(segments), u)
        pieces, changed = self._pairs(segments, u[:, -1])
        weights = np.ones(len(numbers), np.float32)
        labels = {"sentence_labels": changed.astype(np.int32), "sentence_loss_weights": weights}
        return self._features(pieces, u[:, :-1]) | labels

    @functools.cached_property
    def segments(self) -> Segments:
        if self.objective.pairs == "none":
            return full(np.array([0, self.text.length]), self.limits.raw)
        segments = even(self.tokens.offsets, self.limits.raw)
        if not len(segments.starts) or (
            self.objective.pairs == "next-sentence" and np.ptp(segments.documents) == 0
        ):
            raise SettingError(
                "data.corpus has too few documents for objective.pairs; it needs two of two tokens each"
            )
        return segments

    @functools.cached_property
    def text(self) -> Running:
        separator = self.vocabulary.sep if self.objective.separates else None
        return running(self.tokens.tokens, self.tokens.offsets, separator)

    def _whole(self, segments: np.ndarray) -> Pieces:
        return Pieces(*(values[segments, None] * np.array([1, 0]) for values in self.segments[:2]))

    def _read(self, pieces: Pieces) -> np.ndarray:
        """int32 [B,raw]: the first piece, the second, and then whatever follows."""
        places = np.arange(self.limits.raw)
        first, second = pieces.starts[:, :1], pieces.starts[:, 1:] - pieces.lengths[:, :1]
        if self.objective.pairs != "none":
            first = np.where(places < pieces.lengths[:, :1], first, second)
        return self.text.read(first + places)

    def _cuts(self, segments: np.ndarray, u: np.ndarray) -> np.ndarray:
        return cuts(self._read(self._whole(segments)), self.segments.lengths[segments], u, self.vocabulary)

    def _pairs(self, segments: np.ndarray, u: np.ndarray) -> tuple[Pieces, np.ndarray]:
        """Segments [B], uniforms [B,CHOICES...] -> their pieces, and which pairs are not as in the text.

        A label is 1 there: of next-sentence as in BERT's released code, where 0 is "is next".
        """
        begin, whole = self.segments.starts[segments], self.segments.lengths[segments]
        cut, changed = self._cuts(segments, u[:, 0]), u[:, 1] < CHANGED
        starts, lengths = np.stack([begin, begin + cut], axis=1), np.stack([cut, whole - cut], axis=1)
        if self.objective.pairs == "sentence-order":
            swap = np.where(changed[:, None], [1, 0], [0, 1])
            return Pieces(
                *(np.take_along_axis(values, swap, axis=1) for values in (starts, lengths))
            ), changed
        place, room = self._elsewhere(segments, u[:, 2:])
        starts[:, 1] = np.where(changed, place, starts[:, 1])
        # of true pairs too, or short ones would give away the others
        lengths[:, 1] = np.minimum(lengths[:, 1], room)
        return Pieces(starts, lengths), changed

    def _elsewhere(self, segments: np.ndarray, u: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
        """[B]: a place in another document where a second piece could begin, and how much of the document
        follows.
        """
        documents = self.segments.documents  # in order, so that those of one document are neighbours
        low, high = (np.searchsorted(documents, documents[segments], side=side) for side in ("left", "right"))
        other = (u[:, 0] * (len(documents) - high + low)).astype(np.int64)
        other += (other >= low) * (high - low)
        place = self.segments.starts[other] + self._cuts(other, u[:, 1])
        return place, self.tokens.offsets[documents[other] + 1] - place

    def _features(self, pieces: Pieces, u: np.ndarray) -> Batch:
        text, first, whole = self._read(pieces), pieces.lengths[:, :1], pieces.lengths.sum(1)
        starts, between = None, text == self.vocabulary.sep  # documents; never hidden
        if self.objective.reads_words:  # and a piece or a document begins one, whatever came before it
            starts = self.vocabulary.word_starts[text] | (np.arange(self.limits.raw) == first) | between
            starts[:, 1:] |= between[:, :-1]
        noise = noise_mask(self.objective, whole, u, self.limits.raw, 0, starts) & ~between
        shown, _ = INPUTS[self.objective.inputs](text, noise, u[:, -1], self.vocabulary)
        places, paired = np.arange(self.limits.inputs), int(self.objective.pairs != "none")
        second = paired * (places > first + 1)
        end = whole[:, None] + 1 + paired  # where the last [SEP] stands
        row = places <= end
        words = (places > 0) & (places < end) & ((places != first + 1) | (not paired))
        frame = np.where(places > 0, self.vocabulary.sep, self.vocabulary.cls) * row + PAD * ~row
        source = np.clip(places - 1 - second, 0, self.limits.raw - 1)
        shown, text, noise = (np.take_along_axis(values, source, axis=1) for values in (shown, text, noise))
        batch = {
            "encoder_input_tokens": np.where(words, shown, frame).astype(np.int32),
            "encoder_target_tokens": np.where(words, text, frame).astype(np.int32),
            "encoder_loss_weights": (words & noise).astype(np.float32),
            "encoder_segment_ids": row.astype(np.int32),
            "encoder_positions": (places * row).astype(np.int32),
        }
        if paired:
            batch["encoder_token_types"] = (second * row).astype(np.int32)
        if self.objective.targets == "replaced":  # the discriminator tells of every token
            batch["text_loss_weights"] = row.astype(np.float32)
        return batch

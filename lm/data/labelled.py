"""Rows of labelled tasks -> features and labels for a head, and the head's outputs -> what the metrics
compare.

A row reads [CLS] A [SEP] B [SEP] for an encoder, A <eos> B <eos> for all others, whose head reads the last
token; both sides of an encoder-decoder read the same, unshifted (Lewis et al. 2020, section 3.1).
Words whose labels or places matter are encoded one by one: for most tokenizers that gives the pieces of the
whole text.
"""

import functools
import re
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import chain
from typing import Any, NamedTuple

import numpy as np

from lm.data.batches import Batch, check_size, shuffled
from lm.data.checks import check_rows, check_symbols
from lm.data.objectives import Lengths
from lm.data.packing import DECODERS
from lm.data.tasks.labelled import LabelledTask
from lm.data.tasks.task import Row
from lm.data.text.vocabulary import PAD, Vocabulary
from lm.settings import SettingError

WORD = re.compile(r"\w+|[^\w\s]")  # a place in a context is one of words and punctuation marks
ANSWER = 30  # longest answer that is looked for [words; of pieces in the code of Devlin et al. 2019]
SHORTEST = 8  # rows [tokens]
NONE = -1  # the label of a word that was cut off or has no pieces


class Framed(NamedTuple):
    """A row of tokens [length of it], their types, and where the last part of the text begins in it and
    ends.
    """

    tokens: np.ndarray
    types: np.ndarray
    begin: int
    end: int


class Words(NamedTuple):
    """Pieces [pieces] of a list of words, and int [words]: each one's first piece and the one behind its
    last.
    """

    pieces: np.ndarray
    first: np.ndarray
    end: np.ndarray


class Example(NamedTuple):
    """One row or, of a choice, one for each candidate; their label [...] and its weight [...]."""

    rows: list[Framed]
    label: Any
    weight: Any


def shortened(sizes: Sequence[int], room: int) -> list[int]:
    """One part or two, of which the longest loses its end until both fit."""
    if len(sizes) == 1:
        return [min(sizes[0], room)]
    first = min(sizes[0], max(room - sizes[1], (room + 1) // 2))
    return [first, min(sizes[1], room - first)]


@functools.lru_cache(maxsize=100_000)
def word_pieces(vocabulary: Vocabulary, lead: str, word: str) -> tuple[int, ...]:
    """A word behind the character ``lead``: behind a blank, which most tokenizers read into the word, as it
    is; else as the pieces that follow those of ``lead``, since a word may have other pieces within text than
    alone."""
    whole, head = vocabulary.encode(lead + word), vocabulary.encode(lead) if lead.strip() else []
    follows = len(whole) > len(head) and whole[: len(head)] == head
    return tuple(whole[len(head) :] if follows else vocabulary.encode(word))


@dataclass(frozen=True)
class Reader:
    """From a task's rows to examples, and from a head's outputs to answers."""

    task: LabelledTask
    vocabulary: Vocabulary
    architecture: str
    length: int

    def __post_init__(self):
        check_rows(self.architecture)
        check_symbols(self.vocabulary, [], self.architecture)
        if self.length < SHORTEST:
            raise SettingError(
                f"tuning.inputs_length={self.length} should be at least {SHORTEST}, such as 128"
            )

    def example(self, row: Row) -> Example:
        kind, target = self.task.kind, self.task.target(row)
        if kind in ("tokens", "span"):
            words, places, framed = self._aligned(row)
            if kind == "tokens":
                return self._labels_of_words(words, framed, target)
            return self._place(self.task.place(row), words, places, framed)
        texts = self.task.texts(row) if kind == "choice" else (self.task.texts(row),)
        rows = [
            self._framed([np.asarray(self.vocabulary.encode(text), np.int32) for text in parts])
            for parts in texts
        ]
        known = kind == "regression" or target >= 0  # test sets have labels of -1
        return Example(rows, target if known else 0, float(known))

    def answer(self, row: Row, output: np.ndarray) -> Any:
        """classes [classes], choice [C]: the highest; regression []: the number; tokens [L,classes]: the
        classes of all words, NONE for one that was cut off; span [2,L]: the text of the best place in the
        context."""
        if self.task.kind == "regression":
            return float(output)
        if self.task.kind in ("classes", "choice"):
            return int(np.argmax(output))
        words, places, framed = self._aligned(row)
        if self.task.kind == "tokens":
            labels = np.argmax(output, axis=-1)
            seen = self._seen(words, framed, words.first)
            return np.where(seen, labels[np.where(seen, framed.begin + words.first, 0)], NONE).tolist()
        whole = np.flatnonzero(self._seen(words, framed, words.end - 1))
        if not len(whole):
            return ""
        start, end = (
            output[0][framed.begin + words.first[whole]],
            output[1][framed.begin + words.end[whole] - 1],
        )
        near = np.tri(len(whole), k=ANSWER - 1) * np.tri(len(whole)).T > 0  # no end before its start
        best = np.argmax(np.where(near, start[:, None] + end, -np.inf))
        start, end = whole[best // len(whole)], whole[best % len(whole)]
        return self.task.texts(row)[-1][places[start][0] : places[end][1]]

    def _framed(self, parts: Sequence[np.ndarray]) -> Framed:
        encoder = self.architecture == "encoder"
        begin, end = [[self.vocabulary.cls], self.vocabulary.sep] if encoder else [[], self.vocabulary.eos]
        kept = shortened([len(part) for part in parts], self.length - len(begin) - len(parts))
        pieces = [np.append(part[:count], end) for part, count in zip(parts, kept, strict=True)]
        tokens = np.concatenate([np.array(begin, np.int32), *pieces])
        types = np.repeat(np.arange(len(parts)), [len(piece) for piece in pieces])
        types = np.concatenate([np.zeros(len(begin), np.int32), types])
        return Framed(tokens, types, len(tokens) - len(pieces[-1]), len(tokens) - 1)

    def _aligned(self, row: Row) -> tuple[Words, list[tuple[int, int]], Framed]:
        """The last part of the text in words, of a context each with its place [characters), and the row."""
        *before, text = self.task.texts(row)
        places = []
        if isinstance(text, str):
            places = [found.span() for found in WORD.finditer(text)]
            lead = [re.sub(r"\s", " ", text[max(start - 1, 0) : start]) for start, _ in places]
            words = self._words([text[start:end] for start, end in places], lead)
        else:
            words = self._words(text, ["", *[" "] * (len(text) - 1)])
        parts = [np.asarray(self.vocabulary.encode(part), np.int32) for part in before]
        return words, places, self._framed([*parts, words.pieces])

    def _words(self, words: Sequence[str], lead: Sequence[str]) -> Words:
        pieces = [word_pieces(self.vocabulary, *both) for both in zip(lead, words, strict=True)]
        end = np.cumsum([len(one) for one in pieces], dtype=np.int64)
        return Words(
            np.fromiter(chain.from_iterable(pieces), np.int32), end - [len(one) for one in pieces], end
        )

    @staticmethod
    def _seen(words: Words, framed: Framed, piece: np.ndarray) -> np.ndarray:
        """bool [words]: this piece of the word is there, and in the row."""
        return (words.end > words.first) & (framed.begin + piece < framed.end)

    def _labels_of_words(self, words: Words, framed: Framed, target: Sequence[int]) -> Example:
        """The first piece of each word has its label."""
        labels, weights = np.zeros(self.length, np.int32), np.zeros(self.length, np.float32)
        seen = self._seen(words, framed, words.first)
        labels[framed.begin + words.first[seen]] = np.asarray(target, np.int32)[seen]
        weights[framed.begin + words.first[seen]] = 1
        return Example([framed], labels, weights)

    @staticmethod
    def _place(
        place: tuple[int, int] | None, words: Words, places: Sequence[tuple[int, int]], framed: Framed
    ) -> Example:
        """First and last piece of the words that the answer touches; weight 0 where they are not all in the
        row.
        """
        touched = [
            i for i, (start, end) in enumerate(places) if place and start < place[1] and end > place[0]
        ]
        touched = [i for i in touched if words.end[i] > words.first[i]]
        if not touched or framed.begin + words.end[touched[-1]] > framed.end:
            return Example([framed], [0, 0], 0.0)
        begin, end = words.first[touched[0]], words.end[touched[-1]] - 1
        return Example([framed], [framed.begin + begin, framed.begin + end], 1.0)

    def batch(self, rows: Sequence[Row], size: int) -> Batch:
        """Features of ``size`` rows, those behind ``rows`` being padding, and their ``labels``."""
        examples = [self.example(row) for row in rows]
        choices = len(examples[0].rows)
        tokens, types = (np.full((size * choices, self.length), PAD, np.int32) for _ in range(2))
        counts = np.zeros(size * choices, np.int64)
        for i, framed in enumerate(framed for example in examples for framed in example.rows):
            counts[i] = len(framed.tokens)
            tokens[i, : counts[i]], types[i, : counts[i]] = framed.tokens, framed.types
        text = (np.arange(self.length) < counts[:, None]).astype(np.int32)
        found = {
            "input_tokens": tokens,
            "segment_ids": text,
            "positions": np.arange(self.length, dtype=np.int32) * text,
        }
        sides = ("encoder",) if self.architecture == "encoder" else ("encoder", "decoder")
        sides = ("decoder",) if self.architecture in DECODERS else sides
        features = {f"{side}_{name}": values for side in sides for name, values in found.items()}
        if self.architecture == "encoder":
            features["encoder_token_types"] = types
        if self.architecture == "prefix-decoder":
            features["decoder_causal_attention"] = text  # all of the text sees all of it
        shape = (size, choices, self.length) if self.task.kind == "choice" else (size, self.length)
        batch = {name: values.reshape(shape) for name, values in features.items()}
        number = np.float32 if self.task.kind == "regression" else np.int32
        for name, dtype, values in (
            ("labels", number, [example.label for example in examples]),
            ("label_loss_weights", np.float32, [example.weight for example in examples]),
        ):
            given = np.array(values, dtype)
            batch[name] = np.zeros((size, *given.shape[1:]), dtype)
            batch[name][: len(given)] = given
        return batch


@dataclass(frozen=True)
class Labelled:
    """Every row of a labelled task once an epoch, each epoch in an order of its own."""

    reader: Reader
    rows: Sequence[Row]
    seed: int

    def __post_init__(self) -> None:
        check_rows(self.reader.architecture, self.seed)
        if not len(self.rows):
            raise SettingError(f"task {self.reader.task.name!r} has no examples to train on")

    @property
    def lengths(self) -> Lengths:
        return Lengths(*[self.reader.length] * 3)

    def __call__(self, numbers: np.ndarray) -> Batch:
        rows = shuffled(numbers, len(self.rows), self.seed).tolist()
        return self.reader.batch([self.rows[row] for row in rows], len(rows))


def labelled_eval_batches(reader: Reader, rows: Sequence[Row], batch_size: int) -> list[Batch]:
    """All rows in order; the last batch is filled up with rows of padding (segment 0), whose labels have no
    weight.
    """
    check_size(batch_size)
    parts = [range(start, min(start + batch_size, len(rows))) for start in range(0, len(rows), batch_size)]
    return [reader.batch([rows[place] for place in part], batch_size) for part in parts]

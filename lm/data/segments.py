"""Cut each window of a corpus into segments, from which rows are made, in the order of an epoch."""

import functools
import hashlib
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import NamedTuple

import numpy as np

from lm.data.batches import Uncached, generator
from lm.data.corpus.sampler import Streams, Walk, WindowPlace
from lm.data.corpus.token_cache import Tokens
from lm.objectives.denoising import Lengths, Objective
from lm.tokenizers.tokenizer import Tokenizer

SEGMENTS = "segments"  # the kind of row that is counted in a window, unless segments are packed into rows
DRAWS = 1 << 41  # set in the keys of the segments' first random numbers, and in none that orders segments
KEPT = 2  # windows of each stream kept in memory, the last ones read [windows]


class Segments(NamedTuple):
    """Starts, lengths and documents of the segments of a text, each int64 [segments]."""

    starts: np.ndarray  # position of the first token of each in the text
    lengths: np.ndarray
    documents: np.ndarray


class RunningText(NamedTuple):
    """Documents concatenated into one text, with ``separator``, if there is one, between each two of them.

    A separator that marks the end of a document (EOS) also follows the last one, unless that is truncated.
    """

    tokens: np.ndarray  # of all documents, one after the other [tokens]
    separators: np.ndarray  # positions of separators in the text, int64, ascending
    separator: int | None

    @property
    def length(self) -> int:
        return len(self.tokens) + len(self.separators)

    def read(self, positions: np.ndarray) -> np.ndarray:
        """Return the tokens at ``positions`` of the text, int32; beyond its end, the last token."""
        before = np.searchsorted(self.separators, positions) if len(self.separators) else 0
        tokens = self.tokens[np.minimum(positions - before, len(self.tokens) - 1)].astype(np.int32)
        if self.separator is not None and len(self.separators):
            nearest = self.separators[np.minimum(before, len(self.separators) - 1)]
            tokens[nearest == positions] = self.separator
        return tokens


def running(
    tokens: np.ndarray, offsets: np.ndarray, separator: int | None, *, behind_last: bool
) -> RunningText:
    """Return the documents ``tokens[offsets[d]:offsets[d + 1]]`` as one text; empty ones are left out.

    ``behind_last``: a separator follows the last document too.
    """
    ends = np.unique(offsets)[1:] if behind_last else np.unique(offsets)[1:-1]
    separators = ends + np.arange(len(ends)) if separator is not None else ends[:0]
    return RunningText(tokens, separators, separator)


def full(offsets: np.ndarray, raw: int) -> Segments:
    """Return the documents split into segments of ``raw`` tokens; the last of each has what remains."""
    sizes = np.diff(offsets)
    documents, nth = _pieces(-(-sizes // raw))
    starts = offsets[documents] + nth * raw
    return Segments(starts, np.minimum(offsets[documents + 1] - starts, raw), documents)


def even(offsets: np.ndarray, raw: int) -> Segments:
    """Return the documents split evenly into segments of at most ``raw`` tokens; those of one are skipped."""
    sizes = np.diff(offsets)
    counts = np.where(sizes > 1, -(-sizes // raw), 0)
    documents, nth = _pieces(counts)
    begin, end = (sizes[documents] * (nth + i) // counts[documents] for i in (0, 1))
    return Segments(offsets[documents] + begin, end - begin, documents)


def _pieces(counts: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """Return the document of each piece, and its index among the pieces of that document, int64 [pieces].

    ``counts``: how many pieces each document has, int64 [documents].
    """
    before = np.repeat(np.cumsum(counts) - counts, counts)
    return np.repeat(np.arange(len(counts)), counts), np.arange(counts.sum()) - before


@dataclass(frozen=True)
class Corpus(Uncached):
    """The documents of one window, concatenated and cut into segments as an objective needs them."""

    tokens: Tokens
    objective: Objective
    tokenizer: Tokenizer
    raw: int  # the most tokens of a segment

    @functools.cached_property
    def text(self) -> RunningText:
        is_mlm, tokens = self.objective.is_mlm, self.tokens
        separator = self.tokenizer.sep if is_mlm else self.tokenizer.eos
        separator = separator if self.objective.eos_between_documents else None
        behind_last = not is_mlm and not tokens.goes_on
        return running(tokens.tokens, tokens.offsets, separator, behind_last=behind_last)

    @functools.cached_property
    def segments(self) -> Segments:
        """Return the segments: of the whole text if the objective concatenates documents, else of each one.

        There are none if next-sentence pairs need a second document and the window has only one.
        """
        if self.objective.pairs == "none":
            whole = np.array([0, self.text.length])
            return full(whole if self.objective.concatenates else self.tokens.offsets, self.raw)
        segments = even(self.tokens.offsets, self.raw)
        if self.objective.pairs == "next-sentence" and len(np.unique(segments.documents)) == 1:
            return Segments(*(values[:0] for values in segments))
        return segments


class WindowRows(NamedTuple):
    """The rows of a batch that are read from one window."""

    place: WindowPlace
    numbers: np.ndarray  # indices among the rows of the window, int64 [rows]
    at: np.ndarray  # their indices in the batch, int64 [rows]


Size = Callable[[WindowPlace], int]  # returns how many rows a window has


@dataclass(frozen=True)
class CorpusReading(Uncached):
    """Finds the window that each row of a batch is read from, and the segments of that window."""

    streams: Streams
    objective: Objective
    lengths: Lengths
    batch_size: int  # of all hosts [rows]

    @property
    def seed(self) -> int:
        return self.streams.seed or 0

    @property
    def tokenizer(self) -> Tokenizer:
        return self.streams.corpus.tokenizer

    def rows(self, numbers: np.ndarray, size: Size, what: str) -> list[WindowRows]:
        """Return the windows of the rows with these numbers, int64 [B], counted from the first batch on.

        ``size`` counts the rows of a window; ``what`` names the kind of row that it counts.
        """
        share = self.batch_size // self.streams.count
        streams = numbers % self.batch_size // share
        return self.at(streams, numbers // self.batch_size * share + numbers % share, size, what)

    def at(self, streams: np.ndarray, nth: np.ndarray, size: Size, what: str) -> list[WindowRows]:
        """Return the ``nth`` rows of ``streams``, both int64 [B], grouped by window."""
        pairs = zip(streams.tolist(), nth.tolist(), strict=True)
        found = [self.walk(stream, size, what).find(row) for stream, row in pairs]
        numbers = np.array([number for _, number in found])
        places = list(dict.fromkeys(place for place, _ in found))
        which = np.array([places.index(place) for place, _ in found])
        return [
            WindowRows(place, numbers[which == k], np.flatnonzero(which == k))
            for k, place in enumerate(places)
        ]

    def walk(self, stream: int, size: Size, what: str) -> Walk:
        """Return the walk through the windows of a stream; one for each stream and kind of row."""
        if (stream, what) not in self._walks:
            self._walks[stream, what] = Walk(self.streams, stream, size, self.notes(stream, what))
        return self._walks[stream, what]

    def notes(self, stream: int, what: str) -> Path | None:
        """Return the file in which a walk notes its counts of rows; None if there is no folder of notes."""
        if self.streams.notes is None:
            return None
        key = f"{self.streams.fingerprint} {self.objective} {self.lengths} {what}"
        return self.streams.notes / hashlib.sha256(key.encode()).hexdigest()[:16] / f"{stream}.txt"

    def streams_of(self, rows: Sequence[slice]) -> list[int]:
        """Return the streams that the given rows of a batch are dealt to, ascending."""
        numbers = np.concatenate([np.arange(self.batch_size)[part] for part in rows])
        return np.unique(numbers * self.streams.count // self.batch_size).tolist()

    @functools.cached_property
    def _walks(self) -> dict[tuple[int, str], Walk]:
        return {}

    @functools.cached_property
    def corpus(self) -> Callable[[WindowPlace], Corpus]:
        """Return the documents of a window; the last windows read are cached."""
        return functools.lru_cache(maxsize=KEPT * self.streams.count)(self._corpus)

    def _corpus(self, place: WindowPlace) -> Corpus:
        return Corpus(self.streams.tokens(place), self.objective, self.tokenizer, self.lengths.raw)

    def segments_of(self, place: WindowPlace) -> int:
        """Return how many segments a window has."""
        return len(self.corpus(place).segments.starts)

    def rows_of_epoch(self, most: int, size: Size, what: str) -> int:
        """Return how many rows the first epoch has, at most ``most``; the corpus is read in one stream."""
        return self.walk(0, size, what).rows_of_epoch(most)

    @functools.cached_property
    def order(self) -> Callable[[WindowPlace], np.ndarray]:
        """Return the segments of a window in the order of its epoch, int64 [segments]."""
        return functools.lru_cache(maxsize=KEPT * self.streams.count)(self._order)

    def _order(self, place: WindowPlace) -> np.ndarray:
        return generator(self.seed, place.order_key).permutation(self.segments_of(place))

    def first_draws(self, place: WindowPlace) -> np.ndarray:
        """Return the first random number of each segment of a window, in epoch order, float32 [segments].

        It decides how much room the segment takes in a row.
        """
        random = generator(place.seed(self.seed), place.key >> 24 | DRAWS)
        return random.random(self.segments_of(place), dtype=np.float32)

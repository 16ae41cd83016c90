"""The text of a window of a corpus, cut into the segments that rows are made of, in the order of an epoch."""

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
from lm.tokenizers.tokenizer import Vocabulary

SEGMENTS = "segments"  # what is counted of a window, if not what they are packed into
DRAWS = 1 << 41  # set in the keys of the segments' first random numbers, and in none that orders segments
KEPT = 2  # windows of a stream in memory, those last read [windows]


class Segments(NamedTuple):
    """Pieces of text, int64 [segments]."""

    starts: np.ndarray  # in the flat array of tokens
    lengths: np.ndarray
    documents: np.ndarray


class RunningText(NamedTuple):
    """Documents strung together as one text, with ``separator`` between two of them if there is one.

    Where it marks a document's end, it stands behind the last one too, unless that is cut.
    """

    tokens: np.ndarray  # of all documents, one after the other [tokens]
    separators: np.ndarray  # positions in the text, int64, ascending
    separator: int | None

    @property
    def length(self) -> int:
        return len(self.tokens) + len(self.separators)

    def read(self, positions: np.ndarray) -> np.ndarray:
        """int32: the tokens at ``positions`` of the text; beyond its end the last one."""
        before = np.searchsorted(self.separators, positions) if len(self.separators) else 0
        tokens = self.tokens[np.minimum(positions - before, len(self.tokens) - 1)].astype(np.int32)
        if self.separator is not None and len(self.separators):
            nearest = self.separators[np.minimum(before, len(self.separators) - 1)]
            tokens[nearest == positions] = self.separator
        return tokens


def running(
    tokens: np.ndarray, offsets: np.ndarray, separator: int | None, *, behind_last: bool
) -> RunningText:
    """The documents ``tokens[offsets[d]:offsets[d + 1]]`` as one text; empty ones leave no trace in it."""
    ends = np.unique(offsets)[1:] if behind_last else np.unique(offsets)[1:-1]
    separators = ends + np.arange(len(ends)) if separator is not None else ends[:0]
    return RunningText(tokens, separators, separator)


def full(offsets: np.ndarray, raw: int) -> Segments:
    """Documents split into ``raw`` tokens each; the last piece has what remains."""
    sizes = np.diff(offsets)
    documents, nth = _pieces(-(-sizes // raw))
    starts = offsets[documents] + nth * raw
    return Segments(starts, np.minimum(offsets[documents + 1] - starts, raw), documents)


def even(offsets: np.ndarray, raw: int) -> Segments:
    """Documents split evenly into pieces of at most ``raw`` tokens; those of one token are skipped."""
    sizes = np.diff(offsets)
    counts = np.where(sizes > 1, -(-sizes // raw), 0)
    documents, nth = _pieces(counts)
    begin, end = (sizes[documents] * (nth + i) // counts[documents] for i in (0, 1))
    return Segments(offsets[documents] + begin, end - begin, documents)


def _pieces(counts: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """Pieces of each document -> the document of every piece, and which of its pieces it is."""
    before = np.repeat(np.cumsum(counts) - counts, counts)
    return np.repeat(np.arange(len(counts)), counts), np.arange(counts.sum()) - before


@dataclass(frozen=True)
class Corpus(Uncached):
    """Documents as an objective reads them."""

    tokens: Tokens
    objective: Objective
    vocabulary: Vocabulary
    raw: int  # the most tokens of a segment

    @functools.cached_property
    def text(self) -> RunningText:
        is_mlm, tokens = self.objective.is_mlm, self.tokens
        separator = self.vocabulary.sep if is_mlm else self.vocabulary.eos
        separator = separator if self.objective.eos_between_documents else None
        behind_last = not is_mlm and not tokens.goes_on
        return running(tokens.tokens, tokens.offsets, separator, behind_last=behind_last)

    @functools.cached_property
    def segments(self) -> Segments:
        """Of the whole text where the objective concatenates documents, else of each document.

        None where pairs need another document and there is one alone.
        """
        if self.objective.pairs == "none":
            whole = np.array([0, self.text.length])
            return full(whole if self.objective.concatenates else self.tokens.offsets, self.raw)
        segments = even(self.tokens.offsets, self.raw)
        if self.objective.pairs == "next-sentence" and len(np.unique(segments.documents)) == 1:
            return Segments(*(values[:0] for values in segments))
        return segments


class WindowRows(NamedTuple):
    """Rows of one window, and where in the batch they stand."""

    place: WindowPlace
    numbers: np.ndarray  # among the rows of the window, int64 [rows]
    at: np.ndarray  # in the batch, int64 [rows]


Size = Callable[[WindowPlace], int]  # how many rows a window has


@dataclass(frozen=True)
class CorpusReading(Uncached):
    """How the rows of batches read a corpus: which window each is of, and the segments of that."""

    streams: Streams
    objective: Objective
    lengths: Lengths
    batch_size: int  # of all hosts [rows]

    @property
    def seed(self) -> int:
        return self.streams.seed or 0

    @property
    def vocabulary(self) -> Vocabulary:
        return self.streams.corpus.vocabulary

    def rows(self, numbers: np.ndarray, size: Size, what: str) -> list[WindowRows]:
        """Rows by number, from the first batch on, int64 [B]; ``what`` names those that ``size`` counts."""
        share = self.batch_size // self.streams.count
        streams = numbers % self.batch_size // share
        return self.at(streams, numbers // self.batch_size * share + numbers % share, size, what)

    def at(self, streams: np.ndarray, nth: np.ndarray, size: Size, what: str) -> list[WindowRows]:
        """The nth rows of their streams, int64 [B], those of each window together."""
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
        """Through the windows of a stream, which it counts once."""
        if (stream, what) not in self._walks:
            self._walks[stream, what] = Walk(self.streams, stream, size, self.notes(stream, what))
        return self._walks[stream, what]

    def notes(self, stream: int, what: str) -> Path | None:
        """The file of a walk's notes."""
        if self.streams.notes is None:
            return None
        key = f"{self.streams.fingerprint} {self.objective} {self.lengths} {what}"
        return self.streams.notes / hashlib.sha256(key.encode()).hexdigest()[:16] / f"{stream}.txt"

    def streams_of(self, rows: Sequence[slice]) -> list[int]:
        """The streams that rows of a batch are dealt to."""
        numbers = np.concatenate([np.arange(self.batch_size)[part] for part in rows])
        return np.unique(numbers * self.streams.count // self.batch_size).tolist()

    @functools.cached_property
    def _walks(self) -> dict[tuple[int, str], Walk]:
        return {}

    @functools.cached_property
    def corpus(self) -> Callable[[WindowPlace], Corpus]:
        """The documents of a window."""
        return functools.lru_cache(maxsize=KEPT * self.streams.count)(self._corpus)

    def _corpus(self, place: WindowPlace) -> Corpus:
        return Corpus(self.streams.tokens(place), self.objective, self.vocabulary, self.lengths.raw)

    def segments_of(self, place: WindowPlace) -> int:
        """How many there are in a window."""
        return len(self.corpus(place).segments.starts)

    def rows_of_epoch(self, most: int, size: Size, what: str) -> int:
        """Of the first epoch of a corpus in one stream, at most ``most``."""
        return self.walk(0, size, what).rows_of_epoch(most)

    @functools.cached_property
    def order(self) -> Callable[[WindowPlace], np.ndarray]:
        """int64 [segments]: the segments of a window in the order of its epoch."""
        return functools.lru_cache(maxsize=KEPT * self.streams.count)(self._order)

    def _order(self, place: WindowPlace) -> np.ndarray:
        return generator(self.seed, place.order_key).permutation(self.segments_of(place))

    def first_draws(self, place: WindowPlace) -> np.ndarray:
        """float32 [segments]: the first random number of each segment of a window, in the order of its epoch.

        How much room a segment takes follows from it.
        """
        random = generator(place.seed(self.seed), place.key >> 24 | DRAWS)
        return random.random(self.segments_of(place), dtype=np.float32)

"""Pieces of a corpus that fill rows, and the order in which epochs visit them."""

import functools
from collections.abc import Sequence
from typing import NamedTuple

import numpy as np

EPOCH = 2**63  # first key of the random numbers of an epoch, beyond those of the examples


class Segments(NamedTuple):
    """Pieces of text, int64 [segments]: where in the flat array of tokens each begins, its length, its
    document.
    """

    starts: np.ndarray
    lengths: np.ndarray
    documents: np.ndarray


class Running(NamedTuple):
    """Documents strung together as one text, with ``separator`` between two of them if there is one."""

    tokens: Sequence[int]  # of all documents, one after the other, read at arrays of places [tokens]
    separators: np.ndarray  # where in the text they stand, int64, in order
    separator: int | None

    @property
    def length(self) -> int:
        return len(self.tokens) + len(self.separators)

    def read(self, places: np.ndarray) -> np.ndarray:
        """int32: the tokens at ``places`` of the text; beyond its end the last one."""
        before = np.searchsorted(self.separators, places) if len(self.separators) else 0
        found = self.tokens[np.minimum(places - before, len(self.tokens) - 1)].astype(np.int32)
        if len(self.separators):
            found[self.separators[np.minimum(before, len(self.separators) - 1)] == places] = self.separator
        return found


def running(tokens: Sequence[int], offsets: np.ndarray, separator: int | None) -> Running:
    """The documents ``tokens[offsets[d]:offsets[d + 1]]`` as one text; those without tokens leave no trace in
    it.
    """
    inner = np.unique(offsets)[1:-1]
    separators = inner + np.arange(len(inner)) if separator is not None else inner[:0]
    return Running(tokens, separators, separator)


def full(offsets: np.ndarray, raw: int) -> Segments:
    """Documents split into ``raw`` tokens each, the last piece having what is left."""
    sizes = np.diff(offsets)
    documents, nth = _pieces(-(-sizes // raw))
    starts = offsets[documents] + nth * raw
    return Segments(starts, np.minimum(offsets[documents + 1] - starts, raw), documents)


def even(offsets: np.ndarray, raw: int) -> Segments:
    """Documents split into pieces as equal as can be, of at most ``raw`` tokens; single tokens are left
    out.
    """
    sizes = np.diff(offsets)
    counts = np.where(sizes > 1, -(-sizes // raw), 0)
    documents, nth = _pieces(counts)
    begin, end = (sizes[documents] * (nth + i) // counts[documents] for i in (0, 1))
    return Segments(offsets[documents] + begin, end - begin, documents)


def _pieces(counts: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """Pieces of each document -> the document of every piece, and which of its pieces it is."""
    before = np.repeat(np.cumsum(counts) - counts, counts)
    return np.repeat(np.arange(len(counts)), counts), np.arange(counts.sum()) - before


def generator(seed: int, epoch: int) -> np.random.Generator:
    return np.random.Generator(np.random.Philox(key=np.array([seed, EPOCH + epoch], np.uint64)))


@functools.lru_cache(maxsize=4)
def _order(seed: int, epoch: int, count: int) -> np.ndarray:
    return generator(seed, epoch).permutation(count)


def shuffled(numbers: np.ndarray, count: int, seed: int) -> np.ndarray:
    """Which of ``count`` things each row is, rows being numbered through all epochs: all once an epoch,
    shuffled.
    """
    epochs = numbers // count
    found = np.empty(len(numbers), np.int64)
    for epoch in np.unique(epochs).tolist():
        found[epochs == epoch] = _order(seed, epoch, count)[numbers[epochs == epoch] % count]
    return found

"""A corpus as one running text, cut into the segments that rows are made of."""

import functools
from dataclasses import dataclass
from typing import NamedTuple

import numpy as np

from lm.data.batches import Uncached
from lm.data.objectives import Objective
from lm.data.text.tokens import Stored, Tokens
from lm.data.text.vocabulary import Vocabulary
from lm.settings import SettingError


class Segments(NamedTuple):
    """Pieces of text, int64 [segments]."""

    starts: np.ndarray  # in the flat array of tokens
    lengths: np.ndarray
    documents: np.ndarray


class RunningText(NamedTuple):
    """Documents strung together as one text, with ``separator`` between two of them if there is one."""

    tokens: np.ndarray | Stored  # of all documents, one after the other, read at arrays of positions [tokens]
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


def running(tokens: np.ndarray | Stored, offsets: np.ndarray, separator: int | None) -> RunningText:
    """The documents ``tokens[offsets[d]:offsets[d + 1]]`` as one text; empty ones leave no trace in it."""
    inner = np.unique(offsets)[1:-1]
    separators = inner + np.arange(len(inner)) if separator is not None else inner[:0]
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
    """The text of a corpus as an objective reads it."""

    tokens: Tokens
    objective: Objective
    vocabulary: Vocabulary
    raw: int  # the most tokens of a segment

    @functools.cached_property
    def text(self) -> RunningText:
        separator = self.vocabulary.sep if self.objective.in_place else self.vocabulary.eos
        separator = separator if self.objective.separates else None
        return running(self.tokens.tokens, self.tokens.offsets, separator)

    @functools.cached_property
    def segments(self) -> Segments:
        """Of the whole text where the objective concatenates documents, else of each document."""
        if self.objective.pairs == "none":
            whole = np.array([0, self.text.length])
            return full(whole if self.objective.concatenates else self.tokens.offsets, self.raw)
        segments = even(self.tokens.offsets, self.raw)
        alone = self.objective.pairs == "next-sentence" and np.ptp(segments.documents) == 0
        if not len(segments.starts) or alone:
            raise SettingError("data.corpus needs two documents of two tokens each for objective.pairs")
        return segments

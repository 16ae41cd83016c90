"""Cut each window of a corpus into segments, from which rows are made, in the order of an epoch.

A corpus is read in streams, a stream window by window (``lm.data.corpus.sampler``). A window holds whole
documents, which are cut into segments: one segment, or several packed together, is a row.
"""

import functools
import hashlib
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import NamedTuple

import numpy as np

from lm.data.batches import PickledWithoutCaches, keyed_generator
from lm.data.corpus.sampler import Streams, Walk, WindowPlace
from lm.data.corpus.token_cache import Tokens
from lm.objectives.denoising import Lengths, Objective
from lm.tokenizers.tokenizer import Vocabulary

SEGMENTS = "segments"  # kind of row: one segment; other kinds are of segments packed into rows
FIRST_UNIFORMS_KEY = 1 << 41  # set in the random keys of ``first_uniforms``, and in none of ``segment_order``
CACHED_WINDOWS = 2  # of each stream, the last ones read [windows]


class Segments(NamedTuple):
    """Starts, lengths and documents of the segments of a text, each int64 [segments]."""

    starts: np.ndarray  # position of the first token of each in the text
    lengths: np.ndarray
    documents: np.ndarray


class RunningText(NamedTuple):
    """Documents concatenated into one text, with separators (EOS or SEP) between them, or without any.

    The separators are not stored among the tokens, which stay as the token cache has them.
    """

    tokens: np.ndarray  # of all documents, one after the other [tokens]
    separators: np.ndarray  # positions of separators in the text, int64, ascending
    separator: int | None  # its id

    @property
    def length(self) -> int:
        return len(self.tokens) + len(self.separators)

    def read(self, positions: np.ndarray) -> np.ndarray:
        """Return the tokens at ``positions`` of the text, int32; beyond its end, the last token."""
        separators_before = np.searchsorted(self.separators, positions) if len(self.separators) else 0
        index = np.minimum(positions - separators_before, len(self.tokens) - 1)
        tokens = self.tokens[index].astype(np.int32)
        if self.separator is not None and len(self.separators):
            next_separator = self.separators[np.minimum(separators_before, len(self.separators) - 1)]
            tokens[next_separator == positions] = self.separator
        return tokens


def concatenate_documents(
    tokens: np.ndarray, offsets: np.ndarray, separator: int | None, *, after_last: bool
) -> RunningText:
    """Return the documents ``tokens[offsets[d]:offsets[d + 1]]`` as one text; empty ones are left out.

    ``after_last``: a separator follows the last document too.
    """
    ends = np.unique(offsets)[1:] if after_last else np.unique(offsets)[1:-1]
    separators = ends + np.arange(len(ends)) if separator is not None else ends[:0]
    return RunningText(tokens, separators, separator)


def split_full(offsets: np.ndarray, raw: int) -> Segments:
    """Return documents split into segments of ``raw`` tokens; each document's last one has what remains."""
    sizes = np.diff(offsets)
    documents, nth = _number_segments(-(-sizes // raw))
    starts = offsets[documents] + nth * raw
    return Segments(starts, np.minimum(offsets[documents + 1] - starts, raw), documents)


def split_evenly(offsets: np.ndarray, raw: int) -> Segments:
    """Return documents split into segments of nearly equal length, at most ``raw`` tokens.

    Documents of a single token are skipped.
    """
    sizes = np.diff(offsets)
    counts = np.where(sizes > 1, -(-sizes // raw), 0)
    documents, nth = _number_segments(counts)
    begin, end = (sizes[documents] * (nth + i) // counts[documents] for i in (0, 1))
    return Segments(offsets[documents] + begin, end - begin, documents)


def _number_segments(counts: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """Return each segment's document, and its index among the segments of that document, int64 [segments].

    ``counts``: how many segments each document has, int64 [documents].
    """
    before = np.repeat(np.cumsum(counts) - counts, counts)
    return np.repeat(np.arange(len(counts)), counts), np.arange(counts.sum()) - before


@dataclass(frozen=True)
class SegmentedWindow(PickledWithoutCaches):
    """The documents of one window, concatenated and cut into segments as an objective needs them."""

    tokens: Tokens
    objective: Objective
    vocabulary: Vocabulary
    raw: int  # the most tokens of a segment

    @functools.cached_property
    def text(self) -> RunningText:
        """Return the documents as one text.

        EOS, which ends a document, also follows the last one unless that goes on in the next window.
        """
        is_mlm, tokens = self.objective.is_mlm, self.tokens
        separator = self.vocabulary.sep if is_mlm else self.vocabulary.eos
        separator = separator if self.objective.eos_between_documents else None
        after_last = not is_mlm and not tokens.goes_on
        return concatenate_documents(tokens.tokens, tokens.offsets, separator, after_last=after_last)

    @functools.cached_property
    def segments(self) -> Segments:
        """Return the segments of the whole text or, if documents are kept apart, of each document.

        There are none if next-sentence pairs need a second document and the window has only one.
        """
        if self.objective.pairs == "none":
            whole = np.array([0, self.text.length])
            return split_full(whole if self.objective.concatenates else self.tokens.offsets, self.raw)
        segments = split_evenly(self.tokens.offsets, self.raw)
        if self.objective.pairs == "next-sentence" and len(np.unique(segments.documents)) == 1:
            return Segments(*(values[:0] for values in segments))
        return segments


class WindowRows(NamedTuple):
    """The rows of a batch that are read from one window."""

    place: WindowPlace
    indices: np.ndarray  # among the rows of the window, int64 [rows]
    batch_rows: np.ndarray  # their indices in the batch, int64 [rows]


CountRows = Callable[[WindowPlace], int]  # returns how many rows a window has


@dataclass(frozen=True)
class SegmentReader(PickledWithoutCaches):
    """Finds the window that each row of a batch is read from, and cuts that window into segments.

    ``count_rows`` and ``row_kind`` are arguments of most methods: how many rows a window has depends on
    whether and how segments are packed. ``row_kind`` is the name of that way, under which counts are stored.
    """

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

    def find_rows(self, numbers: np.ndarray, count_rows: CountRows, row_kind: str) -> list[WindowRows]:
        """Return where the rows with these numbers, int64 [B], are read, grouped by window.

        Row r of step s has the number s * batch_size + r. The rows of a batch are divided equally among the
        streams.
        """
        rows_per_stream = self.batch_size // self.streams.count
        streams = numbers % self.batch_size // rows_per_stream
        nth = numbers // self.batch_size * rows_per_stream + numbers % rows_per_stream
        return self.find_stream_rows(streams, nth, count_rows, row_kind)

    def find_stream_rows(
        self, streams: np.ndarray, nth: np.ndarray, count_rows: CountRows, row_kind: str
    ) -> list[WindowRows]:
        """Return where the ``nth`` rows of ``streams``, both int64 [B], are read, grouped by window."""
        rows_by_window: dict[WindowPlace, list[tuple[int, int]]] = {}  # (index in the window, in the batch)
        for batch_row, (stream, row) in enumerate(zip(streams.tolist(), nth.tolist(), strict=True)):
            place, index = self.walk(stream, count_rows, row_kind).find(row)
            rows_by_window.setdefault(place, []).append((index, batch_row))
        return [WindowRows(place, *np.array(rows).T) for place, rows in rows_by_window.items()]

    def walk(self, stream: int, count_rows: CountRows, row_kind: str) -> Walk:
        """Return the walk through the windows of a stream; one for each stream and kind of row."""
        if (stream, row_kind) not in self._walks:
            notes = self.notes(stream, row_kind)
            self._walks[stream, row_kind] = Walk(self.streams, stream, count_rows, notes)
        return self._walks[stream, row_kind]

    def notes(self, stream: int, row_kind: str) -> Path | None:
        """Return the file in which a walk notes its counts of rows; None if there is no folder of notes."""
        if self.streams.notes is None:
            return None
        key = f"{self.streams.fingerprint} {self.objective} {self.lengths} {row_kind}"
        return self.streams.notes / hashlib.sha256(key.encode()).hexdigest()[:16] / f"{stream}.txt"

    def streams_of_rows(self, rows: Sequence[slice]) -> list[int]:
        """Return the streams that these rows of each batch are read from, ascending."""
        numbers = np.concatenate([np.arange(self.batch_size)[part] for part in rows])
        return np.unique(numbers * self.streams.count // self.batch_size).tolist()

    @functools.cached_property
    def _walks(self) -> dict[tuple[int, str], Walk]:
        return {}

    @functools.cached_property
    def window(self) -> Callable[[WindowPlace], SegmentedWindow]:
        """Return the function that reads and segments a window, with a cache of the last windows."""

        def read(place: WindowPlace) -> SegmentedWindow:
            tokens = self.streams.tokens(place)
            return SegmentedWindow(tokens, self.objective, self.vocabulary, self.lengths.raw)

        return functools.lru_cache(maxsize=CACHED_WINDOWS * self.streams.count)(read)

    def count_segments(self, place: WindowPlace) -> int:
        """Return how many segments a window has."""
        return len(self.window(place).segments.starts)

    def rows_of_epoch(self, most: int, count_rows: CountRows, row_kind: str) -> int:
        """Return how many rows the first epoch has, at most ``most``, of a corpus read in one stream."""
        return self.walk(0, count_rows, row_kind).rows_of_epoch(most)

    @functools.cached_property
    def segment_order(self) -> Callable[[WindowPlace], np.ndarray]:
        """Return the function that shuffles the segments of a window, int64 [segments], with a cache."""

        def shuffle(place: WindowPlace) -> np.ndarray:
            return keyed_generator(self.seed, place.order_key).permutation(self.count_segments(place))

        return functools.lru_cache(maxsize=CACHED_WINDOWS * self.streams.count)(shuffle)

    def first_uniforms(self, place: WindowPlace) -> np.ndarray:
        """Return the first uniform number of each segment of a window, in epoch order, float32 [segments].

        It decides how many noise tokens the segment has, and so how much room it takes in a row.
        """
        random = keyed_generator(place.seed(self.seed), place.key >> 24 | FIRST_UNIFORMS_KEY)
        return random.random(self.count_segments(place), dtype=np.float32)

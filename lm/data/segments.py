"""Split each window of a corpus into segments, shuffle these in each epoch, and find those of a batch's rows.

A window is the part of a shard that is read, shuffled and cached as one (``lm.data.corpus.shards``).
"""

import functools
import hashlib
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import NamedTuple

import numpy as np

from lm.config.base import SettingError
from lm.data.batches import PickledWithoutCache, check_batch_size, order_generator
from lm.data.collocations import Collocations
from lm.data.corpus.sampler import CorpusSampler, RowIndex, WindowPosition
from lm.data.corpus.token_cache import EncodedDocuments
from lm.objectives.denoising import NEXT_SENTENCE, Lengths, Objective
from lm.objectives.formatting import sentence_starts
from lm.tokenizers.tokenizer import Tokenizer

UNPACKED_ROWS = "segments"  # the row index key if each row holds one segment; packed rows have other keys
# Bit that is set in the keys of ``length_uniforms``. It is clear in the keys by which windows are shuffled in
# the first 512 epochs (``WindowPosition.order_key``), so that the two draw different random numbers.
LENGTH_UNIFORMS_BIT = 1 << 41
# Number of the lowest bits of an example's key, which count the examples of a window
# (``WindowPosition.first_example_key``).
EXAMPLE_BITS = 24
CACHED_WINDOWS = 2  # per stream: the ones read last


class Segments(NamedTuple):
    """Hold the segments of a text: their starts, lengths and documents, each int64 [segments]."""

    starts: np.ndarray  # position in the text of each segment's first token
    lengths: np.ndarray  # [tokens]
    documents: np.ndarray  # index of the document that each segment is from


class ConcatenatedText(NamedTuple):
    """Hold documents concatenated into one text, with ``separator`` between them unless it is None.

    If the separator is an EOS it also follows the last document, unless this is truncated.
    """

    tokens: np.ndarray  # of all documents, one after the other [tokens]
    separators: np.ndarray  # positions of separators in the text, int64, ascending
    separator: int | None

    @property
    def length(self) -> int:
        return len(self.tokens) + len(self.separators)

    def read(self, positions: np.ndarray) -> np.ndarray:
        """Return the tokens at ``positions`` of the text, int32; beyond its end, the last token."""
        separators_before = np.searchsorted(self.separators, positions) if len(self.separators) else 0
        indices = np.minimum(positions - separators_before, len(self.tokens) - 1)
        tokens = self.tokens[indices].astype(np.int32)
        if self.separator is not None and len(self.separators):
            next_separator = self.separators[np.minimum(separators_before, len(self.separators) - 1)]
            tokens[next_separator == positions] = self.separator
        return tokens


def concatenate_documents(
    tokens: np.ndarray, offsets: np.ndarray, separator: int | None, *, after_last: bool
) -> ConcatenatedText:
    """Return the documents ``tokens[offsets[d]:offsets[d + 1]]`` as one text; empty ones are left out.

    ``after_last``: a separator follows the last document too.
    """
    if separator is None:
        return ConcatenatedText(tokens, np.zeros(0, np.int64), None)
    ends = np.unique(offsets)[1:]  # of the documents, without separators
    if not after_last:
        ends = ends[:-1]
    return ConcatenatedText(tokens, ends + np.arange(len(ends)), separator)


def split_greedily(offsets: np.ndarray, max_length: int) -> Segments:
    """Return the documents split into segments of ``max_length``; a document's last one may be shorter."""
    lengths = np.diff(offsets)
    documents, index = _number_segments(-(-lengths // max_length))
    starts = offsets[documents] + index * max_length
    return Segments(starts, np.minimum(offsets[documents + 1] - starts, max_length), documents)


def split_evenly(offsets: np.ndarray, max_length: int) -> Segments:
    """Return the documents split into as few segments of equal length as ``max_length`` allows.

    Lengths differ by one token at most. Documents of one token are skipped.
    """
    lengths = np.diff(offsets)
    counts = np.where(lengths > 1, -(-lengths // max_length), 0)
    documents, index = _number_segments(counts)
    begin = lengths[documents] * index // counts[documents]
    end = lengths[documents] * (index + 1) // counts[documents]
    return Segments(offsets[documents] + begin, end - begin, documents)


def pair_sentences(offsets: np.ndarray, sentences: np.ndarray) -> Segments:
    """Return the segments of two sentences that each document is split into, however long they are.

    ``sentences`` int64 holds the position of each sentence's first token. An odd sentence at the end of a
    document is left out.
    """
    documents = np.searchsorted(offsets, sentences, side="right") - 1  # of each sentence
    index = np.arange(len(documents)) - np.searchsorted(documents, documents)  # in its document
    firsts = np.flatnonzero((index[:-1] % 2 == 0) & (documents[:-1] == documents[1:]))
    ends = np.append(sentences, offsets[-1])[firsts + 2]
    return Segments(sentences[firsts], ends - sentences[firsts], documents[firsts])


def _number_segments(counts: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """Return each segment's document, and the segment's index in that document, both int64 [segments].

    ``counts`` int64 [documents] is the number of segments of each document.
    """
    before = np.repeat(np.cumsum(counts) - counts, counts)
    return np.repeat(np.arange(len(counts)), counts), np.arange(counts.sum()) - before


@dataclass(frozen=True)
class SegmentedWindow(PickledWithoutCache):
    """The documents of one window, concatenated and split into segments as an objective needs them."""

    documents: EncodedDocuments
    objective: Objective
    tokenizer: Tokenizer
    max_length: int  # of a segment [tokens]

    @functools.cached_property
    def text(self) -> ConcatenatedText:
        is_mlm, separator = self.objective.is_mlm, None
        if self.objective.eos_between_documents:
            separator = self.tokenizer.sep if is_mlm else self.tokenizer.eos
        after_last = not is_mlm and not self.documents.is_truncated
        return concatenate_documents(
            self.documents.tokens, self.documents.offsets, separator, after_last=after_last
        )

    @functools.cached_property
    def sentences(self) -> np.ndarray:
        """Return the positions of the first tokens of all sentences, int64, ascending."""
        tokens, offsets = self.documents.tokens.astype(np.int32), self.documents.offsets
        starts = sentence_starts(tokens[None], self.tokenizer)[0]
        starts[offsets[offsets < len(tokens)]] = True  # a document begins with a sentence
        return np.flatnonzero(starts)

    @functools.cached_property
    def segments(self) -> Segments:
        """Return the segments of the concatenated text, or of each document if these are not concatenated.

        There are none if the window has only one document and next-sentence pairs need a second one.
        """
        if self.objective.pairs == "none":
            whole = np.array([0, self.text.length])
            offsets = whole if self.objective.concatenates else self.documents.offsets
            return split_greedily(offsets, self.max_length)
        if self.objective.pairs == "next-single-sentence":
            segments = pair_sentences(self.documents.offsets, self.sentences)
        else:
            segments = split_evenly(self.documents.offsets, self.max_length)
        if self.objective.pairs in NEXT_SENTENCE and len(np.unique(segments.documents)) == 1:
            return Segments(*(values[:0] for values in segments))
        return segments


class WindowRows(NamedTuple):
    """Hold the rows of a batch that are read from one window."""

    position: WindowPosition
    rows: np.ndarray  # indices among the rows of the window, int64 [rows]
    batch_rows: np.ndarray  # indices among the rows that were asked for, int64 [rows]


CountRows = Callable[[WindowPosition], int]  # returns how many rows a window has


@dataclass(frozen=True)
class SegmentReader(PickledWithoutCache):
    """Find the window that each row of a batch is read from, and split it into segments."""

    sampler: CorpusSampler
    objective: Objective
    lengths: Lengths
    batch_size: int  # over all hosts; a multiple of the sampler's streams [rows]
    collocations: Collocations | None = None  # for noise with ``needs_collocations``

    def __post_init__(self) -> None:
        check_batch_size(self.batch_size)
        if self.batch_size % self.sampler.num_streams:
            raise SettingError(
                f"batch_size={self.batch_size} should be a multiple of the sampler's "
                f"{self.sampler.num_streams} streams (num_streams, or data.streams), each of which supplies "
                "an equal part of every batch"
            )

    @property
    def seed(self) -> int:
        return self.sampler.seed or 0

    @property
    def tokenizer(self) -> Tokenizer:
        return self.sampler.corpus.tokenizer

    def find_rows(
        self, row_numbers: np.ndarray, count_rows: CountRows, row_index_key: str
    ) -> list[WindowRows]:
        """Return the windows of the rows with these numbers, int64 [B], counted from the first batch on.

        ``count_rows`` returns the number of rows of a window. It depends on how segments are packed, which
        ``row_index_key`` names: each key has its own index of row counts.
        """
        rows_per_stream = self.batch_size // self.sampler.num_streams
        steps, global_batch_rows = np.divmod(row_numbers, self.batch_size)
        streams = global_batch_rows // rows_per_stream
        stream_rows = steps * rows_per_stream + row_numbers % rows_per_stream
        return self.find_stream_rows(streams, stream_rows, count_rows, row_index_key)

    def find_stream_rows(
        self, streams: np.ndarray, stream_rows: np.ndarray, count_rows: CountRows, row_index_key: str
    ) -> list[WindowRows]:
        """Return the windows of rows, given the stream and the number in it of each row, both int64 [B]."""
        pairs = zip(streams.tolist(), stream_rows.tolist(), strict=True)
        rows: dict[WindowPosition, list[int]] = {}
        batch_rows: dict[WindowPosition, list[int]] = {}
        for batch_row, (stream, stream_row) in enumerate(pairs):
            position, row = self.row_index(stream, count_rows, row_index_key).find(stream_row)
            rows.setdefault(position, []).append(row)
            batch_rows.setdefault(position, []).append(batch_row)
        return [
            WindowRows(position, np.array(numbers), np.array(batch_rows[position]))
            for position, numbers in rows.items()
        ]

    def row_index(self, stream: int, count_rows: CountRows, row_index_key: str) -> RowIndex:
        """Return the index of a stream's rows; there is one for each stream and ``row_index_key``."""
        if (stream, row_index_key) not in self._row_indices:
            index_file = self.index_file(stream, row_index_key)
            self._row_indices[stream, row_index_key] = RowIndex(self.sampler, stream, count_rows, index_file)
        return self._row_indices[stream, row_index_key]

    def index_file(self, stream: int, row_index_key: str) -> Path | None:
        """Return the file that stores a stream's row counts; None if the sampler has no index folder."""
        if self.sampler.index_folder is None:
            return None
        key = f"{self.sampler.fingerprint} {self.objective} {self.lengths} {row_index_key}"
        folder = hashlib.sha256(key.encode()).hexdigest()[:16]
        return self.sampler.index_folder / folder / f"{stream}.txt"

    def streams_of_rows(self, rows: Sequence[slice]) -> list[int]:
        """Return the streams from which these ``rows`` of every batch are read, ascending."""
        numbers = np.concatenate([np.arange(self.batch_size)[part] for part in rows])
        return np.unique(numbers * self.sampler.num_streams // self.batch_size).tolist()

    @functools.cached_property
    def _row_indices(self) -> dict[tuple[int, str], RowIndex]:
        return {}

    @functools.cached_property
    def read_window(self) -> Callable[[WindowPosition], SegmentedWindow]:
        """Return the function that reads a window and splits it into segments, with a cache."""
        maxsize = CACHED_WINDOWS * self.sampler.num_streams
        return functools.lru_cache(maxsize)(self._read_window_uncached)

    def _read_window_uncached(self, position: WindowPosition) -> SegmentedWindow:
        documents = self.sampler.read(position)
        return SegmentedWindow(documents, self.objective, self.tokenizer, self.lengths.raw)

    def count_segments(self, position: WindowPosition) -> int:
        return len(self.read_window(position).segments.starts)

    def count_epoch_rows(self, limit: int, count_rows: CountRows, row_index_key: str) -> int:
        """Return the number of rows in the first epoch of a single-stream corpus, at most ``limit``."""
        return self.row_index(0, count_rows, row_index_key).count_epoch_rows(limit)

    @functools.cached_property
    def shuffle_segments(self) -> Callable[[WindowPosition], np.ndarray]:
        """Return the function that returns the shuffled indices of a window's segments, with a cache."""
        maxsize = CACHED_WINDOWS * self.sampler.num_streams
        return functools.lru_cache(maxsize)(self._shuffle_uncached)

    def _shuffle_uncached(self, position: WindowPosition) -> np.ndarray:
        return order_generator(self.seed, position.order_key).permutation(self.count_segments(position))

    def length_uniforms(self, position: WindowPosition) -> np.ndarray:
        """Return the first random number of each shuffled segment of a window, float32 [segments].

        It decides how long the corrupted segment is, so it is drawn before segments are packed into rows.
        """
        random = order_generator(
            position.examples_seed(self.seed),
            position.first_example_key >> EXAMPLE_BITS | LENGTH_UNIFORMS_BIT,
        )
        return random.random(self.count_segments(position), dtype=np.float32)

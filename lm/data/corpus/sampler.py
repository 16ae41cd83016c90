"""Find the window of a corpus from which each row of a batch is read.

A window is the part of a shard that is read, shuffled and cached as one (``lm.data.corpus.shards``). The rows
of a global batch are divided among a fixed number of streams, an equal number of consecutive rows to each. A
stream has its own shards, which it reads window by window, in a new order every epoch. The segments of a
window are shuffled by ``lm.data.segments``.

So a host reads only the shards of its own rows, and a row is a function of its number. To find a row's
window, only the row counts of the windows before it in its stream are needed. They are kept in an index file.
"""

import functools
import zlib
from bisect import bisect_right
from collections.abc import Callable, Iterator
from contextlib import suppress
from dataclasses import dataclass
from itertools import count, takewhile
from math import gcd
from pathlib import Path
from typing import NamedTuple

import numpy as np

from lm.config.base import SettingError
from lm.data.corpus.shards import MIN_WINDOW_BYTES
from lm.data.corpus.token_cache import EncodedCorpus, EncodedDocuments, concatenate

# Keys of the random permutations, to which numbers are added: ASSIGNMENT_KEY assigns all shards to streams,
# ORDER_KEY + stream + (epoch << 12) orders the shards of a stream in an epoch.
ASSIGNMENT_KEY, ORDER_KEY = 2**62, 2**61
DEFAULT_STREAMS = 16  # if the batch size is divisible by it
# An example is a segment with its corruption; a row of a batch holds one or several.
# Bit fields of an example's random key: 7 bits for the epoch, 20 for the window in the epoch, 12 for the
# stream, 24 for the example in the window. Keys of different examples are then distinct.
MAX_STREAMS = 1 << 12
EPOCHS_PER_SEED = 1 << 7
INDEX_TAIL_BYTES = 1 << 12  # read at the end of an index file to find its newest entry


class WindowPosition(NamedTuple):
    """Locate a window in the reading order of a stream, and in the corpus. Index files hold these fields."""

    stream: int
    epoch: int
    index_in_epoch: int  # among the windows of the stream
    shard: int
    window: int  # index in the shard
    tokens_before: int  # tokens in the earlier windows of this stream and epoch

    @property
    def order_key(self) -> int:
        """Return the random key by which this window's segments are shuffled in this epoch."""
        return ((self.epoch << 20) | self.index_in_epoch) << 12 | self.stream

    @property
    def first_example_key(self) -> int:
        """Return the random key of this window's first example, below 2^63; the next examples count up.

        Keys of different windows are at least 2^24 apart. After every EPOCHS_PER_SEED epochs the keys repeat,
        and ``examples_seed`` changes.
        """
        return (((self.epoch % EPOCHS_PER_SEED) << 20 | self.index_in_epoch) << 12 | self.stream) << 24

    def examples_seed(self, seed: int) -> int:
        """Return the seed of this window's examples, from the seed of the run.

        The low 32 bits are ``seed``; those above are epoch // EPOCHS_PER_SEED, since keys repeat then.
        """
        return (self.epoch // EPOCHS_PER_SEED) << 32 | seed


def choose_num_streams(requested: int, batch_size: int, corpus_bytes: int) -> int:
    """Return the number of streams that read a corpus.

    It is ``requested`` unless that is 0; SettingError if ``requested`` does not divide the batch size or is
    above MAX_STREAMS. By default it is the greatest common divisor of the batch size and DEFAULT_STREAMS, or
    a smaller divisor if the corpus is small.
    """
    if requested:
        if batch_size % requested or requested > MAX_STREAMS:
            raise SettingError(
                f"data.streams={requested} should divide the {batch_size} sequences of a batch, and be at "
                f"most {MAX_STREAMS:,}"
            )
        return requested
    return largest_divisor(gcd(batch_size, DEFAULT_STREAMS), corpus_bytes // MIN_WINDOW_BYTES)


def largest_divisor(number: int, limit: int) -> int:
    """Return the largest divisor of ``number`` up to ``limit``, or 1."""
    return max(n for n in range(1, number + 1) if not number % n and (n <= limit or n == 1))


@dataclass(frozen=True)
class CorpusSampler:
    """Determine the order in which the windows of a corpus are read, by stream and epoch."""

    corpus: EncodedCorpus
    num_streams: int
    seed: int | None = None  # None: read the shards in their own order
    tokens_per_epoch: int | None = None  # over all streams, the same in each epoch; None: the whole corpus
    index_folder: Path | None = None  # of the files that say how many rows each window has

    @property
    def fingerprint(self) -> str:
        """Return what tells the order of windows, and the text in them, from those of other samplers."""
        # Windows with skipped records have fewer rows; and files that were restored may keep their digests.
        on_corrupt = " skip" if self.corpus.on_corrupt == "skip" else ""
        order = f"{self.num_streams} {self.seed} {self.tokens_per_epoch}"
        return f"{self.corpus.fingerprint} {order}{on_corrupt}"

    def shard_order(self, stream: int, epoch: int) -> list[int]:
        """Return the shards of a stream in the order of an epoch.

        All epochs have the same order if ``tokens_per_epoch`` is set, so that they read the same tokens.
        """
        shards = np.arange(len(self.corpus.shards))
        if self.seed is None:
            return shards[stream :: self.num_streams].tolist()
        shards = _random(self.seed, ASSIGNMENT_KEY).permutation(shards)[stream :: self.num_streams]
        key = ORDER_KEY + stream
        if not self.tokens_per_epoch:
            key += epoch << 12
        return _random(self.seed, key).permutation(shards).tolist()

    def windows(self, stream: int, after: WindowPosition | None = None) -> Iterator[WindowPosition]:
        """Yield the nonempty windows of a stream without end, epoch by epoch.

        They begin at the start of the stream or behind the window ``after``. Windows that are not in the
        token cache are encoded. SettingError if the stream has no tokens.
        """
        for epoch in count(after.epoch if after else 0):
            is_empty = True
            for position in self._windows_of_epoch(stream, epoch, after):
                is_empty = False
                yield position
            if is_empty and not after:
                raise SettingError(
                    f"data.corpus has no text to train on in stream {stream} of {self.num_streams}: name a "
                    "corpus with a document at least, or set data.streams lower"
                )
            after = None

    def _windows_of_epoch(
        self, stream: int, epoch: int, after: WindowPosition | None
    ) -> Iterator[WindowPosition]:
        """Yield the nonempty windows of one epoch of a stream, from behind ``after`` on."""
        shards = self.shard_order(stream, epoch)
        index, tokens_before, first_window = 0, 0, 0
        if after:
            shards = shards[shards.index(after.shard) :]
            index, first_window = after.index_in_epoch + 1, after.window + 1
            tokens_before = after.tokens_before + len(self.read(after).tokens)
        for shard in shards:
            for window in count(first_window):
                if self.tokens_per_epoch and tokens_before >= self.tokens_per_epoch // self.num_streams:
                    return
                documents = _read_cached(self.corpus, shard, window)
                if documents is None:
                    break
                if num_tokens := len(documents.tokens):
                    yield WindowPosition(stream, epoch, index, shard, window, tokens_before)
                    index += 1
                    tokens_before += num_tokens
            first_window = 0

    def read(self, position: WindowPosition) -> EncodedDocuments:
        """Return the documents of a window, cut where the stream has read its share of the epoch.

        The share is ``tokens_per_epoch // num_streams`` tokens.
        """
        documents = _read_cached(self.corpus, position.shard, position.window)
        assert documents is not None, position
        if not self.tokens_per_epoch:
            return documents
        return documents.truncate(self.tokens_per_epoch // self.num_streams - position.tokens_before)

    def read_epoch(self) -> EncodedDocuments:
        """Return all tokens of the first epoch of all streams, in memory."""
        windows = []
        for stream in range(self.num_streams):
            first_epoch = takewhile(lambda position: position.epoch == 0, self.windows(stream))
            windows += [self.read(position) for position in first_epoch]
        return concatenate(windows)


@functools.lru_cache(maxsize=2)  # iterating over windows reads each one before ``CorpusSampler.read`` does
def _read_cached(corpus: EncodedCorpus, shard: int, window: int) -> EncodedDocuments | None:
    return corpus.read(shard, window)


def _random(seed: int, key: int) -> np.random.Generator:
    return np.random.Generator(np.random.Philox(key=np.array([seed, key], np.uint64)))


# ---- which window has which rows


class IndexEntry(NamedTuple):
    """Hold the number of a window's first row among the rows of its stream, counted over all epochs."""

    first_row: int
    position: WindowPosition


class RowIndex:
    """Find the window of any row of a stream, by counting the rows of its windows in reading order.

    Windows are counted lazily, up to the row that is asked for. The counts are appended to a file, so that
    other processes and resumed runs need not read the earlier windows again.
    """

    def __init__(
        self,
        sampler: CorpusSampler,
        stream: int,
        count_rows: Callable[[WindowPosition], int],
        index_file: Path | None,
    ):
        self._sampler, self._stream, self._count_rows = sampler, stream, count_rows
        self._index_file = index_file
        self._restart(None)

    def _restart(self, entry: IndexEntry | None) -> None:
        """Restart counting at the window of ``entry``, or at the start of the stream."""
        self._entries = [] if entry is None else [entry]  # consecutive windows that have rows
        self._end = 0 if entry is None else entry.first_row + self._count_rows(entry.position)
        self._windows = self._sampler.windows(self._stream, None if entry is None else entry.position)

    def find(self, row: int) -> tuple[WindowPosition, int]:
        """Return the window that holds a row, and the row's index among the rows of that window.

        ``row`` is its number in the stream, counted over all epochs.
        """
        if not self._covers(row):
            self._jump(row)
        while row >= self._end:
            self._count_next_window()
        entry = self._entries[bisect_right(self._entries, row, key=lambda entry: entry.first_row) - 1]
        return entry.position, row - entry.first_row

    def count_epoch_rows(self, limit: int) -> int:
        """Return the number of rows in the first epoch of the stream, at most ``limit``."""
        if self._entries and self._entries[0].position.epoch > 0:  # ``find`` began to count in a later epoch
            self._restart(None)
        while self._end < limit and (not self._entries or self._entries[-1].position.epoch == 0):
            self._count_next_window()
        later = [entry.first_row for entry in self._entries if entry.position.epoch > 0]
        return min([limit, self._end, *later])

    def _covers(self, row: int) -> bool:
        return bool(self._entries) and self._entries[0].first_row <= row < self._end

    def _jump(self, row: int) -> None:
        """Restart counting at the last window of the index file that begins at or before ``row``.

        Do nothing if counting has already reached that window.
        """
        entries = [entry for entry in read_index(self._index_file) if entry.first_row <= row]
        nearest = max(entries, default=None)
        first_row = 0 if nearest is None else nearest.first_row
        is_counted = bool(self._entries) and self._entries[0].first_row <= first_row <= self._end
        if not is_counted:
            self._restart(nearest)

    def _count_next_window(self) -> None:
        position = next(self._windows)
        if position.epoch > 0 and self._end == 0:
            raise SettingError(
                f"data.corpus has no row in stream {self._stream}: it needs two documents of two tokens each "
                "for objective.pairs, else one token"
            )
        if num_rows := self._count_rows(position):
            entry = IndexEntry(self._end, position)
            self._entries.append(entry)
            # Row 0 needs no entry: without one, counting begins there.
            if self._index_file is not None and entry.first_row:
                append_to_index(self._index_file, entry)
            self._end += num_rows


def append_to_index(path: Path, entry: IndexEntry) -> None:
    """Append a line to an index file: the numbers of ``entry`` and their checksum."""
    numbers = " ".join(map(str, (entry.first_row, *entry.position)))
    path.parent.mkdir(parents=True, exist_ok=True)
    with path.open("a") as file:
        file.write(f"{numbers} {zlib.crc32(numbers.encode())}\n")


def read_index(path: Path | None, tail_bytes: int | None = None) -> Iterator[IndexEntry]:
    """Yield the undamaged entries of an index file, or of its last ``tail_bytes``."""
    if path is None or not path.exists():
        return
    with path.open("rb") as file:
        if tail_bytes is not None:
            file.seek(max(path.stat().st_size - tail_bytes, 0))
        lines = file.read().splitlines()
    for line in lines:
        numbers, _, checksum = line.rpartition(b" ")
        with suppress(ValueError, TypeError):
            if zlib.crc32(numbers) == int(checksum):
                first_row, *position = map(int, numbers.split())
                yield IndexEntry(first_row, WindowPosition(*position))


def last_entry(path: Path | None) -> IndexEntry | None:
    """Return the newest entry of an index file, or None if it has none."""
    entries = [*read_index(path, INDEX_TAIL_BYTES)]
    return entries[-1] if entries else None

"""Find the window of a corpus from which each row of a batch is read.

The rows of a global batch are divided among a fixed number of streams, an equal run of consecutive rows to
each. A stream has its own shards, which it reads window by window, in a new order every epoch; the code that
makes rows of a window shuffles it. So a host reads only the shards of its own rows, and a row is a function
of its number: of the windows before it only their numbers of rows are needed, and these are noted in a file.
"""

import functools
import zlib
from bisect import bisect_right
from collections.abc import Callable, Iterator
from contextlib import suppress
from dataclasses import dataclass
from itertools import chain, count, takewhile
from math import gcd
from pathlib import Path
from typing import NamedTuple

import numpy as np

from lm.config.base import SettingError
from lm.data.corpus.shards import SMALLEST_WINDOW
from lm.data.corpus.token_cache import EncodedCorpus, Tokens, join

SHARDS, ORDERS = 2**62, 2**61  # first random keys: to deal shards to streams, to order them
USUAL = 16  # streams by default, if the batch size is divisible by it [streams]
# so that random keys are distinct; likewise an epoch of a stream has up to 2^20 windows of 2^24 examples
MOST_STREAMS = 1 << 12
KEYED_EPOCHS = 1 << 7  # epochs whose random keys fit in an int64
LAST_NOTES = 1 << 12  # read at the end of a file of notes to find the newest [bytes]
LEAST_ROWS = 64  # per stream and epoch; a smaller corpus gets fewer streams [rows]


class WindowPlace(NamedTuple):
    """Locate a window in a stream, and in the corpus."""

    stream: int
    epoch: int
    number: int  # among the windows of the stream in this epoch
    shard: int
    window: int  # of the shard
    before: int  # tokens of the stream in this epoch before the window

    @property
    def order_key(self) -> int:
        """Return the random key that orders this window's segments in this epoch."""
        return ((self.epoch << 20) | self.number) << 12 | self.stream

    @property
    def key(self) -> int:
        """Return the first random key of this window's examples, below 2^63.

        Keys of different windows are at least 2^24 apart. After KEYED_EPOCHS the keys repeat, under another
        seed (``seed``).
        """
        return (((self.epoch % KEYED_EPOCHS) << 20 | self.number) << 12 | self.stream) << 24

    def seed(self, seed: int) -> int:
        """Return ``seed`` (32 bits) with the part of the epoch that ``key`` omits in the bits above."""
        return (self.epoch // KEYED_EPOCHS) << 32 | seed


def stream_count(wanted: int, batch_size: int, size: int) -> int:
    """Return how many streams read a corpus of ``size`` bytes.

    That is ``wanted``, or SettingError if it does not divide the batch or is too large. With 0 it is
    the greatest common divisor of the batch size and 16, reduced to a smaller divisor for a small corpus.
    """
    if wanted:
        if batch_size % wanted or wanted > MOST_STREAMS:
            raise SettingError(
                f"data.streams={wanted} should divide the {batch_size} sequences of a batch, and be at most "
                f"{MOST_STREAMS:,}"
            )
        return wanted
    return largest_divisor(gcd(batch_size, USUAL), size // SMALLEST_WINDOW)


def largest_divisor(number: int, most: int) -> int:
    """Return the largest divisor of ``number`` that is at most ``most``, but at least 1."""
    return max(n for n in range(1, number + 1) if not number % n and (n <= most or n == 1))


@dataclass(frozen=True)
class Streams:
    """Determine the order in which the windows of a corpus are read, by stream and epoch."""

    corpus: EncodedCorpus
    count: int
    seed: int | None = None  # None: read the corpus in its own order
    unique: int | None = None  # per epoch, over all streams; None: the whole corpus [tokens]
    notes: Path | None = None  # folder of notes of how many rows each window has

    @property
    def fingerprint(self) -> str:
        return f"{self.corpus.fingerprint} {self.count} {self.seed} {self.unique}"

    def shards(self, stream: int, epoch: int) -> list[int]:
        """Return the shards of a stream in the order of an epoch; with ``unique`` epochs do not differ."""
        own = np.arange(len(self.corpus.shards))
        if self.seed is None:
            return own[stream :: self.count].tolist()
        own = _random(self.seed, SHARDS).permutation(own)[stream :: self.count]
        order = ORDERS + (0 if self.unique else epoch << 12) + stream
        return _random(self.seed, order).permutation(own).tolist()

    def places(self, stream: int, last: WindowPlace | None = None) -> Iterator[WindowPlace]:
        """Yield the nonempty windows of a stream, epoch after epoch, from its start or after ``last``.

        Windows that are not in the token cache are encoded. SettingError if the stream has no tokens.
        """
        for epoch in count(last.epoch if last else 0):
            found = False
            for place in self._epoch(stream, epoch, last):
                found = True
                yield place
            if not found and not last:
                raise SettingError(
                    f"data.corpus has no text to train on in stream {stream} of {self.count}: name a corpus "
                    "with a document at least, or set data.streams lower"
                )
            last = None

    def _epoch(self, stream: int, epoch: int, last: WindowPlace | None) -> Iterator[WindowPlace]:
        shards, number, before, first = self.shards(stream, epoch), 0, 0, 0
        if last:
            shards = shards[shards.index(last.shard) :]
            number, first = last.number + 1, last.window + 1
            before = last.before + len(self.tokens(last).tokens)
        for shard in shards:
            for window in count(first):
                if self.unique and before >= self.unique // self.count:
                    return
                if (tokens := self._read(shard, window)) is None:
                    break
                if size := len(tokens.tokens):
                    yield WindowPlace(stream, epoch, number, shard, window, before)
                    number, before = number + 1, before + size
            first = 0

    def tokens(self, place: WindowPlace) -> Tokens:
        """Return the tokens of a window, cut where the ``unique`` tokens of the epoch end."""
        tokens = self._read(place.shard, place.window)
        assert tokens is not None, place
        return tokens.cut(self.unique // self.count - place.before) if self.unique else tokens

    def epoch(self) -> Tokens:
        """Return all tokens of the first epoch of all streams, in memory."""
        first = (takewhile(lambda place: not place.epoch, self.places(s)) for s in range(self.count))
        return join([self.tokens(place) for place in chain.from_iterable(first)])

    def _read(self, shard: int, window: int) -> Tokens | None:
        return _read_once(self.corpus, shard, window)


@functools.lru_cache(maxsize=2)  # a window is located, and then read
def _read_once(corpus: EncodedCorpus, shard: int, window: int) -> Tokens | None:
    return corpus.read(shard, window)


def _random(seed: int, key: int) -> np.random.Generator:
    return np.random.Generator(np.random.Philox(key=np.array([seed, key], np.uint64)))


class Walk:
    """Count the rows of the windows of one stream, in reading order, to find the window of any row.

    Windows are counted lazily, as far as rows are asked for. The counts are noted in a file, so that another
    process, or a resumed run, need not read the windows before again.
    """

    def __init__(self, streams: Streams, stream: int, size: Callable[[WindowPlace], int], notes: Path | None):
        self._streams, self._stream, self._size, self._notes = streams, stream, size, notes
        self._begin(0, None)

    def _begin(self, rows: int, place: WindowPlace | None) -> None:
        """Restart counting at ``place``, which has ``rows`` rows before it, or at the start of the stream."""
        self._places, self._starts = ([place], [rows]) if place else ([], [])
        self._end = rows + (self._size(place) if place else 0)
        self._next = self._streams.places(self._stream, place)

    def find(self, row: int) -> tuple[WindowPlace, int]:
        """Return the window of row ``row`` of the stream, counted over all epochs, and its index in it."""
        if not self._starts or not self._starts[0] <= row < self._end:
            self._jump(row)
        while row >= self._end:
            self._count_next()
        index = bisect_right(self._starts, row) - 1
        return self._places[index], row - self._starts[index]

    def rows_of_epoch(self, most: int) -> int:
        """Return the number of rows in the first epoch of the stream, but at most ``most``."""
        while self._end < most and (not self._places or not self._places[-1].epoch):
            self._count_next()
        later = [start for start, place in zip(self._starts, self._places, strict=True) if place.epoch]
        return min([most, self._end, *later])

    def _jump(self, row: int) -> None:
        """Restart counting at the last noted window before ``row``, unless what is counted includes it."""
        known = max((note for note in self._noted() if note[0] <= row), default=(0, None))
        if not self._starts or not self._starts[0] <= known[0] <= self._end:
            self._begin(*known)

    def _count_next(self) -> None:
        place = next(self._next)
        if place.epoch and not self._end:
            raise SettingError(
                f"data.corpus has no row in stream {self._stream}: it needs two documents of two tokens each "
                "for objective.pairs, else one token"
            )
        if rows := self._size(place):
            self._places.append(place)
            self._starts.append(self._end)
            self._note(self._end, place)
            self._end += rows

    def _noted(self) -> list[tuple[int, WindowPlace]]:
        return [*read_notes(self._notes)]

    def _note(self, rows: int, place: WindowPlace) -> None:
        if self._notes is not None and rows:
            numbers = " ".join(map(str, (rows, *place)))
            self._notes.parent.mkdir(parents=True, exist_ok=True)
            with self._notes.open("a") as file:
                file.write(f"{numbers} {zlib.crc32(numbers.encode())}\n")


def read_notes(path: Path | None, end: int | None = None) -> Iterator[tuple[int, WindowPlace]]:
    """Yield (rows before the window, window) from a file of notes or its last ``end`` bytes, if undamaged."""
    if path is None or not path.exists():
        return
    with path.open("rb") as file:
        file.seek(max(path.stat().st_size - end, 0) if end else 0)
        lines = file.read().splitlines()
    for line in lines:
        numbers, _, checksum = line.rpartition(b" ")
        with suppress(ValueError, TypeError):
            if zlib.crc32(numbers) == int(checksum):
                rows, *place = map(int, numbers.split())
                yield rows, WindowPlace(*place)


def last_note(path: Path | None) -> tuple[int, WindowPlace] | None:
    """Return the newest entry of a file of notes, or None if it has none."""
    return next(iter([*read_notes(path, LAST_NOTES)][::-1]), None)

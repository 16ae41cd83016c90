"""Which window of a corpus each row of a batch is read from.

The rows of a global batch are dealt to a fixed number of streams, as many in a row to each. A stream has
shards of its own, which it reads window by window, in another order every epoch; what is within a window is
shuffled by those who make rows of it. So a host reads the shards of its own rows alone, and a row is a
function of its number: of the windows before it only how many rows they have is needed, and that is noted.
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

SHARDS, ORDERS = 2**62, 2**61  # first keys of random numbers: those that deal shards, and that order them
USUAL = 16  # streams of a batch that divides by them
MOST_STREAMS = 1 << 12  # streams; and of an epoch of one, no more than 2^20 windows of 2^24 examples
KEYED_EPOCHS = 1 << 7  # epochs whose keys of random numbers fit in an int64
LAST_NOTES = 1 << 12  # of a file of notes, among which the newest is found [bytes]
LEAST_ROWS = 64  # rows of a stream in an epoch; a corpus of fewer has fewer streams [rows]


class WindowPlace(NamedTuple):
    """A window of a stream."""

    stream: int
    epoch: int
    number: int  # among the windows of the stream in this epoch
    shard: int
    window: int  # of the shard
    before: int  # tokens of the stream in this epoch in front of it

    @property
    def order_key(self) -> int:
        """The key that orders this window's segments in this epoch."""
        return ((self.epoch << 20) | self.number) << 12 | self.stream

    @property
    def key(self) -> int:
        """The first key of this window's examples, below 2^63: every other window's is 2^24 away or more.

        After KEYED_EPOCHS the keys begin again, under another seed (``seed``).
        """
        return (((self.epoch % KEYED_EPOCHS) << 20 | self.number) << 12 | self.stream) << 24

    def seed(self, seed: int) -> int:
        """``seed`` (32 bits) with the epochs that ``key`` leaves out above them."""
        return (self.epoch // KEYED_EPOCHS) << 32 | seed


def stream_count(wanted: int, batch_size: int, size: int) -> int:
    """How many streams read a corpus of ``size`` bytes: ``wanted``; with 0 as many as divide a batch, 16 at
    most, and fewer of a small corpus.
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
    """Of a number, that is at most ``most``; 1 if none is."""
    return max(n for n in range(1, number + 1) if not number % n and (n <= most or n == 1))


@dataclass(frozen=True)
class Streams:
    """The order in which the windows of a corpus are read."""

    corpus: EncodedCorpus
    count: int
    seed: int | None = None  # None: the corpus in its own order
    unique: int | None = None  # tokens of an epoch, of all streams; None: all there are [tokens]
    notes: Path | None = None  # folder of how many rows windows have that were read before

    @property
    def fingerprint(self) -> str:
        return f"{self.corpus.fingerprint} {self.count} {self.seed} {self.unique}"

    def shards(self, stream: int, epoch: int) -> list[int]:
        """The shards of a stream in the order of an epoch; with ``unique`` tokens it is always the same."""
        own = np.arange(len(self.corpus.shards))
        if self.seed is None:
            return own[stream :: self.count].tolist()
        own = _random(self.seed, SHARDS).permutation(own)[stream :: self.count]
        order = ORDERS + (0 if self.unique else epoch << 12) + stream
        return _random(self.seed, order).permutation(own).tolist()

    def places(self, stream: int, last: WindowPlace | None = None) -> Iterator[WindowPlace]:
        """The windows of a stream that hold tokens, without end, from its begin or behind the ``last`` one.

        They are encoded on the way. SettingError if the stream has no token.
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
        """Of a window, as far as the epoch goes."""
        tokens = self._read(place.shard, place.window)
        assert tokens is not None, place
        return tokens.cut(self.unique // self.count - place.before) if self.unique else tokens

    def epoch(self) -> Tokens:
        """All that is read once, in memory."""
        first = (takewhile(lambda place: not place.epoch, self.places(s)) for s in range(self.count))
        return join([self.tokens(place) for place in chain.from_iterable(first)])

    def _read(self, shard: int, window: int) -> Tokens | None:
        return _read_once(self.corpus, shard, window)


@functools.lru_cache(maxsize=2)  # a window is looked for, and then read
def _read_once(corpus: EncodedCorpus, shard: int, window: int) -> Tokens | None:
    return corpus.read(shard, window)


def _random(seed: int, key: int) -> np.random.Generator:
    return np.random.Generator(np.random.Philox(key=np.array([seed, key], np.uint64)))


class Walk:
    """How many rows the windows of one stream have, in the order in which they are read.

    Windows are counted as far as rows are asked for. What was counted is noted in a file, so that another
    process, or a run that goes on, need not read again what lies before.
    """

    def __init__(self, streams: Streams, stream: int, size: Callable[[WindowPlace], int], notes: Path | None):
        self._streams, self._stream, self._size, self._notes = streams, stream, size, notes
        self._begin(0, None)

    def _begin(self, rows: int, place: WindowPlace | None) -> None:
        """From the begin, or at a place with so many rows before it."""
        self._places, self._starts = ([place], [rows]) if place else ([], [])
        self._end = rows + (self._size(place) if place else 0)
        self._next = self._streams.places(self._stream, place)

    def find(self, row: int) -> tuple[WindowPlace, int]:
        """The window of a row of the stream, counted through all epochs, and which row of it that is."""
        if not self._starts or not self._starts[0] <= row < self._end:
            self._jump(row)
        while row >= self._end:
            self._count_next()
        index = bisect_right(self._starts, row) - 1
        return self._places[index], row - self._starts[index]

    def rows_of_epoch(self, most: int) -> int:
        """Of the first epoch, if there are no more than ``most``, else ``most``."""
        while self._end < most and (not self._places or not self._places[-1].epoch):
            self._count_next()
        later = [start for start, place in zip(self._starts, self._places, strict=True) if place.epoch]
        return min([most, self._end, *later])

    def _jump(self, row: int) -> None:
        """To the noted window that is nearest in front of a row, unless that is known."""
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
    """(rows before it, window) of a file of notes, or of its last ``end`` bytes, without damaged lines."""
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
    """The newest of a file of notes."""
    return next(iter([*read_notes(path, LAST_NOTES)][::-1]), None)

"""Read a corpus as shards: files that any process reads in order, in windows of up to some megabytes.

Listing the shards of a corpus reads almost nothing of them. A window is the unit that is read, shuffled,
encoded and cached; its contents depend only on its shard, its number and the size of windows. A stream is one
of the parallel readers of a corpus (``lm.data.corpus.sampler``): it reads its own shards, window by window.
"""

import functools
import hashlib
import heapq
import itertools
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from dataclasses import dataclass, replace
from pathlib import Path
from typing import NamedTuple, Protocol

import numpy as np

from lm.config.base import DataError, SettingError
from lm.data.corpus.tfds import (
    OnCorrupt,
    Row,
    TfdsRows,
    file_instructions,
    file_stamp,
    find_prepared,
    open_builder,
    prepared_corpus_rows,
)

# Bounds of the size of a window, counted in stored bytes, but of JSON lines and parquet in decompressed ones.
# The minimum holds even if a stream then has fewer windows than MIN_WINDOWS_PER_STREAM.
MAX_WINDOW_BYTES, MIN_WINDOW_BYTES = 1 << 23, 1 << 16
MIN_WINDOWS_PER_STREAM = 4  # of a small corpus
# If the smallest stream would have less than 1 / MAX_IMBALANCE of the mean text of a stream, all windows of
# the corpus are read once and assigned one by one (dealt), so that all streams get about as much; but not if
# the corpus has more than MAX_DEALT_BYTES, or more than MAX_DEALT_SHARDS shards after ``split_shards``.
MAX_IMBALANCE, MAX_DEALT_BYTES, MAX_DEALT_SHARDS = 4, 1 << 30, 1_000
MIN_DEALT_WINDOW_BYTES = 1 << 12
DIGEST_THREADS = 32  # files whose ends are read in parallel
SAMPLE_STREAMS = 16  # ``sample_documents`` reads windows of the size that so many streams would read
HELD_OUT_SHARE = 0.05  # of the documents, where no validation split is named
# bytes of the start, and of the end, of files that are read for fingerprints: of all files together, but of
# each at least the minimum
DIGEST_BYTES, MIN_DIGEST_BYTES = 1 << 26, 1 << 16


class WindowText(NamedTuple):
    """Hold the documents of a window of a shard."""

    documents: list[str]
    num_corrupt: int  # records that were skipped


class Shard(Protocol):
    """The interface of a shard, a part of a corpus that is read window by window."""

    @property
    def name(self) -> str:
        """Return the name for messages: the file and, if the shard is only a part of it, which part."""

    @property
    def size(self) -> int:
        """Return the size of what is read, as it is stored, such as compressed [bytes].

        A shard in memory returns its number of characters.
        """

    @property
    def fingerprint(self) -> str:
        """Return a fingerprint of the size and both ends; ``on_corrupt`` is not part of it."""

    def read(self, window: int, window_bytes: int) -> WindowText | None:
        """Return the window with this index, of about ``window_bytes``, or None after the last window.

        DataError, with the name of the file, if something is missing or cannot be read.
        """


@dataclass(frozen=True)
class StridedShard:
    """Read every ``stride``-th window of another shard, from window ``start`` on, as a shard."""

    shard: Shard
    start: int
    stride: int

    @property
    def name(self) -> str:
        return f"{self.shard.name}, windows {self.start}, {self.start + self.stride}, ..."

    @property
    def size(self) -> int:
        return self.shard.size // self.stride

    @property
    def fingerprint(self) -> str:
        return f"{self.shard.fingerprint} {self.start} {self.stride}"

    def read(self, window: int, window_bytes: int) -> WindowText | None:
        return self.shard.read(self.start + window * self.stride, window_bytes)


@dataclass(frozen=True)
class WindowsShard:
    """Read chosen windows of other shards as a shard. Its windows have a size of their own."""

    windows: tuple[tuple[Shard, int], ...]  # shard and index of the window in it
    window_bytes: int  # of these windows, whatever ``read`` is asked for
    size: int  # characters of their text

    @property
    def name(self) -> str:
        names = dict.fromkeys(shard.name for shard, _ in self.windows)
        return f"{len(self.windows)} windows of {', '.join(names)}"

    @property
    def fingerprint(self) -> str:
        shards = {id(shard): shard for shard, _ in self.windows}  # each once, since its files are read
        fingerprints = {key: shard.fingerprint for key, shard in shards.items()}
        windows = [f"{fingerprints[id(shard)]} {index}" for shard, index in self.windows]
        return f"{'; '.join(windows)} in windows of {self.window_bytes}"

    def read(self, window: int, window_bytes: int) -> WindowText | None:
        del window_bytes
        if window >= len(self.windows):
            return None
        shard, index = self.windows[window]
        return shard.read(index, self.window_bytes)


@dataclass(frozen=True)
class InMemoryShard:
    """Serve documents in memory as a shard."""

    documents: tuple[str, ...]
    name: str = "texts"

    @property
    def size(self) -> int:
        return sum(map(len, self.documents))

    @functools.cached_property
    def fingerprint(self) -> str:
        digest = hashlib.sha256()
        for text in self.documents:
            digest.update(f"{len(text)} {text}".encode(errors="surrogatepass"))
        return digest.hexdigest()

    def read(self, window: int, window_bytes: int) -> WindowText | None:
        bounds = window_bounds(len(self.documents), window, self.size, window_bytes)
        return None if bounds is None else WindowText([*self.documents[slice(*bounds)]], 0)


def window_bounds(
    num_records: int, window: int, total_bytes: int, window_bytes: int
) -> tuple[int, int] | None:
    """Return the bounds [first, end) of the records in a window, or None after the last window.

    All records take ``total_bytes``. Each window has about the same number of records, as many as take
    ``window_bytes`` on average.
    """
    num_windows = min(max(round(total_bytes / window_bytes), 1), num_records)
    if window >= num_windows:
        return None
    return num_records * window // num_windows, num_records * (window + 1) // num_windows


def choose_window_bytes(shards: Sequence[Shard], num_streams: int) -> int:
    """Return the size of a window: total size / (MIN_WINDOWS_PER_STREAM x streams), within its bounds.

    Large windows make streams switch windows seldom. Those of a small corpus are smaller, so that every
    stream has several.
    """
    largest = sum(shard.size for shard in shards) // (MIN_WINDOWS_PER_STREAM * num_streams)
    return min(max(largest, MIN_WINDOW_BYTES), MAX_WINDOW_BYTES)


def split_shards(shards: Sequence[Shard], num_streams: int) -> list[Shard]:
    """Return at least as many shards as streams: if there are fewer, each is split into strided shards."""
    stride = -(-num_streams // max(len(shards), 1))
    if stride <= 1:
        return [*shards]
    return [StridedShard(shard, start, stride) for shard in shards for start in range(stride)]


def shards_for_streams(shards: Sequence[Shard], num_streams: int, window_bytes: int) -> list[Shard]:
    """Return at least as many shards as streams; no stream has far less text than another, by their sizes.

    All streams read at the same rate, so the few documents of a small stream would be seen again and again.
    ``split_shards`` divides shards of about equal size. If sizes differ a lot, each stream gets a shard of
    windows with about as much text as the others; for this, all of the corpus is read. A corpus of more than
    MAX_DEALT_BYTES, or of more than MAX_DEALT_SHARDS shards after ``split_shards``, is left as that divides
    it. A stream may still be empty: the size of a ``StridedShard`` does not tell whether it has a window.
    """
    parts = split_shards(shards, num_streams)
    total = sum(shard.size for shard in shards)
    smallest_stream = sum(sorted(part.size for part in parts)[: len(parts) // num_streams])
    is_balanced = smallest_stream * num_streams * MAX_IMBALANCE >= total
    if is_balanced or total > MAX_DEALT_BYTES or len(parts) > MAX_DEALT_SHARDS:
        return parts
    windows = _sized_windows(shards, window_bytes)
    # Halve windows until there is one for each stream, but not below the size of a usual document: smaller
    # windows would be empty.
    while len(windows) < num_streams and window_bytes > MIN_DEALT_WINDOW_BYTES:
        window_bytes //= 2
        windows = _sized_windows(shards, window_bytes)
    return _deal_windows(windows, num_streams, window_bytes)


@dataclass(frozen=True)
class SizedWindow:
    """The place of a window, and the length of its text."""

    shard: Shard
    index: int  # in the shard
    characters: int


def _sized_windows(shards: Sequence[Shard], window_bytes: int) -> list[SizedWindow]:
    """Return each window that has text, in the order of the shards."""
    windows = list[SizedWindow]()
    for shard in shards:
        for index in itertools.count():
            text = shard.read(index, window_bytes)
            if text is None:
                break
            if text.documents:
                windows.append(SizedWindow(shard, index, sum(map(len, text.documents))))
    return windows


def _deal_windows(windows: Sequence[SizedWindow], num_streams: int, window_bytes: int) -> list[Shard]:
    """Return a shard for each stream: each window, the largest first, goes to the stream with least text."""
    streams = [(0, stream) for stream in range(num_streams)]  # a heap of (characters, stream)
    dealt: list[list[tuple[Shard, int]]] = [[] for _ in streams]
    for window in sorted(windows, key=lambda window: -window.characters):
        size, stream = streams[0]
        heapq.heapreplace(streams, (size + window.characters, stream))
        dealt[stream].append((window.shard, window.index))
    sizes = {stream: size for size, stream in streams}
    return [
        WindowsShard(tuple(stream_windows), window_bytes, sizes[stream])
        for stream, stream_windows in enumerate(dealt)
    ]


def iter_documents(shards: Sequence[Shard]) -> Iterator[str]:
    """Yield all documents of the shards in order; windows are read lazily."""
    for shard in shards:
        yield from _documents_from(shard, 0, MAX_WINDOW_BYTES)


def sample_documents(shards: Sequence[Shard]) -> Iterator[str]:
    """Yield all documents, window by window; windows are read lazily.

    As many windows as the stored size of a shard suggests come first, in a fixed random order. The others
    follow, shard by shard: the size divided by that of a window is rounded, so a shard may have a further,
    partly filled window; and a compressed file holds more windows than its size suggests, which cannot be
    counted without decompressing it.
    """
    window_bytes = choose_window_bytes(shards, SAMPLE_STREAMS)
    estimates = [max(round(shard.size / window_bytes), 1) for shard in shards]
    windows = [(shard, index) for shard, num in zip(shards, estimates, strict=True) for index in range(num)]
    random = np.random.Generator(np.random.Philox(key=[0, 0]))
    for number in random.permutation(len(windows)).tolist():
        shard, index = windows[number]
        if (window := shard.read(index, window_bytes)) is not None:
            yield from window.documents
    for shard, index in zip(shards, estimates, strict=True):
        yield from _documents_from(shard, index, window_bytes)


def _documents_from(shard: Shard, window: int, window_bytes: int) -> Iterator[str]:
    """Yield the documents of a shard in order, from the window with this index on."""
    while (text := shard.read(window, window_bytes)) is not None:
        yield from text.documents
        window += 1


def corpus_fingerprint(shards: Sequence[Shard]) -> str:
    """Return a SHA-256 digest of the fingerprints of all shards in order."""
    return hashlib.sha256("\n".join(shard_fingerprints(shards)).encode()).hexdigest()


def shard_fingerprints(shards: Sequence[Shard]) -> tuple[str, ...]:
    """Return the fingerprint of each shard, read in parallel, since cloud storage is slow to answer."""
    with ThreadPoolExecutor(DIGEST_THREADS) as pool:
        return tuple(pool.map(lambda shard: shard.fingerprint, shards))


def choose_end_bytes(num_files: int) -> int:
    """Return how many bytes at either end of each file are read for its fingerprint."""
    return max(DIGEST_BYTES // max(num_files, 1), MIN_DIGEST_BYTES)


def file_digest(path: Path, end_bytes: int) -> str:
    """Return the SHA-256 of a file's size and of ``end_bytes`` at both ends; DataError if unreadable."""
    try:
        return _file_digest(path, end_bytes, *file_stamp(path))
    except OSError as error:
        raise DataError(f"{path} cannot be read ({error.strerror}): restore it") from error


@functools.lru_cache(maxsize=1 << 16)
def _file_digest(path: Path, end_bytes: int, size: int, _modified: int) -> str:
    """Return ``file_digest``, cached as long as the file has the same size and time of modification."""
    with path.open("rb") as file:
        digest = hashlib.sha256(f"{size} ".encode() + file.read(end_bytes))
        file.seek(max(end_bytes, size - end_bytes))
        digest.update(file.read(end_bytes))
    return digest.hexdigest()


# ---- TFDS sets


@dataclass(frozen=True)
class TfdsShard:
    """Read the records of one file of a split of a TFDS set, or a selection of them."""

    rows: TfdsRows
    path: Path
    first: int  # index in the split of the file's first record that belongs to the split
    skip: int  # records of the file before that one
    count: int  # records of the file in the split
    feature: str  # that holds the text
    end_bytes: int  # read at either end for the fingerprint
    on_corrupt: OnCorrupt = "stop"
    selected: tuple[int, ...] | None = None  # indices in the split; None: all records

    @property
    def name(self) -> str:
        return str(self.path)

    @property
    def size(self) -> int:
        """Return the size of the whole file, even if the shard has only some of its records [bytes]."""
        size, _ = file_stamp(self.path)
        return size

    @property
    def fingerprint(self) -> str:
        selected = self.selected and hashlib.sha256(repr(self.selected).encode()).hexdigest()
        part = (self.rows.split, self.first, self.count, self.feature, selected)
        return f"{file_digest(self.path, self.end_bytes)} {part}"

    def read(self, window: int, window_bytes: int) -> WindowText | None:
        records: Sequence[int] = range(self.first, self.first + self.count)
        if self.selected is not None:
            records = self.selected
        bounds = window_bounds(len(records), window, self.size, window_bytes)
        if bounds is None:
            return None
        if self.selected is None and "array_record" in self.path.name:
            begin, end = (self.skip + bound for bound in bounds)
            # Errors of array_record and protobuf do not name the record: ``_read_records`` names or skips it.
            with suppress(Exception):
                return WindowText(read_texts(self.path, begin, end, self.feature), 0)
        return self._read_records(records[slice(*bounds)])

    def _read_records(self, records: Sequence[int]) -> WindowText:
        """Read records one by one: raise DataError for the first corrupt one, or skip and count them."""
        if self.on_corrupt == "stop":
            return WindowText([row[self.feature] for row in self.rows.read_many(records)], 0)
        documents = []
        for record in records:
            with suppress(DataError):
                documents.append(self.rows[record][self.feature])
        return WindowText(documents, len(records) - len(documents))


def read_texts(path: Path, first: int, end: int, feature: str) -> list[str]:
    """Return ``feature`` of records ``first`` to ``end`` - 1 of an array_record file; decode no other."""
    from array_record.python.array_record_module import ArrayRecordReader
    from tensorflow_datasets.proto import tf_example_pb2

    reader = ArrayRecordReader(str(path))
    try:
        records = reader.read(first, end)
    finally:
        reader.close()
    examples = map(tf_example_pb2.Example.FromString, records)
    return [x.features.feature[feature].bytes_list.value[0].decode(errors="replace") for x in examples]


def tfds_shards(name: str, split: str, cache: Path, on_corrupt: OnCorrupt = "stop") -> tuple[TfdsShard, ...]:
    """Return the files of a split of a TFDS set as shards: ``train``, or for any other name validation.

    Without a validation split, the last records of ``train``, a share HELD_OUT_SHARE, are held out.
    SettingError if it is unclear which feature is the text.
    """
    folder = find_prepared(name, cache)
    info = open_builder(folder).info
    features = [key for key, feature in info.features.items() if type(feature).__name__ == "Text"]
    if "text" not in features and len(features) != 1:
        raise SettingError(f"{name} at {folder} should have a text feature 'text', or only one: {features}")
    feature = "text" if "text" in features else features[0]
    validation = next((key for key in ("validation", "valid", "dev") if key in info.splits), None)
    percent = round(100 * (1 - HELD_OUT_SHARE))
    if split == "train":
        part = "train" if validation else f"train[:{percent}%]"
    else:
        part = validation or f"train[{percent}%:]"
    rows, files = prepared_corpus_rows(name, part, cache), file_instructions(folder, part)
    shards, first, end_bytes = list[TfdsShard](), 0, choose_end_bytes(len(files))
    for file in files:
        path = Path(file.filename)
        shards.append(TfdsShard(rows, path, first, file.skip, file.take, feature, end_bytes, on_corrupt))
        first += file.take
    return tuple(shards)


def select_records(shards: Sequence[TfdsShard], predicate: Callable[[Row], bool]) -> tuple[TfdsShard, ...]:
    """Return the shards, limited to records whose row meets the predicate; all rows are read."""
    result = []
    for shard in shards:
        records = range(shard.first, shard.first + shard.count)
        rows = zip(records, shard.rows.read_many(records), strict=True)
        selected = tuple(record for record, row in rows if predicate(row))
        if selected:
            result.append(replace(shard, selected=selected))
    return tuple(result)

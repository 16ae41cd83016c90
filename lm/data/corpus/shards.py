"""Read a corpus as shards: files that any process reads in order, in windows of up to some megabytes.

Listing the shards of a corpus reads almost nothing of them. A window is the unit that is read, shuffled,
encoded and cached; its contents depend only on its shard, its number and the size of windows.
"""

import functools
import hashlib
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from dataclasses import dataclass, replace
from pathlib import Path
from typing import NamedTuple, Protocol

import numpy as np

from lm.config.base import DataError, SettingError
from lm.data.corpus.tfds import (
    Corrupt,
    Row,
    StoredRows,
    files_of,
    find_prepared,
    open_set,
    prepared_split,
    stamp,
)

LARGEST_WINDOW = 1 << 23  # of a window, in the file as it is stored [bytes]
SMALLEST_WINDOW = 1 << 16  # of a window, even if the corpus has less for each stream [bytes]
WINDOWS = 4  # per stream of a small corpus [windows]
DIGESTED_AT_ONCE = 32  # files whose ends are read in parallel [files]
SAMPLED = 16  # windows of a sample are as large as if so many streams read the corpus [streams]
HELD_OUT = 0.05  # share of the documents held out where no validation split is named
# read for the fingerprint at either end of files: of all files together, and at least of each [bytes]
DIGESTED, LEAST_DIGESTED = 1 << 26, 1 << 16


class WindowText(NamedTuple):
    """Hold the documents of a window of a shard."""

    documents: list[str]
    left_out: int  # corrupt records that were skipped


class Shard(Protocol):
    """Specify the interface of a shard, a part of a corpus that is read window by window."""

    @property
    def name(self) -> str:
        """Return the name for messages: that of the file and, if it is only a part of it, which part."""

    @property
    def size(self) -> int:
        """Return the size of the shard as it is stored [bytes]."""

    @property
    def fingerprint(self) -> str:
        """Return a fingerprint of size and both ends, whatever is done with corrupt records."""

    def read(self, number: int, size: int) -> WindowText | None:
        """Return window ``number`` of about ``size`` bytes, or None after the last window.

        DataError, with the name of the file, if something is missing or cannot be read.
        """


@dataclass(frozen=True)
class ShardPart:
    """Read every ``every``-th window of another shard, from window ``first`` on, as a shard of its own."""

    shard: Shard
    first: int
    every: int

    @property
    def name(self) -> str:
        return f"{self.shard.name}, windows {self.first}, {self.first + self.every}, ..."

    @property
    def size(self) -> int:
        return self.shard.size // self.every

    @property
    def fingerprint(self) -> str:
        return f"{self.shard.fingerprint} {self.first} {self.every}"

    def read(self, number: int, size: int) -> WindowText | None:
        return self.shard.read(self.first + number * self.every, size)


@dataclass(frozen=True)
class Texts:
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

    def read(self, number: int, size: int) -> WindowText | None:
        return window_of(self.documents, number, self.size, size)


def window_of(documents: Sequence[str], number: int, stored: int, size: int) -> WindowText | None:
    """Return window ``number`` of ``documents``, which take ``stored`` bytes in all, or None after the last.

    Each window has about the same number of documents, as many as take ``size`` bytes on average.
    """
    bounds = record_range(len(documents), number, stored, size)
    return None if bounds is None else WindowText([documents[i] for i in range(*bounds)], 0)


def record_range(count: int, number: int, stored: int, size: int) -> tuple[int, int] | None:
    """Return the bounds [first, end) of the records in window ``number``, or None after the last window.

    All ``count`` records take ``stored`` bytes, and a window about ``size`` bytes.
    """
    windows = min(max(round(stored / size), 1), count)
    return None if number >= windows else (count * number // windows, count * (number + 1) // windows)


def window_size(shards: Sequence[Shard], streams: int) -> int:
    """Return the size of a window [bytes].

    It is large, so that streams switch windows seldom, but leaves every stream WINDOWS windows if it can.
    """
    fair = sum(shard.size for shard in shards) // (WINDOWS * streams)
    return min(max(fair, SMALLEST_WINDOW), LARGEST_WINDOW)


def deal(shards: Sequence[Shard], streams: int) -> list[Shard]:
    """Return at least as many shards as streams: if there are fewer, each is divided into parts."""
    parts = -(-streams // max(len(shards), 1))
    return (
        [ShardPart(shard, first, parts) for shard in shards for first in range(parts)]
        if parts > 1
        else [*shards]
    )


def documents_of(shards: Sequence[Shard], size: int = LARGEST_WINDOW) -> Iterator[str]:
    """Yield all documents of the shards in order."""
    for shard in shards:
        number = 0
        while (window := shard.read(number, size)) is not None:
            yield from window.documents
            number += 1


def sample_documents(shards: Sequence[Shard]) -> Iterator[str]:
    """Yield documents, window by window in random order; windows are read lazily. Deterministic."""
    size = window_size(shards, SAMPLED)
    windows = [(shard, number) for shard in shards for number in range(max(round(shard.size / size), 1))]
    for index in np.random.Generator(np.random.Philox(key=[0, 0])).permutation(len(windows)).tolist():
        shard, number = windows[index]
        if (window := shard.read(number, size)) is not None:
            yield from window.documents


def fingerprint_of(shards: Sequence[Shard]) -> str:
    """Return a SHA-256 digest of the fingerprints of all shards in order."""
    return hashlib.sha256("\n".join(fingerprints_of(shards)).encode()).hexdigest()


def fingerprints_of(shards: Sequence[Shard]) -> tuple[str, ...]:
    """Return the fingerprint of each shard; they are read in parallel, since a bucket is slow to answer."""
    with ThreadPoolExecutor(DIGESTED_AT_ONCE) as pool:
        return tuple(pool.map(lambda shard: shard.fingerprint, shards))


def digested(files: int) -> int:
    """Return how much is read at either end of each of so many files for a fingerprint [bytes]."""
    return max(DIGESTED // max(files, 1), LEAST_DIGESTED)


def file_digest(path: Path, end: int) -> str:
    """Return the SHA-256 of a file's size and ``end`` bytes at both ends; DataError if it is unreadable."""
    try:
        return _file_digest(path, end, *stamp(path))
    except OSError as error:
        raise DataError(f"{path} cannot be read ({error.strerror}): restore it") from error


@functools.lru_cache(maxsize=1 << 16)
def _file_digest(path: Path, end: int, size: int, _changed: int) -> str:
    with path.open("rb") as file:
        digest = hashlib.sha256(f"{size} ".encode() + file.read(end))
        file.seek(max(end, size - end))
        digest.update(file.read(end))
    return digest.hexdigest()


# ---- TFDS sets


@dataclass(frozen=True)
class StoredShard:
    """Read the records of one file of a split of a TFDS set, or those among them that are ``chosen``."""

    rows: StoredRows
    path: Path
    first: int  # number of its first record in the split
    skipped: int  # records of the file before that
    count: int  # of its records in the split
    feature: str
    end: int  # read at either end for the fingerprint [bytes]
    corrupt: Corrupt = "stop"
    chosen: tuple[int, ...] | None = None  # numbers in the split; None: all

    @property
    def name(self) -> str:
        return str(self.path)

    @property
    def size(self) -> int:
        return stamp(self.path)[0]

    @property
    def fingerprint(self) -> str:
        chosen = self.chosen and hashlib.sha256(repr(self.chosen).encode()).hexdigest()
        part = (self.rows.split, self.first, self.count, self.feature, chosen)
        return f"{file_digest(self.path, self.end)} {part}"

    def read(self, number: int, size: int) -> WindowText | None:
        numbers = range(self.first, self.first + self.count) if self.chosen is None else self.chosen
        if (bounds := record_range(len(numbers), number, self.size, size)) is None:
            return None
        if self.chosen is None and "array_record" in self.path.name:
            begin, end = (self.skipped + bound for bound in bounds)
            with suppress(Exception):  # errors of array_record and protobuf do not name the record
                return WindowText(read_texts(self.path, begin, end, self.feature), 0)
        return self._row_by_row(numbers[slice(*bounds)])

    def _row_by_row(self, numbers: Sequence[int]) -> WindowText:
        """Read records one by one: raise DataError for the first corrupt one, or skip and count them."""
        if self.corrupt == "stop":
            return WindowText([row[self.feature] for row in self.rows.several(numbers)], 0)
        documents = [text for number in numbers if (text := self._readable(number)) is not None]
        return WindowText(documents, len(numbers) - len(documents))

    def _readable(self, number: int) -> str | None:
        try:
            return self.rows[number][self.feature]
        except DataError:
            return None


def read_texts(path: Path, first: int, last: int, feature: str) -> list[str]:
    """Return ``feature`` of records ``first`` to ``last`` - 1 of an array_record file; decode no other."""
    from array_record.python.array_record_module import ArrayRecordReader
    from tensorflow_datasets.proto import tf_example_pb2

    reader = ArrayRecordReader(str(path))
    try:
        records = reader.read(first, last)
    finally:
        reader.close()
    examples = map(tf_example_pb2.Example.FromString, records)
    return [x.features.feature[feature].bytes_list.value[0].decode(errors="replace") for x in examples]


def tfds_shards(name: str, split: str, cache: Path, corrupt: Corrupt = "stop") -> tuple[StoredShard, ...]:
    """Return the files of a split of a TFDS set as shards.

    Without a validation split, the last records of ``train``, a share HELD_OUT, are held out. SettingError if
    it is unclear which feature is the text.
    """
    folder = find_prepared(name, cache)
    info = open_set(folder).info
    features = [key for key, feature in info.features.items() if type(feature).__name__ == "Text"]
    if "text" not in features and len(features) != 1:
        raise SettingError(f"{name} at {folder} should have a text feature 'text', or only one: {features}")
    feature = "text" if "text" in features else features[0]
    validation = next((key for key in ("validation", "valid", "dev") if key in info.splits), None)
    percent = round(100 * (1 - HELD_OUT))
    train = "train" if validation else f"train[:{percent}%]"
    part = train if split == "train" else validation or f"train[{percent}%:]"
    rows, files = prepared_split(name, part, cache), files_of(folder, part)
    first, shards, end = 0, list[StoredShard](), digested(len(files))
    for file in files:
        path = Path(file.filename)
        shards.append(StoredShard(rows, path, first, file.skip, file.take, feature, end, corrupt))
        first += file.take
    return tuple(shards)


def chosen_records(
    shards: Sequence[StoredShard], is_chosen: Callable[[Row], bool]
) -> tuple[StoredShard, ...]:
    """Return the shards, limited to records whose row ``is_chosen``; all rows are read."""
    chosen = []
    for shard in shards:
        numbers = range(shard.first, shard.first + shard.count)
        rows = zip(numbers, shard.rows.several(numbers), strict=True)
        chosen.append(replace(shard, chosen=tuple(number for number, row in rows if is_chosen(row))))
    return tuple(shard for shard in chosen if shard.chosen)

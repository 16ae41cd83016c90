"""A corpus as shards: files that are read in order, a window of some megabytes at a time, by any process.

Listing the shards of a corpus reads next to nothing of them. A window is the least that is read, shuffled,
encoded and kept; what it holds depends on its shard, its number and the size of windows alone.
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

LARGEST_WINDOW = 1 << 23  # of a file, as it is stored [bytes]
SMALLEST_WINDOW = 1 << 16  # of a corpus that has less than that for every stream [bytes]
WINDOWS = 4  # of a small corpus, for every stream
DIGESTED_AT_ONCE = 32  # ends of files [files]
SAMPLED = 16  # a sample of a small corpus is of windows as so many streams have [streams]
HELD_OUT = 0.05  # share of the documents that are validation where nothing is named for it
# what is read of a corpus to tell it from others: both ends of every file, of each at least so much [bytes]
DIGESTED, LEAST_DIGESTED = 1 << 26, 1 << 16


class WindowText(NamedTuple):
    """What a window of a shard holds."""

    documents: list[str]
    left_out: int  # corrupt records that were skipped


class Shard(Protocol):
    """A part of a corpus."""

    @property
    def name(self) -> str:
        """For messages: the file's, with its place where it is not the whole file."""

    @property
    def size(self) -> int:
        """As it is stored [bytes]."""

    @property
    def fingerprint(self) -> str:
        """Of its size and what stands at its ends, whatever becomes of corrupt records."""

    def read(self, number: int, size: int) -> WindowText | None:
        """The window of that number, of about ``size`` bytes; None: the one before was the last.

        DataError, with the name of the file, for what is missing or cannot be read.
        """


@dataclass(frozen=True)
class ShardPart:
    """Every so-many-th window of a shard, as a shard of its own."""

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
    """Documents that are there already."""

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
    """The window of that number of ``documents`` that take ``stored`` bytes: as many in each."""
    bounds = record_range(len(documents), number, stored, size)
    return None if bounds is None else WindowText([documents[i] for i in range(*bounds)], 0)


def record_range(count: int, number: int, stored: int, size: int) -> tuple[int, int] | None:
    """First and last of ``count`` records in a window, where all of them take ``stored`` bytes."""
    windows = min(max(round(stored / size), 1), count)
    return None if number >= windows else (count * number // windows, count * (number + 1) // windows)


def window_size(shards: Sequence[Shard], streams: int) -> int:
    """So large that streams switch windows seldom, and so small that all have several [bytes]."""
    fair = sum(shard.size for shard in shards) // (WINDOWS * streams)
    return min(max(fair, SMALLEST_WINDOW), LARGEST_WINDOW)


def deal(shards: Sequence[Shard], streams: int) -> list[Shard]:
    """At least as many shards as streams: where there are fewer, each is dealt in parts."""
    parts = -(-streams // max(len(shards), 1))
    return (
        [ShardPart(shard, first, parts) for shard in shards for first in range(parts)]
        if parts > 1
        else [*shards]
    )


def documents_of(shards: Sequence[Shard], size: int = LARGEST_WINDOW) -> Iterator[str]:
    """All documents, in order."""
    for shard in shards:
        number = 0
        while (window := shard.read(number, size)) is not None:
            yield from window.documents
            number += 1


def sample_documents(shards: Sequence[Shard]) -> Iterator[str]:
    """The documents of windows in random order: as many windows are read as are asked for."""
    size = window_size(shards, SAMPLED)
    windows = [(shard, number) for shard in shards for number in range(max(round(shard.size / size), 1))]
    for index in np.random.Generator(np.random.Philox(key=[0, 0])).permutation(len(windows)).tolist():
        shard, number = windows[index]
        if (window := shard.read(number, size)) is not None:
            yield from window.documents


def fingerprint_of(shards: Sequence[Shard]) -> str:
    """Of all shards in their order; read in part, as each of them says."""
    return hashlib.sha256("\n".join(fingerprints_of(shards)).encode()).hexdigest()


def fingerprints_of(shards: Sequence[Shard]) -> tuple[str, ...]:
    """Of each shard; many are read at once, since a bucket takes its time to answer."""
    with ThreadPoolExecutor(DIGESTED_AT_ONCE) as pool:
        return tuple(pool.map(lambda shard: shard.fingerprint, shards))


def digested(files: int) -> int:
    """What is read at either end of each of so many files [bytes]."""
    return max(DIGESTED // max(files, 1), LEAST_DIGESTED)


def file_digest(path: Path, end: int) -> str:
    """SHA-256 of a file's size and of ``end`` bytes at both ends; DataError if it cannot be read."""
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
    """The records of one file of a split of a TFDS set, or those among them that are ``chosen``."""

    rows: StoredRows
    path: Path
    first: int  # number of its first record in the split
    skipped: int  # records of the file in front of that
    count: int  # of its records
    feature: str
    end: int  # what is read at either end to tell it from others [bytes]
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
            with suppress(Exception):  # array_record, protobuf: each has its own, and neither says of which
                return WindowText(read_texts(self.path, begin, end, self.feature), 0)
        return self._row_by_row(numbers[slice(*bounds)])

    def _row_by_row(self, numbers: Sequence[int]) -> WindowText:
        """With the number of the first record that cannot be read, or without those that cannot."""
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
    """A text feature of records ``first`` to ``last`` - 1 of an array_record file: no other is decoded."""
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
    """The files of a TFDS set; the last records of ``train`` are held out if it has no validation split."""
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
    """The records with such a row; reads them all."""
    chosen = []
    for shard in shards:
        numbers = range(shard.first, shard.first + shard.count)
        rows = zip(numbers, shard.rows.several(numbers), strict=True)
        chosen.append(replace(shard, chosen=tuple(number for number, row in rows if is_chosen(row))))
    return tuple(shard for shard in chosen if shard.chosen)

"""Make shards of a user's own files: UTF-8 text, JSON lines (plain, gzip, bzip2 or xz) and parquet.

Files named for a split (valid, val, dev, test), or in a folder that is, are that split. Where none is named
for validation, the held-out split is a share of the documents, chosen by a hash of their content. Text files
are split into documents at blank lines.
"""

import functools
import glob
import hashlib
import os
import re
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Literal, NamedTuple

from lm.config.base import DataError, SettingError
from lm.data.corpus.readers import FILE_ENDINGS, WINDOW_READERS
from lm.data.corpus.shards import (
    HELD_OUT,
    SMALLEST_WINDOW,
    Shard,
    WindowText,
    digested,
    documents_of,
    file_digest,
)
from lm.data.corpus.tfds import Corrupt, stamp

SAMPLE = 1 << 24  # of text from the start of a corpus; sets the largest digest that is held out [characters]
TEXT_SPLITS = dict.fromkeys(("valid", "val", "dev", "validation"), "validation") | {"test": "test"}
Split = Literal["train", "validation"]


class HeldOut(NamedTuple):
    """Select the documents of a split: those whose digest is at most ``edge`` are held out for validation."""

    edge: bytes
    split: Split

    def keeps(self, text: str) -> bool:
        return (digest_of(text) <= self.edge) == (self.split == "validation")


def digest_of(text: str) -> bytes:
    return hashlib.sha256(text.strip().encode(errors="surrogatepass")).digest()


@dataclass(frozen=True)
class FileShard:
    """Read one file, or several small text files together, as a shard."""

    paths: tuple[Path, ...]
    kind: str  # one of WINDOW_READERS
    end: int  # read at either end of a file for its fingerprint [bytes]
    corrupt: Corrupt = "stop"
    held_out: HeldOut | None = None  # None: all documents

    @property
    def name(self) -> str:
        more = f" and {len(self.paths) - 1} more" * (len(self.paths) > 1)
        return f"{self.paths[0]}{more}"

    @property
    def size(self) -> int:
        return sum(path.stat().st_size for path in self.paths)

    @property
    def fingerprint(self) -> str:
        digests = " ".join(file_digest(path, self.end) for path in self.paths)
        return f"{self.kind} {digests} {self.held_out}"

    def read(self, number: int, size: int) -> WindowText | None:
        try:
            window = WINDOW_READERS[self.kind](self.paths, number, size, self.corrupt)
        except OSError as error:
            raise DataError(f"{self.name} cannot be read: {error}") from error
        if window is None or self.held_out is None:
            return window
        return window._replace(documents=[*filter(self.held_out.keeps, window.documents)])


def file_shards(kind: str, pattern: str, split: Split, corrupt: Corrupt = "stop") -> tuple[FileShard, ...]:
    """Return the shards of one split of the files that match; raise SettingError if they hold no text."""
    files = tuple((path, *stamp(path)) for path in matches(kind, pattern))
    return _file_shards(kind, pattern, split, corrupt, files)


@functools.lru_cache(maxsize=32)
def _file_shards(
    kind: str, pattern: str, split: Split, corrupt: Corrupt, files: tuple[tuple[Path, int, int], ...]
) -> tuple[FileShard, ...]:
    """Return the shards of ``files``, each (path, size, time of the last change).

    The result is cached by these, so that a sample is read only once while the files do not change.
    """
    paths = [path for path, *_ in files]
    base = Path(os.path.commonpath([path.parent for path in paths]))
    splits = [next(filter(None, map(_split_of, path.relative_to(base).parts)), "train") for path in paths]
    has_validation = "validation" in splits
    name = split if has_validation else "train"
    chosen = [path for path, named in zip(paths, splits, strict=True) if named == name]
    end = digested(len(files))
    shards = [FileShard(group, kind, end, corrupt) for group in _groups(kind, chosen)]
    sample = [*_sample(shards)]
    if len(sample) < (1 if has_validation or split == "validation" else 2):
        few = ", ".join(f"{path} ({path.stat().st_size:,} bytes)" for path in chosen[:3])
        more = f" and {len(chosen) - 3:,} more" * (len(chosen) > 3)
        raise SettingError(
            f"data.corpus={kind}:{pattern}: no text for {split!r} in {few}{more}: a validation file "
            "needs a document, and files of which a part is held out two"
        )
    if has_validation:
        return tuple(shards)
    edge = sorted(map(digest_of, sample))[max(1, round(HELD_OUT * len(sample))) - 1]
    held_out = HeldOut(edge, split)
    return tuple(FileShard(shard.paths, kind, end, corrupt, held_out) for shard in shards)


def _groups(kind: str, paths: Sequence[Path]) -> list[tuple[Path, ...]]:
    """Return the files of each shard, in order.

    Small text files share a shard up to SMALLEST_WINDOW, and empty ones are dropped; every file of another
    kind is a shard of its own.
    """
    groups, room = list[list[Path]](), 0
    for path in paths:
        size = path.stat().st_size
        if kind == "text" and not size:
            continue
        if kind != "text" or (room := room - size) < 0:
            groups.append([])
            room = SMALLEST_WINDOW - size
        groups[-1].append(path)
    return [tuple(group) for group in groups]


def _sample(shards: Sequence[Shard]) -> Iterator[str]:
    read = 0
    for text in documents_of(shards):
        yield text
        if (read := read + len(text)) > SAMPLE:
            return


def matches(kind: str, pattern: str) -> list[Path]:
    """Return the sorted files that a path, glob or folder names; raise SettingError if there are none."""
    pattern = os.path.expanduser(pattern)
    if os.path.isdir(pattern):
        inner = [f"{glob.escape(pattern)}/**/*{ending}" for ending in FILE_ENDINGS[kind]]
    else:
        inner = [pattern]
    names = [pattern] if os.path.isfile(pattern) else sum((glob.glob(x, recursive=True) for x in inner), [])
    if files := sorted({path for path in map(Path, names) if path.is_file()}):
        return files
    raise SettingError(f"data.corpus={kind}:{pattern}: no file matches {os.path.abspath(inner[0])}")


def _split_of(part: str) -> str | None:
    return TEXT_SPLITS.get(re.split(r"[._-]", part.lower())[0])

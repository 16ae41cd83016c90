"""Make shards of a user's own files: UTF-8 text, JSON lines (plain, gzip, bzip2 or xz) and parquet.

A file belongs to the split with which its name, or the name of one of its folders, begins (valid, val, dev or
validation: validation; test: test; else train), such as ``val-00001.txt`` or ``dev/a.txt``. Files of the test
split are not read. If no file belongs to the validation split, a share of the training documents, chosen by a
hash of their content, is held out instead. A corpus that is the path of one file, whatever its name, or a
folder whose only file is named for test, is training text, of which such a share is held out. Text files of
over 8 KiB are split into several documents, at blank lines where that can be done.
"""

import functools
import glob
import hashlib
import os
import re
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Literal, NamedTuple

from lm.config.base import DataError, SettingError
from lm.data.corpus.readers import BLOCK_BYTES, FILE_ENDINGS, WINDOW_READERS
from lm.data.corpus.shards import (
    HELD_OUT_SHARE,
    MIN_WINDOW_BYTES,
    InMemoryShard,
    Shard,
    WindowText,
    choose_end_bytes,
    file_digest,
    iter_documents,
)
from lm.data.corpus.tfds import OnCorrupt, file_stamp
from lm.files import similar_file

# of the documents at the start of a corpus, whose digests set the threshold for held-out documents
SAMPLE_CHARACTERS = 1 << 24
SPLIT_NAMES = dict.fromkeys(("valid", "val", "dev", "validation"), "validation") | {"test": "test"}
Split = Literal["train", "validation"]


# Fields are not renamed: the fingerprint of a shard contains this tuple as text.
class HeldOut(NamedTuple):
    """Select the documents of a split.

    Held out for validation are those whose digest is at most ``edge``, the threshold.
    """

    edge: bytes
    split: Split

    def keeps(self, text: str) -> bool:
        return (document_digest(text) <= self.edge) == (self.split == "validation")


def document_digest(text: str) -> bytes:
    return hashlib.sha256(text.strip().encode(errors="surrogatepass")).digest()


@dataclass(frozen=True)
class FileShard:
    """Read one file, or several small text files together, as a shard."""

    paths: tuple[Path, ...]
    kind: str  # one of WINDOW_READERS
    end_bytes: int  # read at either end of a file for its fingerprint
    on_corrupt: OnCorrupt = "stop"
    held_out: HeldOut | None = None  # None: all documents

    @property
    def name(self) -> str:
        first, *others = self.paths
        return f"{first} and {len(others)} more" if others else str(first)

    @property
    def size(self) -> int:
        return sum(path.stat().st_size for path in self.paths)

    @property
    def fingerprint(self) -> str:
        digests = " ".join(file_digest(path, self.end_bytes) for path in self.paths)
        block_size = f" in blocks of {BLOCK_BYTES}" if self.kind == "text" else ""
        return f"{self.kind}{block_size} {digests} {self.held_out}"

    def read(self, window: int, window_bytes: int) -> WindowText | None:
        try:
            text = WINDOW_READERS[self.kind](self.paths, window, window_bytes, self.on_corrupt)
        except OSError as error:
            raise DataError(f"{self.name} cannot be read: {error}") from error
        if text is None or self.held_out is None:
            return text
        return text._replace(documents=[*filter(self.held_out.keeps, text.documents)])


def file_shards(
    kind: str, pattern: str, split: Split, on_corrupt: OnCorrupt = "stop"
) -> tuple[FileShard | InMemoryShard, ...]:
    """Return the shards of one split of the files that match; raise SettingError if they hold no text."""
    files = tuple((path, *file_stamp(path)) for path in matching_files(kind, pattern))
    return _file_shards(kind, pattern, split, on_corrupt, files)


@functools.lru_cache(maxsize=32)
def _file_shards(
    kind: str, pattern: str, split: Split, on_corrupt: OnCorrupt, files: tuple[tuple[Path, int, int], ...]
) -> tuple[FileShard | InMemoryShard, ...]:
    """Return the shards of ``files``, each (path, size, time of the last change).

    The result is cached by these, so that a sample is read only once while the files do not change.
    """
    paths = [path for path, *_ in files]
    splits = _splits_of(paths, pattern)
    has_validation = "validation" in splits
    needed = split if has_validation else "train"
    split_paths = [path for path, of_path in zip(paths, splits, strict=True) if of_path == needed]
    if not split_paths:
        raise SettingError(
            f"data.corpus={kind}:{pattern}: no text for {needed!r}, since all files are named for another "
            f"split, such as {paths[0]}: add one called {needed}, or name a single file, of which a "
            "part is then held out"
        )
    end_bytes = choose_end_bytes(len(files))
    groups = _group_small_files(kind, split_paths)
    shards = tuple(FileShard(group, kind, end_bytes, on_corrupt) for group in groups)
    sample = _sample_documents(shards)
    digests = sorted({*map(document_digest, sample)})  # copies of a document are held out together
    if not sample:
        raise SettingError(f"data.corpus={kind}:{pattern}: no text for {split!r} in {_sizes(split_paths)}")
    # A corpus of one document can be held out whole, so that it can be scored; but nothing is left to train
    # on.
    if len(digests) < 2 and not has_validation and split == "train":
        document = "a file, or 8 KiB of a longer one," if kind == "text" else "a record"
        raise SettingError(
            f"data.corpus={kind}:{pattern}: too little text to hold a part of it out in "
            f"{_sizes(split_paths)}: {document} is a document, and there should be two that differ; add "
            "text, or a file of held-out text (valid.txt)"
        )
    if has_validation:
        return shards
    # two if there are at least four, since objective.pairs needs two
    num_held_out = max(1, min(2, len(digests) // 2), round(HELD_OUT_SHARE * len(digests)))
    held_out = HeldOut(digests[num_held_out - 1], split)
    if split == "validation" and sum(map(len, sample)) <= SAMPLE_CHARACTERS:  # the sample is the corpus
        # All held-out documents in one shard in memory: read by windows of the files, with one in twenty of
        # their documents each, a window may lack the two documents that objective.pairs needs.
        return (InMemoryShard(tuple(filter(held_out.keeps, sample)), f"held-out text of {kind}:{pattern}"),)
    return tuple(replace(shard, held_out=held_out) for shard in shards)


def _sizes(paths: Sequence[Path]) -> str:
    """Return the names and sizes of the first three files, and how many there are besides."""
    examples = ", ".join(f"{path} ({path.stat().st_size:,} bytes)" for path in paths[:3])
    if len(paths) > 3:
        examples += f" and {len(paths) - 3:,} more"
    return examples


def _group_small_files(kind: str, paths: Sequence[Path]) -> list[tuple[Path, ...]]:
    """Return the files of each shard, in order.

    Small text files share a shard of up to MIN_WINDOW_BYTES, and empty ones are dropped. Every file of
    another kind is a shard.
    """
    if kind != "text":
        return [(path,) for path in paths]
    groups, room = list[list[Path]](), 0
    for path in paths:
        size = path.stat().st_size
        if not size:
            continue
        room -= size
        if room < 0:
            groups.append([])
            room = MIN_WINDOW_BYTES - size
        groups[-1].append(path)
    return [tuple(group) for group in groups]


def _sample_documents(shards: Sequence[Shard]) -> list[str]:
    """Return the first documents of the shards, SAMPLE_CHARACTERS and a document at most."""
    documents, num_characters = [], 0
    for text in iter_documents(shards):
        documents.append(text)
        num_characters += len(text)
        if num_characters > SAMPLE_CHARACTERS:
            break
    return documents


def matching_files(kind: str, pattern: str) -> list[Path]:
    """Return the sorted files that a path, glob or folder names; raise SettingError if there are none."""
    pattern = os.path.expanduser(pattern)
    if os.path.isfile(pattern):
        return [Path(pattern)]
    if is_folder := os.path.isdir(pattern):
        names = files_with_endings(pattern, FILE_ENDINGS[kind])
    else:
        names = [name for name in glob.glob(pattern, recursive=True) if os.path.isfile(name)]
    if names:
        return sorted({Path(name) for name in names})  # a pattern with two ** finds some twice
    if re.search(rf"\+ *({'|'.join(WINDOW_READERS)}|tfds|documentation)\b", pattern):
        raise SettingError(
            f"data.corpus={kind}:{pattern}: join corpora by ' + ', with a blank on either side"
        )
    missing = os.path.abspath(f"{pattern}/**/*{FILE_ENDINGS[kind][0]}" if is_folder else pattern)
    raise SettingError(
        f"data.corpus={kind}:{pattern}: no file matches {missing}{similar_file(Path(pattern))}"
    )


def files_with_endings(folder: str, endings: tuple[str, ...]) -> list[str]:
    """Return the files below a folder whose names end in one of ``endings``, in small or capital letters."""
    names = glob.glob(f"{glob.escape(folder)}/**/*", recursive=True)
    return [name for name in names if name.lower().endswith(endings) and os.path.isfile(name)]


def describe_files(kind: str, pattern: str) -> str:
    """Return how many files of a corpus are read, and their bytes, such as "9 files of 1,634,002 bytes"."""
    paths = matching_files(kind, pattern)
    splits = _splits_of(paths, pattern)
    read = [path for path, split in zip(paths, splits, strict=True) if split != "test"]
    size = sum(path.stat().st_size for path in read)
    description = f"{_count(len(read))} of {size:,} bytes"
    if left_out := len(paths) - len(read):
        verb = "is" if left_out == 1 else "are"
        description += f" ({_count(left_out)} named for test {verb} not read)"
    return description


def other_files(kind: str, pattern: str) -> dict[str, str]:
    """Return corpus -> number of its files, such as "2 files", of each other kind in the folder of a corpus.

    It is empty for a corpus that is not a folder.
    """
    folder = os.path.expanduser(pattern)
    if not os.path.isdir(folder):
        return {}
    counts = {
        f"{other}:{pattern}": len(files_with_endings(folder, endings))
        for other, endings in FILE_ENDINGS.items()
        if other != kind
    }
    return {corpus: _count(number) for corpus, number in counts.items() if number}


def _count(number: int) -> str:
    return f"{number:,} file{'s' * (number != 1)}"


def _splits_of(paths: Sequence[Path], pattern: str) -> list[str]:
    """Return the split to which each file of a corpus belongs."""
    pattern = os.path.expanduser(pattern)
    # names outside of the corpus say nothing, such as that of the folder that it is
    folder = pattern if os.path.isdir(pattern) else os.path.commonpath([path.parent for path in paths])
    splits = [_named_split(path.relative_to(folder)) or "train" for path in paths]
    if len(paths) == 1 and (os.path.isfile(pattern) or splits == ["test"]):
        return ["train"]  # a part of it is held out, whatever it is called
    return splits


def _named_split(path: Path) -> str | None:
    """Return the split that an outer folder or the file is named for, or None.

    It is named for a split if its name up to the first ".", "_" or "-" is in SPLIT_NAMES.
    """
    for part in path.parts:
        name, *_ = re.split(r"[._-]", part.lower())
        if name in SPLIT_NAMES:
            return SPLIT_NAMES[name]
    return None

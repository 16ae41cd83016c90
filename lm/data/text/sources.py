"""Texts of files and of TFDS sets as sequences: random access, decoded when read."""

import dataclasses
import functools
import glob
import hashlib
import mmap
import os
import re
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from lm.data.text.tfds import Corrupt, StoredRows, find_prepared, open_set, prepared_rows, stamp
from lm.settings import DataError, SettingError

DOCUMENT = 8192  # a longer file is cut, at a blank line if there is one in the second half [bytes]
HELD_OUT = 0.05  # share of the documents that are validation where no file is named for it
TEXT_SPLITS = dict.fromkeys(("valid", "val", "dev", "validation"), "validation") | {"test": "test"}
BLANK_LINE = re.compile(rb"\n[ \t\r]*\n")


@dataclasses.dataclass(frozen=True)
class Joined(Sequence[str]):
    """Several corpora, one after the other."""

    parts: tuple[Any, ...]  # sequences of texts with fingerprints

    def __len__(self) -> int:
        return sum(map(len, self.parts))

    def __getitem__(self, index: Any) -> Any:
        index = range(len(self))[index]
        for part in self.parts:
            if index < len(part):
                return part[index]
            index -= len(part)
        raise IndexError(index)

    @property
    def fingerprint(self) -> str:
        return hashlib.sha256(" + ".join(part.fingerprint for part in self.parts).encode()).hexdigest()


def left_out(texts: Sequence[Any]) -> int:
    """How many corrupt records ``texts``, or rows, skip."""
    if isinstance(texts, Joined):
        return sum(map(left_out, texts.parts))
    return len(getattr(getattr(texts, "rows", texts), "left_out", ()))


@dataclasses.dataclass(frozen=True)
class Texts(Sequence[str]):
    """One text feature of ``rows``, of all or of those that are ``chosen``."""

    rows: StoredRows
    feature: str
    chosen: Sequence[int]

    def __len__(self) -> int:
        return len(self.chosen)

    def __getitem__(self, index: Any) -> Any:
        return self.rows[self.chosen[index]][self.feature]

    @property
    def fingerprint(self) -> str:
        """That of the rows where all are chosen."""
        digest = self.rows.fingerprint
        if len(self) == len(self.rows):
            return digest
        return hashlib.sha256(digest.encode() + np.array(self.chosen, np.int64).tobytes()).hexdigest()


def tfds_texts(name: str, split: str, cache: Path, corrupt: Corrupt = "stop") -> Texts:
    """The texts of a TFDS set; the last of ``train`` are held out if it has no validation split."""
    folder = find_prepared(name, cache)
    info = open_set(folder).info
    features = [key for key, feature in info.features.items() if type(feature).__name__ == "Text"]
    if "text" not in features and len(features) != 1:
        raise SettingError(f"{name} at {folder} should have a text feature 'text', or only one: {features}")
    validation = next((key for key in ("validation", "valid", "dev") if key in info.splits), None)
    percent = round(100 * (1 - HELD_OUT))
    train = "train" if validation else f"train[:{percent}%]"
    part = train if split == "train" else validation or f"train[{percent}%:]"
    rows = prepared_rows(name, part, cache, corrupt)
    if not len(rows):
        raise SettingError(f"{name} at {folder}: split {part!r} has no rows")
    return Texts(rows, "text" if "text" in features else features[0], range(len(rows)))


# Text files


@dataclasses.dataclass(frozen=True)
class TextFiles(Sequence[str]):
    """Pieces of UTF-8 files; ``pieces[i]`` is (index of a path, first byte, byte behind the last)."""

    paths: tuple[Path, ...]
    pieces: np.ndarray
    fingerprint: str

    def __len__(self) -> int:
        return len(self.pieces)

    def __getitem__(self, index: Any) -> Any:
        path, start, end = self.pieces[index].tolist()
        return document(self.paths[path], start, end)


Documents = Joined | Texts | TextFiles  # texts with a ``fingerprint`` of their content


def document(path: Path, start: int, end: int) -> str:
    with path.open("rb") as file:
        file.seek(start)
        text = file.read(end - start)
    try:
        return text.decode().lstrip("\ufeff").replace("\r\n", "\n").strip()
    except UnicodeDecodeError as error:
        reason = f"are no longer valid text ({error}); has the file changed?"
        raise DataError(f"{path}: bytes {start} to {end} {reason}") from error


def text_files(pattern: str, split: str) -> TextFiles:
    """Validation is what is named so (valid, val, dev), else a share chosen by content; test is skipped."""
    return _text_files(pattern, split, tuple((path, *stamp(path)) for path in matches(pattern)))


@functools.lru_cache(maxsize=32)
def _text_files(pattern: str, split: str, files: tuple[tuple[Path, int, int], ...]) -> TextFiles:
    """The text of ``files``, (path, size, time of the last change): read once while they do not change."""
    paths = [path for path, *_ in files]
    base = Path(os.path.commonpath([path.parent for path in paths]))
    splits = [next(filter(None, map(_split_of, path.relative_to(base).parts)), "train") for path in paths]
    has_validation = "validation" in splits
    name = split if has_validation else "train"
    chosen = tuple(path for path, named in zip(paths, splits, strict=True) if named == name)
    texts = [(i, *piece) for i, path in enumerate(chosen) for piece in pieces(path)]
    if not has_validation:
        edge = sorted(digest for *_, digest in texts)[: max(1, round(HELD_OUT * len(texts)))][-1:]
        texts = [text for text in texts if ([text[3]] <= edge) == (split == "validation")]
    if not texts:
        raise SettingError(f"data.corpus=text:{pattern}: no text for {split!r} in {len(paths)} files")
    fingerprint = hashlib.sha256(b"".join(digest for *_, digest in texts)).hexdigest()
    return TextFiles(chosen, np.array([text[:3] for text in texts], np.int64), fingerprint)


def matches(pattern: str) -> list[Path]:
    """The file or files that a pattern or a folder of .txt files stands for, in order of name."""
    pattern = os.path.expanduser(pattern)
    inner = f"{glob.escape(pattern)}/**/*.txt" if os.path.isdir(pattern) else pattern
    names = [pattern] if os.path.isfile(pattern) else glob.glob(inner, recursive=True)
    if files := sorted(path for path in map(Path, names) if path.is_file()):
        return files
    raise SettingError(f"data.corpus=text:{pattern}: no file matches {os.path.abspath(inner)}")


def _split_of(part: str) -> str | None:
    return TEXT_SPLITS.get(re.split(r"[._-]", part.lower())[0])


def pieces(path: Path, start: int = 0, end: int | None = None) -> Iterator[tuple[int, int, bytes]]:
    """(start, end, digest) of a file's documents that hold text; SettingError where it is not UTF-8."""
    size = path.stat().st_size if end is None else end
    if not size:
        return
    with path.open("rb") as file, mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ) as data:
        while start < size:
            window = data[start : min(start + DOCUMENT, size)]
            piece = window if start + len(window) == size else window[: _end_of_document(window)]
            _check_text(piece, path, start)
            if piece.strip():
                yield start, start + len(piece), hashlib.sha256(piece.strip()).digest()
            start += len(piece)


def _end_of_document(window: bytes) -> int:
    """Behind the last blank line of the second half, else behind its last line, word or character."""
    half = len(window) // 2
    if blank := list(BLANK_LINE.finditer(window, half)):
        return blank[-1].end()
    for mark in (b"\n", b" "):
        if (end := window.rfind(mark, half)) >= 0:
            return end + 1
    end = len(window)
    while end > half and window[end - 1] & 0xC0 == 0x80:  # inside a UTF-8 sequence
        end -= 1
    return end - 1 if window[end - 1] & 0x80 else end


def _check_text(piece: bytes, path: Path, start: int) -> None:
    try:
        piece.decode()
        fault = piece.find(b"\0")
    except UnicodeDecodeError as error:
        fault = error.start
    if fault >= 0:
        byte = f"byte {piece[fault]:#04x} at offset {start + fault}"
        raise SettingError(f"{path}: {byte} is not UTF-8 text; leave this file out")

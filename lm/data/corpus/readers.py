"""Read windows of files: UTF-8 text, JSON lines (plain, gzip, bzip2 or xz) and parquet.

Text is split into documents at blank lines. What cannot be read raises DataError with its file and place.
"""

import bz2
import gzip
import itertools
import json
import lzma
import mmap
import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import IO, Any

from lm.config.base import DataError, SettingError
from lm.data.corpus.shards import WindowText
from lm.data.corpus.tfds import Corrupt

DOCUMENT = 8192  # longest one; a longer text is split, at a blank line if its second half has one [bytes]
BLANK_LINE = re.compile(rb"\n[ \t\r]*\n")
TEXT_FIELD = "text"  # of JSON lines and parquet
COMPRESSED: Mapping[str, Callable[..., Any]] = {".gz": gzip.open, ".bz2": bz2.open, ".xz": lzma.open}


# ---- text


def read_text(paths: Sequence[Path], number: int, size: int, _corrupt: Corrupt) -> WindowText | None:
    """Return the documents in window ``number`` of ``size`` bytes of the files, read as if concatenated.

    Where a window ends within a file, it is extended to the next end of a document. None after the last
    window.
    """
    begin, stop, documents = number * size, (number + 1) * size, list[str]()
    lengths = [path.stat().st_size for path in paths]
    if number and begin >= sum(lengths):
        return None
    offset = 0
    for path, length in zip(paths, lengths, strict=True):
        first, last = (_cut(path, place - offset, length) for place in (begin, stop))
        documents += [document(path, *ends) for *ends, _ in pieces(path, first, last)]
        offset += length
    return WindowText(documents, 0)


def _cut(path: Path, place: int, length: int) -> int:
    """Return the first byte offset from ``place`` on at which a document ends, from 0 to ``length``."""
    if place <= 0 or place >= length:
        return min(max(place, 0), length)
    with path.open("rb") as file:
        file.seek(place)
        window = file.read(DOCUMENT)
    if match := BLANK_LINE.search(window):
        return place + match.end()
    return length if place + len(window) == length else place + _end_of_document(window)


def document(path: Path, start: int, end: int) -> str:
    with path.open("rb") as file:
        file.seek(start)
        text = file.read(end - start)
    try:
        return text.decode().lstrip("\ufeff").replace("\r\n", "\n").strip()
    except UnicodeDecodeError as error:
        reason = f"are no longer valid text ({error}); has the file changed?"
        raise DataError(f"{path}: bytes {start} to {end} {reason}") from error


def pieces(path: Path, start: int = 0, end: int | None = None) -> Iterator[tuple[int, int, bytes]]:
    """Yield (start, end, text) of each nonblank document of a file between two byte offsets.

    SettingError where the file is not UTF-8 text.
    """
    size = path.stat().st_size if end is None else end
    if start >= size:
        return
    with path.open("rb") as file, mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ) as data:
        while start < size:
            window = data[start : min(start + DOCUMENT, size)]
            piece = window if start + len(window) == size else window[: _end_of_document(window)]
            _check_text(piece, path, start)
            if piece.strip():
                yield start, start + len(piece), piece
            start += len(piece)


def _end_of_document(window: bytes) -> int:
    """Return the byte offset in ``window`` at which its document ends.

    It is after the last blank line of the second half; without one after its last line, word or character.
    """
    half = len(window) // 2
    if blank := list(BLANK_LINE.finditer(window, half)):
        return blank[-1].end()
    for mark in (b"\n", b" "):
        if (end := window.rfind(mark, half)) >= 0:
            return end + 1
    end = len(window)
    while end > half and window[end - 1] & 0xC0 == 0x80:  # a continuation byte of UTF-8
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


# ---- JSON lines


def read_json_lines(paths: Sequence[Path], number: int, size: int, corrupt: Corrupt) -> WindowText | None:
    """Return the texts of the lines whose first byte, after decompression, lies in the window.

    A line that is not ``{"text": "..."}`` raises DataError, or is counted and skipped if ``corrupt`` is
    ``"skip"``. None after the last window.
    """
    (path,) = paths
    lines = _lines(path, number, size)
    if lines is None:
        return None
    documents, damaged = [], 0
    for place, line in lines:
        try:
            documents.append(json.loads(line)[TEXT_FIELD] + "")
        except (ValueError, KeyError, TypeError, RecursionError) as error:
            damaged += 1
            if corrupt == "stop":
                wrong = f'{path}: the line at byte {place:,} is no {{"{TEXT_FIELD}": "..."}} ({error!r:.100})'
                raise DataError(f"{wrong}: mend it, or set data.corrupt_records='skip'") from error
    return WindowText([text for text in documents if text.strip()], damaged)


def _lines(path: Path, number: int, size: int) -> list[tuple[int, bytes]] | None:
    """Return (byte offset, line) of each nonblank line that begins in the window; None after the last."""
    opened = COMPRESSED.get(path.suffix.lower())
    if opened is not None:
        return _compressed_window(path, number, size)
    if number and number * size >= path.stat().st_size:
        return None
    with path.open("rb") as file:
        if number:
            file.seek(number * size - 1)
            file.readline()  # skips the rest of a line that began in the window before
        return [*_lines_until(file, (number + 1) * size)]


def _lines_until(file: IO[bytes], stop: int) -> Iterator[tuple[int, bytes]]:
    while (place := file.tell()) < stop and (line := file.readline()):
        if line.strip():
            yield place, line


class _Reader:
    """Read a compressed file sequentially: the next window needs no decompression from the start."""

    def __init__(self, path: Path, size: int):
        self.file: Any = COMPRESSED[path.suffix.lower()](path)
        self.size, self.number = size, 0

    def window(self, number: int) -> list[tuple[int, bytes]] | None:
        while self.number < number:
            for _ in _lines_until(self.file, (self.number + 1) * self.size):
                pass
            self.number += 1
        begin = self.file.tell()
        lines = [*_lines_until(self.file, (number + 1) * self.size)]
        self.number = number + 1
        return None if number and self.file.tell() == begin and not self.file.peek(1) else lines


_READERS: dict[tuple[Path, int], _Reader] = {}  # those of this process, most recently used last
KEPT_OPEN = 32  # compressed files that stay open [files]


def _compressed_window(path: Path, number: int, size: int) -> list[tuple[int, bytes]] | None:
    reader = _READERS.pop((path, size), None)
    if reader is None or reader.number > number:
        reader = _Reader(path, size)
    try:
        found = reader.window(number)
    except (EOFError, lzma.LZMAError) as error:
        raise DataError(f"{path} is damaged or cut off: {error}") from error
    _READERS[path, size] = reader
    while len(_READERS) > KEPT_OPEN:
        _READERS.pop(next(iter(_READERS))).file.close()
    return found


# ---- parquet


def read_parquet(paths: Sequence[Path], number: int, size: int, _corrupt: Corrupt) -> WindowText | None:
    """Return the texts of the row groups that make up a window; a row group is the smallest unit to read.

    DataError if the file is damaged or has no column ``text``. None after the last window.
    """
    import pyarrow
    from pyarrow import parquet

    (path,) = paths
    try:
        with parquet.ParquetFile(path) as file:
            if TEXT_FIELD not in file.schema_arrow.names:
                raise DataError(f"{path} has no column {TEXT_FIELD!r}, but {file.schema_arrow.names}")
            sizes = [file.metadata.row_group(i).total_byte_size for i in range(file.num_row_groups)]
            windows = [*_row_groups(sizes, size)]
            if number >= max(len(windows), 1):
                return None
            texts: list[Any] = []
            for group in windows[number] if windows else ():
                texts += file.read_row_group(group, columns=[TEXT_FIELD])[TEXT_FIELD].to_pylist()
    except pyarrow.ArrowException as error:
        raise DataError(f"{path} cannot be read as parquet: {error}") from error
    return WindowText([text for text in texts if isinstance(text, str) and text.strip()], 0)


def _row_groups(sizes: Sequence[int], size: int) -> list[list[int]]:
    """Return the numbers of the row groups of each window: those whose first byte lies in it."""
    ends = itertools.accumulate(sizes)
    window = [(end - own) // size for end, own in zip(ends, sizes, strict=True)]
    return [[i for i, _ in group] for _, group in itertools.groupby(enumerate(window), lambda pair: pair[1])]


# (paths, number of the window, its size, what to do with corrupt records) -> the window
WINDOW_READERS: Mapping[str, Callable[[Sequence[Path], int, int, Corrupt], WindowText | None]] = {
    "text": read_text,
    "jsonl": read_json_lines,
    "parquet": read_parquet,
}
_JSON = (".jsonl", ".json")
FILE_ENDINGS = {
    "text": (".txt",),
    "jsonl": (*_JSON, *(json + packed for json in _JSON for packed in COMPRESSED)),
    "parquet": (".parquet",),
}

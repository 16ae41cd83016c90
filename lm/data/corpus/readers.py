"""Read windows of files: UTF-8 text, JSON lines (plain, gzip, bzip2 or xz) and parquet.

A text file is a document; a longer one is cut into several, at blank lines where that can be done. DataError
names the file and offset of what cannot be read.
"""

import bz2
import gzip
import json
import lzma
import mmap
import re
import zlib
from collections.abc import Callable, Iterator, Mapping, Sequence
from itertools import pairwise
from pathlib import Path
from typing import IO, Any

from lm.config.base import DataError, SettingError
from lm.data.corpus.shards import WindowText
from lm.data.corpus.tfds import OnCorrupt, file_stamp

# a longer document is split, at a blank line if its second half has one
MAX_DOCUMENT_BYTES = 8192
# Text is cut anew in each of these blocks of a file, so that its documents are the same in windows of any
# size: else a document that is held out would be trained on in other pieces.
BLOCK_BYTES = 1 << 16
BLANK_LINE = re.compile(rb"\n[ \t\r]*\n")
TEXT_FIELD = "text"  # of JSON lines and parquet
COMPRESSED: Mapping[str, Callable[..., Any]] = {".gz": gzip.open, ".bz2": bz2.open, ".xz": lzma.open}
DECOMPRESSION_ERRORS = (EOFError, zlib.error, lzma.LZMAError)  # besides OSError


# ---- text


def read_text(
    paths: Sequence[Path], window: int, window_bytes: int, _on_corrupt: OnCorrupt
) -> WindowText | None:
    """Return the documents of those blocks of the files that begin in a window, None after the last window.

    Windows count the bytes of all files as if concatenated. The documents of a block depend on its file
    alone.
    """
    begin, end = window * window_bytes, (window + 1) * window_bytes
    file_sizes = [path.stat().st_size for path in paths]
    if window and begin >= sum(file_sizes):
        return None
    documents = list[str]()
    file_start = 0
    for path, file_size in zip(paths, file_sizes, strict=True):
        first = _blocks_before(begin - file_start, file_size)
        last = _blocks_before(end - file_start, file_size)
        starts = [_next_document(path, block * BLOCK_BYTES, file_size) for block in range(first, last + 1)]
        for block_start, block_end in pairwise(starts):
            documents += split_documents(path, block_start, block_end)
        file_start += file_size
    return WindowText(documents, 0)


def _blocks_before(offset: int, file_size: int) -> int:
    """Return how many blocks of a file begin before ``offset``, which may lie outside of the file."""
    num_bytes = min(max(offset, 0), file_size)
    return -(-num_bytes // BLOCK_BYTES)


def _next_document(path: Path, offset: int, file_size: int) -> int:
    """Return the first byte from ``offset`` on at which a document begins, up to ``file_size``."""
    if not 0 < offset < file_size:
        return min(offset, file_size)
    with path.open("rb") as file:
        file.seek(offset)
        buffer = file.read(MAX_DOCUMENT_BYTES)
    if match := BLANK_LINE.search(buffer):
        return offset + match.end()
    if offset + len(buffer) == file_size:
        return file_size
    return offset + _end_of_document(buffer)


def split_documents(path: Path, start: int, end: int | None) -> Iterator[str]:
    """Yield each nonblank document of a file between two byte offsets, without blanks at its ends.

    end: None is the end of the file. SettingError where the file is not UTF-8 text.
    """
    end = path.stat().st_size if end is None else end
    if start >= end:
        return
    with path.open("rb") as file, mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ) as data:
        while start < end:
            buffer = data[start : min(start + MAX_DOCUMENT_BYTES, end)]
            is_last = start + len(buffer) == end
            document = buffer if is_last else buffer[: _end_of_document(buffer)]
            if text := _decode(document, path, start):
                yield text
            start += len(document)


def _end_of_document(buffer: bytes) -> int:
    """Return the number of bytes in ``buffer`` that belong to the document at its start.

    It ends after the last blank line of the buffer's second half; if there is none, after the last line, word
    or character.
    """
    half = len(buffer) // 2
    if blank_lines := list(BLANK_LINE.finditer(buffer, half)):
        return blank_lines[-1].end()
    for separator in (b"\n", b" "):
        if (end := buffer.rfind(separator, half)) >= 0:
            return end + 1
    end = len(buffer)
    while end > half and buffer[end - 1] & 0xC0 == 0x80:  # a continuation byte of UTF-8
        end -= 1
    is_first_byte = buffer[end - 1] & 0x80  # of a character of several bytes, which may lack its end
    return end - 1 if is_first_byte else end


def _decode(document: bytes, path: Path, start: int) -> str:
    """Return the text of a document that begins at byte ``start`` of a file, without blanks at its ends."""
    try:
        text, fault = document.decode(), document.find(b"\0")
    except UnicodeDecodeError as error:
        text, fault = "", error.start
    if fault >= 0:
        byte = f"byte {document[fault]:#04x} at offset {start + fault}"
        mend = "save the file so, or leave it out" if document[fault] else "leave this file out"
        raise SettingError(f"{path}: {byte} is not UTF-8 text; {mend}")
    return text.lstrip("\ufeff").replace("\r\n", "\n").strip()


# ---- JSON lines


def read_json_lines(
    paths: Sequence[Path], window: int, window_bytes: int, on_corrupt: OnCorrupt
) -> WindowText | None:
    """Return the texts of the lines whose first byte, after decompression, lies in the window.

    A line that is not ``{"text": "..."}`` raises DataError, or is skipped and counted if ``on_corrupt`` is
    ``"skip"``. None after the last window.
    """
    (path,) = paths
    lines = _read_lines(path, window, window_bytes)
    if lines is None:
        return None
    documents, num_corrupt = [], 0
    for offset, line in lines:
        try:
            documents.append(replace_lone_surrogates(_text_of_line(line)))
        except (ValueError, KeyError, TypeError, RecursionError) as error:
            num_corrupt += 1
            if on_corrupt == "stop":
                wrong = f'{path}: the line at byte {offset:,} is no {{"{TEXT_FIELD}": "..."}}'
                raise DataError(f"{wrong} {_mend_of_line(line, offset, error)}") from error
    return WindowText([text for text in documents if text.strip()], num_corrupt)


def _text_of_line(line: bytes) -> str:
    """Return the text in a line of JSON.

    KeyError if it lacks the field, TypeError if it is no object or the text no string; ValueError or
    RecursionError if it is not JSON.
    """
    row = json.loads(line)
    if not isinstance(row, dict):
        raise TypeError(f"it is {row!r:.40}, and should be an object")
    text = row[TEXT_FIELD]
    if not isinstance(text, str):
        raise TypeError(f"its {TEXT_FIELD} is {text!r:.40}, and should be a string")
    return text


def replace_lone_surrogates(text: str) -> str:
    """Return the text with "?" for each half of a character, as JSON may hold, which no tokenizer takes."""
    return text.encode(errors="replace").decode()


def _mend_of_line(line: bytes, offset: int, error: Exception) -> str:
    """Return what is wrong with a line of JSON lines, and what to do."""
    if isinstance(error, KeyError) and offset == 0:  # then all lines will have another field
        fields = ", ".join([*json.loads(line)][:5]) or "no field"
        return (
            f"(it has {fields}): rename the field of the text, such as with "
            f"jq -c '{{{TEXT_FIELD}: .content}}' in.jsonl > out.jsonl"
        )
    found = "it has no such field" if isinstance(error, KeyError) else f"{error!s:.100}"
    return f"({found}): mend it, or set data.corrupt_records='skip'"


def _read_lines(path: Path, window: int, window_bytes: int) -> list[tuple[int, bytes]] | None:
    """Return (byte offset, line) of each nonblank line that begins in the window; None after the last."""
    if path.suffix.lower() in COMPRESSED:
        return _read_compressed_lines(path, window, window_bytes)
    if window and window * window_bytes >= path.stat().st_size:
        return None
    with path.open("rb") as file:
        if window:
            file.seek(window * window_bytes - 1)
            file.readline()  # skips the rest of a line that began in the window before
        return [*_lines_until(file, (window + 1) * window_bytes)]


def _lines_until(file: IO[bytes], end: int) -> Iterator[tuple[int, bytes]]:
    while (offset := file.tell()) < end and (line := file.readline()):
        if line.strip():
            yield offset, line


class _CompressedReader:
    """Read a compressed file sequentially: the next window needs no decompression from the start."""

    def __init__(self, path: Path, window_bytes: int):
        self.file: Any = COMPRESSED[path.suffix.lower()](path)
        self.window_bytes, self.next_window = window_bytes, 0

    def read(self, window: int) -> list[tuple[int, bytes]] | None:
        while self.next_window < window:
            for _ in _lines_until(self.file, (self.next_window + 1) * self.window_bytes):
                pass
            self.next_window += 1
        begin = self.file.tell()
        lines = [*_lines_until(self.file, (window + 1) * self.window_bytes)]
        self.next_window = window + 1
        is_past_end = window and self.file.tell() == begin and not self.file.peek(1)
        return None if is_past_end else lines


# of this process, most recently used last, by file, size of windows and stamp of the file
_OPEN_READERS: dict[tuple[Path, int, tuple[int, int]], _CompressedReader] = {}
MAX_OPEN_READERS = 32


def _read_compressed_lines(path: Path, window: int, window_bytes: int) -> list[tuple[int, bytes]] | None:
    key = path, window_bytes, file_stamp(path)
    reader = _OPEN_READERS.pop(key, None)
    if reader is None or reader.next_window > window:
        reader = _CompressedReader(path, window_bytes)
    try:
        lines = reader.read(window)
    except DECOMPRESSION_ERRORS as error:
        raise DataError(f"{path} is damaged or cut off: {error}") from error
    _OPEN_READERS[key] = reader
    while len(_OPEN_READERS) > MAX_OPEN_READERS:
        oldest = next(iter(_OPEN_READERS))
        _OPEN_READERS.pop(oldest).file.close()
    return lines


# ---- parquet


def read_parquet(
    paths: Sequence[Path], window: int, window_bytes: int, _on_corrupt: OnCorrupt
) -> WindowText | None:
    """Return the texts of the row groups that make up a window; a row group is the smallest unit to read.

    DataError if the file is damaged or has not one column ``text``, of texts. None after the last window.
    """
    import pyarrow
    from pyarrow import parquet

    (path,) = paths
    try:
        with parquet.ParquetFile(path) as file:
            columns = file.schema_arrow.names
            if columns.count(TEXT_FIELD) != 1:
                raise DataError(f"{path} should have one column {TEXT_FIELD!r}, not {columns}")
            sizes = [file.metadata.row_group(i).total_byte_size for i in range(file.num_row_groups)]
            windows = _group_by_window(sizes, window_bytes) or [[]]
            if window >= len(windows):
                return None
            texts: list[Any] = []
            for group in windows[window]:
                texts += file.read_row_group(group, columns=[TEXT_FIELD])[TEXT_FIELD].to_pylist()
    except (pyarrow.ArrowException, UnicodeDecodeError) as error:
        raise DataError(f"{path} cannot be read as parquet: {error}") from error
    texts = [text for text in texts if text is not None]
    if others := sorted({type(text).__name__ for text in texts} - {"str"}):
        raise DataError(f"{path}: the column {TEXT_FIELD!r} should hold text, not {', '.join(others)}")
    return WindowText([text for text in texts if text.strip()], 0)


def _group_by_window(sizes: Sequence[int], window_bytes: int) -> list[list[int]]:
    """Return the row groups of each window: those whose first byte lies in it; empty windows are left out."""
    windows: dict[int, list[int]] = {}
    start = 0
    for group, size in enumerate(sizes):
        windows.setdefault(start // window_bytes, []).append(group)
        start += size
    return [*windows.values()]


# (paths, index of the window, its size, what to do with corrupt records) -> the window
WINDOW_READERS: Mapping[str, Callable[[Sequence[Path], int, int, OnCorrupt], WindowText | None]] = {
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

"""Reads pages from text files, JSON lines and WET files (C4's own input), part by part; reports damage."""

import functools
import gzip
import itertools
import json
import mmap
import re
import zlib
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import BinaryIO, NamedTuple

from lm.config.base import SettingError
from lm.data.corpus.readers import BLANK_LINE, replace_lone_surrogates, split_documents

# the most that one process reads at a time; a compressed file is never split, whatever its size
PART_BYTES = 1 << 26
MIN_PARTS = 64  # smaller sources have smaller parts, of a mebibyte or more
MAX_PAGE_BYTES = 1 << 27  # of a line of JSON
MAX_HEADERS = 1_000  # of a record of a WET file
MAX_RECORD_BYTES = 1 << 30  # of a WET file


class Piece(NamedTuple):
    path: str
    start: int  # first byte
    end: int  # one after the last byte; as stored, so compressed if the file is


class Page(NamedTuple):
    text: str
    url: str


class Damage(NamedTuple):
    location: str
    reason: str


def find_parts(source: Path) -> list[list[Piece]]:
    """Return the parts of a source: its files, sorted by name, split and grouped to at most PART_BYTES each.

    SettingError if no file has an ending of READERS.
    """
    paths = [source] if source.is_file() else sorted(path for path in source.rglob("*") if path.is_file())
    usable = [path for path in paths if ending(path) and path.stat().st_size]
    if not usable:
        reason = f"none of its {len(paths)} files does" if source.exists() else "it does not exist"
        raise SettingError(f"source={source} should hold files that end in {', '.join(READERS)}: {reason}")
    size = min(PART_BYTES, max(1 << 20, sum(path.stat().st_size for path in usable) // MIN_PARTS))
    parts: list[list[Piece]] = []
    room = 0
    for piece in itertools.chain.from_iterable(split_file(path, size) for path in usable):
        length = piece.end - piece.start
        if length > room:
            parts.append([])
            room = size
        parts[-1].append(piece)
        room -= length
    return parts


def ending(path: Path) -> str | None:
    """Return the ending of a file's name, without .gz, if it is a key of READERS, else None."""
    name = path.name.lower()
    end = Path(name.removesuffix(".gz")).suffix
    return end if end in READERS and not name.endswith(".txt.gz") else None


def split_file(path: Path, part: int) -> Iterator[Piece]:
    """Yield the pieces of a file, split at the first split point after each multiple of ``part`` bytes.

    Compressed and WET files stay in one piece.
    """
    size, split_point, cuts = path.stat().st_size, SPLIT_POINTS.get(path.suffix.lower()), [0]
    if split_point and size > part:
        with path.open("rb") as file, mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ) as data:
            for start in range(part, size, part):
                if start >= cuts[-1] and (match := split_point.search(data, start)) and match.end() < size:
                    cuts.append(match.end())
    yield from (Piece(str(path), *ends) for ends in itertools.pairwise([*cuts, size]))


def read_pages(piece: Piece) -> Iterator[Page | Damage]:
    """Yield the pages of a piece that hold text, and a Damage for what could not be read."""
    try:
        for page in READERS[ending(Path(piece.path)) or ""](piece):
            if isinstance(page, Damage):
                yield page
            elif page.text.strip():
                yield Page(*map(replace_lone_surrogates, page))
    except (OSError, EOFError, zlib.error, SettingError) as error:
        yield Damage(piece.path, f"{error}; the rest of it is skipped")


def _open(path: str) -> gzip.GzipFile | BinaryIO:
    return gzip.open(path) if path.lower().endswith(".gz") else open(path, "rb")


def _lines(file: gzip.GzipFile | BinaryIO) -> Iterator[bytes]:
    """Yield the lines, truncated to MAX_PAGE_BYTES; a truncated line is damaged JSON."""
    for line in iter(lambda: file.readline(MAX_PAGE_BYTES), b""):
        end = line
        while len(end) == MAX_PAGE_BYTES and not end.endswith(b"\n"):
            end = file.readline(MAX_PAGE_BYTES)
        yield line


def text_pages(piece: Piece) -> Iterator[Page]:
    """Yield the documents of a text file as pages, split like the corpus ``text:PATH``."""
    for text in split_documents(Path(piece.path), piece.start, piece.end):
        yield Page(text, "")


def json_pages(piece: Piece) -> Iterator[Page | Damage]:
    compressed = piece.path.lower().endswith(".gz")
    with _open(piece.path) as file:
        file.seek(piece.start)
        for number, line in enumerate(_lines(file), 1):
            try:
                row = json.loads(line) if line.strip() else {"text": ""}
                yield Page(row["text"] + "", (row.get("url") or "") + "")
            except (ValueError, KeyError, TypeError, AttributeError, RecursionError) as error:
                location = f"{piece.path}, line {_lines_before(piece) + number}"
                yield Damage(location, f'no {{"text": ...}}: {error!r:.200}')
            if not compressed and file.tell() >= piece.end:
                return


@functools.lru_cache(maxsize=1)  # every damaged line of a piece needs it
def _lines_before(piece: Piece) -> int:
    with open(piece.path, "rb") as file:
        chunks = iter(lambda: file.read(min(1 << 20, piece.start - file.tell())), b"")
        return sum(chunk.count(b"\n") for chunk in chunks)


def wet_pages(piece: Piece) -> Iterator[Page | Damage]:
    """Yield the records of WARC/1.0 (ISO 28500) that hold the text of a page, or a Damage."""
    with _open(piece.path) as file:
        number = 1
        in_damage = False  # the damage was reported, and the next record has not begun
        for line in _lines(file):
            location = f"{piece.path}, record {number}"
            if not line.startswith(b"WARC/"):
                if line.strip() and not in_damage:
                    in_damage = True
                    yield Damage(location, f"begins with {line[:40]!r}, not with 'WARC/'")
                continue
            number, in_damage = number + 1, False
            headers = _read_headers(file)
            length = headers.get("content-length", "")
            if not re.fullmatch("[0-9]{1,10}", length) or int(length) >= MAX_RECORD_BYTES:
                in_damage = True
                yield Damage(location, f"Content-Length is {length[:40]!r}")
                continue
            body = file.read(int(length))
            if len(body) < int(length):
                yield Damage(location, f"ends after {len(body)} of {length} bytes")
            elif headers.get("warc-type") == "conversion":
                yield Page(body.decode(errors="replace"), headers.get("warc-target-uri", ""))


def _read_headers(file: gzip.GzipFile | BinaryIO) -> dict[str, str]:
    """Return ``{name in lower case: value}`` of the lines up to an empty one, MAX_HEADERS at most."""
    headers = {}
    for line in itertools.islice(_lines(file), MAX_HEADERS):
        if not line.strip():
            break
        name, _, value = line.strip().decode(errors="replace").partition(":")
        headers[name.lower()] = value.strip()
    return headers


PageReader = Callable[[Piece], Iterator[Page] | Iterator[Page | Damage]]
JSON_ENDINGS = (".jsonl", ".json")
READERS: Mapping[str, PageReader] = {
    ".txt": text_pages,
    **dict.fromkeys(JSON_ENDINGS, json_pages),
    ".wet": wet_pages,
}
SPLIT_POINTS = {".txt": BLANK_LINE, **dict.fromkeys(JSON_ENDINGS, re.compile(rb"\n"))}

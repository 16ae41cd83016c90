"""Pages of text files, JSON lines and WET files (C4's own input), a part at a time; what is damaged is
named.
"""

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

from lm.data.text.sources import BLANK_LINE, document, pieces
from lm.settings import SettingError

# one process reads so much at a time, of small sources less; a compressed file is never split [bytes]
PART = 1 << 26
PARTS = 64  # a source has as many, if they are of a mebibyte at least
LINE = 1 << 27  # no page of JSON lines is as long [bytes]
FIELDS = 1_000  # no record of a WET file has as many headers
RECORD = 1 << 30  # no record of a WET file is as long [bytes]


class Piece(NamedTuple):
    path: str
    start: int  # first byte
    end: int  # byte behind the last, as stored


class Page(NamedTuple):
    text: str
    url: str


class Damage(NamedTuple):
    place: str
    reason: str


def find_parts(source: Path) -> list[list[Piece]]:
    """The files below ``source`` in order of name, split and grouped into parts of equal size, PART at
    most.
    """
    found = [source] if source.is_file() else sorted(path for path in source.rglob("*") if path.is_file())
    usable = [path for path in found if kind(path) and path.stat().st_size]
    if not usable:
        there = f"none of its {len(found)} files ends so" if source.exists() else "it does not exist"
        raise SettingError(f"source={source} should hold files {', '.join(READERS)}: {there}")
    size = min(PART, max(1 << 20, sum(path.stat().st_size for path in usable) // PARTS))
    parts, room = [], 0
    for piece in (piece for path in usable for piece in split(path, size)):
        if (room := room - (piece.end - piece.start)) < 0:
            parts.append([])
            room = size - (piece.end - piece.start)
        parts[-1].append(piece)
    return parts


def kind(path: Path) -> str | None:
    """The ending that says how to read a file; None if it is not for us."""
    name = path.name.lower()
    end = Path(name.removesuffix(".gz")).suffix
    return end if end in READERS and not name.endswith(".txt.gz") else None


def split(path: Path, part: int) -> Iterator[Piece]:
    """Cuts at the first mark behind each multiple of ``part``; what is compressed, or a WET file, stays
    whole.
    """
    size, mark, cuts = path.stat().st_size, MARKS.get(path.suffix.lower()), [0]
    if mark and size > part:
        with path.open("rb") as file, mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ) as data:
            for place in range(part, size, part):
                if place >= cuts[-1] and (found := mark.search(data, place)) and found.end() < size:
                    cuts.append(found.end())
    yield from (Piece(str(path), *ends) for ends in itertools.pairwise([*cuts, size]))


def read(piece: Piece) -> Iterator[Page | Damage]:
    """The pages of a piece that hold text, and what could not be read."""
    try:
        for found in READERS[kind(Path(piece.path)) or ""](piece):
            if isinstance(found, Damage):
                yield found
            elif found.text.strip():
                # JSON may hold half characters
                yield Page(*(text.encode(errors="replace").decode() for text in found))
    except (OSError, EOFError, zlib.error, SettingError) as error:
        yield Damage(piece.path, f"{error}; the rest of it is left out")


def _open(path: str) -> BinaryIO:
    return gzip.open(path) if path.lower().endswith(".gz") else open(path, "rb")


def lines(file: BinaryIO) -> Iterator[bytes]:
    """The lines; of one of more than LINE bytes that many, which is no JSON then."""
    for line in iter(lambda: file.readline(LINE), b""):
        end = line
        while len(end) == LINE and not end.endswith(b"\n"):
            end = file.readline(LINE)
        yield line


def text_pages(piece: Piece) -> Iterator[Page]:
    """Documents cut as the corpus ``text:PATH`` cuts them."""
    for start, end, _ in pieces(Path(piece.path), piece.start, piece.end):
        yield Page(document(Path(piece.path), start, end), "")


def json_pages(piece: Piece) -> Iterator[Page | Damage]:
    packed = piece.path.lower().endswith(".gz")
    with _open(piece.path) as file:
        file.seek(piece.start)
        for number, line in enumerate(lines(file), 1):
            try:
                row = json.loads(line) if line.strip() else {"text": ""}
                yield Page(row["text"] + "", (row.get("url") or "") + "")
            except (ValueError, KeyError, TypeError, AttributeError, RecursionError) as error:
                place = f"{piece.path}, line {lines_before(piece) + number}"
                yield Damage(place, f'no {{"text": ...}}: {error!r:.200}')
            if not packed and file.tell() >= piece.end:
                return


@functools.lru_cache(maxsize=1)  # a damaged file may be so in every line
def lines_before(piece: Piece) -> int:
    with open(piece.path, "rb") as file:
        chunks = iter(lambda: file.read(min(1 << 20, piece.start - file.tell())), b"")
        return sum(chunk.count(b"\n") for chunk in chunks)


def wet_pages(piece: Piece) -> Iterator[Page | Damage]:
    """Of the records of WARC/1.0 (ISO 28500) those that hold the text of a page."""
    with _open(piece.path) as file:
        number, lost = 1, False
        for line in lines(file):
            place = f"{piece.path}, record {number}"
            if not line.startswith(b"WARC/"):
                if line.strip() and not lost:
                    lost = True
                    yield Damage(place, f"begins with {line[:40]!r}, not with 'WARC/'")
                continue
            number, lost = number + 1, False
            head = itertools.islice(iter(lambda: next(lines(file), b"").strip(), b""), FIELDS)
            rows = (row.decode(errors="replace").partition(":") for row in head)
            headers = {name.lower(): value.strip() for name, _, value in rows}
            length = headers.get("content-length", "")
            if not re.fullmatch("[0-9]{1,10}", length) or int(length) >= RECORD:
                lost = True
                yield Damage(place, f"Content-Length is {length[:40]!r}")
                continue
            body = file.read(int(length))
            if len(body) < int(length):
                yield Damage(place, f"ends after {len(body)} of {length} bytes")
            elif headers.get("warc-type") == "conversion":
                yield Page(body.decode(errors="replace"), headers.get("warc-target-uri", ""))


READERS: Mapping[str, Callable[[Piece], Iterator[Page | Damage]]] = {
    ".txt": text_pages,
    ".jsonl": json_pages,
    ".json": json_pages,
    ".wet": wet_pages,
}
MARKS = {".txt": BLANK_LINE, ".jsonl": re.compile(rb"\n"), ".json": re.compile(rb"\n")}

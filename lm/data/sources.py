"""Corpora as sequences of texts and benchmarks as sequences of rows: random access, decoded when asked for.

A corpus is ``documentation`` (what is installed here; written on first use) or ``documentation/PART``, ``text:PATH`` (a
file, a folder of .txt files or a glob) or ``tfds:NAME[:VERSION]`` (a TFDS set prepared as array_record, such as
``tfds:c4/en``), or several with " + " between them, one after the other.
"""

import dataclasses
import functools
import glob
import hashlib
import mmap
import os
import re
import sys
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from lm.config import SettingError, nearest

Row = dict[str, Any]
DOCUMENT = 8192  # a longer file is cut, at a blank line if it has one in the right place [bytes]
HELD_OUT = 0.05  # share of the documents that are validation when nobody has set some apart
TEXT_SPLITS = dict.fromkeys(("valid", "val", "dev", "validation"), "validation") | {"test": "test"}
BLANK_LINE = re.compile(rb"\n[ \t\r]*\n")


def documents(spec: str, split: str, cache: Path) -> Sequence[str]:
    """The texts of a corpus, ``train`` or ``validation``, with a ``fingerprint`` of their content."""
    if split not in ("train", "validation"):
        raise SettingError(f"split={split!r} of a corpus should be 'train' or 'validation'")
    if " + " in spec:
        return Joined(tuple(documents(part.strip(), split, cache) for part in spec.split(" + ")))
    kind, _, name = spec.partition(":")
    if kind.partition("/")[0] == "documentation" and not name:
        from lm.data import documentation  # imports TFDS, which takes seconds

        return documentation.texts(kind.partition("/")[2], split, cache)
    if kind == "tfds" and name:
        return tfds_texts(name, split, cache)
    if kind == "text" and name:
        return text_files(name, split)
    kinds = ("documentation", "documentation/PART", "text:PATH", "tfds:NAME")
    raise SettingError(f"data.corpus={spec!r} should be one of {', '.join(kinds)}{nearest(kind, kinds)}")


@dataclasses.dataclass(frozen=True)
class Joined(Sequence[str]):
    """Several corpora, one after the other."""

    parts: tuple[Sequence[str], ...]

    def __len__(self) -> int:
        return sum(map(len, self.parts))

    def __getitem__(self, index: int) -> str:
        index = range(len(self))[index]
        for part in self.parts:
            if index < len(part):
                return part[index]
            index -= len(part)
        raise IndexError(index)

    @property
    def fingerprint(self) -> str:
        return hashlib.sha256(" + ".join(part.fingerprint for part in self.parts).encode()).hexdigest()


def examples(name: str, split: str, cache: Path) -> "Rows":
    """The rows of a prepared TFDS set, text as str; ``split`` may be any of TFDS's expressions (``train[:10%]``)."""
    folder = find(name, cache)
    builder = _builder(folder)
    for part in split.split("+"):
        if part.partition("[")[0] not in builder.info.splits:
            raise SettingError(f"{name} at {folder} has no split {part!r}{nearest(part, builder.info.splits)}")
    return Rows(folder, split)


# TFDS


def find(name: str, cache: Path) -> Path:
    """The folder ``name[:version]`` was prepared in (the newest version if none is given)."""
    name, _, version = name.partition(":")
    if name.startswith("documentation/"):
        from lm.data import documentation

        documentation.prepare(cache, name=name.partition("/")[2], report=lambda line: print(line, file=sys.stderr))
    if folder := newest(name, version or "*.*.*", cache):
        return folder
    places, there = tfds_folders(cache), prepared(cache)
    hint = nearest(f"{name}/{version}", there) if version else nearest(name, {os.path.dirname(p) for p in there})
    said = f"data set {name!r}{f' version {version}' * bool(version)} is not prepared in {', '.join(map(str, places))}"
    raise SettingError(f"{said}{hint}; to prepare it: {preparation(name, places[0])}")


def newest(name: str, version: str, cache: Path) -> Path | None:
    """The folder of the newest prepared version that matches, in the first place that has one; None: there is none."""
    found = (list((place / name).glob(f"{version}/dataset_info.json")) for place in tfds_folders(cache))
    folders = [about.parent for about in next(filter(None, found), [])]
    return max(folders, key=lambda folder: [int(n) for n in re.findall(r"\d+", folder.name)], default=None)


def tfds_folders(cache: Path) -> list[Path]:
    """Where prepared sets are looked for, in order."""
    given = os.environ.get("TFDS_DATA_DIR")
    return [Path(cache) / "tfds", *([Path(given)] if given else []), Path.home() / "tensorflow_datasets"]


def prepared(cache: Path) -> list[str]:
    """``name/version`` or ``name/config/version`` of every prepared set."""
    patterns = ("[!.]*/*.*.*/dataset_info.json", "[!.]*/*/*.*.*/dataset_info.json")
    found = [(path, place) for place in tfds_folders(cache) for pattern in patterns for path in place.glob(pattern)]
    return sorted({str(path.parent.relative_to(place)) for path, place in found})


def preparation(name: str, place: Path) -> str:
    """The command that prepares a TFDS set so that it can be read here."""
    return f"tfds build {name} --file_format=array_record --data_dir={place} (some sets need TensorFlow for this)"


@functools.lru_cache(maxsize=32)
def _builder(folder: Path) -> Any:
    import tensorflow_datasets as tfds  # takes seconds, hence not at the top

    builder = tfds.builder_from_directory(folder)
    formats = {file_format.value for file_format in builder.info.available_file_formats()}
    if not formats & {"array_record", "parquet"}:
        name = f"{builder.info.name}/{builder.info.config_name or ''}".rstrip("/")
        raise SettingError(
            f"{folder} holds {'/'.join(sorted(formats)) or 'unknown'} files, which have no random access; convert them:"
            f" tfds convert_format --dataset_version_dir={folder} --out_file_format=array_record,"
            f" or prepare anew: {preparation(name, folder.parents[name.count('/') + 1])}"
        )
    return builder


class Rows(Sequence[Row]):
    """Rows of one split of a TFDS set; opened on first use, in whichever process that is."""

    def __init__(self, folder: Path, split: str):
        self.folder, self.split = folder, split

    @functools.cached_property
    def source(self) -> Any:
        return _builder(self.folder).as_data_source(split=self.split)

    def __getstate__(self) -> Row:
        return {"folder": self.folder, "split": self.split}

    def __len__(self) -> int:
        return len(self.source)

    def __getitem__(self, index: int) -> Row:
        if not -len(self) <= index < len(self):
            raise IndexError(index)
        return {name: plain(value) for name, value in self.source[index % len(self)].items()}

    @property
    def fingerprint(self) -> str:
        """Of the stored bytes; of names, sizes and both ends of a file where a file is larger than 64 MiB."""
        digest = hashlib.sha256(self.split.encode())
        for path in sorted((*self.folder.glob("*array_record*"), *self.folder.glob("*parquet*"))):
            with path.open("rb") as file:
                size, end = os.fstat(file.fileno()).st_size, 1 << 25
                digest.update(f"{path.name} {size}".encode() + file.read(end))
                file.seek(max(end, size - end))
                digest.update(file.read(end))
        return digest.hexdigest()


def plain(value: Any) -> Any:
    """str, numbers, lists and dicts from what TFDS decodes."""
    if isinstance(value, bytes):
        return value.decode("utf-8", errors="replace")
    if isinstance(value, dict):
        return {name: plain(item) for name, item in value.items()}
    if isinstance(value, np.ndarray) and value.dtype != object and value.ndim:
        return value.tolist()
    if isinstance(value, (np.ndarray, list, tuple)):
        return [plain(item) for item in value] if np.ndim(value) else plain(value.item())
    return value.item() if isinstance(value, np.generic) else value


@dataclasses.dataclass(frozen=True)
class Texts(Sequence[str]):
    """One text feature of ``rows``, of all or of those that are ``chosen``."""

    rows: Rows
    feature: str
    chosen: Sequence[int]

    def __len__(self) -> int:
        return len(self.chosen)

    def __getitem__(self, index: int) -> str:
        return self.rows[self.chosen[index]][self.feature]

    @property
    def fingerprint(self) -> str:
        """That of the rows where all are chosen."""
        own = self.rows.fingerprint
        if len(self) == len(self.rows):
            return own
        return hashlib.sha256(own.encode() + np.array(self.chosen, np.int64).tobytes()).hexdigest()


def tfds_texts(name: str, split: str, cache: Path) -> Texts:
    """The texts of a TFDS set; the last of ``train`` are held out if it has no validation split."""
    folder = find(name, cache)
    info = _builder(folder).info
    features = [key for key, feature in info.features.items() if type(feature).__name__ == "Text"]
    if "text" not in features and len(features) != 1:
        raise SettingError(f"{name} at {folder} should have a text feature 'text', or only one, not {features}")
    held_out = next((key for key in ("validation", "valid", "dev") if key in info.splits), None)
    percent = round(100 * (1 - HELD_OUT))
    parts = {"train": "train" if held_out else f"train[:{percent}%]", "validation": held_out or f"train[{percent}%:]"}
    rows = examples(name, parts[split], cache)
    if not len(rows):
        raise SettingError(f"{name} at {folder}: split {parts[split]!r} has no rows")
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

    def __getitem__(self, index: int) -> str:
        path, start, end = self.pieces[index].tolist()
        return document(self.paths[path], start, end)


def document(path: Path, start: int, end: int) -> str:
    with path.open("rb") as file:
        file.seek(start)
        return file.read(end - start).decode().lstrip("\ufeff").replace("\r\n", "\n").strip()


def text_files(pattern: str, split: str) -> TextFiles:
    """Validation is what is named so (valid, val, dev), else a share chosen by content; test is left out."""
    paths = matches(pattern)
    base = Path(os.path.commonpath([path.parent for path in paths]))
    splits = [next(filter(None, map(_split_of, path.relative_to(base).parts)), "train") for path in paths]
    own = "validation" in splits
    chosen = tuple(path for path, name in zip(paths, splits, strict=True) if name == (split if own else "train"))
    found = [(i, start, end, digest) for i, path in enumerate(chosen) for start, end, digest in pieces(path)]
    if not own:
        edge = sorted(digest for *_, digest in found)[: max(1, round(HELD_OUT * len(found)))][-1:]
        found = [piece for piece in found if ([piece[3]] <= edge) == (split == "validation")]
    if not found:
        raise SettingError(f"data.corpus=text:{pattern}: no text for {split!r} in {len(paths)} files; add text")
    fingerprint = hashlib.sha256(b"".join(digest for *_, digest in found)).hexdigest()
    return TextFiles(chosen, np.array([piece[:3] for piece in found], np.int64), fingerprint)


def matches(pattern: str) -> list[Path]:
    pattern = os.path.expanduser(pattern)
    inner = f"{glob.escape(pattern)}/**/*.txt" if os.path.isdir(pattern) else pattern
    found = [Path(pattern)] if os.path.isfile(pattern) else [Path(name) for name in glob.glob(inner, recursive=True)]
    files = sorted(path for path in found if path.is_file())
    if not files:
        raise SettingError(f"data.corpus=text:{pattern}: no file matches {os.path.abspath(inner)}")
    return files


def _split_of(part: str) -> str | None:
    return TEXT_SPLITS.get(re.split(r"[._-]", part.lower())[0])


def pieces(path: Path, start: int = 0, end: int | None = None) -> Iterator[tuple[int, int, bytes]]:
    """(start, end, digest) of the documents of a file that hold text; SettingError where it is no UTF-8 text."""
    size = path.stat().st_size if end is None else end
    if not size:
        return
    with path.open("rb") as file, mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ) as data:
        while start < size:
            window = data[start : min(start + DOCUMENT, size)]
            piece = window if start + len(window) == size else window[: cut(window)]
            _check_text(piece, path, start)
            if piece.strip():
                yield start, start + len(piece), hashlib.sha256(piece.strip()).digest()
            start += len(piece)


def cut(window: bytes) -> int:
    """Where the document ends: behind the last blank line, else line, else word of the second half, else character."""
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
        wrong = piece.find(b"\0")
    except UnicodeDecodeError as error:
        wrong = error.start
    if wrong >= 0:
        place = f"byte {piece[wrong]:#04x} at offset {start + wrong}"
        raise SettingError(f"{path}: {place} is no UTF-8 text; leave this file out")

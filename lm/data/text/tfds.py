"""TFDS sets that were prepared as array_record: found, checked before anything is read of them, read row by
row.

array_record keeps a hash with every record and with the index behind them, so no bit that is read can have
changed unnoticed; each file is opened, and its records counted, before training begins. A record is read when
it is needed.
"""

import bisect
import functools
import hashlib
import json
import os
import re
import resource
import sys
from collections.abc import Iterator, Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any, Literal

import numpy as np

from lm.files import is_sealed, write_sealed
from lm.settings import DataError, SettingError, nearest, parse_json, read_object

Row = dict[str, Any]
Corrupt = Literal["stop", "skip"]  # what becomes of records to train on that cannot be read
CLASSES = "tensorflow_datasets."  # features.json names classes to import, which runs their module
BLOCK = 1_024  # records that are read at once to find the corrupt ones
MEND = "restore the files, or delete the folder and prepare the set anew"
# a fault of the machine, such as "open() failed: Too many open files"
MACHINE = re.compile(r"\w\(\) failed:")
SHOWN = 5  # of what is wrong with a set, so many are named; all is counted


def examples(name: str, split: str, cache: Path, corrupt: Corrupt = "stop") -> "Rows":
    """The rows of a prepared TFDS set, text as str; ``split`` may be any of TFDS's expressions
    (``train[:10%]``).

    SettingError or DataError if the set or one of the split's files is missing or damaged. Corrupt records
    are left out with ``corrupt="skip"``, else reading one is a DataError.
    """
    folder = find(name, cache)
    info = open_set(folder).info
    for part in split.split("+"):
        if part.partition("[")[0] not in info.splits:
            raise SettingError(f"{name} at {folder} has no split {part!r}{nearest(part, info.splits)}")
    check_files(folder, split)
    return Rows(folder, split, corrupt_records(Rows(folder, split), cache) if corrupt == "skip" else ())


def find(name: str, cache: Path) -> Path:
    """The folder ``name[:version]`` was prepared in (the newest version if none is given)."""
    name, _, version = name.partition(":")
    if folder := newest(name, version or "*.*.*", cache):
        return folder
    places, there = tfds_folders(cache), prepared(cache)
    hint = (
        nearest(f"{name}/{version}", there) if version else nearest(name, {os.path.dirname(p) for p in there})
    )
    wanted = f"{name!r}{f' version {version}' * bool(version)}"
    raise SettingError(
        f"data set {wanted} is not prepared in {', '.join(map(str, places))}{hint}; to prepare it: "
        f"{preparation(name, places[0])}"
    )


def newest(name: str, version: str, cache: Path) -> Path | None:
    """The folder of the newest prepared version that matches, in the first place that has one; None: there is
    none.
    """
    found = (list((place / name).glob(f"{version}/dataset_info.json")) for place in tfds_folders(cache))
    folders = [about.parent for about in next(filter(None, found), [])]
    return max(folders, key=lambda folder: [int(n) for n in re.findall(r"\d+", folder.name)], default=None)


def tfds_folders(cache: Path) -> list[Path]:
    """Where prepared sets are looked for, in order."""
    # which stays "~" where there is none
    given, home = os.environ.get("TFDS_DATA_DIR"), os.path.expanduser("~")
    usual = [] if home == "~" else [Path(home) / "tensorflow_datasets"]
    return [Path(cache) / "tfds", *([Path(given)] if given else []), *usual]


def prepared(cache: Path) -> list[str]:
    """``name/version`` or ``name/config/version`` of every prepared set."""
    patterns = ("[!.]*/*.*.*/dataset_info.json", "[!.]*/*/*.*.*/dataset_info.json")
    found = [
        (path, place) for place in tfds_folders(cache) for pattern in patterns for path in place.glob(pattern)
    ]
    return sorted({str(path.parent.relative_to(place)) for path, place in found})


def preparation(name: str, place: Path) -> str:
    """The command that prepares a TFDS set so that it can be read here."""
    return (
        f"tfds build {name} --file_format=array_record --data_dir={place} "
        "(some sets need TensorFlow for this)"
    )


@functools.lru_cache(maxsize=32)
def open_set(folder: Path) -> Any:
    """The builder of a prepared set; DataError if what describes the set is damaged, or would run code of its
    own.
    """
    import tensorflow_datasets as tfds  # takes seconds, hence not at the top

    _described(folder / "dataset_info.json")
    features = folder / "features.json"
    for kind in _classes(_described(features)):
        if not kind.startswith(CLASSES):
            raise DataError(
                f"{features} names {kind!r}, code outside of TFDS that would run: do not use this set"
            )
    try:
        builder = tfds.builder_from_directory(folder)
        formats = {file_format.value for file_format in builder.info.available_file_formats()}
    except Exception as error:  # TFDS and protobuf have many for a damaged file
        raise DataError(f"{folder} cannot be read as a TFDS set ({error!r:.500}): {MEND}") from error
    if not formats & {"array_record", "parquet"}:
        name = f"{builder.info.name}/{builder.info.config_name or ''}".rstrip("/")
        raise SettingError(
            f"{folder} holds {'/'.join(sorted(formats)) or 'unknown'} files, which have no random access; "
            "convert them:"
            f" tfds convert_format --dataset_version_dir={folder} --out_file_format=array_record,"
            f" or prepare anew: {preparation(name, folder.parents[name.count('/') + 1])}"
        )
    return builder


def _described(path: Path) -> Row:
    try:
        return read_object(path)
    except SettingError as error:
        raise DataError(f"{error}; it is damaged or missing: {MEND}") from error


def _classes(described: Any) -> Iterator[str]:
    """What features.json has TFDS import, in its present form, its former one, and JSON within JSON."""
    for key, value in described.items() if isinstance(described, dict) else enumerate(described):
        if isinstance(value, dict | list):
            yield from _classes(value)
        elif key in ("pythonClassName", "python_class_name", "type") and isinstance(value, str):
            yield value
        elif key == "json" and isinstance(value, str):
            yield from _classes([parse_json(value, "features.json")])


def split_sizes(folder: Path) -> dict[str, int]:
    """Rows of each split as dataset_info.json says, read without TFDS."""
    path = folder / "dataset_info.json"
    try:
        return {split["name"]: sum(map(int, split["shardLengths"])) for split in _described(path)["splits"]}
    except (KeyError, TypeError, ValueError) as error:
        raise DataError(f"{path} lists no splits ({error!r:.200}): {MEND}") from error


def files_of(folder: Path, split: str) -> list[Any]:
    """TFDS's instructions of which records of which files make up ``split``."""
    try:
        found = open_set(folder).info.splits[split].file_instructions
    except Exception as error:  # for instance of an expression that is none
        raise SettingError(f"{folder} has no part {split!r}: {error!r:.300}") from error
    if not found:
        raise SettingError(f"{folder}: split {split!r} has no rows; choose a larger part, or {MEND}")
    return found


def check_files(folder: Path, split: str) -> None:
    """DataError unless all files of ``split`` are there and hold as many records as dataset_info.json
    says.
    """
    files = {Path(file.filename): file.examples_in_shard for file in files_of(folder, split)}
    if outside := [path for path in files if path.parent != folder]:
        raise DataError(f"{folder} names {outside[0]}, which lies elsewhere: {MEND}")
    wrong = [fault for path, count in files.items() if (fault := _fault(path, count))]
    if wrong:
        shown = "".join(f"\n  {fault}" for fault in wrong[:SHOWN])
        raise DataError(
            f"{folder}, split {split!r}: {len(wrong)} of {len(files)} files are damaged ({MEND}):{shown}"
        )


def _fault(path: Path, count: int) -> str | None:
    if not path.is_file() or not path.stat().st_size:
        return f"{path.name} is {'empty' if path.exists() else 'missing'}"
    return _opened(path, count, *stamp(path)) if "array_record" in path.name else None


@functools.lru_cache(maxsize=4096)
def _opened(path: Path, count: int, size: int, changed: int) -> str | None:
    """What is wrong with the records of a file that has this size and was last ``changed`` at this time."""
    # nothing else that lists rows needs it
    from array_record.python.array_record_module import ArrayRecordReader

    try:
        reader = ArrayRecordReader(str(path))
        found = reader.num_records()
        if not reader.ok():
            reader.read([0])  # says why
        reader.close()
    except (RuntimeError, ValueError, OSError, IndexError) as error:
        return f"{path.name} cannot be opened: {error}"
    return (
        None if found == count else f"{path.name} has {found:,} records, dataset_info.json counts {count:,}"
    )


def corrupt_records(rows: "Rows", cache: Path) -> tuple[int, ...]:
    """Places of the records that cannot be read; looked for once, then kept in ``cache``."""
    about = [
        (file.filename, file.skip, file.take, stamp(file.filename))
        for file in files_of(rows.folder, rows.split)
    ]
    path = Path(cache) / "corrupt" / f"{hashlib.sha256(repr(about).encode()).hexdigest()[:16]}.json"
    if is_sealed(path):
        return tuple(json.loads(path.read_bytes()))
    print(f"looking for corrupt records in {rows.folder}, once", file=sys.stderr, flush=True)
    corrupt = []
    for start in range(0, len(rows), BLOCK):
        places = range(start, min(start + BLOCK, len(rows)))
        try:
            rows.source.__getitems__([*places])
        except Exception:
            corrupt += [place for place in places if not _reads(rows, place)]
    write_sealed(path, json.dumps(corrupt).encode())
    return tuple(corrupt)


def _reads(rows: "Rows", place: int) -> bool:
    try:
        rows[place]
    except DataError:
        return False
    return True


def stamp(path: str | Path) -> tuple[int, int]:
    """Size [bytes] and time of the last change [nanoseconds] of a file."""
    about = os.stat(path)
    return about.st_size, about.st_mtime_ns


class Rows(Sequence[Row]):
    """Rows of one split of a TFDS set, but for those ``left_out``; opened on first use, in whichever process
    that is.

    A record that cannot be read is a DataError with its file and place.
    """

    def __init__(self, folder: Path, split: str, left_out: tuple[int, ...] = ()):
        self.folder, self.split, self.left_out = folder, split, left_out
        self._shifts = [place - before for before, place in enumerate(left_out)]

    @functools.cached_property
    def source(self) -> Any:
        with suppress(OSError, ValueError):  # a reader keeps each of its files open
            resource.setrlimit(resource.RLIMIT_NOFILE, (resource.getrlimit(resource.RLIMIT_NOFILE)[1],) * 2)
        return open_set(self.folder).as_data_source(split=self.split)

    def __reduce__(self) -> tuple[Any, ...]:
        return Rows, (self.folder, self.split, self.left_out)

    def __len__(self) -> int:
        return len(self.source) - len(self.left_out)

    def __getitem__(self, index: int) -> Row:
        if not -len(self) <= index < len(self):
            raise IndexError(index)
        place = index % len(self)
        place += bisect.bisect_right(self._shifts, place)
        try:
            return {name: plain(value) for name, value in self.source[place].items()}
        except Exception as error:  # array_record, TFDS and protobuf each have their own
            if isinstance(error, OSError | MemoryError) or MACHINE.search(str(error)):
                raise
            raise DataError(
                f"{self.folder}, split {self.split!r}: record {place} ({self._where(place)}) cannot be "
                f"read: {MEND}; "
                "data.corrupt_records='skip' leaves such records out of training, never out of evaluation. "
                f"{type(error).__name__}: {error}"
            ) from error

    def _where(self, place: int) -> str:
        for file in files_of(self.folder, self.split):
            if place < file.take:
                return f"number {file.skip + place} of {Path(file.filename).name}"
            place -= file.take
        return "of no file"

    @property
    def fingerprint(self) -> str:
        """Of the stored bytes of the split's files; of a file larger than 64 MiB, of both its ends."""
        files = sorted({Path(file.filename) for file in files_of(self.folder, self.split)})
        digest = hashlib.sha256(" ".join([self.split, *map(str, self.left_out)]).encode())
        for path in files:
            digest.update(_summed(path, *stamp(path)))
        return digest.hexdigest()


@functools.lru_cache(maxsize=4096)
def _summed(path: Path, size: int, changed: int) -> bytes:
    """The SHA-256 of a file's name, its size and both its ends."""
    with path.open("rb") as file:
        end = 1 << 25
        digest = hashlib.sha256(f"{path.name} {size}".encode() + file.read(end))
        file.seek(max(end, size - end))
        digest.update(file.read(end))
    return digest.digest()


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

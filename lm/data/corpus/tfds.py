"""Find prepared TFDS datasets (array_record or parquet), check their files, and read them by row.

array_record stores a hash with every record and with the index after them, so no damage to what is read goes
unnoticed; each file is opened, and its records counted, before training begins. A record is read when needed.
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

from lm.config.base import DataError, SettingError, nearest, parse_json, read_object
from lm.files import matches_checksum, write_with_checksum

Row = dict[str, Any]
Corrupt = Literal["stop", "skip"]  # how records to train on that cannot be read are handled
CLASSES = "tensorflow_datasets."  # importing a class named in features.json runs its module; only TFDS's may
READ_AT_ONCE = 1_024  # in a search for corrupt records [records]
MEND = "restore the files, or delete the folder and prepare the set again"
MACHINE = re.compile(r"\w\(\) failed:")  # errors of the machine: "open() failed: Too many open files"
SLICES = "a part reads NAME, NAME[FROM:TO] or NAME[FROM%:TO%] with FROM below TO, such as validation[:10%]"
LISTED_FAULTS = 5  # faults of a dataset that are listed; all are counted
OPENED = 64  # files of a larger corpus are not opened before they are read [files]


def prepared_rows(name: str, split: str, cache: Path, corrupt: Corrupt = "stop") -> "StoredRows":
    """Return the rows of a split of a prepared TFDS dataset, text as str.

    ``split`` may be an expression of TFDS (``train[:10%]``). SettingError or DataError if the dataset or a
    file of the split is missing or damaged. With ``corrupt="skip"`` corrupt records are skipped, else reading
    one raises DataError.
    """
    folder = find_prepared(name, cache)
    info = open_set(folder).info
    for part in split.split("+"):
        if part.partition("[")[0] not in info.splits:
            raise SettingError(f"{name} at {folder} has no split {part!r}{nearest(part, info.splits)}")
    check_files(folder, split)
    skipped = corrupt_records(StoredRows(folder, split), cache) if corrupt == "skip" else ()
    return StoredRows(folder, split, skipped)


def prepared_split(name: str, split: str, cache: Path) -> "StoredRows":
    """Return the rows of a split of a corpus; raise SettingError if it has none.

    If it has more than OPENED files, these are only checked to exist and are opened when they are read.
    """
    folder = find_prepared(name, cache)
    check_files(folder, split, OPENED)
    rows = StoredRows(folder, split)
    if not sum(file.take for file in files_of(folder, split)):
        raise SettingError(f"{name} at {folder}: split {split!r} has no rows")
    return rows


def find_prepared(name: str, cache: Path) -> Path:
    """Return the folder of prepared ``name[:version]``, the newest without a version; else SettingError."""
    name, _, version = name.partition(":")
    if folder := newest(name, version or "*.*.*", cache):
        return folder
    folders, names = tfds_folders(cache), prepared(cache)
    unversioned = {known.partition(":")[0] for known in names}
    near = nearest(f"{name}:{version}", names) if version else nearest(name, unversioned)
    missing = f"dataset {name!r}{version and f' version {version}'} is not prepared"
    command = preparation(name, folders[0])
    raise SettingError(f"{missing} in {', '.join(map(str, folders))}{near}; to prepare it: {command}")


def newest(name: str, version: str, cache: Path) -> Path | None:
    """Return the newest prepared version that matches, from the first folder that has one, or None."""
    matches = (list((folder / name).glob(f"{version}/dataset_info.json")) for folder in tfds_folders(cache))
    versions = [path.parent for path in next(filter(None, matches), [])]
    return max(versions, key=lambda path: [int(n) for n in re.findall(r"\d+", path.name)], default=None)


def tfds_folders(cache: Path) -> list[Path]:
    """Return the folders that are searched for prepared datasets, in order."""
    # expanduser leaves "~" as it is if there is no home
    variable, home = os.environ.get("TFDS_DATA_DIR"), os.path.expanduser("~")
    usual = [] if home == "~" else [Path(home) / "tensorflow_datasets"]
    return [Path(cache) / "tfds", *([Path(variable)] if variable else []), *usual]


def prepared(cache: Path) -> list[str]:
    """Return ``name:version`` or ``name/config:version`` of every prepared dataset, sorted."""
    patterns = ("[!.]*/*.*.*/dataset_info.json", "[!.]*/*/*.*.*/dataset_info.json")
    folders = tfds_folders(cache)
    paths = ((folder, path) for folder in folders for pattern in patterns for path in folder.glob(pattern))
    sets = ((path.parent.parent.relative_to(folder), path.parent.name) for folder, path in paths)
    return sorted({f"{name}:{version}" for name, version in sets})


def preparation(name: str, folder: Path) -> str:
    """Return the command that prepares a TFDS dataset in a format that can be read here."""
    options = f"--file_format=array_record --data_dir={folder}"
    return f"tfds build {name} {options} (some sets need TensorFlow for this)"


@functools.lru_cache(maxsize=32)
def open_set(folder: Path) -> Any:
    """Return TFDS's builder of a prepared dataset.

    DataError if its description is damaged or would run code from outside TFDS; SettingError if its files
    have no random access.
    """
    import tensorflow_datasets as tfds  # takes seconds, hence not at the top

    _description(folder / "dataset_info.json")
    features = folder / "features.json"
    for name in _imported_classes(_description(features)):
        if not name.startswith(CLASSES):
            raise DataError(f"{features} names {name!r}, code outside of TFDS that would run: do not use it")
    try:
        builder = tfds.builder_from_directory(folder)
        formats = {file_format.value for file_format in builder.info.available_file_formats()}
    except Exception as error:  # TFDS and protobuf raise many kinds for a damaged file
        raise DataError(f"{folder} cannot be read as a TFDS set ({error!r:.500}): {MEND}") from error
    if not formats & {"array_record", "parquet"}:
        name = f"{builder.info.name}/{builder.info.config_name or ''}".rstrip("/")
        raise SettingError(
            f"{folder} holds {'/'.join(sorted(formats)) or 'unknown'} files, which have no random access; "
            f"convert them: tfds convert_format --dataset_version_dir={folder} --out_file_format=array_record"
            f", or prepare again: {preparation(name, folder.parents[name.count('/') + 1])}"
        )
    return builder


def _description(path: Path) -> Row:
    try:
        return read_object(path)
    except SettingError as error:
        raise DataError(f"{error}; it is damaged or missing: {MEND}") from error


def _imported_classes(description: Any) -> Iterator[str]:
    """Yield the classes that features.json has TFDS import, in its current and old form and nested JSON."""
    for key, value in description.items() if isinstance(description, dict) else enumerate(description):
        if isinstance(value, dict | list):
            yield from _imported_classes(value)
        elif key in ("pythonClassName", "python_class_name", "type") and isinstance(value, str):
            yield value
        elif key == "json" and isinstance(value, str):
            yield from _imported_classes([parse_json(value, "features.json")])


def split_sizes(folder: Path) -> dict[str, int]:
    """Return the number of rows of each split according to dataset_info.json, without importing TFDS."""
    path = folder / "dataset_info.json"
    try:
        return {split["name"]: sum(map(int, split["shardLengths"])) for split in _description(path)["splits"]}
    except (KeyError, TypeError, ValueError) as error:
        raise DataError(f"{path} lists no splits ({error!r:.200}): {MEND}") from error


def serialized(example: Any) -> bytes:
    """Return the bytes of a tf.train.Example, the same in every process.

    Protobuf's default order of the fields varies by process.
    """
    return example.SerializeToString(deterministic=True)


def files_of(folder: Path, split: str) -> list[Any]:
    """Return TFDS's file instructions: which records of which files make up ``split``.

    SettingError if the split is unknown, reversed or empty.
    """
    try:
        splits = open_set(folder).info.splits
        files = splits[split].file_instructions
        is_reversed = _is_reversed(split, splits)
    except Exception as error:  # for example for an expression that TFDS cannot parse
        reason = str(error).strip().rpartition("\n")[2]
        raise SettingError(f"{folder} has no part {split!r}: {reason:.200}; {SLICES}") from error
    if is_reversed:  # TFDS reads [3:2] as all rows from 3 on
        raise SettingError(f"{folder}: split {split!r} ends before it begins; {SLICES}")
    if not files:
        raise SettingError(f"{folder}: split {split!r} has no rows; choose a larger part, or {MEND}")
    return files


def _is_reversed(split: str, splits: Any) -> bool:
    """Return whether a slice in an expression of TFDS ends before it begins."""
    from tensorflow_datasets.core import ReadInstruction

    parts = ReadInstruction.from_spec(split).to_absolute(dict(splits))
    return any(None not in (part.from_, part.to) and part.from_ > part.to for part in parts)


def check_files(folder: Path, split: str, opened: int | None = None) -> None:
    """Raise DataError unless all files of ``split`` exist with the record counts of dataset_info.json.

    If there are more than ``opened`` files, their records are not counted; None: always count.
    """
    files = {Path(file.filename): file.examples_in_shard for file in files_of(folder, split)}
    if outside := [path for path in files if path.parent != folder]:
        raise DataError(f"{folder} names {outside[0]}, which lies elsewhere: {MEND}")
    counted = opened is None or len(files) <= opened
    if faults := [fault for path, count in files.items() if (fault := _fault(path, count, counted))]:
        damage = f"{len(faults)} of {len(files)} files are damaged ({MEND}):"
        raise DataError("\n  ".join([f"{folder}, split {split!r}: {damage}", *faults[:LISTED_FAULTS]]))


def _fault(path: Path, count: int, counted: bool) -> str | None:
    if not path.is_file() or not path.stat().st_size:
        return f"{path.name} is {'empty' if path.exists() else 'missing'}"
    if "array_record" not in path.name or not counted:
        return None
    records = _count_records(path, *stamp(path))
    if isinstance(records, str):
        return f"{path.name} cannot be opened: {records}"
    if records != count:
        return f"{path.name} has {records:,} records, dataset_info.json counts {count:,}"
    return None


@functools.lru_cache(maxsize=4096)
def _count_records(path: Path, _size: int, _changed: int) -> int | str:
    """Return the number of records in an array_record file, or why it cannot be opened.

    The result is cached by the file's size and time of the last change.
    """
    from array_record.python.array_record_module import ArrayRecordReader  # only needed to count records

    try:
        reader = ArrayRecordReader(str(path))
        records = reader.num_records()
        if not reader.ok():
            reader.read([0])  # raises the reason
        reader.close()
    except (RuntimeError, ValueError, OSError, IndexError) as error:
        return str(error)
    return records


def corrupt_records(rows: "StoredRows", cache: Path) -> tuple[int, ...]:
    """Return the numbers of the records that cannot be read; found once and then stored in ``cache``."""
    files = files_of(rows.folder, rows.split)
    key = repr([(file.filename, file.skip, file.take, stamp(file.filename)) for file in files])
    path = Path(cache) / "corrupt" / f"{hashlib.sha256(key.encode()).hexdigest()[:16]}.json"
    if matches_checksum(path):
        return tuple(json.loads(path.read_bytes()))
    print(f"searching for corrupt records in {rows.folder}, once", file=sys.stderr, flush=True)
    corrupt: list[int] = []
    for start in range(0, len(rows), READ_AT_ONCE):
        numbers = range(start, min(start + READ_AT_ONCE, len(rows)))
        try:
            rows.source.__getitems__([*numbers])
        except Exception:
            corrupt += [number for number in numbers if not _is_readable(rows, number)]
    write_with_checksum(path, json.dumps(corrupt).encode())
    return tuple(corrupt)


def _is_readable(rows: "StoredRows", number: int) -> bool:
    with suppress(DataError):
        rows[number]
        return True
    return False


def stamp(path: str | Path) -> tuple[int, int]:
    """Return the size [bytes] and the time of the last change [nanoseconds] of a file."""
    status = os.stat(path)
    return status.st_size, status.st_mtime_ns


class StoredRows(Sequence[Row]):
    """Read the rows of one split of a TFDS dataset, without those ``left_out``, as a sequence.

    Files are opened on first use, in each process. A record that cannot be read raises DataError with its
    file and number.
    """

    def __init__(self, folder: Path, split: str, left_out: tuple[int, ...] = ()):
        self.folder, self.split, self.left_out = folder, split, left_out
        self._shifts = [number - before for before, number in enumerate(left_out)]

    @functools.cached_property
    def source(self) -> Any:
        with suppress(OSError, ValueError):  # a reader keeps all its files open
            resource.setrlimit(resource.RLIMIT_NOFILE, (resource.getrlimit(resource.RLIMIT_NOFILE)[1],) * 2)
        return open_set(self.folder).as_data_source(split=self.split)

    def __reduce__(self) -> tuple[Any, ...]:
        return StoredRows, (self.folder, self.split, self.left_out)

    def __len__(self) -> int:
        return len(self.source) - len(self.left_out)

    def __getitem__(self, index: Any) -> Any:
        if not -len(self) <= index < len(self):
            raise IndexError(index)
        number = index % len(self)
        number += bisect.bisect_right(self._shifts, number)
        try:
            return {name: plain_values(value) for name, value in self.source[number].items()}
        except Exception as error:  # array_record, TFDS and protobuf raise their own
            if isinstance(error, OSError | MemoryError) or MACHINE.search(str(error)):
                raise
            raise DataError(
                f"{self.folder}, split {self.split!r}: record {number} ({self._location(number)}) cannot be "
                f"read: {MEND}; data.corrupt_records='skip' leaves such records out of training, never out "
                f"of evaluation. {type(error).__name__}: {error}"
            ) from error

    def several(self, numbers: Sequence[int]) -> list[Row]:
        """Return the rows of ``numbers``, read together; raise DataError for the first that is unreadable."""
        try:
            return [plain_values(row) for row in self.source.__getitems__([*numbers])]
        except Exception:  # it does not name the record
            return [self[number] for number in numbers]

    def _location(self, number: int) -> str:
        for file in files_of(self.folder, self.split):
            if number < file.take:
                return f"number {file.skip + number} of {Path(file.filename).name}"
            number -= file.take
        return "of no file"

    @property
    def fingerprint(self) -> str:
        """Return a SHA-256 digest of the split, ``left_out`` and the stored bytes of its files.

        Of a file larger than 64 MiB only both ends are digested.
        """
        files = sorted({Path(file.filename) for file in files_of(self.folder, self.split)})
        digest = hashlib.sha256(" ".join([self.split, *map(str, self.left_out)]).encode())
        for path in files:
            digest.update(_digest(path, *stamp(path)))
        return digest.hexdigest()


@functools.lru_cache(maxsize=4096)
def _digest(path: Path, size: int, _changed: int) -> bytes:
    """Return the SHA-256 of a file's name, its size and both its ends, 32 MiB each."""
    with path.open("rb") as file:
        end = 1 << 25
        digest = hashlib.sha256(f"{path.name} {size}".encode() + file.read(end))
        file.seek(max(end, size - end))
        digest.update(file.read(end))
    return digest.digest()


def plain_values(value: Any) -> Any:
    """Convert what TFDS decodes to str, numbers, lists and dicts."""
    if isinstance(value, bytes):
        return value.decode("utf-8", errors="replace")
    if isinstance(value, dict):
        return {name: plain_values(item) for name, item in value.items()}
    if isinstance(value, np.ndarray) and not value.ndim:
        return plain_values(value.item())
    if isinstance(value, np.ndarray) and value.dtype != object:
        return value.tolist()
    if isinstance(value, (np.ndarray, list, tuple)):
        return [plain_values(item) for item in value]
    return value.item() if isinstance(value, np.generic) else value

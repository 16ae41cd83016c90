"""Find prepared TFDS datasets (array_record or parquet), check their files, and read them by row.

array_record stores a hash with every record and with the index after them, so no damage to what is read goes
unnoticed. Before training begins, each array_record file is opened and its records are counted, but not those
of a corpus of more than MAX_OPENED_FILES files. A record is read when it is needed.
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

from lm.config.base import DataError, SettingError, did_you_mean, parse_json, read_object
from lm.files import matches_checksum, write_with_checksum

Row = dict[str, Any]
# what to do with a training record that cannot be read: raise DataError, or leave it out
OnCorrupt = Literal["stop", "skip"]
# TFDS imports the classes that features.json names, which runs their modules: only those of TFDS are allowed.
TRUSTED_MODULES = "tensorflow_datasets."
RECORDS_PER_READ = 1_024  # in a search for corrupt records
REMEDY = "restore the files, or delete the folder and prepare the set again"
SYSTEM_ERROR = re.compile(r"\w\(\) failed:")  # not of the data: "open() failed: Too many open files"
SLICE_SYNTAX = "write NAME, NAME[FROM:TO] or NAME[FROM%:TO%] with FROM below TO, such as validation[:10%]"
VERSION = re.compile(r"\d+\.\d+\.\d+")  # a folder of another name is still being prepared
MAX_LISTED_FAULTS = 5  # in the message about a damaged dataset, which counts all
MAX_OPENED_FILES = 64  # files of a larger corpus are opened only when they are read


def prepared_rows(name: str, split: str, cache: Path, on_corrupt: OnCorrupt = "stop") -> "TfdsRows":
    """Return the rows of a split of a prepared TFDS dataset, text as str.

    ``split`` may be an expression of TFDS (``train[:10%]``). SettingError or DataError if the dataset or a
    file of the split is missing or damaged. With ``on_corrupt="skip"`` corrupt records are skipped, otherwise
    reading one raises DataError.
    """
    folder = find_prepared(name, cache)
    info = open_builder(folder).info
    for part in split.split("+"):
        if part.partition("[")[0] not in info.splits:
            raise SettingError(f"{name} at {folder} has no split {part!r}{did_you_mean(part, info.splits)}")
    check_files(folder, split)
    skipped = corrupt_records(TfdsRows(folder, split), cache) if on_corrupt == "skip" else ()
    return TfdsRows(folder, split, skipped)


def prepared_corpus_rows(name: str, split: str, cache: Path) -> "TfdsRows":
    """Return the rows of a split that a corpus is read from; raise SettingError if the split has no rows.

    Unlike ``prepared_rows`` it searches for no corrupt records, and of a split of more than MAX_OPENED_FILES
    files it only checks that they exist and are not empty: each is opened when it is read.
    """
    folder = find_prepared(name, cache)
    check_files(folder, split, MAX_OPENED_FILES)
    rows = TfdsRows(folder, split)
    if not sum(file.take for file in file_instructions(folder, split)):
        raise SettingError(f"{name} at {folder}: split {split!r} has no rows")
    return rows


def find_prepared(name: str, cache: Path) -> Path:
    """Return the folder of prepared ``name[:version]``, the newest without a version; else SettingError."""
    name, _, version = name.partition(":")
    if folder := newest_version(name, version or "*.*.*", cache):
        return folder
    folders, names = tfds_folders(cache), prepared_sets(cache)
    unversioned = {name_with_version.partition(":")[0] for name_with_version in names}
    missing, suggestion = f"dataset {name!r}", did_you_mean(name, unversioned)
    if version:
        missing, suggestion = f"{missing} version {version}", did_you_mean(f"{name}:{version}", names)
    places = f"{', '.join(map(str, folders))}{suggestion}"
    command = preparation_command(name, folders[0])
    raise SettingError(f"{missing} is not prepared in {places}; to prepare it: {command}")


def newest_version(name: str, version: str, cache: Path) -> Path | None:
    """Return the newest prepared version that matches, from the first folder that has one, or None."""
    for folder in tfds_folders(cache):
        paths = (path.parent for path in (folder / name).glob(f"{version}/dataset_info.json"))
        if versions := [path for path in paths if VERSION.fullmatch(path.name)]:
            return max(versions, key=lambda path: [*map(int, path.name.split("."))])
    return None


def tfds_folders(cache: Path) -> list[Path]:
    """Return the folders that are searched for prepared datasets, in order."""
    folders = [Path(cache) / "tfds"]
    if data_dir := os.environ.get("TFDS_DATA_DIR"):
        folders.append(Path(data_dir))
    home = os.path.expanduser("~")  # stays "~" if there is no home
    if home != "~":
        folders.append(Path(home) / "tensorflow_datasets")
    return folders


def prepared_sets(cache: Path) -> list[str]:
    """Return ``name:version`` or ``name/config:version`` of every prepared dataset, sorted."""
    names = set()
    for folder in tfds_folders(cache):
        for pattern in ("[!.]*/*.*.*/dataset_info.json", "[!.]*/*/*.*.*/dataset_info.json"):
            for path in folder.glob(pattern):
                version = path.parent
                if VERSION.fullmatch(version.name):
                    names.add(f"{version.parent.relative_to(folder)}:{version.name}")
    return sorted(names)


def preparation_command(name: str, folder: Path) -> str:
    """Return the command that prepares a TFDS dataset in a format that can be read here."""
    options = f"--file_format=array_record --data_dir={folder}"
    return f"tfds build {name} {options} (some sets need TensorFlow for this)"


@functools.lru_cache(maxsize=32)
def open_builder(folder: Path) -> Any:
    """Return TFDS's builder of a prepared dataset.

    DataError if its description is damaged or would run code from outside TFDS; SettingError if its files
    have no random access.
    """
    import tensorflow_datasets as tfds  # takes seconds, hence not at the top

    _read_description(folder / "dataset_info.json")
    features = folder / "features.json"
    for name in _imported_classes(_read_description(features)):
        if not name.startswith(TRUSTED_MODULES):
            raise DataError(f"{features} names {name!r}, code outside of TFDS that would run: do not use it")
    try:
        builder = tfds.builder_from_directory(folder)
        formats = {file_format.value for file_format in builder.info.available_file_formats()}
    except Exception as error:  # TFDS and protobuf raise many kinds for a damaged file
        raise DataError(f"{folder} cannot be read as a TFDS set ({error!r:.500}): {REMEDY}") from error
    if not formats & {"array_record", "parquet"}:
        name = f"{builder.info.name}/{builder.info.config_name or ''}".rstrip("/")
        raise SettingError(
            f"{folder} holds {'/'.join(sorted(formats)) or 'unknown'} files, which have no random access; "
            f"convert them: tfds convert_format --dataset_version_dir={folder} --out_file_format=array_record"
            f", or prepare again: {preparation_command(name, folder.parents[name.count('/') + 1])}"
        )
    return builder


def _read_description(path: Path) -> Row:
    try:
        return read_object(path)
    except SettingError as error:
        raise DataError(f"{error}; it is damaged or missing: {REMEDY}") from error


def _imported_classes(description: Any) -> Iterator[str]:
    """Yield the names of the classes that TFDS would import for features.json.

    They stand under the keys of its current and of its old format, also in JSON inside of strings.
    """
    items = description.items() if isinstance(description, dict) else enumerate(description)
    for key, value in items:
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
        splits = _read_description(path)["splits"]
        return {split["name"]: sum(map(int, split["shardLengths"])) for split in splits}
    except (KeyError, TypeError, ValueError) as error:
        raise DataError(f"{path} lists no splits ({error!r:.200}): {REMEDY}") from error


def serialize_example(example: Any) -> bytes:
    """Return the bytes of a tf.train.Example, the same in every process.

    Protobuf's default order of the fields varies by process.
    """
    return example.SerializeToString(deterministic=True)


def file_instructions(folder: Path, split: str) -> list[Any]:
    """Return TFDS's file instructions: which records of which files make up ``split``.

    SettingError if the split is unknown, reversed or empty.
    """
    try:
        splits = open_builder(folder).info.splits
        files = splits[split].file_instructions
        is_reversed = _is_reversed(split, splits)
    except Exception as error:  # for example for an expression that TFDS cannot parse
        reason = str(error).strip().rpartition("\n")[2]
        raise SettingError(f"{folder} has no part {split!r}: {reason:.200}; {SLICE_SYNTAX}") from error
    if is_reversed:  # TFDS reads [3:2] as all rows from 3 on
        raise SettingError(f"{folder}: split {split!r} ends before it begins; {SLICE_SYNTAX}")
    if not files:
        raise SettingError(f"{folder}: split {split!r} has no rows; choose a larger part, or {REMEDY}")
    return files


def _is_reversed(split: str, splits: Any) -> bool:
    """Return whether a slice in an expression of TFDS ends before it begins."""
    from tensorflow_datasets.core import ReadInstruction

    parts = ReadInstruction.from_spec(split).to_absolute(dict(splits))
    return any(None not in (part.from_, part.to) and part.from_ > part.to for part in parts)


def check_files(folder: Path, split: str, max_opened: int | None = None) -> None:
    """Raise DataError unless all files of ``split`` exist with the record counts of dataset_info.json.

    If there are more than ``max_opened`` files, their records are not counted; None: always count.
    """
    files = {Path(file.filename): file.examples_in_shard for file in file_instructions(folder, split)}
    if outside := [path for path in files if path.parent != folder]:
        raise DataError(f"{folder} names {outside[0]}, which lies elsewhere: {REMEDY}")
    counts_records = max_opened is None or len(files) <= max_opened
    faults = [_find_fault(path, count, counts_records) for path, count in files.items()]
    if faults := [fault for fault in faults if fault]:
        damage = f"{len(faults)} of {len(files)} files are damaged ({REMEDY}):"
        raise DataError("\n  ".join([f"{folder}, split {split!r}: {damage}", *faults[:MAX_LISTED_FAULTS]]))


def _find_fault(path: Path, count: int, counts_records: bool) -> str | None:
    """Return what is wrong with a file that should have ``count`` records, or None."""
    if not path.is_file() or not path.stat().st_size:
        return f"{path.name} is {'empty' if path.exists() else 'missing'}"
    if "array_record" not in path.name or not counts_records:
        return None
    records = _count_records(path, *file_stamp(path))
    if isinstance(records, str):
        return f"{path.name} cannot be opened: {records}"
    if records != count:
        return f"{path.name} has {records:,} records, dataset_info.json counts {count:,}"
    return None


@functools.lru_cache(maxsize=4096)
def _count_records(path: Path, _size: int, _modified: int) -> int | str:
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


def corrupt_records(rows: "TfdsRows", cache: Path) -> tuple[int, ...]:
    """Return the numbers of the records that cannot be read; found once and then stored in ``cache``."""
    files = file_instructions(rows.folder, rows.split)
    key = repr([(file.filename, file.skip, file.take, file_stamp(file.filename)) for file in files])
    path = Path(cache) / "corrupt" / f"{hashlib.sha256(key.encode()).hexdigest()[:16]}.json"
    if matches_checksum(path):
        return tuple(json.loads(path.read_bytes()))
    print(f"searching for corrupt records in {rows.folder}, once", file=sys.stderr, flush=True)
    corrupt: list[int] = []
    for start in range(0, len(rows), RECORDS_PER_READ):
        numbers = range(start, min(start + RECORDS_PER_READ, len(rows)))
        try:
            rows.source.__getitems__([*numbers])
        except Exception:
            corrupt += [number for number in numbers if not _is_readable(rows, number)]
    write_with_checksum(path, json.dumps(corrupt).encode())
    return tuple(corrupt)


def _is_readable(rows: "TfdsRows", number: int) -> bool:
    with suppress(DataError):
        rows[number]
        return True
    return False


def file_stamp(path: str | Path) -> tuple[int, int]:
    """Return the size [bytes] and the time of the last change [nanoseconds] of a file."""
    status = os.stat(path)
    return status.st_size, status.st_mtime_ns


class TfdsRows(Sequence[Row]):
    """Read the rows of one split of a TFDS dataset as a sequence, without the ``skipped`` records.

    Files are opened on first use, in each process. A record that cannot be read raises DataError with its
    file and number.
    """

    def __init__(self, folder: Path, split: str, skipped: tuple[int, ...] = ()):
        self.folder, self.split, self.skipped = folder, split, skipped
        # for each skipped record, how many records before it are not skipped
        self._kept_before = [record - count for count, record in enumerate(skipped)]

    @functools.cached_property
    def source(self) -> Any:
        # A reader keeps all files of the split open: raise this process's limit of open files to the maximum.
        with suppress(OSError, ValueError):
            _, maximum = resource.getrlimit(resource.RLIMIT_NOFILE)
            resource.setrlimit(resource.RLIMIT_NOFILE, (maximum, maximum))
        return open_builder(self.folder).as_data_source(split=self.split)

    def __reduce__(self) -> tuple[Any, ...]:
        return TfdsRows, (self.folder, self.split, self.skipped)

    def __len__(self) -> int:
        return len(self.source) - len(self.skipped)

    def __getitem__(self, index: Any) -> Any:
        if not -len(self) <= index < len(self):
            raise IndexError(index)
        number = index % len(self)
        number += bisect.bisect_right(self._kept_before, number)
        try:
            return {name: plain_values(value) for name, value in self.source[number].items()}
        except Exception as error:  # array_record, TFDS and protobuf raise their own
            if isinstance(error, OSError | MemoryError) or SYSTEM_ERROR.search(str(error)):
                raise
            raise DataError(
                f"{self.folder}, split {self.split!r}: record {number} ({self._location(number)}) cannot be "
                f"read: {REMEDY}; data.corrupt_records='skip' leaves such records out of training, never out "
                f"of evaluation. {type(error).__name__}: {error}"
            ) from error

    def read_many(self, numbers: Sequence[int]) -> list[Row]:
        """Return the rows with these numbers, read together; DataError for the first that cannot be read.

        The split has no skipped records: rows and stored records then have the same numbers.
        """
        assert not self.skipped
        try:
            return [plain_values(row) for row in self.source.__getitems__([*numbers])]
        except Exception:  # it does not name the record
            return [self[number] for number in numbers]

    def _location(self, number: int) -> str:
        for file in file_instructions(self.folder, self.split):
            if number < file.take:
                return f"number {file.skip + number} of {Path(file.filename).name}"
            number -= file.take
        return "of no file"

    @property
    def fingerprint(self) -> str:
        """Return a SHA-256 digest of the split, ``skipped`` and the stored bytes of its files.

        Of a file larger than 64 MiB only both ends are digested.
        """
        files = sorted({Path(file.filename) for file in file_instructions(self.folder, self.split)})
        digest = hashlib.sha256(" ".join([self.split, *map(str, self.skipped)]).encode())
        for path in files:
            digest.update(_named_file_digest(path, *file_stamp(path)))
        return digest.hexdigest()


def named_file_digest(path: Path) -> str:
    """Return the SHA-256 of a file's name, its size and both its ends, 32 MiB each, as hex digits."""
    return _named_file_digest(path, *file_stamp(path)).hex()


@functools.lru_cache(maxsize=4096)
def _named_file_digest(path: Path, size: int, _modified: int) -> bytes:
    """Return ``named_file_digest`` as bytes, cached by the file's size and time of the last change."""
    with path.open("rb") as file:
        end_bytes = 1 << 25
        digest = hashlib.sha256(f"{path.name} {size}".encode() + file.read(end_bytes))
        file.seek(max(end_bytes, size - end_bytes))
        digest.update(file.read(end_bytes))
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

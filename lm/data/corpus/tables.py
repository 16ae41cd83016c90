"""Read a user's own tables: CSV, TSV, JSON lines and parquet files, and datasets of the Hugging Face Hub.

A row is ``{column: value}``; values of CSV are strings. All rows are read at once, since these are the
examples of a task and not a corpus. A malformed row raises DataError with its file and line.
"""

import csv
import functools
import hashlib
import json
import re
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple

from lm.config.base import DataError, SettingError, did_you_mean, parse_json
from lm.data.corpus.readers import COMPRESSED, DECOMPRESSION_ERRORS, replace_lone_surrogates
from lm.data.corpus.tfds import Row, file_stamp

MAX_CELL_CHARACTERS = 1 << 27  # of a CSV file


class TableRow(NamedTuple):
    """Hold a row of a table and its line number."""

    line: int  # in its file, from 1; for parquet and the Hub the number of the row
    row: Row


@dataclass(frozen=True)
class TableRows(Sequence[Row]):
    """Hold the rows of one split, with the interface of ``TfdsRows``."""

    name: str  # of the file, or of the set and its split
    numbered_rows: tuple[TableRow, ...]
    fingerprint: str  # of their contents
    skipped: tuple[int, ...] = ()  # corrupt rows; always empty, since one is an error here

    def __len__(self) -> int:
        return len(self.numbered_rows)

    def __getitem__(self, index: Any) -> Any:
        return self.numbered_rows[index].row

    def location(self, index: int) -> str:
        """Return the file and line of a row, such as ``train.csv, line 7``."""
        return f"{self.name}, line {self.numbered_rows[index].line}"


def read_table(path: Path) -> TableRows:
    """Return all rows of a file in the format that its ending names, cached while the file does not change.

    SettingError if the file is missing, empty or of another format; DataError if it cannot be read.
    """
    if path.is_dir():
        raise SettingError(f"{path} is a folder, and should be a file of rows")
    if not path.is_file():
        raise SettingError(f"{path} is missing{did_you_mean(path.name, _tables_beside(path))}")
    return _read_table(path, *file_stamp(path))


@functools.lru_cache(maxsize=32)
def _read_table(path: Path, size: int, _modified: int) -> TableRows:
    ending = path.suffix.lower()
    kind = Path(path.stem).suffix.lower() if ending in COMPRESSED else ending
    if kind not in TABLE_READERS:
        raise SettingError(
            f"{path} should end in {', '.join(TABLE_READERS)}, or these with {', '.join(COMPRESSED)}"
        )
    try:
        rows = tuple(TABLE_READERS[kind](path)) if size else ()
    except UnicodeDecodeError as error:
        raise DataError(f"{path} cannot be read as text in UTF-8: save it so ({error})") from error
    except (OSError, *DECOMPRESSION_ERRORS) as error:
        raise DataError(f"{path} cannot be read: {error}") from error
    if not rows:
        only = ", only the names of its columns" if size and kind in (".csv", ".tsv") else ""
        raise SettingError(f"{path} has no rows{only}")
    return TableRows(path.name, rows, hashlib.sha256(path.read_bytes()).hexdigest())


def _tables_beside(path: Path) -> list[str]:
    """Return the names of the tables in the folder of ``path``."""
    files = path.parent.iterdir() if path.parent.is_dir() else ()
    return [file.name for file in files if TABLE_READERS.keys() & set(file.suffixes)]


def _open_text(path: Path, **options: Any) -> Any:
    open_file = COMPRESSED.get(path.suffix.lower(), open)
    return open_file(path, "rt", encoding="utf-8-sig", **options)


def _read_csv(path: Path, delimiter: str = ",") -> Iterator[TableRow]:
    """Yield the rows of a CSV file; empty lines are skipped, and the first other one names the columns."""
    csv.field_size_limit(MAX_CELL_CHARACTERS)
    with _open_text(path, newline="") as file:
        _check_delimiter(path, file, delimiter)
        file.seek(0)
        lines = csv.reader(file, delimiter=delimiter, strict=True)
        begin = 1  # line of the row that is read
        try:
            header = next(filter(None, lines), [])
            if len(set(header)) < len(header):
                duplicate = next(name for name in header if header.count(name) > 1)
                raise DataError(f"{path}, line {lines.line_num}: two columns are called {duplicate!r}")
            begin = lines.line_num + 1  # a quoted cell may hold newlines
            for cells in lines:
                if cells and len(cells) != len(header):
                    counts = f"{len(cells)} cells, and the header names {len(header)} columns"
                    fault = f"{path}, line {begin}: {counts} ({', '.join(header)})"
                    if len(cells) > len(header):
                        fault += f"; a text with {delimiter!r} stands in quotes"
                    raise DataError(fault)
                if cells:
                    yield TableRow(begin, dict(zip(header, cells, strict=True)))
                begin = lines.line_num + 1
        except csv.Error as error:
            if "unexpected end" in str(error):
                raise DataError(f"{path}, line {begin}: a quote is opened and never closed") from error
            raise DataError(f"{path}, line {lines.line_num}: {error}") from error


def _check_delimiter(path: Path, file: Iterable[str], delimiter: str) -> None:
    """Raise DataError if the columns of a file of tables seem to be separated by another sign.

    The sign is in the names of columns, where ``delimiter`` is not, and so is one of the two in the first
    row. Without either there, the file has one column, whose name has such a sign.
    """
    lines = (line for line in enumerate(file, 1) if line[1].strip())
    number, names = next(lines, (1, ""))
    _, row = next(lines, (1, ""))
    names = re.sub('"[^"]*"', "", names)  # a name in quotes may have any signs
    other = next((sign for sign in ";\t|" if sign in names), None)
    if other and delimiter not in names and (other in row or delimiter in row):
        raise DataError(
            f"{path}, line {number}: columns are separated by {other!r}: save the file with {delimiter!r} "
            f"between them; a name with {other!r} in it stands in quotes"
        )


def _read_tsv(path: Path) -> Iterator[TableRow]:
    return _read_csv(path, "\t")


def _read_json_lines(path: Path) -> Iterator[TableRow]:
    with _open_text(path) as file:
        for number, line in enumerate(file, 1):
            if line.strip():
                try:
                    row = parse_json(line, f"{path}, line {number},")
                except SettingError as error:
                    raise DataError(f"{error}") from error
                if not isinstance(row, dict):
                    raise DataError(f'{path}, line {number}: {line.strip():.40} is no {{"column": value}}')
                yield TableRow(number, _repaired(row))


def _repaired(value: Any) -> Any:
    """Return a value of JSON whose texts hold no half characters."""
    if isinstance(value, str):
        return replace_lone_surrogates(value)
    if isinstance(value, dict):
        return {_repaired(name): _repaired(item) for name, item in value.items()}
    return [*map(_repaired, value)] if isinstance(value, list) else value


def _read_parquet(path: Path) -> Iterator[TableRow]:
    import pyarrow
    from pyarrow import parquet

    try:
        with COMPRESSED.get(path.suffix.lower(), open)(path, "rb") as file:
            rows = parquet.read_table(file).to_pylist()
    except pyarrow.ArrowException as error:
        raise DataError(f"{path} cannot be read as parquet: {error}") from error
    return map(TableRow, range(1, len(rows) + 1), rows)


TABLE_READERS: Mapping[str, Callable[[Path], Iterator[TableRow]]] = {  # by the ending of a file's name
    ".csv": _read_csv,
    ".tsv": _read_tsv,
    ".jsonl": _read_json_lines,
    ".json": _read_json_lines,
    ".parquet": _read_parquet,
}


@functools.lru_cache(maxsize=32)
def read_hub(name: str, split: str) -> TableRows:
    """Return all rows of a split of ``NAME`` or ``NAME:CONFIG`` on the Hub, using the package ``datasets``.

    SettingError if that package or the network is missing, or the dataset or split does not exist.
    """
    try:
        from datasets import load_dataset
    except ImportError as error:
        raise SettingError(f"hf:{name} needs the package datasets: pip install 'lm-study[hub]'") from error
    path, _, config = name.partition(":")
    try:
        rows = [dict(row) for row in load_dataset(path, config or None, split=split)]
    except Exception as error:  # datasets raises dozens, for the network, the Hub or the dataset
        reason = next(iter(str(error).splitlines()), "")
        raise SettingError(
            f"hf:{name}, split {split!r}, cannot be loaded: {reason or repr(error)}"
        ) from error
    if not rows:
        raise SettingError(f"hf:{name}, split {split!r}, has no rows")
    contents = json.dumps(rows, sort_keys=True, default=str)
    numbered_rows = tuple(map(TableRow, range(1, len(rows) + 1), rows))
    return TableRows(f"hf:{name} {split}", numbered_rows, hashlib.sha256(contents.encode()).hexdigest())

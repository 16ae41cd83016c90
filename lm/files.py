"""Files and folders written atomically, and files with a checksum that reveals later changes."""

import contextlib
import difflib
import hashlib
import json
import os
import shutil
import uuid
from collections.abc import Iterable, Iterator, Mapping
from pathlib import Path
from typing import Any, BinaryIO

from lm.config.base import DataError, SettingError, parse_json

CHECKSUM = "sha256"  # member of a JSON object that holds the checksum of all other members


def temporary_path(path: Path) -> Path:
    """Return a path beside ``path`` that no other process uses, on any machine of a shared disk."""
    return path.with_name(f".{path.name}-{os.getpid()}-{uuid.uuid4().hex[:8]}")


@contextlib.contextmanager
def name_file_in_errors(path: Path) -> Iterator[None]:
    """Add the file's name to an OSError raised in this context; those of ``write`` and ``close`` lack it."""
    try:
        yield
    except OSError as error:
        error.filename = error.filename or str(path)
        raise


@contextlib.contextmanager
def locked_if_possible(path: Path) -> Iterator[None]:
    """Hold the lock file ``path``, waiting for others; hold nothing where the file system has no locks."""
    from filelock import FileLock  # which takes a while to import

    lock = FileLock(path, fallback_to_soft=False)
    with contextlib.suppress(OSError):
        lock.acquire()
    try:
        yield
    finally:
        lock.release()


@contextlib.contextmanager
def atomic_file(path: Path) -> Iterator[BinaryIO]:
    """Open a file to write that gets its name once it is complete on disk; an error leaves nothing."""
    path.parent.mkdir(parents=True, exist_ok=True)
    draft = temporary_path(path)
    try:
        with draft.open("wb") as file:
            yield file
            file.flush()
            os.fsync(file.fileno())
        os.replace(draft, path)
    finally:
        draft.unlink(missing_ok=True)


@contextlib.contextmanager
def atomic_folder(path: Path) -> Iterator[Path]:
    """Make a folder to fill that gets its name when this context ends; an error leaves nothing."""
    draft = temporary_path(path.absolute())
    draft.mkdir(parents=True)
    try:
        yield draft
        os.replace(draft, path)
    finally:
        shutil.rmtree(draft, ignore_errors=True)


def write(path: Path, contents: str | bytes) -> None:
    """Write text (UTF-8) or bytes atomically.

    Lone surrogates in a text, as in the name of a file, are written as escapes. Raises OSError with the name
    of the file.
    """
    with name_file_in_errors(path), atomic_file(path) as file:
        file.write(contents if isinstance(contents, bytes) else contents.encode(errors="backslashreplace"))


def json_with_checksum(value: Mapping[str, Any]) -> str:
    """Return ``value`` as indented JSON with a checksum, which ``parse_with_checksum`` verifies."""
    return json.dumps({**value, CHECKSUM: checksum(value)}, indent=1) + "\n"


def parse_with_checksum(
    data: bytes, path: Any, mend: str = "put back a copy that is whole"
) -> dict[str, Any]:
    """Return the value that ``json_with_checksum`` wrote.

    Raises DataError with the file's name and the ``mend`` if it was changed.
    """
    try:
        return _checked_value(data, path, "")[0]
    except SettingError as error:
        raise DataError(f"{error}; {mend}") from error


def line_with_checksum(value: Mapping[str, Any], before: str) -> tuple[str, str]:
    """Return ``value`` as a line of a file of JSON lines, and its checksum.

    The checksum covers that of the line ``before`` ("" for the first), so that a missing line is detected.
    """
    own = checksum(value, before)
    return json.dumps({**value, CHECKSUM: own}) + "\n", own


def lines_with_checksum(values: Iterable[Mapping[str, Any]]) -> str:
    """Return all lines of a file of JSON lines with checksums."""
    lines, before = [], ""
    for value in values:
        line, before = line_with_checksum(value, before)
        lines.append(line)
    return "".join(lines)


def parse_lines_with_checksum(
    data: bytes, path: Any, mend: str = "put back a copy that is whole"
) -> list[dict[str, Any]]:
    """Return the values of all lines that ``line_with_checksum`` wrote, without a last line cut by a kill.

    Raises DataError with the file's name, the number of the line, what is wrong with it and the ``mend``.
    """
    *lines, last = data.rstrip(b"\0").split(b"\n")  # zeros: where a machine lost its power
    if last and not _is_cut(last):
        lines.append(last)
    values, before = [], ""
    for number, line in enumerate(lines, 1):
        try:
            value, before = _checked_value(line, path, before)
        except SettingError as error:
            raise DataError(f"{error}, in line {number} of {len(lines)}; {mend}") from error
        values.append(value)
    return values


def checksum(value: Mapping[str, Any], before: str = "") -> str:
    """Return the SHA-256 of an object's JSON without its member CHECKSUM, whatever its order and layout.

    ``before`` is the checksum of the line before, if there is one.
    """
    return _checksum_of_parsed(json.loads(json.dumps(value)), before)  # as it is read back: keys become text


def _checksum_of_parsed(value: Mapping[str, Any], before: str) -> str:
    """Return ``checksum`` of a value that JSON was parsed to, in a third of the time."""
    bare = {name: member for name, member in value.items() if name != CHECKSUM}
    return hashlib.sha256(f"{before}{json.dumps(bare, sort_keys=True)}".encode()).hexdigest()


def _checked_value(text: bytes, path: Any, before: str) -> tuple[dict[str, Any], str]:
    """Return the value without its checksum, and the checksum; SettingError if they do not fit."""
    value = parse_json(text, path)
    if not isinstance(value, dict) or not isinstance(value.get(CHECKSUM), str):
        raise SettingError(f"{path} has no checksum ({CHECKSUM}): not written by this version, or damaged")
    own = value.pop(CHECKSUM)
    with contextlib.suppress(RecursionError, ValueError):  # of values nested deeper than any that was written
        if own == _checksum_of_parsed(value, before):
            return value, own
    raise SettingError(f"{path} was edited or damaged: it does not fit its checksum ({CHECKSUM})")


def _is_cut(line: bytes) -> bool:
    """Return whether a last line is the beginning of an object, rather than damaged."""
    try:
        json.JSONDecoder().raw_decode(line.decode())
    except (ValueError, RecursionError):
        return True
    return False


def write_with_checksum(path: Path, contents: bytes) -> None:
    """Write ``contents`` atomically, and their SHA-256 in a file beside it.

    While the contents change, that file lists the SHA-256 of the old ones too. So the file is whole, with the
    old contents or the new, wherever this is interrupted.
    """
    checksum_file, new = _checksum_file(path), hashlib.sha256(contents).hexdigest()
    checksums = f"{checksum_file.read_text()}\n{new}" if matches_checksum(path) else new
    write(checksum_file, checksums)
    write(path, contents)
    write(checksum_file, new)


def matches_checksum(path: Path) -> bool:
    """Return whether ``path`` is as ``write_with_checksum`` wrote it."""
    try:
        digest = hashlib.sha256(path.read_bytes()).hexdigest().encode()
        return digest in _checksum_file(path).read_bytes().split(b"\n")
    except OSError:
        return False


def is_json_lines(path: Path) -> bool:
    """Return whether a file has a JSON value per line, by the ending of its name."""
    return path.suffix.lower() == ".jsonl"


def split_lines(text: str) -> list[str]:
    """Return the lines of a text, split at newlines alone.

    An answer may hold a form feed, and JSON U+2028, at which ``str.splitlines`` splits too.
    """
    return [line.removesuffix("\r") for line in text.removesuffix("\n").split("\n")] if text else []


def check_characters(value: Any, name: str) -> None:
    """Raise SettingError if a text, or one of the texts in parsed JSON, has half of a character.

    A terminal that does not write UTF-8 gives such halves, and JSON may: no tokenizer takes them.
    """
    if isinstance(value, list | dict):
        for each in value.values() if isinstance(value, dict) else value:
            check_characters(each, name)
    elif isinstance(value, str):
        try:
            value.encode()
        except UnicodeEncodeError as error:
            raise SettingError(
                f"{name}: character {error.start + 1} of {value!r:.60} is {value[error.start]!r}, half of a "
                "character; write it in UTF-8 or leave it out"
            ) from error


def _checksum_file(path: Path) -> Path:
    """Return the file beside ``path`` that holds the checksum of its contents."""
    return path.with_name(f"{path.name}.sha256")


def relative(path: Path) -> str:
    """Return a path from the current folder if it is below that, else the whole path."""
    return str(path.relative_to(Path.cwd()) if path.is_relative_to(Path.cwd()) else path)


def similar_file(path: Path) -> str:
    """Return ``"; did you mean x.txt?"`` for the most similar name in the folder of a missing file, or ""."""
    try:
        names = [other.name for other in path.expanduser().parent.iterdir()]
    except OSError:
        return ""
    close = difflib.get_close_matches(path.name, names, n=1)
    return f"; did you mean {path.with_name(close[0])}?" if close else ""

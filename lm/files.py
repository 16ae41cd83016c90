"""Files and folders that appear complete or not at all, and files whose checksum shows later changes."""

import contextlib
import hashlib
import json
import os
import shutil
import uuid
from collections.abc import Iterable, Iterator, Mapping
from pathlib import Path
from typing import Any, BinaryIO

from lm.config.base import DataError, SettingError, parse_json

SEAL = "sha256"  # the name under which a small JSON file has the checksum of all else in it


def draft_of(path: Path) -> Path:
    """A name beside ``path`` that no other process uses, on any machine of a shared disk."""
    return path.with_name(f".{path.name}-{os.getpid()}-{uuid.uuid4().hex[:8]}")


@contextlib.contextmanager
def naming(path: Path) -> Iterator[None]:
    """Add the file's name to an OSError inside, which those of ``write`` and ``close`` lack."""
    try:
        yield
    except OSError as error:
        error.filename = error.filename or str(path)
        raise


@contextlib.contextmanager
def complete(path: Path) -> Iterator[BinaryIO]:
    """A file to write that gets its name when it is complete on the disk; after an error nothing is left."""
    path.parent.mkdir(parents=True, exist_ok=True)
    draft = draft_of(path)
    try:
        with draft.open("wb") as file:
            yield file
            file.flush()
            os.fsync(file.fileno())
        os.replace(draft, path)
    finally:
        draft.unlink(missing_ok=True)


@contextlib.contextmanager
def complete_folder(path: Path) -> Iterator[Path]:
    """A folder to fill that gets its name when it is complete; after an error nothing is left."""
    draft = draft_of(path.absolute())
    draft.mkdir(parents=True)
    try:
        yield draft
        os.replace(draft, path)
    finally:
        shutil.rmtree(draft, ignore_errors=True)


def write(path: Path, contents: str | bytes) -> None:
    """Write text (UTF-8) or bytes completely; OSError with the name of the file.

    Lone surrogates in a text, as in the name of a file, are written as their numbers.
    """
    with naming(path), complete(path) as file:
        file.write(contents if isinstance(contents, bytes) else contents.encode(errors="backslashreplace"))


def seal(value: Mapping[str, Any]) -> str:
    """``value`` as indented JSON with a checksum, by which ``unseal`` detects an edited or damaged file."""
    return json.dumps({**value, SEAL: checksum(value)}, indent=1) + "\n"


def unseal(data: bytes, path: Any, mend: str = "put back a copy that is whole") -> dict[str, Any]:
    """The value that ``seal`` wrote; DataError with the file's name and the ``mend`` if it was changed."""
    try:
        return _unsealed(data, path, "")[0]
    except SettingError as error:
        raise DataError(f"{error}; {mend}") from error


def seal_line(value: Mapping[str, Any], before: str) -> tuple[str, str]:
    """``value`` as a line of a file of JSON lines, and its checksum.

    That depends on the checksum of the line ``before`` ("" for the first): a missing line is detected.
    """
    own = checksum(value, before)
    return json.dumps({**value, SEAL: own}) + "\n", own


def seal_lines(values: Iterable[Mapping[str, Any]]) -> str:
    """All lines of such a file."""
    lines, before = [], ""
    for value in values:
        line, before = seal_line(value, before)
        lines.append(line)
    return "".join(lines)


def unseal_lines(data: bytes, path: Any, mend: str = "put back a copy that is whole") -> list[dict[str, Any]]:
    """The values of all lines that ``seal_line`` wrote, without a last line that a kill cut short.

    DataError with the file's name, the number of the line, what is wrong with it and the ``mend``.
    """
    *lines, last = data.rstrip(b"\0").split(b"\n")  # zeros: where a machine lost its power
    if last and not _is_cut(last):
        lines.append(last)
    values, before = [], ""
    for number, line in enumerate(lines, 1):
        try:
            value, before = _unsealed(line, path, before)
        except SettingError as error:
            raise DataError(f"{error}, in line {number} of {len(lines)}; {mend}") from error
        values.append(value)
    return values


def checksum(value: Mapping[str, Any], before: str = "") -> str:
    """SHA-256 of the JSON of an object without its member SEAL, whatever its order and layout.

    ``before``: the checksum of the line before, if there is one.
    """
    bare = {name: member for name, member in value.items() if name != SEAL}
    plain = json.dumps(json.loads(json.dumps(bare)), sort_keys=True)  # as it is read back: keys become text
    return hashlib.sha256(f"{before}{plain}".encode()).hexdigest()


def _unsealed(text: bytes, path: Any, before: str) -> tuple[dict[str, Any], str]:
    """The value without its checksum, and the checksum."""
    value = parse_json(text, path)
    if not isinstance(value, dict) or not isinstance(value.get(SEAL), str):
        raise SettingError(f"{path} has no checksum ({SEAL}): not written by this version, or damaged")
    own = value.pop(SEAL)
    with contextlib.suppress(RecursionError, ValueError):  # of values nested deeper than any that was sealed
        if own == checksum(value, before):
            return value, own
    raise SettingError(f"{path} was edited or damaged: it does not fit its checksum ({SEAL})")


def _is_cut(line: bytes) -> bool:
    """Whether a line without an end is the beginning of an object, rather than damaged."""
    try:
        json.JSONDecoder().raw_decode(line.decode())
    except (ValueError, RecursionError):
        return True
    return False


def write_sealed(path: Path, contents: bytes) -> None:
    """Write ``contents`` completely, and their SHA-256 beside them."""
    write(_seal_of(path), hashlib.sha256(contents).hexdigest())
    write(path, contents)


def is_sealed(path: Path) -> bool:
    """Whether ``path`` is as ``write_sealed`` wrote it."""
    try:
        return hashlib.sha256(path.read_bytes()).hexdigest().encode() == _seal_of(path).read_bytes()
    except OSError:
        return False


def lines_of(text: str) -> list[str]:
    """Cut at newlines alone: an answer may hold a form feed, and JSON U+2028, at which Python cuts too."""
    return [line.removesuffix("\r") for line in text.removesuffix("\n").split("\n")] if text else []


def _seal_of(path: Path) -> Path:
    return path.with_name(f"{path.name}.sha256")

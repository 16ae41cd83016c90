"""Files and folders that are there whole or not at all."""

import contextlib
import hashlib
import json
import os
import shutil
import uuid
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any, BinaryIO

from lm.config import SettingError, parse_json

SEAL = "sha256"  # the name under which a small JSON file has the checksum of all else in it


def draft_of(path: Path) -> Path:
    """A name beside ``path`` that no other process uses, on whichever machine of a shared disk it runs."""
    return path.with_name(f".{path.name}-{os.getpid()}-{uuid.uuid4().hex[:8]}")


@contextlib.contextmanager
def naming(path: Path) -> Iterator[None]:
    """An OSError inside tells which file it was, which those of ``write`` and ``close`` do not."""
    try:
        yield
    except OSError as error:
        error.filename = error.filename or str(path)
        raise


@contextlib.contextmanager
def complete(path: Path) -> Iterator[BinaryIO]:
    """A file to write that takes its name when all of it is on the disk, and leaves nothing behind after an error."""
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
    """A folder to fill that takes its name when it is whole, and leaves nothing behind after an error."""
    draft = draft_of(path.absolute())
    draft.mkdir(parents=True)
    try:
        yield draft
        os.replace(draft, path)
    finally:
        shutil.rmtree(draft, ignore_errors=True)


def write(path: Path, text: str) -> None:
    """``text`` in UTF-8, whole; OSError with the name of the file."""
    with naming(path), complete(path) as file:
        file.write(text.encode())


def seal(value: Mapping[str, Any]) -> str:
    """``value`` as indented JSON with a checksum, so that ``unseal`` tells an edited or damaged file."""
    bare = json.loads(json.dumps(value))
    return json.dumps(bare | {SEAL: _checksum(bare)}, indent=1) + "\n"


def unseal(data: bytes, path: Any) -> dict[str, Any]:
    """The value that ``seal`` wrote; SettingError, with the file's name, if it is not what was written."""
    found = parse_json(data, path)
    if not isinstance(found, dict) or SEAL not in found:
        raise SettingError(f"{path} has no checksum ({SEAL}): it was not written by this version, or is damaged")
    due = found.pop(SEAL)
    with contextlib.suppress(RecursionError):  # of values nested deeper than any that was sealed
        if due == _checksum(found):
            return found
    raise SettingError(f"{path} was edited or damaged: it does not fit its checksum ({SEAL})")


def _checksum(value: Any) -> str:
    return hashlib.sha256(json.dumps(value, sort_keys=True).encode()).hexdigest()


def write_sealed(path: Path, contents: bytes) -> None:
    """Write ``contents`` whole, and their SHA-256 beside them."""
    write(_seal_of(path), hashlib.sha256(contents).hexdigest())
    with complete(path) as file:
        file.write(contents)


def is_sealed(path: Path) -> bool:
    """Whether ``path`` is there as ``write_sealed`` wrote it."""
    try:
        return hashlib.sha256(path.read_bytes()).hexdigest().encode() == _seal_of(path).read_bytes()
    except OSError:
        return False


def _seal_of(path: Path) -> Path:
    return path.with_name(f"{path.name}.sha256")

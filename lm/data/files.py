"""Files that are there whole or not at all."""

import contextlib
import hashlib
import os
import uuid
from collections.abc import Iterator
from pathlib import Path
from typing import BinaryIO


def draft_of(path: Path) -> Path:
    """A name beside ``path`` that no other process uses, on whichever machine of a shared disk it runs."""
    return path.with_name(f".{path.name}-{os.getpid()}-{uuid.uuid4().hex[:8]}")


@contextlib.contextmanager
def complete(path: Path) -> Iterator[BinaryIO]:
    """A file to write that takes its name when it is whole, and leaves nothing behind after an error."""
    path.parent.mkdir(parents=True, exist_ok=True)
    draft = draft_of(path)
    try:
        with draft.open("wb") as file:
            yield file
        os.replace(draft, path)
    finally:
        draft.unlink(missing_ok=True)


def seal(path: Path, contents: bytes) -> None:
    """Write ``contents`` whole, and their SHA-256 beside them."""
    with complete(_seal_of(path)) as file:
        file.write(hashlib.sha256(contents).hexdigest().encode())
    with complete(path) as file:
        file.write(contents)


def is_sealed(path: Path) -> bool:
    """Whether ``path`` is there as ``seal`` wrote it."""
    try:
        return hashlib.sha256(path.read_bytes()).hexdigest().encode() == _seal_of(path).read_bytes()
    except OSError:
        return False


def _seal_of(path: Path) -> Path:
    return path.with_name(f"{path.name}.sha256")

"""Saves and loads the named arrays of a model in one file (npz), with a checksum in a second file."""

import io
import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from lm.config.base import DataError
from lm.files import CHECKSUM, matches_checksum, write_with_checksum

KIND = "kind"  # name of the array that holds the kind of model


def save_tables(path: Path, kind: str, tables: Mapping[str, np.ndarray]) -> None:
    """Write the tables of a model of this kind as one file, complete or absent, and its SHA-256."""
    contents = io.BytesIO()
    arrays: dict[str, Any] = {KIND: pack_texts([kind]), **tables}
    np.savez(contents, **arrays)
    write_with_checksum(path, contents.getvalue())


def load_tables(path: Path, kind: str) -> dict[str, np.ndarray]:
    """Return what ``save_tables`` wrote.

    Raises DataError if the file is missing, damaged or of a model of another kind.
    """
    if not path.exists():
        raise DataError(f"{path} does not exist; estimate the model again, or name the file that it is in")
    if not matches_checksum(path):
        why = f"it does not fit its checksum in {path.name}.{CHECKSUM}"
        raise DataError(
            f"{path} is damaged: {why}; estimate the model again, or put back a copy that is whole"
        )
    with np.load(path) as arrays:  # numpy refuses pickled objects by default
        tables = dict(arrays)
    found = unpack_texts(tables.pop(KIND)) if KIND in tables else ["something else"]
    if found != [kind]:
        raise DataError(f"{path} holds the tables of {found[0]!r}, not of {kind!r}; name another file")
    return tables


def pack_texts(texts: Sequence[str]) -> np.ndarray:
    """Return texts as the bytes of a JSON list, uint8 [bytes]; numpy would pad them all to the longest."""
    return np.frombuffer(json.dumps(texts).encode(), np.uint8)


def unpack_texts(array: np.ndarray) -> list[str]:
    """Return the texts that ``pack_texts`` put into an array."""
    return json.loads(array.tobytes())

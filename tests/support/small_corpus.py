"""The documentation corpus of a part of Python's library, written once by each process of the tests."""

import atexit
import shutil
import tempfile
from functools import cache
from pathlib import Path

from lm.data.documentation import corpus


@cache
def written() -> Path:
    """Return a cache that holds the data sets; writing them takes seconds."""
    folder = Path(tempfile.mkdtemp(prefix="lm-tests-corpus-"))
    atexit.register(shutil.rmtree, folder, ignore_errors=True)
    corpus.prepare_sets(folder, packages=corpus.STDLIB)
    return folder


def prepare(folder: Path) -> Path:
    """Copy the data sets into the cache ``folder``, which a test may change, and return where they are."""
    shutil.copytree(written(), folder, dirs_exist_ok=True)
    return folder / "tfds" / "documentation"

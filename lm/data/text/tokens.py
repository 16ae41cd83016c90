"""A corpus as one flat array of tokens on disk: encoded once, then read through the page cache."""

import functools
import hashlib
import os
import shutil
import time
import zlib
from collections.abc import Iterator, Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from lm.data.text.vocabulary import Vocabulary
from lm.files import complete_folder, draft_of, seal, unseal, write
from lm.settings import DataError, SettingError

CHUNK = 4_000_000  # text that is encoded at a time [characters]
ABANDONED = 3600  # a draft to which nothing was written for so long is deleted [seconds]
BLOCK = 1 << 18  # of tokens with a checksum of its own [bytes]
# at each end of the tokens, checked before they are used; the rest is checked when it is first read [bytes]
CHECKED_AT_START = 1 << 28
ORDER_SEED = 0  # seed of the order in which documents are stored


@dataclass(frozen=True)
class Tokens:
    """Encoded documents without EOS, one after the other; cheap to send to another process."""

    folder: Path
    first: int | None = None  # how many are read, from the start; None: all [tokens]

    @functools.cached_property
    def tokens(self) -> "Stored":
        """uint16 or uint32 [tokens], mapped from disk."""
        return Stored(self.folder, self.record["dtype"], self.first)

    @functools.cached_property
    def offsets(self) -> np.ndarray:
        """int64 [documents + 1]: document d is ``tokens[offsets[d]:offsets[d + 1]]``; the last may be cut."""
        offsets = np.load(self.folder / "offsets.npy")
        end = offsets[-1] if self.first is None else min(self.first, offsets[-1])
        return np.append(offsets[offsets < end], end)

    @functools.cached_property
    def record(self) -> dict[str, Any]:
        return unseal((self.folder / "about.json").read_bytes(), self.folder / "about.json")

    @property
    def fingerprint(self) -> str:
        return self.record["fingerprint"]

    def cut(self, count: int) -> "Tokens":
        """The first ``count`` tokens, of documents that are stored in random order."""
        return Tokens(self.folder, count)

    def __getstate__(self) -> dict[str, Any]:  # without the memory map, which would be pickled as a copy
        return {"folder": self.folder, "first": self.first}


class Stored:
    """Tokens mapped from disk, read by indices or slices; a block is checked when any of it is first read.

    DataError if a block is not as it was written.
    """

    def __init__(self, folder: Path, dtype: str, first: int | None):
        self._folder, self._bytes = folder, np.memmap(folder / "tokens", np.uint8, mode="r")
        self._tokens = self._bytes.view(dtype)[:first]
        self._sums = np.load(folder / "sums.npy")
        self._unchecked = np.ones(len(self._sums), bool)
        self._count = len(self._sums)  # of unchecked blocks

    def __len__(self) -> int:
        return len(self._tokens)

    def __getitem__(self, index: np.ndarray | slice) -> np.ndarray:
        if self._count:
            self._check(np.arange(len(self))[index] if isinstance(index, slice) else index)
        return np.asarray(self._tokens[index])

    def __array__(self, dtype=None, copy=None) -> np.ndarray:
        return np.array(self[:], dtype)

    def tolist(self) -> list[int]:
        return self[:].tolist()

    def _check(self, index: np.ndarray) -> None:
        blocks = np.ravel(index) // (BLOCK // self._tokens.itemsize)
        for block in np.unique(blocks[self._unchecked[blocks]]).tolist():
            start, end = block * BLOCK, (block + 1) * BLOCK
            if zlib.crc32(self._bytes[start:end].data) != self._sums[block]:
                damage = f"{self._folder / 'tokens'} is damaged in bytes {start:,} to {end:,}"
                raise DataError(f"{damage}: delete {self._folder}, and the corpus is encoded again")
            self._unchecked[block] = False
            self._count -= 1


def encode_corpus(documents: Sequence[str], vocabulary: Vocabulary, folder: Path) -> Tokens:
    """The encoded corpus, from ``folder`` if it is there undamaged. Documents are stored shuffled, once."""
    key = f"{_fingerprint(documents)} {vocabulary.fingerprint} {ORDER_SEED}"
    fingerprint = hashlib.sha256(key.encode()).hexdigest()
    path = Path(folder) / fingerprint[:16]
    if is_intact(path, fingerprint):
        return Tokens(path)
    if path.exists():
        print(f"warning: {path} is damaged, or older than this release, and is encoded again", flush=True)
    for draft in path.parent.glob(f".{path.name}-*"):  # of processes that were killed, none at work
        with suppress(OSError):
            if time.time() - (draft / "tokens").stat().st_mtime > ABANDONED:
                shutil.rmtree(draft)
    damaged = draft_of(path)
    try:
        with complete_folder(path) as draft:
            _encode_into(documents, vocabulary, draft, fingerprint)
            if path.exists() and not is_intact(path, fingerprint):
                os.rename(path, damaged)
    except OSError:
        if not is_intact(path, fingerprint):  # else another process was faster, with the same result
            raise
    finally:
        shutil.rmtree(damaged, ignore_errors=True)
    return Tokens(path)


def is_intact(folder: Path, fingerprint: str) -> bool:
    """Whether an encoded corpus is as it was written, except for blocks that are checked when first read."""
    try:
        record = unseal((folder / "about.json").read_bytes(), folder)
        item = np.dtype(record["dtype"]).itemsize
        if record["fingerprint"] != fingerprint or record["sums"] != _sums(folder):
            return False
        if (folder / "tokens").stat().st_size != record["tokens"] * item:
            return False
        stored = Stored(folder, record["dtype"], None)
        starts, ends = np.arange(0, len(stored), BLOCK // item), CHECKED_AT_START // item
        stored[starts[(starts < ends) | (starts >= len(stored) - ends)]]
    except (OSError, SettingError, KeyError, TypeError, ValueError):
        return False
    return True


def _sums(folder: Path) -> dict[str, int]:
    """CRC-32 of each file but the tokens, whose blocks have theirs in one of these."""
    return {name: zlib.crc32((folder / name).read_bytes()) for name in ("offsets.npy", "sums.npy")}


def _fingerprint(documents: Sequence[str]) -> str:
    """The source's own fingerprint, or that of the text of a plain sequence."""
    if fingerprint := getattr(documents, "fingerprint", None):
        return fingerprint
    digest = hashlib.sha256()
    for text in documents:
        digest.update(f"{len(text)} {text}".encode(errors="surrogatepass"))
    return digest.hexdigest()


def _encode_into(documents: Sequence[str], vocabulary: Vocabulary, folder: Path, fingerprint: str) -> None:
    """Appends chunk by chunk, so that memory does not grow with the text."""
    dtype = np.dtype(np.uint16 if vocabulary.size <= 2**16 else np.uint32)
    counts = [np.zeros(1, np.int64)]
    with open(folder / "tokens", "wb") as file:
        for texts in _chunks(documents):
            encoded = vocabulary.encode_batch(texts)
            counts.append(np.array([len(ids) for ids in encoded], np.int64))
            file.write(np.concatenate(encoded).astype(dtype).tobytes())
    offsets = np.cumsum(np.concatenate(counts))
    if not offsets[-1]:
        raise SettingError("data.corpus has no text to train on; name one with at least one document of text")
    np.save(folder / "offsets.npy", offsets)
    with (folder / "tokens").open("rb") as file:
        blocks = iter(functools.partial(file.read, BLOCK), b"")
        np.save(folder / "sums.npy", np.array([zlib.crc32(block) for block in blocks], np.uint32))
    record = {"fingerprint": fingerprint, "dtype": dtype.name, "documents": len(documents)}
    write(folder / "about.json", seal(record | {"tokens": int(offsets[-1]), "sums": _sums(folder)}))


def _chunks(documents: Sequence[str]) -> Iterator[list[str]]:
    """The documents in their stored order, about CHUNK characters at a time."""
    order = np.random.Generator(np.random.Philox(key=[ORDER_SEED, 0])).permutation(len(documents))
    texts, size = [], 0
    for index in order.tolist():
        texts.append(documents[index])
        size += len(texts[-1])
        if size >= CHUNK:
            yield texts
            texts, size = [], 0
    if texts:
        yield texts

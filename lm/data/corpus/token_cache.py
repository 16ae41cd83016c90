"""A corpus as tokens: each window of its shards is encoded when it is first needed, by any process, and kept.

A file of tokens is complete or absent, is named by all that it depends on, and is checked when it is read: a
damaged one is made again. So processes, runs and machines share a folder without knowing of each other.
"""

import contextlib
import fcntl
import functools
import hashlib
import io
import os
import zipfile
import zlib
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import NamedTuple

import numpy as np

from lm.config.base import DataError
from lm.data.corpus.shards import Shard, Texts, deal, fingerprints_of, window_size
from lm.data.corpus.tfds import Corrupt
from lm.files import atomic_file, name_file_in_errors
from lm.tokenizers.tokenizer import Vocabulary

ENCODED_AT_ONCE = 1 << 20  # text of one call of the tokenizer [characters]
TRIMMED_EVERY = 32  # windows that a process writes between looks at how much is kept [windows]
TOKENS_FOLDER = "tokens"  # in a cache: the folder of what is kept
GIGABYTE = 10**9


class Tokens(NamedTuple):
    """Encoded documents without EOS, one after the other."""

    tokens: np.ndarray  # uint16 or uint32 [tokens]
    offsets: np.ndarray  # int64 [documents + 1]: document d is tokens[offsets[d]:offsets[d + 1]]
    left_out: int = 0  # corrupt records that were skipped
    goes_on: bool = False  # the last document is cut

    def cut(self, count: int) -> "Tokens":
        """The first ``count`` tokens; the last document may be cut."""
        if count >= len(self.tokens):
            return self
        offsets = np.append(self.offsets[self.offsets < count], count)
        return Tokens(self.tokens[:count], offsets, self.left_out, count not in self.offsets)


@dataclass(frozen=True)
class EncodedCorpus:
    """The shards of a corpus as the windows of tokens that they become; cheap to send to another process."""

    shards: tuple[Shard, ...]  # at least as many as streams
    vocabulary: Vocabulary
    folder: Path  # of the windows that are kept
    window: int  # [bytes]
    streams: int  # that its shards can be dealt to
    corrupt: Corrupt = "stop"  # what its shards do with corrupt records
    most: float = 0.0  # kept in the folder; beyond that those last read longest ago go; 0: all [gigabytes]

    @functools.cached_property
    def fingerprint(self) -> str:
        key = f"{self.fingerprints} {self.vocabulary.fingerprint} {self.window}"
        return hashlib.sha256(key.encode()).hexdigest()

    @functools.cached_property
    def fingerprints(self) -> tuple[str, ...]:
        """Of each shard when this was first asked, in this process or in that which sent the corpus to it."""
        return fingerprints_of(self.shards)

    def path(self, shard: int, number: int) -> Path:
        """Where a window of a shard is kept; DataError if the shard is not what it was."""
        if self.shards[shard].fingerprint != self.fingerprints[shard]:
            raise DataError(f"{self.shards[shard].name} has changed since it was first read: restore it")
        skips = "skip" * (self.corrupt == "skip")  # a window without some records is another
        key = f"{self.fingerprints[shard]} {number} {self.window} {self.vocabulary.fingerprint} {skips}"
        name = hashlib.sha256(key.encode()).hexdigest()[:32]
        return self.folder / name[:2] / f"{name}.npz"

    def read(self, shard: int, number: int) -> Tokens | None:
        """The tokens of a window of a shard, encoded if need be; None: the window before was the last."""
        path = self.path(shard, number)
        if (kept := _load(path)) is None:
            with _alone(path):  # another process may be at it
                if (kept := _load(path)) is None:
                    kept = self._encode(shard, number)
                    _save(path, kept)
                    self._trim()
        return None if kept.ended else kept.tokens

    def is_kept(self, shard: int, number: int) -> bool:
        return self.path(shard, number).exists()

    def _encode(self, shard: int, number: int) -> "_Kept":
        window = self.shards[shard].read(number, self.window)
        if window is None:
            return _Kept(encode([], self.vocabulary), True)
        if window.left_out:
            name = self.shards[shard].name
            print(f"warning: {window.left_out} corrupt records of {name} are left out", flush=True)
        return _Kept(encode(window.documents, self.vocabulary)._replace(left_out=window.left_out), False)

    def first(self, count: int | None = None) -> Tokens:
        """The first ``count`` tokens of the corpus in its own order, or all of them, in memory."""
        parts, room = list[Tokens](), count
        for shard in range(len(self.shards)):
            number = 0
            while (room is None or room > 0) and (tokens := self.read(shard, number)) is not None:
                parts.append(tokens)
                room = None if room is None else room - len(tokens.tokens)
                number += 1
        joined = join(parts)
        return joined if count is None else joined.cut(count)

    def _trim(self) -> None:
        """Once in TRIMMED_EVERY windows: delete those last read longest ago until ``most`` is kept."""
        _WRITTEN[self.folder] = _WRITTEN.get(self.folder, 0) + 1
        if not self.most or _WRITTEN[self.folder] % TRIMMED_EVERY:
            return
        files = []
        for path in self.folder.glob("*/*.npz"):
            with contextlib.suppress(OSError):  # another process trims too
                status = path.stat()
                files.append((status.st_mtime, status.st_size, path))
        excess = sum(size for _, size, _ in files) - self.most * GIGABYTE
        for _, size, path in sorted(files):
            if excess <= 0:
                return
            path.unlink(missing_ok=True)
            excess -= size


def kept_bytes(folder: Path) -> int:
    """How much encoded text a folder holds [bytes]."""
    sizes = 0
    for path in folder.glob("*/*.npz"):
        with contextlib.suppress(OSError):  # another process deletes them
            sizes += path.stat().st_size
    return sizes


_WRITTEN: dict[Path, int] = {}  # windows, by this process


def encoded_corpus(
    shards: Sequence[Shard], vocabulary: Vocabulary, folder: Path, streams: int
) -> EncodedCorpus:
    """Shards as ``streams`` read them."""
    size = window_size(shards, streams)
    return EncodedCorpus(tuple(deal(shards, streams)), vocabulary, Path(folder), size, streams)


def encode_texts(
    documents: Sequence[str], vocabulary: Vocabulary, folder: Path, streams: int = 1
) -> EncodedCorpus:
    """A corpus of documents that are there already."""
    return encoded_corpus([Texts(tuple(documents))], vocabulary, folder, streams)


def encode(documents: Sequence[str], vocabulary: Vocabulary) -> Tokens:
    """Documents -> their tokens, one after the other."""
    dtype = np.dtype(np.uint16 if vocabulary.size <= 2**16 else np.uint32)
    counts, parts = [np.zeros(1, np.int64)], [np.zeros(0, dtype)]
    for texts in _chunks(documents):
        encoded = vocabulary.encode_batch(texts)
        counts.append(np.array([len(ids) for ids in encoded], np.int64))
        parts.append(np.concatenate(encoded).astype(dtype))
    return Tokens(np.concatenate(parts), np.cumsum(np.concatenate(counts)))


def join(parts: Sequence[Tokens]) -> Tokens:
    """One after the other."""
    if not parts:
        return Tokens(np.zeros(0, np.uint16), np.zeros(1, np.int64))
    before = np.cumsum([0, *(len(part.tokens) for part in parts)])
    offsets = [part.offsets[1:] + start for part, start in zip(parts, before[:-1], strict=True)]
    tokens = np.concatenate([part.tokens for part in parts])
    return Tokens(tokens, np.concatenate([[0], *offsets]), sum(part.left_out for part in parts))


def _chunks(documents: Sequence[str]) -> Iterator[list[str]]:
    texts, size = list[str](), 0
    for text in documents:
        texts.append(text)
        size += len(text)
        if size >= ENCODED_AT_ONCE:
            yield texts
            texts, size = [], 0
    if texts:
        yield texts


# ---- files of tokens


class _Kept(NamedTuple):
    tokens: Tokens
    ended: bool  # there is no such window


def _save(path: Path, kept: _Kept) -> None:
    tokens = kept.tokens
    numbers = np.array([tokens.left_out, kept.ended], np.int64)
    contents = io.BytesIO()
    np.savez(
        contents, tokens=tokens.tokens, lengths=np.diff(tokens.offsets).astype(np.uint32), numbers=numbers
    )
    with name_file_in_errors(path), atomic_file(path) as file:
        file.write(contents.getbuffer())


def _load(path: Path) -> _Kept | None:
    """What is kept; None: nothing, or it is damaged (zip files have a checksum of each array)."""
    try:
        with np.load(path) as arrays:
            lengths, (left_out, ended) = arrays["lengths"], arrays["numbers"].tolist()
            tokens = Tokens(
                arrays["tokens"], np.concatenate([[0], np.cumsum(lengths, dtype=np.int64)]), left_out
            )
    except FileNotFoundError:
        return None
    except (OSError, ValueError, KeyError, EOFError, zipfile.BadZipFile, zlib.error, NotImplementedError):
        print(f"warning: {path} is damaged, and is encoded again", flush=True)
        return None
    with contextlib.suppress(OSError):  # what was read last is kept longest
        os.utime(path)
    return _Kept(tokens, bool(ended))


@contextlib.contextmanager
def _alone(path: Path) -> Iterator[None]:
    """No other process of this machine makes ``path`` meanwhile; where nothing can be locked, one may."""
    lock = path.with_suffix(".lock")
    lock.parent.mkdir(parents=True, exist_ok=True)
    with lock.open("w") as file:
        with contextlib.suppress(OSError):
            fcntl.flock(file, fcntl.LOCK_EX)
        try:
            yield
        finally:
            lock.unlink(missing_ok=True)

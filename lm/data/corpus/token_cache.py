"""Keep a corpus as tokens: a cache of its windows, each encoded by the process that first needs it.

A file of tokens is complete or absent, is named by a hash of all that it depends on, and is checked when it
is read: a damaged one is encoded again. So processes, runs and machines share a folder without coordination.
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
from lm.tokenizers.tokenizer import Tokenizer

ENCODED_AT_ONCE = 1 << 20  # text per call of the tokenizer [characters]
TRIMMED_EVERY = 32  # that a process writes between checks of the cache's size [windows]
TOKENS_FOLDER = "tokens"  # name of the folder of encoded windows in a cache
GIGABYTE = 10**9


class Tokens(NamedTuple):
    """Hold encoded documents without EOS, concatenated."""

    tokens: np.ndarray  # uint16 or uint32 [tokens]
    offsets: np.ndarray  # int64 [documents + 1]: document d is tokens[offsets[d]:offsets[d + 1]]
    left_out: int = 0  # corrupt records that were skipped
    goes_on: bool = False  # the last document is truncated

    def cut(self, count: int) -> "Tokens":
        """Return the first ``count`` tokens; the last document may be truncated."""
        if count >= len(self.tokens):
            return self
        offsets = np.append(self.offsets[self.offsets < count], count)
        return Tokens(self.tokens[:count], offsets, self.left_out, count not in self.offsets)


@dataclass(frozen=True)
class EncodedCorpus:
    """Read the windows of a corpus's shards as tokens, through a cache; cheap to send to another process."""

    shards: tuple[Shard, ...]  # at least as many as streams
    tokenizer: Tokenizer
    folder: Path  # of the token cache
    window: int  # [bytes]
    streams: int  # among which its shards can be divided
    corrupt: Corrupt = "stop"  # how its shards handle corrupt records
    most: float = 0.0  # size of the cache; least recently read windows are evicted; 0: no limit [gigabytes]

    @functools.cached_property
    def fingerprint(self) -> str:
        key = f"{self.fingerprints} {self.tokenizer.fingerprint} {self.window}"
        return hashlib.sha256(key.encode()).hexdigest()

    @functools.cached_property
    def fingerprints(self) -> tuple[str, ...]:
        """Return the fingerprints of the shards, as they were when first asked for.

        They are pickled with the corpus, so that a process that receives it does not read them again.
        """
        return fingerprints_of(self.shards)

    def path(self, shard: int, number: int) -> Path:
        """Return the cache file of a window of a shard; raise DataError if the shard has changed."""
        if self.shards[shard].fingerprint != self.fingerprints[shard]:
            raise DataError(f"{self.shards[shard].name} has changed since it was first read: restore it")
        skips = "skip" * (self.corrupt == "skip")  # skipping records changes a window
        key = f"{self.fingerprints[shard]} {number} {self.window} {self.tokenizer.fingerprint} {skips}"
        name = hashlib.sha256(key.encode()).hexdigest()[:32]
        return self.folder / name[:2] / f"{name}.npz"

    def read(self, shard: int, number: int) -> Tokens | None:
        """Return the tokens of a window of a shard, encoded if not cached, or None after the last window."""
        path = self.path(shard, number)
        if (kept := _load(path)) is None:
            with _alone(path):  # another process may be encoding it
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
            return _Kept(encode([], self.tokenizer), True)
        if window.left_out:
            name = self.shards[shard].name
            print(f"warning: {window.left_out} corrupt records of {name} are left out", flush=True)
        return _Kept(encode(window.documents, self.tokenizer)._replace(left_out=window.left_out), False)

    def first(self, count: int | None = None) -> Tokens:
        """Return the first ``count`` tokens of the corpus in its own order, or all of them, in memory."""
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
        """Once in TRIMMED_EVERY calls, evict least recently read windows beyond ``most`` gigabytes."""
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
    """Return the total size of the token files in a folder [bytes]."""
    sizes = 0
    for path in folder.glob("*/*.npz"):
        with contextlib.suppress(OSError):  # another process may delete it
            sizes += path.stat().st_size
    return sizes


_WRITTEN: dict[Path, int] = {}  # number of windows that this process wrote, by folder


def encoded_corpus(
    shards: Sequence[Shard], tokenizer: Tokenizer, folder: Path, streams: int
) -> EncodedCorpus:
    """Return the encoded corpus of ``shards``, divided so that ``streams`` streams can read it."""
    size = window_size(shards, streams)
    return EncodedCorpus(tuple(deal(shards, streams)), tokenizer, Path(folder), size, streams)


def encode_texts(
    documents: Sequence[str], tokenizer: Tokenizer, folder: Path, streams: int = 1
) -> EncodedCorpus:
    """Return the encoded corpus of documents in memory."""
    return encoded_corpus([Texts(tuple(documents))], tokenizer, folder, streams)


def encode(documents: Sequence[str], tokenizer: Tokenizer) -> Tokens:
    """Return the tokens of ``documents``, concatenated; uint16 if the vocabulary fits, else uint32."""
    dtype = np.dtype(np.uint16 if tokenizer.vocab_size <= 2**16 else np.uint32)
    counts, parts = [np.zeros(1, np.int64)], [np.zeros(0, dtype)]
    for texts in _chunks(documents):
        encoded = tokenizer.encode_batch(texts)
        counts.append(np.array([len(ids) for ids in encoded], np.int64))
        parts.append(np.concatenate(encoded).astype(dtype))
    return Tokens(np.concatenate(parts), np.cumsum(np.concatenate(counts)))


def join(parts: Sequence[Tokens]) -> Tokens:
    """Concatenate the documents of ``parts``."""
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
    ended: bool  # the shard has no such window


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
    """Return what a cache file holds; None if it is missing or damaged (zip has a checksum per array)."""
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
    with contextlib.suppress(OSError):  # recently read files are evicted last
        os.utime(path)
    return _Kept(tokens, bool(ended))


@contextlib.contextmanager
def _alone(path: Path) -> Iterator[None]:
    """Hold a lock, so that no other process of this machine writes ``path``; does nothing without flock."""
    lock = path.with_suffix(".lock")
    lock.parent.mkdir(parents=True, exist_ok=True)
    with lock.open("w") as file:
        with contextlib.suppress(OSError):
            fcntl.flock(file, fcntl.LOCK_EX)
        try:
            yield
        finally:
            lock.unlink(missing_ok=True)

"""Cache a corpus as tokens: each window is encoded by the process that first needs it.

A file of tokens is complete or absent, is named by a hash of all that it depends on, and is checked when it
is read: a damaged one is encoded again. So processes, runs and machines share a folder without coordination.
"""

import contextlib
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
from lm.data.corpus.shards import (
    InMemoryShard,
    Shard,
    choose_window_bytes,
    shard_fingerprints,
    shards_for_streams,
)
from lm.data.corpus.tfds import OnCorrupt
from lm.files import atomic_file, locked_if_possible, name_file_in_errors
from lm.tokenizers.tokenizer import Tokenizer

CHARACTERS_PER_CALL = 1 << 20  # of the tokenizer
EVICTION_INTERVAL = 32  # windows that a process writes between checks of the cache's size
TOKENS_FOLDER = "tokens"  # name of the folder of encoded windows in a cache
GIGABYTE = 10**9


class EncodedDocuments(NamedTuple):
    """Hold the tokens of documents, without EOS, concatenated."""

    tokens: np.ndarray  # uint16 or uint32 [tokens]
    offsets: np.ndarray  # int64 [documents + 1]: document d is tokens[offsets[d]:offsets[d + 1]]
    num_corrupt: int = 0  # records that were skipped
    is_truncated: bool = False  # the last document lacks its end

    def truncate(self, length: int) -> "EncodedDocuments":
        """Return the first ``length`` tokens."""
        if length >= len(self.tokens):
            return self
        offsets = np.append(self.offsets[self.offsets < length], length)
        return EncodedDocuments(self.tokens[:length], offsets, self.num_corrupt, length not in self.offsets)


@dataclass(frozen=True)
class EncodedCorpus:
    """A corpus that is read as tokens, window by window; it is cheap to send to another process.

    A window is encoded when it is first read, and cached.
    """

    shards: tuple[Shard, ...]  # at least as many as streams
    tokenizer: Tokenizer
    folder: Path  # of the token cache
    window_bytes: int
    num_streams: int  # for which the shards were divided; a sampler may read with a divisor of it
    # must be that of the shards: cache files of windows with skipped records have other names
    on_corrupt: OnCorrupt = "stop"
    max_gigabytes: float = 0.0  # of the cache; the least recently read windows are evicted; 0: no limit

    @functools.cached_property
    def fingerprint(self) -> str:
        """Return a SHA-256 digest of what the tokens depend on, except ``on_corrupt``."""
        key = f"{self.shard_fingerprints} {self.tokenizer.fingerprint} {self.window_bytes}"
        return hashlib.sha256(key.encode()).hexdigest()

    @functools.cached_property
    def shard_fingerprints(self) -> tuple[str, ...]:
        """Return the fingerprints of the shards, as they were when first asked for.

        They are pickled with the corpus, so that a process that receives it does not read them again.
        """
        return shard_fingerprints(self.shards)

    def path(self, shard: int, window: int) -> Path:
        """Return the cache file of a window of a shard; raise DataError if the shard has changed."""
        if self.shards[shard].fingerprint != self.shard_fingerprints[shard]:
            raise DataError(f"{self.shards[shard].name} has changed since it was first read: restore it")
        on_corrupt = "skip" if self.on_corrupt == "skip" else ""  # skipping records changes a window
        tokenizer = self.tokenizer.fingerprint
        key = f"{self.shard_fingerprints[shard]} {window} {self.window_bytes} {tokenizer} {on_corrupt}"
        name = hashlib.sha256(key.encode()).hexdigest()[:32]
        return self.folder / name[:2] / f"{name}.npz"

    def read(self, shard: int, window: int) -> EncodedDocuments | None:
        """Return the tokens of a window of a shard, encoded if not cached, or None after the last window."""
        path = self.path(shard, window)
        cached = _load(path)
        if cached is None:
            with _file_lock(path):  # another process may be encoding it
                cached = _load(path)
                if cached is None:
                    cached = self._encode(shard, window)
                    _save(path, cached)
                    self._evict()
        return None if cached.is_past_end else cached.documents

    def is_cached(self, shard: int, window: int) -> bool:
        return self.path(shard, window).exists()

    def _encode(self, shard: int, window: int) -> "_CachedWindow":
        text = self.shards[shard].read(window, self.window_bytes)
        if text is None:
            return _CachedWindow(encode_documents([], self.tokenizer), is_past_end=True)
        if text.num_corrupt:
            name = self.shards[shard].name
            print(f"warning: {text.num_corrupt} corrupt records of {name} are left out", flush=True)
        documents = encode_documents(text.documents, self.tokenizer)
        return _CachedWindow(documents._replace(num_corrupt=text.num_corrupt), is_past_end=False)

    def first(self, num_tokens: int | None = None) -> EncodedDocuments:
        """Return the first ``num_tokens`` tokens in the order of the shards, or all of them, in memory."""
        windows, read = list[EncodedDocuments](), 0
        for shard in range(len(self.shards)):
            window = 0
            while num_tokens is None or read < num_tokens:
                documents = self.read(shard, window)
                if documents is None:
                    break
                windows.append(documents)
                read += len(documents.tokens)
                window += 1
        documents = concatenate(windows)
        return documents if num_tokens is None else documents.truncate(num_tokens)

    def _evict(self) -> None:
        """Once in EVICTION_INTERVAL calls, evict least recently read windows beyond ``max_gigabytes``."""
        _WINDOWS_WRITTEN[self.folder] = _WINDOWS_WRITTEN.get(self.folder, 0) + 1
        if not self.max_gigabytes or _WINDOWS_WRITTEN[self.folder] % EVICTION_INTERVAL:
            return
        files = []
        for path in self.folder.glob("*/*.npz"):
            with contextlib.suppress(OSError):  # another process evicts too
                status = path.stat()
                files.append((status.st_mtime, status.st_size, path))
        excess = sum(size for _, size, _ in files) - self.max_gigabytes * GIGABYTE
        for _, size, path in sorted(files):
            if excess <= 0:
                return
            path.unlink(missing_ok=True)
            excess -= size


_WINDOWS_WRITTEN: dict[Path, int] = {}  # by this process, per folder


def token_cache_bytes(folder: Path) -> int:
    """Return the total size of the token files in a folder [bytes]."""
    total = 0
    for path in folder.glob("*/*.npz"):
        with contextlib.suppress(OSError):  # another process may delete it
            total += path.stat().st_size
    return total


def make_encoded_corpus(
    shards: Sequence[Shard], tokenizer: Tokenizer, folder: Path, num_streams: int
) -> EncodedCorpus:
    """Return the corpus of ``shards``, divided among ``num_streams`` streams.

    It encodes nothing yet, but may read all text of a corpus whose shards differ a lot in size
    (``shards_for_streams``). The caller sets ``on_corrupt``, if its shards skip records, and
    ``max_gigabytes``.
    """
    window_bytes = choose_window_bytes(shards, num_streams)
    divided = tuple(shards_for_streams(shards, num_streams, window_bytes))
    return EncodedCorpus(divided, tokenizer, Path(folder), window_bytes, num_streams)


def in_memory_corpus(
    documents: Sequence[str], tokenizer: Tokenizer, folder: Path, num_streams: int = 1
) -> EncodedCorpus:
    """Return a corpus of documents in memory, which are encoded window by window when they are read."""
    return make_encoded_corpus([InMemoryShard(tuple(documents))], tokenizer, folder, num_streams)


def encode_documents(documents: Sequence[str], tokenizer: Tokenizer) -> EncodedDocuments:
    """Return the tokens of ``documents``, concatenated: uint16 if all ids fit, else uint32."""
    dtype = np.dtype(np.uint16 if tokenizer.vocab_size <= 2**16 else np.uint32)
    lengths, tokens = [np.zeros(1, np.int64)], [np.zeros(0, dtype)]
    for texts in _chunks(documents):
        encoded = tokenizer.encode_batch(texts)
        lengths.append(np.array([len(ids) for ids in encoded], np.int64))
        tokens.append(np.concatenate(encoded).astype(dtype))
    return EncodedDocuments(np.concatenate(tokens), np.cumsum(np.concatenate(lengths)))


def concatenate(parts: Sequence[EncodedDocuments]) -> EncodedDocuments:
    """Return all documents of the parts in order.

    The result is marked as truncated if the last part is. Nothing marks a document that is cut at the end of
    an earlier part.
    """
    if not parts:
        return EncodedDocuments(np.zeros(0, np.uint16), np.zeros(1, np.int64))
    starts = np.cumsum([0, *(len(part.tokens) for part in parts[:-1])])
    offsets = [part.offsets[1:] + start for part, start in zip(parts, starts, strict=True)]
    tokens = np.concatenate([part.tokens for part in parts])
    num_corrupt = sum(part.num_corrupt for part in parts)
    is_truncated = parts[-1].is_truncated
    return EncodedDocuments(tokens, np.concatenate([[0], *offsets]), num_corrupt, is_truncated)


def _chunks(documents: Sequence[str]) -> Iterator[list[str]]:
    """Yield the documents in lists of about CHARACTERS_PER_CALL characters."""
    chunk, size = list[str](), 0
    for text in documents:
        chunk.append(text)
        size += len(text)
        if size >= CHARACTERS_PER_CALL:
            yield chunk
            chunk, size = [], 0
    if chunk:
        yield chunk


# ---- cache files


class _CachedWindow(NamedTuple):
    documents: EncodedDocuments
    is_past_end: bool  # the shard has no such window


def _save(path: Path, window: _CachedWindow) -> None:
    documents = window.documents
    lengths = np.diff(documents.offsets).astype(np.uint32)
    numbers = np.array([documents.num_corrupt, window.is_past_end], np.int64)
    contents = io.BytesIO()
    np.savez(contents, tokens=documents.tokens, lengths=lengths, numbers=numbers)
    with name_file_in_errors(path), atomic_file(path) as file:
        file.write(contents.getbuffer())


def _load(path: Path) -> _CachedWindow | None:
    """Return the contents of a cache file; None if it is missing or damaged."""
    try:
        with np.load(path) as arrays:
            if arrays.zip.testzip():  # numpy may stop before the end, where zipfile compares the checksum
                raise zipfile.BadZipFile
            num_corrupt, is_past_end = arrays["numbers"].tolist()
            offsets = np.concatenate([[0], np.cumsum(arrays["lengths"], dtype=np.int64)])
            documents = EncodedDocuments(arrays["tokens"], offsets, num_corrupt)
    except FileNotFoundError:
        return None
    except (OSError, ValueError, KeyError, EOFError, RuntimeError, zipfile.BadZipFile, zlib.error):
        print(f"warning: {path} is damaged, and is encoded again", flush=True)
        return None
    with contextlib.suppress(OSError):  # recently read files are evicted last
        os.utime(path)
    return _CachedWindow(documents, bool(is_past_end))


@contextlib.contextmanager
def _file_lock(path: Path) -> Iterator[None]:
    """Hold a lock, where there are locks, so that no other process of this machine writes ``path``."""
    lock = path.with_suffix(".lock")
    lock.parent.mkdir(parents=True, exist_ok=True)
    with locked_if_possible(lock):
        try:
            yield
        finally:
            lock.unlink(missing_ok=True)

"""A corpus as one flat array of tokens on disk: encoded once, read through the page cache by whoever needs
it.
"""

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

import numpy as np

from lm.data.text.vocabulary import Vocabulary
from lm.files import draft_of, seal, unseal, write
from lm.settings import DataError, SettingError

CHUNK = 4_000_000  # text that is encoded at a time [characters]
ABANDONED = 3600  # is a draft to which nothing was written for so long [seconds]
BLOCK = 1 << 18  # of tokens that has a checksum of its own [bytes]
# of each end of the tokens that is read before they are used; all else when it is first read [bytes]
SUMMED = 1 << 28
ORDER = 0  # seed of the order in which documents are stored


@dataclass(frozen=True)
class Tokens:
    """Encoded documents without EOS, one after the other; a value that is cheap to send to another
    process.
    """

    folder: Path
    first: int | None = None  # how many are read, from the start; None: all [tokens]

    @functools.cached_property
    def tokens(self) -> "Stored":
        """uint16 or uint32 [tokens], mapped from disk."""
        return Stored(self.folder, self.about["dtype"], self.first)

    @functools.cached_property
    def offsets(self) -> np.ndarray:
        """int64 [documents + 1]: document d is ``tokens[offsets[d]:offsets[d + 1]]``; the last may lack its
        end.
        """
        offsets = np.load(self.folder / "offsets.npy")
        end = offsets[-1] if self.first is None else min(self.first, offsets[-1])
        return np.append(offsets[offsets < end], end)

    @functools.cached_property
    def about(self) -> dict[str, str | int]:
        path = self.folder / "about.json"
        return unseal(path.read_bytes(), path)

    @property
    def fingerprint(self) -> str:
        return self.about["fingerprint"]

    def cut(self, count: int) -> "Tokens":
        """The first ``count`` tokens, of documents that are stored in random order."""
        return Tokens(self.folder, count)

    def __getstate__(self) -> dict[str, Path | int | None]:
        # a pickled memory map would be a copy of the corpus
        return {"folder": self.folder, "first": self.first}


class Stored:
    """Tokens mapped from disk, to be read at places or in slices; each block is proved when any of it is
    first read.

    DataError if a block is not as it was written.
    """

    def __init__(self, folder: Path, dtype: str, first: int | None):
        self._folder, self._bytes = folder, np.memmap(folder / "tokens", np.uint8, mode="r")
        self._tokens = self._bytes.view(dtype)[:first]
        self._sums = np.load(folder / "sums.npy")
        self._unproved = np.ones(len(self._sums), bool)
        self._left = len(self._sums)  # blocks that are not proved

    def __len__(self) -> int:
        return len(self._tokens)

    def __getitem__(self, places: np.ndarray | slice) -> np.ndarray:
        if self._left:
            self._prove(np.arange(len(self))[places] if isinstance(places, slice) else places)
        return np.asarray(self._tokens[places])

    def __array__(self, dtype=None, copy=None) -> np.ndarray:
        return np.array(self[:], dtype)

    def tolist(self) -> list[int]:
        return self[:].tolist()

    def _prove(self, places: np.ndarray) -> None:
        blocks = np.ravel(places) // (BLOCK // self._tokens.itemsize)
        for block in np.unique(blocks[self._unproved[blocks]]).tolist():
            if zlib.crc32(self._bytes[block * BLOCK : (block + 1) * BLOCK]) != self._sums[block]:
                raise DataError(
                    f"{self._folder / 'tokens'} is damaged in bytes {block * BLOCK:,} to "
                    f"{(block + 1) * BLOCK:,}: "
                    f"delete {self._folder}, and the corpus is encoded anew"
                )
            self._unproved[block] = False
            self._left -= 1


def encode_corpus(documents: Sequence[str], vocabulary: Vocabulary, folder: Path) -> Tokens:
    """The encoded corpus, from ``folder`` if it is there undamaged. Documents are stored shuffled, once."""
    fingerprint = hashlib.sha256(
        f"{_fingerprint(documents)} {vocabulary.fingerprint} {ORDER}".encode()
    ).hexdigest()
    place = Path(folder) / fingerprint[:16]
    if not whole(place, fingerprint):
        if place.exists():
            print(f"warning: {place} is damaged, or older than this release, and is encoded anew", flush=True)
        # by a process that was killed, and not by one at work
        for left in place.parent.glob(f".{place.name}-*"):
            with suppress(OSError):
                if time.time() - (left / "tokens").stat().st_mtime > ABANDONED:
                    shutil.rmtree(left)
        draft, damaged = draft_of(place), draft_of(place)
        draft.mkdir(parents=True)
        try:
            _write(documents, vocabulary, draft, fingerprint)
            if not whole(place, fingerprint):
                with suppress(FileNotFoundError):
                    os.rename(place, damaged)
                os.rename(draft, place)
        except OSError:
            if not whole(place, fingerprint):  # else another process was faster, with the same result
                raise
        finally:
            shutil.rmtree(draft, ignore_errors=True)
            shutil.rmtree(damaged, ignore_errors=True)
    return Tokens(place)


def whole(folder: Path, fingerprint: str) -> bool:
    """Whether an encoded corpus is there as it was written, but for what is proved when it is read."""
    try:
        about = unseal((folder / "about.json").read_bytes(), folder)
        size = about["tokens"] * np.dtype(about["dtype"]).itemsize
        if about["fingerprint"] != fingerprint or about["sums"] != _sums(folder):
            return False
        if (folder / "tokens").stat().st_size != size:
            return False
        stored, ends = Stored(folder, about["dtype"], None), SUMMED // np.dtype(about["dtype"]).itemsize
        every = BLOCK // np.dtype(about["dtype"]).itemsize
        places = np.arange(0, len(stored), every)
        stored[places[(places < ends) | (places >= len(stored) - ends)]]
    except (OSError, SettingError, KeyError, TypeError, ValueError):
        return False
    return True


def _sums(folder: Path) -> dict[str, int]:
    """CRC-32 of each file but the tokens, whose blocks have theirs in one of these."""
    return {name: zlib.crc32((folder / name).read_bytes()) for name in ("offsets.npy", "sums.npy")}


def _block_sums(path: Path) -> np.ndarray:
    """uint32 [blocks]: CRC-32 of each block of a file."""
    with path.open("rb") as file:
        return np.array([zlib.crc32(block) for block in iter(lambda: file.read(BLOCK), b"")], np.uint32)


def _fingerprint(documents: Sequence[str]) -> str:
    """The source's own fingerprint, or that of the text of a plain sequence."""
    if own := getattr(documents, "fingerprint", None):
        return own
    digest = hashlib.sha256()
    for text in documents:
        digest.update(f"{len(text)} {text}".encode(errors="surrogatepass"))
    return digest.hexdigest()


def _write(documents: Sequence[str], vocabulary: Vocabulary, folder: Path, fingerprint: str) -> None:
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
        raise SettingError(
            "data.corpus gives no text to train on; name one with at least one document of text"
        )
    np.save(folder / "offsets.npy", offsets)
    about = {
        "fingerprint": fingerprint,
        "dtype": dtype.name,
        "documents": len(documents),
        "tokens": int(offsets[-1]),
    }
    np.save(folder / "sums.npy", _block_sums(folder / "tokens"))
    about["sums"] = _sums(folder)
    write(folder / "about.json", seal(about))


def _chunks(documents: Sequence[str]) -> Iterator[list[str]]:
    """The documents in their stored order, about CHUNK characters at a time."""
    order = np.random.Generator(np.random.Philox(key=[ORDER, 0])).permutation(len(documents))
    texts, size = [], 0
    for index in order:
        texts.append(documents[int(index)])
        size += len(texts[-1])
        if size >= CHUNK:
            yield texts
            texts, size = [], 0
    if texts:
        yield texts

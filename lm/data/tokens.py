"""A corpus as one flat array of tokens on disk: encoded once, read through the page cache by whoever needs it."""

import functools
import hashlib
import json
import os
import shutil
import time
import zlib
from collections.abc import Iterator, Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from lm.config import SettingError, parse_json
from lm.data.vocabulary import Vocabulary
from lm.files import draft_of

CHUNK = 4_000_000  # text that is encoded at a time [characters]
ABANDONED = 3600  # is a draft to which nothing was written for so long [seconds]
SUMMED = 1 << 28  # of each end of a file that is read to see whether it is damaged [bytes]
ORDER = 0  # seed of the order in which documents are stored


@dataclass(frozen=True)
class Tokens:
    """Encoded documents without EOS, one after the other; a value that is cheap to send to another process."""

    folder: Path
    first: int | None = None  # how many are read, from the start; None: all [tokens]

    @functools.cached_property
    def tokens(self) -> np.ndarray:
        """uint16 or uint32 [tokens], mapped from disk."""
        return np.memmap(self.folder / "tokens", dtype=self.about["dtype"], mode="r")[: self.first]

    @functools.cached_property
    def offsets(self) -> np.ndarray:
        """int64 [documents + 1]: document d is ``tokens[offsets[d]:offsets[d + 1]]``; the last may lack its end."""
        offsets = np.load(self.folder / "offsets.npy")
        end = offsets[-1] if self.first is None else min(self.first, offsets[-1])
        return np.append(offsets[offsets < end], end)

    @functools.cached_property
    def about(self) -> dict[str, str | int]:
        return json.loads((self.folder / "about.json").read_text())

    @property
    def fingerprint(self) -> str:
        return self.about["fingerprint"]

    def cut(self, count: int) -> "Tokens":
        """The first ``count`` tokens, of documents that are stored in random order."""
        return Tokens(self.folder, count)

    def __getstate__(self) -> dict[str, Path | int | None]:
        return {"folder": self.folder, "first": self.first}  # a pickled memory map would be a copy of the corpus


def encode_corpus(documents: Sequence[str], vocabulary: Vocabulary, folder: Path) -> Tokens:
    """The encoded corpus, from ``folder`` if it is there undamaged. Documents are stored shuffled, once."""
    fingerprint = hashlib.sha256(f"{_fingerprint(documents)} {vocabulary.fingerprint} {ORDER}".encode()).hexdigest()
    place = Path(folder) / fingerprint[:16]
    if not whole(place, fingerprint):
        if place.exists():
            print(f"warning: {place} is damaged, or older than this release, and is encoded anew", flush=True)
        for left in place.parent.glob(f".{place.name}-*"):  # by a process that was killed, and not by one at work
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
    """Whether an encoded corpus is there as it was written."""
    try:
        about = parse_json((folder / "about.json").read_bytes(), folder)
        size = about["tokens"] * np.dtype(about["dtype"]).itemsize
        return about["fingerprint"] == fingerprint and about["sums"] == _sums(folder, about["dtype"], size)
    except (OSError, SettingError, KeyError, TypeError):
        return False


def _sums(folder: Path, dtype: str, size: int) -> dict[str, int]:
    """CRC-32 of dtype and size [bytes], and of each file, or its first and last SUMMED bytes if it is longer."""
    found = {"about": zlib.crc32(f"{dtype} {size}".encode())}
    for name in ("tokens", "offsets.npy"):
        with (folder / name).open("rb") as file:
            end = os.fstat(file.fileno()).st_size
            found[name] = zlib.crc32(b"%d" % end)
            for start, stop in ((0, min(SUMMED, end)), (max(SUMMED, end - SUMMED), end)):
                file.seek(start)
                for place in range(start, stop, 1 << 24):
                    found[name] = zlib.crc32(file.read(min(1 << 24, stop - place)), found[name])
    return found


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
        raise SettingError("data.corpus gives no text to train on; name one with at least one document of text")
    np.save(folder / "offsets.npy", offsets)
    about = {"fingerprint": fingerprint, "dtype": dtype.name, "documents": len(documents), "tokens": int(offsets[-1])}
    about["sums"] = _sums(folder, dtype.name, int(offsets[-1]) * dtype.itemsize)
    (folder / "about.json").write_text(json.dumps(about, indent=1))


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

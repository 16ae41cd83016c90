"""Word vectors: trained on texts, looked up, compared, saved and loaded."""

import io
import re
from collections import Counter
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path

import numpy as np

from lm.classical.word2vec import train_skipgram
from lm.config.base import DataError, SettingError, nearest
from lm.config.skipgram import SkipGramConfig
from lm.files import matches_checksum, write_with_checksum


@dataclass(frozen=True)
class WordVectors:
    """The words of a text, by number, and skip-gram's two tables of their vectors."""

    words: tuple[str, ...]  # [V]
    centres: np.ndarray  # u float32 [V,D]
    contexts: np.ndarray  # v float32 [V,D]

    def __post_init__(self) -> None:
        shapes = {"centres": self.centres.shape, "contexts": self.contexts.shape}
        for name, shape in shapes.items():
            if shape[:1] != (len(self.words),) or shape != self.centres.shape or len(shape) != 2:
                raise SettingError(f"{name} should be [{len(self.words)},D] as the words are, not {[*shape]}")

    @cached_property
    def numbers(self) -> dict[str, int]:
        """Return the number of each word."""
        return {word: number for number, word in enumerate(self.words)}

    def vectors(self, words: Sequence[str]) -> np.ndarray:
        """Return the vectors of words as centres, [T,D]; a word has one vector whatever stands around it.

        Raises SettingError for a word that the text lacked, and names the nearest.
        """
        for word in words:
            if word not in self.numbers:
                raise SettingError(f"{word!r} has no vector{nearest(word, self.words)}")
        return self.centres[[self.numbers[word] for word in words]]

    def neighbours(self, word: str, count: int) -> list[tuple[str, float]]:
        """Return the ``count`` other words with the highest cosine to ``word``, and their cosines.

        The highest comes first.
        """
        own = self.vectors([word])[0]
        lengths = np.linalg.norm(self.centres, axis=1) * np.linalg.norm(own)
        cosines = self.centres @ own / np.maximum(lengths, np.finfo(np.float32).tiny)
        cosines[self.numbers[word]] = -np.inf
        order = np.argsort(-cosines, kind="stable")[: min(count, len(self.words) - 1)]
        return [(self.words[number], float(cosines[number])) for number in order]

    def save(self, path: Path) -> None:
        """Write one .npz file, complete or not at all, with its checksum beside it."""
        file = io.BytesIO()
        np.savez(file, words=np.array(self.words), centres=self.centres, contexts=self.contexts)
        write_with_checksum(Path(path), file.getvalue())


def train_word_vectors(texts: Iterable[str], config: SkipGramConfig, *, least: int, seed: int) -> WordVectors:
    """Train vectors of the words that occur ``least`` times or more; equal seeds give equal vectors."""
    words, ids = number_words(texts, least)
    return WordVectors(words, *map(np.asarray, train_skipgram(ids, len(words), config, seed)))


def load_word_vectors(path: Path) -> WordVectors:
    """Return what ``WordVectors.save`` wrote; raise DataError if it is missing or was changed."""
    if not matches_checksum(Path(path)):
        raise DataError(
            f"{path} is missing or damaged: it does not fit its checksum; train the vectors again"
        )
    with np.load(path) as file:
        return WordVectors(tuple(file["words"].tolist()), file["centres"], file["contexts"])


def split_words(text: str) -> list[str]:
    """Return the words of a text: runs of letters, digits and underscores, in lower case."""
    return re.findall(r"\w+", text.lower())


def number_words(texts: Iterable[str], least: int) -> tuple[tuple[str, ...], list[np.ndarray]]:
    """Return the words that occur at least ``least`` times, by falling count, and each text as their numbers.

    The numbers are int32. Rarer words are left out of the texts, as in word2vec: their neighbours move
    together.
    """
    split = [split_words(text) for text in texts]
    counts = Counter(word for words in split for word in words)
    known = sorted(
        (word for word, count in counts.items() if count >= least), key=lambda word: (-counts[word], word)
    )
    numbers = {word: number for number, word in enumerate(known)}
    ids = [[numbers[word] for word in words if word in numbers] for words in split]
    return tuple(known), [np.array(row, np.int32) for row in ids]

"""The text, subsampling and noise distribution of skip-gram."""

from collections.abc import Sequence
from typing import NamedTuple

import numpy as np

from lm.config.base import SettingError

NOISE_POWER = 0.75  # of the unigram distribution [Mikolov et al. 2013, section 2.2]


class Text(NamedTuple):
    """Documents one after the other; at either end stand ``window`` words or more of no document."""

    words: np.ndarray  # int32 [window + N + window, or longer]
    documents: np.ndarray  # int32, the number of each word's document; -1 at the ends


class AliasTable(NamedTuple):
    """A distribution over V words as Walker's alias table: a draw costs two random numbers, whatever V is."""

    threshold: np.ndarray  # float32 [V]: with this probability a cell gives its own word
    alias: np.ndarray  # int32 [V]: the word that it gives otherwise


def join_documents(documents: Sequence[np.ndarray], vocab_size: int) -> tuple[np.ndarray, np.ndarray]:
    """Concatenate documents of ids; return the words, and the number of each word's document, both int32 [N].

    Raises SettingError if there is no word, or one that is not in 0..vocab_size - 1.
    """
    words = np.concatenate([np.zeros(0, np.int32), *documents]).astype(np.int32)
    if not len(words):
        raise SettingError("skip-gram has no text to train on: every document is empty")
    if words.min() < 0 or words.max() >= vocab_size:
        wrong = words[(words < 0) | (words >= vocab_size)][0]
        raise SettingError(
            f"word {wrong} of the text should be in 0..{vocab_size - 1}, the rows of the tables"
        )
    return words, np.repeat(np.arange(len(documents), dtype=np.int32), [len(ids) for ids in documents])


def pad_text(words: np.ndarray, documents: np.ndarray, window: int, length: int) -> Text:
    """Return a text of N <= ``length`` words, with ``window`` places before it and the others behind."""
    sides = (window, window + length - len(words))
    return Text(np.pad(words, sides), np.pad(documents, sides, constant_values=-1))


def keep_probabilities(counts: np.ndarray, threshold: float) -> np.ndarray:
    """Return the probability with which subsampling keeps each word, float [V].

    It is sqrt(threshold / frequency), at most 1; 1 for all if ``threshold`` is 0. Words more frequent than
    ``threshold`` are left out of the text at random [section 2.3].
    """
    if not threshold:
        return np.ones(len(counts))
    return np.minimum(1.0, np.sqrt(threshold * counts.sum() / np.maximum(counts, 1)))


def noise_of(counts: np.ndarray) -> AliasTable:
    """Return the noise distribution: unigram ``counts`` int [V] to the power NOISE_POWER, normalised."""
    p = counts.astype(np.float64) ** NOISE_POWER
    threshold, alias = p * (len(p) / p.sum()), np.arange(len(p), dtype=np.int32)
    poor = [*np.flatnonzero(threshold < 1).tolist()]
    rich = [*np.flatnonzero(threshold >= 1).tolist()]
    while poor and rich:  # each poor cell is filled up by a rich one
        low, high = poor.pop(), rich[-1]
        alias[low] = high
        threshold[high] -= 1 - threshold[low]
        if threshold[high] < 1:
            poor.append(rich.pop())
    threshold[poor + rich] = 1  # they are 1 up to rounding
    return AliasTable(threshold.astype(np.float32), alias)

"""Collocations: sequences of words that occur together far more often than by chance, for PMI masking.

PMI masking (Levine et al. 2021, "PMI-Masking: Principled Masking of Correlated Spans") hides a collocation as
a whole, as whole-word masking hides a word. The collocations are n-grams of 2 to 5 words, ranked by

    PMI_n(w_1 ... w_n) = min over segmentations s of log(p(w_1 ... w_n) / product of p(segment) in s)

where a segmentation cuts the n-gram into two parts or more (equation 3). For two words it is their pointwise
mutual information. An n-gram that holds together only because a part of it does scores low.

Shapes: W words of running text; B texts of at most L tokens.
"""

import hashlib
import json
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import NamedTuple

import numpy as np

from lm.config.base import DataError, parse_json
from lm.data.corpus.token_cache import EncodedDocuments
from lm.files import write_with_checksum

PER_TOKEN = 800_000 / 30_000  # collocations by the size of the vocabulary, as in the paper
MIN_COUNT = 11  # occurrences of a collocation: the paper counts those with "over 10"
# Share of the collocations by their number of words, since PMI_n grows with n and would favour long ones.
SHARES = {2: 1 / 2, 3: 1 / 4, 4: 1 / 8, 5: 1 / 8}
TOKEN_BITS = 32  # of a key of ``Collocations``; the rest is a node


class Collocation(NamedTuple):
    """A sequence of words, as tokens, and how often and how strongly they occur together."""

    tokens: tuple[int, ...]
    num_words: int
    occurrences: int
    pmi: float  # PMI_n [nats]


# ---- counting


class WordText(NamedTuple):
    """Running text as words: the number of each word, and where it begins."""

    words: np.ndarray  # int64 [W]: equal words have equal numbers
    bounds: np.ndarray  # int64 [W + 1]: word i is tokens[bounds[i]:bounds[i + 1]]
    num_following: np.ndarray  # int64 [W]: words from each one to the end of its document, itself included


def split_words(text: EncodedDocuments, word_starts: np.ndarray) -> WordText:
    """Return the words of documents; ``word_starts`` bool [vocab_size] says which tokens begin a word."""
    is_start = word_starts[text.tokens]
    is_start[text.offsets[text.offsets < len(text.tokens)]] = True
    bounds = np.append(np.flatnonzero(is_start), len(text.tokens))
    spelling = text.tokens.tobytes()
    size = text.tokens.itemsize
    numbers: dict[bytes, int] = {}
    pieces = (spelling[a * size : b * size] for a, b in zip(bounds[:-1], bounds[1:], strict=True))
    words = np.fromiter((numbers.setdefault(piece, len(numbers)) for piece in pieces), np.int64)
    document_ends = np.searchsorted(bounds, text.offsets)  # counted in words
    ends = document_ends[np.searchsorted(document_ends, np.arange(len(words)), side="right")]
    return WordText(words, bounds, ends - np.arange(len(words)))


class NGramCounts(NamedTuple):
    """The frequent n-grams of one length."""

    at: np.ndarray  # int32 [W]: the count of the n-gram that begins at each word; 0: it is rare
    firsts: np.ndarray  # int64 [n-grams]: the word at which each frequent n-gram occurs first
    total: int  # n-grams of this length in the text, rare ones included


def count_frequent(text: WordText, max_words: int, min_count: int) -> list[NGramCounts]:
    """Return the counts of n-grams of 1 to ``max_words`` words that occur ``min_count`` times or more.

    No n-gram crosses the end of a document. An n-gram is frequent only if its parts are, so that each length
    looks only where the length before found frequent ones.
    """
    found = list[NGramCounts]()
    places, ids = np.arange(len(text.words)), np.zeros(len(text.words), np.int64)  # of the empty n-gram
    num_words = int(text.words.max(initial=0)) + 1
    for length in range(1, max_words + 1):
        keys = ids[places] * num_words + text.words[places + length - 1]
        _, first, inverse, counts = np.unique(
            keys, return_index=True, return_inverse=True, return_counts=True
        )
        at = np.zeros(len(text.words), np.int32)
        at[places] = np.where(counts >= min_count, counts, 0)[inverse]
        total = int((text.num_following >= length).sum())
        found.append(NGramCounts(at, np.sort(places[first[counts >= min_count]]), total))
        ids[places] = inverse
        places = places[(at[places] > 0) & (text.num_following[places] > length)]
        places = places[at[places + 1] > 0]
    return found


def pmi(counts: Sequence[NGramCounts], length: int) -> np.ndarray:
    """Return PMI_n of the frequent n-grams of ``length`` words, in nats: float64 [n-grams].

    The best segmentation of the first j words is the best one of the first i, and a segment from there to j.
    """
    firsts = counts[length - 1].firsts

    def log_prob(start: int, end: int) -> np.ndarray:
        """Return the log-probability of words ``start`` to ``end`` - 1 of each n-gram."""
        part = counts[end - start - 1]
        return np.log(part.at[firsts + start] / part.total)

    best = [np.zeros(len(firsts))]  # the largest log-probability of the segments of the first j words
    for end in range(1, length + 1):
        shortest = 1 if end == length else 0  # the n-gram as one segment is no segmentation
        options = [best[start] + log_prob(start, end) for start in range(shortest, end)]
        best.append(np.max(options, axis=0))
    return log_prob(0, length) - best[length]


def find_collocations(
    text: EncodedDocuments, word_starts: np.ndarray, number: int, min_count: int = MIN_COUNT
) -> list[Collocation]:
    """Return at most ``number`` collocations of a text, in the SHARES of their lengths, best first.

    A length with fewer n-grams that hold together (PMI_n above 0) has fewer; others do not take their place.
    """
    words = split_words(text, word_starts)
    counts = count_frequent(words, max(SHARES), min_count)
    found = list[Collocation]()
    for length, share in SHARES.items():
        firsts = counts[length - 1].firsts
        measures = np.round(pmi(counts, length), 9)  # so that all machines rank them alike
        occurrences = counts[length - 1].at[firsts]
        ranked = np.lexsort((firsts, -occurrences, -measures))[: round(number * share)]
        for index in ranked[measures[ranked] > 0].tolist():
            begin, end = words.bounds[firsts[index]], words.bounds[firsts[index] + length]
            tokens = tuple(text.tokens[begin:end].tolist())
            found.append(Collocation(tokens, length, int(occurrences[index]), float(measures[index])))
    return found


# ---- files


def save_collocations(path: Path, found: Iterable[Collocation], texts: Iterable[str]) -> None:
    """Write a JSON object per line, with a checksum beside the file; ``texts`` are for who reads the file."""
    lines = [
        json.dumps(each._asdict() | {"text": text}, ensure_ascii=False)
        for each, text in zip(found, texts, strict=True)
    ]
    write_with_checksum(path, "".join(f"{line}\n" for line in lines).encode(errors="backslashreplace"))


def load_collocations(path: Path) -> list[Collocation]:
    """Return the collocations in a file; DataError, with the line, if it is not what was written."""
    found = list[Collocation]()
    for number, line in enumerate(path.read_bytes().splitlines(), 1):
        try:
            value = parse_json(line, path)
            fields = {name: value[name] for name in Collocation._fields}
            found.append(Collocation(**fields | {"tokens": tuple(map(int, fields["tokens"]))}))
        except (KeyError, TypeError, ValueError) as error:
            due = f"should have {', '.join(Collocation._fields)}: delete the file to make it anew"
            raise DataError(f"{path}, line {number} {due}") from error
    return found


# ---- units of masking


class Collocations:
    """Finds collocations in texts: a tree whose paths from the root spell them, token by token.

    Node 0 is the root. Node k + 1 has the key ``keys[k]``: its parent times 2^TOKEN_BITS, plus its token.
    """

    def __init__(self, sequences: Iterable[Sequence[int]]):
        ordered = sorted({tuple(map(int, sequence)) for sequence in sequences})
        self.fingerprint = hashlib.sha256(json.dumps(ordered).encode()).hexdigest()
        self.max_tokens = max(map(len, ordered), default=0)
        lengths = np.array([len(sequence) for sequence in ordered], np.int64)
        padded = np.zeros((len(ordered), self.max_tokens), np.int64)
        for row, sequence in enumerate(ordered):
            padded[row, : len(sequence)] = sequence
        node, levels, size = np.zeros(len(ordered), np.int64), [np.zeros(0, np.int64)], 1
        for depth in range(self.max_tokens):
            inside = lengths > depth
            level, inverse = np.unique(
                (node[inside] << TOKEN_BITS) + padded[inside, depth], return_inverse=True
            )
            node[inside] = size + inverse  # parents have lower numbers, so that all keys are ascending
            levels.append(level)
            size += len(level)
        self.keys = np.concatenate(levels)
        self.is_end = np.zeros(size, bool)
        self.is_end[node] = True
        self.is_end[0] = False

    def unit_starts(
        self, tokens: np.ndarray, word_starts: np.ndarray, breaks: np.ndarray, uniforms: np.ndarray
    ) -> np.ndarray:
        """Return which tokens begin a unit, a collocation or else a word, bool [B,L].

        ``word_starts`` says which tokens begin a word, and no collocation reaches over a token in ``breaks``,
        bool [B,L] each, such as the end of a text. A collocation within a longer one is part of that. Of
        collocations that overlap, the one with the smallest of ``uniforms`` [B,L] at its start is a unit, and
        the words that are left are units each.
        """
        starts, ends = self._find(tokens, word_starts, breaks)
        longest_end = np.maximum.accumulate(np.append(0, ends))[:-1]  # of those that begin before
        outermost = ends > longest_end
        starts, ends = starts[outermost], ends[outermost]
        chosen = _choose_apart(starts, ends, uniforms.ravel()[starts])
        steps = np.zeros(tokens.size + 1, np.int8)  # +1 where the inside of a unit begins, -1 where it ends
        steps[starts[chosen] + 1] += 1
        steps[ends[chosen]] -= 1
        inside = np.cumsum(steps[:-1], dtype=np.int8).view(bool)
        return word_starts & ~inside.reshape(tokens.shape)

    def _find(
        self, tokens: np.ndarray, word_starts: np.ndarray, breaks: np.ndarray
    ) -> tuple[np.ndarray, np.ndarray]:
        """Return the longest collocation from each word: where it begins and ends in ``tokens.ravel()``."""
        length = tokens.shape[1]
        is_limit = breaks.copy()  # no collocation reaches over these
        is_limit[:, :1] = True
        limits = np.append(np.flatnonzero(is_limit), tokens.size)
        may_end = np.append((is_limit | word_starts).ravel(), True)
        starts, flat_tokens = np.flatnonzero(word_starts), tokens.ravel()
        limit = limits[np.searchsorted(limits, starts, side="right")]  # the first behind each word's start
        ends = np.zeros(len(starts), np.int64)
        active, node = np.arange(len(starts)), np.zeros(len(starts), np.int64)
        for depth in range(min(self.max_tokens, length)):
            place = starts[active] + depth
            key = (node << TOKEN_BITS) + flat_tokens[place]
            index = np.minimum(np.searchsorted(self.keys, key), len(self.keys) - 1)
            found = self.keys[index] == key
            active, node, place = active[found], index[found] + 1, place[found]
            is_end = self.is_end[node] & may_end[place + 1]
            ends[active[is_end]] = place[is_end] + 1
            goes_on = place + 1 < limit[active]
            active, node = active[goes_on], node[goes_on]
        found = ends > 0
        return starts[found], ends[found]


def _choose_apart(starts: np.ndarray, ends: np.ndarray, priority: np.ndarray) -> np.ndarray:
    """Return which spans to take so that none overlap, bool [spans]: those of the lowest priority first.

    Both starts and ends are ascending. In each round every span is taken that comes before all that it still
    overlaps, and those that it overlaps are dropped: what one by one in order of priority would give.
    """
    index = np.arange(len(starts))
    num_overlapping = np.searchsorted(starts, ends) - index - 1  # of the spans that begin later
    first = np.repeat(index, num_overlapping)
    second = first + 1 + np.arange(len(first)) - np.searchsorted(first, first)
    first_is_before = priority[first] <= priority[second]
    before = np.where(first_is_before, first, second)
    after = np.where(first_is_before, second, first)
    taken, left = np.zeros(len(starts), bool), np.ones(len(starts), bool)
    while left.any():
        best = left.copy()
        best[after[left[before]]] = False
        taken |= best
        left &= ~best
        left[after[best[before]]] = False
    return taken

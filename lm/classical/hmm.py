"""A hidden Markov model that tags words: estimates from counts, joint probabilities, and beam search.

The decoder reads a ``Lattice``, log-probabilities of one sentence, and knows nothing of words. Words are
cased. An unknown word is tagged by its suffix and capitalisation: as the rare words of training with the same
ending, where words with and without a capital in front are told apart.
"""

import functools
from collections import Counter, defaultdict
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from itertools import chain
from pathlib import Path
from typing import NamedTuple

import numpy as np

from lm.classical.tables import load_tables, packed, save_tables, unpacked
from lm.config.base import SettingError, from_json, to_json
from lm.config.counts import MarkovConfig

TAGGER = "hidden Markov"  # kind of a file of tables
Tagged = Sequence[tuple[str, str]]  # a sentence: words with their tags


class Lattice(NamedTuple):
    """Log-probabilities, -inf for 0, of a sentence of T words and K tags."""

    initial: np.ndarray  # float64 [K]: log P(s_1)
    transitions: np.ndarray  # float64 [K,K]: log P(s'|s) in row s, column s'
    emissions: np.ndarray  # float64 [T,K]: log P(o_t|s)


class TagPath(NamedTuple):
    """A sequence of tags, and the log of its joint probability with the words [nats]."""

    states: np.ndarray  # int64 [T]
    log_prob: float


@dataclass(frozen=True)
class MarkovTagger:
    """A tagger made of the counts of tagged sentences.

    Tags are in alphabetical order; the lower number wins a tie.
    """

    config: MarkovConfig
    tags: tuple[str, ...]
    words: tuple[str, ...]
    first: np.ndarray  # int64 [K]: sentences that begin with each tag
    pairs: np.ndarray  # int64 [K,K]: how often tag s (row) is followed by tag s' (column)
    emitted: np.ndarray  # int64 [W,K]: how often each word has each tag

    @functools.cached_property
    def totals(self) -> np.ndarray:
        """Return the number of words of each tag, those that end a sentence included: int64 [K]."""
        return self.emitted.sum(0)

    @functools.cached_property
    def initial(self) -> np.ndarray:
        """Return P(s_1), float64 [K]."""
        counts = self.first + self.config.smoothing
        return counts / counts.sum()

    @functools.cached_property
    def transitions(self) -> np.ndarray:
        """Return P(s'|s), float64 [K,K]: s in rows, s' in columns.

        A row need not sum to 1: what is missing is the probability that the sentence ends.
        """
        smoothing = self.config.smoothing
        return (self.pairs + smoothing) / (self.totals[:, None] + smoothing * len(self.tags))

    def emissions(self, words: Sequence[str]) -> np.ndarray:
        """Return P(o|s), float64 [T,K]; of an unknown word up to a factor that is the same for all tags."""
        known = [self.numbers.get(word) for word in words]
        rows = [
            self._unknown(word) if k is None else self.emitted[k]
            for word, k in zip(words, known, strict=True)
        ]
        return np.array(rows).reshape(-1, len(self.tags)) / self.totals

    def lattice(self, words: Sequence[str]) -> Lattice:
        """Return the log-probabilities by which ``words`` are tagged."""
        with np.errstate(divide="ignore"):
            return Lattice(*map(np.log, (self.initial, self.transitions, self.emissions(words))))

    def names(self, states: Iterable[int]) -> list[str]:
        """Return the tags of the numbers that a decoder found."""
        return [self.tags[state] for state in states]

    def states(self, tags: Sequence[str]) -> np.ndarray:
        """Return the numbers of tags, int64 [T]; raise SettingError for one that was not seen."""
        numbers = {tag: number for number, tag in enumerate(self.tags)}
        if unseen := [tag for tag in tags if tag not in numbers]:
            raise SettingError(f"tag {unseen[0]!r} should be one of training: {', '.join(self.tags)}")
        return np.array([numbers[tag] for tag in tags], np.int64)

    def most_frequent(self, words: Sequence[str]) -> list[str]:
        """Return the tag that each word has most often, whatever its context.

        An unknown word gets the most frequent tag.
        """
        rows = [self.totals if k is None else self.emitted[k] for k in map(self.numbers.get, words)]
        return self.names(int(row.argmax()) for row in rows)

    @functools.cached_property
    def numbers(self) -> dict[str, int]:
        """Return the row of ``emitted`` of each word."""
        return {word: number for number, word in enumerate(self.words)}

    @functools.cached_property
    def endings(self) -> dict[tuple[bool, str], np.ndarray]:
        """Return how often rare words have each tag, int64 [K], by (first letter is a capital, ending)."""
        counts: dict[tuple[bool, str], np.ndarray] = defaultdict(lambda: np.zeros(len(self.tags), np.int64))
        occurrences = self.emitted.sum(1)
        for number in np.flatnonzero(occurrences <= self.config.rare).tolist():
            for look in _looks(self.words[number], self.config.suffix):
                counts[look] += self.emitted[number]
        return dict(counts)

    def _unknown(self, word: str) -> np.ndarray:
        """Return P(s|looks), float64 [K], which is P(o|s) P(s) up to a factor (Brants 2000, section 2.3).

        It interpolates the distribution of all tags with those of ever longer endings, as far as rare words
        have them.
        """
        probs, shorter = self.totals / self.totals.sum(), self.config.shorter
        for look in _looks(word, self.config.suffix):
            if look not in self.endings:
                break
            counts = self.endings[look]
            probs = (counts / counts.sum() + shorter * probs) / (1 + shorter)
        return probs


def estimate_tagger(sentences: Iterable[Tagged], config: MarkovConfig) -> MarkovTagger:
    """Count tagged sentences; those without words are skipped.

    Raises SettingError if none is left.
    """
    texts = [list(sentence) for sentence in sentences if sentence]
    if not texts:
        raise SettingError("a tagger needs one tagged sentence with a word at least")
    tags = {tag: number for number, tag in enumerate(sorted({tag for text in texts for _, tag in text}))}
    words = {word: number for number, word in enumerate(sorted({word for text in texts for word, _ in text}))}
    first, pairs = np.zeros(len(tags), np.int64), np.zeros((len(tags), len(tags)), np.int64)
    emitted = np.zeros((len(words), len(tags)), np.int64)
    for (word, tag), count in Counter(chain.from_iterable(texts)).items():
        emitted[words[word], tags[tag]] = count
    for text in texts:
        states = np.array([tags[tag] for _, tag in text])
        first[states[0]] += 1
        np.add.at(pairs, (states[:-1], states[1:]), 1)
    return MarkovTagger(config, tuple(tags), tuple(words), first, pairs, emitted)


def joint_log_prob(lattice: Lattice, states: np.ndarray) -> float:
    """Return log P(S, O) of tags int [T] and the words of the lattice [nats]."""
    moves = lattice.transitions[states[:-1], states[1:]]
    emitted = lattice.emissions[np.arange(len(states)), states]
    return float(lattice.initial[states[0]] + moves.sum() + emitted.sum())


def beam(lattice: Lattice, width: int) -> TagPath:
    """Return the best path of those through the ``width`` best tags of each word but the last: O(T K width).

    A tag's best predecessor is chosen among the ``width`` tags of the word before to which the best partial
    paths lead. Width 1 is greedy; width K is the Viterbi algorithm, which finds the most probable path. Of
    equally probable tags the lower number is chosen.
    """
    score = lattice.initial + lattice.emissions[0]
    back = np.zeros(lattice.emissions.shape, np.int64)
    for t, emission in enumerate(lattice.emissions[1:], 1):
        kept = np.sort(np.argsort(-score, kind="stable")[:width])
        paths = score[kept, None] + lattice.transitions[kept]
        back[t] = kept[paths.argmax(0)]
        score = paths.max(0) + emission
    states = [int(score.argmax())]
    for pointers in back[:0:-1]:
        states.append(int(pointers[states[-1]]))
    return TagPath(np.array(states[::-1]), float(score.max()))


def tag(model: MarkovTagger, words: Sequence[str], width: int) -> list[str]:
    """Return a tag for each word, by ``beam``.

    Raises SettingError where that finds no path of probability above 0.
    """
    if width < 1:
        raise SettingError(f"width={width} of a beam should be at least 1, which is greedy")
    if not words:
        return []
    path = beam(model.lattice(words), width)
    if path.log_prob == -np.inf:
        cure = f"estimate with smoothing above {model.config.smoothing}, such as 0.1, or widen the beam"
        raise SettingError(f"no tags found for {' '.join(words)!r:.80} have a probability above 0: {cure}")
    return model.names(path.states)


def save_tagger(model: MarkovTagger, path: Path) -> None:
    """Write the counts as one file, complete or absent."""
    texts = {"tags": model.tags, "words": model.words, "config": [to_json(model.config)]}
    counts = {"first": model.first, "pairs": model.pairs, "emitted": model.emitted}
    save_tables(path, TAGGER, {name: packed(values) for name, values in texts.items()} | counts)


def load_tagger(path: Path) -> MarkovTagger:
    """Return the saved tagger; raise DataError if the file is missing, damaged or another model's."""
    tables = load_tables(path, TAGGER)
    (config,), tags, words = (unpacked(tables.pop(name)) for name in ("config", "tags", "words"))
    return MarkovTagger(from_json(MarkovConfig, config), tuple(tags), tuple(words), **tables)


def _looks(word: str, suffix: int) -> list[tuple[bool, str]]:
    """Return (first letter is a capital, ending) for endings of 0 to ``suffix`` characters."""
    return [(word[:1].isupper(), word[len(word) - n :]) for n in range(min(suffix, len(word)) + 1)]

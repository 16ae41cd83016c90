"""A hidden Markov model that tags words: estimation from counts, joint probabilities, beam search.

The decoder reads a ``Lattice``, the log-probabilities of one sentence, and knows nothing of words. Words are
case-sensitive. An unknown word is tagged by its suffix and capitalisation, as the rare words of training that
share both. Where tags are BIO labels of entities, smoothing makes no pair of tags possible that BIO forbids.
"""

import functools
from collections import Counter, defaultdict
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from itertools import chain
from pathlib import Path
from typing import NamedTuple

import numpy as np

from lm.classical.tables import load_tables, pack_texts, save_tables, unpack_texts
from lm.config.base import SettingError, from_json, to_json
from lm.config.classical import HMMConfig

TAGGER = "hidden Markov"  # kind of a file of tables
TaggedSentence = Sequence[tuple[str, str]]  # words with their tags
SuffixKey = tuple[bool, str]  # whether a word begins with a capital, and its suffix


class Lattice(NamedTuple):
    """Log-probabilities, -inf for 0, of a sentence of T words and K tags."""

    initial: np.ndarray  # float64 [K]: log P(s_1)
    transitions: np.ndarray  # float64 [K,K]: log P(s'|s) in row s, column s'
    emissions: np.ndarray  # float64 [T,K]: log P(o_t|s)


class TagPath(NamedTuple):
    """A sequence of tags, and the log of its joint probability with the words [nats]."""

    tag_ids: np.ndarray  # int64 [T]
    log_prob: float


@dataclass(frozen=True)
class HMMTagger:
    """A tagger made of the counts of tagged sentences.

    Tags are in alphabetical order; of equally probable tags the first is chosen.
    """

    config: HMMConfig
    tags: tuple[str, ...]
    words: tuple[str, ...]
    initial_counts: np.ndarray  # int64 [K]: sentences that begin with each tag
    transition_counts: np.ndarray  # int64 [K,K]: how often tag s (row) is followed by tag s' (column)
    emission_counts: np.ndarray  # int64 [W,K]: how often each word has each tag

    @functools.cached_property
    def word_ids(self) -> dict[str, int]:
        """Return the row of each word in ``emission_counts``."""
        return {word: index for index, word in enumerate(self.words)}

    @functools.cached_property
    def tag_counts(self) -> np.ndarray:
        """Return how many words have each tag, int64 [K]; words that end a sentence are included."""
        return self.emission_counts.sum(0)

    @functools.cached_property
    def entity_tags(self) -> dict[int, int]:
        """Return the id of I-X -> that of B-X; empty if tags are no BIO labels, or training broke BIO."""
        ids = {tag: index for index, tag in enumerate(self.tags)}
        inside = {}
        for tag in self.tags:
            if tag.startswith("I-"):
                begin = f"B-{tag[2:]}"
                if begin not in ids:
                    return {}
                inside[ids[tag]] = ids[begin]
        allowed = self._allowed_pairs(inside)
        is_broken = self.transition_counts[~allowed].any() or self.initial_counts[[*inside]].any()
        return {} if is_broken else inside

    def _allowed_pairs(self, inside: dict[int, int]) -> np.ndarray:
        """Return which tag (column) may follow each tag (row), bool [K,K]: I-X only B-X and I-X."""
        allowed = np.ones((len(self.tags), len(self.tags)), bool)
        for inner, begin in inside.items():
            allowed[:, inner] = False
            allowed[[begin, inner], inner] = True
        return allowed

    @functools.cached_property
    def initial(self) -> np.ndarray:
        """Return P(s_1), float64 [K]."""
        counts = self.initial_counts + self.config.smoothing
        counts[[*self.entity_tags]] = 0
        return counts / counts.sum()

    @functools.cached_property
    def transitions(self) -> np.ndarray:
        """Return P(s'|s), float64 [K,K]: s in rows, s' in columns.

        A row may sum to less than 1: the rest is the probability that the sentence ends.
        """
        smoothing = self.config.smoothing * self._allowed_pairs(self.entity_tags)
        totals = self.tag_counts[:, None] + smoothing.sum(1, keepdims=True)
        return (self.transition_counts + smoothing) / totals

    def emissions(self, words: Sequence[str]) -> np.ndarray:
        """Return P(o|s), float64 [T,K]; for an unknown word up to a factor that is the same for all tags.

        A word that was only seen as I-X gets the count ``smoothing`` for B-X: otherwise it could have no tag
        where no entity of type X precedes it.
        """
        rows = []
        for word in words:
            word_id = self.word_ids.get(word)
            counts = self._unknown_word(word) if word_id is None else self.emission_counts[word_id]
            for inner, begin in self.entity_tags.items():
                if counts[inner] and not counts[begin]:
                    counts = counts.astype(np.float64)  # a copy
                    counts[begin] = self.config.smoothing
            rows.append(counts)
        return np.array(rows).reshape(-1, len(self.tags)) / self.tag_counts

    def lattice(self, words: Sequence[str]) -> Lattice:
        """Return the log-probabilities that the decoder reads for a sentence."""
        with np.errstate(divide="ignore"):
            return Lattice(*map(np.log, (self.initial, self.transitions, self.emissions(words))))

    def tag_names(self, tag_ids: Iterable[int]) -> list[str]:
        """Return the tags with these ids."""
        return [self.tags[tag_id] for tag_id in tag_ids]

    def most_frequent_tags(self, words: Sequence[str]) -> list[str]:
        """Return the tag that each word has most often, whatever its context.

        An unknown word gets the most frequent tag of all.
        """
        tag_ids = []
        for word in words:
            word_id = self.word_ids.get(word)
            counts = self.tag_counts if word_id is None else self.emission_counts[word_id]
            tag_ids.append(int(counts.argmax()))
        return self.tag_names(tag_ids)

    @functools.cached_property
    def suffix_counts(self) -> dict[SuffixKey, np.ndarray]:
        """Return how often rare words with each suffix and capitalisation have each tag, int64 [K]."""
        counts: dict[SuffixKey, np.ndarray] = defaultdict(lambda: np.zeros(len(self.tags), np.int64))
        word_counts = self.emission_counts.sum(1)
        for word_id in np.flatnonzero(word_counts <= self.config.rare).tolist():
            for key in _suffix_keys(self.words[word_id], self.config.suffix):
                counts[key] += self.emission_counts[word_id]
        return dict(counts)

    def _unknown_word(self, word: str) -> np.ndarray:
        """Return P(s|suffix), float64 [K]: P(o|s) P(s) up to a factor (Brants 2000, section 2.3).

        The distribution of all tags is interpolated with those of ever longer suffixes, as long as rare words
        have them.
        """
        probs, shorter = self.tag_counts / self.tag_counts.sum(), self.config.shorter
        for key in _suffix_keys(word, self.config.suffix):
            if key not in self.suffix_counts:
                break
            counts = self.suffix_counts[key]
            probs = (counts / counts.sum() + shorter * probs) / (1 + shorter)
        return probs


def _suffix_keys(word: str, max_length: int) -> list[SuffixKey]:
    """Return the keys of a word for suffixes of 0 to ``max_length`` characters, the shortest first."""
    capital = word[:1].isupper()
    return [(capital, word[len(word) - n :]) for n in range(min(max_length, len(word)) + 1)]


def estimate_tagger(sentences: Iterable[TaggedSentence], config: HMMConfig) -> HMMTagger:
    """Count tagged sentences; those without words are skipped.

    Raises SettingError if none is left.
    """
    texts = [list(sentence) for sentence in sentences if sentence]
    if not texts:
        raise SettingError("a tagger needs one tagged sentence with a word at least")
    pair_counts = Counter(chain.from_iterable(texts))  # of words with their tags
    tags = {tag: index for index, tag in enumerate(sorted({tag for _, tag in pair_counts}))}
    words = {word: index for index, word in enumerate(sorted({word for word, _ in pair_counts}))}
    initial_counts = np.zeros(len(tags), np.int64)
    transition_counts = np.zeros((len(tags), len(tags)), np.int64)
    emission_counts = np.zeros((len(words), len(tags)), np.int64)
    for (word, tag), count in pair_counts.items():
        emission_counts[words[word], tags[tag]] = count
    for text in texts:
        tag_ids = np.array([tags[tag] for _, tag in text])
        initial_counts[tag_ids[0]] += 1
        np.add.at(transition_counts, (tag_ids[:-1], tag_ids[1:]), 1)
    return HMMTagger(config, tuple(tags), tuple(words), initial_counts, transition_counts, emission_counts)


def beam_search(lattice: Lattice, width: int) -> TagPath:
    """Return the best path through the ``width`` best tags of each word but the last: O(T K width).

    The best tags of a word are those to which the best partial paths lead; the predecessor of a tag is chosen
    among those of the word before. Width 1 is greedy; width K is the Viterbi algorithm, which finds the most
    probable path. Of equally probable tags the one with the lower id is chosen.
    """
    scores = lattice.initial + lattice.emissions[0]
    backpointers = np.zeros(lattice.emissions.shape, np.int64)
    for t, emission in enumerate(lattice.emissions[1:], 1):
        beam = np.sort(np.argsort(-scores, kind="stable")[:width])
        paths = scores[beam, None] + lattice.transitions[beam]
        backpointers[t] = beam[paths.argmax(0)]
        scores = paths.max(0) + emission
    tag_ids = [int(scores.argmax())]
    for pointers in backpointers[:0:-1]:
        tag_ids.append(int(pointers[tag_ids[-1]]))
    return TagPath(np.array(tag_ids[::-1]), float(scores.max()))


def tag_words(tagger: HMMTagger, words: Sequence[str], width: int) -> list[str]:
    """Return a tag for each word, by ``beam_search``.

    Raises SettingError if no path that it reaches has a probability above 0.
    """
    if width < 1:
        raise SettingError(f"width={width} of a beam should be at least 1, which is greedy")
    if not words:
        return []
    path = beam_search(tagger.lattice(words), width)
    if path.log_prob == -np.inf:
        cure = f"estimate with smoothing above {tagger.config.smoothing}, such as 0.1, or widen the beam"
        raise SettingError(f"no tags found for {' '.join(words)!r:.80} have a probability above 0: {cure}")
    return tagger.tag_names(path.tag_ids)


def save_tagger(tagger: HMMTagger, path: Path) -> None:
    """Write the counts as one file, complete or absent."""
    texts = {"tags": tagger.tags, "words": tagger.words, "config": [to_json(tagger.config)]}
    tables = {name: pack_texts(values) for name, values in texts.items()}
    tables["first"] = tagger.initial_counts
    tables["pairs"] = tagger.transition_counts
    tables["emitted"] = tagger.emission_counts
    save_tables(path, TAGGER, tables)


def load_tagger(path: Path) -> HMMTagger:
    """Return the saved tagger; raise DataError if the file is missing, damaged or another model's."""
    tables = load_tables(path, TAGGER)
    (config,), tags, words = (unpack_texts(tables[name]) for name in ("config", "tags", "words"))
    counts = (tables["first"], tables["pairs"], tables["emitted"])
    return HMMTagger(from_json(HMMConfig, config), tuple(tags), tuple(words), *counts)

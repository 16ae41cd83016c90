"""n-grams of token ids: counts, texts sampled from them, and interpolated Kneser-Ney probabilities.

A text is ``tokens`` int [N] and ``offsets`` int [documents + 1], as a corpus is stored: document d is
``tokens[offsets[d]:offsets[d + 1]]``. Contexts do not cross the start of a document, in front of which stands
one symbol that is never predicted. The end of a document is predicted if the caller puts an EOS there.
"""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from lm.classical.tables import load_tables, save_tables
from lm.config.base import SettingError
from lm.config.counts import HIGHEST_ORDER

LARGEST_VOCABULARY = 2**16  # ids; keys of 2^46 different n-grams then fit in 63 bits
ALL = slice(None)
KNESER_NEY = "Kneser-Ney"  # kind of a file of tables
SCORED_AT_ONCE = 1 << 18  # more takes more memory and is not faster [tokens]
DISCOUNT = 0.5  # where no n-gram of an order occurs once, so that it cannot be estimated


@dataclass(frozen=True)
class NGrams:
    """The different n-grams of a text, of all orders up to ``order``, numbered from 0 within each order.

    The number of a single token is its id. A longer n-gram has a key, made of the number of its prefix (all
    tokens but the last) and its last token; its number is the place of that key among the sorted ones. So the
    n-grams that continue the same context have consecutive numbers.
    """

    vocab_size: int
    keys: tuple[np.ndarray, ...]  # sorted int64 [n-grams], of each order from 2

    @property
    def order(self) -> int:
        return len(self.keys) + 1

    @property
    def begin(self) -> int:
        """Return the id of the symbol in front of a document."""
        return self.vocab_size

    @property
    def base(self) -> int:
        return self.vocab_size + 1

    def size(self, order: int) -> int:
        """Return the number of n-grams of that order."""
        return self.base if order == 1 else len(self.keys[order - 2])

    def prefixes(self, order: int, numbers: slice | np.ndarray = ALL) -> np.ndarray:
        """Return the numbers of the prefixes, int64 [n-grams].

        A single token has the empty prefix, number 0.
        """
        return (
            np.zeros(self.base, np.int64)[numbers]
            if order == 1
            else self.keys[order - 2][numbers] // self.base
        )

    def lasts(self, order: int, numbers: slice | np.ndarray = ALL) -> np.ndarray:
        """Return the last tokens, int64 [n-grams]."""
        return np.arange(self.base)[numbers] if order == 1 else self.keys[order - 2][numbers] % self.base

    def find(self, order: int, prefix: np.ndarray, last: np.ndarray) -> np.ndarray:
        """Return the numbers of n-grams, int64 [n], from the numbers of their prefixes and their last tokens.

        A prefix is -1 for none. An n-gram that was not seen gets -1.
        """
        keys, wanted = self.keys[order - 2], prefix * self.base + last
        if not len(keys):
            return np.full(len(wanted), -1)
        rising, place = np.argsort(wanted), np.empty(len(wanted), np.int64)
        # in rising order the search stays in the cache: among 4 M keys it takes an eighth of the time
        place[rising] = np.minimum(np.searchsorted(keys, wanted[rising]), len(keys) - 1)
        return np.where(keys[place] == wanted, place, -1)

    def suffixes(self) -> Iterator[np.ndarray]:
        """Yield for each order the numbers of its n-grams' suffixes, int64 [n-grams].

        A suffix is all tokens but the first; its number is among the n-grams an order below.
        """
        suffix = np.zeros(self.base, np.int64)
        for order in range(1, self.order + 1):
            if order == 2:
                suffix = self.lasts(2)
            elif order > 2:
                suffix = self.find(order - 1, suffix[self.prefixes(order)], self.lasts(order))
            yield suffix

    def contexts(self, tokens: Sequence[int]) -> Iterator[tuple[int, slice]]:
        """Yield (order, numbers) of the n-grams that continue the end of ``tokens``, short contexts first.

        ``tokens`` start at the start of a document. Contexts that were not seen are left out.
        """
        text = [self.begin, *tokens]
        for order in range(2, min(self.order, len(text) + 1) + 1):
            number, *rest = np.array(text[len(text) - order + 1 :])[:, None]
            for length, token in enumerate(rest, 2):
                number = self.find(length, number, token)
            ends = np.searchsorted(self.keys[order - 2], [number[0] * self.base, (number[0] + 1) * self.base])
            if ends[0] < ends[1]:
                yield order, slice(*ends.tolist())


@dataclass(frozen=True)
class NGramCounts:
    """The count of each n-gram of a text."""

    ngrams: NGrams
    counts: tuple[np.ndarray, ...]  # int64 [n-grams] of each order from 1; of ``begin`` that of documents

    def table(self, order: int) -> dict[tuple[int, ...], int]:
        """Return all n-grams of that order as tuples of ids, with their counts."""
        numbers, columns = np.arange(self.ngrams.size(order)), []
        for length in range(order, 0, -1):
            columns.append(self.ngrams.lasts(length, numbers))
            numbers = self.ngrams.prefixes(length, numbers)
        grams = map(tuple, np.stack(columns[::-1], axis=1).tolist())
        return {
            gram: count for gram, count in zip(grams, self.counts[order - 1].tolist(), strict=True) if count
        }


@dataclass(frozen=True)
class KneserNey:
    """Interpolated Kneser-Ney probabilities, from which every context can be computed.

    The probability of a token is that of the longest n-gram seen which it ends, times the ``backoffs`` of the
    longer contexts in front of it.
    """

    ngrams: NGrams
    # float64 [n-grams] of each order from 1: of the last token given the others
    probs: tuple[np.ndarray, ...]
    backoffs: tuple[np.ndarray, ...]  # float64 [n-grams] of each order below the highest, as a context
    discounts: tuple[float, ...]  # of each order from 1


def count_ngrams(tokens: np.ndarray, offsets: np.ndarray, order: int, vocab_size: int) -> NGramCounts:
    """Count the n-grams of a text, of orders 1 to ``order``.

    Raises SettingError for an order, vocabulary or text that cannot be counted.
    """
    if not 1 <= order <= HIGHEST_ORDER:
        raise SettingError(f"order={order} of n-grams should be from 1 to {HIGHEST_ORDER}")
    if not 1 <= vocab_size <= LARGEST_VOCABULARY:
        raise SettingError(f"vocab_size={vocab_size} of n-grams should be from 1 to {LARGEST_VOCABULARY:,}")
    text = _with_begins(tokens, offsets, vocab_size)
    if len(text) < len(offsets):
        raise SettingError("n-grams of a text without tokens cannot be counted; give one token at least")
    base = vocab_size + 1
    keys, counts, numbers = [], [np.bincount(text, minlength=base)], text
    for _ in range(order - 1):
        contexts = np.concatenate([[-1], numbers[:-1]])
        continued = np.flatnonzero((contexts >= 0) & (text != vocab_size))
        found, inverse, count = np.unique(
            contexts[continued] * base + text[continued], return_inverse=True, return_counts=True
        )
        numbers = np.full(len(text), -1)
        numbers[continued] = inverse
        keys.append(found)
        counts.append(count)
    return NGramCounts(NGrams(vocab_size, tuple(keys)), tuple(counts))


def sample(counted: NGramCounts, rng: np.random.Generator, end: int, length: int) -> list[int]:
    """Return a document sampled token by token in proportion to the counts of the highest order, unsmoothed.

    It ends with the id ``end``, with a token that nothing follows in training, or after ``length`` tokens.
    """
    ngrams, tokens = counted.ngrams, list[int]()
    while len(tokens) < length and end not in tokens[-1:]:
        wanted = min(ngrams.order, len(tokens) + 2)  # the context was drawn, or is the start of the document
        found = [numbers for order, numbers in ngrams.contexts(tokens) if order == wanted]
        if wanted > 1 and not found:
            break
        followers = found[0] if wanted > 1 else slice(ngrams.vocab_size)
        counts = counted.counts[wanted - 1][followers]
        tokens.append(int(rng.choice(ngrams.lasts(wanted, followers), p=counts / counts.sum())))
    return tokens


def kneser_ney(counted: NGramCounts) -> KneserNey:
    """Estimate interpolated Kneser-Ney with one discount an order (Chen and Goodman 1999, section 4.1.6).

    Below the highest order an n-gram counts by how many different tokens precede it; those that begin a
    document, which nothing precedes, count by how often they occur. Order 1 is interpolated with the uniform
    distribution over the vocabulary, so that every id has a probability in every context. A discount is n1 /
    (n1 + 2 n2) of the n-grams that count once and twice.
    """
    ngrams, suffixes = counted.ngrams, list(counted.ngrams.suffixes())
    probs, backoffs, discounts = [], [], []
    lower, contexts = np.array([1 / ngrams.vocab_size]), 1
    for order, count in enumerate(counted.counts, 1):
        if order < ngrams.order:
            preceded = np.bincount(suffixes[order], minlength=len(count))
            count = np.where(preceded > 0, preceded, count)
        if order == 1:
            count = np.append(count[: ngrams.vocab_size], 0)  # the start of a document is not predicted
        discount, prefixes = _discount(count), ngrams.prefixes(order)
        total = np.bincount(prefixes, count, contexts)
        saved = discount * np.bincount(prefixes, count > 0, contexts)
        backoff = np.divide(saved, total, out=np.ones(contexts), where=total > 0)
        share = np.maximum(count - discount, 0) / total[prefixes]
        lower = share + backoff[prefixes] * lower[suffixes[order - 1]]
        contexts = len(lower)
        probs.append(lower)
        backoffs.append(backoff)
        discounts.append(discount)
    return KneserNey(ngrams, tuple(probs), tuple(backoffs[1:]), tuple(discounts))


def token_log_probs(model: KneserNey, tokens: np.ndarray, offsets: np.ndarray) -> np.ndarray:
    """Return the log-probability of each token given those before it in its document, float64 [N] nats."""
    text = _with_begins(tokens, offsets, model.ngrams.vocab_size)
    before, found = model.ngrams.order - 1, np.empty(len(text))
    for start in range(0, len(text), SCORED_AT_ONCE):
        seen = max(start - before, 0)
        found[start : start + SCORED_AT_ONCE] = _probs(model, text[seen : start + SCORED_AT_ONCE])[
            start - seen :
        ]
    return np.log(found[text != model.ngrams.begin])


def next_probs(model: KneserNey, tokens: Sequence[int]) -> np.ndarray:
    """Return the probability of each id after ``tokens``, float64 [V].

    ``tokens`` start at the start of a document.
    """
    probs = model.probs[0][: model.ngrams.vocab_size].copy()
    for order, followers in model.ngrams.contexts(tokens):
        probs *= model.backoffs[order - 2][model.ngrams.prefixes(order, followers)[0]]
        probs[model.ngrams.lasts(order, followers)] = model.probs[order - 1][followers]
    return probs


def save_kneser_ney(model: KneserNey, path: Path) -> None:
    """Write the model as one file, complete or absent."""
    lists = {"keys": model.ngrams.keys, "probs": model.probs, "backoffs": model.backoffs}
    tables = {
        f"{name}/{number}": array for name, arrays in lists.items() for number, array in enumerate(arrays)
    }
    sizes = {"vocab_size": np.array(model.ngrams.vocab_size), "discounts": np.array(model.discounts)}
    save_tables(path, KNESER_NEY, tables | sizes)


def load_kneser_ney(path: Path) -> KneserNey:
    """Return the saved model; raise DataError if the file is missing, damaged or another model's."""
    tables = load_tables(path, KNESER_NEY)
    discounts, vocab_size = tables.pop("discounts").tolist(), int(tables.pop("vocab_size"))
    lists: dict[str, list[np.ndarray]] = {"keys": [], "probs": [], "backoffs": []}
    for name, array in tables.items():  # in the order in which they were saved
        lists[name.partition("/")[0]].append(array)
    keys, probs, backoffs = map(tuple, lists.values())
    return KneserNey(NGrams(vocab_size, keys), probs, backoffs, tuple(discounts))


def _with_begins(tokens: np.ndarray, offsets: np.ndarray, vocab_size: int) -> np.ndarray:
    """Return the text with the begin symbol in front of each document, int64 [N + documents].

    Raises SettingError for offsets or ids out of range.
    """
    tokens, offsets = np.asarray(tokens, np.int64), np.asarray(offsets, np.int64)
    if not len(offsets) or offsets[0] or offsets[-1] != len(tokens) or (np.diff(offsets) < 0).any():
        ends = "no offsets" if not len(offsets) else f"offsets from {offsets[0]} to {offsets[-1]}"
        raise SettingError(f"{ends} should rise from 0 to the {len(tokens)} tokens of the text")
    if len(tokens) and not 0 <= tokens.min() <= tokens.max() < vocab_size:
        ids = f"ids from {tokens.min()} to {tokens.max()}"
        raise SettingError(f"{ids} should be from 0 to {vocab_size - 1}: vocab_size={vocab_size}")
    return np.insert(tokens, offsets[:-1], vocab_size)


def _discount(counts: np.ndarray) -> float:
    once, twice = np.count_nonzero(counts == 1), np.count_nonzero(counts == 2)
    return float(once / (once + 2 * twice)) if once else DISCOUNT


def _probs(model: KneserNey, text: np.ndarray) -> np.ndarray:
    """Return the probability of each symbol of a text with begins, float64.

    Nothing is known of what stands in front of the text.
    """
    numbers, probs = text, model.probs[0][text]
    for order, (seen, backoff) in enumerate(zip(model.probs[1:], model.backoffs, strict=True), 2):
        contexts = np.concatenate([[-1], numbers[:-1]])
        known = np.flatnonzero(contexts >= 0)
        probs[known] *= backoff[contexts[known]]
        both = known[numbers[known] >= 0]  # an n-gram was seen only if its prefix and suffix were
        found = model.ngrams.find(order, contexts[both], text[both])
        hit = found >= 0
        both, found = both[hit], found[hit]
        probs[both] = seen[found]
        numbers = np.full(len(text), -1)
        numbers[both] = found
    return probs

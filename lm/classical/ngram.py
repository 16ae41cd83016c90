"""n-grams of token ids: counts, and interpolated Kneser-Ney probabilities of tokens and continuations.

A text is ``tokens`` int [N] and ``offsets`` int [documents + 1]: document d is
``tokens[offsets[d]:offsets[d + 1]]``. A begin-of-document symbol (BOS) is put in front of each document; it
is never predicted, and no n-gram crosses it. The end of a document is predicted if the caller appends an EOS.
"""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from lm.classical.tables import load_tables, save_tables
from lm.config.base import SettingError
from lm.config.classical import MAX_ORDER

# ids; a key is then below 2^63 as long as the text has at most 2^46 different n-grams of an order
MAX_VOCABULARY = 2**16
KNESER_NEY = "Kneser-Ney"  # names the kind of model in its file (``save_tables``)
SCORING_CHUNK = 1 << 18  # more takes more memory and is not faster [tokens]
DEFAULT_DISCOUNT = 0.5  # where no n-gram of an order occurs once, so that it cannot be estimated
ALL = slice(None)


@dataclass(frozen=True)
class NGramIndex:
    """The different n-grams of a text, of all orders up to ``order``, with ids from 0 within each order.

    The id of a unigram is its token. A longer n-gram has a sorted key: prefix id * base + last token, where
    the prefix is all tokens but the last. Its id is the position of its key. So all n-grams with the same
    prefix have consecutive ids.
    """

    vocab_size: int
    keys: tuple[np.ndarray, ...]  # sorted int64 [n-grams], for each order from 2

    @property
    def order(self) -> int:
        return len(self.keys) + 1

    @property
    def bos(self) -> int:
        """Return the id of the symbol in front of a document."""
        return self.vocab_size

    @property
    def base(self) -> int:
        """Return the number of symbols: the vocabulary and BOS."""
        return self.vocab_size + 1

    def size(self, order: int) -> int:
        """Return the number of n-grams of this order."""
        return self.base if order == 1 else len(self.keys[order - 2])

    def prefixes(self, order: int, ids: slice | np.ndarray = ALL) -> np.ndarray:
        """Return the ids of the n-grams' prefixes, int64 [n-grams].

        A unigram has the empty prefix, id 0.
        """
        if order == 1:
            return np.zeros(self.base, np.int64)[ids]
        return self.keys[order - 2][ids] // self.base

    def last_tokens(self, order: int, ids: slice | np.ndarray = ALL) -> np.ndarray:
        """Return the last tokens of the n-grams, int64 [n-grams]."""
        if order == 1:
            return np.arange(self.base)[ids]
        return self.keys[order - 2][ids] % self.base

    def lookup(self, order: int, prefixes: np.ndarray, tokens: np.ndarray) -> np.ndarray:
        """Return the ids of the n-grams ``prefixes`` + ``tokens``, int64 [n]; -1 for those that do not occur.

        ``prefixes`` are ids, -1 for a prefix that does not occur.
        """
        keys, wanted = self.keys[order - 2], prefixes * self.base + tokens
        if not len(keys):
            return np.full(len(wanted), -1)
        # a sorted search stays in the CPU's cache: among 4 M keys it takes an eighth of the time
        by_key, index = np.argsort(wanted), np.empty(len(wanted), np.int64)
        index[by_key] = np.minimum(np.searchsorted(keys, wanted[by_key]), len(keys) - 1)
        return np.where(keys[index] == wanted, index, -1)

    def suffixes(self) -> list[np.ndarray]:
        """Return for each order the ids of its n-grams' suffixes, int64 [n-grams].

        A suffix is all tokens but the first; its id is among the n-grams of the order below.
        """
        suffixes = [np.zeros(self.base, np.int64)]
        for order in range(2, self.order + 1):
            if order == 2:
                suffixes.append(self.last_tokens(2))
            else:
                suffixes_of_prefixes = suffixes[-1][self.prefixes(order)]
                suffixes.append(self.lookup(order - 1, suffixes_of_prefixes, self.last_tokens(order)))
        return suffixes

    def continuations(self, tokens: Sequence[int]) -> Iterator[tuple[int, slice]]:
        """Yield (order, ids) of the n-grams whose prefix is the end of ``tokens``, by rising order from 2.

        ``tokens`` begin at the beginning of a document. Orders whose prefix does not occur are left out.
        """
        text = [self.bos, *tokens]
        for order in range(2, min(self.order, len(text) + 1) + 1):
            prefix, *rest = np.array(text[len(text) - order + 1 :])[:, None]
            for length, token in enumerate(rest, 2):
                prefix = self.lookup(length, prefix, token)
            keys = [prefix[0] * self.base, (prefix[0] + 1) * self.base]
            start, end = np.searchsorted(self.keys[order - 2], keys).tolist()
            if start < end:
                yield order, slice(start, end)


# ---- counts


@dataclass(frozen=True)
class NGramCounts:
    """The count of each n-gram of a text."""

    index: NGramIndex
    counts: tuple[np.ndarray, ...]  # int64 [n-grams] for each order from 1; BOS counts the documents


def count_ngrams(tokens: np.ndarray, offsets: np.ndarray, order: int, vocab_size: int) -> NGramCounts:
    """Count the n-grams of a text, of orders 1 to ``order``.

    Raises SettingError for an order, vocabulary or text that cannot be counted.
    """
    if not 1 <= order <= MAX_ORDER:
        raise SettingError(f"order={order} of n-grams should be from 1 to {MAX_ORDER}")
    if not 1 <= vocab_size <= MAX_VOCABULARY:
        raise SettingError(f"vocab_size={vocab_size} of n-grams should be from 1 to {MAX_VOCABULARY:,}")
    text = _with_bos(tokens, offsets, vocab_size)
    if not len(tokens):
        raise SettingError("n-grams of a text without tokens cannot be counted; give one token at least")
    bos, base = vocab_size, vocab_size + 1
    keys: list[np.ndarray] = []
    counts = [np.bincount(text, minlength=base)]
    ids = text  # at each position, the id of the n-gram that ends there; -1 for none
    for _ in range(order - 1):
        prefixes = np.concatenate([[-1], ids[:-1]])
        positions = np.flatnonzero((prefixes >= 0) & (text != bos))
        order_keys, order_ids, order_counts = np.unique(
            prefixes[positions] * base + text[positions], return_inverse=True, return_counts=True
        )
        ids = np.full(len(text), -1)
        ids[positions] = order_ids
        keys.append(order_keys)
        counts.append(order_counts)
    return NGramCounts(NGramIndex(vocab_size, tuple(keys)), tuple(counts))


def _with_bos(tokens: np.ndarray, offsets: np.ndarray, vocab_size: int) -> np.ndarray:
    """Return the text with BOS in front of each document, int64 [N + documents].

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


# ---- interpolated Kneser-Ney


@dataclass(frozen=True)
class KneserNey:
    """An interpolated Kneser-Ney model, as a backoff model.

    Of the n-grams that end in a token and occur in the text that was counted, the longest gives its
    probability: ``probs`` of that n-gram, times ``backoffs`` of every longer context.
    """

    index: NGramIndex
    # float64 [n-grams] for each order from 1: P(last token | prefix), interpolated with the lower orders
    probs: tuple[np.ndarray, ...]
    # float64 [n-grams] for each order below the highest: the factor of the lower order's probability where
    # this n-gram is the context
    backoffs: tuple[np.ndarray, ...]
    discounts: tuple[float, ...]  # for each order from 1


def estimate_kneser_ney(counts: NGramCounts) -> KneserNey:
    """Estimate interpolated Kneser-Ney with one discount per order (Chen and Goodman 1999, section 4.1.6).

    Below the highest order, the count of an n-gram is replaced by the number of different tokens that precede
    it; n-grams that begin a document have no such token and keep their count. Order 1 is interpolated with
    the uniform distribution over the vocabulary, so that every id has a probability in every context. The
    discount of an order is n1 / (n1 + 2 n2), from the numbers of n-grams with count 1 and 2.
    """
    index, suffixes = counts.index, counts.index.suffixes()
    probs, backoffs, discounts = [], [], []
    lower_probs = np.array([1 / index.vocab_size])  # of the order below; here order 0, uniform
    for order, count in enumerate(counts.counts, 1):
        if order < index.order:
            preceding = np.bincount(suffixes[order], minlength=len(count))
            count = np.where(preceding > 0, preceding, count)
        if order == 1:
            count = np.append(count[: index.vocab_size], 0)  # BOS is not predicted
        num_contexts, prefixes = len(lower_probs), index.prefixes(order)
        discount = _discount(count)
        total = np.bincount(prefixes, count, num_contexts)
        discounts_sum = discount * np.bincount(prefixes, count > 0, num_contexts)
        backoff = np.divide(discounts_sum, total, out=np.ones(num_contexts), where=total > 0)
        discounted = np.maximum(count - discount, 0) / total[prefixes]
        lower_probs = discounted + backoff[prefixes] * lower_probs[suffixes[order - 1]]
        probs.append(lower_probs)
        backoffs.append(backoff)
        discounts.append(discount)
    return KneserNey(index, tuple(probs), tuple(backoffs[1:]), tuple(discounts))


def _discount(counts: np.ndarray) -> float:
    once, twice = np.count_nonzero(counts == 1), np.count_nonzero(counts == 2)
    return float(once / (once + 2 * twice)) if once else DEFAULT_DISCOUNT


def token_log_probs(model: KneserNey, tokens: np.ndarray, offsets: np.ndarray) -> np.ndarray:
    """Return the log-probability of each token given those before it in its document, float64 [N] nats."""
    text = _with_bos(tokens, offsets, model.index.vocab_size)
    probs, max_context = np.empty(len(text)), model.index.order - 1
    for start in range(0, len(text), SCORING_CHUNK):
        end = start + SCORING_CHUNK
        context_start = max(start - max_context, 0)
        probs[start:end] = _token_probs(model, text[context_start:end])[start - context_start :]
    return np.log(probs[text != model.index.bos])


def _token_probs(model: KneserNey, text: np.ndarray) -> np.ndarray:
    """Return the probability of each symbol of a text with BOS given those before it in ``text``, float64."""
    ids = text  # at each position, the id of the n-gram that ends there; -1 if it does not occur
    probs = model.probs[0][text]
    for order, (order_probs, backoff) in enumerate(zip(model.probs[1:], model.backoffs, strict=True), 2):
        prefixes = np.concatenate([[-1], ids[:-1]])
        known = np.flatnonzero(prefixes >= 0)
        probs[known] *= backoff[prefixes[known]]
        candidates = known[ids[known] >= 0]  # an n-gram can occur only where its prefix and suffix do
        found = model.index.lookup(order, prefixes[candidates], text[candidates])
        positions, found = candidates[found >= 0], found[found >= 0]
        probs[positions] = order_probs[found]
        ids = np.full(len(text), -1)
        ids[positions] = found
    return probs


def next_token_probs(model: KneserNey, tokens: Sequence[int]) -> np.ndarray:
    """Return the probability of each id after ``tokens``, float64 [V].

    ``tokens`` begin at the beginning of a document.
    """
    probs = model.probs[0][: model.index.vocab_size].copy()
    for order, ids in model.index.continuations(tokens):
        prefix = model.index.prefixes(order, ids)[0]  # the same for all
        probs *= model.backoffs[order - 2][prefix]
        probs[model.index.last_tokens(order, ids)] = model.probs[order - 1][ids]
    return probs


def save_kneser_ney(model: KneserNey, path: Path) -> None:
    """Write the model as one file, complete or absent."""
    by_order = {"keys": model.index.keys, "probs": model.probs, "backoffs": model.backoffs}
    tables: dict[str, np.ndarray] = {}
    for name, arrays in by_order.items():
        tables |= {f"{name}/{i}": array for i, array in enumerate(arrays)}
    tables["vocab_size"] = np.array(model.index.vocab_size)
    tables["discounts"] = np.array(model.discounts)
    save_tables(path, KNESER_NEY, tables)


def load_kneser_ney(path: Path) -> KneserNey:
    """Return the saved model; raise DataError if the file is missing, damaged or another model's."""
    tables = load_tables(path, KNESER_NEY)
    discounts, vocab_size = tables.pop("discounts").tolist(), int(tables.pop("vocab_size"))
    by_order: dict[str, list[np.ndarray]] = {"keys": [], "probs": [], "backoffs": []}
    for name, array in tables.items():  # in the order in which they were saved
        by_order[name.partition("/")[0]].append(array)
    keys, probs, backoffs = map(tuple, by_order.values())
    return KneserNey(NGramIndex(vocab_size, keys), probs, backoffs, tuple(discounts))

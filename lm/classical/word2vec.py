"""word2vec's skip-gram [Mikolov et al. 2013]: losses and gradients, batches, training, and the word vectors.

There are two tables: u [V,D] of words as centres, v [V,D] of the same words as contexts. A batch has B
centres with C contexts each; ``weights`` [B,C] is 1 where there is a context, else 0. Losses are sums over
all pairs of a centre and a context.

On one core of a shared CPU, the documentation by words (1.16 million, V = 9,067), window 5, 5 negatives and D
= 100: 590,000 words a second compiled and 410,000 with compiling in two epochs; gensim 4.4, which draws
negatives for each pair, 215,000 (medians of three interleaved runs, CPU time). After 5 epochs the held-out
loss of a pair is 2.458 nats, gensim's 2.460.
"""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import cached_property, partial
from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax import Array

from lm.config.base import SettingError, did_you_mean
from lm.config.classical import VectorsConfig

NOISE_POWER = 0.75  # of the unigram distribution [Mikolov et al. 2013, section 2.2]
BATCHES_PER_SCAN = 64  # batches of one compiled scan


# ---- losses and their gradients


def softmax_loss(u: Array, v: Array, targets: Array, weights: Array) -> Array:
    """Return the sum of -log P(c|t), where P(c|t) = exp(u_t v_c) / sum_k exp(u_t v_k).

    ``u`` [B,D] are the rows of the centres, ``v`` [V,D] is the whole table, ``targets`` int [B,C] the
    contexts.
    """
    log_p = jax.nn.log_softmax(u @ v.T)
    return -(jnp.take_along_axis(log_p, targets, axis=1) * weights).sum()


def softmax_gradients(u: Array, v: Array, targets: Array, weights: Array) -> tuple[Array, Array]:
    """Return the gradients of ``softmax_loss`` with respect to u [B,D] and v [V,D].

    For one pair: with respect to u_t, -v_c + sum_k P(k|t) v_k; with respect to v_k, (P(k|t) - [k = c]) u_t.
    """
    num_contexts = weights.sum(axis=1, keepdims=True)
    expected = jax.nn.softmax(u @ v.T) * num_contexts
    d_u = expected @ v - jnp.einsum("bc,bcd->bd", weights, v[targets])
    d_v = (expected.T @ u).at[targets].add(-weights[:, :, None] * u[:, None, :])
    return d_u, d_v


def negative_sampling_loss(u: Array, positive: Array, negative: Array, weights: Array) -> Array:
    """Return the sum of -log sigma(u_t v_c) - sum_i log sigma(-u_t v_i) over all pairs.

    i runs over the negatives of the centre. ``u`` [B,D] are the rows of the centres, ``positive`` [B,C,D]
    those of their contexts, ``negative`` [B,K,D] those of words drawn from noise. All pairs of a centre share
    its K negatives: the expected loss is the same as with K negatives per pair, and C times fewer are read.
    """
    positive_logits = jnp.einsum("bd,bcd->bc", u, positive)
    negative_logits = jnp.einsum("bd,bkd->bk", u, negative)
    num_contexts = weights.sum(axis=1, keepdims=True)
    positive_loss = (jax.nn.softplus(-positive_logits) * weights).sum()
    return positive_loss + (jax.nn.softplus(negative_logits) * num_contexts).sum()


def negative_sampling_gradients(
    u: Array, positive: Array, negative: Array, weights: Array
) -> tuple[Array, Array]:
    """Return the gradients of ``negative_sampling_loss``: d_u [B,D], and d_v [B,C+K,D].

    d_v holds the gradients of the positives, then those of the negatives. For one pair: with respect to u_t,
    (sigma(u_t v_c) - 1) v_c + sum_i sigma(u_t v_i) v_i; with respect to v_c, (sigma(u_t v_c) - 1) u_t; with
    respect to v_i, sigma(u_t v_i) u_t.
    """
    v = jnp.concatenate([positive, negative], axis=1)
    num_contexts = jnp.broadcast_to(weights.sum(axis=1, keepdims=True), negative.shape[:2])
    is_positive = (jnp.arange(v.shape[1]) < positive.shape[1]).astype(u.dtype)[None, :]
    logits = jnp.einsum("bd,bkd->bk", u, v)
    d_logits = (jax.nn.sigmoid(logits) - is_positive) * jnp.concatenate([weights, num_contexts], axis=1)
    return jnp.einsum("bk,bkd->bd", d_logits, v), d_logits[:, :, None] * u[:, None, :]


# ---- the text as word ids


class PaddedText(NamedTuple):
    """The concatenated documents, padded so that a window around any word lies within the arrays."""

    words: np.ndarray  # int32 [window + N + window, or longer]
    documents: np.ndarray  # int32, the number of each word's document; -1 for padding


def join_documents(documents: Sequence[np.ndarray], vocab_size: int) -> tuple[np.ndarray, np.ndarray]:
    """Concatenate documents of ids; return the words, and the number of each word's document, both int32 [N].

    Raises SettingError if there is no word, or one that is not in 0..vocab_size - 1.
    """
    words = np.concatenate([np.zeros(0, np.int32), *documents])
    if not len(words):
        raise SettingError("skip-gram has no text to train on: every document is empty")
    if words.min() < 0 or words.max() >= vocab_size:
        wrong = words[(words < 0) | (words >= vocab_size)][0]
        raise SettingError(
            f"word {wrong} of the text should be in 0..{vocab_size - 1}, the rows of the tables"
        )
    document_of_word = np.repeat(np.arange(len(documents), dtype=np.int32), [len(ids) for ids in documents])
    return words.astype(np.int32), document_of_word


def pad_text(words: np.ndarray, documents: np.ndarray, window: int, length: int) -> PaddedText:
    """Return N <= ``length`` words with ``window`` padding before and ``window + length - N`` after them."""
    padding = (window, window + length - len(words))
    return PaddedText(np.pad(words, padding), np.pad(documents, padding, constant_values=-1))


def keep_probabilities(counts: np.ndarray, threshold: float) -> np.ndarray:
    """Return the probability with which subsampling keeps each word, float [V].

    It is sqrt(threshold / frequency) for words more frequent than ``threshold``, else 1 [section 2.3].
    ``threshold`` 0 keeps all words.
    """
    if not threshold:
        return np.ones(len(counts))
    return np.minimum(1.0, np.sqrt(threshold * counts.sum() / np.maximum(counts, 1)))


# ---- negatives


class AliasTable(NamedTuple):
    """A distribution over V words as Walker's alias table: a draw costs two random numbers, whatever V is."""

    threshold: np.ndarray  # float32 [V]: probability that a cell gives its own word
    alias: np.ndarray  # int32 [V]: the word that the cell gives otherwise


def noise_distribution(counts: np.ndarray) -> AliasTable:
    """Return the noise distribution: unigram ``counts`` int [V] to the power NOISE_POWER, normalised."""
    p = counts.astype(np.float64) ** NOISE_POWER
    threshold, alias = p * (len(p) / p.sum()), np.arange(len(p), dtype=np.int32)
    poor = np.flatnonzero(threshold < 1).tolist()
    rich = np.flatnonzero(threshold >= 1).tolist()
    while poor and rich:  # each poor cell is filled up by a rich one
        low, high = poor.pop(), rich[-1]
        alias[low] = high
        threshold[high] -= 1 - threshold[low]
        if threshold[high] < 1:
            poor.append(rich.pop())
    threshold[poor + rich] = 1  # they are 1 up to rounding
    return AliasTable(threshold.astype(np.float32), alias)


def sample_negatives(key: Array, noise: AliasTable, shape: tuple[int, ...]) -> Array:
    """Sample words of this shape, int, from the noise distribution."""
    cell_key, alias_key = jax.random.split(key)
    cells = jax.random.randint(cell_key, shape, 0, len(noise.alias))
    keeps_cell = jax.random.uniform(alias_key, shape) < noise.threshold[cells]
    return jnp.where(keeps_cell, cells, noise.alias[cells])


# ---- batches


class CentreBatches(NamedTuple):
    """S batches of B centres, for one scan."""

    positions: Array  # int [S,B]: indices in ``PaddedText.words``
    reach: Array  # int [S,B]: contexts on either side; 0 where the last batch is padded
    rates: Array  # float [S]: learning rates
    keys: Array  # [S]: random keys of the negatives


class Pairs(NamedTuple):
    """A batch of centres with their contexts and negatives, as word ids."""

    centres: Array  # int [B]
    contexts: Array  # int [B,C]
    weights: Array  # float [B,C]: 1 where there is a context
    negatives: Array  # int [B,K]


class ContextWindows(NamedTuple):
    """Holds the words of B windows, whose contexts are up to C / 2 positions away."""

    centres: Array  # int [B]
    contexts: Array  # int [B,C]
    weights: Array  # float [B,C]: 1 where a context counts, else 0


def context_windows(text: PaddedText, positions: Array, reach: Array, window: int) -> ContextWindows:
    """Return the words around ``positions`` [B], C = 2 ``window`` of them for each.

    A context counts if it lies within ``reach`` [B] of its centre and in the same document.
    """
    offsets = jnp.asarray([offset for offset in range(-window, window + 1) if offset])[None, :]
    context_positions = positions[:, None] + offsets
    same_document = text.documents[context_positions] == text.documents[positions][:, None]
    within_reach = jnp.abs(offsets) <= reach[:, None]
    weights = (same_document & within_reach).astype(jnp.float32)
    return ContextWindows(text.words[positions], text.words[context_positions], weights)


def _epoch_batches(
    text: PaddedText, epoch: int, config: VectorsConfig, rng: np.random.Generator
) -> Iterator[CentreBatches]:
    """Yield all centres of an epoch in random order, BATCHES_PER_SCAN batches at a time."""
    positions = rng.permutation(np.flatnonzero(np.asarray(text.documents) >= 0))
    min_reach = config.window if config.reach == "whole" else 1
    reach = rng.integers(min_reach, config.window + 1, len(positions))
    shape = (BATCHES_PER_SCAN, config.batch)
    size = BATCHES_PER_SCAN * config.batch
    for start in range(0, len(positions), size):
        padding = (0, max(0, start + size - len(positions)))
        epochs_done = epoch + (start + config.batch * np.arange(BATCHES_PER_SCAN)) / len(positions)
        progress = np.minimum(epochs_done / config.epochs, 1)
        rates = config.learning_rate + (config.last_rate - config.learning_rate) * progress
        yield CentreBatches(
            jnp.asarray(np.pad(positions[start : start + size], padding).reshape(shape)),
            jnp.asarray(np.pad(reach[start : start + size], padding).reshape(shape)),
            jnp.asarray(rates, jnp.float32),
            jax.random.split(jax.random.key(int(rng.integers(2**31))), BATCHES_PER_SCAN),
        )


def _make_pairs(text: PaddedText, noise: AliasTable, batch: CentreBatches, config: VectorsConfig) -> Pairs:
    windows = context_windows(text, batch.positions, batch.reach, config.window)
    negatives = sample_negatives(batch.keys, noise, (len(batch.positions), config.negatives))
    return Pairs(windows.centres, windows.contexts, windows.weights, negatives)


# ---- training


class Tables(NamedTuple):
    """The two vectors of each word; its embedding is its vector as a centre."""

    centres: Array  # u [V,D]
    contexts: Array  # v [V,D]


def initial_tables(key: Array, vocab_size: int, d_model: int) -> Tables:
    """Return word2vec's initial tables: centres uniform in [-1/2D, 1/2D], contexts 0."""
    centres = jax.random.uniform(key, (vocab_size, d_model), minval=-0.5 / d_model, maxval=0.5 / d_model)
    return Tables(centres, jnp.zeros((vocab_size, d_model)))


def train_epoch(
    tables: Tables, documents: Sequence[np.ndarray], config: VectorsConfig, seed: int, epoch: int
) -> Tables:
    """Return the tables after one more pass over the documents; ``epoch`` counts from 0.

    The buffers of ``tables`` are donated: they cannot be read afterwards. The result depends on the arguments
    only, so that training may be resumed after any epoch.
    """
    vocab_size, rng = len(tables.contexts), np.random.default_rng((seed, epoch))
    words, document_ids = join_documents(documents, vocab_size)
    counts = np.bincount(words, minlength=vocab_size)
    noise = jax.device_put(noise_distribution(counts))
    kept = rng.random(len(words)) < keep_probabilities(counts, config.subsample)[words]
    # every epoch is padded to the length of the whole text, so that all share one compiled scan
    text = jax.device_put(pad_text(words[kept], document_ids[kept], config.window, len(words)))
    for batches in _epoch_batches(text, epoch, config, rng):
        tables = _scan_updates(tables, text, noise, batches, config)
    return tables


@partial(jax.jit, static_argnames="config", donate_argnames="tables")
def _scan_updates(
    tables: Tables, text: PaddedText, noise: AliasTable, batches: CentreBatches, config: VectorsConfig
) -> Tables:
    update = _negative_sampling_update if config.negatives else _softmax_update

    def step(tables: Tables, batch: CentreBatches) -> tuple[Tables, None]:
        return update(tables, _make_pairs(text, noise, batch, config), batch.rates), None

    return jax.lax.scan(step, tables, batches)[0]


def _negative_sampling_update(tables: Tables, pairs: Pairs, rate: Array) -> Tables:
    """Apply a step of SGD that touches only the rows of the batch; its cost does not depend on V."""
    u, v = tables
    words = jnp.concatenate([pairs.contexts, pairs.negatives], axis=1)
    positive, negative = v[pairs.contexts], v[pairs.negatives]
    d_u, d_v = negative_sampling_gradients(u[pairs.centres], positive, negative, pairs.weights)
    return Tables(u.at[pairs.centres].add(-rate * d_u), v.at[words].add(-rate * d_v))


def _softmax_update(tables: Tables, pairs: Pairs, rate: Array) -> Tables:
    """Apply a step of SGD; the softmax updates every word as a context."""
    u, v = tables
    d_u, d_v = softmax_gradients(u[pairs.centres], v, pairs.contexts, pairs.weights)
    return Tables(u.at[pairs.centres].add(-rate * d_u), v - rate * d_v)


def mean_loss(tables: Tables, documents: Sequence[np.ndarray], config: VectorsConfig, seed: int) -> float:
    """Return the mean loss of a pair of held-out documents [nats].

    Windows are drawn as in training. Negatives are drawn by the counts of these documents, and no word is
    left out: losses of other documents are not comparable.
    """
    vocab_size, rng = len(tables.contexts), np.random.default_rng((seed, 0))
    words, document_ids = join_documents(documents, vocab_size)
    noise = jax.device_put(noise_distribution(np.bincount(words, minlength=vocab_size)))
    text = jax.device_put(pad_text(words, document_ids, config.window, len(words)))
    total = np.zeros(2)
    for batches in _epoch_batches(text, 0, config, rng):
        total += np.asarray(_scan_losses(tables, text, noise, batches, config))
    loss, pairs = total
    return float(loss / max(pairs, 1))


@partial(jax.jit, static_argnames="config")
def _scan_losses(
    tables: Tables, text: PaddedText, noise: AliasTable, batches: CentreBatches, config: VectorsConfig
) -> Array:
    """Return the sum of losses and the number of pairs, [2]."""

    def step(total: Array, batch: CentreBatches) -> tuple[Array, None]:
        pairs = _make_pairs(text, noise, batch, config)
        u, v = tables.centres[pairs.centres], tables.contexts
        if config.negatives:
            loss = negative_sampling_loss(u, v[pairs.contexts], v[pairs.negatives], pairs.weights)
        else:
            loss = softmax_loss(u, v, pairs.contexts, pairs.weights)
        return total + jnp.stack([loss, pairs.weights.sum()]), None

    return jax.lax.scan(step, jnp.zeros(2), batches)[0]


def rescale_to(tables: Tables, like: Array) -> Tables:
    """Rescale the tables so that centres have the root mean square of ``like``.

    The products of centres and contexts stay the same.
    """
    factor = jnp.sqrt(jnp.square(like).mean() / jnp.square(tables.centres).mean())
    return Tables(tables.centres * factor, tables.contexts / factor)


# ---- the vectors of words: looked up and compared


@dataclass(frozen=True)
class WordVectors:
    """Words and the table of their vectors, skip-gram's as centres."""

    words: tuple[str, ...]  # [V]
    centres: np.ndarray  # u float32 [V,D]

    def __post_init__(self) -> None:
        shape = self.centres.shape
        if shape[:1] != (len(self.words),) or len(shape) != 2:
            raise SettingError(f"centres should be [{len(self.words)},D] as the words are, not {[*shape]}")

    @cached_property
    def ids(self) -> dict[str, int]:
        """Return the row of each word in the tables."""
        return {word: index for index, word in enumerate(self.words)}

    def vectors(self, words: Sequence[str]) -> np.ndarray:
        """Return the vectors of words as centres, [T,D]; a word has the same vector in every context.

        Raises SettingError for a word that the text lacked, with the known word that is most like it.
        """
        for word in words:
            if word not in self.ids:
                raise SettingError(f"{word!r} has no vector{did_you_mean(word, self.words)}")
        return self.centres[[self.ids[word] for word in words]]

    def neighbours(self, word: str, count: int) -> list[tuple[str, float]]:
        """Return the ``count`` other words with the highest cosine to ``word``, and their cosines.

        The highest comes first.
        """
        vector = self.vectors([word])[0]
        norms = np.linalg.norm(self.centres, axis=1) * np.linalg.norm(vector)
        cosines = self.centres @ vector / np.maximum(norms, np.finfo(np.float32).tiny)
        cosines[self.ids[word]] = -np.inf
        order = np.argsort(-cosines, kind="stable")[: min(count, len(self.words) - 1)]
        return [(self.words[index], float(cosines[index])) for index in order]

"""Input and target formats of a text under a corruption mask, and how its sentences are ordered and split.

A new way to show noise is one entry of INPUTS or TARGETS and its name. Tokens, noise and uniforms are [B,L].
"""

from collections.abc import Callable
from typing import Literal, NamedTuple

import numpy as np

from lm.objectives.corruption import Selection, latest, length_mask, runs_of, tie_broken
from lm.tokenizers.tokenizer import Tokenizer

RANDOM_SHARE = 0.1  # share that becomes any id [Raffel et al. 2020, 3.3.1; Devlin et al. 2019, 3.1]
SAME_SHARE = 0.1  # share of noise tokens that an encoder sees unchanged [Devlin et al. 2019, 3.1]

# Masks replace tokens one for one, "span-masks" a span each. Of "masks-or-random" 10 % are any token, and of
# "masks-random-or-same" another 10 % stay as they were.
_MasksName = Literal["masks", "masks-or-random", "masks-random-or-same", "span-masks"]
InputsName = Literal["sentinels", _MasksName, "drop", "shuffle"]
# "in-place" and "replaced" are of encoders; "replaced" also asks of every token whether it is the text's.
TargetsName = Literal["sentinels", "drop", "everything", "in-place", "replaced"]


class Side(NamedTuple):
    """The format of one side of an example, inputs or targets: what it shows of a corrupted text."""

    # of tokens, noise and uniforms, each [B,L]
    show: Callable[[np.ndarray, np.ndarray, np.ndarray, Tokenizer], Selection]
    # tokens of text, of noise, and runs that become sentinels [B] -> tokens shown [B], without EOS
    size: Callable[[np.ndarray, np.ndarray, np.ndarray], np.ndarray] = lambda text, noise, runs: text
    draws: int = 0  # random numbers per token


def noise_span_to_unique_sentinel(
    tokens: np.ndarray, noise: np.ndarray, _u: np.ndarray, tokenizer: Tokenizer
) -> Selection:
    """Replace each noise span by a unique sentinel; sentinels count down from the top of the vocabulary.

    T5's ``noise_span_to_unique_sentinel``, and with the mask inverted its nonnoise form for targets.
    """
    starts = runs_of(noise)
    counts = np.count_nonzero(starts, axis=1)
    order = np.arange(counts.sum()) - np.repeat(np.cumsum(counts) - counts, counts)
    replaced = tokens.copy()
    replaced.ravel()[np.flatnonzero(starts)] = tokenizer.vocab_size - 1 - order
    return replaced, starts | ~noise


def _masks(tokens: np.ndarray, noise: np.ndarray, _u: np.ndarray, tokenizer: Tokenizer) -> Selection:
    return np.where(noise, np.int32(tokenizer.mask), tokens), np.ones_like(noise)


def _or_random(tokens: np.ndarray, noise: np.ndarray, u: np.ndarray, tokenizer: Tokenizer) -> Selection:
    first = tokenizer.first_regular_id
    anything = first + (u / RANDOM_SHARE * (tokenizer.vocab_size - first)).astype(np.int32)
    shown = np.where(u < RANDOM_SHARE, anything, tokenizer.mask)
    return np.where(noise, shown, tokens), np.ones_like(noise)


def _or_same(tokens: np.ndarray, noise: np.ndarray, u: np.ndarray, tokenizer: Tokenizer) -> Selection:
    return _or_random(tokens, noise & (u < 1 - SAME_SHARE), u, tokenizer)


def _shuffle(tokens: np.ndarray, noise: np.ndarray, u: np.ndarray, _vocabulary: Tokenizer) -> Selection:
    """Permute the noise tokens among their places (deshuffling)."""
    order = np.argsort(np.where(noise, tie_broken(u), np.inf), axis=1)
    shuffled = tokens.copy()
    shuffled[noise] = np.take_along_axis(tokens, order, axis=1)[length_mask(noise.sum(1), noise.shape[1])]
    return shuffled, np.ones_like(noise)


INPUTS: dict[InputsName, Side] = {
    "sentinels": Side(noise_span_to_unique_sentinel, lambda text, noise, runs: text - noise + runs),
    "masks": Side(_masks),
    "masks-or-random": Side(_or_random, draws=1),
    "masks-random-or-same": Side(_or_same, draws=1),
    "span-masks": Side(_masks),  # only of noise that is infilled
    "drop": Side(lambda tokens, noise, *_: (tokens, ~noise), lambda text, noise, runs: text - noise),
    "shuffle": Side(_shuffle, draws=1),
}
TARGETS: dict[TargetsName, Side] = {
    "sentinels": Side(
        lambda tokens, noise, u, tokenizer: noise_span_to_unique_sentinel(tokens, ~noise, u, tokenizer),
        lambda text, noise, runs: noise + runs,
    ),
    "drop": Side(lambda tokens, noise, *_: (tokens, noise), lambda text, noise, runs: noise),
    "everything": Side(lambda tokens, noise, *_: (tokens, np.ones_like(noise))),
}


# --- sentences


def sentence_starts(tokens: np.ndarray, tokenizer: Tokenizer) -> np.ndarray:
    """Return where sentences begin, bool [B,L]; never the first token.

    A sentence begins where a word follows the end of one, or anything an EOS.
    """
    starts = np.zeros(tokens.shape, bool)
    before = tokens[:, :-1]
    starts[:, 1:] = tokenizer.sentence_ends[before] & tokenizer.word_starts[tokens[:, 1:]]
    starts[:, 1:] |= before == tokenizer.eos
    return starts


def permutation(tokens: np.ndarray, lengths: np.ndarray, u: np.ndarray, tokenizer: Tokenizer) -> np.ndarray:
    """Return the positions of the text with its sentences in random order, int [B,L]; u uniform [B,L]."""
    order = np.take_along_axis(u, latest(sentence_starts(tokens, tokenizer)), axis=1)
    np.putmask(order, ~length_mask(lengths, u.shape[1]), np.inf)
    return np.argsort(order, axis=1, kind="stable")


def split_points(tokens: np.ndarray, lengths: np.ndarray, u: np.ndarray, tokenizer: Tokenizer) -> np.ndarray:
    """Return where to split each text, int [B], at least one token from either end; u uniform [B].

    Any sentence is as likely, any word where there is one sentence only, any token where there is one word.
    """
    inner = length_mask(lengths, tokens.shape[1])
    inner[:, 0] = False
    for starts in (tokenizer.word_starts[tokens], sentence_starts(tokens, tokenizer)):
        finer, inner = inner, starts & inner
        inner = np.where(inner.any(axis=1, keepdims=True), inner, finer)
    nth = (u * inner.sum(axis=1)).astype(np.int64)
    return np.argmax(np.cumsum(inner, axis=1) > nth[:, None], axis=1)

"""Sentences in arrays of tokens [B,L]: where they begin, in another order, and where to cut a text in two."""

import numpy as np

from lm.data.noise import latest, within
from lm.data.text.vocabulary import Vocabulary


def sentence_starts(tokens: np.ndarray, vocabulary: Vocabulary) -> np.ndarray:
    """bool [B,L]: a word begins after the end of a sentence, or anything after EOS; the first token is
    none.
    """
    starts = np.zeros(tokens.shape, bool)
    before = tokens[:, :-1]
    starts[:, 1:] = (vocabulary.sentence_ends[before] & vocabulary.word_starts[tokens[:, 1:]]) | (
        before == vocabulary.eos
    )
    return starts


def permute(tokens: np.ndarray, lengths: np.ndarray, u: np.ndarray, vocabulary: Vocabulary) -> np.ndarray:
    """[B,L]: the sentences in random order, each whole; uniforms [B,L]."""
    order = np.take_along_axis(u, latest(sentence_starts(tokens, vocabulary)), axis=1)
    np.putmask(order, ~within(lengths, u.shape[1]), np.inf)
    return np.take_along_axis(tokens, np.argsort(order, axis=1, kind="stable"), axis=1)


def cuts(tokens: np.ndarray, lengths: np.ndarray, u: np.ndarray, vocabulary: Vocabulary) -> np.ndarray:
    """[B]: where a second part begins, one or more tokens from either end; uniforms [B].

    Any sentence is as likely, any word where there is one sentence only, any token where there is one word.
    """
    inner = within(lengths, tokens.shape[1])
    inner[:, 0] = False
    for starts in (vocabulary.word_starts[tokens], sentence_starts(tokens, vocabulary)):
        found = starts & inner
        inner = np.where(found.any(axis=1, keepdims=True), found, inner)
    nth = (u * inner.sum(axis=1)).astype(np.int64)
    return np.argmax(np.cumsum(inner, axis=1) > nth[:, None], axis=1)

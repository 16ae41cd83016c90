"""Inspects the layers of a model as it reads a text: their predictions, and how similar states are."""

import jax
import numpy as np
from jax import Array

from lm.batch import Batch
from lm.nn.transformer import Transformer


@jax.jit
def logit_lens(model: Transformer, batch: Batch) -> Array:
    """Return the logits that the last norm and output matrix give for each layer's residual stream.

    float32 [layers+1,B,T,V], of the decoder if there is one; the first are of the embeddings, the last are
    the model's own (nostalgebraist 2020, "interpreting GPT: the logit lens").
    """
    side = "decoder" if model.config.has_decoder else "encoder"
    stack = model.decoder if model.config.has_decoder else model.encoder
    return jax.lax.map(lambda states: model.logits(stack.norm(states)), model.hidden_states(batch)[side])


def cosine(first: np.ndarray, second: np.ndarray) -> np.ndarray:
    """Return the cosine similarity float [...] of vectors [...,D]; 0 where one is 0."""
    lengths = np.linalg.norm(first, axis=-1) * np.linalg.norm(second, axis=-1)
    return (first * second).sum(-1) / np.where(lengths > 0, lengths, 1.0)


def word_similarity(first: np.ndarray, second: np.ndarray, spans: tuple[slice, slice]) -> np.ndarray:
    """Return the cosine of a word's states in two texts, float [L]; their states are [L,T,D] and [L,S,D].

    ``spans`` are the word's tokens in each text; its state is their mean.
    """
    first_span, second_span = spans
    return cosine(first[:, first_span].mean(1), second[:, second_span].mean(1))


def mean_similarity(first: np.ndarray, second: np.ndarray, ids: tuple[list[int], list[int]]) -> np.ndarray:
    """Return the mean cosine of all pairs of unequal tokens of two texts, float [L].

    The texts' states are [L,T,D] and [L,S,D]. This is the similarity of any states of a layer, a baseline for
    that of a word's (Ethayarajh 2019). It is 0 if all tokens are equal.
    """
    pairs = cosine(first[:, :, None], second[:, None])
    unequal = np.not_equal.outer(*map(np.array, ids))
    return pairs[:, unequal].mean(1) if unequal.any() else np.zeros(len(pairs))

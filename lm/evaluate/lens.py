"""What is inside a model while it reads: the guess of every layer, and how alike two states are."""

import jax
import numpy as np
from jax import Array

from lm.batch import Batch
from lm.nn.transformer import Transformer


@jax.jit
def logit_lens(model: Transformer, batch: Batch) -> Array:
    """float32 [layers+1,B,T,V]: the logits if the last norm and output matrix read each layer's stream.

    Of the decoder if there is one; the first are of the embeddings, the last are the model's own
    (nostalgebraist 2020, "interpreting GPT: the logit lens").
    """
    side = "decoder" if model.config.has_decoder else "encoder"
    stack = model.decoder if model.config.has_decoder else model.encoder
    return jax.lax.map(lambda states: model.logits(stack.norm(states)), model.hidden_states(batch)[side])


def cosine(first: np.ndarray, second: np.ndarray) -> np.ndarray:
    """float [...] of vectors [...,D]: the cosine of their angle, 0 where one is 0."""
    lengths = np.linalg.norm(first, axis=-1) * np.linalg.norm(second, axis=-1)
    return (first * second).sum(-1) / np.where(lengths > 0, lengths, 1.0)


def word_similarity(first: np.ndarray, second: np.ndarray, spans: tuple[slice, slice]) -> np.ndarray:
    """float [L]: cosine of a word's states in two texts, whose states are [L,T,D] and [L,S,D].

    ``spans``: which tokens of each text are the word's; its state is their mean.
    """
    return cosine(*(states[:, span].mean(1) for states, span in zip((first, second), spans, strict=True)))


def mean_similarity(first: np.ndarray, second: np.ndarray, ids: tuple[list[int], list[int]]) -> np.ndarray:
    """float [L]: mean cosine of all pairs of unequal tokens of two texts, states [L,T,D] and [L,S,D].

    What any two states of a layer have in common (Ethayarajh 2019); 0 if all tokens are equal.
    """
    pairs = cosine(first[:, :, None], second[:, None])
    unequal = np.not_equal.outer(*map(np.array, ids))
    return pairs[:, unequal].mean(1) if unequal.any() else np.zeros(len(pairs))

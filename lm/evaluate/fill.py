"""What a masked language model puts in place of masks: candidates for each, or a text over several passes."""

from functools import partial

import jax
import jax.numpy as jnp
import numpy as np
from jax import Array

from lm.nn.transformer import Transformer
from lm.nn.view import Batch


def fill(model: Transformer, batch: Batch, *, mask: int, k: int) -> tuple[np.ndarray, np.ndarray]:
    """The ``k`` likeliest tokens int32 [M,k] and their probabilities [M,k] at each of M masks, row by row."""
    tokens, probabilities = likeliest(model, batch, k=min(k, model.config.vocab_size))
    masked = np.asarray(_masked(batch, mask))
    return np.asarray(tokens)[masked], np.asarray(probabilities)[masked]


@partial(jax.jit, static_argnames="k")
def likeliest(model: Transformer, batch: Batch, *, k: int) -> tuple[Array, Array]:
    """The ``k`` likeliest tokens int32 [B,T,k] of every position, the first most, and their probabilities."""
    probabilities, tokens = jax.lax.top_k(jax.nn.softmax(model(batch)), k)
    return tokens, probabilities


def _masked(batch: Batch, mask: int) -> Array:
    """bool [B,S]: the masks of the text."""
    tokens = jnp.asarray(batch["encoder_input_tokens"])
    return (tokens == mask) & (jnp.asarray(batch.get("encoder_segment_ids", jnp.ones_like(tokens))) > 0)


@partial(jax.jit, static_argnames=("iterations", "mask"))
def mask_predict(model: Transformer, batch: Batch, *, iterations: int, mask: int) -> Array:
    """int32 [B,S]: the text with every mask filled (Ghazvininejad et al. 2019).

    Each pass predicts all that is masked at once. Of n positions that were masked at first, the n (T - t) / T
    that the model was least sure of are masked again before pass t of T.
    """
    first = _masked(batch, mask)
    count = first.sum(-1)

    def predict_again(t, state):
        tokens, confidence = state
        remaining = count * (iterations - t) // iterations
        rank = jnp.argsort(jnp.argsort(jnp.where(first, confidence, jnp.inf), axis=-1), axis=-1)
        masked = (rank < remaining[:, None]) & first
        inputs = batch | {"encoder_input_tokens": jnp.where(masked, mask, tokens)}
        probabilities = jax.nn.softmax(model(inputs).at[:, :, mask].set(-jnp.inf))
        tokens = jnp.where(masked, probabilities.argmax(-1), tokens).astype(jnp.int32)
        return tokens, jnp.where(masked, probabilities.max(-1), confidence)

    tokens = jnp.asarray(batch["encoder_input_tokens"], jnp.int32)
    confidence = jnp.zeros(tokens.shape, jnp.float32)
    return jax.lax.fori_loop(0, iterations, predict_again, (tokens, confidence))[0]

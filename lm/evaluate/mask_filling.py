"""Fills masks: with the likeliest tokens for each mask, or so that the whole text is likely.

A masked language model predicts one token per mask, at once or in several passes. From a text of masks alone,
a model that was trained by masked diffusion samples a text without a prompt. An encoder-decoder generates any
number of tokens per mask.
"""

from collections.abc import Sequence
from dataclasses import replace
from functools import partial

import jax
import jax.numpy as jnp
import numpy as np
from jax import Array

from lm.batch import Batch
from lm.config.decoding import Decoding
from lm.evaluate.generate import beam_search
from lm.nn.transformer import Transformer


def fill_masks(model: Transformer, batch: Batch, *, mask: int, k: int) -> tuple[np.ndarray, np.ndarray]:
    """Return the ``k`` likeliest tokens at each of M masks, row by row, and their probabilities.

    The tokens are int32 [M,k], the probabilities [M,k].
    """
    tokens, probabilities = top_k_tokens(model, batch, k=min(k, model.config.vocab_size), mask=mask)
    masked = np.asarray(_is_masked(batch, mask))
    return np.asarray(tokens)[masked], np.asarray(probabilities)[masked]


@partial(jax.jit, static_argnames=("k", "mask"))
def top_k_tokens(model: Transformer, batch: Batch, *, k: int, mask: int | None = None) -> tuple[Array, Array]:
    """Return the ``k`` likeliest tokens of every position, the likeliest first, and their probabilities.

    The tokens are int32 [B,T,k], the probabilities [B,T,k]. ``mask`` is needed if the batch has masks.
    """
    logits = model(batch) if mask is None else _predict(model, batch, mask)
    probabilities, tokens = jax.lax.top_k(jax.nn.softmax(logits), k)
    return tokens, probabilities


def _predict(model: Transformer, batch: Batch, mask: int) -> Array:
    """Return the logits of all positions, float32 [B,S,V].

    A model with a query stream (XLNet) predicts the masked tokens by it, from the tokens that are no masks.
    """
    if "query-stream" not in model.config.heads:
        return model(batch)
    order = _is_masked(batch, mask).astype(jnp.int32)
    return model(replace(batch, encoder=replace(batch.side("encoder"), prediction_order=order)))


def _is_masked(batch: Batch, mask: int) -> Array:
    """Return where the encoder's text has a mask, bool [B,S]."""
    side = batch.side("encoder")
    is_mask = jnp.asarray(side.tokens) == mask
    return is_mask if side.segment_ids is None else is_mask & (jnp.asarray(side.segment_ids) > 0)


def _fill_logits(model: Transformer, batch: Batch, tokens: Array, mask: int) -> Array:
    """Return the logits of all positions of texts ``tokens`` [B,S], float32 [B,S,V]; -inf for the mask."""
    batch = replace(batch, encoder=replace(batch.side("encoder"), tokens=tokens))
    return _predict(model, batch, mask).at[:, :, mask].set(-jnp.inf)


def _ranks(values: Array, where: Array) -> Array:
    """Return the rank of each value [B,S] in its row, the lowest first; those not in ``where`` come last."""
    return jnp.argsort(jnp.argsort(jnp.where(where, values, jnp.inf), axis=-1), axis=-1)


@partial(jax.jit, static_argnames=("iterations", "mask"))
def mask_predict(model: Transformer, batch: Batch, *, iterations: int, mask: int) -> Array:
    """Fill every mask of the text by mask-predict (Ghazvininejad et al. 2019); returns the text, int32 [B,S].

    Each of T passes predicts all masked positions at once. Of the n positions that were masked at first, pass
    t, counted from 0, masks the n (T - t) / T with the least probable tokens again: pass 0 masks all of them.
    """
    to_fill = _is_masked(batch, mask)
    count = to_fill.sum(-1)

    def predict_again(t, state):
        tokens, confidence = state
        num_masked = count * (iterations - t) // iterations
        masked = (_ranks(confidence, to_fill) < num_masked[:, None]) & to_fill
        probabilities = jax.nn.softmax(_fill_logits(model, batch, jnp.where(masked, mask, tokens), mask))
        tokens = jnp.where(masked, probabilities.argmax(-1), tokens).astype(jnp.int32)
        return tokens, jnp.where(masked, probabilities.max(-1), confidence)

    tokens = jnp.asarray(batch.side("encoder").tokens, jnp.int32)
    confidence = jnp.zeros(tokens.shape, jnp.float32)
    return jax.lax.fori_loop(0, iterations, predict_again, (tokens, confidence))[0]


@partial(jax.jit, static_argnames="mask")
def gibbs(model: Transformer, batch: Batch, key: Array, *, iterations: int, mask: int) -> Array:
    """Fill every mask by Gibbs sampling (Wang and Cho 2019); returns the text, int32 [B,S].

    Each round visits all positions that were masked at first, one by one, in a random order for each row and
    round: the position is masked again, and its token is sampled from the model's prediction. If the
    predictions are the conditional probabilities of one joint distribution, the samples converge to it. The
    same ``key`` gives the same text.
    """
    to_fill = _is_masked(batch, mask)
    count = to_fill.sum(-1)
    visits = jnp.maximum(count.max(), 1)

    def visit(step, tokens):
        turn = step % visits
        shuffled = jax.random.uniform(jax.random.fold_in(key, 2 * (step // visits)), to_fill.shape)
        position = jnp.argsort(jnp.where(to_fill, shuffled, jnp.inf), axis=-1)[:, turn]
        is_visited = (jnp.arange(to_fill.shape[1])[None] == position[:, None]) & (turn < count)[:, None]
        logits = _fill_logits(model, batch, jnp.where(is_visited, mask, tokens), mask)
        logits = jnp.take_along_axis(logits, position[:, None, None], axis=1)[:, 0]
        drawn = jax.random.categorical(jax.random.fold_in(key, 2 * step + 1), logits)
        return jnp.where(is_visited, drawn[:, None], tokens).astype(jnp.int32)

    tokens = jnp.asarray(batch.side("encoder").tokens, jnp.int32)
    return jax.lax.fori_loop(0, iterations * visits, visit, tokens)


@partial(jax.jit, static_argnames="mask")
def metropolis_hastings(
    model: Transformer, batch: Batch, key: Array, *, iterations: int, mask: int
) -> tuple[Array, Array]:
    """Fill every mask by Metropolis-Hastings (Goyal et al. 2021); return the text, int32 [B,S].

    Also return which share of the proposals was accepted [B]. A proposal is a step of Gibbs sampling. It is
    accepted so that texts are drawn with a probability in proportion to exp(pseudo_log_likelihood), which
    exists even if the model's predictions are the conditional probabilities of no joint distribution. Each of
    the ``iterations`` rounds makes as many proposals as there are masks. A proposal needs a forward pass for
    every position of the text, to compute its pseudo-log-likelihood, and one more. The same ``key`` gives the
    same text.
    """
    to_fill = _is_masked(batch, mask)
    count = to_fill.sum(-1)
    visits = jnp.maximum(count.max(), 1)
    rows = jnp.arange(len(to_fill))

    def propose(step, state):
        tokens, likelihood, accepted = state
        position_key, token_key, accept_key = jax.random.split(jax.random.fold_in(key, step), 3)
        priority = jax.random.uniform(position_key, to_fill.shape)
        position = jnp.argmax(jnp.where(to_fill, priority, -1), axis=-1)
        has_turn = step % visits < count
        logits = _fill_logits(model, batch, tokens.at[rows, position].set(mask), mask)
        log_p = jax.nn.log_softmax(logits[rows, position])
        new, old = jax.random.categorical(token_key, log_p), tokens[rows, position]
        proposed = tokens.at[rows, position].set(new)
        proposed_likelihood = pseudo_log_likelihood(model, batch, proposed, mask=mask)
        gain = proposed_likelihood - likelihood + log_p[rows, old] - log_p[rows, new]
        is_accepted = has_turn & (jnp.log(jax.random.uniform(accept_key, gain.shape)) < gain)
        return (
            jnp.where(is_accepted[:, None], proposed, tokens),
            jnp.where(is_accepted, proposed_likelihood, likelihood),
            accepted + is_accepted,
        )

    gibbs_key, key = jax.random.split(key)
    start = gibbs(model, batch, gibbs_key, iterations=1, mask=mask)
    likelihood = pseudo_log_likelihood(model, batch, start, mask=mask)
    state = (start, likelihood, jnp.zeros(len(to_fill), jnp.int32))
    tokens, _, accepted = jax.lax.fori_loop(0, iterations * visits, propose, state)
    return tokens, accepted / jnp.maximum(iterations * count, 1)


def pseudo_log_likelihood(model: Transformer, batch: Batch, tokens: Array, *, mask: int) -> Array:
    """Return the sum of the log-probabilities of all tokens [B,S] of texts, each masked alone, [B] in nats.

    Source: Salazar et al. 2020, section 2.
    """
    segments = batch.side("encoder").segment_ids
    is_text = jnp.ones(tokens.shape, bool) if segments is None else jnp.asarray(segments) > 0

    def add(position, total):
        logits = _fill_logits(model, batch, tokens.at[:, position].set(mask), mask)
        log_p = jax.nn.log_softmax(logits[:, position])
        own = jnp.take_along_axis(log_p, tokens[:, position][:, None], axis=-1)[:, 0]
        return total + jnp.where(is_text[:, position], own, 0)

    return jax.lax.fori_loop(0, tokens.shape[1], add, jnp.zeros(len(tokens), jnp.float32))


@partial(jax.jit, static_argnames=("iterations", "mask"))
def ancestral(model: Transformer, batch: Batch, key: Array, *, iterations: int, mask: int) -> Array:
    """Fill every mask by ancestral sampling of masked diffusion; returns the text, int32 [B,S].

    Time goes from 1 to 0 in equal steps. In the step from time t to s each mask is replaced with probability
    (t - s) / t, by a token that is sampled from the model's prediction (Sahoo et al. 2024, equation 7 with
    the log-linear schedule). Masks that are replaced in one step are sampled independently, so that the
    samples follow the model's distribution as the number of ``iterations`` grows. The same ``key`` gives the
    same text.
    """
    to_fill = _is_masked(batch, mask)

    def denoise(step, tokens):
        choice_key, token_key = jax.random.split(jax.random.fold_in(key, step))
        chosen = jax.random.uniform(choice_key, tokens.shape) < 1 / (iterations - step)  # at the end, all
        logits = _fill_logits(model, batch, tokens, mask)
        drawn = jax.random.categorical(token_key, logits)
        return jnp.where(to_fill & (tokens == mask) & chosen, drawn, tokens).astype(jnp.int32)

    tokens = jnp.asarray(batch.side("encoder").tokens, jnp.int32)
    return jax.lax.fori_loop(0, iterations, denoise, tokens)


@partial(jax.jit, static_argnames=("iterations", "mask", "temperature"))
def most_confident_first(
    model: Transformer, batch: Batch, key: Array, *, iterations: int, mask: int, temperature: float
) -> Array:
    """Fill every mask, the most confident predictions first; returns the text, int32 [B,S].

    Each pass predicts a token for every mask and keeps the most probable ones. Every pass keeps the same
    number: of n masks, n (T - t) / T are left after t of T passes. This is LLaDA's low-confidence remasking
    (Nie et al. 2025, section 2.4). Unlike ``mask_predict`` it predicts no position again. Tokens are the
    likeliest ones at temperature 0, else they are sampled.
    """
    to_fill = _is_masked(batch, mask)
    count = to_fill.sum(-1)

    def predict(step, tokens):
        logits = _fill_logits(model, batch, tokens, mask)
        if temperature:
            predicted = jax.random.categorical(jax.random.fold_in(key, step), logits / temperature)
        else:
            predicted = logits.argmax(-1)
        probabilities = jnp.take_along_axis(jax.nn.softmax(logits), predicted[..., None], axis=-1)[..., 0]
        is_mask = to_fill & (tokens == mask)
        num_left = count * (iterations - 1 - step) // iterations
        is_kept = is_mask & (_ranks(probabilities, is_mask) >= num_left[:, None])
        return jnp.where(is_kept, predicted, tokens).astype(jnp.int32)

    tokens = jnp.asarray(batch.side("encoder").tokens, jnp.int32)
    return jax.lax.fori_loop(0, iterations, predict, tokens)


def infill(model: Transformer, batch: Batch, *, max_length: int, k: int) -> tuple[np.ndarray, np.ndarray]:
    """Return the ``k`` best answers of an encoder-decoder by beam search, and their probabilities.

    The answers are int32 [B,k,max_length], the probabilities [B,k]. BART answers with the whole text (Lewis
    et al. 2020), T5 with the spans that the sentinels replace (``sentinel_spans``).
    """
    tokens, scores = beam_search(model, batch, Decoding(max_length, beams=k, length_penalty=0.0))
    return np.asarray(tokens), np.exp(np.asarray(scores))


def sentinel_spans(
    answer: Sequence[int], sentinels: Sequence[int], lowest_sentinel_id: int
) -> list[list[int] | None]:
    """Return the ids that follow each of ``sentinels`` in an answer of T5; None for one that it lacks.

    A span ends at the next sentinel, which is any id from ``lowest_sentinel_id`` on, or at the end of the
    answer (Raffel et al. 2020).
    """
    spans: dict[int, list[int]] = {}
    span: list[int] = []
    for token in answer:
        if token >= lowest_sentinel_id:
            span = []
            spans.setdefault(token, span)  # if a sentinel is repeated, its first span counts
        else:
            span.append(token)
    return [spans.get(sentinel) for sentinel in sentinels]

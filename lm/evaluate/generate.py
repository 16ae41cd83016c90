"""Autoregressive decoding with a KV cache: greedy, by sampling, or by beam search.

A batch holds encoder inputs, or decoder prompts as the decoder reads them, with a start token if the model
has one: the first generated token follows the last prompt token. Rows may differ in length and be padded on
either side: padding is where segment ids are 0, whatever the tokens there are. A row that is all padding gets
no answer.
"""

from dataclasses import replace
from functools import partial
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax import Array

from lm.batch import Batch, Side
from lm.config.base import SettingError
from lm.config.decoding import Decoding
from lm.config.model import ModelConfig
from lm.evaluate import beam_search as beam_steps
from lm.evaluate.beam_search import T5_RULES, BeamRules, Search
from lm.evaluate.sampling import next_token
from lm.nn.attention_inputs import segments_of
from lm.nn.cache import Cache
from lm.nn.ensemble import Ensemble
from lm.nn.transformer import Transformer

# The fields of a prompt's side; positions follow from them.
PROMPT_FIELDS = ("tokens", "segment_ids", "token_types", "causal_attention", "global_attention")

Model = Transformer | Ensemble


class Decoded(NamedTuple):
    """The tokens that were written."""

    tokens: Array  # int32 [B,max_length], padded after EOS
    lengths: Array  # int32 [B]: tokens written, EOS counted; the highest is the number of steps


class Prefilled(NamedTuple):
    """Holds what a model computed from the prompts of a batch, for the answers to go on from."""

    logits: Array  # float32 [B,V] of the first token of each answer
    cache: Any  # for the other tokens: a ``Cache``, or one for each member of an ensemble
    is_padding: Array  # bool [B]: rows that are all padding, and get no answer


def greedy(model: Model, batch: Batch, *, max_length: int) -> Array:
    """Return the likeliest token at each step, int32 [B,max_length], up to and with EOS, then padding."""
    return decode(model, batch, Decoding(max_length)).tokens


def decode(model: Model, batch: Batch, decoding: Decoding, *, key: Array | None = None) -> Decoded:
    """Write the likeliest tokens, or sampled ones, one by one.

    ``key`` is needed to sample. Compiles once for equal shapes and ``decoding``. Raises SettingError for
    beams, which only ``beam_search`` has.
    """
    if decoding.beams > 1:
        raise SettingError(f"beams={decoding.beams} should be 1: call beam_search for several")
    return _decode(model, _prompt(model, batch), key, decoding=decoding)


def beam_search(
    model: Model, batch: Batch, decoding: Decoding, *, rules: BeamRules = T5_RULES
) -> tuple[Array, Array]:
    """Return the answers of a beam search, best first, and their scores.

    The tokens are int32 [B,beams,max_length], padded after EOS, the scores float32 [B,beams]. Raises
    SettingError for a temperature: a search does not sample.
    """
    if decoding.temperature:
        raise SettingError(f"temperature={decoding.temperature} should be 0: call decode to sample")
    return _beam_search(model, _prompt(model, batch), search=Search(decoding, rules))


def prompt_batch(config: ModelConfig, tokens: np.ndarray, segment_ids: np.ndarray) -> Batch:
    """Return the batch of prompts [B,T]: the inputs of the encoder if there is one, else of the decoder.

    A prefix decoder sees all of a prompt as its prefix.
    """
    if config.has_encoder:
        return Batch(encoder=Side(tokens=tokens, segment_ids=segment_ids))
    prefix = segment_ids if config.architecture == "prefix-decoder" else None
    return Batch(decoder=Side(tokens=tokens, segment_ids=segment_ids, causal_attention=prefix))


def _prompt(model: Model, batch: Batch) -> Batch:
    """Return a batch of only the fields that decoding reads, so that others never cause a recompilation."""
    if not model.config.has_decoder:
        raise SettingError("model.architecture='encoder' has no decoder to write with")
    name = "encoder" if model.config.has_encoder else "decoder"
    side = batch.side(name)
    return Batch(**{name: Side(**{field: getattr(side, field) for field in PROMPT_FIELDS})})


@partial(jax.jit, static_argnames="decoding")
def _decode(model, batch, key, *, decoding):
    special = model.config.special
    logits, cache, done = _first_logits(model, batch, decoding.max_length)
    model, cache = model.unstack(cache)  # separate arrays per layer: slices would be copied at every token

    def unfinished(state):
        decoded, done, *_ = state
        return (decoded.lengths.max() < decoding.max_length) & ~done.all()

    def append_token(decoded, done, logits):
        step = decoded.lengths.max()  # the number of tokens in every unfinished row
        step_key = None if key is None else jax.random.fold_in(key, step)
        token = next_token(decoding, logits, step_key)
        token = jnp.where(done, special.pad, token)
        decoded = Decoded(decoded.tokens.at[:, step].set(token), decoded.lengths + ~done)
        if special.eos is not None:
            done = done | (token == special.eos)
        return decoded, done, token

    def advance(state):
        decoded, done, token, cache = state
        logits, cache = model.step(token, cache)
        return *append_token(decoded, done, logits), cache

    tokens = jnp.full((len(done), decoding.max_length), special.pad, jnp.int32)
    decoded = Decoded(tokens, jnp.zeros(len(done), jnp.int32))
    return jax.lax.while_loop(unfinished, advance, (*append_token(decoded, done, logits), cache))[0]


def _first_logits(model, batch, max_length):
    """Return what the model computed from the prompts, in a cache with room for ``max_length`` tokens more.

    Raises SettingError if prompts, with their padding, and answers exceed the last position.
    """
    side = batch.side("encoder" if model.config.has_encoder else "decoder")
    tokens, segments = side.tokens, segments_of(side)
    # A cache holds a row's text from its first slot on, so padding moves to the right.
    order = jnp.argsort(segments == 0, axis=1, stable=True)
    batch = batch.map(lambda values: jnp.take_along_axis(values, order, axis=1))
    if model.config.has_encoder:
        start_token = model.config.special.start
        if start_token is None:
            message = "model.special.start=None: an encoder-decoder needs a token to start answers with"
            raise SettingError(message)
        start = jnp.full((len(tokens), 1), start_token, jnp.int32)
        batch = replace(batch, decoder=Side(tokens=start))
    length = batch.side("decoder").tokens.shape[1] + max_length - 1  # the last token is not read
    longest = model.config.positions.max_length
    if model.config.has_max_length and length > longest:
        raise SettingError(
            f"prompts and answers of {max_length} tokens need {length} positions and have "
            f"model.positions.max_length={longest}: shorten either, or the padding of the prompts"
        )
    logits, cache = model.prefill(batch, length)
    return Prefilled(logits, cache, is_padding=jnp.logical_not((segments > 0).any(-1)))


@partial(jax.jit, static_argnames="search")
def _beam_search(model, batch, *, search):
    special = model.config.special
    count, max_length = search.decoding.beams, search.decoding.max_length
    logits, cache, done = _first_logits(model, batch, max_length)
    rows = jnp.arange(len(done))

    def choose(beams, logits, step):
        log_probabilities = jax.nn.log_softmax(logits).reshape(len(done), count, -1)
        return beam_steps.extend_beams(search, beams, log_probabilities, step, special.eos)

    def unfinished(state):
        step, beams, *_ = state
        return (step < max_length) & ~beams.done.all()

    def advance(state):
        step, beams, parent, token, cache = state
        order = (rows[:, None] * count + parent).reshape(-1)
        cache = _map_caches(lambda cache: cache.reorder(order), cache)
        logits, cache = model.step(token.reshape(-1), cache)
        return step + 1, *choose(beams, logits, step), cache

    beams = beam_steps.initial_beams(search, ~done, special.pad)
    first = choose(beams, jnp.repeat(logits, count, axis=0), 0)
    model, cache = model.unstack(_map_caches(lambda cache: cache.repeat_beams(count), cache))
    step, beams, *_ = jax.lax.while_loop(unfinished, advance, (1, *first, cache))
    return beam_steps.rank_sequences(search, beams, step, special.pad)


def _map_caches(change, cache):
    """Return ``change`` of a cache, or of the cache of each member of an ensemble."""
    return change(cache) if isinstance(cache, Cache) else tuple(map(change, cache))

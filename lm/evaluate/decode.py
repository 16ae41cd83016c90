"""Writing tokens one after another, over a cache: greedily, by drawing, or with beams.

A batch is encoder features, or the prompts of a decoder, shifted, so that the last token is the one that the
first answer follows. Rows may differ in length and be padded on either side: padding is where segment ids are
0, whatever the tokens there are. A row that is all padding gets no answer.
"""

from collections.abc import Callable
from functools import partial
from typing import NamedTuple

import jax
import jax.numpy as jnp

from lm.nn.cache import Cache
from lm.nn.config import SpecialTokens
from lm.nn.ensemble import Ensemble
from lm.nn.transformer import Batch, Transformer
from lm.ops.decoding import beams as searching
from lm.ops.decoding import sampling
from lm.settings import SettingError

# positions follow
PROMPT = ("input_tokens", "segment_ids", "token_types", "causal_attention", "global_attention")

Model = Transformer | Ensemble
Choose = Callable[[jax.Array, jax.Array | None], jax.Array]  # (logits [B,V], key) -> tokens int32 [B]


class Decoded(NamedTuple):
    """What was written."""

    tokens: jax.Array  # int32 [B,max_length], padded after EOS
    lengths: jax.Array  # int32 [B]: tokens written, EOS counted; the highest is the number of steps
    # [B,max_length,...]: what ``record`` made of each step's logits, until all are done
    record: jax.Array | None


def greedy(model: Model, batch: Batch, *, max_length: int) -> jax.Array:
    """int32 [B,max_length]: the likeliest token at each step, up to and with EOS, then padding."""
    return decode(model, batch, max_length=max_length, choose=sampling.greedy, key=None).tokens


def decode(
    model: Model,
    batch: Batch,
    *,
    max_length: int,
    choose: Choose,
    key: jax.Array | None,
    special: SpecialTokens | None = None,
    record: Callable[[jax.Array], jax.Array] | None = None,
) -> Decoded:
    """The tokens as ``choose`` has them; compiles once for equal shapes, ``choose`` and ``record``.

    ``special``: ids that pad, end and start, the model's own by default. ``record`` maps the logits [B,V] of
    a step to what is to be kept of them.
    """
    special = special or model.config.special
    return _decode(
        model,
        _prompt(model, batch),
        key,
        max_length=max_length,
        choose=choose,
        special=special,
        record=record,
    )


def _prompt(model: Model, batch: Batch) -> Batch:
    """The features that are read; others may change without anything being compiled anew."""
    if not model.config.has_decoder:
        raise SettingError("model.architecture='encoder' has no decoder to write with")
    side = "encoder" if model.config.has_encoder else "decoder"
    return {f"{side}_{name}": batch[f"{side}_{name}"] for name in PROMPT if f"{side}_{name}" in batch}


@partial(jax.jit, static_argnames=("max_length", "choose", "special", "record"))
def _decode(model, batch, key, *, max_length, choose, special, record):
    logits, cache, done = _begin(model, batch, max_length, special)

    def unfinished(state):
        decoded, done, *_ = state
        return (decoded.lengths.max() < max_length) & ~done.all()

    def write(decoded, done, logits):
        step = decoded.lengths.max()  # every row that is not done has as many
        token = choose(logits, None if key is None else jax.random.fold_in(key, step))
        token = jnp.where(done, special.pad, token)
        kept = None if record is None else decoded.record.at[:, step].set(record(logits))
        decoded = Decoded(decoded.tokens.at[:, step].set(token), decoded.lengths + ~done, kept)
        return decoded, done if special.eos is None else done | (token == special.eos), token

    def advance(state):
        decoded, done, token, cache = state
        logits, cache = model.step(token, cache)
        return *write(decoded, done, logits), cache

    tokens = jnp.full((len(done), max_length), special.pad, jnp.int32)
    kept = None if record is None else jax.eval_shape(record, logits)
    kept = kept and jnp.zeros((len(done), max_length, *kept.shape[1:]), kept.dtype)
    decoded = Decoded(tokens, jnp.zeros(len(done), jnp.int32), kept)
    return jax.lax.while_loop(unfinished, advance, (*write(decoded, done, logits), cache))[0]


def _begin(model, batch, max_length, special):
    """Logits [B,V] of the first token, the cache to write the others with, and the rows [B] that are all
    padding.
    """
    side = "encoder" if model.config.has_encoder else "decoder"
    tokens = batch[f"{side}_input_tokens"]
    segments = batch.get(f"{side}_segment_ids", jnp.ones_like(tokens))
    # A cache holds a row's text from its first slot on, so padding moves to the right.
    order = jnp.argsort(segments == 0, axis=1, stable=True)
    batch = {name: jnp.take_along_axis(values, order, axis=1) for name, values in batch.items()}
    if model.config.has_encoder:
        if special.start is None:
            raise SettingError(
                "model.special.start=None: an encoder-decoder needs a token to start answers with"
            )
        batch["decoder_input_tokens"] = jnp.full((len(tokens), 1), special.start, jnp.int32)
    logits, cache = model.prefill(batch, batch["decoder_input_tokens"].shape[1] + max_length - 1)
    return logits, cache, ~(segments > 0).any(-1)


def beam_search(
    model: Model,
    batch: Batch,
    *,
    beams: int,
    max_length: int,
    length_penalty: float,
    early_stopping: bool | str,
    rules: str,
    special: SpecialTokens | None = None,
) -> tuple[jax.Array, jax.Array]:
    """tokens int32 [B,beams,max_length], padded after EOS, and scores float32 [B,beams], best first.

    ``early_stopping`` (True, False or "never") and ``rules`` ("t5" or "transformers") as in ``beams.Search``.
    By the latter one beam is greedy decoding; by T5's a sequence may also end in its second-best token.
    """
    search = searching.Search(beams, max_length, length_penalty, early_stopping, rules)
    return _beam_search(model, _prompt(model, batch), search=search, special=special or model.config.special)


@partial(jax.jit, static_argnames=("search", "special"))
def _beam_search(model, batch, *, search, special):
    logits, cache, done = _begin(model, batch, search.max_length, special)
    rows = jnp.arange(len(done))

    def choose(beams, logits, step):
        log_probabilities = jax.nn.log_softmax(logits).reshape(len(done), search.beams, -1)
        return searching.advance(search, beams, log_probabilities, step, special.eos)

    def unfinished(state):
        step, beams, *_ = state
        return (step < search.max_length) & ~beams.done.all()

    def advance(state):
        step, beams, parent, token, cache = state
        order = (rows[:, None] * search.beams + parent).reshape(-1)
        cache = _each(lambda cache: _reorder(cache, order), cache)
        logits, cache = model.step(token.reshape(-1), cache)
        return step + 1, *choose(beams, logits, step), cache

    beams = searching.begin(search, ~done, special.pad)
    first = choose(beams, jnp.repeat(logits, search.beams, axis=0), 0)
    cache = _each(lambda cache: _widen(cache, search.beams), cache)
    step, beams, *_ = jax.lax.while_loop(unfinished, advance, (1, *first, cache))
    return searching.ranked(search, beams, step, special.pad)


def _each(change, cache):
    """``change`` of a cache, or of every one of an ensemble's."""
    return change(cache) if isinstance(cache, Cache) else tuple(map(change, cache))


def _widen(cache: Cache, beams: int) -> Cache:
    """The cache with each row ``beams`` times."""
    stacks = jax.tree.map(
        lambda x: jnp.repeat(x, beams, axis=1), (cache.self_attention, cache.cross_attention)
    )
    length, mask = jax.tree.map(lambda x: jnp.repeat(x, beams, axis=0), (cache.length, cache.cross_mask))
    return Cache(stacks[0], length, stacks[1], mask)


def _reorder(cache: Cache, rows: jax.Array) -> Cache:
    """The cache with ``rows`` in place of its own; a row's beams have lengths and encoder's output in
    common.
    """
    return cache._replace(
        self_attention=jax.tree.map(lambda x: jnp.take(x, rows, axis=1), cache.self_attention)
    )

"""The state of a beam search and a step of it; it reads log-probabilities and knows no model.

Each of B rows has K running beams, and the K best finished sequences. The score of a sequence is the sum of
its log-probabilities, EOS included, divided by a length penalty.
"""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, Literal, NamedTuple

import jax
import jax.numpy as jnp
from jax import Array

from lm.config.base import SettingError
from lm.config.decoding import Decoding


@dataclass(frozen=True)
class BeamRules:
    """The rules in which implementations of beam search differ."""

    length_penalty: Callable[[Any, float], Any]  # (length, exponent) -> divisor of the sum
    # A sequence finishes only if its EOS is among the (this number * K) best continuations of its row.
    eos_candidates_per_beam: int
    # What becomes of a beam that reaches max_length without EOS. "finished": it counts as finished;
    # "fallback": it is returned only if fewer than K sequences have finished.
    truncated_beams: Literal["finished", "fallback"]
    # When to stop once K have finished. True: at once; False: when no running beam scores higher at its
    # current length; "never": when none could at any length.
    early_stopping: bool | Literal["never"]

    def __post_init__(self):
        if self.early_stopping not in (True, False, "never"):
            raise SettingError(f"early_stopping={self.early_stopping!r} should be True, False or 'never'")


def shifted_length_penalty(length: Any, alpha: float) -> Any:
    """Return ((5 + length) / 6)^alpha (Wu et al. 2016, equation 14)."""
    return ((5 + length) / 6) ** alpha


def plain_length_penalty(length: Any, alpha: float) -> Any:
    """Return length^alpha, by which transformers divides."""
    return length**alpha


T5_RULES = BeamRules(  # T5X
    shifted_length_penalty, 2, truncated_beams="fallback", early_stopping="never"
)
# With these rules one beam is greedy decoding; with T5_RULES it may end by an EOS that is second best.
TRANSFORMERS_RULES = BeamRules(plain_length_penalty, 1, truncated_beams="finished", early_stopping=False)


class Search(NamedTuple):
    """The settings of a beam search, and the rules of an implementation."""

    decoding: Decoding
    rules: BeamRules

    def score(self, sums: Array, length: Array | int) -> Array:
        """Return the scores of sequences of ``length`` tokens, from their summed log-probabilities."""
        return sums / self.rules.length_penalty(jnp.float32(length), self.decoding.length_penalty)


class Beams(NamedTuple):
    """The state of a search; sums and scores are minus infinity where there is no sequence."""

    tokens: Array  # int32 [B,K,T] of the running beams, best first
    sums: Array  # float32 [B,K]
    finished: Array  # int32 [B,K,T], best first
    scores: Array  # float32 [B,K]
    done: Array  # bool [B]: no running beam can change the finished ones


class Extension(NamedTuple):
    """Holds the beams of a search after one more token, and what each running one extends."""

    beams: Beams
    parent: Array  # int32 [B,K]: index of the beam that it extends
    token: Array  # int32 [B,K]: its last token


def initial_beams(search: Search, has_prompt: Array, pad: int) -> Beams:
    """Return a state with one empty beam in each row where ``has_prompt``, bool [B], is true.

    The other rows are done.
    """
    shape = (has_prompt.shape[0], search.decoding.beams)
    tokens = jnp.full((*shape, search.decoding.max_length), pad, jnp.int32)
    minus_infinity = jnp.full(shape, -jnp.inf)
    sums = minus_infinity.at[:, 0].set(jnp.where(has_prompt, 0.0, -jnp.inf))
    return Beams(tokens, sums, finished=tokens, scores=minus_infinity, done=~has_prompt)


def extend_beams(
    search: Search, beams: Beams, log_probabilities: Array, step: Array, eos: int | None
) -> Extension:
    """Extend the beams by the token at position ``step``, from log-probabilities [B,K,V]."""
    count, vocabulary, length = search.decoding.beams, log_probabilities.shape[-1], step + 1
    sums = (beams.sums[:, :, None] + log_probabilities).reshape(len(beams.sums), -1)
    sums, index = blockwise_top_k(sums, 2 * count)  # 2 K, so that K can go on even if K end
    parent, token = index // vocabulary, (index % vocabulary).astype(jnp.int32)
    tokens = _gather(beams.tokens, parent).at[:, :, step].set(token)
    is_eos = jnp.zeros_like(token, bool) if eos is None else token == eos

    finishing = is_eos & (jnp.arange(2 * count) < search.rules.eos_candidates_per_beam * count)[None]
    if search.rules.truncated_beams == "finished":
        finishing |= (length == search.decoding.max_length) & (jnp.arange(2 * count) < count)[None]
    new = jnp.where(finishing & ~beams.done[:, None], search.score(sums, length), -jnp.inf)
    scores, chosen = jax.lax.top_k(jnp.concatenate([beams.scores, new], axis=1), count)
    finished = _gather(jnp.concatenate([beams.finished, tokens], axis=1), chosen)

    sums, chosen = jax.lax.top_k(jnp.where(is_eos, -jnp.inf, sums), count)
    done = beams.done | _is_finished(search, sums[:, 0], scores[:, -1], length)
    parent, token = _gather(parent, chosen), _gather(token, chosen)
    return Extension(Beams(_gather(tokens, chosen), sums, finished, scores, done), parent, token)


def blockwise_top_k(values: Array, count: int) -> tuple[Array, Array]:
    """Return the ``count`` highest of values [B,L] and their indices, as ``jax.lax.top_k`` does.

    ``top_k`` sorts all values. This sorts only the ``count`` blocks with the highest maxima: no other block
    can hold one of the highest values.
    """
    block = 128
    if values.shape[1] // block <= count:
        return jax.lax.top_k(values, count)
    padded = jnp.pad(values, ((0, 0), (0, -values.shape[1] % block)), constant_values=-jnp.inf)
    padded = padded.reshape(len(values), -1, block)
    chosen = jnp.sort(jax.lax.top_k(padded.max(-1), count)[1], axis=1)  # so ties go to the first
    best, position = jax.lax.top_k(_gather(padded, chosen).reshape(len(values), -1), count)
    return best, _gather(chosen, position // block) * block + position % block


def _is_finished(search: Search, best: Array, worst: Array, length: Array) -> Array:
    """Return which rows are done, bool [B]: K are finished, and no running beam can score higher.

    ``best`` [B] is the highest sum of a running beam, ``worst`` [B] the lowest score of a finished one.
    ``early_stopping`` decides which score a running beam may still reach.
    """
    bound = search.score(best, length)
    if search.rules.early_stopping == "never":  # sums only fall, but a longer sequence may divide by more
        bound = jnp.maximum(bound, search.score(best, search.decoding.max_length))
    done = worst >= bound
    if search.rules.early_stopping is True:
        done |= worst > -jnp.inf
    return done


def rank_sequences(search: Search, beams: Beams, length: Array, pad: int) -> tuple[Array, Array]:
    """Return tokens [B,K,T] and scores [B,K], best first; running beams of ``length`` tokens come last."""
    scores = jnp.concatenate([beams.scores, search.score(beams.sums, length)], axis=1)
    count = search.decoding.beams
    unfinished = (jnp.arange(scores.shape[1]) >= count)[None] | (scores == -jnp.inf)
    order = jnp.lexsort((-scores, unfinished), axis=-1)[:, :count]
    tokens = _gather(jnp.concatenate([beams.finished, beams.tokens], axis=1), order)
    scores = _gather(scores, order)
    return jnp.where((scores == -jnp.inf)[:, :, None], pad, tokens), scores


def _gather(values: Array, index: Array) -> Array:
    """Return values [B,K,...] at the indices [B,L] of their second axis: [B,L,...]."""
    return jnp.take_along_axis(values, index.reshape(*index.shape, *(1,) * (values.ndim - 2)), axis=1)

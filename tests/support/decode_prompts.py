"""Prompts of unequal lengths for decoding, models with other special tokens, and the logits of each step."""

from dataclasses import replace

import jax
import jax.numpy as jnp
import numpy as np
from small_models import logits_of_steps

from lm.batch import Batch, Side
from lm.evaluate.generate import _first_logits, _prompt

LENGTHS = np.array([5, 2, 0])  # of the prompts; the last row is padding


def prompts(architecture):
    """Three rows of prompts, or of encoder features."""
    tokens = np.random.default_rng(0).integers(2, 40, (3, 5))
    valid = (np.arange(5)[None] < LENGTHS[:, None]).astype(int)
    if "encoder" in architecture:
        return Batch(encoder=Side(tokens=tokens * valid, segment_ids=valid))
    # The whole prompt is the prefix.
    return Batch(decoder=Side(tokens=tokens * valid, segment_ids=valid, causal_attention=valid))


def with_special(model, special):
    """The model with these ids that pad, end and start its text; the arrays are shared."""
    changed = jax.tree.map(lambda leaf: leaf, model)
    changed.config = replace(changed.config, special=special)
    return changed


@jax.jit
def cached_logits(model, batch, answers):
    """The logits [B,T,V] of each of the answers [B,T], by the cache of what stands before it."""
    first, cache, _ = _first_logits(model, _prompt(model, batch), answers.shape[1])
    model, cache = model.unstack(cache)
    others = logits_of_steps(model, cache, answers[:, :-1])
    return jnp.concatenate([first[None], others]).swapaxes(0, 1)

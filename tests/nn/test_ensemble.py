"""Models that write together: the mean of their logits, before the softmax."""

from dataclasses import replace

import jax
import numpy as np
import pytest
from decode_prompts import prompts
from flax import nnx
from small_models import TINY, make

from lm.config.base import SettingError, changes
from lm.config.decoding import Decoding
from lm.evaluate.beam_search import T5_RULES
from lm.evaluate.generate import beam_search, greedy
from lm.nn.ensemble import Ensemble
from lm.nn.transformer import Transformer

BATCH = prompts("decoder")


def other(**settings):
    return Transformer(
        changes(TINY, {"architecture": "decoder", **settings}), nnx.Rngs(params=jax.random.key(1))
    )


def test_a_model_with_itself_writes_what_it_writes_alone():
    model = make("decoder")
    both = Ensemble([model, model])
    np.testing.assert_array_equal(greedy(both, BATCH, max_length=6), greedy(model, BATCH, max_length=6))
    search, rules = Decoding(4, beams=2), replace(T5_RULES, early_stopping=True)
    found, expected = (beam_search(writer, BATCH, search, rules=rules) for writer in (both, model))
    for one, due in zip(found, expected, strict=True):
        np.testing.assert_allclose(one, due, rtol=1e-6)


def test_logits_are_the_mean_at_every_step_and_members_may_differ_in_size():
    members = [make("decoder"), other(d_model=8, num_decoder_layers=1)]
    tokens = np.array([5, 6, 7])

    @jax.jit
    def logits(model):
        first, cache = model.prefill(BATCH, 7)
        return first, model.step(tokens, cache)[0]

    one, two, mean = logits(members[0]), logits(members[1]), logits(Ensemble(members))
    for a, b, found in zip(one, two, mean, strict=True):
        np.testing.assert_allclose(found, (a + b) / 2, rtol=1e-5, atol=1e-6)
        assert np.abs(a - b).max() > 0.1


def test_members_must_mean_the_same_by_a_token():
    with pytest.raises(SettingError, match="model.vocab_size"):
        Ensemble([make("decoder"), other(vocab_size=50)])

"""The cache of decoding: what is written into it."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from small_models import make

from lm.batch import Batch, Side
from lm.nn.cache import KeyValue, LayerCache

LENGTH = 4
EMPTY = LayerCache(*jnp.zeros((2, 2, 1, LENGTH, 3)))


def tokens(count):
    """Keys and values of ``count`` tokens of two rows, all ones."""
    return KeyValue(*jnp.ones((2, 2, count, 1, 3)))


@pytest.mark.parametrize("count", [1, 2])
def test_what_does_not_fit_into_a_cache_is_nan_and_never_over_the_tokens_before_it(count):
    last = LENGTH - count
    key, value = jax.jit(LayerCache.write)(EMPTY, tokens(count), jnp.array([last, last + 1]))
    for written in (np.asarray(key), np.asarray(value)):
        assert written[0, 0, :, 0].tolist() == [0.0] * last + [1.0] * count
        assert np.isnan(written[1]).any() and not (written[1] == 1).any()


def test_a_token_beyond_the_cache_has_no_logits():
    model = make("decoder")
    _, cache = model.prefill(Batch(decoder=Side(tokens=np.array([[5, 6]]))), 3)
    logits, cache = model.step(np.array([7]), cache)
    assert np.isfinite(logits).all()
    logits, _ = model.step(np.array([8]), cache)
    assert np.isnan(logits).all()

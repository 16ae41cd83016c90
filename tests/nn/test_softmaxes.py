"""Laws of mixtures of softmaxes."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx
from small_models import TINY

from lm.batch import Batch, Side
from lm.config.base import SettingError, changes
from lm.nn.layers import num_parameters
from lm.nn.transformer import Transformer
from lm.train.flops import step_flops

PLAIN = changes(TINY, {"architecture": "decoder", "d_model": 8, "num_decoder_layers": 1})


def model(softmaxes):
    config = changes(PLAIN, {"output.softmaxes": softmaxes})
    return Transformer(config, nnx.Rngs(params=jax.random.key(0)))


X = np.random.default_rng(1).normal(size=(2, 15, 8)).astype(np.float32)
logits = jax.jit(Transformer.logits)


def test_softmaxes_that_are_equal_are_one_softmax_of_their_context():
    mixture, plain = model(3), model(1)
    kernel = mixture.mixture.contexts.kernel
    one = np.asarray(kernel[...])[:, :8]
    kernel[...] = jnp.asarray(np.tile(one, (1, 3)))
    expected = jax.nn.log_softmax(logits(plain, np.tanh(X @ one)))
    np.testing.assert_allclose(logits(mixture, X), expected, atol=1e-5)


def test_a_mixture_gives_probabilities_that_sum_to_one_and_a_matrix_of_higher_rank_than_one_softmax():
    ranks = {}
    for softmaxes in (1, 4):
        found = model(softmaxes)
        found.embed.table[...] = 5 * found.embed.table[...]
        log_probabilities = np.asarray(logits(found, X if softmaxes > 1 else 20 * X))
        if softmaxes > 1:
            np.testing.assert_allclose(np.exp(log_probabilities).sum(-1), 1, rtol=1e-5)
        log_probabilities = np.asarray(jax.nn.log_softmax(log_probabilities))
        ranks[softmaxes] = np.linalg.matrix_rank(log_probabilities.reshape(30, -1), tol=1e-3)
    assert ranks[1] <= 9 < ranks[4]


def test_its_parameters_and_operations_are_those_of_all_contexts_and_softmaxes():
    plain, mixture = (changes(PLAIN, {"output.softmaxes": softmaxes}) for softmaxes in (1, 4))
    assert num_parameters(model(4)) - num_parameters(model(1)) == 4 * 8 * 8 + 4 * 8
    more = step_flops(mixture, 1, 10, 10) - step_flops(plain, 1, 10, 10)
    assert more == 6 * 10 * (4 * 8 * 8 + 4 * 8 + 3 * 8 * 40)


def test_gradients_are_finite_where_a_token_has_no_probability():
    mixture = model(2)
    mixture.embed.table[...] = 1e4 * mixture.embed.table[...]
    batch = Batch(decoder=Side(tokens=np.array([[1, 2, 3]])))
    gradients = jax.jit(jax.grad(lambda model: model(batch).sum()))(mixture)
    assert all(np.isfinite(leaf).all() for leaf in jax.tree.leaves(gradients))


def test_a_mixture_needs_an_output_matrix():
    with pytest.raises(SettingError, match="model.output.softmaxes=2 needs an output matrix"):
        changes(PLAIN, {"output.softmaxes": 2, "output.logits": "none"})

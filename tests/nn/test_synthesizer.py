"""Laws of synthesizers. Packing and decoding of them are in test_transformer.py too."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx
from small_models import CONFIGS, TINY, example, features, make

from lm.config.base import SettingError, changes
from lm.nn.attention_inputs import AttentionInputs
from lm.nn.layers import num_parameters
from lm.nn.synthesizer import Synthesizer
from lm.train.flops import costs, step_flops


def synthesizer(logits, products="none", **new):
    config = changes(
        TINY, {"mixer.kind": "synthesizer", "mixer.logits": logits, "mixer.products": products, **new}
    )
    return Synthesizer(config, nnx.Rngs(params=jax.random.key(0)))


def weights(module, x):
    return module.weights(x, module.key_value(x, None), AttentionInputs())


TEXT, OTHER = jax.random.normal(jax.random.key(1), (2, 1, 6, 16))


@pytest.mark.parametrize("logits", ["dense", "random", "factorized"])
def test_weights_do_not_depend_on_the_keys_unless_products_are_added(logits):
    changed = TEXT.at[:, 2].set(OTHER[:, 2])
    alone, added = synthesizer(logits), synthesizer(logits, "added")
    before, after = weights(alone, TEXT), weights(alone, changed)
    others = np.array([0, 1, 3, 4, 5])
    np.testing.assert_array_equal(before[:, :, others], after[:, :, others])
    assert np.array_equal(before, after) == (logits != "dense")  # dense ones depend on the query
    assert np.abs(weights(added, TEXT) - weights(added, changed))[:, :, others].max() > 1e-4


def test_a_mixture_goes_from_the_products_alone_to_the_synthesized_logits_alone():
    mixed, added = synthesizer("random", "mixed"), synthesizer("random", "added")
    for name in ("query", "key", "random"):
        setattr(mixed, name, getattr(added, name))
    mixed.mixture[...] = 50.0
    np.testing.assert_allclose(weights(mixed, TEXT), weights(mixed, OTHER), atol=1e-6)
    mixed.mixture[...], added.random[...] = -50.0, jnp.zeros_like(added.random[...])
    np.testing.assert_allclose(weights(mixed, TEXT), weights(added, TEXT), atol=1e-6)


def test_factorized_logits_are_random_ones_of_low_rank():
    low, full = synthesizer("factorized", **{"mixer.rank": 3}), synthesizer("random")
    full.random[...] = low.left[...] @ low.right[...].swapaxes(1, 2)
    np.testing.assert_allclose(weights(low, TEXT), weights(full, TEXT), atol=1e-6)
    assert np.linalg.matrix_rank(full.random[0]) == 3


# 16 features, 4 heads of 8, 16 positions
@pytest.mark.parametrize(
    ("logits", "products", "parameters", "flops"),
    [
        ("dense", "none", 3 * 16 * 32 + 8 * 16, 10 * 2 * (3 * 16 * 32 + 4 * 8 * 16) + 2 * 10 * 10 * 32),
        ("random", "none", 2 * 16 * 32 + 4 * 16 * 16, 10 * 2 * 2 * 16 * 32 + 2 * 10 * 10 * 32),
        ("random", "mixed", 4 * 16 * 32 + 4 * 16 * 16 + 1, 10 * 2 * 4 * 16 * 32 + 2 * 10 * 10 * 2 * 32),
        ("factorized", "none", 2 * 16 * 32 + 2 * 4 * 16 * 16, 10 * 2 * 2 * 16 * 32 + 2 * 10 * 10 * 32),
    ],
)
def test_it_has_and_multiplies_the_matrices_that_it_reads(logits, products, parameters, flops):
    module = synthesizer(logits, products)
    assert (num_parameters(module), module.flops(10, 10)) == (parameters, flops)


def test_without_products_the_cache_holds_values_alone():
    alone, added = (
        changes(CONFIGS["decoder, random synthesizer"], {"mixer.products": products})
        for products in ("none", "added")
    )
    assert 2 * costs(alone, 10).cache == costs(added, 10).cache
    assert step_flops(alone, 1, 10, 10) < step_flops(added, 1, 10, 10)


def test_rows_longer_than_its_positions_are_refused():
    with pytest.raises(SettingError, match="rows of 17 tokens are longer than model.positions.max_length=16"):
        features(make("decoder, random synthesizer"), example(1, 5, 17))


@pytest.mark.parametrize(
    ("new", "message"),
    [
        ({"positions.kind": "rotary"}, "model.positions.kind='rotary'"),
        ({"attention.implementation": "flash"}, "model.attention.implementation='flash'"),
        ({"cross_attention.kind": "merged"}, "model.cross_attention.kind='merged'"),
        ({"lora.rank": 2, "lora.matrices": ("key", "value")}, "no matrix for key of"),
        ({"cross_attention.kind": "dot", "cross_attention.d_kv": 4}, "model.cross_attention.d_kv=4"),
    ],
)
def test_what_a_synthesizer_lacks_is_refused(new, message):
    with pytest.raises(SettingError, match=message):
        changes(TINY, {"mixer.kind": "synthesizer"} | new)

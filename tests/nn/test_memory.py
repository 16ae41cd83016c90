"""Laws of product-key memories. Packing and decoding are in test_transformer.py too."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx
from small_models import CONFIGS, MEMORY, TINY, example, loss_and_gradients, make, shapes

from lm.config.base import SettingError, changes
from lm.nn.memory import ProductKeyMemory, nearest_pairs
from lm.sharding import named
from lm.train.flops import costs, step_flops
from lm.train.optimizers import GradualUnfreezing

NAME = "product-key memory"
PLAIN, WITH_MEMORY = CONFIGS["encoder-decoder"], CONFIGS[NAME]
X = np.random.default_rng(1).normal(size=(2, 3, 16)).astype(np.float32)


def test_the_nearest_pairs_are_those_of_all_pairs():
    scores = np.random.default_rng(0).normal(size=(4, 2, 7)).astype(np.float32)
    sums = (scores[:, 0, :, None] + scores[:, 1, None, :]).reshape(4, 49)
    best, index = nearest_pairs(jnp.asarray(scores), 5)
    places = np.argsort(-sums, axis=1)[:, :5]
    np.testing.assert_allclose(best, np.take_along_axis(sums, places, 1), rtol=1e-6)
    np.testing.assert_array_equal(index, places)


def test_a_memory_of_which_every_value_is_read_is_attention_to_all_keys():
    config = changes(TINY, MEMORY | {"memory.neighbours": 6, "memory.heads": 1})
    memory = ProductKeyMemory(config, nnx.Rngs(params=jax.random.key(0)))

    @jax.jit
    def both(memory, x):
        """What the memory gives, and the attention."""
        query = memory.norm(memory.query(x).reshape(2, 3, 2, 2))
        halves = jnp.einsum("bthk,hmk->bthm", query, memory.keys[0])
        best, index = nearest_pairs(halves, 6)
        logits = (halves[:, :, 0, :, None] + halves[:, :, 1, None, :]).reshape(2, 3, 36)
        chosen = (jax.nn.one_hot(index, 36).sum(2) > 0) & (logits >= best[..., -1:])
        weights = jax.nn.softmax(logits, axis=-1, where=chosen)
        return memory(x), weights @ memory.values[...]

    found, expected = both(memory, X)
    np.testing.assert_allclose(found, expected, atol=1e-5)


def test_one_layer_of_the_decoder_has_it_in_place_of_its_feed_forward_layer():
    model = shapes(WITH_MEMORY)
    assert model.encoder.blocks.memory is None
    assert model.decoder.blocks.memory.values.shape == (1, 36, 16)
    assert [blocks.mlp.hidden.kernel.shape[0] for blocks in (model.encoder.blocks, model.decoder.blocks)] == [
        2,
        1,
    ]
    plain = named(shapes(PLAIN))
    for name, value in named(model).items():
        if ".mlp." not in name and ".memory." not in name:
            assert value.shape == plain[name].shape, name


def test_what_it_adds_is_counted():
    found, plain = costs(WITH_MEMORY, 10), costs(PLAIN, 10)
    query, keys, values = 16 * 8, 2 * 2 * 6 * 2, 36 * 16
    assert found.parameters - plain.parameters == query + 2 * 2 + keys + values - 2 * 16 * 24
    assert found.parameters - found.active_parameters == (36 - 2 * 3) * 16
    more = query + 2 * 2 * 6 * 2 + 2 * 3 * 16 - 2 * 16 * 24
    assert step_flops(WITH_MEMORY, 1, 10, 6) - step_flops(PLAIN, 1, 10, 6) == 6 * 6 * more


@pytest.mark.slow
def test_recomputed_stacks_give_the_same_loss_and_gradients_and_values_that_are_read_learn():
    batch, key = example(4, 5, 6), jax.random.key(7)
    expected = loss_and_gradients(make(NAME), batch, key)
    assert np.abs(expected["decoder.blocks.memory.values"]).max() > 0
    found = loss_and_gradients(make(NAME, **{"compile.remat": "full"}), batch, key)
    for name, value in expected.items():
        np.testing.assert_allclose(found[name], value, rtol=1e-5, atol=1e-5, err_msg=name)


def test_gradual_unfreezing_trains_it_with_its_layer():
    updates = {name: np.ones(value.shape, np.float32) for name, value in named(shapes(WITH_MEMORY)).items()}
    first, last = (GradualUnfreezing(WITH_MEMORY, 10)(updates, step) for step in (0, 9))
    name = "decoder.blocks.memory.values"  # of the first of two layers
    assert not first[name].any() and last[name].all()
    assert first["decoder.blocks.mlp.out.kernel"].all()  # of the last one


@pytest.mark.parametrize(
    "new",
    [
        {"experts.count": 2},
        {"shared_layers": True},
        {"mlp.activation": "none"},
        {"memory.layer": -3},
        {"memory.neighbours": 7},
        {"lora.rank": 1, "lora.matrices": ("mlp",)},
    ],
)
def test_it_needs_one_layer_with_a_feed_forward_layer_of_its_own(new):
    with pytest.raises(SettingError, match="model.memory"):
        changes(TINY, MEMORY | new)

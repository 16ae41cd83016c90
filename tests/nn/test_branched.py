"""Laws of the Weighted Transformer's branches. Packing and decoding are in test_transformer.py too."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx
from scipy.special import softmax
from small_models import CONFIGS, TINY, example, loss_and_gradients, make

from lm.config.base import SettingError, changes
from lm.nn.attention import Attention
from lm.nn.attention_inputs import AttentionInputs
from lm.train.flops import costs, step_flops

NAME, BRANCHES = "branches", {"attention.branching": "weighted"}


def drawn(*shape):
    return np.random.default_rng(1).normal(size=shape).astype(np.float32)


X = drawn(2, 3, 16)
attend = jax.jit(lambda attention, x: attention(x, AttentionInputs(), None, {})[0])
feed = jax.jit(lambda mlp, x: mlp(x, None))


def test_the_output_is_the_weighted_sum_of_each_heads_feed_forward_layer():
    attention = Attention(changes(TINY, BRANCHES), nnx.Rngs(params=jax.random.key(0)))
    branches = attention.branches
    first, second = drawn(2, 4)
    branches.concatenation_logits[...], branches.addition_logits[...] = map(jnp.asarray, (first, second))
    heads, expected = drawn(2, 3, 4, 8), 0
    for head in range(4):
        kernel = np.asarray(attention.out.kernel[...])[8 * head : 8 * head + 8]
        x = softmax(first)[head] * heads[:, :, head] @ kernel
        expected += softmax(second)[head] * np.asarray(feed(branches.mlp, x))
    combine = jax.jit(lambda attention, x, heads: attention.combine(x, heads))
    np.testing.assert_allclose(combine(attention, X, heads), expected, atol=1e-5)


def test_with_one_head_it_is_attention_and_then_the_feed_forward_layer():
    config = changes(TINY, BRANCHES | {"attention.num_heads": 1, "positions.kind": "none"})
    branched = Attention(config, nnx.Rngs(params=jax.random.key(0)))
    plain = jax.tree.map(lambda leaf: leaf, branched)
    plain.branches = None
    expected = feed(branched.branches.mlp, attend(plain, X))
    np.testing.assert_allclose(attend(branched, X), expected, atol=1e-5)


def test_blocks_have_no_other_feed_forward_layer_and_its_repetitions_are_counted():
    config, plain = CONFIGS[NAME], changes(TINY, {"mlp.activation": "none"})
    assert make(NAME).encoder.blocks.mlp is None
    mlp, weights = 3 * 16 * 24, 2 * 4
    # one in each layer of the encoder, two in each of the decoder
    assert costs(config, 10).parameters - costs(plain, 10).parameters == (2 + 4) * (mlp + weights)
    more = step_flops(config, 1, 10, 6) - step_flops(plain, 1, 10, 6)
    assert more == 3 * 2 * 4 * mlp * (2 * 10 + 4 * 6)


@pytest.mark.slow
def test_recomputed_stacks_give_the_same_loss_and_gradients_and_weights_learn():
    batch, key = example(4, 5, 6), jax.random.key(7)
    expected = loss_and_gradients(make(NAME), batch, key)
    for weights in ("addition_logits", "concatenation_logits"):
        assert np.abs(expected[f"decoder.blocks.cross.branches.{weights}"]).max() > 0
    found = loss_and_gradients(make(NAME, **{"compile.remat": "full"}), batch, key)
    for name, value in expected.items():
        np.testing.assert_allclose(found[name], value, rtol=1e-5, atol=1e-5, err_msg=name)


def test_the_output_keeps_its_type():
    attention = Attention(changes(TINY, BRANCHES), nnx.Rngs(params=jax.random.key(0)))
    assert jax.eval_shape(attend, attention, jnp.asarray(X, jnp.bfloat16)).dtype == jnp.bfloat16


@pytest.mark.parametrize(
    "new",
    [
        {"mlp.activation": "none"},
        {"experts.count": 2},
        {"mixer.kind": "synthesizer"},
        {"cross_attention.kind": "dot"},
        {"lora.rank": 1, "lora.matrices": ("out",)},
    ],
)
def test_it_needs_heads_and_a_feed_forward_layer_that_nothing_else_takes(new):
    with pytest.raises(SettingError, match=r"model\.attention\.branching"):
        changes(TINY, BRANCHES | new)

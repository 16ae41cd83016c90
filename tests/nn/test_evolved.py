"""Laws of the Evolved Transformer. Packing and decoding are in test_transformer.py too."""

import jax
import numpy as np
import pytest
from flax import nnx
from small_models import TINY, example, influence, loss_and_gradients, make, shapes

from lm.config.base import SettingError, changes
from lm.nn.attention_inputs import make_attention_inputs
from lm.nn.evolved import ConvolutionBranches, FullConvolution, SeparableConvolution
from lm.train.flops import cache_bytes, costs, step_flops

NAME, EVOLVED = "evolved", {"block": "evolved"}
X = np.random.default_rng(1).normal(size=(1, 6, 16)).astype(np.float32)
mixed = jax.jit(lambda layer, x, segments: layer(x, segments, None)[0])


def rngs():
    return nnx.Rngs(params=jax.random.key(0))


def test_convolutions_are_those_of_numpy_and_read_no_other_example():
    full = FullConvolution(TINY, rngs(), (16, 5), 1, 1)
    separable = SeparableConvolution(TINY, rngs(), (16, 5), 3, 0)
    x, segments = X[0], np.array([1, 1, 1, 1, 2, 2])
    kernel = np.asarray(full.out.kernel[...]).reshape(3, 16, 5)
    weights, pointwise = np.asarray(separable.depthwise[...]), np.asarray(separable.pointwise.kernel[...])
    expected, separate = np.zeros((6, 5)), np.zeros((6, 5))
    for query in range(6):
        for key in range(6):
            if segments[query] != segments[key]:
                continue
            if abs(key - query) <= 1:
                expected[query] += x[key] @ kernel[key - query + 1]
            if 0 <= query - key <= 3:
                separate[query] += (x[key] * weights[key - query + 3]) @ pointwise
    np.testing.assert_allclose(mixed(full, X, segments[None])[0], expected, atol=1e-5)
    np.testing.assert_allclose(mixed(separable, X, segments[None])[0], separate, atol=1e-5)


def test_an_encoders_branches_read_five_tokens_on_each_side_and_fill_half_of_the_features():
    encoder = ConvolutionBranches(TINY, rngs(), bidirectional=True)
    x = np.random.default_rng(1).normal(size=(1, 13, 16)).astype(np.float32)
    other = x + (np.arange(13) == 6).astype(np.float32)[None, :, None]
    convolved = jax.jit(lambda encoder, x: encoder(x, None, None, None)[0])
    y, changed = (np.asarray(convolved(encoder, each)) for each in (x, other))
    assert not y[..., 8:].any() and y[..., :8].all()
    moved = np.abs(changed - y)[0].max(-1) > 1e-6
    assert moved.tolist() == [1 <= place <= 11 for place in range(13)]


def test_a_decoder_depends_on_what_came_before_and_on_all_of_it():
    np.testing.assert_array_equal(influence("decoder, evolved"), np.tri(6, dtype=bool))


def test_beams_share_the_keys_of_both_cross_attentions():
    model, batch = make(NAME), example(3, 5, 4)

    @jax.jit
    def cached_and_encoded(model):
        encoded = model._encoder(*model._encoder_inputs(batch)).x
        return model.prefill(batch, 8)[1].encoder_kv, encoded

    both, encoded = jax.tree.map(np.asarray, cached_and_encoded(model))
    assert both.key.shape == (2, 1, 8, 5, 8)
    first = model.decoder.blocks.first_cross
    key = encoded @ np.asarray(first.key.kernel[...])[0]
    np.testing.assert_allclose(both.key[0, 0, :4], key.reshape(5, 4, 8).swapaxes(0, 1), atol=1e-5)


def test_its_attention_weights_are_those_of_its_mixers_inputs():
    model, batch = make("decoder, evolved"), example(3, 5, 4)

    @jax.jit
    def both(model):
        inputs = make_attention_inputs(model.config, batch, "decoder", None)
        attention, x = model.decoder._blocks_by_layer()[1].attention, model.mixer_inputs(batch)["decoder"][1]
        weights = attention.weights(x, attention.row_key_value(x, inputs), inputs)
        return weights, model.attention_weights(batch)["decoder"][1]

    np.testing.assert_allclose(*both(model), atol=1e-6)


@pytest.mark.slow
def test_scanned_unrolled_and_recomputed_stacks_give_the_same_loss_and_gradients():
    batch, key = example(4, 5, 6), jax.random.key(7)
    expected = loss_and_gradients(make(NAME), batch, key)
    assert all(np.abs(value).max() > 0 for name, value in expected.items() if "blocks" in name)
    found = loss_and_gradients(
        make(NAME, **{"compile.layers": "unroll", "compile.remat": "full"}), batch, key
    )
    for name, value in expected.items():
        np.testing.assert_allclose(found[name], value, rtol=1e-5, atol=1e-5, err_msg=name)


def test_an_encoder_may_have_another_activation():
    config = changes(TINY, EVOLVED | {"encoder.activation": "silu"})
    assert config.encoder_config.mlp.activation == "silu" and config.mlp.activation == "relu"
    assert shapes(config).encoder.config.mlp.activation == "silu"


@pytest.mark.parametrize("group", ["encoder", "cross_attention"])
def test_twice_as_many_heads_of_keys_need_not_divide_the_heads_of_the_encoder_or_of_cross_attention(group):
    model = shapes(changes(TINY, EVOLVED | {"attention.num_key_value_heads": 2, f"{group}.num_heads": 2}))
    wide, sizes = model.decoder.blocks.wide, TINY.attention
    assert wide.query.kernel.shape[-1] == 2 * sizes.num_heads * sizes.d_kv
    assert wide.key.kernel.shape[-1] == 2 * 2 * sizes.d_kv


def test_its_sub_layers_are_counted():
    config, plain = changes(TINY, EVOLVED), TINY
    glu, encoder = 16 * 32, 16 * 64 + 3 * 16 * 8 + 9 * 64 + 64 * 8
    heads, decoder = 16 * 32, 11 * 16 + 16 * 32 + 7 * 16 + 16 * 8 + 7 * 32 + 32 * 16
    norms = 2 * (16 + 16) + 64 + 32  # of both stacks' sub-layers, and within branches
    matrices = 2 * (glu + encoder) + 2 * (8 * heads + 4 * heads + decoder)
    more = costs(config, 10).parameters - costs(plain, 10).parameters
    assert more == matrices + 2 * norms + 2 * 8 * 8
    of_encoder = 10 * (glu + encoder)
    of_decoder = 6 * (8 * heads + 2 * heads + decoder) + 10 * 2 * heads
    scores = 6 * 6 * 8 * 16 + 6 * 10 * 4 * 16
    assert step_flops(config, 1, 10, 6) - step_flops(plain, 1, 10, 6) == 3 * 2 * 2 * (
        of_encoder + of_decoder + scores
    )
    cached = 2 * 4 * (2 * 2 * 6 * 32 + 10 * 16 + 6 * 16 + 6 * 32 + 2 * 10 * 32)
    assert cache_bytes(config, 6, 10) - cache_bytes(plain, 6, 10) == cached


@pytest.mark.parametrize(
    "new",
    [
        {"architecture": "prefix-decoder"},
        {"attention.mask": "none"},
        {"positions.kind": "alibi"},
        {"residual": "parallel"},
        {"cross_attention.kind": "dot"},
    ],
)
def test_it_needs_attention_that_reads_back_alone_and_residuals_of_each_sub_layer(new):
    with pytest.raises(SettingError, match=r"model\.block='evolved'"):
        changes(TINY, EVOLVED | new)

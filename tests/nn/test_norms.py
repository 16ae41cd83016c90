"""Norms by their formulas: their parameters, and where in a block they stand."""

from dataclasses import replace

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from small_models import TINY, attention_weights, example, features, made, moved, run, shapes

from lm.config.attention import SparsityConfig
from lm.config.base import changes
from lm.config.layers import NormConfig
from lm.nn.layers import make_norm, num_parameters
from lm.sharding import named
from lm.train.flops import costs, step_flops

X = jax.random.normal(jax.random.key(0), (3, 8))


@pytest.mark.parametrize("kind", ["rms", "layer"])
def test_the_scale_of_a_zero_centred_norm_is_1_plus_a_parameter_that_starts_at_0(kind):
    plain, centred = (make_norm(NormConfig(kind, zero_centered=flag), 8) for flag in (False, True))
    assert (plain.scale[...] == 1).all() and (centred.scale[...] == 0).all()
    np.testing.assert_array_equal(centred(X), plain(X))
    weights = jnp.linspace(-2, 2, 8)
    plain.scale[...], centred.scale[...] = 1 + weights, weights
    np.testing.assert_allclose(centred(X), plain(X), rtol=1e-6)


def test_a_layer_norm_without_bias_has_a_scale_alone():
    plain, unbiased = (make_norm(NormConfig("layer", bias=bias), 8) for bias in (True, False))
    assert set(named(plain)) - set(named(unbiased)) == {"bias"}
    np.testing.assert_array_equal(unbiased(X), plain(X))
    assert set(named(make_norm(NormConfig("rms"), 8))) == {"scale"}


SANDWICH = changes(TINY, {"residual": "sandwich-norm", "dropout": 0.0})


def test_a_sandwich_adds_a_norm_to_each_sublayer_and_no_product():
    plain = replace(SANDWICH, residual="pre-norm")
    added = named(shapes(SANDWICH)).keys() - named(shapes(plain)).keys()
    sublayers = {"encoder": ("attention", "mlp"), "decoder": ("attention", "cross", "mlp")}
    assert added == {
        f"{side}.blocks.{sublayer}_output_norm.scale"
        for side, names in sublayers.items()
        for sublayer in names
    }
    assert num_parameters(shapes(SANDWICH)) - num_parameters(shapes(plain)) == (2 * 2 + 3 * 2) * TINY.d_model
    assert step_flops(SANDWICH, 3, 8, 6) == step_flops(plain, 3, 8, 6)
    assert costs(SANDWICH, 8).parameters == num_parameters(shapes(SANDWICH))


def test_a_sandwiched_sublayer_adds_its_normed_output_to_the_residual_stream():
    """So the size of a last matrix does not matter: its output is normalised."""
    model, batch = moved(changes(SANDWICH, {"norm.epsilon": 1e-12})), example(1, 5, 6)
    before = run(model, batch)
    for side, sublayers in (("encoder", ("attention", "mlp")), ("decoder", ("attention", "cross", "mlp"))):
        for sublayer in sublayers:
            louder = jax.tree.map(lambda leaf: leaf, model)
            kernel = getattr(getattr(louder, side).blocks, sublayer).out.kernel
            kernel[...] = 7 * kernel[...]
            np.testing.assert_allclose(run(louder, batch), before, atol=2e-4)
            norm = getattr(getattr(louder, side).blocks, f"{sublayer}_output_norm")
            norm.scale[...] = 2 * norm.scale[...]
            assert np.abs(run(louder, batch) - before).max() > 1e-2


FIRST = changes(TINY, {"norm.first_attention": "none", "dropout": 0.0, "positions.kind": "rotary"})


@pytest.mark.parametrize("layers", [1, pytest.param(2, marks=pytest.mark.slow), 3])
def test_the_first_layer_has_no_norm_before_attention_and_the_others_have_theirs(layers):
    config = changes(
        FIRST, {"architecture": "encoder", "num_encoder_layers": layers, "num_decoder_layers": layers}
    )
    model, batch = moved(config), example(2, 6, 5)
    name = "encoder.blocks.attention_norm.scale"
    shapes = {path: leaf.shape for path, leaf in named(model).items()}
    assert shapes.get(name) == ((layers - 1, 16) if layers > 1 else None)
    assert shapes["encoder.blocks.mlp_norm.scale"] == (layers, 16)
    both = jax.jit(lambda model: (model.hidden_states(batch), model.mixer_inputs(batch)))(model)
    x, inputs = (np.asarray(by_side["encoder"]) for by_side in both)
    np.testing.assert_array_equal(inputs[0], x[0])
    for layer in range(1, layers):
        normed = x[layer] / np.sqrt(np.square(x[layer]).mean(-1, keepdims=True) + 1e-6)
        expected = normed * np.asarray(named(model)[name])[layer - 1]
        np.testing.assert_allclose(inputs[layer], expected, rtol=1e-5, atol=1e-6)


@pytest.mark.slow
def test_a_stack_without_its_first_norm_is_the_usual_one_where_the_first_norm_changes_nothing():
    """It scales each state by the root mean square of all, once states and embeddings are that long."""
    usual = moved(changes(FIRST, {"norm.first_attention": "norm", "norm.epsilon": 1e-12}))
    arrays = dict(named(usual))
    arrays["embed.table"] /= jnp.sqrt(jnp.square(arrays["embed.table"]).mean(-1, keepdims=True))
    for side in ("encoder", "decoder"):
        scale = arrays[f"{side}.blocks.attention_norm.scale"]
        arrays[f"{side}.blocks.attention_norm.scale"] = scale.at[0].set(1)
    usual = jax.tree.unflatten(jax.tree.structure(usual), list(arrays.values()))
    left_out = made(changes(FIRST, {"norm.epsilon": 1e-12}))
    fitted = [arrays[name][-len(leaf) :] for name, leaf in named(left_out).items()]
    left_out = jax.tree.unflatten(jax.tree.structure(left_out), fitted)
    batch = example(3, 6, 5)
    np.testing.assert_allclose(features(left_out, batch), features(usual, batch), atol=2e-5)
    found = attention_weights(left_out, batch)
    for name, weights in attention_weights(usual, batch).items():
        np.testing.assert_allclose(found[name], weights, atol=2e-5)


def test_the_gradient_of_a_stack_without_its_first_norm_reaches_every_parameter():
    batch = example(4, 6, 5)
    gradient = jax.jit(jax.grad(lambda model: jnp.square(model(batch)).sum()))(moved(FIRST))
    for name, value in named(gradient).items():
        rows = np.abs(np.asarray(value)).reshape(len(value), -1).max(1)
        assert name == "embed.table" or (rows > 0).all(), name


@pytest.mark.parametrize("unroll", [False, pytest.param(True, marks=pytest.mark.slow)])
def test_a_base_of_windows_is_that_of_all_layers_where_all_have_a_window(unroll):
    new = {"positions.kind": "rotary", "compile.layers": "unroll" if unroll else "scan", "dropout": 0.0}
    windowed = changes(TINY, new | {"sparsity": SparsityConfig(window=3)})
    one, windows, full = (
        moved(changes(windowed, {f"positions.rotary.{name}": value for name, value in bases.items()}))
        for bases in ({"base": 7.0}, {"window_base": 7.0}, {})
    )
    batch = example(5, 6, 5)
    np.testing.assert_allclose(run(windows, batch), run(one, batch), atol=1e-5)
    assert np.abs(run(full, batch) - run(one, batch)).max() > 1e-3
    found = attention_weights(windows, batch)
    for name, weights in attention_weights(one, batch).items():
        np.testing.assert_allclose(found[name], weights, atol=1e-5)


def test_a_base_of_windows_turns_the_layers_that_have_one_and_no_other():
    """A window as wide as the row hides nothing."""
    new = {"positions.kind": "rotary", "architecture": "encoder", "dropout": 0.0}
    mixed = changes(
        TINY, new | {"sparsity": SparsityConfig(layer_windows=(None, 9)), "positions.rotary.window_base": 7.0}
    )
    weights = {
        base: attention_weights(moved(changes(TINY, new | {"positions.rotary.base": base})), example(6, 6, 5))
        for base in (7.0, 10_000.0)
    }
    model, batch = moved(mixed), example(6, 6, 5)
    found = attention_weights(model, batch)["encoder"]
    np.testing.assert_allclose(found[0], weights[10_000.0]["encoder"][0], atol=1e-5)
    assert np.abs(found[0] - weights[7.0]["encoder"][0]).max() > 1e-3
    one_layer = {"num_encoder_layers": 1, "sparsity": SparsityConfig(window=9)}
    second = moved(changes(mixed, one_layer))
    plain = moved(changes(TINY, new | {"num_encoder_layers": 1, "positions.rotary.base": 7.0}))
    np.testing.assert_allclose(
        attention_weights(second, batch)["encoder"],
        attention_weights(plain, batch)["encoder"],
        atol=1e-5,
    )


@pytest.mark.parametrize("windows", [(1, None), pytest.param((0, 2), marks=pytest.mark.slow), (None, None)])
def test_an_encoder_beside_a_decoder_may_have_windows_of_its_own(windows):
    config = changes(
        TINY,
        {
            "positions.kind": "rotary",
            "sparsity": SparsityConfig(layer_windows=(None, 1)),
            "encoder.layer_windows": windows,
            "dropout": 0.0,
        },
    )
    weights = attention_weights(moved(config), example(7, 6, 6))
    distance = np.abs(np.arange(6)[:, None] - np.arange(6)[None, :])
    for layer, window in enumerate(windows):
        seen = np.asarray(weights["encoder"][layer]).min((0, 1)) > 0
        np.testing.assert_array_equal(seen, distance <= (6 if window is None else window))
    seen = np.asarray(weights["decoder"]).min((1, 2)) > 0
    np.testing.assert_array_equal(seen[0], np.tri(6, dtype=bool))
    np.testing.assert_array_equal(seen[1], np.tri(6, dtype=bool) & (distance <= 1))


def test_scores_of_an_encoders_own_windows_are_counted_on_both_sides_and_a_decoders_on_one():
    plain = changes(TINY, {"positions.kind": "rotary"})
    windowed = changes(
        plain, {"sparsity": SparsityConfig(layer_windows=(None, 3)), "encoder.layer_windows": (5, None)}
    )
    score = 3 * 4 * TINY.attention.num_heads * TINY.attention.d_kv  # forward and backward, of one key
    length = 32
    own = length + (2 * 5 + 1) + length + (3 + 1)  # keys of a token of the encoder, and of one of the decoder
    found, expected = costs(windowed, length), costs(plain, length)
    assert found.scores == score * (own + 2 * length) / 2
    assert expected.scores == score * 6 * length / 2
    assert expected.training - expected.scores == pytest.approx(found.training - found.scores)


def test_a_cap_of_the_logits_bounds_them_and_keeps_their_order():
    plain = moved(changes(TINY, {"dropout": 0.0}))
    capped = jax.tree.unflatten(
        jax.tree.structure(shapes(changes(TINY, {"dropout": 0.0, "output.logit_cap": 0.5}))),
        jax.tree.leaves(plain),
    )
    batch = example(8, 5, 6)
    np.testing.assert_allclose(run(capped, batch), 0.5 * np.tanh(run(plain, batch) / 0.5), atol=1e-6)


@pytest.mark.parametrize("scores", [pytest.param("scaled-dot", marks=pytest.mark.slow), "bilinear"])
def test_products_are_divided_by_the_root_of_the_query_scalar_which_is_d_kv_where_none_is_given(scores):
    base = changes(TINY, {"attention.scores": scores, "dropout": 0.0})
    same, other = (
        moved(changes(base, {"attention.query_pre_attn_scalar": scalar}))
        for scalar in (base.attention.d_kv, 4 * base.attention.d_kv)
    )
    batch, plain = example(9, 5, 6), moved(base)
    np.testing.assert_array_equal(run(same, batch), run(plain, batch))
    halved = jax.tree.map(lambda leaf: leaf, plain)
    for attention in (
        halved.encoder.blocks.attention,
        halved.decoder.blocks.attention,
        halved.decoder.blocks.cross,
    ):
        attention.query.kernel[...] = attention.query.kernel[...] / 2
    # relative biases are added after the division
    np.testing.assert_allclose(run(other, batch), run(halved, batch), atol=1e-5)

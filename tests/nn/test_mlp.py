"""Activations of the feed-forward layer by their formulas, and what a gate costs."""

from typing import get_args

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from scipy.special import erf
from small_models import TINY, example, made, run, shapes

from lm.config.base import SettingError, changes
from lm.config.layers import Activation, MlpConfig, NormConfig
from lm.nn.layers import ACTIVATIONS, RMSNorm, make_norm, num_parameters
from lm.train.flops import costs, step_flops

X = np.linspace(-4, 4, 33).astype(np.float32)


def sigmoid(x):
    return 1 / (1 + np.exp(-x))


TANH_GELU = X / 2 * (1 + np.tanh((2 / np.pi) ** 0.5 * (X + 0.044715 * X**3)))
ALPHA, LAMBDA = 1.6732632423543772, 1.0507009873554805  # SELU's constants [Klambauer et al. 2017]
FORMULAS = {
    "relu": np.maximum(X, 0),
    "squared-relu": np.maximum(X, 0) ** 2,
    "gelu": X * (1 + erf(X / 2**0.5)) / 2,
    "gelu-tanh": TANH_GELU,
    "silu": X * sigmoid(X),
    "elu": np.where(X > 0, X, np.exp(X) - 1),
    "selu": LAMBDA * np.where(X > 0, X, ALPHA * (np.exp(X) - 1)),
    "sigmoid": sigmoid(X),
    "softplus": np.log1p(np.exp(X)),
    "gated-sigmoid": sigmoid(X),
    "gated-linear": X,
    "gated-relu": np.maximum(X, 0),
    "gated-gelu": TANH_GELU,
    "gated-gelu-erf": X * (1 + erf(X / 2**0.5)) / 2,
    "gated-silu": X * sigmoid(X),
}
GATED = [name for name in FORMULAS if name.startswith("gated")]


def test_every_activation_that_a_setting_may_name_is_there_with_a_formula():
    assert set(get_args(Activation)) == set(ACTIVATIONS) | {"none"} == set(FORMULAS) | {"none"}


@pytest.mark.parametrize("name", FORMULAS)
def test_an_activation_is_its_formula(name):
    np.testing.assert_allclose(ACTIVATIONS[name](X), FORMULAS[name], rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize("name", FORMULAS)
def test_a_feed_forward_layer_is_its_formula_and_has_no_bias_unless_asked(name):
    mlp = made(changes(TINY, {"architecture": "decoder", "mlp.activation": name})).decoder.blocks.mlp
    layer = jax.tree.map(lambda leaf: leaf[0], mlp)
    x = jax.random.normal(jax.random.key(0), (1, 3, TINY.d_model))
    hidden = ACTIVATIONS[name](x @ layer.hidden.kernel[...])
    if name in GATED:
        hidden = hidden * (x @ layer.linear.kernel[...])
    np.testing.assert_allclose(layer(x, None), hidden @ layer.out.kernel[...], rtol=1e-4, atol=1e-5)
    assert all(leaf.ndim == 2 for leaf in jax.tree.leaves(layer))


@pytest.mark.parametrize(  # the name of an activation says whether there is a gate, and changes no shape
    "name",
    [pytest.param(name, marks=[pytest.mark.slow] * (name not in (GATED[0], GATED[-1]))) for name in GATED],
)
def test_a_gate_with_two_thirds_of_the_width_has_the_parameters_and_flops_of_two_matrices(name):
    plain, gated = changes(TINY, {"mlp.d_ff": 24}), changes(TINY, {"mlp.d_ff": 16, "mlp.activation": name})
    assert num_parameters(shapes(plain)) == num_parameters(shapes(gated)) == costs(gated, 8).parameters
    assert step_flops(plain, 4, 8, 6) == step_flops(gated, 4, 8, 6)


@pytest.mark.parametrize(
    "name",
    [
        pytest.param(name, marks=[pytest.mark.slow] * (name not in ("relu", "gated-relu")))
        for name in FORMULAS
    ],
)
def test_a_model_with_every_activation_gives_finite_logits(name):
    config = changes(TINY, {"mlp.activation": name, "dtype": "bfloat16"})
    assert np.isfinite(run(made(config), example(1, 5, 4))).all()


@pytest.mark.parametrize("new", [{"output.transform": True}, {"heads": ("replaced-token",)}])
def test_a_gate_without_activation_gives_a_head_none(new):
    with pytest.raises(SettingError, match="activation='gated-linear' leaves"):
        changes(TINY, {"mlp.activation": "gated-linear", **new})
    assert MlpConfig("gated-linear")


def test_a_partial_rms_norm_divides_by_the_root_mean_square_of_the_first_features():
    """Of 768 features 6.75 % are 52, as in the released code of Narang et al. 2021."""
    norm = make_norm(NormConfig("rms", fraction=0.0675), 768)
    x = jax.random.normal(jax.random.key(0), (5, 768))
    expected = x / jnp.sqrt((x[:, :52] ** 2).mean(-1, keepdims=True) + 1e-6)
    np.testing.assert_allclose(norm(x), expected, rtol=1e-5)
    seven = make_norm(NormConfig("rms", fraction=0.07), 100)  # 100 * 0.07 is 7.000000000000001
    np.testing.assert_allclose(jnp.square(seven(x[:, :100])[:, :7]).mean(-1), 1, rtol=1e-4)
    whole = make_norm(NormConfig("rms"), 768)
    np.testing.assert_array_equal(whole(x), RMSNorm(768, 1e-6)(x))
    with pytest.raises(SettingError, match="norm.fraction=1.5 should be at most 1"):
        NormConfig("rms", fraction=1.5)

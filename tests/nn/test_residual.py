"""ReZero and Fixup: what a new block returns, which scalars it has, and how its matrices start."""

from functools import cache

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from small_models import TINY, cached_logits, example, features, made, moved, run, shapes

from lm.config.base import SettingError, changes
from lm.config.training import OptimizerConfig
from lm.nn.layers import num_parameters
from lm.nn.residual import count_branches
from lm.sharding import named
from lm.train.flops import costs, step_flops
from lm.train.optimizers import optimizer_state_size

NO_NORM = {"norm.kind": "none"}
REZERO = changes(TINY, {"residual": "rezero", **NO_NORM})
FIXUP = changes(TINY, {"residual": "fixup", **NO_NORM})


@pytest.mark.parametrize("config", [REZERO, FIXUP])
def test_new_blocks_return_their_input(config):
    model, batch = made(config), example(1, 4, 6)
    np.testing.assert_allclose(features(model, batch), model.embed(batch.decoder.tokens), atol=1e-6)


@pytest.mark.parametrize(
    "norm", ["none", *(pytest.param(x, marks=pytest.mark.slow) for x in ("rms", "layer"))]
)
def test_rezero_adds_one_scalar_per_sublayer_and_is_pre_norm_when_all_are_1(norm):
    rezero, plain = (changes(TINY, {"residual": kind, "norm.kind": norm}) for kind in ("rezero", "pre-norm"))
    assert (
        num_parameters(shapes(rezero)) - num_parameters(shapes(plain))
        == count_branches(TINY)
        == 2 * 2 + 2 * 3
    )
    leaves, batch = named(made(plain)), example(2, 4, 6)
    ones = [leaves[name] if name in leaves else jnp.ones_like(x) for name, x in named(made(rezero)).items()]
    model = jax.tree.unflatten(jax.tree.structure(made(rezero)), ones)
    np.testing.assert_allclose(run(model, batch), run(made(plain), batch), atol=1e-5)


def test_rezero_with_a_norm_has_the_norms_of_pre_norm():
    rezero, plain = (set(named(shapes(changes(TINY, {"residual": r})))) for r in ("rezero", "pre-norm"))
    assert rezero - plain == {name for name in rezero if "_scale." in name}
    assert plain < rezero


def test_fixup_starts_last_matrices_at_0_and_scales_the_others_by_the_number_of_branches():
    fixup, plain = named(made(FIXUP)), named(made(changes(TINY, NO_NORM)))
    factors = {"query": -1 / 6, "key": -1 / 6, "value": -1 / 6, "hidden": -1 / 2}
    for name, value in plain.items():
        layer = name.split(".")[-2]
        if layer in factors:
            np.testing.assert_allclose(fixup[name], value * 10 ** factors[layer], rtol=1e-5)
        elif layer == "out":
            assert not fixup[name].any()
        else:
            np.testing.assert_array_equal(fixup[name], value)
    scales = {name for name in fixup if "_scale." in name}
    biases = fixup.keys() - plain.keys() - scales
    # One factor per branch; a bias per branch, one in each feed-forward layer, and one after each stack.
    assert sum(fixup[name].size for name in scales) == 10 and all((fixup[n] == 1).all() for n in scales)
    assert sum(fixup[name].size for name in biases) == 10 + 4 + 2 and not any(fixup[n].any() for n in biases)


def test_fixup_scales_both_projections_of_a_gated_layer():
    config = changes(FIXUP, {"mlp.activation": "gated-silu"})
    fixup, plain = named(made(config)), named(made(changes(config, {"residual": "pre-norm"})))
    name = "decoder.blocks.mlp.linear.kernel"
    np.testing.assert_allclose(fixup[name], plain[name] * 10**-0.5, rtol=1e-5)


@pytest.mark.parametrize(
    "config",
    [
        REZERO,
        *(pytest.param(x, marks=pytest.mark.slow) for x in (FIXUP, changes(REZERO, {"norm.kind": "rms"}))),
    ],
)
def test_a_step_over_the_cache_gives_what_the_whole_row_gives(config):
    model, batch = moved(config), example(3, 5, 9)
    batch = jax.tree.map(lambda x: x, batch)
    batch.decoder.causal_attention[:] = 0
    full = np.asarray(run(model, batch))
    for place, logits in enumerate(np.asarray(cached_logits(model, batch)), 3):
        np.testing.assert_allclose(logits[0], full[0, place], rtol=1e-4, atol=1e-4)


@cache
def gradients_of(config):
    gradients = jax.jit(jax.grad(lambda model: features(model, example(4, 4, 5)).sum()))(moved(config))
    return {name: np.asarray(value) for name, value in named(gradients).items()}


@pytest.mark.parametrize("config", [pytest.param(REZERO, marks=pytest.mark.slow), FIXUP])
@pytest.mark.parametrize("optimizer", ["adafactor", "adamw", "muon"])
def test_scalars_are_trained_by_every_optimiser(config, optimizer):
    assert optimizer_state_size(OptimizerConfig(optimizer), shapes(config)) > 0
    gradients = gradients_of(config)
    assert all(gradients[name].any() for name in gradients if "_scale." in name)


def test_scalars_cost_parameters_and_no_products():
    for config in (REZERO, FIXUP):
        plain = changes(config, {"residual": "pre-norm"})
        assert step_flops(config, 4, 8, 6) == step_flops(plain, 4, 8, 6)
        assert costs(config, 8).parameters == num_parameters(shapes(config)) > costs(plain, 8).parameters


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"norm.kind": "rms"}, "norm.kind='rms' should be 'none'"),
        ({"mixer.kind": "lstm", "positions.kind": "none"}, "needs model.mixer.kind='attention'"),
        ({"cross_attention.kind": "dot"}, "needs .*model.cross_attention.kind='heads'"),
    ],
)
def test_fixup_without_what_it_scales_is_refused(settings, message):
    with pytest.raises(SettingError, match=message):
        changes(FIXUP, settings)

"""Optimisers where the numbers of other implementations (test_peer_cases.py) are silent, and layer by
layer.
"""

from dataclasses import replace
from functools import cache
from typing import get_args, get_type_hints

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
import toy
from flax import nnx

from experiments.runs.kinds.pretraining import pretraining_spec
from experiments.study.registry import build
from lm import sharding
from lm.config.base import SettingError, changes
from lm.config.layers import AttentionConfig, MlpConfig
from lm.config.model import ModelConfig
from lm.config.training import OPTIMIZERS, OptimizerConfig
from lm.nn.transformer import Transformer
from lm.train.optimizers import (
    average_parameters,
    learning_rate,
    optimizer_state_size,
    per_layer,
    update_direction,
)

MODEL = ModelConfig(
    vocab_size=8,
    d_model=6,
    mlp=MlpConfig(d_ff=9),
    attention=AttentionConfig(d_kv=2, num_heads=3),
    num_encoder_layers=2,
    num_decoder_layers=2,
)


@cache
def compiled_direction(config, axes):
    """``init`` and ``update`` of an optimiser, compiled once for all that it is asked in a test."""
    transform = update_direction(config, dict(axes))
    return jax.jit(transform.init), jax.jit(transform.update)


def direction(config, axes):
    return compiled_direction(config, tuple(axes.items()))


def test_what_is_no_matrix_does_not_decay():
    config = OptimizerConfig("adamw", 0.1, "constant", weight_decay=0.5)
    axes = {
        "norm": ("layers", "norm"),
        "content_bias": ("layers", "heads", "kv"),  # a vector for each head (Transformer-XL, XLNet)
        "kernel": ("layers", "embed", "mlp"),
    }
    shapes = {"norm": (3, 4), "content_bias": (3, 4, 2), "kernel": (3, 4, 2)}
    params = {name: np.ones(shape, np.float32) for name, shape in shapes.items()}
    init, update = direction(config, axes)
    zeros = jax.tree.map(np.zeros_like, params)
    updates = jax.tree.map(np.asarray, update(zeros, init(params), params)[0])
    assert not updates["norm"].any() and not updates["content_bias"].any()
    assert (updates["kernel"] == 0.5).all()


@pytest.mark.parametrize("name", ["adafactor", "adamw", "adamw-relative"])
def test_a_stack_of_layers_is_trained_as_its_layers_one_by_one(name):
    config = OptimizerConfig(name, 0.1, "constant", factor_from=4)
    size = np.float32([1.0, 10.0, 0.1, 3.0, 1.0, 2.0])[:, None, None]  # layers that must not be averaged
    shapes = {"kernel": (6, 4, 8), "norm": (6, 5, 1)}
    rng = np.random.default_rng(0)
    stacked = {name: size * rng.standard_normal(shape).astype(np.float32) for name, shape in shapes.items()}
    stacked["norm"] = stacked["norm"][..., 0]  # [6,5]: taken for a matrix, it would be factored
    grads = [
        {name: rng.standard_normal(x.shape).astype(np.float32) * x for name, x in stacked.items()}
        for _ in "123"
    ]
    axes = {"kernel": ("embed", "mlp"), "norm": ("norm",)}

    def descend(params, grads, axes):
        init, update = direction(config, axes)
        state = init(params)
        for gradient in grads:
            updates, state = update(gradient, state, params)
            params = jax.tree.map(lambda p, u: p - np.float32(0.1) * np.asarray(u), params, updates)
        return params

    together = descend(stacked, grads, {name: ("layers", *names) for name, names in axes.items()})
    for layer in range(6):
        one = [{name: x[layer] for name, x in tree.items()} for tree in (stacked, *grads)]
        for name, value in descend(one[0], one[1:], axes).items():
            np.testing.assert_allclose(together[name][layer], value, rtol=1e-5)


def directions_of(config, axes, params, gradients):
    """The last of the directions from ``gradients``, one after another, at the same parameters."""
    init, update = direction(config, axes)
    state = init(params)
    for gradient in gradients:
        directions, state = update(gradient, state, params)
    return jax.tree.map(np.asarray, directions)


def normals(*shapes):
    rng = np.random.default_rng(0)
    return [rng.standard_normal(shape).astype(np.float32) for shape in shapes]


def test_lamb_is_that_of_optax_for_matrices_and_adamw_for_norms_and_biases():
    config = OptimizerConfig("lamb", 0.1, "constant", weight_decay=0.5, beta2=0.999, epsilon=1e-6)
    axes = {"kernel": ("embed", "mlp"), "table": ("vocab", "embed"), "norm": ("norm",)}
    values = normals((8, 16), (32, 8), (8,))
    params = dict(zip(axes, values, strict=True))
    gradients = [{name: np.sin(scale * x) for name, x in params.items()} for scale in (0.3, 2.0, 5.0)]
    found = directions_of(config, axes, params, gradients)
    peer = optax.lamb(-1.0, b2=0.999, weight_decay=0.5)
    state = peer.init(params)
    for gradient in gradients:
        expected, state = peer.update(gradient, state, params)
    for name in ("kernel", "table"):
        np.testing.assert_allclose(found[name], expected[name], rtol=1e-5)
        assert np.linalg.norm(found[name]) == pytest.approx(np.linalg.norm(params[name]), rel=1e-5)
    adamw = directions_of(replace(config, name="adamw"), axes, params, gradients)
    np.testing.assert_allclose(found["norm"], adamw["norm"], rtol=1e-5)


def test_lambs_update_of_each_layer_in_a_stack_has_the_norm_of_its_own_matrix():
    params, gradient = normals((3, 8, 16), (3, 8, 16))
    params *= np.float32([1.0, 10.0, 0.1])[:, None, None]
    config = OptimizerConfig("lamb", 0.1, "constant", weight_decay=0.5)
    axes = {"kernel": ("layers", "embed", "mlp")}
    found = directions_of(config, axes, {"kernel": params}, [{"kernel": gradient}])
    due = np.linalg.norm(params, axis=(1, 2))
    np.testing.assert_allclose(np.linalg.norm(found["kernel"], axis=(1, 2)), due, rtol=1e-5)


MUON = OptimizerConfig("muon", 0.1, "constant")
KERNEL = {"kernel": ("layers", "embed", "mlp")}


def muon_rounding(longer_side):
    """Return how far two updates may be apart that differ in one rounding, as by the order of a sum.

    Each of the five Newton-Schulz steps is 3.4445 x - 4.775 x^3 + 2.0315 x^5 of the singular values, so
    that a difference grows at most 3.4445 times; then the matrix gets a root mean square of 0.2.
    """
    return 0.2 * longer_side**0.5 * 3.4445**5 * np.finfo(np.float32).eps


@pytest.mark.parametrize("shape", [(16, 16), (8, 32), (48, 16)])
def test_muons_update_of_a_matrix_is_nearly_orthogonal_whatever_the_gradients_size(shape):
    gradients = [
        {"kernel": np.stack([x, 1e-3 * y])} for x, y in zip(*[iter(normals(*[shape] * 6))] * 2, strict=True)
    ]
    zeros = np.zeros((2, *shape), np.float32)
    kernel = directions_of(MUON, KERNEL, {"kernel": zeros}, gradients)["kernel"]
    singular = np.linalg.svd(kernel / (0.2 * max(shape) ** 0.5), compute_uv=False)
    assert (0.6 < singular).all() and (singular < 1.3).all()
    size = np.sqrt(np.square(kernel).mean((1, 2)))  # of a layer, by which one learning rate serves AdamW too
    np.testing.assert_allclose(size, 0.2, rtol=0.2)


def test_muons_update_of_a_transposed_matrix_is_the_transposed_update():
    wide = normals(*[(3, 8, 24)] * 3)
    found = [
        directions_of(MUON, KERNEL, {"kernel": np.zeros_like(x[0])}, [{"kernel": each} for each in x])[
            "kernel"
        ]
        for x in (wide, [each.swapaxes(1, 2) for each in wide])
    ]
    np.testing.assert_allclose(found[0], found[1].swapaxes(1, 2), rtol=0, atol=muon_rounding(24))


def test_muon_trains_a_stack_as_its_layers_one_by_one_and_each_head_of_a_bilinear_score_alone():
    axes = KERNEL | {"bilinear": ("layers", "bias_heads", "kv", "kv")}
    grads = [
        {"kernel": x, "bilinear": y}
        for x, y in zip(normals(*[(4, 8, 6)] * 3), normals(*[(4, 2, 5, 5)] * 3), strict=True)
    ]
    together = directions_of(MUON, axes, jax.tree.map(np.zeros_like, grads[0]), grads)
    for layer in range(4):
        one = [jax.tree.map(lambda x, layer=layer: x[layer : layer + 1], each) for each in grads]
        alone = directions_of(MUON, axes, jax.tree.map(np.zeros_like, one[0]), one)
        np.testing.assert_allclose(
            together["kernel"][layer], alone["kernel"][0], rtol=0, atol=muon_rounding(8)
        )
        for head in range(2):
            of_head = [{"kernel": each["bilinear"][:, head]} for each in one]
            zeros = {"kernel": np.zeros((1, 5, 5), np.float32)}
            head_alone = directions_of(MUON, KERNEL, zeros, of_head)["kernel"][0]
            np.testing.assert_allclose(
                together["bilinear"][layer, head], head_alone, rtol=0, atol=muon_rounding(5)
            )


def test_muon_is_that_of_optax():
    (params, *gradients) = [{"kernel": x} for x in normals(*[(12, 20)] * 40)]
    peer = optax.contrib.muon(-1.0, consistent_rms=0.2)
    state, update = jax.jit(peer.init)(params), jax.jit(peer.update)
    for gradient in gradients:
        due, state = update(gradient, state, params)
    stack = [{"kernel": each["kernel"][None]} for each in (params, *gradients)]
    found = directions_of(MUON, KERNEL, stack[0], stack[1:])["kernel"][0]
    np.testing.assert_allclose(found, due["kernel"], atol=0.02)  # it corrects for the beginning, we do not


def test_with_muon_all_but_the_matrices_of_layers_change_by_adamw():
    model = jax.eval_shape(
        lambda: Transformer(
            changes(MODEL, {"positions.kind": "relative-per-layer", "bias": True}), nnx.Rngs(0)
        )
    )
    axes, rng = sharding.logical_axes(model), np.random.default_rng(0)
    grads = {n: rng.standard_normal(x.shape).astype(np.float32) for n, x in sharding.named(model).items()}
    muon, adamw = (
        directions_of(replace(MUON, name=name), axes, grads, [grads]) for name in ("muon", "adamw")
    )
    alike = {name for name in axes if np.allclose(muon[name], adamw[name], rtol=1e-5)}
    kernels = {name for name in axes if ".blocks." in name and name.endswith("kernel")}
    assert alike == axes.keys() - kernels and len(kernels) == 16 and "embed.table" in alike


@pytest.mark.parametrize(
    ("axes", "is_matrix"),
    [
        (("heads", "kv"), False),
        (("classes", "heads", "kv"), False),  # keys of token types (XLNet)
        (("memory", "embed"), False),
        (("bias_heads", "kv"), False),  # the vector of additive attention
        (("heads", "length", "length"), False),  # logits of a random Synthesizer
        (("heads", "length", "kv"), False),  # and their factors
        (("taps", "gates"), False),  # kernels of a lightweight convolution
        (("taps", "mlp"), False),  # and of one of each feature by itself
        (("embed", "kv"), True),
        (("heads", "embed"), True),
        (("kv", "length"), True),  # from features to logits, of a dense Synthesizer
        (("mlp", "gates"), True),
        (("experts", "embed", "mlp"), True),
        (("bias_heads", "kv", "kv"), True),  # bilinear scores
        (("heads", "kv", "kv", "kv"), True),
    ],
)
def test_muon_orthogonalises_what_multiplies_features_and_all_else_changes_by_adamw(axes, is_matrix):
    axes = ("layers", *axes)
    grads = {"x": normals((2, 4, 8, 6, 6)[: len(axes)])[0]}
    muon, adamw = (
        directions_of(replace(MUON, name=name), {"x": axes}, grads, [grads]) for name in ("muon", "adamw")
    )
    assert np.allclose(muon["x"], adamw["x"], rtol=1e-5) == (not is_matrix)


def test_kernels_of_convolutions_name_their_taps():
    evolved = changes(toy.MODEL, {"block": "evolved"})
    lightweight = changes(toy.MODEL, {"mixer.kind": "lightweight-convolution", "positions.kind": "none"})
    for config, ends in ((evolved, "depthwise"), (lightweight, "attention.kernel")):
        model = jax.eval_shape(lambda config=config: Transformer(config, nnx.Rngs(0)))
        found = [axes for name, axes in sharding.logical_axes(model).items() if name.endswith(ends)]
        assert found and all(axes[:2] == ("layers", "taps") for axes in found)


@pytest.mark.parametrize("name", ["adafactor", "adamw-relative"])
def test_a_relative_update_grows_with_the_parameter(name):
    config = OptimizerConfig(name, factor_from=4)
    params, *gradients = [{"kernel": x} for x in normals(*[(2, 6, 8)] * 4)]
    size = np.float32([3.0, 0.5])[:, None, None]
    once = directions_of(config, KERNEL, params, gradients)["kernel"]
    larger = directions_of(config, KERNEL, {"kernel": size * params["kernel"]}, gradients)["kernel"]
    np.testing.assert_allclose(larger, size * once, rtol=1e-5)
    tiny = directions_of(config, KERNEL, {"kernel": 0 * params["kernel"]}, gradients)["kernel"]
    assert 0.5e-3 < np.sqrt(np.square(tiny).mean()) < 1.5e-3  # epsilon_scale: what is 0 can leave it


def test_the_mean_of_constant_parameters_is_these_and_of_others_lags_behind():
    params, later = ({"kernel": x} for x in normals((4, 4), (4, 4)))

    @jax.jit
    def averaged(start, value, decay):
        def step(average, step):
            return average_parameters(decay, step, average, value), None

        return jax.lax.scan(step, start, jnp.arange(2_000))[0]["kernel"]

    np.testing.assert_array_equal(averaged(params, params, 0.99), params["kernel"])
    np.testing.assert_allclose(averaged(params, later, 0.99), later["kernel"], atol=1e-5)
    # In the long run a step keeps the share ``decay`` of the mean.
    after = jax.jit(average_parameters)(0.99, jnp.int32(10**6), params, later)["kernel"]
    np.testing.assert_allclose(after, 0.99 * params["kernel"] + 0.01 * later["kernel"], atol=1e-6)


def test_warmup_stable_decay_ramps_stays_and_falls_in_a_straight_line():
    config = OptimizerConfig("adamw", 0.3, "warmup-stable-decay", 10, decay_start=100, decay_end=200)
    steps = np.array([0, 1, 10, 11, 99, 100, 101, 150, 199, 200, 1_000])
    due = 0.3 * np.array([0, 0.1, 1, 1, 1, 1, 0.99, 0.5, 0.01, 0, 0])
    np.testing.assert_allclose(learning_rate(config, steps), due, rtol=1e-5, atol=1e-8)


def test_inverse_sqrt_then_linear_is_mesh_tensorflows():
    """``rsqrt(max(step, 10)) * min(1, (train_steps - step) / (train_steps * 0.1))`` of its Noam schedule."""
    config = OptimizerConfig(
        learning_rate=0.3, schedule="inverse-sqrt-linear", timescale=10, decay_start=180, decay_end=200
    )
    steps = np.array([0, 9, 10, 11, 100, 179, 180, 181, 190, 199, 200, 1_000])
    due = 0.3 * np.maximum(steps, 10) ** -0.5 * np.clip((200 - steps) / (200 * 0.1), 0, 1)
    np.testing.assert_allclose(learning_rate(config, steps), due, rtol=1e-5, atol=1e-8)
    plain = replace(config, schedule="inverse-sqrt")
    np.testing.assert_array_equal(learning_rate(config, steps[:7]), learning_rate(plain, steps[:7]))


@pytest.mark.parametrize("schedule", ["linear", "cosine", "warmup-stable-decay", "inverse-sqrt-linear"])
def test_a_decay_to_a_floor_goes_from_the_whole_rate_to_that_share_and_stays(schedule):
    to_zero = OptimizerConfig("adamw", 0.3, schedule, 10, timescale=1_000, decay_start=100, decay_end=200)
    steps = np.array([0, 5, 10, 50, 100, 150, 199, 200, 1_000])
    zero, floor = (learning_rate(replace(to_zero, decay_floor=floor), steps) for floor in (0.0, 0.1))
    peak = float(floor[2])
    np.testing.assert_array_equal(floor[:3], zero[:3])
    np.testing.assert_allclose(floor[3:], 0.1 * peak + 0.9 * zero[3:], rtol=1e-5)
    np.testing.assert_allclose(floor[-2:], 0.1 * peak, rtol=1e-5)


def test_a_cosine_to_a_floor_is_that_of_optax():
    config = OptimizerConfig("adamw", 0.3, "cosine", 10, decay_end=200, decay_floor=0.1)
    due = optax.warmup_cosine_decay_schedule(0.0, 0.3, 10, 200, end_value=0.03)
    steps = np.arange(300)
    np.testing.assert_allclose(learning_rate(config, steps), due(steps), rtol=1e-4)


def test_stacks_of_unequal_depth_stand_side_by_side():
    transform = per_layer(optax.clip_by_block_rms(1.0), {"a", "b"})
    params = {
        name: np.full((layers, 3), value, np.float32)
        for name, layers, value in (("a", 2, 1), ("b", 5, 4), ("c", 5, 4))
    }
    updates, _ = jax.jit(transform.update)(params, transform.init(params), params)
    assert list(updates) == ["a", "b", "c"]
    assert all((np.asarray(value) == 1).all() for value in updates.values())


@pytest.mark.parametrize("size", [1, 300])  # of which the larger is factored
def test_adafactor_with_momentum_takes_the_mean_of_its_updates_as_t5x_does(size):
    rng = np.random.default_rng(0)
    params = {"p": rng.standard_normal((2 * size, size)).astype(np.float32)}
    (init, plain), (init_heavy, heavy) = (
        direction(OptimizerConfig(momentum=m), {"p": ("embed", "mlp")}) for m in (0.0, 0.9)
    )
    states, mean = [init(params), init_heavy(params)], 0.0
    signs = np.sign(params["p"])  # of which each stays, so that no sum cancels down to its rounding
    for _ in range(3):
        gradient = {"p": signs * np.abs(rng.standard_normal((2 * size, size)).astype(np.float32))}
        update, states[0] = plain(gradient, states[0], params)
        mean = 0.9 * mean + (1 - 0.9) * np.asarray(update["p"])  # without a correction for its beginning
        update, states[1] = heavy(gradient, states[1], params)
        np.testing.assert_allclose(update["p"], mean, rtol=1e-5, atol=1e-8)


def test_linear_and_stepwise_decay_are_those_of_t5x():
    """``constant * linear_decay`` and ``constant * linear_warmup * decay_every`` of its learning rate
    scheduler.
    """
    steps = np.array([0, 1, 9, 10, 11, 99, 100, 101, 150, 199, 200, 1_000])
    linear = OptimizerConfig(learning_rate=0.3, schedule="linear", warmup_steps=10, decay_end=110)
    due = 0.3 * np.minimum(steps / 10, 1 + 0.01 * (10 - steps))
    np.testing.assert_allclose(learning_rate(linear, steps), np.maximum(due, 0), rtol=1e-5, atol=1e-8)
    every = OptimizerConfig(
        learning_rate=0.3, schedule="decay-every", warmup_steps=10, decay_factor=0.7, steps_per_decay=100
    )
    due = 0.3 * np.minimum(1, steps / 10) * 0.7 ** (steps // 100)
    np.testing.assert_allclose(learning_rate(every, steps), due, rtol=1e-5)


def test_every_optimiser_that_a_setting_may_name_is_there_and_its_memory_is_counted():
    assert set(OPTIMIZERS) == set(get_args(get_type_hints(OptimizerConfig)["name"]))
    model = jax.eval_shape(lambda: toy.Toy(toy.MODEL, nnx.Rngs(0)))
    numbers = sum(leaf.size for leaf in jax.tree.leaves(model))
    assert optimizer_state_size(OptimizerConfig("adamw"), model) == pytest.approx(2 * numbers, abs=10)
    assert numbers < optimizer_state_size(OptimizerConfig(momentum=0.9, factor_from=8), model) < 1.5 * numbers
    table = model.table.size + model.scale.size  # Muon remembers one mean of all others
    assert optimizer_state_size(OptimizerConfig("muon"), model) == pytest.approx(numbers + table, abs=10)
    for name in OPTIMIZERS:
        plain, mean = (optimizer_state_size(OptimizerConfig(name, ema=ema), model) for ema in (0.0, 0.9))
        assert mean - plain == numbers


@pytest.mark.parametrize("schedule", ["linear", "cosine", "warmup-stable-decay"])
def test_a_decay_without_an_end_ends_with_the_last_step_of_the_phase(schedule):
    config = OptimizerConfig(learning_rate=0.3, schedule=schedule, warmup_steps=2, decay_start=2)
    for steps in (10, 40):
        ended = config.ending_at(steps)
        assert ended == replace(config, decay_end=steps) and ended.ending_at(7) == ended
        assert float(learning_rate(ended, steps)) == pytest.approx(0, abs=1e-7)
        assert float(learning_rate(ended, steps - 1)) > 0
    new = {"schedule": schedule, "warmup_steps": 2, "decay_start": 2}
    experiment = changes(
        build("gpt/base", "nano", {f"pretraining.optimizer.{name}": value for name, value in new.items()}),
        {"pretraining.steps": 77},
    )
    assert pretraining_spec(experiment).optimizer.decay_end == 77
    assert OptimizerConfig().ending_at(10) == OptimizerConfig()


@pytest.mark.parametrize(
    "field, value",
    [
        ("momentum", 1.0),
        ("ema", 1.0),
        ("muon_rms", 0.0),
        ("decay_factor", 0.0),
        ("decay_floor", 1.0),
        ("steps_per_decay", 0),
    ],
)
def test_momentum_and_decay_out_of_range_are_named(field, value):
    with pytest.raises(SettingError, match=f"optimizer.{field}={value}"):
        OptimizerConfig(**{field: value})


@pytest.mark.parametrize("schedule", ["warmup-stable-decay", "inverse-sqrt-linear"])
@pytest.mark.parametrize("start", [0, 9])
def test_a_late_decay_that_begins_while_the_rate_warms_up_is_refused(schedule, start):
    message = f"optimizer.decay_start={start} should be at least optimizer.warmup_steps=10"
    with pytest.raises(SettingError, match=message):
        OptimizerConfig(schedule=schedule, warmup_steps=10, decay_start=start).ending_at(20)
    assert OptimizerConfig(schedule=schedule, warmup_steps=10, decay_start=10).ending_at(20).decay_end == 20
    OptimizerConfig(schedule=schedule).ending_at(20)  # that decays from the first step on
    OptimizerConfig(schedule="linear", warmup_steps=10).ending_at(20)  # which does not read decay_start


def test_a_decay_needs_an_end():
    with pytest.raises(SettingError, match="optimizer.decay_end=0 should be the last step"):
        learning_rate(OptimizerConfig(schedule="cosine"), 1)
    with pytest.raises(
        SettingError, match="optimizer.decay_end=9 should be beyond optimizer.warmup_steps=10"
    ):
        OptimizerConfig(schedule="cosine", warmup_steps=10, decay_end=9)
    with pytest.raises(SettingError, match="decay_end=5 should be beyond optimizer.decay_start=5"):
        OptimizerConfig(schedule="warmup-stable-decay", decay_start=5, decay_end=5)


# without a mean of the parameters the optimiser's own state is the same
@pytest.mark.parametrize("ema", [0.9, pytest.param(0.0, marks=pytest.mark.slow)])
@pytest.mark.parametrize("name", OPTIMIZERS)
def test_before_its_first_step_an_optimiser_remembers_zeros(name, ema):
    """So that an imported model, which has made no step, is saved without running the optimiser."""
    optimizer = toy.steps(optimizer=OptimizerConfig(name, ema=ema)).initial_state(0).opt_state
    assert all(not np.asarray(leaf).any() for leaf in jax.tree.leaves(optimizer))

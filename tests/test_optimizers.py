"""Optimisers where the numbers of other implementations (test_peer_cases.py) are silent, and layer by
layer.
"""

from typing import get_args, get_type_hints

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
import toy
from flax import nnx

from lm.settings import SettingError
from lm.train.config import OPTIMIZERS, OptimizerConfig
from lm.train.optimizers import learning_rate, optimizer, per_layer, remembered


def test_what_is_no_matrix_does_not_decay():
    config = OptimizerConfig("adamw", 0.1, "constant", weight_decay=0.5)
    params = {"norm": jnp.ones((3, 4)), "kernel": jnp.ones((3, 4, 2))}
    transform = optimizer(config, {"norm": ("layers", "norm"), "kernel": ("layers", "embed", "mlp")})
    zeros = jax.tree.map(jnp.zeros_like, params)
    updates, _ = transform.update(zeros, transform.init(params), params)
    assert not updates["norm"].any() and (updates["kernel"] == 0.5).all()


@pytest.mark.parametrize("name", ["adafactor", "adamw"])
def test_a_stack_of_layers_is_trained_as_its_layers_one_by_one(name):
    config = OptimizerConfig(name, 0.1, "constant", factor_from=4)
    size = jnp.asarray([1.0, 10.0, 0.1, 3.0, 1.0, 2.0])[:, None, None]  # layers that must not be averaged
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
        transform = optimizer(config, axes)
        state, update = transform.init(params), jax.jit(transform.update)
        for gradient in grads:
            updates, state = update(gradient, state, params)
            params = jax.tree.map(lambda p, u: p - 0.1 * u, params, updates)
        return params

    together = descend(stacked, grads, {name: ("layers", *names) for name, names in axes.items()})
    for layer in range(6):
        one = [{name: x[layer] for name, x in tree.items()} for tree in (stacked, *grads)]
        for name, value in descend(one[0], one[1:], axes).items():
            np.testing.assert_allclose(together[name][layer], value, rtol=1e-5)


def test_stacks_of_unequal_depth_stand_side_by_side():
    transform = per_layer(optax.clip_by_block_rms(1.0), {"a", "b"})
    params = {"a": jnp.ones((2, 3)), "b": 4 * jnp.ones((5, 3)), "c": 4 * jnp.ones((5, 3))}
    updates, _ = transform.update(params, transform.init(params), params)
    assert list(updates) == ["a", "b", "c"] and all((value == 1).all() for value in updates.values())


@pytest.mark.parametrize("size", [1, 300])  # of which the larger is factored
def test_adafactor_with_momentum_takes_the_mean_of_its_updates_as_t5x_does(size):
    rng = np.random.default_rng(0)
    params = {"p": jnp.asarray(rng.standard_normal((2 * size, size)), jnp.float32)}
    plain, heavy = (optimizer(OptimizerConfig(momentum=m), {"p": ("embed", "mlp")}) for m in (0.0, 0.9))
    states, mean = [plain.init(params), heavy.init(params)], 0.0
    for _ in range(3):
        gradient = {"p": jnp.asarray(rng.standard_normal((2 * size, size)), jnp.float32)}
        update, states[0] = plain.update(gradient, states[0], params)
        mean = 0.9 * mean + (1 - 0.9) * update["p"]  # without a correction for its beginning
        update, states[1] = heavy.update(gradient, states[1], params)
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
    assert remembered(OptimizerConfig("adamw"), model) == pytest.approx(2 * numbers, abs=10)
    assert numbers < remembered(OptimizerConfig(momentum=0.9, factor_from=8), model) < 1.5 * numbers


@pytest.mark.parametrize("field, value", [("momentum", 1.0), ("decay_factor", 0.0), ("steps_per_decay", 0)])
def test_momentum_and_decay_out_of_range_are_named(field, value):
    with pytest.raises(SettingError, match=f"optimizer.{field}={value}"):
        OptimizerConfig(**{field: value})


def test_a_decay_needs_an_end():
    with pytest.raises(SettingError, match="optimizer.decay_end=0 should be beyond"):
        OptimizerConfig(schedule="cosine")

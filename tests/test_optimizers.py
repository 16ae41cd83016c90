"""Optimisers where the numbers of other implementations (test_peer_cases.py) are silent, and layer by layer."""

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

from lm.config import SettingError
from lm.train.config import OptimizerConfig
from lm.train.optimizers import optimizer, per_layer


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
    grads = [{name: rng.standard_normal(x.shape).astype(np.float32) * x for name, x in stacked.items()} for _ in "123"]
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


def test_a_decay_needs_an_end():
    with pytest.raises(SettingError, match="optimizer.decay_end=0 should be beyond"):
        OptimizerConfig(schedule="cosine")

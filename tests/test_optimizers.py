"""Adafactor, AdamW and schedules against what other implementations computed, and layer by layer."""

import json
from dataclasses import replace
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

from lm.config import SettingError
from lm.train.config import OptimizerConfig
from lm.train.optimizers import learning_rate, optimizer, per_layer

PEERS = Path(__file__).parents[1].parent / "shared" / "parity" / "peer_cases.json"


def cases(*functions):
    found = json.loads(PEERS.read_text())["cases"] if PEERS.exists() else []
    chosen = [case for case in found if case["fn"] in functions]
    return [pytest.param(case["args"], case["expected"], id=case["id"]) for case in chosen]


def descend(config, params, grads, state=None):
    """The parameters after each gradient, and the last state."""
    params, found = {"p": jnp.asarray(params, jnp.float32)}, []
    transform = optimizer(config, {"p": ("embed", "mlp")[: params["p"].ndim]})
    state = transform.init(params) if state is None else state(transform.init(params))
    for step, gradient in enumerate(grads):
        updates, state = transform.update({"p": jnp.asarray(gradient, jnp.float32)}, state, params)
        params = {"p": params["p"] - learning_rate(config, step) * updates["p"]}
        found.append(np.asarray(params["p"]))
    return found, state


# Left out: Adafactor with beta1 (a mean of its updates), which T5 does without.
@pytest.mark.parametrize("args, expected", cases("adafactor(t5x)", "adafactor(hf)", "adafactor(optax)"))
def test_adafactor_steps_as_that_of_t5x_transformers_and_optax(args, expected):
    if args["beta1"]:
        pytest.skip("no mean of updates")
    config = OptimizerConfig(
        schedule="constant",
        learning_rate=args["learning_rate"],
        decay_exponent=args["decay_rate"],
        factor_from=1 if args["factored"] else 10**9,
        relative="parameter" if args["multiply_by_parameter_scale"] else "none",
        clip_rms=args["clipping_threshold"],
        epsilon_square=args["epsilon1"],
        epsilon_scale=args["epsilon2"],
    )
    for found, due in zip(descend(config, args["params"], args["grads"])[0], expected, strict=True):
        np.testing.assert_allclose(found, due, atol=2e-6, rtol=2e-6)


@pytest.mark.parametrize("args, expected", cases("t5x.adafactor.single_step"))
def test_adafactor_goes_on_from_a_given_memory(args, expected):
    config = OptimizerConfig(
        schedule="constant",
        learning_rate=args["learning_rate"],
        factor_from=1,
        clip_norm=args.get("global_norm_clip_threshold"),
    )
    row, column = "v_col", "v_row"  # T5X calls the mean over the larger axis a row, whatever axis that is
    memory = {column: jnp.asarray(args["v_row"]), row: jnp.asarray(args["v_col"])}

    def remembering(state):
        def filled(path, leaf):
            field = jax.tree_util.keystr(path).split(".")[-1].split("[")[0]
            return jnp.asarray(1, jnp.int32) if field == "count" else memory.get(field, leaf)

        return jax.tree_util.tree_map_with_path(filled, state)

    found, state = descend(config, args["params"], [args["grads"]], remembering)
    np.testing.assert_allclose(found[0], expected["params"], atol=1e-5)
    factored = optax.tree.get(state, column), optax.tree.get(state, row)
    np.testing.assert_allclose(factored[0]["p"], expected["v_row"], atol=1e-5)
    np.testing.assert_allclose(factored[1]["p"], expected["v_col"], atol=1e-5)


@pytest.mark.parametrize("args, expected", cases("adamw(torch)"))
def test_adamw_steps_as_that_of_torch(args, expected):
    (beta1, beta2), row = args["betas"], lambda values: [values]  # a matrix, for only those decay
    config = OptimizerConfig(
        "adamw", args["learning_rate"], "constant", weight_decay=args["weight_decay"], beta1=beta1, beta2=beta2
    )
    found, _ = descend(config, row(args["params"]), map(row, args["grads"]))
    np.testing.assert_allclose(np.concatenate(found), expected, atol=1e-6)


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
        state = transform.init(params)
        for gradient in grads:
            updates, state = transform.update(gradient, state, params)
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


RATES = {
    "constant * rsqrt_decay": OptimizerConfig(),
    "constant * linear_warmup": OptimizerConfig(schedule="constant"),
    "constant * linear_warmup * rsqrt_decay": OptimizerConfig(),
    "constant * linear_warmup * rsqrt_normalized_decay": OptimizerConfig(),
}


@pytest.mark.parametrize("args, expected", cases("t5x.utils.create_learning_rate_scheduler"))
def test_schedules_are_those_of_t5x(args, expected):
    if args["factors"] not in RATES:
        pytest.skip(f"no schedule for {args['factors']}")
    warmup, rate = args["warmup_steps"], args["base_learning_rate"]
    ramp = warmup if "linear_warmup" in args["factors"] else 0
    rate *= warmup**0.5 if "normalized" in args["factors"] else 1
    config = replace(RATES[args["factors"]], learning_rate=rate, timescale=warmup, warmup_steps=ramp)
    np.testing.assert_allclose(learning_rate(config, jnp.asarray(args["steps"])), expected, rtol=1e-6, atol=2e-8)


# Left out: hf.schedule.inverse_sqrt, which shifts its start; T5's does not.
COURSES = {"constant_with_warmup": "constant", "linear_warmup_linear_decay": "linear", "linear_warmup_cosine": "cosine"}


@pytest.mark.parametrize("name", COURSES)
def test_schedules_are_those_of_transformers(name):
    for case in cases(f"hf.schedule.{name}"):
        args, expected = case.values
        end = args.get("num_training_steps", 0)
        config = OptimizerConfig(
            learning_rate=args["base_lr"],
            schedule=COURSES[name],
            warmup_steps=args["num_warmup_steps"],
            decay_end=end,
        )
        inside = [i for i, step in enumerate(args["steps"]) if not end or step <= end]  # past it theirs rises again
        found = learning_rate(config, jnp.asarray(args["steps"]))
        np.testing.assert_allclose(found[np.array(inside)], np.array(expected)[inside], rtol=1e-5, atol=1e-9)


def test_a_decay_needs_an_end():
    with pytest.raises(SettingError, match="optimizer.decay_end=0 should be beyond"):
        OptimizerConfig(schedule="cosine")

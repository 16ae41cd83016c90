"""Adafactor as T5 uses it, AdamW, and schedules: all built on optax, all a function of the step."""

from collections.abc import Callable, Collection, Mapping

import jax
import jax.numpy as jnp
import optax
from flax import nnx

from lm import sharding
from lm.train.config import OptimizerConfig


def learning_rate(config: OptimizerConfig, step: jax.Array) -> jax.Array:
    """float32 []: the rate of the update from ``step`` to step + 1."""
    step = jnp.asarray(step, jnp.float32)
    past = jnp.clip((step - config.warmup_steps) / max(1, config.decay_end - config.warmup_steps), 0, 1)
    course = {
        "constant": jnp.ones_like(step),
        "inverse-sqrt": jnp.maximum(step, config.timescale) ** -0.5,
        "linear": 1 - past,
        "cosine": (1 + jnp.cos(jnp.pi * past)) / 2,
        "decay-every": config.decay_factor ** (step // config.steps_per_decay),
    }[config.schedule]
    ramp = jnp.minimum(1, step / config.warmup_steps) if config.warmup_steps else 1.0
    return config.learning_rate * course * ramp


def optimizer(config: OptimizerConfig, axes: Mapping[str, tuple[str, ...]]) -> optax.GradientTransformation:
    """The optimiser of parameters ``{name: array}`` with these axes (``lm.sharding.axes``).

    It gives directions: the new parameters are the old ones minus ``learning_rate`` times these.
    """
    clip = [optax.clip_by_global_norm(config.clip_norm)] if config.clip_norm is not None else []
    direction = OPTIMIZERS[config.name](config)
    stacked = {name for name, names in axes.items() if names[:1] == ("layers",)}
    matrices = {name: len(names) - (name in stacked) > 1 for name, names in axes.items()}
    decay = [optax.add_decayed_weights(config.weight_decay, mask=matrices)] if config.weight_decay else []
    return optax.chain(*clip, per_layer(direction, stacked), *decay)


def per_layer(
    transform: optax.GradientTransformation, stacked: Collection[str]
) -> optax.GradientTransformation:
    """``transform`` as if each layer of the ``stacked`` parameters were a parameter by itself.

    Adafactor's factors, clipping and scale are of one matrix: a stack seen as one array would mix its layers.
    """

    def groups(arrays):  # {depth: {name: array}}, depth 0 for what is not stacked
        found = {}
        for name, array in arrays.items():
            found.setdefault(array.shape[0] if name in stacked else 0, {})[name] = array
        return found

    def init(params):
        return {
            str(depth): (jax.vmap(transform.init) if depth else transform.init)(group)
            for depth, group in groups(params).items()
        }

    def update(updates, state, params):
        groups_of_params, done, new_state = groups(params), {}, {}
        for depth, group in groups(updates).items():
            step = jax.vmap(transform.update) if depth else transform.update
            new, new_state[str(depth)] = step(group, state[str(depth)], groups_of_params[depth])
            done |= new
        return {name: done[name] for name in updates}, new_state

    return optax.GradientTransformation(init, update)


def _adafactor(config: OptimizerConfig) -> optax.GradientTransformation:
    steps = [
        optax.scale_by_factored_rms(
            decay_rate=config.decay_exponent,
            min_dim_size_to_factor=config.factor_from,
            epsilon=config.epsilon_square,
        )
    ]
    if config.clip_rms is not None:
        steps.append(optax.clip_by_block_rms(config.clip_rms))
    if config.relative == "parameter":
        steps.append(optax.scale_by_param_block_rms(config.epsilon_scale))
    if config.momentum:
        steps.append(optax.ema(config.momentum, debias=False))
    return optax.chain(*steps)


def _adamw(config: OptimizerConfig) -> optax.GradientTransformation:
    return optax.scale_by_adam(config.beta1, config.beta2, config.epsilon)


# By the name in the settings; where its memory lives and how much it takes follows from the memory's own
# shapes.
OPTIMIZERS: dict[str, Callable[[OptimizerConfig], optax.GradientTransformation]] = {
    "adafactor": _adafactor,
    "adamw": _adamw,
}


def remembered(config: OptimizerConfig, model: nnx.Module) -> int:
    """How many numbers the optimiser remembers of a model, which may be one of shapes alone."""
    transform = optimizer(config, sharding.axes(model))
    return sum(leaf.size for leaf in jax.tree.leaves(jax.eval_shape(transform.init, sharding.named(model))))

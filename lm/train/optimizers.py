"""Adafactor as T5 uses it, AdamW, Muon, and schedules: all built on optax, all a function of the step."""

from collections.abc import Callable, Collection
from dataclasses import dataclass
from typing import TypeAlias

import jax
import jax.numpy as jnp
import numpy as np
import optax
from flax import nnx

from lm import sharding
from lm.nn.composed import BODY, FORWARD
from lm.nn.config import ModelConfig
from lm.train.config import Axes, OptimizerConfig

Optimizer: TypeAlias = optax.GradientTransformation
Updates = dict[str, jax.Array]  # what the optimiser asks for, by parameter
EMBEDDING = ".embed.table"  # how the name of the embedding of tokens ends, in models within models too
Tune = Callable[[Updates, jax.Array], Updates]  # also takes the state's step


def learning_rate(config: OptimizerConfig, step: jax.Array) -> jax.Array:
    """float32 []: the rate of the update from ``step`` to step + 1."""
    step = jnp.asarray(step, jnp.float32)

    def past(start: int) -> jax.Array:  # share of the time from there to the end of the decay
        return jnp.clip((step - start) / max(1, config.decay_end - start), 0, 1)

    course = {
        "constant": jnp.ones_like(step),
        "inverse-sqrt": jnp.maximum(step, config.timescale) ** -0.5,
        "linear": 1 - past(config.warmup_steps),
        "cosine": (1 + jnp.cos(jnp.pi * past(config.warmup_steps))) / 2,
        "decay-every": config.decay_factor ** (step // config.steps_per_decay),
        "warmup-stable-decay": 1 - past(config.decay_start),
    }[config.schedule]
    ramp = jnp.minimum(1, step / config.warmup_steps) if config.warmup_steps else 1.0
    return config.learning_rate * course * ramp


def optimizer(config: OptimizerConfig, axes: Axes) -> Optimizer:
    """The optimiser of parameters ``{name: array}`` with these axes (``lm.sharding.axes``).

    It gives directions: the new parameters are the old ones minus ``learning_rate`` times these.
    """
    clip = [optax.clip_by_global_norm(config.clip_norm)] if config.clip_norm is not None else []
    direction = config.transform(axes)
    stacked = {name for name, names in axes.items() if names[:1] == ("layers",)}
    matrices = {name: len(names) - (name in stacked) > 1 for name, names in axes.items()}
    decay = [optax.add_decayed_weights(config.weight_decay, mask=matrices)] if config.weight_decay else []
    return optax.chain(*clip, per_layer(direction, stacked), *decay)


def per_layer(transform: Optimizer, stacked: Collection[str]) -> Optimizer:
    """``transform`` as if each layer of the ``stacked`` parameters were a parameter by itself.

    Adafactor's factors, clipping and scale are of one matrix: a stack seen as one array would mix its layers.
    """

    def groups(arrays):  # {depth: {name: array}}, depth 0 for what is not stacked
        by_depth: dict[int, dict[str, jax.Array]] = {}
        for name, array in arrays.items():
            by_depth.setdefault(array.shape[0] if name in stacked else 0, {})[name] = array
        return by_depth

    def init(params):
        inits = {depth: jax.vmap(transform.init) if depth else transform.init for depth in groups(params)}
        return {str(depth): inits[depth](group) for depth, group in groups(params).items()}

    def update(updates, state, params):
        groups_of_params, new_state = groups(params), {}
        new_updates: Updates = {}
        for depth, group in groups(updates).items():
            step = jax.vmap(transform.update) if depth else transform.update
            new, new_state[str(depth)] = step(group, state[str(depth)], groups_of_params[depth])
            new_updates |= new
        return {name: new_updates[name] for name in updates}, new_state

    return optax.GradientTransformation(init, update)


def mean_parameters(decay: float, step: jax.Array, average: Updates, params: Updates) -> Updates:
    """The mean of all parameters until ``step``, [] from 0 on, and of the ``params`` after it.

    It starts at the initial parameters, so that it is a model at any time; in fine-tuning that is first the
    pre-trained one. So that they do not keep a weight of ``decay ** step``, the decay grows up to ``decay``,
    as (1 + step) / (10 + step): after 100 steps they weigh less than 1e-12.
    """
    keep = jnp.minimum(decay, (1 + step) / (10 + step))
    return {name: average[name] + (1 - keep) * (value - average[name]) for name, value in params.items()}


def remembered(config: OptimizerConfig, model: nnx.Module) -> int:
    """How many numbers are remembered of a model besides its own, which may be one of shapes alone."""
    transform = optimizer(config, sharding.axes(model))
    memory = [jax.eval_shape(transform.init, sharding.named(model)), model if config.ema else ()]
    return sum(leaf.size for leaf in jax.tree.leaves(memory))


# Which parameters fine-tuning moves, by their names. A new head, outside of the body, is always trained.
# Source: Raffel et al. 2020, section 3.5.1.


def every_parameter(updates: Updates, _step: jax.Array) -> Updates:
    """Every parameter is trained, always."""
    return updates


def body_frozen(updates: Updates, _step: jax.Array) -> Updates:
    """Only what is new is trained, and the body does not decay either."""
    return {name: jnp.zeros_like(x) if name.startswith(BODY) else x for name, x in updates.items()}


def embedding_frozen(updates: Updates, _step: jax.Array) -> Updates:
    """All but the embedding of tokens is trained; tied to it, the output matrix is not."""
    return {name: jnp.zeros_like(x) if f".{name}".endswith(EMBEDDING) else x for name, x in updates.items()}


def adapters_only(updates: Updates, _step: jax.Array) -> Updates:
    """Adapters and all norms are trained, as the paper says; the released code trains the adapters' norms
    alone.
    """
    return _alone(
        updates, lambda modules: "adapter" in modules or any(each.endswith("norm") for each in modules[-1:])
    )


def lora_only(updates: Updates, _step: jax.Array) -> Updates:
    """Low-rank updates alone are trained, and a new head (Hu et al. 2021, section 4)."""
    return _alone(updates, lambda modules: "lora" in modules)


def _alone(updates: Updates, trained: Callable[[list[str]], bool]) -> Updates:
    """Those of a new head, and of parameters in ``trained`` modules, outermost first; the others are 0."""
    has_body = any(name.startswith(BODY) for name in updates)

    def moves(name):
        return has_body and not name.startswith(BODY) or trained(name.split(".")[:-1])

    return {name: value if moves(name) else jnp.zeros_like(value) for name, value in updates.items()}


@dataclass(frozen=True)
class GradualUnfreezing:
    """Unfreezes a layer at a time, from the top of all stacks at once, and the last after ``steps`` less one
    episode.

    There are as many episodes as the deepest stack has layers, equally long. A stack's last norm and the
    softmax, with the embedding if that is the same matrix, are trained from the start on. The relative bias,
    and whatever else comes before the first layer, are trained with that layer.
    """

    model: ModelConfig
    steps: int  # of the whole fine-tuning

    def __call__(self, updates: Updates, step: jax.Array) -> Updates:
        model = self.model
        layers = {"encoder": model.num_encoder_layers, "decoder": model.num_decoder_layers}
        sides = [side for side in layers if getattr(model, f"has_{side}")]
        depths = {side: 1 if model.shared_layers else layers[side] for side in sides}
        depths |= {"backward": depths["decoder"]} if "backward" in model.heads else {}
        episodes = max(depths.values())
        unfrozen = 1 + step * episodes // self.steps  # layers, from the top

        def needed(name: str, ndim: int) -> int | np.ndarray:  # unfrozen layers before this is trained
            module, _, rest = name.removeprefix(BODY).removeprefix(FORWARD).partition(".")
            if module == "embed" and not model.logits.startswith("tied"):
                return episodes
            if module not in depths or rest.startswith("norm."):
                return 1
            if not rest.startswith("blocks."):
                return depths[module]
            return np.arange(depths[module], 0, -1).reshape(-1, *[1] * (ndim - 1))

        return {name: jnp.where(unfrozen >= needed(name, x.ndim), x, 0) for name, x in updates.items()}

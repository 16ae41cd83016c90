"""Optimisers, schedules and frozen parameters, built on optax; schedules and masks depend on the step."""

from collections.abc import Callable, Collection, Mapping
from dataclasses import dataclass
from functools import partial
from typing import TypeAlias

import jax
import jax.numpy as jnp
import numpy as np
import optax
from flax import nnx

from lm import sharding
from lm.config.base import SettingError
from lm.config.model import ModelConfig
from lm.config.training import OPTIMIZERS, Axes, OptimizerConfig, is_matrix
from lm.nn.elmo import FORWARD
from lm.nn.finetune import BODY
from lm.nn.stack import layers_by_module

Optimizer: TypeAlias = optax.GradientTransformationExtraArgs
Transform: TypeAlias = optax.GradientTransformation
Updates = dict[str, jax.Array]  # updates of parameters, by name
EMBEDDING = ".embed.table"  # name suffix of a token embedding, also inside a wrapped model
EMBEDDINGS = (EMBEDDING, ".encoder_embed.table")  # the second is an encoder's own
CLUSTERS = (".embed.clusters.", ".encoder_embed.clusters.")  # likewise, of adaptive embeddings
MaskUpdates = Callable[[Updates, jax.Array], Updates]  # (updates, step) -> updates, 0 for frozen parameters


def learning_rate(config: OptimizerConfig, step: jax.Array) -> jax.Array:
    """Return float32 []: the learning rate of the update from ``step`` to step + 1.

    >>> config = OptimizerConfig(learning_rate=0.1, schedule="linear", warmup_steps=2, decay_end=4)
    >>> print(*[round(float(learning_rate(config, step)), 3) for step in range(5)])
    0.0 0.05 0.1 0.05 0.0

    Raises SettingError for a decay whose end is not known yet (``OptimizerConfig.ending_at``).
    """
    if config.decays and not config.decay_end:
        raise SettingError(
            f"optimizer.decay_end=0 should be the last step of the schedule {config.schedule!r}: "
            "call OptimizerConfig.ending_at(steps)"
        )
    step = jnp.asarray(step, jnp.float32)

    def progress(start: int) -> jax.Array:
        """Return the fraction of the decay from step ``start`` that is done."""
        return jnp.clip((step - start) / max(1, config.decay_end - start), 0, 1)

    def to_floor(decay: jax.Array) -> jax.Array:
        """Return a decay from 1 to ``decay_floor``, given one from 1 to 0."""
        return decay if config.decay_floor == 0 else config.decay_floor + (1 - config.decay_floor) * decay

    inverse_sqrt = jnp.maximum(step, config.timescale) ** -0.5
    late_decay = to_floor(1 - progress(config.decay_start))
    schedule = {
        "constant": jnp.ones_like(step),
        "inverse-sqrt": inverse_sqrt,
        "inverse-sqrt-linear": inverse_sqrt * late_decay,
        "linear": to_floor(1 - progress(config.warmup_steps)),
        "cosine": to_floor((1 + jnp.cos(jnp.pi * progress(config.warmup_steps))) / 2),
        "decay-every": config.decay_factor ** (step // config.steps_per_decay),
        "warmup-stable-decay": late_decay,
    }[config.schedule]
    warmup = jnp.minimum(1, step / config.warmup_steps) if config.warmup_steps else 1.0
    return config.learning_rate * schedule * warmup


def make_optimizer(
    config: OptimizerConfig,
    axes: Axes,
    mask_updates: MaskUpdates,
    learning_rate_multipliers: Mapping[str, float] | None = None,
) -> Optimizer:
    """Return the optimiser of parameters {name: array} with these axes (``lm.sharding.logical_axes``).

    ``learning_rate_multipliers`` multiply the learning rates of the parameters that they name
    (``lm.train.mup``). The optimiser's ``update`` also takes ``step`` int32 [], for the schedule and
    ``mask_updates``, so neither keeps a step count of its own that fine-tuning would have to reset.
    """
    masking, descent = apply_at_step(mask_updates), apply_at_step(partial(_descend, config))
    directions = _direction_transforms(config, axes, learning_rate_multipliers, mask_updates)
    return optax.chain(*directions, masking, descent)


def update_direction(config: OptimizerConfig, axes: Axes) -> Transform:
    """Return the transformation from gradients to directions, to be multiplied by the learning rate.

    Tests compare it with reference optimisers; training uses ``make_optimizer``.
    """
    return optax.chain(*_direction_transforms(config, axes, None))


def _direction_transforms(
    config: OptimizerConfig,
    axes: Axes,
    learning_rate_multipliers: Mapping[str, float] | None,
    mask_updates: MaskUpdates | None = None,
) -> list[Transform]:
    stacked = {name for name, names in axes.items() if names[:1] == ("layers",)}
    decayed = {name: is_matrix(names) for name, names in axes.items()}
    transforms = []
    if config.clip_norm is not None:
        transforms.append(_clip_by_trained_norm(config.clip_norm, mask_updates))
    transforms.append(per_layer(config.transform(axes), stacked))
    if learning_rate_multipliers:
        # Weight decay is added after the multipliers, so that it shrinks matrices of every width by the same
        # fraction per step.
        transforms.append(optax.stateless(partial(_multiply, learning_rate_multipliers)))
    if config.weight_decay and not getattr(OPTIMIZERS[config.name], "adds_weight_decay", False):
        transforms.append(optax.add_decayed_weights(config.weight_decay, mask=decayed))
    return transforms


def _clip_by_trained_norm(clip_norm: float, mask_updates: MaskUpdates | None) -> Optimizer:
    """Return ``optax.clip_by_global_norm`` by the norm of those gradients that are not masked."""

    def update(updates, state, _params=None, *, step=None, **_):
        norm = optax.tree.norm(updates if mask_updates is None else mask_updates(updates, step))
        clipped = jax.tree.map(lambda x: jnp.where(norm < clip_norm, x, x / norm * clip_norm), updates)
        return clipped, state

    return optax.GradientTransformationExtraArgs(lambda params: optax.EmptyState(), update)


def _multiply(factors: Mapping[str, float], updates: Updates, _params: Updates | None) -> Updates:
    return {name: update * factors.get(name, 1.0) for name, update in updates.items()}


def apply_at_step(function: MaskUpdates) -> Optimizer:
    """Return the stateless transformation of updates by ``function(updates, step)``."""

    def update(updates, state, _params=None, *, step, **_):
        return function(updates, step), state

    return optax.GradientTransformationExtraArgs(lambda params: optax.EmptyState(), update)


def _descend(config: OptimizerConfig, updates: Updates, step: jax.Array) -> Updates:
    rate = learning_rate(config, step)
    return {name: -(rate * update) for name, update in updates.items()}


def per_layer(transform: Transform, stacked: Collection[str]) -> Transform:
    """Apply ``transform`` to each layer of the ``stacked`` parameters separately.

    Adafactor factors, clips and scales each matrix: treating the stack as one array would mix statistics
    across layers.
    """

    def group_by_depth(arrays):  # {number of layers: {name: array}}, 0 for arrays that are not stacked
        groups: dict[int, dict[str, jax.Array]] = {}
        for name, array in arrays.items():
            groups.setdefault(array.shape[0] if name in stacked else 0, {})[name] = array
        return groups

    def init(params):
        state = {}
        for depth, group in group_by_depth(params).items():
            init_group = jax.vmap(transform.init) if depth else transform.init
            state[str(depth)] = init_group(group)
        return state

    def update(updates, state, params):
        param_groups, new_state = group_by_depth(params), {}
        new_updates: Updates = {}
        for depth, group in group_by_depth(updates).items():
            update_group = jax.vmap(transform.update) if depth else transform.update
            new, new_state[str(depth)] = update_group(group, state[str(depth)], param_groups[depth])
            new_updates |= new
        return {name: new_updates[name] for name in updates}, new_state

    return optax.GradientTransformation(init, update)


def average_parameters(decay: float, step: jax.Array, average: Updates, params: Updates) -> Updates:
    """Return the exponential moving average of the parameters, updated with the ``params`` of ``step`` + 1.

    The average starts as the initial (or pre-trained) parameters. The decay grows as (1 + step) / (10 + step)
    up to ``decay``, so that the weight of the initial parameters falls below 1e-12 within 100 steps.
    """
    decay_now = jnp.minimum(decay, (1 + step) / (10 + step))
    return {name: average[name] + (1 - decay_now) * (value - average[name]) for name, value in params.items()}


def optimizer_state_size(config: OptimizerConfig, model: nnx.Module) -> int:
    """Return the number of array elements in the optimiser's state and the moving average."""
    optimizer = make_optimizer(config, sharding.logical_axes(model), train_all)
    state = [jax.eval_shape(optimizer.init, sharding.named(model)), model if config.ema else ()]
    return sum(leaf.size for leaf in jax.tree.leaves(state))


# --- ``MaskUpdates`` for fine-tuning: which parameters are trained, by their names

# A new head is always trained: its names do not begin with BODY, as those of the pre-trained model do.
# Adapters and gradual unfreezing: Raffel et al. 2020, section 3.5.1.


def train_all(updates: Updates, _step: jax.Array) -> Updates:
    """Train all parameters."""
    return updates


def freeze_body(updates: Updates, _step: jax.Array) -> Updates:
    """Train only the new head; weight decay skips the body too."""
    return {name: jnp.zeros_like(x) if name.startswith(BODY) else x for name, x in updates.items()}


def freeze_embedding(updates: Updates, _step: jax.Array) -> Updates:
    """Train all but the embeddings of tokens, one of which may also be the output matrix."""

    def is_embedding(name: str) -> bool:
        path = f".{name}"
        return path.endswith(EMBEDDINGS) or any(cluster in path for cluster in CLUSTERS)

    return {name: jnp.zeros_like(x) if is_embedding(name) else x for name, x in updates.items()}


def train_adapters(updates: Updates, _step: jax.Array) -> Updates:
    """Train adapters and all norms, as Raffel et al. 2020 say; their code trains only adapters' norms."""
    return _train_modules(updates, lambda path: "adapter" in path or path[-1].endswith("norm"))


def train_lora(updates: Updates, _step: jax.Array) -> Updates:
    """Train low-rank updates alone, and a new head (Hu et al. 2021, section 4)."""
    return _train_modules(updates, lambda path: "lora" in path)


def _train_modules(updates: Updates, is_trained: Callable[[list[str]], bool]) -> Updates:
    """Return the updates, with 0 for frozen parameters; those of a new head are always trained.

    ``is_trained`` says for all others whether they are trained, given the path of the parameter's module.
    """
    has_body = any(name.startswith(BODY) for name in updates)

    def has_update(name):
        is_in_head = has_body and not name.startswith(BODY)
        path = name.split(".")[:-1] or [""]
        return is_in_head or is_trained(path)

    return {name: value if has_update(name) else jnp.zeros_like(value) for name, value in updates.items()}


@dataclass(frozen=True)
class GradualUnfreezing:
    """Unfreezes one more layer per episode, from the top of every stack; the last episode trains all layers.

    Episodes are equally long, and there are as many as the deepest stack has layers. A stack's last norm and
    the output matrix, also if it is tied to the embedding, are trained from the start. The relative bias, and
    everything else before the first layer, are trained together with that layer; an embedding that several
    stacks read, with the first layer of the deepest.
    """

    model: ModelConfig
    steps: int  # of the whole fine-tuning

    def __call__(self, updates: Updates, step: jax.Array) -> Updates:
        episodes = max(self.stack_depths.values())
        num_unfrozen = 1 + step * episodes // self.steps  # layers, from the top
        masked = {}
        for name, update in updates.items():
            is_trained = num_unfrozen >= self._num_layers_to_unfreeze(name, update.shape)
            masked[name] = jnp.where(is_trained, update, 0)
        return masked

    @property
    def stack_depths(self) -> dict[str, int]:
        """Return the number of layers of each stack; 1 if all of its layers share their parameters."""
        model = self.model
        num_layers = {"encoder": model.num_encoder_layers, "decoder": model.num_decoder_layers}
        depths = {}
        for stack in ("encoder", "decoder"):
            if getattr(model, f"has_{stack}"):
                is_one_layer = model.shares_layers(stack) and model.shared_parts == "all"
                depths[stack] = 1 if is_one_layer else num_layers[stack]
        if "backward" in model.heads:
            depths["backward"] = depths["decoder"]
        return depths

    def _num_layers_to_unfreeze(self, name: str, shape: tuple[int, ...]) -> int | np.ndarray:
        """Return how many top layers have to be unfrozen before this parameter is trained.

        For a parameter that is stacked over layers: the number for each layer, int [layers,1,...].
        """
        model, depths = self.model, self.stack_depths
        component, _, rest = name.removeprefix(BODY).removeprefix(FORWARD).partition(".")
        is_output = component == "embed" and model.output.logits.startswith("tied")
        if component == "encoder_embed":
            return depths["encoder"]
        if component == "embed" and not is_output:
            # An encoder that has an embedding of its own does not read the decoder's.
            has_two_embeddings = model.has_decoder and model.embedding.encoder == "separate"
            return max(
                depth for stack, depth in depths.items() if stack != "encoder" or not has_two_embeddings
            )
        if component not in depths or rest.startswith("norm."):
            return 1
        depth = depths[component]
        if not rest.startswith("blocks."):
            return depth
        block_module = rest.split(".")[1]
        has_memory = model.has_product_key_memory(component == "decoder" and model.has_encoder)
        # A module without an entry is in all layers: each has its own, or ``shape[0]`` is 1 and all share it
        # as part of the top layer.
        default = range(depth - shape[0], depth)
        layer_indices = layers_by_module(model, depth, has_memory).get(block_module, default)
        # If all layers share one block, ``depth`` is 1, but the step embeddings of a Universal Transformer
        # are stacked over all layers, with indices up to 0. They are trained with the block.
        counts = np.minimum(depth - np.array(layer_indices), depth)
        return counts.reshape(-1, *[1] * (len(shape) - 1))

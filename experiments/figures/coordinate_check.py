"""The coordinate check: how much a few steps change what a model computes, by its width.

In the maximal update parametrisation hidden states and logits change by as much at any width. In the standard
one they change by more the wider the model is, so that its best learning rate falls (Yang et al. 2022,
appendix D.1).
"""

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from lm.batch import Batch
from lm.config.base import SettingError, changes
from lm.config.model import ModelConfig
from lm.config.training import OptimizerConfig
from lm.train.state import State
from lm.train.step import StepSpec, initial_state, train_step


def at_width(config: ModelConfig, width: int, is_mup: bool) -> ModelConfig:
    """Return a model with d_model ``width`` and as many heads, whose d_ff and d_kv are in proportion.

    With ``is_mup`` the given model is the base of muP; otherwise the new one has the standard
    parametrisation. Raises SettingError where a width would not be a whole number.
    """
    sizes = {"mlp.d_ff": config.mlp.d_ff, "attention.d_kv": config.attention.d_kv}
    if config.attention.d_v is not None:
        sizes["attention.d_v"] = config.attention.d_v
    if config.encoder.d_ff is not None:
        sizes["encoder.d_ff"] = config.encoder.d_ff
    new: dict[str, object] = {"d_model": width}
    for path, size in sizes.items():
        if size * width % config.d_model or size * width < config.d_model:
            raise SettingError(
                f"a width of {width} makes model.{path}={size} of model.d_model={config.d_model} "
                f"{size * width / config.d_model:g}: choose a multiple of {config.d_model}"
            )
        new[path] = size * width // config.d_model
    if is_mup:
        new |= {"mup.base": config.d_model, "mup.base_d_kv": config.attention.d_kv}
    return changes(config, new)


def coordinate_changes(
    config: ModelConfig, optimizer: OptimizerConfig, batch: Batch, steps: int, seed: int = 0
) -> dict[str, np.ndarray]:
    """Return by how much the last hidden states, and the logits, differ from the start after each step.

    The result is {"hidden states", "logits": float32 [steps]}: root mean squares over the positions and
    features of ``batch``, on which each of the steps trains too. The hidden states are those before the last
    norm.
    """
    spec = StepSpec(config, optimizer)
    transform = spec.make_optimizer()

    def outputs(state: State, batch: Batch) -> dict[str, jax.Array]:
        model: Any = state.eval_model
        hidden = model.hidden_states(batch)["decoder" if config.has_decoder else "encoder"][-1]
        found = {"hidden states": hidden.astype(jnp.float32)}
        return found if config.output.logits == "none" else found | {"logits": model(batch)}

    @jax.jit
    def train(seed: jax.Array, batch: Batch) -> dict[str, jax.Array]:
        start = initial_state(spec, transform, seed)
        first = outputs(start, batch)

        def step(state, _):
            state, _ = train_step(spec, transform, state, batch, seed)
            differences = jax.tree.map(jnp.subtract, outputs(state, batch), first)
            return state, {name: jnp.sqrt(jnp.square(x).mean()) for name, x in differences.items()}

        return jax.lax.scan(step, start, length=steps)[1]

    return {name: np.asarray(sizes) for name, sizes in train(np.uint32(seed), batch).items()}

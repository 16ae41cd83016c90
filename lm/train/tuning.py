"""Which parameters fine-tuning moves: functions ``tune(updates, step) -> updates``, by name of parameter.

What is new, a head outside of the body, is trained by all of them. Source: Raffel et al. 2020, section 3.5.1.
"""

from collections.abc import Callable
from dataclasses import dataclass

import jax
import jax.numpy as jnp
import numpy as np

from lm.nn.composed import BODY
from lm.nn.config import ModelConfig

Updates = dict[str, jax.Array]  # what the optimiser asks for, by parameter
Tune = Callable[[Updates, jax.Array], Updates]  # also takes the state's step


def every_parameter(updates: Updates, step: jax.Array) -> Updates:
    """Every parameter is trained, always."""
    return updates


def body_frozen(updates: Updates, step: jax.Array) -> Updates:
    """Only what is new is trained, and the body does not decay either."""
    return {
        name: jnp.zeros_like(value) if name.startswith(BODY) else value for name, value in updates.items()
    }


def adapters_only(updates: Updates, step: jax.Array) -> Updates:
    """Adapters and all norms are trained, as the paper says; the released code trains the adapters' norms
    alone.
    """
    has_body = any(name.startswith(BODY) for name in updates)

    def trained(name):
        *modules, _ = name.split(".")
        new = has_body and not name.startswith(BODY)
        return new or "adapter" in modules or any(name.endswith("norm") for name in modules[-1:])

    return {name: value if trained(name) else jnp.zeros_like(value) for name, value in updates.items()}


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
        depths = {
            side: 1 if model.shared_layers else depth
            for side, depth in layers.items()
            if getattr(model, f"has_{side}")
        }
        episodes = max(depths.values())
        unfrozen = 1 + step * episodes // self.steps  # layers, from the top

        def needed(name: str, ndim: int) -> int | np.ndarray:  # unfrozen layers before this is trained
            module, _, rest = name.removeprefix(BODY).partition(".")
            if module == "embed" and not model.logits.startswith("tied"):
                return episodes
            if module not in depths or rest.startswith("norm."):
                return 1
            if not rest.startswith("blocks."):
                return depths[module]
            return np.arange(depths[module], 0, -1).reshape(-1, *[1] * (ndim - 1))

        return {
            name: jnp.where(unfrozen >= needed(name, value.ndim), value, 0) for name, value in updates.items()
        }

"""Learning rates by parameter in the maximal update parametrisation (lm.config.mup has the whole table)."""

from lm.config.base import SettingError
from lm.config.model import ModelConfig
from lm.config.training import Axes, OptimizerConfig

# Axes of parameters that grow with the width of a model, and axes that do not.
WIDE = frozenset({"embed", "heads", "kv_heads", "mlp", "kv", "norm"})
NARROW = frozenset({"layers", "vocab", "length", "buckets", "bias_heads", "classes", "taps"})


def learning_rate_multipliers(model: ModelConfig, axes: Axes) -> dict[str, float]:
    """Return {name: factor of the learning rate} of the parameters whose rate depends on the width.

    These are the hidden matrices, which map features to features: two of their axes grow with the width. An
    embedding or an output matrix has one such axis, as a bias and a norm have, and a scalar has none. At the
    width of the base, and in the standard parametrisation, the result is empty.

    Raises SettingError for an axis of which it is unknown whether it grows.
    """
    if model.width_factor == 1:
        return {}
    factors: dict[str, float] = {}
    for name, names in axes.items():
        if unknown := set(names) - WIDE - NARROW:
            raise SettingError(
                f"model.mup.base={model.mup.base} has no learning rate for the parameter {name} with axes "
                f"{names}: {', '.join(sorted(unknown))} should be one of {', '.join(sorted(WIDE | NARROW))}, "
                "or model.mup.base be 0"
            )
        if sum(axis in WIDE for axis in names) > 1:
            factors[name] = model.width_factor
    return factors


def check_optimizer(model: ModelConfig, optimizer: OptimizerConfig, name: str = "optimizer") -> None:
    """Raise SettingError for an optimiser whose learning rates by width are not known here.

    The rule of Adam holds where each element of an update is about 1 whatever the gradient's size, as it is
    with Adafactor too if its step is not relative to the size of a parameter. ``name`` is that of the
    settings in the error.
    """
    if not model.mup.base:
        return
    is_adafactor = optimizer.name == "adafactor" and optimizer.relative == "none"
    if optimizer.name == "adamw" or is_adafactor:
        return
    found = f"{name}.name={optimizer.name!r}"
    if optimizer.name == "adafactor":
        found += f" with {name}.relative={optimizer.relative!r}"
    raise SettingError(
        f"model.mup.base={model.mup.base} has learning rates by width for {name}.name='adamw', and for "
        f"'adafactor' with {name}.relative='none', not for {found}: choose one of the two, or set "
        "model.mup.base=0"
    )

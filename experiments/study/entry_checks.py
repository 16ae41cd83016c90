"""Checks that functions of a user's own module return what their registries expect (docs/extending.md).

They are called once, on a small example, when the module is loaded: otherwise their mistakes would show only
after the data have been prepared. Each raises SettingError; its cause is what the function itself raised.
"""

from collections.abc import Callable
from dataclasses import replace
from typing import TYPE_CHECKING, Any

import numpy as np

from lm.config.base import SettingError
from lm.objectives.corruption import CorruptionInputs, Noise, NoiseCounts, length_mask, run_starts
from lm.objectives.denoising import OBJECTIVES

if TYPE_CHECKING:
    from jax import Array

LENGTHS = np.array([1, 2, 3, 7, 16, 32], np.int32)  # of the texts that a noise is tried on


def check_activation(name: str, activation: "Callable[[Array], Array]") -> None:
    """Raise SettingError unless an entry of ACTIVATIONS maps features [...] to features [...]."""
    import jax

    features = jax.ShapeDtypeStruct((2, 3, 4), np.float32)
    _check_result(f"ACTIVATIONS[{name!r}]", activation, features.shape, features=features)


def check_token_loss(name: str, token_loss: "Callable[[Array, Array], Array]") -> None:
    """Raise SettingError unless an entry of TOKEN_LOSSES maps logits [B,T,V] and targets [B,T] to [B,T]."""
    import jax

    logits, targets = jax.ShapeDtypeStruct((2, 3, 5), np.float32), jax.ShapeDtypeStruct((2, 3), np.int32)
    _check_result(f"TOKEN_LOSSES[{name!r}]", token_loss, targets.shape, logits=logits, targets=targets)


def check_noise(name: str, noise: Noise) -> None:
    """Raise SettingError unless the mask of an entry of NOISES is bool [B,L], and its counts are the mask's.

    Counts, if it has them, should be the number of noise tokens, and at least the numbers of spans.
    """
    rng = np.random.default_rng(0)
    batch, width = len(LENGTHS), int(LENGTHS.max())
    uniforms = rng.random((batch, noise.uniforms_per_token, width), np.float32)
    of_name: Any = {"noise": name}
    objective = replace(OBJECTIVES["baseline"], **of_name)
    texts = CorruptionInputs(LENGTHS, uniforms, 100, rng.random((batch, width)) < 0.5)
    counts: Any = None
    try:
        mask = objective.draw_noise(texts)
        if noise.counts is not None:
            counts = noise.counts(objective, LENGTHS, uniforms[:, 0, 0])
    except SettingError:
        raise
    except Exception as error:
        raise SettingError(f"NOISES[{name!r}] fails: {type(error).__name__}: {error}") from error
    if noise.counts is None:
        return
    if not isinstance(counts, NoiseCounts):
        raise SettingError(
            f"the counts of NOISES[{name!r}] should be NoiseCounts(tokens, spans, visible_spans)"
        )
    is_text = length_mask(LENGTHS, width)
    hidden, visible = mask & is_text, ~mask & is_text
    due = NoiseCounts(hidden.sum(1), run_starts(hidden).sum(1), run_starts(visible).sum(1))
    for field, found, least in zip(NoiseCounts._fields, map(np.asarray, counts), due, strict=True):
        is_exact = field == "tokens"
        if found.shape == least.shape and (found == least if is_exact else found >= least).all():
            continue
        raise SettingError(
            f"the counts of NOISES[{name!r}] give {field}={found.tolist()} for texts of {LENGTHS.tolist()} "
            f"tokens; its mask has {'' if is_exact else 'at least '}{least.tolist()}"
        )


def _check_result(entry: str, function: Callable[..., Any], due: tuple[int, ...], **arguments: Any) -> None:
    """Raise SettingError unless a function of arrays returns floating-point numbers of shape ``due``."""
    import jax
    import jax.numpy as jnp

    read = " and ".join(f"{name} {list(array.shape)}" for name, array in arguments.items())
    try:
        result: Any = jax.eval_shape(function, *arguments.values())
    except Exception as error:
        raise SettingError(f"{entry} fails for {read}: {type(error).__name__}: {error}") from error
    shape, dtype = getattr(result, "shape", None), getattr(result, "dtype", type(result).__name__)
    if shape != due or not jnp.issubdtype(dtype, jnp.floating):
        found = dtype if shape is None else f"{dtype} {list(shape)}"
        raise SettingError(f"{entry} returns {found} for {read}; it should return floats {list(due)}")

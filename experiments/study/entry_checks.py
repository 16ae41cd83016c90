"""Checks that functions of a user's own module return what their registries expect (docs/extending.md).

When the module is loaded, noises are called on a few short texts, and activations and losses are traced for
small arrays: otherwise their mistakes would show only after the data have been prepared. For the same reason
a run traces the model of a row that names a mixer of the module. Each check raises SettingError, whose cause
is what the function itself raised.
"""

from collections.abc import Callable
from dataclasses import replace
from typing import TYPE_CHECKING, Any, get_args

import numpy as np

from lm.config.base import SettingError, did_you_mean
from lm.config.layers import MixerName
from lm.config.model import ModelConfig
from lm.objectives.corruption import (
    CorruptionConfig,
    CorruptionInputs,
    Noise,
    NoiseCounts,
    length_mask,
    run_starts,
)
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

    if name == "cross-entropy":
        raise SettingError("TOKEN_LOSSES['cross-entropy'] is the project's own; choose another name")
    logits, targets = jax.ShapeDtypeStruct((2, 3, 5), np.float32), jax.ShapeDtypeStruct((2, 3), np.int32)
    _check_result(f"TOKEN_LOSSES[{name!r}]", token_loss, targets.shape, logits=logits, targets=targets)


def check_mixer(model: ModelConfig, length: int) -> None:
    """Raise SettingError unless a model with a mixer of a user's own can be traced for a row of ``length``.

    Other models are not traced: they are tested.
    """
    name = model.mixer.kind
    if name in get_args(MixerName):
        return
    import jax

    from lm.batch import Batch, Side
    from lm.train.step import StepSpec

    def logits(key: "Array", tokens: "Array") -> Any:
        side = Side(tokens=tokens)
        batch = Batch(
            encoder=side if model.has_encoder else None, decoder=side if model.has_decoder else None
        )
        transformer: Any = StepSpec(model).make_model(key)
        return transformer(batch, key)

    tokens = jax.ShapeDtypeStruct((2, length), np.int32)
    try:
        jax.eval_shape(logits, jax.eval_shape(lambda: jax.random.key(0)), tokens)
    except SettingError:
        raise
    except Exception as error:
        raise SettingError(
            f"model.mixer.kind={name!r} fails for rows of {length} tokens: {type(error).__name__}: {error}"
        ) from error


class StartsNotGiven(SettingError):
    """A noise reads starts of words or sentences without the flag with which it gets them."""


class TrialTexts(CorruptionInputs):
    """Texts that raise StartsNotGiven if a noise reads starts that it does not get without a flag."""

    def _starts(self, field: str) -> np.ndarray:
        starts: Any = self[self._fields.index(field)]  # the tuple's own, not the property of this name
        if starts is None:
            raise StartsNotGiven(f"reads texts.{field}, which it gets with Noise(..., needs_{field}=True)")
        return starts

    def __getattr__(self, name: str) -> Any:
        raise AttributeError(f"texts has no {name!r}; it has {', '.join(self._fields)}")

    @property
    def word_starts(self) -> np.ndarray:
        return self._starts("word_starts")

    @property
    def sentence_starts(self) -> np.ndarray:
        return self._starts("sentence_starts")


def check_noise(name: str, noise: Noise) -> None:
    """Raise SettingError unless the mask of an entry of NOISES is bool [B,L], and its counts suit the mask.

    The mask is a function of settings and texts: it is the same if it is drawn again. Of counts, if it has
    them, that of noise tokens is exact, and those of spans may be too large. What it ignores should be
    settings, and the rate is none of them if the room for targets follows from it.
    """
    settings = [field for field, value in vars(CorruptionConfig).items() if isinstance(value, property)]
    for ignored in noise.ignores:
        if ignored not in settings:
            raise SettingError(f"NOISES[{name!r}] ignores {ignored!r}{did_you_mean(ignored, settings)}")
    if "rate" in noise.ignores and noise.target_room_follows_rate:
        raise SettingError(
            f"NOISES[{name!r}] ignores 'rate' and has no counts: targets have room for objective.rate of a "
            "text, and noise beyond that is left out. Give Noise(..., counts=...), or do not ignore 'rate' "
            "and set objective.rate to the share that it hides"
        )
    rng = np.random.default_rng(0)
    batch, width = len(LENGTHS), int(LENGTHS.max())
    uniforms = rng.random((batch, noise.uniforms_per_token, width), np.float32)
    chosen: Any = name  # none of the names that the type has
    objective = replace(OBJECTIVES["baseline"], noise=chosen)
    word_starts, sentence_starts = rng.random((batch, width)) < 0.5, rng.random((batch, width)) < 0.1

    def drawn() -> np.ndarray:
        words = word_starts.copy() if noise.needs_word_starts else None
        sentences = sentence_starts.copy() if noise.needs_sentence_starts else None
        texts = TrialTexts(LENGTHS.copy(), uniforms.copy(), width, words, sentences)
        return objective.draw_noise(texts)

    is_text = length_mask(LENGTHS, width)
    counts: Any = None
    try:
        mask, again = drawn(), drawn()
        if noise.counts is not None:
            counts = noise.counts(objective, LENGTHS, uniforms[:, 0, 0])
    except StartsNotGiven as error:
        raise SettingError(f"NOISES[{name!r}] {error}") from error
    except SettingError:
        raise
    except Exception as error:
        raise SettingError(f"NOISES[{name!r}] fails: {type(error).__name__}: {error}") from error
    if ((mask != again) & is_text).any():
        raise SettingError(
            f"NOISES[{name!r}] returns another mask when it is called again with the same texts; take its "
            "random numbers from texts.uniforms alone, so that a batch is a function of seed and step"
        )
    if noise.counts is None:
        return
    if not isinstance(counts, NoiseCounts):
        raise SettingError(
            f"the counts of NOISES[{name!r}] should be NoiseCounts({', '.join(NoiseCounts._fields)})"
        )
    hidden, visible = mask & is_text, ~mask & is_text
    of_mask = NoiseCounts(hidden.sum(1), run_starts(hidden).sum(1), run_starts(visible).sum(1))
    for field, count, actual in zip(NoiseCounts._fields, map(np.asarray, counts), of_mask, strict=True):
        is_exact = field == "num_noise_tokens"
        if count.shape == actual.shape and (count == actual if is_exact else count >= actual).all():
            continue
        raise SettingError(
            f"the counts of NOISES[{name!r}] give {field}={count.tolist()} for texts of {LENGTHS.tolist()} "
            f"tokens; its mask has {actual.tolist()}"
        )


def _check_result(
    entry: str, function: Callable[..., Any], expected: tuple[int, ...], **arguments: Any
) -> None:
    """Raise SettingError unless a function of arrays returns floating-point numbers of this shape."""
    import jax
    import jax.numpy as jnp

    given = " and ".join(f"{name} {list(array.shape)}" for name, array in arguments.items())
    try:
        result: Any = jax.eval_shape(function, *arguments.values())
    except Exception as error:
        raise SettingError(f"{entry} fails for {given}: {type(error).__name__}: {error}") from error
    shape, dtype = getattr(result, "shape", None), getattr(result, "dtype", type(result).__name__)
    if shape != expected or not jnp.issubdtype(dtype, jnp.floating):
        found = dtype if shape is None else f"{dtype} {list(shape)}"
        raise SettingError(f"{entry} returns {found} for {given}; it should return floats {list(expected)}")

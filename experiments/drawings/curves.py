"""What changes with distance, as curves: position encodings, learnt biases, gradients through a state."""

from collections.abc import Mapping
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx
from matplotlib.figure import Figure

from experiments.drawings.panels import Plot, plots
from lm.config.attention import RotaryConfig
from lm.config.base import SettingError
from lm.config.layers import MixerConfig, PositionsConfig
from lm.config.model import ModelConfig
from lm.evaluate.rnn_states import state_gradients
from lm.nn.rnn import Direction
from lm.nn.transformer import Transformer
from lm.ops.positions import AlibiBias, alibi_slopes, relative_position_bucket, rotate
from lm.ops.recurrence import States

DISTANCE = "distance, key's position − query's [tokens]"
Curve = tuple[np.ndarray, np.ndarray]  # places and heights


def bucket_curves(reach: int, config: ModelConfig) -> dict[str, Curve]:
    """T5's bucket of each distance up to ``reach``, of encoders and of decoders."""
    distance = np.arange(-reach, reach + 1)
    sizes = {
        "num_buckets": config.positions.relative_buckets,
        "max_distance": config.positions.relative_max_distance,
    }

    def bucket(both: bool) -> np.ndarray:
        return np.asarray(relative_position_bucket(jnp.asarray(distance), bidirectional=both, **sizes))

    return {name: (distance, bucket(name == "encoder")) for name in ("encoder", "decoder")}


def alibi_curves(reach: int, heads: int) -> dict[str, Curve]:
    """ALiBi's bias of each distance up to ``reach``, of each head."""
    distance = np.arange(-reach, reach + 1)
    bias = AlibiBias(jnp.asarray(alibi_slopes(heads))).evaluate(jnp.asarray(distance)[None, None])[0, :, 0]
    return {f"head {i}": (distance, np.asarray(head)) for i, head in enumerate(bias, 1)}


def rotary_curves(reach: int, width: int, config: RotaryConfig) -> dict[str, Curve]:
    """By distance, over their value at 0: the score of two equal vectors of ones, and Su et al.'s bound.

    The bound is the mean of ``|S_j|``, S_j the sum of the first j turned unit vectors (2021, section 3.4.3).
    """
    distance = np.arange(reach + 1)
    frequencies, factor = config.frequencies(width)
    ones = jnp.ones((1, reach + 1, 1, width))
    places = jnp.asarray(distance)[None]
    turned = np.asarray(rotate(ones, places, frequencies, factor, config.layout))[0, :, 0]
    sums = np.cumsum(np.exp(1j * distance[:, None] * frequencies), axis=1)
    curves = {"score of equal vectors": turned @ turned[0], "bound of Su et al.": np.abs(sums).mean(1)}
    return {name: (distance, values / values[0]) for name, values in curves.items()}


def bias_plots(model: Transformer) -> list[Plot]:
    """What each head adds to scores by distance, a panel a stack; SettingError for other positions."""
    config = model.config
    if config.positions.kind != "relative":
        raise SettingError(f"model.positions.kind={config.positions.kind!r} should be 'relative', T5's bias")
    reach, panels = round(1.25 * config.positions.relative_max_distance), []
    distance = np.arange(-reach, reach + 1)
    for side in ("encoder", "decoder"):
        stack = getattr(model, side)
        if stack is None:
            continue
        both = side == "encoder" or config.architecture == "prefix-decoder"
        bias = np.asarray(stack.relative(both).evaluate(jnp.asarray(distance)[None, None]))[0, :, 0]
        seen = slice(None) if both else slice(reach + 1)
        lines = {f"head {i}": (distance[seen], head[seen]) for i, head in enumerate(bias, 1)}
        panels.append(Plot(f"{side}, learnt", DISTANCE, "bias of the score [nats]", lines))
    return panels


def gradient_curves(name: str, sizes: States) -> dict[str, Curve]:
    """The sizes of ``state_gradients`` by distance, a curve for each array of the state."""
    states = ("h", "C")[: len(sizes)]
    return {
        f"{name}: ∂hₜ/∂{state}ₖ": (np.arange(1, len(size) + 1), np.asarray(size))
        for state, size in zip(states, sizes, strict=True)
    }


def starting_gradients(width: int, length: int, gain: float) -> dict[str, Curve]:
    """Curves of layers as they start, ``width`` features in and out, over a row of standard normal inputs.

    The second Elman network has ``gain`` times the weights of the first where they multiply the state.
    """
    x = jax.random.normal(jax.random.key(1), (length, width))

    def layer(mixer: Any) -> Direction:
        config = ModelConfig(
            "decoder", mixer=MixerConfig(kind=mixer), positions=PositionsConfig(kind="none"), d_model=width
        )
        return Direction(config, nnx.Rngs(params=jax.random.key(0)))

    louder = layer("rnn")
    louder.state = nnx.Param(louder.state[...] * gain)
    layers = {"RNN": layer("rnn"), f"RNN, weights × {gain:g}": louder, "LSTM": layer("lstm")}
    curves: dict[str, Curve] = {}
    for name, each in layers.items():
        curves |= gradient_curves(name, state_gradients(each, x))
    return curves


def draw_gradients(title: str, curves: Mapping[str, Curve]) -> Figure:
    """Sizes of Jacobians against the distance."""
    size = "size of the Jacobian J, |J| / √features"
    return plots([Plot(title, "distance t − k [tokens]", size, curves, log="y")])

"""Curves over distance: position encodings, learned biases, gradients through a recurrent state."""

from collections.abc import Mapping
from dataclasses import replace
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx
from matplotlib.figure import Figure

from experiments.figures.draw import draw_plots
from experiments.figures.panels import Curve, Plot, PlotGrid
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


def bucket_curves(max_distance: int, config: ModelConfig) -> dict[str, Curve]:
    """Return T5's bucket of each distance, in an encoder and in a decoder."""
    curves = {}
    for stack in ("encoder", "decoder"):
        # a decoder sees no key after its query
        distance = np.arange(-max_distance, max_distance + 1 if stack == "encoder" else 1)
        bucket = relative_position_bucket(
            jnp.asarray(distance),
            bidirectional=stack == "encoder",
            num_buckets=config.positions.relative_buckets,
            max_distance=config.positions.relative_max_distance,
        )
        curves[stack] = Curve(distance, np.asarray(bucket))
    return curves


def alibi_curves(max_distance: int, num_heads: int) -> dict[str, Curve]:
    """Return ALiBi's bias for each distance, per head."""
    distance = np.arange(-max_distance, max_distance + 1)
    slopes = AlibiBias(jnp.asarray(alibi_slopes(num_heads)))
    bias = np.asarray(slopes.evaluate(jnp.asarray(distance)[None, None]))[0, :, 0]
    return {f"head {i}": Curve(distance, head) for i, head in enumerate(bias, 1)}


def rotary_curves(max_distance: int, width: int, config: RotaryConfig) -> dict[str, Curve]:
    """Return the score of two equal vectors by distance, and Su et al.'s bound, relative to distance 0.

    The bound is the mean of ``|S_j|``, where S_j is the sum of the first j rotated unit vectors (Su et al.
    2021, section 3.4.3).
    """
    distance = np.arange(max_distance + 1)
    frequencies, factor = config.frequencies(width)
    ones = jnp.ones((1, max_distance + 1, 1, width))
    positions = jnp.asarray(distance)[None]
    rotated = np.asarray(rotate(ones, positions, frequencies, factor, config.layout))[0, :, 0]
    score = rotated @ rotated[0]
    bound = np.abs(np.cumsum(np.exp(1j * distance[:, None] * frequencies), axis=1)).mean(1)
    return {
        "score of equal vectors": Curve(distance, score / score[0]),
        "bound of Su et al.": Curve(distance, bound / bound[0]),
    }


def bias_plots(model: Transformer) -> list[Plot]:
    """Return what each head adds to scores by distance, a panel per stack; SettingError without T5's bias."""
    config = model.config
    if config.positions.kind != "relative":
        raise SettingError(f"model.positions.kind={config.positions.kind!r} should be 'relative', T5's bias")
    max_distance = round(1.25 * config.positions.relative_max_distance)
    panels = []
    for name in ("encoder", "decoder"):
        stack = getattr(model, name)
        if stack is None:
            continue
        is_bidirectional = name == "encoder" or config.architecture == "prefix-decoder"
        distance = np.arange(-max_distance, (max_distance if is_bidirectional else 0) + 1)
        bias = stack.relative(is_bidirectional).evaluate(jnp.asarray(distance)[None, None])
        curves = {f"head {i}": Curve(distance, head) for i, head in enumerate(np.asarray(bias)[0, :, 0], 1)}
        panel = Plot(f"{name}, learned", DISTANCE, "bias of the score [nats]", curves)
        if not is_bidirectional:  # all distances are negative, with wide labels
            panel = replace(panel, max_x_intervals=7)
        panels.append(panel)
    return panels


def gradient_curves(name: str, sizes: States) -> dict[str, Curve]:
    """Return the sizes that ``state_gradients`` gives by distance, one curve per array of the state."""
    states = ("h", "C")[: len(sizes)]
    return {
        f"{name}: ∂hₜ/∂{state}ₖ": Curve(np.arange(1, len(size) + 1), np.asarray(size))
        for state, size in zip(states, sizes, strict=True)
    }


def initial_gradients(width: int, length: int, gain: float) -> dict[str, Curve]:
    """Return the curves of layers of ``width`` features at initialization, over standard normal inputs.

    In the second Elman network the recurrent weights are ``gain`` times those of the first.
    """
    x = jax.random.normal(jax.random.key(1), (length, width))

    def layer(mixer: Any) -> Direction:
        config = ModelConfig(
            "decoder", mixer=MixerConfig(kind=mixer), positions=PositionsConfig(kind="none"), d_model=width
        )
        return Direction(config, nnx.Rngs(params=jax.random.key(0)))

    scaled = layer("rnn")
    scaled.state = nnx.Param(scaled.state[...] * gain)
    layers = {"RNN": layer("rnn"), f"RNN, weights × {gain:g}": scaled, "LSTM": layer("lstm")}
    curves: dict[str, Curve] = {}
    for name, each in layers.items():
        curves |= gradient_curves(name, state_gradients(each, x))
    return curves


def draw_gradients(title: str, curves: Mapping[str, Curve]) -> Figure:
    """Draw the sizes of Jacobians against the distance."""
    y_label = "size of the Jacobian J, |J| / √features"
    return draw_plots(PlotGrid([Plot(title, "distance t − k [tokens]", y_label, curves, log="y")]))

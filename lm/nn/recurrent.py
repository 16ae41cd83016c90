"""Recurrent mixers: an Elman network, GRU and LSTM, one way in a decoder, both ways in an encoder.

Flax's cells are not used: they begin with a segment only where a row does, and multiply each position's
input by itself, where here one product serves all.
"""

import jax.numpy as jnp
from flax import nnx
from jax import Array
from jax.typing import DTypeLike

from lm.nn.config import ModelConfig
from lm.nn.layers import Keep, Keyed, Linear, along, normal, param, product
from lm.nn.view import View
from lm.ops.recurrence import CELLS, RecurrentCell, States, Weights, flow_of, recur
from lm.sharding import constrain


class Direction(nnx.Module):
    """One way through a row, with h = ``mixer_width`` features and G gates: G*h*(h+D+1) parameters.

    One bias per gate, as the equations have it; torch has two, which add up. Only where GRU's reset gate
    multiplies a product of the state is the second (``state_bias`` [h]) one more set of parameters.
    """

    def __init__(self, config: ModelConfig, rngs: nnx.Rngs):
        self.config = config
        cell, d_model, width = CELLS[config.mixer], config.d_model, config.state_width
        columns = cell.gates * width
        # Each device has whole rows of gates: split, it would wait for the others at each position.
        self.input = param(normal(rngs, (d_model, columns), d_model**-0.5), "embed", "gates")
        self.state = param(normal(rngs, (width, columns), width**-0.5), "state", "gates")
        bias = jnp.zeros((columns,), jnp.float32)
        if config.mixer == "lstm":  # forgets little at first (Jozefowicz et al. 2015)
            bias = bias.at[width : 2 * width].set(1.0)
        self.bias = param(bias, "gates")
        self.state_bias = param(jnp.zeros((width,), jnp.float32), "gates") if config.mixer == "gru" else None

    def __call__(
        self, x: Array, segments: Array | None, state: States, starts: States | None = None
    ) -> States:
        """The states [T,B,h] after each position of x [B,T,D], time first; ``state`` [B,h] is that before.

        A later segment begins with what ``starts`` [T,B,h] says at its first position, or with zeros.
        """
        flow = None if segments is None else flow_of(segments)._replace(starts=starts)
        truncation = self.config.truncation
        return recur(self.cell, self.weights(x.dtype), self.inputs(x), state, flow, truncation)

    def inputs(self, x: Array) -> Array:
        """[T,B,G*h]: products of all positions of x [B,T,D] with their weights, and the bias."""
        x = constrain(x, "batch", "key_length", "embed").swapaxes(0, 1)
        inputs = product(x, self.input[...].astype(x.dtype))
        return inputs + along(self.bias[...], inputs)

    def weights(self, dtype: DTypeLike) -> Weights:
        """What multiplies the state, gathered here, before the loop, not at each position."""
        return Weights(constrain(self.state[...].astype(dtype), "kv", "gates"), self._state_bias())

    def empty(self, rows: int) -> States:
        """Zeros [B,h]: what is remembered before the first token."""
        return (jnp.zeros((rows, self.config.state_width), jnp.float32),) * self.cell.states

    @property
    def cell(self) -> RecurrentCell:
        """How the state changes at a position."""
        return CELLS[self.config.mixer]

    def _state_bias(self) -> Array | None:
        """[G*h]: 0 for the reset and update gates of GRU, which have a bias already."""
        if self.state_bias is None:
            return None
        return jnp.pad(self.state_bias[...], (2 * self.config.state_width, 0))


class Recurrent(Keyed):
    """A ``Mixer`` that reads a row position by position; a step of decoding costs the same at each.

    A causal one of width D shows its states as they are. Otherwise they are projected to D features: both
    directions of an encoder side by side, [2h], so that a direction is as wide there as in a decoder, and
    each feature of the output may read both. Nothing is dropped out between positions (Zaremba et al. 2014).

    Where ``cross_attention`` is "none", a decoder's first state is tanh(W C), C being the encoder's output at
    the last token of its segment: with a matrix of each layer's own as in Cho et al. 2014, and at the first
    step alone as in Sutskever et al. 2014.
    """

    def __init__(self, config: ModelConfig, rngs: nnx.Rngs, both_ways: bool):
        self.config = config
        self.forward = Direction(config, rngs)
        self.backward = Direction(config, rngs) if both_ways else None
        width = config.state_width * (1 + both_ways)
        shape = (width, config.d_model)
        plain = width == config.d_model and not both_ways
        self.out = None if plain else Linear(config, rngs, shape, ("gates", "embed"), width**-0.5)
        begins = config.cross_attention == "none" and not both_ways
        first = (config.d_model, config.state_width * CELLS[config.mixer].states)
        self.first = Linear(config, rngs, first, ("embed", "gates"), config.d_model**-0.5) if begins else None

    def __call__(
        self, x: Array, view: View, carry: States | None, _keep: Keep
    ) -> tuple[Array, States | None]:
        """[B,T,D] of x [B,T,D], and the state after its last token."""
        state, starts = self.empty(len(x), 0) if carry is None else carry, None
        if view.context is not None:
            state, starts = self._first_states(view.context, view.segments)
        states = self.forward(x, view.segments, state, starts)
        hidden = states[0].swapaxes(0, 1)
        if self.backward is not None:
            segments = None if view.segments is None else view.segments[:, ::-1]
            after = self.backward(x[:, ::-1], segments, self.backward.empty(len(x)))
            hidden = jnp.concatenate([hidden, after[0].swapaxes(0, 1)[:, ::-1]], axis=-1)
        hidden = hidden.astype(x.dtype)
        hidden = hidden if self.out is None else self.out(hidden)
        return hidden, None if carry is None else tuple(array[-1] for array in states)

    def empty(self, rows: int, _slots: int) -> States:
        """The state [B,h] before the first token, of any number of ``slots``."""
        return self.forward.empty(rows)

    def dropped(self, _length: int) -> dict[str, tuple[int, ...]]:
        """No masks: the block drops out what the mixer gives."""
        return {}

    def _first_states(self, context: Array, segments: Array | None) -> tuple[States, States | None]:
        """The state [B,h] that a row starts from, and those [T,B,h] of its segments, by position.

        From ``context`` [B,T|1,D], the encoder's last state for each position.
        """
        values = jnp.tanh(self.first(context).astype(jnp.float32))
        starts = tuple(jnp.split(values, CELLS[self.config.mixer].states, axis=-1))
        if segments is None:
            return tuple(array[:, 0] for array in starts), None
        starts = tuple(jnp.broadcast_to(x, (*segments.shape, x.shape[-1])) for x in starts)
        begin = jnp.argmax(segments > 0, axis=1)[:, None, None]
        state = tuple(jnp.take_along_axis(array, begin, axis=1)[:, 0] for array in starts)
        return state, tuple(array.swapaxes(0, 1) for array in starts)

"""Recurrent token mixers: Elman networks, GRUs and LSTMs; one direction in a decoder, two in an encoder.

Flax's cells are not used: they start a segment only where a row starts, and multiply the input at each
position by itself; here one product serves all positions.
"""

import jax.numpy as jnp
import numpy as np
from flax import nnx
from jax import Array
from jax.typing import DTypeLike
from jaxtyping import Float, Int

from lm.config.model import ModelConfig
from lm.nn.attention_inputs import AttentionInputs
from lm.nn.costs import TokenMixer
from lm.nn.dropout import DropoutMasks, Shapes
from lm.nn.layers import Identity, Linear, Module, broadcast_to_rank, normal, param
from lm.ops.products import dense
from lm.ops.recurrence import CELLS, RecurrentCell, States, StateWeights, rnn_scan, segment_resets
from lm.sharding import constrain


class Direction(Module):
    """One direction through a row, with h = ``mixer.width`` features and G gates: G*h*(h+D+1) parameters.

    Each gate has one bias, as in the equations; torch has two, which add up. A GRU has a second one,
    ``state_bias`` [h], where its reset gate multiplies a product of the state.
    """

    def __init__(self, config: ModelConfig, rngs: nnx.Rngs):
        self.config = config
        cell, d_model, width = CELLS[config.mixer.kind], config.d_model, config.state_width
        columns = cell.gates * width
        # Gates are not sharded: each device would wait for the others at each position.
        self.input = param(normal(rngs, (d_model, columns), d_model**-0.5), "embed", "gates")
        self.state = param(normal(rngs, (width, columns), width**-0.5), "state", "gates")
        bias = jnp.zeros((columns,), jnp.float32)
        if config.mixer.kind == "lstm":  # forgets little at first (Jozefowicz et al. 2015)
            bias = bias.at[width : 2 * width].set(1.0)
        self.bias = param(bias, "gates")
        state_bias = None
        if config.mixer.kind == "gru":
            state_bias = param(jnp.zeros((width,), jnp.float32), "gates")
        self.state_bias = state_bias

    def __call__(
        self,
        x: Float[Array, "B T D"],
        segments: Int[Array | np.ndarray, "B T"] | None,
        state: States,
        start_states: States | None = None,
    ) -> States:
        """Return the states [T,B,h] after each position of x [B,T,D], time first.

        ``state`` [B,h] precedes the row. Later segments start from ``start_states`` [T,B,h] at their first
        position, or from zeros.
        """
        resets = None
        if segments is not None:
            resets = segment_resets(segments)._replace(states=start_states)
        weights, inputs = self.state_weights(x.dtype), self.input_products(x)
        return rnn_scan(self.cell, weights, inputs, state, resets, self.config.mixer.truncation)

    def input_products(self, x: Float[Array, "B T D"]) -> Float[Array, "T B Gh"]:
        """Return x [B,T,D] times the input's kernel, plus the bias: [T,B,G*h]."""
        x = constrain(x, "batch", "key_length", "embed").swapaxes(0, 1)
        products = dense(x, self.input[...].astype(x.dtype))
        return products + broadcast_to_rank(self.bias[...], products)

    def state_weights(self, dtype: DTypeLike) -> StateWeights:
        """Return the weights of the state, gathered from all devices once and not at each position."""
        bias = None
        if self.state_bias is not None:  # GRU's reset and update gates have a bias already: 0 here
            bias = jnp.pad(self.state_bias[...], (2 * self.config.state_width, 0))
        return StateWeights(constrain(self.state[...].astype(dtype), "kv", "gates"), bias)

    def initial_state(self, rows: int) -> States:
        """Return zeros [B,h]: the state before the first token."""
        return (jnp.zeros((rows, self.config.state_width), jnp.float32),) * self.cell.states

    @property
    def cell(self) -> RecurrentCell:
        """Return the cell that the settings name."""
        return CELLS[self.config.mixer.kind]


class Recurrent(TokenMixer):
    """A token mixer that reads a row position by position; each step of decoding costs the same.

    A decoder's mixer with h = D returns its states. All others project them to D features; an encoder's first
    concatenates both directions to 2h features, so that a direction is as wide as in a decoder. Nothing is
    dropped out between positions (Zaremba et al. 2014).

    In an encoder-decoder without cross-attention, the decoder starts from tanh(W c), where c is the encoder's
    output at the last token of its segment: with a matrix for each layer as in Cho et al. 2014, and at the
    first position alone as in Sutskever et al. 2014.
    """

    def __init__(self, config: ModelConfig, rngs: nnx.Rngs, bidirectional: bool):
        self.config = config
        self.forward = Direction(config, rngs)
        self.backward = Direction(config, rngs) if bidirectional else None
        width = config.state_width * (1 + bidirectional)

        def linear(shape: tuple[int, int], axes: tuple[str, str]) -> Linear:
            return Linear(rngs, shape, axes, std=shape[0] ** -0.5, use_bias=config.bias)

        self.out: Linear | Identity = Identity()
        if bidirectional or width != config.d_model:
            self.out = linear((width, config.d_model), ("gates", "embed"))
        first = None
        if config.cross_attention.kind == "none" and not bidirectional:  # it starts from the encoder's state
            states = config.state_width * CELLS[config.mixer.kind].states
            first = linear((config.d_model, states), ("embed", "gates"))
        self.first = first

    def __call__(
        self,
        x: Float[Array, "B T D"],
        inputs: AttentionInputs,
        carry: States | None,
        _dropout_masks: DropoutMasks,
    ) -> tuple[Float[Array, "B T D"], States | None]:
        """Return [B,T,D] of x [B,T,D], and the state after its last token."""
        segments, start_states = inputs.segments, None
        state = self.init_carry(len(x), 0) if carry is None else carry
        if inputs.encoder_state is not None:
            state, start_states = self._start_states(inputs.encoder_state, segments)
        states = self.forward(x, segments, state, start_states)
        hidden = states[0].swapaxes(0, 1)
        if self.backward is not None:
            reversed_segments = None if segments is None else segments[:, ::-1]
            state = self.backward.initial_state(len(x))
            backward = self.backward(x[:, ::-1], reversed_segments, state)
            hidden = jnp.concatenate([hidden, backward[0].swapaxes(0, 1)[:, ::-1]], axis=-1)
        out = self.out(hidden.astype(x.dtype))
        return out, None if carry is None else tuple(array[-1] for array in states)

    def init_carry(self, rows: int, _length: int) -> States:
        """Return the state [B,h] before the first token."""
        return self.forward.initial_state(rows)

    def dropout_shapes(self, _length: int) -> Shapes:
        """Return no shapes: the block drops out what the mixer returns."""
        return {}

    def _start_states(self, encoder_state: Array, segments: Array | None) -> tuple[States, States | None]:
        """Return a row's start state [B,h], and [T,B,h] where segments start.

        ``encoder_state`` [B,T|1,D] is the encoder's last state for each position.
        """
        values = jnp.tanh(self.first(encoder_state).astype(jnp.float32))
        starts = tuple(jnp.split(values, CELLS[self.config.mixer.kind].states, axis=-1))
        if segments is None:
            return tuple(array[:, 0] for array in starts), None
        starts = tuple(jnp.broadcast_to(x, (*segments.shape, x.shape[-1])) for x in starts)
        first_token = jnp.argmax(segments > 0, axis=1)[:, None, None]
        state = tuple(jnp.take_along_axis(array, first_token, axis=1)[:, 0] for array in starts)
        return state, tuple(array.swapaxes(0, 1) for array in starts)

"""Recurrence: a state that is carried along a sequence, and the cells that advance it at each position.

Shapes: T positions, B rows, h features of a state, G gates of h features each. Time is the first axis, as a
scan needs it.
"""

from collections.abc import Callable
from functools import partial
from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax import Array
from jaxtyping import Float, Int

# float32 [B,h] each; the first is the output, and what the state's kernel multiplies
States = tuple[Array, ...]
Gates = list[Array]  # [B,h] each


class RecurrentCell(NamedTuple):
    """The elementwise part of a recurrent layer; its matrix products are left to the scan."""

    gates: int  # G: the products of the input, and as many of the state
    states: int  # arrays in a state
    advance: Callable[[Gates, Gates, States], States]  # (input's products, state's products, state) -> next


class StateWeights(NamedTuple):
    """What the state is multiplied by."""

    kernel: Array  # [h,G*h]
    bias: Array | None = None  # [G*h], added to that product


class SegmentResets(NamedTuple):
    """Where a packed and padded row [T,B,1] resets its state, and where it keeps it."""

    is_start: Array  # bool: whether the position is the first of a later segment
    is_token: Array  # bool: whether it is a token; padding leaves the state as it is
    states: States | None = None  # float32 [T,B,h] each: the state with which a segment starts; None: zeros


def _sigmoid(x: Array) -> Array:
    """Return the logistic function, by tanh: a CPU is slower at an exponential and a division."""
    return 0.5 * jnp.tanh(0.5 * x) + 0.5


def _elman(x: Gates, h: Gates, _: States) -> States:
    return (jnp.tanh(x[0] + h[0]),)


def _gru(x: Gates, h: Gates, state: States) -> States:
    reset, update = _sigmoid(x[0] + h[0]), _sigmoid(x[1] + h[1])
    new = jnp.tanh(x[2] + reset * h[2])
    return ((1 - update) * new + update * state[0],)


def _lstm(x: Gates, h: Gates, state: States) -> States:
    input_gate, forget_gate, new, output_gate = (a + b for a, b in zip(x, h, strict=True))
    cell = _sigmoid(forget_gate) * state[1] + _sigmoid(input_gate) * jnp.tanh(new)
    return _sigmoid(output_gate) * jnp.tanh(cell), cell


CELLS = {  # by model.mixer.kind; gates in torch's order, whose weights are these transposed
    "rnn": RecurrentCell(1, 1, _elman),  # Elman 1990: tanh
    # Cho et al. 2014: reset, update, new; the reset gate comes after the product, as in cuDNN
    "gru": RecurrentCell(3, 1, _gru),
    "lstm": RecurrentCell(4, 2, _lstm),  # Gers et al. 2000: input, forget, new, output; states h and c
}


def segment_resets(segments: Int[Array | np.ndarray, "B T"]) -> SegmentResets:
    """Return the resets of segment ids [B,T], where 0 is padding.

    A segment starts where the last token before it is another segment's. A row's first segment is no reset:
    it may carry on from a state.
    """
    segments = jnp.asarray(segments)
    index = jnp.arange(segments.shape[1], dtype=jnp.int32)[None, :]
    last_token = jax.lax.cummax(jnp.where(segments > 0, index, 0), axis=1)  # at or before each position
    before = jnp.take_along_axis(segments, jnp.pad(last_token[:, :-1], ((0, 0), (1, 0))), axis=1)
    is_start = (before != segments) & (before > 0) & (segments > 0)
    return SegmentResets(is_start.T[:, :, None], (segments > 0).T[:, :, None])


@partial(jax.custom_vjp, nondiff_argnums=(0, 5))
def rnn_scan(
    cell: RecurrentCell,
    weights: StateWeights,
    inputs: Float[Array, "T B Gh"],
    state: States,
    resets: SegmentResets | None,
    truncation: int | None = None,
) -> States:
    """Return the states [T,B,h] after each position, from the input's products [T,B,G*h] and a first state.

    The gradient of the weights is one product over all positions: differentiating the scan would sum one per
    position, which on a CPU takes most of the time. ``truncation``: gradients do not flow back past multiples
    of so many positions (truncated backpropagation through time, Williams and Peng 1990).
    """
    return _forward(cell, weights, inputs, state, resets, truncation)[0]


def _forward(cell, weights, inputs, state, resets, _truncation):
    def step(state, at_position):
        x, resets = at_position
        before = _reset(state, resets)
        products = _state_products(weights, before[0])
        after = _advance(cell, resets, x, products, before)
        return after, (after, products)

    _, (states, products) = jax.lax.scan(step, state, (inputs, resets))
    return states, (weights, inputs, state, resets, states, products)


def _backward(cell, truncation, residuals, gradients):
    weights, inputs, first, resets, states, products = residuals
    before = tuple(jnp.concatenate([a[None], b[:-1]]) for a, b in zip(first, states, strict=True))
    kernel = weights.kernel.T.astype(jnp.float32)

    def step(d_state, at_position):
        x, products, resets, before, d_output, stop = at_position
        d_state = tuple(map(jnp.add, d_state, d_output))
        _, pullback = jax.vjp(partial(_advance, cell, resets), x, products, _reset(before, resets))
        d_inputs, d_products, (d_hidden, *d_others) = pullback(d_state)
        d_state = d_hidden + d_products @ kernel, *d_others
        d_start = None
        if resets is not None and resets.states is not None:
            d_start = _where(resets.is_start, d_state)
        if stop is not None:
            d_state = _where(~stop, d_state)
        return d_state, (d_inputs, d_products, d_start)

    zeros = tuple(map(jnp.zeros_like, first))
    stops = _stop_gradient_mask(len(inputs), resets, truncation)
    sequence = inputs, products, resets, before, gradients, stops
    d_state, (d_inputs, d_products, d_starts) = jax.lax.scan(step, zeros, sequence, reverse=True)
    hidden = _reset(before, resets)[0]
    d_kernel = jnp.tensordot(hidden, d_products, ((0, 1), (0, 1))).astype(weights.kernel.dtype)
    d_bias = None if weights.bias is None else d_products.sum((0, 1)).astype(weights.bias.dtype)
    d_resets = None
    if resets is not None:
        d_resets = resets._replace(is_start=None, is_token=None, states=d_starts)
    return StateWeights(d_kernel, d_bias), d_inputs, d_state, d_resets


rnn_scan.defvjp(_forward, _backward)


def _reset(state: States, resets: SegmentResets | None) -> States:
    """Return the state before a position: at a segment's first, the one that the segment starts with."""
    if resets is None:
        return state
    starts: tuple[Array | float, ...] = resets.states or (0.0,) * len(state)
    pairs = zip(starts, state, strict=True)
    return tuple(jnp.where(resets.is_start, start, array) for start, array in pairs)


def _where(mask: Array, states: States) -> States:
    """Return the states where ``mask``, else 0."""
    return tuple(jnp.where(mask, array, 0.0) for array in states)


def _stop_gradient_mask(length: int, resets: SegmentResets | None, truncation: int | None) -> Array | None:
    """Return bool [T,B|1,1]: whether no gradient flows back past a position; None: it always does."""
    is_start = None if resets is None else resets.is_start
    if truncation is None:
        return is_start
    index = jnp.arange(length)[:, None, None]
    is_cut = (index > 0) & (index % truncation == 0)
    return is_cut if is_start is None else is_cut | is_start


def _state_products(weights: StateWeights, hidden: Array) -> Array:
    """Return the state's products float32 [B,G*h]."""
    kernel = weights.kernel
    products = jnp.matmul(hidden.astype(kernel.dtype), kernel, preferred_element_type=jnp.float32)
    return products if weights.bias is None else products + weights.bias[None, :]


def _advance(
    cell: RecurrentCell, resets: SegmentResets | None, x: Array, products: Array, before: States
) -> States:
    """Return the state after a position, from the products [B,G*h] of its input and of the last state."""
    input_gates = jnp.split(x.astype(jnp.float32), cell.gates, axis=-1)
    state_gates = jnp.split(products.astype(jnp.float32), cell.gates, axis=-1)
    after = cell.advance(input_gates, state_gates, before)
    if resets is None:
        return after
    return tuple(jnp.where(resets.is_token, new, old) for new, old in zip(after, before, strict=True))

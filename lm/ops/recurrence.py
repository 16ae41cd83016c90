"""Recurrence: a state that is carried along a sequence, and the cells that change it at each position.

Shapes: T positions, B rows, h features of a state, G products of h features each that a cell asks for.
Time is the first axis, as a loop needs it.
"""

from collections.abc import Callable
from functools import partial
from typing import NamedTuple

import jax
import jax.numpy as jnp
from jax import Array

States = tuple[Array, ...]  # float32 [B,h] each; the first is what a cell shows and multiplies by its weights
Gates = list[Array]  # [B,h] each


class RecurrentCell(NamedTuple):
    """What is computed of a state without mixing its features: products are left to the loop."""

    gates: int  # G: products with the input, and as many with the state
    states: int  # arrays in a state
    advance: Callable[[Gates, Gates, States], States]  # from products with the input, with the state, and it


class Weights(NamedTuple):
    """What multiplies the state."""

    kernel: Array  # [h,G*h]
    bias: Array | None = None  # [G*h], added to that product


class Flow(NamedTuple):
    """Where in a packed and padded row [T,B,1] the state goes on; bool."""

    begins: Array  # whether the position is a later segment's first
    inside: Array  # whether it is a token: padding leaves the state as it is
    starts: States | None = None  # float32 [T,B,h] each: the state before a segment, where it begins; None: 0


def _sigmoid(x: Array) -> Array:
    """By tanh, which a CPU computes faster than an exponential and a division."""
    return 0.5 * jnp.tanh(0.5 * x) + 0.5


def _elman(x: Gates, h: Gates, _: States) -> States:
    return (jnp.tanh(x[0] + h[0]),)


def _gru(x: Gates, h: Gates, state: States) -> States:
    reset, update = _sigmoid(x[0] + h[0]), _sigmoid(x[1] + h[1])
    new = jnp.tanh(x[2] + reset * h[2])
    return ((1 - update) * new + update * state[0],)


def _lstm(x: Gates, h: Gates, state: States) -> States:
    write, forget, new, show = (a + b for a, b in zip(x, h, strict=True))
    memory = _sigmoid(forget) * state[1] + _sigmoid(write) * jnp.tanh(new)
    return _sigmoid(show) * jnp.tanh(memory), memory


# The order of the gates is torch's, whose weights are ours transposed.
CELLS = {
    "rnn": RecurrentCell(1, 1, _elman),  # Elman 1990: tanh
    "gru": RecurrentCell(
        3, 1, _gru
    ),  # Cho et al. 2014: reset, update, new; the reset comes after the product, as in cuDNN
    "lstm": RecurrentCell(4, 2, _lstm),  # Gers et al. 2000: input, forget, new, output; states h and C
}


def flow_of(segments: Array) -> Flow:
    """Of segment ids [B,T], 0 being padding: a segment begins where the last token before is of another."""
    place = jnp.arange(segments.shape[1], dtype=jnp.int32)[None, :]
    last = jax.lax.cummax(jnp.where(segments > 0, place, 0), axis=1)  # the token at or before a position
    before = jnp.take_along_axis(segments, jnp.pad(last[:, :-1], ((0, 0), (1, 0))), axis=1)
    begins = (before != segments) & (before > 0) & (segments > 0)
    return Flow(begins.T[:, :, None], (segments > 0).T[:, :, None])


@partial(jax.custom_vjp, nondiff_argnums=(0, 5))
def recur(
    cell: RecurrentCell,
    weights: Weights,
    inputs: Array,
    state: States,
    flow: Flow | None,
    truncation: int | None = None,
) -> States:
    """The states [T,B,h] after each position, from products with the inputs [T,B,G*h] and the first state.

    The gradient of the weights is one product over all positions: jax would add up one for each, which on a
    CPU takes most of the time. ``truncation``: no gradient reaches back past places that it divides, as if
    the state were a constant there (truncated backpropagation through time, Williams and Peng 1990).
    """
    return _forward(cell, weights, inputs, state, flow, truncation)[0]


def _forward(cell, weights, inputs, state, flow, _truncation):
    def step(state, now):
        x, flow = now
        before = _begun(state, flow)
        products = _products(weights, before[0])
        after = _after(cell, flow, x, products, before)
        return after, (after, products)

    _, (states, products) = jax.lax.scan(step, state, (inputs, flow))
    return states, (weights, inputs, state, flow, states, products)


def _backward(cell, truncation, saved, gradients):
    weights, inputs, first, flow, states, products = saved
    before = tuple(jnp.concatenate([a[None], b[:-1]]) for a, b in zip(first, states, strict=True))
    kernel = weights.kernel.T.astype(jnp.float32)

    def step(gradient, now):
        x, products, flow, before, shown, stops = now
        gradient = tuple(map(jnp.add, gradient, shown))
        _, back = jax.vjp(partial(_after, cell, flow), x, products, _begun(before, flow))
        to_inputs, to_products, (hidden, *others) = back(gradient)
        gradient = hidden + to_products @ kernel, *others
        to_start = None if flow is None or flow.starts is None else _only(flow.begins, gradient)
        gradient = gradient if stops is None else _only(~stops, gradient)
        return gradient, (to_inputs, to_products, to_start)

    zeros = tuple(map(jnp.zeros_like, first))
    sequence = inputs, products, flow, before, gradients, _stops(len(inputs), flow, truncation)
    gradient, (to_inputs, to_products, to_starts) = jax.lax.scan(step, zeros, sequence, reverse=True)
    hidden = _begun(before, flow)[0]
    to_kernel = jnp.tensordot(hidden, to_products, ((0, 1), (0, 1))).astype(weights.kernel.dtype)
    to_bias = None if weights.bias is None else to_products.sum((0, 1)).astype(weights.bias.dtype)
    to_flow = None if flow is None else flow._replace(begins=None, inside=None, starts=to_starts)
    return Weights(to_kernel, to_bias), to_inputs, gradient, to_flow


recur.defvjp(_forward, _backward)


def _begun(state: States, flow: Flow | None) -> States:
    """The state before a position: at a segment's first that with which the segment starts."""
    if flow is None:
        return state
    starts: tuple[Array | float, ...] = flow.starts or (0.0,) * len(state)
    return tuple(jnp.where(flow.begins, start, array) for start, array in zip(starts, state, strict=True))


def _only(mask: Array, states: States) -> States:
    """The states where ``mask``, else 0."""
    return tuple(jnp.where(mask, array, 0.0) for array in states)


def _stops(length: int, flow: Flow | None, truncation: int | None) -> Array | None:
    """bool [T,B|1,1]: whether no gradient reaches what is before a position."""
    begins = None if flow is None else flow.begins
    if truncation is None:
        return begins
    place = jnp.arange(length)[:, None, None]
    cuts = (place > 0) & (place % truncation == 0)
    return cuts if begins is None else cuts | begins


def _products(weights: Weights, hidden: Array) -> Array:
    """float32 [B,G*h]."""
    kernel = weights.kernel
    products = jnp.matmul(hidden.astype(kernel.dtype), kernel, preferred_element_type=jnp.float32)
    return products if weights.bias is None else products + weights.bias[None, :]


def _after(cell: RecurrentCell, flow: Flow | None, x: Array, products: Array, before: States) -> States:
    """The state after a position, from the products [B,G*h] with its input and with the state before."""
    gates = [jnp.split(array.astype(jnp.float32), cell.gates, axis=-1) for array in (x, products)]
    after = cell.advance(gates[0], gates[1], before)
    if flow is None:
        return after
    return tuple(jnp.where(flow.inside, new, old) for new, old in zip(after, before, strict=True))

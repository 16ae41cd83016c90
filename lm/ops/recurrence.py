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

    begins: Array  # whether the position is a segment's first: the state before it is 0
    inside: Array  # whether it is a token: padding leaves the state as it is


def _elman(x: Gates, h: Gates, _: States) -> States:
    return (jnp.tanh(x[0] + h[0]),)


def _gru(x: Gates, h: Gates, state: States) -> States:
    reset, update = jax.nn.sigmoid(x[0] + h[0]), jax.nn.sigmoid(x[1] + h[1])
    new = jnp.tanh(x[2] + reset * h[2])
    return ((1 - update) * new + update * state[0],)


def _lstm(x: Gates, h: Gates, state: States) -> States:
    write, forget, new, show = (a + b for a, b in zip(x, h, strict=True))
    memory = jax.nn.sigmoid(forget) * state[1] + jax.nn.sigmoid(write) * jnp.tanh(new)
    return jax.nn.sigmoid(show) * jnp.tanh(memory), memory


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


@partial(jax.custom_vjp, nondiff_argnums=(0,))
def recur(cell: RecurrentCell, weights: Weights, inputs: Array, state: States, flow: Flow | None) -> States:
    """The states [T,B,h] after each position, from products with the inputs [T,B,G*h] and the first state.

    The gradient of the weights is one product over all positions: jax would add up one for each, which on a
    CPU takes most of the time.
    """
    return _forward(cell, weights, inputs, state, flow)[0]


def _forward(cell, weights, inputs, state, flow):
    def step(state, now):
        x, flow = now
        before = _begun(state, flow)
        products = _products(weights, before[0])
        after = _after(cell, flow, x, products, before)
        return after, (after, products)

    _, (states, products) = jax.lax.scan(step, state, (inputs, flow))
    return states, (weights, inputs, state, flow, states, products)


def _backward(cell, saved, gradients):
    weights, inputs, first, flow, states, products = saved
    before = tuple(jnp.concatenate([a[None], b[:-1]]) for a, b in zip(first, states, strict=True))
    kernel = weights.kernel.T.astype(jnp.float32)

    def step(gradient, now):
        x, products, flow, before, shown = now
        gradient = tuple(map(jnp.add, gradient, shown))
        _, back = jax.vjp(partial(_after, cell, flow), x, products, _begun(before, flow))
        to_inputs, to_products, (hidden, *others) = back(gradient)
        return _begun((hidden + to_products @ kernel, *others), flow), (to_inputs, to_products)

    zeros = tuple(map(jnp.zeros_like, first))
    sequence = inputs, products, flow, before, gradients
    gradient, (to_inputs, to_products) = jax.lax.scan(step, zeros, sequence, reverse=True)
    hidden = _begun(before, flow)[0]
    to_kernel = jnp.tensordot(hidden, to_products, ((0, 1), (0, 1))).astype(weights.kernel.dtype)
    to_bias = None if weights.bias is None else to_products.sum((0, 1)).astype(weights.bias.dtype)
    return Weights(to_kernel, to_bias), to_inputs, gradient, None


recur.defvjp(_forward, _backward)


def _begun(state: States, flow: Flow | None) -> States:
    """The state before a position: 0 at a segment's first."""
    return state if flow is None else tuple(jnp.where(flow.begins, 0.0, array) for array in state)


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

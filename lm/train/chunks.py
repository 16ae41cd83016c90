"""The loss of rows chunk by chunk, so that the logits of one chunk are in memory and not those of all."""

from collections.abc import Callable
from functools import partial
from typing import Any, TypeVar

import jax
import jax.numpy as jnp
from jax import Array

Chunked = TypeVar("Chunked")  # a pytree of arrays [B,T,...]
LossAndAux = tuple[Array, Any]  # a loss float32 [], and a pytree of sums that have no gradient


def sum_over_chunks(
    loss_of: Callable[[Chunked, Any], LossAndAux], states: Chunked, side: Any, chunks: int
) -> LossAndAux:
    """Return the sum of ``loss_of(states, side)`` over chunks of positions, the second axis of all arrays.

    ``loss_of`` may read a model's parameters. Arrays are padded with zeros to a multiple of ``chunks``.

    The forward pass computes the gradient of each chunk at once, while its logits are there; the backward
    pass scales it. So nothing is computed twice, and the gradient of parameters is held once more.
    """
    states, side = jax.tree.map(lambda array: _split(array, chunks), (states, side))
    first = jax.tree.map(lambda array: array[0], (states, side))
    of_chunk, parameters = jax.closure_convert(loss_of, *first)
    return _sum(of_chunk, parameters, states, side)


def _split(array: Array, chunks: int) -> Array:
    """Return an array [B,T,...] as [chunks,B,C,...], padded with zeros."""
    batch, length, *rest = array.shape
    size = -(-length // chunks)
    array = jnp.pad(array, [(0, 0), (0, chunks * size - length)] + [(0, 0)] * len(rest))
    return jnp.moveaxis(array.reshape(batch, chunks, size, *rest), 1, 0)


def _scan(function: Callable[..., tuple[Any, Any]], chunks: tuple[Any, Any]) -> tuple[Any, Any]:
    """Return the sum of the first results of ``function`` over chunks, and the second ones of each."""

    def step(total: Any, chunk: tuple[Any, Any]) -> tuple[Any, Any]:
        summand, output = function(*chunk)
        return jax.tree.map(jnp.add, total, summand), output

    one_chunk = jax.tree.map(lambda array: array[0], chunks)
    zeros = jax.tree.map(jnp.zeros_like, jax.eval_shape(function, *one_chunk)[0])
    return jax.lax.scan(step, zeros, chunks)


@partial(jax.custom_vjp, nondiff_argnums=(0,))
def _sum(loss_of: Callable[..., LossAndAux], parameters: list[Array], states: Any, side: Any) -> LossAndAux:
    def of_chunk(states: Any, side: Any) -> tuple[LossAndAux, None]:
        return loss_of(states, side, *parameters), None

    return _scan(of_chunk, (states, side))[0]


def _sum_forward(loss_of, parameters, states, side):
    def with_gradient(states, side):
        def loss(parameters, states):
            return loss_of(states, side, *parameters)

        (loss, sums), gradients = jax.value_and_grad(loss, (0, 1), has_aux=True)(parameters, states)
        return (loss, sums, gradients[0]), gradients[1]

    (loss, sums, d_parameters), d_states = _scan(with_gradient, (states, side))
    return (loss, sums), (d_parameters, d_states)


def _sum_backward(_loss_of, gradients, d_result):
    scaled = jax.tree.map(lambda gradient: gradient * d_result[0].astype(gradient.dtype), gradients)
    return *scaled, None


_sum.defvjp(_sum_forward, _sum_backward)

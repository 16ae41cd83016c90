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
    loss_of: Callable[[Chunked, Any, Any], LossAndAux], states: Chunked, side: Any, whole: Any, chunks: int
) -> LossAndAux:
    """Return the sum of ``loss_of(states, side, whole)`` over chunks of positions.

    Positions are the second axis of all arrays of ``states`` and ``side``, which are padded with zeros to a
    multiple of ``chunks``; every chunk reads the arrays of ``whole``. Gradients reach ``states`` and the
    parameters that ``loss_of`` closes over, but neither ``side`` nor ``whole``. Other arrays than those of
    floating-point numbers have to be arguments, since ``jax.closure_convert`` leaves them in the closure.

    The forward pass computes the gradient of each chunk at once, while its logits are there; the backward
    pass scales it. So nothing is computed twice, and the gradient of parameters is held once more. Under
    ``jax.checkpoint`` it would be computed twice, for nothing.
    """
    length = jax.tree.leaves(states)[0].shape[1]
    states, side = jax.tree.map(lambda array: _split(array, length, chunks), (states, side))
    first = jax.tree.map(lambda array: array[0], (states, side))
    of_chunk, parameters = jax.closure_convert(loss_of, *first, whole)
    return _sum(of_chunk, parameters, states, side, whole)


def _split(array: Array, length: int, chunks: int) -> Array:
    """Return an array [B,T,...] as [chunks,B,C,...], padded with zeros; ValueError unless T is ``length``."""
    batch, positions, *rest = array.shape
    if positions != length:
        raise ValueError(f"an array of shape {array.shape} should have {length} positions, as the first one")
    size = -(-length // chunks)
    array = jnp.pad(array, [(0, 0), (0, chunks * size - length)] + [(0, 0)] * len(rest))
    return jnp.moveaxis(array.reshape(batch, chunks, size, *rest), 1, 0)


def _scan(function: Callable[..., tuple[Any, Any]], chunks: tuple[Any, Any]) -> tuple[Any, Any]:
    """Return the first results of ``function`` summed over chunks, and the second stacked [chunks,...]."""

    def step(total: Any, chunk: tuple[Any, Any]) -> tuple[Any, Any]:
        summand, output = function(*chunk)
        return jax.tree.map(jnp.add, total, summand), output

    one_chunk = jax.tree.map(lambda array: array[0], chunks)
    zeros = jax.tree.map(jnp.zeros_like, jax.eval_shape(function, *one_chunk)[0])
    return jax.lax.scan(step, zeros, chunks)


@partial(jax.custom_vjp, nondiff_argnums=(0,))
def _sum(
    loss_of: Callable[..., LossAndAux], parameters: list[Array], states: Any, side: Any, whole: Any
) -> LossAndAux:
    def of_chunk(states: Any, side: Any) -> tuple[LossAndAux, None]:
        return loss_of(states, side, whole, *parameters), None

    return _scan(of_chunk, (states, side))[0]


def _sum_forward(loss_of, parameters, states, side, whole):
    def with_gradient(states, side):
        def loss(parameters, states):
            return loss_of(states, side, whole, *parameters)

        (loss, sums), gradients = jax.value_and_grad(loss, (0, 1), has_aux=True)(parameters, states)
        return (loss, sums, gradients[0]), gradients[1]

    (loss, sums, d_parameters), d_states = _scan(with_gradient, (states, side))
    return (loss, sums), (d_parameters, d_states)


def _sum_backward(_loss_of, gradients, d_result):
    scaled = jax.tree.map(lambda gradient: gradient * d_result[0].astype(gradient.dtype), gradients)
    return *scaled, None, None


_sum.defvjp(_sum_forward, _sum_backward)

"""Inspects recurrent layers as they read a text: gates, states, and gradients between states."""

import operator

import jax
import jax.numpy as jnp
from jax import Array

from lm.batch import Batch
from lm.config.base import SettingError
from lm.nn.layers import broadcast_to_rank
from lm.nn.rnn import Direction, Recurrent
from lm.nn.transformer import Transformer
from lm.ops.recurrence import States, rnn_scan

# model.mixer.kind -> names of the gates among a cell's products, in order; None: a product without a sigmoid
GATES = {
    "rnn": (None,),
    "gru": ("reset gate", "update gate", None),
    "lstm": ("input gate", "forget gate", None, "output gate"),
}
MEMORY = "memory C"
STATES = ("state h", MEMORY)  # arrays of a state, in order


def recurrent_layers(model: Transformer, batch: Batch) -> list[tuple[Direction, Array]]:
    """Return the forward direction and its input [B,T,D] of each layer of the stack that reads the text.

    That is the encoder if there is one, else the decoder. Raises SettingError if the layers are not
    recurrent.
    """
    side = "encoder" if model.config.has_encoder else "decoder"
    stack = model.encoder if model.config.has_encoder else model.decoder
    mixer = stack.blocks.attention
    if not isinstance(mixer, Recurrent):
        raise SettingError(
            f"model.mixer.kind={model.config.mixer.kind!r} carries no state along a row: open a run with "
            "model.mixer.kind 'rnn', 'gru' or 'lstm'"
        )
    inputs = model.mixer_inputs(batch)[side]
    stored = len(mixer.forward.bias[...])  # fewer than the layers if these share parameters
    layers: list[tuple[Direction, Array]] = []
    for number, x in enumerate(inputs):
        direction = jax.tree.map(operator.itemgetter(number % stored), mixer.forward)
        layers.append((direction, x))
    return layers


def gate_activations(direction: Direction, x: Array) -> dict[str, Array]:
    """Return each gate and each array of the state by name, float32 [B,T,h].

    x [B,T,D] is the input of the direction. A gate is the share, 0 to 1, that it lets through at a position;
    the state is the one after that position.
    """
    inputs, weights = direction.input_products(x), direction.state_weights(x.dtype)
    first = direction.initial_state(len(x))
    states = rnn_scan(direction.cell, weights, inputs, first, None)
    before = jnp.concatenate([first[0][None], states[0][:-1]])
    products = inputs + jnp.matmul(before.astype(weights.kernel.dtype), weights.kernel)
    if weights.bias is not None:
        products += broadcast_to_rank(weights.bias, products)
    arrays: dict[str, Array] = {}
    names = GATES[direction.config.mixer.kind]
    for name, part in zip(names, jnp.split(products, direction.cell.gates, axis=-1), strict=True):
        if name is not None:
            arrays[name] = jax.nn.sigmoid(part)
    arrays |= dict(zip(STATES, states, strict=False))
    return {name: array.astype(jnp.float32).swapaxes(0, 1) for name, array in arrays.items()}


@jax.jit
def state_gradients(direction: Direction, x: Array) -> States:
    """Return the norm of the Jacobian d h_T / d state_(T-n) at distances n = 1 ... T-1, float32 [T-1].

    There is one such array for each array of the state. x [T,D] is the input of the direction. The norm is
    |J|_F / sqrt(h), 1 for the identity: the root mean square factor by which J [h,h] changes the length of a
    vector. The Jacobian is pulled back step by step, as in backpropagation.
    """
    cell, weights = direction.cell, direction.state_weights(x.dtype)
    inputs, first = direction.input_products(x[None]), direction.initial_state(1)
    states = rnn_scan(cell, weights, inputs, first, None)
    before = tuple(jnp.concatenate([a[None], b[:-1]]) for a, b in zip(first, states, strict=True))
    width = direction.config.state_width

    def pull_back(jacobian, step):
        x_products, state = step
        _, vjp = jax.vjp(lambda state: rnn_scan(cell, weights, x_products[None], state, None), state)
        (jacobian,) = jax.vmap(vjp)(jax.tree.map(lambda rows: rows[:, None], jacobian))
        return jacobian, tuple(jnp.linalg.norm(part) * width**-0.5 for part in jacobian)

    d_other_states = (jnp.zeros((width, 1, width)),) * (cell.states - 1)
    last = (jnp.eye(width)[:, None], *d_other_states)
    steps = (inputs[1:], jax.tree.map(lambda states: states[1:], before))
    _, norms = jax.lax.scan(pull_back, last, steps, reverse=True)
    return tuple(norm[::-1] for norm in norms)

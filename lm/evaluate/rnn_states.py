"""Looks inside recurrent layers while they read: their gates, and how later states depend on earlier ones."""

import jax
import jax.numpy as jnp
from jax import Array

from lm.batch import Batch
from lm.config.base import SettingError
from lm.nn.layers import broadcast_to_rank
from lm.nn.rnn import Direction, Recurrent
from lm.nn.transformer import Transformer
from lm.ops.recurrence import States, rnn_scan

# by model.mixer.kind: the products of a cell that go through a sigmoid, in their order; None: another
GATES = {
    "rnn": (None,),
    "gru": ("reset gate", "update gate", None),
    "lstm": ("input gate", "forget gate", None, "output gate"),
}
MEMORY = "memory C"
STATES = ("state h", MEMORY)  # arrays of a state, in their order


def reading_layers(model: Transformer, batch: Batch) -> list[tuple[Direction, Array]]:
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
    inputs, kept = model.mixer_inputs(batch)[side], len(mixer.forward.bias[...])
    layer = [jax.tree.map(lambda leaf, i=i: leaf[i % kept], mixer.forward) for i in range(len(inputs))]
    return list(zip(layer, inputs, strict=True))


def gates(direction: Direction, x: Array) -> dict[str, Array]:
    """Return each gate and each array of the state by name, float32 [B,T,h].

    x [B,T,D] is what the direction reads. A gate is the share, 0 to 1, of what it lets through at a position;
    the state is that after it.
    """
    inputs, weights = direction.input_products(x), direction.state_weights(x.dtype)
    first = direction.initial_state(len(x))
    states = rnn_scan(direction.cell, weights, inputs, first, None)
    before = jnp.concatenate([first[0][None], states[0][:-1]])
    products = inputs + jnp.matmul(before.astype(weights.kernel.dtype), weights.kernel)
    products = products if weights.bias is None else products + broadcast_to_rank(weights.bias, products)
    parts = jnp.split(products, direction.cell.gates, axis=-1)
    names = GATES[direction.config.mixer.kind]
    found = {name: jax.nn.sigmoid(part) for name, part in zip(names, parts, strict=True) if name is not None}
    found |= dict(zip(STATES, states, strict=False))
    return {name: array.astype(jnp.float32).swapaxes(0, 1) for name, array in found.items()}


@jax.jit
def state_gradients(direction: Direction, x: Array) -> States:
    """Return the size of d h_T / d state_(T-n) at distances n = 1 ... T-1, float32 [T-1].

    There is one for each array of the state. x [T,D] is what the direction reads. The size is the root mean
    square of what the Jacobian [h,h] does to a vector's length, |J|_F / sqrt(h): 1 for the identity. The
    Jacobian is pulled back step by step, as in backpropagation.
    """
    cell, weights = direction.cell, direction.state_weights(x.dtype)
    inputs, first = direction.input_products(x[None]), direction.initial_state(1)
    states = rnn_scan(cell, weights, inputs, first, None)
    before = tuple(jnp.concatenate([a[None], b[:-1]]) for a, b in zip(first, states, strict=True))
    width = direction.config.state_width

    def pull(rows, now):
        given, state = now
        _, back = jax.vjp(lambda state: rnn_scan(cell, weights, given[None], state, None), state)
        (rows,) = jax.vmap(back)(jax.tree.map(lambda row: row[:, None], rows))
        return rows, tuple(jnp.linalg.norm(row) * width**-0.5 for row in rows)

    last = (jnp.eye(width)[:, None], *(jnp.zeros((width, 1, width)),) * (cell.states - 1))
    _, sizes = jax.lax.scan(pull, last, (inputs[1:], jax.tree.map(lambda s: s[1:], before)), reverse=True)
    return tuple(size[::-1] for size in sizes)

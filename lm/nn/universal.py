"""The Universal Transformer: embeddings of steps, gates, and halting (Dehghani et al. 2018).

Its layers are steps that share one block. Shapes: B rows, T positions, D features.
"""

from typing import NamedTuple

import jax
import jax.numpy as jnp
from flax import nnx
from jax import Array
from jaxtyping import Float, Float32, Int

from lm.config.model import ModelConfig
from lm.nn.layers import Linear, Module, broadcast_to_rank, embedding_std, make_norm, normal, param
from lm.ops.positions import sinusoids


class StepEmbedding(Module):
    """Adds a step's own vector to its input and, if the settings say so, sines and cosines of positions."""

    def __init__(self, config: ModelConfig, rngs: nnx.Rngs):
        self.config = config
        std = embedding_std(config.output.logits, config.d_model)
        self.vector = param(normal(rngs, (config.d_model,), std), "norm")

    def __call__(
        self, x: Float[Array, "B T D"], positions: Int[Array, "#B T"] | None
    ) -> Float[Array, "B T D"]:
        """Return the input [B,T,D] of a step from x [B,T,D] and positions [B|1,T]."""
        x = x + broadcast_to_rank(self.vector[...], x)
        if self.config.universal.embedding == "step":
            return x
        return x + sinusoids(positions, x.shape[-1], layout="interleaved").astype(x.dtype)


class NoStepEmbedding(Module):
    """Returns the input of a layer that knows no step."""

    def __call__(
        self, x: Float[Array, "B T D"], _positions: Int[Array, "#B T"] | None
    ) -> Float[Array, "B T D"]:
        return x


class GRUGate(Module):
    """The gate of a GRU between a sub-layer's input x and its output h, before x is added.

    With u and r the update and reset gates, sigmoids of linear layers of [x; h], it returns

        (1 - u) h + u sigmoid(W [r x; h])

    as in the code of Narang et al. 2021. A GRU has tanh in place of the second sigmoid, and (1 - u) x in
    place of (1 - u) h. x, r x and h are normalised where they are concatenated, not elsewhere.
    """

    def __init__(self, config: ModelConfig, rngs: nnx.Rngs):
        width = config.d_model

        def linear(out: int) -> Linear:
            axes, std = ("embed", "mlp"), (2 * width) ** -0.5
            return Linear(rngs, (2 * width, out), axes, std=std, use_bias=True)

        self.gates, self.candidate = linear(2 * width), linear(width)
        self.input_norm, self.output_norm = (make_norm(config.norm, width) for _ in range(2))

    def __call__(self, x: Float[Array, "B T D"], h: Float[Array, "B T D"]) -> Float[Array, "B T D"]:
        """Return the gated output [B,T,D] of a sub-layer with input x and output h [B,T,D]."""
        normed = self.output_norm(h)
        both = jnp.concatenate([self.input_norm(x), normed], axis=-1)
        update, reset = jnp.split(jax.nn.sigmoid(self.gates(both)), 2, axis=-1)
        both = jnp.concatenate([self.input_norm(reset * x), normed], axis=-1)
        candidate = jax.nn.sigmoid(self.candidate(both))
        return (1 - update) * h + update * candidate


class NoGate(Module):
    """Returns a sub-layer's output as it is."""

    def __call__(self, _x: Float[Array, "B T D"], h: Float[Array, "B T D"]) -> Float[Array, "B T D"]:
        return h


def make_step_embedding(config: ModelConfig, rngs: nnx.Rngs) -> Module:
    """Return what is added to the input of a layer."""
    return NoStepEmbedding() if config.universal.embedding == "none" else StepEmbedding(config, rngs)


def make_gate(config: ModelConfig, rngs: nnx.Rngs) -> Module:
    """Return the gate of a sub-layer's output."""
    return GRUGate(config, rngs) if config.universal.gate == "gru" else NoGate()


class HaltingState(NamedTuple):
    """The state between two steps of a stack whose positions halt, each after steps of its own."""

    x: Float[Array, "B T D"]  # input of the next step
    output: Float[Array, "B T D"]  # what the stack returns if no position goes on
    halted: Float32[Array, "B T 1"]  # sum of halting probabilities; 1 where a position has halted


class Halting(Module):
    """Adaptive computation time of each position (Graves 2016), in the form of Dehghani et al. 2018.

    Step n gives a position the halting probability p_n, a sigmoid of a linear layer of its input. A position
    halts at the step at which the sum of its p reaches the threshold; what is then left of 1, the remainder,
    takes the place of p_n. One that has not halted by the last step has no remainder. The output starts at 0
    and moves towards the state after step n by the share p_n, as in their program: unlike those of Graves'
    mean, the shares do not sum to 1.

    All positions pass all steps, so shapes are static. The state of one that has halted goes on changing, and
    others read it so, as in their program (the paper copies it); only its output stays. Nothing in the loss
    asks for few steps, as nothing in the paper's text does.
    """

    def __init__(self, config: ModelConfig, rngs: nnx.Rngs):
        self.threshold = config.universal.threshold
        shape = config.d_model, 1
        self.probability = Linear(rngs, shape, ("embed", "classes"), std=shape[0] ** -0.5, use_bias=True)

    def start(self, x: Float[Array, "B T D"]) -> HaltingState:
        """Return the state before the first step, whose input is x [B,T,D]."""
        return HaltingState(x, jnp.zeros_like(x), jnp.zeros((*x.shape[:2], 1), jnp.float32))

    def input(self, state: HaltingState) -> Float[Array, "B T D"]:
        """Return the input [B,T,D] of the next step."""
        return state.x

    def step(self, state: HaltingState, x: Float[Array, "B T D"], y: Float[Array, "B T D"]) -> HaltingState:
        """Return the state after a step from x [B,T,D], its embedding included, to y [B,T,D]."""
        probability = jax.nn.sigmoid(self.probability(x).astype(jnp.float32))
        halts = state.halted + probability >= self.threshold
        weight = jnp.where(halts, 1 - state.halted, probability)  # 0 once a position has halted
        share = weight.astype(y.dtype)
        output = share * y + (1 - share) * state.output
        return HaltingState(y, output, jnp.where(halts, 1.0, state.halted + weight))

    def end(self, state: HaltingState) -> Float[Array, "B T D"]:
        """Return the output [B,T,D] of all steps."""
        return state.output


class NoHalting(Module):
    """Makes the output of each layer the input of the next; the state is that input, [B,T,D]."""

    def start(self, x: Array) -> Array:
        return x

    def input(self, state: Array) -> Array:
        return state

    def step(self, _state: Array, _x: Array, y: Array) -> Array:
        return y

    def end(self, state: Array) -> Array:
        return state


def make_halting(config: ModelConfig, rngs: nnx.Rngs) -> Halting | NoHalting:
    """Return what decides after how many steps a position halts."""
    return Halting(config, rngs) if config.universal.halting == "adaptive" else NoHalting()

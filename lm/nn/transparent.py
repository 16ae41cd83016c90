"""Transparent attention: each layer of a decoder reads a mean of all layers of the encoder.

Shapes: E layers of the encoder, L layers of the decoder, B rows, S positions of the encoder, D features.
"""

import jax
import jax.numpy as jnp
from flax import nnx
from jax import Array
from jaxtyping import Float, Float32

from lm.config.model import ModelConfig
from lm.nn.layers import Module, normal, param


class LayerWeights(Module):
    """The weights with which layers of a decoder read layers of the encoder (Bapna et al. 2018).

    For each layer of the decoder they are a softmax of E + 1 parameters. As in the code of Narang et al.
    2021, the layers of the encoder are the input of each block as it is and, as the last one, the encoder's
    output, which is normalised.
    """

    def __init__(self, config: ModelConfig, rngs: nnx.Rngs):
        shape = config.num_encoder_layers + 1, config.num_decoder_layers
        self.logits = param(normal(rngs, shape, shape[0] ** -0.5), "classes", "classes")

    def __call__(
        self, block_inputs: Float[Array, "E B S D"], encoded: Float[Array, "B S D"]
    ) -> Float[Array, "L B S D"]:
        """Return what each layer of the decoder reads, from the blocks' inputs and the encoder's output."""
        states = jnp.concatenate([block_inputs, encoded[None]])
        return jnp.einsum("el,ebsd->lbsd", self.weights.astype(states.dtype), states)

    @property
    def weights(self) -> Float32[Array, "_ L"]:
        """Return the weights float32 [E+1,L]; each column sums to 1."""
        return jax.nn.softmax(self.logits[...], axis=0)

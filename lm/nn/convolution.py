"""Mixers that read a few neighbours of each position, and a convolution beside the first layer.

Shapes: B rows, T positions, D features, W tokens of a window, H kernels, each shared by D / H features.
"""

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx
from jax import Array
from jaxtyping import Float, Int

from lm.config.model import ModelConfig
from lm.nn.attention_inputs import AttentionInputs
from lm.nn.costs import TokenMixer, matmul_flops
from lm.nn.dropout import DropoutMasks, Shapes
from lm.nn.layers import ACTIVATIONS, Linear, Module, make_norm, normal, param
from lm.sharding import constrain


class LocalMixer(TokenMixer):
    """A mixer whose positions read ``behind`` tokens before them and ``ahead`` tokens after them.

    Tokens outside of a position's segment count as 0. In decoding it carries the last ``behind`` vectors.
    """

    def __init__(self, config: ModelConfig, behind: int, ahead: int):
        self.config = config
        self.behind, self.ahead = behind, ahead

    def neighbours(
        self,
        x: Float[Array, "B T D"],
        segments: Int[Array | np.ndarray, "B T"] | None,
        carry: Float[Array, "B _ D"] | None,
    ) -> tuple[list[Float[Array, "B T D"]], Float[Array, "B _ D"] | None]:
        """Return each token of all positions' windows, [B,T,D], from the first to the last, and the carry."""
        length = x.shape[1]
        before = self.init_carry(len(x), 0) if carry is None else carry
        padded = jnp.pad(jnp.concatenate([before, x], axis=1), ((0, 0), (0, self.ahead), (0, 0)))
        shifted = [padded[:, start : start + length] for start in range(self.behind + 1 + self.ahead)]
        if segments is not None:
            # the carry belongs to the row's first segment
            ids = jnp.pad(segments, ((0, 0), (self.behind, 0)), mode="edge")
            ids = jnp.pad(ids, ((0, 0), (0, self.ahead)))
            for start, tokens in enumerate(shifted):
                is_same_segment = ids[:, start : start + length] == segments
                shifted[start] = jnp.where(is_same_segment[:, :, None], tokens, 0)
        return shifted, None if carry is None else self._next_carry(padded, segments, length)

    def init_carry(self, rows: int, _length: int) -> Array:
        """Return zeros [B,behind,D]."""
        return jnp.zeros((rows, self.behind, self.config.d_model), self.config.dtype)

    def dropout_shapes(self, _length: int) -> Shapes:
        """Return no shapes: the only dropout is the block's, on the mixer's output."""
        return {}

    def _next_carry(self, padded: Array, segments: Array | np.ndarray | None, length: int) -> Array:
        """Return the last ``behind`` vectors before padding, of ``padded`` [B,behind+T,D]."""
        if segments is None:
            return padded[:, length:]
        index = (segments > 0).sum(1)[:, None] + jnp.arange(self.behind)[None, :]
        return jnp.take_along_axis(padded, index[:, :, None], axis=1)


class Convolution(LocalMixer):
    """A convolution along the row whose kernels are normalised by a softmax (Wu et al. 2019).

    Each feature is convolved by itself. A lightweight convolution has the same kernels everywhere, a dynamic
    one computes them from the position's input. As in the code of Narang et al. 2021, a gated linear layer
    comes before the convolution and two linear layers after it. A decoder's kernel ends at the position
    itself, an encoder's has it in the middle.
    """

    def __init__(self, config: ModelConfig, rngs: nnx.Rngs, bidirectional: bool):
        size, width = config.mixer.kernel_size, config.d_model
        ahead = (size - 1) // 2 if bidirectional else 0
        super().__init__(config, size - 1 - ahead, ahead)
        self.num_kernels = config.mixer.kernels or width

        def linear(axes: tuple[str, str]) -> Linear:
            return Linear(rngs, (width, width), axes, std=width**-0.5, use_bias=config.bias)

        self.value, self.gate = linear(("embed", "mlp")), linear(("embed", "mlp"))
        kernel = dynamic = None
        # the logits of a kernel's weights have this deviation in both forms
        std = size**-0.5
        if config.mixer.kind == "lightweight-convolution":
            kernel = param(normal(rngs, (size, self.num_kernels), std), "taps", "gates")
        else:
            shape, std = (width, size * self.num_kernels), std * width**-0.5
            dynamic = Linear(rngs, shape, ("mlp", "gates"), std=std, use_bias=config.bias)
        self.kernel, self.dynamic = kernel, dynamic
        self.pointwise, self.out = linear(("mlp", "embed")), linear(("embed", "mlp"))

    def __call__(
        self,
        x: Float[Array, "B T D"],
        inputs: AttentionInputs,
        carry: Float[Array, "B _ D"] | None,
        _dropout_masks: DropoutMasks,
    ) -> tuple[Float[Array, "B T D"], Float[Array, "B _ D"] | None]:
        """Return [B,T,D] from x [B,T,D] and, if a carry was given, the last gated inputs."""
        x = constrain(x, "batch", "key_length", "embed")
        gated = self.value(x) * jax.nn.sigmoid(self.gate(x))
        weights = self.kernel_weights(gated).astype(gated.dtype)
        tokens, carry = self.neighbours(gated, inputs.segments, carry)
        shared_by = self.config.d_model // self.num_kernels
        mixed = jnp.zeros_like(gated)
        for index, token in enumerate(tokens):
            mixed = mixed + token * jnp.repeat(weights[:, :, index], shared_by, axis=-1)
        return self.out(self.pointwise(mixed)), carry

    def kernel_weights(self, gated: Float[Array, "B T D"]) -> Float[Array, "#B #T W H"]:
        """Return the weights of each token of a window, float32 [B|1,T|1,W,H]; they sum to 1 over W."""
        if self.dynamic is None:
            logits = self.kernel[...][None, None]
        else:
            logits = self.dynamic(gated).reshape(*gated.shape[:2], -1, self.num_kernels)
        return jax.nn.softmax(logits.astype(jnp.float32), axis=2)

    def flops(self, length: int, _visible: int, /) -> int:
        """Return the FLOPs of the forward pass over one row: of all matrices, and of the convolution."""
        linear = (self.value, self.gate, self.dynamic, self.pointwise, self.out)
        products = sum(matmul_flops(layer, length) for layer in linear)
        return products + 2 * length * self.config.mixer.kernel_size * self.config.d_model


class InputConvolution(Module):
    """A convolution of the first layer's input, added to the output of that layer (DeBERTa 2).

    The sum is normalised. A position reads the tokens of its own segment alone; those outside count as 0.
    """

    def __init__(self, config: ModelConfig, rngs: nnx.Rngs):
        self.config = config
        size, width = config.embedding.convolution, config.d_model
        kernel = normal(rngs, (size, width, width), (size * width) ** -0.5)
        self.kernel = param(kernel, "taps", "embed", "mlp")
        self.bias = param(jnp.zeros((width,), jnp.float32), "mlp")
        self.norm = make_norm(config.norm, width)

    def __call__(
        self,
        layer_input: Float[Array, "B T D"],
        layer_output: Float[Array, "B T D"],
        segments: Int[Array | np.ndarray, "B T"] | None,
    ) -> Float[Array, "B T D"]:
        """Return [B,T,D] from the first layer's input and output [B,T,D]."""
        length, reach = layer_input.shape[1], self.config.embedding.convolution // 2
        around = ((0, 0), (reach, reach))
        padded = jnp.pad(layer_input, (*around, (0, 0)))
        kernel, total = self.kernel[...].astype(layer_input.dtype), self.bias[...].astype(layer_input.dtype)
        total = jnp.broadcast_to(total[None, None, :], layer_input.shape)
        ids = None if segments is None else jnp.pad(jnp.asarray(segments), around)
        for start in range(len(kernel)):
            tokens = padded[:, start : start + length]
            if ids is not None:
                is_same_segment = ids[:, start : start + length] == ids[:, reach : reach + length]
                tokens = jnp.where(is_same_segment[:, :, None], tokens, 0)
            total = total + tokens @ kernel[start]
        activation = INPUT_ACTIVATIONS[self.config.embedding.convolution_activation]
        return self.norm(layer_output + activation(total))

    def flops(self, length: int) -> int:
        """Return the FLOPs of the forward pass over one row."""
        return 2 * length * self.kernel.size


INPUT_ACTIVATIONS = {
    "gelu": ACTIVATIONS["gelu"],
    "tanh": jnp.tanh,
}  # by model.embedding.convolution_activation

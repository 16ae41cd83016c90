"""The blocks of the Evolved Transformer (So et al. 2019), in the form of Narang et al. 2021.

A block begins with two more sub-layers than that of a Transformer. Shapes: B rows, T positions, S positions
of the encoder, D features, C and E features of an inner layer, W tokens of a window.
"""

from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx
from jax import Array
from jaxtyping import Float, Int

from lm.config.base import changes
from lm.config.layers import BIAS_TABLES
from lm.config.model import EncoderConfig, ModelConfig
from lm.nn.attention import Attention
from lm.nn.attention_inputs import AttentionInputs
from lm.nn.block import Block, BlockOutput
from lm.nn.cache import Carry, KeyValue, LayerCache
from lm.nn.convolution import LocalMixer
from lm.nn.costs import array_bytes, matmul_flops
from lm.nn.dropout import DropoutMasks, Shapes, dropout
from lm.nn.layers import Linear, Module, broadcast_to_rank, make_norm, normal, param
from lm.nn.positions import RelativePositionBias
from lm.nn.residual import make_branch_norm
from lm.sharding import constrain


def pad_features(x: Float[Array, "B T C"], width: int) -> Float[Array, "B T {width}"]:
    """Return x [B,T,C] with features of 0 after its own, [B,T,width]."""
    return jnp.pad(x, ((0, 0), (0, 0), (0, width - x.shape[-1])))


class WindowLayer(LocalMixer):
    """The base of convolutions of C features; in decoding it carries the last ``behind`` inputs."""

    def __init__(self, config: ModelConfig, width: int, behind: int, ahead: int):
        super().__init__(config, behind, ahead)
        self.width = width

    def init_carry(self, rows: int, _length: int) -> Array:
        """Return zeros [B,behind,C]."""
        return jnp.zeros((rows, self.behind, self.width), self.config.dtype)


class FullConvolution(WindowLayer):
    """A convolution along the row that mixes all features: a linear layer of W tokens."""

    def __init__(self, config: ModelConfig, rngs: nnx.Rngs, shape: tuple[int, int], behind: int, ahead: int):
        super().__init__(config, shape[0], behind, ahead)
        inner = shape[0] * (behind + 1 + ahead)
        axes, std = ("embed", "mlp"), inner**-0.5
        self.out = Linear(rngs, (inner, shape[1]), axes, std=std, use_bias=config.bias)

    def __call__(
        self, x: Float[Array, "B T C"], segments: Int[Array | np.ndarray, "B T"] | None, carry: Array | None
    ) -> tuple[Float[Array, "B T E"], Array | None]:
        """Return [B,T,E] from x [B,T,C] and, if a carry was given, the last inputs."""
        tokens, carry = self.neighbours(constrain(x, "batch", "key_length", "embed"), segments, carry)
        return self.out(jnp.concatenate(tokens, axis=-1)), carry


class SeparableConvolution(WindowLayer):
    """A convolution of each feature by itself along the row, and then a linear layer."""

    def __init__(self, config: ModelConfig, rngs: nnx.Rngs, shape: tuple[int, int], behind: int, ahead: int):
        super().__init__(config, shape[0], behind, ahead)
        size = behind + 1 + ahead
        self.depthwise = param(normal(rngs, (size, shape[0]), size**-0.5), "taps", "mlp")
        axes, std = ("embed", "mlp"), shape[0] ** -0.5
        self.pointwise = Linear(rngs, shape, axes, std=std, use_bias=config.bias)

    def __call__(
        self, x: Float[Array, "B T C"], segments: Int[Array | np.ndarray, "B T"] | None, carry: Array | None
    ) -> tuple[Float[Array, "B T E"], Array | None]:
        """Return [B,T,E] from x [B,T,C] and, if a carry was given, the last inputs."""
        tokens, carry = self.neighbours(constrain(x, "batch", "key_length", "embed"), segments, carry)
        mixed = jnp.zeros_like(x)
        for token, weights in zip(tokens, self.depthwise[...], strict=True):
            mixed = mixed + token * broadcast_to_rank(weights, x)
        return self.pointwise(mixed), carry


class ConvolutionBranches(Module):
    """Two branches, whose sum is normalised, and a separable convolution of it.

    In an encoder the branches are a linear layer of 4 D features and a convolution of 3 tokens of D / 2, both
    with relu, and the last layer reads 9 tokens. In a decoder they are separable convolutions of the last 11
    tokens, of 2 D features with relu, and of the last 7, of D / 2, and the last layer reads 7. Features that
    a narrower branch or output lacks are 0. Dropout comes after the norm; Narang et al. drop out each branch.
    """

    def __init__(self, config: ModelConfig, rngs: nnx.Rngs, bidirectional: bool):
        self.config = config
        width, half = config.d_model, config.d_model // 2
        if bidirectional:
            self.hidden_width = 4 * width
            axes, std = ("embed", "mlp"), width**-0.5
            self.left: Any = Linear(rngs, (width, self.hidden_width), axes, std=std, use_bias=config.bias)
            self.right: Any = FullConvolution(config, rngs, (width, half), 1, 1)
            self.last = SeparableConvolution(config, rngs, (self.hidden_width, half), 4, 4)
        else:
            self.hidden_width = 2 * width
            self.left = SeparableConvolution(config, rngs, (width, self.hidden_width), 10, 0)
            self.right = SeparableConvolution(config, rngs, (width, half), 6, 0)
            self.last = SeparableConvolution(config, rngs, (self.hidden_width, width), 6, 0)
        self.norm = make_norm(config.norm, self.hidden_width)
        self.bidirectional = bidirectional

    def __call__(
        self,
        x: Float[Array, "B T D"],
        segments: Int[Array | np.ndarray, "B T"] | None,
        carry: tuple[Array, Array, Array] | None,
        dropout_mask: Array | None,
    ) -> tuple[Float[Array, "B T D"], Carry | None]:
        """Return [B,T,D] from x [B,T,D] and, if a carry was given, the last inputs of all convolutions."""
        first, second, third = (None, None, None) if carry is None else carry
        if self.bidirectional:
            left = self.left(x)
        else:
            left, first = self.left(x, segments, first)
        right, second = self.right(x, segments, second)
        if self.bidirectional:
            right = jax.nn.relu(right)
        hidden = jax.nn.relu(left) + pad_features(right, self.hidden_width)
        hidden = dropout(self.norm(hidden), dropout_mask, self.config.dropout)
        y, third = self.last(hidden, segments, third)
        return pad_features(y, x.shape[-1]), None if carry is None else (first, second, third)

    def init_carry(self, rows: int) -> tuple[Array, Array, Array]:
        """Return the carry of a decoder's convolutions before the first token."""
        first, second, third = (layer.init_carry(rows, 0) for layer in (self.left, self.right, self.last))
        return first, second, third


class BothCrossAttentions(NamedTuple):
    """The two cross-attentions of a block, which share one cache of the encoder's keys and values."""

    first: Any
    second: Any

    def key_value(self, encoded: Float[Array, "B S D"], positions: Any) -> KeyValue:
        """Return keys and values [B,S,2K,H] of the encoder's output: those of the first, then the second."""
        pairs = (attention.key_value(encoded, positions) for attention in self)
        return KeyValue(*(jnp.concatenate(pair, axis=2) for pair in zip(*pairs, strict=True)))


class FirstSublayersOutput(NamedTuple):
    """The results of the two sub-layers with which a block begins."""

    x: Float[Array, "B T D"]
    carry: Carry | None  # of the wide self-attention and of the convolutions
    encoder_kv: LayerCache | None  # of the block's second cross-attention


class EvolvedBlock(Block):
    """A block of a Transformer after two further sub-layers, each with a residual connection.

    The first is a gated linear layer in an encoder; in a decoder it is the sum of self-attention with twice
    as many heads, of the same width each, and of cross-attention (So et al. divide the same width by more
    heads). The second is ``ConvolutionBranches``.
    """

    def __init__(self, config: ModelConfig, rngs: nnx.Rngs, has_cross_attention: bool):
        super().__init__(config, rngs, has_cross_attention)
        bidirectional = config.is_bidirectional(has_cross_attention)
        self.first_norm, self.convolution_norm = make_branch_norm(config), make_branch_norm(config)
        self.convolutions = ConvolutionBranches(config, rngs, bidirectional)
        gate = wide = wide_relative = first_cross = None
        if bidirectional:
            shape, std = (config.d_model, 2 * config.d_model), config.d_model**-0.5
            gate = Linear(rngs, shape, ("embed", "mlp"), std=std, use_bias=config.bias)
        else:
            # Sizes that the encoder and cross-attention have of their own might not fit twice as many heads.
            sizes: dict[str, Any] = {
                "attention.num_heads": 2 * config.attention.num_heads,
                "encoder": EncoderConfig(),
                "cross_attention.num_heads": None,
                "cross_attention.d_kv": None,
            }
            if config.attention.num_key_value_heads is not None:
                sizes["attention.num_key_value_heads"] = 2 * config.attention.num_key_value_heads
            wide_config = changes(config, sizes)
            wide = Attention(wide_config, rngs)
            if config.positions.kind in BIAS_TABLES:
                wide_relative = RelativePositionBias(wide_config, rngs, bidirectional)
            if has_cross_attention:
                first_cross = Attention(config.cross_config, rngs, is_cross=True)
        self.gate, self.wide, self.wide_relative, self.first_cross = gate, wide, wide_relative, first_cross

    def __call__(
        self,
        x: Float[Array, "B T D"],
        inputs: AttentionInputs,
        dropout_masks: DropoutMasks,
        carry: Carry | None,
        encoder_kv: LayerCache | None,
    ) -> BlockOutput:
        """Return the block's output, as ``Block`` does; the carry has those of all sub-layers."""
        first_carry, own_carry = (None, None) if carry is None else carry
        first = self._first_sublayers(x, inputs, dropout_masks, first_carry, encoder_kv)
        output = super().__call__(first.x, inputs, dropout_masks, own_carry, first.encoder_kv)
        if carry is None:
            return output
        return output._replace(carry=(first.carry, output.carry))

    def _first_sublayers(
        self,
        x: Float[Array, "B T D"],
        inputs: AttentionInputs,
        dropout_masks: DropoutMasks,
        carry: Carry | None,
        encoder_kv: LayerCache | None,
    ) -> FirstSublayersOutput:
        """Return what the two further sub-layers compute from x [B,T,D]; arguments are as in ``__call__``.

        ``encoder_kv`` holds the keys and values of both cross-attentions; returned are those of the second.
        """
        wide_carry, convolution_carry = (None, None) if carry is None else carry
        h, kv = self._sublayer_input(x, x, self.first_norm), None
        if self.wide is None:
            value, gate = jnp.split(self.gate(h), 2, axis=-1)
            y = value * jax.nn.sigmoid(gate)
        else:
            own = inputs
            if self.wide_relative is not None:
                own = inputs._replace(bias=inputs.layer_bias(self.wide_relative))
            masks = {"attention": dropout_masks["wide"]} if "wide" in dropout_masks else {}
            y, wide_carry = self.wide(h, own, wide_carry, masks)
        if self.first_cross is not None and (inputs.encoded is not None or encoder_kv is not None):
            first, kv = _halves(self._encoder_key_value(inputs, encoder_kv))
            y = y + self._attend_to_encoder(
                self.first_cross, h, first, inputs, dropout_masks.get("first_cross")
            )
        x = self._add(x, y, self.first_norm, dropout_masks.get("first_out"))
        h = self._sublayer_input(x, x, self.convolution_norm)
        mask = dropout_masks.get("convolution")
        h, convolution_carry = self.convolutions(h, inputs.segments, convolution_carry, mask)
        x = self._add(x, h, self.convolution_norm, dropout_masks.get("convolution_out"))
        if carry is not None:
            carry = wide_carry, convolution_carry
        return FirstSublayersOutput(x, carry, kv)

    def init_carry(self, rows: int, length: int) -> Carry:
        """Return the carry of a decoder's block before the first token."""
        assert self.wide is not None, "encoders carry nothing"
        first = self.wide.init_carry(rows, length), self.convolutions.init_carry(rows)
        return first, super().init_carry(rows, length)

    def dropout_shapes(self, length: int, encoded_length: int | None) -> Shapes:
        """Return the shapes of one row's dropout masks, those of ``Block`` first."""
        shapes, out = super().dropout_shapes(length, encoded_length), (1, self.config.d_model)
        if self.wide is not None:
            shapes |= {"wide": (self.wide.num_heads, 1, length)}
        if self.first_cross is not None and encoded_length is not None:
            shapes |= {"first_cross": (self.first_cross.num_heads, 1, encoded_length)}
        hidden = (1, self.convolutions.hidden_width)
        return shapes | {"first_out": out, "convolution": hidden, "convolution_out": out}

    def attention_weights(
        self, x: Float[Array, "B T D"], inputs: AttentionInputs, encoder_kv: LayerCache | None = None
    ) -> tuple[Array | None, Array | None]:
        """Return the weights of the attentions that a Transformer's block has too, as ``Block`` does."""
        first = self._first_sublayers(x, inputs, {}, None, encoder_kv)
        return super().attention_weights(first.x, inputs, first.encoder_kv)

    def mixer_input(self, x: Float[Array, "B T D"], inputs: AttentionInputs) -> Float[Array, "B T D"]:
        """Return the mixer's input from the block's input x [B,T,D], after the further sub-layers."""
        first = self._first_sublayers(x, inputs, {}, None, None)
        return super().mixer_input(first.x, inputs)

    @property
    def attention_to_encoder(self) -> Any:
        """Return the cross-attentions that make keys and values of the encoder's output."""
        return BothCrossAttentions(self.first_cross, self.cross)

    def mixer_flops(self, length: int, visible: int) -> int:
        """Return the FLOPs of all sub-layers but cross-attention and the feed-forward layer, forward."""
        flops = super().mixer_flops(length, visible) + matmul_flops(self.convolutions, length)
        if self.wide is not None:
            flops += self.wide.flops(length, visible)
        return flops + matmul_flops(self.gate, length)

    def mixer_cache_bytes(self, length: int) -> int:
        """Return the bytes of the carry of one row of ``length`` tokens."""
        return array_bytes(jax.eval_shape(lambda block: block.init_carry(1, length), self))

    def cross_flops(self, queries: int, keys: int) -> int:
        """Return the FLOPs of both cross-attentions, forward."""
        first = 0 if self.first_cross is None else self.first_cross.cross_flops(queries, keys)
        return first + super().cross_flops(queries, keys)

    def cross_cache_bytes(self, length: int) -> int:
        """Return the bytes of the keys and values of ``length`` tokens of the encoder."""
        if self.first_cross is None or self.cross is None:
            return 0
        return self.first_cross.cache_bytes(length) + self.cross.cache_bytes(length)


def _halves(kv: KeyValue) -> tuple[KeyValue, LayerCache]:
    """Return the keys and values of the first cross-attention, and the cache of the second's."""
    first, second = zip(*(jnp.split(x, 2, axis=2) for x in kv), strict=True)
    return KeyValue(*first), LayerCache.from_key_value(KeyValue(*second))

"""A block: a token mixer and, as the settings say, cross-attention, a feed-forward layer and an adapter.

A sub-layer is one of these layers. A residual branch is a sub-layer with the norms, the scale and the gate
around it, whose output is added to x.

Shapes: B rows, T positions, D = d_model, S positions of the encoder, N heads, M heads of cross-attention.
"""

from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from flax import nnx
from jax import Array
from jax.ad_checkpoint import checkpoint_name
from jaxtyping import Float, Float32

from lm.config.layers import CompileConfig
from lm.config.model import ModelConfig
from lm.nn.attention import Attention
from lm.nn.attention_inputs import AttentionInputs
from lm.nn.cache import Carry, KeyValue, LayerCache
from lm.nn.convolution import InputConvolution
from lm.nn.costs import matmul_flops, mixer_cache_bytes, mixer_flops
from lm.nn.dropout import DropoutMasks, Shapes, dropout
from lm.nn.experts import ExpertMLP, RouterStatistics
from lm.nn.layers import Identity, Module
from lm.nn.lora import add_lora
from lm.nn.memory import ProductKeyMemory
from lm.nn.mixers import CROSS_ATTENTION, Mixer, make_mixer
from lm.nn.mlp import MLP, Adapter
from lm.nn.positions import RelativePositionBias
from lm.nn.residual import apply_fixup, make_branch_norm, make_branch_output_norm, make_branch_scale
from lm.nn.universal import make_gate, make_step_embedding
from lm.sharding import constrain


def remat_policy(config: CompileConfig) -> Callable[..., Any]:
    """Return which values ``jax.checkpoint`` saves for the backward pass; it recomputes the others.

    It always saves its arguments, such as the block's input, unless the policy sends them to the host.
    """
    if config.remat == "dots":
        # Save products with parameters. In bfloat16 they are inside ``jax.lax.platform_dependent``, where the
        # first policy does not see them. The second saves them by the name that ``lm.ops.products`` gives.
        policies = jax.checkpoint_policies
        return policies.save_from_both_policies(
            policies.dots_with_no_batch_dims_saveable, policies.save_only_these_names("product")
        )
    if not config.offloaded_tensors:
        return jax.checkpoint_policies.save_only_these_names(*config.saved_tensors)
    return jax.checkpoint_policies.save_and_offload_only_these_names(
        names_which_can_be_saved=config.saved_tensors,
        names_which_can_be_offloaded=config.offloaded_tensors,
        offload_src="device",
        offload_dst="pinned_host",
    )


class BlockOutput(NamedTuple):
    """The results of a block."""

    x: Float[Array, "B T D"]
    carry: Carry | None  # the mixer's
    router: RouterStatistics | None  # None in a model without experts


class Block(Module):
    """The residual block that a stack repeats."""

    def __init__(self, config: ModelConfig, rngs: nnx.Rngs, has_cross_attention: bool):
        self.config = config
        bidirectional = config.is_bidirectional(has_cross_attention)
        shares_norm = config.residual == "parallel-one-norm"
        self.attention_norm = make_branch_norm(config)
        # Whichever mixer it is: checkpoints call it attention.
        self.attention: Mixer = make_mixer(config, rngs, bidirectional)
        has_own_bias = config.positions.kind == "relative-per-layer"
        self.relative = RelativePositionBias(config, rngs, bidirectional) if has_own_bias else None
        self.cross = (
            CROSS_ATTENTION[config.cross_attention.kind](config, rngs) if has_cross_attention else None
        )
        has_cross_norm = self.cross is not None and not shares_norm
        self.cross_norm = make_branch_norm(config) if has_cross_norm else None
        has_mlp = config.has_feed_forward
        has_mlp_norm = has_mlp and not shares_norm
        self.mlp_norm = make_branch_norm(config) if has_mlp_norm else None
        # Where some layers have experts and others do not, a stack leaves one of the two out of each layer.
        has_experts, is_mixed = config.experts.count > 0, config.experts.every > 1
        self.mlp = MLP(config, rngs) if has_mlp and (is_mixed or not has_experts) else None
        self.experts = ExpertMLP(config, rngs) if has_experts else None
        # Set by the stack, only in the layer that has it: it is too large to allocate in every layer.
        self.memory: ProductKeyMemory | None = nnx.data(None)
        self.has_product_key_memory = config.has_product_key_memory(has_cross_attention)
        # A stack sets it, in the first layer.
        self.convolution: InputConvolution | None = nnx.data(None)
        self.attention_scale = make_branch_scale(config)
        self.cross_scale = make_branch_scale(config) if self.cross is not None else Identity()
        self.mlp_scale = make_branch_scale(config) if has_mlp else Identity()
        self.attention_output_norm = make_branch_output_norm(config)
        self.cross_output_norm = make_branch_output_norm(config) if has_cross_norm else Identity()
        self.mlp_output_norm = make_branch_output_norm(config) if has_mlp_norm else Identity()
        self.attention_gate = make_gate(config, rngs)
        self.cross_gate = make_gate(config, rngs) if self.cross is not None else None
        self.mlp_gate = make_gate(config, rngs) if has_mlp else None
        # Adds the embedding of this layer, a step of a Universal Transformer, to x; other models add nothing.
        self.step_embedding = make_step_embedding(config, rngs)
        apply_fixup(config, self)
        self.adapter = Adapter(config, rngs) if config.mlp.adapter_width else None
        add_lora(config, rngs, self)

    def __call__(
        self,
        x: Float[Array, "B T D"],
        inputs: AttentionInputs,
        dropout_masks: DropoutMasks,
        carry: Carry | None,
        encoder_kv: LayerCache | None,
    ) -> BlockOutput:
        """Return the block's output [B,T,D] from x [B,T,D], the mixer's new carry, and router statistics.

        ``carry`` is a KV cache, a recurrent state, or None. ``encoder_kv`` holds the keys and values of the
        encoder's output, computed once for decoding; the beams of a row, adjacent in x, share them. If it is
        None, keys and values are computed from ``inputs.encoded`` [B,S,D]. If that is None too, there is no
        cross-attention.
        """
        x = block_input = self.step_embedding(checkpoint_name(x, "block_input"), inputs.positions)
        is_decoding = carry is not None
        h = self._sublayer_input(block_input, x, self.attention_norm)
        h, carry = self.attention(
            h, self._self_attention_inputs(inputs, encoder_kv, len(x)), carry, dropout_masks
        )
        h = self.attention_gate(x, self.attention_output_norm(self.attention_scale(h)))
        x = self._add(x, h, self.attention_norm, dropout_masks.get("attention_out"))
        if inputs.pool is not None:
            x = inputs.pool(x)
        if self.cross is not None and (inputs.encoded is not None or encoder_kv is not None):
            kv = self._encoder_key_value(inputs, encoder_kv)
            h = self._sublayer_input(block_input, x, self.cross_norm)
            h = self._attend_to_encoder(self.cross, h, kv, inputs, dropout_masks.get("cross"))
            h = self.cross_gate(x, self.cross_output_norm(self.cross_scale(h)))
            x = self._add(x, h, self.cross_norm, dropout_masks.get("cross_out"))
        router = RouterStatistics.zeros(len(x)) if self.config.experts.count else None
        if self.config.has_feed_forward:
            h = self._sublayer_input(block_input, x, self.mlp_norm)
            if self.memory is not None:
                h = self.memory(h)
            elif self.experts is not None:
                h, router = self._mixture_of_experts(h, inputs, dropout_masks, is_decoding)
            else:
                h = self.mlp(h, dropout_masks.get("mlp"))
            h = self.mlp_gate(x, self.mlp_output_norm(self.mlp_scale(h)))
            x = self._add(x, h, self.mlp_norm, dropout_masks.get("mlp_out"))
        if self.adapter is not None:
            h = self.adapter(x, dropout_masks.get("adapter"))
            h = dropout(h, dropout_masks.get("adapter_out"), self.config.dropout)
            x = constrain(x + h, "batch", "length", "embed")
        if self.convolution is not None:
            x = self.convolution(block_input, x, inputs.segments)
        return BlockOutput(x, carry, router)

    def init_carry(self, rows: int, length: int) -> Carry:
        """Return the mixer's carry of ``rows`` before their first token, as ``Mixer.init_carry`` does."""
        return self.attention.init_carry(rows, length)

    def dropout_shapes(self, length: int, encoded_length: int | None) -> Shapes:
        """Return the shapes of one row's dropout masks, [N,1,S] for weights and [1,features] for activations.

        All masks are slices of one array of random numbers, so their order decides which numbers each gets.
        """
        config, out = self.config, (1, self.config.d_model)
        is_merged = config.has_merged_attention and encoded_length is not None
        keys = length + encoded_length if is_merged else length
        shapes = self.attention.dropout_shapes(keys) | {"attention_out": out}
        if config.has_feed_forward:
            shapes |= {"mlp": (1, config.mlp.d_ff), "mlp_out": out}
        if self.adapter is not None:
            shapes |= {"adapter": (1, config.mlp.adapter_width), "adapter_out": out}
        if encoded_length is not None and self.cross is not None:
            shapes |= {"cross": (self.cross.num_heads, 1, encoded_length), "cross_out": out}
        return shapes

    def attention_weights(
        self, x: Float[Array, "B T D"], inputs: AttentionInputs, encoder_kv: LayerCache | None = None
    ) -> tuple[Float32[Array, "B N T T"] | None, Float32[Array, "B M T S"] | None]:
        """Return the weights of self-attention and of cross-attention for the block's input x [B,T,D].

        Either is None if the block lacks that attention. ``encoder_kv`` is as in ``__call__``, but does not
        replace ``inputs.encoded``: without that, no weights of cross-attention are returned.
        """
        inputs = self._self_attention_inputs(inputs, None, len(x))
        x = block_input = self.step_embedding(x, inputs.positions)
        h = self._sublayer_input(x, x, self.attention_norm)
        weights = None
        if isinstance(self.attention, Attention):
            kv = self.attention.row_key_value(h, inputs)
            kv = self.attention.all_keys(kv, inputs)
            weights = self.attention.weights(h, kv, inputs)
        if inputs.encoded is None:
            return weights, None
        if self.cross is None:  # merged: the encoder's keys come last
            return weights[..., : x.shape[1]], weights[..., x.shape[1] :]
        h = self.attention_output_norm(self.attention_scale(self.attention(h, inputs, None, {})[0]))
        h = self.attention_gate(x, h)
        x = self._add(x, h, self.attention_norm, None)
        h = self._sublayer_input(block_input, x, self.cross_norm)
        kv = self._encoder_key_value(inputs, encoder_kv)
        return weights, self.cross.weights(h, kv, self._cross_attention_inputs(inputs, len(x)))

    def mixer_input(self, x: Float[Array, "B T D"], inputs: AttentionInputs) -> Float[Array, "B T D"]:
        """Return the mixer's input from the block's input x [B,T,D]: x, normalised unless post-norm."""
        x = self.step_embedding(x, inputs.positions)
        return self._sublayer_input(x, x, self.attention_norm)

    @property
    def attention_to_encoder(self) -> Any:
        """Return the attention that makes keys and values of the encoder's output: cross or, merged, self."""
        return self.attention if self.config.has_merged_attention else self.cross

    def mixer_flops(self, length: int, visible: int) -> int:
        """Return the forward FLOPs of the mixer over a row in which each token reads ``visible`` tokens."""
        return mixer_flops(self.attention, length, visible)

    def mixer_cache_bytes(self, length: int) -> int:
        """Return the bytes of the carry of one row of ``length`` tokens."""
        return mixer_cache_bytes(self.attention, length)

    def cross_flops(self, queries: int, keys: int) -> int:
        """Return the forward FLOPs of cross-attention from ``queries`` tokens to ``keys`` of the encoder."""
        if self.config.has_merged_attention:
            return self.attention_to_encoder.merged_flops(queries, keys)
        return 0 if self.cross is None else self.cross.cross_flops(queries, keys)

    def gate_flops(self, length: int) -> int:
        """Return the forward FLOPs of the gates of residual branches for ``length`` tokens."""
        return sum(
            matmul_flops(gate, length) for gate in (self.attention_gate, self.cross_gate, self.mlp_gate)
        )

    def cross_cache_bytes(self, length: int) -> int:
        """Return the bytes of keys and values of ``length`` tokens of the encoder."""
        attention = self.attention_to_encoder
        return 0 if attention is None else attention.cache_bytes(length)

    def _mixture_of_experts(
        self, h: Array, inputs: AttentionInputs, dropout_masks: DropoutMasks, is_decoding: bool
    ) -> tuple[Array, RouterStatistics]:
        """Return the output of the experts for their input h [B,T,D], and the router's statistics."""
        router_key = dropout_masks.get("router")  # a random key, not a mask
        keeps_all = is_decoding and router_key is None
        return self.experts(h, inputs.segments, dropout_masks.get("mlp"), router_key, keeps_all)

    def _encoder_key_value(self, inputs: AttentionInputs, encoder_kv: LayerCache | None) -> KeyValue:
        """Return keys and values [B,S,K,H] of the encoder's output: ``encoder_kv`` if there is one."""
        if encoder_kv is not None:
            return encoder_kv.key_value()
        return self.attention_to_encoder.key_value(inputs.encoded, inputs.encoder_positions)

    def _self_attention_inputs(
        self, inputs: AttentionInputs, encoder_kv: LayerCache | None, rows: int
    ) -> AttentionInputs:
        """Return the inputs of the mixer for x [rows,T,D].

        Those of the stack lack two parts: the bias from this block's own table, if each block has one (UMT5),
        and the encoder's keys and values, if attention is merged.
        """
        if self.relative is not None:
            inputs = inputs._replace(bias=inputs.layer_bias(self.relative))
        has_encoder = inputs.encoded is not None or encoder_kv is not None
        if self.config.has_merged_attention and has_encoder:
            kv = self._encoder_key_value(inputs, encoder_kv)
            # the beams of a row, which are adjacent, read the same keys and values
            by_beam = KeyValue(*(jnp.repeat(x, rows // len(x), axis=0) for x in kv))
            inputs = inputs._replace(encoder_kv=by_beam)
        return inputs

    def _attend_to_encoder(
        self, attention: Any, h: Array, kv: KeyValue, inputs: AttentionInputs, dropout_mask: Array | None
    ) -> Array:
        """Return the output [B,T,D] of a cross-attention from h [B,T,D] to the encoder's keys and values."""
        rows = len(kv.key)
        queries = h.reshape(rows, -1, h.shape[-1])  # a row's beams become more queries of the same keys
        cross_inputs = self._cross_attention_inputs(inputs, rows)
        output = attention.attend_to(queries, kv, cross_inputs, dropout_mask)
        return output.reshape(h.shape)

    def _cross_attention_inputs(self, inputs: AttentionInputs, rows: int) -> AttentionInputs:
        """Return the inputs of cross-attention to keys of ``rows`` rows, whose beams are further queries."""
        if self.config.cross_attention.positions == "none":
            return AttentionInputs(mask=inputs.cross_mask)
        positions = inputs.positions
        # Positions [1,T] are the same for all rows. Otherwise the beams of a row, which are adjacent, become
        # one row of queries.
        if len(positions) > 1:
            positions = positions.reshape(rows, -1)
        return AttentionInputs(mask=inputs.cross_mask, positions=positions)

    def _sublayer_input(self, block_input: Array, x: Array, norm: Any) -> Array:
        """Return a sub-layer's input: x, or the block's input if parallel; normalised unless post-norm.

        If ``norm`` is None, all sub-layers share the norm of the mixer's branch.
        """
        if self.config.residual == "post-norm":
            return x  # normalised by ``_add``
        norm = self.attention_norm if norm is None else norm
        return norm(block_input if self.config.residual.startswith("parallel") else x)

    def _add(self, x: Array, h: Array, norm: Any, dropout_mask: Array | None) -> Array:
        """Return x plus a sub-layer's output h, or h alone if residual is "none"; normalised if post-norm."""
        h = dropout(h, dropout_mask, self.config.dropout)
        if self.config.residual_multiplier != 1.0:
            h = h * self.config.residual_multiplier
        if self.config.residual != "none":
            h = x + h
        h = constrain(h, "batch", "length", "embed")
        return norm(h) if self.config.residual == "post-norm" else h

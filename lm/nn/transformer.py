"""The Transformer: encoder, decoder, prefix decoder, and encoder-decoder with two stacks or a shared one."""

from collections.abc import Callable
from dataclasses import replace
from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx
from jax import Array
from jaxtyping import Float, Float32, Int

from lm.batch import Batch
from lm.config.base import SettingError
from lm.config.model import ModelConfig
from lm.nn.adaptive import AdaptiveEmbed, AdaptiveSoftmax
from lm.nn.attention_inputs import (
    AttentionInputs,
    continue_positions,
    last_encoder_states,
    make_attention_inputs,
    make_cross_mask,
    make_decode_inputs,
    make_two_stream_inputs,
    merge_masks,
    segments_of,
)
from lm.nn.cache import Cache, Carry, LayerCache
from lm.nn.dropout import split_key
from lm.nn.funnel import FunnelStack, encoder_output_side, make_encoder_inputs
from lm.nn.heads import PAIR_CLASSES, MLMTransform, ReplacedTokenHead
from lm.nn.layers import (
    Embed,
    Identity,
    Linear,
    Module,
    broadcast_to_rank,
    embedding_std,
    normal,
    param,
)
from lm.nn.softmaxes import SoftmaxMixture
from lm.nn.stack import Stack, StackOutput, split_layers
from lm.nn.transparent import LayerWeights
from lm.ops.attention import soft_cap
from lm.ops.products import dense
from lm.sharding import constrain


class StackInputs(NamedTuple):
    """The arguments of a stack."""

    embeddings: Array  # [B,T,d_embed]: of tokens
    token_types: Array | None  # int32 [B,T]
    attention: AttentionInputs


class _ForwardPass(NamedTuple):
    """The hidden states of one stack for a batch, and the inputs that produced them."""

    stack: Stack
    states: Array  # [layers+1,B,T,D]: each block's input, and the last block's output
    inputs: AttentionInputs
    encoder_kv: LayerCache | None  # of transparent attention


class Transformer(Module):
    """An encoder, a decoder or both, which return logits. Passing a key switches dropout on.

    A batch has one side per stack, the arrays of that stack (``lm.batch.Side``): tokens int32 [B,S] or [B,T],
    and optional segment ids, positions, token types and global attention.
    """

    def __init__(self, config: ModelConfig, rngs: nnx.Rngs):
        self.config = config
        d_model, heads = config.d_model, config.heads
        self.embed = _embedding(config, rngs)
        # If encoder and decoder share one stack, it is ``decoder``.
        has_own_encoder = config.architecture in ("encoder-decoder", "encoder")

        def make_encoder() -> Stack:
            stack_class = FunnelStack if config.funnel.blocks > 1 else Stack
            return stack_class(
                config.encoder_config,
                rngs,
                config.num_encoder_layers,
                has_cross_attention=False,
                shares_layers=config.shares_layers("encoder"),
            )

        def make_decoder() -> Stack:
            return Stack(
                config,
                rngs,
                config.num_decoder_layers,
                has_cross_attention=config.has_encoder,
                shares_layers=config.shares_layers("decoder"),
            )

        self.encoder = make_encoder() if has_own_encoder else None
        self.decoder = make_decoder() if config.has_decoder else None
        # Projects hidden states from d_model to d_embed before tied logits (OPT). Its parameters have this
        # name in checkpoints.
        self.narrowing = output_projection(config, rngs)
        # BERT's dense layer, activation and norm before the logits.
        self.transform = MLMTransform(config, rngs) if config.output.transform else Identity()
        self.head = _output_matrix(config, rngs) if config.output.logits.startswith("separate") else None
        self.logits_bias = param(jnp.zeros(config.vocab_size), "vocab") if config.output.bias else None

        def linear(width: int, axis: str) -> Linear:
            shape, axes = (d_model, width), ("embed", axis)
            return Linear(rngs, shape, axes, std=d_model**-0.5, use_bias=config.bias)

        self.pooler = linear(d_model, "kv") if "pooler" in heads else None
        self.next_sentence = linear(PAIR_CLASSES, "classes") if "next-sentence" in heads else None
        self.sentence_order = linear(PAIR_CLASSES, "classes") if "sentence-order" in heads else None
        self.replaced = ReplacedTokenHead(config, rngs) if "replaced-token" in heads else None
        self.copy_gate = linear(1, "classes") if "copy" in heads else None
        # The vector that replaces every token's embedding in XLNet's query stream. Masked LMs use the [MASK]
        # token instead.
        has_queries = "query-stream" in heads
        self.query_embedding = _query_embedding(config, rngs) if has_queries else None
        is_separate = config.embedding.encoder == "separate"
        self.encoder_embed = _embedding(config, rngs) if is_separate else None
        # The share of each encoder layer in what each decoder layer attends to (transparent attention).
        self.layer_weights = LayerWeights(config, rngs) if config.has_transparent_attention else None
        # A mixture of softmaxes, and an adaptive softmax. Their parameters have these names in checkpoints.
        self.mixture = SoftmaxMixture(config, rngs) if config.output.softmaxes > 1 else None
        self.adaptive = AdaptiveSoftmax(config, rngs) if config.output.softmax == "adaptive" else None

    def __call__(
        self, batch: Batch, key: Array | None = None
    ) -> Float32[Array, "B T {self.config.vocab_size}"]:
        """Return logits float32 [B,T,V].

        A decoder's at position t predict token t + 1. An encoder's predict token t itself, as in a masked LM.
        """
        return self.logits(self.features(batch, key))

    def features(self, batch: Batch, key: Array | None = None) -> Float[Array, "B T {self.config.d_model}"]:
        """Return the last hidden states [B,T,D], of the decoder if there is one."""
        return self.outputs(batch, key).x

    def outputs(self, batch: Batch, key: Array | None = None) -> StackOutput:
        """Return the last hidden states [B,T,D], and the statistics of the routers of both stacks."""
        encoder_key, decoder_key = split_key(key, 2)
        if not self.config.has_encoder:
            return self.decoder(*self._decoder_inputs(batch, None), key=decoder_key)
        encoded = self._encode(batch, encoder_key)
        if not self.config.has_decoder:
            return encoded
        inputs = self._decoder_inputs(batch, encoded.x)
        encoder_kv = self._encoder_key_value(encoded.block_inputs, encoded.x, inputs.attention)
        decoded = self.decoder(*inputs, key=decoder_key, encoder_kv=encoder_kv)
        return decoded._replace(router=jax.tree.map(jnp.add, encoded.router, decoded.router))

    def outputs_from_carry(self, batch: Batch, carry: Carry, key: Array | None = None) -> StackOutput:
        """Return hidden states [B,T,D] of a recurrent decoder started from ``carry``, and the new carry."""
        _, decoder_key = split_key(key, 2)  # as in ``outputs``
        return self.decoder(*self._decoder_inputs(batch, None), key=decoder_key, carry=carry)

    def encode(self, batch: Batch, key: Array | None = None) -> Float[Array, "B S {self.config.d_model}"]:
        """Return the encoder's output [B,S,D]."""
        return self._encode(batch, key).x

    def logits(self, x: Float[Array, "B T D"]) -> Float32[Array, "B T {self.config.vocab_size}"]:
        """Return logits float32 [B,T,V] of last hidden states x [B,T,D].

        With a mixture of softmaxes or an adaptive softmax these are log-probabilities.
        """
        if self.config.output.logits == "none":
            raise SettingError(
                "model.output.logits='none': no output matrix; use the model's features or its heads"
            )
        if self.mixture is not None:
            logits = self.mixture(x, self._softmax_logits)
        else:
            logits = self._softmax_logits(x)
        if self.adaptive is not None:
            logits = self.adaptive(x, logits)
        return constrain(logits, "batch", "length", "vocab")

    def _softmax_logits(self, x: Array) -> Array:
        """Return the logits float32 [B,T,V] of one softmax for states x [B,T,D]."""
        config = self.config
        x = self.transform(self.narrowing(x))
        # Outside muP, base_width is d_model and width_factor is 1. In muP, base_width is the d_model of the
        # base model, and width_factor is base_width / d_model.
        if config.output.logits.endswith("scaled"):
            x = x * config.base_width**-0.5
        if config.width_factor != 1:
            x = x * config.width_factor
        if self.head is not None:
            logits = dense(x, self.head.kernel[...].astype(x.dtype), jnp.float32)
        else:
            logits = self.embed.logits(x)
        if self.logits_bias is not None:
            logits = logits + broadcast_to_rank(self.logits_bias[...], logits)
        if config.output.logit_divisor != 1.0:
            logits = logits / config.output.logit_divisor
        return soft_cap(logits, config.output.logit_cap)

    def pooled(self, x: Float[Array, "B T D"]) -> Float[Array, "B D"]:
        """Return [B,D], the representation of each text: the pooler applied to the first position of x."""
        return jnp.tanh(self.pooler(x[:, 0]))

    def hidden_states(self, batch: Batch) -> dict[str, Array]:
        """Return {"encoder", "decoder": [layers+1,B,T,D]}: each block's input, and the last block's output.

        With a ``prediction_order`` the encoder's arrays have the 2B rows of ``_two_stream_inputs``.
        """
        return {side: forward.states for side, forward in self._forward_passes(batch).items()}

    def attention_weights(self, batch: Batch) -> dict[str, Array]:
        """Return the weights of self-attention by stack, and of cross-attention.

        They are {"encoder", "decoder": float32 [layers,B,N,T,T], "cross": float32 [layers,B,M,T,S]}, where M
        is the number of heads of cross-attention. The entry of a stack is missing if its mixer is not
        attention. With a ``prediction_order`` the encoder's weights have the 2B rows of
        ``_two_stream_inputs``.
        """
        weights: dict[str, Array | None] = {}
        for side, forward in self._forward_passes(batch).items():
            self_attention, cross_attention = forward.stack.attention_weights(
                forward.states, forward.inputs, forward.encoder_kv
            )
            weights |= {side: self_attention, "cross": cross_attention}
        return {name: array for name, array in weights.items() if array is not None}

    def mixer_inputs(self, batch: Batch) -> dict[str, Array]:
        """Return {"encoder", "decoder": [layers,B,T,D]}: the input of each block's mixer.

        With a ``prediction_order`` the encoder's array has the 2B rows of ``_two_stream_inputs``.
        """
        return {
            side: forward.stack.mixer_inputs(forward.states, forward.inputs)
            for side, forward in self._forward_passes(batch).items()
        }

    def _forward_passes(self, batch: Batch) -> dict[str, _ForwardPass]:
        """Return {side: the hidden states of its stack for a batch, and their inputs}."""
        passes: dict[str, _ForwardPass] = {}
        encoded = block_inputs = None
        if self.config.has_encoder:
            inputs = self._encoder_inputs(batch)
            states = self._encoder.hidden_states(*inputs)
            passes["encoder"] = _ForwardPass(self._encoder, states, inputs.attention, None)
            encoded, block_inputs = self._encoder.norm(states[-1]), states[:-1]
        if self.config.has_decoder:
            inputs = self._decoder_inputs(batch, encoded)
            encoder_kv = self._encoder_key_value(block_inputs, encoded, inputs.attention)
            states = self.decoder.hidden_states(*inputs, encoder_kv)
            passes["decoder"] = _ForwardPass(self.decoder, states, inputs.attention, encoder_kv)
        return passes

    def embedding(self, side: str) -> Callable[..., Array]:
        """Return the module that embeds the tokens of a side, "encoder" or "decoder"."""
        return self.encoder_embed if side == "encoder" and self.encoder_embed is not None else self.embed

    @property
    def _encoder(self) -> Stack:
        """Return the stack that encodes: ``encoder``, or ``decoder`` where both share one stack."""
        return self.decoder if self.encoder is None else self.encoder

    def _encoder_key_value(
        self, block_inputs: Array | None, encoded: Array, inputs: AttentionInputs
    ) -> LayerCache | None:
        """Return the keys and values [layers,B,K,S,H] that transparent attention reads.

        None in all other models, whose blocks compute their own from ``inputs.encoded``.
        """
        if self.layer_weights is None:
            return None
        return self.decoder.encoder_key_value(
            self.layer_weights(block_inputs, encoded), inputs.encoder_positions
        )

    def _encode(self, batch: Batch, key: Array | None) -> StackOutput:
        """Return the encoder's output, with states [B,S,D].

        If it has two streams (XLNet), these are the states of the query stream.
        """
        output = self._encoder(*self._encoder_inputs(batch), key=key)
        if batch.side("encoder").prediction_order is None:
            return output
        return output._replace(x=output.x[1::2])  # the query stream has every second row

    def _encoder_inputs(self, batch: Batch) -> StackInputs:
        if batch.side("encoder").prediction_order is not None:
            return self._two_stream_inputs(batch)
        stack, side = self._encoder, batch.side("encoder")
        attention = make_encoder_inputs(stack.config, batch, stack.relative, self.config.funnel.blocks)
        return StackInputs(self.embedding("encoder")(side.tokens), side.token_types, attention)

    def _two_stream_inputs(self, batch: Batch) -> StackInputs:
        """Return the encoder's inputs for two streams (XLNet, Yang et al. 2019), as rows [2B,S].

        The content stream of a row reads the tokens. The query stream, in the row after it, reads one learned
        vector in place of each token.
        """
        if self.query_embedding is None:
            raise SettingError(
                f"prediction_order needs 'query-stream' in model.heads={self.config.heads}, which predicts "
                "tokens that it has not read"
            )
        attention = make_two_stream_inputs(self._encoder.config, batch, self._encoder.relative)
        side = batch.side("encoder")
        content = self.embedding("encoder")(side.tokens)
        query = jnp.broadcast_to(self.query_embedding[...].astype(content.dtype)[None, None], content.shape)
        both = jnp.stack([content, query], axis=1).reshape(-1, *content.shape[1:])
        token_types = None if side.token_types is None else jnp.repeat(side.token_types, 2, axis=0)
        return StackInputs(constrain(both, "batch", "length", "embed"), token_types, attention)

    def _decoder_inputs(self, batch: Batch, encoded: Array | None) -> StackInputs:
        config = self.config
        attention = make_attention_inputs(config, batch, "decoder", self.decoder.relative)
        side = batch.side("decoder")
        if encoded is not None:
            encoder_side = encoder_output_side(config, batch.side("encoder"))
            segments = side.segment_ids, encoder_side.segment_ids
            if config.cross_attention.kind == "none":
                states = last_encoder_states(encoded, *segments)
                attention = attention._replace(encoder_state=states)
            else:
                length = side.tokens.shape[1]
                cross_mask = make_cross_mask(config, length, *segments)
                attention = attention._replace(encoded=encoded, cross_mask=cross_mask)
                if config.cross_attention.positions == "continued":
                    attention, _ = continue_positions(attention, encoder_side, side.segment_ids)
                if config.has_merged_attention:
                    attention = merge_masks(attention, length, length, encoded.shape[1])
        return StackInputs(self.embed(side.tokens), side.token_types, attention)

    def prefill(self, batch: Batch, max_length: int) -> tuple[Float32[Array, "B V"], Cache]:
        """Return logits [B,V] of the token after each row's prompt, and a cache with room for ``max_length``.

        Prompts are the decoder's tokens, padded on the right. For an encoder-decoder the prompt is usually
        just the decoder's start token.
        """
        side, config = batch.side("decoder"), self.config
        prompt, rows = side.tokens, len(side.tokens)
        encoder_kv = cross_mask = position_offset = None
        inputs = make_attention_inputs(config, batch, "decoder", self.decoder.relative, max_length)
        inputs = inputs._replace(cache_index=jnp.zeros(rows, jnp.int32))
        if config.has_encoder:
            output = self._encoder(*self._encoder_inputs(batch))
            encoder_side = encoder_output_side(config, batch.side("encoder"))
            encoded, encoder_segments = output.x, encoder_side.segment_ids
            if config.cross_attention.kind == "none":
                states = last_encoder_states(encoded, None, encoder_segments)
                inputs = inputs._replace(encoder_state=states)
            else:
                if config.cross_attention.positions == "continued":
                    inputs, position_offset = continue_positions(inputs, encoder_side, None)
                memory = encoded
                if self.layer_weights is not None:
                    memory = self.layer_weights(output.block_inputs, encoded)
                encoder_kv = self.decoder.encoder_key_value(memory, inputs.encoder_positions)
                cross_mask = make_cross_mask(config, 1, None, encoder_segments)
                inputs = inputs._replace(cross_mask=cross_mask)
                if config.has_merged_attention:
                    inputs = merge_masks(inputs, prompt.shape[1], max_length, encoded.shape[1])
        carry = self.decoder.init_carry(rows, max_length)
        x, carry, *_ = self.decoder(
            self.embed(prompt), side.token_types, inputs, carry=carry, encoder_kv=encoder_kv
        )
        lengths = (segments_of(side) > 0).sum(-1, dtype=jnp.int32)
        last = jnp.take_along_axis(x, jnp.maximum(lengths - 1, 0)[:, None, None], axis=1)
        cache = Cache(carry, lengths, encoder_kv, cross_mask, max_length, position_offset)
        return self.logits(last)[:, 0], cache

    def unstack(self, cache: Cache) -> tuple["Transformer", Cache]:
        """Return the same model and cache with separate arrays for each layer, for many steps of decoding.

        Without a scan over layers a step is slower to compile and faster to run: see ``Stack.unstack``.
        """
        model, count = jax.tree.map(lambda leaf: leaf, self), self.config.num_decoder_layers
        model.decoder = self.decoder.unstack()
        encoder_kv = None
        if cache.encoder_kv is not None:
            encoder_kv = tuple(split_layers(cache.encoder_kv, count))
        return model, replace(cache, carry=tuple(split_layers(cache.carry, count)), encoder_kv=encoder_kv)

    def step(
        self, tokens: Int[Array | np.ndarray, " B"], cache: Cache
    ) -> tuple[Float32[Array, "B V"], Cache]:
        """Append one token to each row; return logits [B,V] of the next token, and the new cache."""
        x, cache = self.extend(tokens[:, None], cache)
        return self.logits(x)[:, 0], cache

    def extend(
        self,
        tokens: Int[Array | np.ndarray, "B T"],
        cache: Cache,
        lengths: Int[Array | np.ndarray, " B"] | None = None,
    ) -> tuple[Float[Array, "B T D"], Cache]:
        """Append ``tokens`` [B,T]; return their last hidden states [B,T,D], and the new cache.

        ``lengths`` [B] is the number of tokens in each row, after which there may be padding. The cache must
        have room for the padding too.
        """
        count = tokens.shape[1]
        inputs = make_decode_inputs(self.config, cache.length, cache.max_length, self.decoder.relative, count)
        inputs = inputs._replace(cross_mask=cache.cross_mask, cache_index=cache.length)
        if lengths is not None:  # padding gets position 0, since its own may lie beyond learned positions
            is_token = jnp.arange(count)[None, :] < lengths[:, None]
            positions = jnp.where(is_token, inputs.positions, 0)
            inputs = inputs._replace(positions=positions, segments=is_token * 1)
        if cache.position_offset is not None:
            positions, key_positions = (
                x + cache.position_offset for x in (inputs.positions, inputs.key_positions)
            )
            inputs = inputs._replace(positions=positions, key_positions=key_positions)
        if self.config.has_merged_attention:
            inputs = merge_masks(inputs, count, cache.max_length, cache.encoded_length)
        x, carry, *_ = self.decoder(
            self.embed(tokens), None, inputs, carry=cache.carry, encoder_kv=cache.encoder_kv
        )
        return x, replace(cache, carry=carry, length=cache.length + (count if lengths is None else lengths))


def _embedding(config: ModelConfig, rngs: nnx.Rngs) -> Embed | AdaptiveEmbed:
    """Return an embedding of the tokens, in clusters if the settings have any."""
    width = config.embed_width
    std = embedding_std(config.output.logits, config.mup.base or width)
    if config.embedding.clusters:
        return AdaptiveEmbed(config, rngs, std=std)
    return Embed(rngs, (config.vocab_size, width), "vocab", std=std, dtype=config.dtype)


def _query_embedding(config: ModelConfig, rngs: nnx.Rngs) -> nnx.Param:
    """Return the vector [d_embed] that stands for any token, initialised like a token's embedding."""
    width = config.embed_width
    return param(normal(rngs, (width,), embedding_std(config.output.logits, width)), "embed")


def output_projection(config: ModelConfig, rngs: nnx.Rngs) -> nnx.Module:
    """Return the linear layer [D,d_embed] before a tied embedding (OPT); Identity if none is needed."""
    is_tied = config.output.logits.startswith("tied")
    projects_tokens = config.embedding.d_embed is not None and config.embedding.projected == "tokens"
    if config.output.transform or not (is_tied and projects_tokens):
        return Identity()
    shape, std = (config.d_model, config.embed_width), config.d_model**-0.5
    return Linear(rngs, shape, ("embed", "kv"), std=std, use_bias=False)


def _output_matrix(config: ModelConfig, rngs: nnx.Rngs) -> Linear:
    """Return the linear layer [D,V] to logits.

    Its std gives logits of unit variance at initialisation; in muP, of variance ``mup.base`` / D.
    """
    std = 1.0 if config.output.logits.endswith("scaled") else config.base_width**-0.5
    shape = config.d_model, config.vocab_size
    return Linear(rngs, shape, ("embed", "vocab"), std=std, use_bias=False)

"""The Transformer: encoder, decoder, prefix decoder, and encoder-decoder with two stacks or a shared one."""

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import jax
import jax.numpy as jnp
from flax import nnx
from jax import Array

from lm.nn.cache import Cache, Carry
from lm.nn.config import ModelConfig
from lm.nn.heads import PAIR_CLASSES, Replaced, Transform
from lm.nn.layers import Embed, Keyed, Linear, along, param, product, split
from lm.nn.stack import Stack
from lm.nn.view import Batch, View, cross_mask, full_view, last_states, step_view
from lm.ops.masks import periods
from lm.settings import SettingError
from lm.sharding import constrain

StackInputs = tuple[Array, Array | None, View]  # embeddings [B,T,D], types [B,T]


class Transformer(Keyed):
    """Logits of the next token, or of the masked ones of an encoder. Passing a key switches dropout on.

    A batch holds ``encoder_input_tokens`` and ``decoder_input_tokens``, int32 [B,S] and [B,T], as far as
    there are such stacks, and may hold for each ``_segment_ids`` (0: padding; absent: all is one text),
    ``_positions`` (absent: counted from the start of each segment) and ``_token_types`` of the same shape;
    ``encoder_global_attention`` names positions that see and are seen by all, whatever window there is.
    """

    def __init__(self, config: ModelConfig, rngs: nnx.Rngs):
        self.config = config
        self.embed = Embed(config, rngs, (config.vocab_size, config.embed_width), "vocab")
        own, side = config.architecture in ("encoder-decoder", "encoder"), config.encoder_side
        self.encoder = Stack(side, rngs, config.num_encoder_layers, False) if own else None
        crosses = config.has_encoder and config.has_decoder
        self.decoder = Stack(config, rngs, config.num_decoder_layers, crosses) if config.has_decoder else None
        self.narrowing = _narrowing(config, rngs)
        self.transform = Transform(config, rngs) if config.logits_transform else None
        self.head = _output_matrix(config, rngs) if config.logits.startswith("separate") else None
        self.logits_bias = param(jnp.zeros(config.vocab_size), "vocab") if config.logits_bias else None
        width, heads, std = config.d_model, config.heads, config.d_model**-0.5
        square = (width, width), ("embed", "kv"), std
        pair = (width, PAIR_CLASSES), ("embed", "classes"), std
        self.pooler = Linear(config, rngs, *square) if "pooler" in heads else None
        self.next_sentence = Linear(config, rngs, *pair) if "next-sentence" in heads else None
        self.sentence_order = Linear(config, rngs, *pair) if "sentence-order" in heads else None
        self.replaced = Replaced(config, rngs) if "replaced-token" in heads else None

    def __call__(self, batch: Batch, key: Array | None = None) -> Array:
        """float32 [B,T,V]: of what follows each decoder token, or of what an encoder's token stands for."""
        return self.logits(self.features(batch, key))

    def features(self, batch: Batch, key: Array | None = None) -> Array:
        """[B,T,D]: the last hidden states, of the decoder if there is one."""
        encoder_key, decoder_key = split(key, 2)
        encoded = self.encode(batch, encoder_key) if self.config.has_encoder else None
        if not self.config.has_decoder:
            return encoded
        return self.decoder(*self._decoder_inputs(batch, encoded), decoder_key)[0]

    def continued(self, batch: Batch, carry: Carry, key: Array | None = None) -> tuple[Array, Carry]:
        """[B,T,D] of a recurrent decoder whose rows go on from the states ``carry``, and those after them."""
        return self.decoder(*self._decoder_inputs(batch, None), split(key, 2)[1], carry)

    def encode(self, batch: Batch, key: Array | None = None) -> Array:
        """[B,S,D]: the encoder's output for ``encoder_input_tokens``; a shared model's one stack is both."""
        return self._encoder(*self._encoder_inputs(batch), key)[0]

    def logits(self, x: Array) -> Array:
        """float32 [B,T,V] of last hidden states x [B,T,D]."""
        config = self.config
        if config.logits == "none":
            raise SettingError("model.logits='none': no output matrix; use the model's features or its heads")
        x = x if self.narrowing is None else self.narrowing(x)
        x = x if self.transform is None else self.transform(x)
        x = x * config.d_model**-0.5 if config.logits.endswith("scaled") else x
        if self.head is not None:
            logits = product(x, self.head.kernel[...].astype(x.dtype), jnp.float32)
        else:
            logits = self.embed.logits(x)
        logits = logits if self.logits_bias is None else logits + along(self.logits_bias[...], logits)
        return constrain(logits, "batch", "length", "vocab")

    def pooled(self, x: Array) -> Array:
        """[B,D]: the first position of x [B,T,D] through the pooler, which speaks for the whole text."""
        return jnp.tanh(self.pooler(x[:, 0]))

    def hidden(self, batch: Batch) -> dict[str, Array]:
        """``{"encoder", "decoder": [layers+1,B,T,D]}``: what each block reads, and the last one's output."""
        return {side: states for side, (_, states, _) in self._traced(batch).items()}

    def attention(self, batch: Batch) -> dict[str, Array]:
        """``{"encoder", "decoder", "cross": float32 [layers,B,N,T,S]}``: attention weights of each head.

        Stacks with another mixer have none of their own.
        """
        weights: dict[str, Array | None] = {}
        for side, (stack, states, view) in self._traced(batch).items():
            own, cross = stack.weights(states, view)
            weights |= {side: own, "cross": cross}
        return {name: each for name, each in weights.items() if each is not None}

    def mixer_inputs(self, batch: Batch) -> dict[str, Array]:
        """``{"encoder", "decoder": [layers,B,T,D]}``: what mixes the positions of each block reads this."""
        return {side: stack.mixer_inputs(x) for side, (stack, x, _) in self._traced(batch).items()}

    def _traced(self, batch: Batch) -> dict[str, tuple[Stack, Array, View]]:
        """Each side's stack, its hidden states [layers+1,B,T,D], and what it saw."""
        sides, encoded = {}, None
        if self.config.has_encoder:
            inputs = self._encoder_inputs(batch)
            states = self._encoder.hidden(*inputs)
            sides["encoder"], encoded = (
                (self._encoder, states, inputs[-1]),
                self._encoder.normalised(states[-1]),
            )
        if self.config.has_decoder:
            inputs = self._decoder_inputs(batch, encoded)
            sides["decoder"] = self.decoder, self.decoder.hidden(*inputs), inputs[-1]
        return sides

    @property
    def _encoder(self) -> Stack:
        return self.decoder if self.encoder is None else self.encoder

    def _encoder_inputs(self, batch: Batch) -> StackInputs:
        """Embeddings, types and view of the encoder's stack."""
        view = full_view(self._encoder.config, batch, "encoder", self._encoder.relative)
        return self.embed(batch["encoder_input_tokens"]), batch.get("encoder_token_types"), view

    def _decoder_inputs(self, batch: Batch, encoded: Array | None) -> StackInputs:
        """Embeddings, types and view of the decoder's stack."""
        view = full_view(self.config, batch, "decoder", self.decoder.relative)
        if encoded is not None:
            length = batch["decoder_input_tokens"].shape[1]
            segments = batch.get("decoder_segment_ids"), batch.get("encoder_segment_ids")
            if self.config.cross_attention == "none":
                view = view._replace(context=last_states(encoded, *segments))
            else:
                view = view._replace(encoded=encoded, cross_mask=cross_mask(self.config, length, *segments))
        return self.embed(batch["decoder_input_tokens"]), batch.get("decoder_token_types"), view

    def prefill(self, batch: Batch, size: int) -> tuple[Array, Cache]:
        """Logits [B,V] of the token after each row's prompt, and a cache of ``size`` slots with the prompt.

        That is ``decoder_input_tokens``, padded on the right; for an encoder-decoder usually a start token.
        """
        prompt, config = batch["decoder_input_tokens"], self.config
        rows = len(prompt)
        crossed = sees = context = None
        if config.has_encoder:
            encoded, segments = self.encode(batch), batch.get("encoder_segment_ids")
            if config.cross_attention == "none":
                context = last_states(encoded, None, segments)
            else:
                crossed = self.decoder.cross_key_value(encoded)
                sees = cross_mask(config, 1, jnp.ones((rows, 1), jnp.int32), segments)
        carry = self.decoder.empty(rows, size)
        view = full_view(config, batch, "decoder", self.decoder.relative, slots=size)
        view = view._replace(cross_mask=sees, context=context, slot=jnp.zeros(rows, jnp.int32))
        types = batch.get("decoder_token_types")
        x, carry = self.decoder(self.embed(prompt), types, view, None, carry, crossed)
        segments = batch.get("decoder_segment_ids", jnp.ones_like(prompt))
        lengths = (segments > 0).sum(-1, dtype=jnp.int32)
        last = jnp.take_along_axis(x, jnp.maximum(lengths - 1, 0)[:, None, None], axis=1)
        return self.logits(last)[:, 0], Cache(carry, lengths, crossed, sees, size)

    def unstacked(self, cache: Cache) -> tuple["Transformer", Cache]:
        """The same model and ``cache`` with each layer's arrays apart: a long loop of steps reads them as is.

        Each step compiles longer, since no loop over layers is left.
        """
        model, count = jax.tree.map(lambda leaf: leaf, self), self.config.num_decoder_layers
        model.decoder = Unstacked(self.decoder)
        crossed = None if cache.crossed is None else tuple(_layers(cache.crossed, count))
        return model, replace(cache, carry=tuple(_layers(cache.carry, count)), crossed=crossed)

    def step(self, tokens: Array, cache: Cache) -> tuple[Array, Cache]:
        """Logits [B,V] of what follows ``tokens`` [B], the next after ``cache``, and the new cache."""
        x, cache = self.extend(tokens[:, None], cache)
        return self.logits(x)[:, 0], cache

    def extend(self, tokens: Array, cache: Cache, lengths: Array | None = None) -> tuple[Array, Cache]:
        """Last hidden states [B,T,D] of ``tokens`` [B,T], the next after ``cache``, and the new cache.

        ``lengths`` [B]: how many are tokens; padding follows them. The cache has slots for it too.
        """
        count = tokens.shape[1]
        view = step_view(self.config, cache.length, cache.slots, self.decoder.relative, count)
        if lengths is not None:  # padding is at position 0, since a table of positions may end before it
            inside = jnp.arange(count)[None, :] < lengths[:, None]
            view = view._replace(positions=jnp.where(inside, view.positions, 0), segments=inside * 1)
        view = view._replace(cross_mask=cache.cross_mask, slot=cache.length)
        x, carry = self.decoder(self.embed(tokens), None, view, None, cache.carry, cache.crossed)
        return x, replace(cache, carry=carry, length=cache.length + (count if lengths is None else lengths))


class Unstacked(Stack):
    """A stack with a list of blocks, for a loop over tokens: nothing there is sliced from stacked arrays.

    A slice is a copy, which at every token would move all parameters once more than reading them does.
    """

    def __init__(self, stack: Stack):
        vars(self).update(vars(jax.tree.map(lambda leaf: leaf, stack)))  # a copy, without its blocks
        shared = stack.config.shared_layers
        layers = _layers(stack.blocks, 1 if shared else stack.num_layers)
        self.layers = nnx.List(layers * stack.num_layers if shared else layers)
        del self.blocks

    def _run(self, step: Callable, x: Any, inputs: Any, view: View) -> tuple[Any, Any]:
        """As that of a ``Stack``, of the inputs of ``__call__``, with a carry that is a tuple by layer."""
        keep, carries, crossed = inputs
        masks = [view.mask] * self.num_layers
        if view.masks:
            windows = zip(view.masks, periods(self.config.sparsity.layer_windows), strict=True)
            masks = [mask for pattern, (_, count) in windows for mask in pattern * count]
        after = []
        for layer, block in enumerate(self.layers):
            seen = None if crossed is None else crossed[layer]
            x, carry = step(block, x, (keep, carries[layer], seen), view._replace(mask=masks[layer]))
            after.append(carry)
        return x, tuple(after)


def _layers(stacked: Any, count: int) -> list:
    """A tree for each layer of one with leaves [layers,...]."""
    leaves, structure = jax.tree.flatten(stacked)
    parts = zip(*(jnp.split(leaf, count) for leaf in leaves), strict=True)
    return [jax.tree.unflatten(structure, [leaf[0] for leaf in part]) for part in parts] or [stacked] * count


def _narrowing(config: ModelConfig, rngs: nnx.Rngs) -> Linear | None:
    """A kernel [D,d_embed] that brings states back to the embedding's width, if nothing else does (OPT)."""
    back = config.logits_transform or not config.logits.startswith("tied")
    if config.projected == "sum" or config.d_embed is None or back:
        return None
    shape = config.d_model, config.embed_width
    return Linear(replace(config, bias=False), rngs, shape, ("embed", "kv"), config.d_model**-0.5)


def _output_matrix(config: ModelConfig, rngs: nnx.Rngs) -> Linear:
    """A kernel [D,V] that makes logits of size 1, of hidden states that are scaled first or not."""
    std = 1.0 if config.logits.endswith("scaled") else config.d_model**-0.5
    shape = config.d_model, config.vocab_size
    return Linear(replace(config, bias=False), rngs, shape, ("embed", "vocab"), std)

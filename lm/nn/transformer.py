"""The Transformer: encoder-decoder, decoder, prefix decoder, and the encoder-decoder whose two stacks are one."""

from typing import NamedTuple

import jax
import jax.numpy as jnp
from flax import nnx

from lm.nn.cache import Cache, KeyValue, empty
from lm.nn.config import ModelConfig
from lm.nn.layers import Embed, Keep, Linear, Mlp, RelativeBias, RmsNorm, draw_keep, dropout, scaled, split
from lm.ops import masks
from lm.ops.attention import dot_product_attention
from lm.sharding import constrain

Batch = dict[str, jax.Array]


class Attention(nnx.Module):
    """Multi-head attention; the scores are not scaled by H^-0.5, the initial queries are."""

    def __init__(self, config: ModelConfig, rngs: nnx.Rngs):
        self.config = config
        d_model, heads = config.d_model, config.num_heads * config.d_kv
        self.query = Linear(rngs, (d_model, heads), ("embed", "heads"), (d_model * config.d_kv) ** -0.5)
        self.key = Linear(rngs, (d_model, heads), ("embed", "heads"), d_model**-0.5)
        self.value = Linear(rngs, (d_model, heads), ("embed", "heads"), d_model**-0.5)
        self.out = Linear(rngs, (heads, d_model), ("heads", "embed"), heads**-0.5)

    def _heads(self, x: jax.Array) -> jax.Array:
        x = constrain(x, "batch", "length", "heads")
        return x.reshape(*x.shape[:-1], self.config.num_heads, self.config.d_kv)

    def key_value(self, x: jax.Array) -> KeyValue:
        """Keys and values [B,S,K,H] of x [B,S,D]."""
        return KeyValue(self._heads(self.key(x)), self._heads(self.value(x)))

    def __call__(
        self, x: jax.Array, seen: KeyValue, mask: jax.Array | None, bias: jax.Array | None, keep: jax.Array | None
    ) -> jax.Array:
        """[B,T,D] from x [B,T,D] and what it sees."""
        keep = None if keep is None else scaled(keep, self.config.dropout)
        out = dot_product_attention(self._heads(self.query(x)), seen.key, seen.value, mask, bias, keep=keep)
        return self.out(out.reshape(*x.shape[:-1], -1))


class View(NamedTuple):
    """What all blocks of a stack see alike, made once."""

    mask: jax.Array | None  # bool [B|1,T,S] of self-attention; None: everything is visible
    bias: jax.Array  # float32 [B|1,N,T,S] of self-attention
    encoded: jax.Array | None = None  # the encoder's output [B,S,D], for cross-attention
    cross_mask: jax.Array | None = None  # bool [B,T,S] of cross-attention
    position: jax.Array | None = None  # int32 [B]: the first slot of the cache to write; None: nothing is cached


class Block(nnx.Module):
    """Self-attention, cross-attention if there is something to cross to, feed-forward; each x + f(norm(x))."""

    def __init__(self, config: ModelConfig, rngs: nnx.Rngs, crosses: bool):
        self.config = config
        self.attention_norm = RmsNorm(config)
        self.attention = Attention(config, rngs)
        self.cross_norm = RmsNorm(config) if crosses else None
        self.cross = Attention(config, rngs) if crosses else None
        self.mlp_norm = RmsNorm(config)
        self.mlp = Mlp(config, rngs)

    def __call__(
        self, x: jax.Array, view: View, keep: Keep, cached: KeyValue | None, crossed: KeyValue | None
    ) -> tuple[jax.Array, KeyValue | None]:
        """x [B,T,D] and the keys and values to see the next time; ``crossed``: those of ``view.encoded``, if known."""
        h = self.attention_norm(x)
        seen = self.attention.key_value(h)
        if cached is not None:
            seen = cached = cached.write(seen, view.position)
        x = self._add(
            x, self.attention(h, seen, view.mask, view.bias, keep.get("attention")), keep.get("attention_out")
        )
        if view.encoded is not None or crossed is not None:
            seen = self.cross.key_value(view.encoded) if crossed is None else crossed
            h = self.cross(self.cross_norm(x), seen, view.cross_mask, None, keep.get("cross"))
            x = self._add(x, h, keep.get("cross_out"))
        return self._add(x, self.mlp(self.mlp_norm(x), keep.get("mlp")), keep.get("mlp_out")), cached

    def _add(self, x, h, keep):
        return constrain(x + dropout(h, keep, self.config.dropout), "batch", "length", "embed")


REMAT = {  # what jax.checkpoint keeps for the backward pass
    "dots": jax.checkpoint_policies.dots_with_no_batch_dims_saveable,  # products with parameters, not with activations
    "full": jax.checkpoint_policies.nothing_saveable,
}


def _unroll(step, x, layers):
    """As ``jax.lax.scan``, without its loop: nothing is copied into and out of stacks, and compiling takes longer."""
    leaves, structure = jax.tree.flatten(layers)
    out = []
    for parts in zip(*(jnp.split(leaf, leaf.shape[0]) for leaf in leaves), strict=True):
        x, result = step(x, jax.tree.unflatten(structure, [part[0] for part in parts]))
        out.append(result)
    return x, jax.tree.map(lambda *results: jnp.stack(results), *out)


RUN = {"scan": jax.lax.scan, "unroll": _unroll}


class Stack(nnx.Module):
    """Blocks on a leading axis of their parameters, a bias table for all of them, and a norm at the end."""

    def __init__(self, config: ModelConfig, rngs: nnx.Rngs, num_layers: int, crosses: bool):
        self.config = config
        self.num_layers = num_layers
        keys = jax.random.split(rngs.params(), num_layers)
        self.blocks = jax.vmap(lambda key: Block(config, nnx.Rngs(params=key), crosses))(keys)
        self.relative = RelativeBias(config, rngs)
        self.norm = RmsNorm(config)

    def __call__(
        self,
        x: jax.Array,
        view: View,
        key: jax.Array | None = None,
        cached: KeyValue | None = None,
        crossed: KeyValue | None = None,
    ) -> tuple[jax.Array, KeyValue | None]:
        """[B,T,D] from embeddings x [B,T,D]; ``cached`` and ``crossed`` [layers,B,S,K,H] as for ``Block``."""
        config = self.config
        ends, inner = self._keep(x, view, key)

        def step(x, layer):
            block, *rest = layer
            return block(x, view, *rest)

        if config.remat != "none":
            step = jax.checkpoint(step, policy=REMAT[config.remat], prevent_cse=config.layers == "unroll")
        x = constrain(dropout(x, ends.get("in"), config.dropout), "batch", "length", "embed")
        x, cached = RUN[config.layers](step, x, (self.blocks, inner, cached, crossed))
        return dropout(self.norm(x), ends.get("out"), config.dropout), cached

    def _keep(self, x: jax.Array, view: View, key: jax.Array | None) -> tuple[Keep, Keep]:
        """The dropout masks of the stack's two ends [B,...] and of its blocks [layers,B,...]."""
        config = self.config
        if key is None or config.dropout == 0:
            return {}, {}
        rows, length, width = x.shape
        inner = {
            "attention": (config.num_heads, 1, length),
            "attention_out": (1, width),
            "mlp": (1, config.d_ff),
            "mlp_out": (1, width),
        }
        if view.encoded is not None:
            inner |= {"cross": (config.num_heads, 1, view.encoded.shape[1]), "cross_out": (1, width)}
        shapes = {name: (self.num_layers, *shape) for name, shape in inner.items()}
        keep = draw_keep(key, config.dropout, rows, shapes | {"in": (1, width), "out": (1, width)})
        return keep, {name: keep.pop(name).swapaxes(0, 1) for name in inner}


class Transformer(nnx.Module):
    """Logits of the next token. ``model(batch)`` evaluates; ``model(batch, key)`` trains, that is, drops out."""

    def __init__(self, config: ModelConfig, rngs: nnx.Rngs):
        self.config = config
        self.embed = Embed(config, rngs)
        two_stacks = config.architecture == "encoder-decoder"
        self.encoder = Stack(config, rngs, config.num_encoder_layers, False) if two_stacks else None
        self.decoder = Stack(config, rngs, config.num_decoder_layers, config.has_encoder)
        shape = (config.d_model, config.vocab_size)
        separate = config.logits == "separate"
        self.head = Linear(rngs, shape, ("embed", "vocab"), config.d_model**-0.5) if separate else None

    def __call__(self, batch: Batch, key: jax.Array | None = None) -> jax.Array:
        """float32 logits [B,T,V] of the tokens that follow ``decoder_input_tokens``."""
        encoder_key, decoder_key = split(key, 2)
        encoded = self.encode(batch, encoder_key) if self.config.has_encoder else None
        tokens, segments = batch["decoder_input_tokens"], batch.get("decoder_segment_ids")
        view = View(
            mask=self._decoder_mask(batch),
            bias=self.decoder.relative.full(tokens.shape[1], self.config.architecture == "prefix-decoder"),
            encoded=encoded,
            cross_mask=_cross_mask(segments, batch.get("encoder_segment_ids")) if self.config.has_encoder else None,
        )
        x, _ = self.decoder(self.embed(tokens), view, decoder_key)
        return self.logits(x)

    def encode(self, batch: Batch, key: jax.Array | None = None) -> jax.Array:
        """[B,S,D]: the encoder's output for ``encoder_input_tokens``; a shared model's one stack is both."""
        stack = self.decoder if self.encoder is None else self.encoder
        tokens, segments = batch["encoder_input_tokens"], batch.get("encoder_segment_ids")
        mask = None if segments is None else masks.same_segment(segments, segments)
        view = View(mask, stack.relative.full(tokens.shape[1], bidirectional=True))
        return stack(self.embed(tokens), view, key)[0]

    def logits(self, x: jax.Array) -> jax.Array:
        """float32 [B,T,V] of the decoder's output x [B,T,D]."""
        if self.head is None:
            logits = self.embed.logits(x)
        else:
            kernel = self.head.kernel[...].astype(x.dtype)
            logits = jnp.einsum("btd,dv->btv", x, kernel, preferred_element_type=jnp.float32)
        return constrain(logits, "batch", "length", "vocab")

    def _decoder_mask(self, batch: Batch) -> jax.Array:
        """bool [B|1,T,T]"""
        mask = masks.causal(batch["decoder_input_tokens"].shape[1])
        if self.config.architecture == "prefix-decoder":
            mask |= masks.prefix(batch["decoder_causal_attention"])
        segments = batch.get("decoder_segment_ids")
        return mask if segments is None else mask & masks.same_segment(segments, segments)

    def prefill(self, batch: Batch, size: int) -> tuple[jax.Array, Cache]:
        """Logits [B,V] of the token that follows each row's prompt, and a cache of ``size`` slots with all before it.

        The prompt is ``decoder_input_tokens``, padded on the right, and for an encoder-decoder usually one 0.
        """
        prompt, config = batch["decoder_input_tokens"], self.config
        rows, length = prompt.shape
        segments = batch.get("decoder_segment_ids", jnp.ones_like(prompt))
        cross = cross_mask = None
        if config.has_encoder:
            encoded = self.encode(batch)
            cross = jax.vmap(lambda block: block.cross.key_value(encoded))(self.decoder.blocks)
            cross_mask = _cross_mask(jnp.ones((rows, 1), jnp.int32), batch.get("encoder_segment_ids"))
        cached = empty(config.num_decoder_layers, rows, size, config.num_heads, config.d_kv, config.dtype)
        unseen = ((0, 0), (0, 0), (0, size - length))
        bias = self.decoder.relative.full(length, config.architecture == "prefix-decoder")
        view = View(
            mask=jnp.pad(self._decoder_mask(batch), unseen),
            bias=jnp.pad(bias, ((0, 0), *unseen)),
            cross_mask=cross_mask,
            position=jnp.zeros(rows, jnp.int32),
        )
        x, cached = self.decoder(self.embed(prompt), view, None, cached, cross)
        lengths = (segments > 0).sum(-1, dtype=jnp.int32)
        last = jnp.take_along_axis(x, jnp.maximum(lengths - 1, 0)[:, None, None], axis=1)
        return self.logits(last)[:, 0], Cache(cached, lengths, cross, cross_mask)

    def step(self, tokens: jax.Array, cache: Cache) -> tuple[jax.Array, Cache]:
        """Logits [B,V] of the token after ``tokens`` [B], which follow what ``cache`` holds, and the longer cache."""
        slots = jnp.arange(cache.self_attention.key.shape[2])[None, None, :]
        distance = slots - cache.length[:, None, None]
        bias = self.decoder.relative(distance, self.config.architecture == "prefix-decoder")
        view = View(distance <= 0, bias.swapaxes(0, 1), cross_mask=cache.cross_mask, position=cache.length)
        x = self.embed(tokens[:, None])
        x, cached = self.decoder(x, view, None, cache.self_attention, cache.cross_attention)
        return self.logits(x)[:, 0], cache._replace(self_attention=cached, length=cache.length + 1)


def _cross_mask(segments: jax.Array | None, encoder_segments: jax.Array | None) -> jax.Array | None:
    """bool [B,T,S]; without segments of its own a decoder sees all of its row's encoder output but the padding."""
    if encoder_segments is None:
        return None
    if segments is None:
        return (encoder_segments > 0)[:, None, :]
    return masks.same_segment(segments, encoder_segments)

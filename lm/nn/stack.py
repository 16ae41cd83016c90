"""Blocks, and a stack of them: an encoder or a decoder without the embedding of tokens.

Shapes: B rows, T positions, D = d_model, S positions that are seen, K key heads of width H (as in lm.ops).
A ``View`` says what each position sees, ``keep`` holds dropout masks, ``carry`` is the cache while decoding.
"""

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import jax
import jax.numpy as jnp
from flax import nnx
from jax import Array

from lm.nn.cache import Carry, Slots
from lm.nn.config import ModelConfig
from lm.nn.layers import (
    Adapter,
    Embed,
    Keep,
    Keyed,
    Linear,
    Mlp,
    Norm,
    RelativeBias,
    add_low_rank,
    draw_keep,
    dropout,
    stacked,
)
from lm.nn.mixers import CROSS_ATTENTION, Attention, Mixer, make_mixer
from lm.nn.view import View
from lm.ops.masks import periods
from lm.ops.positions import sinusoids
from lm.sharding import constrain


class Block(Keyed):
    """Self-attention (or another mixer), cross-attention, a feed-forward layer, and maybe an adapter.

    Each of them may be left out but the first, which ``model.mixer`` does.
    """

    def __init__(self, config: ModelConfig, rngs: nnx.Rngs, crosses: bool):
        self.config = config
        one_norm = config.residual == "parallel-one-norm"
        self.attention_norm = Norm(config, config.d_model)
        # The name stands in checkpoints, whichever mixer it is.
        self.attention: Mixer = make_mixer(config, rngs, config.reads_both_ways(crosses))
        own_bias = config.positions == "relative-per-layer"
        self.relative = RelativeBias(config, rngs, config.reads_both_ways(crosses)) if own_bias else None
        self.cross = CROSS_ATTENTION[config.cross_attention](config, rngs) if crosses else None
        norms_cross = self.cross is not None and not one_norm
        self.cross_norm = Norm(config, config.d_model) if norms_cross else None
        self.mlp_norm = None if one_norm or config.mlp == "none" else Norm(config, config.d_model)
        self.mlp = Mlp(config, rngs) if config.mlp != "none" else None
        self.adapter = Adapter(config, rngs) if config.adapter_width else None
        attentions = self.attention, getattr(self.attention, "globals", None), self.cross
        add_low_rank(config, rngs, filter(None, attentions), self.mlp)

    def __call__(
        self, x: Array, view: View, keep: Keep, carry: Carry | None, crossed: Slots | None
    ) -> tuple[Array, Carry | None]:
        """[B,T,D] of x [B,T,D], and the mixer's carry.

        ``crossed``: keys and values of the encoder's output, which decoding computes once, shared by
        a row's beams, which follow each other in ``x``; None: from ``view.encoded`` [B,S,D], or no
        cross-attention without that.
        """
        start = x  # a parallel block's sub-layers all read this, not each other's output
        h = self._sublayer_input(start, x, self.attention_norm)
        h, carry = self.attention(h, self._with_bias(view), carry, keep)
        x = self._add(x, h, self.attention_norm, keep.get("attention_out"))
        if view.encoded is not None or crossed is not None:
            seen = self.cross.key_value(view.encoded, None) if crossed is None else crossed.seen()
            h = self._sublayer_input(start, x, self.cross_norm)
            h = h.reshape(len(seen.key), -1, h.shape[-1])  # all beams of a row read its keys in one product
            h = self.cross.read(h, seen, View(view.cross_mask), keep.get("cross")).reshape(x.shape)
            x = self._add(x, h, self.cross_norm, keep.get("cross_out"))
        if self.mlp is not None:
            h = self.mlp(self._sublayer_input(start, x, self.mlp_norm), keep.get("mlp"))
            x = self._add(x, h, self.mlp_norm, keep.get("mlp_out"))
        if self.adapter is not None:
            h = dropout(self.adapter(x, keep.get("adapter")), keep.get("adapter_out"), self.config.dropout)
            x = constrain(x + h, "batch", "length", "embed")
        return x, carry

    def dropped(self, length: int, encoded_length: int | None) -> dict[str, tuple[int, ...]]:
        """Shapes of a row's dropout masks, by name: [heads,1,S] of weights, [1,features] of activations.

        One draw is cut into all of them (``draw_keep``), so their order decides which numbers each gets.
        """
        config, out = self.config, (1, self.config.d_model)
        shapes = self.attention.dropped(length) | {"attention_out": out}
        shapes |= {} if self.mlp is None else {"mlp": (1, config.d_ff), "mlp_out": out}
        if config.adapter_width:
            shapes |= {"adapter": (1, config.adapter_width), "adapter_out": out}
        if encoded_length is not None:
            shapes |= {"cross": (self.cross.heads, 1, encoded_length), "cross_out": out}
        return shapes

    def weights(self, x: Array, view: View) -> tuple[Array | None, Array | None]:
        """float32 [B,N,T,S] of self- and of cross-attention, where there is such, from x [B,T,D]."""
        start, view, h = x, self._with_bias(view), self.mixer_input(x)
        weights = None
        if isinstance(self.attention, Attention):
            weights = self.attention.weights(h, self.attention.key_value(h, view.positions), view)
        if view.encoded is None:
            return weights, None
        x = self._add(x, self.attention(h, view, None, {})[0], self.attention_norm, None)
        h = self._sublayer_input(start, x, self.cross_norm)
        return weights, self.cross.weights(h, self.cross.key_value(view.encoded, None), View(view.cross_mask))

    def mixer_input(self, x: Array) -> Array:
        """[B,T,D]: what the mixer reads of the block's input x [B,T,D]."""
        return self._sublayer_input(x, x, self.attention_norm)

    def _with_bias(self, view: View) -> View:
        """The view with the bias of this block's own table, if it has one (UMT5)."""
        return view if self.relative is None else view._replace(bias=view.layer_bias(self.relative))

    def _sublayer_input(self, start: Array, x: Array, norm: Norm | None) -> Array:
        """What a sub-layer reads: x [B,T,D] or, of a parallel block, its ``start``, normalised."""
        if self.config.residual == "post-norm":
            return x  # ``_add`` has normalised it
        norm = self.attention_norm if norm is None else norm  # which all sub-layers share
        return norm(start if self.config.residual.startswith("parallel") else x)

    def _add(self, x: Array, h: Array, norm: Norm | None, keep: Array | None) -> Array:
        """The residual stream x [B,T,D] with a sub-layer's output h [B,T,D] added, or h without a stream."""
        h = dropout(h, keep, self.config.dropout)
        x = constrain(h if self.config.residual == "none" else x + h, "batch", "length", "embed")
        return norm(x) if self.config.residual == "post-norm" else x


REMAT = {  # what jax.checkpoint saves of a block for the backward pass; the rest is computed again
    "dots": jax.checkpoint_policies.dots_with_no_batch_dims_saveable,  # products with parameters
    "full": jax.checkpoint_policies.nothing_saveable,  # only the block's input, which the loop saves anyway
}


def _unroll(step, x, layers, length):
    """As ``jax.lax.scan``, without a loop: copies nothing into stacked arrays, but compiles longer."""
    leaves, structure = jax.tree.flatten(layers)
    parts = [jnp.split(leaf, length) for leaf in leaves]
    out = []
    for layer in range(length):
        x, result = step(x, jax.tree.unflatten(structure, [part[layer][0] for part in parts]))
        out.append(result)
    return x, jax.tree.map(lambda *results: jnp.stack(results), *out)


LOOPS = {"scan": jax.lax.scan, "unroll": _unroll}  # by model.layers


def _projection(config: ModelConfig, rngs: nnx.Rngs) -> Linear:
    """From the embedding's width to the model's; with a bias where it is of the sum of embeddings."""
    width = config.embed_width
    biased = replace(config, bias=config.bias and config.projected == "sum")
    return Linear(biased, rngs, (width, config.d_model), ("kv", "embed"), width**-0.5)


class Stack(Keyed):
    """All that is added to embeddings of tokens, the blocks, and a final norm.

    The parameters of all blocks are stacked on a leading axis [layers,...], so that one loop runs them and
    only one block is compiled. With ``shared_layers`` (ALBERT) that axis has length 1.
    """

    def __init__(self, config: ModelConfig, rngs: nnx.Rngs, num_layers: int, crosses: bool):
        self.config = config
        self.num_layers = num_layers
        width, learned = config.sum_width, config.positions == "learned"
        rows, types = config.max_length + config.position_offset, config.type_vocab_size
        self.positions = Embed(config, rngs, (rows, width), "length") if learned else None
        self.types = Embed(config, rngs, (types, width), "classes") if types else None
        self.embed_norm = Norm(config, width) if config.embed_norm else None
        self.projection = None if config.d_embed is None else _projection(config, rngs)
        keys = jax.random.split(rngs.params(), 1 if config.shared_layers else num_layers)
        # vmap initialises the blocks side by side, each with its key: this makes the leading axis.
        self.blocks = stacked(jax.vmap(lambda key: Block(config, nnx.Rngs(params=key), crosses))(keys))
        has_bias = config.positions == "relative"
        self.relative = RelativeBias(config, rngs, config.reads_both_ways(crosses)) if has_bias else None
        # Post-norm blocks end with a norm already.
        self.norm = None if config.residual == "post-norm" else Norm(config, config.d_model)

    def __call__(
        self,
        x: Array,
        types: Array | None,
        view: View,
        key: Array | None = None,
        carry: Carry | None = None,
        crossed: Slots | None = None,
    ) -> tuple[Array, Carry | None]:
        """[B,T,D] from embeddings x [B,T,d_embed] and token types [B,T], and the carry of all layers.

        ``key`` switches dropout on. ``carry`` and ``crossed`` are as in ``Block``, [layers,...].
        """
        stack_keep, block_keep = self._draw_keep(x, view, key)

        def step(block, x, inputs, view):
            return block(x, view, *inputs)

        x = self._first_input(x, types, view, stack_keep.get("in"))
        x, carry = self._run(step, x, (block_keep, carry, crossed), view)
        return dropout(self.normalised(x), stack_keep.get("out"), self.config.dropout), carry

    def normalised(self, x: Array) -> Array:
        """The last block's output x [B,T,D] after the final norm, if there is one."""
        return x if self.norm is None else self.norm(x)

    def cross_key_value(self, encoded: Array) -> Slots:
        """Keys and values [layers,B,K,S,H] of the encoder's output [B,S,D], for all blocks."""
        seen = jax.vmap(lambda block: Slots.of(block.cross.key_value(encoded, None)))(self.blocks)
        return jax.tree.map(lambda x: jnp.broadcast_to(x, (self.num_layers, *x.shape[1:])), seen)

    def empty(self, rows: int, slots: int) -> Carry:
        """The carry of all layers before the first token, leaves [layers,B,...]."""
        carry = self.blocks.attention.empty(rows, slots)
        return jax.tree.map(lambda x: jnp.broadcast_to(x, (self.num_layers, *x.shape)), carry)

    def hidden(self, x: Array, types: Array | None, view: View) -> Array:
        """[layers+1,B,T,D]: each block's input, and the last one's output before the final norm."""

        def step(block, x, _, view):
            return block(x, view, {}, None, None)[0], x

        last, inputs = self._run(step, self._first_input(x, types, view, None), None, view)
        return jnp.concatenate([inputs, last[None]])

    def weights(self, hidden: Array, view: View) -> tuple[Array | None, Array | None]:
        """Attention weights float32 [layers,B,N,T,S], of self- and of cross-attention, from ``hidden``.

        None where a stack has no such attention.
        """

        def step(block, _, x, view):
            return None, block.weights(x, view)

        return self._run(step, None, hidden[:-1], view)[1]

    def mixer_inputs(self, hidden: Array) -> Array:
        """[layers,B,T,D]: what each block's mixer reads, from ``hidden``."""
        return self._run(lambda block, _, x, view: (None, block.mixer_input(x)), None, hidden[:-1], View())[1]

    def _run(self, step: Callable, x: Any, inputs: Any, view: View) -> tuple[Any, Any]:
        """x after ``step(block, x, inputs, view)`` of every block, and the steps' other results [layers,...].

        Leaves of ``inputs`` are [layers,...]. Only layers with the same window share a loop: a mask's rule
        is static and cannot change from one pass of a loop to the next.
        """
        config, results, start = self.config, [], 0
        layers = (None if config.shared_layers else self.blocks, inputs)  # what the loop takes apart
        if not view.masks:
            return self._loop(step, x, layers, [view], self.num_layers)
        for masks, (pattern, count) in zip(view.masks, periods(config.sparsity.layer_windows), strict=True):
            end = start + count * len(pattern)
            # ``blocks`` is bound here, as the lambda's default: ``start`` changes below.
            part = jax.tree.map(lambda leaf, blocks=slice(start, end): leaf[blocks], layers)
            views = [view._replace(mask=mask) for mask in masks]
            x, result = self._loop(step, x, part, views, count)
            results.append(result)
            start = end
        return x, jax.tree.map(lambda *parts: jnp.concatenate(parts), *results)

    def _loop(self, step: Callable, x: Any, layers: Any, views: list[View], count: int) -> tuple[Any, Any]:
        """As ``_run``, of layers which have these ``views`` in turn, ``count`` times."""
        config, loop = self.config, LOOPS[self.config.layers]

        def of_layer(view):
            def one_layer(x, layer):
                block, inputs = layer
                return step(self._shared_block if block is None else block, x, inputs, view)

            if config.remat == "none":
                return one_layer
            # Outside of a loop the compiler would find both computations alike and merge them again.
            return jax.checkpoint(
                one_layer, policy=REMAT[config.remat], prevent_cse=config.layers == "unroll"
            )

        steps = [of_layer(view) for view in views]
        if len(steps) == 1:
            return loop(steps[0], x, layers, length=count)

        def pattern(x, layers):
            results = []
            for place, one_layer in enumerate(steps):
                x, result = one_layer(x, jax.tree.map(lambda leaf, place=place: leaf[place], layers))
                results.append(result)
            return x, jax.tree.map(lambda *parts: jnp.stack(parts), *results)

        in_turn = jax.tree.map(lambda leaf: leaf.reshape(count, len(steps), *leaf.shape[1:]), layers)
        x, results = loop(pattern, x, in_turn, length=count)
        return x, jax.tree.map(lambda leaf: leaf.reshape(-1, *leaf.shape[2:]), results)

    @property
    def _shared_block(self) -> Block:
        """The one block of ``shared_layers``, without the leading axis."""
        return jax.tree.map(lambda leaf: leaf[0], self.blocks)

    def _first_input(self, x: Array, types: Array | None, view: View, keep: Array | None) -> Array:
        """The first block's input [B,T,D], from embeddings of tokens x [B,T,d_embed] and types [B,T]."""
        config = self.config
        # In the order of the published models: scaled, positions, types, norm, dropout, and then projected.
        if config.embed_scale == "sqrt":
            x = x * config.d_model**0.5
        before = config.projected == "tokens"
        x = self.projection(x) if before and self.projection is not None else x
        if self.positions is not None:
            # a negative position would find a row of the offset
            rows = jnp.where(view.positions < 0, -1, view.positions + config.position_offset)
            x += self.positions(rows)
        if config.positions == "sinusoidal":
            x += sinusoids(view.positions, config.sum_width, layout=config.sinusoid).astype(x.dtype)
        if self.types is not None:
            x += self.types(jnp.zeros(x.shape[:2], jnp.int32) if types is None else types)
        x = x if self.embed_norm is None else self.embed_norm(x)
        x = dropout(x, keep, config.dropout)
        x = x if before or self.projection is None else self.projection(x)
        return constrain(x, "batch", "length", "embed")

    def _draw_keep(self, x: Array, view: View, key: Array | None) -> tuple[Keep, Keep]:
        """The dropout masks of the stack's input and output, [B,...], and of its blocks, [layers,B,...]."""
        config = self.config
        if key is None or config.dropout == 0:
            return {}, {}
        rows, length = x.shape[:2]
        by_block = self.blocks.dropped(length, None if view.encoded is None else view.encoded.shape[1])
        shapes = {name: (self.num_layers, *shape) for name, shape in by_block.items()}
        shapes["in"] = (1, config.sum_width)
        if config.residual != "post-norm":  # post-norm drops out the last sub-layer just before its last norm
            shapes["out"] = (1, config.d_model)
        keep = draw_keep(key, config.dropout, rows, shapes)
        return keep, {name: keep.pop(name).swapaxes(0, 1) for name in by_block}

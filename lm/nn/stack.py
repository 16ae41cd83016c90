"""A stack of blocks: an encoder or a decoder without the embedding of tokens.

Shapes: B rows, T positions, D = d_model, S positions of the encoder, N query heads, M heads of
cross-attention, K key heads of width H.
"""

from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx
from jax import Array
from jaxtyping import Float, Float32, Int

from lm.config.model import ModelConfig
from lm.nn.attention_inputs import AttentionInputs
from lm.nn.block import Block, remat_policy
from lm.nn.cache import Carry, LayerCache
from lm.nn.convolution import InputConvolution
from lm.nn.dropout import DropoutMasks, draw_dropout_masks, dropout
from lm.nn.evolved import EvolvedBlock
from lm.nn.experts import RouterStatistics
from lm.nn.layers import (
    Embed,
    Identity,
    Linear,
    Module,
    add_layers_axis,
    embedding_std,
    make_norm,
    next_key,
)
from lm.nn.memory import ProductKeyMemory
from lm.nn.positions import make_shared_relative
from lm.nn.residual import make_last_norm
from lm.nn.universal import StepEmbedding, make_halting
from lm.ops.positions import sinusoids
from lm.sharding import constrain

# The modules of a block that layers share, by model.shared_parts; "all" shares whole blocks.
SHARED_MODULE_GROUPS = {
    "attention": (
        *("attention_norm", "attention", "attention_scale", "attention_output_norm", "relative"),
        *("cross_norm", "cross", "cross_scale", "cross_output_norm"),
    ),
    "mlp": ("mlp_norm", "mlp", "experts", "mlp_scale", "mlp_output_norm", "adapter"),
}

# Functions that return what stands in place of a module in the layers that lack it: None or Identity.
PLACEHOLDERS: dict[str, Callable[[], Any]] = {
    "attention_norm": Identity,
    "mlp": lambda: None,
    "experts": lambda: None,
    "memory": lambda: None,
    "convolution": lambda: None,
}
# Modules that only one layer has, so they are not created for every layer.
SINGLE_LAYER_MODULES = {"memory": ProductKeyMemory, "convolution": InputConvolution}


BLOCKS = {"transformer": Block, "evolved": EvolvedBlock}  # by model.block


class StackOutput(NamedTuple):
    """The results of a stack."""

    x: Float[Array, "B T D"]
    carry: Carry | None  # of the mixers of all layers
    router: RouterStatistics | None  # sums over layers; None in a model without experts, and in decoding
    # the input of each block, [layers,B,T,D]; only set in an encoder read by transparent attention
    block_inputs: Float[Array, "layers B T D"] | None = None


class Stack(Module):
    """Adds positions and types to token embeddings, runs the blocks, and normalises the result.

    The parameters of all blocks are stacked on a leading axis [layers,...], so that a scan over layers
    compiles one block only. Of parameters that all layers share (ALBERT) that axis has length 1.
    """

    def __init__(
        self,
        config: ModelConfig,
        rngs: nnx.Rngs,
        num_layers: int,
        has_cross_attention: bool,
        shares_layers: bool,
    ):
        self.config = config
        self.num_layers = num_layers
        self.returns_block_inputs = config.has_transparent_attention and not has_cross_attention
        width = config.sum_width  # in which embeddings of tokens, positions and types are added
        std = embedding_std(config.output.logits, config.mup.base or width)

        def table(rows: int, axis: str) -> Embed:
            return Embed(rngs, (rows, width), axis, std=std, dtype=config.dtype)

        rows = config.positions.max_length + config.positions.offset
        self.positions = table(rows, "length") if config.positions.is_learned else None
        self.types = (
            table(config.embedding.type_vocab_size, "classes") if config.embedding.type_vocab_size else None
        )
        self.embed_norm = make_norm(config.norm, width) if config.embedding.norm else Identity()
        self.projection = input_projection(config, rngs)
        shares_blocks = shares_layers and config.shared_parts == "all"
        keys = jax.random.split(next_key(rngs), 1 if shares_blocks else num_layers)

        def block(key: Array) -> Block:
            return BLOCKS[config.block](config, nnx.Rngs(params=key), has_cross_attention)

        # vmap initialises each block with its own key and stacks their parameters.
        self.blocks: Any = add_layers_axis(jax.vmap(block)(keys))
        if shares_layers and not shares_blocks:
            share_modules(self.blocks, SHARED_MODULE_GROUPS[config.shared_parts])
        if shares_blocks and config.universal.embedding != "none":  # what tells the steps apart
            keys = jax.random.split(next_key(rngs), num_layers)
            embeddings = jax.vmap(lambda key: StepEmbedding(config, nnx.Rngs(params=key)))(keys)
            self.blocks.step_embedding = add_layers_axis(embeddings)
        # Decides after how many steps each position halts (adaptive computation time, Universal Transformer).
        # All other models have ``NoHalting``, whose state is the input of the next block: ``step`` returns
        # the block's output; ``start``, ``input`` and ``end`` return what they are given.
        self.halting = make_halting(config, rngs)
        self.has_product_key_memory = config.has_product_key_memory(has_cross_attention)
        for name, layers in self._layers_by_module.items():
            if name in SINGLE_LAYER_MODULES:
                module = make_in_one_layer(SINGLE_LAYER_MODULES[name], config, next_key(rngs))
                setattr(self.blocks, name, module)
            else:
                keep_in_layers(self.blocks, name, layers)
        # The direction only matters for initialisation, to a bias that starts as straight lines: each call
        # passes the direction in which it reads the bias.
        bidirectional = config.is_bidirectional(has_cross_attention)
        # What all layers share of relative positions: a table of biases, embeddings, sinusoids, or None.
        self.relative = make_shared_relative(config, rngs, bidirectional)
        # Post-norm blocks end with a norm already.
        is_post_norm = config.residual == "post-norm"
        self.norm = Identity() if is_post_norm else make_last_norm(config)

    def __call__(
        self,
        x: Float[Array, "B T d_embed"],
        token_types: Int[Array | np.ndarray, "B T"] | None,
        inputs: AttentionInputs,
        key: Array | None = None,
        carry: Carry | None = None,
        encoder_kv: LayerCache | tuple[LayerCache, ...] | None = None,
    ) -> StackOutput:
        """Return [B,T,D] from embeddings x [B,T,d_embed] and token types [B,T], and what the layers return.

        ``key`` switches dropout on. ``carry`` and ``encoder_kv`` are as in ``Block``, [layers,...] or, if the
        stack is unstacked, tuples by layer.
        """
        stack_masks, block_masks = self._draw_dropout_masks(x, inputs, key)

        def run_block(block, state, args, inputs):
            """Return the halting state after a block, and the block's carry, router statistics and input."""
            x = self.halting.input(state)
            y, carry, router = block(x, inputs, *args)
            embedded_x = block.step_embedding(x, inputs.positions)  # as the block itself embeds it
            state = self.halting.step(state, embedded_x, y)
            return state, (carry, router, x if self.returns_block_inputs else None)

        state = self.halting.start(self._first_block_input(x, token_types, inputs, stack_masks.get("in")))
        layer_args = block_masks, carry, encoder_kv
        state, (carry, router, block_inputs) = self._run(run_block, state, layer_args, inputs)
        x = self.halting.end(state)
        router = jax.tree.map(lambda by_layer: by_layer.sum(0), router)
        x = dropout(self.norm(x), stack_masks.get("out"), self.config.dropout)
        return StackOutput(x, carry, router, block_inputs)

    def encoder_key_value(
        self, encoded: Float[Array, "*layers B S D"], positions: Int[Array, "#B S"] | None
    ) -> LayerCache:
        """Return keys and values [layers,B,K,S,H] of the encoder's output, for all blocks.

        The output is [B,S,D], or [layers,B,S,D] if each block reads a different one. ``positions`` [B|1,S]
        are the keys' positions in cross-attention; None if it uses none.
        """

        def cross_key_value(attention, encoded):
            return LayerCache.from_key_value(attention.key_value(encoded, positions))

        by_block = jax.vmap(cross_key_value, in_axes=(0, 0 if encoded.ndim == 4 else None))
        kv = by_block(self.blocks.attention_to_encoder, encoded)
        return jax.tree.map(lambda x: jnp.broadcast_to(x, (self.num_layers, *x.shape[1:])), kv)

    def init_carry(self, rows: int, length: int) -> Carry:
        """Return the carry of all layers before the first token, leaves [layers,B,...]."""
        carry = self.blocks.init_carry(rows, length)
        return jax.tree.map(lambda x: jnp.broadcast_to(x, (self.num_layers, *x.shape)), carry)

    def hidden_states(
        self,
        x: Float[Array, "B T d_embed"],
        token_types: Int[Array | np.ndarray, "B T"] | None,
        inputs: AttentionInputs,
        encoder_kv: LayerCache | None = None,
    ) -> Float[Array, "{self.num_layers}+1 B T D"]:
        """Return [layers+1,B,T,D]: each block's input, and what the stack returns before the final norm.

        This is the last block's output or, with adaptive halting, the mix of all steps'.
        """

        def run_block(block, state, encoder_kv, inputs):
            """Return the halting state after a block, and the block's input."""
            x = self.halting.input(state)
            y = block(x, inputs, {}, None, encoder_kv).x
            embedded_x = block.step_embedding(x, inputs.positions)
            return self.halting.step(state, embedded_x, y), x

        state = self.halting.start(self._first_block_input(x, token_types, inputs, None))
        state, block_inputs = self._run(run_block, state, encoder_kv, inputs)
        return jnp.concatenate([block_inputs, self.halting.end(state)[None]])

    def attention_weights(
        self,
        hidden: Float[Array, "_ B T D"],
        inputs: AttentionInputs,
        encoder_kv: LayerCache | None = None,
    ) -> tuple[Float32[Array, "layers B N T T"] | None, Float32[Array, "layers B M T S"] | None]:
        """Return the weights of self-attention, float32 [layers,B,N,T,T], and of cross-attention.

        The latter are float32 [layers,B,M,T,S]. Either is None if the stack lacks that attention. ``hidden``
        is what ``hidden_states`` returns.
        """

        def run_block(block, _, args, inputs):
            """Return no state, and the block's weights."""
            x, encoder_kv = args
            return None, block.attention_weights(x, inputs, encoder_kv)

        return self._run(run_block, None, (hidden[:-1], encoder_kv), inputs)[1]

    def mixer_inputs(
        self, hidden: Float[Array, "_ B T D"], inputs: AttentionInputs
    ) -> Float[Array, "layers B T D"]:
        """Return the input of each block's mixer, [layers,B,T,D], given what ``hidden_states`` returns."""

        def run_block(block, _, x, inputs):
            """Return no state, and the input of the block's mixer."""
            return None, block.mixer_input(x, inputs)

        return self._run(run_block, None, hidden[:-1], inputs)[1]

    def unstack(self) -> "Stack":
        """Return the same stack with a list of blocks in place of stacked parameters.

        A decoding loop then reads each layer's own arrays; slices of a stacked array would be copied at every
        token.
        """
        stack = jax.tree.map(lambda leaf: leaf, self)  # a copy
        stack.blocks = nnx.List(self._blocks_by_layer())
        return stack

    def _run(self, run_block: Callable, x: Any, layer_args: Any, inputs: AttentionInputs) -> tuple[Any, Any]:
        """Apply ``run_block`` to block after block; return the last x and the stacked results of all blocks.

        ``x`` is what one block passes to the next: the state of ``halting``, or None. ``layer_args`` is a
        tree of further arguments, with leaves [layers,...]. ``run_block(block, x, args, inputs)`` receives
        the slice of ``layer_args`` for one layer, and returns the next x and a result. In an unstacked stack,
        arguments and results are tuples by layer instead.
        """
        config = self.config
        if isinstance(self.blocks, nnx.List):
            return self._run_unstacked(run_block, x, layer_args, inputs)
        is_uniform = not inputs.layer_inputs and not self._layers_by_module
        is_scanned = config.compile.layers == "scan" and is_uniform

        def one_layer(block, x, args, layer_inputs):
            return run_block(block, x, args, inputs.with_layer_inputs(layer_inputs))

        if config.compile.remat != "none":
            # Without a scan, XLA would merge the recomputation with the original unless CSE is prevented.
            policy = remat_policy(config.compile)
            one_layer = jax.checkpoint(one_layer, policy=policy, prevent_cse=not is_scanned)
        if not is_scanned:
            return self._run_unrolled(one_layer, x, layer_args, inputs)
        # All layers have the same mask and frequencies, or they would not be scanned.
        shared_inputs = inputs.inputs_per_layer(1)[0]
        parameters, treedef = jax.tree.flatten(self.blocks)
        # By their number: those that layers have apart, [layers,...], and those that they share, [1,...],
        # which cannot be scanned over.
        scanned: dict[int, Array] = {}
        shared: dict[int, Array] = {}
        for number, array in enumerate(parameters):
            group = scanned if len(array) == self.num_layers else shared
            group[number] = array

        def scanned_layer(x, slices_and_args):
            slices, args = slices_and_args
            leaves = slices | {number: array[0] for number, array in shared.items()}
            block = jax.tree.unflatten(treedef, [leaves[number] for number in range(len(parameters))])
            return one_layer(block, x, args, shared_inputs)

        return jax.lax.scan(scanned_layer, x, (scanned, layer_args), length=self.num_layers)

    def _run_unrolled(
        self, one_layer: Callable, x: Any, layer_args: Any, inputs: AttentionInputs
    ) -> tuple[Any, Any]:
        """Run the layers in a Python loop: needed if layers differ, and faster if there are few."""
        layers = zip(
            self._blocks_by_layer(),
            split_layers(layer_args, self.num_layers),
            inputs.inputs_per_layer(self.num_layers),
            strict=True,
        )
        results = []
        for block, args, layer_inputs in layers:
            x, result = one_layer(block, x, args, layer_inputs)
            results.append(result)
        return x, jax.tree.map(lambda *leaves: jnp.stack(leaves), *results)

    def _run_unstacked(
        self, run_block: Callable, x: Any, layer_args: Any, inputs: AttentionInputs
    ) -> tuple[Any, tuple[tuple, None, None]]:
        """Run an unstacked stack, in decoding.

        ``layer_args`` is ({}, carries, encoder_kv or None), the last two by layer.
        """
        dropout_masks, carries, encoder_kvs = layer_args
        inputs_per_layer = inputs.inputs_per_layer(self.num_layers)
        new_carries = []
        for index, block in enumerate(self.blocks):
            kv = None if encoder_kvs is None else encoder_kvs[index]
            args = dropout_masks, carries[index], kv
            x, (carry, *_) = run_block(block, x, args, inputs.with_layer_inputs(inputs_per_layer[index]))
            new_carries.append(carry)
        return x, (tuple(new_carries), None, None)

    @property
    def _layers_by_module(self) -> dict[str, tuple[int, ...]]:
        return layers_by_module(self.config, self.num_layers, self.has_product_key_memory)

    def _blocks_by_layer(self) -> list[Block]:
        """Return the block of each layer, without the leading axis; shared parameters are the same arrays."""
        if not self._layers_by_module:
            return split_layers(self.blocks, self.num_layers)
        with_placeholders = jax.tree.map(lambda leaf: leaf, self.blocks)  # a copy
        for name in self._layers_by_module:
            setattr(with_placeholders, name, PLACEHOLDERS[name]())
        blocks = split_layers(with_placeholders, self.num_layers)
        for name, layers in self._layers_by_module.items():
            modules = split_layers(getattr(self.blocks, name), len(layers))
            for layer, module in zip(layers, modules, strict=True):
                setattr(blocks[layer], name, module)
        return blocks

    def _first_block_input(
        self,
        x: Array,
        token_types: Array | np.ndarray | None,
        inputs: AttentionInputs,
        dropout_mask: Array | None,
    ) -> Array:
        """Return the first block's input [B,T,D], from embeddings of tokens x [B,T,d_embed] and types [B,T].

        The order is that of published models: scale, positions, types, norm, dropout. The projection to
        d_model comes before the positions if it projects token embeddings (OPT), or last if it projects the
        sum of embeddings (ALBERT).
        """
        config = self.config
        if config.embedding.scale == "sqrt":
            x = x * config.base_width**0.5
        if config.embedding.multiplier != 1.0:
            x = x * config.embedding.multiplier
        if config.embedding.projected == "tokens":
            x = self.projection(x)
        if self.positions is not None:
            # Keep negative positions negative, so that Embed returns NaN: adding the offset could make them
            # valid rows.
            rows = jnp.where(inputs.positions < 0, -1, inputs.positions + config.positions.offset)
            x = x + self.positions(rows)
        if config.positions.kind == "sinusoidal":
            x = x + sinusoids(inputs.positions, config.sum_width, layout=config.positions.sinusoid).astype(
                x.dtype
            )
        if self.types is not None:
            if token_types is None:
                token_types = jnp.zeros(x.shape[:2], jnp.int32)
            x = x + self.types(token_types)
        x = dropout(self.embed_norm(x), dropout_mask, config.dropout)
        if config.embedding.projected == "sum":
            x = self.projection(x)
        return constrain(x, "batch", "length", "embed")

    def _draw_dropout_masks(
        self, x: Array, inputs: AttentionInputs, key: Array | None
    ) -> tuple[DropoutMasks, DropoutMasks]:
        """Return the masks of the stack's input and output, [B,...], and of its blocks, [layers,B,...].

        Blocks with experts also get a key each, as "router".
        """
        config = self.config
        router_keys = {}
        if key is not None and config.experts.count:
            # Drawn from a separate key, so that the dropout masks equal those of a model without experts.
            router_keys = {"router": jax.random.split(jax.random.fold_in(key, 1), self.num_layers)}
        if key is None or config.dropout == 0:
            return {}, router_keys
        rows, length = x.shape[:2]
        encoded_length = None if inputs.encoded is None else inputs.encoded.shape[1]
        by_block = self.blocks.dropout_shapes(length, encoded_length)
        shapes = {name: (self.num_layers, *shape) for name, shape in by_block.items()}
        shapes["in"] = (1, config.sum_width)
        if config.residual != "post-norm":  # a post-norm block already ends with dropout and a norm
            shapes["out"] = (1, config.d_model)
        masks = draw_dropout_masks(key, config.dropout, rows, shapes)
        stack_masks = {name: mask for name, mask in masks.items() if name not in by_block}
        block_masks = {name: masks[name].swapaxes(0, 1) for name in by_block}
        return stack_masks, block_masks | router_keys


def layers_by_module(
    config: ModelConfig, num_layers: int, has_product_key_memory: bool
) -> dict[str, tuple[int, ...]]:
    """Return {module of a block: layers that have it} for modules that some layers of a stack lack."""
    layers = range(num_layers)
    by_module: dict[str, tuple[int, ...]] = {}
    if config.norm.kind != "none" and config.norm.first_attention == "none":
        by_module["attention_norm"] = tuple(layers[1:])
    expert_layers = config.experts.layers(num_layers)
    if expert_layers and config.experts.every > 1:
        by_module["experts"] = expert_layers
        by_module["mlp"] = tuple(layer for layer in layers if layer not in expert_layers)
    if has_product_key_memory:
        memory_layer = num_layers + config.memory.layer  # counted from the last layer, -1
        by_module["memory"] = (memory_layer,)
        by_module["mlp"] = tuple(layer for layer in layers if layer != memory_layer)
    if config.embedding.convolution:
        by_module["convolution"] = (0,)
    return by_module


def share_modules(blocks: Any, names: tuple[str, ...]) -> None:
    """Let all layers share these modules of a block: their parameters [layers,...] become [1,...]."""
    for name in names:
        setattr(blocks, name, jax.tree.map(lambda leaf: leaf[:1], getattr(blocks, name)))


def make_in_one_layer(module: Callable[..., Any], config: ModelConfig, key: Array) -> Any:
    """Return a module of a block whose parameters have the leading axis of layers, of length 1."""
    return add_layers_axis(jax.vmap(lambda key: module(config, nnx.Rngs(params=key)))(key[None]))


def keep_in_layers(blocks: Any, name: str, layers: tuple[int, ...]) -> None:
    """Keep a module of a block in these layers alone: its parameters [all layers,...] become fewer."""
    kept = jax.tree.map(lambda leaf: leaf[np.array(layers, int)], getattr(blocks, name))
    setattr(blocks, name, kept if layers else PLACEHOLDERS[name]())


def split_layers(stacked: Any, count: int) -> list:
    """Return the tree of each of ``count`` layers, given leaves [layers,...], or [1,...] if shared."""
    leaves, treedef = jax.tree.flatten(stacked)

    def slices(leaf: Array) -> list[Array]:
        """Return [1,...] for each layer."""
        if len(leaf) == 1:
            return [leaf] * count
        return jnp.split(leaf, count)

    leaf_slices = [slices(leaf) for leaf in leaves]
    layers = []
    for layer in range(count):
        leaves_of_layer = [each[layer][0] for each in leaf_slices]
        layers.append(jax.tree.unflatten(treedef, leaves_of_layer))
    return layers


def input_projection(config: ModelConfig, rngs: nnx.Rngs) -> nnx.Module:
    """Return the linear layer from d_embed to d_model; Identity if ``model.embedding.d_embed`` is None.

    It has a bias only if it projects the sum of all embeddings (ALBERT), not of tokens (OPT).
    """
    if config.embedding.d_embed is None:
        return Identity()
    width, use_bias = config.embed_width, config.bias and config.embedding.projected == "sum"
    return Linear(rngs, (width, config.d_model), ("kv", "embed"), std=width**-0.5, use_bias=use_bias)

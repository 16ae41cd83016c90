"""Memory-compressed attention: keys and values shortened by a strided convolution (Liu et al. 2018).

Shapes: B rows, T queries, S keys, M blocks of C keys, D features; N query heads and K key heads of width H,
values of width Hv.
"""

from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx
from jax import Array
from jaxtyping import Bool, Float, Float32, Int, Int32

from lm.config.model import ModelConfig
from lm.nn.attention import Attention
from lm.nn.attention_inputs import AttentionInputs, positions_in_segments
from lm.nn.cache import KeyValue, LayerCache
from lm.nn.dropout import DropoutMasks, Shapes
from lm.nn.layers import normal, param
from lm.ops.masks import AttentionMask
from lm.ops.positions import PositionBias, RotaryPositions


class Blocks(NamedTuple):
    """Where the blocks of a row end: a block is C neighbouring tokens of one text."""

    end: Int32[Array, "#B M"]  # index of the last token of each block; of no meaning where there is none
    is_there: Bool[Array, "#B M"]  # False for blocks beyond the last one of the row


class CompressedCache(NamedTuple):
    """The cache of a layer: keys and values of all tokens, and those of the blocks that they make."""

    tokens: LayerCache  # [B,K,S,H]
    blocks: LayerCache  # [B,K,M,H]


def find_blocks(length: int, segments: Int[Array | np.ndarray, "B {length}"] | None, size: int) -> Blocks:
    """Return the blocks of ``size`` tokens of each text in rows of ``length``, counted from its first token.

    The tokens after a text's last whole block belong to none. Segment 0 is padding.

    >>> find_blocks(7, np.array([[1, 1, 1, 1, 2, 2, 0]]), 2).end.tolist()
    [[1, 3, 5]]
    """
    position = positions_in_segments(length, None if segments is None else jnp.asarray(segments))
    is_end = (position + 1) % size == 0
    if segments is not None:
        is_end = is_end & (segments > 0)
    # The ends come first, in their order.
    end = jnp.argsort(~is_end, axis=1, stable=True)[:, : max(length // size, 1)].astype(jnp.int32)
    return Blocks(end, jnp.take_along_axis(is_end, end, axis=1))


def compress(
    x: Float[Array, "B S K H"], end: Int32[Array, "#B M"], kernel: Float[Array, "K C H Ho"]
) -> Float[Array, "B M K Ho"]:
    """Return the product of each block of C tokens of x with its head's kernel; ``end`` is its last index."""
    size = kernel.shape[1]
    index = jnp.maximum(end[:, :, None] + jnp.arange(1 - size, 1)[None, None, :], 0)
    index = jnp.broadcast_to(index.reshape(len(end), -1), (len(x), index.shape[1] * size))
    tokens = jnp.take_along_axis(x, index[:, :, None, None], axis=1)
    tokens = tokens.reshape(len(x), -1, size, *x.shape[2:])
    return jnp.einsum("bmckh,kcho->bmko", tokens, kernel.astype(x.dtype))


class CompressedAttention(Attention):
    """Self-attention of a decoder to blocks of C tokens, ``model.attention.compression`` (Liu et al. 2018).

    A convolution of width C and stride C makes one key of the keys of a block, and one value of its values;
    each head of keys has one kernel for its keys and another for its values. A query sees a block only when
    all of its tokens are at or before the query, in its own text. So nothing is read ahead. A query does not
    see the tokens of a block that has not ended, itself included. One without any block before it sees
    nothing: the outputs of its heads are then 0. Blocks are counted from the first token of each text, so
    that packed texts have the states of texts alone.

    Positions of a block are those of its last token: its key is rotated by them after the convolution, which
    would mix different angles, and biases are those of that token. A cache of decoding also holds the keys
    and values of the tokens, from which the block of a new token is computed again.
    """

    def __init__(self, config: ModelConfig, rngs: nnx.Rngs, _bidirectional: bool = False):
        super().__init__(config, rngs)
        sizes = config.attention
        self.size = sizes.compression

        def kernel(width: int) -> nnx.Param:
            shape = sizes.key_value_heads, self.size, width, width
            axis = "heads" if sizes.num_key_value_heads is None else "kv_heads"
            return param(normal(rngs, shape, (self.size * width) ** -0.5), axis, "kv", "kv", "kv")

        self.key_kernel, self.value_kernel = kernel(sizes.d_kv), kernel(sizes.value_width)

    def __call__(
        self,
        x: Float[Array, "B T D"],
        inputs: AttentionInputs,
        cache: CompressedCache | None,
        dropout_masks: DropoutMasks,
    ) -> tuple[Float[Array, "B T D"], CompressedCache | None]:
        """Return the output [B,T,D] of self-attention on x [B,T,D], and the updated cache."""
        kv = self.key_value(x, None)
        if cache is None:
            kv = self.all_keys(kv, inputs)
        else:
            tokens = cache.tokens.write(kv, inputs.cache_index)
            cache = CompressedCache(
                tokens, self._update(cache.blocks, tokens, inputs.cache_index, x.shape[1])
            )
            kv = cache.blocks.key_value()
        return self.attend_to(x, kv, inputs, dropout_masks.get("attention")), cache

    def key_value(
        self, x: Float[Array, "B S D"], _positions: Int[Array | np.ndarray, "#B S"] | RotaryPositions | None
    ) -> KeyValue:
        """Return keys and values [B,S,K,H] of the tokens x [B,S,D], not rotated."""
        return super().key_value(x, None)

    def all_keys(self, kv: KeyValue, inputs: AttentionInputs) -> KeyValue:
        """Return keys and values [B,M,K,H] of the blocks, given those of the tokens of whole rows."""
        blocks = find_blocks(kv.key.shape[1], inputs.segments, self.size)
        positions = None if inputs.positions is None else _columns(inputs.positions, blocks.end)
        return self._compress(kv, blocks.end, positions)

    def attend_to(
        self,
        x: Float[Array, "B T D"],
        kv: KeyValue,
        inputs: AttentionInputs,
        dropout_mask: Bool[Array, "B N 1 M"] | None,
    ) -> Float[Array, "B T D"]:
        """Return the output [B,T,D] of attention from x [B,T,D] to keys and values of blocks."""
        return super().attend_to(x, kv, self._of_blocks(inputs, x.shape[1], kv.key.shape[1]), dropout_mask)

    def weights(
        self, x: Float[Array, "B T D"], kv: KeyValue, inputs: AttentionInputs
    ) -> Float32[Array, "B N T T"]:
        """Return the attention weights from x [B,T,D], [B,N,T,T]: a C-th of a block's to each token."""
        length = x.shape[1]
        by_block = super().weights(x, kv, self._of_blocks(inputs, length, kv.key.shape[1]))
        blocks, index = find_blocks(length, inputs.segments, self.size), jnp.arange(length)[None, None, :]
        end = jnp.where(blocks.is_there, blocks.end, -1)[:, :, None]
        is_inside = (index <= end) & (index > end - self.size)
        shares = jnp.broadcast_to(is_inside / self.size, (len(x), *is_inside.shape[1:]))
        return jnp.einsum("bntm,bms->bnts", by_block, shares)

    def init_carry(self, rows: int, length: int) -> CompressedCache:
        """Return an empty cache for ``length`` positions; masks hide the blocks that have not ended."""
        tokens = super().init_carry(rows, max(length, self.size))
        return CompressedCache(tokens, super().init_carry(rows, self._num_blocks(length)))

    def dropout_shapes(self, key_length: int) -> Shapes:
        """Return one row's shape [N,1,M] of the mask of attention weights."""
        return {"attention": (self.num_heads, 1, self._num_blocks(key_length))}

    def flops(self, length: int, visible: int, /) -> int:
        """Return the FLOPs of the forward pass over one row, as ``Attention`` does.

        A token attends to the blocks of the ``visible`` tokens, at least one if it sees any.
        """
        kernels = self.key_kernel.size + self.value_kernel.size
        blocks = self._num_blocks(length)
        seen = max(visible // self.size, 1) if visible else 0
        return super().flops(length, seen) + 2 * blocks * kernels

    def _num_blocks(self, length: int) -> int:
        return max(length // self.size, 1)

    def _cached_ends(self, num_blocks: int) -> Array:
        """Return the index of the last token of each block of a cache, int32 [1,M]."""
        return (jnp.arange(num_blocks, dtype=jnp.int32) * self.size + self.size - 1)[None]

    def _compress(self, kv: KeyValue, end: Array, positions: Array | None) -> KeyValue:
        """Return keys and values [B,M,K,H] of blocks that end at ``end`` and have these ``positions``."""
        key = compress(kv.key, end, self.key_kernel[...])
        return KeyValue(self._rotate(key, positions), compress(kv.value, end, self.value_kernel[...]))

    def _update(self, blocks: LayerCache, tokens: LayerCache, index: Array, count: int) -> LayerCache:
        """Return the blocks after ``count`` tokens have been written from ``index`` int32 [B] on."""
        num_blocks = blocks.key.shape[2]
        if count > 1:
            end = self._cached_ends(num_blocks)
            return LayerCache.from_key_value(self._compress(tokens.key_value(), end, end))
        # One token changes the block that it is in, if that fits into the cache.
        block = jnp.minimum(index // self.size, num_blocks - 1)

        def own_tokens(x: Array, start: Array) -> Array:
            return jax.lax.dynamic_slice_in_dim(x, start, self.size, axis=1)

        own = LayerCache(*(jax.vmap(own_tokens)(x, block * self.size) for x in tokens)).key_value()
        end = jnp.full((1, 1), self.size - 1, jnp.int32)
        return blocks.write(self._compress(own, end, block[:, None] * self.size + self.size - 1), block)

    def _of_blocks(self, inputs: AttentionInputs, length: int, num_blocks: int) -> AttentionInputs:
        """Return the inputs with the mask and the bias of blocks in place of those of tokens."""
        if inputs.cache_index is None:
            blocks = find_blocks(length, inputs.segments, self.size)
        else:  # index s of a cache holds position s of its row; a block may be longer than all rows
            end = self._cached_ends(num_blocks)
            blocks = Blocks(end, end < inputs.key_positions.shape[1])
        relative = blocks.end[:, None, :] - jnp.arange(length)[None, :, None]
        mask, bias = inputs.mask, inputs.bias
        if isinstance(mask, AttentionMask):
            ids = {name: _columns(x, blocks.end) for name, x in mask.key.items()}
            mask = AttentionMask(mask.query, ids, mask.spec).evaluate(relative)
        else:
            mask = _columns(mask, blocks.end)
        if bias is not None:
            bias = bias.evaluate(relative) if isinstance(bias, PositionBias) else _columns(bias, blocks.end)
        return inputs._replace(mask=mask & blocks.is_there[:, None, None, :], bias=bias)


def _columns(x: Array, index: Int32[Array, "#B M"]) -> Array:
    """Return the columns [B|1,...,M] of x [B|1,...,S] at ``index``; the last one for an index beyond it."""
    index = jnp.minimum(index, x.shape[-1] - 1)
    rows = max(len(x), len(index))
    index = index.reshape(len(index), *[1] * (x.ndim - 2), -1)
    x = jnp.broadcast_to(x, (rows, *x.shape[1:]))
    return jnp.take_along_axis(x, jnp.broadcast_to(index, (rows, *x.shape[1:-1], index.shape[-1])), axis=-1)

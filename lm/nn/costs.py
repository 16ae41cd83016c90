"""Costs of a layer: FLOPs of products with its matrices, and bytes of its cache of decoding.

Modules may be abstract, as ``jax.eval_shape`` returns them. Their parameters are those of one layer, without
the axis on which a stack holds all layers.
"""

from typing import Any

import jax
from flax import nnx

from lm.nn.layers import Module


def matmul_flops(module: nnx.Module | None, positions: int) -> int:
    """Return the FLOPs of multiplying ``positions`` vectors by each matrix of a module; 0 without a module.

    A matrix [in,out] takes 2*in*out for each vector. Arrays of other ranks are not counted: neither biases
    nor weights of rank 3, which a mixer adds by itself.
    """
    return 2 * positions * sum(leaf.size for leaf in jax.tree.leaves(module) if leaf.ndim == 2)


def array_bytes(tree: Any) -> int:
    """Return the bytes of all arrays of a tree, abstract or not."""
    return sum(leaf.size * leaf.dtype.itemsize for leaf in jax.tree.leaves(tree))


class TokenMixer(Module):
    """The base of token mixers, with the costs of one that multiplies each position by each of its matrices.

    A mixer that computes more, or less, overrides ``flops``.
    """

    def flops(self, length: int, _visible: int, /) -> int:
        """Return the FLOPs of the forward pass over one row of ``length`` tokens.

        Each token attends to ``visible`` tokens of the row. FLOPs that grow with these count as scores.
        """
        return matmul_flops(self, length)

    def cache_bytes(self: Any, length: int, /) -> int:
        """Return the bytes of the carry of one row of ``length`` tokens."""
        return array_bytes(jax.eval_shape(lambda mixer: mixer.init_carry(1, length), self))


def mixer_flops(mixer: Any, length: int, visible: int) -> int:
    """Return ``mixer.flops(length, visible)``, or what ``TokenMixer`` counts if the mixer lacks it."""
    if hasattr(mixer, "flops"):
        return mixer.flops(length, visible)
    return TokenMixer.flops(mixer, length, visible)


def mixer_cache_bytes(mixer: Any, length: int) -> int:
    """Return ``mixer.cache_bytes(length)``, or what ``TokenMixer`` counts if the mixer lacks it."""
    if hasattr(mixer, "cache_bytes"):
        return mixer.cache_bytes(length)
    return TokenMixer.cache_bytes(mixer, length)

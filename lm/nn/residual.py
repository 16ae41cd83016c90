"""Norms, scalars and initial values of residual branches, by model.residual.

A branch adds the output of a sub-layer f (attention, cross-attention or the feed-forward layer) to x:

* pre-norm: x + f(norm(x));
* sandwich-norm (Ding et al. 2021; Gemma 2): x + norm(f(norm(x))), with two norms of their own;
* output-norm (OLMo 2): x + norm(f(x));
* ReZero (Bachlechner et al. 2020): x + a f(norm(x)). The scalar a of each branch starts at 0, so that a new
  block returns its input;
* Fixup (Zhang et al. 2019), without norms: x + a f(x + b). Here a starts at 1, b at 0, the last matrix of f
  at 0, and its other matrices smaller the more branches there are. Another scalar bias precedes the last
  matrix of a feed-forward layer.

ReZero and Fixup are as in the code of Narang et al. 2021, which leaves the output matrix as it is, where
Fixup starts it at 0.
"""

from typing import Any

import jax.numpy as jnp
from flax import nnx

from lm.config.model import ModelConfig
from lm.nn.layers import Identity, Linear, ScalarBias, ScalarScale, make_norm

# Matrices one after another in a branch: those of queries, keys, values and the output, and two of an MLP.
ATTENTION_MATRICES, MLP_MATRICES = 4, 2


def make_branch_norm(config: ModelConfig) -> nnx.Module:
    """Return the norm of a branch's input (of the sum in post-norm models); in Fixup a scalar bias."""
    return Identity() if config.residual == "output-norm" else make_last_norm(config)


def make_last_norm(config: ModelConfig) -> nnx.Module:
    """Return the norm after the last block of a stack; in Fixup a scalar bias."""
    return ScalarBias() if config.residual == "fixup" else make_norm(config.norm, config.d_model)


def make_branch_output_norm(config: ModelConfig) -> nnx.Module:
    """Return the norm of a branch's output, before it is added, where residuals have one; else Identity."""
    has_norm = config.residual in ("sandwich-norm", "output-norm")
    return make_norm(config.norm, config.d_model) if has_norm else Identity()


def make_branch_scale(config: ModelConfig) -> nnx.Module:
    """Return the factor of a branch's output: a scalar in ReZero and Fixup, else Identity."""
    starts = {"rezero": 0.0, "fixup": 1.0}
    return ScalarScale(starts[config.residual]) if config.residual in starts else Identity()


def count_branches(config: ModelConfig) -> int:
    """Return the number of residual branches of all blocks of both stacks (Fixup's L)."""
    per_block = 1 + config.has_feed_forward
    branches = 0
    if config.has_encoder:
        branches += config.num_encoder_layers * per_block
    if config.has_decoder:
        branches += config.num_decoder_layers * (per_block + config.has_encoder)
    return branches


def apply_fixup(config: ModelConfig, block: Any) -> None:
    """Give the matrices of a new block Fixup's initial values, if model.residual says so.

    In a branch of m matrices the last one becomes 0, and all others are multiplied by L^(-1/(2m-2)).
    """
    if config.residual != "fixup":
        return
    for attention in (block.attention, block.cross):
        for layer in (attention, getattr(attention, "globals", None)):
            _scale_branch(config, layer, ("query", "key", "value"), ATTENTION_MATRICES)
    _scale_branch(config, block.mlp, ("hidden", "linear"), MLP_MATRICES)


def _scale_branch(config: ModelConfig, layer: Any, names: tuple[str, ...], num_matrices: int) -> None:
    factor = count_branches(config) ** (-1 / (2 * num_matrices - 2))
    for name in names:
        matrix = getattr(layer, name, None)
        if isinstance(matrix, Linear):
            matrix.kernel[...] = matrix.kernel[...] * factor
    last = getattr(layer, "out", None)
    if isinstance(last, Linear):
        last.kernel[...] = jnp.zeros_like(last.kernel[...])

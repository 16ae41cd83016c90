"""Adaptive embeddings and the adaptive softmax, which give frequent tokens more than rare ones.

Shapes: B rows, T positions, D = d_model, V tokens in C clusters of widths W.
"""

from collections.abc import Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx
from jax import Array
from jaxtyping import Float, Float32, Int

from lm.config.model import ModelConfig
from lm.nn.costs import matmul_flops
from lm.nn.layers import Embed, Identity, Linear, Module
from lm.ops.products import dense


class Cluster(Module):
    """The embeddings [tokens,W] of some tokens, and their projection to D features unless W is D."""

    def __init__(self, config: ModelConfig, rngs: nnx.Rngs, tokens: int, width: int, std: float):
        is_projected = width != config.d_model
        if is_projected:  # both factors have the same deviation, and their product ``std``
            std = (std / width**0.5) ** 0.5
        self.embed = Embed(rngs, (tokens, width), "vocab", std=std, dtype=config.dtype)
        self.projection: Linear | Identity = Identity()
        if is_projected:
            shape, axes = (width, config.d_model), ("kv", "embed")
            self.projection = Linear(rngs, shape, axes, std=std, use_bias=False)

    def __call__(self, ids: Int[Array, "B T"]) -> Float[Array, "B T D"]:
        """Return the embeddings [B,T,D] of ids that count the tokens of this cluster from 0."""
        return self.projection(self.embed(ids))

    def logits(self, x: Float[Array, "B T D"]) -> Float32[Array, "B T tokens"]:
        """Return the products of x [B,T,D] with all embeddings, float32 [B,T,tokens]."""
        if isinstance(self.projection, Linear):
            x = dense(x, self.projection.kernel[...].astype(x.dtype).T)
        return self.embed.logits(x)


class AdaptiveEmbed(Module):
    """A table of embeddings like ``Embed``, in clusters of consecutive ids with a width each.

    Tied to the output, it is the output matrix of one softmax over all tokens, as in the code of Narang et
    al. 2021 (Baevski and Auli 2019 have an adaptive softmax).
    """

    def __init__(self, config: ModelConfig, rngs: nnx.Rngs, *, std: float):
        self.sizes = config.cluster_sizes
        self.clusters = nnx.List(
            Cluster(config, rngs, tokens, width, std)
            for tokens, width in zip(self.sizes, config.embedding.cluster_widths, strict=True)
        )

    def __call__(self, ids: Int[Array | np.ndarray, "B T"]) -> Float[Array, "B T D"]:
        """Return [B,T,D] of ids int32 [B,T]; NaN for an id that no cluster has, also for a negative one."""
        ids, start = jnp.asarray(ids), 0
        x: Any = jnp.nan
        for cluster, tokens in zip(self.clusters, self.sizes, strict=True):
            is_inside = (ids >= start) & (ids < start + tokens)
            found = cluster(jnp.where(is_inside, ids - start, 0))
            x = jnp.where(is_inside[:, :, None], found, x)
            start += tokens
        return x

    def logits(self, x: Float[Array, "B T D"]) -> Float32[Array, "B T V"]:
        """Return the products of x [B,T,D] with all embeddings, float32 [B,T,V]."""
        return jnp.concatenate([cluster.logits(x) for cluster in self.clusters], axis=-1)

    def lookup_flops(self, positions: int) -> int:
        """Return the FLOPs of the projections of so many embeddings: all clusters project each position."""
        return sum(matmul_flops(cluster.projection, positions) for cluster in self.clusters)


class AdaptiveSoftmax(Module):
    """Log-probabilities of tokens in clusters: of the cluster, and of the token in it (Grave et al. 2017).

    The first cluster, of the most frequent tokens, shares its softmax with the names of the others, whose
    logits are products of x with a vector for each. All logits are computed, so that the log-probabilities
    are exact for every token, and nothing is saved.
    """

    def __init__(self, config: ModelConfig, rngs: nnx.Rngs):
        self.sizes = config.cluster_sizes
        names = len(self.sizes) - 1
        std = config.d_model**-0.5
        self.names = Linear(rngs, (config.d_model, names), ("embed", "classes"), std=std, use_bias=False)

    def __call__(self, x: Float[Array, "B T D"], logits: Float32[Array, "B T V"]) -> Float32[Array, "B T V"]:
        """Return the log-probabilities float32 [B,T,V] of all tokens, whose logits of states x are given."""
        names = dense(x, self.names.kernel[...].astype(x.dtype), jnp.float32)
        return adaptive_log_softmax(logits, names, self.sizes)


def adaptive_log_softmax(
    logits: Float32[Array, "... V"], names: Float32[Array, "... C-1"], sizes: Sequence[int]
) -> Float32[Array, "... V"]:
    """Return log-probabilities [...,V] of tokens in clusters of ``sizes``.

    ``logits`` are those of all tokens, ``names`` those of all clusters but the first.

    log p(v) = log softmax([first, names])_v for v in the first cluster, and log softmax([first, names])_c +
    log softmax(cluster c)_v for v in another one, c.
    """
    first, *others = jnp.split(logits, np.cumsum(sizes)[:-1], axis=-1)
    shared = jax.nn.log_softmax(jnp.concatenate([first, names], axis=-1), axis=-1)
    of_first, of_names = jnp.split(shared, [sizes[0]], axis=-1)
    parts = [of_first]
    for index, cluster_logits in enumerate(others):
        of_cluster = of_names[..., index, None]
        parts.append(of_cluster + jax.nn.log_softmax(cluster_logits, axis=-1))
    return jnp.concatenate(parts, axis=-1)

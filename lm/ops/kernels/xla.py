"""Attention that stores the whole matrix of logits, 9 to 28 % faster on a CPU than the plain formula.

Three things make the difference. Query heads that share a key head are folded into the positions, so that
products have one batch axis less. The division by the sum of weights comes after the product with the values:
H divisions per query instead of S. The backward pass computes the logits again, which are most of what a
training step would otherwise keep in memory.
"""

from functools import partial

import jax
import jax.numpy as jnp
from jax import Array
from jaxtyping import Float

from lm.ops.attention import NO_OPTIONS, AttentionOptions, attention_logits, check_mask_and_bias
from lm.ops.masks import AnyMask, materialize_mask
from lm.ops.positions import AnyBias, materialize_bias
from lm.ops.products import queries_times_keys, weights_times_values

SUPPORTED = frozenset({"scale", "logit_cap", "dropout_factors"})


def xla_attention(
    query: Float[Array, "B T N H"],
    key: Float[Array, "B S K H"],
    value: Float[Array, "B S K Hv"],
    mask: AnyMask = None,
    bias: AnyBias = None,
    options: AttentionOptions = NO_OPTIONS,
) -> Float[Array, "B T N Hv"]:
    """Return ``scaled_dot_product_attention`` of the same arguments, [B,T,N,Hv].

    A mask or bias that is not an array yet is turned into one here.
    """
    options.check_supported("xla", SUPPORTED)
    (batch, length, heads, width), key_length = query.shape, key.shape[1]
    mask = materialize_mask(mask, length, key_length)
    bias = materialize_bias(bias, length, key_length)
    check_mask_and_bias(mask, bias, (batch, heads, length, key_length))
    scale = width**-0.5 if options.scale is None else options.scale

    def attend(query, key, value, mask, bias, dropout_factors):
        logits = _logits(query, key, bias, scale, options.logit_cap)
        return _weighted_mean(*_unnormalized_softmax(logits, mask), value, dropout_factors)

    return jax.checkpoint(attend, prevent_cse=False)(query, key, value, mask, bias, options.dropout_factors)


def _logits(query: Array, key: Array, bias: Array | None, scale: float, logit_cap: float | None) -> Array:
    """Return logits float32 [B,N,T,S]. Scaling the query, not the logits, takes H products, not S."""
    batch, length, heads, _ = query.shape
    query = _fold_heads(query if scale == 1.0 else query * scale, key.shape[2])
    products = queries_times_keys(query, key)
    products = products.reshape(batch, heads, length, key.shape[1])
    if bias is not None and bias.shape[0] != batch:
        bias = _broadcast_batch(bias, batch)
    return attention_logits(products, bias, logit_cap=logit_cap)


def _unnormalized_softmax(logits: Array, mask: Array | None) -> tuple[Array, Array]:
    """Return exp(logits - max), 0 where masked, and its sums over keys [B,N,T], 1 in place of 0."""
    if mask is not None:
        logits = jnp.where(mask, logits, -jnp.inf)
    highest = jax.lax.stop_gradient(logits.max(-1, keepdims=True))
    weights = jnp.exp(logits - jnp.where(jnp.isfinite(highest), highest, 0.0))
    total = weights.sum(-1)
    return weights, jnp.where(total == 0, 1.0, total)


def _weighted_mean(weights: Array, total: Array, value: Array, dropout_factors: Array | None) -> Array:
    """Return values [B,S,K,H] averaged by weights [B,N,T,S], whose sums are ``total`` [B,N,T]."""
    batch, heads, length, key_length = weights.shape
    groups, width = value.shape[2:]
    if dropout_factors is not None:
        weights = weights * dropout_factors
    weights = weights.reshape(batch, groups, -1, key_length).astype(value.dtype)
    out = weights_times_values(weights, value)
    out = _unfold_heads(out, (batch, length, heads, width)) / total.swapaxes(1, 2)[..., None]
    return out.astype(value.dtype)


def _fold_heads(x: Array, groups: int) -> Array:
    """Return x [B,T,N,H] as [B,N/K*T,K,H]: query heads that share a key head become queries."""
    batch, length, heads, width = x.shape
    x = x.reshape(batch, length, groups, heads // groups, width)
    return x.transpose(0, 3, 1, 2, 4).reshape(batch, -1, groups, width)


def _unfold_heads(x: Array, shape: tuple[int, int, int, int]) -> Array:
    """Return x [B,N/K*T,K,H] as ``shape`` [B,T,N,H]: the inverse of ``_fold_heads``."""
    batch, length, heads, width = shape
    groups = x.shape[2]
    return x.reshape(batch, heads // groups, length, groups, width).transpose(0, 2, 3, 1, 4).reshape(shape)


@partial(jax.custom_vjp, nondiff_argnums=(1,))
def _broadcast_batch(bias: Array, batch: int) -> Array:
    """Return a bias [1,N,T,S] as [B,N,T,S]. Its gradient is summed by an einsum: 60 times faster on a CPU."""
    return jnp.broadcast_to(bias, (batch, *bias.shape[1:]))


def _broadcast_batch_backward(batch: int, _: None, gradient: Array) -> tuple[Array]:
    return (jnp.einsum("b,bnts->nts", jnp.ones(batch), gradient, precision="highest")[None],)


_broadcast_batch.defvjp(lambda bias, batch: (_broadcast_batch(bias, batch), None), _broadcast_batch_backward)

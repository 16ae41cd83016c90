"""Attention by cuDNN's fused kernel, on NVIDIA GPUs, through ``jax.nn``."""

import jax
import jax.numpy as jnp
from jax import Array

from lm.ops.attention import NO_OPTIONS, AttentionOptions, check_mask_and_bias, repeat_heads
from lm.ops.masks import CAUSAL, AnyMask, AttentionMask, materialize_mask

SUPPORTED = frozenset({"scale", "dropout_factors"})


def cudnn_attention(
    query: Array,
    key: Array,
    value: Array,
    mask: AnyMask = None,
    bias: None = None,
    options: AttentionOptions = NO_OPTIONS,
) -> Array:
    """Return ``scaled_dot_product_attention`` without a bias, [B,T,N,H].

    Any mask but the causal one is written out.
    """
    options.check_supported("cudnn", SUPPORTED)
    if bias is not None:
        raise ValueError("attention by 'cudnn' takes no bias: use another implementation")
    if options.dropout_factors is not None:
        key, value = drop_values(key, value, options.dropout_factors)
    is_causal = isinstance(mask, AttentionMask) and mask == CAUSAL
    if mask is None or is_causal:
        return jax.nn.dot_product_attention(
            query, key, value, scale=options.scale, is_causal=is_causal, implementation="cudnn"
        )
    (batch, length, heads, _), key_length = query.shape, key.shape[1]
    mask = materialize_mask(mask, length, key_length)
    check_mask_and_bias(mask, None, (batch, heads, length, key_length))
    assert mask is not None
    full = jnp.broadcast_to(mask, (batch, mask.shape[1], length, key_length))
    out = jax.nn.dot_product_attention(
        query, key, value, mask=full, scale=options.scale, implementation="cudnn"
    )
    # cuDNN returns the mean of all values where a query may attend to nothing.
    return jnp.where(full.any(-1).swapaxes(1, 2)[..., None], out, 0)


def drop_values(key: Array, value: Array, dropout_factors: Array) -> tuple[Array, Array]:
    """Return keys and values [B,S,N,H], the values times ``dropout_factors`` [B,N,1,S].

    A mask that all queries of a row share can multiply the values instead of the weights, which a fused
    kernel does not expose. It has no gradient.
    """
    key, value = (repeat_heads(x, dropout_factors.shape[1]) for x in (key, value))
    factor = jax.lax.stop_gradient(dropout_factors)[:, :, 0].swapaxes(1, 2)[..., None]
    return key, (value * factor).astype(value.dtype)

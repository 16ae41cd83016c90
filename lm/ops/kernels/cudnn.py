"""Attention by cuDNN's fused kernel, on NVIDIA GPUs, through ``jax.nn``."""

import jax
import jax.numpy as jnp
from jax import Array
from jaxtyping import Float

from lm.ops.attention import NO_OPTIONS, AttentionOptions, apply_dropout_to_values, check_mask_and_bias
from lm.ops.masks import CAUSAL, AnyMask, AttentionMask, materialize_mask

SUPPORTED = frozenset({"scale", "dropout_factors"})


def cudnn_attention(
    query: Float[Array, "B T N H"],
    key: Float[Array, "B S K H"],
    value: Float[Array, "B S K Hv"],
    mask: AnyMask = None,
    bias: None = None,
    options: AttentionOptions = NO_OPTIONS,
) -> Float[Array, "B T N Hv"]:
    """Return ``scaled_dot_product_attention`` without a bias, [B,T,N,Hv].

    Any mask but the causal one is written out.
    """
    options.check_supported("cudnn", SUPPORTED)
    if bias is not None:
        raise ValueError("attention by 'cudnn' takes no bias: use another implementation")
    if options.dropout_factors is not None:
        key, value = apply_dropout_to_values(key, value, options.dropout_factors)
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

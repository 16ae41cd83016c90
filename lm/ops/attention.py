"""Attention over explicit scores, and through cuDNN."""

from collections.abc import Callable
from functools import partial
from typing import NamedTuple

import jax
import jax.numpy as jnp
from jax import Array

from lm.ops.masks import CAUSAL, AnyMask, Mask
from lm.ops.positions import AnyBias, Bias


class Softmax(NamedTuple):
    """Options of attention: what is done to scores before the softmax, and to attention weights after it.

    A new one is computed by explicit scores first; ``IMPLEMENTED`` says who else knows it.
    """

    scale: float | None = None  # scores are multiplied by it; None: H^-0.5
    keep: Array | None = None  # float32 [B,N,1,S]: weights are multiplied by it, which is dropout

    def scale_of(self, width: int) -> float:
        """What scores of heads of this ``width`` are multiplied by."""
        return width**-0.5 if self.scale is None else self.scale

    def used(self) -> list[str]:
        """The options that are not at their defaults."""
        return [name for name, value in self._asdict().items() if _differs(value, self._field_defaults[name])]


def _differs(value, default):
    return value is not default and (hasattr(value, "shape") or value != default)


PLAIN = Softmax()

# Which options of ``Softmax`` each implementation of attention computes, besides explicit scores, which
# compute all: an option that one lacks would be left out without a word.
IMPLEMENTED: dict[str, tuple[str, ...]] = {
    "cudnn": ("scale", "keep"),
    "flash": ("scale", "keep"),  # lm.ops.flash.kernel
    "rows": ("scale", "keep"),  # lm.ops.flash.rows
}


def lacks(name: str, softmax: Softmax) -> list[str]:
    """The options in use that the implementation of this name does not compute."""
    return [option for option in softmax.used() if option not in IMPLEMENTED.get(name, softmax._fields)]


def check_options(name: str, softmax: Softmax) -> None:
    """ValueError for an option in use that the implementation of this name lacks."""
    if missing := lacks(name, softmax):
        raise ValueError(
            f"attention by {name!r} does not compute {', '.join(missing)}: use dot_product_attention, or "
            f"compute it there and name it in lm.ops.attention.IMPLEMENTED"
        )


def dot_product_attention(
    query: Array,
    key: Array,
    value: Array,
    mask: AnyMask = None,
    bias: AnyBias = None,
    softmax: Softmax = PLAIN,
) -> Array:
    """Compute softmax(Q K^T * scale + bias) V, [B,T,N,H] from query [B,T,N,H], key and value [B,S,K,H].

    The mask is bool [B|1,T|1,S|1] or [B|1,N|1,T|1,S|1], True where a query sees a key, the bias float
    [B|1,N|1,T,S]; the scale is H^-0.5 unless ``softmax`` says another: all as in
    ``jax.nn.dot_product_attention``, but that the mask comes before the bias.
    Query heads n*N/K ... (n+1)*N/K-1 read key head n. Values may have another width, which the result then
    has. Scores and softmax are float32 whatever the inputs are.
    A query that sees nothing gives zeros, and zero gradients. All queries share a dropout mask, so that it
    could as well multiply the values. A mask or a bias that is not laid out is laid out here. The backward
    pass computes the scores again: reading them from memory would take an accelerator longer, and they are
    most of what a step would have to remember.
    """

    def attend(query, key, value, mask, bias, keep):
        return _mean(_exponentials(_products(query, key, bias, scale), mask), value, keep)

    scale = softmax.scale_of(query.shape[-1])
    return jax.checkpoint(attend, prevent_cse=False)(query, key, value, mask, bias, softmax.keep)


def additive_attention(
    query: Array, key: Array, value: Array, vector: Array, mask: AnyMask = None, keep: Array | None = None
) -> Array:
    """[B,T,N,D] from query [B,T,N,H], key [B,S,N,H], value [B,S,N,D] and the vector [N,H] of the scores.

    As ``dot_product_attention``, but for ``additive_scores``; ``keep`` is that of ``Softmax``. The backward
    pass computes [B,T,S,N,H] numbers again, which are most of its memory.
    """

    def attend(query, key, value, vector, mask, keep):
        return _mean(_exponentials(additive_scores(query, key, vector), mask), value, keep)

    return jax.checkpoint(attend, prevent_cse=False)(query, key, value, vector, mask, keep)


def additive_scores(query: Array, key: Array, vector: Array) -> Array:
    """float32 [B,N,T,S]: v * tanh(q + k) of query [B,T,N,H], key [B,S,N,H] and vector v [N,H].

    Query and key are products with matrices of their own, W s and U h in Bahdanau et al. 2015.
    """
    sums = query[:, :, None].astype(jnp.float32) + key[:, None].astype(jnp.float32)
    return jnp.einsum("btsnh,nh->bnts", jnp.tanh(sums), vector.astype(jnp.float32))


def cudnn_attention(
    query: Array, key: Array, value: Array, mask: AnyMask = None, _bias: None = None, softmax: Softmax = PLAIN
) -> Array:
    """As ``dot_product_attention`` without a bias, on a GPU; any mask but the causal one is laid out."""
    check_options("cudnn", softmax)
    key, value = drop_values(key, value, softmax.keep)
    scale = softmax.scale_of(query.shape[-1])
    call = partial(jax.nn.dot_product_attention, query, key, value, scale=scale, implementation="cudnn")
    if mask is None or isinstance(mask, Mask) and mask == CAUSAL:
        return call(is_causal=mask is not None)
    (rows, length, heads, _), slots = query.shape, key.shape[1]
    seen = _seen(mask, (rows, heads, length, slots))
    seen = jnp.broadcast_to(seen, (rows, seen.shape[1], length, slots))
    # cuDNN takes the mean where nothing is seen
    return jnp.where(seen.any(-1).swapaxes(1, 2)[..., None], call(mask=seen), 0)


def drop_values(key: Array, value: Array, keep: Array | None) -> tuple[Array, Array]:
    """Keys and values [B,S,K,H], the latter times ``keep`` [B,N,1,S]; with it both get N heads."""
    if keep is None:
        return key, value
    key, value = (jnp.repeat(x, keep.shape[1] // x.shape[2], axis=2) for x in (key, value))
    return key, (value * jax.lax.stop_gradient(keep)[:, :, 0].swapaxes(1, 2)[..., None]).astype(value.dtype)


def attention_weights(
    query: Array, key: Array, mask: AnyMask = None, bias: AnyBias = None, *, scale: float | None = None
) -> Array:
    """float32 [B,N,T,S], what ``dot_product_attention`` multiplies values by; 0 where nothing is seen."""
    scale = Softmax(scale).scale_of(query.shape[-1])
    return weights_of(_products(query, key, bias, scale), mask)


def weights_of(scores: Array, mask: AnyMask = None) -> Array:
    """float32 [B,N,T,S]: the softmax of scores [B,N,T,S] over what is seen; 0 where nothing is."""
    weights, total = _exponentials(scores, mask)
    return weights / total[..., None]


def bilinear(query: Array, weight: Array) -> Array:
    """[B,T,N,H], whose product with a key is query * weight [N,H,H] * key ("general", Luong et al. 2015)."""
    return jnp.einsum("btnh,nhg->btng", query, weight)


SCORE_SCALES: dict[str, Callable[[int], float]] = {  # what the scores of heads of width H are multiplied by
    "dot": lambda width: 1.0,  # T5
    "scaled-dot": lambda width: width**-0.5,  # Vaswani et al. 2017
    "bilinear": lambda width: width**-0.5,  # of a weight whose columns have length 1, as at the start
}


def _products(query, key, bias, scale):
    """float32 [B,N,T,S]: query times key, scaled, plus the bias."""
    batch, length, heads, _ = query.shape
    query = _join_heads(query * scale if scale != 1.0 else query, key.shape[2])
    scores = jnp.einsum("btkh,bskh->bkts", query, key, preferred_element_type=jnp.float32)
    scores = scores.reshape(batch, heads, length, key.shape[1])
    if bias is None:
        return scores
    bias = bias.dense(length, key.shape[1]) if isinstance(bias, Bias) else bias
    _check_shape("bias", "float [B|1,N|1,T|1,S|1]", bias, scores.shape)
    if bias.dtype == bool:
        raise ValueError("a bias should be numbers that are added to scores, not bool: pass it as the mask")
    return scores + (bias if bias.shape[0] == batch else _for_rows(bias, batch))


def _exponentials(scores, mask):
    """exp(score) float32 [B,N,T,S] over a factor common to a query, and their sums [B,N,T], or 1 for 0."""
    if mask is not None:
        scores = jnp.where(_seen(mask, scores.shape), scores, -jnp.inf)
    highest = jax.lax.stop_gradient(scores.max(-1, keepdims=True))
    weights = jnp.exp(scores - jnp.where(jnp.isfinite(highest), highest, 0.0))
    total = weights.sum(-1)
    return weights, jnp.where(total == 0, 1.0, total)


def _seen(mask, shape):
    """bool [B|1,N|1,T|1,S|1] of a mask with or without an axis of heads, for scores of ``shape`` [B,N,T,S].

    ValueError for one of numbers, whose meaning is unknown: 0 may be what is seen or what is hidden.
    """
    mask = mask.dense(*shape[2:]) if isinstance(mask, Mask) else mask
    if mask.dtype != bool:
        raise ValueError(
            f"a mask should be bool, True where a query sees a key, not {mask.dtype}: compare it with what "
            "hides a key, or pass numbers that are added to scores as the bias"
        )
    seen = mask[:, None] if mask.ndim == 3 else mask
    _check_shape("mask", "bool [B|1,T|1,S|1] or [B|1,N|1,T|1,S|1]", seen, shape, found=mask.shape)
    return seen


def _check_shape(what, expected, array, shape, found=None):
    """ValueError for an array that does not broadcast to scores of ``shape`` [B,N,T,S]."""
    fits = array.ndim == 4 and all(n in (1, size) for n, size in zip(array.shape, shape, strict=True))
    if not fits:
        sizes = ", ".join(f"{axis}={size}" for axis, size in zip("BNTS", shape, strict=True))
        raise ValueError(f"a {what} should be {expected} with {sizes}, not {found or array.shape}")


def _mean(exponentials, value, keep):
    """[B,T,N,H]: values [B,S,K,H] by weights [B,N,T,S], over the weights' sums [B,N,T]."""
    weights, total = exponentials
    (batch, heads, length, slots), (groups, width) = weights.shape, value.shape[2:]
    if keep is not None:
        weights *= keep
    weights = weights.reshape(batch, groups, -1, slots).astype(value.dtype)
    out = jnp.einsum("bkts,bskh->btkh", weights, value, preferred_element_type=jnp.float32)
    # Divided by their sum after the product with the values: H divisions a query instead of S.
    out = _split_heads(out, (batch, length, heads, width)) / total.swapaxes(1, 2)[..., None]
    return out.astype(value.dtype)


def _join_heads(x, groups):
    """[B,N/K*T,K,H] of x [B,T,N,H]: query heads that read one key head are like more queries.

    With an axis more, the products are half as fast on CPU.
    """
    batch, length, heads, width = x.shape
    x = x.reshape(batch, length, groups, heads // groups, width)
    return x.transpose(0, 3, 1, 2, 4).reshape(batch, -1, groups, width)


def _split_heads(x, shape):
    """The inverse of ``_join_heads``: ``shape`` [B,T,N,H] of x [B,N/K*T,K,H]."""
    batch, length, heads, width = shape
    groups = x.shape[2]
    return x.reshape(batch, heads // groups, length, groups, width).transpose(0, 2, 3, 1, 4).reshape(shape)


@partial(jax.custom_vjp, nondiff_argnums=(1,))
def _for_rows(bias: Array, rows: int) -> Array:
    """[B,N,T,S] of bias [1,N,T,S]; its gradient sums rows by a product, on CPU 60 times faster than a sum."""
    return jnp.broadcast_to(bias, (rows, *bias.shape[1:]))


def _for_rows_backward(rows, _, gradient):
    return (jnp.einsum("b,bnts->nts", jnp.ones(rows), gradient, precision="highest")[None],)


_for_rows.defvjp(lambda bias, rows: (_for_rows(bias, rows), None), _for_rows_backward)

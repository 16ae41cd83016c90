"""Attention as formulas: scaled dot-product, multi-head, and additive attention.

``scaled_dot_product_attention`` defines what attention is here. Models run one of its implementations in
``lm.ops.kernels``; a test holds all of them equal to it.
"""

from typing import NamedTuple

import jax
import jax.numpy as jnp
from jax import Array
from jaxtyping import Float, Float32


def scaled_dot_product_attention(
    query: Float[Array, "B T N H"],
    key: Float[Array, "B S K H"],
    value: Float[Array, "B S K Hv"],
    mask: Array | None = None,
    bias: Array | None = None,
    *,
    scale: float | None = None,
    logit_cap: float | None = None,
    dropout_factors: Float[Array, "#B #N #T #S"] | None = None,
) -> Float[Array, "B T N Hv"]:
    """Return softmax(Q K^T / sqrt(H) + bias) V (Vaswani et al. 2017, equation 1).

    query [B,T,N,H], key [B,S,K,H] and value [B,S,K,Hv] with N % K == 0; mask bool, True where a query attends
    to a key, and bias float, both [B|1,N|1,T|1,S|1]; dropout_factors float32 [B|1,N|1,T|1,S|1] ->
    [B,T,N,Hv]. The default scale is that of ``jax.nn.dot_product_attention``, whose argument order differs:
    the bias comes before the mask.

    With K < N this is grouped-query attention (Ainslie et al. 2023), with K = 1 multi-query (Shazeer 2019).
    A query that may attend to nothing gives zeros. Logits and softmax are float32 whatever the inputs are.
    """
    weights = attention_weights(query, key, mask, bias, scale=scale, logit_cap=logit_cap)
    if dropout_factors is not None:
        weights = weights * dropout_factors
    value = repeat_heads(value, query.shape[2])
    return jnp.einsum("bnts,bsnh->btnh", weights.astype(value.dtype), value)


def multi_head_attention(
    x: Float[Array, "B T D"],
    memory: Float[Array, "B S D"],
    wq: Float[Array, "D N H"],
    wk: Float[Array, "D K H"],
    wv: Float[Array, "D K H"],
    wo: Float[Array, "N H D"],
    mask: Array | None = None,
    bias: Array | None = None,
    *,
    scale: float | None = None,
) -> Float[Array, "B T D"]:
    """Return N heads of attention from x [B,T,D] to memory [B,S,D], concatenated and projected: [B,T,D].

    wq [D,N,H], wk and wv [D,K,H], wo [N,H,D]; ``memory`` is x in self-attention. Other arguments as above
    (Vaswani et al. 2017, section 3.2.2).
    """
    query = jnp.einsum("btd,dnh->btnh", x, wq)
    key = jnp.einsum("bsd,dkh->bskh", memory, wk)
    value = jnp.einsum("bsd,dkh->bskh", memory, wv)
    head_outputs = scaled_dot_product_attention(query, key, value, mask, bias, scale=scale)
    return jnp.einsum("btnh,nhd->btd", head_outputs, wo)


def attention_weights(
    query: Float[Array, "B T N H"],
    key: Float[Array, "B S K H"],
    mask: Array | None = None,
    bias: Array | None = None,
    *,
    scale: float | None = None,
    logit_cap: float | None = None,
) -> Float32[Array, "B N T S"]:
    """Return the weights softmax(Q K^T / sqrt(H) + bias), float32 [B,N,T,S]; arguments are as above."""
    batch, length, num_heads, width = query.shape
    check_mask_and_bias(mask, bias, (batch, num_heads, length, key.shape[1]))
    scale = width**-0.5 if scale is None else scale
    key = repeat_heads(key, num_heads)
    products = jnp.einsum("btnh,bsnh->bnts", query, key, preferred_element_type=jnp.float32)
    logits = attention_logits(products, bias, scale=scale, logit_cap=logit_cap)
    return jax.nn.softmax(logits, axis=-1, where=mask)  # zeros where all is masked


def attend_by_logits(
    logits: Float[Array, "#B N T S"],
    value: Float[Array, "B S K H"],
    mask: Array | None = None,
    *,
    dropout_factors: Float[Array, "#B #N #T #S"] | None = None,
) -> Float[Array, "B T N H"]:
    """Return softmax(logits) V, [B,T,N,H]: the end of attention, for logits however they were computed."""
    check_mask_and_bias(mask, None, (len(value), *logits.shape[1:]))
    weights = jax.nn.softmax(logits, axis=-1, where=mask)
    if dropout_factors is not None:
        weights = weights * dropout_factors
    value = repeat_heads(value, logits.shape[1])
    weights = jnp.broadcast_to(weights, (len(value), *weights.shape[1:])).astype(value.dtype)
    return jnp.einsum("bnts,bsnh->btnh", weights, value)


def attention_logits(
    products: Array, bias: Array | None = None, *, scale: float = 1.0, logit_cap: float | None = None
) -> Array:
    """Return the logits of attention, of any shape: products of queries and keys scaled, capped and biased.

    Every implementation calls this, a Pallas kernel for each tile, so that none can leave an option out.
    """
    logits = soft_cap(products if scale == 1.0 else products * scale, logit_cap)
    return logits if bias is None else logits + bias


def soft_cap(logits: Array, cap: float | None) -> Array:
    """Return cap * tanh(logits / cap), which stays within ±cap (Gemma Team 2024); None: the logits."""
    return logits if cap is None else cap * jnp.tanh(logits / cap)


class AttentionOptions(NamedTuple):
    """The options of attention, apart from mask and bias. Each implementation declares those it supports."""

    scale: float | None = None  # products are multiplied by it; None: 1 / sqrt(H)
    logit_cap: float | None = None  # logits c become cap * tanh(c / cap) (Gemma 2, Gemma Team 2024)
    dropout_factors: Array | None = None  # float32 [B,N,1,S], 0 or 1 / (1 - rate): weights times these

    @property
    def in_use(self) -> frozenset[str]:
        """Return the names of the options that are set."""
        return frozenset(name for name, value in self._asdict().items() if value is not None)

    def check_supported(self, implementation: str, supported: frozenset[str]) -> None:
        """Raise ValueError if an option in use is not among those that an implementation supports."""
        if missing := self.in_use - supported:
            names = ", ".join(sorted(missing))
            raise ValueError(
                f"attention by {implementation!r} does not implement {names}: use another "
                "implementation, or add the option to this one and to its SUPPORTED"
            )


NO_OPTIONS = AttentionOptions()


def repeat_heads(x: Float[Array, "B S K H"], num_heads: int) -> Float[Array, "B S {num_heads} H"]:
    """Return keys or values [B,S,K,H] as [B,S,N,H]: each head N/K times, for the queries that share it."""
    return x if x.shape[2] == num_heads else jnp.repeat(x, num_heads // x.shape[2], axis=2)


def apply_dropout_to_values(
    key: Float[Array, "B S K H"], value: Float[Array, "B S K Hv"], dropout_factors: Float[Array, "B N 1 S"]
) -> tuple[Float[Array, "B S N H"], Float[Array, "B S N Hv"]]:
    """Return keys and values [B,S,N,H], the values times ``dropout_factors`` [B,N,1,S].

    Fused kernels do not expose the weights. If all queries of a row share a dropout mask, multiplying the
    values by it gives the same result. No gradient flows to the factors.
    """
    key, value = (repeat_heads(x, dropout_factors.shape[1]) for x in (key, value))
    factor = jax.lax.stop_gradient(dropout_factors)[:, :, 0].swapaxes(1, 2)[..., None]
    return key, (value * factor).astype(value.dtype)


def check_mask_and_bias(mask: Array | None, bias: Array | None, shape: tuple[int, ...]) -> None:
    """Raise ValueError unless a mask is bool and a bias float, and both broadcast to ``shape`` [B,N,T,S]."""
    if mask is not None and mask.dtype != jnp.bool_:
        raise ValueError(
            f"a mask should be bool, True where a query attends to a key, not {mask.dtype}: pass an additive "
            "mask as the bias, or compare it with 0"
        )
    if bias is not None and not jnp.issubdtype(bias.dtype, jnp.floating):
        raise ValueError(f"a bias should be float, not {bias.dtype}: pass a mask as the mask")
    for name, array in (("mask", mask), ("bias", bias)):
        if array is None:
            continue
        if array.ndim != 4 or any(
            size not in (1, full) for size, full in zip(array.shape, shape, strict=True)
        ):
            sizes = ", ".join(f"{axis}={size}" for axis, size in zip("BNTS", shape, strict=True))
            raise ValueError(f"a {name} should be [B|1,N|1,T|1,S|1] with {sizes}, not {array.shape}")


def additive_attention(
    query: Float[Array, "B T N H"],
    key: Float[Array, "B S N H"],
    value: Float[Array, "B S N D"],
    vector: Float[Array, "N H"],
    mask: Array | None = None,
    *,
    dropout_factors: Float[Array, "#B #N #T #S"] | None = None,
) -> Float[Array, "B T N D"]:
    """Return [B,T,N,D]: attention by additive scores (Bahdanau et al. 2015).

    query [B,T,N,H], key [B,S,N,H], value [B,S,N,D], vector [N,H], mask bool [B|1,N|1,T|1,S|1].
    The sums [B,T,S,N,H] would take most of the memory, so the backward pass computes them again.
    """

    def attend(query, key, value, vector, mask, dropout_factors):
        scores = additive_scores(query, key, vector)
        return attend_by_logits(scores, value, mask, dropout_factors=dropout_factors)

    return jax.checkpoint(attend, prevent_cse=False)(query, key, value, vector, mask, dropout_factors)


def additive_scores(
    query: Float[Array, "B T N H"], key: Float[Array, "B S N H"], vector: Float[Array, "N H"]
) -> Float32[Array, "B N T S"]:
    """Return v . tanh(q + k), float32 [B,N,T,S], of query [B,T,N,H], key [B,S,N,H] and vector v [N,H].

    Query and key are already projected: they are W s and U h in Bahdanau et al. 2015.
    """
    sums = query[:, :, None].astype(jnp.float32) + key[:, None].astype(jnp.float32)
    return jnp.einsum("btsnh,nh->bnts", jnp.tanh(sums), vector.astype(jnp.float32))


def bilinear_query(query: Float[Array, "B T N H"], weight: Float[Array, "N H H"]) -> Float[Array, "B T N H"]:
    """Return q W, [B,T,N,H] of query [B,T,N,H] and weight [N,H,H].

    Its product with a key is q W k, the score "general" of Luong et al. 2015.
    """
    return jnp.einsum("btnh,nhg->btng", query, weight)

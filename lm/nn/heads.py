"""Heads: layers that predict something else than the next token from hidden states x [B,T,D].

Sources: Devlin et al. 2019 (masked LM, next sentence, classes, tokens, spans), Lan et al. 2020 (sentence
order), Clark et al. 2020 (replaced tokens), Radford et al. 2018 (the last token), Peters et al. 2018 (a
mixture of layers).
"""

from collections.abc import Callable

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx
from jax import Array
from jaxtyping import Bool, Float, Float32, Int

from lm.config.model import HeadConfig, ModelConfig
from lm.nn.dropout import dropout
from lm.nn.layers import ACTIVATIONS, Identity, Linear, Module, make_norm, param

PAIR_CLASSES = 2  # the second sentence follows, or it does not (next-sentence); right order, or swapped


class MLMTransform(Module):
    """Dense layer, activation and norm, [B,T,D] to [B,T,d_embed], before the output matrix of a masked LM."""

    def __init__(self, config: ModelConfig, rngs: nnx.Rngs):
        self.config = config
        shape, std = (config.d_model, config.embed_width), config.d_model**-0.5
        self.dense = Linear(rngs, shape, ("embed", "kv"), std=std, use_bias=config.bias)
        self.norm = make_norm(config.norm, config.embed_width)

    def __call__(self, x: Float[Array, "B T D"]) -> Float[Array, "B T d_embed"]:
        return self.norm(ACTIVATIONS[self.config.mlp.activation](self.dense(x)))


class ReplacedTokenHead(Module):
    """Replaced-token detection: the logit float32 [B,T] that a token is a generator's and not the text's."""

    def __init__(self, config: ModelConfig, rngs: nnx.Rngs):
        self.config = config
        width, std, use_bias = config.d_model, config.d_model**-0.5, config.bias
        self.dense = Linear(rngs, (width, width), ("embed", "kv"), std=std, use_bias=use_bias)
        self.out = Linear(rngs, (width, 1), ("embed", "classes"), std=std, use_bias=use_bias)

    def __call__(self, x: Float[Array, "B T D"]) -> Float32[Array, "B T"]:
        return self.out(ACTIVATIONS[self.config.mlp.activation](self.dense(x)))[..., 0].astype(jnp.float32)


def _take_position(x: Array, position: Array) -> Array:
    return jnp.take_along_axis(x, position[:, None, None], axis=1)[:, 0]


def pool_first(x: Float[Array, "B T D"], is_token: Bool[Array | np.ndarray, "B T"]) -> Float[Array, "B D"]:
    """Return [B,D]: the first position of x [B,T,D] where ``is_token`` bool [B,T]."""
    return _take_position(x, is_token.argmax(-1))


def pool_last(x: Float[Array, "B T D"], is_token: Bool[Array | np.ndarray, "B T"]) -> Float[Array, "B D"]:
    """Return [B,D]: the last position of x [B,T,D] where ``is_token`` bool [B,T]."""
    return _take_position(x, jnp.where(is_token, jnp.arange(x.shape[1])[None, :], 0).max(-1))


def pool_mean(x: Float[Array, "B T D"], is_token: Bool[Array | np.ndarray, "B T"]) -> Float[Array, "B D"]:
    """Return [B,D]: the mean of x [B,T,D] where ``is_token`` bool [B,T]; 0 for a row of padding."""
    weights = is_token / jnp.maximum(is_token.sum(-1, keepdims=True), 1)
    return jnp.einsum("bt,btd->bd", weights, x.astype(jnp.float32)).astype(x.dtype)


def pool_max(x: Float[Array, "B T D"], is_token: Bool[Array | np.ndarray, "B T"]) -> Float[Array, "B D"]:
    """Return [B,D]: the maximum of x [B,T,D] where ``is_token`` bool [B,T]; 0 for a row of padding."""
    maximum = jnp.where(is_token[:, :, None], x, jnp.finfo(x.dtype).min).max(1)
    return jnp.where(is_token.any(-1, keepdims=True), maximum, 0)


# By ``HeadConfig.dense``, which may also be "none".
HEAD_ACTIVATIONS: dict[str, Callable[[Array], Array]] = {
    "tanh": jnp.tanh,
    "relu": ACTIVATIONS["relu"],
    "gelu": ACTIVATIONS["gelu"],
}

# By ``HeadConfig.pool``. In a packed row, ``is_token`` may be True for the tokens of one of its texts only.
POOLINGS: dict[str, Callable[[Array, Array | np.ndarray], Array]] = {
    "first": pool_first,
    "last": pool_last,
    "mean": pool_mean,
    "max": pool_max,
}


class LayerMixture(Module):
    """A weighted mean of all layers [layers+1,B,T,D], with learned weights and a learned size (ELMo)."""

    def __init__(self, num_layers: int):
        self.weights = param(jnp.zeros(num_layers + 1, jnp.float32), "classes")
        self.size = param(jnp.ones(1, jnp.float32), "classes")

    @property
    def layer_weights(self) -> Array:
        """Return the weight of each layer, float32 [layers+1], which sum to 1."""
        return jax.nn.softmax(self.weights[...])

    def __call__(self, hidden: Float[Array, "layers B T D"]) -> Float[Array, "B T D"]:
        """Return [B,T,D] of all hidden states [layers+1,B,T,D]."""
        weights = self.size[...] * self.layer_weights
        return jnp.einsum("l,lbtd->btd", weights, hidden.astype(jnp.float32)).astype(hidden.dtype)


class Head(Module):
    """A linear layer on a text's pooled state [B,D] or on the states of all positions [B,T,D]; gives float32.

    With ``HeadConfig.dense`` a dense layer of the same width and its activation come before it. Pooled:
    classes [B,classes], regression [B], choice [B,C]. Of all positions: tokens [B,T,classes], span [B,2,T],
    the logits of where it starts and where it ends.
    """

    def __init__(self, config: ModelConfig, head: HeadConfig, rngs: nnx.Rngs):
        self.config, self.head = config, head
        outputs = {"span": 2, "regression": 1, "choice": 1}.get(head.kind, head.classes)
        width = config.feature_width
        axes, std = ("embed", "classes"), width**-0.5
        self.out = Linear(rngs, (width, outputs), axes, std=std, use_bias=config.bias)
        self.dense: Linear | Identity = Identity()
        if head.dense != "none":
            self.dense = Linear(rngs, (width, width), ("embed", "kv"), std=std, use_bias=config.bias)

    def __call__(
        self, x: Float[Array, "B *T D"], segments: Int[Array | np.ndarray, "B _"], key: Array | None
    ) -> Float32[Array, "B ..."]:
        """Return outputs of pooled states [B,D], or of states [B,T,D] with segments [B,T].

        A key switches dropout on.
        """
        if self.head.dense != "none":
            x = self._drop_out(x, None if key is None else jax.random.fold_in(key, 1))
            x = HEAD_ACTIVATIONS[self.head.dense](self.dense(x))
        logits = self.out(self._drop_out(x, key)).astype(jnp.float32)
        if self.head.kind == "span":  # padding neither starts nor ends an answer
            is_token = (segments > 0)[:, None, :]
            return jnp.where(is_token, logits.swapaxes(1, 2), jnp.finfo(jnp.float32).min)
        if self.head.kind in ("regression", "choice"):
            return logits[..., 0]
        return logits

    def _drop_out(self, x: Array, key: Array | None) -> Array:
        """Return ``x`` with dropout, or as it is without a key."""
        if key is None or not self.config.dropout:
            return x
        mask = jax.random.bernoulli(key, 1 - self.config.dropout, x.shape)
        return dropout(x, mask, self.config.dropout)

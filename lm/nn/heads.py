"""What is predicted from hidden states x [B,T,D] besides the next token: in pre-training and fine-tuning.

Sources: Devlin et al. 2019 (masked LM, next sentence, classes, tokens, spans), Lan et al. 2020 (sentence
order), Clark et al. 2020 (replaced tokens), Radford et al. 2018 (the last token), Peters et al. 2018 (a
mixture of layers).
"""

from collections.abc import Callable

import jax
import jax.numpy as jnp
from flax import nnx
from jax import Array

from lm.nn.config import HeadConfig, ModelConfig
from lm.nn.layers import ACTIVATIONS, Linear, Norm, dropout, param

PAIR_CLASSES = 2  # the second sentence follows, or it does not (next-sentence); right order, or swapped


class Transform(nnx.Module):
    """[B,T,d_embed]: dense layer, activation and norm before the output matrix of a masked LM."""

    def __init__(self, config: ModelConfig, rngs: nnx.Rngs):
        self.config = config
        shape = (config.d_model, config.embed_width)
        self.dense = Linear(config, rngs, shape, ("embed", "kv"), config.d_model**-0.5)
        self.norm = Norm(config, config.embed_width)

    def __call__(self, x: Array) -> Array:
        return self.norm(ACTIVATIONS[self.config.mlp](self.dense(x)))


class Replaced(nnx.Module):
    """float32 [B,T]: the logit of each token's being a generator's and not the text's."""

    def __init__(self, config: ModelConfig, rngs: nnx.Rngs):
        self.config = config
        width, std = config.d_model, config.d_model**-0.5
        self.dense = Linear(config, rngs, (width, width), ("embed", "kv"), std)
        self.out = Linear(config, rngs, (width, 1), ("embed", "classes"), std)

    def __call__(self, x: Array) -> Array:
        return self.out(ACTIVATIONS[self.config.mlp](self.dense(x)))[..., 0].astype(jnp.float32)


def _at(x: Array, position: Array) -> Array:
    return jnp.take_along_axis(x, position[:, None, None], axis=1)[:, 0]


def _first(x: Array, text: Array) -> Array:
    return _at(x, text.argmax(-1))


def _last(x: Array, text: Array) -> Array:
    return _at(x, jnp.where(text, jnp.arange(x.shape[1])[None, :], 0).max(-1))


def _mean(x: Array, text: Array) -> Array:
    shares = text / jnp.maximum(text.sum(-1, keepdims=True), 1)
    return jnp.einsum("bt,btd->bd", shares, x.astype(jnp.float32)).astype(x.dtype)


def _max(x: Array, text: Array) -> Array:
    greatest = jnp.where(text[:, :, None], x, jnp.finfo(x.dtype).min).max(1)
    return jnp.where(text.any(-1, keepdims=True), greatest, 0)  # a row of padding says nothing


# By HeadConfig.pool: x [B,T,D] -> [B,D] of the positions where ``text`` bool [B,T] is True: those that are no
# padding or, of a packed row, those of one of its texts.
POOL: dict[str, Callable[[Array, Array], Array]] = {
    "first": _first,
    "last": _last,
    "mean": _mean,
    "max": _max,
}


class LayerMixture(nnx.Module):
    """[B,T,D]: a mean of all layers [layers+1,B,T,D], whose weights and size are learned."""

    def __init__(self, num_layers: int):
        self.weights = param(jnp.zeros(num_layers + 1, jnp.float32), "classes")
        self.size = param(jnp.ones(1, jnp.float32), "classes")

    @property
    def shares(self) -> Array:
        """float32 [layers+1]: how much of the mean each layer is; their sum is 1."""
        return jax.nn.softmax(self.weights[...])

    def __call__(self, hidden: Array) -> Array:
        weights = self.size[...] * self.shares
        return jnp.einsum("l,lbtd->btd", weights, hidden.astype(jnp.float32)).astype(hidden.dtype)


class Head(nnx.Module):
    """A linear layer on a text's pooled state [B,D] or on the states of all positions [B,T,D]; gives float32.

    Pooled: classes [B,classes], regression [B], choice [B,C]; of all positions: tokens [B,T,classes], span
    [B,2,T], the logits of where it starts and where it ends.
    """

    def __init__(self, config: ModelConfig, head: HeadConfig, rngs: nnx.Rngs):
        self.config, self.head = config, head
        outputs = {"span": 2, "regression": 1, "choice": 1}.get(head.kind, head.classes)
        width = config.feature_width
        self.out = Linear(config, rngs, (width, outputs), ("embed", "classes"), width**-0.5)

    def __call__(self, x: Array, segments: Array, key: Array | None) -> Array:
        """From pooled states [B,D], or from states [B,T,D] with segments [B,T]; a key switches dropout on."""
        if key is not None and self.config.dropout:
            keep = jax.random.bernoulli(key, 1 - self.config.dropout, x.shape)
            x = dropout(x, keep, self.config.dropout)
        logits = self.out(x).astype(jnp.float32)
        if self.head.kind == "span":  # padding neither starts nor ends an answer
            return jnp.where((segments > 0)[:, None, :], logits.swapaxes(1, 2), jnp.finfo(jnp.float32).min)
        return logits[..., 0] if self.head.kind in ("regression", "choice") else logits

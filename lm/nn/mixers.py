"""Mixers: the layers by which the positions of a row exchange information, such as attention."""

from collections.abc import Callable
from dataclasses import replace
from typing import Protocol

import jax.numpy as jnp
from flax import nnx
from jax import Array

from lm.nn.cache import Carry, KeyValue, Slots
from lm.nn.config import MIXERS, ModelConfig
from lm.nn.kernels import attend
from lm.nn.layers import Keep, Keyed, Linear, Norm, normal, param, scaled
from lm.nn.recurrent import Recurrent
from lm.nn.view import View
from lm.ops.attention import (
    SCORE_SCALES,
    Softmax,
    additive_attention,
    additive_scores,
    attention_weights,
    bilinear,
    dot_product_attention,
    weights_of,
)
from lm.ops.positions import rotate
from lm.settings import SettingError
from lm.sharding import constrain


class Mixer(Protocol):
    """What a block needs of such a layer: a state space model would be one too.

    A class with ``has_scores`` True takes what changes scores: biases by distance, rotary positions, windows,
    prefixes and low-rank updates. Its arithmetic is counted as attention's.
    """

    def __call__(self, x: Array, view: View, carry: Carry | None, keep: Keep, /) -> tuple[Array, Carry]:
        """[B,T,D] from x [B,T,D], and the carry for the tokens that follow; None if ``carry`` is None."""

    def empty(self, rows: int, slots: int, /) -> Carry:
        """The carry of ``rows`` [B] before the first token, of up to ``slots``; leaves [B,...].

        Beams repeat and reorder the rows of all leaves without knowing what they are.
        """

    def dropped(self, length: int, /) -> dict[str, tuple[int, ...]]:
        """Shapes of the dropout masks of a row of ``length``, by names that are unique within a block."""


class Projections(Keyed):
    """Queries, keys and values of multi-head, grouped-query and multi-query attention."""

    def __init__(self, config: ModelConfig, rngs: nnx.Rngs):
        self.config = config
        d_model, heads = config.d_model, config.num_heads * config.d_kv
        groups = config.key_value_heads
        biased = replace(config, bias=config.qkv_has_bias)
        # Kernels of std D^-0.5 give queries of size 1. T5 scales these by H^-0.5 instead of the scores.
        std = (d_model * config.d_kv) ** -0.5 if config.scores == "dot" else d_model**-0.5
        self.query = Linear(biased, rngs, (d_model, heads), ("embed", "heads"), std)
        axes, std = ("embed", self._key_axis), d_model**-0.5
        self.key = Linear(biased, rngs, (d_model, groups * config.d_kv), axes, std)
        self.value = Linear(biased, rngs, (d_model, groups * config.value_width), axes, std)
        self.query_norm = Norm(config, config.d_kv) if config.qk_norm else None
        self.key_norm = Norm(config, config.d_kv) if config.qk_norm else None

    def queries(self, x: Array, positions: Array | None) -> Array:
        """[B,T,N,H] of x [B,T,D]."""
        query = self._heads(self.query(x), "length", "heads")
        return self._turn(query if self.query_norm is None else self.query_norm(query), positions)

    def key_value(self, x: Array, positions: Array | None) -> KeyValue:
        """Keys and values [B,S,K,H] of x [B,S,D]; None ``positions`` in cross-attention."""
        key, value = (self._heads(layer(x), "key_length", self._key_axis) for layer in (self.key, self.value))
        return KeyValue(self._turn(key if self.key_norm is None else self.key_norm(key), positions), value)

    @property
    def _key_axis(self) -> str:
        # Axes by which a kernel is split over devices: K heads may not divide by as many devices as N do.
        return "heads" if self.config.num_key_value_heads is None else "kv_heads"

    def _heads(self, x: Array, length: str, axis: str) -> Array:
        heads = self.config.num_heads if axis == "heads" else self.config.key_value_heads
        return constrain(x.reshape(*x.shape[:-1], heads, -1), "batch", length, axis, "kv")

    def _turn(self, x: Array, positions: Array | None) -> Array:
        if self.config.positions != "rotary" or positions is None:
            return x
        rotary = self.config.rotary
        return rotate(x, positions, *rotary.frequencies(self.config.d_kv), rotary.layout)


class Attention(Projections):
    """Multi-head attention of a sequence to itself, a ``Mixer``; or of a decoder to the encoder's output.

    Which positions are seen is up to the mask, whether the stack reads ahead or not.
    """

    has_scores = True

    def __init__(
        self, config: ModelConfig, rngs: nnx.Rngs, _both_ways: bool = False, *, crosses: bool = False
    ):
        super().__init__(config, rngs)
        heads, width = config.num_heads, config.d_kv
        inner = heads * config.value_width
        self.out = Linear(config, rngs, (inner, config.d_model), ("heads", "embed"), inner**-0.5)
        if crosses and config.cross_attention_start == "mimetic":
            self._start_queries_as_keys()
        weight = normal(rngs, (heads, width, width), width**-0.5) if config.scores == "bilinear" else None
        self.bilinear = None if weight is None else param(weight, "bias_heads", "kv", "kv")
        separate = config.sparsity.projections == "separate" and not crosses
        self.globals = Projections(config, rngs) if separate else None

    def __call__(self, x: Array, view: View, carry: Slots | None, keep: Keep) -> tuple[Array, Slots | None]:
        """[B,T,D] of x [B,T,D], which sees itself or, with a carry, also the positions before it."""
        seen = self.key_value(x, view.positions)
        if carry is not None:  # decoding: the cache then holds all that x sees, x included
            carry = carry.write(seen, view.slot)
            seen = carry.seen()
        return self.read(x, seen, view, keep.get("attention")), carry

    def empty(self, rows: int, slots: int) -> Slots:
        """Zeros [B,K,S,H]; masks hide every slot that has not been written."""
        config, shape = self.config, (rows, self.config.key_value_heads, slots)
        return Slots(*(jnp.zeros((*shape, w), config.dtype) for w in (config.d_kv, config.value_width)))

    def dropped(self, length: int) -> dict[str, tuple[int, ...]]:
        """One mask [N,1,S] of a row's attention weights, shared by all its queries, as in T5."""
        return {"attention": (self.heads, 1, length)}

    @property
    def heads(self) -> int:
        """N."""
        return self.config.num_heads

    def read(self, x: Array, seen: KeyValue, view: View, keep: Array | None) -> Array:
        """[B,T,D] from x [B,T,D] and the keys and values that it sees; ``keep`` bool [B,N,1,S]."""
        query = self._query(self, x, view)
        keep = None if keep is None else scaled(keep, self.config.dropout)
        # Global positions (Longformer) see everything, by projections of their own. Both are computed for all
        # positions, and one result is chosen for each: shapes stay static.
        out = attend(self.config, query, seen, view.mask, view.bias, keep)
        if self._has_globals(view):
            query, seen = self._query(self.globals, x, view), self.globals.key_value(x, view.positions)
            everywhere = attend(self.config, query, seen, view.everything, view.bias, keep)
            out = jnp.where(view.everywhere[:, :, None, None], everywhere, out)
        return self.out(out.reshape(*x.shape[:-1], -1))

    def weights(self, x: Array, seen: KeyValue, view: View) -> Array:
        """float32 [B,N,T,S]: how much each head of x [B,T,D] takes from what it sees."""
        scale = SCORE_SCALES[self.config.scores](self.config.d_kv)
        query = self._query(self, x, view)
        local = attention_weights(query, seen.key, view.mask, view.bias, scale=scale)
        if not self._has_globals(view):
            return local
        query, seen = self._query(self.globals, x, view), self.globals.key_value(x, view.positions)
        everywhere = attention_weights(query, seen.key, view.everything, view.bias, scale=scale)
        return jnp.where(view.everywhere[:, None, :, None], everywhere, local)

    def _start_queries_as_keys(self) -> None:
        """Each head's query kernel [D,H] is its key kernel, in the size that a query kernel starts with.

        Their product, one times the other transposed, is then about the unit matrix: the score of two equal
        features is H^0.5 of the standard deviations that scores of unequal ones have.
        """
        config = self.config
        by_head = self.key.kernel[...].reshape(config.d_model, config.key_value_heads, config.d_kv)
        kernel = jnp.repeat(by_head, config.num_heads // config.key_value_heads, axis=1)
        size = config.d_kv**-0.5 if config.scores == "dot" else 1.0
        self.query.kernel = param(size * kernel.reshape(config.d_model, -1), "embed", "heads")

    def _has_globals(self, view: View) -> bool:
        """Whether there are global positions with projections of their own."""
        return self.globals is not None and view.everywhere is not None

    def _query(self, projections: Projections, x: Array, view: View) -> Array:
        query = projections.queries(x, view.positions)
        return query if self.bilinear is None else bilinear(query, self.bilinear[...].astype(x.dtype))


class StateAttention(Keyed):
    """Attention of a decoder to the encoder's states h_j [D] as they are, by one head.

    A query s [D] scores s * h_j ("dot") or s * W h_j ("multiplicative", "general" in Luong et al. 2015), or
    v * tanh(W s + U h_j) ("additive", Bahdanau et al. 2015). The mean of the states, not of projections of
    them, is what is read. Norms make states D^0.5 long, so that products are scaled by D^-0.5.
    """

    heads = 1

    def __init__(self, config: ModelConfig, rngs: nnx.Rngs):
        self.config, width = config, config.d_model
        square = (config, rngs, (width, width), ("embed", "kv"), width**-0.5)
        adds = config.cross_attention == "additive"
        self.query = Linear(*square) if adds else None
        self.key = None if config.cross_attention == "dot" else Linear(*square)
        self.vector = param(normal(rngs, (1, width), width**-0.5), "bias_heads", "kv") if adds else None
        self.out = Linear(config, rngs, (width, width), ("kv", "embed"), width**-0.5)

    def key_value(self, x: Array, _positions: None) -> KeyValue:
        """Keys and values [B,S,1,D] of the encoder's states x [B,S,D]: what scores need of them, and they."""
        x = constrain(x, "batch", "key_length", "embed")
        key = x if self.key is None else self.key(x)
        return KeyValue(key[:, :, None], x[:, :, None])

    def read(self, x: Array, seen: KeyValue, view: View, keep: Array | None) -> Array:
        """[B,T,D] from x [B,T,D] and the keys and values that it sees; ``keep`` bool [B,1,1,S]."""
        keep = None if keep is None else scaled(keep, self.config.dropout)
        if self.vector is None:
            softmax = Softmax(self._scale, keep)
            out = dot_product_attention(self._query(x), *seen, view.mask, None, softmax)
        else:
            out = additive_attention(self._query(x), *seen, self.vector[...], view.mask, keep)
        return self.out(out[:, :, 0])

    def weights(self, x: Array, seen: KeyValue, view: View) -> Array:
        """float32 [B,1,T,S]: how much x [B,T,D] takes from what it sees, the alignment."""
        if self.vector is None:
            return attention_weights(self._query(x), seen.key, view.mask, scale=self._scale)
        return weights_of(additive_scores(self._query(x), seen.key, self.vector[...]), view.mask)

    @property
    def _scale(self) -> float:
        return SCORE_SCALES["scaled-dot"](self.config.d_model)

    def _query(self, x: Array) -> Array:
        """[B,T,1,D] of x [B,T,D]."""
        x = constrain(x if self.query is None else self.query(x), "batch", "length", "embed")
        return x[:, :, None]


class LastTokens(Keyed):
    """tanh(W [x_(t-n+1); ...; x_t] + b): a ``Mixer`` of the last n = ``mixer_window`` tokens.

    With it and no feed-forward layer after it a model is that of Bengio et al. 2003, whose window counts the
    target too. Each place of the window has its own rows of W. An encoder's window reaches as far ahead, so
    that it has 2n-1 places. Places outside of a position's segment are 0.
    """

    def __init__(self, config: ModelConfig, rngs: nnx.Rngs, both_ways: bool):
        self.config = config
        self.ahead = config.mixer_window - 1 if both_ways else 0
        inner, width = (self._back + 1 + self.ahead) * config.d_model, config.state_width
        self.hidden = Linear(replace(config, bias=True), rngs, (inner, width), ("embed", "mlp"), inner**-0.5)
        shape = (width, config.d_model)
        plain = width == config.d_model
        self.out = None if plain else Linear(config, rngs, shape, ("mlp", "embed"), width**-0.5)

    def __call__(self, x: Array, view: View, carry: Array | None, _keep: Keep) -> tuple[Array, Array | None]:
        """[B,T,D] of x [B,T,D], and the last n-1 inputs [B,n-1,D] up to its last token."""
        length, before = x.shape[1], self.empty(len(x), 0) if carry is None else carry
        x = constrain(x, "batch", "key_length", "embed")
        seen = jnp.pad(jnp.concatenate([before, x], axis=1), ((0, 0), (0, self.ahead), (0, 0)))
        places = [seen[:, place : place + length] for place in range(self._back + 1 + self.ahead)]
        if view.segments is not None:
            ids = jnp.pad(view.segments, ((0, 0), (self._back, 0)), mode="edge")  # what is carried is ours
            ids = jnp.pad(ids, ((0, 0), (0, self.ahead)))
            same = [ids[:, place : place + length] == view.segments for place in range(len(places))]
            places = [jnp.where(mask[:, :, None], each, 0) for mask, each in zip(same, places, strict=True)]
        hidden = jnp.tanh(self.hidden(jnp.concatenate(places, axis=-1)))
        hidden = hidden if self.out is None else self.out(hidden)
        return hidden, None if carry is None else self._after(seen, view, length)

    def empty(self, rows: int, _slots: int) -> Array:
        """Zeros [B,n-1,D]."""
        return jnp.zeros((rows, self._back, self.config.d_model), self.config.dtype)

    def dropped(self, _length: int) -> dict[str, tuple[int, ...]]:
        """No masks: the block drops out what the mixer gives."""
        return {}

    @property
    def _back(self) -> int:
        return self.config.mixer_window - 1

    def _after(self, seen: Array, view: View, length: int) -> Array:
        """The last inputs [B,n-1,D] of ``seen`` [B,n-1+T,D], of rows whose padding follows their tokens."""
        if view.segments is None:
            return seen[:, length:]
        place = (view.segments > 0).sum(1)[:, None] + jnp.arange(self._back)[None, :]
        return jnp.take_along_axis(seen, place[:, :, None], axis=1)


class Nothing(Keyed):
    """A ``Mixer`` that mixes nothing: each position keeps to itself."""

    def __call__(self, x: Array, _view: View, carry: Carry | None, _keep: Keep) -> tuple[Array, Carry]:
        """Zeros [B,T,D] to add to x [B,T,D]."""
        return jnp.zeros_like(x), carry

    def empty(self, _rows: int, _slots: int) -> Carry:
        """Nothing is remembered."""
        return ()

    def dropped(self, _length: int) -> dict[str, tuple[int, ...]]:
        """No masks."""
        return {}


# By model.cross_attention; of the settings and random keys.
CROSS_ATTENTION: dict[str, Callable[[ModelConfig, nnx.Rngs], Attention | StateAttention | None]] = {
    "heads": lambda config, rngs: Attention(config, rngs, crosses=True),
    "dot": StateAttention,
    "multiplicative": StateAttention,
    "additive": StateAttention,
    "none": lambda config, rngs: None,
}

# By model.mixer; of the settings, random keys, and whether the stack reads both ways.
MIXERS |= {
    "attention": Attention,
    "rnn": Recurrent,
    "gru": Recurrent,
    "lstm": Recurrent,
    "window": LastTokens,
    "none": lambda config, rngs, both_ways: Nothing(),
}


def make_mixer(config: ModelConfig, rngs: nnx.Rngs, both_ways: bool) -> Mixer:
    """The mixer of these settings; SettingError if it has scores and what stands in ``MIXERS`` hides it."""
    mixer = MIXERS[config.mixer](config, rngs, both_ways)
    if getattr(mixer, "has_scores", False) != config.has_scores:
        raise SettingError(
            f"MIXERS[{config.mixer!r}] should say has_scores={not config.has_scores}, as what it makes does: "
            "put the class there, or set that attribute of the function"
        )
    return mixer

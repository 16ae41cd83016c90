"""Token mixers: layers such as attention, through which the positions of a row exchange information."""

from collections.abc import Callable
from typing import Protocol

import jax.numpy as jnp
from flax import nnx
from jax import Array
from jaxtyping import Float

from lm.config.base import SettingError
from lm.config.model import MIXERS, ModelConfig
from lm.nn.alignment import BahdanauAttention, LuongAttention
from lm.nn.attention import Attention
from lm.nn.attention_inputs import AttentionInputs
from lm.nn.cache import Carry
from lm.nn.compressed import CompressedAttention
from lm.nn.convolution import Convolution, LocalMixer
from lm.nn.costs import TokenMixer
from lm.nn.dropout import DropoutMasks, Shapes
from lm.nn.layers import Identity, Linear
from lm.nn.rnn import Recurrent
from lm.nn.synthesizer import Synthesizer
from lm.sharding import constrain


class Mixer(Protocol):
    """The interface of token mixers; a state space model would be one too.

    A class that computes attention logits sets ``has_attention_logits = True``. Only then settings that act
    on logits or on projections to heads are allowed: position biases, rotary positions, windows, prefixes,
    low-rank updates of attention's matrices. ``lm.nn.costs.TokenMixer`` is a base class with ``flops`` and
    ``cache_bytes``; for a class without these methods its formulas are used.
    """

    def __call__(
        self, x: Array, inputs: AttentionInputs, carry: Carry | None, dropout_masks: DropoutMasks, /
    ) -> tuple[Array, Carry]:
        """Return [B,T,D] from x [B,T,D], and the carry after these tokens, or None if ``carry`` is None."""

    def init_carry(self, rows: int, length: int, /) -> Carry:
        """Return the carry of ``rows`` before their first token, with leaves [B,...].

        For attention it is an empty KV cache with room for ``length`` tokens, for recurrent mixers the
        initial state. Beam search repeats and reorders all leaves along their first axis, the rows.
        """

    def dropout_shapes(self, length: int, /) -> Shapes:
        """Return the shapes of one row's dropout masks, by names that are unique within a block."""


class NGramMLP(LocalMixer):
    """tanh(W [x_(t-n+1); ...; x_t] + b): a hidden layer over the last n = ``mixer.window`` tokens.

    Without a feed-forward layer after it, the model is that of Bengio et al. 2003, whose n counts the target
    too. Each token of the window has its own part of W. An encoder's window also covers the next n-1 tokens,
    2n-1 in total.
    """

    def __init__(self, config: ModelConfig, rngs: nnx.Rngs, bidirectional: bool):
        behind = config.mixer.window - 1
        super().__init__(config, behind, behind if bidirectional else 0)
        inner, width = (self.behind + 1 + self.ahead) * config.d_model, config.state_width
        self.hidden = Linear(rngs, (inner, width), ("embed", "mlp"), std=inner**-0.5, use_bias=True)
        self.out: Linear | Identity = Identity()
        if width != config.d_model:
            shape, axes = (width, config.d_model), ("mlp", "embed")
            self.out = Linear(rngs, shape, axes, std=width**-0.5, use_bias=config.bias)

    def __call__(
        self,
        x: Float[Array, "B T D"],
        inputs: AttentionInputs,
        carry: Float[Array, "B _ D"] | None,
        _dropout_masks: DropoutMasks,
    ) -> tuple[Float[Array, "B T D"], Float[Array, "B _ D"] | None]:
        """Return [B,T,D] from x [B,T,D] and, if a carry was given, the last n-1 inputs [B,n-1,D]."""
        x = constrain(x, "batch", "key_length", "embed")
        tokens, carry = self.neighbours(x, inputs.segments, carry)
        return self.out(jnp.tanh(self.hidden(jnp.concatenate(tokens, axis=-1)))), carry


class NoMixing(TokenMixer):
    """A mixer whose output is 0: positions exchange no information."""

    def __call__(
        self,
        x: Float[Array, "B T D"],
        _inputs: AttentionInputs,
        carry: Carry | None,
        _dropout_masks: DropoutMasks,
    ) -> tuple[Float[Array, "B T D"], Carry]:
        """Return zeros [B,T,D]."""
        return jnp.zeros_like(x), carry

    def init_carry(self, _rows: int, _length: int) -> Carry:
        """Return an empty carry."""
        return ()

    def dropout_shapes(self, _length: int) -> Shapes:
        """Return no shapes."""
        return {}


CrossAttention = Attention | LuongAttention

# By model.cross_attention.kind; called with the settings and random keys.
CROSS_ATTENTION: dict[str, Callable[[ModelConfig, nnx.Rngs], CrossAttention | None]] = {
    "heads": lambda config, rngs: Attention(config.cross_config, rngs, is_cross=True),
    "dot": LuongAttention,
    "multiplicative": LuongAttention,
    "additive": BahdanauAttention,
    "merged": lambda config, rngs: None,  # the block's self-attention
    "none": lambda config, rngs: None,
}

# By model.mixer.kind; called with the settings, random keys, and whether the stack is bidirectional.
MIXERS |= {
    "attention": Attention,
    "synthesizer": Synthesizer,
    "rnn": Recurrent,
    "gru": Recurrent,
    "lstm": Recurrent,
    "window": NGramMLP,
    "lightweight-convolution": Convolution,
    "dynamic-convolution": Convolution,
    "none": lambda config, rngs, bidirectional: NoMixing(),
}


def make_mixer(config: ModelConfig, rngs: nnx.Rngs, bidirectional: bool) -> Mixer:
    """Return the mixer ``model.mixer.kind``.

    SettingError if its entry in MIXERS and the mixer itself differ in ``has_attention_logits``.
    """
    kind = CompressedAttention if config.attention.compression > 1 else MIXERS[config.mixer.kind]
    mixer = kind(config, rngs, bidirectional)
    if getattr(mixer, "has_attention_logits", False) != config.has_attention_logits:
        raise SettingError(
            f"MIXERS[{config.mixer.kind!r}] should say has_attention_logits="
            f"{not config.has_attention_logits}, as what it makes does: put the class there, or set that "
            "attribute of the function"
        )
    return mixer

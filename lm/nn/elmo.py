"""A bidirectional language model (ELMo), and skip-gram's tables of embeddings."""

from dataclasses import replace

import jax
import jax.numpy as jnp
from flax import nnx
from jax import Array
from jaxtyping import Float, Float32

from lm.batch import Batch, Side
from lm.config.model import ModelConfig
from lm.nn.attention_inputs import positions_in_segments, segments_of
from lm.nn.dropout import split_key
from lm.nn.layers import Embed, Module, embedding_std
from lm.nn.stack import Stack
from lm.nn.transformer import Transformer

FORWARD = "forward."  # how the names of the forward model's parameters begin


class BidirectionalLM(Module):
    """Two language models of one text that share embedding and output matrix (ELMo, Peters et al. 2018).

    ``forward`` reads the text from left to right. The same model with the stack ``backward`` as its decoder
    reads it from right to left. The batch is a decoder's.
    """

    def __init__(self, config: ModelConfig, rngs: nnx.Rngs):
        self.config = config
        self.forward = Transformer(config, rngs)
        self.backward = Stack(
            config,
            rngs,
            config.num_decoder_layers,
            has_cross_attention=False,
            shares_layers=config.shares_layers("decoder"),
        )

    def __call__(
        self, batch: Batch, key: Array | None = None
    ) -> tuple[Float32[Array, "B T V"], Float32[Array, "B T V"]]:
        """Return the logits of the forward and of the backward model, float32 [B,T,V], for targets [B,T].

        Each target is predicted from those before it, and from those after it in its segment.
        """
        forward_key, backward_key = split_key(key, 2)
        flipped = _flip(batch).side("decoder")
        flipped = replace(flipped, tokens=_shift_right(flipped, self.config.special.pad))
        backward = self._backward_model(Batch(decoder=flipped), backward_key)
        return self.forward(batch, forward_key), backward[:, ::-1]

    def features(self, batch: Batch, key: Array | None = None) -> Float[Array, "B T 2*{self.config.d_model}"]:
        """Return [B,T,2D]: the last states at each of the decoder's tokens, in both directions."""
        forward_key, backward_key = split_key(key, 2)
        forward = self.forward.features(batch, forward_key)
        backward = self._backward_model.features(_flip(batch), backward_key)
        return jnp.concatenate([forward, backward[:, ::-1]], axis=-1)

    def hidden_states(self, batch: Batch) -> dict[str, Array]:
        """Return {"decoder": [layers+1,B,T,2D]}: the states of both directions side by side."""
        forward = self.forward.hidden_states(batch)["decoder"]
        backward = self._backward_model.hidden_states(_flip(batch))["decoder"]
        return {"decoder": jnp.concatenate([forward, backward[:, :, ::-1]], axis=-1)}

    @property
    def _backward_model(self) -> Transformer:
        """Return the language model that reads rows from right to left."""
        model = jax.tree.map(lambda leaf: leaf, self.forward)  # a copy, whose stack is replaced
        model.decoder = self.backward
        return model


def _flip(batch: Batch) -> Batch:
    """Return the decoder's side from right to left; its positions, if given, count from the other end."""
    side = batch.side("decoder").map(lambda x: x[:, ::-1])
    if side.positions is None:
        return Batch(decoder=side)
    segments = jnp.asarray(segments_of(side))
    positions = positions_in_segments(segments.shape[1], segments)
    return Batch(decoder=replace(side, positions=jnp.where(segments > 0, positions, 0)))


def _shift_right(side: Side, pad: int) -> Array:
    """Return int32 [B,T]: the target before each position, and ``pad`` at the start of a segment."""
    targets, segments = side.targets, segments_of(side)
    has_previous = jnp.pad(segments[:, 1:] == segments[:, :-1], ((0, 0), (1, 0)))
    return jnp.where(has_previous, jnp.pad(targets[:, :-1], ((0, 0), (1, 0))), pad)


class SkipGramTables(Module):
    """Skip-gram's tables [V,d_embed] of tokens as centres and as contexts (Mikolov et al. 2013).

    The embedding of another model can start as the first of them, ``embed``.
    """

    def __init__(self, config: ModelConfig, rngs: nnx.Rngs):
        shape = config.vocab_size, config.embed_width
        std = embedding_std(config.output.logits, config.embed_width)
        self.embed = Embed(rngs, shape, "vocab", std=std, dtype=config.dtype)
        self.contexts = Embed(rngs, shape, "vocab", std=std, dtype=config.dtype)

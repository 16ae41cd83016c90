"""A bidirectional language model, and skip-gram's tables: models of words in context and without."""

from dataclasses import replace

import jax
import jax.numpy as jnp
from flax import nnx
from jax import Array

from lm.batch import Batch, Side
from lm.config.model import ModelConfig
from lm.nn.dropout import split_key
from lm.nn.layers import Embed, Module, embedding_std
from lm.nn.stack import Stack
from lm.nn.transformer import Transformer

FORWARD = "forward."  # how the names of the forward model's parameters begin


class BidirectionalLM(Module):
    """Two language models of one text that share embedding and output matrix (ELMo, Peters et al. 2018).

    ``forward`` reads the text from its beginning; with the stack ``backward`` in its place, from its end.
    The batch is a decoder's.
    """

    def __init__(self, config: ModelConfig, rngs: nnx.Rngs):
        self.config = config
        self.forward = Transformer(config, rngs)
        self.backward = Stack(config, rngs, config.num_decoder_layers, has_cross_attention=False)

    def __call__(self, batch: Batch, key: Array | None = None) -> tuple[Array, Array]:
        """Return logits float32 [B,T,V] of the decoder's targets [B,T], twice.

        Each token is predicted from those before it, and from those after it in its segment.
        """
        forward_key, backward_key = split_key(key, 2)
        flipped = _flip(batch).side("decoder")
        flipped = replace(flipped, tokens=_shift_right(flipped, self.config.special.pad))
        backward = self._backward_model(Batch(decoder=flipped), backward_key)
        return self.forward(batch, forward_key), backward[:, ::-1]

    def features(self, batch: Batch, key: Array | None = None) -> Array:
        """Return [B,T,2D]: the last states at each of the decoder's tokens, in both directions."""
        forward_key, backward_key = split_key(key, 2)
        forward = self.forward.features(batch, forward_key)
        backward = self._backward_model.features(_flip(batch), backward_key)
        return jnp.concatenate([forward, backward[:, ::-1]], axis=-1)

    def hidden_states(self, batch: Batch) -> dict[str, Array]:
        """Return {"decoder": [layers+1,B,T,2D]}: both directions of each layer, the embeddings twice."""
        forward = self.forward.hidden_states(batch)["decoder"]
        backward = self._backward_model.hidden_states(_flip(batch))["decoder"]
        return {"decoder": jnp.concatenate([forward, backward[:, :, ::-1]], axis=-1)}

    @property
    def _backward_model(self) -> Transformer:
        """Return the language model that reads flipped rows."""
        model = jax.tree.map(lambda leaf: leaf, self.forward)  # a copy, whose stack is replaced
        model.decoder = self.backward
        return model


def _flip(batch: Batch) -> Batch:
    """Return the decoder's side from right to left, without positions: they count from the other end now."""
    return Batch(decoder=replace(batch.side("decoder"), positions=None).map(lambda x: x[:, ::-1]))


def _shift_right(side: Side, pad: int) -> Array:
    """Return int32 [B,T]: the target before each position, and ``pad`` at the start of a segment."""
    targets = side.targets
    segments = jnp.ones_like(targets) if side.segment_ids is None else side.segment_ids
    has_previous = jnp.pad(segments[:, 1:] == segments[:, :-1], ((0, 0), (1, 0)))
    return jnp.where(has_previous, jnp.pad(targets[:, :-1], ((0, 0), (1, 0))), pad)


class SkipGramTables(Module):
    """Skip-gram's tables [V,d_embed] of tokens as centres and as contexts (Mikolov et al. 2013).

    An embedding can start as the first of them, ``embed``.
    """

    def __init__(self, config: ModelConfig, rngs: nnx.Rngs):
        shape, std = (
            (config.vocab_size, config.embed_width),
            embedding_std(config.output.logits, config.embed_width),
        )
        self.embed = Embed(rngs, shape, "vocab", std=std, dtype=config.dtype)
        self.contexts = Embed(rngs, shape, "vocab", std=std, dtype=config.dtype)

"""ELECTRA: a generator that replaces tokens, and a discriminator that finds or restores them.

Source: Clark et al. 2020; the discriminators that restore tokens are of section 3.5 and Table 5.
"""

from dataclasses import replace
from typing import NamedTuple

import jax
import jax.numpy as jnp
from flax import nnx
from jax import Array
from jaxtyping import Float, Float32, Int32

from lm.batch import Batch
from lm.config.base import changes
from lm.config.model import ModelConfig
from lm.nn.dropout import split_key
from lm.nn.layers import Module
from lm.nn.transformer import Transformer
from lm.sharding import constrain

DISCRIMINATOR = "discriminator."  # how the names of its parameters begin


class ElectraOutputs(NamedTuple):
    """Outputs of ``Electra``."""

    generator_logits: Float32[Array, "B S V"]
    tokens: Int32[Array, "B S"]  # the discriminator's input, with the generator's samples
    replaced_logits: Float32[Array, "B S"]  # the discriminator's, that a token is not the text's


class RestoredOutputs(NamedTuple):
    """Outputs of ``RestoringElectra``."""

    generator_logits: Float32[Array, "B S V"]
    tokens: Int32[Array, "B S"]  # the discriminator's input, with the generator's samples
    logits: Float32[Array, "B S V"]  # the discriminator's, of the text's token at each position
    copy_logits: Float32[Array, "B S"] | None  # of the probability to predict the input token; None: no gate


class DiscriminatorFeatures(NamedTuple):
    """What the discriminator computes from the generator's samples, and what these were drawn from."""

    generator_logits: Float32[Array, "B S V"]
    tokens: Int32[Array, "B S"]  # the discriminator's input, with the generator's samples
    x: Float[Array, "B S D"]  # the discriminator's last states


class GeneratorAndDiscriminator(Module):
    """A generator, which is a small masked LM, and a discriminator; they share embeddings."""

    def __init__(self, config: ModelConfig, generator: ModelConfig, rngs: nnx.Rngs):
        self.discriminator = Transformer(config, rngs)
        self.generator = Transformer(generator, rngs)
        del self.generator.embed  # the discriminator's is used

    def features(self, batch: Batch, sample_key: Array, key: Array | None) -> DiscriminatorFeatures:
        """Return the discriminator's last states for a batch in which the generator replaced tokens.

        The generator replaces tokens whose loss weights are above 0. ``key`` switches dropout on.
        """
        generator_key, discriminator_key = split_key(key, 2)
        generator = jax.tree.map(lambda leaf: leaf, self.generator)  # a copy, to which the embedding is added
        generator.embed = self.discriminator.embed
        logits = generator(batch, generator_key)
        samples = jax.random.categorical(sample_key, jax.lax.stop_gradient(logits)).astype(jnp.int32)
        side = batch.side("encoder")
        tokens = jnp.where(side.loss_weights > 0, samples, side.targets)
        tokens = constrain(tokens, "batch", "length")
        corrupted = replace(batch, encoder=replace(side, tokens=tokens))
        x = self.discriminator.features(corrupted, discriminator_key)
        return DiscriminatorFeatures(logits, tokens, x)


class Electra(GeneratorAndDiscriminator):
    """A generator, and a discriminator that finds the tokens which are not the text's."""

    def __call__(self, batch: Batch, sample_key: Array, key: Array | None = None) -> ElectraOutputs:
        """Return the outputs of both; the generator replaces tokens whose loss weights are above 0."""
        features = self.features(batch, sample_key, key)
        replaced_logits = self.discriminator.replaced(features.x)
        return ElectraOutputs(features.generator_logits, features.tokens, replaced_logits)


class RestoringElectra(GeneratorAndDiscriminator):
    """A generator, and a discriminator that predicts the text's token at each position (replace MLM).

    With the head "copy" it predicts its input token with the probability of a gate, and else by its output
    matrix (all-tokens MLM).
    """

    def __call__(self, batch: Batch, sample_key: Array, key: Array | None = None) -> RestoredOutputs:
        """Return the outputs of both; the generator replaces tokens whose loss weights are above 0."""
        features = self.features(batch, sample_key, key)
        copy_logits = None
        if self.discriminator.copy_gate is not None:
            copy_logits = self.discriminator.copy_gate(features.x)[..., 0].astype(jnp.float32)
        logits = self.discriminator.logits(features.x)
        return RestoredOutputs(features.generator_logits, features.tokens, logits, copy_logits)


def generator_of(model: ModelConfig, share: float) -> ModelConfig | None:
    """Return the settings of the generator whose samples ``model`` reads; None if it is trained without."""
    if {"replaced-token", "generator"}.isdisjoint(model.heads):
        return None
    return generator_config(model, share)


def generator_config(model: ModelConfig, share: float) -> ModelConfig:
    """Return the settings of a generator as deep as ``model``, with ``share`` of its heads and its embedding.

    It has one head at least, each as wide as the model's, and d_model is the width of all of them together:
    ``share`` of the model's own d_model if that is the width of the model's heads together.
    """
    num_heads = max(int(model.attention.num_heads * share), 1)
    return changes(
        model,
        {
            "d_model": num_heads * model.attention.d_kv,
            "mlp.d_ff": max(int(model.mlp.d_ff * share), 1),
            "attention.num_heads": num_heads,
            "attention.num_key_value_heads": None,
            "embedding.d_embed": model.embed_width,
            "output.logits": "tied",
            "output.transform": True,
            "output.bias": True,
            "heads": (),
        },
    )

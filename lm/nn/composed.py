"""Models made of models: one with a head to fine-tune, ELECTRA's pair, and ensembles."""

from collections.abc import Sequence

import jax
import jax.numpy as jnp
from flax import nnx
from jax import Array

from lm.nn.cache import Cache
from lm.nn.config import HeadConfig, ModelConfig
from lm.nn.heads import POOL, Head, LayerMixture
from lm.nn.layers import split
from lm.nn.transformer import Transformer
from lm.nn.view import Batch
from lm.settings import SettingError
from lm.sharding import constrain

BODY, DISCRIMINATOR = "body.", "discriminator."  # how names of the parameters of the model inside begin


class Tuned(nnx.Module):
    """A pre-trained ``body`` with a new ``head``; calls give what ``Head`` gives.

    The batch is the body's; of multiple choice each feature is [B,C,L], C candidates to a row.
    """

    def __init__(self, config: ModelConfig, head: HeadConfig, rngs: nnx.Rngs):
        self.config, self.settings = config, head
        self.body = Transformer(config, rngs)
        self.head = Head(config, head, rngs)
        layers = config.num_decoder_layers if config.has_decoder else config.num_encoder_layers
        self.mixture = LayerMixture(layers) if head.layers == "mixed-frozen" else None

    def __call__(self, batch: Batch, key: Array | None = None) -> Array:
        if self.settings.kind != "choice":
            return self._read(batch, key)
        rows, choices, length = batch[f"{self._side}_input_tokens"].shape
        flat = {name: x.reshape(rows * choices, length) for name, x in batch.items() if x.ndim == 3}
        return self._read(flat, key).reshape(rows, choices)

    @property
    def _side(self) -> str:
        return "decoder" if self.config.has_decoder else "encoder"

    def _read(self, batch: Batch, key: Array | None) -> Array:
        body_key, head_key = split(key, 2)
        if self.mixture is None:
            x = self.body.features(batch, body_key)
        else:
            x = self.mixture(jax.lax.stop_gradient(self.body.hidden(batch)[self._side]))
        tokens = batch[f"{self._side}_input_tokens"]
        segments = batch.get(f"{self._side}_segment_ids", jnp.ones_like(tokens))
        if self.settings.kind not in ("tokens", "span"):
            pooler = self.settings.pool == "first" and self.body.pooler is not None
            x = self.body.pooled(x) if pooler else POOL[self.settings.pool](x, segments > 0)
        return self.head(x, segments, head_key)


class Electra(nnx.Module):
    """ELECTRA: a small masked LM, the generator, and an encoder that tells its words from the text's.

    The two share the embedding of tokens (Clark et al. 2020).
    """

    def __init__(self, config: ModelConfig, generator: ModelConfig, rngs: nnx.Rngs):
        self.discriminator = Transformer(config, rngs)
        self.generator = Transformer(generator, rngs)
        del self.generator.embed  # the discriminator's is used

    def __call__(self, batch: Batch, sample: Array, key: Array | None = None) -> tuple[Array, ...]:
        """Generator's logits [B,S,V]; tokens int32 [B,S] with its samples, drawn with key ``sample``, where
        ``encoder_loss_weights`` are above 0; the discriminator's logits [B,S] of their not being the text's.
        """
        generator_key, discriminator_key = split(key, 2)
        generator = jax.tree.map(lambda leaf: leaf, self.generator)  # a copy, to which the embedding is added
        generator.embed = self.discriminator.embed
        logits = generator(batch, generator_key)
        drawn = jax.random.categorical(sample, jax.lax.stop_gradient(logits)).astype(jnp.int32)
        tokens = jnp.where(batch["encoder_loss_weights"] > 0, drawn, batch["encoder_target_tokens"])
        tokens = constrain(tokens, "batch", "length")
        x = self.discriminator.features(batch | {"encoder_input_tokens": tokens}, discriminator_key)
        return logits, tokens, self.discriminator.replaced(x)


class Ensemble(nnx.Module):
    """Models that write as one, by the mean of their logits before the softmax (Raffel et al. 2020, 3.6).

    It has the methods of a ``Transformer`` that decoding calls; the cache is a tuple of the members' caches.
    """

    def __init__(self, members: Sequence[Transformer]):
        ids = {(member.config.vocab_size, member.config.special) for member in members}
        if len(ids) != 1:
            message = "an ensemble should be models of the same model.vocab_size and special ids"
            raise SettingError(f"{message}, not {ids}")
        self.members = nnx.List(members)
        self.config = members[0].config

    def prefill(self, batch: Batch, size: int) -> tuple[Array, tuple[Cache, ...]]:
        """As ``Transformer.prefill``."""
        return _mean_logits([member.prefill(batch, size) for member in self.members])

    def step(self, tokens: Array, cache: tuple[Cache, ...]) -> tuple[Array, tuple[Cache, ...]]:
        """As ``Transformer.step``."""
        pairs = zip(self.members, cache, strict=True)
        return _mean_logits([member.step(tokens, member_cache) for member, member_cache in pairs])


def _mean_logits(outputs: Sequence[tuple[Array, Cache]]) -> tuple[Array, tuple[Cache, ...]]:
    logits, caches = zip(*outputs, strict=True)
    return sum(logits) / len(logits), caches

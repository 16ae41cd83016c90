"""Models made of models: with a head to fine-tune, ELECTRA's and ELMo's pairs, ensembles, LoRA merged."""

from collections.abc import Collection, Sequence
from dataclasses import replace

import jax
import jax.numpy as jnp
from flax import nnx
from jax import Array

from lm.nn.cache import Cache
from lm.nn.config import HeadConfig, LoraConfig, ModelConfig
from lm.nn.heads import POOL, Head, LayerMixture
from lm.nn.layers import Embed, Keyed, split
from lm.nn.stack import Stack
from lm.nn.transformer import Transformer
from lm.nn.view import Batch
from lm.settings import SettingError
from lm.sharding import constrain, named

# how names of the parameters of the model inside begin
BODY, DISCRIMINATOR, FORWARD = "body.", "discriminator.", "forward."


class Tuned(Keyed):
    """A pre-trained ``body`` with a new ``head``; calls give what ``Head`` gives.

    The body is a ``Transformer`` or, with the pre-training head "backward", a ``BidirectionalLM``. The batch
    is the body's; of multiple choice each feature is [B,C,L], C candidates to a row.
    """

    def __init__(self, config: ModelConfig, head: HeadConfig, rngs: nnx.Rngs):
        self.config, self.settings = config, head
        self.body = (BidirectionalLM if "backward" in config.heads else Transformer)(config, rngs)
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
        if self.mixture is not None:
            x = self.mixture(jax.lax.stop_gradient(self.body.hidden(batch)[self._side]))
        elif self.settings.layers == "last-frozen":
            x = jax.lax.stop_gradient(self.body.features(batch))
        else:
            x = self.body.features(batch, body_key)
        tokens = batch[f"{self._side}_input_tokens"]
        segments = batch.get(f"{self._side}_segment_ids", jnp.ones_like(tokens))
        if self.settings.kind not in ("tokens", "span"):
            x = self._pooled(x, segments)
        return self.head(x, segments, head_key)

    def _pooled(self, x: Array, segments: Array) -> Array:
        """[B,W] of x [B,T,W]: what speaks for a text, a first position through the pooler if there is one."""
        body, pool = self.body, self.settings.pool
        if pool == "first" and isinstance(body, Transformer) and body.pooler is not None:
            return body.pooled(x)
        return POOL[pool](x, segments > 0)


class Electra(Keyed):
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


def generator_config(model: ModelConfig, share: float) -> ModelConfig:
    """ELECTRA's generator: as deep as the model, ``share`` as wide, with its token embedding."""
    heads = max(int(model.num_heads * share), 1)
    d_ff = max(int(model.d_ff * share), 1)
    narrow = replace(model, d_model=heads * model.d_kv, d_ff=d_ff, num_heads=heads, num_key_value_heads=None)
    embed = model.embed_width  # that of the model, whose embedding it shares
    return replace(narrow, d_embed=embed, logits="tied", logits_transform=True, logits_bias=True, heads=())


class BidirectionalLM(Keyed):
    """Two language models of the same text with one embedding and output matrix, as in ELMo (Peters et al.
    2018): ``forward`` reads from its beginning; with the stack ``backward`` in its place, from its end.

    The batch is a decoder's.
    """

    def __init__(self, config: ModelConfig, rngs: nnx.Rngs):
        self.config = config
        self.forward = Transformer(config, rngs)
        self.backward = Stack(config, rngs, config.num_decoder_layers, crosses=False)

    def __call__(self, batch: Batch, key: Array | None = None) -> tuple[Array, Array]:
        """float32 [B,T,V] of ``decoder_target_tokens`` [B,T], twice: each from those before it, and each from
        those after it in its segment.
        """
        forward_key, backward_key = split(key, 2)
        behind = _from_the_end(batch)
        behind["decoder_input_tokens"] = _shift_right(behind, self.config.special.pad)
        logits = self._reversed(behind, backward_key)
        return self.forward(batch, forward_key), logits[:, ::-1]

    def features(self, batch: Batch, key: Array | None = None) -> Array:
        """[B,T,2D]: last states at each of ``decoder_input_tokens``, read up to it and from the end."""
        forward_key, backward_key = split(key, 2)
        behind = self._reversed.features(_from_the_end(batch), backward_key)
        return jnp.concatenate([self.forward.features(batch, forward_key), behind[:, ::-1]], axis=-1)

    def hidden(self, batch: Batch) -> dict[str, Array]:
        """``{"decoder": [layers+1,B,T,2D]}``: both directions of each layer, the embeddings twice."""
        before, behind = self.forward.hidden(batch), self._reversed.hidden(_from_the_end(batch))
        return {"decoder": jnp.concatenate([before["decoder"], behind["decoder"][:, :, ::-1]], axis=-1)}

    @property
    def _reversed(self) -> Transformer:
        """The language model of rows that begin with their end."""
        model = jax.tree.map(lambda leaf: leaf, self.forward)  # a copy, whose stack is exchanged
        model.decoder = self.backward
        return model


def _from_the_end(batch: Batch) -> Batch:
    """Features [B,T] from right to left; positions, which count from the other end now, are left out."""
    return {name: x[:, ::-1] for name, x in batch.items() if name != "decoder_positions" and x.ndim == 2}


def _shift_right(batch: Batch, pad: int) -> Array:
    """int32 [B,T]: the target before each, and ``pad`` at the beginning of a segment."""
    targets = batch["decoder_target_tokens"]
    segments = batch.get("decoder_segment_ids", jnp.ones_like(targets))
    follows = jnp.pad(segments[:, 1:] == segments[:, :-1], ((0, 0), (1, 0)))
    return jnp.where(follows, jnp.pad(targets[:, :-1], ((0, 0), (1, 0))), pad)


class WordTables(nnx.Module):
    """Skip-gram's two tables [V,d_embed]: ``embed``, as which an embedding starts, of tokens as centres, and
    ``contexts`` of the same as contexts (Mikolov et al. 2013).
    """

    def __init__(self, config: ModelConfig, rngs: nnx.Rngs):
        shape = config.vocab_size, config.embed_width
        self.embed, self.contexts = (Embed(config, rngs, shape, "vocab") for _ in range(2))


def source_of(learnt: Collection[str], name: str) -> str | None:
    """The one of the ``learnt`` parameters that parameter ``name`` starts from; None if it is new."""
    bare = name.removeprefix(BODY)
    olds = [name, bare, DISCRIMINATOR + bare, FORWARD + bare]
    olds += [bare.removeprefix(DISCRIMINATOR), bare.removeprefix(FORWARD)]  # from vectors
    return next((old for old in olds if old in learnt), None)


def merged(model: Transformer) -> Transformer:
    """The same function without low-rank updates, each added to its matrix (Hu et al. 2021, section 4.1)."""
    if not model.config.lora.rank:
        return model
    lora, params = model.config.lora, named(model)
    plain = jax.eval_shape(lambda: Transformer(replace(model.config, lora=LoraConfig()), nnx.Rngs(params=0)))
    for down in [name for name in params if name.endswith(".lora.down")]:
        linear = down.removesuffix("lora.down")
        update = jnp.einsum("...ir,...ro->...io", params[down], params[f"{linear}lora.up"])
        params[f"{linear}kernel"] += update * (lora.alpha / lora.rank)
    return jax.tree.unflatten(jax.tree.structure(plain), [params[name] for name in named(plain)])


class Ensemble(Keyed):
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

    def unstacked(self, cache: tuple[Cache, ...]) -> tuple["Ensemble", tuple[Cache, ...]]:
        """As ``Transformer.unstacked``."""
        pairs = zip(self.members, cache, strict=True)
        members, caches = zip(*(member.unstacked(own) for member, own in pairs), strict=True)
        return Ensemble(members), caches

    def step(self, tokens: Array, cache: tuple[Cache, ...]) -> tuple[Array, tuple[Cache, ...]]:
        """As ``Transformer.step``."""
        pairs = zip(self.members, cache, strict=True)
        return _mean_logits([member.step(tokens, member_cache) for member, member_cache in pairs])


def _mean_logits(outputs: Sequence[tuple[Array, Cache]]) -> tuple[Array, tuple[Cache, ...]]:
    logits, caches = zip(*outputs, strict=True)
    return sum(logits) / len(logits), caches

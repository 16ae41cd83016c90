"""A pre-trained model with a new head, which parameters it starts from, and merging of LoRA."""

from collections.abc import Collection
from dataclasses import replace
from typing import TypeVar

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx
from jax import Array
from jaxtyping import Float, Float32

from lm.batch import Batch
from lm.config.model import HeadConfig, LoraConfig, ModelConfig
from lm.nn.attention_inputs import segments_of
from lm.nn.dropout import split_key
from lm.nn.electra import DISCRIMINATOR
from lm.nn.elmo import FORWARD, BidirectionalLM
from lm.nn.experts import RouterStatistics
from lm.nn.heads import POOLINGS, Head, LayerMixture
from lm.nn.layers import Module
from lm.nn.transformer import Transformer
from lm.sharding import named

BODY = "body."  # how the names of the pre-trained model's parameters begin
Model = TypeVar("Model", Transformer, BidirectionalLM)


class ModelWithHead(Module):
    """A pre-trained ``body`` with a new ``head``, whose outputs a call returns.

    The body is a ``Transformer`` or, with the pre-training head "backward", a ``BidirectionalLM``. The batch
    is the body's; in multiple choice each array of a side is [B,C,L], with C candidates per row.
    """

    def __init__(self, config: ModelConfig, head: HeadConfig, rngs: nnx.Rngs):
        self.config, self.settings = config, head
        body = BidirectionalLM if "backward" in config.heads else Transformer
        self.body = body(config, rngs)
        self.head = Head(config, head, rngs)
        layers = config.num_decoder_layers if config.has_decoder else config.num_encoder_layers
        self.mixture = LayerMixture(layers) if head.layers == "mixed-frozen" else None

    def __call__(self, batch: Batch, key: Array | None = None) -> Float32[Array, "B ..."]:
        return self.outputs_and_router(batch, key)[0]

    def outputs_and_router(
        self, batch: Batch, key: Array | None = None
    ) -> tuple[Float32[Array, "B ..."], RouterStatistics | None]:
        """Return the outputs, and the statistics of the body's routers; None if it has none or is frozen."""
        if self.settings.kind != "choice":
            return self._outputs(batch, key)
        rows, choices, _ = batch.side(self._side).tokens.shape
        flat = batch.map_sides(lambda side: side.map(lambda x: x.reshape(rows * choices, x.shape[2])))
        outputs, router = self._outputs(flat, key)
        router = jax.tree.map(lambda x: x.reshape(rows, choices).mean(1), router)
        return outputs.reshape(rows, choices), router

    @property
    def _side(self) -> str:
        return "decoder" if self.config.has_decoder else "encoder"

    def _outputs(self, batch: Batch, key: Array | None) -> tuple[Array, RouterStatistics | None]:
        body_key, head_key = split_key(key, 2)
        (x, router), segments = self._features(batch, body_key), segments_of(batch.side(self._side))
        if self.settings.is_pooled:
            x = pool_texts(self.body, self.settings.pool, x, segments)
        return self.head(x, segments, head_key), router

    def pooled(self, batch: Batch) -> Float[Array, "B D"]:
        """Return [B,D]: the state of each text that a head on whole texts reads."""
        (x, _), segments = self._features(batch, None), segments_of(batch.side(self._side))
        return pool_texts(self.body, self.settings.pool, x, segments)

    def _features(self, batch: Batch, key: Array | None) -> tuple[Array, RouterStatistics | None]:
        """Return the states [B,T,D] that the head reads, before they are pooled, and router statistics."""
        if self.mixture is not None:
            hidden = self.body.hidden_states(batch)[self._side]
            return self.mixture(jax.lax.stop_gradient(hidden)), None
        if self.settings.layers == "last-frozen":
            return jax.lax.stop_gradient(self.body.features(batch)), None
        if isinstance(self.body, Transformer):
            outputs = self.body.outputs(batch, key)
            return outputs.x, outputs.router
        return self.body.features(batch, key), None


def pool_texts(
    body: Transformer | BidirectionalLM, pool: str, x: Float[Array, "B T D"], segments: Array | np.ndarray
) -> Float[Array, "B D"]:
    """Return [B,D] of x [B,T,D]: one state per text, the first through the pooler if the body has one."""
    if pool == "first" and isinstance(body, Transformer) and body.pooler is not None:
        return body.pooled(x)
    return POOLINGS[pool](x, segments > 0)


def source_parameter(learned: Collection[str], name: str) -> str | None:
    """Return which of the ``learned`` parameters the parameter ``name`` starts from; None if it is new.

    The learned model may have become the body of another, or be one of ELECTRA's or ELMo's two models.
    """
    bare = name.removeprefix(BODY)
    candidates = [name, bare, DISCRIMINATOR + bare, FORWARD + bare]
    candidates += [bare.removeprefix(DISCRIMINATOR), bare.removeprefix(FORWARD)]  # an embedding from vectors
    return next((candidate for candidate in candidates if candidate in learned), None)


def merge_lora(model: Model) -> Model:
    """Return a model that computes the same without low-rank updates: each is added to its kernel.

    Hu et al. 2021, section 4.1.
    """
    if not model.config.lora.rank:
        return model
    lora, params = model.config.lora, named(model)
    without = replace(model.config, lora=LoraConfig())
    merged = jax.eval_shape(lambda: type(model)(without, nnx.Rngs(params=0)))
    for down in [name for name in params if name.endswith(".lora.down")]:
        linear = down.removesuffix("lora.down")
        update = jnp.einsum("...ir,...ro->...io", params[down], params[f"{linear}lora.up"])
        params[f"{linear}kernel"] += update * (lora.alpha / lora.rank)
    return jax.tree.unflatten(jax.tree.structure(merged), [params[name] for name in named(merged)])

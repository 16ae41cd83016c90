"""Masks of all kinds and what they do to scores, as arrays, computed as models do."""

from dataclasses import dataclass, field
from typing import Any, Literal

import jax
import jax.numpy as jnp
import numpy as np

from lm.batch import Batch, Side
from lm.config.attention import SparsityConfig
from lm.config.layers import PositionsConfig
from lm.config.model import ModelConfig
from lm.nn.attention_inputs import make_attention_inputs, make_cross_mask
from lm.ops.attention import attention_weights
from lm.ops.masks import CAUSAL, materialize_mask


@dataclass(frozen=True)
class Sight:
    """A model, and what its batches say of a row's positions: how a mask comes about."""

    side: Literal["encoder", "decoder", "cross"]
    model: dict[str, Any] = field(default_factory=dict)  # settings of the model that differ
    features: tuple[str, ...] = ()  # "padded", "packed" or "prefix": what the batch says besides tokens

    def mask(self, length: int) -> np.ndarray:
        """bool [T,T], the mask that attention uses in rows of ``length``."""
        sparsity = SparsityConfig(**self.model)
        kinds = {"encoder": "encoder", "cross": "encoder-decoder"}
        kind: Any = "prefix-decoder" if "prefix" in self.features else kinds.get(self.side, "decoder")
        config = ModelConfig(
            kind, positions=PositionsConfig(kind="none", max_length=length), sparsity=sparsity
        )
        batch = self.batch(length)
        if self.side == "cross":
            segments = batch.side("decoder").segment_ids, batch.side("encoder").segment_ids
            mask = make_cross_mask(config, length, *segments)
        else:
            mask = make_attention_inputs(config, batch, self.side, None).mask
        return np.asarray(materialize_mask(mask, length, length))[0, 0]

    def batch(self, length: int) -> Batch:
        """Tokens, of which the mask knows nothing, and segments and a prefix of the places in a row."""
        place = jnp.arange(length, dtype=jnp.int32)[None]
        segments = {"padded": 1 * (place < length * 3 // 4), "packed": 1 + place // -(-length // 3)}
        named = next((segments[name] for name in segments if name in self.features), None)
        source = named
        if self.side == "cross":  # sources are longer than what is made of them
            source = 1 + (place >= length // 2) + (place >= length * 5 // 6)
        prefix = 1 * (place < length // 3)
        return Batch(
            encoder=Side(tokens=place, segment_ids=source),
            decoder=Side(tokens=place, segment_ids=named, causal_attention=prefix),
        )


BIG_BIRD = {"window": 1, "block": 2, "global_tokens": 1, "random_blocks": 1}
MASKS = {
    "causal (decoder)": Sight("decoder"),
    "prefix (prefix decoder)": Sight("decoder", features=("prefix",)),
    "padding (encoder)": Sight("encoder", features=("padded",)),
    "packed (encoder)": Sight("encoder", features=("packed",)),
    "packed (decoder)": Sight("decoder", features=("packed",)),
    "packed (cross-attention)": Sight("cross", features=("packed",)),
    "window of 2 (encoder)": Sight("encoder", {"window": 2}),
    "window of 2 (decoder)": Sight("decoder", {"window": 2}),
    "window of 2, dilated by 2": Sight("encoder", {"window": 2, "dilation": 2}),
    "window of 1, first 2 global": Sight("encoder", {"window": 1, "global_tokens": 2}),
    "blocks of 2 (BigBird)": Sight("encoder", BIG_BIRD),
}


def score_stages(length: int, width: int, seed: int) -> dict[str, np.ndarray]:
    """float32 [T,T] of random queries and keys: scores, masked scores (-inf where unseen), and weights."""
    query, key = jax.random.normal(jax.random.key(seed), (2, 1, length, 1, width))
    scores = jnp.einsum("btnh,bsnh->ts", query, key) * width**-0.5
    mask = CAUSAL.materialize(length, length)
    weights = attention_weights(query, key, mask, scale=width**-0.5)[0, 0]
    masked = jnp.where(mask[0, 0], scores, -jnp.inf)
    return {name: np.asarray(x) for name, x in (("scores", scores), ("masked", masked), ("weights", weights))}

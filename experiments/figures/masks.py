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
class MaskExample:
    """A stack of a model, and the features of its batch that its mask depends on."""

    stack: Literal["encoder", "decoder", "cross"]
    sparsity: dict[str, Any] = field(default_factory=dict)  # settings of SparsityConfig
    features: tuple[str, ...] = ()  # "padded", "packed" or "prefix"

    def mask(self, length: int) -> np.ndarray:
        """Return the mask that attention applies to sequences of ``length``, bool [T,T]."""
        config = ModelConfig(
            self._architecture(),
            positions=PositionsConfig(kind="none", max_length=length),
            sparsity=SparsityConfig(**self.sparsity),
        )
        batch = self.batch(length)
        if self.stack == "cross":
            segments = batch.side("decoder").segment_ids, batch.side("encoder").segment_ids
            mask = make_cross_mask(config, length, *segments)
        else:
            mask = make_attention_inputs(config, batch, self.stack, None).mask
        if mask is None:  # nothing is hidden
            return np.ones((length, length), bool)
        return np.asarray(materialize_mask(mask, length, length))[0, 0]

    def _architecture(self) -> Any:
        if "prefix" in self.features:
            return "prefix-decoder"
        return {"encoder": "encoder", "cross": "encoder-decoder", "decoder": "decoder"}[self.stack]

    def batch(self, length: int) -> Batch:
        """Return one sequence with the segments and the prefix that ``features`` name."""
        position = jnp.arange(length, dtype=jnp.int32)[None]
        segments = None
        if "padded" in self.features:
            segments = 1 * (position < length * 3 // 4)
        elif "packed" in self.features:
            segments = 1 + position // -(-length // 3)
        encoder_segments = segments
        if self.stack == "cross":  # sources are longer than their targets
            encoder_segments = 1 + (position >= length // 2) + (position >= length * 5 // 6)
        prefix = 1 * (position < length // 3)
        return Batch(
            encoder=Side(tokens=position, segment_ids=encoder_segments),
            decoder=Side(tokens=position, segment_ids=segments, causal_attention=prefix),
        )


BIG_BIRD = {"window": 1, "block": 2, "global_tokens": 1, "random_blocks": 1}
MASKS = {
    "causal (decoder)": MaskExample("decoder"),
    "fully visible (encoder)": MaskExample("encoder"),
    "prefix (prefix decoder)": MaskExample("decoder", features=("prefix",)),
    "padding (encoder)": MaskExample("encoder", features=("padded",)),
    "packed (encoder)": MaskExample("encoder", features=("packed",)),
    "packed (decoder)": MaskExample("decoder", features=("packed",)),
    "packed (cross-attention)": MaskExample("cross", features=("packed",)),
    "window of 2 (encoder)": MaskExample("encoder", {"window": 2}),
    "window of 2 (decoder)": MaskExample("decoder", {"window": 2}),
    "window of 2, dilated by 2": MaskExample("encoder", {"window": 2, "dilation": 2}),
    "window of 1, first 2 global": MaskExample("encoder", {"window": 1, "global_tokens": 2}),
    "blocks of 2 (BigBird)": MaskExample("encoder", BIG_BIRD),
}


def masked_softmax_steps(length: int, width: int, seed: int) -> dict[str, np.ndarray]:
    """Return "scores", "masked" (-inf if hidden) and "weights" of random queries and keys, float32 [T,T]."""
    query, key = jax.random.normal(jax.random.key(seed), (2, 1, length, 1, width))
    scores = jnp.einsum("btnh,bsnh->ts", query, key) * width**-0.5
    mask = CAUSAL.materialize(length, length)
    weights = attention_weights(query, key, mask, scale=width**-0.5)[0, 0]
    masked = jnp.where(mask[0, 0], scores, -jnp.inf)
    return {"scores": np.asarray(scores), "masked": np.asarray(masked), "weights": np.asarray(weights)}

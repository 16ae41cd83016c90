"""An ensemble of models that generate as one."""

from collections.abc import Sequence

import numpy as np
from flax import nnx
from jax import Array
from jaxtyping import Float32, Int

from lm.batch import Batch
from lm.config.base import SettingError
from lm.nn.cache import Cache
from lm.nn.layers import Module
from lm.nn.transformer import Transformer


class Ensemble(Module):
    """Models that decode by the mean of their logits (Raffel et al. 2020, section 3.6).

    It has the methods of a ``Transformer`` that decoding calls; its cache is a tuple of the members' caches.
    """

    def __init__(self, members: Sequence[Transformer]):
        ids = {(member.config.vocab_size, member.config.special) for member in members}
        if len(ids) != 1:
            message = "an ensemble should be models of the same model.vocab_size and special ids"
            raise SettingError(f"{message}, not {ids}")
        self.members = nnx.List(members)
        self.config = members[0].config

    def prefill(self, batch: Batch, max_length: int) -> tuple[Float32[Array, "B V"], tuple[Cache, ...]]:
        """Return the mean of the logits, and the caches, as ``Transformer.prefill`` does."""
        return _mean_logits([member.prefill(batch, max_length) for member in self.members])

    def unstack(self, cache: tuple[Cache, ...]) -> tuple["Ensemble", tuple[Cache, ...]]:
        """Return the members and their caches with each layer's arrays apart."""
        pairs = zip(self.members, cache, strict=True)
        members, caches = zip(*(member.unstack(member_cache) for member, member_cache in pairs), strict=True)
        return Ensemble(members), caches

    def step(
        self, tokens: Int[Array | np.ndarray, " B"], cache: tuple[Cache, ...]
    ) -> tuple[Float32[Array, "B V"], tuple[Cache, ...]]:
        """Return the mean of the logits, and the caches, as ``Transformer.step`` does."""
        pairs = zip(self.members, cache, strict=True)
        return _mean_logits([member.step(tokens, member_cache) for member, member_cache in pairs])


def _mean_logits(outputs: Sequence[tuple[Array, Cache]]) -> tuple[Array, tuple[Cache, ...]]:
    logits, caches = zip(*outputs, strict=True)
    return sum(logits) / len(logits), caches

"""Several models that write as one: the mean of their logits, before the softmax (Raffel et al. 2020, section
3.6).
"""

from collections.abc import Sequence

import jax
from flax import nnx

from lm.nn.cache import Cache
from lm.nn.transformer import Batch, Transformer
from lm.settings import SettingError


class Ensemble(nnx.Module):
    """What decoding asks of a ``Transformer``, answered by all ``members``; the cache is a tuple of
    theirs.
    """

    def __init__(self, members: Sequence[Transformer]):
        ids = {(member.config.vocab_size, member.config.special) for member in members}
        if len(ids) != 1:
            raise SettingError(
                f"an ensemble should be models of the same model.vocab_size and special ids, not {ids}"
            )
        self.members = nnx.List(members)
        self.config = members[0].config

    def prefill(self, batch: Batch, size: int) -> tuple[jax.Array, tuple[Cache, ...]]:
        return _mean([member.prefill(batch, size) for member in self.members])

    def step(self, tokens: jax.Array, cache: tuple[Cache, ...]) -> tuple[jax.Array, tuple[Cache, ...]]:
        return _mean([member.step(tokens, held) for member, held in zip(self.members, cache, strict=True)])


def _mean(answers: Sequence[tuple[jax.Array, Cache]]) -> tuple[jax.Array, tuple[Cache, ...]]:
    logits, caches = zip(*answers, strict=True)
    return sum(logits) / len(logits), caches

"""Settings of skip-gram, without jax, so that listing experiments starts at once."""

from dataclasses import dataclass, fields
from typing import Literal

from lm.config.base import ABOVE_0, SettingError, above_0, at_least, setting


@dataclass(frozen=True)
class SkipGramTraining:
    """Settings of the training of skip-gram's tables, whatever their size."""

    window: int = 5  # contexts on either side of a centre, at most [words]
    # contexts on either side: all of the window, or a number drawn from 1..window for each centre (word2vec)
    reach: Literal["whole", "random"] = "random"
    negatives: int = 5  # drawn for each centre; 0: the full softmax
    subsample: float = 0.0  # words of a higher frequency are left out at random; 0: none are
    learning_rate: float = 0.025  # of a pair at the start; it falls linearly to ``last_rate``
    last_rate: float = 0.0001  # at the end
    epochs: int = 5  # passes over the text
    # centres of a batch, whose updates are summed; 16 to 256 reach the same held-out loss at equal rates
    batch: int = 256

    def check(self, prefix: str, least: int) -> None:
        """Raise SettingError for numbers without sense, or fewer epochs than ``least``.

        Names in messages begin with ``prefix``.
        """
        at_least(self, prefix, window=1, negatives=0, subsample=0, epochs=least, batch=1)
        at_least(self, prefix, learning_rate=0, last_rate=0)


@dataclass(frozen=True)
class SkipGramConfig(SkipGramTraining):
    """Settings of skip-gram."""

    d_model: int = 100  # columns of both tables

    def __post_init__(self) -> None:
        self.check("", least=1)
        at_least(self, "", d_model=1)


@dataclass(frozen=True)
class VectorsConfig(SkipGramTraining):
    """Skip-gram over the pieces of the text before pre-training, whose embedding starts as its vectors."""

    epochs: int = 0  # passes over the text; 0: the embedding starts at random
    tokens: int = 2**26  # of the text, from its start, that are read at most [tokens]
    # in pre-training
    embedding: Literal["trained", "frozen"] = setting("trained", {"pretraining.steps": ABOVE_0})

    def __post_init__(self) -> None:
        self.check("vectors.", least=0)
        at_least(self, "vectors.", tokens=1)
        above_0(self, "vectors.", "learning_rate")
        if self.embedding == "frozen" and not self.epochs:
            raise SettingError("vectors.embedding='frozen' needs vectors.epochs above 0, or it stays random")

    def of_width(self, d_model: int) -> SkipGramConfig:
        """Return the settings of tables with ``d_model`` columns."""
        return SkipGramConfig(
            **{x.name: getattr(self, x.name) for x in fields(SkipGramTraining)}, d_model=d_model
        )

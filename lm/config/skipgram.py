"""Settings of skip-gram, without jax, so that listing experiments starts at once."""

from dataclasses import dataclass, fields
from typing import Literal

from lm.config.base import ABOVE_0, SettingError, above_0, at_least, setting


@dataclass(frozen=True)
class SkipGramTraining:
    """Settings of the training of skip-gram's tables, whatever their size."""

    window: int = 5  # largest number of contexts on each side of a centre [words]
    # number of contexts on each side: the whole window, or, as in word2vec, a random number from 1 to window
    # for each centre
    reach: Literal["whole", "random"] = "random"
    negatives: int = 5  # number of negative samples per centre; 0: full softmax
    subsample: float = 0.0  # frequency above which words are randomly left out; 0: never
    learning_rate: float = 0.025  # learning rate of a pair at the start; it decays linearly to last_rate
    last_rate: float = 0.0001  # learning rate at the end
    epochs: int = 5  # number of passes over the text [passes]
    # number of centres per batch, whose updates are summed; from 16 to 256 they reach the same held-out loss
    # at equal rates [words]
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

    epochs: int = 0  # number of passes of skip-gram over the text; 0: random initial embeddings [passes]
    tokens: int = 2**26  # largest number of tokens read, from the start of the text [tokens]
    # whether pre-training goes on to train the embedding, or freezes it
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

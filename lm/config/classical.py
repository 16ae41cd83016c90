"""Settings of the models that came before the Transformer: n-grams, hidden Markov models and skip-gram."""

from dataclasses import dataclass
from typing import Literal

from lm.config.base import ABOVE_0, Condition, SettingError, check_above_0, check_at_least, setting

TAGGER: Condition = {"model": ("tagger",)}

MAX_ORDER = 5  # of n-grams


@dataclass(frozen=True)
class HMMConfig:
    """How a hidden Markov model is estimated; without smoothing, probabilities are relative frequencies."""

    # added to the count of every first tag and pair of tags; above 0, every sentence can be tagged
    smoothing: float = 0.0
    rare: int = 1  # words with at most this count model unknown words
    suffix: int = 5  # longest suffix by which unknown words are tagged [characters]
    shorter: float = 0.1  # weight of all shorter suffixes; the suffix has weight 1 (theta of Brants 2000)

    def __post_init__(self) -> None:
        check_at_least(self, "counts.markov.", smoothing=0, rare=1, suffix=0, shorter=1e-6)


@dataclass(frozen=True)
class CountsConfig:
    """A model made of counts instead of a network; it is neither pre-trained nor fine-tuned."""

    # ngram: interpolated Kneser-Ney, counted on the text that pre-training would read, once over
    # tagger: a hidden Markov model for each of tuning.heads
    model: Literal["none", "ngram", "tagger"] = "none"
    order: int = setting(3, {"model": ("ngram",)})  # of n-grams: the predicted token and its context [tokens]
    # how a tagger decides: each word alone, or the path of tags by beams of width 1, beam_width, or all tags
    tagging: Literal["most-frequent", "greedy", "beam", "viterbi"] = setting("viterbi", TAGGER)
    beam_width: int = setting(4, TAGGER | {"tagging": ("beam",)})  # of tagging="beam" [tags]
    markov: HMMConfig = setting(HMMConfig(smoothing=0.1), TAGGER | {"tagging": ("greedy", "beam", "viterbi")})

    def __post_init__(self):
        check_at_least(self, "counts.", beam_width=1)
        if not 1 <= self.order <= MAX_ORDER:
            raise SettingError(f"counts.order={self.order} should be from 1 to {MAX_ORDER}")


@dataclass(frozen=True)
class VectorsConfig:
    """Skip-gram over the pieces of the text before pre-training, whose embedding starts as its vectors."""

    window: int = 5  # largest distance between a centre word and its contexts [words]
    # contexts on either side: all of the window, or a number drawn from 1..window for each centre (word2vec)
    reach: Literal["whole", "random"] = "random"
    negatives: int = 5  # drawn for each centre; 0: the full softmax
    subsample: float = 0.0  # words of a higher frequency are dropped at random; 0: none are
    learning_rate: float = 0.025  # of a pair at the start; it falls linearly to ``last_rate``
    last_rate: float = 0.0001  # at the end
    epochs: int = 0  # passes over the text; 0: the embedding starts at random
    # centres of a batch, whose updates are summed; 16 to 256 reach the same held-out loss at equal rates
    batch: int = 256
    tokens: int = 2**26  # most tokens that are read, from the start of the text [tokens]
    # in pre-training
    embedding: Literal["trained", "frozen"] = setting("trained", {"pretraining.steps": ABOVE_0})

    def __post_init__(self) -> None:
        check_at_least(self, "vectors.", window=1, negatives=0, subsample=0, epochs=0, batch=1)
        check_at_least(self, "vectors.", learning_rate=0, last_rate=0, tokens=1)
        check_above_0(self, "vectors.", "learning_rate")
        if self.embedding == "frozen" and not self.epochs:
            raise SettingError("vectors.embedding='frozen' needs vectors.epochs above 0, or it stays random")

"""Settings of models made of counts."""

from dataclasses import dataclass
from typing import Literal

from lm.config.base import Condition, SettingError, at_least, setting

TAGGER: Condition = {"model": ("tagger",)}

HIGHEST_ORDER = 5


@dataclass(frozen=True)
class MarkovConfig:
    """Estimation of probabilities from counts; without smoothing they are the relative frequencies."""

    # added to the count of every first tag and pair of tags; above 0, every sentence can be tagged
    smoothing: float = 0.0
    rare: int = 1  # words that occur at most so often stand for unknown ones
    suffix: int = 5  # the longest ending that an unknown word is told by [characters]
    shorter: float = 0.1  # weight of all shorter endings against one with weight 1 (theta of Brants 2000)

    def __post_init__(self) -> None:
        at_least(self, "", smoothing=0, rare=1, suffix=0, shorter=1e-6)


@dataclass(frozen=True)
class CountsConfig:
    """A model made of counts instead of a network, which is then neither pre-trained nor fine-tuned."""

    # ngram: interpolated Kneser-Ney, of the text that pre-training would read, once over
    # tagger: hidden Markov, of each of tuning.heads
    model: Literal["none", "ngram", "tagger"] = "none"
    order: int = setting(3, {"model": ("ngram",)})  # of n-grams: the predicted token and its context [tokens]
    # how a tagger decides: each word alone, or the path of tags by beams of width 1, beam_width, or all tags
    tagging: Literal["most-frequent", "greedy", "beam", "viterbi"] = setting("viterbi", TAGGER)
    beam_width: int = setting(4, TAGGER | {"tagging": ("beam",)})  # of tagging="beam" [tags]
    markov: MarkovConfig = setting(
        MarkovConfig(smoothing=0.1), TAGGER | {"tagging": ("greedy", "beam", "viterbi")}
    )

    def __post_init__(self):
        at_least(self, "counts.", beam_width=1)
        if not 1 <= self.order <= HIGHEST_ORDER:
            raise SettingError(f"counts.order={self.order} should be from 1 to {HIGHEST_ORDER}")

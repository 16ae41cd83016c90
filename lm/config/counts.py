"""Settings of models made of counts."""

from dataclasses import dataclass
from typing import Literal

from lm.config.base import Condition, SettingError, at_least, setting

TAGGER: Condition = {"model": ("tagger",)}

HIGHEST_ORDER = 5


@dataclass(frozen=True)
class MarkovConfig:
    """Estimation of probabilities from counts; without smoothing they are the relative frequencies."""

    # count added to every first tag and pair of tags; above 0, every sentence can be tagged
    smoothing: float = 0.0
    rare: int = 1  # largest frequency of the words from which unknown words are estimated [words]
    suffix: int = 5  # longest suffix by which an unknown word is recognised [characters]
    shorter: float = 0.1  # weight of all shorter suffixes against one with weight 1 (theta of Brants 2000)

    def __post_init__(self) -> None:
        at_least(self, "", smoothing=0, rare=1, suffix=0, shorter=1e-6)


@dataclass(frozen=True)
class CountsConfig:
    """A model made of counts instead of a network, which is then neither pre-trained nor fine-tuned."""

    # model made of counts instead of a network: interpolated Kneser-Ney n-grams of the text of pre-training,
    # read once, or a hidden Markov tagger for each of tuning.heads
    model: Literal["none", "ngram", "tagger"] = "none"
    # order of the n-grams: the predicted token and its context [tokens]
    order: int = setting(3, {"model": ("ngram",)})
    # how tags are decoded: the most frequent one per word, or paths of tags with a beam of 1 (greedy),
    # beam_width, or all tags (Viterbi)
    tagging: Literal["most-frequent", "greedy", "beam", "viterbi"] = setting("viterbi", TAGGER)
    beam_width: int = setting(4, TAGGER | {"tagging": ("beam",)})  # width of the beam of tagging=beam [tags]
    markov: MarkovConfig = setting(
        MarkovConfig(smoothing=0.1), TAGGER | {"tagging": ("greedy", "beam", "viterbi")}
    )

    def __post_init__(self):
        at_least(self, "counts.", beam_width=1)
        if not 1 <= self.order <= HIGHEST_ORDER:
            raise SettingError(f"counts.order={self.order} should be from 1 to {HIGHEST_ORDER}")

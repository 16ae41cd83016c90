"""Settings of decoding, without jax, so that a command line can offer them."""

from dataclasses import dataclass

from lm.config.base import SettingError, check_at_least


@dataclass(frozen=True)
class Decoding:
    """How answers are decoded: greedily, by sampling with a temperature, or by beam search."""

    max_length: int = 64  # longest answer [tokens]
    beams: int = 1  # number of beams; 1: no beam search
    # length penalty of beam search; 0 compares log-probabilities, larger values favour long answers
    length_penalty: float = 0.6
    temperature: float = 0.0  # sampling temperature, which divides the logits; 0: greedy
    top_k: int = 0  # sample from this many of the likeliest tokens; 0: from all [tokens]
    top_p: float = 1.0  # sample from the likeliest tokens that together have this probability

    def __post_init__(self):
        check_at_least(self, "", max_length=1, beams=1, top_k=0)
        if not self.temperature >= 0:
            raise SettingError(f"temperature={self.temperature} should be 0 or more, such as 0.8")
        if not 0 < self.top_p <= 1:
            raise SettingError(f"top_p={self.top_p} should be above 0 and at most 1, which keeps all tokens")
        if self.beams > 1 and self.temperature:
            raise SettingError(f"beams={self.beams} and temperature={self.temperature} exclude each other")
        if (self.top_k or self.top_p != 1) and not self.temperature:
            limits = f"top_k={self.top_k} and top_p={self.top_p}"
            raise SettingError(f"{limits} need a temperature above 0, such as 1.0")

"""Settings of the Universal Transformer, whose layers are steps of one block.

Sources: Dehghani et al. 2018 (Universal Transformers), and the code of Narang et al. 2021.
"""

from dataclasses import dataclass
from typing import Literal

from lm.config.base import Condition, SettingError, setting

ADAPTIVE: Condition = {"halting": ("adaptive",)}


@dataclass(frozen=True)
class UniversalConfig:
    """The Universal Transformer: what each step adds to its input, gates, and halting."""

    # what is added to the input of each step: nothing, a vector that is learned for each step (step), or that
    # and sines and cosines of the position (step-and-position), as in the program of Dehghani et al. 2018; in
    # their paper steps have sines and cosines too
    embedding: Literal["none", "step", "step-and-position"] = "none"
    # gate between each sub-layer's input and its output, before this is added: none, or that of a GRU (Narang
    # et al. 2021)
    gate: Literal["none", "gru"] = "none"
    # when a position halts: after all steps, or when its halting probabilities add up to the threshold
    # (adaptive computation time, Graves 2016)
    halting: Literal["last-step", "adaptive"] = "last-step"
    threshold: float = setting(0.99, ADAPTIVE)  # sum of halting probabilities from which a position halts

    def __post_init__(self):
        if not 0 < self.threshold <= 1:
            raise SettingError(f"model.universal.threshold={self.threshold} should be in (0, 1]")

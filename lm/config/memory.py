"""Settings of a product-key memory, which takes the place of one feed-forward layer.

Source: Lample et al. 2019 (Large memory layers with product keys).
"""

from dataclasses import dataclass

from lm.config.base import ABOVE_0, Condition, SettingError, check_at_least, check_at_most, setting

READ: Condition = {"keys": ABOVE_0}


@dataclass(frozen=True)
class MemoryConfig:
    """A product-key memory: each token reads the values of the keys that are nearest to its queries."""

    # number of keys of each half; the memory has a value for each pair of them; 0: no memory [keys]
    keys: int = 0
    # layer that has the memory in place of its feed-forward layer, counted from the last, -1; of an
    # encoder-decoder, the decoder's
    layer: int = setting(-2, READ)
    heads: int = setting(4, READ)  # number of queries of a token, each with keys of its own [heads]
    key_width: int = setting(128, READ)  # width of a query: half of it is compared with each half [features]
    neighbours: int = setting(32, READ)  # number of values that a query reads [values]

    def __post_init__(self):
        prefix = "model.memory."
        check_at_least(self, prefix, keys=0, heads=1, key_width=2, neighbours=1)
        check_at_most(self, prefix, keys=2**15, layer=-1)
        if self.key_width % 2:
            raise SettingError(
                f"{prefix}key_width={self.key_width} should be even: each query has two halves"
            )
        if self.keys and self.neighbours > self.keys:
            raise SettingError(
                f"{prefix}neighbours={self.neighbours} should be at most {prefix}keys={self.keys}"
            )

"""Settings of the Funnel-Transformer, an encoder whose rows get shorter.

Source: Dai et al. 2020 (Funnel-Transformer).
"""

from dataclasses import dataclass

from lm.config.base import Condition, Values, check_at_least, check_at_most, setting

FUNNEL: Condition = {"blocks": Values(exclude=(1,), description="2 or more")}


@dataclass(frozen=True)
class FunnelConfig:
    """The Funnel-Transformer: neighbours become one in the first layer of each block but the first."""

    # number of blocks of the encoder, each about as many layers, whose rows are shorter than those of the
    # block before; 1: all rows are as long as the text [blocks]
    blocks: int = 1
    size: int = setting(2, FUNNEL)  # number of neighbours whose mean takes their place [positions]

    def __post_init__(self):
        check_at_least(self, "model.funnel.", blocks=1, size=2)
        check_at_most(self, "model.funnel.", blocks=16, size=16)

    @property
    def multiple(self) -> int:
        """Return the number of tokens that become one position of the encoder's output.

        Packed examples begin at multiples of it, so that none shares a position with another.
        """
        return self.size ** (self.blocks - 1)

    def pooling_layers(self, num_layers: int) -> tuple[int, ...]:
        """Return the layers in which rows get shorter: the first of each block but the first.

        >>> FunnelConfig(blocks=3).pooling_layers(12)
        (4, 8)
        """
        return tuple(round(block * num_layers / self.blocks) for block in range(1, self.blocks))

    def row_lengths(self, num_layers: int, length: int) -> list[int]:
        """Return the length of the input of each layer, and last that of the output [positions].

        >>> FunnelConfig(blocks=3).row_lengths(3, 9)
        [9, 9, 5, 3]
        """
        lengths, pooling = [length], self.pooling_layers(num_layers)
        for layer in range(num_layers):
            lengths.append(-(-lengths[-1] // self.size) if layer in pooling else lengths[-1])
        return lengths

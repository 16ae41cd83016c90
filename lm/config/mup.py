"""Settings of the maximal update parametrisation (muP), whose best learning rate does not move with width.

Source: Yang et al. 2022, "Tensor Programs V", arXiv 2203.03466. Of its equivalent tables this is the one in
which the output matrix may be tied to the embedding (Table 8), with the column of Adam:

    parameters                                  standard deviation     factor of products  learning rate
    embeddings, positions, biases, norms        that of the base       1                   1
    hidden matrices (both sides grow)           1 / sqrt(fan-in)       1                   base / width
    output matrix                               that of the base       base / width        1
    queries times keys                          -                      base d_kv / d_kv    -

"The base" is the model of width ``base``. It is the standard parametrisation itself, bit for bit. The other
widths (d_ff, and the number of heads times d_kv) grow in proportion to d_model.
"""

from dataclasses import dataclass

from lm.config.base import ABOVE_0, Condition, Values, check_at_least, setting
from lm.config.layers import RELATIVE_VECTOR_KINDS

# The values of settings of a model for whose parts the table has a rule.
COVERED: Condition = {
    "block": ("transformer",),
    "mixer.kind": ("attention",),
    "attention.scores": ("dot", "scaled-dot"),
    "attention.branching": ("none",),
    "attention.compression": (1,),
    "positions.kind": Values(exclude=RELATIVE_VECTOR_KINDS),
    "cross_attention.kind": ("heads", "merged"),
    # of the base only one width of heads is known
    "cross_attention.d_kv": (None,),
    "encoder.d_kv": (None,),
    "residual": Values(exclude=("fixup",)),
    "embedding.d_embed": (None,),
    "embedding.clusters": ((),),
    "embedding.convolution": (0,),
    "experts.count": (0,),
    "memory.keys": (0,),
    "universal.embedding": ("none",),
    "universal.gate": ("none",),
    "universal.halting": ("last-step",),
    "mlp.adapter_width": (0,),
    "lora.rank": (0,),
    "heads": ((),),
    "output.softmaxes": (1,),
    "output.softmax": ("full",),
}


@dataclass(frozen=True)
class MupConfig:
    """The maximal update parametrisation: a learning rate that was tuned at one width serves all widths."""

    # d_model at which the learning rate was tuned; 0: the standard parametrisation [features]
    base: int = 0
    # d_kv at that width, if wider models have wider heads; None: d_kv, if they have more heads [features]
    base_d_kv: int | None = setting(None, {"base": ABOVE_0})

    def __post_init__(self):
        check_at_least(self, "model.mup.", base=0, base_d_kv=1)

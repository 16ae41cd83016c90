"""Rungs for ``lm ladder``: language models of three kinds, each at five sizes.

From rung to rung the width of a model and the number of its updates grow by the same factor. All rungs have
the optimiser COMMON_OPTIMIZER. The largest have the sizes, updates and text of the table ``history``.
"""

from dataclasses import replace

from experiments.study.baselines import COMMON_OPTIMIZER, EqualSize, language_model
from experiments.study.changes import Changes, times
from experiments.study.table import make_table

KINDS = ("window", "lstm", "transformer")
SIZES = (0.25, 0.375, 0.5, 0.75, 1)  # widths and updates, as multiples of those of the table history


def at_size(kind: str, size: float) -> Changes:
    """Return a kind of language model with ``size`` times the width and ``size`` times the updates."""
    model = language_model(kind)
    width = model.get("model.mixer.width")
    if isinstance(width, EqualSize):
        model |= {"model.mixer.width": replace(width, d_ff_factor=size)}
    else:
        model |= {"model.mlp.d_ff": times(size)}
    # widths come first, since those of recurrent layers follow from them
    sizes: Changes = {"model.d_model": times(size), "model.attention.d_kv": times(size)}
    return sizes | model | COMMON_OPTIMIZER | {"pretraining.steps": times(4 * size)}


TABLES = (
    # a seed of a kind takes about as long as its row of the table history alone: the smaller rungs are cheap
    make_table(
        "ladder",
        "How the loss of a language model falls with compute",
        {f"{kind}-x{size:g}": at_size(kind, size) for kind in KINDS for size in SIZES},
        baseline="transformer-x1",
        scale="mini",
        seeds=3,
    ),
)

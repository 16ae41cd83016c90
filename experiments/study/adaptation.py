"""Pre-training that goes on with another objective or mask: adaptations of T5 and of decoders.

T5 was adapted to language modelling before prompts were tuned, by a tenth more steps (Lester et al. 2021,
section 3.3). Wang et al. 2022 (section 5) adapt causal decoders to span corruption with a prefix mask, and
models of span corruption to language modelling. All continue the optimiser and its schedule.
"""

from experiments.study.changes import Changes, after_pretraining, objective
from experiments.study.experiment import Mask
from experiments.study.table import Conclusion, make_table
from lm.objectives.denoising import OBJECTIVES

LM_ADAPTATION = 100 / 1_000  # steps of language modelling for each step before (Lester et al. 2021)
MLM_ADAPTATION = 51 / 168  # tokens of span corruption for each token before (Wang et al. 2022, section 5)
DECODER: Changes = {"model.architecture": "decoder"}
PREFIX_DECODER: Changes = {"model.architecture": "prefix-decoder"}


def after(name: str, extra: float, mask: Mask | None = None) -> Changes:
    """Return all steps of the scale by the objective of this name, and ``extra`` times as many after them."""
    return after_pretraining(1 + extra, OBJECTIVES[name], mask, "continue")


TABLES = (
    # six to ten minutes each
    make_table(
        "adaptation",
        "Adaptations: one objective or mask, then another",
        {
            "t5": objective("span-corruption"),
            "t5-lm-adapted": objective("prefix-lm") | after("span-corruption", LM_ADAPTATION),
            "decoder": DECODER | objective("language-model"),
            "decoder-to-prefix": PREFIX_DECODER
            | objective("span-corruption")
            | after("language-model", MLM_ADAPTATION, "causal"),
            "prefix": PREFIX_DECODER | objective("span-corruption"),
            "prefix-to-decoder": DECODER
            | objective("language-model")
            | after("span-corruption", LM_ADAPTATION, "prefix"),
        },
        scale="mini",
        seeds=5,
        # written down before the rows were trained
        conclusions=(
            Conclusion("decoder-to-prefix", "decoder", "a decoder gains by adapting to span corruption"),
            Conclusion("decoder-to-prefix", "prefix", "a causal model first is better than none"),
        ),
    ),
)

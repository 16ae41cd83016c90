"""The tables of Shazeer 2020 ("GLU variants improve Transformer"): a line for each row.

A row replaces the feed-forward layer of the T5 baseline, which predicts spans here. A gate has a third
matrix, so that its layer is 2/3 as wide and has as many parameters. Choices made where the paper is silent:
docs/choices.md.
"""

from functools import partial
from pathlib import Path

from experiments.study.changes import Changes, objective
from experiments.study.papers.setups import NOT_TUNED, gated
from experiments.study.table import (
    Conclusion,
    Missing,
    NoiseEstimate,
    Paper,
    PublishedScores,
    make_setup,
    make_table,
    missing,
)

_SCORES = PublishedScores(Path(__file__).with_name("glu_scores.json"))
STEPS = 524_288
SPANS: Changes = objective("span-corruption") | {"model.dropout": 0.0}
# The rate falls linearly over the last tenth of the steps.
DECAY: Changes = {
    "pretraining.optimizer.schedule": "inverse-sqrt-linear",
    "pretraining.optimizer.decay_start": STEPS * 9 // 10,
    "pretraining.optimizer.decay_end": STEPS,
}
TUNED: Changes = DECAY | {"tuning.mixtures": ("glue", "super_glue", "squad"), "finetuning.steps": 131_072}

PAPER = Paper(
    name="GLU variants",
    citation="Shazeer 2020",
    authors="Noam Shazeer",
    title="GLU Variants Improve Transformer",
    columns=_SCORES.columns,
    question="Does a gate in the feed-forward layer help at equal parameters and operations, and which one?",
    source="arXiv 2002.05202",
    noise=NoiseEstimate(4, "the baseline for the loss after 65,536 steps; tasks: ten runs of the T5 paper"),
    setup=make_setup(SPANS, TUNED),
)


ROWS: dict[str, Changes | Missing] = {
    "relu": {},
    "gelu": {"model.mlp.activation": "gelu-tanh"},  # the form in the code that the paper used
    "swish": {"model.mlp.activation": "silu"},
    "glu": gated("gated-sigmoid"),
    "bilinear": gated("gated-linear"),
    "geglu": gated("gated-gelu"),
    "swiglu": gated("gated-silu"),
    "reglu": gated("gated-relu"),
}
QUOTED: dict[str, Changes | Missing] = {"raffel": missing("another paper's run")}

_table = partial(make_table, scale="mini", seeds=5, paper=PAPER, published=_SCORES)

# lm sweep 'glu/*'; in the paper GEGLU has 1.942 in Table 1 and ReLU 1.997
TABLES = (
    # four minutes each, without fine-tuning
    _table(
        "glu/1-perplexity",
        "Feed-forward layers: held-out loss",
        ROWS,
        columns=["LOSS-65k"],
        conclusions=(
            Conclusion("geglu", "relu", "a gate with GELU helps"),
            Conclusion("swiglu", "relu", "a gate with Swish helps"),
            Conclusion("geglu", "gelu", "the gate helps, not GELU alone"),
            Conclusion("reglu", "relu", "a gate with ReLU helps"),
            Conclusion("bilinear", "relu", "a gate without activation helps"),
            Conclusion("glu", "relu", "a gate with a sigmoid helps"),
        ),
        setup=make_setup(SPANS | NOT_TUNED, DECAY),
    ),
    # seven minutes each
    _table(
        "glu/2-glue",
        "Feed-forward layers: GLUE",
        ROWS | QUOTED,
        columns=["GLUE"],
        conclusions=(
            Conclusion("reglu", "relu", "gates help after fine-tuning"),
            Conclusion("relu", "raffel", "no dropout in pre-training helps"),
        ),
    ),
    # the runs of the table before
    _table(
        "glu/3-superglue",
        "Feed-forward layers: SuperGLUE",
        ROWS | QUOTED,
        columns=["SGLUE"],
        conclusions=(Conclusion("swiglu", "relu", "gates help after fine-tuning"),),
    ),
    # the runs of the table before
    _table(
        "glu/4-squad",
        "Feed-forward layers: SQuAD",
        ROWS | QUOTED,
        columns=["SQuAD-EM", "SQuAD-F1"],
        conclusions=(Conclusion("bilinear", "relu", "gates help after fine-tuning"),),
    ),
)

"""The mask rates of Wettig et al. 2022 ("Should you mask 15 % ...?"): a line for each row.

Encoders with norms before each layer, whose hidden tokens are all [MASK] unless the row says otherwise.
Choices made where the recipe is silent: docs/choices.md.
"""

from pathlib import Path

from experiments.study.changes import Changes, at_least
from experiments.study.classic import NO_NSP
from experiments.study.papers.setups import (
    LEARNED,
    ROTARY,
    WIKIPEDIA_AND_BOOKS,
    adamw,
    pretraining,
    size,
    tuned_by_heads,
    vocabulary,
)
from experiments.study.presets import BERT
from experiments.study.table import Axis, Conclusion, Paper, PublishedScores, make_setup, make_table

_SCORES = PublishedScores(Path(__file__).with_name("wettig_scores.json"))
STEPS = 23_000
# At the small scales positions are rotary: with learned ones this encoder stays on the unigram plateau
# (docs/choices.md). It is near it after a quarter of the updates in any case.
MASKED: Changes = (
    BERT
    | NO_NSP
    | ROTARY
    | {
        "model.residual": "pre-norm",
        "objective.inputs": "masks",
        "pretraining.steps": at_least(1_000),
        "tuning.branches": (1.0,),
    }
)
PUBLISHED: Changes = (
    size(24, 1_024, 16)
    | LEARNED
    | vocabulary("bpe", 50_265)
    | {"data.corpus": WIKIPEDIA_AND_BOOKS, "model.norm.epsilon": 1e-5, "model.embedding.norm": True}
    | pretraining(STEPS, 4_096, 128)
    | adamw(STEPS, 2e-3, 1_380, beta2=0.98, clip_norm=None)
    | tuned_by_heads(3e-5, 32, 128, warmup=0.06, beta2=0.98, weight_decay=0.1, clip_norm=None)
)
BERTS: Changes = {"objective.inputs": "masks-random-or-same"}  # 80 % [MASK], 10 % random, 10 % unchanged

PAPER = Paper(
    name="Mask rates",
    citation="Wettig et al. 2022",
    authors="Alexander Wettig, Tianyu Gao, Zexuan Zhong, Danqi Chen",
    title="Should You Mask 15% in Masked Language Modeling?",
    columns=_SCORES.columns,
    question="Is 15 % the right share of tokens to hide, and should some of them be random or unchanged?",
    source="arXiv 2202.08005",
    setup=make_setup(MASKED, PUBLISHED),
)


def rate(percent: int) -> Changes:
    """Return the change to this share of hidden tokens [%]."""
    return {} if percent == 15 else {"objective.rate": percent / 100}


TABLES = (
    # lm sweep wettig/mask-rate; six minutes each; in the paper 40 % has 84.5 on MNLI and 15 % 84.2
    make_table(
        "wettig/mask-rate",
        "Masked language modelling: the share of hidden tokens",
        {str(percent): rate(percent) for percent in (15, 20, 30, 40, 50, 60, 70, 80)}
        | {f"{percent}-801010": rate(percent) | BERTS for percent in (15, 40)},
        axis=Axis("objective.rate", "share of hidden tokens"),
        scale="mini",
        seeds=5,
        paper=PAPER,
        published=_SCORES,
        conclusions=(
            Conclusion("40", "15", "40 % is better than 15 %", "MNLI"),
            Conclusion("15", "80", "80 % is too much", "MNLI"),
            Conclusion("40", "40-801010", "[MASK] alone is better, at 40 %", "MNLI"),
            Conclusion("15", "15-801010", "[MASK] alone is better, at 15 %", "MNLI"),
        ),
    ),
)

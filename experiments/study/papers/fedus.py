"""The tables of Fedus et al. 2021 (Switch Transformers): a line for each row.

Dense rows are T5 with gates; in rows with experts every second feed-forward layer is a mixture. Choices made
where the paper is silent: docs/choices.md.
"""

from pathlib import Path
from typing import Literal

from experiments.study.changes import Changes, objective, share_of, times
from experiments.study.papers.setups import NOT_TUNED, gated, pretraining
from experiments.study.table import (
    Conclusion,
    NoiseEstimate,
    Paper,
    PublishedScores,
    make_setup,
    make_table,
    missing,
)

_SCORES = PublishedScores(Path(__file__).with_name("fedus_scores.json"))
T5_GATED: Changes = objective("span-corruption") | gated("gated-gelu")
TUNED: Changes = {"tuning.mixtures": ("glue", "super_glue", "cnn_dailymail", "squad")}
PAPER = Paper(
    name="Switch Transformer",
    citation="Fedus et al. 2021",
    authors="William Fedus, Barret Zoph, Noam Shazeer",
    title="Switch Transformers: Scaling to Trillion Parameter Models with Simple and Efficient Sparsity",
    columns=_SCORES.columns,
    question="Is one expert per token better than two and than a dense model, at equal operations?",
    source="arXiv 2101.03961",
    noise=NoiseEstimate(3, "Switch-Base with small initial values, for the loss after 3,500 steps"),
    setup=make_setup(T5_GATED | NOT_TUNED, pretraining(550_000, 2_048, 512)),
)
SHORT = make_setup(T5_GATED | NOT_TUNED, pretraining(100_000, 2_048, 512))
# Sizes of groups: in the paper the tokens of a batch on each of 32 cores share the capacity of the experts.
GROUP = share_of("pretraining.batch_size", 1 / 32)


def larger(width: float, d_ff: float) -> Changes:
    """Return twice the layers, and so many times the widths of T5 base."""
    return {
        "model.d_model": times(width, 8),
        "model.mlp.d_ff": times(d_ff, 8),
        "model.attention.num_heads": times(width),
        "model.num_encoder_layers": times(2),
        "model.num_decoder_layers": times(2),
    }


LARGE, XXL = larger(4 / 3, 11 / 8), larger(16 / 3, 5)


def switch(
    factor: float = 1.25, per_token: int = 1, *, every: int = 2, experts: int = 128, d_model: int = 768
) -> Changes:
    """Return layers with experts, as many as in the paper at its ``d_model``, and fewer in narrower models.

    factor: capacity factor in training; in evaluation it is 2.
    """
    return {
        "model.experts.count": share_of("model.d_model", experts / d_model, 8),
        "model.experts.per_token": per_token,
        "model.experts.every": every,
        "model.experts.capacity_factor": factor,
        "model.experts.eval_capacity_factor": 2.0,
        "model.experts.group_rows": GROUP,
        "model.experts.exploration": "jitter",
    }


LARGER: Changes = {"model.d_model": times(7 / 6, 8), "model.attention.num_heads": times(4 / 3)}
# Switch-C: 15 layers, all with experts, and no gates.
TRILLION: Changes = {
    "model.d_model": times(2_080 / 768, 8),
    "model.mlp.activation": "relu",
    "model.mlp.d_ff": times(3, 8),
    "model.attention.num_heads": times(8 / 3),
    "model.num_encoder_layers": times(5 / 4),
    "model.num_decoder_layers": times(5 / 4),
}


def exploring(how: Literal["none", "sample", "dropout", "jitter"]) -> Changes:
    """Return a router that tries other experts in this way."""
    return switch() | {"model.experts.exploration": how}


TABLES = (
    # lm sweep fedus/1-moe; four and eleven minutes; in the paper T5-Base has -1.731 and T5-Large -1.550
    make_table(
        "fedus/1-moe",
        "Experts and dense models",
        {
            "t5-base": {},
            "t5-large": LARGE,
            "moe-2.0": switch(2.0, 2),
            "switch-2.0": switch(2.0),
            "moe-1.25": switch(1.25, 2),
            "switch-1.25": switch(1.25),
            "moe-1.0": switch(1.0, 2),
            "switch-1.0": switch(1.0),
            "switch+1.0": LARGER | switch(1.0, d_model=896),
        },
        scale="mini",
        seeds=5,
        paper=PAPER,
        setup=SHORT,
        columns=["LOGPERP-100k"],
        published=_SCORES,
        conclusions=(
            Conclusion("switch-1.0", "t5-base", "experts help at equal operations"),
            Conclusion("switch-1.0", "moe-1.0", "one expert is better at low capacity"),
            Conclusion("switch-1.25", "moe-1.25", "one expert is better at low capacity"),
            Conclusion("switch+1.0", "moe-2.0", "one expert is better at equal speed"),
            Conclusion("t5-large", "t5-base", "a larger dense model is better"),
        ),
    ),
    make_table(
        "fedus/3-initial-values",
        "Initial values of models with experts",
        {"init-0.1": missing("smaller initial values of all matrices"), "init-1.0": switch(experts=32)},
        baseline="init-1.0",
        scale="mini",
        paper=PAPER,
        setup=make_setup(T5_GATED | NOT_TUNED, pretraining(3_500, 2_048, 512)),
        columns=["LOGPERP-3.5k"],
        published=_SCORES,
        conclusions=(Conclusion("init-0.1", "init-1.0", "small initial values are better"),),
    ),
    # lm sweep fedus/4-expert-dropout; seven minutes; in the paper T5-Base has 82.9 on GLUE
    make_table(
        "fedus/4-expert-dropout",
        "Dropout in fine-tuning",
        {
            "t5-base-d0.1": {"model.dropout": 0.1},  # which small scales do not have
            "switch-d0.1": switch() | {"model.dropout": 0.1},
            "switch-d0.2": switch() | {"model.dropout": 0.2},
            "switch-d0.3": switch() | {"model.dropout": 0.3},
            "switch-d0.1-ed0.4": switch() | {"model.dropout": 0.1, "model.experts.dropout": 0.4},
        },
        scale="mini",
        seeds=5,
        paper=PAPER,
        setup=make_setup(T5_GATED, TUNED | pretraining(65_536, 1_024, 512)),
        columns=["GLUE", "CNNDM", "SQuAD", "SGLUE"],
        published=_SCORES,
        conclusions=(
            Conclusion("switch-d0.1-ed0.4", "switch-d0.1", "dropout inside experts helps", "GLUE"),
            Conclusion("switch-d0.1", "switch-d0.3", "more dropout everywhere hurts", "GLUE"),
        ),
    ),
    # lm sweep fedus/9-sizes; four minutes to two hours; in the paper T5-Base has -1.599 after 250,000 steps
    make_table(
        "fedus/9-sizes",
        "Sizes of dense models and of models with experts",
        {
            "t5-base": {},
            "t5-large": LARGE,
            "t5-xxl": XXL,
            "switch-base": switch(),
            "switch-large": LARGE | switch(d_model=1_024),
            "switch-xxl": XXL | switch(experts=64, d_model=4_096),
            "switch-c": TRILLION | switch(every=1, experts=2_048, d_model=2_080),
        },
        scale="mini",
        seeds=3,
        paper=PAPER,
        columns=["LOGPERP-250k", "LOGPERP-500k"],
        published=_SCORES,
        conclusions=(
            Conclusion("t5-large", "t5-base", "a larger dense model is better"),
            Conclusion("switch-base", "t5-base", "experts help at equal operations"),
            Conclusion("switch-large", "t5-large", "experts help at equal operations"),
        ),
    ),
    make_table(
        "fedus/11-exploration",
        "How an expert is chosen",
        {
            "argmax": exploring("none"),
            "sample-softmax": exploring("sample"),
            "input-dropout": exploring("dropout") | {"model.experts.noise": 0.1},
            "input-jitter": exploring("jitter"),
        },
        scale="mini",
        paper=PAPER,
        columns=["LOGPERP"],
        published=_SCORES,
        conclusions=(Conclusion("input-jitter", "argmax", "jitter of the router's inputs helps"),),
    ),
)

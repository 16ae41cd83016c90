"""The tables of Fedus et al. 2021 (Switch Transformers): a line for each row.

Dense rows are T5 with gates. Rows with experts are listed with their scores, and cannot be built yet. Choices
made where the paper is silent: docs/choices.md.
"""

from pathlib import Path

from experiments.study.changes import Changes, objective, times
from experiments.study.papers.published import PublishedScores
from experiments.study.papers.setups import NOT_TUNED, gated, pretraining
from experiments.study.table import Conclusion, Missing, Paper, Yardstick, make_setup, make_table, missing

_SCORES = PublishedScores(Path(__file__).with_name("fedus_scores.json"))
T5_GATED: Changes = objective("span-corruption") | gated("gated-gelu")
TUNED: Changes = {"tuning.mixtures": ("glue", "super_glue", "cnn_dailymail", "squad")}
PAPER = Paper(
    name="Switch Transformer",
    citation="Fedus et al. 2021",
    columns=_SCORES.columns,
    question="Is one expert per token better than two and than a dense model, at equal operations?",
    source="arXiv 2101.03961",
    yardstick=Yardstick(3, "Switch-Base with small initial values, for the loss after 3,500 steps"),
    setup=make_setup(T5_GATED | NOT_TUNED, pretraining(550_000, 2_048, 512)),
)
SHORT = make_setup(T5_GATED | NOT_TUNED, pretraining(100_000, 2_048, 512))
EXPERTS = missing("mixture of experts")


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


def with_experts(dense: dict[str, Changes], *names: str) -> dict[str, Changes | Missing]:
    """Return dense rows, then rows with experts."""
    return {**dense, **dict.fromkeys(names, EXPERTS)}


TABLES = (
    # lm sweep fedus/1-moe; four and eleven minutes; in the paper T5-Base has -1.731 and T5-Large -1.550
    make_table(
        "fedus/1-moe",
        "Experts and dense models",
        with_experts(
            {"t5-base": {}, "t5-large": LARGE},
            *("moe-2.0", "switch-2.0", "moe-1.25", "switch-1.25", "moe-1.0", "switch-1.0", "switch+1.0"),
        ),
        scale="mini",
        seeds=5,
        paper=PAPER,
        setup=SHORT,
        columns=["LOGPERP-100k"],
        published=_SCORES.table("fedus/1-moe"),
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
        with_experts({}, "init-0.1", "init-1.0"),
        baseline="fedus/3-initial-values/init-1.0",
        scale="mini",
        paper=PAPER,
        columns=["LOGPERP-3.5k"],
        published=_SCORES.table("fedus/3-initial-values"),
        conclusions=(Conclusion("init-0.1", "init-1.0", "small initial values are better"),),
    ),
    # lm sweep fedus/4-expert-dropout; seven minutes; in the paper T5-Base has 82.9 on GLUE
    make_table(
        "fedus/4-expert-dropout",
        "Dropout in fine-tuning",
        with_experts({"t5-base-d0.1": {}}, "switch-d0.1", "switch-d0.2", "switch-d0.3", "switch-d0.1-ed0.4"),
        scale="mini",
        seeds=5,
        paper=PAPER,
        setup=make_setup(T5_GATED, TUNED | pretraining(65_536, 1_024, 512)),
        columns=["GLUE", "CNNDM", "SQuAD", "SGLUE"],
        published=_SCORES.table("fedus/4-expert-dropout"),
        conclusions=(
            Conclusion("switch-d0.1-ed0.4", "switch-d0.1", "dropout inside experts helps", "GLUE"),
            Conclusion("switch-d0.1", "switch-d0.3", "more dropout everywhere hurts", "GLUE"),
        ),
    ),
    # lm sweep fedus/9-sizes; four minutes to two hours; in the paper T5-Base has -1.599 after 250,000 steps
    make_table(
        "fedus/9-sizes",
        "Sizes of dense models and of models with experts",
        with_experts(
            {"t5-base": {}, "t5-large": LARGE, "t5-xxl": XXL},
            *("switch-base", "switch-large", "switch-xxl", "switch-c"),
        ),
        scale="mini",
        seeds=3,
        paper=PAPER,
        columns=["LOGPERP-250k", "LOGPERP-500k"],
        published=_SCORES.table("fedus/9-sizes"),
        conclusions=(
            Conclusion("t5-large", "t5-base", "a larger dense model is better"),
            Conclusion("switch-base", "t5-base", "experts help at equal operations"),
            Conclusion("switch-large", "t5-large", "experts help at equal operations"),
        ),
    ),
    make_table(
        "fedus/11-exploration",
        "How an expert is chosen",
        with_experts({}, "argmax", "sample-softmax", "input-dropout", "input-jitter"),
        scale="mini",
        paper=PAPER,
        columns=["LOGPERP"],
        published=_SCORES.table("fedus/11-exploration"),
        conclusions=(Conclusion("input-jitter", "argmax", "jitter of the router's inputs helps"),),
    ),
)

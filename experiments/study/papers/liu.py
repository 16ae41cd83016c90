"""The tables of Liu et al. 2019 (RoBERTa): a line for each row.

Rows of Tables 1 to 3 have the size of BERT-Base and its text, rows of Tables 4 and 8 that of BERT-Large.
Choices made where the paper is silent: docs/choices.md.
"""

from pathlib import Path

from experiments.study.changes import Changes, times
from experiments.study.classic import NO_NSP
from experiments.study.papers.setups import (
    GLUE_HEADS,
    RACE_HEADS,
    WIKIPEDIA_AND_BOOKS,
    adamw,
    pretraining,
    size,
    tuned_by_heads,
    vocabulary,
)
from experiments.study.papers.t5 import corpus
from experiments.study.presets import BERT
from experiments.study.table import (
    Conclusion,
    Missing,
    Paper,
    PublishedScores,
    make_setup,
    make_table,
    missing,
)

_SCORES = PublishedScores(Path(__file__).with_name("liu_scores.json"))
ROBERTA: Changes = BERT | NO_NSP
TASKS = GLUE_HEADS + RACE_HEADS
BASE: Changes = (
    size(12, 768, 12)
    | vocabulary("bpe", 50_265)
    | {"data.corpus": WIKIPEDIA_AND_BOOKS, "model.norm.epsilon": 1e-5}
    | pretraining(1_000_000, 256, 512)
    | adamw(1_000_000, 1e-4, 10_000)
    | tuned_by_heads(2e-5, 32, 512, heads=TASKS)  # as BERT
)
LARGE: Changes = (
    BASE
    | size(24, 1_024, 16)
    | pretraining(100_000, 8_192, 512)
    | adamw(100_000, 4e-4, 30_000, beta2=0.98, clip_norm=None)
    | tuned_by_heads(2e-5, 32, 512, heads=TASKS, warmup=0.06, beta2=0.98, weight_decay=0.1, clip_norm=None)
)
PAPER = Paper(
    name="RoBERTa",
    citation="Liu et al. 2019",
    authors=(
        "Yinhan Liu, Myle Ott, Naman Goyal, Jingfei Du, Mandar Joshi, Danqi Chen, Omer Levy, Mike Lewis, "
        "Luke Zettlemoyer, Veselin Stoyanov"
    ),
    title="RoBERTa: A Robustly Optimized BERT Pretraining Approach",
    columns=_SCORES.columns,
    question="Which choices of BERT's pre-training matter: masks, pairs of texts, batches, data, length?",
    source="arXiv 1907.11692",
    setup=make_setup(ROBERTA, BASE),
)
LARGE_SETUP = make_setup(ROBERTA, LARGE)

NEXT_SENTENCE: Changes = {
    "objective.pairs": "next-sentence",
    "objective.eos": "each-example",
    "model.embedding.type_vocab_size": 2,
    "model.heads": ("pooler", "next-sentence"),
}
QUOTED = missing("another paper's run")


def batches(factor: float, steps: float, rate: float) -> Changes:
    """Return larger batches at a higher rate, with so many times the steps."""
    return {
        "pretraining.batch_size": times(factor),
        "pretraining.steps": times(steps),
        "pretraining.optimizer.decay_end": times(steps),
        "pretraining.optimizer.learning_rate": times(rate),
    }


# 16 GB of text, and 160 GB; news, pages and stories are folders that the user must have.
SOME_TEXT = corpus(WIKIPEDIA_AND_BOOKS, "documentation/operations + documentation/learning")
MORE_TEXT = corpus(f"{WIKIPEDIA_AND_BOOKS} + text:cc-news + text:openwebtext + text:stories", "documentation")


def longer(factor: float) -> Changes:
    """Return more text and ``factor`` times the steps."""
    return MORE_TEXT | {
        "pretraining.steps": times(factor),
        "pretraining.optimizer.decay_end": times(factor),
    }


BY_LENGTH: dict[str, Changes | Missing] = {
    "books+wiki": SOME_TEXT,
    "more-data": MORE_TEXT,
    "longer": longer(3),
    "even-longer": longer(5),
}

TABLES = (
    # lm sweep liu/1-masking; six minutes each; in the paper dynamic masks have 78.7 on SQuAD 2.0
    make_table(
        "liu/1-masking",
        "Masks drawn once or anew",
        {
            "reference": QUOTED,
            "static": missing("masks drawn once"),
            "dynamic": NEXT_SENTENCE,
        },
        baseline="dynamic",
        scale="mini",
        seeds=5,
        paper=PAPER,
        columns=["SQuAD2", "MNLI", "SST2"],
        published=_SCORES,
        conclusions=(Conclusion("dynamic", "static", "dynamic masks are slightly better", "SQuAD2"),),
    ),
    # lm sweep liu/2-format; six minutes each; in the paper full sentences have 84.7 on MNLI
    make_table(
        "liu/2-format",
        "Pairs of texts, and next-sentence prediction",
        {
            "segment-pair+nsp": NEXT_SENTENCE,
            "sentence-pair+nsp": NEXT_SENTENCE | {"objective.pairs": "next-single-sentence"},
            "full-sentences": {},
            "doc-sentences": {"objective.documents": "apart"},
            "bert-base": QUOTED,
            "xlnet-base-k7": QUOTED,
            "xlnet-base-k6": QUOTED,
        },
        scale="mini",
        seeds=5,
        paper=PAPER,
        columns=["SQuAD2", "MNLI", "SST2", "RACE"],
        published=_SCORES,
        conclusions=(
            Conclusion("segment-pair+nsp", "sentence-pair+nsp", "single sentences hurt", "MNLI"),
            Conclusion("full-sentences", "segment-pair+nsp", "no next-sentence loss is needed", "MNLI"),
            Conclusion("doc-sentences", "segment-pair+nsp", "no next-sentence loss is needed", "MNLI"),
            Conclusion("doc-sentences", "full-sentences", "rows of one document help a little", "RACE"),
        ),
    ),
    # lm sweep liu/3-batch; six minutes each; in the paper batches of 2K have a perplexity of 3.68
    make_table(
        "liu/3-batch",
        "Size of batches at equal epochs",
        {"256": {}, "2k": batches(8, 1 / 8, 7), "8k": batches(32, 0.031, 10)},
        scale="mini",
        seeds=5,
        paper=PAPER,
        columns=["PPL", "MNLI", "SST2"],
        published=_SCORES,
        conclusions=(
            Conclusion("2k", "256", "larger batches help", "PPL"),
            Conclusion("8k", "256", "much larger batches help", "PPL"),
        ),
    ),
    # lm sweep liu/4-data-and-length; six minutes to half an hour; in the paper all have above 89 on MNLI
    make_table(
        "liu/4-data-and-length",
        "More data and more steps",
        BY_LENGTH | dict.fromkeys(("bert-large", "xlnet-large", "xlnet-large-more"), QUOTED),
        scale="mini",
        seeds=5,
        paper=PAPER,
        setup=LARGE_SETUP,
        columns=["SQuAD1", "SQuAD2", "MNLI", "SST2"],
        published=_SCORES,
        conclusions=(
            Conclusion("books+wiki", "bert-large", "the recipe alone helps", "MNLI"),
            Conclusion("more-data", "books+wiki", "more data help", "MNLI"),
            Conclusion("longer", "more-data", "more steps help", "MNLI"),
            Conclusion("even-longer", "longer", "still more steps help", "MNLI"),
        ),
        surrogate_data=True,
    ),
    # the runs of the table before, and one of the base size
    make_table(
        "liu/8-glue",
        "More data and more steps: GLUE",
        {
            "base": longer(5)
            | {
                "model.num_encoder_layers": times(1 / 2),
                "model.d_model": times(3 / 4, 8),
                "model.mlp.d_ff": times(3 / 4, 8),
                "model.attention.num_heads": times(3 / 4),
                "pretraining.optimizer.learning_rate": times(3 / 2),
                "pretraining.optimizer.warmup_steps": times(4 / 5),
            },
            **BY_LENGTH,
        },
        baseline="books+wiki",
        scale="mini",
        seeds=5,
        paper=PAPER,
        setup=LARGE_SETUP,
        columns=["MNLI", "QNLI", "QQP", "RTE", "SST2", "MRPC", "CoLA", "STS"],
        published=_SCORES,
        surrogate_data=True,
    ),
)

"""The tables of Clark et al. 2020 (ELECTRA): a line for each row.

Rows of Table 5 and of section 3.2 have the size of BERT-Base. Table 1 is of small models, whose sizes are
shares of that, and Table 2 of large ones. Choices made where the paper is silent: docs/choices.md.
"""

from pathlib import Path

from experiments.study.changes import Changes, at_least, share_of, times, without
from experiments.study.classic import ELECTRA
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
from experiments.study.table import Conclusion, Paper, PublishedScores, make_setup, make_table, missing

_SCORES = PublishedScores(Path(__file__).with_name("clark_scores.json"))
WARMUP = 10_000
_TEXT: Changes = vocabulary("wordpiece", 30_522) | {"data.corpus": WIKIPEDIA_AND_BOOKS}


def published(model: Changes, steps: int, batch_size: int, rate: float, tuning_rate: float) -> Changes:
    """Return the paper's setup for a size of model; small models are sizes of the base."""
    return (
        model
        | LEARNED
        | _TEXT
        | pretraining(steps, batch_size, 512)
        | adamw(steps, rate, WARMUP)
        | tuned_by_heads(tuning_rate, 32, 128)
    )


BASE = published(size(12, 768, 12), 1_000_000, 256, 2e-4, 1e-4) | {"generator_share": 1 / 3}
LARGE = published(size(24, 1_024, 16), 400_000, 2_048, 2e-4, 5e-5) | {"objective.rate": 0.25}

# At the small scales a generator leaves the unigram plateau after some 500 updates (docs/choices.md). After a
# quarter of 1,000 it is on it, so that a branch there shows nothing.
SMALL_SCALE: Changes = ELECTRA | ROTARY | {"pretraining.steps": at_least(1_000), "tuning.branches": (1.0,)}
PAPER = Paper(
    name="ELECTRA",
    citation="Clark et al. 2020",
    authors="Kevin Clark, Minh-Thang Luong, Quoc V. Le, Christopher D. Manning",
    title="ELECTRA: Pre-training Text Encoders as Discriminators Rather Than Generators",
    columns=_SCORES.columns,
    question="Does replaced-token detection gain from a loss on all tokens, or from inputs without [MASK]?",
    source="arXiv 2003.10555",
    setup=make_setup(SMALL_SCALE, BASE),
)
# BERT's masks and loss, without pairs of sentences
MASKED_LM: Changes = {
    "objective.inputs": "masks-random-or-same",
    "objective.targets": "in-place",
    "model.output.logits": "tied",
    "model.output.transform": True,
    "model.output.bias": True,
    "model.heads": (),
}
# A masked LM that reads a generator's tokens in place of masks
RESTORED: Changes = without(MASKED_LM, "objective.inputs") | {"model.heads": ("generator",)}
HALF: Changes = {"pretraining.steps": times(1 / 2), "pretraining.optimizer.decay_end": times(1 / 2)}
SMALL: Changes = {
    "model.d_model": times(1 / 3, 8),
    "model.mlp.d_ff": times(1 / 3, 8),
    "model.attention.num_heads": times(1 / 3),
    "model.embedding.d_embed": share_of("model.d_model", 1 / 2),
    "data.inputs_length": times(1 / 4),
    "pretraining.batch_size": times(1 / 2),
    "pretraining.optimizer.learning_rate": times(5 / 2),
    "generator_share": 0.25,
}


def trained(share: float) -> Changes:
    """Return ELECTRA-Small after a share of its steps; its learning rate falls as if it were trained on."""
    return SMALL | {"pretraining.steps": times(share)}


# The masked LM has 3/2 of the steps, which are as many FLOP as those of ELECTRA with its generator.
BERT_SMALL: Changes = (
    without(SMALL, "generator_share")
    | MASKED_LM
    | {"pretraining.steps": times(3 / 2), "pretraining.optimizer.decay_end": times(3 / 2)}
)
QUOTED = missing("another paper's run")

TABLES = (
    # lm sweep clark/5-efficiency; eight minutes each; in the paper ELECTRA has 85.0 and BERT 82.2
    make_table(
        "clark/5-efficiency",
        "From BERT to ELECTRA: which tokens are replaced and which are predicted",
        {
            "electra": {},
            "all-tokens-mlm": RESTORED
            | {"objective.targets": "restored", "model.heads": ("generator", "copy")},
            "replace-mlm": RESTORED | {"objective.targets": "restored-at-masks"},
            "electra-15": {"objective.targets": "replaced-at-masks"},
            "bert": MASKED_LM,
        },
        scale="mini",
        seeds=5,
        paper=PAPER,
        columns=["GLUE"],
        published=_SCORES,
        conclusions=(
            Conclusion("electra", "electra-15", "a loss on all tokens is what matters most"),
            Conclusion("replace-mlm", "bert", "[MASK] in pre-training harms a little"),
            Conclusion("all-tokens-mlm", "replace-mlm", "predicting all tokens closes most of the gap"),
            Conclusion("electra", "all-tokens-mlm", "ELECTRA gains by more than learning faster"),
        ),
    ),
    # lm sweep clark/3.2-weight-sharing; six minutes each; in the paper tied embeddings have 84.3
    make_table(
        "clark/3.2-weight-sharing",
        "What a generator as large as its discriminator shares with it",
        {
            "none": missing("generator of its own"),
            "embeddings": HALF | {"generator_share": 1.0},
            "all": missing("one stack as generator and discriminator"),
        },
        baseline="embeddings",
        scale="mini",
        seeds=5,
        paper=PAPER,
        columns=["GLUE"],
        published=_SCORES,
        conclusions=(Conclusion("embeddings", "none", "sharing embeddings helps"),),
    ),
    # lm sweep clark/1-small; two minutes each, eight of the base models; in the paper ELECTRA-Small has 79.9
    make_table(
        "clark/1-small",
        "Small models at equal compute",
        {
            "elmo": QUOTED,
            "gpt": QUOTED,
            "bert-small": BERT_SMALL,
            "bert-base": MASKED_LM,
            "electra-small": SMALL,
            "electra-small-50": trained(1 / 2),
            "electra-small-25": trained(1 / 4),
            "electra-small-12.5": trained(1 / 8),
            "electra-small-6.25": trained(1 / 16),
            "electra-base": {},
        },
        baseline="electra-small",
        scale="mini",
        seeds=5,
        paper=PAPER,
        columns=["GLUE"],
        published=_SCORES,
        conclusions=(
            Conclusion("electra-small", "bert-small", "small models gain by replaced-token detection"),
            Conclusion("electra-base", "bert-base", "base models gain by replaced-token detection"),
            Conclusion("electra-small", "gpt", "a small model is better than GPT"),
            Conclusion("electra-small", "electra-small-50", "more steps help a small model"),
        ),
    ),
    # lm sweep clark/2-large; eight minutes each, 35 of the longest; in the paper ELECTRA-400K has 89.0
    make_table(
        "clark/2-large",
        "Large models",
        {
            "bert": QUOTED,
            "roberta-100k": QUOTED,
            "roberta-500k": QUOTED,
            "xlnet": QUOTED,
            "bert-ours": MASKED_LM,
            "electra-400k": {},
            "electra-1.75m": {
                "pretraining.steps": times(35 / 8),
                "pretraining.optimizer.decay_end": times(35 / 8),
            },
        },
        baseline="electra-400k",
        scale="mini",
        seeds=5,
        paper=PAPER,
        setup=make_setup(SMALL_SCALE, LARGE),
        columns=["GLUE"],
        published=_SCORES,
        conclusions=(
            Conclusion("electra-400k", "bert-ours", "large models gain by replaced-token detection"),
            Conclusion("electra-400k", "roberta-100k", "ELECTRA is better at RoBERTa's compute"),
            Conclusion("electra-1.75m", "electra-400k", "longer training helps"),
        ),
    ),
)

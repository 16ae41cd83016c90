"""The tables of Lan et al. 2019 (ALBERT): a line for each row.

An encoder whose layers share their parameters, with a narrow embedding and a loss on the order of two pieces
of text. Choices made where the paper is silent: docs/choices.md.
"""

from functools import partial
from pathlib import Path

from experiments.study.changes import Changes, at_least, objective, resized, share_of, times
from experiments.study.papers.liu import MORE_TEXT, SOME_TEXT
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
from experiments.study.presets import ADAMW, HEADS, family
from experiments.study.table import Conclusion, Paper, PublishedScores, make_setup, make_table, missing

_SCORES = PublishedScores(Path(__file__).with_name("lan_scores.json"))
STEPS = 125_000


def embedding(features: int) -> Changes:
    """Return the change to an embedding of this width in the paper, whose model is 768 wide."""
    return {"model.embedding.d_embed": share_of("model.d_model", features / 768)}


# At the small scales an encoder with a wide embedding leaves the unigram plateau after 1,200 to 1,400 updates
# (docs/choices.md). It is on it after a quarter of them in any case, so that a branch there shows nothing.
ALBERT: Changes = (
    family("albert-base")
    | embedding(128)
    | objective("whole-word-masked-lm")
    | {"objective.pairs": "sentence-order", "objective.eos": "each-example"}
    | HEADS
    | ADAMW
    | {"pretraining.steps": at_least(2_400), "tuning.branches": (1.0,)}
)
PUBLISHED: Changes = (
    size(12, 768, 12)
    | vocabulary("unigram", 30_000)
    | {"data.corpus": WIKIPEDIA_AND_BOOKS}
    | pretraining(STEPS, 4_096, 512)
    | adamw(STEPS, 1.76e-3, 3_125)
    | {"pretraining.optimizer.name": "lamb"}
    | tuned_by_heads(3e-5, 128, 512, heads=GLUE_HEADS + RACE_HEADS)
)
PAPER = Paper(
    name="ALBERT",
    citation="Lan et al. 2019",
    authors="Zhenzhong Lan, Mingda Chen, Sebastian Goodman, Kevin Gimpel, Piyush Sharma, Radu Soricut",
    title="ALBERT: A Lite BERT for Self-supervised Learning of Language Representations",
    columns=_SCORES.columns,
    question="How do shared layers, a narrow embedding and a loss on sentence order change an encoder?",
    source="arXiv 1909.11942",
    setup=make_setup(ALBERT, PUBLISHED),
)

WIDE: Changes = {"model.embedding.d_embed": None}  # as the model
NOT_SHARED: Changes = {"model.shared_layers": False}
SHARED_ATTENTION: Changes = {"model.shared_parts": "attention"}
SHARED_MLP: Changes = {"model.shared_parts": "mlp"}


LARGE, XLARGE, XXLARGE = resized(4 / 3, 2), resized(8 / 3, 2), resized(16 / 3)
# BERT has embeddings as wide as the model and layers that are not shared.
BERT: Changes = NOT_SHARED | WIDE

_table = partial(make_table, scale="mini", seeds=5, paper=PAPER, columns=["AVG"], published=_SCORES)

# lm sweep 'lan/*'; in the paper ALBERT-base has an average of 80.1, BERT-base 82.3
TABLES = (
    # ten minutes each; two hours and a half of the widest
    _table(
        "lan/2-sizes",
        "BERT and ALBERT by size",
        {
            "bert-base": BERT,
            "bert-large": LARGE | BERT,
            "albert-base": {},
            "albert-large": LARGE,
            "albert-xlarge": XLARGE,
            "albert-xxlarge": XXLARGE,
        },
        baseline="albert-base",
        conclusions=(
            Conclusion("albert-xxlarge", "bert-large", "a wide ALBERT is better with fewer parameters"),
            Conclusion("bert-base", "albert-base", "sharing costs something at equal size"),
        ),
    ),
    # ten minutes each
    _table(
        "lan/3-embedding",
        "Width of the embedding, with and without shared layers",
        {
            "not-shared-64": NOT_SHARED | embedding(64),
            "not-shared-128": NOT_SHARED,
            "not-shared-256": NOT_SHARED | embedding(256),
            "not-shared-768": NOT_SHARED | WIDE,
            "all-shared-64": embedding(64),
            "all-shared-128": {},
            "all-shared-256": embedding(256),
            "all-shared-768": WIDE,
        },
        baseline="all-shared-128",
        conclusions=(
            Conclusion("not-shared-768", "not-shared-64", "without sharing, a wide embedding is better"),
            Conclusion("all-shared-128", "all-shared-768", "with sharing, 128 features are best"),
        ),
    ),
    # ten minutes each
    _table(
        "lan/4-sharing-768",
        "What layers share, with a wide embedding",
        {
            "all-shared-768": WIDE,
            "shared-attention-768": SHARED_ATTENTION | WIDE,
            "shared-ffn-768": SHARED_MLP | WIDE,
            "not-shared-768": NOT_SHARED | WIDE,
        },
        baseline="all-shared-768",
        conclusions=(
            Conclusion("not-shared-768", "all-shared-768", "sharing everything hurts"),
            Conclusion("shared-attention-768", "shared-ffn-768", "shared feed-forward layers hurt most"),
        ),
    ),
    # ten minutes each
    _table(
        "lan/4-sharing-128",
        "What layers share, with a narrow embedding",
        {
            "all-shared-128": {},
            "shared-attention-128": SHARED_ATTENTION,
            "shared-ffn-128": SHARED_MLP,
            "not-shared-128": NOT_SHARED,
        },
        baseline="all-shared-128",
        conclusions=(
            Conclusion("not-shared-128", "all-shared-128", "sharing everything hurts"),
            Conclusion("shared-attention-128", "shared-ffn-128", "shared feed-forward layers hurt most"),
        ),
    ),
    # ten minutes each
    _table(
        "lan/5-pairs",
        "Loss on pairs of texts",
        {
            "none": {"objective.pairs": "none", "model.heads": ("pooler",)},
            "nsp": {"objective.pairs": "next-sentence", "model.heads": ("pooler", "next-sentence")},
            "sop": {},
        },
        baseline="sop",
        conclusions=(
            Conclusion("sop", "nsp", "the order of sentences is better than the next sentence"),
            Conclusion("sop", "none", "the order of sentences helps"),
        ),
    ),
    # ten minutes each
    _table(
        "lan/7-data",
        "More data",
        {"no-extra-data": SOME_TEXT, "extra-data": MORE_TEXT},
        baseline="no-extra-data",
        conclusions=(Conclusion("extra-data", "no-extra-data", "more data help"),),
        surrogate_data=True,
    ),
    # 16 hours each
    _table(
        "lan/8-dropout",
        "Dropout of the widest model",
        {
            "dropout": XXLARGE
            | {
                "model.dropout": 0.1,  # which small scales do not have
                "pretraining.steps": times(8),
                "pretraining.optimizer.decay_end": times(8),
            },
            "no-dropout": missing("dropout that changes in a run"),
        },
        baseline="dropout",
        conclusions=(Conclusion("no-dropout", "dropout", "removing dropout helps the largest model"),),
    ),
)

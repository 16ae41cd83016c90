"""The tables of Jo et al. 2025 (continuous diffusion of text): a line for each row.

On text8 a row is a character model of 256 characters. Most rows are quoted or need other kinds of diffusion
than masks. Choices made where the paper is silent: docs/choices.md.
"""

from pathlib import Path

from experiments.study.changes import Changes, objective
from experiments.study.papers.sahoo import (
    DECODER,
    LM1B,
    MDLM,
    MDLM_AT_EQUAL_TOKENS,
    QUOTED,
    SCORE_ENTROPY,
    TRAINING,
)
from experiments.study.papers.setups import NOT_TUNED, pretraining
from experiments.study.table import Conclusion, Paper, PublishedScores, make_setup, make_table, missing

_SCORES = PublishedScores(Path(__file__).with_name("jo_scores.json"))
BYTES: Changes = {"data.vocabulary": "bytes"}  # for the 27 characters of text8
TEXT8: Changes = (
    TRAINING | pretraining(1_000_000, 512, 256) | {"data.corpus": "text:text8", "model.vocab_size": 384}
)
PAPER = Paper(
    name="Diffusion on text8",
    citation="Jo et al. 2025",
    authors="Jaehyeong Jo, Sung Ju Hwang",
    title="Continuous Diffusion Model for Language Modeling",
    columns=_SCORES.columns,
    question="How many bits per character of text8 do models need that do not predict from left to right?",
    source="arXiv 2502.11564",
    setup=make_setup(DECODER | BYTES | NOT_TUNED, TEXT8),
)
FLOW = missing("normalising flows")
CONTINUOUS = missing("continuous diffusion")
ANY_ORDER: Changes = MDLM | objective("any-order")

TABLES = (
    # lm sweep jo/1-text8; two minutes; in the paper 1.23 bits per character
    make_table(
        "jo/1-text8",
        "Bits per character on text8",
        {
            "ar-argmax-flow": FLOW,
            "transformer-ar": {},
            "discrete-flow": FLOW,
            "ardm": ANY_ORDER,
            "mac": missing("a fixed set of orders"),
            **dict.fromkeys(("multinomial", "d3pm-uniform"), missing("diffusion by random tokens")),
            "d3pm-absorb": missing("diffusion in discrete time"),
            "sedd-absorb": SCORE_ENTROPY,
            "mdlm": MDLM,
            "md4": missing("time as an input"),
            **dict.fromkeys(("plaid", "bfn", "rdlm"), CONTINUOUS),
        },
        baseline="transformer-ar",
        scale="mini",
        seeds=5,
        paper=PAPER,
        columns=["BPC"],
        published=_SCORES,
        conclusions=(
            Conclusion("transformer-ar", "md4", "left to right is ahead of masked diffusion"),
            Conclusion("d3pm-absorb", "d3pm-uniform", "masks are better than random tokens"),
            Conclusion("rdlm", "md4", "continuous diffusion is ahead of masks"),
        ),
    ),
    # lm sweep jo/2-lm1b; two and four minutes; in the paper 22.32
    make_table(
        "jo/2-lm1b",
        "Perplexity on LM1B",
        {
            **dict.fromkeys(("transformer-x", "omninet"), QUOTED),
            "transformer": {},
            **dict.fromkeys(("bert-mouth", "d3pm-absorb", "diffusionbert", "sedd"), QUOTED),
            "mdlm": MDLM_AT_EQUAL_TOKENS,
            **dict.fromkeys(("diffusion-lm", "rdlm"), CONTINUOUS),
        },
        baseline="transformer",
        scale="mini",
        seeds=5,
        paper=PAPER,
        setup=make_setup(DECODER | NOT_TUNED, LM1B),
        columns=["PPL"],
        published=_SCORES,
        conclusions=(Conclusion("mdlm", "rdlm", "masked diffusion is ahead of continuous"),),
    ),
    make_table(
        "jo/5-objective",
        "Losses of continuous diffusion on text8",
        dict.fromkeys(("mse", "cross-entropy", "cross-entropy+importance"), CONTINUOUS),
        paper=PAPER,
        columns=["BPC"],
        published=_SCORES,
        conclusions=(Conclusion("cross-entropy+importance", "mse", "cross entropy is better"),),
    ),
)

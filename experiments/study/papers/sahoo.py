"""The tables of Sahoo et al. 2024 (MDLM: masked diffusion): a line for each row.

Rows that predict from left to right are decoders with rotary positions; masked diffusion is the same stack as
an encoder. Parts of it that are left out here, such as time as an input, are missing. Choices made where the
paper is silent: docs/choices.md.
"""

from pathlib import Path

from experiments.study.changes import Changes, objective, times
from experiments.study.classic import NO_NSP
from experiments.study.papers.setups import (
    NOT_TUNED,
    adamw,
    pretraining,
    size,
    tuned_by_heads,
    vocabulary,
)
from experiments.study.presets import BERT, GPT
from experiments.study.table import Conclusion, Paper, PublishedScores, make_setup, make_table, missing

_SCORES = PublishedScores(Path(__file__).with_name("sahoo_scores.json"))
DECODER: Changes = GPT | {
    "model.positions.kind": "rotary",
    "model.output.logits": "separate",
    "tuning.heads": (),
}
# Linear layers of attention have no biases in its code, and norms have none; all others have.
BIASES: Changes = {
    "model.bias": False,
    "model.mlp.bias": True,
    "model.norm.bias": False,
    "model.output.bias": True,
}
TRAINING: Changes = (
    size(12, 768, 12)
    | BIASES
    | adamw(500_000, 3e-4, 2_500, epsilon=1e-8, weight_decay=0.0)
    | {"pretraining.optimizer.schedule": "constant", "pretraining.optimizer.ema": 0.9999}
)
LM1B: Changes = (
    TRAINING | pretraining(500_000, 512, 128) | vocabulary("wordpiece", 30_522) | {"data.corpus": "tfds:lm1b"}
)
OPENWEBTEXT: Changes = (
    TRAINING
    | pretraining(500_000, 512, 1_024)
    | vocabulary("bpe", 50_257)
    | {"data.corpus": "text:openwebtext"}
)
# Three matrices, each as wide as BERT's two: 137 million parameters as printed, and not 109.
MOSAIC: Changes = {"model.positions.kind": "alibi", "model.mlp.activation": "gated-gelu-erf"}
MOSAIC_RATE = 5e-4
MOSAIC_AT_BASE: Changes = (
    size(12, 768, 12)
    | vocabulary("wordpiece", 30_522)
    | pretraining(70_000, 4_096, 128)
    # The weight decay of its optimiser, 1e-5, is not multiplied by the rate, as ours is, but by the rate's
    # share of its peak (DecoupledAdamW of Composer).
    | adamw(70_000, MOSAIC_RATE, 4_200, beta2=0.98, weight_decay=1e-5 / MOSAIC_RATE, clip_norm=None)
    | {"objective.rate": 0.3, "pretraining.optimizer.decay_floor": 0.02}
    # the defaults of the example of transformers for GLUE
    | tuned_by_heads(2e-5, 16, 128, warmup=0.0, epsilon=1e-8, weight_decay=0.0)
)
PAPER = Paper(
    name="Masked diffusion",
    citation="Sahoo et al. 2024",
    authors=(
        "Subham Sekhar Sahoo, Marianne Arriola, Yair Schiff, Aaron Gokaslan, Edgar Marroquin, "
        "Justin T. Chiu, Alexander Rush, Volodymyr Kuleshov"
    ),
    title="Simple and Effective Masked Diffusion Language Models",
    columns=_SCORES.columns,
    question="How far is masked diffusion behind left-to-right prediction with the same Transformer?",
    source="arXiv 2406.07524",
    setup=make_setup(DECODER | NOT_TUNED, LM1B),
)
OWT_SETUP = make_setup(DECODER | NOT_TUNED, OPENWEBTEXT)
# The decoder's stack without its mask.
MDLM: Changes = {"model.architecture": "encoder", **objective("masked-diffusion")}
# It predicts half of the tokens that it reads, so that twice the steps predict as many as a decoder does.
MDLM_AT_EQUAL_TOKENS: Changes = MDLM | {"pretraining.steps": times(2)}
QUOTED, SCORE_ENTROPY = missing("another paper's run"), missing("score entropy")
DISCRETE_TIME = missing("diffusion in discrete time")
SCHEDULE = missing("noise schedules other than the log-linear one")


TABLES = (
    # lm sweep sahoo/1-lm1b; two and four minutes, and ten times as many of ten times the steps; in the paper
    # 22.32 and 20.86
    make_table(
        "sahoo/1-lm1b",
        "Perplexity on LM1B",
        {
            **dict.fromkeys(("transformer-x", "omninet", "bert-mouth", "d3pm-absorb"), QUOTED),
            **dict.fromkeys(("diffusion-lm", "diffusionbert", "sedd-33b"), QUOTED),
            "ar-33b": {},
            "ar-327b": {"pretraining.steps": times(10)},
            "mdlm-33b": MDLM_AT_EQUAL_TOKENS,
            "mdlm-327b": MDLM | {"pretraining.steps": times(20)},
        },
        baseline="ar-33b",
        scale="mini",
        seeds=5,
        paper=PAPER,
        columns=["PPL"],
        published=_SCORES,
        conclusions=(
            Conclusion("ar-33b", "mdlm-33b", "left to right is ahead at equal predicted tokens"),
            Conclusion("ar-327b", "mdlm-327b", "left to right is ahead after longer training"),
            Conclusion("mdlm-33b", "sedd-33b", "masked diffusion is ahead of score entropy"),
            Conclusion("mdlm-327b", "mdlm-33b", "longer training helps masked diffusion"),
            Conclusion("ar-327b", "ar-33b", "longer training helps from left to right"),
        ),
    ),
    # lm sweep sahoo/2-owt; two and four minutes; in the paper 17.54
    make_table(
        "sahoo/2-owt",
        "Perplexity on OpenWebText",
        {"ar": {}, "sedd": SCORE_ENTROPY, "mdlm": MDLM_AT_EQUAL_TOKENS},
        scale="mini",
        seeds=5,
        paper=PAPER,
        setup=OWT_SETUP,
        columns=["PPL"],
        published=_SCORES,
        conclusions=(
            Conclusion("ar", "mdlm", "left to right is ahead"),
            Conclusion("mdlm", "sedd", "masked diffusion is ahead of score entropy"),
        ),
    ),
    make_table(
        "sahoo/3-zero-shot",
        "Perplexity on other corpora",
        {
            "ar": missing("held-out text of other corpora"),
            "sedd": missing("score entropy", "held-out text of other corpora"),
            "mdlm": missing("held-out text of other corpora"),
        },
        scale="mini",
        paper=PAPER,
        setup=OWT_SETUP,
        columns=["PTB", "Wikitext", "LM1B", "Lambada", "AGNews", "Pubmed", "Arxiv"],
        published=_SCORES,
        conclusions=(Conclusion("mdlm", "sedd", "masked diffusion is ahead of score entropy"),),
    ),
    # lm sweep sahoo/4-glue; six minutes each; in the paper 81.62 of the encoder and 74.88 of the decoder
    make_table(
        "sahoo/4-glue",
        "GLUE of a decoder, an encoder, and that trained on by diffusion",
        {
            "ar": {"model.architecture": "decoder", **objective("causal-lm")},
            "bert": {},
            "bert+mdlm": missing("fine-tuning by another objective"),
        },
        baseline="bert",
        scale="mini",
        seeds=5,
        paper=PAPER,
        setup=make_setup(BERT | NO_NSP | MOSAIC, MOSAIC_AT_BASE),
        columns=["GLUE"],
        published=_SCORES,
        conclusions=(
            Conclusion("bert+mdlm", "bert", "generating costs no scores", relation="equivalent"),
            Conclusion("bert", "ar", "an encoder is ahead of a decoder"),
        ),
    ),
    make_table(
        "sahoo/8-ablation",
        "Parts of masked diffusion",
        {
            "mdlm": MDLM_AT_EQUAL_TOKENS,
            "discrete-time": DISCRETE_TIME,
            "no-carry-over": missing("predictions of visible tokens in the loss"),
            "no-zero-masking": missing("the mask among the predictions of the bound"),
        },
        paper=PAPER,
        columns=["PPL"],
        published=_SCORES,
        conclusions=(Conclusion("discrete-time", "no-carry-over", "carrying tokens over matters most"),),
    ),
    make_table(
        "sahoo/9-schedule",
        "Noise schedules at evaluation",
        {
            "log-linear": MDLM_AT_EQUAL_TOKENS,
            **dict.fromkeys(("cosine", "cosine-squared", "linear"), SCHEDULE),
        },
        paper=PAPER,
        setup=OWT_SETUP,
        columns=["BPD", "VARIANCE"],
        published=_SCORES,
    ),
    make_table(
        "sahoo/11-times",
        "Discrete times at evaluation",
        {
            "infinity": MDLM_AT_EQUAL_TOKENS,
            **dict.fromkeys(("10", "20", "50", "100", "200", "500", "1000"), DISCRETE_TIME),
        },
        paper=PAPER,
        setup=OWT_SETUP,
        columns=["PPL"],
        published=_SCORES,
        conclusions=(Conclusion("1000", "100", "more times give a tighter bound"),),
    ),
    make_table(
        "sahoo/12-time-conditioning",
        "Time as an input",
        {"without-time": MDLM_AT_EQUAL_TOKENS, "with-time": missing("time as an input")},
        paper=PAPER,
        setup=OWT_SETUP,
        columns=["PPL"],
        published=_SCORES,
    ),
)

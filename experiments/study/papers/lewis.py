"""Table 1 of Lewis et al. 2019 (BART): a line for each objective.

Encoder-decoders of the size of BERT-Base read noisy text and predict the text. All scores were read second
hand. Choices made where the paper is silent: docs/choices.md.
"""

from pathlib import Path

from experiments.study.changes import Changes, objective, times
from experiments.study.classic import BART
from experiments.study.papers.setups import (
    WIKIPEDIA_AND_BOOKS,
    adamw,
    pretraining,
    size,
    tuned_by_heads,
    vocabulary,
)
from experiments.study.table import Conclusion, Paper, PublishedScores, make_setup, make_table, missing

_SCORES = PublishedScores(Path(__file__).with_name("lewis_scores.json"))
BASE: Changes = (
    size(6, 768, 12)
    | vocabulary("bpe", 50_265)
    | {"data.corpus": WIKIPEDIA_AND_BOOKS, "start.steps": 0}
    | pretraining(1_000_000, 256, 512)
    | adamw(1_000_000, 4e-4, 10_000, beta2=0.98, clip_norm=None)
    | tuned_by_heads(3e-5, 32, 512, warmup=0.06, beta2=0.98, epsilon=1e-8, clip_norm=None)
)
PAPER = Paper(
    name="BART",
    citation="Lewis et al. 2019",
    authors=(
        "Mike Lewis, Yinhan Liu, Naman Goyal, Marjan Ghazvininejad, Abdelrahman Mohamed, Omer Levy, "
        "Ves Stoyanov, Luke Zettlemoyer"
    ),
    title="BART: Denoising Sequence-to-Sequence Pre-training for Natural Language Generation, "
    "Translation, and Comprehension",
    columns=_SCORES.columns,
    question="Which noise is best for an encoder-decoder, in understanding and in generation?",
    source="arXiv 1910.13461",
    setup=make_setup(BART, BASE),
)
IN_ORDER: Changes = {"objective.sentences": "in-order"}
MASKED: Changes = IN_ORDER | {"objective.noise": "iid", "objective.inputs": "masks"}
NO_NOISE: Changes = {"objective.noise": "none", "objective.inputs": "masks"}
MASS: Changes = IN_ORDER | {
    "objective.noise": "single-span",
    "objective.inputs": "masks",
    "objective.targets": "drop",
    "objective.rate": 0.5,
}
# Encoders with the layers of both stacks. Heads read one stream; the paper's models write by two.
MASKED_LM: Changes = {
    "model.architecture": "encoder",
    "model.num_encoder_layers": times(2),
    **objective("masked-lm"),
}
# XLNet's objective without its relative positions, as in the paper
PERMUTED_LM: Changes = MASKED_LM | objective("permutation-lm") | {"model.heads": ("query-stream",)}
LANGUAGE_MODEL: Changes = {"model.architecture": "decoder", **objective("causal-lm")}

TABLES = (
    # lm sweep lewis/1-objectives; eight minutes each; in the paper text infilling has 90.8 on SQuAD
    make_table(
        "lewis/1-objectives",
        "Objectives at the size of BERT-Base",
        {
            "bert": missing("another paper's run"),
            "masked-lm": MASKED_LM,
            "masked-seq2seq": MASS,
            "language-model": LANGUAGE_MODEL,
            "permuted-lm": PERMUTED_LM,
            "multitask-masked-lm": missing("masks of attention drawn anew"),
            "token-masking": MASKED,
            "token-deletion": MASKED | {"objective.inputs": "drop"},
            "text-infilling": IN_ORDER,
            "document-rotation": NO_NOISE | {"objective.sentences": "rotated"},
            "sentence-shuffling": NO_NOISE,
            "infilling+shuffling": {},
        },
        baseline="token-masking",
        scale="mini",
        seeds=5,
        paper=PAPER,
        columns=["SQuAD", "MNLI"],
        published=_SCORES,
        conclusions=(
            Conclusion("language-model", "infilling+shuffling", "a decoder writes long answers best", "ELI5"),
            Conclusion("token-masking", "language-model", "a decoder alone reads worst", "SQuAD"),
            Conclusion("token-masking", "document-rotation", "rotation alone does badly", "SQuAD"),
            Conclusion("token-masking", "sentence-shuffling", "shuffling alone does badly", "SQuAD"),
            Conclusion("token-deletion", "token-masking", "deleting is better to generate", "XSum"),
            Conclusion("token-masking", "masked-lm", "generation needs left-to-right prediction", "XSum"),
            Conclusion("masked-seq2seq", "permuted-lm", "generation needs left-to-right prediction", "XSum"),
            Conclusion("text-infilling", "token-masking", "infilling does well everywhere", "SQuAD"),
            Conclusion("infilling+shuffling", "text-infilling", "shuffling helps summaries", "CNNDM"),
        ),
    ),
)

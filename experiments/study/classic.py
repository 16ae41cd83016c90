"""BERT, GPT, ELECTRA and BART on equal text and of equal size; position encodings; ablations of a decoder.

Rows differ from the first of their table by what their name says. They read the same corpus as the T5 rows of
the same scale. Encoders, GPT and BART answer labelled tasks through heads, as in their papers, not in words.
"""

from experiments.study.changes import Changes, objective, resized, times
from experiments.study.presets import ADAMW, BERT, GPT, HEADS, family
from experiments.study.table import Axis, Conclusion, make_table
from lm.config.attention import SparsityConfig

NO_NSP: Changes = {
    "objective.pairs": "none",
    "objective.eos": "between-documents",
    "model.embedding.type_vocab_size": 0,
    "model.heads": (),
}
ORDER: Changes = {"objective.pairs": "sentence-order", "model.heads": ("pooler", "sentence-order")}
# as many embeddings as BERT has of positions; DeBERTa v3 reads as many buckets
DISENTANGLED: Changes = {
    "model.positions.kind": "relative-disentangled",
    "model.positions.relative_buckets": 512,
    "model.positions.relative_max_distance": 512,
}
# every token predicted by a second stream of queries, which has not read it
XLNET: Changes = objective("permutation-lm") | {
    "model.positions.kind": "relative-sinusoids",
    "model.heads": ("query-stream",),
}
WITHOUT_TASKS: Changes = BERT | {"tuning.heads": ()}  # compared by the loss on held-out text
BART: Changes = family("bart-base") | objective("text-infilling") | HEADS | ADAMW
ELECTRA: Changes = (
    BERT | NO_NSP | family("electra-base") | objective("electra") | {"model.embedding.type_vocab_size": 0}
)

DECODER: Changes = GPT | {
    # sinusoids have a norm of sqrt(d_model / 2), so embeddings are scaled up to be as large
    "model.embedding.scale": "sqrt",
    "finetuning.steps": 0,
    "data.inputs_length": 64,
    "data.held_out_lengths": (1, 2, 4, 8),
}

# With rotary positions a model soon finds a token at a fixed distance: without a mask, the one to predict.
ROTARY_DECODER: Changes = DECODER | {"model.positions.kind": "rotary"}
RELATIVE: Changes = {"model.positions.kind": "relative", "model.positions.relative_bias_start": "normal"}
LONG_ROWS: Changes = ROTARY_DECODER | {
    "data.inputs_length": 256,
    "pretraining.batch_size": times(1 / 4),
    "data.held_out_lengths": (1, 2, 4),
}

TABLES = (
    # one to two minutes each; tasks at chance
    make_table(
        "bert",
        "Encoders: what masked language models are trained on",
        {
            "base": BERT,
            "no-nsp": BERT | NO_NSP,
            "order": BERT | ORDER,
            "whole-word": BERT | NO_NSP | objective("whole-word-masked-lm"),
            "pmi": BERT | NO_NSP | objective("pmi-masked-lm"),
            "span": BERT | NO_NSP | objective("span-masked-lm"),
            "shared-layers": BERT | ORDER | {"model.shared_layers": True},
            "deberta": BERT | NO_NSP | DISENTANGLED,
            "xlnet": BERT | NO_NSP | XLNET,
            "mixed-layers": BERT | {"tuning.layers": "mixed-frozen"},
            "mean-pooling": BERT | {"tuning.pool": "mean"},
            "max-pooling": BERT | {"tuning.pool": "max"},
            "no-pretraining": BERT | {"pretraining.steps": 0},
        },
    ),
    # The sizes of Turc et al. 2019 and Devlin et al. 2019, which scale base has. Other scales keep the ratios
    # of widths to their own model. Layers and heads are rounded up, so at mini tiny, mini and small have one
    # layer, medium and base two. All rows have the learning rate of their scale.
    make_table(
        "bert-sizes",
        "Encoder sizes",
        {
            "base": WITHOUT_TASKS,
            "tiny": WITHOUT_TASKS | resized(128 / 768, 2 / 12),
            "mini": WITHOUT_TASKS | resized(256 / 768, 4 / 12),
            "small": WITHOUT_TASKS | resized(512 / 768, 4 / 12),
            "medium": WITHOUT_TASKS | resized(512 / 768, 8 / 12),
            "large": WITHOUT_TASKS | resized(1_024 / 768, 24 / 12),
        },
        scale="mini",
        seeds=3,
        conclusions=(
            Conclusion("mini", "tiny", "about twice the width, from scale small up also twice the layers"),
            Conclusion("small", "mini", "about twice the width at equal depth"),
            Conclusion("medium", "small", "more layers at equal width"),
            Conclusion("base", "medium", "half as much again in width, from scale small up also deeper"),
            Conclusion("large", "base", "the largest is best, also after few updates"),
        ),
    ),
    # all rows share one pre-training
    make_table(
        "rates",
        "Fine-tuning: learning rates",
        {
            rate: BERT | {"finetuning.optimizer.learning_rate": float(rate)}
            for rate in ("3e-4", "3e-5", "1e-4", "1e-3", "3e-3")
        },
        axis=Axis("finetuning.optimizer.learning_rate", "learning rate of fine-tuning"),
    ),
    # one to two minutes each; tasks near chance
    make_table(
        "gpt",
        "Decoders",
        {
            "base": GPT,
            "post-norm": GPT | {"model.residual": "post-norm"},
            # three matrices instead of two
            "llama": GPT | family("llama-7b") | {"model.mlp.d_ff": times(2 / 3, rounding="down")},
            "start-delim-extract": GPT | {"tuning.layout": "start-delim-extract"},
            "no-pretraining": GPT | {"pretraining.steps": 0},
        },
    ),
    # one to two minutes each
    make_table(
        "electra",
        "Replaced-token detection",
        {
            "base": ELECTRA,
            "half-width-generator": ELECTRA | {"generator_share": 0.5},
        },
    ),
    # one to two minutes each
    make_table(
        "bart",
        "Denoising encoder-decoders with heads",
        {
            "base": BART,
            "t5-objective": BART | objective("baseline"),
        },
    ),
    # 3.5 minutes each; with the options of docs/positions.md the perplexities of the first six rows are 105.2
    # (rotary) to 129.0 (none) at 64 tokens, and 103.3 (ALiBi) to 169.4 (sinusoidal) at 512
    make_table(
        "positions",
        "Trained on short rows, tested on long ones",
        {
            name: DECODER | {"model.positions.kind": name}
            for name in ("none", "learned", "sinusoidal", "relative", "rotary", "alibi")
        }
        | {
            "relative": DECODER | RELATIVE,
            "rotary-pairs": ROTARY_DECODER | {"model.positions.rotary.layout": "pairs"},
        },
        scale="mini",
        seeds=3,
    ),
    # one minute each; perplexities are 119 to 214, without a mask 1.1
    make_table(
        "block",
        "A decoder's block without one of its parts",
        {
            "base": ROTARY_DECODER,
            "no-mask": ROTARY_DECODER | {"model.attention.mask": "none"},
            "no-feed-forward": ROTARY_DECODER | {"model.mlp.activation": "none"},
            "no-residual": ROTARY_DECODER | {"model.residual": "none"},
            "no-norm": ROTARY_DECODER | {"model.norm.kind": "none"},
            "no-positions": ROTARY_DECODER | {"model.positions.kind": "none"},
        },
    ),
    # two minutes each; perplexities are 125 (window) to 142 (dilated)
    make_table(
        "sparse",
        "What attention may skip in rows of 256 to 1,024 tokens",
        {
            "full": LONG_ROWS,
            "window": LONG_ROWS | {"model.sparsity.window": 8},
            "dilated": LONG_ROWS | {"model.sparsity": SparsityConfig(window=8, dilation=8)},
            "global": LONG_ROWS | {"model.sparsity": SparsityConfig(window=8, global_tokens=8)},
            "block-sparse": LONG_ROWS
            | {"model.sparsity": SparsityConfig(1, global_tokens=1, block=8, random_blocks=2)},
            # Liu et al. 2018, without their local layers
            "compressed": LONG_ROWS | {"model.attention.compression": 3},
        },
    ),
)

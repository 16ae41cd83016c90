"""The tables of Narang et al. 2021 ("Do Transformer modifications transfer ..."): a line for each row.

A row is one published modification of the T5 baseline with layer norm, which predicts spans. Rows of the
second table have learned positions in place of relative ones. Choices made where the paper is silent:
docs/choices.md.
"""

from dataclasses import dataclass, replace
from math import ceil
from pathlib import Path
from typing import Literal

from experiments.study.changes import Changes, objective, share_of, times
from experiments.study.experiment import Experiment
from experiments.study.papers.setups import NOT_TUNED, gated
from experiments.study.table import (
    Conclusion,
    Missing,
    NoiseEstimate,
    Paper,
    PublishedScores,
    Table,
    make_setup,
    make_table,
)
from lm.config.layers import EmbeddingConfig

_SCORES = PublishedScores(Path(__file__).with_name("narang_scores.json"))
# The released code has layer norm with scale and bias, and biases in the feed-forward layer.
VANILLA: Changes = objective("span-corruption") | {
    "model.norm.kind": "layer",
    "model.mlp.bias": True,
    "model.dropout": 0.0,
}
FINETUNED_ON_SUPERGLUE: Changes = {
    "tuning.mixtures": ("super_glue",),
    "finetuning.optimizer.learning_rate": 5e-4,
    "finetuning.optimizer.warmup_steps": 20_000,
}
LEARNED_POSITIONS: Changes = {"model.positions.kind": "learned"}

PAPER = Paper(
    name="Modifications",
    citation="Narang et al. 2021",
    authors=(
        "Sharan Narang, Hyung Won Chung, Yi Tay, William Fedus, Thibault Fevry, Michael Matena, "
        "Karishma Malkan, Noah Fiedel, Noam Shazeer, Zhenzhong Lan, Yanqi Zhou, Wei Li, Nan Ding, "
        "Jake Marcus, Adam Roberts, Colin Raffel"
    ),
    title="Do Transformer Modifications Transfer Across Implementations and Applications?",
    columns=_SCORES.columns,
    question="Do published modifications of the Transformer help in another code base, without new tuning?",
    source="arXiv 2102.11972",
    noise=NoiseEstimate(5, "the baseline for the early loss, after 65,536 steps"),
    setup=make_setup(VANILLA | NOT_TUNED, FINETUNED_ON_SUPERGLUE),
)

UNTIED_OUTPUT: Changes = {"model.output.logits": "separate"}
SHARED_LAYERS: Changes = {"model.shared_layers": True}
SEPARATE_ENCODER_EMBEDDING: Changes = {"model.embedding.encoder": "separate"}
# Rows without norms are not stable with Adafactor, so ReZero and Fixup train with Adam. The rows of ReZero
# with norms use Adam too.
ADAM: Changes = {
    "pretraining.optimizer.name": "adamw",
    # divided by the square root of max(step, timescale): at most 5e-4 at scale base
    "pretraining.optimizer.learning_rate": 0.05,
    "pretraining.optimizer.warmup_steps": share_of("pretraining.steps", 4_000 / 524_288),
}
REZERO: Changes = ADAM | {"model.residual": "rezero"}
# An embedding of d_model / 6 features (128 of 768). With UNTIED_OUTPUT the output matrix is not factorised;
# in FACTORIZED_SHARED it is the embedding itself.
FACTORIZED: Changes = {"model.embedding.d_embed": share_of("model.d_model", 1 / 6)}
FACTORIZED_SHARED: Changes = FACTORIZED | {"model.embedding.projected": "tokens"}

# One layer for each stack, applied 28 times. Each sub-layer has a GRU gate: three matrices of 1,536 x 768.
UNIVERSAL: Changes = (
    SHARED_LAYERS
    | UNTIED_OUTPUT
    | {
        "model.num_encoder_layers": times(28 / 12),
        "model.num_decoder_layers": times(28 / 12),
        "model.universal.embedding": "step",
        "model.universal.gate": "gru",
    }
)

# A layer is about as large as two of the baseline.
EVOLVED: Changes = {
    "model.block": "evolved",
    "model.num_encoder_layers": times(1 / 2),
    "model.num_decoder_layers": times(1 / 2),
    "model.mlp.activation": "silu",
    "model.encoder.activation": "relu",
}

# In the paper's code the feed-forward layers beside dynamic convolutions are a sixth as wide.
LIGHTWEIGHT: Changes = {"model.mixer.kind": "lightweight-convolution"}
DYNAMIC: Changes = {"model.mixer.kind": "dynamic-convolution", "model.mlp.d_ff": times(1 / 6)}
NO_POSITIONS: Changes = {"model.positions.kind": "none"}


def layers(factor: float) -> Changes:
    """Return the change to ``factor`` times the layers with about as many parameters in all.

    d_ff and the number of heads are divided by ``factor``.
    """
    return {
        "model.num_encoder_layers": times(factor),
        "model.num_decoder_layers": times(factor),
        "model.mlp.d_ff": times(1 / factor),
        "model.attention.num_heads": times(1 / factor),
    }


@dataclass(frozen=True)
class RowsOf:
    """A change that makes a setting the number of rows of inputs that hold so many tokens."""

    tokens: int

    def __call__(self, _old: int, experiment: Experiment) -> int:
        """Return the number of rows at this scale."""
        return ceil(self.tokens / experiment.data.inputs_length)

    def __str__(self) -> str:
        return f"as many rows as hold {self.tokens:,} tokens"


def experts(per_token: int, factor: float) -> Changes:
    """Return the change to 32 experts in every fourth layer of the paper's twelve.

    factor: capacity factor in training; in evaluation it is 2.
    """
    return {
        "model.experts.count": 32,
        "model.experts.per_token": per_token,
        "model.experts.every": share_of("model.num_encoder_layers", 1 / 3),
        "model.experts.capacity_factor": factor,
        "model.experts.eval_capacity_factor": 2.0,
        "model.experts.group_rows": RowsOf(1_024),
    }


def synthesizer(
    logits: Literal["dense", "random", "factorized"], products: Literal["none", "added", "mixed"] = "none"
) -> Changes:
    """Return the change to a synthesizer in place of self-attention.

    At the paper's size it has 8 heads of 128 features, the defaults of the released code. Cross-attention
    keeps 12 heads of 64.
    """
    return {
        "model.mixer.kind": "synthesizer",
        "model.mixer.logits": logits,
        "model.mixer.products": products,
        "model.cross_attention.num_heads": share_of("model.attention.num_heads", 1),
        "model.cross_attention.d_kv": share_of("model.attention.d_kv", 1),
        "model.attention.num_heads": times(2 / 3),
        "model.attention.d_kv": times(2),
    }


@dataclass(frozen=True)
class Clusters:
    """A change of ``model.embedding``: clusters of tokens with embeddings of different widths."""

    tokens: tuple[float, ...]  # shares of the vocabulary; the last cluster has the rest
    widths: tuple[float, ...]  # shares of d_model

    def __call__(self, old: EmbeddingConfig, experiment: Experiment) -> EmbeddingConfig:
        """Return the embedding with clusters of at least one token and one feature each."""
        model = experiment.model
        tokens = tuple(max(1, round(share * model.vocab_size)) for share in self.tokens)
        widths = tuple(max(1, round(share * model.d_model)) for share in self.widths)
        return replace(old, clusters=tokens, cluster_widths=widths)

    def __str__(self) -> str:
        tokens = ", ".join(f"{share:.3g}" for share in self.tokens)
        widths = ", ".join(f"{share:.3g}" for share in self.widths)
        return f"clusters of {tokens} x model.vocab_size and the rest, {widths} x model.d_model wide"


@dataclass(frozen=True)
class FunnelBlocks:
    """A change of ``model.funnel.blocks`` to three, or to the number of encoder layers if less."""

    def __call__(self, _old: int, experiment: Experiment) -> int:
        """Return the number of blocks at this scale."""
        return min(3, experiment.model.num_encoder_layers)

    def __str__(self) -> str:
        return "3, or model.num_encoder_layers where that is less"


CLUSTERS = (2_500 / 32_128, 6_000 / 32_128)  # the first two, as shares of the vocabulary


def adaptive_softmax(*widths: float) -> Changes:
    """Return an adaptive softmax whose clusters have these shares of d_model as widths."""
    return {"model.embedding": Clusters(CLUSTERS, widths), "model.output.softmax": "adaptive"}


ROWS: dict[str, Changes | Missing] = {
    "vanilla": {},
    "gelu": {"model.mlp.activation": "gelu-tanh"},
    "swish": {"model.mlp.activation": "silu"},
    "elu": {"model.mlp.activation": "elu"},
    "glu": gated("gated-sigmoid"),
    "geglu": gated("gated-gelu"),
    "reglu": gated("gated-relu"),
    "selu": {"model.mlp.activation": "selu"},
    "swiglu": gated("gated-silu"),
    "liglu": gated("gated-linear"),
    "sigmoid": {"model.mlp.activation": "sigmoid"},
    "softplus": {"model.mlp.activation": "softplus"},
    "rms": {"model.norm.kind": "rms"},
    "rezero": REZERO | {"model.norm.kind": "none"},
    "rezero+layer": REZERO,
    "rezero+rms": REZERO | {"model.norm.kind": "rms"},
    "fixup": ADAM | {"model.residual": "fixup", "model.norm.kind": "none"},
    "24-layers": layers(2),
    "18-layers": layers(3 / 2),
    "8-layers": layers(2 / 3),
    "6-layers": layers(1 / 2),
    "block-sharing": SHARED_LAYERS | UNTIED_OUTPUT,
    "block-sharing+factorized": SHARED_LAYERS | FACTORIZED | UNTIED_OUTPUT,
    "block-sharing+factorized+shared": SHARED_LAYERS | FACTORIZED_SHARED,
    "block-sharing-encoder": SHARED_LAYERS | UNTIED_OUTPUT | {"model.shared_stack": "encoder"},
    "block-sharing-decoder": SHARED_LAYERS | UNTIED_OUTPUT | {"model.shared_stack": "decoder"},
    "factorized": FACTORIZED | UNTIED_OUTPUT,
    "factorized+shared": FACTORIZED_SHARED,
    "tied-inputs": UNTIED_OUTPUT,
    "tied-decoder": SEPARATE_ENCODER_EMBEDDING,
    "untied": SEPARATE_ENCODER_EMBEDDING | UNTIED_OUTPUT,
    "adaptive-inputs": {"model.embedding": Clusters(CLUSTERS, (1, 1 / 3, 1 / 12))},
    "adaptive-softmax": adaptive_softmax(1, 1 / 3, 1 / 12),
    "adaptive-softmax-no-projection": adaptive_softmax(1, 1, 1),
    "mixture-of-softmaxes": {"model.output.softmaxes": 15},
    "transparent": {"model.cross_attention.encoder_layers": "weighted"},
    "dynamic-convolution": DYNAMIC,
    "lightweight-convolution": LIGHTWEIGHT,
    "evolved": EVOLVED,
    "synthesizer-dense": synthesizer("dense"),
    "synthesizer-dense-plus": synthesizer("dense", "added"),
    "synthesizer-dense-plus-alpha": synthesizer("dense", "mixed"),
    "synthesizer-factorized": synthesizer("factorized"),
    "synthesizer-random": synthesizer("random"),
    "synthesizer-random-plus": synthesizer("random", "added"),
    "synthesizer-random-plus-alpha": synthesizer("random", "mixed"),
    "universal": UNIVERSAL,
    "moe": experts(2, 2.0) | {"model.experts.d_ff": share_of("model.mlp.d_ff", 1 / 2)},
    "switch": experts(1, 1.2) | {"model.experts.exploration": "jitter"},
    "funnel": {"model.funnel.blocks": FunnelBlocks()},
    "weighted": {"model.attention.branching": "weighted"},
    "product-key": {
        "model.memory.keys": share_of("model.d_model", 2 / 3, 32),
        "model.memory.heads": 8,
        "model.memory.key_width": 128,
    },
}
# The Weighted Transformer did not converge with learned positions, and is no row of their table.
POSITIONS: dict[str, Changes | Missing] = {
    "relative-per-layer": {"model.positions.kind": "relative-per-layer"},
    "relative": {"model.positions.kind": "relative"},
    "relative-shaw": {"model.positions.kind": "relative-keys"},
    "sinusoidal": {"model.positions.kind": "sinusoidal", "model.positions.sinusoid": "tensor2tensor"},
}

CONCLUSIONS = (
    Conclusion("swiglu", "vanilla", "SwiGLU helps", "FINAL"),
    Conclusion("geglu", "vanilla", "GeGLU helps", "FINAL"),
    Conclusion("rms", "vanilla", "RMS norm helps", "FINAL"),
    Conclusion("18-layers", "6-layers", "deeper is better at equal parameters", "FINAL"),
    Conclusion("24-layers", "6-layers", "deeper is better at equal parameters", "FINAL"),
    Conclusion("vanilla", "block-sharing", "sharing layers hurts", "FINAL"),
    Conclusion("vanilla", "block-sharing-encoder", "sharing layers hurts", "FINAL"),
    Conclusion("vanilla", "block-sharing-decoder", "sharing layers hurts", "FINAL"),
    Conclusion("tied-decoder", "vanilla", "an embedding of the encoder helps", "FINAL"),
    Conclusion("untied", "vanilla", "three embeddings help", "FINAL"),
    Conclusion("mixture-of-softmaxes", "vanilla", "a mixture of softmaxes helps", "FINAL"),
    Conclusion("switch", "vanilla", "experts help", "FINAL"),
    Conclusion("moe", "vanilla", "experts help", "FINAL"),
    Conclusion("product-key", "vanilla", "product keys help", "FINAL"),
    Conclusion("vanilla", "transparent", "transparent attention harms transfer", "SGLUE"),
    Conclusion("vanilla", "universal", "the Universal Transformer is worse", "FINAL"),
)

# Train with: lm sweep 'narang/*'. Rows are compared with the baseline by the loss after 65,536 steps (EARLY),
# since the paper gives the standard deviation of that column only. Table 1 has 2.127 for SwiGLU and 2.182 for
# the baseline.
TABLES: tuple[Table, ...] = (
    # four minutes a row without fine-tuning, up to eight minutes for 24 layers
    make_table(
        "narang/1-modifications",
        "Modifications of the Transformer",
        # convolutions have no scores for relative positions
        ROWS
        | {
            "dynamic-convolution": NO_POSITIONS | DYNAMIC,
            "lightweight-convolution": NO_POSITIONS | LIGHTWEIGHT,
        },
        scale="mini",
        seeds=5,
        paper=PAPER,
        columns=["EARLY"],
        pairs="with-baseline",
        published=_SCORES,
        conclusions=CONCLUSIONS,
    ),
    # the same
    make_table(
        "narang/2-learned-positions",
        "Modifications of the Transformer with learned positions",
        {key: changes for key, changes in ROWS.items() if key != "weighted"} | POSITIONS,
        scale="mini",
        seeds=5,
        paper=PAPER,
        setup=make_setup(VANILLA | LEARNED_POSITIONS | NOT_TUNED, FINETUNED_ON_SUPERGLUE),
        columns=["EARLY"],
        pairs="with-baseline",
        published=_SCORES,
        conclusions=(Conclusion("relative", "vanilla", "relative attention helps", "FINAL"),),
    ),
)

"""Encoder-decoder or decoder, with today's parts and at equal FLOP; and how many layers to give either stack.

The blocks are those of RedLLM and DecLLM (Zhang et al. 2025, arXiv 2510.26622, section 3): SwiGLU, RMS norms,
rotary positions, one table of embeddings, and norms of queries, keys and values without parameters. The
encoder-decoder has a norm of attention's output too, and rotary cross-attention whose positions go on from
the encoder's end. All rows spend the FLOP of pre-training that "redllm" spends, as `lm show --costs` counts
them: padding counts, and rows that cost less take more updates. Of the two halves of the tasks, *reading* has
questions that nobody answers without their input; *language* asks how well a model knows the language.
"""

from dataclasses import dataclass

from experiments.study.changes import Changes, objective, times
from experiments.study.experiment import Experiment
from experiments.study.papers.setups import gated
from experiments.study.presets import family
from experiments.study.table import Conclusion, make_table
from lm.config.base import changes
from lm.config.model import ModelConfig
from lm.data.packing import row_length
from lm.objectives.denoising import Objective, compute_lengths


def block_flops(model: ModelConfig, queries: int, encoder_keys: int = 0) -> int:
    """Return the FLOPs of a block's forward pass over a row of ``queries`` tokens.

    encoder_keys: number of encoder tokens that its cross-attention reads; 0 without cross-attention.
    """
    attention_width = model.attention.num_heads * model.attention.d_kv
    matrices = 3 if model.mlp.activation.startswith("gated") else 2
    matmul_macs = queries * model.d_model * (4 * attention_width + matrices * model.mlp.d_ff)
    score_macs = 2 * queries * (queries + encoder_keys) * attention_width
    cross_projection_macs = 2 * encoder_keys * model.d_model * attention_width
    if encoder_keys and not model.has_merged_attention:
        cross_projection_macs += 2 * queries * model.d_model * attention_width
    return 2 * (matmul_macs + score_macs + cross_projection_macs)  # a multiply-add is two FLOPs


def step_flops(experiment: Experiment) -> int:
    """Return the FLOPs of one update of pre-training for one row of the batch.

    ``lm.train.flops`` counts them from the arrays of a model but imports jax; this formula covers attention,
    feed-forward layers and logits only.
    """
    model = experiment.model
    lengths = compute_lengths(experiment.objective, experiment.data.inputs_length)
    targets = row_length(model.architecture, lengths)
    inputs = lengths.inputs if model.has_encoder else 0
    encoder = model.num_encoder_layers * block_flops(model, inputs) if inputs else 0
    decoder = model.num_decoder_layers * block_flops(model, targets, inputs)
    return 3 * (encoder + decoder + 2 * targets * model.d_model * model.vocab_size)


@dataclass(frozen=True)
class EqualFlops:
    """A change of the number of updates: all of them take the FLOP that those of RedLLM take.

    RedLLM's layers are those of both stacks of the row together, half in each stack.
    """

    def __call__(self, steps: int, experiment: Experiment) -> int:
        """Return the number of updates."""
        model = experiment.model
        layers = (model.num_encoder_layers + model.num_decoder_layers) // 2
        even = {"model.num_encoder_layers": layers, "model.num_decoder_layers": layers}
        redllm = changes(experiment, dict(STACKS) | even)
        return round(steps * step_flops(redllm) / step_flops(experiment))

    def __str__(self) -> str:
        return "as many as take the FLOP of 'redllm'"


# of both models: Zhang et al. 2025, section 3
MODERN: Changes = (
    family("llama-7b")
    | gated("gated-silu")
    | {
        "model.output.logits": "tied",
        "model.attention.qk_norm": True,
        "model.attention.value_norm": True,
        "model.attention.norm_scale": False,
    }
)
# Each text is cut in the middle, as in the paper.
PREFIX_LM: Changes = {"objective": Objective("suffix-share", "drop", "drop", rate=0.5)}
STACKS: Changes = PREFIX_LM | {
    "model.architecture": "encoder-decoder",
    "model.attention.output_norm": True,
    "model.cross_attention.kind": "heads",
    "model.cross_attention.positions": "continued",
}
REDLLM: Changes = MODERN | STACKS
EQUAL_FLOPS: Changes = {"pretraining.steps": EqualFlops()}  # comes last


def split(encoder: float, decoder: float) -> Changes:
    """Return RedLLM with stacks so many times as deep."""
    layers: Changes = {
        "model.num_encoder_layers": times(encoder),
        "model.num_decoder_layers": times(decoder),
    }
    return REDLLM | layers | EQUAL_FLOPS


def equally_good_at_language(first: str, second: str) -> Conclusion:
    """Return the conclusion that two rows are equivalent on the language tasks."""
    return Conclusion(first, second, "they read the same text", relation="equivalent", tasks="language")


TABLES = (
    make_table(
        "now/2-architectures",
        "Encoder-decoder or decoder at equal FLOP",
        {
            "redllm": REDLLM,
            "decllm": MODERN | objective("causal-lm") | {"model.architecture": "decoder"} | EQUAL_FLOPS,
            "prefix-decoder": MODERN | PREFIX_LM | {"model.architecture": "prefix-decoder"} | EQUAL_FLOPS,
            "deep-encoder": split(3 / 2, 1 / 2),
            "deep-decoder": split(1 / 2, 3 / 2),
            "merged": REDLLM | {"model.cross_attention.kind": "merged"} | EQUAL_FLOPS,
        },
        scale="mini",
        seeds=5,
        # Written down before the rows were trained, each with its source and what is expected in either half.
        conclusions=(
            # Zhang et al. 2025, section 6: after tuning the encoder-decoder is level or better. Raffel et al.
            # 2020, table 2: at equal FLOP it is ahead of a language model.
            Conclusion("redllm", "decllm", "inputs are read both ways", tasks="reading"),
            equally_good_at_language("redllm", "decllm"),
            # Zhang et al. 2025, section 6 (DecLLM + BiAttn); Raffel et al. 2020, table 2.
            Conclusion("prefix-decoder", "decllm", "inputs are read both ways", tasks="reading"),
            equally_good_at_language("prefix-decoder", "decllm"),
            # Raffel et al. 2020, table 2: twice the parameters at the same FLOP. Zhang et al. find the tuned
            # decoder that reads both ways ahead without examples, and level with them.
            Conclusion("redllm", "prefix-decoder", "more parameters at equal FLOP"),
            # Kasai et al. 2021 (deep encoder, shallow decoder) and Tay et al. 2021 (small-el16-dl4).
            Conclusion("deep-encoder", "redllm", "depth helps where text is read", tasks="reading"),
            Conclusion("redllm", "deep-decoder", "one layer reads little of a text", tasks="reading"),
            # T5Gemma 2 (2025): merged attention costs a little quality and saves parameters.
            Conclusion("redllm", "merged", "cross-attention has matrices of its own", tasks="reading"),
            equally_good_at_language("redllm", "merged"),
        ),
    ),
)

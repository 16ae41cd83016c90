"""Encoder-decoders from LSTMs without attention to the Transformer, trained from scratch."""

from experiments.study.changes import Changes, times, without
from experiments.study.presets import family
from experiments.study.table import make_table

# As these models were trained before pre-training was known.
SCRATCH: Changes = {
    "pretraining.steps": 0,
    "tuning.mixtures": ("copy", "reverse", "restore"),
    "tuning.inputs_length": 64,
    "tuning.evaluation_examples": 200,
    "tuning.report_examples": 200,
    "finetuning.steps": times(4),
    "finetuning.save_every": times(4),
    "finetuning.optimizer.name": "adamw",
    "finetuning.optimizer.learning_rate": 2e-3,
    "finetuning.optimizer.schedule": "constant",
    "finetuning.optimizer.warmup_steps": 100,
    "finetuning.optimizer.clip_norm": 1.0,
}
TRANSFORMER: Changes = family("transformer-base") | SCRATCH
# All but the mixer and cross-attention is as in the Transformer.
RECURRENT_MODEL: Changes = without(TRANSFORMER, "model.positions.sinusoid", "model.attention.scores") | {
    "model.mixer.kind": "lstm",
    "model.positions.kind": "none",
}

TABLES = (
    # docs/sequences.md has what came out
    make_table(
        "seq2seq",
        "Encoder-decoders from scratch: what the decoder sees of what is read",
        {
            **{
                name: RECURRENT_MODEL | {"model.cross_attention.kind": name}
                for name in ("none", "dot", "multiplicative", "additive")
            },
            "transformer-2017": TRANSFORMER,
        },
    ),
)

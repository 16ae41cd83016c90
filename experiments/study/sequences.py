"""Encoder-decoders from before the Transformer to it, and what they can read of a longer text."""

from experiments.study.changes import Changes, times
from experiments.study.presets import family
from experiments.study.table import make_table

# From scratch, as these models were before pre-training: what they know is of the task.
SCRATCH: Changes = {
    "pretraining.steps": 0,
    "tuning.mixtures": ("copy", "reverse", "first-sentence"),
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
TRANSFORMER = family("transformer-base") | SCRATCH
# Everything but what mixes positions and reads the encoder is as in the Transformer.
RECURRENT_MODEL: Changes = {
    path: value
    for path, value in TRANSFORMER.items()
    if path not in ("model.positions.sinusoid", "model.attention.scores")
}
RECURRENT_MODEL |= {"model.mixer.kind": "lstm", "model.positions.kind": "none"}

TABLES = (
    # lm sweep seq2seq --scale nano: 5 rows, one seed; docs/sequences.md has what came out
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

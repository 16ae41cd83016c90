"""The same study at another size: changes to the baseline that are applied before a row's own.

``base`` is the paper's setup. ``mini`` takes about ten minutes a row on two CPU cores, ``nano`` about one.
The small scales train on the embedded documentation corpus and its four tasks, whose metrics stand in for the paper's.
"""

from experiments.experiment import Changes

_DOCUMENTATION: Changes = {
    "data.corpus": "documentation",
    "tuning.mixtures": ("documentation",),
    "tuning.examples_limit": 2_000,  # the largest of the four tasks would else be more than half of the mixture
    "pretraining.optimizer.timescale": 2_500,  # short runs learn faster at a rate of 0.02, and have no time to decay
    "finetuning.optimizer.learning_rate": 0.01,
}

SCALES: dict[str, Changes] = {
    "base": {},
    "mini": _DOCUMENTATION | {
        "data.vocabulary_size": 4_000,
        "data.inputs_length": 128,
        "model.vocab_size": 4_224,  # 4,000 pieces + 100 sentinels, rounded up to a multiple of 128
        "model.num_encoder_layers": 2,
        "model.num_decoder_layers": 2,
        "model.d_model": 128,
        "model.d_ff": 512,
        "model.d_kv": 32,
        "model.num_heads": 4,
        "model.layers": "unroll",
        "pretraining.steps": 1_400,
        "pretraining.batch_size": 16,
        "pretraining.save_every": 350,
        "pretraining.log_every": 50,
        "finetuning.steps": 700,
        "finetuning.batch_size": 16,
        "finetuning.save_every": 175,
        "finetuning.log_every": 50,
        "tuning.inputs_length": 128,
        "tuning.evaluation_examples": 200,
    },
    "nano": _DOCUMENTATION | {
        "data.vocabulary_size": 2_000,
        "data.inputs_length": 64,
        "model.vocab_size": 2_176,  # 2,000 pieces + 100 sentinels, rounded up to a multiple of 128
        "model.num_encoder_layers": 2,
        "model.num_decoder_layers": 2,
        "model.d_model": 64,
        "model.d_ff": 256,
        "model.d_kv": 16,
        "model.num_heads": 4,
        "model.layers": "unroll",  # with two layers as quick to compile, and quicker to run
        "pretraining.steps": 200,
        "pretraining.batch_size": 16,
        "pretraining.save_every": 100,
        "pretraining.log_every": 20,
        "finetuning.steps": 200,
        "finetuning.batch_size": 16,
        "finetuning.save_every": 100,
        "finetuning.log_every": 20,
        "tuning.inputs_length": 96,
        "tuning.evaluation_examples": 100,
    },
}  # fmt: skip

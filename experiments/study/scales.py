"""The same study at another size: changes to the baseline that are applied before a row's own.

``base`` is the setup of each row's paper. On one CPU core a row of ``nano`` takes one to two minutes, one of
``mini`` about seven. ``small`` is for a night on a workstation or minutes on a GPU, ``medium`` for less
than an hour on an H100; docs/study.md has the FLOP, memory and hours of each. All of these are tuned on the
tasks of the documentation, which stand in for the paper's; ``mini-real`` on real benchmarks, as far as they
were prepared, in place of these tasks.
"""

from collections.abc import Mapping
from typing import Any

from experiments.study.changes import Changes, ReadOnly
from lm.objectives.denoising import OBJECTIVES

_DOCUMENTATION: Changes = {
    "data.corpus": "documentation",
    "data.inputs_length": 64,
    "data.encoders": 0,  # so little text is encoded when it is needed
    "tuning.inputs_length": 96,
    "tuning.mixtures": ("documentation-reading", "documentation-language"),
    "tuning.examples_limit": 500,  # below the size of nearly all tasks, so that these are drawn equally often
    "tuning.shuffled_inputs": 500,
    # of 400 to 8,000 examples per task: as the paper's 2^19, between the sizes of its tasks
    "mixing.limit": 2_000,
    # A decoder that has predicted so few tokens does not find out by itself where to look in its inputs. With
    # both of these it does within 400 steps of the baseline's objective, with one alone not within 1,000. The
    # start copies the text, which is no row's objective.
    "model.positions.relative_bias_start": "slopes",
    "start.steps": 200,
    "start.objective": OBJECTIVES["copy"],
    # short runs learn faster at a rate of 0.02, and have no time to decay
    "pretraining.optimizer.timescale": 2_500,
    "finetuning.optimizer.learning_rate": 0.01,
}

_NANO: Changes = _DOCUMENTATION | {
    "data.vocabulary_size": 2_000,
    "model.vocab_size": 2_176,  # 2,000 pieces + 100 sentinels, rounded up to a multiple of 128
    "model.num_encoder_layers": 2,
    "model.num_decoder_layers": 2,
    "model.d_model": 64,
    "model.mlp.d_ff": 256,
    "model.attention.d_kv": 16,
    "model.attention.num_heads": 4,
    "model.compile.layers": "unroll",  # with two layers as quick to compile, and quicker to run
    "model.dropout": 0.0,  # no text is seen twice
    "pretraining.steps": 300,
    "pretraining.batch_size": 32,
    "pretraining.save_every": 300,
    "pretraining.evaluate_every": 50,
    "pretraining.log_every": 50,
    "finetuning.steps": 150,  # on each of the two mixtures
    "finetuning.batch_size": 16,
    "finetuning.save_every": 150,
    "finetuning.log_every": 50,
    "tuning.evaluation_examples": 50,
    "tuning.report_examples": 500,
}

_MINI: Changes = _NANO | {
    "model.d_model": 128,
    "model.mlp.d_ff": 512,
    "model.attention.d_kv": 32,
    "pretraining.steps": 600,
    "pretraining.evaluate_every": 100,
    "tuning.branches": (0.25, 1.0),
    "finetuning.steps": 300,
    "finetuning.save_every": 300,
    "tuning.evaluation_examples": 256,
    "tuning.report_examples": 1_000,
}

_REAL: Changes = {  # benchmarks as far as they can be had, each under the paper's column of its kind
    "tuning.mixtures": tuple(
        "glue_small super_glue_small squad_small scitldr multi30k_ende multi30k_enfr xquad_enro".split()
    ),
    "tuning.examples_limit": None,
    "tuning.shuffled_inputs": 0,
    "tuning.report_examples": 0,
    "mixing.limit": 4_000,
    "data.vocabulary_texts": "corpus+tasks",  # which are German, French and Romanian too
    "data.vocabulary_size": 8_000,
    "model.vocab_size": 8_192,  # 8,000 pieces + 100 sentinels, rounded up to a multiple of 128
}

_WIKIPEDIA: Changes = {
    "data.corpus": "tfds:wikipedia/20230601.en",  # about 20 GB
    "data.encoders": 4,
    "data.vocabulary_texts": "corpus+tasks",
}

# 12,400 x 64 rows x 127 tokens are 100.8 M tokens. The built-in text has 11 M at 4,000 pieces and would
# be read nine times; up to four times, repeats cost little (Muennighoff et al. 2023).
_SMALL: Changes = (
    _DOCUMENTATION
    | _WIKIPEDIA
    | {
        "data.inputs_length": 128,
        "data.vocabulary_size": 4_000,
        "model.vocab_size": 4_224,
        "model.num_encoder_layers": 4,
        "model.num_decoder_layers": 4,
        "model.d_model": 256,
        "model.mlp.d_ff": 1_024,
        "model.attention.d_kv": 64,
        "model.attention.num_heads": 4,
        "start.steps": 400,
        "pretraining.steps": 12_400,
        "pretraining.batch_size": 64,
        "pretraining.save_every": 2_000,
        "pretraining.evaluate_every": 500,
        "tuning.branches": (0.25, 1.0),
        "finetuning.steps": 1_500,
        "finetuning.batch_size": 32,
        "finetuning.save_every": 500,
        "tuning.evaluation_examples": 500,
    }
)

# Pre-training as in nanoT5 (Nawrot 2023), which trains T5 1.1 base on 17 tokens per parameter: AdamW with
# updates relative to a parameter's root mean square, cosine decay to almost zero (nanoT5 1e-5, here 0), and
# no dropout. The model is the paper's T5 and not 1.1; fine-tuning has the paper's Adafactor at its rate.
_MEDIUM: Changes = _SMALL | {
    "data.inputs_length": 256,
    "data.vocabulary_size": 16_000,
    "model.vocab_size": 16_128,
    "model.num_encoder_layers": 6,
    "model.num_decoder_layers": 6,
    "model.d_model": 768,
    "model.mlp.d_ff": 3_072,
    "model.attention.num_heads": 12,
    "model.dtype": "bfloat16",  # of activations
    "model.dropout": 0.0,
    "start.steps": 0,  # of so many tokens the baseline needs none
    "model.positions.relative_bias_start": "normal",
    # 29,000 x 256 rows x 255 tokens = 1.89 G tokens, a third of the text, 17 for each of 111.5 M parameters
    "pretraining.steps": 29_000,
    "pretraining.batch_size": 256,
    "pretraining.optimizer.name": "adamw-relative",
    "pretraining.optimizer.learning_rate": 0.02,
    "pretraining.optimizer.schedule": "cosine",  # to 0 at the last step
    "pretraining.optimizer.warmup_steps": 4_400,  # as large a share as nanoT5's 10,000 of 65,536
    "pretraining.optimizer.beta2": 0.999,
    "pretraining.optimizer.epsilon": 1e-6,
    "pretraining.optimizer.clip_norm": 1.0,
    "tuning.branches": (1.0,),  # before the rate has decayed a score says little of a shorter run
    "finetuning.steps": 3_000,
    "finetuning.optimizer.learning_rate": 0.001,
}

DEFAULT_SCALE = "nano"  # of all commands
PAPER_SCALE = "base"  # at which each paper's rows have its own sizes (study.table.Setup.at_base)

_OWN_SCALE = (
    """a scale stays what it is; add one of your own, such as SCALES["my-scale"] = SCALES["nano"] | {...}"""
)

_PUBLISHED: dict[str, Changes] = {  # the smallest first
    "nano": _NANO,
    "mini": _MINI,
    "mini-real": _MINI | _REAL,
    "small": _SMALL,
    "medium": _MEDIUM,
    "base": {"model.dtype": "bfloat16"},  # of activations, as on the TPUs of the paper
}

# by name; a module of a user's own adds to it (docs/extending.md)
SCALES: dict[str, Mapping[str, Any]] = {
    name: ReadOnly(changes, _OWN_SCALE) for name, changes in _PUBLISHED.items()
}
OWN_FROM = len(SCALES)  # from this place on scales are those of a study module

# Tasks that reports show and do not average, and why: scale -> task -> reason. A task is left out if no row
# of any table answers it better than chance by three standard errors, or if the baseline's score falls with
# more pre-training. Either is found on seeds that no report counts, before the tables are run.
NOT_AVERAGED: Mapping[str, Mapping[str, str]] = {
    # pilot of seeds 100, 101 and 102 (docs/choices.md): 1.55, 1.53, 1.45 bits after a quarter of
    # pre-training, 1.27, 1.47, 1.20 after all of it
    "mini": {"modality": "falls with pre-training"},
}

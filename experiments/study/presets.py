"""Changes that make a model one of a published family, and train it as such models are trained here."""

from typing import cast

from experiments.study.changes import Changes, objective
from lm.config.base import leaves, unused_settings
from lm.nn.presets import PRESETS

# settings that stay those of the scale: size, vocabulary and special tokens, and how the model is compiled
_OF_SCALE = """vocab_size num_encoder_layers num_decoder_layers d_model mlp.d_ff attention.d_kv
    attention.num_heads attention.num_key_value_heads embedding.d_embed special.pad special.eos special.start
    dropout dtype compile.layers compile.remat compile.saved compile.offloaded
    compile.loss_chunks""".split()

# No encoder or decoder of these was published with Adafactor; warm-up keeps post-norm stacks from diverging.
ADAMW: Changes = {
    "pretraining.optimizer.name": "adamw",
    "pretraining.optimizer.schedule": "constant",
    "pretraining.optimizer.learning_rate": 1e-3,
    "pretraining.optimizer.warmup_steps": 50,
    "pretraining.optimizer.weight_decay": 0.01,
    "pretraining.optimizer.clip_norm": 1.0,
    "finetuning.optimizer.name": "adamw",
    "finetuning.optimizer.schedule": "constant",
    "finetuning.optimizer.learning_rate": 3e-4,
    "finetuning.optimizer.warmup_steps": 50,
    "finetuning.optimizer.weight_decay": 0.01,
    "finetuning.optimizer.clip_norm": 1.0,
}


def family(name: str) -> Changes:
    """Return the changes that make a model one of the family of the published ``name``.

    Settings that the family does not read are left out; sizes and vocabulary stay those of the scale.
    """
    published = dict(leaves(PRESETS[name]))
    left_out = {*_OF_SCALE, *unused_settings(PRESETS[name], published)}
    kept = {f"model.{path}": value for path, value in published.items() if path not in left_out}
    return cast(Changes, kept)


LABELLED = ("acceptability", "follows", "extract", "next")  # labelled tasks of the documentation
HEADS: Changes = {"tuning.mixtures": (), "tuning.heads": LABELLED}

BERT: Changes = (
    family("bert-base")
    | objective("masked-lm")
    # each text of a pair ends, since pairs are not joined
    | {"objective.pairs": "next-sentence", "objective.eos": "each-example"}
    | HEADS
    | ADAMW
)
GPT: Changes = (
    family("gpt2")
    | objective("causal-lm")
    | HEADS
    | ADAMW
    # no start by denoising: a causal LM learns from the first steps on, and rows of the start would be longer
    | {"start.steps": 0, "pretraining.optimizer.learning_rate": 3e-3}
)

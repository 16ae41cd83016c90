"""What makes a model one of a published family, and how models of such families are trained here."""

from typing import Any

from lm.config.base import leaves, unused_settings
from lm.nn.presets import PRESETS
from lm.objectives.denoising import OBJECTIVES

# What stays as the scale has it: the size, the vocabulary and its special tokens, and how it is compiled.
_OF_SCALE = """vocab_size num_encoder_layers num_decoder_layers d_model mlp.d_ff attention.d_kv
    attention.num_heads attention.num_key_value_heads embedding.d_embed special.pad special.eos special.start
    dropout dtype compile.layers compile.remat""".split()

# No encoder or decoder of these was published with Adafactor; a ramp keeps post-norm stacks from diverging.
_RAMP: dict[str, Any] = {"clip_norm": 1.0, "weight_decay": 0.01, "warmup_steps": 50}
ADAMW: dict[str, Any] = {
    f"{phase}.optimizer.{name}": value
    for phase, rate in (("pretraining", 1e-3), ("finetuning", 3e-4))
    for name, value in (_RAMP | {"name": "adamw", "schedule": "constant", "learning_rate": rate}).items()
}


def family(name: str) -> dict[str, Any]:
    """The changes that make a model one of the family of the published ``name``, which reads all of them."""
    published = dict(leaves(PRESETS[name]))
    left_out = {*_OF_SCALE, *unused_settings(PRESETS[name], published)}
    return {f"model.{path}": value for path, value in published.items() if path not in left_out}


LABELLED = ("acceptability", "follows", "extract", "next")  # labelled tasks of the documentation
HEADS: dict[str, Any] = {"tuning.mixtures": (), "tuning.heads": LABELLED}

BERT = family("bert-base") | {"objective": OBJECTIVES["masked-lm"], "objective.pairs": "next-sentence"}
BERT |= {"objective.eos": "each-example"}  # of pairs, which are not joined
BERT |= HEADS | ADAMW
# No start by denoising: a causal LM learns from the first steps on, and rows of the start would be longer.
GPT = family("gpt2") | {"objective": OBJECTIVES["causal-lm"]} | HEADS | ADAMW | {"start.steps": 0}
GPT |= {"pretraining.optimizer.learning_rate": 3e-3}

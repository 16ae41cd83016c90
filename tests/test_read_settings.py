"""Every setting changes what is computed, or is refused where it is given by hand."""

import typing
from types import NoneType

import pytest
from tiny import TINY

from experiments.study.experiment import Experiment
from experiments.study.registry import build
from experiments.study.scales import SCALES
from lm.data.corpora import documentation

# A T5, a GPT, a BERT, an LSTM and an n-gram row, as small as they can be, and rows that read more settings.
ROWS = {
    "gpt": ("gpt/base", {"tuning.heads": ("acceptability",)}),
    "lstm": ("history/lstm", {}),
    "bert": ("bert/base", {"tuning.heads": ("acceptability",)}),
    "t5": ("t5/1-baseline/baseline", {}),
    "ngram": ("history/trigram", {}),
}
TINY_SCALE = TINY | {
    "pretraining.steps": 4,
    "finetuning.steps": 2,
    "finetuning.save_every": 1,
    "tuning.mixtures": ("cloze",),
    "mixing.limit": 100,
    "vectors.tokens": 500,
    "data.vocabulary_size": 350,
}
# Settings of how a run is done: its numbers are the same, so that no other setting decides who reads them.
HOW = {
    "data.corrupt_records": "what is done about a damaged record; there is none",
    "data.workers": "who prepares batches",
    "data.encoders": "who encodes text ahead",
    "data.cache_size": "how much encoded text is kept",
    "model.attention": "which kernel computes the same attention",
    "model.layers": "how the stack is compiled",
    "model.remat": "what the backward pass computes again",
    "pretraining.microbatches": "in how many parts a batch is computed",
    "pretraining.keep_hours": "which checkpoints are kept",
    "pretraining.log_every": "how often numbers are written",
    "finetuning.microbatches": "in how many parts a batch is computed",
    "finetuning.keep_hours": "which checkpoints are kept",
    "finetuning.log_every": "how often numbers are written",
    "guard.non_finite": "what is done about a loss that is not finite; there is none",
    "guard.in_a_row": "when a run that leaves out updates is ended",
    "guard.failed_save": "what is done about a bad disk",
    **{
        f"mesh.{axis}": "which device computes what"
        for axis in ("slice", "data", "fsdp", "sequence", "tensor")
    },
}
GIVEN_OTHERWISE = {"start.model": "by --start"}
# Second values that are not found by their type alone, the first that can be had in a row.
OTHERS = {
    "data.corpus": ("documentation/libraries",),
    "data.vocabulary": ("bytes", "bpe"),
    "data.held_out_lengths": ((1, 2),),
    "data.streams": (1, 2),
    "data.held_out_documents": (2,),
    "model.vocab_size": (640,),
    "model.special.eos": (2, None),
    "model.sparsity.layer_windows": ((3,),),
    "model.published": ("{}",),
    "model.heads": (("backward",), ("pooler",), ("replaced-token",)),
    "tuning.mixtures": (("extract",),),
    "tuning.heads": (("follows",),),
    "tuning.branches": ((0.5, 1.0),),
    "tuning.lora.matrices": (("mlp",),),
    "model.lora.matrices": (("mlp",),),
    "model.num_key_value_heads": (1,),
    "model.encoder.num_heads": (1,),
    "pretraining.optimizer.factor_from": (8,),
    "finetuning.optimizer.factor_from": (8,),
}


def kind_of(path):
    """The type of a setting."""
    cls = Experiment
    for name in path.split("."):
        cls = typing.get_type_hints(cls)[name]
    return cls


def others(path, value):
    """Other values that a setting may have, by its type."""
    if path in OTHERS:
        return OTHERS[path]
    kind = kind_of(path)
    if NoneType in typing.get_args(kind):
        kind = next(each for each in typing.get_args(kind) if each is not NoneType)
    if typing.get_origin(kind) is typing.Literal:
        return tuple(choice for choice in typing.get_args(kind) if choice != value)
    if kind is bool:
        return (not value,)
    if kind is int:
        return tuple(number for number in (2 * (value or 1), (value or 0) + 1, 1, 2, 3) if number != value)
    if kind is float:
        return ((value or 0.5) / 2, 0.25)
    raise AssertionError(f"{path} of type {kind} needs another value in OTHERS")


@pytest.fixture(scope="module")
def cache(tmp_path_factory):
    """A cache that holds a small documentation corpus; and a scale ``tiny``."""
    folder = tmp_path_factory.mktemp("runs") / "cache"
    documentation.prepare_sets(folder, packages=documentation.STDLIB)
    SCALES["tiny"] = SCALES["nano"] | TINY_SCALE
    yield folder
    del SCALES["tiny"]


def built(row):
    name, changes = ROWS[row]
    return build(name, "tiny", changes)

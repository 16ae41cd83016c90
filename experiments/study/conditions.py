"""When a setting of an experiment is read: the conditions that ``setting(default, read_if)`` is given.

A condition maps paths of other settings to the values that they should have, all of them; of several
conditions, one is enough.
"""

from lm.config.base import ABOVE_0, GIVEN, Condition, Conditions, Values
from lm.objectives.corruption import BOUNDS_LIKELIHOOD, HIDES_NOTHING
from lm.objectives.denoising import IN_PLACE

# ---- paths from the outermost settings

NETWORK: Condition = {"counts.model": Values(("none",), description="networks")}
NGRAMS: Condition = {"counts.model": ("ngram",)}
TAGGER: Condition = {"counts.model": ("tagger",)}
REPEATED_NGRAMS: Condition = NGRAMS | {"data.repeats": ABOVE_0}  # whose text is cut to whole passes

PRETRAINED: Condition = NETWORK | {"pretraining.steps": ABOVE_0}
PRETRAINED_ON_CORPUS: Condition = PRETRAINED | {"mixing.pretraining": Values(exclude=("tasks",))}
MULTI_TASK: Condition = PRETRAINED | {"mixing.pretraining": Values(exclude=("corpus",))}
LANGUAGE_MODEL: Condition = PRETRAINED | {
    "model.architecture": ("decoder",),
    "objective.noise": ("everything",),
    "objective.inputs": ("drop",),
    "objective.mixture": ("",),
}
MASKED_DIFFUSION: Condition = PRETRAINED | {
    "model.architecture": ("encoder",),
    "objective.noise": BOUNDS_LIKELIHOOD,
}

TUNED_ON_TEXT: Condition = NETWORK | {"finetuning.steps": ABOVE_0, "tuning.mixtures": GIVEN}
FINETUNED: Conditions = (
    TUNED_ON_TEXT,
    NETWORK | {"finetuning.steps": ABOVE_0, "tuning.heads": GIVEN},
)

TRAINED_VOCABULARY: Condition = {"data.vocabulary": ("unigram", "bpe", "wordpiece")}

NO_CHECKPOINT: Condition = {"start.model": Values(("",), description="models without --start")}
# steps by another objective before pre-training
DECODER_START: Condition = (
    NETWORK
    | {"model.architecture": Values(exclude=("encoder",), description="models with a decoder")}
    | NO_CHECKPOINT
    | {"pretraining.steps": ABOVE_0}
)
_STARTS_AS_MASKED_LM: Condition = {
    "start.objective.targets": Values(IN_PLACE, description="encoders with an objective of encoders")
}
_STARTS_AS_CAUSAL_LM: Condition = {
    "start.objective.noise": Values(("everything",), description="encoders with a causal language model"),
    "start.objective.inputs": ("drop",),
}
ENCODER_STARTS: Conditions = tuple(
    NETWORK
    | objective
    | {"model.architecture": ("encoder",)}
    | NO_CHECKPOINT
    | {"pretraining.steps": ABOVE_0}
    for objective in (_STARTS_AS_MASKED_LM, _STARTS_AS_CAUSAL_LM)
)

HIDES_TOKENS = Values(exclude=HIDES_NOTHING)  # kinds of noise

# Ids above those of word pieces stand for noise, for masks, and for the ends of texts that an encoder reads.
SENTINELS: Conditions = (
    PRETRAINED | {"objective.mixture": GIVEN},
    PRETRAINED | {"objective.noise": HIDES_TOKENS, "objective.inputs": Values(exclude=("drop", "shuffle"))},
    PRETRAINED | {"objective.targets": ("sentinels",), "objective.inputs": Values(exclude=("drop",))},
    PRETRAINED | {"objective.targets": ("sentinels",), "objective.noise": Values(exclude=("everything",))},
    DECODER_START
    | {
        "start.steps": ABOVE_0,
        "start.objective.noise": HIDES_TOKENS,
        "start.objective.inputs": Values(exclude=("drop", "shuffle")),
    },
    DECODER_START | {"start.steps": ABOVE_0, "start.objective.targets": ("sentinels",)},
    PRETRAINED | {"pretraining.phases": GIVEN},
    DECODER_START | {"start.steps": ABOVE_0, "start.objective.mixture": GIVEN},
    NETWORK | {"model.architecture": ("encoder",)},
    {"finetuning.steps": ABOVE_0, "tuning.heads": GIVEN, "tuning.layout": ("start-delim-extract",)},
)

# ---- paths within ``tuning``

HAS_TASKS: Conditions = ({"mixtures": GIVEN}, {"heads": GIVEN})
FINETUNES_HEADS: Condition = {"heads": GIVEN, "finetuning.steps": ABOVE_0}
FINETUNES: Condition = {"finetuning.steps": ABOVE_0}

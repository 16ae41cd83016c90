"""Pre-training that goes on with another objective or mask: adaptations of T5 and of decoders.

T5 was adapted to language modelling before prompts were tuned (Lester et al. 2021, section 3.3): a tenth more
steps, which continue its optimiser and its schedule. Wang et al. 2022 (section 5) adapt causal decoders to span
corruption with a prefix mask, and prefix decoders back to language modelling.
"""

from experiments.study.changes import Changes, objective, times
from experiments.study.experiment import PretrainingPhase
from experiments.study.table import make_table
from lm.objectives.denoising import OBJECTIVES

LANGUAGE_MODEL, SPANS = OBJECTIVES["language-model"], OBJECTIVES["span-corruption"]
DECODER: Changes = {"model.architecture": "decoder", "start.steps": 0}
PREFIX_DECODER: Changes = {"model.architecture": "prefix-decoder", "start.steps": 0}
LM_ADAPTED = 100 / 1_000  # steps of language modelling for each step before (Lester et al. 2021)
MLM_ADAPTED = 51 / 168  # tokens of span corruption for each token before (Wang et al. 2022, section 5)


def adapted(phase: PretrainingPhase, extra: float) -> Changes:
    """Return the change to a phase of as many steps as the scale has, and ``extra`` times as many after it."""
    return {"pretraining.phases": (phase,), "pretraining.steps": times(1 + extra)}


def first(share: float, name: str, **mask: str) -> PretrainingPhase:
    """Return a first phase by the objective of this name."""
    return PretrainingPhase(share, OBJECTIVES[name], **mask)

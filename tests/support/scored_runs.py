"""Runs of untrained models, and what scoring them writes."""

import json

from drawn import drawn_state
from tiny import TINY

from experiments.runs import provenance
from experiments.runs.paths import save_settings
from experiments.runs.stages import stages_of
from experiments.study.experiment import Experiment
from lm import sharding
from lm.config.base import changes
from lm.config.training import CheckpointConfig
from lm.tokenizers.sentencepiece import ByteTokenizer
from lm.train.runtime.checkpoints import Checkpoints

SMALL = TINY | {
    "data.vocabulary": "bytes",
    "model.output.logits": "separate",  # tied ones of a new model repeat what was read: padding
    "tuning.inputs_length": 36,  # cuts the first translation, not the second
}
HEADS = {"tuning.mixtures": (), "tuning.heads": ("cola",), "model.architecture": "encoder"}


def run_of(runs, name, given):
    """The folder of a run whose phases are all done, its settings, and {phase: (state, steps)}."""
    folder, experiment, made = runs / "nano" / name, changes(Experiment(), SMALL | given), {}
    save_settings(folder, experiment, runs / "cache")
    mesh = sharding.make_mesh(experiment.mesh)
    for seed, stage in enumerate(stages_of(folder)):
        steps = stage.steps(mesh)
        made[stage.name] = drawn_state(steps, seed), steps
        with Checkpoints(str(stage.folder / "checkpoints"), CheckpointConfig()) as checkpoints:
            checkpoints.save(made[stage.name][0])
        record = dict.fromkeys(provenance.PARTS, {}) | {
            "vocabulary": {"fingerprint": ByteTokenizer(100).fingerprint}
        }
        provenance.record(stage.folder, record)
    return folder, experiment, made


def read(place):
    lines = (place / "predictions.jsonl").read_text().splitlines()
    return json.loads((place / "scores.json").read_text()), list(map(json.loads, lines))

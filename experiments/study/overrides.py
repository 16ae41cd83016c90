"""Settings on top of a row's: given on the command line, or those of a checkpoint that it starts from."""

from collections.abc import Iterable, Sequence
from typing import Any

from experiments.study.changes import Changes
from experiments.study.experiment import BASELINE, FREE, Experiment
from experiments.study.registry import build
from lm.config.base import SettingError, diff, leaves, unused_settings

# where a row starts from a checkpoint, these settings of a model stay the row's, those of data are not
OF_TRAINING = ("dropout", "dtype", "attention.implementation", "compile.layers", "compile.remat")
OF_VOCABULARY = ("vocabulary", "vocabulary_texts", "vocabulary_size", "unknown", "sentinels")


def overrides_of(name: str, scale: str, experiment: Experiment) -> Changes:
    """Return the changes that make row ``name`` into ``experiment``; its folder has them in its name."""
    started = {path: new for path, new in start_changes(experiment).items() if path != "start.model"}
    changed = diff(build(name, scale, started), experiment).items()
    return {path: new for path, (_, new) in changed if not path.startswith(FREE)}


def start_changes(experiment: Experiment) -> Changes:
    """What a row takes over where it starts from the checkpoint that this experiment has; {} without one.

    That is the shape of the model, its vocabulary and special ids. Pre-training is left out, unless it is
    asked for by its steps; the rate of dropout, and how the model is compiled, stay the row's.
    """
    if not experiment.start.model:
        return {}
    model = {f"model.{path}": new for path, new in leaves(experiment.model) if path not in OF_TRAINING}
    data = {f"data.{name}": getattr(experiment.data, name) for name in OF_VOCABULARY}
    vectors = {f"vectors.{path}": new for path, new in leaves(BASELINE.vectors)}
    left_out = vectors | {"start.steps": 0, "pretraining.steps": 0}
    return model | data | left_out | {"start.model": experiment.start.model}


def named_changes(changes: Changes) -> Changes:
    """``changes`` without what follows from ``start.model`` among them."""

    def follows(path: str, new: Any) -> bool:
        group, _, name = path.partition(".")
        shape = group == "model" and name not in OF_TRAINING
        words = group == "data" and name in OF_VOCABULARY
        return shape or words or group == "vectors" or (path.endswith(".steps") and new == 0)

    is_started = "start.model" in changes
    return {path: new for path, new in changes.items() if not (is_started and follows(path, new))}


def check_start(experiment: Experiment, changes: Changes) -> None:
    """SettingError for a setting in ``changes`` that contradicts the checkpoint of ``experiment``."""
    for path, due in start_changes(experiment).items():
        if path in changes and path != "pretraining.steps" and changes[path] != due:
            raise SettingError(
                f"--{path} {changes[path]} contradicts --start: the checkpoint {experiment.start.model} has "
                f"{due!r:.60}; leave it out"
            )


def check_given(experiments: Sequence[Experiment], paths: Iterable[str]) -> None:
    """SettingError for a setting, given by hand at one of ``paths``, that none of these experiments reads."""
    for path in paths:
        if path == "start.model":
            raise SettingError(f"{path} is set by --start: name a folder, a run or hf:NAME there")
        reasons = [unused_settings(experiment, [path]) for experiment in experiments]
        if all(reasons):
            raise SettingError("; ".join(reasons[0].values()))


def used_changes(name: str, scale: str, changes: Changes) -> Changes:
    """Those of ``changes``, made in many rows, that row ``name`` reads: without the others it is the same."""
    if "start.model" in changes:  # which has all of its checkpoint
        return changes
    lost = unused_settings(build(name, scale, changes), changes)
    return {path: value for path, value in changes.items() if path not in lost}

"""Settings on top of a row's: given on the command line, or those of a checkpoint that it starts from."""

from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from functools import cache
from types import MappingProxyType
from typing import Any

from experiments.study.changes import Overrides
from experiments.study.experiment import BASELINE, Experiment, PretrainingPhase
from experiments.study.registry import build
from experiments.study.settings_diff import NON_SEMANTIC
from experiments.study.words import shown_value
from lm.config.base import SettingError, diff, leaves, unused_settings
from lm.config.training import OptimizerConfig
from lm.objectives.denoising import OBJECTIVES, Objective

# settings of a model that stay the row's if it starts from a checkpoint
MODEL_SETTINGS_KEPT_FROM_ROW = (
    *("dropout", "dtype", "attention.implementation"),
    *("compile.layers", "compile.remat", "compile.saved", "compile.offloaded"),
    "compile.loss_chunks",
)
# settings of a model that may differ from those of the checkpoint, whose weights are then converted
CONVERTIBLE_MODEL_SETTINGS = ("architecture", "cross_attention.kind", "cross_attention.positions")
# Settings that convert the checkpoint named by --start, or that choose how many of its layers are used. They
# may be given together with --start.
START_OPTIONS = tuple(
    f"model.{path}" for path in (*CONVERTIBLE_MODEL_SETTINGS, "num_encoder_layers", "num_decoder_layers")
)
# settings of ``data`` that a row takes over from the checkpoint that it starts from
VOCABULARY_SETTINGS = ("vocabulary", "vocabulary_texts", "vocabulary_size", "unknown", "sentinels")
NO_SETTINGS: Mapping[str, Any] = MappingProxyType({})


def overrides_of(name: str, scale: str, experiment: Experiment) -> Overrides:
    """Return the changes that make row ``name`` into ``experiment``; its folder has them in its name."""
    started = {path: new for path, new in start_changes(experiment).items() if path != "start.model"}
    changed = diff(build(name, scale, started), experiment).items()
    return {path: new for path, (_, new) in changed if not path.startswith(NON_SEMANTIC)}


def start_changes(experiment: Experiment) -> Overrides:
    """Return the settings that a row takes over from the checkpoint that ``experiment`` starts from.

    These are the shape of the model, its vocabulary and its special ids; {} without a checkpoint.
    ``start.steps``, the updates of a warm-up on the corpus before pre-training, and ``pretraining.steps`` are
    0, and the settings of word vectors are the defaults. Steps of pre-training that a command line gives are
    applied after these changes. Dropout and compilation stay the row's.
    """
    if not experiment.start.model:
        return {}
    model = {
        f"model.{path}": new
        for path, new in leaves(experiment.model)
        if path not in MODEL_SETTINGS_KEPT_FROM_ROW
    }
    data = {f"data.{name}": getattr(experiment.data, name) for name in VOCABULARY_SETTINGS}
    vectors = {f"vectors.{path}": new for path, new in leaves(BASELINE.vectors)}
    left_out = vectors | {"start.steps": 0, "pretraining.steps": 0}
    return model | data | left_out | {"start.model": experiment.start.model}


def explicit_overrides(changes: Overrides) -> Overrides:
    """Return the changes that were made explicitly: without those that follow from ``start.model``."""

    def follows(path: str, new: Any) -> bool:
        group, _, name = path.partition(".")
        is_shape = group == "model" and name not in MODEL_SETTINGS_KEPT_FROM_ROW
        is_vocabulary = group == "data" and name in VOCABULARY_SETTINGS
        is_left_out = path in ("start.steps", "pretraining.steps") and new == 0
        return is_shape or is_vocabulary or is_left_out or group == "vectors"

    is_started = "start.model" in changes
    return {path: new for path, new in changes.items() if not (is_started and follows(path, new))}


def command_line_overrides(changes: Overrides, options: Mapping[str, Any] = NO_SETTINGS) -> Overrides:
    """Return the changes to write as options beside --start.

    They are all but ``start.model`` and those that follow from it.

    options: the settings that the user gave as options. Those of START_OPTIONS are returned too, although
    they look like part of the checkpoint's shape.
    """
    explicit = {path: new for path, new in explicit_overrides(changes).items() if path != "start.model"}
    return explicit | {path: new for path, new in options.items() if path in START_OPTIONS}


def setting_values(values: Mapping[str, Any]) -> str:
    """Return settings with their values for labels, such as "mlp.d_ff=128, dropout=0.1"."""
    return ", ".join(f"{short_name(path)}={shown_value(value)}" for path, value in values.items())


def short_name(path: str) -> str:
    """Return the shortest end of a setting's path that no other setting has, such as "mlp.d_ff".

    >>> short_name("pretraining.optimizer.learning_rate")
    'pretraining.optimizer.learning_rate'
    >>> short_name("model.mlp.d_ff"), short_name("tuning.branches"), short_name("start.model")
    ('mlp.d_ff', 'branches', 'start')
    """
    if path == "start.model":  # by its option, --start
        return "start"
    known = _count_ends()
    return next((end for end in _ends(path) if known[end] == 1), path)


@cache
def _count_ends() -> Counter[str]:
    """Return how many settings each end of a path belongs to."""
    return Counter(end for path, _ in leaves(BASELINE) for end in _ends(path))


def _ends(path: str) -> list[str]:
    """Return the ends of a path, shortest first: "c", "b.c" and "a.b.c" of "a.b.c"."""
    names = path.split(".")
    return [".".join(names[first:]) for first in reversed(range(len(names)))]


def check_agreement_with_checkpoint(experiment: Experiment, changes: Overrides) -> None:
    """Raise SettingError for a setting in ``changes`` that contradicts the checkpoint of ``experiment``."""
    for path, due in start_changes(experiment).items():
        if path in changes and path != "pretraining.steps" and changes[path] != due:
            raise SettingError(
                f"--{path} {changes[path]} contradicts --start: the checkpoint {experiment.start.model} has "
                f"{due!r:.60}; leave it out"
            )


def check_overrides_are_read(experiments: Sequence[Experiment], paths: Iterable[str]) -> None:
    """Raise SettingError for a setting, given at one of ``paths``, that none of ``experiments`` reads.

    If there are no experiments, since none of the rows can be built, it is raised for any setting.
    """
    for path in paths:
        if path == "start.model":
            raise SettingError(f"{path} is set by --start: name a folder, a run or hf:NAME there")
        if not experiments:
            raise SettingError(f"{path} is read by no row, since none of these can be built: leave it out")
        reasons = [unused_settings(experiment, [path]) for experiment in experiments]
        if path == "pretraining.phases":
            pairs = zip(reasons, experiments, strict=True)
            reasons = [whole | _unused_in_phases(each.pretraining.phases) for whole, each in pairs]
        if all(reasons):
            raise SettingError("; ".join(reasons[0].values()) + _of_other_stack(experiments[0], path))


def _of_other_stack(experiment: Experiment, path: str) -> str:
    """Return a clause that names the same setting of the decoder for one of the encoder, or the reverse.

    It is "" unless there is such a setting and the experiment reads it.
    """
    known = dict(leaves(experiment))
    for stack, other in (("encoder", "decoder"), ("decoder", "encoder")):
        same = path.replace(stack, other)
        if same != path and same in known and not unused_settings(experiment, [same]):
            return f"; that of {other}s is {same}"
    return ""


def _unused_in_phases(phases: Iterable[PretrainingPhase]) -> dict[str, str]:
    """Return {path: reason} of the settings in phases that differ from their defaults and are not used.

    An objective that has a name is taken as a whole.
    """
    reasons: dict[str, str] = {}
    for index, phase in enumerate(phases):
        name, changed = f"pretraining.phases[{index}]", []
        if phase.optimizer is not None:
            changed += [f"optimizer.{path}" for path in diff(OptimizerConfig(), phase.optimizer)]
        if phase.objective not in OBJECTIVES.values():
            changed += [f"objective.{path}" for path in diff(Objective(), phase.objective)]
        unused = unused_settings(phase, changed)
        reasons |= {f"{name}.{path}": f"{name}: {why}" for path, why in unused.items()}
    return reasons


def effective_overrides(name: str, scale: str, changes: Overrides) -> Overrides:
    """Return the changes that take effect, since row ``name`` reads them; the others change nothing."""
    if "start.model" in changes:  # all that follows from a checkpoint is kept
        return changes
    lost = unused_settings(build(name, scale, changes), changes)
    return {path: value for path, value in changes.items() if path not in lost}

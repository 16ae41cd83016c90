"""The stages of training that a run consists of: its pre-trainings, then its fine-tunings.

A run of counts has one stage for each of its models instead. Everything that trains, scores, plans or shows
runs iterates over the stages. Runs that pre-train alike share one pre-training, whatever they do with it
afterwards: its folder is called by a hash of the settings that it depends on.
"""

import hashlib
import json
from collections.abc import Sequence
from dataclasses import replace
from itertools import product
from pathlib import Path

from experiments.runs.kinds.counts import COUNT_STAGES
from experiments.runs.kinds.finetuning import Finetuning
from experiments.runs.kinds.head import HeadFinetuning
from experiments.runs.kinds.network import NetworkStage
from experiments.runs.kinds.pretraining import (
    FEEDING,
    Given,
    Pretraining,
    branch_step,
    has_start,
    pretraining_settings,
)
from experiments.runs.kinds.stage import Stage
from experiments.runs.kinds.vectors import Vectors, vectors_settings
from experiments.runs.paths import (
    COUNTS,
    DEFAULT_CACHE,
    PRETRAINING,
    START,
    VECTORS,
    branch_name,
    find_cache,
    load_settings,
    name_without,
    scale_folder,
    start_folder,
)
from experiments.study.experiment import BASELINE, Experiment
from lm.config.base import diff
from lm.data.tasks.names import task_name


def stages_of(run: Path) -> tuple[Stage, ...]:
    """Return the stages of the run in a folder, by the settings there; SettingError if it is not a run."""
    return stages(load_settings(run), run, find_cache(run))


def stages(experiment: Experiment, run: Path = Path(), cache: Path | None = None) -> tuple[Stage, ...]:
    """Return the stages of the run in the folder ``run``, in the order in which they are trained.

    The vectors and the start of each member's pre-training, if it has them; then one pre-training of each
    member of the ensemble, or one for each target that it leaves out; then for each target (a mixture, or a
    task with a head) and each of ``tuning.branches``, the whole first, one fine-tuning of each member. Beside
    ``cache`` lie the folders of what runs share; without it their paths are relative.
    """
    if experiment.counts.model != "none":
        return _counted(experiment, run)
    shared_stages = SharedStages(run, cache)
    tuning = experiment.tuning
    targets, models = (*tuning.mixtures, *tuning.heads), _members(experiment)
    pretrains = experiment.pretraining.steps > 0
    parents: dict[tuple[int | None, str], NetworkStage | None] = {}
    for (member, settings), target in product(models, targets or ("",)):
        owner, own_settings = member, settings
        if experiment.ensemble.pretraining == "shared":
            owner, own_settings = None, replace(settings, seed=experiment.seed)
        if pretrains:
            parents[member, target] = shared_stages.pretraining(owner, own_settings, target)
        else:
            parents[member, target] = shared_stages.before(owner, own_settings)
    finetunings: list[Stage] = []
    shares = tuning.branches[::-1] if pretrains else (1.0,)  # a task's files are first found in the whole's
    for target, share, (member, settings) in product(targets, shares, models):
        if experiment.finetuning.steps:
            kind = HeadFinetuning if target in tuning.heads else Finetuning
            name = branch_name(task_name(target), share)
            parent = parents[member, target]
            last = parent.training.steps if parent else None
            after = branch_step(experiment, share) if pretrains else last
            stage = kind(name, member, (target,), settings, run, parent, after)
            finetunings.append(replace(stage, folder=run / "finetuning" / stage.name))
    pretrained: list[Stage] = [stage for stage in parents.values() if stage is not None]
    # Most targets have the same pre-training: each stage is there once.
    once = dict.fromkeys((*_ancestors(pretrained), *pretrained))
    return (*(stage for stage in once if not isinstance(stage, Given)), *finetunings)


def given_checkpoint(experiment: Experiment, cache: Path) -> Given | None:
    """Return the checkpoint whose model a run has; None: it has none's."""
    if not (name := experiment.start.model):
        return None
    return Given(name, None, (), experiment, start_folder(name, cache) / PRETRAINING)


def _ancestors(stages: Sequence[Stage]) -> list[Stage]:
    """Return what these stages start from, and what that starts from; first those that others start from."""
    parents = [stage.parent for stage in stages if stage.parent is not None]
    return [*_ancestors(parents), *parents] if parents else []


def _counted(experiment: Experiment, run: Path) -> tuple[Stage, ...]:
    """Return the stage of an n-gram model, or of each tagger."""
    models: list[tuple[str, tuple[str, ...], Path]] = [(COUNTS, (), run / COUNTS)]
    if experiment.counts.model == "tagger":
        models = [(name, (name,), run / COUNTS / name) for name in experiment.tuning.heads]
    kind = COUNT_STAGES[experiment.counts.model]
    return tuple(kind(name, None, on, experiment, folder) for name, on, folder in models)


def _members(experiment: Experiment) -> list[tuple[int | None, Experiment]]:
    """Return (number, settings) of each model that the run consists of.

    Members differ in their seeds: member k of n has seed * n + k, so that no two members of ensembles with
    seeds 0, 1, ... are alike. Those n of seed 0 pre-train like single runs with seeds 0 to n - 1, and share
    their pre-training with them.
    """
    count = experiment.ensemble.members
    if count == 1:
        return [(None, experiment)]
    single = replace(experiment, ensemble=BASELINE.ensemble)
    return [(k, replace(single, seed=experiment.seed * count + k)) for k in range(count)]


class SharedStages:
    """The stages of a run that come before fine-tuning, in folders that runs share."""

    def __init__(self, run: Path, cache: Path | None):
        self.run, self.cache = run, cache or DEFAULT_CACHE
        self.shared = scale_folder(run, cache) if cache else Path()

    def pretraining(self, member: int | None, settings: Experiment, target: str) -> Pretraining:
        """Return the pre-training of a model that is then fine-tuned on ``target``."""
        parent = self.start(member, settings) if has_start(settings) else self.before(member, settings)
        return self._pretraining(member, settings, target, parent, PRETRAINING)

    def start(self, member: int | None, settings: Experiment) -> Pretraining:
        """Return the pre-training that comes before it: on the corpus, as short as ``start.steps`` says.

        What rows differ in otherwise is left out of it, so that those of one model, data and seed share it.
        """
        first = replace(
            settings,
            objective=settings.start.objective,
            pretraining=replace(settings.pretraining, steps=settings.start.steps, steps_per_row=1),
            data=replace(settings.data, repeats=0, held_out_documents=0),
            mixing=BASELINE.mixing,
            tuning=replace(settings.tuning, branches=BASELINE.tuning.branches),
            start=BASELINE.start,
        )
        return self._pretraining(member, first, "", self.before(member, first), START)

    def before(self, member: int | None, settings: Experiment) -> NetworkStage | None:
        """Return what comes before all training on batches: a checkpoint, vectors, or nothing."""
        given = given_checkpoint(settings, self.cache)
        if given is not None:
            return given if settings.start.weights == "trained" else None
        return self.vectors(member, settings)

    def vectors(self, member: int | None, settings: Experiment) -> Vectors | None:
        """Return the vectors as which the embedding of a model starts, unless it starts at random."""
        if not settings.vectors.epochs:
            return None
        complete, data = vectors_settings(settings), settings.data
        feeding = {name: getattr(data, name) for name in FEEDING}
        data_settings = replace(complete.data, **feeding)
        complete = replace(complete, data=data_settings, mesh=settings.mesh, guard=settings.guard)
        folder = self.shared_folder(vectors_settings(complete), settings)
        return Vectors(VECTORS, member, (), complete, folder)

    def _pretraining(
        self, member: int | None, settings: Experiment, target: str, parent: NetworkStage | None, name: str
    ) -> Pretraining:
        if settings.mixing.pretraining == "corpus+other-tasks":
            name = name_without(name, task_name(target))
        decisive = pretraining_settings(settings, target)
        groups = ("data", "mesh", "guard", "pretraining", "finetuning")  # have settings that change no number
        tuning = replace(decisive.tuning, branches=settings.tuning.branches)  # these choose checkpoints alone
        complete = replace(decisive, tuning=tuning, **{name: getattr(settings, name) for name in groups})
        on = () if decisive.mixing.pretraining == "corpus" else decisive.tuning.mixtures
        folder = self.shared_folder(pretraining_settings(complete), settings)
        step = parent.training.steps if parent else None
        return Pretraining(name, member, on, complete, folder, parent, step)

    def shared_folder(self, decisive: Experiment, settings: Experiment) -> Path:
        """Return the folder of what depends on the ``decisive`` settings and, by its vocabulary, on tasks."""
        if (self.run / PRETRAINING / "checkpoints").is_dir():  # an imported run has its own
            return self.run / PRETRAINING
        # A hash of the settings that differ from the baseline's: settings added later do not change it.
        changed = diff(BASELINE, decisive)
        contents: dict[str, object] = {path: str(new) for path, (_, new) in changed.items()}
        if settings.data.vocabulary_texts == "corpus+tasks" and settings.tuning.mixtures:
            contents["texts"] = settings.tuning.mixtures
        key = hashlib.sha256(json.dumps(contents).encode()).hexdigest()[:16]
        return self.shared / PRETRAINING / key

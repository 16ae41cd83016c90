"""Lists the stages of training that a run consists of: its pre-trainings, then its fine-tunings.

All code that trains, scores, plans or shows a run iterates over its stages. A run of a count-based model has
one stage per model (one n-gram model, or an HMM tagger per task) and no pre-training. Runs share a
pre-training if all settings that it depends on are equal, whatever they fine-tune on: a hash of those
settings names its folder.

Two settings are called heads. ``model.heads`` are output heads of pre-training, such as next-sentence.
``tuning.heads`` are labelled tasks, for each of which fine-tuning adds a new head.
"""

import hashlib
import json
from collections.abc import Sequence
from dataclasses import replace
from itertools import product
from pathlib import Path
from typing import cast

from experiments.runs.kinds.counts import COUNT_STAGES
from experiments.runs.kinds.finetuning import TextFinetuning
from experiments.runs.kinds.head import HeadFinetuning
from experiments.runs.kinds.network import NetworkStage
from experiments.runs.kinds.pretraining import (
    LOADER_SETTINGS,
    ExternalCheckpoint,
    Pretraining,
    has_start_pretraining,
    pretraining_settings,
)
from experiments.runs.kinds.stage import Stage
from experiments.runs.kinds.vectors import SkipGram, skipgram_settings
from experiments.runs.paths import (
    COUNTS,
    DEFAULT_CACHE,
    PRETRAINING,
    START,
    VECTORS,
    branch_name,
    find_cache,
    load_settings,
    member_name,
    name_without,
    phase_name,
    scale_folder,
    start_folder,
)
from experiments.runs.phases import branch_step, phase_settings, start_model
from experiments.study.experiment import BASELINE, Experiment
from lm.config.base import diff
from lm.data.tasks.names import task_name


def stages_of(run: Path) -> tuple[Stage, ...]:
    """Return the stages of the run in a folder, by its ``settings.json``; SettingError if it is no run."""
    return stages(load_settings(run), run, find_cache(run))


def stages(experiment: Experiment, run: Path = Path(), cache: Path | None = None) -> tuple[Stage, ...]:
    """Return the stages of the run in the folder ``run``, in the order of training.

    1. Skip-gram (``vectors.*``).
    2. The start pre-training (``start.steps``).
    3. Each phase of pre-training before the last (``pretraining.phases``).
    4. The last or only phase of pre-training. With mixing.pretraining="corpus+other-tasks" there is one
       pre-training for each downstream task, on all others.
    5. Fine-tuning: for each downstream task (a mixture, or a task with a head), and for each fraction of
       pre-training in ``tuning.branches`` (1.0 first).

    Stages that the experiment does not ask for are left out. Within an item of this list, all members of an
    ensemble are listed before the next item begins. The members of one fine-tuning (one task, one fraction)
    are adjacent, since ``Run.train`` groups adjacent stages, whose models predict together.

    cache: the folder beside which the stages lie that runs share. None: their paths are relative, for callers
    that use only the names and settings of the stages.
    """
    if experiment.counts.model != "none":
        return _count_stages(experiment, run)
    shared_stages = SharedStages(run, cache)
    tuning = experiment.tuning
    downstream_tasks = (*tuning.mixtures, *tuning.heads)
    members = _ensemble_members(experiment)
    pretrains = experiment.pretraining.steps > 0
    parents: dict[tuple[int | None, str], NetworkStage | None] = {}
    # The task "" stands for no downstream task: there is pre-training alone.
    for (member, settings), task in product(members, downstream_tasks or ("",)):
        if experiment.ensemble.pretraining == "shared":
            with_shared_seed = replace(settings, seed=experiment.seed)
            parents[member, task] = shared_stages.parent_of_finetuning(None, with_shared_seed, task)
        else:
            parents[member, task] = shared_stages.parent_of_finetuning(member, settings, task)
    finetunings: list[Stage] = []
    # tuning.branches ends with 1.0. The fine-tuning after full pre-training comes first, since whoever looks
    # for the files of a task takes the first folder that has them.
    fractions = tuning.branches[::-1] if pretrains else (1.0,)
    for task, fraction, (member, settings) in product(downstream_tasks, fractions, members):
        if experiment.finetuning.steps:
            kind = HeadFinetuning if task in tuning.heads else TextFinetuning
            name = branch_name(task_name(task), fraction)
            parent = parents[member, task]
            if not pretrains:  # the parent is an external checkpoint, skip-gram or None
                parent_step = _last_step(parent)
            else:
                parent_step = branch_step(experiment.pretraining.steps, fraction)
                parent = _phase_at(parent, parent_step)
            folder = run / "finetuning" / member_name(name, member)
            finetunings.append(
                kind(name, member, (task,), settings, folder, parent=parent, parent_step=parent_step)
            )
    pretrained: list[Stage] = [stage for stage in parents.values() if stage is not None]
    # Most tasks start from the same pre-training, which is listed once.
    unique = dict.fromkeys((*_ancestors(pretrained), *pretrained))
    return (*(stage for stage in unique if not isinstance(stage, ExternalCheckpoint)), *finetunings)


def external_checkpoint(experiment: Experiment, cache: Path) -> ExternalCheckpoint | None:
    """Return the checkpoint that ``start.model`` names; None if it names none.

    The settings of the returned stage are ``experiment``, which has the checkpoint's architecture and
    vocabulary, even if its parameters are not used (``start.weights``).
    """
    if not (name := experiment.start.model):
        return None
    folder = start_folder(name, cache) / PRETRAINING
    return ExternalCheckpoint(name, member=None, task_names=(), settings=experiment, folder=folder)


def _ancestors(stages: Sequence[Stage]) -> list[Stage]:
    """Return the parents of these stages, their parents and so on, each before its children."""
    parents = [stage.parent for stage in stages if stage.parent is not None]
    return [*_ancestors(parents), *parents] if parents else []


def _last_step(stage: NetworkStage | None) -> int | None:
    return None if stage is None else stage.training.steps


def _phase_at(stage: NetworkStage | None, step: int) -> NetworkStage | None:
    """Return the phase of pre-training that has a checkpoint after ``step``, given the last phase."""
    while stage is not None and stage.first_step >= step:
        stage = cast(NetworkStage, stage.parent)
    return stage


def _count_stages(experiment: Experiment, run: Path) -> tuple[Stage, ...]:
    """Return the stage of an n-gram model, or one stage per tagger."""
    models: list[tuple[str, tuple[str, ...], Path]] = [(COUNTS, (), run / COUNTS)]
    if experiment.counts.model == "tagger":
        models = [(name, (name,), run / COUNTS / name) for name in experiment.tuning.heads]
    kind = COUNT_STAGES[experiment.counts.model]
    return tuple(
        kind(name, member=None, task_names=task_names, settings=experiment, folder=folder)
        for name, task_names, folder in models
    )


def _ensemble_members(experiment: Experiment) -> list[tuple[int | None, Experiment]]:
    """Return (number, settings) of each member of the ensemble; the number is None if there is one model.

    Members differ only in their seed: member k of n has seed * n + k, so ensembles with different seeds have
    no member in common. The members of seed 0 have the seeds 0 to n - 1, and share their pre-training with
    single runs of those seeds.
    """
    count = experiment.ensemble.members
    if count == 1:
        return [(None, experiment)]
    of_one_model = replace(experiment, ensemble=BASELINE.ensemble)
    return [(k, replace(of_one_model, seed=experiment.seed * count + k)) for k in range(count)]


class SharedStages:
    """Makes the stages before fine-tuning, whose folders several runs may share.

    Its methods take an ensemble member and the member's settings. The member None stands for the one model
    of a run that trains no ensemble, or for all members if they share the stage.
    """

    def __init__(self, run: Path, cache: Path | None):
        self.run, self.cache = run, cache or DEFAULT_CACHE
        self.shared = scale_folder(run, cache) if cache else Path()

    def parent_of_finetuning(
        self, member: int | None, settings: Experiment, task: str
    ) -> NetworkStage | None:
        """Return the stage whose model is fine-tuned on ``task``; None if all parameters are random.

        task: a mixture or a labelled task; "" for pre-training alone.
        """
        if settings.pretraining.steps:
            return self.pretraining(member, settings, task)
        return self.initial_parent(member, settings)

    def pretraining(self, member: int | None, settings: Experiment, task: str) -> Pretraining:
        """Return the last phase of the pre-training of a model that is then fine-tuned on ``task``.

        Its ``parent`` is the phase before it, and so on.
        """
        parent: NetworkStage | None
        if has_start_pretraining(settings):
            parent = self.start_pretraining(member, settings)
        else:
            parent = self.initial_parent(member, settings)
        last = len(settings.pretraining.phases)
        for index in range(last):
            phase = phase_settings(settings, index)
            parent = self._pretraining(member, phase, task, parent, phase_name(index + 1))
        return self._pretraining(member, phase_settings(settings, last), task, parent, PRETRAINING)

    def start_pretraining(self, member: int | None, settings: Experiment) -> Pretraining:
        """Return the start pre-training: a short one on the corpus for ``start.steps``, before the others.

        It ignores the settings in which experiments usually differ, such as objective and loss, so that all
        with the same model, data and seed share it. Its optimiser is the first phase's, and so is its
        attention mask, except that a causal LM makes an encoder causal.
        """
        model, settings = start_model(settings), phase_settings(settings, 0)
        start_settings = replace(
            settings,
            model=model,
            objective=settings.start.objective,
            pretraining=replace(
                settings.pretraining,
                steps=settings.start.steps,
                steps_per_row=1,
                loss=BASELINE.pretraining.loss,
            ),
            data=replace(settings.data, repeats=0, held_out_documents=0),
            mixing=BASELINE.mixing,
            tuning=replace(settings.tuning, branches=BASELINE.tuning.branches),
            start=BASELINE.start,
            distillation=BASELINE.distillation,
        )
        parent = self.initial_parent(member, start_settings)
        return self._pretraining(member, start_settings, "", parent, START)

    def initial_parent(self, member: int | None, settings: Experiment) -> NetworkStage | None:
        """Return the stage from which the first network starts: an external checkpoint or skip-gram.

        None: all parameters are random.
        """
        checkpoint = external_checkpoint(settings, self.cache)
        if checkpoint is not None:
            return checkpoint if settings.start.weights == "trained" else None
        return self.vectors(member, settings)

    def vectors(self, member: int | None, settings: Experiment) -> SkipGram | None:
        """Return the skip-gram stage that initializes the embedding, or None without ``vectors.epochs``."""
        if not settings.vectors.epochs:
            return None
        hashed_settings = skipgram_settings(settings)
        # The devices (mesh), the reactions to bad updates and failed saves (guard) and the loading of data
        # change no vector: the hash leaves them out, but training needs them.
        loader_settings = {name: getattr(settings.data, name) for name in LOADER_SETTINGS}
        data = replace(hashed_settings.data, **loader_settings)
        stage_settings = replace(hashed_settings, data=data, mesh=settings.mesh, guard=settings.guard)
        folder = self.shared_folder(hashed_settings, settings)
        return SkipGram(VECTORS, member, task_names=(), settings=stage_settings, folder=folder)

    def _pretraining(
        self, member: int | None, settings: Experiment, task: str, parent: NetworkStage | None, name: str
    ) -> Pretraining:
        """Return a pre-training, or a phase of it.

        It has all settings that training reads; its folder is named by those of ``pretraining_settings``.
        """
        if settings.mixing.pretraining == "corpus+other-tasks":
            name = name_without(name, task_name(task))
        hashed_settings = pretraining_settings(settings, task)
        # Some settings of these groups change no result: the hash leaves them out, but training needs them.
        groups = ("data", "mesh", "guard", "pretraining", "finetuning")
        settings_for_training = {group: getattr(settings, group) for group in groups}
        # Branches choose which checkpoints are kept.
        tuning = replace(hashed_settings.tuning, branches=settings.tuning.branches)
        stage_settings = replace(hashed_settings, tuning=tuning, **settings_for_training)
        reads_tasks = hashed_settings.mixing.pretraining != "corpus"
        task_names = hashed_settings.tuning.mixtures if reads_tasks else ()
        folder = self.shared_folder(hashed_settings, settings)
        teacher = settings.distillation.teacher
        teacher_folder = start_folder(teacher, self.cache) if teacher else None
        return Pretraining(
            name,
            member,
            task_names,
            stage_settings,
            folder,
            parent=parent,
            parent_step=_last_step(parent),
            teacher=teacher_folder,
        )

    def shared_folder(self, hashed_settings: Experiment, settings: Experiment) -> Path:
        """Return the folder of a stage that runs may share.

        Its name is a hash of all settings on which the results of the stage (parameters, losses, scores)
        depend. A run that was made by importing a checkpoint keeps its parameters in its own folder
        ``pretraining``, which is returned then.

        hashed_settings: the settings on which the results depend; all other settings are the baseline's.
        settings: those of the whole run, whose tasks enter the hash if the vocabulary is trained on their
        texts too (``data.vocabulary_texts``).
        """
        own_folder = self.run / PRETRAINING
        if (own_folder / "checkpoints").is_dir():
            return own_folder
        # Only settings that differ from the baseline's are hashed, so that settings added later do not change
        # the hash.
        changed = diff(BASELINE, hashed_settings)
        contents: dict[str, object] = {path: str(new) for path, (_, new) in changed.items()}
        if settings.data.vocabulary_texts == "corpus+tasks" and settings.tuning.mixtures:
            contents["texts"] = settings.tuning.mixtures
        key = hashlib.sha256(json.dumps(contents).encode()).hexdigest()[:16]
        return self.shared / PRETRAINING / key

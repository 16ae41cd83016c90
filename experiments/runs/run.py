"""A run: an experiment in a folder, checked, trained stage by stage, and scored.

In the folder of a run, ``settings.json`` holds the experiment and ``paths.json`` the path of the cache.
Each stage has a folder with checkpoints, ``metrics.jsonl``, ``run.json``, ``origin.json``, its vocabulary and
its predictions. It is ``finetuning/NAME`` in the run's folder or, for a stage that several runs share, a
folder beside the runs of the same scale. ``scores.json`` is written last and names the folders of all stages.

Two words of the settings: the *start* (``start.*``) is a short pre-training that rows share and that comes
before a row's own. The *branches* (``tuning.branches``) are intermediate checkpoints of pre-training, each
after a fraction of its steps, from which fine-tuning is repeated.
"""

import os
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import asdict
from functools import cached_property, partial
from itertools import groupby
from pathlib import Path
from typing import Any, cast

import jax
from jax.sharding import Mesh

from experiments.processes.cluster import broadcast_from_first, main_process_first
from experiments.processes.progress import NO_TOOLS, Reporter, Tools
from experiments.runs import checks
from experiments.runs.inputs import Inputs
from experiments.runs.kinds.network import NetworkStage, ensemble_scores, model_parameters
from experiments.runs.kinds.pretraining import Pretraining
from experiments.runs.kinds.stage import Stage, TaskScores
from experiments.runs.paths import SETTINGS, save_settings, scale_folder
from experiments.runs.prepare import prepare_inputs
from experiments.runs.result import Result, read_result
from experiments.runs.scores import write_scores
from experiments.runs.sources import Sources
from experiments.runs.stages import stages
from experiments.runs.status import StageLog, is_stage_finished, locked
from experiments.study.experiment import Experiment
from lm import sharding
from lm.config.base import SettingError
from lm.files import locked_if_possible
from lm.train.runtime.preemption import Interrupted

ALLOW_NONE: frozenset[str] = frozenset()  # nothing may have changed since the run was started


class Run:
    """An experiment that is trained in ``folder`` on the data in ``cache``."""

    def __init__(self, experiment: Experiment, folder: Path, cache: Path):
        self.experiment, self.folder, self.cache = experiment, folder, cache

    @cached_property
    def stages(self) -> tuple[Stage, ...]:
        """Return the stages in the order of training."""
        return stages(self.experiment, self.folder, self.cache)

    @cached_property
    def mesh(self) -> Mesh:
        """Return the mesh of devices that the experiment asks for."""
        return sharding.make_mesh(self.experiment.mesh)

    @property
    def result(self) -> Result | None:
        """Return what the run scored and cost; None before it finishes, SettingError if it is damaged."""
        return read_result(self.folder, scale_folder(self.folder, self.cache))

    def check(self, say: Callable[[str], object] = print, allow: frozenset[str] = ALLOW_NONE) -> Inputs:
        """Check the run, prepare its inputs in the cache, and return them.

        Raise SettingError for anything that would stop training. The settings are checked first, in seconds.
        Preparing inputs may take long the first time: it encodes text and may train a vocabulary.
        Nothing is compiled, and nothing is written to the run's folder.
        allow: the parts (of provenance.PARTS) that may have changed since the run was started.
        """
        experiment, sources = self.experiment, Sources(self.cache, self.experiment.data.corrupt_records)
        checks.check_experiment(experiment, sources)
        checks.check_folder(experiment, self.folder, self.cache, say if "settings" in allow else None)
        broadcast_from_first(lambda: checks.check_start_parameters(experiment, self.cache))
        broadcast_from_first(lambda: checks.check_teacher(experiment, self.cache))
        broadcast_from_first(lambda: checks.check_branches(self.stages))
        inputs = main_process_first(lambda: self._prepare(sources, say))
        checks.check_inputs(experiment, self.stages, inputs, say)
        return inputs

    def train(
        self,
        reporter: Reporter,
        allow: frozenset[str] = ALLOW_NONE,
        tools: Tools = NO_TOOLS,
        begin: Callable[[], object] = lambda: None,
    ) -> None:
        """Train and score the stages that have not finished, then write ``scores.json``.

        ``begin`` is called after all checks, once the run's folder exists and before training.

        Raise SettingError, before anything compiles, as ``check`` does. Raise RunDeleted if the run's folder
        is deleted or moved meanwhile.
        """
        inputs = self.check(reporter.say, allow)
        if jax.process_index() == 0:  # from now on the folder belongs to this run
            save_settings(self.folder, self.experiment, self.cache)
        begin()
        scores: TaskScores = {}
        branches: dict[str, dict[str, Any]] = {}  # task -> pre-training step -> scores
        for _, group in groupby(self.stages, lambda stage: stage.ensemble_name):
            ensemble_members = list(group)  # one stage unless the run is an ensemble
            with unless_deleted(self.folder):
                for stage in ensemble_members:
                    self._train_stage(stage, inputs, reporter, allow, tools)
            found = self._scores(ensemble_members, inputs, reporter)
            if ensemble_members[0].is_compared:
                scores |= found
            for step, at_step in self._branch_scores(ensemble_members[0], found, inputs).items():
                for task, score in at_step.items():
                    branches.setdefault(task, {})[str(step)] = score
        values = {"tasks": scores, "branches": branches} | self._costs(inputs)
        if jax.process_index() == 0:
            write_scores(self.folder, scale_folder(self.folder, self.cache), self.stages, values)

    def _prepare(self, sources: Sources, say: Callable[[str], object]) -> Inputs:
        """Prepare data under a lock, so that runs on one machine do it once."""
        with locked_if_possible(self.cache / "lock"):
            return prepare_inputs(self.experiment, self.stages, sources, say)

    def _train_stage(
        self, stage: Stage, inputs: Inputs, reporter: Reporter, allow: frozenset[str], tools: Tools
    ) -> None:
        """Train a stage to its end, from its newest checkpoint, under the lock of its folder.

        Before that, process 0 alone calls ``stage.check_provenance``, which compares what the stage is
        trained with to what it was started with, records it, and stores the vocabulary in the stage's folder.
        """
        steps = stage.training.steps
        with locked(stage.folder, reporter):
            finished = is_stage_finished(stage.folder, steps)
            broadcast_from_first(partial(stage.check_provenance, inputs, finished, allow, reporter.say))
            if finished:
                reporter.advance(stage.num_steps)
                return
            reporter.start(stage.title, stage.startup_status)
            settings = asdict(stage.settings) | {"corrupt_records_left_out": dict(inputs.left_out)}
            title = self.title if stage.is_shared else ""
            with StageLog(stage.folder, settings, reporter, title, tools.wandb) as log:
                try:
                    stage.train(inputs, self.mesh, log, reporter, tools.profile_steps)
                except Interrupted as stopped:
                    stopped.stage = stage.title
                    raise

    @property
    def title(self) -> str:
        """Return a name such as "t5.1-baseline.baseline.seed-0", for logs of shared stages.

        The folders of these are named by a hash.
        """
        scale = scale_folder(self.folder, self.cache)
        name = os.path.relpath(self.folder.resolve(), scale).replace("/", ".")
        return name[-200:]  # file names are limited to 255 bytes

    def _scores(self, ensemble_members: Sequence[Stage], inputs: Inputs, reporter: Reporter) -> TaskScores:
        """Return the scores of a stage by task; several members predict together, as an ensemble."""
        stage = ensemble_members[0]
        if not stage.tasks["validation"]:
            return {}
        if len(ensemble_members) == 1:
            return stage.scores(inputs, self.mesh)
        reporter.start(f"{len(ensemble_members)} models together on {stage.ensemble_name}")
        return ensemble_scores(cast(Sequence[NetworkStage], ensemble_members), inputs, self.mesh)

    def _branch_scores(self, stage: Stage, scores: TaskScores, inputs: Inputs) -> dict[int, TaskScores]:
        """Return pre-training step -> scores; {} for a run with one branch.

        scores: of the stage after its last step. A fine-tuning has one entry, at the step that it started
        from. A pre-training that is itself scored on tasks is scored here at each earlier branch too.
        """
        if not scores or len(self.experiment.tuning.branches) == 1:
            return {}
        if stage.branch_steps:
            earlier = stage.branch_steps[:-1]
            found = {step: stage.scores(inputs, self.mesh, step) for step in earlier}
            return found | {stage.training.steps: scores}
        return {} if stage.parent_step is None else {stage.parent_step: scores}

    def _costs(self, inputs: Inputs) -> dict[str, Any]:
        """Return the size of the model, the FLOPs of each pre-training, and its loss on longer sequences."""
        flops: dict[str, float] = {}
        length_losses: dict[str, float] | None = None
        count_parameters = 0  # of n-gram models and HMMs, which run instead of a network
        for stage in self.stages:
            if stage.is_count_based:
                count_parameters += stage.parameters()
            if not isinstance(stage, Pretraining):
                continue
            flops[stage.name] = stage.flops(inputs)
            if stage.is_compared and length_losses is None:  # of several pre-trainings the first
                length_losses = stage.length_losses(inputs, self.mesh)
        return {
            "length_losses": length_losses or {},
            "flops": flops,
            "parameters": count_parameters or model_parameters(self.experiment.model),
        }


class RunDeleted(RuntimeError):
    """The folder of a run was deleted or moved while the run trained."""


@contextmanager
def unless_deleted(folder: Path) -> Iterator[None]:
    """Raise RunDeleted in place of an error, other than a SettingError, if the run's folder is gone."""
    try:
        yield
    except SettingError:
        raise
    except Exception as error:
        if (folder / SETTINGS).exists():
            raise
        raise RunDeleted(
            f"the run's folder {folder} was deleted or moved while it trained; put it back, or run the same "
            "command to train it from the start"
        ) from error

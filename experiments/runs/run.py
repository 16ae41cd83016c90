"""A run: an experiment in a folder, checked, trained stage by stage, and scored.

The folder of a run has ``settings.json``, which is the experiment, and ``paths.json``, which says where the
cache lies and which scale (``--scale``) the run belongs to. Each stage has a folder of its own with
checkpoints, ``metrics.jsonl``, ``run.json``, ``origin.json``, the vocabulary and predictions. Stages that
only this run uses are in its folder: ``finetuning/NAME`` or, for models made of counts, ``counts`` and
``counts/NAME``. Stages that several runs may share are in ``pretraining/HASH`` in the folder of the scale,
which holds all runs of that scale. ``scores.json`` is written last and names the folders of all stages.

The settings ``start.*`` say what comes before an experiment's own pre-training. ``start.model`` names an
external checkpoint to start from. ``start.steps`` asks instead for the *start pre-training*: a short
pre-training with an objective of its own, which experiments with the same model, data and seed share.
``tuning.branches`` are fractions of pre-training. The checkpoint after each of them, a *branch*, is
fine-tuned and scored.
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
from experiments.runs.inputs import Inputs, run_reads_corpus
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
from lm.data.corpus.spec import describe_corpus
from lm.files import locked_if_possible
from lm.train.runtime.preemption import Interrupted

ALLOW_NONE: frozenset[str] = frozenset()  # a run resumes only if none of provenance.PARTS has changed


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
        say: called with each line to show.
        allow: which of provenance.PARTS may have changed since the run was started (option --allow).
        """
        experiment, sources = self.experiment, Sources(self.cache, self.experiment.data.corrupt_records)
        checks.check_experiment(experiment, sources)
        on_difference = say if "settings" in allow else None
        checks.check_folder(experiment, self.folder, self.cache, on_difference)
        broadcast_from_first(lambda: checks.check_start_parameters(experiment, self.cache))
        broadcast_from_first(lambda: checks.check_teacher(experiment, self.cache))
        broadcast_from_first(lambda: checks.check_branches(self.stages))
        if run_reads_corpus(experiment) and (line := describe_corpus(experiment.data.corpus)):
            say(line)
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
        is deleted or moved while it is trained or scored.
        """
        inputs = self.check(reporter.say, allow)
        if jax.process_index() == 0:  # from now on the folder belongs to this run
            save_settings(self.folder, self.experiment, self.cache)
        begin()
        scores: TaskScores = {}
        branches: dict[str, dict[str, Any]] = {}  # task -> step of pre-training -> score
        with report_deleted_run(self.folder):
            for _, group in groupby(self.stages, lambda stage: stage.name_without_member):
                ensemble_members = list(group)  # one stage unless the run is an ensemble
                for stage in ensemble_members:
                    self._train_stage(stage, inputs, reporter, allow, tools)
                group_scores = self._scores(ensemble_members, inputs, reporter)
                if ensemble_members[0].is_compared:  # earlier branches are recorded under "branches" alone
                    scores |= group_scores
                scores_by_step = self._branch_scores(ensemble_members[0], group_scores, inputs)
                for step, scores_at_step in scores_by_step.items():
                    for task, score in scores_at_step.items():
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
            tensorboard_title = self.log_title if stage.is_shared else ""  # else the folder's name is shown
            stage_log = StageLog(
                stage.folder,
                settings,
                reporter,
                title=tensorboard_title,
                project=tools.wandb,
                phase=stage.title,
                first_step=stage.first_step,
                last_step=steps,
            )
            with stage_log as log:
                try:
                    stage.train(inputs, self.mesh, log, reporter, tools.profile_steps)
                except Interrupted as stopped:
                    stopped.stage = stage.title
                    raise

    @property
    def log_title(self) -> str:
        """Return the run's name, such as "t5.1-baseline.baseline.seed-0".

        TensorBoard shows a shared stage under this name, since the stage's own folder is named by a hash.
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
        reporter.start(f"{len(ensemble_members)} models together on {stage.name_without_member}")
        return ensemble_scores(cast(Sequence[NetworkStage], ensemble_members), inputs, self.mesh)

    def _branch_scores(self, stage: Stage, scores: TaskScores, inputs: Inputs) -> dict[int, TaskScores]:
        """Return {step of pre-training: scores by task} of a stage; {} for a run with one branch.

        A fine-tuning contributes its own scores, under the step of pre-training that it started from. A
        pre-training that is itself scored on tasks contributes the scores of its checkpoint at each earlier
        branch, and ``scores`` at its last step.

        scores: those that ``_scores`` returned for the stage. They are of its best checkpoints, which need
        not be its last.
        """
        if not scores or len(self.experiment.tuning.branches) == 1:
            return {}
        if stage.branch_steps:
            earlier = stage.branch_steps[:-1]
            scores_by_step = {step: stage.scores(inputs, self.mesh, step) for step in earlier}
            return scores_by_step | {stage.training.steps: scores}
        return {} if stage.parent_step is None else {stage.parent_step: scores}

    def _costs(self, inputs: Inputs) -> dict[str, Any]:
        """Return what ``scores.json`` says of costs: of FLOPs, parameters, and losses on longer sequences.

        ``flops`` are those of each pre-training, by the name of its stage. ``parameters`` are counted of one
        member of an ensemble, and of all models made of counts together. ``length_losses`` are {length
        multiple: held-out loss} of the first pre-training.
        """
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
    """The folder of a run was deleted or moved while the run was trained or scored."""


@contextmanager
def report_deleted_run(folder: Path) -> Iterator[None]:
    """Turn an exception of the body into RunDeleted if the run's folder is gone.

    A SettingError is raised unchanged.
    """
    try:
        yield
    except SettingError:
        raise
    except Exception as error:
        if (folder / SETTINGS).exists():
            raise
        raise RunDeleted(
            f"the run's folder {folder} was deleted or moved while it trained; put it back, or run the same "
            "command to train it again"
        ) from error

"""A run: an experiment in a folder, checked, trained stage by stage, and scored.

The folder of a run has ``settings.json``, whose run it is, and ``paths.json``, where its cache is. Each stage
has a folder of its own with checkpoints, ``metrics.jsonl``, ``run.json``, ``origin.json``, its vocabulary and
its answers: ``finetuning/NAME`` in the run, or one beside the runs of its scale for what they share.
``scores.json`` is written last, and names these folders.
"""

import fcntl
import os
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import asdict
from functools import cached_property, partial
from itertools import groupby
from pathlib import Path
from typing import Any, cast

import jax
from jax.sharding import Mesh

from experiments.processes.group import agreed, first_alone
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
from experiments.runs.status import StageLog, is_finished, locked
from experiments.study.experiment import Experiment
from lm import sharding
from lm.config.base import SettingError

NOTHING: frozenset[str] = frozenset()


class Run:
    """An experiment that is trained in ``folder``, with the data in ``cache``."""

    def __init__(self, experiment: Experiment, folder: Path, cache: Path):
        self.experiment, self.folder, self.cache = experiment, folder, cache

    @cached_property
    def stages(self) -> tuple[Stage, ...]:
        """Return the stages in the order in which they are trained."""
        return stages(self.experiment, self.folder, self.cache)

    @cached_property
    def mesh(self) -> Mesh:
        """Return the devices."""
        return sharding.make_mesh(self.experiment.mesh)

    @property
    def result(self) -> Result | None:
        """Return what the run scored and cost; None until it has finished. SettingError if it is damaged."""
        return read_result(self.folder, scale_folder(self.folder, self.cache))

    def check(self, say: Callable[[str], object] = print, allow: frozenset[str] = NOTHING) -> Inputs:
        """Return what the stages will read; SettingError for anything that would stop them, in seconds.

        Nothing is compiled, and nothing is written to the run's folder. ``allow``: which of provenance.PARTS
        may have changed since the run was started.
        """
        experiment, sources = self.experiment, Sources(self.cache, self.experiment.data.corrupt_records)
        checks.check_experiment(experiment, sources)
        checks.check_folder(experiment, self.folder, self.cache, say if "settings" in allow else None)
        agreed(lambda: checks.check_start_parameters(experiment, self.cache))
        agreed(lambda: checks.check_branches(self.stages))
        inputs = first_alone(lambda: self._prepare(sources, say))
        checks.check_inputs(experiment, self.stages, inputs, say)
        return inputs

    def train(self, reporter: Reporter, allow: frozenset[str] = NOTHING, tools: Tools = NO_TOOLS) -> None:
        """Train and score what remains of the run, and write its result.

        SettingError before anything compiles. RunDeleted if the folder goes while it trains.
        """
        inputs = self.check(reporter.say, allow)
        if jax.process_index() == 0:  # from now on the folder is this run's
            save_settings(self.folder, self.experiment, self.cache)
        scores: TaskScores = {}
        branches: dict[str, dict[str, Any]] = {}  # task -> step of pre-training -> scores
        for _, group in groupby(self.stages, lambda stage: stage.base_name):
            members = list(group)
            with unless_deleted(self.folder):
                for stage in members:
                    self._train_stage(stage, inputs, reporter, allow, tools)
            found = self._scores(members, inputs, reporter)
            if members[0].is_main:
                scores |= found
            for step, at_step in self._branch_scores(members[0], found, inputs).items():
                for task, score in at_step.items():
                    branches.setdefault(task, {})[str(step)] = score
        values = {"tasks": scores, "branches": branches} | self._costs(inputs)
        if jax.process_index() == 0:
            write_scores(self.folder, scale_folder(self.folder, self.cache), self.stages, values)

    def _prepare(self, sources: Sources, say: Callable[[str], object]) -> Inputs:
        """Prepare data, one run of this machine after another: what the first makes the others find."""
        with (self.cache / "lock").open("a") as lock:
            with suppress(OSError):  # all at once where the file system has no locks
                fcntl.flock(lock, fcntl.LOCK_EX)
            return prepare_inputs(self.experiment, self.stages, sources, say)

    def _train_stage(
        self, stage: Stage, inputs: Inputs, reporter: Reporter, allow: frozenset[str], tools: Tools
    ) -> None:
        """Train what remains of a stage, in its folder, in which no other run trains meanwhile."""
        steps = stage.training.steps
        reporter.start(stage.title, stage.preparation)
        with locked(stage.folder, reporter):
            finished = is_finished(stage.folder, steps)
            agreed(partial(stage.check_provenance, inputs, finished, allow, reporter.say))
            if finished:
                reporter.advance(steps)
                return
            settings = asdict(stage.settings) | {"corrupt_records_left_out": dict(inputs.left_out)}
            title = self.title if stage.is_shared else ""
            with StageLog(stage.folder, settings, reporter, title, tools.wandb) as log:
                stage.train(inputs, self.mesh, log, reporter, tools.steps)

    @property
    def title(self) -> str:
        """Return the run's row and seed, for readers of logs whose folder is called by a hash."""
        scale = scale_folder(self.folder, self.cache)
        name = os.path.relpath(self.folder.resolve(), scale).replace("/", ".")
        return name[-200:]  # the name of a file has 255 letters at most

    def _scores(self, members: Sequence[Stage], inputs: Inputs, reporter: Reporter) -> TaskScores:
        """Return the scores of a stage, whose members answer together if they are several."""
        stage = members[0]
        if not stage.tasks["validation"]:
            return {}
        if len(members) == 1:
            return stage.scores(inputs, self.mesh)
        reporter.start(f"{len(members)} models together on {stage.base_name}")
        return ensemble_scores(cast(Sequence[NetworkStage], members), inputs, self.mesh)

    def _branch_scores(self, stage: Stage, scores: TaskScores, inputs: Inputs) -> dict[int, TaskScores]:
        """Return the ``scores`` of a stage by the steps of pre-training behind them, in a run with branches.

        A pre-training that is scored itself is scored at each of its branches.
        """
        if not scores or len(self.experiment.tuning.branches) == 1:
            return {}
        if stage.branch_steps:
            earlier = stage.branch_steps[:-1]
            found = {step: stage.scores(inputs, self.mesh, step) for step in earlier}
            return found | {stage.training.steps: scores}
        return {} if stage.parent_step is None else {stage.parent_step: scores}

    def _costs(self, inputs: Inputs) -> dict[str, Any]:
        """Return the size of the model, the FLOPs of pre-training, and its loss on longer rows."""
        pretrainings = [stage for stage in self.stages if isinstance(stage, Pretraining)]
        flops = {stage: stage.flops(inputs) for stage in pretrainings}
        measured = next((stage for stage in pretrainings if not stage.is_start), None)
        counted = sum(stage.parameters() for stage in self.stages if stage.is_counted)
        return {
            "length_losses": measured.length_losses(inputs, self.mesh) if measured else {},
            "flops": sum(flops.values()),
            "start_flops": sum(flops[stage] for stage in pretrainings if stage.is_start),
            "parameters": counted or model_parameters(self.experiment.model),
        }


class RunDeleted(RuntimeError):
    """The folder of a run is gone, which was there when its training began."""


@contextmanager
def unless_deleted(folder: Path) -> Iterator[None]:
    """Raise RunDeleted in place of any error that comes of the folder's being gone."""
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

"""What stages of networks have in common: their step, checkpoints, training loop and scores."""

from abc import abstractmethod
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any, cast

import jax
import numpy as np
from jax.sharding import Mesh

from experiments.processes.group import agreed, trains
from experiments.processes.place import wait
from experiments.processes.progress import Reporter
from experiments.runs.inputs import EvalSplit, Inputs
from experiments.runs.kinds.stage import Stage, TaskScores
from experiments.runs.paths import CACHE
from experiments.runs.status import StageLog
from experiments.runs.task_scores import (
    best_of,
    reported,
    score_values,
    task_score,
    write_example_values,
    write_reported,
)
from lm import sharding
from lm.batch import Batch
from lm.config.base import SettingError
from lm.config.model import ModelConfig
from lm.config.training import CheckpointConfig, LoopConfig, Weights
from lm.data.batches import Batches, TBPTTRows, stream
from lm.data.corpus.prefetch import pretokenize_in_background
from lm.data.masked_lm import MaskedLMRows
from lm.data.packing import row_length
from lm.data.pretraining import DenoisingRows
from lm.data.segments import UNPACKED_ROWS
from lm.data.seq2seq import CorpusExamples, MixtureRows
from lm.data.tasks.labelled import AnyTask
from lm.evaluate.evaluator import EvalTask, score_task
from lm.nn import electra, elmo, finetune
from lm.nn.ensemble import Ensemble
from lm.nn.transformer import Transformer
from lm.train import loop
from lm.train.flops import step_flops
from lm.train.runtime import manifest
from lm.train.runtime.checkpoints import CheckpointError, Checkpoints
from lm.train.state import State
from lm.train.step import Steps, StepSpec, build

Measure = Callable[[State], dict[str, Any]]  # what is recorded of a state


@dataclass(frozen=True)
class NetworkStage(Stage):
    """A stage that trains a network by steps of an optimiser, and saves checkpoints."""

    # ---- what each kind says

    @abstractmethod
    def step_spec(self) -> StepSpec:
        """Return the model, the loss, and which parameters are trained."""

    def questions(self, inputs: Inputs, mesh: Mesh, split: EvalSplit) -> list[EvalTask]:
        """Return the rows of its tasks that its checkpoints answer."""
        return []

    @property
    def evaluate_every(self) -> int:
        """Return the steps between evaluations: one at each checkpoint."""
        return self.training.save_every

    @property
    def prefix(self) -> str:
        """Return what the names of the Transformer's parameters begin with in its checkpoints."""
        heads = self.settings.model.heads
        if "replaced-token" in heads:
            return electra.DISCRIMINATOR
        return elmo.FORWARD if "backward" in heads else ""

    # ---- the step

    def steps(self, mesh: Mesh) -> Steps:
        """Return the compiled steps."""
        return build(self.step_spec(), mesh)

    def body_steps(self, mesh: Mesh) -> Steps:
        """Return the steps of the Transformer alone, as ``lm generate`` and others use it."""
        return build(StepSpec(self.step_spec().model), mesh)

    def step_flops(self, inputs: Inputs) -> float:
        """Return the FLOPs of one step."""
        lengths, model = inputs.batches[self.name].lengths, self.model_of_flops
        targets = row_length(model.architecture, lengths)
        return step_flops(model, self.training.batch_size, lengths.inputs, targets)

    @property
    def model_of_flops(self) -> ModelConfig:
        """Return the model whose FLOPs are counted."""
        return self.settings.model

    def parameters(self) -> int:
        return model_parameters(self.settings.model)

    # ---- training

    def train(
        self,
        inputs: Inputs,
        mesh: Mesh,
        log: StageLog,
        reporter: Reporter,
        profile: tuple[int, int] | None = None,
    ) -> None:
        steps, training = self.steps(mesh), self.training
        every, patience = (training.log_every, self.evaluate_every), wait("LM_STEP_TIMEOUT")
        config = LoopConfig(training.steps, *every, "score", self.settings.guard, patience, profile)
        with self.checkpoints() as checkpoints:
            run = loop.Run(
                seed=self.settings.seed,
                data=partial(self.data, inputs, mesh, reporter),
                checkpoints=checkpoints,
                log=log,
                evaluate=self.evaluation(inputs, mesh, steps),
                initial=self.initial_state(steps),
                flops=self.step_flops(inputs),
            )
            loop.train(steps, run, config)
            agreed(lambda: None)  # the first process has written the last checkpoint
            trains(False)

    def initial_state(self, steps: Steps) -> Callable[[], State] | None:
        """Return what makes the state before the first step from the parent's; None: it is random."""
        if self.parent is None:
            return None
        return partial(cast(NetworkStage, self.parent).warm_start, steps, self.parent_step)

    def data(self, inputs: Inputs, mesh: Mesh, reporter: Reporter, first: int) -> Iterator[Batch]:
        """Yield this process's rows of the batches from step ``first`` on, and report each as progress."""
        batches, training, config = inputs.batches[self.name], self.training, self.settings.data
        rows = sharding.process_rows(mesh, training.batch_size)
        reporter.advance(first)
        with encode_ahead(batches, rows, config.encoders):
            for batch in stream(batches, first, training.steps, rows=rows, workers=config.workers):
                yield batch
                reporter.advance(1)

    def evaluation(self, inputs: Inputs, mesh: Mesh, steps: Steps) -> Measure:
        """Return what evaluates a state: all metrics of the validation rows of its tasks, at checkpoints.

        More is better of every score here: of bits per byte it is less than 0. The answers of each step are
        written.
        """
        asked = self.questions(inputs, mesh, "validation")
        training = self.training

        def evaluate(state: State) -> dict[str, Any]:
            values: dict[str, Any] = {}
            step = int(state.step)
            if step % training.save_every and step not in (*self.branch_steps, training.steps):
                return values
            for questions in asked:
                path = answers_path(self.folder, questions.task, step)
                metrics, _ = score_task(state.eval_model, questions, steps.shard_batch, path)
                values |= score_values(questions.task, metrics)
            names = [f"{each.task.name}/score" for each in asked]
            if asked and values.keys() >= {*names}:
                values["score"] = sum(values[name] for name in names) / len(names)
            return values

        return evaluate

    # ---- checkpoints

    def checkpoints(self) -> Checkpoints:
        """Open its checkpoints: the newest, the best by each score, at branches, one per ``keep_hours``."""
        every, hours = self.training.save_every, self.training.keep_hours
        config = CheckpointConfig(every, best="highest", hours=hours, steps=self.branch_steps)
        return Checkpoints(self.folder / "checkpoints", config, self.settings.guard)

    def trained(self, mesh: Mesh, step: int | None = None, weights: Weights = "scored") -> State:
        """Return its parameters after ``step``, by default the best ones if it was scored, else the last."""
        return self._restored(self.steps(mesh), "", step, weights)

    def trained_body(self, mesh: Mesh, weights: Weights = "scored") -> Transformer:
        """Return its Transformer, without a head or ELECTRA's generator; low-rank updates are merged."""
        state = self._restored(self.body_steps(mesh), self.prefix, weights=weights)
        return finetune.merge_lora(cast(Transformer, state.eval_model))

    def _restored(
        self, steps: Steps, prefix: str, step: int | None = None, weights: Weights = "scored"
    ) -> State:
        config = CheckpointConfig(best="highest")
        with Checkpoints(str(self.folder / "checkpoints"), config) as checkpoints:
            if not checkpoints.steps():
                raise SettingError(self._why_untrained())
            try:
                chosen = step or checkpoints.best()
                return checkpoints.restore_model(steps.abstract, chosen, lambda path: prefix + path, weights)
            except CheckpointError as error:
                raise SettingError(str(error)) from error

    def _why_untrained(self) -> str:
        if self.folder.exists():
            return f"{self.folder} has no checkpoint yet; train the run first"
        return (
            f"{self.folder}, the folder of stage {self.name!r}, is missing: train the run first or, if it "
            f"was copied, copy the folder of runs as a whole or name the cache in it by {CACHE}=FOLDER"
        )

    def warm_start(self, steps: Steps, step: int | None = None) -> State:
        """Return the first state of other steps, with what this stage has learnt by ``step`` or its end.

        As in T5 the optimiser's memory comes along, if it was trained here; steps count from 0 again.
        """
        last = step or self.training.steps
        with self.checkpoints() as checkpoints:
            fresh = steps.initial_state(self.settings.seed)
            learnt = self.steps(steps.mesh).abstract
            like = replace(steps.abstract, average=learnt.average, carry=learnt.carry)
            if sharding.named(like).keys() == sharding.named(learnt).keys():
                state = checkpoints.restore(like, last)
                assert state is not None, f"{self.folder} has no checkpoint {last}"
                return state.warm_start(fresh)
            # another optimiser, which remembers other things, or a model with a head
            source = partial(finetune.source_parameter, frozenset(learnt.params))
            return checkpoints.restore_model(fresh, last, source).warm_start(fresh)

    # ---- scores

    def scores(self, inputs: Inputs, mesh: Mesh, step: int | None = None) -> TaskScores:
        """Return the scores of the checkpoint of ``step``, by default the best by its mean validation score.

        Tasks with report rows are scored on them once. By default a task that has none has the score of the
        best checkpoint by its own, as in the paper. A step that is given has its answers in a folder of its
        own.
        """
        tasks, folder = self.tasks, self.folder
        answers = folder if step is None else folder / f"at-{step}"
        unreported = [task for task in tasks["validation"] if not task.report]
        scores = agreed(lambda: {task.name: best_of(task, folder, step) for task in unreported})
        if tasks["report"]:
            chosen = step or agreed(lambda: best_step(folder / "checkpoints"))
            kept = agreed(lambda: reported(answers))
            if kept.get("step") != chosen:
                model = self.trained(mesh, chosen).eval_model
                found = self.scores_of(model, "report", inputs, mesh, answers, chosen)
                kept = {"step": chosen, "tasks": found}
                if jax.process_index() == 0:
                    write_reported(answers, kept)
            scores |= kept["tasks"]
        return scores

    def scores_of(
        self, model: Any, split: EvalSplit, inputs: Inputs, mesh: Mesh, folder: Path, step: int
    ) -> TaskScores:
        """Return the scores of a model on one split of the tasks, ``validation`` where they have no other.

        Its answers and the values of single rows are written to ``folder``.
        """
        scores: TaskScores = {}
        name = "ensemble" if isinstance(model, Ensemble) else step
        shard_batch = self.steps(mesh).shard_batch
        for questions in self.questions(inputs, mesh, split):
            task = questions.task
            if split == "validation" and task.report:
                continue
            metrics, values = score_task(model, questions, shard_batch, answers_path(folder, task, name))
            scores[task.name] = task_score(task, step, metrics) | {"rows": questions.num_rows}
            scores[task.name] |= {"answered": len(questions.rows)}
            if split == "report" and values and jax.process_index() == 0:
                scores[task.name]["examples"] = write_example_values(folder, task.name, values)
        return scores


def ensemble_scores(members: Sequence[NetworkStage], inputs: Inputs, mesh: Mesh) -> TaskScores:
    """Return the scores of the members' best models as an ensemble; its answers lie beside the members'."""
    stage = members[0]
    ensemble = Ensemble([cast(Transformer, member.trained(mesh).eval_model) for member in members])
    folder, step = stage.folder.parent, stage.training.steps
    scores = stage.scores_of(ensemble, "validation", inputs, mesh, folder, step)
    return scores | stage.scores_of(ensemble, "report", inputs, mesh, folder, step)


def model_parameters(config: ModelConfig) -> int:
    """Return the number of parameters of a Transformer without heads."""
    shapes = jax.eval_shape(StepSpec(config).make_model, jax.random.key(0))
    return sum(leaf.size for leaf in jax.tree.leaves(shapes))


def answers_path(folder: Path, task: AnyTask, step: int | str) -> Path:
    """Return the file of a model's answers to a task, in the folder of its stage."""
    return folder / "predictions" / task.name / f"{step}.jsonl"


def best_step(checkpoints: Path) -> int:
    """Return the step whose checkpoint has the highest mean score, or the last where none is defined."""
    saved = manifest.manifests(checkpoints)
    return manifest.best(saved, name="score", kind="highest") or max(saved)


def encode_ahead(batches: Batches, rows: Sequence[slice], processes: int) -> AbstractContextManager[None]:
    """Return the context of processes that encode ahead what these rows of the batches need of the corpus."""
    source = batches.rows.rows if isinstance(batches.rows, TBPTTRows) else batches.rows
    if isinstance(source, MixtureRows):  # whose examples are dealt to all streams
        corpora = [x.source for x in source.examples_by_task.values() if isinstance(x, CorpusExamples)]
        kind, rows, source = UNPACKED_ROWS, [slice(None)], corpora[0] if corpora else None
    elif isinstance(source, DenoisingRows | MaskedLMRows):
        kind = source.row_index_key
    else:
        source = None
    if source is None or not processes:
        return nullcontext()
    reading = source.reader
    notes = {stream: reading.index_file(stream, kind) for stream in reading.streams_of(rows)}
    return pretokenize_in_background(reading.sampler, notes, processes)


def rows_of_process(mesh: Mesh, size: int, batches: Sequence[Batch]) -> list[Batch]:
    """Return this process's rows of global batches of ``size`` rows."""
    rows = np.concatenate([np.arange(size)[rows] for rows in sharding.process_rows(mesh, size)])
    return [batch.map(lambda values: values[rows]) for batch in batches]

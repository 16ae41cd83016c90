"""The base class of stages that train networks: step, checkpoints, training loop and scores.

Tasks have validation rows, on which checkpoints are chosen, and may have report rows, on which only the
chosen checkpoint is scored.
"""

from abc import abstractmethod
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, replace
from functools import cache, partial
from pathlib import Path
from typing import Any, cast

import jax
import numpy as np
from jax.sharding import Mesh

from experiments.processes.cluster import broadcast_from_first, timeout
from experiments.processes.progress import Reporter
from experiments.runs.inputs import EvalSplit, Inputs
from experiments.runs.kinds.stage import Stage, TaskScores
from experiments.runs.paths import CACHE
from experiments.runs.status import StageLog
from experiments.runs.task_scores import (
    best_of,
    read_report_scores,
    score_values,
    task_score,
    write_example_values,
    write_report_scores,
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
from lm.data.pretraining import DenoiserMixtureRows, DenoisingRows
from lm.data.segments import UNPACKED_ROWS
from lm.data.seq2seq import CorpusExamples, MixtureRows
from lm.data.tasks.labelled import AnyTask
from lm.evaluate.evaluator import EvalTask, score_shuffled, score_task
from lm.files import split_lines
from lm.nn import electra, elmo, finetune
from lm.nn.ensemble import Ensemble
from lm.nn.transformer import Transformer
from lm.objectives.denoising import Lengths
from lm.train import loop
from lm.train.flops import step_flops
from lm.train.runtime import manifest
from lm.train.runtime.checkpoints import CheckpointError, Checkpoints
from lm.train.runtime.records import records
from lm.train.state import State
from lm.train.step import Steps, StepSpec, build

cached_step_flops = cache(step_flops)  # a sweep asks for thousands of stages, and of few models
EvalFn = Callable[[State], dict[str, Any]]  # state -> name of a metric -> value to record


@dataclass(frozen=True)
class NetworkStage(Stage):
    """A stage that trains a network with an optimizer, and saves checkpoints."""

    # ---- for each kind to define

    @abstractmethod
    def step_spec(self) -> StepSpec:
        """Return what its step computes, without a teacher: model, loss, optimizer, trained parameters.

        Checkpoints are restored with it.
        """

    def eval_tasks(self, inputs: Inputs, mesh: Mesh, split: EvalSplit) -> list[EvalTask]:
        """Return each of its tasks with its rows of a split, and with how answers are predicted and read."""
        return []

    @property
    def evaluate_every(self) -> int:
        """Return the number of steps between evaluations; by default one at each checkpoint."""
        return self.training.save_every

    @property
    def transformer_prefix(self) -> str:
        """Return what precedes the names of the Transformer's parameters in its checkpoints.

        It is "" unless the Transformer is a part of ELECTRA's or ELMo's module, or of one with a new head.
        """
        heads = self.settings.model.heads
        if "replaced-token" in heads or "generator" in heads:
            return electra.DISCRIMINATOR
        return elmo.FORWARD if "backward" in heads else ""

    # ---- the step

    def training_spec(self) -> StepSpec:
        """Return ``step_spec`` with the teacher and the distillation loss, if the stage has a teacher.

        Only ``train`` uses it.
        """
        return self.step_spec()

    def teacher_params(self, mesh: Mesh) -> dict[str, jax.Array] | None:
        """Return the parameters of the teacher of ``training_spec``, by name; None without a teacher."""
        return None

    def steps(self, mesh: Mesh) -> Steps:
        """Return the compiled training and evaluation steps."""
        return build(self.step_spec(), mesh)

    def transformer_steps(self, mesh: Mesh) -> Steps:
        """Return the compiled steps of the Transformer alone, without a head or a generator."""
        return build(StepSpec(self.step_spec().model), mesh)

    def step_flops(self, inputs: Inputs) -> float:
        """Return the FLOPs of one training step, a teacher's forward pass included."""
        return self.flops_of_lengths(inputs.batches[self.name].lengths)

    def flops_of_lengths(self, lengths: Lengths) -> float:
        """Return the FLOPs of one training step on sequences of these lengths, as ``step_flops`` does."""
        model = self.model_of_flops
        # A model without an encoder reads the inputs in the decoder's row.
        decoder_length = row_length(model.architecture, lengths)
        return cached_step_flops(
            model, self.training.batch_size, lengths.inputs, decoder_length, self.generator
        )

    @property
    def generator(self) -> ModelConfig | None:
        """Return the generator that is trained in the same steps (ELECTRA); None without one."""
        return None

    @property
    def model_of_flops(self) -> ModelConfig:
        """Return the settings of the Transformer whose FLOPs are counted, with the adapters of its step.

        Fine-tuning with a head leaves out the parts that it does not compute, such as the output matrix.
        """
        return self.step_spec().model

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
        steps, training = build(self.training_spec(), mesh), self.training
        config = LoopConfig(
            steps=training.steps,
            log_every=training.log_every,
            evaluate_every=self.evaluate_every,
            score="score",
            guard=self.settings.guard,
            patience=timeout("LM_STEP_TIMEOUT"),
            profile=profile,
        )
        with self.checkpoints() as checkpoints:
            run = loop.Run(
                seed=self.settings.seed,
                data=partial(self.batch_iterator, inputs, mesh, reporter),
                checkpoints=checkpoints,
                log=log,
                evaluate=self.make_evaluate(inputs, mesh, steps),
                initial=self.initial_state(steps),
                flops=self.step_flops(inputs),
                first_step=self.first_step,
                teacher_params=self.teacher_params(mesh),
            )
            loop.train(steps, run, config)
            broadcast_from_first(lambda: None)  # wait until process 0 has written the last checkpoint

    def initial_state(self, steps: Steps) -> Callable[[], State] | None:
        """Return a function that makes the first state from the parent's checkpoint; None: it is random."""
        if self.parent is None:
            return None
        restore = cast(NetworkStage, self.parent).initial_state_from_checkpoint
        return partial(restore, steps, self.parent_step, self.settings.seed)

    def batch_iterator(
        self, inputs: Inputs, mesh: Mesh, reporter: Reporter, steps_done: int
    ) -> Iterator[Batch]:
        """Yield this process's part of each batch that follows after ``steps_done``, and report progress."""
        batches, training, config = inputs.batches[self.name], self.training, self.settings.data
        rows = sharding.process_rows(mesh, training.batch_size)
        reporter.advance(steps_done - self.first_step)
        with pretokenize_ahead(batches, rows, config.encoders):
            for batch in stream(batches, steps_done, training.steps, rows=rows, workers=config.workers):
                yield batch
                reporter.advance(1)

    def make_evaluate(self, inputs: Inputs, mesh: Mesh, steps: Steps) -> EvalFn:
        """Return a function that evaluates a state on the validation rows of the stage's tasks.

        At a step that saves no checkpoint it returns {}. At a checkpoint it returns the metrics of each task
        as ``TASK/METRIC`` and, if all tasks have a score, their mean as ``score``, by which checkpoints are
        ranked; it also writes the predictions. Scores are recorded so that higher is better: bits per byte
        are negated.
        """
        eval_tasks = self.eval_tasks(inputs, mesh, "validation")
        training = self.training

        def evaluate(state: State) -> dict[str, Any]:
            values: dict[str, Any] = {}
            step = int(state.step)
            is_branch_or_last = step in (*self.branch_steps, training.steps)
            if not is_branch_or_last and step % training.save_every:
                return values
            for eval_task in eval_tasks:
                path = predictions_path(self.folder, eval_task.task, step)
                evaluation = score_task(state.eval_model, eval_task, steps.shard_batch, path)
                values |= score_values(eval_task.task, evaluation.metrics)
            names = [f"{eval_task.task.name}/score" for eval_task in eval_tasks]
            if names and values.keys() >= {*names}:  # a task may have no score
                values["score"] = sum(values[name] for name in names) / len(names)
            return values

        return evaluate

    # ---- checkpoints

    def checkpoints(self) -> Checkpoints:
        """Return a context with its checkpoints.

        The three newest are kept, the best by each score, those of ``branch_steps``, and one for every
        ``keep_hours`` of training.
        """
        every, hours = self.training.save_every, self.training.keep_hours
        config = CheckpointConfig(every, best="highest", hours=hours, steps=self.branch_steps)
        return Checkpoints(self.folder / "checkpoints", config, self.settings.guard)

    @property
    def progress_if_unfinished(self) -> str:
        """Return which model of an unfinished stage is loaded by default, such as "step 167 of 3,000".

        The first number is the step of the best checkpoint so far, the second the last step of training. It
        is "" once the last step is saved, for an imported model, whose only step is 0, and for a stage
        without checkpoints.
        """
        folder, last = self.folder / "checkpoints", self.training.steps
        newest = max(manifest.steps(folder), default=0)
        return f"step {best_step(folder):,} of {last:,}" if 0 < newest < last else ""

    def restore_state(self, mesh: Mesh, *, step: int | None = None, weights: Weights = "scored") -> State:
        """Return its state after ``step``.

        step: None is the checkpoint with the best mean validation score or, if none has a score, the last.
        weights: "scored" are those that evaluation uses, the average of parameters if one is kept
        (``optimizer.ema``).
        """
        return self._restored(self.steps(mesh), "", step, weights)

    def restore_transformer(
        self, mesh: Mesh, *, step: int | None = None, weights: Weights = "scored"
    ) -> Transformer:
        """Return its Transformer without a head or ELECTRA's generator, with LoRA merged.

        step, weights: as in ``restore_state``.
        """
        state = self._restored(self.transformer_steps(mesh), self.transformer_prefix, step, weights)
        return finetune.merge_lora(cast(Transformer, state.eval_model))

    def _restored(self, steps: Steps, prefix: str, step: int | None, weights: Weights) -> State:
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
            f"was copied, copy the whole folder of runs, or name the cache in it by {CACHE}=FOLDER"
        )

    def initial_state_from_checkpoint(
        self, steps: Steps, step: int | None = None, seed: int | None = None
    ) -> State:
        """Return the initial state of a stage that starts from a checkpoint of this one.

        It has the parameters of the checkpoint, or their moving average if one is kept. The optimiser's state
        is restored too, as in T5, if the states of both stages have arrays of the same names: the model and
        the kind of optimiser are the same, and both or neither clip gradients and have momentum. Otherwise it
        starts anew. Steps count from 0 again.

        steps: the compiled steps of the stage that starts.
        step: that of the checkpoint; None: the last one.
        seed: draws the parameters that the checkpoint lacks, such as a head's; None: that of this stage.
        """
        checkpoint_step = step or self.training.steps
        with self.checkpoints() as checkpoints:
            fresh = steps.initial_state(self.settings.seed if seed is None else seed)
            saved = self.steps(steps.mesh).abstract
            # An average of parameters and the state of an RNN (carry) are restored as they were saved.
            # warm_start takes the average, if there is one, as the parameters, and drops carry.
            wanted = replace(steps.abstract, average=saved.average, carry=saved.carry)
            if sharding.named(wanted).keys() == sharding.named(saved).keys():
                return cast(State, checkpoints.restore(wanted, checkpoint_step)).warm_start(fresh)
            # The optimizers differ, or one of the models has a head: only parameters are restored.
            source = partial(finetune.source_parameter, frozenset(saved.params))
            return checkpoints.restore_model(fresh, checkpoint_step, source).warm_start(fresh)

    # ---- scores

    def scores(self, inputs: Inputs, mesh: Mesh, step: int | None = None) -> TaskScores:
        """Return the scores by task.

        A task with report rows is scored on those, once, by one checkpoint: the one after ``step`` or, by
        default, the one with the highest mean validation score. A task without report rows gets its
        validation score after ``step`` or, by default, its highest over all checkpoints, as in T5.
        Predictions on report rows and the report scores are written to the stage's folder or, if ``step`` is
        given, to its subfolder ``at-STEP``.
        """
        tasks, folder = self.tasks, self.folder
        output_folder = folder if step is None else folder / f"at-{step}"
        without_report_rows = [cast(AnyTask, task) for task in tasks["validation"] if not task.report]
        scores = broadcast_from_first(
            lambda: {task.name: self._validation_score(task, step) for task in without_report_rows}
        )
        if tasks["report"]:
            chosen = step or broadcast_from_first(lambda: best_step(folder / "checkpoints"))
            saved_scores = broadcast_from_first(lambda: read_report_scores(output_folder))
            trained_time = broadcast_from_first(lambda: _time_of_step(folder, chosen))
            # If training was lost and repeated, saved scores belong to a different model.
            is_same_model = saved_scores.get("trained", trained_time) == trained_time
            if saved_scores.get("step") != chosen or not is_same_model:
                model = self.restore_state(mesh, step=chosen).eval_model
                found = self.scores_of(model, "report", inputs, mesh, output_folder, chosen)
                saved_scores = {"step": chosen, "trained": trained_time, "tasks": found}
                if jax.process_index() == 0:
                    write_report_scores(output_folder, saved_scores)
            scores |= saved_scores["tasks"]
        return scores

    def _validation_score(self, task: AnyTask, step: int | None) -> dict[str, Any]:
        """Return the score of a task on its validation rows, with the number of rows that were evaluated."""
        best = best_of(task, self.folder, step)
        predictions = predictions_path(self.folder, task, best["step"])
        if predictions.exists():
            best["rows"] = len(split_lines(predictions.read_text("utf-8")))
        return best

    def scores_of(
        self, model: Any, split: EvalSplit, inputs: Inputs, mesh: Mesh, folder: Path, step: int
    ) -> TaskScores:
        """Return the scores of a model on one split of the tasks.

        The validation split leaves out the tasks that have report rows. Predictions, and for report rows the
        likelihood of each row's right answer, are written to ``folder``.
        """
        scores: TaskScores = {}
        name = "ensemble" if isinstance(model, Ensemble) else step
        shard_batch = self.steps(mesh).shard_batch
        for eval_task in self.eval_tasks(inputs, mesh, split):
            task = eval_task.task
            if split == "validation" and task.report:
                continue
            path = predictions_path(folder, task, name)
            evaluation = score_task(model, eval_task, shard_batch, path)
            scores[task.name] = task_score(task, step, evaluation.metrics)
            # the larger of: rows that are predicted, rows whose right answer's likelihood is measured
            scores[task.name]["rows"] = eval_task.num_rows
            scores[task.name]["answered"] = len(eval_task.rows)  # those that are predicted
            if shuffled := score_shuffled(model, eval_task, shard_batch):
                scores[task.name]["shuffled"] = shuffled
            records_examples = split == "report" and jax.process_index() == 0
            if records_examples and (example_values := evaluation.example_values()):
                digest = write_example_values(folder, task.name, example_values)
                scores[task.name]["examples"] = digest
        return scores


def ensemble_scores(members: Sequence[NetworkStage], inputs: Inputs, mesh: Mesh) -> TaskScores:
    """Return the scores of the ensemble of the members' best models, by task.

    Its predictions are written to the folder above those of the members.
    """
    stage = members[0]
    ensemble = Ensemble([cast(Transformer, member.restore_state(mesh).eval_model) for member in members])
    folder, step = stage.folder.parent, stage.training.steps
    scores = stage.scores_of(ensemble, "validation", inputs, mesh, folder, step)
    return scores | stage.scores_of(ensemble, "report", inputs, mesh, folder, step)


def model_parameters(config: ModelConfig) -> int:
    """Return the number of parameters of a Transformer, without fine-tuning heads and generators."""
    shapes = jax.eval_shape(StepSpec(config).make_model, jax.random.key(0))
    return sum(leaf.size for leaf in jax.tree.leaves(shapes))


def predictions_path(folder: Path, task: AnyTask, name: int | str) -> Path:
    """Return the file of a model's predictions on a task, in the folder of its stage.

    name: step of the checkpoint, or "ensemble".
    """
    return folder / "predictions" / task.name / f"{name}.jsonl"


def _time_of_step(folder: Path, step: int) -> float:
    """Return when the last line up to ``step`` was recorded [s since 1970].

    A stage that is trained again reaches the step at another time, by which outdated scores are recognised.
    """
    return max((record["time"] for record in records(folder) if record["step"] <= step), default=0.0)


def best_step(checkpoints: Path) -> int:
    """Return the step of the checkpoint with the highest mean score, or the last if none has a score."""
    saved = manifest.manifests(checkpoints)
    return manifest.best(saved, name="score", kind="highest") or max(saved)


def pretokenize_ahead(
    batches: Batches, rows: Sequence[slice], processes: int
) -> AbstractContextManager[None]:
    """Return a context in which background processes tokenize the text of the coming batches.

    It does nothing if no corpus is read.
    rows: this process's rows of a batch, whose streams are tokenized.
    processes: number of background processes; 0: none.
    """
    if not processes:
        return nullcontext()
    source = batches.row_source
    if isinstance(source, TBPTTRows):
        source = source.row_source
    if isinstance(source, DenoiserMixtureRows):
        source = source.longest_text_rows  # all denoisers read the same text
    if isinstance(source, MixtureRows):
        corpora = [x.source for x in source.examples_by_task.values() if isinstance(x, CorpusExamples)]
        if not corpora:
            return nullcontext()
        source, index_key = corpora[0], UNPACKED_ROWS
        rows = [slice(None)]  # examples of the corpus come from all streams, whatever the rows
    elif isinstance(source, DenoisingRows | MaskedLMRows):
        index_key = source.row_index_key
    else:
        return nullcontext()
    reader = source.reader
    index_files = {stream: reader.index_file(stream, index_key) for stream in reader.streams_of_rows(rows)}
    return pretokenize_in_background(reader.sampler, index_files, processes)


def rows_of_process(mesh: Mesh, size: int, batches: Sequence[Batch]) -> list[Batch]:
    """Return this process's part of global batches of ``size`` rows each."""
    rows = np.concatenate([np.arange(size)[rows] for rows in sharding.process_rows(mesh, size)])
    return [batch.map(lambda values: values[rows]) for batch in batches]

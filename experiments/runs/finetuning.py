"""Fine-tuning from a pre-trained model: on mixtures of tasks as text-to-text, and on labelled tasks through a
head.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any

import jax
import numpy as np

from experiments.processes.group import agreed
from experiments.runs.phase import Phase, Session, Start, checkpoints_of, fit
from experiments.runs.prepare import Encoded, fingerprints, tuning_lengths
from experiments.runs.stages import Stage
from experiments.study.experiment import Experiment
from lm import sharding
from lm.data.batches import Batch, Batches
from lm.data.labelled import Labelled, Reader, labelled_eval_batches
from lm.data.objectives import Lengths
from lm.data.packing import ENCODER_DECODERS
from lm.data.supervised import Mixed, eval_batches
from lm.data.tasks.labelled import LabelledTask, find_labelled
from lm.data.tasks.mixtures import mixture, rates
from lm.data.tasks.task import Row, Task
from lm.data.text.vocabulary import Vocabulary
from lm.evaluate.decode import greedy
from lm.evaluate.questions import Questions, score_task
from lm.nn.composed import Ensemble, Tuned
from lm.nn.config import HeadConfig, ModelConfig
from lm.train.log import records
from lm.train.losses import labelled
from lm.train.optimizers import GradualUnfreezing, Tune, adapters_only, body_frozen, every_parameter
from lm.train.state import State
from lm.train.step import Steps, StepSpec, build


@dataclass(frozen=True)
class FineTuning:
    """What is trained on, and what is asked at every checkpoint."""

    steps: Steps
    batches: Batches
    lengths: Lengths
    asked: Sequence[Questions]


def finetune(session: Session, pretrained: Start | None, stage: Stage) -> dict[str, dict]:
    """Fine-tune to the end of the stage; ``{task: its best checkpoint's step and scores}``.

    As in T5 the optimiser's memory comes along from pre-training; steps count from 0 again.
    """
    name, folder = stage.group, stage.folder
    session.reporter.start(f"fine-tuning on {name}")
    made = fine_tuning(session, name)
    with checkpoints_of(session.experiment, session.experiment.finetuning, folder) as checkpoints:
        evaluate = evaluation(session, made.asked, made.lengths, made.steps, folder)
        config, read = session.experiment.finetuning, fingerprints(stage, session.cache)
        fit(
            Phase(
                session,
                config,
                made.steps,
                made.batches,
                made.lengths,
                checkpoints,
                evaluate,
                read,
                pretrained,
            )
        )
    return agreed(lambda: {each.task.name: best_of(each.task, folder) for each in made.asked})


def answer_together(sessions: Sequence[Session], name: str, folders: Sequence[Path]) -> dict[str, dict]:
    """The scores of the members' best models for ``name`` as an ensemble; their answers lie beside the
    members.
    """
    sessions[0].reporter.start(f"{len(folders)} models together on {name}")
    made, found = fine_tuning(sessions[0], name), {}
    models = []
    for session, folder in zip(sessions, folders, strict=True):
        with checkpoints_of(session.experiment, session.experiment.finetuning, folder) as checkpoints:
            models.append(checkpoints.restore_model(made.steps.abstract, checkpoints.best()).model)
    for each in made.asked:
        path = folders[0].parent / "predictions" / each.task.name / "ensemble.jsonl"
        metrics = score_task(Ensemble(models), each, made.steps.put, path)
        found[each.task.name] = about(each.task, session.experiment.finetuning.steps, metrics)
    return found


def fine_tuning(session: Session, name: str) -> FineTuning:
    """On the mixture or labelled task ``name``."""
    return on_labels(session, name) if name in session.experiment.tuning.heads else on_mixture(session, name)


def on_mixture(session: Session, name: str) -> FineTuning:
    """Of the whole model, or what ``tuning`` says of it, on tasks as text."""
    experiment, vocabulary = session.experiment, session.prepared.vocabulary
    phase, lengths, tuned = experiment.finetuning, tuning_lengths(experiment, (name,)), experiment.tuning
    model = adapted(experiment)
    examples = {
        task.name: Encoded(
            task, task.rows("train", session.cache, experiment.data.corrupt_records), vocabulary
        )
        for task in mixture(name)
        if task.train
    }
    sizes = {task: len(rows) for task, rows in examples.items()}
    shares = rates(sizes, kind="proportional", limit=tuned.examples_limit, temperature=1.0)
    rows = Mixed(examples, shares, model.architecture, lengths, experiment.seed)
    batches = Batches(rows, phase.batch_size)
    spec = StepSpec(
        model,
        phase.optimizer,
        tune=tune_of(experiment),
        microbatches=phase.microbatches,
        guard=experiment.guard,
    )
    return FineTuning(build(spec, session.mesh), batches, lengths, asked(session, (name,)))


def on_labels(session: Session, name: str) -> FineTuning:
    """Of a new head, and the model under it."""
    experiment, task = session.experiment, find_labelled(name)
    length, phase = experiment.tuning.inputs_length, experiment.finetuning
    reader = Reader(task, session.prepared.vocabulary, experiment.model.architecture, length)
    rows = task.rows("train", session.cache, experiment.data.corrupt_records)
    batches = Batches(Labelled(reader, rows, experiment.seed), phase.batch_size)
    lengths = Lengths(raw=length, inputs=length, targets=length)
    return FineTuning(
        head_steps(experiment, session.mesh, name), batches, lengths, [ask(session, task, length)]
    )


def asked(session: Session, names: Sequence[str]) -> list[Questions]:
    """The validation sets of the mixtures ``names``."""
    return [
        ask(session, task, mixture(name).targets_length) for name in names for task in mixture(name).evaluated
    ]


def ask(session: Session, task: Any, targets_length: int) -> Questions:
    rows = first(task.rows("validation", session.cache), session.experiment.tuning.evaluation_examples)
    return questions(
        session.experiment, session.prepared.vocabulary, session.mesh, task, rows, targets_length
    )


def evaluation(
    session: Session, asked: Sequence[Questions], lengths: Lengths, steps: Steps, folder: Path
) -> Callable[[State], dict[str, float]]:
    """All metrics of all tasks, the loss of their targets, and ``score``: the mean of theirs.

    The loss tells models apart that are too small to answer. The answers of each step are kept in ``folder``.
    """
    right = {
        each.task.name: right_answers(session, each, lengths) for each in asked if isinstance(each.task, Task)
    }

    def evaluate(state: State) -> dict[str, float]:
        found = {}
        for each in asked:
            name = each.task.name
            path = folder / "predictions" / name / f"{int(state.step)}.jsonl"
            metrics = score_task(state.model, each, steps.put, path)
            metrics |= {"loss": steps.evaluate(state, right[name])["loss"]} if name in right else {}
            found |= {f"{name}/{metric}": value for metric, value in metrics.items()}
        return found | {"score": sum(found[f"{each.task.name}/score"] for each in asked) / len(asked)}

    return evaluate


def right_answers(session: Session, asked: Questions, lengths: Lengths) -> list[Batch]:
    """This process's parts of the rows with their targets, which alone have a loss, whatever the
    architecture.
    """
    rows = Encoded(asked.task, asked.rows, session.prepared.vocabulary)
    size, architecture = session.experiment.finetuning.batch_size, session.experiment.model.architecture
    batches = eval_batches(rows, architecture=architecture, lengths=lengths, batch_size=size)
    if architecture not in ENCODER_DECODERS:  # whose loss has the inputs in it
        for batch in batches:
            visible = batch["decoder_causal_attention"]  # it reaches one position further than the inputs
            batch["decoder_loss_weights"][:, :-1] *= 1 - visible[:, 1:]
    return mine(session.mesh, size, batches)


def adapted(experiment: Experiment) -> ModelConfig:
    """The model of fine-tuning."""
    width = round(experiment.tuning.adapters * experiment.model.d_model)
    return replace(experiment.model, adapter_width=width)


def tune_of(experiment: Experiment) -> Tune:
    """What fine-tuning moves."""
    if experiment.tuning.adapters:
        return adapters_only
    if experiment.tuning.unfreezing == "gradual":
        return GradualUnfreezing(experiment.model, experiment.finetuning.steps)
    return every_parameter


def head_steps(experiment: Experiment, mesh: jax.sharding.Mesh, name: str) -> Steps:
    """The steps of the model with a head for the labelled task ``name``."""
    task, model, phase = find_labelled(name), adapted(experiment), experiment.finetuning
    head = HeadConfig(
        kind=task.kind,
        classes=max(len(task.labels), 1),
        pool="last" if model.has_decoder else "first",
        layers=experiment.tuning.layers,
    )
    tune = body_frozen if experiment.tuning.layers == "mixed-frozen" else tune_of(experiment)
    spec = StepSpec(
        model,
        phase.optimizer,
        labelled,
        module=Tuned,
        parts=(head,),
        tune=tune,
        microbatches=phase.microbatches,
        guard=experiment.guard,
    )
    return build(spec, mesh)


def best_of(task: Any, folder: Path) -> dict:
    """The best evaluation of a task, as the paper reports it: every task by its own checkpoint.

    Of several with the same score it is the one with the lowest loss, else the last: as of checkpoints.
    """
    name = task.name
    evaluations = [record for record in records(folder) if f"{name}/score" in record]
    best = max(evaluations, key=lambda r: (r[f"{name}/score"], -r.get(f"{name}/loss", np.inf), r["step"]))
    metrics = {key.split("/")[1]: value for key, value in best.items() if key.startswith(f"{name}/")}
    if "loss" in metrics:
        # of its own best checkpoint
        metrics["loss"] = min(r.get(f"{name}/loss", np.inf) for r in evaluations)
    return about(task, best["step"], metrics)


def about(task: Any, step: int, metrics: dict[str, float]) -> dict:
    """What ``scores.json`` says of a task."""
    counting = [metric for metric in task.metrics if metric not in task.beside]
    return {
        "column": task.column,
        "metric": " and ".join(counting),
        "step": step,
        "score": metrics["score"],
        "metrics": {name: value for name, value in metrics.items() if name != "score"},
    }


told = jax.jit(Tuned.__call__)  # model, batch -> what its head gives


def questions(
    experiment: Experiment,
    vocabulary: Vocabulary,
    mesh: jax.sharding.Mesh,
    task: Task | LabelledTask,
    rows: Sequence[Row],
    targets_length: int,
) -> Questions:
    """Those of ``rows``; answers in words have at most ``targets_length`` tokens."""
    length, size = experiment.tuning.inputs_length, experiment.finetuning.batch_size
    architecture = experiment.model.architecture
    if isinstance(task, LabelledTask):
        reader = Reader(task, vocabulary, architecture, length)
        batches, output, read = labelled_eval_batches(reader, rows, size), told, reader.answer
    else:
        prompts = [(vocabulary.encode(task.to_text(row)[0]), ()) for row in rows]
        lengths = Lengths(raw=length, inputs=length, targets=1)
        batches = eval_batches(prompts, architecture=architecture, lengths=lengths, batch_size=size)
        output, read = partial(greedy, max_length=targets_length), lambda row, ids: vocabulary.decode(ids)
    return Questions(task, rows, mine(mesh, size, batches), output, read)


def mine(mesh: jax.sharding.Mesh, size: int, batches: Sequence[Batch]) -> list[Batch]:
    """This process's rows of global batches of ``size`` rows."""
    rows = np.concatenate([np.arange(size)[rows] for rows in sharding.rows_of_process(mesh, size)])
    return [{feature: values[rows] for feature, values in batch.items()} for batch in batches]


def first(rows: Sequence[Row], limit: int) -> Sequence[Row]:
    """The first ``limit`` rows; 0 means all."""
    return [rows[place] for place in range(min(limit or len(rows), len(rows)))]

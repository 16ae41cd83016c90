"""Fine-tuning from a pre-trained model: on mixtures of tasks as text-to-text, and on labelled tasks through a head."""

from collections.abc import Callable, Sequence
from functools import cache
from pathlib import Path
from typing import Any

import jax
from flax import nnx

from experiments.phase import Session, Start, fit
from experiments.prepare import Encoded, tuning_lengths
from lm import sharding
from lm.data import pipeline
from lm.data.labelled import Labelled, Reader, labelled_eval_batches
from lm.data.mixtures import mixture, proportional
from lm.data.objectives import Lengths
from lm.data.tasks.labelled import labelled as labelled_task
from lm.evaluate.score import LabelledQuestions, Questions, score, score_labels
from lm.nn.config import HeadConfig, ModelConfig
from lm.nn.tuned import BODY, Tuned
from lm.train.checkpoints import Checkpoints
from lm.train.config import CheckpointConfig, LossConfig
from lm.train.log import records
from lm.train.losses import labelled
from lm.train.state import State
from lm.train.step import Steps, build, same


def finetune(session: Session, pretrained: Start | None, name: str, folder: Path) -> dict[str, dict]:
    """Fine-tune on the mixture ``name`` to the end; ``{task: its best checkpoint's step, score and metrics}``.

    As in T5 the optimiser's memory comes along from pre-training; steps count from 0 again.
    """
    experiment, vocabulary = session.experiment, session.prepared.vocabulary
    phase, lengths = experiment.finetuning, tuning_lengths(experiment, name)
    session.reporter.start(f"fine-tuning on {name}")
    steps = build(experiment.model, phase.optimizer, LossConfig(), session.mesh, phase.microbatches)
    examples = {t.name: Encoded(t, t.rows("train", session.cache), vocabulary) for t in mixture(name)}
    batches = pipeline.task_batches(
        examples,
        proportional({task: len(rows) for task, rows in examples.items()}, experiment.tuning.examples_limit),
        architecture=experiment.model.architecture,
        lengths=lengths,
        batch_size=phase.batch_size,
        seed=experiment.seed,
    )
    asked = [questions(session, task, name) for task in mixture(name)]

    def evaluate(state: State) -> dict[str, float]:
        model, step, found = state.model, int(state.step), {}
        for each in asked:
            path = folder / "predictions" / each.task.name / f"{step}.jsonl"
            metrics = score(model, each, steps.put, vocabulary.decode, path)
            found |= {f"{each.task.name}/{metric}": value for metric, value in metrics.items()}
        return found | {"score": sum(found[f"{each.task.name}/score"] for each in asked) / len(asked)}

    _fit(session, steps, batches, lengths, folder, evaluate, pretrained)
    return {each.task.name: best_of(each.task, folder) for each in asked}


def finetune_head(session: Session, pretrained: Start | None, name: str, folder: Path) -> dict[str, dict]:
    """Fine-tune a new head, and the model under it, on the labelled task ``name``; as ``finetune`` gives it."""
    experiment, vocabulary = session.experiment, session.prepared.vocabulary
    phase, task, length = experiment.finetuning, labelled_task(name), experiment.tuning.inputs_length
    session.reporter.start(f"fine-tuning a head for {name}")
    steps = head_steps(session, name)
    reader = Reader(task, vocabulary, experiment.model.architecture, length)
    batches = Labelled(reader, task.rows("train", session.cache), phase.batch_size, experiment.seed)
    rows = first(task.rows("validation", session.cache), experiment.tuning.evaluation_examples)
    held_out = _mine(session, labelled_eval_batches(reader, rows, phase.batch_size))
    asked = LabelledQuestions(task, rows, held_out, reader.answer)

    def evaluate(state: State) -> dict[str, float]:
        path = folder / "predictions" / name / f"{int(state.step)}.jsonl"
        found = score_labels(state.model, asked, steps.put, path)
        return {f"{name}/{metric}": value for metric, value in found.items()} | {"score": found["score"]}

    _fit(session, steps, batches, Lengths(raw=length, inputs=length, targets=length), folder, evaluate, pretrained)
    return {name: best_of(task, folder)}


def head_steps(session: Session, name: str) -> Steps:
    """The steps of the model with a head for the labelled task ``name``."""
    experiment, task = session.experiment, labelled_task(name)
    model, phase = experiment.model, experiment.finetuning
    head = HeadConfig(
        kind=task.kind,
        classes=max(len(task.labels), 1),
        pool="last" if model.has_decoder else "first",
        layers=experiment.tuning.layers,
    )
    tune = frozen if experiment.tuning.layers == "mixed-frozen" else same
    return build(model, phase.optimizer, LossConfig(), session.mesh, phase.microbatches, tuned(head), labelled, tune)


@cache
def tuned(head: HeadConfig) -> Callable[[ModelConfig, nnx.Rngs], Tuned]:
    """What makes a model with this head; the same for the same, so that its steps are compiled once."""
    return lambda config, rngs: Tuned(config, head, rngs)


def frozen(updates: dict[str, jax.Array], step: jax.Array) -> dict[str, jax.Array]:
    """Only what is new is trained, and the body does not decay either."""
    return {name: 0 * value if name.startswith(BODY) else value for name, value in updates.items()}


def _fit(session, steps, batches, lengths, folder, evaluate, pretrained) -> None:
    phase = session.experiment.finetuning
    config = CheckpointConfig(every=phase.save_every, keep=1, best="highest")
    with Checkpoints(folder / "checkpoints", config) as checkpoints:
        fit(session, phase, steps, batches, lengths, checkpoints, evaluate, pretrained)


def questions(session: Session, task, name: str) -> Questions:
    """The validation rows of a task, as prompts in batches."""
    experiment, vocabulary = session.experiment, session.prepared.vocabulary
    rows = first(task.rows("validation", session.cache), experiment.tuning.evaluation_examples)
    prompts = [(vocabulary.encode(task.to_text(row)[0]), ()) for row in rows]
    lengths, size = tuning_lengths(experiment, name), experiment.finetuning.batch_size
    architecture = experiment.model.architecture
    batches = pipeline.eval_batches(
        prompts, architecture=architecture, lengths=lengths._replace(targets=1), batch_size=size
    )
    return Questions(task, rows, _mine(session, batches), lengths.targets)


def first(rows: Sequence, limit: int) -> Sequence:
    """The first ``limit`` rows; 0 means all."""
    return [rows[place] for place in range(min(limit or len(rows), len(rows)))]


def _mine(session: Session, batches) -> list[pipeline.Batch]:
    """This process's rows of global batches."""
    size = session.experiment.finetuning.batch_size
    index, count = sharding.shard_of_batch(session.mesh, size)
    mine = slice(index * size // count, (index + 1) * size // count)
    return [{feature: values[mine] for feature, values in batch.items()} for batch in batches]


def best_of(task: Any, folder: Path) -> dict:
    """The best evaluation of a task, as the paper reports it: every task by its own checkpoint."""
    name = task.name
    best = max((r for r in records(folder) if r["kind"] == "eval"), key=lambda record: record[f"{name}/score"])
    metrics = {key.split("/")[1]: value for key, value in best.items() if key.startswith(f"{name}/")}
    counting = [metric for metric in task.metrics if metric not in task.beside]
    return {
        "column": task.column,
        "metric": " and ".join(counting),
        "step": best["step"],
        "score": metrics.pop("score"),
        "metrics": metrics,
    }

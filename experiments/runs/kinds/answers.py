"""Makes the evaluation of tasks: their rows as batches, and how the outputs of a model become answers."""

from collections.abc import Callable, Sequence
from dataclasses import replace
from functools import partial
from typing import Any, cast

import jax
import numpy as np
from jax.sharding import Mesh

from experiments.runs.inputs import EvalSplit, Inputs, first_rows
from experiments.runs.kinds.network import NetworkStage, rows_of_process
from experiments.study.experiment import Experiment
from lm.data.classification import Reader, labelled_eval_batches
from lm.data.seq2seq import eval_batches
from lm.data.tasks.choices import encode_choices, first_choices, shuffle_inputs
from lm.data.tasks.labelled import AnyTask, LabelledTask
from lm.data.tasks.mixtures import mixture
from lm.data.tasks.task import Row, Task
from lm.evaluate.evaluator import EvalTask
from lm.evaluate.generate import greedy
from lm.nn import finetune
from lm.objectives.denoising import Lengths
from lm.special_tokens import boundary_tokens
from lm.tokenizers.tokenizer import Tokenizer


def text_eval_tasks(stage: NetworkStage, inputs: Inputs, mesh: Mesh, split: EvalSplit) -> list[EvalTask]:
    """Return the evaluation of all tasks that a stage answers by generated text."""
    tasks = cast(list[Task], stage.tasks[split])
    return [_text_eval_task(stage, inputs, mesh, task, split) for task in tasks]


def _text_eval_task(
    stage: NetworkStage, inputs: Inputs, mesh: Mesh, task: Task, split: EvalSplit
) -> EvalTask:
    """Return the evaluation of one task that a stage answers by generated text.

    The likelihood of the right answer is measured on all rows. Answers are generated for at most
    ``tuning.evaluation_examples`` of them, if the task is scored by its answers or if these are report rows;
    at earlier branches only if the task is scored by its answers.
    """
    settings, vocabulary = stage.settings, inputs.vocabulary
    rows, limit = stage.scored_rows(task, split, inputs), settings.tuning.evaluation_examples
    is_answered = task.measure == "score" or (split == "report" and stage.is_compared)
    answered = first_rows(rows, limit) if is_answered else []
    length = max(mixture(name).targets_length for name in stage.scored_on if mixture(name).has(task.name))
    eval_task = make_eval_task(settings, vocabulary, mesh, task, answered, length)
    lengths, boundary = (settings.tuning.inputs_length, length), boundary_tokens(settings.model, vocabulary)
    validation_rows = first_rows(inputs.sources.rows(task, "validation"), limit)
    choices = partial(encode_choices, task, tokenizer=vocabulary, lengths=lengths, boundary=boundary)
    if split == "validation":
        return replace(eval_task, choices=choices(validation_rows))
    calibration = None
    if task.candidates or task.candidate_inputs:  # without candidates there is nothing to calibrate
        calibration = choices(validation_rows)
    asked, shuffled = choices(rows), None
    if settings.tuning.shuffled_inputs and stage.is_compared:
        shuffled = shuffle_inputs(first_choices(asked, settings.tuning.shuffled_inputs))
    return replace(eval_task, choices=asked, calibration=calibration, shuffled=shuffled)


def make_eval_task(
    experiment: Experiment,
    vocabulary: Tokenizer,
    mesh: Mesh,
    task: AnyTask,
    rows: Sequence[Row],
    targets_length: int,
) -> EvalTask:
    """Return how a task is evaluated on ``rows``.

    targets_length: the most tokens that a generated answer may have.
    """
    length, size = experiment.tuning.inputs_length, experiment.finetuning.batch_size
    architecture = experiment.model.architecture
    predict_batch: Callable[[Any, Any], jax.Array]
    postprocess_output: Callable[[Row, np.ndarray], Any]
    if isinstance(task, LabelledTask):
        reader = reader_of(experiment, task, vocabulary)
        batches = labelled_eval_batches(reader, rows, size)
        predict_batch, postprocess_output = _head_output, reader.answer
    else:
        prompts = [(vocabulary.encode(task.to_text(row)[0]), ()) for row in rows]
        lengths = Lengths(raw=length, inputs=length, targets=1)
        boundary = boundary_tokens(experiment.model, vocabulary)
        batches = eval_batches(
            prompts, architecture=architecture, lengths=lengths, batch_size=size, boundary=boundary
        )
        predict_batch = partial(greedy, max_length=targets_length)
        postprocess_output = partial(decode_answer, vocabulary)
    return EvalTask(task, rows, rows_of_process(mesh, size, batches), predict_batch, postprocess_output)


def decode_answer(vocabulary: Tokenizer, _row: Row, ids: np.ndarray) -> str:
    """Return the text of the answer to a row: the ``postprocess_output`` of tasks answered by text."""
    return vocabulary.decode(ids)


_head_output = jax.jit(finetune.ModelWithHead.__call__)  # model, batch -> output of its head


def reader_of(experiment: Experiment, task: LabelledTask, vocabulary: Tokenizer) -> Reader:
    """Return the reader that turns rows of a labelled task into batches for the model."""
    tuning = experiment.tuning
    return Reader(task, vocabulary, experiment.model.architecture, tuning.inputs_length, tuning.layout)

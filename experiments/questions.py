"""What a model is asked to be scored on a task: in words, or through a head."""

from collections.abc import Sequence
from functools import partial

import jax
import numpy as np

from experiments.experiment import Experiment
from lm import sharding
from lm.data import pipeline
from lm.data.labelled import Reader, labelled_eval_batches
from lm.data.objectives import Lengths
from lm.data.tasks.labelled import LabelledTask
from lm.data.tasks.task import Row, Task
from lm.data.vocabulary import Vocabulary
from lm.evaluate.decode import greedy
from lm.evaluate.score import Questions
from lm.nn.tuned import Tuned

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
        batches = pipeline.eval_batches(prompts, architecture=architecture, lengths=lengths, batch_size=size)
        output, read = partial(greedy, max_length=targets_length), lambda row, ids: vocabulary.decode(ids)
    return Questions(task, rows, mine(mesh, size, batches), output, read)


def mine(mesh: jax.sharding.Mesh, size: int, batches: Sequence[pipeline.Batch]) -> list[pipeline.Batch]:
    """This process's rows of global batches of ``size`` rows."""
    rows = np.concatenate([np.arange(size)[rows] for rows in sharding.rows_of_process(mesh, size)])
    return [{feature: values[rows] for feature, values in batch.items()} for batch in batches]


def first(rows: Sequence[Row], limit: int) -> Sequence[Row]:
    """The first ``limit`` rows; 0 means all."""
    return [rows[place] for place in range(min(limit or len(rows), len(rows)))]

"""What the models of a run answer to the rows of a task: in words, or by a head."""

from collections.abc import Sequence
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np

from experiments.runs.finetuning import head_steps, questions
from experiments.runs.stages import Stage, load_settings, stages_of
from experiments.runs.trained import Trained, chosen, restored
from experiments.runs.vocabularies import kept
from lm import sharding
from lm.data.tasks.benchmarks import TASKS
from lm.data.tasks.labelled import LABELLED, LabelledTask
from lm.data.tasks.mixtures import MIXTURES
from lm.data.tasks.task import Row, Scored, Task
from lm.evaluate.decode import greedy
from lm.evaluate.questions import Questions, predict
from lm.nn.composed import Ensemble
from lm.settings import SettingError

AT_ONCE = 32  # that a model answers in a batch [rows]
LONGEST_ANSWER = 64  # to a task of no mixture [tokens]


def team_of(folder: Path, name: str, wanted: str) -> tuple[Scored, list[Stage]]:
    """A task as the run in ``folder`` answers it, in words or by a head, and the stages that answer together.

    That is ``wanted``, else the first that was tuned for the task, else pre-training, with all its members.
    """
    experiment, stages = load_settings(folder), stages_of(folder)
    heads, writes = experiment.tuning.heads, experiment.model.has_decoder
    tuned = [name] if name in heads else []
    tuned += [mixture for mixture in experiment.tuning.mixtures if name in MIXTURES[mixture].tasks]
    teams: dict[str, list[Stage]] = {}
    for stage in stages:
        teams.setdefault(stage.group, []).append(stage)
    default = next((group for group in tuned if group in teams), "")
    team = chosen(folder, {stage.name: [stage] for stage in stages} | teams, wanted or default)
    head = team[0].group if team[0].kind == "head" else None
    if head == name:
        return LABELLED[name], team[:1]
    if head is None and writes and name in TASKS:
        return TASKS[name], team
    reason = f"its heads are {', '.join(heads) or 'none'}"
    reason += "" if writes else ", and an encoder writes no text"
    raise SettingError(f"{folder} has no model that answers {name!r}: {reason}")


def answers_by_head(task: LabelledTask, stage: Stage, rows: Sequence[Row]) -> list[Any]:
    """One for each row, of the kind that the task has."""
    experiment = stage.settings
    steps = head_steps(experiment, sharding.make_mesh(experiment.mesh), task.name)
    vocabulary = kept(stage.folder, experiment)
    asked = questions(experiment, vocabulary, steps.mesh, task, rows, 0)
    return predict(restored(stage, steps).model, asked, steps.put)


def answers_in_words(models: Sequence[Trained], task: Task, rows: Sequence[Row], width: int) -> list[str]:
    """What a model, or several together, write to inputs of at most ``width`` tokens."""
    first = models[0]
    lengths = {name: mixed.targets_length for name, mixed in MIXTURES.items() if task.name in mixed.tasks}
    length = lengths.get(first.stage.group) or max(lengths.values(), default=LONGEST_ANSWER)
    output, decoded = partial(greedy, max_length=length), lambda row, ids: first.vocabulary.decode(ids)
    model = first.model if len(models) == 1 else Ensemble([trained.model for trained in models])
    inputs = prompts(first, [task.to_text(row)[0] for row in rows], width, length)
    return predict(model, Questions(task, rows, inputs, output, decoded), first.put)


def prompts(run: Trained, inputs: Sequence[str], width: int, answer: int) -> list[dict[str, np.ndarray]]:
    """Inputs as the run's model reads them, cut to ``width`` tokens, in batches of one shape."""
    config = run.config
    width += not config.has_encoder  # a decoder's begin with a token of its own
    texts = [_cut(run.encode(text), width, config.special.eos) for text in inputs]
    on_host = replace(run, put=lambda batch: batch)  # nothing goes to the devices yet
    batches = [
        on_host.batch(texts[start : start + AT_ONCE], answer) for start in range(0, len(texts), AT_ONCE)
    ]
    shape = (-(-AT_ONCE // run.devices) * run.devices, max(map(len, texts)))
    return [{name: _padded(x, shape) for name, x in batch.items()} for batch in batches]


def _padded(array: np.ndarray, shape: tuple[int, int]) -> np.ndarray:
    return np.pad(array, [(0, size - length) for size, length in zip(shape, array.shape, strict=True)])


def _cut(ids: list[int], width: int, eos: int) -> list[int]:
    """The first ``width`` of ``ids``, with their EOS if they have one."""
    if len(ids) <= width:
        return ids
    return [*ids[: width - 1], eos] if ids[-1] == eos else ids[:width]

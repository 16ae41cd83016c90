"""The composition root: trains the stages of an experiment, one from another, and scores what they learnt.

A run is a folder: ``settings.json`` says whose it is; ``finetuning/MIXTURE/`` holds checkpoints,
``metrics.jsonl``, ``run.json`` and predictions, as does the folder of its pre-training, which runs that
pre-train alike share; ``scores.json`` appears when all is done and names the folders.
"""

import os
from collections.abc import Callable, Iterable, Sequence
from functools import cache, partial
from itertools import groupby
from pathlib import Path
from typing import cast

import jax

from experiments.processes.group import agreed, trains
from experiments.processes.place import wait
from experiments.runs.checks import check
from experiments.runs.prepare import tasks_of
from experiments.runs.progress import Reporter
from experiments.runs.recipes import (
    RECIPES,
    checkpoints_of,
    held_out_batches,
    right_answers,
    start_from,
    steps_of,
    trained,
)
from experiments.runs.scores import best_of, task_score, write_scores
from experiments.runs.session import Session, ShownLog, check_origin, data, finished, flops, locked
from experiments.runs.stages import Stage, home_of, save_settings, stages
from experiments.study.experiment import Experiment
from lm.data.objectives import Lengths
from lm.data.tasks.task import Task
from lm.evaluate.questions import score_task
from lm.nn.composed import Ensemble
from lm.nn.transformer import Transformer
from lm.train.config import LoopConfig
from lm.train.loop import Run, train
from lm.train.state import State
from lm.train.step import Steps

WATCHED = 512  # of held-out text, on which the loss of pre-training is watched [sequences]
COMPARED = 1_000  # of held-out text, at most, on which rows of different lengths are compared [batches]


def run(
    experiment: Experiment, folder: Path, cache: Path, reporter: Reporter, allow: frozenset[str] = frozenset()
) -> None:
    """Train and score the run in ``folder``, from where it stopped; SettingError before anything compiles.

    ``allow``: which of origin.ORIGINS may have changed since it was started.
    """
    prepared, mesh = check(experiment, folder, cache, reporter.say, allow)
    if jax.process_index() == 0:  # from now on the folder is this run's
        save_settings(folder, experiment)
    home = home_of(folder, cache)
    title = os.path.relpath(folder.resolve(), home).replace("/", ".")
    session = Session(prepared, mesh, reporter, allow, title)
    every = stages(experiment, folder, home)
    scores: dict[str, dict] = {}
    for _, group in groupby(every, lambda stage: stage.group):
        models = list(group)
        fit(models, session)
        scores |= best_scores(models[0]) if len(models) == 1 else scores_together(models, session)
    longer = length_losses(every, session)
    if jax.process_index() == 0:
        write_scores(folder, home, every, scores, longer)


def fit(every: Iterable[Stage], session: Session) -> None:
    """Train what remains of each stage, in its folder, which no other run trains in meanwhile."""
    for stage in every:
        pretrains = "start of pre-training" if stage.is_start else "pre-training"
        title = pretrains if stage.kind == "pretrain" else f"fine-tuning on {stage.group}"
        session.reporter.start(title)
        with locked(stage.folder, session.reporter):
            is_finished = finished(stage.folder, stage.training.steps)
            agreed(partial(check_origin, stage, session, is_finished))
            if is_finished:
                session.reporter.advance(stage.training.steps)
            else:
                _train(stage, session)


def _train(stage: Stage, session: Session) -> None:
    steps, training = steps_of(stage, session.mesh), stage.training
    batches = RECIPES[stage.kind].batches(stage, session.prepared)
    every, guard, patience = (
        (training.log_every, training.save_every),
        stage.settings.guard,
        wait("LM_STEP_TIMEOUT"),
    )
    loop = LoopConfig(training.steps, *every, "score", guard, patience=patience)
    with checkpoints_of(stage) as checkpoints, ShownLog(stage, session) as log:
        run = Run(
            stage.settings.seed,
            partial(data, stage, session, batches),
            checkpoints,
            log,
            evaluation(stage, session, steps, batches.lengths),
            partial(start_from, stage.parent, steps) if stage.parent else None,
            flops(stage, batches.lengths),
        )
        train(steps, run, loop)
        agreed(lambda: None)  # the first process has written the last checkpoint
        trains(False)


def evaluation(
    stage: Stage, session: Session, steps: Steps, lengths: Lengths
) -> Callable[[State], dict[str, float]]:
    """Of pre-training the held-out loss; of tasks all metrics, the loss of targets, and the mean ``score``.

    The loss tells models apart that are too small to answer. The answers of each step are written.
    """
    prepared, mesh, size = session.prepared, session.mesh, stage.training.batch_size
    asked = RECIPES[stage.kind].questions(stage, prepared, mesh)
    texts = [questions for questions in asked if isinstance(questions.task, Task)]
    right = {x.task.name: right_answers(stage, prepared, mesh, x, lengths) for x in texts}
    # made at the first evaluation: tasks need none of it
    held_out = cache(partial(held_out_batches, stage.settings, prepared, mesh, 1, -(-WATCHED // size)))

    def evaluate(state: State) -> dict[str, float]:
        values = steps.evaluate(state, held_out()) if stage.kind == "pretrain" else {}
        for questions in asked:
            name = questions.task.name
            path = stage.folder / "predictions" / name / f"{int(state.step)}.jsonl"
            metrics = score_task(state.model, questions, steps.put, path)
            metrics |= {"loss": steps.evaluate(state, right[name])["loss"]} if name in right else {}
            values |= {f"{name}/{metric}": value for metric, value in metrics.items()}
        if asked:
            values["score"] = sum(values[f"{each.task.name}/score"] for each in asked) / len(asked)
        return values

    return evaluate


def best_scores(stage: Stage) -> dict[str, dict]:
    """``{task: its best checkpoint's step and scores}``."""
    tasks = tasks_of(stage)["validation"]
    return agreed(lambda: {task.name: best_of(task, stage.folder) for task in tasks}) if tasks else {}


def scores_together(models: Sequence[Stage], session: Session) -> dict[str, dict]:
    """The scores of the members' best models as an ensemble; its answers lie beside the members'."""
    first, mesh = models[0], session.mesh
    if not first.scored_on:
        return {}
    session.reporter.start(f"{len(models)} models together on {first.group}")
    ensemble, scores = Ensemble([cast(Transformer, trained(stage, mesh).model) for stage in models]), {}
    for questions in RECIPES[first.kind].questions(first, session.prepared, mesh):
        path = first.folder.parent / "predictions" / questions.task.name / "ensemble.jsonl"
        metrics = score_task(ensemble, questions, steps_of(first, mesh).put, path)
        scores[questions.task.name] = task_score(questions.task, first.training.steps, metrics)
    return scores


def length_losses(every: Sequence[Stage], session: Session) -> dict[str, float]:
    """The loss on held-out text in longer rows than those trained on, by how many times as long they are."""
    stage = next((stage for stage in every if stage.kind == "pretrain" and not stage.is_start), None)
    if stage is None or stage.settings.data.held_out_lengths == (1,):
        return {}
    steps, prepared = steps_of(stage, session.mesh), session.prepared
    state, losses = start_from(stage, steps), {}
    for times in stage.settings.data.held_out_lengths:
        batches = held_out_batches(stage.settings, prepared, session.mesh, times, COMPARED)
        losses[str(times)] = steps.evaluate(state, batches)["loss"]
    return losses

"""The composition root: trains the stages of an experiment, one from another, and scores what they learnt.

A run is a folder: ``settings.json`` says whose it is; ``finetuning/MIXTURE/`` holds checkpoints,
``metrics.jsonl``, ``run.json`` and predictions, as does the folder of its pre-training, which runs that
pre-train alike share; ``scores.json`` appears when all is done and names the folders.
"""

import os
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from functools import cache, partial
from itertools import groupby
from pathlib import Path
from typing import Any, cast

import jax

from experiments.processes.group import agreed, trains
from experiments.processes.place import wait
from experiments.processes.progress import NO_TOOLS, Reporter, Tools
from experiments.runs.checks import check
from experiments.runs.counted import COUNT_MODELS, counts_of, tagged_by
from experiments.runs.prepare import Half, HeldOutText, Prepared, held_out_text, rows_of_half, tasks_of
from experiments.runs.recipes import (
    RECIPES,
    checkpoints_of,
    held_out_batches,
    start_from,
    steps_of,
    trained,
    watched_batches,
)
from experiments.runs.result import recorded
from experiments.runs.scores import (
    best_of,
    reported,
    score_values,
    task_score,
    write_example_values,
    write_reported,
    write_scores,
)
from experiments.runs.session import (
    Session,
    ShownLog,
    check_origin,
    data,
    finished,
    flops,
    locked,
    train_vectors,
)
from experiments.runs.stages import COUNTS_FILE, Stage, save_settings, stages
from experiments.study.experiment import Experiment
from experiments.study.paths import home_of
from lm.config.base import SettingError
from lm.config.training import LoopConfig
from lm.data.tasks.labelled import AnyTask
from lm.evaluate.evaluator import score_task, write_predictions
from lm.evaluate.loglikelihood import Window, documents_log_prob
from lm.nn.ensemble import Ensemble
from lm.nn.transformer import Transformer
from lm.train.loop import Run, train
from lm.train.runtime import manifest
from lm.train.state import State
from lm.train.step import Steps, StepSpec

WATCHED = 512  # of held-out text, on which the loss of pre-training is watched [sequences]
COMPARED = 1_000  # of held-out text, at most, on which rows of different lengths are compared [batches]


def run(
    experiment: Experiment,
    folder: Path,
    cache: Path,
    reporter: Reporter,
    allow: frozenset[str] = frozenset(),
    tools: Tools = NO_TOOLS,
) -> None:
    """Train and score the run in ``folder``, from where it stopped; SettingError before anything compiles.

    ``allow``: which of origin.ORIGINS may have changed since it was started.
    """
    prepared, mesh = check(experiment, folder, cache, reporter.say, allow)
    if jax.process_index() == 0:  # from now on the folder is this run's
        save_settings(folder, experiment)
    home = home_of(folder, cache)
    title = os.path.relpath(folder.resolve(), home).replace("/", ".")[-200:]  # a file's name has 255 at most
    session = Session(prepared, mesh, reporter, allow, title, tools)
    every = stages(experiment, folder, home)
    scores: dict[str, dict] = {}
    branches: dict[str, dict[str, dict]] = {}
    for _, group in groupby(every, lambda stage: stage.group):
        models = list(group)
        with unless_deleted(folder):
            fit(models, session)
        found = reported_scores(models, session)
        scores |= found if models[0].is_main else {}
        for step, at_step in scores_by_step(models[0], found, session).items():
            for task, score in at_step.items():
                branches.setdefault(task, {})[str(step)] = score
    longer = length_losses(every, session)
    if jax.process_index() == 0:
        pretrainings = [stage for stage in every if stage.kind == "pretrain"]
        spent = [(pretraining_flops(stage, prepared), stage.is_start) for stage in pretrainings]
        values = {
            "tasks": scores,
            "branches": branches,
            "length_losses": longer,
            "flops": sum(flops for flops, _ in spent),
            "start_flops": sum(flops for flops, is_start in spent if is_start),
            "parameters": model_size(experiment, every),
        }
        write_scores(folder, home, every, values)


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
        if (folder / "settings.json").exists():
            raise
        raise RunDeleted(
            f"the run's folder {folder} was deleted or moved while it trained; put it back, or run the same "
            "command to train it from the start"
        ) from error


def pretraining_flops(stage: Stage, prepared: Prepared) -> float:
    """Of all steps of a pre-training."""
    return flops(stage, RECIPES[stage.kind].batches(stage, prepared).lengths) * stage.training.steps


def fit(every: Iterable[Stage], session: Session) -> None:
    """Train what remains of each stage, in its folder, which no other run trains in meanwhile."""
    for stage in every:
        titles = {"pretrain": "start of pre-training" if stage.is_start else "pre-training"}
        titles |= {"vectors": "skip-gram", "count": f"counting for {stage.name}"}
        title = titles.get(stage.kind, f"fine-tuning on {stage.group}")
        session.reporter.start(title, "" if stage.kind == "count" else "preparing data, compiling")
        with locked(stage.folder, session.reporter):
            is_finished = finished(stage.folder, stage.training.steps)
            agreed(partial(check_origin, stage, session, is_finished))
            if is_finished:
                session.reporter.advance(stage.training.steps)
            elif stage.kind == "count":
                _count(stage, session)
            elif stage.kind == "vectors":
                train_vectors(stage, session, steps_of(stage, session.mesh), checkpoints_of(stage))
            else:
                _train(stage, session)


def _train(stage: Stage, session: Session) -> None:
    steps, training = steps_of(stage, session.mesh), stage.training
    batches = RECIPES[stage.kind].batches(stage, session.prepared)
    looks = stage.settings.pretraining.evaluate_every if stage.kind == "pretrain" else 0
    every, guard = (training.log_every, looks or training.save_every), stage.settings.guard
    patience, profile = wait("LM_STEP_TIMEOUT"), session.tools.steps
    loop = LoopConfig(training.steps, *every, "score", guard, patience, profile)
    with checkpoints_of(stage) as checkpoints, ShownLog(stage, session) as log:
        run = Run(
            stage.settings.seed,
            partial(data, stage, session, batches),
            checkpoints,
            log,
            evaluation(stage, session, steps),
            partial(start_from, stage.parent, steps, stage.parent_step) if stage.parent else None,
            flops(stage, batches.lengths),
        )
        train(steps, run, loop)
        agreed(lambda: None)  # the first process has written the last checkpoint
        trains(False)


def _count(stage: Stage, session: Session) -> None:
    """Count all that a stage reads, save it, and score it: as one step."""
    recipe, prepared = COUNT_MODELS[stage.settings.counts.model], session.prepared
    with ShownLog(stage, session) as log:
        log.start(0)
        began = time.perf_counter()
        model, tokens = recipe.estimate(stage, prepared)
        spent = {"seconds_per_step": time.perf_counter() - began, "tokens": float(tokens)}
        if jax.process_index() == 0:
            recipe.save(model, stage.folder / COUNTS_FILE)
        agreed(lambda: None)  # the first process has written the file
        log.write(stage.training.steps, "train", spent)
        log.write(stage.training.steps, "eval", recipe.evaluate(model, stage, prepared))
    session.reporter.advance(stage.training.steps)


def evaluation(stage: Stage, session: Session, steps: Steps) -> Callable[[State], dict[str, float]]:
    """Of pre-training the held-out loss; of tasks all metrics of the validation half, and their ``score``.

    More is better of every score here: of bits per byte it is less than 0. The answers of each step are
    written. Tasks are evaluated at checkpoints only, among which they choose; held-out text, by the loop,
    between them too.
    """
    prepared, mesh, training = session.prepared, session.mesh, stage.training
    asked = RECIPES[stage.kind].questions(stage, prepared, mesh, "validation")
    # made at the first evaluation: tasks need none of it
    most = -(-WATCHED // training.batch_size)
    held_out = cache(partial(watched_batches, stage.settings, prepared, mesh, most))
    text = cache(partial(held_out_text, stage.settings, prepared))

    def evaluate(state: State) -> dict[str, Any]:
        values: dict[str, Any] = {}
        if stage.kind == "pretrain":
            batches, reference = held_out()
            values = steps.evaluate(state, batches) | {"reference_loss": reference}
            values |= document_values(state, text(), stage.settings, steps)
        step = int(state.step)
        if step % training.save_every and step not in (*stage.branch_steps, training.steps):
            return values
        for questions in asked:
            path = answers_path(stage.folder, questions.task, step)
            metrics, _ = score_task(state.model, questions, steps.shard_batch, path)
            values |= score_values(questions.task, metrics)
        names = [f"{each.task.name}/score" for each in asked]
        if asked and values.keys() >= {*names}:
            values["score"] = sum(values[name] for name in names) / len(names)
        return values

    return evaluate


def document_values(
    state: State, text: HeldOutText, experiment: Experiment, steps: Steps
) -> dict[str, float]:
    """What is recorded of held-out documents, read in rows as long as in training, half of each context."""
    if not text.documents:
        return {}
    length = experiment.data.inputs_length
    model, window = cast(Transformer, state.model), Window(length, -(-length // 2))
    log_prob = documents_log_prob(model, text.documents, window, text.eos, steps.shard_batch)
    return recorded(text.likelihood(log_prob))


def answers_path(folder: Path, task: AnyTask, step: int | str) -> Path:
    """The file of a model's answers to a task, in the folder of its stage."""
    return folder / "predictions" / task.name / f"{step}.jsonl"


def reported_scores(models: Sequence[Stage], session: Session) -> dict[str, dict]:
    """``{task: scores}`` of the models of a group, which answer together if they are several."""
    if not tasks_of(models[0])["validation"]:
        return {}
    if models[0].kind == "count":
        return scores_of_counts(models[0], session)
    return scores_alone(models[0], session) if len(models) == 1 else scores_together(models, session)


def scores_by_step(stage: Stage, scores: dict[str, dict], session: Session) -> dict[int, dict[str, dict]]:
    """The ``scores`` of a stage by the steps of pre-training behind them; nothing of a run without branches.

    A pre-training that is scored itself is scored at each of its branches.
    """
    if len(stage.settings.tuning.branches) == 1 or not scores:
        return {}
    if stage.kind != "pretrain":
        return {} if stage.parent_step is None else {stage.parent_step: scores}
    earlier = {step: scores_alone(stage, session, step) for step in stage.branch_steps[:-1]}
    return earlier | {stage.training.steps: scores}


def scores_alone(stage: Stage, session: Session, at: int | None = None) -> dict[str, dict]:
    """The best checkpoint by the mean score of the validation halves, scored once on the report halves.

    A task that has no report half has the score of the best checkpoint by its own, as in the paper. With
    ``at`` it is the checkpoint of that step, whose answers lie in a folder of their own.
    """
    tasks, folder = tasks_of(stage), stage.folder
    answers = folder if at is None else folder / f"at-{at}"
    scores = agreed(
        lambda: {task.name: best_of(task, folder, at) for task in tasks["validation"] if not task.report}
    )
    if tasks["report"]:
        step = at or agreed(lambda: best_step(folder / "checkpoints"))
        kept = agreed(lambda: reported(answers))
        if kept.get("step") != step:
            model = trained(stage, session.mesh, step).model
            kept = {"step": step, "tasks": scores_on("report", model, stage, session, (answers, step))}
            if jax.process_index() == 0:
                write_reported(answers, kept)
        scores |= kept["tasks"]
    return scores


def best_step(checkpoints: Path) -> int:
    """Return the step whose checkpoint has the highest mean score, or the last where none is defined."""
    saved = manifest.manifests(checkpoints)
    return manifest.best(saved, name="score", kind="highest") or max(saved)


def scores_of_counts(stage: Stage, session: Session) -> dict[str, dict]:
    """The scores of a tagger on the report half or, where there is none, on the validation half."""
    model, step, scores = counts_of(stage), stage.training.steps, {}
    for task in cast(list[AnyTask], tasks_of(stage)["validation"]):
        rows = rows_of_half(stage, session.prepared, task, "report" if task.report else "validation")
        answers = tagged_by(model, stage, rows)
        if jax.process_index() == 0:
            write_predictions(answers_path(stage.folder, task, step), task, rows, answers)
        scores[task.name] = task_score(task, step, task.evaluate(rows, answers)) | {"rows": len(rows)}
    return scores


def model_size(experiment: Experiment, stages: Sequence[Stage]) -> int:
    """Parameters of the Transformer or, of a run of counts, how many numbers its models consist of."""
    counted = [COUNT_MODELS[experiment.counts.model].size(counts_of(x)) for x in stages if x.kind == "count"]
    shapes = jax.eval_shape(StepSpec(experiment.model).make_model, jax.random.key(0))
    return sum(counted) or sum(leaf.size for leaf in jax.tree.leaves(shapes))


def scores_together(models: Sequence[Stage], session: Session) -> dict[str, dict]:
    """The scores of the members' best models as an ensemble; its answers lie beside the members'."""
    stage, mesh = models[0], session.mesh
    session.reporter.start(f"{len(models)} models together on {stage.group}")
    ensemble = Ensemble([cast(Transformer, trained(member, mesh).model) for member in models])
    place = (stage.folder.parent, stage.training.steps)
    return scores_on("validation", ensemble, stage, session, place) | scores_on(
        "report", ensemble, stage, session, place
    )


def scores_on(
    half: Half, model: Any, stage: Stage, session: Session, place: tuple[Path, int]
) -> dict[str, dict]:
    """The scores of a model on one half of the tasks of its stage, ``validation`` where they have no other.

    ``place``: the folder for its answers and values of single rows, and its step.
    """
    (folder, step), scores = place, {}
    name = "ensemble" if isinstance(model, Ensemble) else step
    put = steps_of(stage, session.mesh).shard_batch
    for questions in RECIPES[stage.kind].questions(stage, session.prepared, session.mesh, half):
        task = questions.task
        if half == "report" or not task.report:
            metrics, values = score_task(model, questions, put, answers_path(folder, task, name))
            scores[task.name] = task_score(task, step, metrics) | {"rows": questions.size}
            scores[task.name] |= {"answered": len(questions.rows)}
            if half == "report" and values and jax.process_index() == 0:
                scores[task.name]["examples"] = write_example_values(folder, task.name, values)
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

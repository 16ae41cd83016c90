"""The composition root: builds mesh, data, optimiser and log for one experiment, and trains, fine-tunes and scores it.

A run is a folder: ``settings.json`` says whose it is; ``pretraining/`` and ``finetuning/MIXTURE/`` hold checkpoints,
``metrics.jsonl`` and ``run.json``; ``scores.json`` appears when all is done.
"""

import json
import tempfile
from collections.abc import Callable, Iterable, Iterator
from dataclasses import asdict, replace
from functools import partial
from pathlib import Path

import jax

from experiments.experiment import Experiment, PhaseConfig
from experiments.prepare import Encoded, Prepared, prepare, pretraining_batches, tuning_lengths
from experiments.progress import Reporter
from experiments.results import check_settings
from lm import sharding
from lm.config import SettingError, to_json
from lm.data import pipeline
from lm.data.mixtures import mixture, proportional
from lm.data.objectives import Lengths
from lm.data.packing import row_length
from lm.evaluate.score import Questions, score
from lm.train.checkpoints import Checkpoints
from lm.train.config import CheckpointConfig, LoopConfig, LossConfig
from lm.train.log import Log, records, replace_file
from lm.train.loop import train
from lm.train.state import State
from lm.train.step import Steps, build
from lm.train.throughput import step_flops

VALIDATION_BATCHES = 8  # of held-out text, on which the loss of pre-training is watched [batches]


def run(experiment: Experiment, folder: Path, cache: Path, reporter: Reporter) -> None:
    """Bring the run in ``folder`` to its end from wherever it is; SettingError before anything compiles."""
    prepared, mesh = check(experiment, folder, cache, reporter.say)
    pretrained = pretrain(experiment, prepared, mesh, folder / "pretraining", reporter)
    best, mixtures = {}, experiment.tuning.mixtures if experiment.finetuning.steps else ()
    for name in mixtures:
        best |= finetune(experiment, prepared, mesh, pretrained, name, folder / "finetuning" / name, cache, reporter)
    if jax.process_index() == 0:
        phases = [folder / "pretraining", *(folder / "finetuning" / name for name in mixtures)]
        found = {"columns": columns(best), "tasks": best, "held_out_loss": held_out_loss(phases[0]), **cost(phases)}
        replace_file(folder / "scores.json", json.dumps(found, indent=1) + "\n")


def check(
    experiment: Experiment, folder: Path, cache: Path, say: Callable[[str], object]
) -> tuple[Prepared, jax.sharding.Mesh]:
    """Data and mesh of a run that can be started in ``folder``, which is then its own."""
    sizes = experiment.mesh.sizes(jax.device_count())
    for phase in (experiment.pretraining, experiment.finetuning):
        sharding.check(experiment.model, sizes, phase.batch_size, phase.microbatches)
    check_folder(experiment, folder, cache)
    prepared = prepare(experiment, cache, say)
    pretraining_batches(experiment, prepared, "train")  # checks objective and lengths against the architecture
    folder.mkdir(parents=True, exist_ok=True)
    replace_file(folder / "settings.json", to_json(experiment) + "\n")
    return prepared, sharding.make_mesh(experiment.mesh)


def check_folder(experiment: Experiment, folder: Path, cache: Path) -> None:
    """SettingError if ``folder`` is another experiment's, or nothing can be written beside it."""
    check_settings(experiment, folder)
    try:
        cache.mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryFile(dir=cache):
            pass
    except OSError as error:
        raise SettingError(f"--runs: {cache} cannot be written to ({error.strerror}); choose another folder") from error


def pretrain(
    experiment: Experiment, prepared: Prepared, mesh: jax.sharding.Mesh, folder: Path, reporter: Reporter
) -> Callable[[Steps], State] | None:
    """Pre-train to the end; a function that gives the result as the first state of other steps, None without any."""
    phase, source = experiment.pretraining, pretraining_batches(experiment, prepared, "train")
    if not phase.steps:
        return None
    reporter.start("pre-training")
    steps = trained = steps_of(experiment, phase, mesh)
    index, count = sharding.shard_of_batch(mesh, phase.batch_size)
    held_out = pretraining_batches(experiment, prepared, "validation")
    held_out = list(
        pipeline.stream(
            held_out, 0, VALIDATION_BATCHES, batch_size=phase.batch_size, process_index=index, process_count=count
        )
    )
    with Checkpoints(folder / "checkpoints", CheckpointConfig(every=phase.save_every)) as checkpoints:
        fit(experiment, phase, steps, source, source.limits, checkpoints, folder, reporter,
            evaluate=lambda state: steps.evaluate(state, held_out))  # fmt: skip

    def initial(steps: Steps) -> State:
        with Checkpoints(folder / "checkpoints", CheckpointConfig(every=phase.save_every)) as checkpoints:
            fresh = steps.init(experiment.seed)
            if sharding.named(steps.abstract).keys() != sharding.named(trained.abstract).keys():
                return checkpoints.restore_model(fresh)  # another optimiser, which remembers other things
            return replace(checkpoints.restore(steps.abstract), step=fresh.step)

    return initial


def finetune(
    experiment: Experiment,
    prepared: Prepared,
    mesh: jax.sharding.Mesh,
    pretrained: Callable[[Steps], State] | None,
    name: str,
    folder: Path,
    cache: Path,
    reporter: Reporter,
) -> dict[str, dict]:
    """Fine-tune on one mixture to the end; ``{task: its best checkpoint's step, score and metrics}``.

    As in T5 the optimiser's memory comes along from pre-training; steps count from 0 again.
    """
    phase, lengths = experiment.finetuning, tuning_lengths(experiment, name)
    reporter.start(f"fine-tuning on {name}")
    steps = steps_of(experiment, phase, mesh)
    examples = {t.name: Encoded(t, t.rows("train", cache), prepared.vocabulary) for t in mixture(name)}
    batches = pipeline.task_batches(
        examples,
        proportional({task: len(rows) for task, rows in examples.items()}, experiment.tuning.examples_limit),
        architecture=experiment.model.architecture,
        lengths=lengths,
        batch_size=phase.batch_size,
        seed=experiment.seed,
    )
    asked = [questions(experiment, task, prepared, name, mesh, cache) for task in mixture(name)]

    def evaluate(state: State) -> dict[str, float]:
        model, step, found = state.model, int(state.step), {}
        for each in asked:
            path = folder / "predictions" / each.task.name / f"{step}.jsonl"
            metrics = score(model, each, steps.put, prepared.vocabulary.decode, path)
            found |= {f"{each.task.name}/{metric}": value for metric, value in metrics.items()}
        return found | {"score": sum(found[f"{each.task.name}/score"] for each in asked) / len(asked)}

    config = CheckpointConfig(every=phase.save_every, keep=1, best="highest")
    with Checkpoints(folder / "checkpoints", config) as checkpoints:
        fit(experiment, phase, steps, batches, lengths, checkpoints, folder, reporter, evaluate,
            initial=pretrained and partial(pretrained, steps))  # fmt: skip
    return {each.task.name: best_of(each, folder) for each in asked}


def fit(
    experiment: Experiment,
    phase: PhaseConfig,
    steps: Steps,
    batches: pipeline.BatchFunction,
    lengths: Lengths,
    checkpoints: Checkpoints,
    folder: Path,
    reporter: Reporter,
    evaluate: Callable[[State], dict[str, float]],
    initial: Callable[[], State] | None = None,
) -> None:
    """Train one phase to its end, wherever it is now."""
    index, count = sharding.shard_of_batch(steps.mesh, phase.batch_size)

    def data(start: int) -> Iterator[pipeline.Batch]:
        reporter.advance(start)
        stream = pipeline.stream(
            batches, start, phase.steps, batch_size=phase.batch_size, process_index=index, process_count=count,
            workers=experiment.data.workers,
        )  # fmt: skip
        return counted(stream, reporter)

    config = LoopConfig(phase.steps, phase.log_every, evaluate_every=phase.save_every, score="score")
    flops = step_flops(
        experiment.model, phase.batch_size, lengths.inputs, row_length(experiment.model.architecture, lengths)
    )
    with ShownLog(folder, asdict(experiment), reporter) as log:
        train(steps, experiment.seed, data, checkpoints, log, evaluate, config, initial, flops)


def counted(stream: Iterable, reporter: Reporter) -> Iterator:
    """``stream``, and every item of it as a step of progress."""
    for item in stream:
        yield item
        reporter.advance(1)


class ShownLog(Log):
    """A log whose newest loss is seen on the terminal too."""

    def __init__(self, folder: Path, settings: dict, reporter: Reporter):
        super().__init__(folder, settings)
        self._reporter = reporter

    def write(self, step: int, kind: str, values: dict[str, float]) -> None:
        super().write(step, kind, values)
        if "loss" in values:
            self._reporter.advance(0, f"{'loss' if kind == 'train' else 'held-out loss'} {values['loss']:.3f}")


def steps_of(experiment: Experiment, phase: PhaseConfig, mesh: jax.sharding.Mesh) -> Steps:
    return build(experiment.model, phase.optimizer, LossConfig(), mesh, phase.microbatches)


def questions(
    experiment: Experiment, task, prepared: Prepared, name: str, mesh: jax.sharding.Mesh, cache: Path
) -> Questions:
    """The validation rows of a task, as prompts in batches."""
    rows = task.rows("validation", cache)
    limit = experiment.tuning.evaluation_examples or len(rows)
    rows = [rows[place] for place in range(min(limit, len(rows)))]
    prompts = [(prepared.vocabulary.encode(task.to_text(row)[0]), ()) for row in rows]
    lengths, size = tuning_lengths(experiment, name), experiment.finetuning.batch_size
    architecture = experiment.model.architecture
    batches = pipeline.eval_batches(
        prompts, architecture=architecture, lengths=lengths._replace(targets=1), batch_size=size
    )
    index, count = sharding.shard_of_batch(mesh, size)
    mine = slice(index * size // count, (index + 1) * size // count)
    batches = [{feature: values[mine] for feature, values in batch.items()} for batch in batches]
    return Questions(task, rows, batches, lengths.targets)


def best_of(asked: Questions, folder: Path) -> dict:
    """The best evaluation of a task, as the paper reports it: every task by its own checkpoint."""
    name = asked.task.name
    best = max((r for r in records(folder) if r["kind"] == "eval"), key=lambda record: record[f"{name}/score"])
    metrics = {key.split("/")[1]: value for key, value in best.items() if key.startswith(f"{name}/")}
    counting = [metric for metric in asked.task.metrics if metric not in asked.task.beside]
    return {
        "column": asked.task.column,
        "metric": " and ".join(counting),
        "step": best["step"],
        "score": metrics.pop("score"),
        "metrics": metrics,
    }


def columns(best: dict[str, dict]) -> dict[str, float]:
    """The paper's columns: the mean over the tasks of each."""
    found: dict[str, list[float]] = {}
    for task in best.values():
        found.setdefault(task["column"], []).append(task["score"])
    return {column: sum(scores) / len(scores) for column, scores in found.items()}


def held_out_loss(pretraining: Path) -> float | None:
    """Of the last state of pre-training, nats a target token; None without pre-training."""
    return next((r["loss"] for r in reversed(records(pretraining)) if r["kind"] == "eval"), None)


def cost(phases: list[Path]) -> dict[str, float]:
    """Seconds of training, compilation and evaluation left out, and the target tokens learnt from."""
    seconds = tokens = 0.0
    for phase in phases:
        before = 0
        for record in records(phase):
            if record["kind"] == "train":
                done, before = record["step"] - before, record["step"]
                seconds += record.get("seconds_per_step", 0.0) * done
                tokens += record["tokens"] * done
    return {"seconds": seconds, "tokens": int(tokens)}


def cache_of(folder: Path) -> Path:
    """The cache beside a run's folder: that of the folder ``runs`` it lies in."""
    return next((up / "cache" for up in folder.resolve().parents if (up / "cache").is_dir()), Path("runs") / "cache")

"""The composition root: builds mesh, data, optimiser and log for one experiment, and trains, fine-tunes and
scores it.

A run is a folder: ``settings.json`` says whose it is; ``finetuning/MIXTURE/`` holds checkpoints,
``metrics.jsonl``, ``run.json`` and predictions, as does the folder of its pre-training, which runs that
pre-train alike share; ``scores.json`` appears when all is done and names the folders.
"""

import os
from collections.abc import Sequence
from dataclasses import replace
from functools import cache, partial
from itertools import groupby
from pathlib import Path

import jax

from experiments.processes.group import agreed
from experiments.runs.checks import check
from experiments.runs.finetuning import answer_together, best_of, evaluation, finetune
from experiments.runs.finetuning import asked as asked_of
from experiments.runs.phase import Phase, Session, Start, checkpoints_of, fit
from experiments.runs.prepare import fingerprints, mixed_batches, pretraining_batches
from experiments.runs.progress import Reporter
from experiments.runs.result import write_result
from experiments.runs.stages import Stage, home_of, save_settings, stages
from experiments.study.experiment import Experiment
from lm import sharding
from lm.data.batches import Batch, stream
from lm.data.tasks.mixtures import mixture
from lm.nn.composed import BODY, DISCRIMINATOR, Electra
from lm.nn.config import ModelConfig
from lm.train.checkpoints import Checkpoints
from lm.train.log import records
from lm.train.losses import masked_lm, replaced_tokens
from lm.train.state import State
from lm.train.step import Steps, StepSpec, build

WATCHED = 512  # of held-out text, on which the loss of pre-training is watched [sequences]
COMPARED = 1_000  # of held-out text, at most, on which rows of different lengths are compared [batches]


def run(
    experiment: Experiment, folder: Path, cache: Path, reporter: Reporter, allow: frozenset[str] = frozenset()
) -> None:
    """Bring the run in ``folder`` to its end from wherever it is; SettingError before anything compiles.

    ``allow``: which of origin.ORIGINS may have changed since it was begun.
    """
    prepared, mesh = check(experiment, folder, cache, reporter.say, allow)
    claim(experiment, folder)

    home = home_of(folder, cache)
    title = os.path.relpath(folder.resolve(), home).replace("/", ".")
    todo = stages(experiment, folder, home)

    def session(settings: Experiment) -> Session:
        return Session(settings, prepared, mesh, cache, reporter, allow, title)

    starts, best = {}, {}
    for stage in (stage for stage in todo if stage.kind == "pretrain"):
        starts[stage] = pretrain(session(stage.settings), stage)
        for task in (task for name in stage.scored_on for task in mixture(name).evaluated):
            best[task.name] = agreed(partial(best_of, task, stage.folder))
    for name, group in groupby((stage for stage in todo if stage.kind != "pretrain"), lambda s: s.group):
        team = list(group)
        sessions = [session(stage.settings) for stage in team]
        for each, stage in zip(sessions, team, strict=True):
            scores = finetune(each, starts.get(stage.parent), stage)
        best |= scores if len(team) == 1 else answer_together(sessions, name, [s.folder for s in team])
    longer = length_losses(session(experiment), next(iter(starts.values()), None))
    if jax.process_index() == 0:
        write_scores(folder, home, todo, {"tasks": best, "length_losses": longer})


def claim(experiment: Experiment, folder: Path) -> None:
    """The folder is this run's from now on."""
    if jax.process_index() == 0:
        save_settings(folder, experiment)


def write_scores(folder: Path, home: Path, trained: Sequence[Stage], found: dict) -> None:
    """What the run came to, and where its stages lie, from the scale's folder."""
    places = {stage.name: stage.folder for stage in trained}
    losses = [held_out_loss(stage.folder) for stage in trained if stage.kind == "pretrain"]
    found |= {"columns": columns(found["tasks"]), "held_out_loss": next(iter(losses), None)}
    found |= cost(list(dict.fromkeys(places.values())))
    found["phases"] = {name: os.path.relpath(place.resolve(), home) for name, place in places.items()}
    found["records"] = {name: len(records(place)) for name, place in places.items()}
    write_result(folder, found)


def pretrain(session: Session, stage: Stage) -> Start:
    """Pre-train to the end; what gives the first state of other steps."""
    session.reporter.start("pre-training")
    with checkpoints_of(session.experiment, session.experiment.pretraining, stage.folder) as checkpoints:
        fit(pretraining(session, stage, checkpoints))
    return partial(pretrained, session, stage.folder)


def pretraining(session: Session, stage: Stage, checkpoints: Checkpoints) -> Phase:
    """On the corpus, on tasks or on both; scored on the tasks if it is not fine-tuned on them."""
    experiment, config = session.experiment, session.experiment.pretraining
    steps, batches = (
        steps_of(experiment, session.mesh),
        pretraining_batches(experiment, session.prepared, "train"),
    )
    # if it is trained
    held_out = cache(partial(validation_batches, session, 1, -(-WATCHED // config.batch_size)))
    lengths, scores = batches.lengths, None
    if experiment.mixing.pretraining != "corpus":
        batches = mixed_batches(experiment, session.prepared, session.cache)
        lengths = batches.lengths
        if stage.scored_on:
            scores = evaluation(session, asked_of(session, stage.scored_on), lengths, steps, stage.folder)
    return Phase(
        session,
        config,
        steps,
        batches,
        lengths,
        checkpoints,
        lambda state: steps.evaluate(state, held_out()) | (scores(state) if scores else {}),
        fingerprints(stage, session.cache),
        settings=stage.decisive,
    )


def pretrained(session: Session, folder: Path, steps: Steps) -> State:
    """What pre-training in ``folder`` came to, as the first state of other steps."""
    experiment, trained = session.experiment, steps_of(session.experiment, session.mesh)
    last = experiment.pretraining.steps
    with checkpoints_of(experiment, experiment.pretraining, folder) as checkpoints:
        fresh = steps.init(experiment.seed)
        if sharding.named(steps.abstract).keys() == sharding.named(trained.abstract).keys():
            return replace(checkpoints.restore(steps.abstract, last), step=fresh.step, guard=fresh.guard)
        # another optimiser, which remembers other things, or a model with a head
        return checkpoints.restore_model(fresh, last, partial(_source, frozenset(trained.abstract.params)))


def _source(pretrained: frozenset[str], name: str) -> str | None:
    """The pre-trained parameter that parameter ``name`` begins with; None: there is none, it is new."""
    bare = name.removeprefix(BODY)
    return next((found for found in (name, bare, DISCRIMINATOR + bare) if found in pretrained), None)


def validation_batches(session: Session, times: int, most: int) -> list[Batch]:
    """This process's parts of ``most`` held-out batches or of all, in rows ``times`` as long as in
    training.
    """
    experiment, shards = session.experiment, sharding.batch_parts(session.mesh.shape)
    rows = -(-experiment.pretraining.batch_size // (times * shards)) * shards  # some for every device
    batches = pretraining_batches(experiment, session.prepared, "validation", times, rows)
    most = min(most, max(len(batches.rows.corpus.segments.starts) // rows, 1))
    return list(stream(batches, 0, most, rows=sharding.rows_of_process(session.mesh, rows)))


def length_losses(session: Session, pretrained: Start | None) -> dict[str, float]:
    """The loss on held-out text in longer rows than those trained on, by how many times as long they are."""
    lengths = session.experiment.data.held_out_lengths
    if lengths == (1,) or pretrained is None:
        return {}
    steps = steps_of(session.experiment, session.mesh)
    state = pretrained(steps)
    held_out = {times: validation_batches(session, times, COMPARED) for times in lengths}
    return {str(times): steps.evaluate(state, batches)["loss"] for times, batches in held_out.items()}


def steps_of(experiment: Experiment, mesh: jax.sharding.Mesh) -> Steps:
    """The steps of pre-training."""
    phase = experiment.pretraining
    spec = StepSpec(
        experiment.model, phase.optimizer, microbatches=phase.microbatches, guard=experiment.guard
    )
    if "replaced-token" in experiment.model.heads:
        spec = replace(spec, module=Electra, parts=(generator_of(experiment),), loss=replaced_tokens)
    elif experiment.model.architecture == "encoder":
        spec = replace(spec, loss=masked_lm)
    return build(spec, mesh)


def generator_of(experiment: Experiment) -> ModelConfig:
    """ELECTRA's generator: as deep as the model, ``generator_share`` as wide, with the model's embedding of
    tokens.
    """
    model, share = experiment.model, experiment.generator_share
    heads = max(int(model.num_heads * share), 1)
    return replace(
        model,
        d_embed=model.embed_width,
        d_model=heads * model.d_kv,
        d_ff=max(int(model.d_ff * share), 1),
        num_heads=heads,
        num_key_value_heads=None,
        logits="tied",
        logits_transform=True,
        logits_bias=True,
        heads=(),
    )


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

"""How each kind of stage is computed: one entry of RECIPES gives its step, its batches and its questions.

The step names the model, its loss and which parameters are trained; the questions are rows of tasks: the
validation rows, on which its checkpoints are scored, or the report rows, on which the chosen one is.
"""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from functools import partial
from typing import Any, NamedTuple, NoReturn, cast

import jax
import numpy as np
from jax.sharding import Mesh

from experiments.runs.prepare import (
    Half,
    Prepared,
    encoded_tasks,
    first,
    mixed_batches,
    pretraining_batches,
    reader_of,
    rows_of_half,
    tasks_of,
    training_batches,
    tuning_lengths,
)
from experiments.runs.stages import Stage
from experiments.study.experiment import Experiment
from lm import sharding
from lm.batch import Batch
from lm.config.base import SettingError, changes
from lm.config.model import HeadConfig
from lm.config.training import CheckpointConfig, Weights
from lm.data.batches import Batches, stream
from lm.data.classification import LabelledRows, labelled_eval_batches
from lm.data.content import unigram_baseline
from lm.data.seq2seq import MixtureRows, eval_batches
from lm.data.tasks.choices import encode_choices
from lm.data.tasks.labelled import AnyTask, LabelledTask, find_labelled
from lm.data.tasks.mixtures import mixing_rates, mixture
from lm.data.tasks.task import Row, Task
from lm.evaluate.evaluator import EvalTask
from lm.evaluate.generate import greedy
from lm.nn import electra, elmo, finetune
from lm.nn.transformer import Transformer
from lm.objectives.denoising import Lengths
from lm.special_tokens import boundary_tokens
from lm.tokenizers.tokenizer import Tokenizer
from lm.train import optimizers
from lm.train.losses import both_directions, labelled, masked_lm, replaced_tokens
from lm.train.runtime.checkpoints import CheckpointError, Checkpoints
from lm.train.state import State
from lm.train.step import Steps, StepSpec, build

UNIGRAMS = 2**22  # of the held-out text, at most, to know how frequent its pieces are [tokens]


class Recipe(NamedTuple):
    """How a kind of stage is computed."""

    step: Callable[[Stage], StepSpec]  # model, loss and what is trained
    batches: Callable[[Stage, Prepared], Batches]
    questions: Callable[[Stage, Prepared, Mesh, Half], list[EvalTask]]  # that its checkpoints are asked


# ---- the step


def pretraining_spec(experiment: Experiment) -> StepSpec:
    """The step of pre-training: of a language model, a masked one, or ELECTRA's or ELMo's pair of models."""
    model, training, guard = experiment.model, experiment.pretraining, experiment.guard
    frozen = experiment.vectors.embedding == "frozen"
    freeze = optimizers.freeze_embedding if frozen else optimizers.train_all
    parts, tbptt = training.microbatches, training.tbptt
    spec = StepSpec(model, training.optimizer, freeze=freeze, microbatches=parts, guard=guard, tbptt=tbptt)
    if "replaced-token" in model.heads:
        generator = electra.generator_config(model, experiment.generator_share)
        return replace(spec, module=electra.Electra, extra_configs=(generator,), loss=replaced_tokens)
    if "backward" in model.heads:
        return replace(spec, module=elmo.BidirectionalLM, loss=both_directions)
    return replace(spec, loss=masked_lm) if model.architecture == "encoder" else spec


def text_spec(experiment: Experiment) -> StepSpec:
    """The step of fine-tuning to answer in words: of all parameters, some first, adapters or LoRA alone."""
    model, training, adapters = experiment.model, experiment.finetuning, experiment.tuning.adapters
    lora = experiment.tuning.lora
    freeze: optimizers.Freeze = optimizers.train_all
    if adapters:
        freeze = optimizers.train_adapters
    elif lora.rank:
        freeze = optimizers.train_lora
    elif experiment.tuning.unfreezing == "gradual":
        freeze = optimizers.GradualUnfreezing(model, training.steps)
    model = changes(model, {"mlp.adapter_width": round(adapters * model.d_model), "lora": lora})
    parts, guard = training.microbatches, experiment.guard
    return StepSpec(model, training.optimizer, freeze=freeze, microbatches=parts, guard=guard)


def head_spec(experiment: Experiment, task: LabelledTask) -> StepSpec:
    """The step of fine-tuning with a new head for a labelled task, and the model below it."""
    spec, head = text_spec(experiment), head_config(experiment, task)
    freeze = optimizers.freeze_body if head.layers.endswith("frozen") else spec.freeze
    return replace(spec, loss=labelled, module=finetune.ModelWithHead, extra_configs=(head,), freeze=freeze)


def head_config(experiment: Experiment, task: LabelledTask) -> HeadConfig:
    """Return the settings of the head for a labelled task."""
    model, tuning = experiment.model, experiment.tuning
    pool = tuning.pool or ("last" if model.has_decoder else "first")
    # no position has read the text from both ends
    pool = "mean" if "backward" in model.heads and tuning.pool is None else pool
    return HeadConfig(kind=task.kind, classes=max(len(task.labels), 1), pool=pool, layers=tuning.layers)


def steps_of(stage: Stage, mesh: Mesh) -> Steps:
    """The compiled steps of a stage."""
    return build(RECIPES[stage.kind].step(stage), mesh)


# ---- the batches


def _pretraining_batches(stage: Stage, prepared: Prepared) -> Batches:
    settings, on = stage.settings, stage.on
    return mixed_batches(settings, on, prepared) if on else training_batches(settings, prepared)


def _no_batches(stage: Stage, _prepared: Prepared) -> NoReturn:
    raise SettingError(f"{stage.folder} is trained on all of the text at once, and not on batches")


def _text_batches(stage: Stage, prepared: Prepared) -> Batches:
    experiment, lengths = stage.settings, tuning_lengths(stage.settings, stage.on)
    examples = encoded_tasks(experiment, stage.on, prepared)
    sizes, limit = {task: len(rows) for task, rows in examples.items()}, experiment.tuning.examples_limit
    shares = mixing_rates(sizes, kind="proportional", limit=limit, temperature=1.0)
    boundary = boundary_tokens(experiment.model, prepared.vocabulary)
    rows = MixtureRows(examples, shares, experiment.model.architecture, lengths, experiment.seed, boundary)
    return Batches(rows, stage.training.batch_size)


def _head_batches(stage: Stage, prepared: Prepared) -> Batches:
    experiment, task = stage.settings, find_labelled(*stage.on)
    reader = reader_of(experiment, task, prepared.vocabulary)
    rows = task.rows("train", prepared.cache, experiment.data.corrupt_records)
    return Batches(LabelledRows(reader, rows, experiment.seed), stage.training.batch_size)


def held_out_batches(
    experiment: Experiment, prepared: Prepared, mesh: Mesh, times: int, most: int
) -> list[Batch]:
    """This process's parts of at most ``most`` batches of held-out text, in rows ``times`` as long."""
    batches, count = _held_out(experiment, prepared, mesh, times, most)
    return list(stream(batches, 0, count, rows=sharding.process_rows(mesh, batches.batch_size)))


def watched_batches(
    experiment: Experiment, prepared: Prepared, mesh: Mesh, most: int
) -> tuple[list[Batch], float]:
    """Those on which pre-training is watched, with the ``frequent_tokens`` of their content tokens, and the
    loss on these of a model that reads no context.
    """
    batches, count = _held_out(experiment, prepared, mesh, 1, most)
    size, every = batches.batch_size, list(stream(batches, 0, count))
    text = prepared.validation.first(UNIGRAMS).tokens
    reference, frequent = unigram_baseline(every, prepared.vocabulary, text)
    pieces = np.tile(frequent, (size, 1))
    return _of_process(mesh, size, [replace(batch, frequent_tokens=pieces) for batch in every]), reference


def _held_out(
    experiment: Experiment, prepared: Prepared, mesh: Mesh, times: int, most: int
) -> tuple[Batches, int]:
    """The batches of held-out text, and how many there are, at most ``most``."""
    shards = sharding.batch_shards(mesh.shape)
    # As many tokens as in training: ``times`` fewer rows, rounded up so that every device gets as many.
    rows = -(-experiment.pretraining.batch_size // (times * shards)) * shards
    batches = pretraining_batches(experiment, prepared, "validation", times, rows)
    return batches, max(batches.rows.rows_of_epoch(most * rows) // rows, 1)


# ---- the questions


def _text_questions(stage: Stage, prepared: Prepared, mesh: Mesh, half: Half) -> list[EvalTask]:
    return [
        _text_question(stage, prepared, mesh, task, half) for task in cast(list[Task], tasks_of(stage)[half])
    ]


def _text_question(stage: Stage, prepared: Prepared, mesh: Mesh, task: Task, half: Half) -> EvalTask:
    """Rows of a half, all measured; of the report half ``tuning.evaluation_examples`` are answered, of the
    other half those of tasks that count by answers, and at the branches of a run of those alone."""
    rows, most = rows_of_half(stage, prepared, task, half), stage.settings.tuning.evaluation_examples
    answers = task.measure == "score" or (half == "report" and stage.is_main)
    answered = first(rows, most) if answers else []
    length = max(mixture(name).targets_length for name in stage.scored_on if mixture(name).has(task.name))
    asked = questions(stage.settings, prepared.vocabulary, mesh, task, answered, length)
    lengths = (stage.settings.tuning.inputs_length, length)
    boundary = boundary_tokens(stage.settings.model, prepared.vocabulary)
    others = first(task.rows("validation", prepared.cache), most)
    choices = partial(encode_choices, task, tokenizer=prepared.vocabulary, lengths=lengths, boundary=boundary)
    if half == "validation":
        return replace(asked, choices=choices(others))
    chooses = task.candidates or task.candidate_inputs  # else nothing is to be fitted
    return replace(asked, choices=choices(rows), calibration=choices(others) if chooses else None)


def _head_questions(stage: Stage, prepared: Prepared, mesh: Mesh, half: Half) -> list[EvalTask]:
    length, asked = stage.settings.tuning.inputs_length, []
    for task in tasks_of(stage)[half]:
        rows = rows_of_half(stage, prepared, task, half)
        asked.append(questions(stage.settings, prepared.vocabulary, mesh, cast(AnyTask, task), rows, length))
    return asked


def questions(
    experiment: Experiment,
    vocabulary: Tokenizer,
    mesh: Mesh,
    task: AnyTask,
    rows: Sequence[Row],
    targets_length: int,
) -> EvalTask:
    """The questions of a task's ``rows``; answers in words have at most ``targets_length`` tokens."""
    length, size = experiment.tuning.inputs_length, experiment.finetuning.batch_size
    architecture = experiment.model.architecture
    output: Callable[[Any, Any], jax.Array]
    answer: Callable[[Row, np.ndarray], Any]
    if isinstance(task, LabelledTask):
        reader = reader_of(experiment, task, vocabulary)
        batches, output, answer = labelled_eval_batches(reader, rows, size), _head_output, reader.answer
    else:
        prompts = [(vocabulary.encode(task.to_text(row)[0]), ()) for row in rows]
        lengths = Lengths(raw=length, inputs=length, targets=1)
        boundary = boundary_tokens(experiment.model, vocabulary)
        batches = eval_batches(
            prompts, architecture=architecture, lengths=lengths, batch_size=size, boundary=boundary
        )
        output, answer = partial(greedy, max_length=targets_length), lambda row, ids: vocabulary.decode(ids)
    return EvalTask(task, rows, _of_process(mesh, size, batches), output, answer)


_head_output = jax.jit(finetune.ModelWithHead.__call__)  # model, batch -> what its head gives


def _of_process(mesh: Mesh, size: int, batches: Sequence[Batch]) -> list[Batch]:
    """This process's rows of global batches of ``size`` rows."""
    rows = np.concatenate([np.arange(size)[rows] for rows in sharding.process_rows(mesh, size)])
    return [batch.map(lambda values: values[rows]) for batch in batches]


def _no_network(stage: Stage, *_: object) -> NoReturn:
    name = stage.settings.counts.model
    raise SettingError(f"{stage.folder}: counts.model={name!r} is made of counts, and this needs a network")


RECIPES: Mapping[str, Recipe] = {
    "pretrain": Recipe(lambda stage: pretraining_spec(stage.settings), _pretraining_batches, _text_questions),
    "text": Recipe(lambda stage: text_spec(stage.settings), _text_batches, _text_questions),
    "head": Recipe(
        lambda stage: head_spec(stage.settings, find_labelled(*stage.on)), _head_batches, _head_questions
    ),
    "count": Recipe(_no_network, _no_network, _no_network),  # see experiments.runs.counted
    "vectors": Recipe(  # trained by session.train_vectors, not step by step
        lambda stage: StepSpec(stage.settings.model, module=elmo.SkipGramTables), _no_batches, lambda *_: []
    ),
}


# ---- what a stage has trained


def checkpoints_of(stage: Stage) -> Checkpoints:
    """Of a stage: the newest, the best by each score, those of branches, and one in every ``keep_hours``."""
    every, hours = stage.training.save_every, stage.training.keep_hours
    config = CheckpointConfig(every, best="highest", hours=hours, steps=stage.branch_steps)
    return Checkpoints(stage.folder / "checkpoints", config, stage.settings.guard)


def trained(stage: Stage, mesh: Mesh, step: int | None = None, weights: Weights = "scored") -> State:
    """The parameters after a stage, the best ones if it was scored; or those after ``step``."""
    return _restored(stage, steps_of(stage, mesh), "", step, weights)


def trained_body(stage: Stage, mesh: Mesh, weights: Weights = "scored") -> Transformer:
    """The Transformer after a stage, without a head or ELECTRA's generator; low-rank updates are merged."""
    state = _restored(stage, body_steps(stage, mesh), prefix_of(stage), weights=weights)
    return finetune.merge_lora(cast(Transformer, state.eval_model))


def trained_whole(stage: Stage, mesh: Mesh, weights: Weights = "scored") -> finetune.ModelWithHead:
    """The model after a stage of kind "head", with its head; low-rank updates are merged."""
    model = cast(finetune.ModelWithHead, trained(stage, mesh, weights=weights).eval_model)
    model.body = finetune.merge_lora(cast(Transformer, model.body))
    return model


def body_steps(stage: Stage, mesh: Mesh) -> Steps:
    """The steps of the Transformer alone, as ``lm generate`` and others use it."""
    return build(StepSpec(RECIPES[stage.kind].step(stage).model), mesh)


def prefix_of(stage: Stage) -> str:
    """What the names of the Transformer's parameters begin with in the checkpoints of a stage."""
    heads, tuned = stage.settings.model.heads, stage.kind == "head"
    inner = elmo.FORWARD if "backward" in heads and stage.kind != "text" else ""
    return finetune.BODY + inner if tuned else electra.DISCRIMINATOR if "replaced-token" in heads else inner


def _restored(
    stage: Stage, steps: Steps, prefix: str, step: int | None = None, weights: Weights = "scored"
) -> State:
    with Checkpoints(str(stage.folder / "checkpoints"), CheckpointConfig(best="highest")) as checkpoints:
        if not checkpoints.steps():
            raise SettingError(f"{stage.folder} has no checkpoint yet; train the run first")
        try:
            chosen = step or checkpoints.best()
            return checkpoints.restore_model(steps.abstract, chosen, lambda path: prefix + path, weights)
        except CheckpointError as error:
            raise SettingError(str(error)) from error


def start_from(parent: Stage, steps: Steps, step: int | None = None) -> State:
    """The first state of other steps, with what pre-training in ``parent`` has learnt by ``step`` or its end.

    As in T5 the optimiser's memory comes along, if it was trained here; steps count from 0 again.
    """
    last = step or parent.training.steps
    with checkpoints_of(parent) as checkpoints:
        fresh = steps.initial_state(parent.settings.seed)
        if parent.kind == "given":
            known = partial(finetune.source_parameter, checkpoints.parameters(last))
            return checkpoints.restore_model(fresh, last, known).warm_start(fresh)
        learnt = steps_of(parent, steps.mesh).abstract
        like = replace(steps.abstract, average=learnt.average, carry=learnt.carry)
        if sharding.named(like).keys() == sharding.named(learnt).keys():
            state = checkpoints.restore(like, last)
            assert state is not None, f"{parent.folder} has no checkpoint {last}"
            return state.warm_start(fresh)
        # another optimiser, which remembers other things, or a model with a head
        state = checkpoints.restore_model(
            fresh, last, partial(finetune.source_parameter, frozenset(learnt.params))
        )
        return state.warm_start(fresh)

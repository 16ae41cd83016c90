"""Checks a run's settings, data, devices and folder before anything compiles.

Every ``check_*`` function raises SettingError if something is wrong.
"""

import shutil
import tempfile
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import replace
from pathlib import Path

import jax
import numpy as np

from experiments.processes.cluster import broadcast_from_first, gathered
from experiments.runs import provenance
from experiments.runs.inputs import Inputs, check_repeated_streams, mixture_lengths, unique_tokens
from experiments.runs.kinds.answers import reader_of
from experiments.runs.kinds.finetuning import text_spec
from experiments.runs.kinds.head import HeadFinetuning, head_config
from experiments.runs.kinds.pretraining import (
    Pretraining,
    has_start_pretraining,
    pretraining_batches,
    teacher_checkpoint,
)
from experiments.runs.kinds.stage import Stage
from experiments.runs.paths import start_folder
from experiments.runs.phases import branch_step, mask_of, phase_model, renaming, tokens_of_text
from experiments.runs.result import check_settings
from experiments.runs.sources import Sources
from experiments.runs.stages import external_checkpoint
from experiments.study.entry_checks import check_mixer
from experiments.study.experiment import Experiment, PhaseConfig
from experiments.study.settings_diff import setting_changes
from lm import sharding
from lm.config.base import SettingError, check_numbers, leaves
from lm.config.model import RECURRENT, LoraConfig, ModelConfig
from lm.config.training import OptimizerConfig
from lm.data.batches import Batches, check_batch_size
from lm.data.checks import check_architecture, check_objective
from lm.data.corpus.spec import check_corpus_name, corpus_parts, is_documentation
from lm.data.corpus.token_cache import GIGABYTE, token_cache_bytes
from lm.data.documentation.pinned import OFFLINE
from lm.data.packing import row_length
from lm.data.tasks.labelled import find_labelled
from lm.data.tasks.mixtures import mixture
from lm.data.tasks.names import is_task_file
from lm.data.tasks.task import LabelledTask, Task
from lm.data.tasks.task_files import check_task_files
from lm.evaluate.loglikelihood import check_attention_mask
from lm.objectives.denoising import REPLACED, RESTORED, Lengths, Objective
from lm.special_tokens import boundary_tokens
from lm.tokenizers.sentencepiece import ByteTokenizer
from lm.tokenizers.tokenizer import Tokenizer
from lm.train.checks import check_host_rows, check_memory, check_mesh, check_rows, device_memory
from lm.train.mup import check_optimizer
from lm.train.runtime import manifest
from lm.train.runtime.records import packages
from lm.train.step import StepSpec


def check_experiment(experiment: Experiment, sources: Sources) -> None:
    """Raise SettingError for settings that are wrong for any data and any folder."""
    check_agreement(experiment)
    check_names(experiment, sources)
    sizes = check_devices(experiment, jax.device_count())
    check_device_memory(experiment, sizes)
    tasks_from_files(experiment)  # raises SettingError if a task file lacks a split
    check_mixer(experiment.model, experiment.data.inputs_length)


def check_devices(experiment: Experiment, devices: int) -> dict[str, int]:
    """Return ``{mesh axis: size}`` on so many devices.

    Raises SettingError for a mesh, a size of the model or a batch of training that cannot be split over them.
    """
    sizes = experiment.mesh.sizes(devices)
    phases: dict[str, PhaseConfig] = {}
    if pretrains(experiment):
        phases["pretraining."] = experiment.pretraining
    if finetunes(experiment) and (experiment.tuning.mixtures or experiment.tuning.heads):
        phases["finetuning."] = experiment.finetuning
    for prefix, training in phases.items():
        check_mesh(experiment.model, sizes, training.batch_size, training.microbatches, prefix)
    return sizes


def check_agreement(experiment: Experiment) -> None:
    """Raise SettingError for settings that contradict each other, whatever the machine."""
    check_numbers(experiment)
    if reads_corpus(experiment):
        for part in corpus_parts(experiment.data.corpus):
            check_corpus_name(part)
        check_repeated_streams(experiment)
    if pretrains(experiment):
        check_phases(experiment)
        check_heads(experiment)
    for name, optimizer in _optimizers(experiment).items():
        optimizer.check_decay_start(name)
    check_mup(experiment)
    check_mixing(experiment)
    check_tbptt(experiment)
    check_held_out_documents(experiment)
    check_counts(experiment)
    tuning = experiment.tuning
    if finetunes(experiment):
        check_scored_once(experiment)
    if finetunes(experiment) and tuning.mixtures:
        check_architecture(experiment.model.architecture, generates=True)
        check_output_matrix(experiment, f"tuning.mixtures={tuning.mixtures}")
        check_attention_mask(experiment.model)
        check_batch_size(experiment.finetuning.batch_size)


def _optimizers(experiment: Experiment) -> dict[str, OptimizerConfig]:
    """Return the optimisers that an experiment trains with, by the paths of their settings."""
    optimizers = {}
    if pretrains(experiment):
        optimizers["pretraining.optimizer"] = experiment.pretraining.optimizer
        for number, phase in enumerate(experiment.pretraining.phases):
            if phase.optimizer is not None:
                optimizers[f"pretraining.phases[{number}].optimizer"] = phase.optimizer
    if finetunes(experiment):
        optimizers["finetuning.optimizer"] = experiment.finetuning.optimizer
    return optimizers


def check_mup(experiment: Experiment) -> None:
    """Raise SettingError if a stage has an optimiser, or a head, for which our muP has no learning rates."""
    model, tuning = experiment.model, experiment.tuning
    if not model.mup.base:
        return
    for name, optimizer in _optimizers(experiment).items():
        check_optimizer(model, optimizer, name)
    if finetunes(experiment) and tuning.heads:
        raise SettingError(
            f"model.mup.base={model.mup.base} has no rule for the new heads of tuning.heads={tuning.heads}: "
            "leave them out, or set model.mup.base=0"
        )


def check_scored_once(experiment: Experiment) -> None:
    """Raise SettingError if two fine-tunings score tasks of the same name: a run has one score per task."""
    tuning = experiment.tuning
    scored_by: dict[str, str] = {}  # name of a task -> the mixture or head that scores it
    for name in (*tuning.mixtures, *tuning.heads):
        tasks = [find_labelled(name)] if name in tuning.heads else mixture(name).evaluated
        for task in tasks:
            other = scored_by.setdefault(task.name, name)
            if other != name:
                raise SettingError(
                    f"tuning.mixtures={tuning.mixtures}, tuning.heads={tuning.heads}: {other!r} and {name!r} "
                    f"both score a task called {task.name!r}, and a run has one score per task: leave one out"
                )


def reads_corpus(experiment: Experiment) -> bool:
    """Return whether the experiment pre-trains a network, or counts, on a corpus."""
    return experiment.pretraining.steps > 0 and experiment.mixing.pretraining != "tasks"


def pretrains(experiment: Experiment) -> bool:
    """Return whether the experiment pre-trains a network."""
    return experiment.pretraining.steps > 0 and experiment.counts.model == "none"


def finetunes(experiment: Experiment) -> bool:
    """Return whether the experiment fine-tunes a network."""
    return experiment.finetuning.steps > 0 and experiment.counts.model == "none"


def learns_mixtures(experiment: Experiment) -> bool:
    """Return whether a network learns ``tuning.mixtures``, in fine-tuning or in pre-training."""
    return experiment.finetuning.steps > 0 or experiment.mixing.pretraining != "corpus"


def check_inputs(
    experiment: Experiment, stages: Sequence[Stage], inputs: Inputs, say: Callable[[str], object]
) -> None:
    """Raise SettingError if the stages cannot be trained with these inputs on these devices.

    It also stores the training batches of each stage in ``inputs.batches``.
    """
    broadcast_from_first(
        lambda: check_task_files(tasks_from_files(experiment), inputs.cache, inputs.vocabulary, say)
    )
    check_same_on_all_processes(provenance_of_run(experiment, stages, inputs))
    broadcast_from_first(lambda: check_disk_space(experiment, inputs))
    for stage in stages:
        if (batches := stage.batches(inputs)) is not None:
            inputs.batches[stage.name] = batches
    tasks = task_lengths(experiment)
    check_lengths(experiment, tasks)
    if pretrains(experiment):
        for multiple in experiment.data.held_out_lengths:
            held_out = pretraining_batches(experiment, inputs, "validation", multiple).lengths
            check_lengths(experiment, [held_out, *tasks])
        check_held_out_text(experiment, pretraining_batches(experiment, inputs, "validation"))
    check_teacher_length(experiment, stages, inputs)
    for stage in stages:
        # the start, and phases before the last, whose scores are in no report
        if stage.is_pretraining and not stage.is_compared:
            check_heads(stage.settings)
            check_lengths(stage.settings, [inputs.batches[stage.name].lengths])
    check_answer_lengths(experiment, inputs.vocabulary)
    report_truncated_examples(stages, inputs, say)
    if finetunes(experiment):
        report_unexportable_heads(experiment, say)
    report_unexportable_model(experiment, say)
    mesh = sharding.make_mesh(experiment.mesh)
    check_memory(text_spec(experiment).model if finetunes(experiment) else experiment.model, mesh)


def report_truncated_examples(stages: Sequence[Stage], inputs: Inputs, say: Callable[[str], object]) -> None:
    """Report for each labelled task how many training examples are longer than ``tuning.inputs_length``.

    At most MEASURED_EXAMPLES, drawn at random, are read.
    """
    # by task, since each branch of pre-training is fine-tuned on the same rows
    tuned = {stage.task_names: stage for stage in stages if isinstance(stage, HeadFinetuning)}
    for stage in tuned.values():
        reader = reader_of(stage.settings, stage.task, inputs.vocabulary)
        examples = inputs.sources.rows(stage.task, "train")
        measured = np.random.default_rng(0).permutation(len(examples))[:MEASURED_EXAMPLES].tolist()
        truncated = sum(reader.is_cut(examples[index]) for index in measured)
        if truncated:
            share = f"{truncated / len(measured):.1%} of the"
            if len(measured) == len(examples):
                share = f"{truncated:,} of {len(examples):,}"
            say(
                f"{stage.task.name}: {share} training rows are longer than {reader.length} tokens and lose "
                "their end (--tuning.inputs_length)"
            )


def check_held_out_text(experiment: Experiment, batches: Batches) -> None:
    """Raise SettingError if the held-out text yields no example; the first evaluation would fail."""
    try:
        batches(0, slice(0, 1))
    except SettingError as error:
        hint = "add text, or give a file of held-out text (valid.txt)"
        if experiment.objective.pairs != "none":
            hint += ", or set objective.pairs=none"
        raise SettingError(f"held-out text: {error}; {hint}") from error


def check_device_memory(experiment: Experiment, sizes: Mapping[str, int]) -> None:
    """Raise SettingError if a batch does not fit in the memory of a device or, in long rows, of the host."""
    if experiment.counts.model != "none":
        return
    model, data, vectors = experiment.model, experiment.data, experiment.vectors
    training, tuning = experiment.pretraining, experiment.tuning
    multiples = data.held_out_lengths if training.steps else ()
    for multiple in multiples:
        named = f"data.inputs_length={data.inputs_length}, pretraining.batch_size={training.batch_size}"
        if multiple > 1:
            named += f", data.held_out_lengths={data.held_out_lengths}"
        check_rows(model, sizes, -(-training.batch_size // multiple), data.inputs_length * multiple, named)
    if training.steps and training.steps_per_row > 1:
        named = f"data.inputs_length={data.inputs_length}, pretraining.steps_per_row={training.steps_per_row}"
        # The host makes whole rows; a device gets one chunk of each.
        check_host_rows(training.batch_size, data.inputs_length * training.steps_per_row, named)
    if experiment.finetuning.steps and (tuning.mixtures or tuning.heads):
        rows = experiment.finetuning.batch_size
        named = f"tuning.inputs_length={tuning.inputs_length}, finetuning.batch_size={rows}"
        check_rows(model, sizes, rows, tuning.inputs_length, named)
    gathered_rows = 2 * vectors.window + vectors.negatives  # vectors of words around each centre
    floats_per_centre = gathered_rows * model.embed_width
    if not vectors.negatives:  # a full softmax: logits and probabilities of all words
        floats_per_centre += 2 * model.vocab_size
    needed = vectors.batch * floats_per_centre * 4 if vectors.epochs else 0
    available = device_memory()
    if needed > available:
        raise SettingError(
            f"vectors.batch={vectors.batch}, vectors.window={vectors.window} and vectors.negatives="
            f"{vectors.negatives} need {needed / 2**30:,.1f} GiB, and there are {available / 2**30:,.1f}"
        )


def check_disk_space(experiment: Experiment, inputs: Inputs) -> None:
    """Raise SettingError if the tokens that pre-training reads do not fit on the disk of the cache."""
    data, corpus, vocabulary = experiment.data, inputs.train, inputs.vocabulary
    bytes_per_token = 1 if isinstance(vocabulary, ByteTokenizer) else BYTES_PER_PIECE
    stored_tokens = sum(shard.size for shard in corpus.shards) // bytes_per_token
    read_tokens = unique_tokens(experiment) if data.repeats else tokens_of_text(experiment)
    needed = min(read_tokens, stored_tokens) * (2 if vocabulary.vocab_size <= 2**16 else 4)
    needed = min(needed, round(data.cache_size * GIGABYTE)) if data.cache_size else needed
    free = shutil.disk_usage(inputs.cache).free
    if needed > free and needed > free + token_cache_bytes(corpus.folder):
        raise SettingError(
            f"pre-training will keep {needed / GIGABYTE:,.0f} GB of encoded text in {corpus.folder}, where "
            f"{free / GIGABYTE:,.0f} GB are free: make room, use other --runs, or set data.cache_size"
        )


def check_names(experiment: Experiment, sources: Sources) -> None:
    """Raise SettingError for tasks, a corpus or a vocabulary that do not exist, before any is prepared."""
    data, tuning = experiment.data, experiment.tuning
    for name in tuning.mixtures:
        mixture(name)
    for name in tuning.heads:
        find_labelled(name)
    if data.vocabulary.endswith(".model") and not Path(data.vocabulary).is_file():
        raise SettingError(f"data.vocabulary={data.vocabulary!r} does not exist; name a .model file")
    if not reads_corpus(experiment):
        return
    for part in corpus_parts(data.corpus):
        # The built-in text is made later, before the tasks that are made from it.
        if not is_documentation(part) or part == OFFLINE:
            sources.corpus(part, "train")


def provenance_of_run(
    experiment: Experiment, stages: Sequence[Stage], inputs: Inputs
) -> provenance.Provenance:
    """Return all settings and data that this process would train the run with, finished stages included."""
    return {
        "settings": {path: str(value) for path, value in leaves(experiment)},
        "vocabulary": {"fingerprint": inputs.vocabulary.fingerprint},
        "data": {name: x for stage in stages for name, x in stage.data_fingerprints(inputs).items()},
        "code": provenance.code(),
        "packages": packages(),
    }


def check_same_on_all_processes(record: provenance.Provenance) -> None:
    """Raise SettingError on all processes if one of them would train with other inputs than process 0."""
    first, *others = gathered(record)
    lines = [
        f"\n  process {number}: {name}: {line}"
        for number, other in enumerate(others, 1)
        for name in provenance.PARTS
        for line in setting_changes(first[name], other[name])
    ]
    if lines:
        raise SettingError(f"all processes should train the same run; they differ in:{''.join(lines)}")


def task_lengths(experiment: Experiment) -> list[Lengths]:
    """Return the lengths of the sequences of each task or mixture that the run trains on."""
    tuning, lengths = experiment.tuning, []
    if learns_mixtures(experiment):
        lengths += [mixture_lengths(experiment, (name,)) for name in tuning.mixtures]
    if experiment.finetuning.steps and tuning.heads:
        lengths.append(Lengths(raw=tuning.inputs_length, inputs=tuning.inputs_length, targets=0))
    return lengths


def check_lengths(experiment: Experiment, lengths: Sequence[Lengths]) -> None:
    """Raise SettingError if the longest row is too long for the model, or if the mesh cannot split it.

    Learned positions and synthesizers limit the length.
    lengths: of the batches to check, on text and on tasks.
    """
    model = experiment.model
    rows = [max(length.inputs, row_length(model.architecture, length)) for length in lengths]
    if not rows:
        return
    longest = max(rows)
    sharding.check_length(longest, experiment.mesh.sizes(jax.device_count()))
    if model.has_max_length and longest > model.positions.max_length:
        raise SettingError(
            f"model.positions.max_length={model.positions.max_length} is less than the {longest} of the "
            "longest row: raise it, or lower data.inputs_length or tuning.inputs_length"
        )


MEASURED_EXAMPLES = 200  # of a labelled task, of which it is measured how many are truncated
BYTES_PER_PIECE = 4  # of text, about, for English and a vocabulary of 32,000 word pieces

NEEDED_HEADS = {  # (field, value) of an objective -> the heads of the model that compute its loss
    ("pairs", "next-sentence"): {"pooler", "next-sentence"},
    ("pairs", "next-single-sentence"): {"pooler", "next-sentence"},
    ("pairs", "sentence-order"): {"pooler", "sentence-order"},
    ("targets", "permuted"): {"query-stream"},
    ("targets", "replaced"): {"replaced-token"},
    ("targets", "replaced-at-masks"): {"replaced-token"},
    ("targets", "restored"): {"generator", "copy"},
    ("targets", "restored-at-masks"): {"generator"},
}
# head -> the module beside the model that it needs
MODULE_OF_HEAD = {"replaced-token": "generator", "generator": "generator", "backward": "backward"}
# head -> field of an objective -> values that train it
NEEDED_OBJECTIVES: dict[str, dict[str, tuple[str, ...]]] = {
    "replaced-token": {"targets": REPLACED},
    "generator": {"targets": RESTORED},
    "copy": {"targets": ("restored",)},
    "backward": {"noise": ("everything",), "inputs": ("drop",)},
    "query-stream": {"targets": ("permuted",)},
}


def _check_objective_of(phase: str, objective: Objective, model: ModelConfig) -> None:
    """Raise SettingError that names the phase if its objective does not suit its model."""
    try:
        check_objective(objective, model.architecture)
    except SettingError as error:
        raise SettingError(f"{phase}: {error}") from error


def check_phases(experiment: Experiment) -> None:
    """Raise SettingError for phases of pre-training whose objectives, masks or models do not agree."""
    pretraining, model = experiment.pretraining, experiment.model
    last = len(pretraining.phases)
    names = [f"pretraining.phases[{index}]" for index in range(last)]
    models = [phase_model(experiment, index) for index in range(last + 1)]
    objectives = [*(phase.objective for phase in pretraining.phases), experiment.objective]
    named_masks = [*(f"{name}.mask" for name in names), "pretraining.mask"]
    if has_start_pretraining(experiment):
        _check_objective_of("start", experiment.start.objective, models[0])
    for name, each, objective in zip(names, models[:-1], objectives[:-1], strict=True):
        _check_objective_of(name, objective, each)
    check_objective(objectives[-1], models[-1].architecture)
    for named, each, objective in zip(named_masks, models, objectives, strict=True):
        if each.architecture == "encoder" and not objective.has_inputs and not each.is_causal_encoder:
            raise SettingError(
                f"{named}={mask_of(each)!r} shows an encoder the tokens that it is to predict: a language "
                "model needs 'causal'"
            )
    if models[-1].has_decoder != model.has_decoder:
        raise SettingError(
            "pretraining.mask='bidirectional' turns the decoder that is fine-tuned into an encoder: set "
            "model.architecture='encoder', or leave that mask to pretraining.phases"
        )
    have_decoder = [each.has_decoder for each in models]
    if have_decoder != sorted(have_decoder):
        raise SettingError(
            "pretraining.phases with mask 'bidirectional', which train a decoder as an encoder, should come "
            "before the others"
        )
    becomes_decoder = have_decoder[0] != have_decoder[-1]
    if becomes_decoder and experiment.start.steps and not experiment.start.objective.is_mlm:
        raise SettingError(
            f"start.steps={experiment.start.steps} should be 0, or start.objective one of encoders, with "
            "pretraining.phases that begin with an encoder"
        )
    if becomes_decoder and (checkpoint := experiment.start.model):
        raise SettingError(
            f"pretraining.phases train an encoder first, and the checkpoint {checkpoint} is a decoder: leave "
            "mask 'bidirectional' out"
        )
    if becomes_decoder:
        check_same_parameters(models[0], models[-1])
        # models[0] is an encoder here, so at least one phase comes before the first that trains a decoder
        last_encoder_step = pretraining.phase_ends[have_decoder.index(True) - 1]
        early = [
            fraction
            for fraction in experiment.tuning.branches
            if branch_step(pretraining.steps, fraction) <= last_encoder_step
        ]
        if early and finetunes(experiment):
            raise SettingError(
                f"tuning.branches={experiment.tuning.branches} should not lie in phases that train an "
                f"encoder, as {early} do: a decoder is fine-tuned"
            )
    if pretraining.phases and (repeats := experiment.data.repeats):
        raise SettingError(
            f"data.repeats={repeats} cuts the text by the steps of one phase: it should be 0 with "
            "pretraining.phases"
        )
    if pretraining.phases and (mixing := experiment.mixing.pretraining) != "corpus":
        raise SettingError(f"mixing.pretraining={mixing!r} should be 'corpus' with pretraining.phases")


def check_same_parameters(one: ModelConfig, other: ModelConfig) -> None:
    """Raise SettingError if an encoder's parameters are not those of the decoder that it is turned into."""

    def shapes(config: ModelConfig, name_of: Callable[[str], str]) -> dict[str, tuple[int, ...]]:
        abstract = jax.eval_shape(StepSpec(config).make_model, jax.random.key(0))
        return {name_of(name): leaf.shape for name, leaf in sharding.named(abstract).items()}

    saved, needed = shapes(one, str), shapes(other, renaming(one, other))
    if differing := [name for name in {**saved, **needed} if saved.get(name) != needed.get(name)]:
        raise SettingError(
            f"pretraining.phases train an encoder, and it has other parameters than the decoder: "
            f"{', '.join(differing[:5])}; choose settings of model that both have alike"
        )


def check_heads(experiment: Experiment) -> None:
    """Raise SettingError if the objective does not fit the heads and the output matrix of the model."""
    objective, heads = experiment.objective, experiment.model.heads
    for (field, value), needed in NEEDED_HEADS.items():
        if getattr(objective, field) == value and not needed <= set(heads):
            message = (
                f"objective.{field}={value!r} needs {' and '.join(sorted(needed))} in model.heads={heads}"
            )
            if start := experiment.start.model:
                message += f", those of {start}; tune it as it is, or choose a row without"
            raise SettingError(message)
    if objective.targets in (*REPLACED, *RESTORED) and objective.pairs != "none":
        targets = f"objective.targets={objective.targets!r}"
        raise SettingError(f"objective.pairs={objective.pairs!r} should be 'none' with {targets}")
    for head, fields in NEEDED_OBJECTIVES.items():
        if head not in heads:
            continue
        for field, values in fields.items():
            if (found := getattr(objective, field)) not in values:
                expected = " or ".join(map(repr, values))
                raise SettingError(f"model.heads={heads} needs objective.{field}={expected}, not {found!r}")
    if objective.targets not in REPLACED and not experiment.start.model:
        check_output_matrix(experiment, f"objective.targets={objective.targets!r}")


def exported_model(experiment: Experiment) -> ModelConfig:
    """Return the settings of a fine-tuned model as it is exported: low-rank updates are merged."""
    return replace(text_spec(experiment).model, lora=LoraConfig())


def why_not_exportable(experiment: Experiment, task: LabelledTask) -> str:
    """Return why `lm convert export` cannot write the head for a task; "" if it can.

    If only the head cannot be written, the text says how to export the model without it.
    """
    from lm.convert import config_json, head_class_name  # slow to import: a tenth of a second

    model = exported_model(experiment)
    try:
        config_json(model)
    except SettingError as error:
        return str(error)  # the model below the head cannot be exported either
    try:
        head_class_name(model, head_config(experiment, task))
    except SettingError as error:
        return f"{error}; --head drop writes the model below it"
    return ""


def exported_heads(experiment: Experiment) -> Iterator[str]:
    """Yield a line for each head that `lm convert export` writes, with its class in transformers."""
    from lm.convert import SENTENCE_TRANSFORMER, head_class_name

    if not finetunes(experiment):
        return
    for name in experiment.tuning.heads:
        task = find_labelled(name)
        if why_not_exportable(experiment, task):
            continue
        found = head_class_name(exported_model(experiment), head_config(experiment, task))
        shown = "a folder of sentence-transformers" if found == SENTENCE_TRANSFORMER else found
        yield f"`lm convert export` will write the head for {name} as {shown}"


def report_unexportable_heads(experiment: Experiment, say: Callable[[str], object]) -> None:
    """Report the heads that `lm convert export` cannot write, in a line for each reason."""
    names_by_reason: dict[str, list[str]] = {}
    for name in experiment.tuning.heads:
        if reason := why_not_exportable(experiment, find_labelled(name)):
            names_by_reason.setdefault(reason, []).append(name)
    for reason, names in names_by_reason.items():
        say(
            f"the head for {', '.join(names)} is trained and scored, but `lm convert export` cannot write "
            f"it: {reason}"
        )


def report_unexportable_model(experiment: Experiment, say: Callable[[str], object]) -> None:
    """Report why `lm convert export` cannot write the network of a run that trains no new head."""
    from lm.convert import config_json
    from lm.convert.heads import with_tied_output

    tunes = finetunes(experiment)
    if experiment.counts.model != "none" or (tunes and experiment.tuning.heads):
        return
    model = exported_model(experiment) if tunes else experiment.model
    try:
        config_json(with_tied_output(model))
    except SettingError as error:
        say(f"`lm convert export` cannot write this model, which is trained and scored all the same: {error}")


def check_output_matrix(experiment: Experiment, needed_by: str) -> None:
    """Raise SettingError if the model has no output matrix.

    needed_by: the setting that needs one, for the message.
    """
    if experiment.model.output.logits == "none":
        raise SettingError(
            f"model.output.logits='none': this model has no output matrix, which {needed_by} needs"
        )


def check_mixing(experiment: Experiment) -> None:
    """Raise SettingError if mixing or the ensemble leaves a stage or a member with nothing to train on."""
    mixing, tuning, members = experiment.mixing.pretraining, experiment.tuning, experiment.ensemble.members
    leaves_one_out = mixing == "corpus+other-tasks"  # a pre-training for each task, on all others
    needed = 2 if leaves_one_out else 1
    if mixing != "corpus" and len(tuning.mixtures) < needed:
        raise SettingError(f"mixing.pretraining={mixing!r} needs {needed}+ tuning.mixtures={tuning.mixtures}")
    if mixing != "corpus" and not experiment.finetuning.steps and (leaves_one_out or members > 1):
        raise SettingError(
            f"mixing.pretraining={mixing!r}, ensemble.members={members} need finetuning.steps above 0"
        )
    if mixing != "corpus" and experiment.objective.mixture:
        raise SettingError(
            f"mixing.pretraining={mixing!r} mixes tasks with one objective: objective.mixture="
            f"{experiment.objective.mixture!r} should be '', or mixing.pretraining 'corpus'"
        )
    if mixing != "corpus" and not experiment.pretraining.steps:
        raise SettingError(f"mixing.pretraining={mixing!r} needs pretraining.steps above 0")
    if members > 1 and tuning.heads:
        raise SettingError(
            f"ensemble.members={members} answer in words: tuning.heads={tuning.heads} should be ()"
        )


def check_tbptt(experiment: Experiment) -> None:
    """Raise SettingError if rows last several steps but the model carries no recurrent state between them."""
    model, objective, training = experiment.model, experiment.objective, experiment.pretraining
    if not training.tbptt:
        return
    # setting -> its value, and the permitted ones
    required: dict[str, tuple[object, tuple[object, ...]]] = {
        "model.mixer.kind": (model.mixer.kind, RECURRENT),
        "model.architecture": (model.architecture, ("decoder",)),
        "model.heads": (model.heads, ((),)),
        "objective.mixture": (objective.mixture, ("",)),
        "objective.noise": (objective.noise, ("everything",)),
        "objective.eos": (objective.eos, ("between-documents",)),
        "mixing.pretraining": (experiment.mixing.pretraining, ("corpus",)),
        "pretraining.phases": (training.phases, ((),)),
        "pretraining.microbatches": (training.microbatches, (1,)),
    }
    for name, (value, permitted) in required.items():
        if value not in permitted:
            should = f"should be {' or '.join(map(repr, permitted))}"
            reason = f"pretraining.steps_per_row={training.steps_per_row}, for which a state is carried"
            raise SettingError(f"{name}={value!r} {should} with {reason}")


def check_held_out_documents(experiment: Experiment) -> None:
    """Raise SettingError if ``data.held_out_documents`` are to be scored by a model that gives no likelihood.

    A causal language model gives the likelihood of a text, and a masked-diffusion encoder a bound on it. Both
    should be trained with EOS.
    """
    count, objective = experiment.data.held_out_documents, experiment.objective
    if not count:
        return
    architecture = experiment.model.architecture
    gives_likelihood = architecture == "decoder" and not objective.has_inputs
    gives_bound = architecture == "encoder" and objective.corruption.bounds_likelihood
    if not (gives_likelihood or gives_bound):
        message = (
            f"data.held_out_documents={count} needs model.architecture='decoder', not {architecture!r}, and "
            "an objective without inputs, such as causal-lm; or an encoder and masked-diffusion"
        )
        if start := experiment.start.model:
            message += f"; the model is that of {start}: choose another row, or another start"
        raise SettingError(message)
    if not objective.writes_eos:
        raise SettingError(
            "objective.eos='none' should be 'each-example' or 'between-documents' with "
            f"data.held_out_documents={count}: EOS begins and ends each of these documents"
        )


def check_counts(experiment: Experiment) -> None:
    """Raise SettingError for a count-based model with settings that it does not support."""
    counts, tuning = experiment.counts.model, experiment.tuning
    if counts == "none":
        return
    if (members := experiment.ensemble.members) > 1 or experiment.mixing.pretraining != "corpus":
        raise SettingError(
            f"counts.model={counts!r} needs ensemble.members=1, not {members}, and "
            f"mixing.pretraining='corpus', not {experiment.mixing.pretraining!r}"
        )
    kinds = {name: find_labelled(name).kind for name in tuning.heads}
    if counts == "tagger" and (tuning.mixtures or set(kinds.values()) != {"tokens"}):
        raise SettingError(
            f"counts.model='tagger' needs tuning.mixtures=() and tuning.heads that tag words, such as roles, "
            f"not {tuning.mixtures} and {tuning.heads}"
        )


def tasks_from_files(experiment: Experiment) -> list[Task | LabelledTask]:
    """Return the tasks from files that a run trains on; raise SettingError if one lacks a split."""
    tuning = experiment.tuning
    learns_tasks = finetunes(experiment) or experiment.counts.model == "tagger"
    if not learns_tasks and experiment.mixing.pretraining == "corpus":
        return []
    tasks: list[Task | LabelledTask] = [
        task for name in tuning.mixtures if is_task_file(name) for task in mixture(name)
    ]
    tasks += [find_labelled(name) for name in tuning.heads if is_task_file(name)]
    for task in tasks:
        for split in ("train", "validation"):
            if getattr(task, split) is None:
                raise SettingError(f"{task.file}: [splits] lacks {split!r}, which training reads")
    return tasks


def check_branches(stages: Sequence[Stage]) -> None:
    """Raise SettingError if two branches round to one step, or a checkpoint to fine-tune from is gone.

    A branch is a share of pre-training after which fine-tuning starts (``tuning.branches``).
    """
    for stage in stages:
        branches, parent = stage.settings.tuning.branches, stage.parent
        steps: tuple[int, ...] = ()
        if stage.branch_steps:
            steps = tuple(branch_step(stage.settings.pretraining.steps, fraction) for fraction in branches)
        if len(set(steps)) < len(steps):
            raise SettingError(
                f"tuning.branches={branches} are {steps} of pretraining.steps="
                f"{stage.training.steps}, two of which are one: leave one out"
            )
        if parent is None or manifest.steps(stage.folder / "checkpoints"):
            continue
        saved = manifest.steps(parent.folder / "checkpoints")
        if stage.parent_step not in saved and max(saved, default=0) > (stage.parent_step or 0):
            raise SettingError(
                f"{parent.folder} is trained beyond step {stage.parent_step} and did not keep it, where "
                f"tuning.branches={branches} starts: delete that folder to pre-train again, or leave this out"
            )


def check_start_parameters(experiment: Experiment, cache: Path) -> None:
    """Raise SettingError if the external checkpoint lacks parameters that pre-training continues with."""
    model, checkpoint = experiment.model, external_checkpoint(experiment, cache)
    if checkpoint is None:
        return
    if experiment.counts.model != "none":
        raise SettingError(
            f"counts.model={experiment.counts.model!r} is counted, and starts from no checkpoint"
        )
    if not experiment.pretraining.steps:
        return
    if not model.has_decoder and model.output.logits == "none" and "replaced-token" not in model.heads:
        raise SettingError(
            f"pretraining.steps={experiment.pretraining.steps}: {checkpoint.name} has no output matrix "
            "(model.output.logits='none'), by which an encoder predicts hidden tokens; tune it as it is"
        )
    path = manifest.steps(checkpoint.folder / "checkpoints").get(0)
    try:
        names = manifest.read_manifest(path, 0)["arrays"] if path else ()
    except manifest.Damage as error:
        raise SettingError(
            f"{path}: {error}; delete {checkpoint.folder.parent} and import it again with --start"
        ) from error
    for head, module in MODULE_OF_HEAD.items():
        if head in model.heads and not any(name.startswith(f"params.{module}.") for name in names):
            raise SettingError(
                f"pretraining.steps={experiment.pretraining.steps}: {checkpoint.name} has no {module}, "
                f"which is trained with model.heads={model.heads}; tune it as it is"
            )


def check_teacher(experiment: Experiment, cache: Path) -> None:
    """Raise SettingError if the teacher of pre-training does not predict what the model predicts."""
    distillation, training = experiment.distillation, experiment.pretraining
    if not (pretrains(experiment) and distillation.teacher):
        return
    teacher = teacher_checkpoint(start_folder(distillation.teacher, cache)).settings.model
    named = f"distillation.teacher={distillation.teacher!r}"
    model = experiment.model
    if heads := sorted(MODULE_OF_HEAD.keys() & {*model.heads}):
        raise SettingError(
            f"{named} teaches language models and masked language models: model.heads={model.heads} should "
            f"be without {' and '.join(heads)}"
        )
    if training.tbptt is not None:
        raise SettingError(
            f"{named} reads whole rows: pretraining.steps_per_row={training.steps_per_row} should be 1"
        )
    if teacher.output.logits == "none":
        raise SettingError(
            f"{named} has no output matrix (model.output.logits='none') and predicts no tokens: name a model "
            "that was trained to predict them"
        )
    if "query-stream" in model.heads and "query-stream" not in teacher.heads:
        raise SettingError(
            f"{named} has no query stream (model.heads={teacher.heads}), by which the model that it teaches "
            "predicts tokens in an order: name one that was trained with objective.targets='permuted'"
        )
    for index in range(len(training.phases) + 1):
        each = phase_model(experiment, index)
        expected, found = describe_architecture(each), describe_architecture(teacher)
        if expected != found:
            raise SettingError(
                f"{named} is {found}, and it should be {expected} as the model that it teaches is: name such "
                "a teacher, or change model.architecture"
            )
    if teacher.vocab_size != model.vocab_size:
        raise SettingError(
            f"{named} predicts {teacher.vocab_size} tokens, and model.vocab_size={model.vocab_size}: they "
            "should be equal; start from the teacher (--start MODEL), name its tokenizer (data.vocabulary) "
            "and model.vocab_size, or choose a teacher with the vocabulary of the row"
        )
    if distillation.cosine and teacher.d_model != model.d_model:
        raise SettingError(
            f"distillation.cosine={distillation.cosine} compares hidden states of one width, and {named} has "
            f"d_model={teacher.d_model}, the model model.d_model={model.d_model}: set distillation.cosine=0, "
            "or make the widths equal"
        )
    sizes = experiment.mesh.sizes(jax.device_count())
    try:
        check_mesh(teacher, sizes, training.batch_size, training.microbatches)
    except SettingError as error:
        raise SettingError(f"{named}: {error}") from error


def check_teacher_length(experiment: Experiment, stages: Sequence[Stage], inputs: Inputs) -> None:
    """Raise SettingError if a sequence of pre-training exceeds the learned positions of the teacher."""
    for stage in stages:
        if not isinstance(stage, Pretraining) or (teacher := stage.teacher_checkpoint()) is None:
            continue
        model, lengths = teacher.settings.model, inputs.batches[stage.name].lengths
        longest = max(lengths.inputs, row_length(model.architecture, lengths))
        if model.has_max_length and longest > model.positions.max_length:
            raise SettingError(
                f"distillation.teacher={teacher.name!r} reads {model.positions.max_length} tokens, and the "
                f"longest row has {longest}: make data.inputs_length={experiment.data.inputs_length} smaller"
            )


def describe_architecture(model: ModelConfig) -> str:
    """Return the architecture of a model, and its mask if it is one stack, such as "an encoder (causal)"."""
    architecture = model.architecture.removeprefix("shared-")
    article = "an" if architecture.startswith("e") else "a"
    mask = mask_of(model)
    return f"{article} {architecture}" + (f" ({mask})" if mask else "")


def check_answer_lengths(experiment: Experiment, vocabulary: Tokenizer) -> None:
    """Raise SettingError if a label is longer than ``targets_length``: cut off, it could never be right."""
    if not learns_mixtures(experiment):
        return
    boundary = boundary_tokens(experiment.model, vocabulary)
    for name in experiment.tuning.mixtures:
        room = mixture(name).targets_length - len(boundary.prefix) - 1
        for task in mixture(name):
            longest = max(task.labels, key=lambda label: len(vocabulary.encode(label)), default="")
            if (count := len(vocabulary.encode(longest))) > room:
                raise SettingError(
                    f"tuning.mixtures: the answer {longest!r} of task {task.name!r} has {count} tokens here, "
                    f"and {name!r} has room for {room}"
                )


def check_folder(
    experiment: Experiment, folder: Path, cache: Path, on_difference: Callable[[str], object] | None
) -> None:
    """Raise SettingError if ``folder`` holds another run, or if ``cache`` cannot be written to.

    on_difference: if given, it is called with the settings that differ, and the folder is accepted.
    """
    broadcast_from_first(lambda: check_settings(experiment, folder, on_difference))
    try:
        cache.mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryFile(dir=cache):
            pass
    except OSError as error:
        text = f"--runs: {cache} cannot be written to ({error.strerror})"
        raise SettingError(f"{text}; choose another folder") from error

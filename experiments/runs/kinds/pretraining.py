"""Pre-training on a corpus, on tasks or on both, its phases, and external checkpoints.

A *row* is one sequence of a batch here; a row of a table is called an experiment. *Content tokens* are the
targets that come from the text: no sentinels, no EOS, no copies of the inputs. The *unigram loss* is the loss
on them of a model that ignores context and knows only how frequent each token is.
"""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cache, partial
from pathlib import Path
from typing import Any, ClassVar, Literal, cast

import jax
import numpy as np
from jax.sharding import Mesh

from experiments.processes.progress import Reporter
from experiments.runs.inputs import (
    ROW_INDEX_FOLDER,
    EvalSplit,
    HeldOutText,
    Inputs,
    encoded_tasks,
    held_out_text,
    mixture_lengths,
    training_streams,
)
from experiments.runs.kinds.answers import text_eval_tasks
from experiments.runs.kinds.network import EvalFn, NetworkStage, cached_step_flops, rows_of_process
from experiments.runs.kinds.stage import CORPUS
from experiments.runs.paths import PRETRAINING, load_settings
from experiments.runs.phases import branch_step, phase_model, renaming
from experiments.runs.result import DENOISERS, to_log_dict
from experiments.runs.status import StageLog
from experiments.study.experiment import BASELINE, Experiment, PhaseConfig
from lm import sharding
from lm.batch import Batch
from lm.config.base import SettingError
from lm.config.model import ModelConfig
from lm.data.batches import Batches, TBPTTRows, stream
from lm.data.content import unigram_baseline
from lm.data.corpus.sampler import CorpusSampler
from lm.data.packing import row_length
from lm.data.pretraining import (
    DenoiserMixtureRows,
    DenoisingRows,
    PretrainingRows,
    pretraining_lengths,
    pretraining_rows,
)
from lm.data.seq2seq import CorpusExamples, Example, MixtureRows
from lm.data.tasks.mixtures import mixing_rates
from lm.evaluate.evaluator import EvalTask
from lm.evaluate.likelihood_bound import documents_bound
from lm.evaluate.loglikelihood import Masking, Window, documents_log_prob
from lm.nn import electra, elmo, finetune
from lm.nn.transformer import Transformer
from lm.objectives.denoising import Lengths, compute_lengths
from lm.special_tokens import boundary_tokens
from lm.tokenizers.tokenizer import Tokenizer
from lm.train import optimizers
from lm.train.losses import (
    both_directions,
    causal_encoder,
    masked_lm,
    replaced_token_detection,
    restored_tokens,
)
from lm.train.state import State
from lm.train.step import Steps, StepSpec

NUM_VALIDATION_SEQUENCES = 512  # held-out sequences that are evaluated during pre-training
MAX_LENGTH_EVAL_BATCHES = 1_000  # held-out batches on which losses at several lengths are measured
# How many random sets of masks estimate the bound of each window of a held-out document: few while a model
# trains, since many would take longer than the training between two evaluations, and more at the end.
BOUND_DRAWS, FINAL_BOUND_DRAWS = 2, 16
MAX_UNIGRAM_TOKENS = 2**22  # held-out tokens in which token frequencies are counted


@dataclass(frozen=True)
class Pretraining(NetworkStage):
    """Pre-training of a network, or a phase of it.

    A phase continues to count the steps of the phases before it. Its settings are truncated to it
    (``phases.phase_settings``): ``pretraining.phases`` lists only the phases before it,
    ``pretraining.steps`` is its last step, and ``tuning.branches`` are fractions of that step.

    It is scored on tasks only if it is trained on them and no fine-tuning follows.
    """

    teacher: Path | None = None  # folder of the run whose model teaches this one (distillation.teacher)

    is_pretraining: ClassVar[bool] = True
    is_shared: ClassVar[bool] = True

    @property
    def title(self) -> str:
        if self.is_start_pretraining:
            return "start phase"
        number = len(self.settings.pretraining.phases) + 1
        is_earlier_phase = not self.is_compared  # the last phase is called pre-training
        return f"phase {number} of pre-training" if is_earlier_phase else "pre-training"

    @property
    def training(self) -> PhaseConfig:
        return self.settings.pretraining

    @property
    def first_step(self) -> int:
        ends = self.settings.pretraining.phase_ends
        return ends[-2] if len(ends) > 1 else 0

    @property
    def generator(self) -> ModelConfig | None:
        return electra.generator_of(self.settings.model, self.settings.generator_share)

    @property
    def evaluate_every(self) -> int:
        return self.settings.pretraining.evaluate_every or self.training.save_every

    @property
    def branch_steps(self) -> tuple[int, ...]:
        last, fractions = self.settings.pretraining.steps, self.settings.tuning.branches
        steps = (branch_step(last, fraction) for fraction in fractions)
        return tuple(step for step in steps if step > self.first_step)

    @property
    def scored_on(self) -> tuple[str, ...]:
        return () if self.settings.finetuning.steps else self.task_names

    @property
    def reads_corpus(self) -> bool:
        return self.settings.mixing.pretraining != "tasks"

    @property
    def needs_collocations(self) -> bool:
        return self.settings.objective.needs_collocations

    @property
    def relevant_settings(self) -> Experiment:
        return pretraining_settings(self.settings)

    @property
    def lengths(self) -> Lengths:
        settings = self.settings
        lengths = pretraining_lengths(
            settings.objective, settings.model.architecture, settings.data.inputs_length
        )
        if not self.task_names:
            return lengths
        return covering_lengths(lengths, mixture_lengths(self.settings, self.task_names))

    def step_spec(self) -> StepSpec:
        return pretraining_spec(self.settings)

    def training_spec(self) -> StepSpec:
        spec, teacher = self.step_spec(), self.teacher_checkpoint()
        if teacher is None:
            return spec
        return replace(spec, teacher_config=teacher.settings.model, distillation=self.settings.distillation)

    def teacher_params(self, mesh: Mesh) -> dict[str, jax.Array] | None:
        teacher = self.teacher_checkpoint()
        return None if teacher is None else sharding.named(teacher.restore_transformer(mesh))

    def teacher_checkpoint(self) -> "ExternalCheckpoint | None":
        """Return the checkpoint of the teacher, None without one; SettingError if it is gone."""
        return None if self.teacher is None else teacher_checkpoint(self.teacher)

    def flops_of_lengths(self, lengths: Lengths) -> float:
        flops, teacher = super().flops_of_lengths(lengths), self.teacher_checkpoint()
        if teacher is None or not self.settings.distillation.needs_teacher_forward:
            return flops
        model = teacher.settings.model
        decoder_length = row_length(model.architecture, lengths)
        # The teacher only runs forward, which is a third of a training step's FLOPs.
        forward = cached_step_flops(model, self.training.batch_size, lengths.inputs, decoder_length) / 3
        return flops + forward

    def initial_state(self, steps: Steps) -> Callable[[], State] | None:
        if not self.first_step:
            return super().initial_state(steps)
        return partial(self.initial_state_from_previous_phase, steps)

    def initial_state_from_previous_phase(self, steps: Steps) -> State:
        """Return the state that this phase starts from: the previous phase's last checkpoint.

        The state of the optimizer is taken over too, unless another optimizer begins with this phase
        (``pretraining.optimizer_start`` is the end of the previous phase): then only the parameters are. The
        guard's statistics always start anew, since losses of different phases cannot be compared.
        """
        parent, fresh = cast(Pretraining, self.parent), steps.initial_state(self.settings.seed)
        source = renaming(parent.settings.model, self.settings.model)
        with parent.checkpoints() as checkpoints:
            if self.settings.pretraining.optimizer_start < self.first_step:
                without_guard = replace(steps.abstract, guard=None)
                state = cast(State, checkpoints.restore(without_guard, self.first_step, source))
                return replace(state, guard=fresh.guard)
            state = checkpoints.restore_model(fresh, self.first_step, source).warm_start(fresh)
        step = jax.device_put(np.int32(self.first_step), steps.abstract.step.sharding)
        return replace(state, step=step)

    def batches(self, inputs: Inputs) -> Batches:
        if self.task_names:
            return mixed_batches(self.settings, self.task_names, inputs)
        return corpus_batches(self.settings, inputs)

    def eval_tasks(self, inputs: Inputs, mesh: Mesh, split: EvalSplit) -> list[EvalTask]:
        """Return the rows of its tasks, which are answered by generated text."""
        return text_eval_tasks(self, inputs, mesh, split)

    def make_evaluate(self, inputs: Inputs, mesh: Mesh, steps: Steps) -> EvalFn:
        """Return a function that evaluates a state on held-out text and, at checkpoints, on its tasks."""
        evaluate_tasks = super().make_evaluate(inputs, mesh, steps)
        # The data is made at the first evaluation, which may come long after the first step.
        max_batches = -(-NUM_VALIDATION_SEQUENCES // self.training.batch_size)
        make_validation = cache(partial(validation_batches, self.settings, inputs, mesh, max_batches))
        make_by_denoiser = cache(partial(denoiser_batches, self.settings, inputs, mesh, max_batches))
        make_text = cache(partial(held_out_text, self.settings, inputs))

        def evaluate(state: State) -> dict[str, Any]:
            batches, unigram_loss = make_validation()
            values = steps.evaluate(state, batches)
            if unigram_loss is not None:
                values["reference_loss"] = unigram_loss  # its name in metrics.jsonl
            for name, batches_of_denoiser in make_by_denoiser().items():
                values[f"{DENOISERS}{name}"] = steps.evaluate(state, batches_of_denoiser)["loss"]
            documents = document_values(state, make_text(), self.settings, steps, inputs.vocabulary)
            return values | documents | evaluate_tasks(state)

        return evaluate

    def length_losses(self, inputs: Inputs, mesh: Mesh) -> dict[str, float]:
        """Return {length multiple: held-out loss}, for sequences that many times as long as in training.

        {} if the only multiple is 1, which every evaluation measures.
        """
        if self.settings.data.held_out_lengths == (1,):
            return {}
        steps = self.steps(mesh)
        # The last checkpoint is measured, not the best; its parameters are the moving average if one is kept.
        state = self.initial_state_from_checkpoint(steps)
        losses = {}
        for times in self.settings.data.held_out_lengths:
            batches = held_out_batches(self.settings, inputs, mesh, times, MAX_LENGTH_EVAL_BATCHES)
            losses[str(times)] = steps.evaluate(state, batches)["loss"]
        return losses

    def flops(self, inputs: Inputs) -> float:
        """Return the FLOPs of the whole pre-training, or of the phase."""
        return self.step_flops(inputs) * self.num_steps


@dataclass(frozen=True)
class ExternalCheckpoint(Pretraining):
    """A finished model in the folder ``starts``, which this run does not train.

    Stages start from it (``start.model``), or it teaches them (``distillation.teacher``).
    """

    @property
    def training(self) -> PhaseConfig:
        return PhaseConfig(steps=0)

    @property
    def first_step(self) -> int:
        return 0

    def step_spec(self) -> StepSpec:
        return StepSpec(self.settings.model)

    def train(
        self,
        inputs: Inputs,
        mesh: Mesh,
        log: StageLog,
        reporter: Reporter,
        profile: tuple[int, int] | None = None,
    ) -> None:
        """Do nothing: it is finished."""

    def initial_state_from_checkpoint(
        self, steps: Steps, step: int | None = None, seed: int | None = None
    ) -> State:
        with self.checkpoints() as checkpoints:
            fresh = steps.initial_state(self.settings.seed if seed is None else seed)
            source = partial(finetune.source_parameter, checkpoints.parameter_names(0))
            return checkpoints.restore_model(fresh, 0, source).warm_start(fresh)


def teacher_checkpoint(run: Path) -> ExternalCheckpoint:
    """Return the checkpoint of a teacher, which is the run in a folder; SettingError if there is none."""
    if not run.is_dir():
        raise SettingError(
            f"distillation.teacher={run.name!r} is missing in {run.parent}: name a folder in the format of "
            "transformers, a run, RUN:STAGE or hf:NAME; lm run keeps a copy there"
        )
    return ExternalCheckpoint(
        run.name, member=None, task_names=(), settings=load_settings(run), folder=run / PRETRAINING
    )


# ---- settings


def has_start_pretraining(experiment: Experiment) -> bool:
    """Return whether the start pre-training, a short one that experiments share, precedes pre-training.

    At the small scales its default objective, which copies, suits models with a decoder. An encoder has no
    start pre-training, therefore, unless the experiment or the command line chooses a masked or a causal LM.
    """
    start = experiment.start
    if not start.steps or start.model:
        return False
    suits_encoder = start.objective.is_mlm or not start.objective.has_inputs
    return suits_encoder or phase_model(experiment, 0).has_decoder


# settings of data that say how it is loaded
LOADER_SETTINGS = ("workers", "corrupt_records", "encoders", "cache_size")
# settings of data that change no result of pre-training -> the baseline's value
IRRELEVANT_DATA_SETTINGS: Mapping[str, Any] = {
    name: getattr(BASELINE.data, name) for name in (*LOADER_SETTINGS, "held_out_lengths")
}


def pretraining_settings(experiment: Experiment, task: str = "") -> Experiment:
    """Return the settings whose hash names the folder of a pre-training.

    They are those of ``experiment`` on which pre-training depends, with all other settings reset to the
    baseline's. Of ``pretraining`` only ``keep_hours`` is reset: ``log_every`` and ``save_every`` are kept,
    although they change no parameter.

    task: the downstream task that mixing.pretraining="corpus+other-tasks" leaves out of pre-training; with
    any other mixing it has no effect.
    """
    mixing, tuning, start = experiment.mixing, experiment.tuning, experiment.start
    if not has_start_pretraining(experiment):
        start = replace(BASELINE.start, model=start.model, weights=start.weights)
    relevant = replace(
        BASELINE,
        objective=experiment.objective,
        model=experiment.model,
        vectors=experiment.vectors if experiment.vectors.epochs else BASELINE.vectors,
        start=start,
        distillation=experiment.distillation,
        pretraining=replace(experiment.pretraining, keep_hours=BASELINE.pretraining.keep_hours),
        data=replace(experiment.data, **IRRELEVANT_DATA_SETTINGS),
        generator_share=experiment.generator_share,
        seed=experiment.seed,
        guard=replace(BASELINE.guard, spikes=experiment.guard.spikes),
    )
    if mixing.pretraining == "corpus":
        return relevant
    mixtures = tuning.mixtures
    if mixing.pretraining == "corpus+other-tasks":
        mixing = replace(mixing, pretraining="corpus+tasks")
        mixtures = tuple(name for name in mixtures if name != task)
    tuning_for_pretraining = replace(BASELINE.tuning, mixtures=mixtures, inputs_length=tuning.inputs_length)
    if experiment.finetuning.steps:
        return replace(relevant, mixing=mixing, tuning=tuning_for_pretraining)
    # Without fine-tuning the pre-trained model itself is scored, on this many examples.
    scored = replace(
        tuning_for_pretraining,
        evaluation_examples=tuning.evaluation_examples,
        report_examples=tuning.report_examples,
        shuffled_inputs=tuning.shuffled_inputs,
    )
    return replace(relevant, mixing=mixing, tuning=scored, finetuning=replace(BASELINE.finetuning, steps=0))


# ---- the step


def pretraining_spec(experiment: Experiment) -> StepSpec:
    """Return the specification of a training step of a causal or masked LM, of ELECTRA, or of ELMo."""
    model, training = experiment.model, experiment.pretraining
    frozen = experiment.vectors.embedding == "frozen"
    spec = StepSpec(
        model,
        training.optimizer.ending_at(training.steps - training.optimizer_start),
        loss_config=training.loss,
        mask_updates=optimizers.freeze_embedding if frozen else optimizers.train_all,
        microbatches=training.microbatches,
        guard=experiment.guard,
        tbptt=training.tbptt,
        optimizer_start=training.optimizer_start,
    )
    generator = electra.generator_of(model, experiment.generator_share)
    if generator is not None:
        spec = replace(spec, extra_configs=(generator,))
        if "generator" in model.heads:
            return replace(spec, module=electra.RestoringElectra, loss=restored_tokens)
        return replace(spec, module=electra.Electra, loss=replaced_token_detection)
    if "backward" in model.heads:
        return replace(spec, module=elmo.BidirectionalLM, loss=both_directions)
    if model.architecture != "encoder":
        return spec
    return replace(spec, loss=masked_lm if experiment.objective.is_mlm else causal_encoder)


# ---- the batches


def pretraining_batches(
    experiment: Experiment,
    inputs: Inputs,
    split: Literal["train", "validation"],
    times: int = 1,
    batch_size: int | None = None,
) -> Batches[PretrainingRows]:
    """Return the batches of one split of the corpus, with the experiment's objective.

    The noise of the validation split is the same whatever the seed.

    times: length of the sequences, as a multiple of ``data.inputs_length``.
    batch_size: None is that of the experiment.
    """
    data, size = experiment.data, batch_size or experiment.pretraining.batch_size
    if split == "train":
        streams = training_streams(experiment, inputs)
        # Streams supply equal parts of each batch. The planner (experiments/plan) asks for a batch of one
        # row, which several streams cannot divide: a single stream reads all text then.
        if size % streams.num_streams:
            streams = replace(streams, num_streams=1)
    else:
        index_folder = inputs.cache / ROW_INDEX_FOLDER
        streams = CorpusSampler(inputs.validation, num_streams=1, index_folder=index_folder)
    source = pretraining_rows(
        streams,
        experiment.objective,
        architecture=experiment.model.architecture,
        inputs_length=data.inputs_length * times,
        batch_size=size,
        boundary=boundary_tokens(experiment.model, inputs.vocabulary),
        collocations=inputs.collocations,
        pad_to_multiple_of=experiment.model.funnel.multiple,
    )
    return Batches(source, size)


def corpus_batches(experiment: Experiment, inputs: Inputs) -> Batches:
    """Return the batches of pre-training on the corpus alone.

    With ``pretraining.steps_per_row`` (truncated backpropagation through time) a row of text is read over
    several steps.
    """
    data, training = experiment.data, experiment.pretraining
    tbptt, lengths = training.tbptt, compute_lengths(experiment.objective, data.inputs_length)
    if tbptt is None:
        return pretraining_batches(experiment, inputs, "train")
    with_long_rows = replace(
        experiment,
        data=replace(data, inputs_length=data.inputs_length * tbptt.chunks_per_row),
        pretraining=replace(training, steps=-(-training.steps // tbptt.chunks_per_row)),
    )
    rows = pretraining_batches(with_long_rows, inputs, "train").row_source
    return Batches(TBPTTRows(rows, lengths, tbptt.rows, tbptt.chunks_per_row), tbptt.rows)


def mixed_batches(experiment: Experiment, mixtures: Sequence[str], inputs: Inputs) -> Batches:
    """Return the batches of multi-task pre-training.

    They mix the tasks' training sets and, unless mixing.pretraining="tasks", the corpus.
    """
    mixing = experiment.mixing
    examples: dict[str, Sequence[Example]] = {**encoded_tasks(mixtures, inputs)}
    sizes = {name: min(len(rows), mixing.limit) for name, rows in examples.items()}
    corpus = pretraining_batches(experiment, inputs, "train")
    if mixing.pretraining != "tasks":
        examples[CORPUS] = CorpusExamples(cast(DenoisingRows, corpus.row_source))
        sizes[CORPUS] = round(mixing.limit * mixing.corpus_share)
    lengths = covering_lengths(corpus.lengths, mixture_lengths(experiment, mixtures))
    shares = mixing_rates(sizes, kind=mixing.rates, limit=None, temperature=mixing.temperature)
    boundary = boundary_tokens(experiment.model, inputs.vocabulary)
    model, seed = experiment.model, experiment.seed
    rows = MixtureRows(
        examples,
        shares,
        model.architecture,
        lengths,
        seed,
        boundary,
        pad_to_multiple_of=model.funnel.multiple,
        loss=experiment.objective.loss,
    )
    return Batches(rows, experiment.pretraining.batch_size)


def covering_lengths(corpus: Lengths, tasks: Lengths) -> Lengths:
    """Return the lengths of sequences with room for examples of the corpus and of the tasks."""
    return corpus._replace(
        inputs=max(corpus.inputs, tasks.inputs), targets=max(corpus.targets, tasks.targets)
    )


# ---- held-out text


def held_out_batches(
    experiment: Experiment, inputs: Inputs, mesh: Mesh, times: int, max_batches: int
) -> list[Batch]:
    """Return this process's part of the first ``max_batches`` held-out batches.

    Sequences are ``times`` as long as in training.
    """
    batches, count = held_out_batches_and_count(experiment, inputs, mesh, times, max_batches)
    return list(stream(batches, 0, count, rows=sharding.process_rows(mesh, batches.batch_size)))


def validation_batches(
    experiment: Experiment, inputs: Inputs, mesh: Mesh, max_batches: int
) -> tuple[list[Batch], float | None]:
    """Return this process's part of the batches evaluated during pre-training, and the unigram loss on them.

    The unigram loss is measured on content tokens [nats per token]. Batches get ``frequent_tokens``, the most
    frequent content tokens, so that ``Steps.evaluate`` measures the model's loss on content tokens too. If
    there are no content tokens, as in copying, the unigram loss is None and ``frequent_tokens`` are not set.
    """
    batches, count = held_out_batches_and_count(experiment, inputs, mesh, 1, max_batches)
    size = batches.batch_size
    global_batches = list(stream(batches, 0, count))
    text = inputs.validation.first(MAX_UNIGRAM_TOKENS).tokens
    unigram_loss, frequent = unigram_baseline(global_batches, inputs.vocabulary, text)
    if unigram_loss is not None:
        frequent_tokens = np.tile(frequent, (size, 1))
        global_batches = [replace(each, frequent_tokens=frequent_tokens) for each in global_batches]
    return rows_of_process(mesh, size, global_batches), unigram_loss


def denoiser_batches(
    experiment: Experiment, inputs: Inputs, mesh: Mesh, max_batches: int
) -> dict[str, list[Batch]]:
    """Return this process's part of held-out batches of each denoiser of a mixture; {} without a mixture.

    ``max_batches`` are divided among the denoisers by weight; each gets at least one.
    """
    if not experiment.objective.mixture:
        return {}
    batches, count = held_out_batches_and_count(experiment, inputs, mesh, 1, max_batches)
    rows, size = cast(DenoiserMixtureRows, batches.row_source), batches.batch_size
    total = sum(denoiser.weight for denoiser in rows.denoisers)
    found: dict[str, list[Batch]] = {}
    for index, denoiser in enumerate(rows.denoisers):
        num_batches = max(round(count * denoiser.weight / total), 1)
        made = [rows.denoiser_batch(index, np.arange(size) + size * n) for n in range(num_batches)]
        found[denoiser.name] = rows_of_process(mesh, size, made)
    return found


def held_out_batches_and_count(
    experiment: Experiment, inputs: Inputs, mesh: Mesh, times: int, max_batches: int
) -> tuple[Batches, int]:
    """Return held-out batches of sequences ``times`` as long as in training, and how many to read.

    That is ``max_batches``, or fewer if the text ends before; at least 1.
    """
    shards = sharding.batch_shards(mesh.shape)
    # A batch has as many tokens as in training: longer sequences are fewer, rounded up so that every device
    # gets equally many.
    batch_size = -(-experiment.pretraining.batch_size // (times * shards)) * shards
    batches = pretraining_batches(experiment, inputs, "validation", times, batch_size)
    num_sequences = batches.row_source.count_epoch_rows(max_batches * batch_size)
    return batches, max(num_sequences // batch_size, 1)


def document_values(
    state: State, text: HeldOutText, experiment: Experiment, steps: Steps, vocabulary: Tokenizer
) -> dict[str, float]:
    """Return the likelihood of held-out documents as values for the log; {} without documents.

    Documents are read in windows as long as the sequences of training. Every window of a document but the
    first scores its second half, with its first half as context. For masked diffusion the value is a bound,
    and documents end in [SEP] instead of EOS.
    """
    if not text.documents:
        return {}
    length = experiment.data.inputs_length
    model = cast(Transformer, state.eval_model)
    if experiment.model.architecture == "encoder":
        masking = Masking.of(vocabulary)
        length -= len(masking.begin + masking.end)
        window = Window(length, -(-length // 2))
        documents = [[*ids[:-1], *masking.end] for ids in text.documents]
        is_last = int(state.step) == experiment.pretraining.steps
        draws = FINAL_BOUND_DRAWS if is_last else BOUND_DRAWS
        bounds = documents_bound(model, documents, window, steps.shard_batch, masking, draws)
        nats, variance = bounds.total()
        return to_log_dict(text.likelihood(-nats, variance))
    window = Window(length, -(-length // 2))
    log_prob = documents_log_prob(model, text.documents, window, text.eos, steps.shard_batch)
    return to_log_dict(text.likelihood(log_prob))

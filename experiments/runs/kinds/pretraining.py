"""Pre-training on a corpus, on tasks or on both, and checkpoints that are given in its place."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cache, partial
from typing import Any, ClassVar, Literal, cast

import numpy as np
from jax.sharding import Mesh

from experiments.processes.progress import Reporter
from experiments.runs.inputs import (
    WINDOW_ROWS,
    EvalSplit,
    HeldOutText,
    Inputs,
    encoded_tasks,
    held_out_text,
    mixture_lengths,
    training_streams,
)
from experiments.runs.kinds.answers import text_questions
from experiments.runs.kinds.network import Measure, NetworkStage, rows_of_process
from experiments.runs.kinds.stage import CORPUS
from experiments.runs.result import recorded
from experiments.runs.status import StageLog
from experiments.study.experiment import BASELINE, Experiment, PhaseConfig
from lm import sharding
from lm.batch import Batch
from lm.data.batches import Batches, TBPTTRows, stream
from lm.data.content import unigram_baseline
from lm.data.corpus.sampler import CorpusSampler
from lm.data.masked_lm import MaskedLMRows
from lm.data.pretraining import DenoisingRows, pretraining_rows
from lm.data.seq2seq import CorpusExamples, Example, MixtureRows
from lm.data.tasks.mixtures import mixing_rates
from lm.evaluate.evaluator import EvalTask
from lm.evaluate.loglikelihood import Window, documents_log_prob
from lm.nn import electra, elmo, finetune
from lm.nn.transformer import Transformer
from lm.objectives.denoising import Lengths, compute_lengths
from lm.special_tokens import boundary_tokens
from lm.train import optimizers
from lm.train.losses import both_directions, masked_lm, replaced_tokens
from lm.train.state import State
from lm.train.step import Steps, StepSpec

WATCHED = 512  # held-out sequences on which the loss of pre-training is watched
COMPARED = 1_000  # batches of held-out text, at most, on which rows of different lengths are compared
UNIGRAMS = 2**22  # tokens of held-out text, at most, that say how frequent its pieces are


@dataclass(frozen=True)
class Pretraining(NetworkStage):
    """Pre-training; it is scored on tasks only where it reads them and no fine-tuning follows."""

    is_pretraining: ClassVar[bool] = True
    is_shared: ClassVar[bool] = True

    @property
    def title(self) -> str:
        return "start of pre-training" if self.is_start else "pre-training"

    @property
    def training(self) -> PhaseConfig:
        return self.settings.pretraining

    @property
    def evaluate_every(self) -> int:
        return self.settings.pretraining.evaluate_every or self.training.save_every

    @property
    def branch_steps(self) -> tuple[int, ...]:
        return tuple(branch_step(self.settings, share) for share in self.settings.tuning.branches)

    @property
    def scored_on(self) -> tuple[str, ...]:
        return () if self.settings.finetuning.steps else self.on

    @property
    def reads_corpus(self) -> bool:
        return self.settings.mixing.pretraining != "tasks"

    @property
    def decisive(self) -> Experiment:
        return pretraining_settings(self.settings)

    @property
    def lengths(self) -> Lengths:
        return compute_lengths(self.settings.objective, self.settings.data.inputs_length)

    def step_spec(self) -> StepSpec:
        return pretraining_spec(self.settings)

    def batches(self, inputs: Inputs) -> Batches:
        return (
            mixed_batches(self.settings, self.on, inputs)
            if self.on
            else corpus_batches(self.settings, inputs)
        )

    def questions(self, inputs: Inputs, mesh: Mesh, split: EvalSplit) -> list[EvalTask]:
        return text_questions(self, inputs, mesh, split)

    def evaluation(self, inputs: Inputs, mesh: Mesh, steps: Steps) -> Measure:
        """Return what evaluates a state: held-out text and, at checkpoints, its tasks."""
        evaluate_tasks = super().evaluation(inputs, mesh, steps)
        # made at the first evaluation, which may be long after the start
        most = -(-WATCHED // self.training.batch_size)
        watched = cache(partial(watched_batches, self.settings, inputs, mesh, most))
        text = cache(partial(held_out_text, self.settings, inputs))

        def evaluate(state: State) -> dict[str, Any]:
            batches, reference = watched()
            values = steps.evaluate(state, batches) | {"reference_loss": reference}
            documents = document_values(state, text(), self.settings, steps)
            return values | documents | evaluate_tasks(state)

        return evaluate

    def length_losses(self, inputs: Inputs, mesh: Mesh) -> dict[str, float]:
        """Return the loss on held-out text by how many times as long as in training its rows are."""
        if self.settings.data.held_out_lengths == (1,):
            return {}
        steps = self.steps(mesh)
        state, losses = self.warm_start(steps), {}
        for times in self.settings.data.held_out_lengths:
            batches = held_out_batches(self.settings, inputs, mesh, times, COMPARED)
            losses[str(times)] = steps.evaluate(state, batches)["loss"]
        return losses

    def flops(self, inputs: Inputs) -> float:
        """Return the FLOPs of all of its steps."""
        return self.step_flops(inputs) * self.training.steps


@dataclass(frozen=True)
class Given(Pretraining):
    """A checkpoint that other stages start from, trained elsewhere: no stage of the run itself."""

    @property
    def training(self) -> PhaseConfig:
        return PhaseConfig(steps=0)

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
        """Do nothing: it was trained elsewhere."""

    def warm_start(self, steps: Steps, step: int | None = None) -> State:
        with self.checkpoints() as checkpoints:
            fresh = steps.initial_state(self.settings.seed)
            source = partial(finetune.source_parameter, checkpoints.parameters(0))
            return checkpoints.restore_model(fresh, 0, source).warm_start(fresh)


# ---- settings


def has_start(experiment: Experiment) -> bool:
    """Return whether a short pre-training, which rows share, comes before that of an experiment."""
    start = experiment.start
    return start.steps > 0 and not start.model and experiment.model.has_decoder


def branch_step(experiment: Experiment, share: float) -> int:
    """Return the step of pre-training that is nearest to a share of it; at least 1."""
    return max(round(share * experiment.pretraining.steps), 1)


# settings of data that change no number of what is trained before fine-tuning
FEEDING = ("workers", "corrupt_records", "encoders", "cache_size")  # how it is read, whatever is made of it
FREE_DATA: Mapping[str, Any] = {name: getattr(BASELINE.data, name) for name in (*FEEDING, "held_out_lengths")}


def pretraining_settings(experiment: Experiment, target: str = "") -> Experiment:
    """Return the settings that pre-training depends on; all others are the baseline's.

    ``target``: the mixture that the model is then fine-tuned on, which "corpus+other-tasks" leaves out.
    """
    mixing, tuning, start = experiment.mixing, experiment.tuning, experiment.start
    if not has_start(experiment):
        start = replace(BASELINE.start, model=start.model, weights=start.weights)
    decisive = replace(
        BASELINE,
        objective=experiment.objective,
        model=experiment.model,
        vectors=experiment.vectors if experiment.vectors.epochs else BASELINE.vectors,
        start=start,
        pretraining=replace(experiment.pretraining, keep_hours=BASELINE.pretraining.keep_hours),
        data=replace(experiment.data, **FREE_DATA),
        generator_share=experiment.generator_share,
        seed=experiment.seed,
        guard=replace(BASELINE.guard, spikes=experiment.guard.spikes),
    )
    if mixing.pretraining == "corpus":
        return decisive
    mixtures = tuning.mixtures
    if mixing.pretraining == "corpus+other-tasks":
        mixing = replace(mixing, pretraining="corpus+tasks")
        mixtures = tuple(name for name in mixtures if name != target)
    trained = replace(BASELINE.tuning, mixtures=mixtures, inputs_length=tuning.inputs_length)
    if experiment.finetuning.steps:
        return replace(decisive, mixing=mixing, tuning=trained)
    # scored as it is
    examples = {name: getattr(tuning, name) for name in ("evaluation_examples", "report_examples")}
    scored = replace(trained, **examples)
    return replace(decisive, mixing=mixing, tuning=scored, finetuning=replace(BASELINE.finetuning, steps=0))


# ---- the step


def pretraining_spec(experiment: Experiment) -> StepSpec:
    """Return the step of a language model, a masked one, or ELECTRA's or ELMo's pair of models."""
    model, training = experiment.model, experiment.pretraining
    frozen = experiment.vectors.embedding == "frozen"
    spec = StepSpec(
        model,
        training.optimizer,
        mask_updates=optimizers.freeze_embedding if frozen else optimizers.train_all,
        microbatches=training.microbatches,
        guard=experiment.guard,
        tbptt=training.tbptt,
    )
    if "replaced-token" in model.heads:
        generator = electra.generator_config(model, experiment.generator_share)
        return replace(spec, module=electra.Electra, extra_configs=(generator,), loss=replaced_tokens)
    if "backward" in model.heads:
        return replace(spec, module=elmo.BidirectionalLM, loss=both_directions)
    return replace(spec, loss=masked_lm) if model.architecture == "encoder" else spec


# ---- the batches


def pretraining_batches(
    experiment: Experiment,
    inputs: Inputs,
    split: Literal["train", "validation"],
    times: int = 1,
    rows: int | None = None,
) -> Batches[DenoisingRows | MaskedLMRows]:
    """Return the batches of a corpus; those of the validation split have one noise in all runs.

    Rows are ``times`` as long as those of the experiment; a batch has ``rows`` of them, if given.
    """
    data, size = experiment.data, rows or experiment.pretraining.batch_size
    if split == "train":
        streams = training_streams(experiment, inputs)
        streams = replace(streams, num_streams=streams.num_streams if not size % streams.num_streams else 1)
    else:
        streams = CorpusSampler(inputs.validation, 1, index_folder=inputs.cache / WINDOW_ROWS)
    source = pretraining_rows(
        streams,
        experiment.objective,
        architecture=experiment.model.architecture,
        inputs_length=data.inputs_length * times,
        batch_size=size,
        boundary=boundary_tokens(experiment.model, inputs.vocabulary),
    )
    return Batches(source, size)


def corpus_batches(experiment: Experiment, inputs: Inputs) -> Batches:
    """Return the batches of pre-training on the corpus alone, whose rows may last several steps."""
    data, training = experiment.data, experiment.pretraining
    tbptt, lengths = training.tbptt, compute_lengths(experiment.objective, data.inputs_length)
    if tbptt is None:
        return pretraining_batches(experiment, inputs, "train")
    long = replace(
        experiment,
        data=replace(data, inputs_length=data.inputs_length * tbptt.chunks_per_row),
        pretraining=replace(training, steps=-(-training.steps // tbptt.chunks_per_row)),
    )
    rows = pretraining_batches(long, inputs, "train").rows
    return Batches(TBPTTRows(rows, lengths, tbptt.rows, tbptt.chunks_per_row), tbptt.rows)


def mixed_batches(experiment: Experiment, mixtures: Sequence[str], inputs: Inputs) -> Batches:
    """Return the batches of multi-task pre-training: the tasks' training sets, and mostly the corpus too."""
    mixing = experiment.mixing
    examples: dict[str, Sequence[Example]] = {**encoded_tasks(mixtures, inputs)}
    sizes = {name: min(len(rows), mixing.limit) for name, rows in examples.items()}
    corpus = pretraining_batches(experiment, inputs, "train")
    if mixing.pretraining != "tasks":
        examples[CORPUS] = CorpusExamples(cast(DenoisingRows, corpus.rows))
        sizes[CORPUS] = round(mixing.limit * mixing.corpus_share)
    tuned, limits = mixture_lengths(experiment, mixtures), corpus.lengths
    lengths = Lengths(limits.raw, max(limits.inputs, tuned.inputs), max(limits.targets, tuned.targets))
    shares = mixing_rates(sizes, kind=mixing.rates, limit=None, temperature=mixing.temperature)
    boundary = boundary_tokens(experiment.model, inputs.vocabulary)
    rows = MixtureRows(examples, shares, experiment.model.architecture, lengths, experiment.seed, boundary)
    return Batches(rows, experiment.pretraining.batch_size)


# ---- held-out text


def held_out_batches(
    experiment: Experiment, inputs: Inputs, mesh: Mesh, times: int, most: int
) -> list[Batch]:
    """Return this process's rows of at most ``most`` batches of held-out text, ``times`` as long."""
    batches, count = _held_out(experiment, inputs, mesh, times, most)
    return list(stream(batches, 0, count, rows=sharding.process_rows(mesh, batches.batch_size)))


def watched_batches(
    experiment: Experiment, inputs: Inputs, mesh: Mesh, most: int
) -> tuple[list[Batch], float]:
    """Return the batches on which pre-training is watched, and the loss of a model without context on them.

    They know the ``frequent_tokens`` of their content tokens.
    """
    batches, count = _held_out(experiment, inputs, mesh, 1, most)
    size, whole = batches.batch_size, list(stream(batches, 0, count))
    text = inputs.validation.first(UNIGRAMS).tokens
    reference, frequent = unigram_baseline(whole, inputs.vocabulary, text)
    pieces = np.tile(frequent, (size, 1))
    return rows_of_process(mesh, size, [replace(each, frequent_tokens=pieces) for each in whole]), reference


def _held_out(
    experiment: Experiment, inputs: Inputs, mesh: Mesh, times: int, most: int
) -> tuple[Batches, int]:
    """Return the batches of held-out text, and how many there are, at most ``most``."""
    shards = sharding.batch_shards(mesh.shape)
    # As many tokens as in training: ``times`` fewer rows, rounded up so that every device gets as many.
    rows = -(-experiment.pretraining.batch_size // (times * shards)) * shards
    batches = pretraining_batches(experiment, inputs, "validation", times, rows)
    return batches, max(batches.rows.rows_of_epoch(most * rows) // rows, 1)


def document_values(
    state: State, text: HeldOutText, experiment: Experiment, steps: Steps
) -> dict[str, float]:
    """Return what is recorded of held-out documents, read in rows as long as in training.

    Of each row half is context.
    """
    if not text.documents:
        return {}
    length = experiment.data.inputs_length
    model, window = cast(Transformer, state.eval_model), Window(length, -(-length // 2))
    log_prob = documents_log_prob(model, text.documents, window, text.eos, steps.shard_batch)
    return recorded(text.likelihood(log_prob))

"""An experiment is one value: all settings of a run. The defaults are the baseline of the T5 paper.

Of libraries only numpy is imported here, no jax, so that listing and comparing rows starts at once.

``setting(default, read_if)`` declares when a setting is used. ``read_if`` is a condition: {path of another
setting: values that it should have}, of which all entries must hold. Of a tuple of conditions one is enough.
Most are in ``study.conditions``. ``apart`` gives other conditions to some settings of a group.
"""

import json
from dataclasses import asdict, dataclass, fields, is_dataclass
from pathlib import Path
from typing import Any, Literal

from experiments.study.conditions import (
    DECODER_START,
    ENCODER_STARTS,
    FINETUNED,
    FINETUNES,
    FINETUNES_HEADS,
    HAS_TASKS,
    LANGUAGE_MODEL,
    MASKED_DIFFUSION,
    MULTI_TASK,
    NETWORK,
    NGRAMS,
    NO_CHECKPOINT,
    PRETRAINED,
    PRETRAINED_ON_CORPUS,
    REPEATED_NGRAMS,
    SENTINELS,
    TAGGER,
    TRAINED_VOCABULARY,
    TUNED_ON_TEXT,
)
from lm.config.base import (
    ABOVE_0,
    GIVEN,
    MAX_INT32,
    SettingError,
    Values,
    check_above_0,
    check_at_least,
    check_at_most,
    check_seed,
    did_you_mean,
    from_json,
    parse_json,
    setting,
)
from lm.config.classical import CountsConfig, VectorsConfig
from lm.config.mesh import MeshConfig
from lm.config.model import RECURRENT, HeadDense, HeadLayers, LoraConfig, ModelConfig, Pool
from lm.config.training import (
    NEVER_SKIP,
    DistillationConfig,
    GuardConfig,
    LossConfig,
    OptimizerConfig,
    TruncatedBPTT,
)
from lm.data.tasks.names import task_name
from lm.objectives.denoising import DECODER_ONLY, OBJECTIVES, REPLACED, RESTORED, LossName, Objective
from lm.tokenizers.tokenizer import Layout

MOST_PROCESSES = 1_024  # of one kind, on a machine
MOST_MEMBERS = 1_000  # of an ensemble


@dataclass(frozen=True)
class DataConfig:
    """The corpus, and how its text becomes tokens."""

    # text to train on: documentation[/PART], text:, jsonl: or parquet:PATH-or-glob, tfds:NAME[:VERSION], or
    # several joined by " + "
    corpus: str = setting("tfds:c4/en", (PRETRAINED, TRAINED_VOCABULARY, {"vectors.epochs": ABOVE_0}, NGRAMS))
    # number of passes over the same tokens, to which the corpus is cut; 0: use the whole corpus [passes]
    repeats: int = setting(0, (PRETRAINED_ON_CORPUS, NGRAMS))
    # kind of vocabulary: unigram, bpe or wordpiece[:CORPUS], trained on the corpus or on CORPUS; bytes; a
    # .model file; or the folder of a tokenizer
    vocabulary: str = "unigram"
    # texts on which a vocabulary is trained
    vocabulary_texts: Literal["corpus", "corpus+tasks"] = setting(
        "corpus", TRAINED_VOCABULARY | {"tuning.mixtures": GIVEN}
    )
    # number of word pieces of a trained vocabulary, without sentinels [tokens]
    vocabulary_size: int = setting(32_000, TRAINED_VOCABULARY)
    # how a trained vocabulary encodes a character that it lacks: as <unk>, or as bytes, which are 256 of its
    # pieces
    unknown: Literal["unk", "bytes"] = setting("unk", {"vocabulary": ("unigram", "bpe")})
    # number of sentinel tokens, which replace corrupted spans [tokens]
    sentinels: int = setting(100, SENTINELS)
    # length of pre-training inputs; the length of targets follows from the objective [tokens]
    inputs_length: int = setting(512, (PRETRAINED, REPEATED_NGRAMS))
    # row lengths at which held-out text is scored [x inputs_length]
    held_out_lengths: tuple[int, ...] = setting((1,), PRETRAINED)
    # number of whole held-out documents on which a language model is also evaluated; masked diffusion gives
    # an upper bound of their bits per byte; 0: none [documents]
    held_out_documents: int = setting(0, (LANGUAGE_MODEL, MASKED_DIFFUSION, NGRAMS))
    # whether a damaged TFDS record or line of JSON stops the run or is skipped
    corrupt_records: Literal["stop", "skip"] = "stop"
    workers: int = 0  # number of processes that prepare batches; 0: prepare them in threads [processes]
    # number of parts into which a batch is split, each of which reads its own shards of the text; a multiple
    # of the number of hosts; 0: 16, or the largest of its divisors that divides the batch and leaves each
    # stream enough text, of which there is less with data.repeats
    streams: int = setting(0, (PRETRAINED_ON_CORPUS, REPEATED_NGRAMS))
    # number of processes that tokenize text ahead of training; 0: tokenize when it is needed [processes]
    encoders: int = 4
    # largest size of the cache of tokenized text, from which the oldest is deleted; 0: no limit [gigabytes]
    cache_size: float = 0.0

    def __post_init__(self):
        check_at_least(
            self, "data.", sentinels=1, vocabulary_size=1, workers=0, repeats=0, held_out_documents=0
        )
        check_at_least(self, "data.", streams=0, encoders=0, cache_size=0, inputs_length=1)
        check_at_most(self, "data.", workers=MOST_PROCESSES, encoders=MOST_PROCESSES, vocabulary_size=2**24)
        if not self.held_out_lengths or min(self.held_out_lengths) < 1:
            due = "should name one or more numbers of at least 1, such as (1, 2)"
            raise SettingError(f"data.held_out_lengths={self.held_out_lengths} {due}")
        if self.unknown == "bytes" and self.vocabulary.partition(":")[0] == "wordpiece":
            pieces = "word pieces have no bytes: a word with an unknown character is [UNK]"
            raise SettingError(f"data.unknown='bytes' suits data.vocabulary unigram and bpe; {pieces}")


@dataclass(frozen=True)
class MixingConfig:
    """Sets what pre-training reads, and how tasks are mixed [Raffel et al. 2020, section 3.5.2]."""

    # data of pre-training; tasks are all of tuning.mixtures, other-tasks those of the mixtures that the model
    # is not fine-tuned on next
    pretraining: Literal["corpus", "corpus+tasks", "corpus+other-tasks", "tasks"] = setting(
        "corpus", {"tuning.mixtures": GIVEN}
    )
    # whether tasks are sampled in proportion to their number of examples or equally often
    rates: Literal["proportional", "equal"] = setting("proportional", MULTI_TASK)
    # largest number of examples that a task counts as: the paper's K [examples]
    limit: int = setting(2**19, MULTI_TASK | {"rates": ("proportional",)})
    # number of examples that the corpus counts as [x limit]
    corpus_share: float = setting(
        1.0, {"pretraining": ("corpus+tasks", "corpus+other-tasks"), "rates": ("proportional",)}
    )
    # temperature T of sampling: rates are raised to the power 1/T, so that a higher one is more equal
    temperature: float = setting(1.0, MULTI_TASK | {"rates": ("proportional",)})

    def __post_init__(self):
        # 1/T of a smaller T raises the sizes of tasks to powers that overflow float64
        check_at_least(self, "mixing.", limit=1, temperature=0.1)
        check_above_0(self, "mixing.", "corpus_share")


@dataclass(frozen=True)
class PhaseConfig:
    """One phase of training, pre-training or fine-tuning: its length, batches, optimiser and loss."""

    steps: int = 524_288  # number of updates; 0: skip this phase [steps]
    batch_size: int = 128  # global batch size, over all devices and micro-batches [sequences]
    # number of micro-batches into which a batch is split to save memory; the update is the same [parts]
    microbatches: int = 1
    save_every: int = 5_000  # time between two checkpoints; fine-tuning is evaluated at each [steps]
    # also keep one checkpoint per period of this length; 0: only the newest and the best [hours]
    keep_hours: float = 1.0
    log_every: int = 100  # time between two lines of metrics.jsonl [steps]
    optimizer: OptimizerConfig = OptimizerConfig()
    loss: LossConfig = LossConfig()

    def check(self, name: str) -> None:
        """Raise SettingError for impossible numbers; ``name`` is that of the phase."""
        least = {"steps": 0, "keep_hours": 0}
        least |= dict.fromkeys(("batch_size", "microbatches", "save_every", "log_every"), 1)
        check_at_least(self, f"{name}.", **least)
        check_at_most(self, f"{name}.", steps=MAX_INT32)
        if self.batch_size % self.microbatches:
            raise SettingError(
                f"{name}.batch_size={self.batch_size} is not divisible by "
                f"{name}.microbatches={self.microbatches}"
            )


@dataclass(frozen=True)
class StartConfig:
    """Sets what comes before pre-training: a checkpoint, or a short warm-up by another objective.

    The warm-up is part of the set-up, the same in all rows that are compared. A small decoder is slow to
    learn to attend to its inputs, and faster by an objective whose targets copy them.
    """

    # name of the checkpoint to start from, in the folder `starts` beside the runs; --start sets it
    model: str = ""
    # whether the parameters of that checkpoint are used, or random ones of its shape, as a control
    weights: Literal["trained", "random"] = setting("trained", {"model": GIVEN})

    # number of updates of a warm-up on the corpus before pre-training, with its optimiser and batch size; an
    # encoder has one only if start.objective is an objective of encoders, or a causal language model, which
    # makes its mask causal [steps]
    steps: int = setting(0, (DECODER_START, *ENCODER_STARTS))
    objective: Objective = setting(
        OBJECTIVES["bert-style"],
        tuple(condition | {"steps": ABOVE_0} for condition in (DECODER_START, *ENCODER_STARTS)),
    )

    def __post_init__(self):
        check_at_least(self, "start.", steps=0)
        if Path(self.model).name != self.model or self.model == "..":
            raise SettingError(
                f"start.model={self.model!r} should be the name of a folder; --start PATH makes one"
            )
        if self.weights == "random" and not self.model:
            raise SettingError("start.weights='random' needs a checkpoint: name one with --start")


# masks of self-attention in pre-training; with "prefix" the inputs of an example see all of each other
Mask = Literal["causal", "prefix", "bidirectional"]


@dataclass(frozen=True, repr=False)
class PretrainingPhase:
    """A phase of pre-training before the last one: its share of the steps, objective, mask and optimiser.

    Its text names only the settings that differ from the defaults, so that settings added later do not change
    the folders of stages.

    >>> PretrainingPhase(0.25, OBJECTIVES["prefix-lm"], "causal")
    {"share":0.25,"objective":{"noise":"suffix","inputs":"drop","targets":"drop"},"mask":"causal"}
    """

    share: float  # share of pretraining.steps that the phase lasts
    objective: Objective = OBJECTIVES["baseline"]
    mask: Mask | None = None  # mask of self-attention; None: that of model.architecture
    # optimiser of this phase, and of earlier phases without one of their own; its state and its schedule end
    # with this phase. None: this phase shares the optimiser of the next one, with one state and one schedule
    optimizer: OptimizerConfig | None = None

    def __repr__(self) -> str:
        return json.dumps(
            {"share": self.share} | _changed(self, PretrainingPhase(0.0)), separators=(",", ":")
        )

    @classmethod
    def parse(cls, text: str) -> "PretrainingPhase":
        """Return the phase of a JSON object such as ``repr`` writes; its objective may also be a name.

        >>> PretrainingPhase.parse('{"share": 0.25, "objective": "prefix-lm"}').objective.noise
        'suffix'

        SettingError for any other text.
        """
        values = parse_json(text, f"pretraining.phases {text}")
        if not isinstance(values, dict) or not isinstance(values.get("share"), int | float):
            due = 'should be objects such as {"share":0.25,"objective":"causal-lm","mask":"causal"}'
            raise SettingError(f"pretraining.phases={text} {due}")
        name = values.get("objective")
        if isinstance(name, str):
            if name not in OBJECTIVES:
                reason = f"there is no objective {name!r}{did_you_mean(name, OBJECTIVES)}"
                raise SettingError(f"pretraining.phases={text}: {reason}")
            values["objective"] = asdict(OBJECTIVES[name])
        try:
            return from_json(cls, json.dumps(values))
        except SettingError as error:  # which names the setting within the phase alone
            raise SettingError(f"pretraining.phases={text}: {error}") from error


def _changed(config: Any, default: Any) -> dict[str, Any]:
    """Return the settings of ``config`` that differ from those of ``default``, groups as dictionaries."""
    changed: dict[str, Any] = {}
    for field in fields(config):
        value, usual = getattr(config, field.name), getattr(default, field.name)
        if value == usual:
            continue
        group: Any = type(value)
        changed[field.name] = _changed(value, group()) if is_dataclass(value) else value
    return changed


@dataclass(frozen=True)
class PretrainingConfig(PhaseConfig):
    """Pre-training: a phase whose loss on held-out text may be evaluated between two checkpoints."""

    # phases before the last one, which has objective, mask and optimizer, and the steps that they leave; each
    # is a JSON object: share (of steps), objective (settings or a name), mask, optimizer
    phases: tuple[PretrainingPhase, ...] = setting(
        (),
        {"mixing.pretraining": ("corpus",), "data.repeats": (0,), "steps_per_row": (1,)},
    )
    # mask of self-attention in the last phase; None: that of model.architecture
    mask: Mask | None = None
    # time between two evaluations of held-out text; 0: evaluate at each checkpoint [steps]
    evaluate_every: int = 0
    # number of steps that each row of text lasts; each step reads the next data.inputs_length tokens, with
    # the recurrent state of the step before (truncated backpropagation through time) [steps]
    steps_per_row: int = setting(1, {"model.mixer.kind": RECURRENT, "model.architecture": ("decoder",)})

    @property
    def tbptt(self) -> TruncatedBPTT | None:
        """Return the layout of rows that several steps read; None if each step reads new ones."""
        return TruncatedBPTT(self.batch_size, self.steps_per_row) if self.steps_per_row > 1 else None

    @property
    def phase_ends(self) -> tuple[int, ...]:
        """Return the step at which each phase ends, the last phase included.

        Each phase lasts at least one step.
        """
        ends: list[int] = []
        share, left = 0.0, len(self.phases)
        for phase in self.phases:
            share += phase.share
            first = ends[-1] if ends else 0
            ends.append(min(max(round(share * self.steps), first + 1), self.steps - left))
            left -= 1
        return (*ends, self.steps)

    @property
    def optimizer_start(self) -> int:
        """Return the step at which the optimiser of the last phase starts.

        It is the end of the last phase that names an optimiser, or 0.
        """
        named = [end for phase, end in zip(self.phases, self.phase_ends, strict=False) if phase.optimizer]
        return named[-1] if named else 0

    def check(self, name: str) -> None:
        """Raise SettingError for impossible numbers; every checkpoint should be evaluated."""
        super().check(name)
        check_at_least(self, f"{name}.", evaluate_every=0, steps_per_row=1)
        if self.evaluate_every and self.save_every % self.evaluate_every:
            raise SettingError(
                f"{name}.save_every={self.save_every} should be a multiple of "
                f"{name}.evaluate_every={self.evaluate_every}"
            )
        shares = [phase.share for phase in self.phases]
        if any(not 0 < share < 1 for share in shares) or sum(shares) >= 1:
            raise SettingError(
                f"{name}.phases have shares {shares}: each should be above 0, and all together below 1, "
                "which leaves steps for the last phase"
            )
        if 0 < self.steps <= len(shares):
            raise SettingError(
                f"{name}.steps={self.steps} should be at least {len(shares) + 1}, one for each phase"
            )


PAPER_MIXTURES = ("glue", "super_glue", "cnn_dailymail", "squad", "wmt_ende", "wmt_enfr", "wmt_enro")


@dataclass(frozen=True)
class TuningConfig:
    """Tasks that the pre-trained model is fine-tuned on, each mixture or head from the same checkpoint."""

    # mixtures of tasks; the model is fine-tuned on each of them separately
    mixtures: tuple[str, ...] = PAPER_MIXTURES
    # labelled tasks; the model is fine-tuned on each separately, with a classification head
    heads: tuple[str, ...] = ()
    # layers that a head reads: the last, or a learned mixture of all; frozen: the model below the head is not
    # trained
    layers: HeadLayers = setting("last", FINETUNES_HEADS)
    # positions that a head reads: the first, the last, or the mean or maximum of all; None: the last for
    # decoders, the first for encoders (through the pooler, if there is one)
    pool: Pool | None = setting(None, FINETUNES_HEADS)
    # activation of a dense layer between the pooled text and the output of a head, as tanh in RoBERTa's, relu
    # in DistilBERT's and gelu in ELECTRA's; none: no such layer
    dense: HeadDense = setting("none", FINETUNES_HEADS)
    # layout of the texts that a head reads: each with an end, or for decoders START text DELIM text EXTRACT
    # with three sentinels (Radford et al. 2018)
    layout: Layout = setting("ended", FINETUNES_HEADS)
    # width of adapters as a share of d_model; only they are trained; 0: train all parameters
    adapters: float = setting(0.0, FINETUNES)
    # low-rank updates, which alone are trained; an exported model has them merged
    lora: LoraConfig = setting(LoraConfig(), FINETUNES)
    # whether all layers are trained at once, or one more from the top at a time
    unfreezing: Literal["at-once", "gradual"] = setting("at-once", FINETUNES)
    # fine-tune after these fractions of pre-training, so that a run is scored at each of them
    branches: tuple[float, ...] = setting((1.0,), {"pretraining.steps": ABOVE_0})
    # tokens on which the loss of a decoder without an encoder is computed in fine-tuning on mixtures: all of
    # a row, or the targets alone and not the inputs before them
    loss: LossName = setting("all-tokens", DECODER_ONLY | FINETUNES | {"mixtures": GIVEN})
    # length of the inputs of tasks; longer inputs are truncated [tokens]
    inputs_length: int = setting(512, HAS_TASKS)
    # largest size of a task when the tasks of a mixture are sampled; None: no limit [examples]
    examples_limit: int | None = setting(None, FINETUNES | {"mixtures": GIVEN})
    # number of examples of each validation set, from its start, on which checkpoints are compared during
    # training; 0: all [examples]
    evaluation_examples: int = setting(0, HAS_TASKS)
    # number of examples of each validation set on which reported scores are measured; 0: all [examples]
    report_examples: int = setting(0, HAS_TASKS)
    # number of the reported examples of each text-to-text task on which it is also scored with the inputs of
    # other examples, which shows whether it needs its inputs; 0: none [examples]
    shuffled_inputs: int = setting(0, {"mixtures": GIVEN})

    def __post_init__(self):
        check_at_least(self, "tuning.", inputs_length=2, examples_limit=1, adapters=0)
        check_at_most(self, "tuning.", adapters=1_000)
        check_at_least(self, "tuning.", evaluation_examples=0, report_examples=0, shuffled_inputs=0)
        names = [task_name(name) for name in (*self.mixtures, *self.heads)]
        if both := sorted({name for name in names if names.count(name) > 1}):
            raise SettingError(
                f"tuning.mixtures and tuning.heads both name {both}, or one does twice: once is enough"
            )
        rising = all(low < high for low, high in zip((0.0, *self.branches), self.branches, strict=False))
        if not rising or self.branches[-1:] != (1.0,):
            raise SettingError(
                f"tuning.branches={self.branches} should rise from above 0 to 1.0, such as (0.25, 0.5, 1.0)"
            )
        chosen = []
        if self.adapters:
            chosen.append(f"tuning.adapters={self.adapters}")
        if self.lora.rank:
            chosen.append(f"tuning.lora.rank={self.lora.rank}")
        if self.unfreezing == "gradual":
            chosen.append("tuning.unfreezing='gradual'")
        if self.lora.rank and self.layers.endswith("frozen"):
            chosen.append(f"tuning.layers={self.layers!r}")
        if len(chosen) > 1:
            raise SettingError(f"{' and '.join(chosen)} say different things of what is trained: choose one")


@dataclass(frozen=True)
class EnsembleConfig:
    """Models that answer together, by the mean of their logits [Raffel et al. 2020, section 3.6]."""

    members: int = 1  # number of models in the ensemble [models]
    # whether each member is pre-trained, or all are fine-tuned from one pre-training
    pretraining: Literal["separate", "shared"] = setting(
        "separate", {"members": Values(above=1), "pretraining.steps": ABOVE_0}
    )

    def __post_init__(self):
        check_at_least(self, "ensemble.", members=1)
        check_at_most(self, "ensemble.", members=MOST_MEMBERS)


@dataclass(frozen=True)
class Experiment:
    """All settings of one run; the defaults are the baseline of Raffel et al. 2020, section 3.1."""

    data: DataConfig = setting(
        DataConfig(),
        (NETWORK, NGRAMS),
        overrides=dict.fromkeys(("corrupt_records", "workers", "encoders", "cache_size"), ()),
    )
    objective: Objective = setting(OBJECTIVES["baseline"], PRETRAINED)
    model: ModelConfig = setting(
        ModelConfig(),
        NETWORK,
        overrides={"vocab_size": (NETWORK, NGRAMS), "published": {"start.model": GIVEN}},
    )
    vectors: VectorsConfig = setting(VectorsConfig(), NETWORK | NO_CHECKPOINT | {"vectors.epochs": ABOVE_0})
    start: StartConfig = StartConfig()
    pretraining: PretrainingConfig = setting(
        PretrainingConfig(),
        PRETRAINED,
        overrides={"steps": (NETWORK, REPEATED_NGRAMS), "batch_size": (PRETRAINED, REPEATED_NGRAMS)},
    )
    distillation: DistillationConfig = setting(DistillationConfig(), PRETRAINED)
    finetuning: PhaseConfig = setting(
        PhaseConfig(steps=262_144, optimizer=OptimizerConfig(schedule="constant", learning_rate=0.001)),
        FINETUNED,
        overrides={"loss": TUNED_ON_TEXT},
    )
    mixing: MixingConfig = setting(MixingConfig(), PRETRAINED)
    tuning: TuningConfig = setting(
        TuningConfig(),
        (*FINETUNED, MULTI_TASK),
        overrides={
            "mixtures": (*FINETUNED, MULTI_TASK, {"data.vocabulary_texts": ("corpus+tasks",)}),
            "heads": (*FINETUNED, TAGGER),
            "evaluation_examples": (*FINETUNED, MULTI_TASK, TAGGER),
            "report_examples": (*FINETUNED, MULTI_TASK, TAGGER),
        },
    )
    ensemble: EnsembleConfig = setting(EnsembleConfig(), NETWORK)
    counts: CountsConfig = CountsConfig()
    guard: GuardConfig = NEVER_SKIP
    # share of the model's attention heads and of mlp.d_ff that ELECTRA's generator has. It has whole heads,
    # one at least, each as wide as the model's, so that its share of d_model may be larger or smaller
    generator_share: float = setting(
        0.25,
        PRETRAINED | {"objective.targets": Values((*REPLACED, *RESTORED), description="ELECTRA's objective")},
    )
    mesh: MeshConfig = MeshConfig()
    seed: int = 0  # seed of initial parameters, order of examples, corruption and dropout

    def __post_init__(self):
        self.pretraining.check("pretraining")
        self.finetuning.check("finetuning")
        if rank := self.model.lora.rank:
            raise SettingError(
                f"model.lora.rank={rank} should be 0: low-rank updates are set by tuning.lora.rank"
            )
        check_seed(self.seed, "seed", 2**32 // self.ensemble.members - 1)  # each member has its own
        check_above_0(self, "", "generator_share")
        check_at_most(self, "", generator_share=1)
        if self.vectors.epochs and self.model.embedding.encoder == "separate":
            raise SettingError(
                f"vectors.epochs={self.vectors.epochs} makes one embedding to start from: "
                "model.embedding.encoder='separate' should be 'shared'"
            )
        share, width = self.tuning.adapters, self.model.d_model
        if share and round(share * width) < 1:
            due = f"should be at least {1 / width:.4g}, a feature of model.d_model={width}, or 0"
            raise SettingError(f"tuning.adapters={share} {due}")


BASELINE = Experiment()

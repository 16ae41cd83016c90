"""An experiment is one value: all settings of a run. The defaults are the baseline of the T5 paper.

Of libraries only numpy is imported here, no jax, so that listing and comparing rows starts at once.
"""

from dataclasses import dataclass
from pathlib import Path
from typing import Literal

from experiments.study.conditions import (
    BY_HEADS,
    FINETUNED,
    LANGUAGE_MODEL,
    MULTI_TASK,
    NETWORK,
    NGRAMS,
    NO_CHECKPOINT,
    ON_CORPUS,
    ON_TASKS,
    PRETRAINED,
    REPEATED_NGRAMS,
    SENTINELS,
    SHARED_START,
    TAGGER,
    TRAINED_VOCABULARY,
    WHEN_TUNED,
)
from lm.config.base import (
    ABOVE_0,
    GIVEN,
    INT32,
    SettingError,
    Values,
    above_0,
    at_least,
    at_most,
    check_seed,
    setting,
)
from lm.config.classical import CountsConfig, VectorsConfig
from lm.config.mesh import MeshConfig
from lm.config.model import RECURRENT, HeadLayers, LoraConfig, ModelConfig, Pool
from lm.config.training import EVERY_UPDATE, GuardConfig, OptimizerConfig, TruncatedBPTT
from lm.data.tasks.names import task_name
from lm.objectives.denoising import OBJECTIVES, Objective
from lm.tokenizers.tokenizer import Layout

MOST_PROCESSES = 1_024  # of one kind, on a machine
MOST_MEMBERS = 1_000  # of an ensemble


@dataclass(frozen=True)
class DataConfig:
    """The corpus, and how its text becomes tokens."""

    # documentation[/PART], text:, jsonl: or parquet:PATH-or-glob, tfds:NAME[:VERSION], or several: "A + B"
    corpus: str = setting("tfds:c4/en", (PRETRAINED, TRAINED_VOCABULARY, {"vectors.epochs": ABOVE_0}, NGRAMS))
    # passes of pre-training over the same tokens: the corpus is cut to fit; 0: it is read whole [passes]
    repeats: int = setting(0, (ON_CORPUS, NGRAMS))
    # unigram, bpe or wordpiece[:CORPUS], which is trained; or bytes, a .model file, a tokenizer's folder
    vocabulary: str = "unigram"
    # texts that the vocabulary is trained on
    vocabulary_texts: Literal["corpus", "corpus+tasks"] = setting(
        "corpus", TRAINED_VOCABULARY | {"tuning.mixtures": GIVEN}
    )
    vocabulary_size: int = setting(32_000, TRAINED_VOCABULARY)  # word pieces, without sentinels [tokens]
    # how a trained vocabulary spells a character that it lacks; bytes: with 256 of its pieces
    unknown: Literal["unk", "bytes"] = setting("unk", {"vocabulary": ("unigram", "bpe")})
    # number of ids above the word pieces, which stand for spans of noise [tokens]
    sentinels: int = setting(100, SENTINELS)
    # length of pre-training inputs; that of targets follows from the objective [tokens]
    inputs_length: int = setting(512, (PRETRAINED, REPEATED_NGRAMS))
    # lengths of the sequences in which held-out text is scored [x inputs_length]
    held_out_lengths: tuple[int, ...] = setting((1,), PRETRAINED)
    # number of whole held-out documents whose likelihood is evaluated too; 0: none [documents]
    held_out_documents: int = setting(0, (LANGUAGE_MODEL, NGRAMS))
    corrupt_records: Literal["stop", "skip"] = "stop"  # what to do at a damaged TFDS record
    workers: int = 0  # processes that prepare batches; 0: threads do [processes]
    # parts of a batch that read different shards, a multiple of the hosts; 0: 16, or what divides the batch
    streams: int = setting(0, (ON_CORPUS, REPEATED_NGRAMS))
    encoders: int = 4  # processes that tokenize text ahead; 0: it is done when needed [processes]
    cache_size: float = 0.0  # tokenized text that is cached, the newest; 0: all of it [gigabytes]

    def __post_init__(self):
        at_least(self, "data.", sentinels=1, vocabulary_size=1, workers=0, repeats=0, held_out_documents=0)
        at_least(self, "data.", streams=0, encoders=0, cache_size=0, inputs_length=1)
        at_most(self, "data.", workers=MOST_PROCESSES, encoders=MOST_PROCESSES, vocabulary_size=2**24)
        if not self.held_out_lengths or min(self.held_out_lengths) < 1:
            due = "should name one or more numbers of at least 1, such as (1, 2)"
            raise SettingError(f"data.held_out_lengths={self.held_out_lengths} {due}")
        if self.unknown == "bytes" and self.vocabulary.partition(":")[0] == "wordpiece":
            pieces = "word pieces have no bytes: a word with an unknown character is [UNK]"
            raise SettingError(f"data.unknown='bytes' suits data.vocabulary unigram and bpe; {pieces}")


@dataclass(frozen=True)
class MixingConfig:
    """What pre-training reads, and how tasks are mixed [Raffel et al. 2020, section 3.5.2]."""

    # tasks: all of tuning.mixtures; other-tasks: all but those of the mixture that is fine-tuned on next
    pretraining: Literal["corpus", "corpus+tasks", "corpus+other-tasks", "tasks"] = setting(
        "corpus", {"tuning.mixtures": GIVEN}
    )
    # whether tasks are drawn in proportion to their number of examples, or equally often
    rates: Literal["proportional", "equal"] = setting("proportional", MULTI_TASK)
    # largest number of examples that a task counts with: the paper's K [examples]
    limit: int = setting(2**19, MULTI_TASK | {"rates": ("proportional",)})
    # number of examples that the corpus counts with [x limit]
    corpus_share: float = setting(
        1.0, {"pretraining": ("corpus+tasks", "corpus+other-tasks"), "rates": ("proportional",)}
    )
    # rates are raised to the power of 1 / temperature: a higher one makes them more equal
    temperature: float = setting(1.0, MULTI_TASK | {"rates": ("proportional",)})

    def __post_init__(self):
        # a lower one raises sizes to a power that no float64 has
        at_least(self, "mixing.", limit=1, temperature=0.1)
        above_0(self, "mixing.", "corpus_share")


@dataclass(frozen=True)
class PhaseConfig:
    """One phase of training, pre-training or fine-tuning: its length, batches and optimiser."""

    steps: int = 524_288  # number of updates; 0 leaves the phase out [steps]
    batch_size: int = 128  # global batch size, over all devices and micro-batches [sequences]
    microbatches: int = 1  # a batch is split into so many, to save memory; the update is the same [parts]
    save_every: int = 5_000  # interval of checkpoints; fine-tuning is evaluated at each [steps]
    keep_hours: float = 1.0  # interval of checkpoints kept beside the newest and best; 0: none [hours]
    log_every: int = 100  # interval of lines in metrics.jsonl [steps]
    optimizer: OptimizerConfig = OptimizerConfig()

    def check(self, name: str) -> None:
        """Raise SettingError for impossible numbers; ``name`` is that of the phase."""
        least = {"steps": 0, "keep_hours": 0}
        least |= dict.fromkeys(("batch_size", "microbatches", "save_every", "log_every"), 1)
        at_least(self, f"{name}.", **least)
        at_most(self, f"{name}.", steps=INT32)
        if self.batch_size % self.microbatches:
            raise SettingError(
                f"{name}.batch_size={self.batch_size} is not divisible by "
                f"{name}.microbatches={self.microbatches}"
            )


@dataclass(frozen=True)
class StartConfig:
    """What comes before pre-training: a checkpoint, or steps by another objective.

    The steps belong to the set-up, not to what rows compare. A small decoder learns late where to look in its
    inputs, and early by an objective whose targets copy them.
    """

    model: str = ""  # checkpoint to start from: a folder in ``starts`` beside the runs, which --start makes
    # random: only shape and vocabulary are the checkpoint's, as a control
    weights: Literal["trained", "random"] = setting("trained", {"model": GIVEN})

    # number of updates before pre-training, with its corpus, optimiser and batch size; 0: none [steps]
    steps: int = setting(0, NETWORK | SHARED_START)
    objective: Objective = setting(OBJECTIVES["bert-style"], NETWORK | SHARED_START | {"steps": ABOVE_0})

    def __post_init__(self):
        at_least(self, "start.", steps=0)
        if Path(self.model).name != self.model or self.model == "..":
            raise SettingError(
                f"start.model={self.model!r} should be the name of a folder; --start PATH makes one"
            )
        if self.weights == "random" and not self.model:
            raise SettingError("start.weights='random' needs a checkpoint: name one with --start")


@dataclass(frozen=True)
class PretrainingConfig(PhaseConfig):
    """Pre-training: a phase whose loss on held-out text may be evaluated between two checkpoints."""

    evaluate_every: int = 0  # interval of evaluations on held-out text; 0: at each checkpoint [steps]
    # number of steps that read one row of text, data.inputs_length tokens each; a recurrent state is carried
    # from one to the next (truncated backpropagation through time) [steps]
    steps_per_row: int = setting(1, {"model.mixer.kind": RECURRENT, "model.architecture": ("decoder",)})

    @property
    def tbptt(self) -> TruncatedBPTT | None:
        """Return the layout of rows that several steps read; None if each step reads new ones."""
        return TruncatedBPTT(self.batch_size, self.steps_per_row) if self.steps_per_row > 1 else None

    def check(self, name: str) -> None:
        """Raise SettingError for impossible numbers; every checkpoint should be evaluated."""
        super().check(name)
        at_least(self, f"{name}.", evaluate_every=0, steps_per_row=1)
        if self.evaluate_every and self.save_every % self.evaluate_every:
            raise SettingError(
                f"{name}.save_every={self.save_every} should be a multiple of "
                f"{name}.evaluate_every={self.evaluate_every}"
            )


PAPER_MIXTURES = ("glue", "super_glue", "cnn_dailymail", "squad", "wmt_ende", "wmt_enfr", "wmt_enro")


@dataclass(frozen=True)
class TuningConfig:
    """Tasks that the pre-trained model is fine-tuned on, each mixture or head from the same checkpoint."""

    mixtures: tuple[str, ...] = PAPER_MIXTURES  # names in lm.data.tasks.mixtures; each is fine-tuned on alone
    heads: tuple[str, ...] = ()  # labelled tasks, answered by a head; each is fine-tuned on alone
    # layers that heads read: the last, or a mixture of all; frozen: the layers are not trained
    layers: HeadLayers = setting("last", BY_HEADS)
    # position whose vector a head reads, or the mean or maximum over all; None: the last of decoders, the
    # first of encoders (through the pooler, if the model has one)
    pool: Pool | None = setting(None, BY_HEADS)
    # format of the texts that a head reads: an end after each, or for decoders START text DELIM text EXTRACT,
    # which are three sentinels (Radford et al. 2018)
    layout: Layout = setting("ended", BY_HEADS)
    # width of adapters, which alone are trained; 0: no adapters, all parameters are trained [x d_model]
    adapters: float = setting(0.0, WHEN_TUNED)
    # low-rank updates, which alone are trained; an exported model has them merged
    lora: LoraConfig = setting(LoraConfig(), WHEN_TUNED)
    # gradual: one more layer is trained at a time, from the top
    unfreezing: Literal["at-once", "gradual"] = setting("at-once", WHEN_TUNED)
    # fine-tune, and score, after these fractions of pre-training
    branches: tuple[float, ...] = setting((1.0,), {"pretraining.steps": ABOVE_0})
    inputs_length: int = setting(512, ON_TASKS)  # longer inputs are cut at their end [tokens]
    # largest size with which a task is drawn, as mixing.limit in pre-training; None: its own [examples]
    examples_limit: int | None = setting(None, WHEN_TUNED | {"mixtures": GIVEN})
    # number of examples of each validation set that checkpoints are scored on; 0: all [examples]
    evaluation_examples: int = setting(0, ON_TASKS)
    report_examples: int = setting(0, ON_TASKS)  # number that final scores are on; 0: all [examples]

    def __post_init__(self):
        at_least(self, "tuning.", inputs_length=2, evaluation_examples=0, report_examples=0, examples_limit=1)
        names = [*map(task_name, (*self.mixtures, *self.heads))]
        if both := sorted({name for name in names if names.count(name) > 1}):
            raise SettingError(
                f"tuning.mixtures and tuning.heads both name {both}, or one does twice: once is enough"
            )
        rising = all(low < high for low, high in zip((0.0, *self.branches), self.branches, strict=False))
        if not rising or self.branches[-1:] != (1.0,):
            raise SettingError(
                f"tuning.branches={self.branches} should rise from above 0 to 1.0, such as (0.25, 0.5, 1.0)"
            )
        at_least(self, "tuning.", adapters=0)
        at_most(self, "tuning.", adapters=1_000)
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

    members: int = 1  # number of models [models]
    # shared: the members have one pre-training and differ in fine-tuning
    pretraining: Literal["separate", "shared"] = setting(
        "separate", {"members": Values(above=1), "pretraining.steps": ABOVE_0}
    )

    def __post_init__(self):
        at_least(self, "ensemble.", members=1)
        at_most(self, "ensemble.", members=MOST_MEMBERS)


@dataclass(frozen=True)
class Experiment:
    """All settings of one run; the defaults are the baseline of Raffel et al. 2020, section 3.1."""

    data: DataConfig = setting(
        DataConfig(),
        (NETWORK, NGRAMS),
        apart=dict.fromkeys(("corrupt_records", "workers", "encoders", "cache_size"), ()),
    )
    objective: Objective = setting(OBJECTIVES["baseline"], PRETRAINED)
    model: ModelConfig = setting(
        ModelConfig(),
        NETWORK,
        apart={"vocab_size": (NETWORK, NGRAMS), "published": {"start.model": GIVEN}},
    )
    vectors: VectorsConfig = setting(VectorsConfig(), NETWORK | NO_CHECKPOINT | {"vectors.epochs": ABOVE_0})
    start: StartConfig = StartConfig()
    pretraining: PretrainingConfig = setting(
        PretrainingConfig(),
        PRETRAINED,
        apart={"steps": (NETWORK, REPEATED_NGRAMS), "batch_size": (PRETRAINED, REPEATED_NGRAMS)},
    )
    finetuning: PhaseConfig = setting(
        PhaseConfig(steps=262_144, optimizer=OptimizerConfig(schedule="constant", learning_rate=0.001)),
        FINETUNED,
    )
    mixing: MixingConfig = setting(MixingConfig(), PRETRAINED)
    tuning: TuningConfig = setting(
        TuningConfig(),
        (*FINETUNED, MULTI_TASK),
        apart={
            "mixtures": (*FINETUNED, MULTI_TASK, {"data.vocabulary_texts": ("corpus+tasks",)}),
            "heads": (*FINETUNED, TAGGER),
            "evaluation_examples": (*FINETUNED, MULTI_TASK, TAGGER),
            "report_examples": (*FINETUNED, MULTI_TASK, TAGGER),
        },
    )
    ensemble: EnsembleConfig = setting(EnsembleConfig(), NETWORK)
    counts: CountsConfig = CountsConfig()
    guard: GuardConfig = EVERY_UPDATE
    # width of ELECTRA's generator [x the model's]
    generator_share: float = setting(
        0.25, PRETRAINED | {"objective.targets": Values(("replaced",), said="ELECTRA's objective")}
    )
    mesh: MeshConfig = MeshConfig()
    seed: int = 0  # random seed of initial parameters, order of examples, noise and dropout

    def __post_init__(self):
        self.pretraining.check("pretraining")
        self.finetuning.check("finetuning")
        if rank := self.model.lora.rank:
            raise SettingError(f"model.lora.rank={rank}: what is tuned alone is set by tuning.lora.rank")
        check_seed(self.seed, "seed", 2**32 // self.ensemble.members - 1)  # each member has its own
        above_0(self, "", "generator_share")
        at_most(self, "", generator_share=1)
        share, width = self.tuning.adapters, self.model.d_model
        if share and round(share * width) < 1:
            due = f"should be at least {1 / width:.4g}, a feature of model.d_model={width}, or 0"
            raise SettingError(f"tuning.adapters={share} {due}")


BASELINE = Experiment()

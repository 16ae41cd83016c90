"""An experiment is one value; a row of a table is the handful of settings in which it differs from a baseline.

Only the standard library and our settings are imported here, so that listing and comparing rows starts at once.
"""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Literal

from lm.config import SettingError, change, leaves
from lm.data.objectives import OBJECTIVES, Objective
from lm.mesh import MeshConfig
from lm.nn.config import ModelConfig
from lm.train.config import OptimizerConfig


@dataclass(frozen=True)
class DataConfig:
    """What is read, and how it becomes tokens."""

    corpus: str = "tfds:c4/en"  # pre-training text: documentation, text:PATH-or-glob or tfds:NAME[:VERSION]
    vocabulary: str = "unigram"  # unigram (trained on the corpus), bytes, a .model file, or a tokenizer's folder
    vocabulary_size: int = 32_000  # word pieces, sentinels not counted; unused with bytes [tokens]
    sentinels: int = 100  # ids above the word pieces that stand for spans of noise [tokens]
    inputs_length: int = 512  # of pre-training inputs; targets follow from the objective [tokens]
    held_out_lengths: tuple[int, ...] = (1,)  # rows on which held-out text is scored in the end [x inputs_length]
    workers: int = 0  # processes that prepare batches; 0 prepares them in threads [processes]

    def __post_init__(self):
        if self.sentinels < 1 or self.vocabulary_size < 1 or self.workers < 0:
            raise SettingError(
                f"data.sentinels={self.sentinels} and data.vocabulary_size={self.vocabulary_size} should be at least "
                f"1, data.workers={self.workers} at least 0"
            )


@dataclass(frozen=True)
class PhaseConfig:
    """One stretch of training; its learning rate and length. Batch sizes are global."""

    steps: int = 524_288  # updates; 0 leaves the phase out [steps]
    batch_size: int = 128  # global, over all devices and micro-batches [sequences]
    microbatches: int = 1  # parts a batch is split into to save memory; the update is the same [parts]
    save_every: int = 5_000  # between checkpoints; fine-tuning is evaluated at each [steps]
    log_every: int = 100  # between lines of metrics.jsonl [steps]
    optimizer: OptimizerConfig = OptimizerConfig()

    def __post_init__(self):
        for name, least in (("steps", 0), ("batch_size", 1), ("microbatches", 1), ("save_every", 1), ("log_every", 1)):
            if getattr(self, name) < least:
                raise SettingError(f"{name}={getattr(self, name)} should be at least {least}")
        if self.batch_size % self.microbatches:
            raise SettingError(f"batch_size={self.batch_size} is not divisible by microbatches={self.microbatches}")


PAPER_MIXTURES = ("glue", "super_glue", "cnn_dailymail", "squad", "wmt_ende", "wmt_enfr", "wmt_enro")


@dataclass(frozen=True)
class TuningConfig:
    """Which mixtures of tasks the pre-trained model is fine-tuned on, each from the same checkpoint."""

    mixtures: tuple[str, ...] = PAPER_MIXTURES  # names of lm.data.mixtures, each fine-tuned on alone
    heads: tuple[str, ...] = ()  # labelled tasks, each fine-tuned on alone and answered by a head instead of in words
    layers: Literal["last", "mixed-frozen"] = "last"  # what heads read; mixed: all, which then are not trained
    inputs_length: int = 512  # longer inputs are cut at their end [tokens]
    examples_limit: int | None = None  # tasks are drawn in proportion to their size, up to this; None: any [examples]
    evaluation_examples: int = 0  # of each validation set, from its start; 0 takes all [examples]

    def __post_init__(self):
        if self.inputs_length < 2 or self.evaluation_examples < 0:
            raise SettingError(
                f"tuning.inputs_length={self.inputs_length} should be at least 2, tuning.evaluation_examples="
                f"{self.evaluation_examples} at least 0"
            )
        if self.examples_limit is not None and self.examples_limit < 1:
            raise SettingError(f"tuning.examples_limit={self.examples_limit} should be at least 1, or None")


@dataclass(frozen=True)
class Experiment:
    """All settings of one run; the defaults are the baseline of Raffel et al. 2020, section 3.1."""

    data: DataConfig = DataConfig()
    objective: Objective = OBJECTIVES["baseline"]
    model: ModelConfig = ModelConfig()
    pretraining: PhaseConfig = PhaseConfig()
    finetuning: PhaseConfig = PhaseConfig(
        steps=262_144, optimizer=OptimizerConfig(schedule="constant", learning_rate=0.001)
    )
    tuning: TuningConfig = TuningConfig()
    generator_share: float = 0.25  # width of ELECTRA's generator over the model's; unused without replaced-token
    mesh: MeshConfig = MeshConfig()
    seed: int = 0  # of initial parameters, order of examples, noise and dropout


BASELINE = Experiment()

Changes = Mapping[str, Any]


def objective(name: str) -> Changes:
    """The published objective of that name, whole."""
    return {"objective": OBJECTIVES[name]}


def half(number: int) -> int:
    """A relative change, for rows that mean the same at every scale."""
    return number // 2


def apply(experiment: Experiment, new: Changes) -> Experiment:
    """``experiment`` with every ``{path: value}`` of ``new``; a function as value is applied to the old one."""
    for path, value in new.items():
        if callable(value):
            value = value(dict(leaves(experiment))[path])
        experiment = change(experiment, path, value)
    return experiment


@dataclass(frozen=True)
class Row:
    """One row of a table of the paper: what it changes, and what the paper scored."""

    name: str  # "t5/6-corruption-rate/15"
    label: str  # the row's name in the paper
    changes: Changes
    paper: Mapping[str, float]  # column -> score on the validation set

    @property
    def table(self) -> str:
        return self.name.rpartition("/")[0]


@dataclass(frozen=True)
class Table:
    """Rows that are compared with each other."""

    name: str
    title: str
    rows: tuple[Row, ...]


def table(name: str, title: str, scores: Mapping[str, Any] | None, rows: Mapping[str, Changes]) -> Table:
    """The table whose row ``key`` differs from BASELINE by ``rows[key]`` and scored ``scores[key]`` in the paper."""
    if scores is None:
        return Table(name, title, tuple(Row(f"{name}/{key}", key, new, {}) for key, new in rows.items()))
    if missing := set(rows) ^ set(scores):
        raise SettingError(f"table {name}: rows and scores differ in {sorted(missing)}")
    return Table(
        name,
        title,
        tuple(Row(f"{name}/{key}", scores[key]["label"], new, scores[key]["scores"]) for key, new in rows.items()),
    )

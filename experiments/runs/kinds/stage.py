"""The base class of all kinds of training stages."""

from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any, ClassVar

from jax.sharding import Mesh

from experiments.processes.progress import Reporter
from experiments.runs import provenance
from experiments.runs.inputs import EvalSplit, Inputs, first_rows, run_reads_corpus
from experiments.runs.paths import START, is_compared, member_name
from experiments.runs.sources import Sources
from experiments.runs.status import StageLog, saved_steps
from experiments.runs.vocabulary import store_vocabulary, vocabulary_corpus
from experiments.study.experiment import Experiment, PhaseConfig
from experiments.study.settings_diff import result_settings
from lm.config.base import SettingError
from lm.data.batches import Batches
from lm.data.corpus.files import Split
from lm.data.tasks.labelled import LabelledTask, find_labelled
from lm.data.tasks.mixtures import mixture
from lm.data.tasks.task import BaseTask, Row
from lm.objectives.denoising import Lengths
from lm.train.runtime.records import packages

SPLITS: tuple[Split, ...] = ("train", "validation")  # splits of a corpus
CORPUS = "corpus"  # name of the corpus among the tasks of a mixture
READ_ORDER = "in shards, by streams"  # version of the order in which a corpus is read; recorded per stage
READ_ORDER_KEY = f"{CORPUS} is read"  # key of READ_ORDER in origin.json

TaskScores = dict[str, dict[str, Any]]  # task -> its entry in scores.json


@dataclass(frozen=True)
class Stage(ABC):
    """The training of one model in one folder.

    The folder holds checkpoints, metrics, predictions on tasks, the vocabulary and the record of everything
    that the stage is trained with. The members of an ensemble have one stage each, all with the same
    ``name_without_member``, and their models predict together.
    """

    name_without_member: str  # its name, without the number of the ensemble member
    member: int | None  # number of the ensemble member; None: there is one model, or all members share it
    # mixtures that it is trained on, () for the corpus alone; a head or tagger has one labelled task instead
    task_names: tuple[str, ...]
    settings: Experiment  # with the seed of the ensemble member
    folder: Path
    parent: "Stage | None" = None  # the stage whose model it starts from; None: random parameters
    parent_step: int | None = None  # step of the parent's checkpoint; None without a parent

    is_pretraining: ClassVar[bool] = False
    is_shared: ClassVar[bool] = (
        False  # whether several runs may share it; a hash of settings names its folder
    )
    is_count_based: ClassVar[bool] = False  # whether it is an n-gram model or HMM, and not a network
    has_text_model: ClassVar[bool] = True  # False for skip-gram, whose model has vectors and reads no text
    has_head: ClassVar[bool] = False  # whether its predictions come from a new head
    writes_answers: ClassVar[bool] = False  # whether it is fine-tuned to generate text as the answer
    start_without_parent: ClassVar[str] = "random parameters"  # what it starts from if it has no parent
    startup_status: ClassVar[str] = "preparing data, compiling"  # shown until its first step

    @property
    def name(self) -> str:
        """Return its name, such as ``pretraining``, ``squad`` or ``at-0.5/squad``.

        That of an ensemble member ends in the member's number (``paths.member_name``).
        """
        return member_name(self.name_without_member, self.member)

    @property
    def is_compared(self) -> bool:
        """Return whether experiments are compared by its scores.

        They are by the last phase of pre-training, by fine-tuning after all of pre-training, and by models
        made of counts; not by skip-gram, the start pre-training, earlier phases or earlier branches.
        """
        return is_compared(self.name_without_member)

    @property
    def is_start_pretraining(self) -> bool:
        """Return whether it is the start pre-training (``start.steps``), which is not scored.

        It is short, precedes an experiment's own pre-training, and is shared by experiments.
        """
        return self.name_without_member == START

    @property
    def first_step(self) -> int:
        """Return the number of updates before it: the last step of the previous phase, 0 if there is none."""
        return 0

    @property
    def num_steps(self) -> int:
        """Return the number of its updates.

        It is less than ``training.steps``, its last step, if it is a phase after another one.
        """
        return self.training.steps - self.first_step

    @property
    def branch_steps(self) -> tuple[int, ...]:
        """Return the steps at which fine-tuning starts from it, whose checkpoints are kept."""
        return ()

    @property
    def scored_on(self) -> tuple[str, ...]:
        """Return the names of the mixtures, or of the task, that its checkpoints are scored on."""
        return self.task_names

    @property
    def reads_corpus(self) -> bool:
        """Return whether the stage itself is trained on the corpus.

        For the run see ``inputs.run_reads_corpus``.
        """
        return False

    @property
    def needs_collocations(self) -> bool:
        """Return whether its objective masks collocations as a whole (PMI masking).

        They are found in the training text before training.
        """
        return False

    @property
    def labelled_task(self) -> str | None:
        """Return the task that it answers by labels, or None if it answers by generated text."""
        return None

    @property
    @abstractmethod
    def title(self) -> str:
        """Return the title to show while it is trained."""

    @property
    @abstractmethod
    def training(self) -> PhaseConfig:
        """Return the number of steps, the batch size and the optimizer."""

    @property
    def relevant_settings(self) -> Experiment:
        """Return its settings, with those that its results do not depend on reset to the baseline's."""
        return self.settings

    @property
    def lengths(self) -> Lengths:
        """Return the lengths of its sequences, as the settings give them; ``raw``: before corruption."""
        length = self.settings.tuning.inputs_length
        return Lengths(raw=length, inputs=length, targets=0)

    # ---- data

    @property
    def tasks(self) -> dict[str, list[BaseTask]]:
        """Return the tasks that it is trained on ("train") and scored on ("validation", "report").

        Checkpoints are chosen on validation rows; the chosen one is scored on report rows, the test set.
        """
        train: list[BaseTask] = [task for name in self.task_names for task in mixture(name) if task.train]
        validation: list[BaseTask] = [task for name in self.scored_on for task in mixture(name).evaluated]
        return {
            "train": train,
            "validation": validation,
            "report": [task for task in validation if task.report],
        }

    def scored_rows(self, task: BaseTask, split: EvalSplit, inputs: Inputs) -> Sequence[Row]:
        """Return the rows of a task that are scored.

        These are the first ``tuning.evaluation_examples`` of the validation split, or the first
        ``tuning.report_examples`` of the report split.
        """
        tuning = self.settings.tuning
        limit = tuning.report_examples if split == "report" else tuning.evaluation_examples
        rows = first_rows(inputs.sources.rows(task, split), limit)
        task.check_labels(rows)
        return rows

    def fingerprints(self, sources: Sources) -> dict[str, str]:
        """Return the fingerprints of the run's corpus, if it reads one, and of the stage's tasks, by name.

        "corpus train" and "corpus validation"; "documentation": the digest of the built-in text, if the
        corpus contains some of it; "vocabulary train": the corpus on which ``data.vocabulary`` is trained, if
        it names one; "corpus is read": READ_ORDER, recorded for every stage, even if no corpus is read; "TASK
        SPLIT" of each task; "TASK file" of a task from a file.
        """
        found, data = {}, self.settings.data
        if run_reads_corpus(self.settings):
            for split in SPLITS:
                found[f"{CORPUS} {split}"] = sources.corpus_fingerprint(data.corpus, split)
            if digest := sources.documentation_digest(data.corpus):
                found["documentation"] = digest
        if corpus := vocabulary_corpus(self.settings):
            found["vocabulary train"] = sources.corpus_fingerprint(corpus, "train")
        found[READ_ORDER_KEY] = READ_ORDER
        for split_name, tasks in self.tasks.items():
            for task in tasks:
                found[f"{task.name} {split_name}"] = sources.stored(task, split_name).fingerprint
                if task.digest:
                    found[f"{task.name} file"] = task.digest
        return found

    def data_fingerprints(self, inputs: Inputs) -> dict[str, str]:
        """Return ``fingerprints``, and those of data made from the text before training (collocations)."""
        found = self.fingerprints(inputs.sources)
        if self.needs_collocations and inputs.collocations is not None:
            found[provenance.COLLOCATIONS] = inputs.collocations.fingerprint
        return found

    def provenance(self, inputs: Inputs) -> provenance.Provenance:
        """Return the settings, vocabulary, data, code and packages that it is trained with now."""
        return {
            "settings": result_settings(self.relevant_settings),
            "vocabulary": {"fingerprint": inputs.vocabulary.fingerprint},
            "data": self.data_fingerprints(inputs),
            "code": provenance.code(),
            "packages": packages(),
        }

    def check_provenance(
        self, inputs: Inputs, finished: bool, allow: frozenset[str], say: Callable[[str], object]
    ) -> None:
        """Check and record what it is trained with, and store the vocabulary in its folder.

        Raise SettingError if it was started with something else.
        allow: the parts (of provenance.PARTS) that may have changed.
        """
        if finished:
            state = "finished"
        elif saved_steps(self.folder):
            state = "begun"
        else:
            state = "new"
        current = self.provenance(inputs)
        provenance.check(self.folder, current, state, allow, say)
        # With ``allow``, a finished stage may differ from ``current``; its record is then kept. A vocabulary
        # is stored only if the record names the same one. If the record cannot be read, none is stored.
        with suppress(SettingError):
            if provenance.read(self.folder)["vocabulary"] == current["vocabulary"]:
                store_vocabulary(self.folder, inputs.vocabulary)

    # ---- training

    @abstractmethod
    def batches(self, inputs: Inputs) -> Batches | None:
        """Return the training batches, or None if it reads all text at once."""

    @abstractmethod
    def train(
        self,
        inputs: Inputs,
        mesh: Mesh,
        log: StageLog,
        reporter: Reporter,
        profile: tuple[int, int] | None = None,
    ) -> None:
        """Train it to its end, from its newest checkpoint, and evaluate it on the way.

        profile: the first and the last step to trace with jax's profiler.
        """

    # ---- results

    @abstractmethod
    def scores(self, inputs: Inputs, mesh: Mesh, step: int | None = None) -> TaskScores:
        """Return the scores of its model after ``step``, by default of the best checkpoint, by task."""

    @abstractmethod
    def parameters(self) -> int:
        """Return the number of parameters of its model, without fine-tuning heads and generators."""


@dataclass(frozen=True)
class LabelledStage(Stage):
    """A stage of one task that is answered by labels."""

    @property
    def task(self) -> LabelledTask:
        """Return the task."""
        return find_labelled(*self.task_names)

    @property
    def labelled_task(self) -> str:
        return self.task_names[0]

    @property
    def tasks(self) -> dict[str, list[BaseTask]]:
        tasks: list[BaseTask] = [self.task]
        return {"train": tasks, "validation": tasks, "report": [task for task in tasks if task.report]}

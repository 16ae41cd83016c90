"""A stage of training: what every kind has, whatever it trains."""

from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, ClassVar

from jax.sharding import Mesh

from experiments.processes.progress import Reporter
from experiments.runs import provenance
from experiments.runs.inputs import EvalSplit, Inputs, first_rows, reads_corpus
from experiments.runs.paths import START, is_main, member_name
from experiments.runs.sources import Sources
from experiments.runs.status import StageLog, saved_steps
from experiments.runs.vocabulary import store_vocabulary, vocabulary_corpus
from experiments.study.experiment import Experiment, PhaseConfig
from experiments.study.settings_diff import result_settings
from lm.data.batches import Batches
from lm.data.corpus.files import Split
from lm.data.tasks.mixtures import mixture
from lm.data.tasks.task import BaseTask, Row
from lm.objectives.denoising import Lengths
from lm.train.runtime.log import packages

SPLITS: tuple[Split, ...] = ("train", "validation")  # of a corpus
CORPUS = "corpus"  # its name among the tasks of a mixture
READ_ORDER = "in shards, by streams"  # in which a corpus is read; recorded with each stage

TaskScores = dict[str, dict[str, Any]]  # task -> what scores.json says of it


@dataclass(frozen=True)
class Stage(ABC):
    """One stage of training: of one model, in a folder of its own.

    The folder holds checkpoints, metrics, answers to tasks, the vocabulary, and what all was trained with.
    The members of an ensemble have stages of one ``base_name``, and answer together.
    """

    base_name: str  # its name without the member
    member: int | None  # of the ensemble; None: the run has one model, or its members share this stage
    on: tuple[str, ...]  # mixtures of tasks, in pre-training beside the corpus; of a head or tagger its task
    settings: Experiment  # with the seed of the member
    folder: Path
    parent: "Stage | None" = None  # whose model it starts from; None: from random parameters
    parent_step: int | None = None  # after which it starts from there; None without a parent [steps]

    is_pretraining: ClassVar[bool] = False
    is_shared: ClassVar[bool] = False  # whether runs share it: its folder is called by a hash of its settings
    is_counted: ClassVar[bool] = False  # whether its model is made of counts
    has_model: ClassVar[bool] = True  # whether a model of texts comes out of it
    has_head: ClassVar[bool] = False  # whether a head answers
    writes_answers: ClassVar[bool] = False  # whether it is fine-tuned to answer in words
    parentless_start: ClassVar[str] = "random parameters"  # what it starts from without a parent
    preparation: ClassVar[str] = "preparing data, compiling"  # what is shown until its first step

    @property
    def name(self) -> str:
        """Return its name, such as ``pretraining``, ``squad`` or ``at-0.5/squad``, with its member."""
        return member_name(self.base_name, self.member)

    @property
    def is_main(self) -> bool:
        """Return whether runs are compared by it: it is neither vectors, a start nor a branch."""
        return is_main(self.base_name)

    @property
    def is_start(self) -> bool:
        """Return whether another pre-training continues from it, and nothing is measured of it."""
        return self.base_name == START

    @property
    def branch_steps(self) -> tuple[int, ...]:
        """Return after which steps fine-tuning starts from it, so that their checkpoints stay."""
        return ()

    @property
    def scored_on(self) -> tuple[str, ...]:
        """Return the mixtures or the task that its checkpoints are scored on."""
        return self.on

    @property
    def reads_corpus(self) -> bool:
        """Return whether it is trained on the corpus."""
        return False

    @property
    def labelled_task(self) -> str | None:
        """Return the task that it answers by labels; None: it answers in words."""
        return None

    @property
    @abstractmethod
    def title(self) -> str:
        """Return what is shown while it is trained."""

    @property
    @abstractmethod
    def training(self) -> PhaseConfig:
        """Return its length, batch size and optimiser."""

    @property
    def decisive(self) -> Experiment:
        """Return the settings that its numbers depend on."""
        return self.settings

    @property
    def lengths(self) -> Lengths:
        """Return the lengths of its rows, by the settings alone."""
        length = self.settings.tuning.inputs_length
        return Lengths(length, length, 0)

    # ---- data

    @property
    def tasks(self) -> dict[str, list[BaseTask]]:
        """Return the tasks that it is trained on ("train") and scored on ("validation", "report")."""
        train: list[BaseTask] = [task for name in self.on for task in mixture(name) if task.train]
        validation: list[BaseTask] = [task for name in self.scored_on for task in mixture(name).evaluated]
        return {"train": train, "validation": validation, "report": [x for x in validation if x.report]}

    def scored_rows(self, task: BaseTask, split: EvalSplit, inputs: Inputs) -> Sequence[Row]:
        """Return the first ``tuning.evaluation_examples`` or ``tuning.report_examples`` of a task."""
        tuning = self.settings.tuning
        limit = tuning.report_examples if split == "report" else tuning.evaluation_examples
        rows = first_rows(inputs.sources.rows(task, split), limit)
        task.check_labels(rows)
        return rows

    def fingerprints(self, sources: Sources) -> dict[str, str]:
        """Return ``{"corpus train": fingerprint, ...}`` of every split that it reads."""
        found, data = {}, self.settings.data
        for split in SPLITS if reads_corpus(self.settings) else ():
            found[f"{CORPUS} {split}"] = sources.corpus_fingerprint(data.corpus, split)
        if corpus := vocabulary_corpus(self.settings):
            found["vocabulary train"] = sources.corpus_fingerprint(corpus, "train")
        found[f"{CORPUS} is read"] = READ_ORDER
        for split_name, tasks in self.tasks.items():
            for task in tasks:
                found[f"{task.name} {split_name}"] = sources.stored(task, split_name).fingerprint
                if task.digest:
                    found[f"{task.name} file"] = task.digest
        return found

    def provenance(self, inputs: Inputs) -> provenance.Provenance:
        """Return what it is trained with."""
        return {
            "settings": result_settings(self.decisive),
            "vocabulary": {"fingerprint": inputs.vocabulary.fingerprint},
            "data": self.fingerprints(inputs.sources),
            "code": provenance.code(),
            "packages": packages(),
        }

    def check_provenance(
        self, inputs: Inputs, is_finished: bool, allow: frozenset[str], say: Callable[[str], object]
    ) -> None:
        """Record what it is trained with; SettingError if it was started with something else.

        ``allow`` names what may have changed, of provenance.PARTS.
        """
        state = "finished" if is_finished else "begun" if saved_steps(self.folder) else "new"
        current = self.provenance(inputs)
        provenance.check(self.folder, current, state, allow, say)
        # a finished stage keeps its own vocabulary where another is allowed
        if provenance.read(self.folder)["vocabulary"] == current["vocabulary"]:
            store_vocabulary(self.folder, inputs.vocabulary)

    # ---- training

    @abstractmethod
    def batches(self, inputs: Inputs) -> Batches | None:
        """Return the batches that it is trained on; None: it reads all text at once."""

    @abstractmethod
    def train(
        self,
        inputs: Inputs,
        mesh: Mesh,
        log: StageLog,
        reporter: Reporter,
        profile: tuple[int, int] | None = None,
    ) -> None:
        """Train what remains of it, from its newest checkpoint, and evaluate it.

        ``profile``: the first and the last step that jax's profiler traces.
        """

    # ---- what it has learnt

    @abstractmethod
    def scores(self, inputs: Inputs, mesh: Mesh, step: int | None = None) -> TaskScores:
        """Return what its model after ``step``, by default the best, scores on its tasks."""

    @abstractmethod
    def parameters(self) -> int:
        """Return how many numbers its model consists of, without heads."""

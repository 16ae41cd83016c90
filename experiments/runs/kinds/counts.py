"""Models made of counts, n-grams and taggers: all text is counted at once."""

import time
from abc import abstractmethod
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, ClassVar, cast

import jax
import numpy as np
from jax.sharding import Mesh

from experiments.processes.cluster import broadcast_from_first
from experiments.processes.progress import Reporter
from experiments.runs.inputs import Inputs, held_out_text, training_streams
from experiments.runs.kinds.network import predictions_path
from experiments.runs.kinds.stage import LabelledStage, Stage, TaskScores
from experiments.runs.paths import COUNTS_FILE
from experiments.runs.result import to_log_dict
from experiments.runs.status import StageLog
from experiments.runs.task_scores import score_values, task_score
from experiments.study.experiment import PhaseConfig
from lm.classical.hmm import HMMTagger, estimate_tagger, load_tagger, save_tagger, tag_words
from lm.classical.ngram import (
    KneserNey,
    count_ngrams,
    estimate_kneser_ney,
    load_kneser_ney,
    save_kneser_ney,
    token_log_probs,
)
from lm.data.tasks.labelled import AnyTask
from lm.data.tasks.task import BaseTask, Row
from lm.evaluate.evaluator import write_predictions

ONE_STEP = PhaseConfig(steps=1)


@dataclass(frozen=True)
class CountStage(Stage):
    """A stage that counts; its one step reads everything."""

    is_count_based: ClassVar[bool] = True
    start_without_parent: ClassVar[str] = "no counts"
    startup_status: ClassVar[str] = ""

    @abstractmethod
    def estimate(self, inputs: Inputs) -> tuple[Any, int]:
        """Return the model, and how many tokens it counted."""

    @abstractmethod
    def save(self, model: Any, path: Path) -> None:
        """Write a model to a file."""

    @abstractmethod
    def load(self, path: Path) -> Any:
        """Return the model in a file; DataError if it is missing or damaged."""

    @abstractmethod
    def size_of(self, model: Any) -> int:
        """Return how many numbers a model consists of."""

    @abstractmethod
    def evaluate(self, model: Any, inputs: Inputs) -> dict[str, Any]:
        """Return what is recorded of a model."""

    @property
    def title(self) -> str:
        return "counting n-grams" if self.name == "counts" else f"counting for {self.name}"

    @property
    def training(self) -> PhaseConfig:
        return ONE_STEP

    def model(self) -> Any:
        """Return its model; DataError if its file is missing or damaged."""
        return self.load(self.folder / COUNTS_FILE)

    def parameters(self) -> int:
        return self.size_of(self.model())

    def batches(self, inputs: Inputs) -> None:
        return None

    def train(
        self,
        inputs: Inputs,
        mesh: Mesh,
        log: StageLog,
        reporter: Reporter,
        profile: tuple[int, int] | None = None,
    ) -> None:
        log.resume_after(0)
        began = time.perf_counter()
        model, tokens = self.estimate(inputs)
        spent = {"seconds_per_step": time.perf_counter() - began, "tokens": float(tokens)}
        if jax.process_index() == 0:
            self.save(model, self.folder / COUNTS_FILE)
        broadcast_from_first(lambda: None)  # the first process has written the file
        log.write(self.training.steps, "train", spent)
        log.write(self.training.steps, "eval", self.evaluate(model, inputs))
        reporter.advance(self.training.steps)


@dataclass(frozen=True)
class Ngrams(CountStage):
    """N-grams with Kneser-Ney smoothing, a language model."""

    @property
    def reads_corpus(self) -> bool:
        return True

    @property
    def tasks(self) -> dict[str, list[BaseTask]]:
        return {"train": [], "validation": [], "report": []}

    def estimate(self, inputs: Inputs) -> tuple[KneserNey, int]:
        settings = self.settings
        text = training_streams(settings, inputs).read_epoch()  # which networks read once, or again and again
        # An EOS ends each document, as it separates them where networks read them.
        offsets = np.unique(text.offsets)
        tokens = np.insert(text.tokens.astype(np.int64), offsets[1:], inputs.vocabulary.eos)
        offsets += np.arange(len(offsets))
        counted = count_ngrams(tokens, offsets, settings.counts.order, settings.model.vocab_size)
        return estimate_kneser_ney(counted), len(tokens)

    def save(self, model: KneserNey, path: Path) -> None:
        save_kneser_ney(model, path)

    def load(self, path: Path) -> KneserNey:
        return load_kneser_ney(path)

    def size_of(self, model: KneserNey) -> int:
        return sum(map(len, model.probs + model.backoffs))

    def evaluate(self, model: KneserNey, inputs: Inputs) -> dict[str, float]:
        text = held_out_text(self.settings, inputs)
        if not text.documents:
            return {}
        log_prob = token_log_probs(model, *texts_as_counted(text.documents)).sum()
        return to_log_dict(text.likelihood(float(log_prob)))

    def scores(self, inputs: Inputs, mesh: Mesh, step: int | None = None) -> TaskScores:
        return {}


def texts_as_counted(texts: Sequence[Sequence[int]]) -> tuple[np.ndarray, np.ndarray]:
    """Return texts of ids as tokens int64 [N] and offsets int64 [texts + 1]."""
    offsets = np.cumsum([0, *map(len, texts)])
    return np.concatenate([np.asarray(text, np.int64) for text in texts]), offsets


@dataclass(frozen=True)
class Tagger(LabelledStage, CountStage):
    """A hidden Markov model that tags the words of a labelled task."""

    def estimate(self, inputs: Inputs) -> tuple[HMMTagger, int]:
        task = self.task
        sentences = [
            [(word, task.labels[number]) for word, number in zip(words, numbers, strict=True)]
            for (words,), numbers in map(task.to_text, inputs.sources.rows(task, "train"))
        ]
        return estimate_tagger(sentences, self.settings.counts.markov), sum(map(len, sentences))

    def save(self, model: HMMTagger, path: Path) -> None:
        save_tagger(model, path)

    def load(self, path: Path) -> HMMTagger:
        return load_tagger(path)

    def size_of(self, model: HMMTagger) -> int:
        dense = model.initial_counts.size + model.transition_counts.size
        return int(dense + np.count_nonzero(model.emission_counts))

    def tags(self, model: HMMTagger, rows: Sequence[Row]) -> list[list[int]]:
        """Return the class of each word of each row of the task, decided as ``counts.tagging`` says."""
        task, counts = self.task, self.settings.counts
        widths = {"greedy": 1, "beam": counts.beam_width, "viterbi": len(model.tags)}
        answers = []
        for (words,) in map(task.texts, rows):
            if counts.tagging == "most-frequent":
                tags = model.most_frequent_tags(words)
            else:
                tags = tag_words(model, words, widths[counts.tagging])
            answers.append([task.labels.index(name) for name in tags])
        return answers

    def evaluate(self, model: HMMTagger, inputs: Inputs) -> dict[str, Any]:
        rows = self.scored_rows(self.task, "validation", inputs)
        values = score_values(self.task, self.task.evaluate(rows, self.tags(model, rows)))
        return values | {"score": values.get(f"{self.task.name}/score")}

    def scores(self, inputs: Inputs, mesh: Mesh, step: int | None = None) -> TaskScores:
        """Return its scores on the report rows or, where there are none, on the validation rows."""
        task, last, model = cast(AnyTask, self.task), self.training.steps, self.model()
        rows = self.scored_rows(task, "report" if task.report else "validation", inputs)
        answers = self.tags(model, rows)
        if jax.process_index() == 0:
            write_predictions(predictions_path(self.folder, task, last), task, rows, answers)
        return {task.name: task_score(task, last, task.evaluate(rows, answers)) | {"rows": len(rows)}}


COUNT_STAGES: dict[str, type[CountStage]] = {"ngram": Ngrams, "tagger": Tagger}  # by counts.model

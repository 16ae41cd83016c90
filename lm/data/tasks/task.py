"""A task: how rows of a dataset become inputs and targets, and how its predictions are scored."""

import dataclasses
import hashlib
from collections.abc import Callable, Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any, Literal

import numpy as np

from lm.config.base import DataError, SettingError
from lm.data.corpus.spec import dataset_rows
from lm.data.corpus.tables import TableRows
from lm.data.corpus.tfds import OnCorrupt, Row
from lm.metrics import CORRELATIONS, MEANS_OVER_EXAMPLES, Metric, Value, check_lengths, mean_value

PaperColumn = Literal["GLUE", "CNNDM", "SQuAD", "SGLUE", "EnDe", "EnFr", "EnRo"]  # Raffel et al. 2020
# The score of a task: the mean of its metrics, or a measure by likelihood (lm.evaluate.ranked_choice).
Measure = Literal["score", "bits_above_chance", "bits_per_byte"]
LOWER_IS_BETTER = {"bits_per_byte"}
# The half of the tasks that a task is averaged with in reports. "reading": it cannot be answered without its
# input. "language": it measures how well a model knows the language of the text. "": the task does not say,
# and reports count it as "reading".
TaskHalf = Literal["reading", "language", ""]
NO_CLASS = -1  # the class of an answer that is no label word; wrong whatever the label
UNKNOWN = "<unk>"  # the target text of a row without a label, as in T5; never scored or trained on

ReadTexts = Callable[[Row], tuple[Any, ...]]  # returns the texts that a model reads in a row
HeadKind = Literal["classes", "regression", "tokens", "span", "choice"]


@dataclasses.dataclass(frozen=True)
class BaseTask:
    """The rows, targets and metrics of a task, whether the model answers in text or by a head."""

    name: str
    source: str  # a data set, in the notation of ``lm.data.corpus.spec.dataset_rows``
    column: str | None  # column of the reports whose mean includes the score; None: no column does
    target: Callable[[Row], Any]  # returns what predictions are compared with; None if the row has no label
    metrics: Mapping[str, Metric]  # by name
    _: dataclasses.KW_ONLY
    # turns a prediction into what metrics compare with the target
    postprocess: Callable[[Any, Row], Any] = lambda prediction, row: prediction
    unscored_metrics: tuple[str, ...] = ()  # names of metrics that are reported but not part of the score
    labels: tuple[str, ...] = ()  # names of the classes
    train: str | None = "train"  # split to train on; None: never
    validation: str | None = "validation"  # split to evaluate checkpoints on; None: never
    # the test split, to score the chosen checkpoint on; None: its validation score is reported, as in T5
    report: str | None = None
    paper_column: PaperColumn | None = None  # for a task that is not in the paper: the column most like it
    measure: Measure = "score"
    half: TaskHalf = ""
    file: Path | None = None  # the task file; None: a built-in task
    # raises SettingError or DataError for rows that do not fit the task file
    check_rows: Callable[[Sequence[Row]], None] = lambda rows: None

    def rows(self, split: str, cache: Path, corrupt: OnCorrupt = "stop") -> Sequence[Row]:
        """Return the rows of a split: "train", "validation", "report", or the name of a split of the source.

        ``cache``: the folder that holds prepared data sets. ``corrupt``: whether corrupt records stop the
        reading; only training may skip them. Raises SettingError if the task has no such split.
        """
        named = {"train": self.train, "validation": self.validation, "report": self.report}
        source_split = named.get(split, split)
        if source_split is None:
            reason = f"is not in [splits] of {self.file}" if self.file else "is not in the study"
            raise SettingError(f"task {self.name!r} has no {split} split: it {reason}")
        return dataset_rows(self.source, source_split, cache, corrupt)

    def is_labelled(self, row: Row) -> bool:
        """Return whether a row has a label; those of test sets are often not public."""
        return self.target(row) is not None

    def check_labels(self, rows: Sequence[Row], indices: Iterable[int] | None = None) -> None:
        """Raise DataError for the first row without a label.

        ``indices``: the positions of the rows in their data set; None: ``rows`` is all of it.
        """
        indices = range(len(rows)) if indices is None else indices
        for index, row in zip(indices, rows, strict=True):
            if not self.is_labelled(row):
                location = rows.location(index) if isinstance(rows, TableRows) else f"row {index + 1}"
                raise DataError(
                    f"task {self.name!r}: {location} has no label, by which to train or to score: leave such "
                    "rows out, or name a split with labels"
                )

    @property
    def name_or_path(self) -> str:
        """Return the name or the path by which ``find_task`` and ``find_labelled`` find the task again."""
        return str(self.file or self.name)

    @property
    def digest(self) -> str | None:
        """Return the SHA-256 of the task file, in hex; None for a built-in task."""
        return hashlib.sha256(self.file.read_bytes()).hexdigest() if self.file else None

    @property
    def direction(self) -> Literal[1, -1]:
        """Return 1 if a higher ``measure`` is better, -1 if a lower one is."""
        return -1 if self.measure in LOWER_IS_BETTER else 1

    @property
    def num_answers(self) -> int | None:
        """Return among how many answers the model chooses; None if it writes, marks or tags them."""
        return len(self.labels) or None

    @property
    def chance(self) -> float | None:
        """Return the score of uniform guesses.

        None where it depends on the rows, as with free text, and for tags of words, of which one is often by
        far the commonest, so that uniform guesses say nothing.
        """
        if self.measure == "bits_above_chance":
            return 0.0
        scored = {name for name in self.metrics if name not in self.unscored_metrics}
        if self.measure != "score" or not scored:
            return None
        if scored <= CORRELATIONS:
            return 0.0
        if scored == {"accuracy"} and self.num_answers is not None:
            return 100 / self.num_answers
        return None

    def evaluate(self, rows: Sequence[Row], predictions: Sequence[Any]) -> dict[str, Value]:
        """Return all metrics of predictions, and ``score``: the mean of those that are scored.

        Raises DataError for a row without a label.
        """
        check_lengths(rows, predictions)
        self.check_labels(rows)
        targets = [self.target(row) for row in rows]
        answers = self._answers(rows, predictions)
        metrics = {name: metric(targets, answers) for name, metric in self.metrics.items()}
        scored = {name: value for name, value in metrics.items() if name not in self.unscored_metrics}
        return metrics | {"score": mean_value(scored)}

    def example_scores(self, rows: Sequence[Row], predictions: Sequence[Any]) -> np.ndarray | None:
        """Return the score of each row alone, float64 [N], whose mean is the score of all.

        None if a metric of the score is not such a mean: a correlation, or the F1 of a class.
        """
        scored = [metric for name, metric in self.metrics.items() if name not in self.unscored_metrics]
        if not MEANS_OVER_EXAMPLES.issuperset(scored):
            return None
        scores = []
        for row, answer in zip(rows, self._answers(rows, predictions), strict=True):
            scores.append([metric([self.target(row)], [answer]) for metric in scored])
        return np.array(scores, np.float64).mean(1)

    def _answers(self, rows: Sequence[Row], predictions: Sequence[Any]) -> list[Any]:
        """Return what metrics compare with the targets."""
        return [self.postprocess(answer, row) for answer, row in zip(predictions, rows, strict=True)]


@dataclasses.dataclass(frozen=True)
class Task(BaseTask):
    """A text-to-text task: inputs and targets are texts."""

    to_text: Callable[[Row], tuple[str, str]]  # returns (inputs, targets)
    _: dataclasses.KW_ONLY
    # returns the training examples that a row becomes; None: the row itself
    training_rows: Callable[[Row], list[Row]] | None = None
    # returns all answers to choose from, the right one among them; None: there is no choice
    candidates: Callable[[Row], tuple[str, ...]] | None = None
    # returns all inputs to choose from, the row's own among them, for the row's target; None: no choice
    candidate_inputs: Callable[[Row], tuple[str, ...]] | None = None
    # targets_length of the mixture of this task alone, EOS included [tokens]; None: there is no such mixture
    targets_length: int | None = None
    longer_targets: Literal["stop", "cut"] = "cut"  # stop: an error before training; cut: the end is lost

    def rows(self, split: str, cache: Path, corrupt: OnCorrupt = "stop") -> Sequence[Row]:
        rows = super().rows(split, cache, corrupt)
        if split != "train" or self.training_rows is None:
            return rows
        self.check_labels(rows)
        return [example for row in rows for example in self.training_rows(row)]

    def choices(self, row: Row) -> tuple[list[tuple[str, str]], int]:
        """Return the (inputs, answer) pairs of a row to choose from, and the index of the right one.

        Without a choice there is one pair.
        """
        inputs, target = self.to_text(row)
        if self.candidates is not None:
            pairs = [(inputs, answer) for answer in self.candidates(row)]
        elif self.candidate_inputs is not None:
            pairs = [(candidate, target) for candidate in self.candidate_inputs(row)]
        else:
            pairs = [(inputs, target)]
        return pairs, pairs.index((inputs, target))


@dataclasses.dataclass(frozen=True)
class LabelledTask(BaseTask):
    """A task that a head on the model answers.

    What ``texts`` returns, and what targets and predictions are, depends on ``kind``:

    - classes: one text or two; a class.
    - regression: one text or two; a number.
    - tokens: a list of words; the class of each.
    - span: question and context; the target is all right answers, the prediction one answer.
    - choice: the texts of each candidate; the index of a candidate.
    """

    kind: HeadKind
    texts: ReadTexts  # returns what the model reads in a row
    _: dataclasses.KW_ONLY
    # returns [start, end) of a span's answer in the context [characters]; None: the context lacks it
    answer_span: Callable[[Row], tuple[int, int] | None] | None = None
    # returns the rows of the task from those of the source; None: they are the same
    derive_rows: Callable[[Sequence[Row]], Sequence[Row]] | None = None
    num_candidates: int | None = None  # of each row of a choice; None: rows differ in it

    def rows(self, split: str, cache: Path, corrupt: OnCorrupt = "stop") -> Sequence[Row]:
        rows = super().rows(split, cache, corrupt)
        return self.derive_rows(rows) if self.derive_rows else rows

    @property
    def num_answers(self) -> int | None:
        if self.kind == "tokens":
            return None
        return self.num_candidates if self.kind == "choice" else super().num_answers

    def to_text(self, row: Row) -> tuple[Any, Any]:
        """Return what the model reads in a row (``texts``, not one formatted text), and the target.

        It is the counterpart of ``Task.to_text``.
        """
        return self.texts(row), self.target(row)


# ---- parts that many tasks share


def class_from_text(labels: Sequence[str]) -> Callable[[str, Row], int]:
    """Return a ``postprocess`` function: the index of a label word, NO_CLASS for any other text."""
    return lambda text, row: list(labels).index(text) if text in labels else NO_CLASS


def label_of(row: Row) -> Any:
    """Return the field ``label`` of a row, a class or a number; None if it is unknown (-1 in data sets)."""
    label = row["label"]
    return None if label is None or label < 0 else label


def label_word(labels: Sequence[str], row: Row) -> str:
    """Return the label word of a row's class; UNKNOWN, as in T5, if the class is unknown."""
    label = label_of(row)
    return UNKNOWN if label is None else labels[label]


def format_fields(name: str, row: Row, fields: Sequence[str]) -> str:
    """Return ``"name field: value field: value"``, T5's format of inputs."""
    return " ".join([name, *(f"{field}: {row[field]}" for field in fields)])


def fields_template(name: str, columns: Sequence[str]) -> str:
    """Return a template that, filled with a row, gives ``format_fields``."""
    return format_fields(name, {column: f"{{{column}}}" for column in columns}, columns)

"""Tasks turn rows of a dataset into text, and text back into what their metrics compare."""

import dataclasses
import hashlib
from collections.abc import Callable, Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any, Literal

from lm.config.base import DataError, SettingError
from lm.data.corpus.spec import dataset_rows
from lm.data.corpus.tables import TableRows
from lm.data.corpus.tfds import OnCorrupt, Row
from lm.metrics import Metric, Value, check_lengths, overall

Column = Literal["GLUE", "CNNDM", "SQuAD", "SGLUE", "EnDe", "EnFr", "EnRo"]  # of the paper's tables
# A task's result: the mean of its metrics, or a measure by likelihood (lm.evaluate.ranked_choice).
Measure = Literal["score", "bits_above_chance", "bits_per_byte"]
LOWER = {"bits_per_byte"}  # measures of which less is better
NO_CLASS = -1  # the class of an answer that is no label word; wrong whatever the label
UNKNOWN = "<unk>"  # the answer of a row without a label, as in T5; it is neither scored nor trained on

Texts = Callable[[Row], tuple[Any, ...]]  # returns the texts of a row
Kind = Literal["classes", "regression", "tokens", "span", "choice"]


@dataclasses.dataclass(frozen=True)
class Scored:
    """What all tasks have in common, whether a model answers in words or by a head."""

    name: str
    source: str  # a data set, as ``lm.data.corpus.spec.dataset_rows`` reads it
    column: str | None  # in which its score counts: one of the paper, or its own name; None: in none
    target: Callable[[Row], Any]  # returns what metrics compare with; None: the row has no label
    metrics: Mapping[str, Metric]  # by name
    _: dataclasses.KW_ONLY
    from_text: Callable[[Any, Row], Any] = lambda prediction, row: prediction  # returns what metrics compare
    beside: tuple[str, ...] = ()  # metrics that are shown and do not count
    labels: tuple[str, ...] = ()  # names of the classes
    train: str | None = "train"  # split to train on; None: never
    validation: str | None = "validation"  # split to evaluate checkpoints on; None: never
    # split on which the chosen checkpoint alone is scored; None: the validation split's score stands, as T5's
    report: str | None = None
    like: Column | None = None  # the paper's column of the same kind, for a task that the paper has not
    measure: Measure = "score"
    file: Path | None = None  # the file that declares it; None: this package does
    # raises SettingError for rows that do not fit what a file declares; None: rows are not checked
    checked: Callable[[Sequence[Row]], None] | None = None

    def rows(self, split: str, cache: Path, corrupt: OnCorrupt = "stop") -> Sequence[Row]:
        """Return the rows of a split: "train", "validation", or the name of a split of the source.

        ``corrupt``: whether corrupt rows stop the reading; only training may skip them. SettingError if the
        task has no such split.
        """
        named = {"train": self.train, "validation": self.validation}
        named |= {"report": self.report} if self.file else {}
        if (stored := named.get(split, split)) is None:
            has = f"is not in [splits] of {self.file}" if self.file else "is not in the study"
            raise SettingError(f"task {self.name!r} has no {split} split: it {has}")
        return dataset_rows(self.source, stored, cache, corrupt)

    def check(self, rows: Sequence[Row]) -> None:
        """Raise SettingError or DataError, with file and line, for rows that do not fit the task's file."""
        if self.checked is not None:
            self.checked(rows)

    def is_labelled(self, row: Row) -> bool:
        """Return whether a row has a label; those of test sets are often withheld."""
        return self.target(row) is not None

    def check_labels(self, rows: Sequence[Row], numbers: Iterable[int] | None = None) -> None:
        """Raise DataError for the first row without a label.

        ``numbers``: the indices of the rows in their data set; None: the rows are all of it.
        """
        numbers = range(len(rows)) if numbers is None else numbers
        for number, row in zip(numbers, rows, strict=True):
            if not self.is_labelled(row):
                place = rows.location(number) if isinstance(rows, TableRows) else f"row {number + 1}"
                raise DataError(
                    f"task {self.name!r}: {place} has no label, by which to train or to score: leave such "
                    "rows out, or name a split with labels"
                )

    @property
    def handle(self) -> str:
        """Return the name or the file by which ``find_task`` and ``find_labelled`` find the task again."""
        return str(self.file or self.name)

    @property
    def digest(self) -> str | None:
        """Return the SHA-256 of the file that declares the task, in hex; None if there is no file."""
        return hashlib.sha256(self.file.read_bytes()).hexdigest() if self.file else None

    @property
    def better(self) -> Literal[1, -1]:
        """Return 1 if more of its measure is better, -1 if less is."""
        return -1 if self.measure in LOWER else 1

    def evaluate(self, rows: Sequence[Row], predictions: Sequence[Any]) -> dict[str, Value]:
        """Return all metrics of predictions, and ``score``: the mean of the metrics that count.

        DataError for a row without a label.
        """
        check_lengths(rows, predictions)
        self.check_labels(rows)
        targets = [self.target(row) for row in rows]
        values = [self.from_text(prediction, row) for prediction, row in zip(predictions, rows, strict=True)]
        scores = {name: metric(targets, values) for name, metric in self.metrics.items()}
        counted = {name: value for name, value in scores.items() if name not in self.beside}
        return scores | {"score": overall(counted)}


@dataclasses.dataclass(frozen=True)
class Task(Scored):
    """A text-to-text task, whose inputs and answers are in words."""

    to_text: Callable[[Row], tuple[str, str]]  # returns (inputs, targets)
    _: dataclasses.KW_ONLY
    training: Callable[[Row], list[Row]] | None = None  # returns the rows to train on of a row; None: itself
    # returns the answers to choose from, the right one among them; None: no choice
    candidates: Callable[[Row], tuple[str, ...]] | None = None
    # returns inputs to choose from, the row's own among them, all with the row's answer; None: no choice
    premises: Callable[[Row], tuple[str, ...]] | None = None
    # length of targets where the task is fine-tuned on alone, EOS included [tokens]; None: it never is
    targets_length: int | None = None
    longer_targets: Literal["stop", "cut"] = "cut"  # cut: they lose their end; stop: error before training

    def rows(self, split: str, cache: Path, corrupt: OnCorrupt = "stop") -> Sequence[Row]:
        rows = super().rows(split, cache, corrupt)
        if split != "train" or self.training is None:
            return rows
        self.check_labels(rows)
        return [example for row in rows for example in self.training(row)]

    def choices(self, row: Row) -> tuple[list[tuple[str, str]], int]:
        """Return the (inputs, answer) pairs of a row to choose from, and the index of the right one.

        With one pair there is no choice.
        """
        inputs, target = right = self.to_text(row)
        if self.candidates is not None:
            pairs = [(inputs, answer) for answer in self.candidates(row)]
        elif self.premises is not None:
            pairs = [(premise, target) for premise in self.premises(row)]
        else:
            pairs = [right]
        return pairs, pairs.index(right)


@dataclasses.dataclass(frozen=True)
class LabelledTask(Scored):
    """A task that is answered by a head; ``texts`` returns what the model reads of a row.

    What it returns, the target and the prediction, by kind:

    - classes: one text or two; a class.
    - regression: one text or two; a number.
    - tokens: a list of words; the class of each.
    - span: question and context; the target is all right answers, the prediction one answer.
    - choice: the texts of each candidate; the index of a candidate.
    """

    kind: Kind
    texts: Texts
    _: dataclasses.KW_ONLY
    # returns [start, end) of a span's answer in the context [characters]; None: it is not there
    answer_span: Callable[[Row], tuple[int, int] | None] | None = None
    derive: Callable[[Sequence[Row]], Sequence[Row]] | None = None  # rows from the source's; None: the same

    def rows(self, split: str, cache: Path, corrupt: OnCorrupt = "stop") -> Sequence[Row]:
        rows = super().rows(split, cache, corrupt)
        return self.derive(rows) if self.derive else rows

    def to_text(self, row: Row) -> tuple[Any, Any]:
        """Return what the model reads, and what it should answer."""
        return self.texts(row), self.target(row)


def to_class(labels: Sequence[str]) -> Callable[[str, Row], int]:
    """Return a function from text to class: the index of a label word, NO_CLASS for any other text."""
    return lambda text, row: list(labels).index(text) if text in labels else NO_CLASS


def label_of(row: Row) -> Any:
    """Return a row's class, or number; None where it is not known, which data sets write as -1."""
    label = row["label"]
    return None if label is None or label < 0 else label


def label_word(labels: Sequence[str], row: Row) -> str:
    """Return the label word of a row's class; UNKNOWN, as T5 does, where the class is not known."""
    label = label_of(row)
    return UNKNOWN if label is None else labels[label]


def fields(name: str, row: Row, names: Sequence[str]) -> str:
    """Return ``"name field: value field: value"``, the paper's format of an input."""
    return " ".join([name, *(f"{key}: {row[key]}" for key in names)])


def field_texts(name: str, names: Sequence[str]) -> str:
    """Return a template in the format of ``fields``, with the columns in braces."""
    return fields(name, {key: f"{{{key}}}" for key in names}, names)

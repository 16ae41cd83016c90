"""A task turns rows of a dataset into text, and text back into what its metrics compare."""

import dataclasses
import hashlib
from collections.abc import Callable, Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any, Literal

from lm.config.base import DataError, SettingError
from lm.data.corpus.spec import examples
from lm.data.corpus.tables import TableRows
from lm.data.corpus.tfds import Corrupt, Row
from lm.metrics import Metric, Value, check_lengths, overall

Column = Literal["GLUE", "CNNDM", "SQuAD", "SGLUE", "EnDe", "EnFr", "EnRo"]  # of the paper's tables
# What counts of a task: the mean of its metrics, or one of those by likelihood (lm.evaluate.ranked_choice).
Measure = Literal["score", "bits_above_chance", "bits_per_byte"]
LOWER = {"bits_per_byte"}  # measures of which less is better
NO_CLASS = -1  # an answer that is no class; it is wrong whatever the label
UNKNOWN = "<unk>"  # the answer of a row without a label, as in T5; it is neither scored nor trained on

Texts = Callable[[Row], tuple[Any, ...]]  # of a row
Kind = Literal["classes", "regression", "tokens", "span", "choice"]


@dataclasses.dataclass(frozen=True)
class Scored:
    """What tasks have in common, whether a model answers in words or through a head."""

    name: str
    source: str  # of lm.data.corpus.spec.examples
    column: str | None  # in which its score counts: of the paper, or its own name; None: in none
    target: Callable[[Row], Any]  # what metrics compare with; None: the row has no label
    metrics: Mapping[str, Metric]  # by name
    _: dataclasses.KW_ONLY
    from_text: Callable[[Any, Row], Any] = lambda prediction, row: prediction  # -> what the metrics compare
    beside: tuple[str, ...] = ()  # metrics that are shown and do not count
    labels: tuple[str, ...] = ()  # names of the classes
    train: str | None = "train"  # split to train on; None: never
    validation: str | None = "validation"  # split to evaluate checkpoints on; None: never
    # split on which the chosen checkpoint alone is scored; None: the validation split's score stands, as T5's
    report: str | None = None
    like: Column | None = None  # the paper's column of the same kind, for a task that the paper has not
    measure: Measure = "score"
    file: Path | None = None  # that declares it; None: this package does
    # SettingError for rows that do not fit what a file declares; None: rows are as this package knows them
    checked: Callable[[Sequence[Row]], None] | None = None

    def rows(self, split: str, cache: Path, corrupt: Corrupt = "stop") -> Sequence[Row]:
        """The rows to train on, to evaluate on, or of another split; only training may skip corrupt ones."""
        named = {"train": self.train, "validation": self.validation}
        named |= {"report": self.report} if self.file else {}
        if (stored := named.get(split, split)) is None:
            has = f"is not in [splits] of {self.file}" if self.file else "is not in the study"
            raise SettingError(f"task {self.name!r} has no {split} split: it {has}")
        return examples(self.source, stored, cache, corrupt)

    def check(self, rows: Sequence[Row]) -> None:
        """SettingError or DataError, with file and line, for rows that the task cannot have."""
        if self.checked is not None:
            self.checked(rows)

    def is_labelled(self, row: Row) -> bool:
        """Whether it is known what is right, which test sets often keep back."""
        return self.target(row) is not None

    def check_labels(self, rows: Sequence[Row], numbers: Iterable[int] | None = None) -> None:
        """DataError for the first row without a label; ``numbers``: those of the rows in their data set."""
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
        """By which the task is found again: its name, or the file that declares it."""
        return str(self.file or self.name)

    @property
    def digest(self) -> str | None:
        """Of the file that declares it."""
        return hashlib.sha256(self.file.read_bytes()).hexdigest() if self.file else None

    @property
    def better(self) -> Literal[1, -1]:
        """Whether more (1) or less (-1) of its measure is better."""
        return -1 if self.measure in LOWER else 1

    def evaluate(self, rows: Sequence[Row], predictions: Sequence[Any]) -> dict[str, Value]:
        """All metrics, and ``score``: the mean of those that count. DataError for a row without a label."""
        check_lengths(rows, predictions)
        self.check_labels(rows)
        targets = [self.target(row) for row in rows]
        values = [self.from_text(prediction, row) for prediction, row in zip(predictions, rows, strict=True)]
        scores = {name: metric(targets, values) for name, metric in self.metrics.items()}
        counted = {name: value for name, value in scores.items() if name not in self.beside}
        return scores | {"score": overall(counted)}


@dataclasses.dataclass(frozen=True)
class Task(Scored):
    """A task with questions and answers in words."""

    to_text: Callable[[Row], tuple[str, str]]  # inputs, targets
    _: dataclasses.KW_ONLY
    training: Callable[[Row], list[Row]] | None = None  # the rows to train on that a row gives; None: itself
    # answers to choose from, the right one among them; None: nothing to choose
    candidates: Callable[[Row], tuple[str, ...]] | None = None
    # inputs to choose from, the row's own among them, to all of which the answer is the row's; None: nothing
    premises: Callable[[Row], tuple[str, ...]] | None = None
    # longer targets are cut where the task is fine-tuned on alone, EOS counted [tokens]; None: it never is
    targets_length: int | None = None
    longer_targets: Literal["stop", "cut"] = "cut"  # stop: longer targets are an error before training

    def rows(self, split: str, cache: Path, corrupt: Corrupt = "stop") -> Sequence[Row]:
        rows = super().rows(split, cache, corrupt)
        if split != "train" or self.training is None:
            return rows
        self.check_labels(rows)
        return [example for row in rows for example in self.training(row)]

    def choices(self, row: Row) -> tuple[list[tuple[str, str]], int]:
        """The (inputs, answer) pairs that a row lets choose from, and which is right; one pair: no choice."""
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
    """``texts`` of a row is what the model reads.

    Classes and regression read one text or two, tokens a list of words, a span the question and the context;
    a choice reads such texts for each candidate. Targets and predictions are a class, a number, the words'
    classes, answers and an answer, and the number of a candidate.
    """

    kind: Kind
    texts: Texts
    _: dataclasses.KW_ONLY
    # where a span's answer stands in the context [characters)
    answer_span: Callable[[Row], tuple[int, int] | None] | None = None
    derive: Callable[[Sequence[Row]], Sequence[Row]] | None = None  # rows from the source's; None: the same

    def rows(self, split: str, cache: Path, corrupt: Corrupt = "stop") -> Sequence[Row]:
        rows = super().rows(split, cache, corrupt)
        return self.derive(rows) if self.derive else rows

    def to_text(self, row: Row) -> tuple[Any, Any]:
        """What the model reads, and what it should answer."""
        return self.texts(row), self.target(row)


def to_class(labels: Sequence[str]) -> Callable[[str, Row], int]:
    """Text to class: the position of a label word, NO_CLASS for any other text."""
    return lambda text, row: list(labels).index(text) if text in labels else NO_CLASS


def label_of(row: Row) -> Any:
    """A row's class, or its number; None where it is not known, which data sets write as -1."""
    label = row["label"]
    return None if label is None or label < 0 else label


def label_word(labels: Sequence[str], row: Row) -> str:
    """Class to text; T5's stand-in where the class is not known."""
    label = label_of(row)
    return UNKNOWN if label is None else labels[label]


def fields(name: str, row: Row, names: Sequence[str]) -> str:
    """``"name field: value field: value"``, the paper's format of an input."""
    return " ".join([name, *(f"{key}: {row[key]}" for key in names)])


def field_texts(name: str, names: Sequence[str]) -> str:
    """That format, with the fields in braces."""
    return fields(name, {key: f"{{{key}}}" for key in names}, names)

"""A task turns rows of a data set into text, and text back into what its metrics compare."""

import dataclasses
import statistics
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any, Literal

from lm import metrics
from lm.data.corpora.corpus import examples
from lm.data.text.tfds import Corrupt, Row
from lm.settings import SettingError

Column = Literal["GLUE", "CNNDM", "SQuAD", "SGLUE", "EnDe", "EnFr", "EnRo"]  # of the paper's tables


@dataclasses.dataclass(frozen=True, kw_only=True)
class Scored:
    """What tasks have in common, whether a model answers in words or through a head."""

    name: str
    source: str  # of lm.data.corpora.corpus.examples
    column: Column | None  # in which its score counts; None: in none
    target: Callable[[Row], Any]  # what metrics compare with
    metrics: Mapping[str, metrics.Metric]  # by name
    from_text: Callable[[Any, Row], Any] = lambda prediction, row: prediction  # -> what the metrics compare
    beside: tuple[str, ...] = ()  # metrics that are shown and do not count
    labels: tuple[str, ...] = ()  # names of the classes
    train: str | None = "train"  # split to train on; None: never
    validation: str | None = "validation"  # split to evaluate on; None: never

    def rows(self, split: str, cache: Path, corrupt: Corrupt = "stop") -> Sequence[Row]:
        """The rows to train or to evaluate on, or those of another split; ``corrupt`` is of what is trained
        on.
        """
        named = {"train": self.train, "validation": self.validation}.get(split, split)
        if named is None:
            raise SettingError(f"task {self.name!r} has no {split} split in the study")
        return examples(self.source, named, cache, corrupt)

    def evaluate(self, rows: Sequence[Row], predictions: Sequence[Any]) -> dict[str, float]:
        """All metrics, and ``score``: the mean of those that count."""
        metrics.check_lengths(rows, predictions)
        targets = [self.target(row) for row in rows]
        values = [self.from_text(prediction, row) for prediction, row in zip(predictions, rows, strict=True)]
        found = {name: metric(targets, values) for name, metric in self.metrics.items()}
        return found | {"score": statistics.mean(found[name] for name in found if name not in self.beside)}


@dataclasses.dataclass(frozen=True, kw_only=True)
class Task(Scored):
    """A task that is asked and answered in words."""

    to_text: Callable[[Row], tuple[str, str]]  # inputs, targets
    training: Callable[[Row], list[Row]] | None = None  # rows to train on that a row gives; None: itself

    def rows(self, split: str, cache: Path, corrupt: Corrupt = "stop") -> Sequence[Row]:
        rows = super().rows(split, cache, corrupt)
        if split != "train" or self.training is None:
            return rows
        return [row for given in rows for row in self.training(given)]


def label(labels: Sequence[str]) -> Callable[[str, Row], int]:
    """Text to class: the place of a label word, -1 for any other text."""
    return lambda text, row: list(labels).index(text) if text in labels else -1


def label_word(labels: Sequence[str], row: Row) -> str:
    """Class to text; -1 is an unknown one, as in test sets."""
    return labels[row["label"]] if row["label"] >= 0 else "<unk>"


def fields(name: str, row: Row, names: Sequence[str]) -> str:
    """``"name field: value field: value"``, the paper's format of an input."""
    return " ".join([name, *(f"{key}: {row[key]}" for key in names)])


def classification(
    name: str, labels: tuple[str, ...], names: Sequence[str], *, prefix: str | None = None, **settings: Any
) -> Task:
    """A task that answers with one of the label words."""
    return Task(
        name=name,
        labels=labels,
        target=lambda row: row["label"],
        from_text=label(labels),
        to_text=lambda row: (fields(prefix or name, row, names), label_word(labels, row)),
        **settings,
    )


def summarisation(name: str, source: str, document: str, summary: str) -> Task:
    """A task that shortens the field ``document`` to the field ``summary``."""
    return Task(
        name=name,
        source=source,
        column="CNNDM",
        target=lambda row: row[summary],
        to_text=lambda row: (f"summarize: {row[document]}", row[summary]),
        metrics={kind: metrics.rouge(kind) for kind in ("rouge1", "rouge2", "rougeLsum")},
        beside=("rouge1", "rougeLsum"),
    )

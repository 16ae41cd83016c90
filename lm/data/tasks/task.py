"""A task turns rows of a data set into text, and text back into what its metrics compare."""

import dataclasses
import statistics
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any, Literal

from lm import metrics

Row = dict[str, Any]
Column = Literal["GLUE", "CNNDM", "SQuAD", "SGLUE", "EnDe", "EnFr", "EnRo"]  # of the paper's tables


@dataclasses.dataclass(frozen=True)
class Task:
    name: str
    source: str  # of lm.data.sources.examples
    column: Column  # in which its score counts
    to_text: Callable[[Row], tuple[str, str]]  # inputs, targets
    from_text: Callable[[str, Row], Any]  # prediction, row -> what the metrics compare
    target: Callable[[Row], Any]  # what they compare it with
    metrics: Mapping[str, metrics.Metric]  # by name
    beside: tuple[str, ...] = ()  # metrics that are shown and do not count
    train: str = "train"  # split to train on
    validation: str = "validation"  # split to evaluate on
    training: Callable[[Row], list[Row]] | None = None  # rows to train on that a row gives; None: itself

    def __reduce__(self) -> tuple[Any, ...]:
        from lm.data.tasks import task  # its functions do not pickle, its name does

        return task, (self.name,)

    def rows(self, split: Literal["train", "validation"], cache: Path) -> Sequence[Row]:
        """The rows to train or to evaluate on."""
        from lm.data import sources

        rows = sources.examples(self.source, self.train if split == "train" else self.validation, cache)
        if split == "validation" or self.training is None:
            return rows
        return [row for given in rows for row in self.training(given)]

    def evaluate(self, rows: Sequence[Row], predictions: Sequence[str]) -> dict[str, float]:
        """All metrics, and ``score``: the mean of those that count."""
        metrics.check_lengths(rows, predictions)
        targets = [self.target(row) for row in rows]
        values = [self.from_text(text, row) for text, row in zip(predictions, rows, strict=True)]
        return scores(self.metrics, self.beside, targets, values)


def scores(
    by_name: Mapping[str, metrics.Metric], beside: Sequence[str], targets: Sequence[Any], values: Sequence[Any]
) -> dict[str, float]:
    """All metrics, and ``score``: the mean of those that are not ``beside``."""
    found = {name: metric(targets, values) for name, metric in by_name.items()}
    return found | {"score": statistics.mean(found[name] for name in found if name not in beside)}


def label(labels: Sequence[str]) -> Callable[[str, Row], int]:
    """Text to class: the place of a label word, -1 for any other text."""
    return lambda text, row: list(labels).index(text) if text in labels else -1


def words(text: str, row: Row) -> str:
    """Text as it is."""
    return text


def fields(name: str, row: Row, names: Sequence[str]) -> str:
    """``"name field: value field: value"``, the paper's format of an input."""
    return " ".join([name, *(f"{key}: {row[key]}" for key in names)])


def classification(
    name: str,
    labels: Sequence[str],
    names: Sequence[str],
    *,
    source: str,
    column: Column,
    metrics: Mapping[str, metrics.Metric],
    prefix: str | None = None,
    **settings: Any,
) -> Task:
    """A task that answers with one of the label words; -1 as a row's label is an unknown one, as in test sets."""
    return Task(
        name,
        source,
        column,
        to_text=lambda row: (
            fields(prefix or name, row, names),
            labels[row["label"]] if row["label"] >= 0 else "<unk>",
        ),
        from_text=label(labels),
        target=lambda row: row["label"],
        metrics=metrics,
        **settings,
    )

"""User-defined tasks: a TOML file names the splits, the inputs and targets, and the metrics.

A text-to-text task has templates with columns in braces::

    inputs = "translate English to French: {en}"
    targets = "{fr}"
    metrics = ["bleu"]
    targets_length = 32

    [splits]
    train = "train.csv"
    validation = "valid.csv"

A labelled task classifies a text or a pair, by a head or in words::

    source = "tfds:glue/rte"
    text = ["sentence1", "sentence2"]
    label = "label"
    labels = ["entailment", "not_entailment"]
    metrics = ["accuracy"]
    splits = {train = "train", validation = "validation"}
"""

import functools
import math
import re
import tomllib
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass, fields
from pathlib import Path
from typing import Any, Literal, get_args

from lm import metrics
from lm.config.base import DataError, SettingError, nearest
from lm.data.corpus.tables import TableRows
from lm.data.corpus.tfds import file_stamp
from lm.data.tasks.task import UNKNOWN, LabelledTask, Row, Task, field_texts, to_class
from lm.tokenizers.tokenizer import Tokenizer

SOURCES = ("tfds", "hf")  # prefixes of data sets; without a source the splits are files
PLACE = re.compile(r"\{\{|\}\}|\{([^{}]*)\}")  # a column in a template, or an escaped brace
DeclaredSplit = Literal["train", "validation", "report"]
LongTargets = Literal["stop", "cut"]

LABEL_METRICS: dict[str, Any] = {  # functions from the number of labels to a metric
    "accuracy": lambda count: metrics.accuracy,
    "f1": lambda count: metrics.binary_f1,
    "macro_f1": metrics.macro_f1,
    "matthews": lambda count: metrics.matthews,
}
TEXT_METRICS: dict[str, metrics.Metric] = {
    "exact_match": metrics.accuracy,
    "f1": lambda targets, texts: metrics.answer_f1([[target] for target in targets], texts),
    "word_accuracy": metrics.word_accuracy,
    "bleu": metrics.bleu,
    **{kind: metrics.rouge(kind) for kind in ("rouge1", "rouge2", "rougeLsum")},
    "pearson": lambda targets, texts: metrics.pearson([*map(metrics.number, targets)], texts),
    "spearman": lambda targets, texts: metrics.spearman([*map(metrics.number, targets)], texts),
}


@dataclass(frozen=True)
class Declaration:
    """The content of a task file; SettingError, without the file's name, for what does not go together."""

    splits: dict[str, str]  # train, validation, report: a file beside this one, or a split of the source
    metrics: list[str]  # whose mean is the score
    source: str = ""  # tfds:NAME[:VERSION] or hf:NAME[:CONFIG]
    inputs: str = ""  # template of the inputs; default of a labelled task: name and columns in T5's format
    targets: str = ""  # template of the targets
    targets_length: int = 64  # EOS included [tokens]
    longer_targets: LongTargets = "stop"  # stop: an error; cut: they lose their end in training, as in T5
    text: list[str] | str = ""  # column that is classified, or the columns of a pair
    label: str = ""  # column of the class: a name in labels or, unless these are numbers, a number from 0
    labels: list[str] | None = None  # names of the classes

    def __post_init__(self):
        if bool(self.label) == bool(self.targets):
            raise SettingError("either targets (a text) or label, labels and text (a class) should be given")
        if self.label and not (self.labels and 1 <= len(self.columns) <= 2):
            raise SettingError("label needs labels, the names of its classes, and text, one column or two")
        if len({*self.names}) < len(self.names):
            raise SettingError(f"labels={self.labels} should be names that differ, one of each class")
        if self.targets and not self.inputs:
            raise SettingError('targets needs inputs, such as inputs = "summarize: {document}"')
        if unknown := [name for name in self.splits if name not in get_args(DeclaredSplit)]:
            raise SettingError(f"splits has {unknown[0]!r}{nearest(unknown[0], get_args(DeclaredSplit))}")
        if self.source and self.source.partition(":")[0] not in SOURCES:
            raise SettingError(f"source={self.source!r} should be 'tfds:NAME' or 'hf:NAME'")
        known = LABEL_METRICS if self.label else TEXT_METRICS
        for name in self.metrics or [""]:
            if name not in known:
                raise SettingError(f"metric {name!r} is unknown{nearest(name, known)}")
        if "f1" in self.metrics and self.label and len(self.names) != 2:
            raise SettingError(f"metric 'f1' is of two labels, not {len(self.names)}; choose 'macro_f1'")
        if self.targets_length < 2:
            raise SettingError(f"targets_length={self.targets_length} should be at least 2, EOS counted")

    @property
    def names(self) -> tuple[str, ...]:
        """Return the names of the classes."""
        return tuple(self.labels or ())

    @property
    def columns(self) -> tuple[str, ...]:
        """Return the columns of the one or two texts that are classified."""
        return tuple([self.text] * bool(self.text) if isinstance(self.text, str) else self.text)

    @property
    def read(self) -> list[str]:
        """Return all columns that are read, each once."""
        templates = [*columns_in(self.inputs), *columns_in(self.targets)]
        return list(dict.fromkeys([*templates, *self.columns, *filter(None, [self.label])]))

    def class_of(self, row: Row) -> int | None:
        """Return the index of a row's class; None where it is not known (-1).

        LookupError if the value is neither a name in labels nor the number of one.
        """
        value = row[self.label]
        if str(value) in self.names:
            return self.names.index(str(value))
        numbered = not any(name.lstrip("-").isdigit() for name in self.names)
        if numbered and re.fullmatch(r"-1|\d+", str(int(value) if isinstance(value, bool) else value)):
            return [None, *range(len(self.names))][int(value) + 1]
        raise LookupError(value)


def columns_in(template: str) -> list[str]:
    """Return the names in braces of a template."""
    return [match[1] for match in PLACE.finditer(template) if match[1] is not None]


def filled(template: str, row: Row) -> str:
    """Return a template filled with the values of a row; doubled braces become single ones."""
    return PLACE.sub(lambda match: match[0][0] if match[1] is None else str(row[match[1]]), template)


def read_declaration(path: Path) -> Declaration:
    """Read a task file; SettingError, with the file's name, for a key or a value that is not allowed."""
    try:
        given = tomllib.loads(path.read_text("utf-8"))
    except FileNotFoundError as error:
        raise SettingError(f"there is no task file {path} in {Path.cwd()}") from error
    except (OSError, ValueError) as error:
        raise SettingError(f"{path} cannot be read as TOML: {error}") from error
    kinds = {field.name: field for field in fields(Declaration)}
    try:
        for name, value in given.items():
            if name not in kinds:
                raise SettingError(f"{name!r} is unknown{nearest(name, kinds)}")
            _check_kind(name, value)
        for name in ("splits", "metrics"):
            if name not in given:
                raise SettingError(f"{name} is missing")
        declaration = Declaration(**given)
        _check_splits(path.parent, declaration)
        return declaration
    except SettingError as error:
        raise SettingError(f"{path}: {error}") from error


def _check_splits(folder: Path, declaration: Declaration) -> None:
    """Raise SettingError if the rows to train on are also those to score on."""
    splits = declaration.splits
    places = {
        name: split if declaration.source else (folder / split).resolve() for name, split in splits.items()
    }
    for name in ("validation", "report"):
        if "train" in places and places["train"] == places.get(name):
            raise SettingError(
                f"splits: train and {name} are both {splits[name]!r}, so that a model would be scored on "
                f"what it learnt: name other rows for {name}"
            )


def _check_kind(name: str, value: Any) -> None:
    """Raise SettingError if a value is not of the type of this field of a Declaration."""
    texts = isinstance(value, list) and all(isinstance(text, str) for text in value)
    if name == "splits":
        fits = isinstance(value, dict) and all(isinstance(split, str) for split in value.values())
        due = 'a table, such as {train = "train.csv", validation = "valid.csv"}'
    elif name == "targets_length":
        fits, due = type(value) is int, "a whole number"
    elif name in ("metrics", "labels", "text"):
        fits, due = (
            texts or (name == "text" and isinstance(value, str)),
            'a list of texts, such as ["a", "b"]',
        )
    else:
        fits, due = isinstance(value, str), "a text"
    if name == "longer_targets":
        fits, due = value in get_args(LongTargets), " or ".join(map(repr, get_args(LongTargets)))
    if not fits:
        raise SettingError(f"{name}={value!r} should be {due}")


@functools.lru_cache(maxsize=32)
def _declaration(path: Path, _size: int, _changed: int) -> Declaration:
    return read_declaration(path)


def _known(name: str) -> tuple[Path, Declaration]:
    """Return the path of a task file and its content, read once while the file does not change."""
    path = Path(name)
    return path, _declaration(path, *file_stamp(path)) if path.is_file() else read_declaration(path)


def declared_task(name: str) -> Task:
    """Return the text-to-text task of a file; a labelled one is answered in the words of ``labels``."""
    path, told = _known(name)
    inputs = told.inputs or field_texts(path.stem, told.columns)

    def to_text(row: Row) -> tuple[str, str]:
        if told.targets:
            return filled(inputs, row), filled(told.targets, row)
        known = told.class_of(row)
        return filled(inputs, row), UNKNOWN if known is None else told.names[known]

    words: dict[str, Any] = {"target": lambda row: filled(told.targets, row)}
    if told.label:
        words = {"target": told.class_of, "from_text": to_class(told.names), "labels": told.names}
        words["candidates"] = lambda row: told.names
    words |= {"targets_length": told.targets_length, "longer_targets": told.longer_targets}
    return Task(**_shared(path, told), **words, to_text=to_text)


def declared_head(name: str) -> LabelledTask:
    """Return the task of a file, to be answered by a head; SettingError if it has no label."""
    path, told = _known(name)
    if not told.label:
        raise SettingError(f"tuning.heads: {path} has no label; name it in tuning.mixtures, to be written")
    return LabelledTask(
        **_shared(path, told),
        target=told.class_of,
        labels=told.names,
        kind="classes",
        texts=lambda row: tuple(str(row[column]) for column in told.columns),
    )


def _shared(path: Path, told: Declaration) -> dict[str, Any]:
    """Return the arguments that both kinds of tasks have in common."""
    kind, _, name = told.source.partition(":")
    source = {"": f"file:{path.parent}", "tfds": name, "hf": told.source}[kind]
    known: Any = TEXT_METRICS
    if told.label:
        known = {name: metric(len(told.names)) for name, metric in LABEL_METRICS.items()}
    splits = {split: told.splits.get(split) for split in get_args(DeclaredSplit)}
    scores = {name: known[name] for name in told.metrics}
    shared = {"name": path.name, "column": path.name, "source": source, "metrics": scores, "file": path}
    return shared | splits | {"checked": functools.partial(check_rows, path, told)}


def check_rows(path: Path, told: Declaration, rows: Sequence[Row]) -> None:
    """Check that rows fit their task file.

    SettingError for a column of the file that the rows lack, or a label of the rows that the file lacks.
    DataError for a row without a value, or with a target that is no number where a metric needs one.
    """

    def place(number: int) -> str:
        return rows.location(number) if isinstance(rows, TableRows) else f"row {number}"

    of = f" of {rows.name}" if isinstance(rows, TableRows) else ""
    for column in told.read:
        if column not in rows[0]:
            raise SettingError(f"{path}: the rows{of} have no column {column!r}{nearest(column, rows[0])}")
    numbers = [name for name in told.metrics if name in ("pearson", "spearman")]
    lacking, first = Counter[str](), ""
    for number, row in enumerate(rows):
        for column in told.read:
            if row.get(column) is None:
                raise DataError(f"{place(number)}, has no value in the column {column!r}, which {path} reads")
        if numbers and not _is_number(target := filled(told.targets, row)):
            due = f"no number, as {' and '.join(numbers)} of {path} need"
            raise DataError(f"{place(number)}: the target {target!r:.40} is {due}")
        try:
            if told.label:
                told.class_of(row)
        except LookupError:
            first = first or place(number)
            lacking[str(row[told.label])] += 1
    if lacking:
        found = ", ".join(f"{label!r} ({count:,} rows)" for label, count in lacking.most_common(5))
        raise SettingError(f"{path}: labels={list(told.names)} lack {found}; the first is at {first}")


def _is_number(text: str) -> bool:
    try:
        return math.isfinite(float(text))
    except ValueError:
        return False


def check_declared(
    tasks: Sequence[Task | LabelledTask], cache: Path, tokenizer: Tokenizer, say: Callable[[str], object]
) -> None:
    """Raise SettingError if rows do not fit the file that declares their task, or targets exceed its length.

    Where the file has longer targets cut, ``say`` reports how many are.
    """
    for task in tasks:
        for split in filter(None, ("train", "validation", "report" if task.report else None)):
            rows = task.rows(split, cache)
            task.check(rows)
            task.check_labels(rows)
            if not isinstance(task, Task) or task.targets_length is None:
                continue
            targets = tokenizer.encode_batch([task.to_text(row)[1] for row in rows])
            lengths = [len(ids) + 1 for ids in targets]  # EOS
            if not (longer := sum(length > task.targets_length for length in lengths)):
                continue
            what = f"{longer:,} of {len(rows):,} targets in {split!r} exceed targets_length"
            what += f"={task.targets_length}, the longest has {max(lengths):,} tokens, EOS counted"
            if task.longer_targets == "stop":
                raise SettingError(f'{task.file}: {what}: raise it, or set longer_targets = "cut"')
            say(f"{task.file}: {what}, and lose their end")

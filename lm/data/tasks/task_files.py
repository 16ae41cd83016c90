"""Tasks that users define: a TOML file gives the splits, the inputs and targets, and the metrics.

A text-to-text task has templates with columns in braces::

    inputs = "translate English to French: {en}"
    targets = "{fr}"
    metrics = ["bleu"]
    targets_length = 32

    [splits]
    train = "train.csv"
    validation = "valid.csv"

A labelled task classifies a text or a pair of texts. A head answers, or the model writes the label::

    source = "tfds:glue/rte"
    text = ["sentence1", "sentence2"]
    label = "label"
    labels = ["entailment", "not_entailment"]
    metrics = ["accuracy"]
    splits = {train = "train", validation = "validation"}

A tagging task classifies each word of a list of words, by a head::

    words = "tokens"
    tags = "ner_tags"
    labels = ["O", "B-PER", "I-PER"]
    splits = {train = "train.jsonl", validation = "valid.jsonl"}
"""

import functools
import math
import re
import tomllib
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, fields
from itertools import chain
from pathlib import Path
from typing import Any, Literal, get_args

from lm import metrics
from lm.config.base import DataError, SettingError, did_you_mean
from lm.data.corpus.tables import TableRows
from lm.data.corpus.tfds import file_stamp
from lm.data.tasks.task import UNKNOWN, LabelledTask, Row, Task, TaskHalf, class_from_text, fields_template
from lm.files import similar_file
from lm.tokenizers.tokenizer import Tokenizer

SOURCES = ("tfds", "hf")  # prefixes of data sets; without a source the splits are files
COLUMN = re.compile(r"\{\{|\}\}|\{([^{}]*)\}")  # a column in a template, or an escaped brace
SplitName = Literal["train", "validation", "report"]
LongTargets = Literal["stop", "cut"]

LABEL_METRICS: dict[str, Callable[[int], metrics.Metric]] = {  # functions of the number of labels
    "accuracy": lambda count: metrics.accuracy,
    "f1": lambda count: metrics.binary_f1,
    "macro_f1": metrics.macro_f1,
    "matthews": lambda count: metrics.matthews,
}
TAG_METRICS: dict[str, Callable[[Sequence[str]], metrics.Metric]] = {  # functions of the labels
    "accuracy": lambda labels: metrics.token_accuracy,
    "entity_f1": metrics.entity_f1,
}
TEXT_METRICS: dict[str, metrics.Metric] = {
    "exact_match": metrics.accuracy,
    "f1": lambda targets, texts: metrics.answer_f1([[target] for target in targets], texts),
    "word_accuracy": metrics.word_accuracy,
    "bleu": metrics.bleu,
    **{kind: metrics.rouge(kind) for kind in ("rouge1", "rouge2", "rougeLsum")},
    "pearson": lambda targets, texts: metrics.pearson([*map(metrics.parse_number, targets)], texts),
    "spearman": lambda targets, texts: metrics.spearman([*map(metrics.parse_number, targets)], texts),
}
MAX_COUNTED_LABELS = 10  # messages count the rows by label of tasks with at most so many labels
NUMBER_METRICS = ("pearson", "spearman")  # their targets are numbers
# keys that would be ignored beside "tags", and beside "targets"
UNREAD_WITH_TAGS = ("inputs", "text", "targets_length", "longer_targets")
UNREAD_WITH_TARGETS = ("text", "labels")


# ---- the file


@dataclass(frozen=True)
class TaskSpec:
    """The content of a task file.

    SettingError for keys that contradict each other; ``read_task_file`` adds the name of the file to it.
    """

    # train, validation, report: a file in the folder of the task file, or a split of the source
    splits: dict[str, str]
    # the score is their mean; none for tags: F1 of entities if the labels are BIO, else accuracy
    metrics: list[str] = field(default_factory=list)
    source: str = ""  # tfds:NAME[:VERSION] or hf:NAME[:CONFIG]
    inputs: str = ""  # template of the inputs; default for a labelled task: name and columns in T5's format
    targets: str = ""  # template of the targets
    targets_length: int = 64  # EOS included [tokens]
    longer_targets: LongTargets = "stop"  # stop: an error; cut: their end is lost in training, as in T5
    half: TaskHalf = ""  # reading: needs its input; language: measures knowledge of the language
    text: list[str] | str = ""  # the column that is classified, or the two columns of a pair
    label: str = ""  # column of the class: a name in labels or, unless these are numbers, a number from 0
    labels: list[str] | None = None  # names of the classes, or of the tags
    words: str = ""  # column of a list of words, each of which has a tag
    tags: str = ""  # column of the list of their tags, which are written like a class

    def __post_init__(self):
        given = [key for key in ("targets", "label", "words", "tags") if getattr(self, key)]
        if len(given) != 1 and given != ["words", "tags"]:
            raise SettingError(
                "either targets (a text), or label, labels and text (a class), or words, tags and labels (a "
                f"tag of each word) should be given, not {' and '.join(given) or 'none of them'}"
            )
        if self.words or self.tags:
            self._check_tags()
        if self.label and not (self.labels and 1 <= len(self.text_columns) <= 2):
            missing = "text, the name of one column or of two"
            if not self.labels:
                missing = 'labels, the names of its classes, such as labels = ["bad", "good"]'
            raise SettingError(f"label needs {missing}")
        if len({*self.label_names}) < len(self.label_names):
            raise SettingError(f"labels={self.labels} should be names that differ, one of each class")
        if self.targets:
            self._check_targets()
        for name in ("inputs", "targets"):
            template = getattr(self, name)
            if re.search("[{}]", COLUMN.sub("", template)):
                raise SettingError(
                    f"{name}={template!r} has a brace without its partner: put columns in braces, as in "
                    "{column}, and double a brace that is text"
                )
        if unknown := [name for name in self.splits if name not in get_args(SplitName)]:
            raise SettingError(f"splits has {unknown[0]!r}{did_you_mean(unknown[0], get_args(SplitName))}")
        if self.source and self.source.partition(":")[0] not in SOURCES:
            raise SettingError(f"source={self.source!r} should be 'tfds:NAME' or 'hf:NAME'")
        known: Mapping[str, Any] = TEXT_METRICS
        if self.label:
            known = LABEL_METRICS
        elif self.tags:
            known = TAG_METRICS
        named = self.metrics
        if not named and not self.tags:  # only tags have metrics by default
            named = [""]
        for name in named:
            if name not in known:
                raise SettingError(f"metric {name!r} is unknown{did_you_mean(name, known)}")
        if "f1" in self.metrics and self.label and len(self.label_names) != 2:
            raise SettingError(
                f"metric 'f1' is of two labels, not {len(self.label_names)}; choose 'macro_f1'"
            )
        if self.targets_length < 2:
            raise SettingError(f"targets_length={self.targets_length} should be at least 2, EOS counted")

    def _check_unread(self, keys: Sequence[str], beside: str) -> None:
        """Raise SettingError if one of ``keys`` is set, since nothing reads it in a task with ``beside``."""
        for key in fields(self):
            if key.name in keys and getattr(self, key.name) != key.default:
                raise SettingError(f"{key.name} is not read with {beside}: leave it out")

    def _check_targets(self) -> None:
        """Raise SettingError for keys that do not fit a text-to-text task."""
        if not self.inputs:
            raise SettingError('targets needs inputs, such as inputs = "summarize: {document}"')
        self._check_unread(UNREAD_WITH_TARGETS, "targets")
        if not template_columns(self.targets):
            raise SettingError(
                f"targets={self.targets!r} names no column in braces, so that all rows have the same "
                'targets: name one, such as targets = "{answer}"'
            )

    def _check_tags(self) -> None:
        """Raise SettingError for keys that do not fit a task with tags."""
        if not (self.tags and self.words):
            raise SettingError(
                "words, the column of a list of words, and tags, that of their tags, need each other"
            )
        if not self.labels:
            raise SettingError('tags needs labels, the names of the tags, such as ["O", "B-PER", "I-PER"]')
        self._check_unread(UNREAD_WITH_TAGS, "words and tags")
        if "entity_f1" in self.metrics and not metrics.is_bio(self.labels):
            raise SettingError(
                f"metric 'entity_f1' needs labels in BIO, O, B-TYPE and I-TYPE, not {self.labels}"
            )

    @property
    def label_names(self) -> tuple[str, ...]:
        """Return the names of the classes or tags; none for a text-to-text task."""
        return tuple(self.labels or ())

    @property
    def text_columns(self) -> tuple[str, ...]:
        """Return the one or two columns that are classified; none for other tasks."""
        if isinstance(self.text, str):
            return (self.text,) if self.text else ()
        return tuple(self.text)

    @property
    def columns(self) -> list[str]:
        """Return all columns that the task reads, each once."""
        names = [*template_columns(self.inputs), *template_columns(self.targets), *self.text_columns]
        names += [column for column in (self.label, self.words, self.tags) if column]
        return list(dict.fromkeys(names))

    @property
    def metric_names(self) -> list[str]:
        """Return the names of all metrics: those of the file, or the default ones of tags."""
        default = ["entity_f1", "accuracy"] if metrics.is_bio(self.label_names) else ["accuracy"]
        return self.metrics or default

    @property
    def unscored_metrics(self) -> tuple[str, ...]:
        """Return the names of the metrics that are not part of the score: by default all but the first."""
        return () if self.metrics else tuple(self.metric_names[1:])

    def class_of(self, row: Row) -> int | None:
        """Return the index of a row's class; None if it is unknown."""
        return self.label_index(row[self.label])

    def tags_of(self, row: Row) -> list[int] | None:
        """Return the index of each word's tag; None if one of them is unknown."""
        tags = row[self.tags]
        known = [index for index in map(self.label_index, tags) if index is not None]
        return known if len(known) == len(tags) else None

    def label_index(self, value: Any) -> int | None:
        """Return the index of the label that a value of the data names; None if it is unknown (-1 or -100).

        Raises LookupError if the value is neither one of ``labels`` nor the number of one. Where labels are
        numbers themselves, a value is always a name, -1 too. A JSON boolean matches a label named True, true
        or 1 (False, false or 0), and is never read as the number of a label.
        """
        text, is_boolean = str(value), isinstance(value, bool)
        possible_names = (text, text.lower(), str(int(value))) if is_boolean else (text,)
        for name in possible_names:
            if name in self.label_names:
                return self.label_names.index(name)
        labels_are_numbers = any(name.lstrip("-").isdigit() for name in self.label_names)
        if labels_are_numbers or not re.fullmatch(r"-1|-100|\d+", text) or int(text) >= len(self.label_names):
            raise LookupError(value)
        return int(text) if int(text) >= 0 else None


def template_columns(template: str) -> list[str]:
    """Return the columns of a template: the names in braces."""
    return [match[1] for match in COLUMN.finditer(template) if match[1] is not None]


def fill_template(template: str, row: Row) -> str:
    """Return a template filled with the values of a row; doubled braces become single ones."""

    def value(match: re.Match) -> str:
        is_escaped_brace = match[1] is None
        return match[0][0] if is_escaped_brace else str(row[match[1]])

    return COLUMN.sub(value, template)


def read_task_file(path: Path) -> TaskSpec:
    """Read a task file; raise SettingError, with its name, for a key or a value that is not allowed."""
    try:
        content = tomllib.loads(path.read_text("utf-8"))
    except FileNotFoundError as error:
        raise SettingError(
            f"there is no task file {path} in {Path.cwd()}"
            + (similar_file(path) or "; a run that was trained with it needs it there too")
        ) from error
    except IsADirectoryError as error:
        raise SettingError(f"{path} is a folder, and should be a task file") from error
    except (OSError, ValueError) as error:
        mend = (
            '; texts stand in quotes, as in labels = ["bad", "good"]' if "Invalid value" in str(error) else ""
        )
        raise SettingError(f"{path} cannot be read as TOML: {error}{mend}") from error
    known = {field.name for field in fields(TaskSpec)}
    try:
        for name, value in content.items():
            if name not in known:
                raise SettingError(f"{name!r} is unknown{did_you_mean(name, known)}")
            _check_type(name, value)
        for name in ("splits", "metrics"):
            has_default = name == "metrics" and {"words", "tags"} & content.keys()
            if name not in content and not has_default:
                raise SettingError(f"{name} is missing")
        spec = TaskSpec(**content)
        _check_splits(path.parent, spec)
        return spec
    except SettingError as error:
        raise SettingError(f"{path}: {error}") from error


def _check_type(name: str, value: Any) -> None:
    """Raise SettingError if a value is not of the type of this field of a TaskSpec."""
    is_text = isinstance(value, str)
    is_text_list = isinstance(value, list) and all(isinstance(text, str) for text in value)
    if name == "splits":
        fits = isinstance(value, dict) and all(isinstance(split, str) for split in value.values())
        expected = 'a table, such as {train = "train.csv", validation = "valid.csv"}'
    elif name == "targets_length":
        fits, expected = type(value) is int, "a whole number"
    elif name == "longer_targets":
        fits, expected = value in get_args(LongTargets), " or ".join(map(repr, get_args(LongTargets)))
    elif name == "half":
        fits, expected = value in get_args(TaskHalf), " or ".join(map(repr, get_args(TaskHalf)))
    elif name in ("metrics", "labels"):
        fits, expected = is_text_list, 'a list of texts, such as ["a", "b"]'
    elif name == "text":
        fits, expected = is_text_list or is_text, 'a text, or a list of texts such as ["a", "b"]'
    else:
        fits, expected = is_text, "a text"
    if not fits:
        raise SettingError(f"{name}={value!r} should be {expected}")


def _check_splits(folder: Path, spec: TaskSpec) -> None:
    """Raise SettingError if the model would be scored on its training rows."""
    splits = spec.splits
    if not spec.source:
        splits = {name: str((folder / file).resolve()) for name, file in splits.items()}
    for name in ("validation", "report"):
        if "train" in splits and splits["train"] == splits.get(name):
            raise SettingError(
                f"splits: train and {name} are both {spec.splits[name]!r}, so that a model would be scored "
                f"on what it learnt: name other rows for {name}"
            )


def _load_spec(path: Path) -> TaskSpec:
    """Return the content of a task file, read again only if the file has changed."""
    return _cached_spec(path, *file_stamp(path)) if path.is_file() else read_task_file(path)


@functools.lru_cache(maxsize=32)
def _cached_spec(path: Path, _size: int, _changed: int) -> TaskSpec:
    return read_task_file(path)


# ---- the task


def task_from_file(name: str) -> Task:
    """Return the text-to-text task of a file; the answer to a labelled one is one of its ``labels``.

    Raises SettingError if it has tags of words.
    """
    path = Path(name)
    spec = _load_spec(path)
    if spec.tags:
        raise SettingError(f"{path} has tags of words, which only a head gives: name it in tuning.heads")
    inputs = spec.inputs or fields_template(path.stem, spec.text_columns)
    lengths: dict[str, Any] = {"targets_length": spec.targets_length, "longer_targets": spec.longer_targets}

    def label_to_text(row: Row) -> tuple[str, str]:
        label = spec.class_of(row)
        return fill_template(inputs, row), UNKNOWN if label is None else spec.label_names[label]

    def targets(row: Row) -> str:
        return fill_template(spec.targets, row)

    if not spec.label:
        return Task(
            **_shared_arguments(path, spec),
            **lengths,
            to_text=lambda row: (fill_template(inputs, row), targets(row)),
            target=targets,
        )
    return Task(
        **_shared_arguments(path, spec),
        **lengths,
        to_text=label_to_text,
        target=spec.class_of,
        postprocess=class_from_text(spec.label_names),
        labels=spec.label_names,
        candidates=lambda row: spec.label_names,
    )


def labelled_task_from_file(name: str) -> LabelledTask:
    """Return the task of a file, for a head to answer; raise SettingError if it has no label or tags."""
    path = Path(name)
    spec = _load_spec(path)
    if spec.tags:
        return LabelledTask(
            **_shared_arguments(path, spec),
            target=spec.tags_of,
            labels=spec.label_names,
            kind="tokens",
            texts=lambda row: (row[spec.words],),
        )
    if not spec.label:
        raise SettingError(f"tuning.heads: {path} has no label; name it in tuning.mixtures, to be written")
    return LabelledTask(
        **_shared_arguments(path, spec),
        target=spec.class_of,
        labels=spec.label_names,
        kind="classes",
        texts=lambda row: tuple(str(row[column]) for column in spec.text_columns),
    )


def has_tags(name: str) -> bool:
    """Return whether the task of a file is to tag words."""
    return bool(_load_spec(Path(name)).tags)


def _shared_arguments(path: Path, spec: TaskSpec) -> dict[str, Any]:
    """Return the arguments of ``BaseTask``, but for the target."""
    kind, _, name = spec.source.partition(":")
    source = {"": f"file:{path.parent}", "tfds": name, "hf": spec.source}[kind]
    if spec.label:
        scores = {name: LABEL_METRICS[name](len(spec.label_names)) for name in spec.metrics}
    elif spec.tags:
        scores = {name: TAG_METRICS[name](spec.label_names) for name in spec.metric_names}
    else:
        scores = {name: TEXT_METRICS[name] for name in spec.metrics}
    return {
        "name": path.name,
        "column": path.name,
        "source": source,
        "metrics": scores,
        "unscored_metrics": spec.unscored_metrics,
        "half": spec.half,
        "file": path,
        "check_rows": functools.partial(check_rows, path, spec),
    } | {split: spec.splits.get(split) for split in get_args(SplitName)}


# ---- checks of the rows, before training


def check_rows(path: Path, spec: TaskSpec, rows: Sequence[Row]) -> None:
    """Check that rows fit their task file.

    Raises SettingError for a column of the file that the rows lack, or a label of the rows that the file
    lacks; DataError for a row without a value, with a list where a class should be, with words and tags that
    do not pair, or with a target that is no number if a metric needs one.
    """

    for column in spec.columns:
        if column not in rows[0]:
            table = f" of {rows.name}" if isinstance(rows, TableRows) else ""
            raise SettingError(
                f"{path}: the rows{table} have no column {column!r}{did_you_mean(column, rows[0])}"
            )
    unknown_labels, first_unknown = Counter[str](), ""
    for index, row in enumerate(rows):
        for column in spec.columns:
            value = row.get(column)
            if value is None or value != value:  # JSON may hold NaN
                raise DataError(
                    f"{_location(rows, index)}, has no value in the column {column!r}, which {path} reads"
                )
        if spec.targets and (wrong := _unscorable(fill_template(spec.targets, row), spec.metrics)):
            raise DataError(f"{_location(rows, index)}: {wrong} ({path})")
        if wrong := _unpaired(row, spec):
            raise DataError(f"{_location(rows, index)}: {wrong} ({path})")
        values = []
        if spec.label:
            values = [row[spec.label]]
        elif spec.tags:
            values = row[spec.tags]
        for value in values:
            try:
                spec.label_index(value)
            except LookupError:
                first_unknown = first_unknown or _location(rows, index)
                unknown_labels[str(value)] += 1
    if unknown_labels:
        unit = "word" if spec.tags else "row"
        found = ", ".join(
            f"{label!r} ({count:,} {unit}{'s' * (count > 1)})"
            for label, count in unknown_labels.most_common(5)
        )
        raise SettingError(
            f"{path}: labels={list(spec.label_names)} lack {found}; the first is at {first_unknown}: correct "
            "the cells, add the labels, or leave such rows out"
        )


def _unpaired(row: Row, spec: TaskSpec) -> str:
    """Return why a row has no class, or no tag for each word; "" if it has."""
    if spec.label and isinstance(row[spec.label], list):
        return f"the label {spec.label!r} is a list; tags of words go under words and tags"
    if not spec.tags:
        return ""
    words, tags = row[spec.words], row[spec.tags]
    if not isinstance(words, list) or not all(isinstance(word, str) for word in words):
        return f"words {spec.words!r} should be a list of texts, not {words!r:.40}"
    if not isinstance(tags, list):
        return f"tags {spec.tags!r} should be a list of labels, not {tags!r:.40}"
    if not words and not tags:
        return f"the list of words {spec.words!r} is empty: leave the row out"
    if len(words) != len(tags):
        counts = f"{len(words)} and {len(tags)} entries"
        return f"{spec.words!r} and {spec.tags!r} have {counts}: each word should have one tag"
    return ""


def _unscorable(target: str, names: Sequence[str]) -> str:
    """Return why metrics cannot score a target; "" if they can.

    It may be no number, or have no letter that ROUGE reads, as in a script other than the Latin one.
    """
    numbers = " and ".join(name for name in names if name in NUMBER_METRICS)
    if numbers and not _is_number(target):
        return f"the target {target!r:.40} is no number, as required by {numbers}"
    overlaps = [name for name in names if name.startswith("rouge")]
    if overlaps and target.strip() and not re.search("[a-z0-9]", target.lower()):
        return f"the target {target!r:.40} has no letter from a to z, and so no word for {overlaps[0]}"
    return ""


def _is_number(text: str) -> bool:
    try:
        return math.isfinite(float(text))
    except ValueError:
        return False


def check_task_files(
    tasks: Sequence[Task | LabelledTask],
    cache: Path,
    tokenizer: Tokenizer,
    print_line: Callable[[str], object],
) -> None:
    """Check all rows of tasks that come from files: columns, labels, empty texts, and lengths of targets.

    Raises SettingError or DataError for rows that do not fit, and for training rows that all have one label.
    ``print_line`` gets a line about other rows of one label, about labels that no training row has, about
    texts that are empty and, if a file has longer targets cut, about those.
    """
    for task in tasks:
        train_label_counts = Counter[Any]()
        for split in ("train", "validation", "report"):
            if split == "report" and not task.report:
                continue
            rows = task.rows(split, cache)
            task.check_rows(rows)
            task.check_labels(rows)
            if task.labels:
                is_tagging = isinstance(task, LabelledTask) and task.kind == "tokens"
                targets = map(task.target, rows)
                label_counts = Counter(chain.from_iterable(targets) if is_tagging else targets)
                if split == "train":
                    train_label_counts = label_counts
                unit = "word" if is_tagging else "row"
                _check_label_counts(task, split, label_counts, train_label_counts, unit, print_line)
            _print_empty_texts(task, split, rows, print_line)
            if isinstance(task, Task) and task.targets_length is not None:
                _check_targets_length(task, task.targets_length, split, rows, tokenizer, print_line)


def _check_label_counts(
    task: Task | LabelledTask,
    split: str,
    label_counts: Mapping[Any, int],
    train_label_counts: Mapping[Any, int],
    unit: str,
    print_line: Callable[[str], object],
) -> None:
    """Print how many rows of a split have each label, and labels that leave nothing to learn or to score.

    Raises SettingError if a classifier would be trained on rows of one label. ``unit``: what has a label, a
    row or a word.
    """
    assert task.labels
    count = sum(label_counts.values())
    if len(task.labels) <= MAX_COUNTED_LABELS:
        counts = ", ".join(f"{label_counts[index]:,} {label}" for index, label in enumerate(task.labels))
        print_line(f"{task.file}: {count:,} {unit}s of {split!r}: {counts}")
    if len(label_counts) == 1 and (count > 1 or split == "train"):
        label, names = task.labels[next(iter(label_counts))], ", ".join(task.labels)
        said = f"{task.file}: all {count:,} {unit}s of {split!r} have the label {label!r}, of {names}"
        if split == "train":
            raise SettingError(f"{said}: there is nothing to learn")
        print_line(f"{said}: a score on them says little")
    for label in sorted(label_counts.keys() - train_label_counts.keys()):
        name = task.labels[label]
        found = f"{label_counts[label]:,} of {count:,} {unit}s of {split!r} have the label {name!r}"
        print_line(f"{task.file}: {found}, which no {unit} of 'train' has: it cannot be learned")


def _print_empty_texts(
    task: Task | LabelledTask, split: str, rows: Sequence[Row], print_line: Callable[[str], object]
) -> None:
    """Print which columns have texts of nothing but blanks, and how many."""
    assert task.file is not None
    spec = _load_spec(task.file)
    texts = [column for column in spec.columns if column not in (spec.label, spec.words, spec.tags)]
    empty, first = Counter[str](), dict[str, int]()
    for index, row in enumerate(rows):
        for column in texts:
            if not str(row[column]).strip():
                empty[column] += 1
                first.setdefault(column, index)
    for column, count in empty.items():
        found = f"{count:,} of {len(rows):,} rows of {split!r} have nothing in the column {column!r}"
        print_line(f"{task.file}: {found}; the first is {_location(rows, first[column])}")


def _location(rows: Sequence[Row], index: int) -> str:
    """Return where a row is, for an error message."""
    return rows.location(index) if isinstance(rows, TableRows) else f"row {index + 1}"


def _check_targets_length(
    task: Task,
    max_length: int,
    split: str,
    rows: Sequence[Row],
    tokenizer: Tokenizer,
    print_line: Callable[[str], object],
) -> None:
    """Raise SettingError for targets of more than ``max_length`` tokens, or print that they are cut."""
    targets = tokenizer.encode_batch([task.to_text(row)[1] for row in rows])
    lengths = [len(ids) + 1 for ids in targets]  # with EOS
    longer = sum(length > max_length for length in lengths)
    if not longer:
        return
    found = f"{longer:,} of {len(rows):,} targets in {split!r} exceed targets_length"
    found += f"={max_length}, the longest has {max(lengths):,} tokens, EOS counted"
    if task.longer_targets == "stop":
        raise SettingError(f'{task.file}: {found}: raise it, or set longer_targets = "cut"')
    print_line(f"{task.file}: {found}, and lose their end")

"""Tasks that are answered by a head instead of in words: classes, numbers, word labels, spans, choices."""

import copyreg
import re
from collections.abc import Callable, Mapping, Sequence
from operator import itemgetter
from typing import Any

from lm import metrics
from lm.config.base import SettingError, nearest
from lm.data.documentation.code_tags import ROLES
from lm.data.tasks.benchmarks import ACCEPTABLE, ACCURACY, CLASS, TASKS, TRUTH
from lm.data.tasks.declared import declared_head
from lm.data.tasks.names import is_task_file
from lm.data.tasks.task import Kind, LabelledTask, Row, Task, Texts

HALVES = ("sentence", "damaged")  # fields of a minimal pair
UPOS = tuple("ADJ ADP ADV AUX CCONJ DET INTJ NOUN NUM PART PRON PROPN PUNCT SCONJ SYM VERB X _".split())


AnyTask = Task | LabelledTask


def find_labelled(name: str) -> LabelledTask:
    """Return ``LABELLED[name]``, or the task that a file declares; SettingError names the nearest."""
    if is_task_file(name):
        return declared_head(name)
    if name not in LABELLED:
        raise SettingError(f"tuning.heads: there is no labelled task {name!r}{nearest(name, LABELLED)}")
    return LABELLED[name]


def with_head(words: str, kind: Kind, texts: str | Texts, **settings: Any) -> LabelledTask:
    """Return the text-to-text task that is named ``words`` as a task with a head.

    ``texts``: what is read of a row, or the names of its fields, with blanks between them.
    """
    shared = ["source", "column", "target", "metrics", "beside", "report", "like"]
    shared += ["labels"] if kind == "classes" else []
    inherited = {field: getattr(TASKS[words], field) for field in shared if field not in settings}
    reads = texts if callable(texts) else lambda row: tuple(row[field] for field in texts.split())
    return LabelledTask(**{"name": words, "kind": kind, "texts": reads} | inherited | settings)


def behind_cue(row: Row) -> tuple[int, int] | None:
    """Return the [start, end) of the answer behind the cue in the context [characters]; None if not there."""
    cue, answer = re.escape(row["question"]), re.escape(row["answers"][0])
    match = re.search(rf"(?<!\S){cue}\s+\W*({answer})(?!\w)", row["context"])
    return match and match.span(1)


def answer_texts(row: Row) -> list[str] | None:
    return row["answers"]["text"] or None


def word_labels(field: str) -> Callable[[Row], Sequence[int] | None]:
    """Return a function that reads the classes of a row's words from ``field``.

    It returns None where one is not known, which data sets write as -1 or -100.
    """

    def labels(row: Row) -> Sequence[int] | None:
        return row[field] if all(label >= 0 for label in row[field]) else None

    return labels


def tokens(row: Row) -> tuple[list[str]]:
    return (row["tokens"],)


def first_answer(row: Row) -> tuple[int, int] | None:
    if not row["answers"]["text"]:
        return None
    start = row["answers"]["answer_start"][0]
    return start, start + len(row["answers"]["text"][0])


def pairs(rows: Sequence[Row]) -> list[Row]:
    """Return rows of two sentences, of which the second follows the first in every other row."""
    return [
        {
            "sentence1": row["sentences"][(row["label"] + i % 2) % len(row["sentences"])],
            "sentence2": row["following"],
            "label": 1 - i % 2,
        }
        for i, row in enumerate(rows)
    ]


def halves(rows: Sequence[Row]) -> list[Row]:
    """Return both sentences of each minimal pair as rows; in every other pair the damaged one is first."""
    both = [[{"sentence": row[key], "label": int(key == "sentence")} for key in HALVES] for row in rows]
    return [half for i, pair in enumerate(both) for half in pair[:: 1 - 2 * (i % 2)]]


def preceding_pairs(row: Row) -> tuple[tuple[str, str], ...]:
    return tuple((sentence, row["following"]) for sentence in row["sentences"])


def copa(row: Row) -> tuple[tuple[str, str], ...]:
    question = {"cause": "What was the cause?", "effect": "What happened as a result?"}[row["question"]]
    return tuple((f"{row['premise']} {question}", row[choice]) for choice in ("choice1", "choice2"))


def multiple_choice(name: str, source: str, stem: str, candidates: Texts, **settings: Any) -> LabelledTask:
    """Return a task to choose the candidate that goes with the field ``stem``."""

    def texts(row: Row) -> tuple[tuple[str, str], ...]:
        return tuple((row[stem], text) for text in candidates(row))

    return LabelledTask(name, source, "SGLUE", CLASS, ACCURACY, "choice", texts, **settings)


POS, EWT = word_labels("upos"), "universal_dependencies/en_ewt"
BY_CLASS: Mapping[str, Any] = {"target": CLASS, "metrics": ACCURACY}
BY_WORD = {"accuracy": metrics.token_accuracy}
_TASKS = (
    with_head("acceptability", "classes", "sentence", labels=ACCEPTABLE, derive=halves, **BY_CLASS),
    with_head(
        "next",
        "classes",
        "sentence1 sentence2",
        name="follows",
        column="follows",
        labels=TRUTH,
        derive=pairs,
        **BY_CLASS,
    ),
    with_head("extract", "span", "question context", answer_span=behind_cue),
    with_head("next", "choice", preceding_pairs, **BY_CLASS),
    with_head("cola", "classes", "sentence"),
    with_head("sst2", "classes", "sentence"),
    with_head("mrpc", "classes", "sentence1 sentence2"),
    with_head("qnli", "classes", "question sentence"),
    with_head("rte", "classes", "sentence1 sentence2"),
    with_head("stsb", "regression", "sentence1 sentence2"),
    with_head("squad", "span", "question context", answer_span=first_answer, target=answer_texts),
    with_head("copa", "choice", copa),
    multiple_choice("piqa", "piqa", "goal", itemgetter("sol1", "sol2")),
    multiple_choice("codah", "codah", "prompt", itemgetter("endings")),
    LabelledTask("pos", EWT, "GLUE", POS, BY_WORD, "tokens", tokens, labels=UPOS, validation="dev"),
    LabelledTask(
        "roles",
        "documentation/roles",
        "roles",
        word_labels("roles"),
        BY_WORD,
        "tokens",
        tokens,
        labels=ROLES,
        report="report",
        like="GLUE",
    ),
)

LABELLED: dict[str, LabelledTask] = {task.name: task for task in _TASKS}

copyreg.pickle(LabelledTask, lambda task: (find_labelled, (task.handle,)))

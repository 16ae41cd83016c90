"""Tasks that a head on the model's states answers, and not words: classes, numbers, labels of words, spans,
choices.
"""

import dataclasses
import re
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any, Literal

from lm import metrics
from lm.data.tasks.registry import TASKS
from lm.data.tasks.task import Row, Scored
from lm.data.text.tfds import Corrupt
from lm.settings import SettingError, nearest

Kind = Literal["classes", "regression", "tokens", "span", "choice"]
CANDIDATES = 4  # of which one follows, in "next"
# TFDS's order
UPOS = "ADJ ADP ADV AUX CCONJ DET INTJ NOUN NUM PART PRON PROPN PUNCT SCONJ SYM VERB X _".split()


@dataclasses.dataclass(frozen=True, kw_only=True)
class LabelledTask(Scored):
    """What a row gives to read, ``texts``, is of classes and regression one text or two, of tokens one list
    of words, of a span the question and the context, of a choice such texts for each candidate.

    Targets and predictions are a class, a number, the words' classes, an answer and answers, a candidate.
    """

    kind: Kind
    texts: Callable[[Row], tuple[Any, ...]]
    place: Callable[[Row], tuple[int, int] | None] | None = None  # of a span's context: [characters)
    # rows from those of the source; None: the same
    make: Callable[[Sequence[Row]], Sequence[Row]] | None = None

    def __reduce__(self) -> tuple[Any, ...]:
        return labelled, (self.name,)  # its functions do not pickle, its name does

    def rows(self, split: str, cache: Path, corrupt: Corrupt = "stop") -> Sequence[Row]:
        rows = super().rows(split, cache, corrupt)
        return self.make(rows) if self.make else rows

    def to_text(self, row: Row) -> tuple[Any, Any]:
        """What is read, and what is to be told."""
        return self.texts(row), self.target(row)


def labelled(name: str) -> LabelledTask:
    """``LABELLED[name]``, or a SettingError with the nearest name."""
    if name not in LABELLED:
        raise SettingError(f"tuning.heads: there is no labelled task {name!r}{nearest(name, LABELLED)}")
    return LABELLED[name]


def of(name: str, kind: Kind, texts: str | Callable[[Row], tuple[Any, ...]], **settings: Any) -> LabelledTask:
    """The text-to-text task of that name, with a head; ``texts`` may be the fields of a row to read."""
    same = ["source", "column", "target", "metrics", "beside"] + (["labels"] if kind == "classes" else [])
    given = {field: getattr(TASKS[name], field) for field in same}
    read = texts if callable(texts) else lambda row: tuple(row[field] for field in texts.split())
    return LabelledTask(name=name, kind=kind, texts=read, **given | settings)


def whole_word(row: Row) -> tuple[int, int] | None:
    """Where the context has the answer behind the word that the question's gap is behind, or has it at
    all.
    """
    before = re.search(r"(\S+)\s+[^\w\s]*_(?!\w)", row["question"])
    answer = rf"(?<!\w){re.escape(row['answers'][0])}(?!\w)"
    leads = [rf"(?<!\S){re.escape(before[1])}\s+\W*"] if before else []
    for lead in (*leads, ""):
        if found := re.search(rf"{lead}({answer})", row["context"]):
            return found.span(1)
    return None


def first_answer(row: Row) -> tuple[int, int]:
    start = row["answers"]["answer_start"][0]
    return start, start + len(row["answers"]["text"][0])


def endings(rows: Sequence[Row]) -> list[Row]:
    """A sentence, and CANDIDATES of which one follows it: the others follow other sentences of the set."""
    pairs = [(row["sentence1"], row["sentence2"]) for row in rows if row["label"] == 1]
    made = []
    for i, (first, _) in enumerate(pairs):
        label = i % CANDIDATES
        found = [
            pairs[(i + (k - label) * (len(pairs) // CANDIDATES)) % len(pairs)][1] for k in range(CANDIDATES)
        ]
        made.append({"sentence": first, "endings": found, "label": label})
    return made


def copa(row: Row) -> tuple[tuple[str, str], ...]:
    asked = {"cause": "What was the cause?", "effect": "What happened as a result?"}[row["question"]]
    return tuple((f"{row['premise']} {asked}", row[choice]) for choice in ("choice1", "choice2"))


def choice(
    name: str, source: str, candidates: Callable[[Row], list[str]], stem: str, **settings: Any
) -> LabelledTask:
    """Which of the candidates goes with the field ``stem``."""
    return LabelledTask(
        name=name,
        source=source,
        column="SGLUE",
        kind="choice",
        target=lambda row: row["label"],
        texts=lambda row: tuple((row[stem], text) for text in candidates(row)),
        metrics={"accuracy": metrics.accuracy},
        **settings,
    )


_TASKS = (
    of("acceptability", "classes", "sentence"),
    of("follows", "classes", "sentence1 sentence2"),
    of("cloze", "span", "question context", place=whole_word),
    choice("next", "documentation/follows", lambda row: row["endings"], "sentence", make=endings),
    of("cola", "classes", "sentence"),
    of("sst2", "classes", "sentence"),
    of("mrpc", "classes", "sentence1 sentence2"),
    of("qnli", "classes", "question sentence"),
    of("rte", "classes", "sentence1 sentence2"),
    of("stsb", "regression", "sentence1 sentence2"),
    of("squad", "span", "question context", place=first_answer, target=lambda row: row["answers"]["text"]),
    of("copa", "choice", copa),
    choice("piqa", "piqa", lambda row: [row["sol1"], row["sol2"]], "goal"),
    choice("codah", "codah", lambda row: row["endings"], "prompt"),
    LabelledTask(
        name="pos",
        source="universal_dependencies/en_ewt",
        column="GLUE",
        kind="tokens",
        labels=tuple(UPOS),
        texts=lambda row: (row["tokens"],),
        target=lambda row: row["upos"],
        metrics={"accuracy": metrics.token_accuracy},
        validation="dev",
    ),
)

LABELLED: Mapping[str, LabelledTask] = {task.name: task for task in _TASKS}

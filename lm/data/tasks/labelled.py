"""Tasks that a head on the model's states answers, and not words: classes, numbers, labels of words, spans, choices."""

import dataclasses
import re
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any, Literal

from lm import metrics
from lm.config import SettingError, nearest
from lm.data.tasks import TASKS
from lm.data.tasks.task import Column, Row, scores

Kind = Literal["classes", "regression", "tokens", "span", "choice"]
CANDIDATES = 4  # of which one follows, in "next"
UPOS = "ADJ ADP ADV AUX CCONJ DET INTJ NOUN NUM PART PRON PROPN PUNCT SCONJ SYM VERB X _"  # TFDS's order


@dataclasses.dataclass(frozen=True)
class LabelledTask:
    """What a row gives to read, ``texts``, is of classes and regression one text or two, of tokens one list of words,
    of a span the question and the context, of a choice such texts for each candidate."""

    name: str
    source: str  # of lm.data.sources.examples
    column: Column  # of the paper's tables in which its score counts
    kind: Kind
    texts: Callable[[Row], tuple[Any, ...]]
    target: Callable[[Row], Any]  # what metrics compare with: a class, a number, words' classes, answers, a candidate
    metrics: Mapping[str, metrics.Metric]  # by name
    labels: tuple[str, ...] = ()  # names of the classes
    place: Callable[[Row], tuple[int, int] | None] | None = None  # of a span's context: [characters)
    beside: tuple[str, ...] = ()  # metrics that are shown and do not count
    train: str = "train"  # split to train on
    validation: str = "validation"  # split to evaluate on
    make: Callable[[Sequence[Row]], Sequence[Row]] | None = None  # rows from those of the source; None: the same

    def __reduce__(self) -> tuple[Any, ...]:
        return labelled, (self.name,)  # its functions do not pickle, its name does

    def rows(self, split: Literal["train", "validation"], cache: Path) -> Sequence[Row]:
        """The rows to train or to evaluate on."""
        from lm.data import sources

        rows = sources.examples(self.source, self.train if split == "train" else self.validation, cache)
        return self.make(rows) if self.make else rows

    def evaluate(self, rows: Sequence[Row], predictions: Sequence[Any]) -> dict[str, float]:
        """All metrics of what ``lm.data.labelled.Reader.answer`` gives, and ``score``: the mean of those that count."""
        return scores(self.metrics, self.beside, [self.target(row) for row in rows], predictions)


def labelled(name: str) -> LabelledTask:
    """``LABELLED[name]``, or a SettingError with the nearest name."""
    if name not in LABELLED:
        raise SettingError(f"tuning.heads: there is no labelled task {name!r}{nearest(name, LABELLED)}")
    return LABELLED[name]


def of(name: str, kind: Kind, texts: str | Callable[[Row], tuple[Any, ...]], **settings: Any) -> LabelledTask:
    """The text-to-text task of that name, with a head; ``texts`` may be the fields of a row to read."""
    given = {field: getattr(TASKS[name], field) for field in ("source", "column", "target", "metrics", "beside")}
    read = texts if callable(texts) else lambda row: tuple(row[field] for field in texts.split())
    return LabelledTask(name, kind=kind, texts=read, **given | settings)


def whole_word(row: Row) -> tuple[int, int] | None:
    """Where the context has the answer behind the word that the question's gap is behind, or has it at all."""
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
        found = [pairs[(i + (k - label) * (len(pairs) // CANDIDATES)) % len(pairs)][1] for k in range(CANDIDATES)]
        made.append({"sentence": first, "endings": found, "label": label})
    return made


def copa(row: Row) -> tuple[tuple[str, str], ...]:
    asked = {"cause": "What was the cause?", "effect": "What happened as a result?"}[row["question"]]
    return tuple((f"{row['premise']} {asked}", row[choice]) for choice in ("choice1", "choice2"))


def choice(name: str, source: str, candidates: Callable[[Row], list[str]], stem: str, **settings: Any) -> LabelledTask:
    """Which of the candidates goes with the field ``stem``."""
    return LabelledTask(
        name, source, "SGLUE", "choice", lambda row: tuple((row[stem], text) for text in candidates(row)),
        lambda row: row["label"], {"accuracy": metrics.accuracy}, **settings,
    )  # fmt: skip


_TASKS = (
    of("acceptability", "classes", "sentence", labels=("unacceptable", "acceptable")),
    of("follows", "classes", "sentence1 sentence2", labels=("False", "True")),
    of("cloze", "span", "question context", place=whole_word),
    choice("next", "documentation/follows", lambda row: row["endings"], "sentence", make=endings),
    of("cola", "classes", "sentence", labels=("unacceptable", "acceptable")),
    of("sst2", "classes", "sentence", labels=("negative", "positive")),
    of("mrpc", "classes", "sentence1 sentence2", labels=("not_equivalent", "equivalent")),
    of("qnli", "classes", "question sentence", labels=("entailment", "not_entailment")),
    of("rte", "classes", "sentence1 sentence2", labels=("entailment", "not_entailment")),
    of("stsb", "regression", "sentence1 sentence2"),
    of("squad", "span", "question context", place=first_answer, target=lambda row: row["answers"]["text"]),
    of("copa", "choice", copa),
    choice("piqa", "piqa", lambda row: [row["sol1"], row["sol2"]], "goal"),
    choice("codah", "codah", lambda row: row["endings"], "prompt"),
    LabelledTask(
        "pos", "universal_dependencies/en_ewt", "GLUE", "tokens", lambda row: (row["tokens"],), lambda row: row["upos"],
        {"accuracy": metrics.token_accuracy}, tuple(UPOS.split()), validation="dev",
    ),
)  # fmt: skip

LABELLED: Mapping[str, LabelledTask] = {task.name: task for task in _TASKS}

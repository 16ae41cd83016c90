"""Tasks that a head on the model answers: classes, numbers, tags of words, spans, multiple choice."""

import copyreg
import re
from collections.abc import Callable, Mapping, Sequence
from operator import itemgetter
from pathlib import Path
from typing import Any

from lm import metrics
from lm.config.base import SettingError, did_you_mean
from lm.data.documentation.code_tags import CODE_TAGS
from lm.data.documentation.object_names import NAME_LABELS
from lm.data.tasks.benchmarks import ACCEPTABLE, ACCURACY, BOTH_MNLI_SETS, FALSE_TRUE, TASKS
from lm.data.tasks.names import is_task_file
from lm.data.tasks.task import HeadKind, LabelledTask, ReadTexts, Row, Task, label_of
from lm.data.tasks.task_files import labelled_task_from_file

UPOS = tuple("ADJ ADP ADV AUX CCONJ DET INTJ NOUN NUM PART PRON PROPN PUNCT SCONJ SYM VERB X _".split())
CONLL = tuple("O B-PER I-PER B-ORG I-ORG B-LOC I-LOC B-MISC I-MISC".split())

AnyTask = Task | LabelledTask


def find_labelled(name: str) -> LabelledTask:
    """Return ``LABELLED[name]``, or the task of a task file; SettingError names the nearest."""
    if is_task_file(name):
        return labelled_task_from_file(name)
    if name not in LABELLED:
        is_own = Path(name).suffix or Path(name).exists()
        own = "; a task of your own is a TOML file that names its data (docs/tasks.md)" if is_own else ""
        raise SettingError(
            f"tuning.heads: there is no labelled task {name!r}{did_you_mean(name, LABELLED)}{own}"
        )
    return LABELLED[name]


def labelled_version(text_task: str, kind: HeadKind, texts: str | ReadTexts, **settings: Any) -> LabelledTask:
    """Return the text-to-text task ``text_task`` as a task that a head answers.

    ``texts``: a function of a row, or the names of the fields to read, separated by spaces. ``settings``
    replace those of the text-to-text task.
    """
    shared = ["source", "column", "target", "metrics", "unscored_metrics", "report", "paper_column", "half"]
    if kind == "classes":
        shared.append("labels")
    inherited = {field: getattr(TASKS[text_task], field) for field in shared if field not in settings}
    read_texts = texts if callable(texts) else lambda row: tuple(row[field] for field in texts.split())
    return LabelledTask(**{"name": text_task, "kind": kind, "texts": read_texts} | inherited | settings)


def multiple_choice(
    name: str, source: str, stem: str, candidates: ReadTexts, num_candidates: int, **settings: Any
) -> LabelledTask:
    """Return a task to choose the candidate that goes with the field ``stem``."""

    def texts(row: Row) -> tuple[tuple[str, str], ...]:
        return tuple((row[stem], text) for text in candidates(row))

    return LabelledTask(
        name,
        source,
        "SGLUE",
        label_of,
        ACCURACY,
        "choice",
        texts,
        num_candidates=num_candidates,
        **settings,
    )


# what models read, targets and spans, by the data set's fields


def span_after_cue(row: Row) -> tuple[int, int] | None:
    """Return the [start, end) of the answer after the cue in the context [characters]; None if not there."""
    cue, answer = re.escape(row["question"]), re.escape(row["answers"][0])
    match = re.search(rf"(?<!\S){cue}\s+\W*({answer})(?!\w)", row["context"])
    return match and match.span(1)


def squad_answers(row: Row) -> list[str] | None:
    return row["answers"]["text"] or None


def squad_span(row: Row) -> tuple[int, int] | None:
    """Return the [start, end) of the first answer in the context [characters]; None if there is no answer."""
    if not row["answers"]["text"]:
        return None
    start = row["answers"]["answer_start"][0]
    return start, start + len(row["answers"]["text"][0])


def tokens(row: Row) -> tuple[list[str]]:
    return (row["tokens"],)


def word_tags(field: str) -> Callable[[Row], Sequence[int] | None]:
    """Return a function that reads the tags of a row's words from ``field``.

    It returns None if one of them is unknown, which data sets write as -1 or -100.
    """

    def tags(row: Row) -> Sequence[int] | None:
        return row[field] if all(tag >= 0 for tag in row[field]) else None

    return tags


def entity_metrics(labels: Sequence[str]) -> dict[str, metrics.Metric]:
    """Return the metrics of named-entity recognition, whose score is the F1 of entities."""
    return {"entity_f1": metrics.entity_f1(labels), "accuracy": metrics.token_accuracy}


def sentence_pairs(rows: Sequence[Row]) -> list[Row]:
    """Return pairs of sentences; in every other row, the second sentence follows the first."""
    pairs = []
    for i, row in enumerate(rows):
        first = (row["label"] + i % 2) % len(row["sentences"])
        pair = {"sentence1": row["sentences"][first], "sentence2": row["following"], "label": 1 - i % 2}
        pairs.append(pair)
    return pairs


def single_sentences(rows: Sequence[Row]) -> list[Row]:
    """Return both sentences of each minimal pair as rows; in every other pair the damaged one is first."""
    sentences: list[Row] = []
    for i, row in enumerate(rows):
        pair = [{"sentence": row["sentence"], "label": 1}, {"sentence": row["damaged"], "label": 0}]
        sentences += reversed(pair) if i % 2 else pair
    return sentences


def next_candidates(row: Row) -> tuple[tuple[str, str], ...]:
    return tuple((sentence, row["following"]) for sentence in row["sentences"])


def copa_candidates(row: Row) -> tuple[tuple[str, str], ...]:
    question = {"cause": "What was the cause?", "effect": "What happened as a result?"}[row["question"]]
    return tuple((f"{row['premise']} {question}", row[choice]) for choice in ("choice1", "choice2"))


RACE_LABELS = {letter: label for label, letter in enumerate("ABCD")}
RACE_GAP = re.compile(r"(?<!\w)_+(?!\w)")


def race_questions(rows: Sequence[Row]) -> list[Row]:
    """Return a row per question: a row of RACE is a passage with several, each with four options."""
    questions = []
    for row in rows:
        for question, options, answer in zip(row["questions"], row["options"], row["answers"], strict=True):
            label = RACE_LABELS[answer]
            questions.append(
                {"passage": row["article"], "question": question, "options": options, "label": label}
            )
    return questions


def race_candidates(row: Row) -> tuple[str, ...]:
    """Return the question with each option: in its first gap, if it has one, otherwise after it."""
    question = row["question"]
    if (gap := RACE_GAP.search(question)) is None:
        return tuple(f"{question} {option}" for option in row["options"])
    begin, end = question[: gap.start()], question[gap.end() :]
    return tuple(f"{begin}{option}{end}" for option in row["options"])


UPOS_TAGS, EWT = word_tags("upos"), "universal_dependencies/en_ewt"
CLASSES: Mapping[str, Any] = {"target": label_of, "metrics": ACCURACY}
TAG_ACCURACY = {"accuracy": metrics.token_accuracy}
_TASKS = (
    labelled_version(
        "acceptability", "classes", "sentence", labels=ACCEPTABLE, derive_rows=single_sentences, **CLASSES
    ),
    labelled_version(
        "next",
        "classes",
        "sentence1 sentence2",
        name="follows",
        column="follows",
        labels=FALSE_TRUE,
        derive_rows=sentence_pairs,
        **CLASSES,
    ),
    labelled_version("extract", "span", "question context", answer_span=span_after_cue),
    labelled_version("next", "choice", next_candidates, num_candidates=4, **CLASSES),
    labelled_version("cola", "classes", "sentence"),
    labelled_version("sst2", "classes", "sentence"),
    labelled_version("mrpc", "classes", "sentence1 sentence2"),
    labelled_version("qqp", "classes", "question1 question2"),
    labelled_version("mnli", "classes", "premise hypothesis", validation=BOTH_MNLI_SETS),
    labelled_version("qnli", "classes", "question sentence"),
    labelled_version("rte", "classes", "sentence1 sentence2"),
    labelled_version("stsb", "regression", "sentence1 sentence2"),
    labelled_version("squad", "span", "question context", answer_span=squad_span, target=squad_answers),
    labelled_version("copa", "choice", copa_candidates, num_candidates=2),
    multiple_choice("piqa", "piqa", "goal", itemgetter("sol1", "sol2"), 2),
    multiple_choice("codah", "codah", "prompt", itemgetter("endings"), 4),
    multiple_choice("race-middle", "race/middle", "passage", race_candidates, 4, derive_rows=race_questions),
    multiple_choice("race-high", "race/high", "passage", race_candidates, 4, derive_rows=race_questions),
    LabelledTask(
        "pos", EWT, "GLUE", UPOS_TAGS, TAG_ACCURACY, "tokens", tokens, labels=UPOS, validation="dev"
    ),
    LabelledTask(
        "ner",
        "conll2003",
        "GLUE",
        word_tags("ner"),
        entity_metrics(CONLL),
        "tokens",
        tokens,
        labels=CONLL,
        unscored_metrics=("accuracy",),
        validation="dev",
        report="test",
    ),
    LabelledTask(
        "entities",
        "documentation/entities",
        "entities",
        word_tags("entities"),
        entity_metrics(NAME_LABELS),
        "tokens",
        tokens,
        labels=NAME_LABELS,
        unscored_metrics=("accuracy",),
        report="report",
        paper_column="GLUE",
    ),
    LabelledTask(
        "roles",
        "documentation/roles",
        "roles",
        word_tags("roles"),
        TAG_ACCURACY,
        "tokens",
        tokens,
        labels=CODE_TAGS,
        report="report",
        paper_column="GLUE",
    ),
)
LABELLED: dict[str, LabelledTask] = {task.name: task for task in _TASKS}

copyreg.pickle(LabelledTask, lambda task: (find_labelled, (task.name_or_path,)))

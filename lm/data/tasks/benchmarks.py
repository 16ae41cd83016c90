"""The paper's benchmarks in the paper's text formats: GLUE, SuperGLUE, SQuAD, CNN/Daily Mail and three of WMT.

The formats, and what is odd about them, are in appendix D of Raffel et al. 2020; WNLI is left out, as there.
"""

import re
from collections.abc import Mapping
from typing import Any

from lm import metrics
from lm.data.tasks.task import Row, Task, classification, words

ACCURACY = {"accuracy": metrics.accuracy}
BOTH = {"f1": metrics.binary_f1, "accuracy": metrics.accuracy}
SQUAD = {"exact_match": metrics.exact_match, "f1": metrics.answer_f1}
ENTAILMENT = ("entailment", "not_entailment")
BOOLEAN = ("False", "True")
DETERMINERS = "a an the this that these those my your his her its our their which whose each every few many much some"


def glue(name: str, names: str, labels: tuple[str, ...], scores: Mapping[str, metrics.Metric], **settings: Any) -> Task:
    """A GLUE task; its fields are in alphabetical order."""
    settings = {"source": f"glue/{name}", "column": "GLUE"} | settings
    return classification(name, labels, names.split(), metrics=scores, **settings)


def super_glue(name: str, names: str, labels: tuple[str, ...], scores: Mapping[str, metrics.Metric]) -> Task:
    """A SuperGLUE task with one label per row; RTE is in GLUE too, with other names for its fields."""
    own = "super_glue_rte" if name == "rte" else name
    settings = {"source": f"super_glue/{name}", "column": "SGLUE", "prefix": name}
    return classification(own, labels, names.split(), metrics=scores, **settings)


# STS-B: a number as text


def stsb_text(row: Row) -> tuple[str, str]:
    """The score, rounded to the nearest fifth, is the target."""
    score = f"{round(row['label'] * 5) / 5:.1f}"
    return f"stsb sentence1: {row['sentence1']} sentence2: {row['sentence2']}", score


def number(text: str, row: Row) -> float:
    """The number a text spells, -1 if none."""
    try:
        return float(text)
    except ValueError:
        return -1.0


# MultiRC: rows are grouped by question


def multirc_text(row: Row) -> tuple[str, str]:
    """Fields in this order, and without the mark-up of the paragraph."""
    plain = {key: re.sub("</?b>", "", row[key].replace("<br>", " ")) for key in ("question", "answer", "paragraph")}
    target = BOOLEAN[row["label"]] if row["label"] >= 0 else "<unk>"
    return " ".join(["multirc", *(f"{key}: {value}" for key, value in plain.items())]), target


def group(row: Row) -> tuple[Any, ...]:
    """Of the answers to one question, whichever fields the data set numbers it by."""
    return tuple(row["idx"][key] for key in sorted(row["idx"]) if key != "answer")


# ReCoRD: entities to choose from, several right ones


def record_text(row: Row) -> tuple[str, str]:
    """Highlights become sentences of the passage."""
    passage = re.sub(r"([.?!\"']?)\n@highlight\n", lambda end: f"{end[1] or '.'} ", row["passage"])
    entities = ", ".join(row["entities"])
    text = f"record query: {row['query']} entities: {entities} passage: {passage}"
    return text, row["answers"][0] if row["answers"] else "<unk>"


def record_training(row: Row) -> list[Row]:
    """One example per right answer."""
    return [row | {"answers": [answer]} for answer in row["answers"]]


# WSC: name what the marked pronoun stands for


def wsc_text(row: Row) -> tuple[str, str]:
    """The pronoun, word ``span2_index`` of the text, stands between asterisks."""
    before = rf"((?:\S+\s+){{{row['span2_index']}}}\W*)"
    text = re.sub(f"^{before}({re.escape(row['span2_text'])})", r"\1*\2*", row["text"])
    return f"wsc: {text}", row["span1_text"]


def refers(text: str, row: Row) -> int:
    """1 if the words of prediction and candidate contain each other, whatever the determiners; -1 for no words."""
    ours, theirs = (
        [word for word in value.lower().split() if word not in DETERMINERS.split()]
        for value in (text, row["span1_text"])
    )
    if not ours:
        return -1
    if ("'" in " ".join(ours)) != ("'" in " ".join(theirs)):
        return 0
    return int(set(ours) <= set(theirs) or set(theirs) <= set(ours))


# SQuAD


def spaced(text: str) -> str:
    """Blanks around every punctuation mark, single ones elsewhere."""
    return re.sub(r"\s+", " ", re.sub(r"([^\w\s]|_)", r" \1 ", text))


def squad_text(row: Row) -> tuple[str, str]:
    question, context = spaced(row["question"]), spaced(row["context"])
    return f"question: {question} context: {context}", spaced(row["answers"]["text"][0])


# Translation


LANGUAGES = {"en": "English", "de": "German", "fr": "French", "ro": "Romanian"}


def translate(row: Row, source: str, target: str) -> tuple[str, str]:
    return f"translate {LANGUAGES[source]} to {LANGUAGES[target]}: {row[source]}", row[target]


def wmt(name: str, target: str, source: str, column: Any) -> Task:
    return Task(
        name,
        source,
        column,
        to_text=lambda row: translate(row, "en", target),
        from_text=words,
        target=lambda row: row[target],
        metrics={"bleu": metrics.bleu},
    )


TASKS = (
    glue("cola", "sentence", ("unacceptable", "acceptable"), {"matthews": metrics.matthews}),
    glue("sst2", "sentence", ("negative", "positive"), ACCURACY),
    glue("mrpc", "sentence1 sentence2", ("not_equivalent", "equivalent"), BOTH),
    Task(
        "stsb",
        "glue/stsb",
        "GLUE",
        to_text=stsb_text,
        from_text=number,
        target=lambda row: row["label"],
        metrics={"pearson": metrics.pearson, "spearman": metrics.spearman},
    ),
    glue("qqp", "question1 question2", ("not_duplicate", "duplicate"), BOTH),
    glue(
        "mnli",
        "hypothesis premise",
        ("entailment", "neutral", "contradiction"),
        ACCURACY,
        # The paper's mean of two accuracies: the halves have 9,815 and 9,832 rows.
        validation="validation_matched+validation_mismatched",
    ),
    glue("qnli", "question sentence", ENTAILMENT, ACCURACY),
    glue("rte", "sentence1 sentence2", ENTAILMENT, ACCURACY),
    super_glue("boolq", "passage question", BOOLEAN, ACCURACY),
    super_glue(
        "cb",
        "hypothesis premise",
        ("entailment", "contradiction", "neutral"),
        {"f1": metrics.macro_f1(3), "accuracy": metrics.accuracy},
    ),
    super_glue("copa", "choice1 choice2 premise question", ("choice1", "choice2"), ACCURACY),
    Task(
        "multirc",
        "super_glue/multirc",
        "SGLUE",
        to_text=multirc_text,
        from_text=lambda text, row: BOOLEAN.index(text) if text in BOOLEAN else -1,
        target=lambda row: (group(row), row["label"]),
        metrics={"f1": metrics.ungrouped(metrics.binary_f1), "exact_match": metrics.group_exact_match},
    ),
    Task(
        "record",
        "super_glue/record",
        "SGLUE",
        to_text=record_text,
        from_text=words,
        target=lambda row: row["answers"],
        metrics=SQUAD,
        training=record_training,
    ),
    super_glue("rte", "hypothesis premise", ENTAILMENT, ACCURACY),
    super_glue("wic", "sentence1 sentence2 word", BOOLEAN, ACCURACY),
    Task(
        "wsc",
        "super_glue/wsc.fixed",
        "SGLUE",
        to_text=wsc_text,
        from_text=refers,
        target=lambda row: row["label"],
        metrics=ACCURACY,
        training=lambda row: [row] if row["label"] == 1 else [],
    ),
    Task(
        "squad",
        "squad/v1.1",
        "SQuAD",
        to_text=squad_text,
        from_text=words,
        target=lambda row: [spaced(answer) for answer in row["answers"]["text"]],
        metrics=SQUAD,
        beside=("f1",),
    ),
    Task(
        "cnn_dailymail",
        "cnn_dailymail",
        "CNNDM",
        to_text=lambda row: (f"summarize: {row['article']}", row["highlights"]),
        from_text=words,
        target=lambda row: row["highlights"],
        metrics={name: metrics.rouge(name) for name in ("rouge1", "rouge2", "rougeLsum")},
        beside=("rouge1", "rougeLsum"),
    ),
    wmt("wmt_ende", "de", "wmt_t2t_translate/de-en", "EnDe"),
    wmt("wmt_enfr", "fr", "wmt15_translate/fr-en", "EnFr"),
    wmt("wmt_enro", "ro", "wmt16_translate/ro-en", "EnRo"),
)

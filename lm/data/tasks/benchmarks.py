"""The paper's benchmarks in the paper's text formats: GLUE, SuperGLUE, DPR, SQuAD, CNN/Daily Mail and three
of WMT.

The formats, and what is odd about them, are in appendix D of Raffel et al. 2020. Smaller sets stand in for
the last four where those cannot be had.
"""

import re
from collections.abc import Mapping
from dataclasses import replace
from typing import Any

from lm import metrics
from lm.data.tasks.task import Row, Task, classification, fields, label, label_word, summarisation

ACCURACY = {"accuracy": metrics.accuracy}
BOTH = {"f1": metrics.binary_f1, "accuracy": metrics.accuracy}
SQUAD = {"exact_match": metrics.exact_match, "f1": metrics.answer_f1}
ENTAILMENT = ("entailment", "not_entailment")
BOOLEAN = ("False", "True")
PRONOUNS = "he she they it her his their them him"
DETERMINERS = (
    "a an the this that these those my your his her its our their which whose each every few many much some"
)


def glue(
    name: str, names: str, labels: tuple[str, ...], scores: Mapping[str, metrics.Metric], **settings: Any
) -> Task:
    """A GLUE task; its fields are in alphabetical order."""
    settings = {"source": f"glue/{name}", "column": "GLUE"} | settings
    return classification(name, labels, names.split(), metrics=scores, **settings)


def super_glue(name: str, names: str, labels: tuple[str, ...], scores: Mapping[str, metrics.Metric]) -> Task:
    """A SuperGLUE task with one label per row; RTE is in GLUE too, with other names for its fields."""
    task = glue(name, names, labels, scores, source=f"super_glue/{name}", column="SGLUE", prefix=name)
    return replace(task, name="super_glue_rte") if name == "rte" else task


# STS-B: a number as text


def stsb_text(row: Row) -> tuple[str, str]:
    """The score, rounded to the nearest fifth, is the target."""
    score = f"{round(row['label'] * 5) / 5:.1f}"
    return f"stsb sentence1: {row['sentence1']} sentence2: {row['sentence2']}", score


# MultiRC: rows are grouped by question


def multirc_text(row: Row) -> tuple[str, str]:
    """Fields in this order, and without the mark-up of the paragraph."""
    plain = {
        key: re.sub("</?b>", "", row[key].replace("<br>", " ")) for key in ("question", "answer", "paragraph")
    }
    return fields("multirc", plain, list(plain)), label_word(BOOLEAN, row)


def group(row: Row) -> tuple[Any, ...]:
    """Of the answers to one question, whichever fields the data set numbers it by."""
    return tuple(row["idx"][key] for key in sorted(row["idx"]) if key != "answer")


# ReCoRD: entities to choose from, several right ones


def record_text(row: Row) -> tuple[str, str]:
    """Highlights become sentences of the passage."""
    passage = re.sub(r"([.?!\"']?)\n@highlight\n", lambda end: f"{end[1] or '.'} ", row["passage"])
    entities = ", ".join(row["entities"])
    return f"record query: {row['query']} entities: {entities} passage: {passage}", record_answers(row)[0]


def record_answers(row: Row) -> list[str]:
    """Those of a row without any, such as one of the test set, are T5's stand-in."""
    return row["answers"] or ["<unk>"]


def record_training(row: Row) -> list[Row]:
    """One example per answer."""
    return [row | {"answers": [answer]} for answer in record_answers(row)]


# WSC, WNLI, DPR: name what the marked pronoun stands for


def marked(text: str, index: int, pronoun: str) -> str:
    """The first ``pronoun`` from word ``index`` of the text on stands between asterisks."""
    before, word = rf"((?:\S+\s+){{{index}}}.*?)", rf"(?<!\w)({re.escape(pronoun)})(?!\w)"
    return "wsc: " + re.sub(f"^{before}{word}", r"\1*\2*", text, count=1, flags=re.DOTALL)


def wsc_text(row: Row) -> tuple[str, str]:
    return marked(row["text"], row["span2_index"], row["span2_text"]), row["span1_text"]


def dpr_text(row: Row) -> tuple[str, str]:
    return marked(row["sentence"], 0, row["pronoun"]), row["candidates"][row["label"]]


def wnli_text(row: Row) -> tuple[str, str]:
    """As in T5, a mark that ends the pronoun's word stands apart from it."""
    text, ((start, end), name) = row["sentence1"], replaced(row)
    rest = re.sub(r"^([.,?!])(?!\S)", r" \1", text[end:])
    return f"wsc: {text[:start]}*{text[start:end]}*{rest}", name


def replaced(row: Row) -> tuple[tuple[int, int], str]:
    """Place [characters) of a pronoun in the premise, and what the hypothesis, a part of the premise, has
    instead.

    Of all pronouns it is the one with the most words of the hypothesis around it, before it those of its
    sentence.
    """
    premise = list(re.finditer(r"\w[\w'-]*|[.!?]", row["sentence1"]))
    hypothesis = re.findall(r"\w[\w'-]*", row["sentence2"])
    ours, theirs = [word[0].lower() for word in premise], [word.lower() for word in hypothesis]
    found, most = [], len(theirs)
    for place in (place for place, word in enumerate(ours) if word in PRONOUNS.split()):
        before = [n for n in range(min(place + 1, most)) if ours[place - n : place] == theirs[:n]]
        after = [n for n in range(most) if ours[place + 1 :][:n] == theirs[most - n :]]
        found += [(m + n, n, -place) for m in before for n in after if m + n < most]
    both, after, place = max(found, default=(0, 0, 0))
    return premise[-place].span(), " ".join(hypothesis[both - after : most - after]).removesuffix("'s")


def refers(text: str, row: Row) -> int:
    """1 if the words of prediction and candidate contain each other, whatever the determiners; -1 for no
    words.
    """
    ours, theirs = (
        set(value.lower().split()) - set(DETERMINERS.split()) for value in (text, row["span1_text"])
    )
    if not ours:
        return -1
    possessive = ["'" in "".join(words) for words in (ours, theirs)]
    return int(possessive[0] == possessive[1] and (ours <= theirs or theirs <= ours))


# SQuAD


def spaced(text: str) -> str:
    """Blanks around every punctuation mark, single ones everywhere."""
    return re.sub(r"\s+", " ", re.sub(r"([^\w\s]|_)", r" \1 ", text))


def squad_text(row: Row) -> tuple[str, str]:
    question, context = spaced(row["question"]), spaced(row["context"])
    text = re.sub(r"\s+", " ", f"question: {question} context: {context}")
    return text, spaced(row["answers"]["text"][0])


# Translation


LANGUAGES = {"en": "English", "de": "German", "fr": "French", "ro": "Romanian"}


def translate(row: Row, source: str, target: str) -> tuple[str, str]:
    return f"translate {LANGUAGES[source]} to {LANGUAGES[target]}: {row[source]}", row[target]


def translation(name: str, target: str, source: str, column: Any) -> Task:
    return Task(
        name=name,
        source=source,
        column=column,
        to_text=lambda row: translate(row, "en", target),
        target=lambda row: row[target],
        metrics={"bleu": metrics.bleu},
    )


TASKS = (
    glue("cola", "sentence", ("unacceptable", "acceptable"), {"matthews": metrics.matthews}),
    glue("sst2", "sentence", ("negative", "positive"), ACCURACY),
    glue("mrpc", "sentence1 sentence2", ("not_equivalent", "equivalent"), BOTH),
    Task(
        name="stsb",
        source="glue/stsb",
        column="GLUE",
        to_text=stsb_text,
        from_text=lambda text, row: metrics.number(text),
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
        name="multirc",
        source="super_glue/multirc",
        column="SGLUE",
        to_text=multirc_text,
        from_text=label(BOOLEAN),
        target=lambda row: (group(row), row["label"]),
        metrics={"f1": metrics.ungrouped(metrics.binary_f1), "exact_match": metrics.group_exact_match},
    ),
    Task(
        name="record",
        source="super_glue/record",
        column="SGLUE",
        to_text=record_text,
        target=record_answers,
        metrics=SQUAD,
        training=record_training,
    ),
    super_glue("rte", "hypothesis premise", ENTAILMENT, ACCURACY),
    super_glue("wic", "sentence1 sentence2 word", BOOLEAN, ACCURACY),
    Task(
        name="wsc",
        source="super_glue/wsc.fixed",
        column="SGLUE",
        to_text=wsc_text,
        from_text=refers,
        target=lambda row: row["label"],
        metrics=ACCURACY,
        training=lambda row: [row] if row["label"] == 1 else [],
    ),
    Task(
        name="wnli",
        source="glue/wnli",
        column=None,  # never trained on, hence in no average
        to_text=wnli_text,
        from_text=lambda text, row: refers(text, {"span1_text": replaced(row)[1]}),
        target=lambda row: row["label"],
        metrics=ACCURACY,
        train=None,
    ),
    Task(
        name="dpr",
        source="definite_pronoun_resolution",
        column=None,
        to_text=dpr_text,
        target=lambda row: row["candidates"][row["label"]],
        metrics=ACCURACY,
        validation=None,
    ),
    Task(
        name="squad",
        source="squad/v1.1",
        column="SQuAD",
        to_text=squad_text,
        target=lambda row: [spaced(answer) for answer in row["answers"]["text"]],
        metrics=SQUAD,
        beside=("f1",),
    ),
    summarisation("cnn_dailymail", "cnn_dailymail", "article", "highlights"),
    summarisation("scitldr", "scitldr", "document", "summary"),
    translation("wmt_ende", "de", "wmt_t2t_translate/de-en", "EnDe"),
    translation("wmt_enfr", "fr", "wmt15_translate/fr-en", "EnFr"),
    translation("wmt_enro", "ro", "wmt16_translate/ro-en", "EnRo"),
    translation("multi30k_ende", "de", "multi30k/en-de", "EnDe"),
    translation("multi30k_enfr", "fr", "multi30k/en-fr", "EnFr"),
    translation("xquad_enro", "ro", "xquad_translation/en-ro", "EnRo"),
)

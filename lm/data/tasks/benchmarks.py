"""All text-to-text tasks by name: on the built-in documentation, copying and reversing, and the paper's.

The paper's are GLUE, SuperGLUE, DPR, SQuAD, CNN/Daily Mail and three of WMT; appendix D of Raffel et al. 2020
shows their formats, with all their oddities. Smaller data sets replace the last four where those cannot be
had. A new task is one entry of the table; with a ``targets_length`` it is also a mixture with its name.
"""

import copyreg
import re
import unicodedata
from collections.abc import Callable, Mapping
from operator import itemgetter
from typing import Any

from lm import metrics
from lm.config.base import SettingError, did_you_mean
from lm.data.tasks.names import is_task_file
from lm.data.tasks.sequences import COPY, REVERSE
from lm.data.tasks.task import (
    NO_CLASS,
    UNKNOWN,
    PaperColumn,
    Row,
    Task,
    TaskHalf,
    class_from_text,
    format_fields,
    label_of,
    label_word,
)
from lm.data.tasks.task_files import task_from_file

ACCURACY = {"accuracy": metrics.accuracy}
MATTHEWS = {"matthews": metrics.matthews}
F1_ACCURACY = {"f1": metrics.binary_f1} | ACCURACY
MACRO_F1_ACCURACY = {"f1": metrics.macro_f1(3)} | ACCURACY
EQUAL_TEXT = {"exact_match": metrics.accuracy}  # without SQuAD's normalisation
SQUAD = {"exact_match": metrics.exact_match, "f1": metrics.answer_f1}
STSB = {"pearson": metrics.pearson, "spearman": metrics.spearman}
MULTIRC = {"f1": metrics.ungrouped(metrics.binary_f1), "exact_match": metrics.group_exact_match}
ROUGE = {kind: metrics.rouge(kind) for kind in ("rouge1", "rouge2", "rougeLsum")}
FALSE_TRUE = ("False", "True")
ACCEPTABLE = ("unacceptable", "acceptable")
COPA_CHOICES = ("choice1", "choice2")
MNLI, CB = ("entailment", "neutral", "contradiction"), ("entailment", "contradiction", "neutral")
# as the paper's mean of the accuracies on two sets: they have 9,815 and 9,832 rows
BOTH_MNLI_SETS = "validation_matched+validation_mismatched"
MINIMAL_PAIRS = ("acceptability", "agreement", "determiners", "verb-forms")  # tasks on the documentation
ENTAILMENT = ("entailment", "not_entailment")
PRONOUNS = "he she they it her his their them him".split()
DETERMINERS = "a an the this that these those my your his her our their which whose each every".split()
DETERMINERS += "few many much some".split()
LANGUAGES = {"en": "English", "de": "German", "fr": "French", "ro": "Romanian"}


def classification(
    source: str, inputs: str, labels: tuple[str, ...], scores: Mapping[str, Any], column: str, **rest: Any
) -> Task:
    """Return a task whose answer is one of ``labels``.

    ``inputs``: the fields to read, separated by spaces. The name is the last part of ``source``.
    """
    name = source.rpartition("/")[2]

    def to_text(row: Row) -> tuple[str, str]:
        return format_fields(name, row, inputs.split()), label_word(labels, row)

    settings: dict[str, Any] = {"name": name, "postprocess": class_from_text(labels), "labels": labels} | rest
    settings = {"candidates": lambda row: labels} | settings
    return Task(source=source, column=column, target=label_of, metrics=scores, to_text=to_text, **settings)


def summarisation(source: str, document: str, summary: str, targets_length: int) -> Task:
    """Return a task that summarises the field ``document`` as the field ``summary``.

    The name is the last part of ``source``.
    """

    def to_text(row: Row) -> tuple[str, str]:
        return f"summarize: {row[document]}", row[summary]

    return Task(
        source.rpartition("/")[2],
        source,
        "CNNDM",
        itemgetter(summary),
        ROUGE,
        to_text,
        unscored_metrics=("rouge1", "rougeLsum"),
        targets_length=targets_length,
    )


def translation(name: str, source: str, column: PaperColumn, language: str, targets_length: int) -> Task:
    """Return a task that translates the field ``en`` to the field ``language``."""

    def to_text(row: Row) -> tuple[str, str]:
        return translate(row, "en", language)

    scores = {"bleu": metrics.bleu}
    return Task(name, source, column, itemgetter(language), scores, to_text, targets_length=targets_length)


def translate(row: Row, source: str, target: str) -> tuple[str, str]:
    return f"translate {LANGUAGES[source]} to {LANGUAGES[target]}: {row[source]}", row[target]


# Tasks on the documentation (lm.data.documentation.tasks makes their rows)


def documentation_task(
    name: str,
    half: TaskHalf,
    paper_column: PaperColumn,
    to_text: Callable[[Row], tuple[str, str]],
    scores: Mapping[str, Any],
    **rest: Any,
) -> Task:
    """Return a task on the documentation, in a column with its name.

    ``paper_column``: the paper's column most like it. Without ``target`` it is the targets text.
    """
    settings: dict[str, Any] = {"report": "report", "paper_column": paper_column, "measure": "bits_per_byte"}
    settings |= {"half": half} | rest
    target = settings.pop("target", lambda row: to_text(row)[1])
    return Task(name, f"documentation/{name}", name, target, scores, to_text, **settings)


def question_to_text(name: str) -> Callable[[Row], tuple[str, str]]:
    return lambda row: (format_fields(name, row, ("question", "context")), row["answers"][0])


def restore_to_text(row: Row) -> tuple[str, str]:
    return f"restore: {row['document']}", row["summary"]


def summary_to_text(row: Row) -> tuple[str, str]:
    return summary_candidate_inputs(row)[row["label"]], row["summary"]


def summary_candidate_inputs(row: Row) -> tuple[str, ...]:
    return tuple(f"summarize: {document}" for document in row["documents"])


def minimal_pairs(name: str) -> Task:
    """Return a task that scores a sentence and a wrong one after the same input."""
    return documentation_task(
        name,
        "language",
        "GLUE",
        lambda row: (f"{name}: {row['context']}", row["sentence"]),
        {"rouge1": ROUGE["rouge1"]},
        candidates=lambda row: tuple(sorted((row["sentence"], row["damaged"]))),
        measure="bits_above_chance",
        targets_length=40,
    )


def next_to_text(row: Row) -> tuple[str, str]:
    return next_candidate_inputs(row)[row["label"]], row["following"]


def next_candidate_inputs(row: Row) -> tuple[str, ...]:
    return tuple(f"next: {sentence}" for sentence in row["sentences"])


# STS-B: a number as text


def stsb_text(row: Row) -> tuple[str, str]:
    """Return inputs and target, which is the score rounded to the nearest 0.2."""
    label = label_of(row)
    score = UNKNOWN if label is None else f"{round(label * 5) / 5:.1f}"
    return f"stsb sentence1: {row['sentence1']} sentence2: {row['sentence2']}", score


# MultiRC: rows are grouped by question


def multirc_text(row: Row) -> tuple[str, str]:
    """Return inputs, with the fields in T5's order and the mark-up of the paragraph removed, and target."""
    names = ("question", "answer", "paragraph")
    plain = {name: re.sub("</?b>", "", row[name].replace("<br>", " ")) for name in names}
    return format_fields("multirc", plain, names), label_word(FALSE_TRUE, row)


def multirc_target(row: Row) -> tuple[Any, int] | None:
    """Return the question, as the data set's indices, and the class of one answer to it.

    None for a row without a label.
    """
    if label_of(row) is None:
        return None
    return tuple(row["idx"][key] for key in sorted(row["idx"]) if key != "answer"), row["label"]


# ReCoRD: entities to choose from, several of them right


def record_text(row: Row) -> tuple[str, str]:
    """Return inputs, in which highlights become sentences of the passage, and the first answer as target."""
    passage = re.sub(r"([.?!\"']?)\n@highlight\n", lambda end: f"{end[1] or '.'} ", row["passage"])
    entities = ", ".join(row["entities"])
    answers = record_answers(row) or [UNKNOWN]
    return f"record query: {row['query']} entities: {entities} passage: {passage}", answers[0]


def record_answers(row: Row) -> list[str] | None:
    """Return the right answers; None for a row of the test set."""
    return row["answers"] or None


def record_training_rows(row: Row) -> list[Row]:
    """Return one example for each right answer."""
    return [row | {"answers": [answer]} for answer in record_answers(row) or ()]


# WSC, WNLI, DPR: name what the marked pronoun refers to


def mark_pronoun(text: str, index: int, pronoun: str) -> str:
    """Return T5's input: the text with asterisks around the first ``pronoun`` at or after word ``index``."""
    before, word = rf"((?:\S+\s+){{{index}}}.*?)", rf"(?<!\w)({re.escape(pronoun)})(?!\w)"
    return "wsc: " + re.sub(f"^{before}{word}", r"\1*\2*", text, count=1, flags=re.DOTALL)


def wsc_text(row: Row) -> tuple[str, str]:
    return mark_pronoun(row["text"], row["span2_index"], row["span2_text"]), row["span1_text"]


def wsc_training_rows(row: Row) -> list[Row]:
    """Return the row if its candidate is the right one; any other row lacks the right answer."""
    return [row] if row["label"] == 1 else []


def dpr_text(row: Row) -> tuple[str, str]:
    return mark_pronoun(row["sentence"], 0, row["pronoun"]), dpr_target(row) or UNKNOWN


def dpr_target(row: Row) -> str | None:
    label = label_of(row)
    return None if label is None else row["candidates"][label]


def wnli_text(row: Row) -> tuple[str, str]:
    """Return inputs and target; as in T5, a space is put between the pronoun and a punctuation mark."""
    text, ((start, end), referent) = row["sentence1"], wnli_referent(row)
    rest = re.sub(r"^([.,?!])(?!\S)", r" \1", text[end:])
    return f"wsc: {text[:start]}*{text[start:end]}*{rest}", referent


def wnli_referent(row: Row) -> tuple[tuple[int, int], str]:
    """Return the [start, end) of a pronoun in the premise, in characters, and the words that replace it.

    The hypothesis repeats a part of the premise with the pronoun replaced. Of all pronouns in the premise,
    this is the one around which most words are those of the hypothesis. Words before it count only within its
    sentence.
    """
    premise = list(re.finditer(r"\w[\w'-]*|[.!?]", row["sentence1"]))
    hypothesis = re.findall(r"\w[\w'-]*", row["sentence2"])
    words, others = [word[0].lower() for word in premise], [word.lower() for word in hypothesis]
    matches, count = [], len(others)  # matches: (equal words, those of them after the pronoun, -its index)
    for i in (i for i, word in enumerate(words) if word in PRONOUNS):
        before = [n for n in range(min(i + 1, count)) if words[i - n : i] == others[:n]]
        after = [n for n in range(count) if words[i + 1 :][:n] == others[count - n :]]
        matches += [(m + n, n, -i) for m in before for n in after if m + n < count]
    equal, equal_after, index = max(matches, default=(0, 0, 0))
    referent = hypothesis[equal - equal_after : count - equal_after]
    return premise[-index].span(), " ".join(referent).removesuffix("'s")


def names_candidate(text: str, row: Row) -> int:
    """Return 1 if the prediction names the candidate, else 0; NO_CLASS if it has only determiners.

    It does if one of the two has all words of the other but determiners, and both or neither are possessive.
    """
    answer, candidate = ({*value.lower().split()} - {*DETERMINERS} for value in (text, row["span1_text"]))
    if not answer:
        return NO_CLASS
    possessive = ["'" in "".join(words) for words in (answer, candidate)]
    return int(possessive[0] == possessive[1] and (answer <= candidate or candidate <= answer))


def wnli_names_candidate(text: str, row: Row) -> int:
    return names_candidate(text, {"span1_text": wnli_referent(row)[1]})


# SQuAD


def space_punctuation(text: str) -> str:
    """Return the text with single spaces between words and around every punctuation mark.

    Marks that belong to a letter, such as accents and vowel signs, stay with it.
    """

    def spaced(match: re.Match) -> str:
        is_mark = unicodedata.category(match[0]).startswith("M")
        return match[0] if is_mark else f" {match[0]} "

    return re.sub(r"\s+", " ", re.sub(r"[^\w\s]|_", spaced, text))


def squad_text(row: Row) -> tuple[str, str]:
    question, context = space_punctuation(row["question"]), space_punctuation(row["context"])
    text = re.sub(r"\s+", " ", f"question: {question} context: {context}")
    return text, (squad_target(row) or [UNKNOWN])[0]


def squad_target(row: Row) -> list[str] | None:
    return [space_punctuation(answer) for answer in row["answers"]["text"]] or None


# Positional fields of Task: name, source, column of the paper's tables, target, metrics, to_text
_TABLE = (
    documentation_task(
        "cloze",
        "reading",
        "SQuAD",
        question_to_text("cloze"),
        EQUAL_TEXT,
        candidates=lambda row: tuple(row["candidates"]),
        measure="bits_above_chance",
        targets_length=16,
    ),
    documentation_task(
        "extract",
        "reading",
        "SQuAD",
        question_to_text("extract"),
        SQUAD,
        target=itemgetter("answers"),
        unscored_metrics=("f1",),
        targets_length=24,
    ),
    *(minimal_pairs(name) for name in MINIMAL_PAIRS),
    documentation_task("restore", "reading", "EnDe", restore_to_text, EQUAL_TEXT, targets_length=40),
    documentation_task(
        "next",
        "reading",
        "SGLUE",
        next_to_text,
        {"rouge1": ROUGE["rouge1"]},
        candidate_inputs=next_candidate_inputs,
        measure="bits_above_chance",
        targets_length=40,
    ),
    documentation_task(
        "summary",
        "reading",
        "CNNDM",
        summary_to_text,
        ROUGE,
        unscored_metrics=("rouge1", "rougeLsum"),
        candidate_inputs=summary_candidate_inputs,
        measure="bits_above_chance",
        targets_length=40,
    ),
    documentation_task(
        "modality",
        "reading",
        "SQuAD",
        lambda row: (f"modality: {row['sentence']}", row["answers"][0]),
        EQUAL_TEXT,
        candidates=lambda row: tuple(row["candidates"]),
        measure="bits_above_chance",
        targets_length=40,
    ),
    documentation_task(
        "order",
        "reading",
        "SGLUE",
        lambda row: (f"order: {row['context']}", row["answers"][0]),
        EQUAL_TEXT,
        candidates=lambda row: tuple(row["candidates"]),
        measure="bits_above_chance",
        targets_length=24,
    ),
    classification("glue/cola", "sentence", ACCEPTABLE, MATTHEWS, "GLUE"),
    classification("glue/sst2", "sentence", ("negative", "positive"), ACCURACY, "GLUE"),
    classification("glue/mrpc", "sentence1 sentence2", ("not_equivalent", "equivalent"), F1_ACCURACY, "GLUE"),
    Task(
        "stsb",
        "glue/stsb",
        "GLUE",
        label_of,
        STSB,
        stsb_text,
        postprocess=lambda text, row: metrics.parse_number(text),
    ),
    classification("glue/qqp", "question1 question2", ("not_duplicate", "duplicate"), F1_ACCURACY, "GLUE"),
    classification("glue/mnli", "hypothesis premise", MNLI, ACCURACY, "GLUE", validation=BOTH_MNLI_SETS),
    classification("glue/qnli", "question sentence", ENTAILMENT, ACCURACY, "GLUE"),
    classification("glue/rte", "sentence1 sentence2", ENTAILMENT, ACCURACY, "GLUE"),
    classification("super_glue/boolq", "passage question", FALSE_TRUE, ACCURACY, "SGLUE"),
    classification("super_glue/cb", "hypothesis premise", CB, MACRO_F1_ACCURACY, "SGLUE"),
    classification("super_glue/copa", "choice1 choice2 premise question", COPA_CHOICES, ACCURACY, "SGLUE"),
    Task(
        "multirc",
        "super_glue/multirc",
        "SGLUE",
        multirc_target,
        MULTIRC,
        multirc_text,
        postprocess=class_from_text(FALSE_TRUE),
        candidates=lambda row: FALSE_TRUE,
    ),
    Task(
        "record",
        "super_glue/record",
        "SGLUE",
        record_answers,
        SQUAD,
        record_text,
        training_rows=record_training_rows,
    ),
    classification(
        "super_glue/rte", "hypothesis premise", ENTAILMENT, ACCURACY, "SGLUE", name="super_glue_rte"
    ),
    classification("super_glue/wic", "sentence1 sentence2 word", FALSE_TRUE, ACCURACY, "SGLUE"),
    Task(
        "wsc",
        "super_glue/wsc.fixed",
        "SGLUE",
        label_of,
        ACCURACY,
        wsc_text,
        postprocess=names_candidate,
        training_rows=wsc_training_rows,
    ),
    # never trained on, hence in no average
    Task(
        "wnli", "glue/wnli", None, label_of, ACCURACY, wnli_text, postprocess=wnli_names_candidate, train=None
    ),
    Task("dpr", "definite_pronoun_resolution", None, dpr_target, ACCURACY, dpr_text, validation=None),
    Task(
        "squad",
        "squad/v1.1",
        "SQuAD",
        squad_target,
        SQUAD,
        squad_text,
        unscored_metrics=("f1",),
        targets_length=97,
    ),
    summarisation("cnn_dailymail", "article", "highlights", 512),
    summarisation("scitldr", "document", "summary", 64),
    translation("wmt_ende", "wmt_t2t_translate/de-en", "EnDe", "de", 512),
    translation("wmt_enfr", "wmt15_translate/fr-en", "EnFr", "fr", 512),
    translation("wmt_enro", "wmt16_translate/ro-en", "EnRo", "ro", 512),
    translation("multi30k_ende", "multi30k/en-de", "EnDe", "de", 64),
    translation("multi30k_enfr", "multi30k/en-fr", "EnFr", "fr", 64),
    translation("xquad_enro", "xquad_translation/en-ro", "EnRo", "ro", 64),
    *COPY,
    *REVERSE,
)
TASKS: dict[str, Task] = {task.name: task for task in _TABLE}


def find_task(name: str) -> Task:
    """Return ``TASKS[name]``, or the task of a task file; SettingError names the nearest."""
    if is_task_file(name):
        return task_from_file(name)
    if name not in TASKS:
        raise SettingError(f"there is no task {name!r}{did_you_mean(name, TASKS)}")
    return TASKS[name]


# A task is pickled by its name, since its functions do not pickle.
copyreg.pickle(Task, lambda task: (find_task, (task.name_or_path,)))

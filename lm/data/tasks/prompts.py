"""Tasks as zero-shot and few-shot prompts for a pre-trained model [Radford et al. 2019; Brown et al. 2020].

``squad@3`` puts three training examples with their answers before each question of ``squad``, ``squad@0``
none. ``squad@3-nearest`` takes those whose questions are most like the one that is asked [Liu et al. 2022].
The answer is generated up to the end of a line, or it is the likeliest of the candidates.
"""

import dataclasses
import json
import re
from collections.abc import Callable, Mapping, Sequence

import numpy as np

from lm.config.base import SettingError, did_you_mean
from lm.data.tasks.benchmarks import EQUAL_TEXT, MINIMAL_PAIRS, TASKS
from lm.data.tasks.names import is_task_file
from lm.data.tasks.task import Row, Task

EXAMPLE_SEPARATOR = "\n\n"
SHOTS_MARK = "@"  # between the name of a task and the number of its examples
NEAREST = "-nearest"  # behind the number of examples
SPARE_EXAMPLES = 8  # drawn in addition, to replace examples that are scored themselves


@dataclasses.dataclass(frozen=True)
class Template:
    """A prompt template: an example is the question, a space and the answer."""

    question: Callable[[Row], str]
    truncated_field: str | None  # of a row, whose end is cut if the prompt is too long; None: nothing is cut
    # how the next question begins; it ends a generated answer, since some vocabularies have no newline
    stop: str
    # returns a candidate answer as it is written in prompts
    verbalize: Callable[[Row, str], str] = lambda row, answer: answer
    answer: Callable[[Row], str] | None = None  # returns the right answer; None: the targets of the task
    target: Callable[[Row], object] | None = None  # returns what metrics compare with; None: as the task does


@dataclasses.dataclass(frozen=True)
class PromptedTask(Task):
    """A few-shot task; once the prompt of a row is made, it is in the row's field ``prompt``."""

    _: dataclasses.KW_ONLY
    template: Template
    shots: int  # examples before a question
    takes_nearest: bool = False  # whether the examples are the nearest to the question, or drawn at random

    @property
    def base_name(self) -> str:
        """Return the name of the task without the number of examples."""
        return self.name.partition(SHOTS_MARK)[0]

    def answers(self, row: Row) -> tuple[str, ...]:
        """Return all candidates, or the right answer alone."""
        _, right = self.to_text(row)
        return (right,) if self.candidates is None else self.candidates(row)

    def continuations(self, row: Row) -> list[str]:
        """Return ``answers`` as they are written after the prompt."""
        return [self.template.verbalize(row, answer) for answer in self.answers(row)]

    def gold_index(self, row: Row) -> int:
        """Return the index of the right answer in ``answers``; 0 if a test set withholds it."""
        _, right = self.to_text(row)
        answers = self.answers(row)
        return answers.index(right) if right in answers else 0

    def prompt(self, row: Row, examples: Sequence[Row]) -> str:
        """Return the prompt: the examples with their answers, then the question."""
        parts = []
        for example in examples:
            answer = self.continuations(example)[self.gold_index(example)]
            parts.append(f"{self.template.question(example)} {answer}")
        return EXAMPLE_SEPARATOR.join([*parts, self.template.question(row)])

    def fit_prompt(self, row: Row, examples: Sequence[Row], fits: Callable[[str], bool]) -> str:
        """Return the prompt with as many words of the question's truncated field as fit.

        Raises SettingError if it does not fit without any of them.
        """
        prompt = self.prompt(row, examples)
        if fits(prompt):
            return prompt
        field = self.template.truncated_field
        words = row[field].split() if field else []

        def with_words(count: int) -> str:
            truncated = row | {field: " ".join(words[:count])} if field else row
            return self.prompt(truncated, examples)

        fitting, too_many = -1, len(words)  # bisection over the number of words
        while too_many - fitting > 1:
            middle = (fitting + too_many) // 2
            if fits(with_words(middle)):
                fitting = middle
            else:
                too_many = middle
        if fitting < 0:
            parts = f"{self.shots} examples and the question" if self.shots else "the question alone"
            raise SettingError(f"{self.name}: {parts} exceeds --prompt-length, or what the model reads")
        return with_words(fitting)

    def extract_answer(self, text: str) -> str:
        """Return the answer in generated text, which ends at a newline or where another question begins."""
        ends = rf"\n|{re.escape(self.template.stop)}"
        return re.split(ends, text.strip(), maxsplit=1)[0].strip()


def draw_examples(task: PromptedTask, train: Sequence[Row], scored: Sequence[Row]) -> list[list[Row]]:
    """Return ``task.shots`` rows of ``train`` for each row of ``scored``, the same ones in every run.

    As in GPT-3, every question has its own examples (Brown et al. 2020, section 2.4). No scored row is among
    them. Raises SettingError if too few rows are left.
    """
    if not task.shots:
        return [[] for _ in scored]
    scored_keys = {*map(_row_key, scored)}
    examples = []
    for index in range(len(scored)):
        random = np.random.Generator(np.random.Philox(key=[0, index]))
        drawn = random.choice(len(train), min(len(train), task.shots + SPARE_EXAMPLES), replace=False)
        rows = [row for i in drawn if _row_key(row := train[int(i)]) not in scored_keys]
        if len(rows) < task.shots:
            rows = [row for i in range(len(train)) if _row_key(row := train[i]) not in scored_keys]
        if len(rows) < task.shots:
            raise _too_few_examples(task, len(rows))
        examples.append(rows[: task.shots])
    return examples


def nearest_examples(
    task: PromptedTask,
    train: Sequence[Row],
    scored: Sequence[Row],
    embed: Callable[[Sequence[str]], np.ndarray],
) -> list[list[Row]]:
    """Return for each row of ``scored`` the ``task.shots`` rows of ``train`` with the nearest questions.

    ``embed`` returns a vector of each text, float [N,D]; the nearest have the largest cosine, of equal ones
    the first. The nearest example comes last, right before the question (Liu et al. 2022). No scored row is
    among them. Raises SettingError if too few rows are left.
    """
    scored_keys = {*map(_row_key, scored)}
    rows = [row for index in range(len(train)) if _row_key(row := train[index]) not in scored_keys]
    if len(rows) < task.shots:
        raise _too_few_examples(task, len(rows))
    question = task.template.question
    questions = _unit_vectors(embed([question(row) for row in scored]))
    candidates = _unit_vectors(embed([question(row) for row in rows]))
    examples = []
    for vector in questions:
        order = np.argsort(-(candidates @ vector), kind="stable")[: task.shots]
        examples.append([rows[index] for index in order[::-1]])
    return examples


def _unit_vectors(vectors: np.ndarray) -> np.ndarray:
    norms = np.linalg.norm(vectors, axis=1, keepdims=True)
    return vectors / np.maximum(norms, np.finfo(np.float32).tiny)


def _too_few_examples(task: PromptedTask, count: int) -> SettingError:
    return SettingError(f"{task.name}: only {count} training rows are not scored themselves")


def _row_key(row: Row) -> str:
    return json.dumps(row, sort_keys=True, default=str)


def is_prompted_task(name: str) -> bool:
    """Return whether a name is that of a few-shot task, ``TASK@K`` or ``TASK@K-nearest``."""
    return SHOTS_MARK in name and not is_task_file(name)


def find_prompted_task(name: str) -> PromptedTask:
    """Return the task ``TASK@K`` or ``TASK@K-nearest``.

    Raises SettingError with the nearest name, or with what K may be.
    """
    base, _, choice = name.partition(SHOTS_MARK)
    shots = choice.removesuffix(NEAREST)
    if base not in TEMPLATES:
        raise SettingError(f"--tasks {name}: there is no prompt for {base!r}{did_you_mean(base, TEMPLATES)}")
    if not shots.isascii() or not shots.isdigit():
        raise SettingError(
            f"--tasks {name}: {choice!r} should be the number of examples, such as {base}{SHOTS_MARK}3, or "
            f"{base}{SHOTS_MARK}3{NEAREST} for those nearest to the question"
        )
    task, template = _PROMPT_ONLY_TASKS.get(base) or TASKS[base], TEMPLATES[base]
    answer = template.answer or (lambda row: task.to_text(row)[1])
    fields = {field.name: getattr(task, field.name) for field in dataclasses.fields(task)}
    fields["name"] = name
    fields["target"] = template.target or task.target
    fields["to_text"] = lambda row: (row.get("prompt", template.question(row)), answer(row))
    return PromptedTask(**fields, template=template, shots=int(shots), takes_nearest=choice != shots)


# ---- the templates


def first_bare_word(text: str, _row: Row) -> str:
    """Return the first word of a text without the punctuation around it."""
    return (text.split() or [""])[0].strip(".,;:!?()[]\"'")


def last_word(row: Row) -> tuple[str, str]:
    """Return two sentences without their last word, and that word [LAMBADA: Paperno et al. 2016]."""
    text, _, word = f"{row['sentences'][row['label']]} {row['following']}".rpartition(" ")
    return text, first_bare_word(word, row)


def summarise(field: str) -> Template:
    """Return the template that summarises a field [Radford et al. 2019, section 3.6]."""
    return Template(lambda row: f"{row[field]}\nTL;DR:", field, "TL;DR:")


def translate_to(language: str) -> Template:
    """Return the template that translates from English [Radford et al. 2019, section 3.7]."""
    return Template(lambda row: f"English: {row['en']}\n{language}:", "en", "English:")


# the gap of a cloze: no underscore within a name, such as those of ``batch_size`` and ``__init__``
CLOZE_GAP = re.compile(r"(?<!\w)_(?!\w)")


def around_gap(row: Row) -> tuple[str, str]:
    """Return the context and the text before the gap of a cloze, and the text after the gap."""
    before, after = CLOZE_GAP.split(row["question"], maxsplit=1)
    return f"{row['context']} {before}".strip(), after


def rte_question(row: Row) -> str:
    return f"{row['sentence1']}\nQuestion: {row['sentence2']} True or False?\nAnswer:"


def copa_question(row: Row) -> str:
    connective = {"cause": "because", "effect": "so"}[row["question"]]
    return f"{row['premise'].rstrip('.')} {connective}"


def lower_first(text: str) -> str:
    return text[:1].lower() + text[1:]


TEMPLATES: Mapping[str, Template] = {
    # tasks on the documentation
    "extract": Template(
        lambda row: f'{row["context"]}\nQuestion: what follows "{row["question"]}"?\nAnswer:',
        "context",
        "Question:",
    ),
    # chooses the candidate with which the rest of the sentence is likeliest, as in CBT [Hill et al. 2016]
    "cloze": Template(
        lambda row: around_gap(row)[0],
        None,
        EXAMPLE_SEPARATOR,
        verbalize=lambda row, word: f"{word}{around_gap(row)[1]}",
    ),
    "last-word": Template(
        lambda row: last_word(row)[0], None, EXAMPLE_SEPARATOR, answer=lambda row: last_word(row)[1]
    ),
    # choose the likelier of two sentences
    **dict.fromkeys(
        MINIMAL_PAIRS,
        Template(lambda row: f"Text: {row['context']}".strip(), None, "Text:"),
    ),
    # the paper's tasks, and smaller sets that replace them
    "cnn_dailymail": summarise("article"),
    "scitldr": summarise("document"),
    "squad": Template(
        lambda row: f"{row['context']}\nQuestion: {row['question']}\nAnswer:",
        "context",
        "Question:",
        answer=lambda row: row["answers"]["text"][0],
        target=lambda row: list(row["answers"]["text"]),
    ),
    "wmt_ende": translate_to("German"),
    "wmt_enfr": translate_to("French"),
    "wmt_enro": translate_to("Romanian"),
    "multi30k_ende": translate_to("German"),
    "multi30k_enfr": translate_to("French"),
    "xquad_enro": translate_to("Romanian"),
    "sst2": Template(lambda row: f"Review: {row['sentence']}\nSentiment:", "sentence", "Review:"),
    "rte": Template(
        rte_question,
        "sentence1",
        "Question:",
        verbalize=lambda row, label: {"entailment": "True", "not_entailment": "False"}[label],
    ),
    "boolq": Template(
        lambda row: f"{row['passage']}\nQuestion: {row['question']}?\nAnswer:",
        "passage",
        "Question:",
        verbalize=lambda row, label: {"True": "yes", "False": "no"}[label],
    ),
    "copa": Template(
        copa_question, None, EXAMPLE_SEPARATOR, verbalize=lambda row, choice: lower_first(row[choice])
    ),
}
_PROMPT_ONLY_TASKS = {
    "last-word": Task(
        "last-word",
        "documentation/next",
        None,
        lambda row: last_word(row)[1],
        EQUAL_TEXT,
        last_word,
        postprocess=first_bare_word,
    )
}

"""Tasks as zero-shot and few-shot prompts for a pre-trained model [Radford et al. 2019; Brown et al. 2020].

``squad@3`` puts three training rows with their answers before each question of ``squad``, ``squad@0`` none.
An answer is generated up to the end of a line, or it is the likeliest of the candidates.
"""

import dataclasses
import json
import re
from collections.abc import Callable, Mapping, Sequence

import numpy as np

from lm.config.base import SettingError, nearest
from lm.data.tasks.benchmarks import EQUAL_TEXT, TASKS
from lm.data.tasks.names import is_task_file
from lm.data.tasks.task import Row, Task

BETWEEN = "\n\n"  # separates examples
AT = "@"  # between the name of a task and the number of its examples
SPARE = 8  # more examples drawn than needed, to replace those that are scored themselves


@dataclasses.dataclass(frozen=True)
class Template:
    """A prompt template: the answer follows the question and a blank."""

    question: Callable[[Row], str]
    body: str | None  # the field that is truncated where a prompt is too long; None: no field may be
    cue: str  # begins the next question; ends an answer, as some vocabularies have no newline
    option: Callable[[Row, str], str] = lambda row, answer: answer  # an answer of the task, as in prompts
    right: Callable[[Row], str] | None = None  # returns the right answer; None: as the task
    target: Callable[[Row], object] | None = None  # returns what metrics compare with; None: as the task


@dataclasses.dataclass(frozen=True)
class PromptedTask(Task):
    """A few-shot task; the prompt of a row, once it is made, is in its field ``prompt``."""

    _: dataclasses.KW_ONLY
    template: Template
    shots: int  # examples in front of a question

    @property
    def asked(self) -> str:
        """Return the name of the task without the number of examples."""
        return self.name.partition(AT)[0]

    def right(self, row: Row) -> str:
        """Return the right answer, in the task's words."""
        return self.to_text(row)[1]

    def texts(self, row: Row) -> list[str]:
        """Return the answers as they may follow the prompt: all candidates, or the right answer alone."""
        answers = [self.right(row)] if self.candidates is None else self.candidates(row)
        return [self.template.option(row, answer) for answer in answers]

    def place(self, row: Row) -> int:
        """Return the index of the right answer in ``texts``; 0 where a test set withholds it."""
        answers = () if self.candidates is None else self.candidates(row)
        return answers.index(self.right(row)) if self.right(row) in answers else 0

    def prompt(self, row: Row, examples: Sequence[Row]) -> str:
        """Return the prompt: the examples with their answers, then the question."""
        solved = [f"{self.template.question(one)} {self.texts(one)[self.place(one)]}" for one in examples]
        return BETWEEN.join([*solved, self.template.question(row)])

    def fitted(self, row: Row, examples: Sequence[Row], fits: Callable[[str], bool]) -> str:
        """Return the prompt with as many words of the question's body as fit, found by bisection.

        SettingError if it does not fit without any.
        """
        if fits(whole := self.prompt(row, examples)):
            return whole
        body = self.template.body
        words = row[body].split() if body else []

        def shortened(count: int) -> str:
            return self.prompt(row | {body or "": " ".join(words[:count])}, examples)

        least, most = -1, len(words)  # numbers of words that are known to fit, and known not to
        while most - least > 1:
            middle = (least + most) // 2
            least, most = (middle, most) if fits(shortened(middle)) else (least, middle)
        if least < 0:
            what = f"{self.shots} examples and the question" if self.shots else "the question alone"
            raise SettingError(f"{self.name}: {what} exceeds --prompt-length, or what the model reads")
        return shortened(least)

    def written(self, text: str) -> str:
        """Return the answer in generated text: up to a newline, or the cue of another question."""
        ends = rf"\n|{re.escape(self.template.cue)}"
        return re.split(ends, text.strip(), maxsplit=1)[0].strip()


def draw_examples(task: PromptedTask, train: Sequence[Row], scored: Sequence[Row]) -> list[list[Row]]:
    """Return ``task.shots`` rows of ``train`` for each row of ``scored``, the same ones in every run.

    As in GPT-3, every question has its own (Brown et al. 2020, section 2.4). No row that is scored is among
    them. SettingError if too few rows are left.
    """
    tested, drawn = {*map(_identity, scored)} if task.shots else set(), []
    for number in range(len(scored)):
        random = np.random.Generator(np.random.Philox(key=[0, number]))
        order = (
            random.choice(len(train), min(len(train), task.shots + SPARE), replace=False)
            if task.shots
            else ()
        )
        rows = [row for index in order if _identity(row := train[int(index)]) not in tested]
        if len(rows) < task.shots:
            rows = [row for row in map(train.__getitem__, range(len(train))) if _identity(row) not in tested]
        if len(rows) < task.shots:
            raise SettingError(f"{task.name}: only {len(rows)} training rows are not scored themselves")
        drawn.append(rows[: task.shots])
    return drawn


def _identity(row: Row) -> str:
    return json.dumps(row, sort_keys=True, default=str)


def is_prompted_task(name: str) -> bool:
    """Return whether a name is one of a few-shot task, ``TASK@K``."""
    return AT in name and not is_task_file(name)


def find_prompted_task(name: str) -> PromptedTask:
    """Return the task ``TASK@K``; SettingError with the nearest name, or with what K may be."""
    stem, _, shots = name.partition(AT)
    if stem not in TEMPLATES:
        raise SettingError(f"--tasks {name}: there is no prompt for {stem!r}{nearest(stem, TEMPLATES)}")
    if not shots.isascii() or not shots.isdigit():
        raise SettingError(f"--tasks {name}: {shots!r} should be the number of examples, such as {stem}{AT}3")
    task, template = _ONLY_PROMPTED.get(stem) or TASKS[stem], TEMPLATES[stem]
    fields = {field.name: getattr(task, field.name) for field in dataclasses.fields(task)}
    right = template.right or (lambda row: task.to_text(row)[1])
    fields |= {"to_text": lambda row: (row.get("prompt", template.question(row)), right(row))}
    fields |= {"name": name, "target": template.target or task.target}
    return PromptedTask(**fields, template=template, shots=int(shots))


def bare_first_word(text: str, _row: Row) -> str:
    return (text.split() or [""])[0].strip(".,;:!?()[]\"'")


def last_word(row: Row) -> tuple[str, str]:
    """Return two sentences without their last word, and that word [LAMBADA: Paperno et al. 2016]."""
    text, _, word = f"{row['sentences'][row['label']]} {row['following']}".rpartition(" ")
    return text, bare_first_word(word, row)


def summarised(document: str) -> Template:
    """Return the template that summarises a field [Radford et al. 2019, section 3.6]."""
    return Template(lambda row: f"{row[document]}\nTL;DR:", document, "TL;DR:")


def translation_to(language: str) -> Template:
    """Return the template that translates from English [Radford et al. 2019, section 3.7]."""
    return Template(lambda row: f"English: {row['en']}\n{language}:", "en", "English:")


def gap(row: Row) -> tuple[str, str]:
    """Return the text before and behind the gap of a cloze, with the context in front."""
    before, _, behind = row["question"].partition("_")
    return f"{row['context']} {before}".strip(), behind


def entails(row: Row) -> str:
    return f"{row['sentence1']}\nQuestion: {row['sentence2']} True or False?\nAnswer:"


def joined(row: Row) -> str:
    word = {"cause": "because", "effect": "so"}[row["question"]]
    return f"{row['premise'].rstrip('.')} {word}"


def lower_first(text: str) -> str:
    return text[:1].lower() + text[1:]


TEMPLATES: Mapping[str, Template] = {
    # of the documentation
    "first-sentence": summarised("document"),
    "extract": Template(
        lambda row: f'{row["context"]}\nQuestion: what follows "{row["question"]}"?\nAnswer:',
        "context",
        "Question:",
    ),
    # of ten candidates the one with which the rest of the sentence is likeliest, as in CBT [Hill et al. 2016]
    "cloze": Template(
        lambda row: gap(row)[0], None, BETWEEN, option=lambda row, word: f"{word}{gap(row)[1]}"
    ),
    "last-word": Template(lambda row: last_word(row)[0], None, BETWEEN, right=lambda row: last_word(row)[1]),
    # of two sentences of the same words, the likelier
    "acceptability": Template(lambda row: f"Text: {row['context']}".strip(), None, "Text:"),
    # the paper's, and smaller sets that stand in for them
    "cnn_dailymail": summarised("article"),
    "scitldr": summarised("document"),
    "squad": Template(
        lambda row: f"{row['context']}\nQuestion: {row['question']}\nAnswer:",
        "context",
        "Question:",
        right=lambda row: row["answers"]["text"][0],
        target=lambda row: list(row["answers"]["text"]),
    ),
    "wmt_ende": translation_to("German"),
    "wmt_enfr": translation_to("French"),
    "wmt_enro": translation_to("Romanian"),
    "multi30k_ende": translation_to("German"),
    "multi30k_enfr": translation_to("French"),
    "xquad_enro": translation_to("Romanian"),
    "sst2": Template(lambda row: f"Review: {row['sentence']}\nSentiment:", "sentence", "Review:"),
    "rte": Template(
        entails,
        "sentence1",
        "Question:",
        option=lambda row, label: {"entailment": "True", "not_entailment": "False"}[label],
    ),
    "boolq": Template(
        lambda row: f"{row['passage']}\nQuestion: {row['question']}?\nAnswer:",
        "passage",
        "Question:",
        option=lambda row, truth: {"True": "yes", "False": "no"}[truth],
    ),
    "copa": Template(joined, None, BETWEEN, option=lambda row, choice: lower_first(row[choice])),
}
_ONLY_PROMPTED = {
    "last-word": Task(
        "last-word",
        "documentation/next",
        None,
        lambda row: last_word(row)[1],
        EQUAL_TEXT,
        last_word,
        postprocess=bare_first_word,
    )
}

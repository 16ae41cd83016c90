"""Tasks as prompts of a model that was tuned for none [Radford et al. 2019; Brown et al. 2020].

``squad@3`` is the task ``squad`` after three of its training rows with their answers, ``squad@0`` the
question alone. Answers are written up to the end of a line, or the likeliest of what there is to choose from.
"""

import dataclasses
import json
import re
from collections.abc import Callable, Mapping, Sequence

import numpy as np

from lm.config.base import SettingError, nearest
from lm.data.tasks.benchmarks import EXACT, TASKS
from lm.data.tasks.names import is_task_file
from lm.data.tasks.task import Row, Task

BETWEEN = "\n\n"  # examples
AT = "@"  # between the name of a task and the number of its examples
SPARE = 8  # examples drawn besides, in the place of those that are scored themselves


@dataclasses.dataclass(frozen=True)
class Template:
    """How a task is put to a model that continues text: an answer stands behind the question and a blank."""

    question: Callable[[Row], str]
    body: str | None  # the field whose end is left out where a prompt is too long; None: nothing may be
    cue: str  # of the next question, which ends an answer as a newline does: some vocabularies have none
    option: Callable[[Row, str], str] = lambda row, answer: answer  # an answer of the task -> what is read
    right: Callable[[Row], str] | None = None  # the answer; None: that of the task
    target: Callable[[Row], object] | None = None  # what metrics compare with; None: that of the task


@dataclasses.dataclass(frozen=True)
class Prompted(Task):
    """A task by prompts; the text of a row is in its field ``prompt``."""

    _: dataclasses.KW_ONLY
    template: Template
    shots: int  # examples in front of a question

    @property
    def asked(self) -> str:
        """The name of the task without the number of examples."""
        return self.name.partition(AT)[0]

    def right(self, row: Row) -> str:
        """The right answer, in the task's words."""
        return self.to_text(row)[1]

    def texts(self, row: Row) -> list[str]:
        """What may stand behind the prompt: all that there is to choose from, or the right answer."""
        answers = [self.right(row)] if self.candidates is None else self.candidates(row)
        return [self.template.option(row, answer) for answer in answers]

    def place(self, row: Row) -> int:
        """Which of ``texts`` is right; 0 where a test set does not tell."""
        answers = () if self.candidates is None else self.candidates(row)
        return answers.index(self.right(row)) if self.right(row) in answers else 0

    def prompt(self, row: Row, examples: Sequence[Row]) -> str:
        """Examples with their answers, and the question."""
        solved = [f"{self.template.question(one)} {self.texts(one)[self.place(one)]}" for one in examples]
        return BETWEEN.join([*solved, self.template.question(row)])

    def fitted(self, row: Row, examples: Sequence[Row], fits: Callable[[str], bool]) -> str:
        """The prompt with the most words of the question's body that fit; SettingError if it never does."""
        if fits(whole := self.prompt(row, examples)):
            return whole
        body = self.template.body
        words = row[body].split() if body else []

        def shortened(count: int) -> str:
            return self.prompt(row | {body or "": " ".join(words[:count])}, examples)

        least, most = -1, len(words)  # the words that are known to fit, and that are known not to
        while most - least > 1:
            middle = (least + most) // 2
            least, most = (middle, most) if fits(shortened(middle)) else (least, middle)
        if least < 0:
            what = f"{self.shots} examples and the question" if self.shots else "the question alone"
            raise SettingError(f"{self.name}: {what} exceeds --prompt-length, or what the model reads")
        return shortened(least)

    def written(self, text: str) -> str:
        """The answer in what a model wrote: up to a newline, or the cue of another question."""
        ends = rf"\n|{re.escape(self.template.cue)}"
        return re.split(ends, text.strip(), maxsplit=1)[0].strip()


def draw_examples(task: Prompted, train: Sequence[Row], scored: Sequence[Row]) -> list[list[Row]]:
    """As many rows of ``train`` for each of ``scored``: the same in every run, and none that is scored.

    As in GPT-3, every question has its own (Brown et al. 2020, section 2.4).
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


def is_prompted(name: str) -> bool:
    """Whether a name is one of a task by prompts."""
    return AT in name and not is_task_file(name)


def find_prompted(name: str) -> Prompted:
    """``TASK@K``; SettingError with the nearest name, or what K may be."""
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
    return Prompted(**fields, template=template, shots=int(shots))


def bare_first_word(text: str, _row: Row) -> str:
    return (text.split() or [""])[0].strip(".,;:!?()[]\"'")


def last_word(row: Row) -> tuple[str, str]:
    """Two sentences without their last word, and that word [LAMBADA: Paperno et al. 2016]."""
    text, _, word = f"{row['sentences'][row['label']]} {row['following']}".rpartition(" ")
    return text, bare_first_word(word, row)


def summarised(document: str) -> Template:
    """Of a field [Radford et al. 2019, section 3.6]."""
    return Template(lambda row: f"{row[document]}\nTL;DR:", document, "TL;DR:")


def translation_to(language: str) -> Template:
    """From English [Radford et al. 2019, section 3.7]."""
    return Template(lambda row: f"English: {row['en']}\n{language}:", "en", "English:")


def gap(row: Row) -> tuple[str, str]:
    """What stands before and behind the gap of a cloze."""
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
    # on the documentation
    "first-sentence": summarised("document"),
    "extract": Template(
        lambda row: f'{row["context"]}\nQuestion: what follows "{row["question"]}"?\nAnswer:',
        "context",
        "Question:",
    ),
    # of ten candidates the one with the likeliest rest of the sentence, as in CBT [Hill et al. 2016]
    "cloze": Template(
        lambda row: gap(row)[0], None, BETWEEN, option=lambda row, word: f"{word}{gap(row)[1]}"
    ),
    "last-word": Template(lambda row: last_word(row)[0], None, BETWEEN, right=lambda row: last_word(row)[1]),
    # of two sentences of the same words the likelier
    "acceptability": Template(lambda row: f"Text: {row['context']}".strip(), None, "Text:"),
    # the paper's, and what stands in for them
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
        EXACT,
        last_word,
        from_text=bare_first_word,
    )
}

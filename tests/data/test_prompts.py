"""Tasks as prompts: what a model reads, which examples it is given, and what of its text is the answer."""

import numpy as np
import pytest

from lm.config.base import SettingError
from lm.data.tasks.benchmarks import TASKS
from lm.data.tasks.prompts import TEMPLATES, draw_examples, find_prompted_task, nearest_examples

SQUAD = {"context": "A b c d.", "question": "What?", "answers": {"text": ["b c", "c"]}}
COPA = {
    "premise": "It rained.",
    "question": "effect",
    "choice1": "I got wet.",
    "choice2": "I slept.",
    "label": 0,
}
NEXT = {"sentences": ["No.", "One two."], "following": "Three four five.", "label": 1}
CLOZE = {"context": "Before.", "question": "The _ is here.", "answers": ["cat"], "candidates": ["dog", "cat"]}
NAMES = {
    "context": "Before.",
    "question": "With snake_case and __init__, a ._, too.",
    "answers": ["cat"],
    "candidates": ["dog", "cat"],
}
PROMPTS = {  # name -> row, prompt, what may stand behind it, and which of that is right
    "squad@0": (SQUAD, "A b c d.\nQuestion: What?\nAnswer:", ["b c"], 0),
    "scitldr@0": ({"document": "A text.", "summary": "A short one."}, "A text.\nTL;DR:", ["A short one."], 0),
    "multi30k_enfr@0": (
        {"en": "a dog", "fr": "un chien qui dort"},
        "English: a dog\nFrench:",
        ["un chien qui dort"],
        0,
    ),
    "copa@0": (COPA, "It rained so", ["i got wet.", "i slept."], 0),
    "copa@0 ": (COPA | {"question": "cause", "label": 1}, "It rained because", ["i got wet.", "i slept."], 1),
    "last-word@0": (NEXT, "One two. Three four", ["five"], 0),
    "cloze@0": (CLOZE, "Before. The", ["dog is here.", "cat is here."], 1),
    "cloze@0 ": (NAMES, "Before. With snake_case and __init__, a .", ["dog, too.", "cat, too."], 1),
    "sst2@0": ({"sentence": "good", "label": 1}, "Review: good\nSentiment:", ["negative", "positive"], 1),
    "boolq@0": (
        {"passage": "P.", "question": "is it", "label": 0},
        "P.\nQuestion: is it?\nAnswer:",
        ["no", "yes"],
        0,
    ),
    "rte@0": (
        {"sentence1": "A.", "sentence2": "B.", "label": 1},
        "A.\nQuestion: B. True or False?\nAnswer:",
        ["True", "False"],
        1,
    ),
}


@pytest.mark.parametrize("name", PROMPTS)
def test_a_prompt_is_the_question_up_to_where_its_answer_stands(name):
    row, prompt, texts, place = PROMPTS[name]
    task = find_prompted_task(name.strip())
    assert task.fit_prompt(row, [], lambda text: True) == task.prompt(row, []) == prompt
    assert task.continuations(row) == texts and task.gold_index(row) == place


def test_examples_stand_in_front_with_their_answers():
    task = find_prompted_task("multi30k_enfr@2")
    rows = [{"en": text, "fr": text.upper()} for text in "abc"]
    expected = "English: a\nFrench: A\n\nEnglish: b\nFrench: B\n\nEnglish: c\nFrench:"
    assert task.prompt(rows[2], rows[:2]) == expected


def test_a_right_answer_has_the_highest_score_of_every_task_that_is_asked():
    for name, (row, *_) in PROMPTS.items():
        task = find_prompted_task(name.strip())
        assert task.evaluate([row], [task.to_text(row)[1]])["score"] == pytest.approx(100)
    assert {*TEMPLATES} - {*TASKS} == {"last-word"}  # which is asked by prompts only


def test_examples_are_the_same_in_every_run_others_for_each_question_and_never_scored():
    train = [{"en": f"t{number}", "fr": "."} for number in range(40)]
    scored = [train[number] for number in range(0, 40, 2)]  # half of the training rows, and ten of their own
    scored += [{"en": f"v{number}", "fr": "."} for number in range(10)]
    task = find_prompted_task("multi30k_enfr@3")
    drawn = draw_examples(task, train, scored)
    assert drawn == draw_examples(task, list(train), [dict(row) for row in scored])
    assert drawn[:5] == draw_examples(task, train, scored[:5] + scored[5:])[:5]
    texts = [[row["en"] for row in few] for few in drawn]
    assert all(len({*few}) == 3 for few in texts)
    assert {text for few in texts for text in few} <= {f"t{number}" for number in range(1, 40, 2)}
    assert len({*map(tuple, texts)}) > len(scored) / 2
    with pytest.raises(
        SettingError, match="multi30k_enfr@30: only 20 training rows are not scored themselves"
    ):
        draw_examples(find_prompted_task("multi30k_enfr@30"), train, scored)
    assert draw_examples(find_prompted_task("multi30k_enfr@0"), (), scored) == [[]] * len(scored)


def letters(texts):
    """A vector of each text: how often its second word has each letter."""
    return np.array([[text.split()[1].count(letter) for letter in "abc"] for text in texts], float)


def test_the_nearest_examples_come_before_a_question_the_nearest_last_and_never_those_that_are_scored():
    train = [{"en": text, "fr": "."} for text in ("a", "ab", "bbbc", "cc", "b", "aab")]
    scored = [{"en": "aaaa", "fr": "."}, {"en": "b", "fr": "."}]  # the second is a training row
    task = find_prompted_task("multi30k_enfr@2-nearest")
    assert task.shots == 2 and task.takes_nearest and task.base_name == "multi30k_enfr"
    texts = [[row["en"] for row in few] for few in nearest_examples(task, train, scored, letters)]
    assert texts == [["aab", "a"], ["ab", "bbbc"]]
    with pytest.raises(SettingError, match="@6-nearest: only 5 training rows"):
        nearest_examples(find_prompted_task("multi30k_enfr@6-nearest"), train, scored, letters)


@pytest.mark.parametrize("room", range(9, 15))
def test_a_prompt_that_is_too_long_loses_the_fewest_words_at_the_end_of_its_body(room):
    task = find_prompted_task("squad@0")
    row = SQUAD | {"context": "1 2 3 4 5 6 7 8 9 10"}
    prompt = task.fit_prompt(row, [], lambda text: len(text.split()) <= room)
    assert prompt.split() == [*map(str, range(1, min(room - 2, 11))), "Question:", "What?", "Answer:"]
    assert len(prompt.split()) == min(room, 13)


def test_a_prompt_that_never_fits_is_refused_with_the_option_that_limits_it():
    for name in ("squad@0", "cloze@0"):
        with pytest.raises(SettingError, match=f"{name}: the question alone exceeds --prompt-length"):
            find_prompted_task(name).fit_prompt(PROMPTS[name][0], [], lambda text: len(text) < 3)


@pytest.mark.parametrize(
    ("name", "text", "answer"),
    [
        ("squad@0", " b c\nQuestion: Who?", "b c"),
        ("squad@0", "\n\n b c Question: Who? Answer:", "b c"),  # of a vocabulary without newlines
        ("scitldr@0", "It is short. TL;DR: again", "It is short."),
        ("squad@0", "", ""),
    ],
)
def test_an_answer_ends_at_a_newline_or_where_another_question_begins(name, text, answer):
    assert find_prompted_task(name).extract_answer(text) == answer


def test_the_last_word_is_compared_without_the_marks_around_it():
    task = find_prompted_task("last-word@0")
    assert task.evaluate([NEXT] * 4, ["five.", "five and", "four", ""])["score"] == 50


@pytest.mark.parametrize(
    ("name", "message"),
    [
        ("sqad@0", "there is no prompt for 'sqad'; did you mean 'squad'"),
        ("next@0", "there is no prompt for 'next'"),
        ("squad@", "'' should be the number of examples, such as squad@3"),
        ("squad@-1", "'-1' should be the number of examples"),
        ("squad@3-nearer", "'3-nearer' should be .* squad@3-nearest for those nearest"),
        ("squad@\u0663", "should be the number of examples"),
    ],
)
def test_a_prompt_that_there_is_none_for_is_refused(name, message):
    with pytest.raises(SettingError, match=message):
        find_prompted_task(name)

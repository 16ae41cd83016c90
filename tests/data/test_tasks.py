"""Tasks and mixtures: names, columns, what a score is made of, and how often a task is drawn."""

import pickle
from collections import defaultdict
from pathlib import Path

import pytest

from experiments.study.experiment import PAPER_MIXTURES
from lm.config.base import DataError, SettingError
from lm.data.seq2seq import EncodedExamples
from lm.data.tasks.benchmarks import TASKS, find_task
from lm.data.tasks.labelled import LABELLED
from lm.data.tasks.mixtures import MIXTURES, mixing_rates, mixture
from lm.data.tasks.task import label_of
from lm.tokenizers.sentencepiece import ByteTokenizer

COLUMNS = {"GLUE": 8, "SGLUE": 8, "SQuAD": 1, "CNNDM": 1, "EnDe": 1, "EnFr": 1, "EnRo": 1}
PLAIN = {"kind": "proportional", "limit": None, "temperature": 1.0}


@pytest.mark.parametrize(
    ("settings", "expected"),
    [
        ({}, {"a": 0.75, "b": 0.25}),
        ({"limit": 100}, {"a": 0.5, "b": 0.5}),
        ({"limit": 200}, {"a": 2 / 3, "b": 1 / 3}),
        ({"temperature": 2.0}, {"a": 3**0.5 / (1 + 3**0.5), "b": 1 / (1 + 3**0.5)}),
        ({"temperature": 2.0, "limit": 200}, {"a": 2**0.5 / (1 + 2**0.5), "b": 1 / (1 + 2**0.5)}),
        ({"temperature": 1e9}, {"a": 0.5, "b": 0.5}),
        ({"kind": "equal"}, {"a": 0.5, "b": 0.5}),
    ],
)
def test_rates_follow_the_examples_up_to_the_limit_and_the_temperature_makes_them_equal(settings, expected):
    assert mixing_rates({"a": 300, "b": 100}, **PLAIN | settings) == pytest.approx(expected)


def test_the_same_data_in_two_tasks_counts_half_in_each():
    sizes = {"rte": 100, "super_glue_rte": 100, "cb": 100}
    assert mixing_rates(sizes, **PLAIN) == {"rte": 0.25, "super_glue_rte": 0.25, "cb": 0.5}
    assert set(mixing_rates(sizes, **PLAIN | {"kind": "equal"}).values()) == {1 / 3}
    assert mixing_rates({"rte": 100, "cb": 100}, **PLAIN) == {"rte": 0.5, "cb": 0.5}


def test_every_task_but_one_for_tests_only_is_in_a_mixture_and_every_mixture_has_known_tasks():
    named = {name for mix in MIXTURES.values() for name in mix.tasks}
    assert named == TASKS.keys() - {"wnli"}
    assert all(one.train for mix in MIXTURES.values() for one in mix)


@pytest.mark.parametrize(
    ("find", "given", "message"),
    [
        (mixture, "superglue", "did you mean 'super_glue'"),
        (find_task, "squat", "did you mean 'squad'"),
        (lambda name: TASKS[name].rows("train", Path()), "wnli", "'wnli' has no train split"),
    ],
)
def test_what_is_not_there_is_named_with_the_nearest(find, given, message):
    with pytest.raises(SettingError, match=message):
        find(given)


def test_the_seven_columns_have_the_papers_tasks_and_the_documentation_has_its_own():
    assert [one.column for one in MIXTURES["documentation"]] == list(MIXTURES["documentation"].tasks)
    assert {one.paper_column for one in MIXTURES["documentation"]} == {
        "CNNDM",
        "GLUE",
        "SGLUE",
        "SQuAD",
        "EnDe",
    }
    paper = [one.column for name in PAPER_MIXTURES for one in mixture(name).evaluated]
    assert {column: paper.count(column) for column in paper} == COLUMNS
    assert all(
        name == one.name and set(one.unscored_metrics) < set(one.metrics) for name, one in TASKS.items()
    )


def test_the_score_is_the_mean_of_the_metrics_that_count():
    rows = [{"label": 1}, {"label": 1}, {"label": 0}]
    found = TASKS["mrpc"].evaluate(rows, ["equivalent", "nonsense", "not_equivalent"])
    assert found["accuracy"] == pytest.approx(200 / 3)
    assert found["score"] == pytest.approx((found["f1"] + found["accuracy"]) / 2)
    found = TASKS["extract"].evaluate([{"answers": ["blue car"]}], ["blue"])
    assert found == {"exact_match": 0.0, "f1": pytest.approx(200 / 3), "score": 0.0}


# a row of any task, whose other fields are all texts
UNLABELLED = defaultdict(
    lambda: "it was",
    question="cause",
    entities=["it"],
    answers=[],
    idx={"paragraph": 0, "question": 0, "answer": 0},
    candidates=["it", "so"],
    span2_index=0,
    query="it",
)
WITH_LABELS = [task for task in TASKS.values() if task.labels or task.target is label_of]
WITH_LABELS += [TASKS[name] for name in ("multirc", "record", "dpr")]


@pytest.mark.parametrize("label", [-1, None, -100])
@pytest.mark.parametrize("task", WITH_LABELS, ids=lambda task: task.name)
def test_a_row_whose_label_is_unknown_is_read_and_neither_scored_nor_trained_on(task, label):
    """Such a row is of a test set; what is no class must not be right because the label is none either."""
    row = UNLABELLED | {"label": label}
    row |= {"sentence": "It is so.", "pronoun": "it"}
    _, target = task.to_text(row) if task.name != "wnli" else ("", None)
    assert target in ("<unk>", None) or task.name == "wsc"
    with pytest.raises(DataError, match=f"task '{task.name}': row 1 has no label, .* leave such rows out"):
        task.evaluate([row], ["garbage"])
    with pytest.raises(DataError, match="row 1 has no label"):
        EncodedExamples(task, [row], ByteTokenizer(100))[0]


@pytest.mark.parametrize("name", [task.name for task in TASKS.values() if task.labels])
def test_an_answer_that_is_no_class_is_always_wrong(name):
    task = TASKS[name]
    for label in range(len(task.labels)):
        for answer in ("garbage", "", "<unk>", "-1", "None"):
            prediction = task.postprocess(answer, {"label": label})
            assert prediction != task.target({"label": label})
            assert prediction is not None


@pytest.mark.parametrize("task", [*TASKS.values(), *LABELLED.values()], ids=lambda task: task.name)
def test_a_task_reads_the_splits_of_its_source_that_it_names(task, monkeypatch):
    read = []
    monkeypatch.setattr("lm.data.tasks.task.dataset_rows", lambda source, split, *_: read.append(split) or [])
    named = [split for split in ("train", "validation", "report") if getattr(task, split) is not None]
    for split in named:
        task.rows(split, Path())
    assert read == [getattr(task, split) for split in named]


def test_wsc_trains_on_what_is_true_only():
    assert [len(TASKS["wsc"].training_rows({"label": value})) for value in (0, 1)] == [0, 1]


def test_a_task_is_pickled_by_name():
    assert pickle.loads(pickle.dumps(TASKS["squad"])) is TASKS["squad"]

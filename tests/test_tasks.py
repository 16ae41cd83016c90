"""Tasks and mixtures: names, columns, what a score is made of, and how often a task is drawn."""

import pickle
from pathlib import Path

import pytest

from experiments.study.experiment import PAPER_MIXTURES
from lm.data.tasks.benchmarks import TASKS, find_task
from lm.data.tasks.mixtures import MIXTURES, mixture, rates
from lm.settings import SettingError

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
    assert rates({"a": 300, "b": 100}, **PLAIN | settings) == pytest.approx(expected)


def test_the_same_data_in_two_tasks_counts_half_in_each():
    sizes = {"rte": 100, "super_glue_rte": 100, "cb": 100}
    assert rates(sizes, **PLAIN) == {"rte": 0.25, "super_glue_rte": 0.25, "cb": 0.5}
    assert set(rates(sizes, **PLAIN | {"kind": "equal"}).values()) == {1 / 3}
    assert rates({"rte": 100, "cb": 100}, **PLAIN) == {"rte": 0.5, "cb": 0.5}


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
    assert {one.like for one in MIXTURES["documentation"]} == {"CNNDM", "GLUE", "SGLUE", "SQuAD", "EnDe"}
    paper = [one.column for name in PAPER_MIXTURES for one in mixture(name).evaluated]
    assert {column: paper.count(column) for column in paper} == COLUMNS
    assert all(name == one.name and set(one.beside) < set(one.metrics) for name, one in TASKS.items())


def test_the_score_is_the_mean_of_the_metrics_that_count():
    rows = [{"label": 1}, {"label": 1}, {"label": 0}]
    found = TASKS["mrpc"].evaluate(rows, ["equivalent", "nonsense", "not_equivalent"])
    assert found["accuracy"] == pytest.approx(200 / 3)
    assert found["score"] == pytest.approx((found["f1"] + found["accuracy"]) / 2)
    found = TASKS["extract"].evaluate([{"answers": ["blue car"]}], ["blue"])
    assert found == {"exact_match": 0.0, "f1": pytest.approx(200 / 3), "score": 0.0}


def test_wsc_trains_on_what_is_true_only():
    assert [len(TASKS["wsc"].training({"label": value})) for value in (0, 1)] == [0, 1]


def test_a_task_is_pickled_by_name():
    assert pickle.loads(pickle.dumps(TASKS["squad"])) is TASKS["squad"]

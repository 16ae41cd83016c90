"""Text formats and labels, against T5's own cases, and what a score is made of."""

import pickle
from pathlib import Path

import pytest

from lm.config import SettingError
from lm.data.mixtures import MIXTURES, PAPER
from lm.data.tasks import TASKS, task

COLUMNS = {"GLUE": 8, "SGLUE": 8, "SQuAD": 1, "CNNDM": 1, "EnDe": 1, "EnFr": 1, "EnRo": 1}


def test_the_seven_columns_have_the_papers_tasks_and_documentation_has_four():
    assert {one.name: one.column for one in MIXTURES["documentation"]} == {
        "summarise": "CNNDM",
        "acceptability": "GLUE",
        "follows": "SGLUE",
        "cloze": "SQuAD",
    }
    paper = [task.column for mixed in PAPER.values() for task in mixed.evaluated]
    assert {column: paper.count(column) for column in paper} == COLUMNS
    assert all(name == one.name and set(one.beside) < set(one.metrics) for name, one in TASKS.items())
    with pytest.raises(SettingError, match="'wnli' has no train split"):
        TASKS["wnli"].rows("train", Path())


def test_the_score_is_the_mean_of_the_metrics_that_count():
    rows = [{"label": 1}, {"label": 1}, {"label": 0}]
    found = TASKS["mrpc"].evaluate(rows, ["equivalent", "nonsense", "not_equivalent"])
    assert found["accuracy"] == pytest.approx(200 / 3)
    assert found["score"] == pytest.approx((found["f1"] + found["accuracy"]) / 2)
    found = TASKS["cloze"].evaluate([{"answers": ["blue car"]}], ["blue"])
    assert found == {"exact_match": 0.0, "f1": pytest.approx(200 / 3), "score": 0.0}


def test_wsc_trains_on_what_is_true_only():
    assert [len(TASKS["wsc"].training({"label": value})) for value in (0, 1)] == [0, 1]


def test_a_task_is_pickled_by_name_and_a_misspelt_one_named():
    assert pickle.loads(pickle.dumps(TASKS["squad"])) is TASKS["squad"]
    with pytest.raises(SettingError, match="did you mean 'squad'"):
        task("squat")

"""Text formats and labels, against T5's own cases, and what a score is made of."""

import pickle
from pathlib import Path

import pytest

from lm.config import SettingError
from lm.data.tasks import TASKS, task

SHARED = Path(__file__).parents[1].parent / "shared"
COLUMNS = {"GLUE": 8, "SGLUE": 8, "SQuAD": 1, "CNNDM": 1, "EnDe": 1, "EnFr": 1, "EnRo": 1}


def test_the_seven_columns_have_the_papers_tasks_and_documentation_has_four():
    ours = [one for one in TASKS.values() if one.source.startswith("documentation/")]
    assert {one.name: one.column for one in ours} == {
        "summarise": "CNNDM",
        "acceptability": "GLUE",
        "follows": "SGLUE",
        "cloze": "SQuAD",
    }
    paper = [one.column for one in TASKS.values() if one not in ours]
    assert {column: paper.count(column) for column in paper} == COLUMNS
    assert all(name == one.name and set(one.beside) < set(one.metrics) for name, one in TASKS.items())


def test_the_score_is_the_mean_of_the_metrics_that_count():
    rows = [{"label": 1}, {"label": 1}, {"label": 0}]
    found = TASKS["mrpc"].evaluate(rows, ["equivalent", "nonsense", "not_equivalent"])
    assert found["accuracy"] == pytest.approx(200 / 3)
    assert found["score"] == pytest.approx((found["f1"] + found["accuracy"]) / 2)
    found = TASKS["cloze"].evaluate([{"answers": ["blue car"]}], ["blue"])
    assert found == {"exact_match": 0.0, "f1": pytest.approx(200 / 3), "score": 0.0}


def test_the_right_answers_score_100_and_none_0():
    blank = dict.fromkeys(("question", "answer", "paragraph"), "")
    places = [{"paragraph": 1, "question": q, "answer": a} for q in (0, 1) for a in (0, 1)]
    rows = [blank | {"idx": place, "label": (place["question"] + place["answer"]) % 2} for place in places]
    multirc = TASKS["multirc"]
    assert multirc.evaluate(rows, [multirc.to_text(row)[1] for row in rows])["score"] == 100
    assert multirc.evaluate(rows, ["?"] * 4) == {"f1": 0, "exact_match": 0, "score": 0}


def test_wsc_trains_on_what_is_true_only():
    assert [len(TASKS["wsc"].training({"label": value})) for value in (0, 1)] == [0, 1]


def test_a_task_is_pickled_by_name_and_a_misspelt_one_named():
    assert pickle.loads(pickle.dumps(TASKS["squad"])) is TASKS["squad"]
    with pytest.raises(SettingError, match="did you mean 'squad'"):
        task("squat")


@pytest.mark.skipif(not SHARED.exists(), reason="no prepared data")
@pytest.mark.parametrize(
    "name", ["cola", "mrpc", "stsb", "cb", "super_glue_rte", "wic", "wsc", "squad", "copa", "boolq"]
)
def test_prepared_rows_become_text_and_their_own_targets_are_right(name, monkeypatch, tmp_path):
    monkeypatch.setenv("TFDS_DATA_DIR", str(SHARED / "data" / "tfds"))
    one = TASKS[name]
    rows = [
        row for split in ("train", "validation") for row, _ in zip(one.rows(split, tmp_path), range(20), strict=False)
    ]
    rows = [row for given in rows for row in (one.training or (lambda row: [row]))(given)]
    pairs = [one.to_text(row) for row in rows]
    assert all(isinstance(part, str) and part.strip() for pair in pairs for part in pair)
    assert one.evaluate(rows, [target for _, target in pairs])["score"] > 99.5

"""Text formats and labels, against T5's own cases, and what a score is made of."""

import json
import pickle
from pathlib import Path

import pytest

from lm.config import SettingError
from lm.data.tasks import TASKS, benchmarks, task
from lm.data.tasks.task import classification, label

SHARED = Path(__file__).parents[1].parent / "shared"
PEERS = SHARED / "parity" / "peer_cases.json"
COLUMNS = {"GLUE": 8, "SGLUE": 8, "SQuAD": 1, "CNNDM": 1, "EnDe": 1, "EnFr": 1, "EnRo": 1}


def peer(name):
    found = json.loads(PEERS.read_text())["cases"] if PEERS.exists() else []
    return [pytest.param(case["args"], case["expected"], id=case["id"]) for case in found if case["fn"] == name]


def text(value):
    return value[0] if isinstance(value, list) else value


@pytest.mark.parametrize(("args", "expected"), peer("t5.preprocessors.glue"))
def test_a_classification_reads_as_in_t5(args, expected):
    (row,), name = args["x"], args["benchmark_name"]
    inputs = expected[0]["inputs"]
    if name in TASKS and "q1" not in row:
        assert TASKS[name].to_text(row) == (inputs, expected[0]["targets"])
    else:
        fields = args.get("feature_names") or sorted(set(row) - {"idx", "uid", "label"})
        made = classification(name, args["label_names"], fields, source="", column="GLUE", metrics={})
        assert made.to_text(row) == (inputs, expected[0]["targets"])


@pytest.mark.parametrize(("args", "expected"), peer("t5.preprocessors.stsb"))
def test_a_similarity_is_rounded_to_fifths(args, expected):
    row = {key: text(value) for key, value in args["x"][0].items()}
    assert TASKS["stsb"].to_text(row) == (text(expected[0]["inputs"]), text(expected[0]["targets"]))


@pytest.mark.parametrize(("args", "expected"), peer("t5.preprocessors.translate"))
def test_a_translation_names_its_languages(args, expected):
    made = benchmarks.translate(args["x"][0], args["source_language"], args["target_language"])
    assert made == (expected[0]["inputs"], expected[0]["targets"])


@pytest.mark.parametrize(("args", "expected"), peer("t5.preprocessors.wsc_simple"))
def test_a_pronoun_is_marked(args, expected):
    assert TASKS["wsc"].to_text(args["dataset"][0]) == (expected[0]["inputs"], expected[0]["targets"])


@pytest.mark.parametrize(("args", "expected"), peer("t5.preprocessors.record"))
def test_record_gives_one_example_per_answer(args, expected):
    record = TASKS["record"]
    row = {key: text(value) if key == "passage" else value for key, value in args["dataset"][0].items()}
    made = [record.to_text(one) for one in record.training(row)]
    assert made == [(text(one["inputs"]), one["targets"]) for one in expected]
    assert record.target(row) == row["answers"]
    assert record.to_text(row | {"answers": []})[1] == "<unk>"


@pytest.mark.parametrize(("args", "expected"), peer("t5.preprocessors._pad_punctuation"))
def test_punctuation_is_set_apart(args, expected):
    assert benchmarks.spaced(args["text"]) == expected


@pytest.mark.parametrize(("args", "expected"), peer("t5.postprocessors.wsc_simple"))
def test_a_referent_is_right_if_it_names_the_same_words(args, expected):
    row = {"span1_text": args["example"]["targets_pretokenized"]}
    assert benchmarks.refers(args["prediction"], row) == expected


@pytest.mark.parametrize(("args", "expected"), peer("t5.postprocessors.string_label_to_class_id"))
def test_a_label_is_its_place(args, expected):
    assert label(args["label_classes"])(args["string_label"], {}) == expected
    assert label(args["label_classes"])("neither", {}) == -1


@pytest.mark.parametrize(("args", "expected"), peer("t5.postprocessors.string_to_float"))
def test_a_number_is_read_or_minus_one(args, expected):
    assert benchmarks.number(args["string"], {}) == expected


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

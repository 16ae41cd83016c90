"""Every metric against the cases of T5's own, and the errors."""

import json
from pathlib import Path

import pytest

from lm import metrics
from lm.config import SettingError

PEERS = Path(__file__).parents[1].parent / "shared" / "parity" / "peer_cases.json"
ONE = {  # peers with one value: the metric here
    "accuracy": metrics.accuracy,
    "sequence_accuracy": metrics.accuracy,
    "f1_score_with_invalid": metrics.binary_f1,
    "mean_multiclass_f1(num_classes=3)": metrics.macro_f1(3),
    "sklearn_metrics_wrapper(matthews_corrcoef, metric_post_process_fn=100*x)": metrics.matthews,
    "pearson_corrcoef": metrics.pearson,
    "spearman_corrcoef": metrics.spearman,
    "bleu": metrics.bleu,
}
GROUPED = {
    "mean_group_metric(all_match)": metrics.group_exact_match,
    "multirc_f1_over_all_answers": metrics.ungrouped(metrics.binary_f1),
}
SEVERAL = {
    "squad": {"em": metrics.exact_match, "f1": metrics.answer_f1},
    "rouge": {name: metrics.rouge(name) for name in ("rouge1", "rouge2", "rougeLsum")},
    "rouge_mean": {name: metrics.rouge(name) for name in ("rouge1", "rouge2", "rougeLsum")},
}
LEFT_OUT = {
    # Of no task of the study: CoQA, TriviaQA, span answers, ranking of choices, regression by ranges, edit distance.
    *("coqa_f1", "_coqa_tokenize", "trivia_qa", "span_squad", "rank_classification", "auc", "score_auc"),
    *("edit_distance", "sklearn_metrics_wrapper(mean_absolute_error)", "mean_group_metric(accuracy)"),
    "all_match",  # within group_exact_match
    "deduplicate_metric(squad)",  # ReCoRD is evaluated on one row per question, so there is nothing to deduplicate
}


def cases(names):
    found = json.loads(PEERS.read_text())["cases"] if PEERS.exists() else []
    split = [(case["fn"].removeprefix("t5.metrics."), case) for case in found if case["fn"].startswith("t5.metrics.")]
    return [pytest.param(name, case["args"], case["expected"], id=case["id"]) for name, case in split if name in names]


@pytest.mark.parametrize(("name", "args", "expected"), cases(ONE))
def test_a_metric_gives_what_t5_gives(name, args, expected):
    (value,) = expected.values()
    assert ONE[name](args["targets"], args["predictions"]) == pytest.approx(value, abs=1e-3)


@pytest.mark.parametrize(("name", "args", "expected"), cases(GROUPED))
def test_a_grouped_metric_gives_what_t5_gives(name, args, expected):
    targets = [(target["group"], target["value"]) for target in args["targets"]]
    (value,) = expected.values()
    assert GROUPED[name](targets, [p["value"] for p in args["predictions"]]) == pytest.approx(value, abs=1e-3)


@pytest.mark.parametrize(("name", "args", "expected"), cases(SEVERAL))
def test_scores_of_text_are_those_of_t5(name, args, expected):
    for key, value in expected.items():
        assert SEVERAL[name][key](args["targets"], args["predictions"]) == pytest.approx(value, abs=1e-3)


def peer(name):
    found = json.loads(PEERS.read_text())["cases"] if PEERS.exists() else []
    return [pytest.param(case["args"], case["expected"], id=case["id"]) for case in found if case["fn"] == name]


@pytest.mark.parametrize(("args", "expected"), peer("t5.qa_utils.normalize_squad"))
def test_answers_are_normalised_as_for_squad(args, expected):
    assert metrics.normalise_answer(args["answer"]) == expected


@pytest.mark.parametrize(("args", "expected"), peer("t5.metrics._sequence_f1"))
def test_word_f1_is_that_of_t5(args, expected):
    found = metrics.word_f1(" ".join(args["target_tokens"]), " ".join(args["prediction_tokens"]))
    assert found == pytest.approx(expected)


def test_every_peer_metric_is_here_or_left_out_by_name():
    if not PEERS.exists():
        pytest.skip("no peer cases")
    names = {case["fn"] for case in json.loads(PEERS.read_text())["cases"] if case["fn"].startswith("t5.metrics.")}
    ours = set(ONE) | set(GROUPED) | set(SEVERAL) | {"_sequence_f1"} | LEFT_OUT
    assert {name.removeprefix("t5.metrics.") for name in names} == ours


ALL = {**ONE, "em": metrics.exact_match, "f1": metrics.answer_f1, "rouge2": metrics.rouge("rouge2")}
ALL |= {"groups": metrics.group_exact_match}


@pytest.mark.parametrize("name", ALL)
def test_unequal_or_no_predictions_are_an_error(name):
    for targets, predictions in ((["a", "b"], ["a"]), ([], [])):
        with pytest.raises(SettingError, match=r"predictions"):
            ALL[name](targets, predictions)


def test_no_class_counts_as_wrong():
    assert metrics.accuracy([0, 1], [0, -1]) == 50
    assert metrics.binary_f1([0, 1], [-1, 1]) == pytest.approx(200 / 3)
    assert metrics.matthews([0, 1, 1, 0], [0, 1, -1, 0]) < 100
    assert metrics.macro_f1(2)([0, 1], [-1, -1]) == 0


def test_a_constant_has_no_correlation():
    assert metrics.pearson([1.0, 2.0, 3.0], [2.0, 2.0, 2.0]) == 0
    assert metrics.spearman([1.0, 1.0, 1.0], [1.0, 2.0, 3.0]) == 0
    assert metrics.matthews([0, 1, 1], [1, 1, 1]) == 0


def test_rouge_l_compares_sentence_by_sentence():
    target, prediction = "the cat sat . the dog ran", "the dog ran . the cat sat"
    assert metrics.rouge("rougeLsum")([target], [prediction]) == pytest.approx(100)
    assert metrics.rouge("rougeL")(["the cat sat the dog ran"], ["the dog ran the cat sat"]) < 100

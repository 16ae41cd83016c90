"""Metrics where the cases of T5's own (test_peer_cases.py) are silent."""

import numpy as np
import pytest

from lm import metrics
from lm.config.base import SettingError

ALL = {
    name: getattr(metrics, name)
    for name in ("accuracy", "binary_f1", "matthews", "pearson", "spearman", "bleu")
}
ALL |= {
    "macro_f1": metrics.macro_f1(3),
    "em": metrics.exact_match,
    "f1": metrics.answer_f1,
    "rouge2": metrics.rouge("rouge2"),
}
ALL |= {"rouge2": metrics.rouge("rouge2"), "groups": metrics.group_exact_match}


@pytest.mark.parametrize("name", ALL)
def test_unequal_or_no_predictions_are_an_error(name):
    for targets, predictions in ((["a", "b"], ["a"]), ([], [])):
        with pytest.raises(SettingError, match=r"predictions"):
            ALL[name](targets, predictions)


@pytest.mark.parametrize("name", ["em", "f1"])
def test_a_question_without_a_right_answer_is_an_error(name):
    assert ALL[name]([["a b"], ["b", ""]], ["a b", ""]) == pytest.approx({"em": 100, "f1": 50}[name])
    with pytest.raises(SettingError, match=r"targets\[1\] has no right answer"):
        ALL[name]([["a"], []], ["a", "b"])


def test_no_class_counts_as_wrong():
    assert metrics.accuracy([0, 1], [0, -1]) == 50
    assert metrics.binary_f1([0, 1], [-1, 1]) == pytest.approx(200 / 3)
    assert metrics.matthews([0, 1, 1, 0], [0, 1, -1, 0]) < 100
    assert metrics.macro_f1(2)([0, 1], [-1, -1]) == 0


@pytest.mark.parametrize("dtype", [bool, np.int8, np.uint8, np.int64])
def test_the_f1_of_arrays_is_that_of_lists_whatever_their_type(dtype):
    """Sums of many small integers would overflow."""
    targets, predictions = np.ones(300, dtype), (np.arange(300) % 3 > 0).astype(dtype)
    assert metrics.binary_f1(targets, predictions) == pytest.approx(80)  # precision 1, recall 2/3


def test_tags_of_another_number_of_words_are_an_error():
    for metric in (metrics.token_accuracy, metrics.entity_f1(CONLL)):
        with pytest.raises(SettingError, match=r"targets\[1\] has 2 labels and predictions\[1\] 1"):
            metric([[0], [1, 2]], [[0], [1]])


CONLL = "O B-PER I-PER B-LOC I-LOC".split()


def classes(line):
    return [CONLL.index(label) if label in CONLL else -1 for label in line.split()]


def test_an_entity_is_right_if_its_type_and_both_ends_are_also_where_labels_break_bio():
    targets = [classes("O B-PER I-PER O B-LOC"), classes("B-LOC B-LOC I-LOC B-PER")]
    # the broken I-PER begins a right entity, the broken I-LOC a wrong one; one entity is read for two
    predictions = [classes("O I-PER I-PER I-LOC B-LOC"), classes("B-LOC I-LOC I-LOC unread")]
    precision, recall = 2 / 4, 2 / 5
    expected = 100 * 2 * precision * recall / (precision + recall)
    assert metrics.entity_f1(CONLL)(targets, predictions) == pytest.approx(expected)


def test_answering_every_example_alike_is_chance_level_by_matthews_correlation():
    assert metrics.matthews([0, 1, 1], [1, 1, 1]) == 0


@pytest.mark.parametrize(
    ("metric", "targets", "predictions", "reason"),
    [
        (metrics.pearson, [1.0, 2.0, 3.0], [2.0, 2.0, 2.0], "all predictions are alike"),
        (metrics.pearson, [1.0, 2.0, 3.0], ["one", "two", "three"], "all predictions are alike"),
        (metrics.spearman, [1.0, 1.0, 1.0], [1.0, 2.0, 3.0], "all targets are alike"),
        (metrics.matthews, [1, 1, 1], [0, 1, 1], "all targets are alike"),
        (metrics.binary_f1, [0, 0], [0, 0], "no target and no prediction is of class 1"),
        (metrics.entity_f1(["O", "B"]), [[0]], [[0]], "no target and no prediction has an entity"),
        (metrics.token_accuracy, [[], []], [[], []], "no text has a word"),
        (metrics.word_accuracy, ["", " "], ["a", ""], "no target has a word"),
    ],
)
def test_what_is_not_defined_has_a_reason_and_no_value(metric, targets, predictions, reason):
    assert metric(targets, predictions) == metrics.Undefined(reason)


def test_a_mean_of_metrics_is_undefined_as_soon_as_one_of_them_is():
    values = {"f1": 50.0, "matthews": metrics.Undefined("all targets are alike")}
    assert metrics.mean_value(values) == metrics.Undefined("matthews: all targets are alike")
    assert metrics.mean_value({"f1": 50.0, "accuracy": 100.0}) == 75
    assert [metrics.format_value(value) for value in values.values()] == [
        "50.00",
        "– (all targets are alike)",
    ]


def test_rouge_l_compares_sentence_by_sentence():
    target, prediction = "the cat sat . the dog ran", "the dog ran . the cat sat"
    assert metrics.rouge("rougeLsum")([target], [prediction]) == pytest.approx(100)
    assert metrics.rouge("rougeL")(["the cat sat the dog ran"], ["the dog ran the cat sat"]) < 100


@pytest.mark.parametrize(
    "answer", [float("nan"), float("inf"), -float("inf"), 1e308, 10**400, "nan", "about three"]
)
@pytest.mark.parametrize("correlation", [metrics.pearson, metrics.spearman])
def test_a_prediction_that_is_no_finite_number_counts_as_minus_one(correlation, answer):
    targets, others = [1.0, 2.0, 3.0, 4.0], [1.5, 2.5, 3.5]
    expected = correlation(targets, [*others, -1.0])
    assert correlation(targets, [*others, answer]) == expected < correlation(targets, [*others, 4.5])


def test_no_words_in_common_are_no_f1_even_if_there_are_none():
    assert metrics.answer_f1([["The"]], ["A"]) == 0


def test_text_without_blanks_has_a_perplexity_per_token_and_one_per_word_that_is_no_float():
    chinese = metrics.Likelihood(nats=1350.0, tokens=540, words=1, bytes=1620)
    assert chinese.perplexity == pytest.approx(12.18, abs=0.01)
    assert chinese.word_perplexity == float("inf")

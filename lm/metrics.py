"""Scores between 0 and 100 of predictions against targets: ``metric(targets, predictions) -> Value``.

As T5 computes them; where a class is predicted, -1 stands for a text that is no class, and counts as wrong.
Where a number is predicted, -1 stands for a text that is none. Where a score would be 0/0, such as the
correlation with a constant, it is ``Undefined``, and says why.
"""

import collections
import itertools
import math
import re
import string
from collections.abc import Callable, Hashable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import numpy as np

from lm.config.base import SettingError

LARGEST_PREDICTION = 1e100  # of numbers: the squares of larger ones overflow


@dataclass(frozen=True)
class Undefined:
    """The value of a metric that these targets and predictions do not define."""

    reason: str


Value = float | Undefined
Metric = Callable[[Sequence[Any], Sequence[Any]], Value]


def defined(values: Mapping[str, Value]) -> dict[str, float]:
    """Those that are numbers."""
    return {name: value for name, value in values.items() if not isinstance(value, Undefined)}


def reasons(values: Mapping[str, Value]) -> dict[str, str]:
    """Why the others are undefined."""
    return {name: value.reason for name, value in values.items() if isinstance(value, Undefined)}


def shown(value: Value) -> str:
    """With two places, or a dash and why there is no value."""
    return f"– ({value.reason})" if isinstance(value, Undefined) else f"{value:.2f}"


def overall(values: Mapping[str, Value]) -> Value:
    """The mean; undefined as soon as one of the values is."""
    for name, value in values.items():
        if isinstance(value, Undefined):
            return Undefined(f"{name}: {value.reason}")
    return sum(defined(values).values()) / len(values)


def check_lengths(targets: Sequence[Any], predictions: Sequence[Any]) -> None:
    """SettingError unless there are as many targets as predictions, and at least one."""
    if len(targets) != len(predictions) or not len(targets):
        numbers = f"{len(targets)} targets and {len(predictions)} predictions"
        raise SettingError(f"{numbers}; as many are needed, one at least")


def mean(scores: Sequence[float]) -> float:
    """In percent."""
    return 100 * float(np.mean(scores))


# Classes and numbers


def accuracy(targets: Sequence[Any], predictions: Sequence[Any]) -> float:
    """Share of equal pairs."""
    check_lengths(targets, predictions)
    return mean([target == prediction for target, prediction in zip(targets, predictions, strict=True)])


def token_accuracy(targets: Sequence[Sequence[Any]], predictions: Sequence[Sequence[Any]]) -> Value:
    """Share of equal labels among those of all words of all texts."""
    check_lengths(targets, predictions)
    pairs = zip(targets, predictions, strict=True)
    if not any(map(len, targets)):
        return Undefined("no text has a word")
    return mean([t == p for labels, predicted in pairs for t, p in zip(labels, predicted, strict=True)])


def binary_f1(targets: Sequence[int], predictions: Sequence[int]) -> Value:
    """F1 of class 1; a prediction that is neither 0 nor 1 is taken for the wrong class."""
    check_lengths(targets, predictions)
    pairs = [(t, p if p in (0, 1) else 1 - t) for t, p in zip(targets, predictions, strict=True)]
    hits = sum(t == p == 1 for t, p in pairs)
    ones = sum(t + p for t, p in pairs)
    return 200 * hits / ones if ones else Undefined("no target and no prediction is of class 1")


def macro_f1(classes: int) -> Metric:
    """Mean of the classes' F1."""

    def metric(targets: Sequence[int], predictions: Sequence[int]) -> float:
        check_lengths(targets, predictions)
        from sklearn.metrics import f1_score

        labels = list(range(classes))
        return 100 * float(f1_score(targets, predictions, labels=labels, average="macro", zero_division=0))

    return metric


def _constant(targets: Sequence[Any], predictions: Sequence[Any]) -> Undefined | None:
    """Why there is no correlation: a side is constant; None: neither is."""
    for name, values in (("targets", targets), ("predictions", predictions)):
        if len({*values}) < 2:
            return Undefined(f"all {name} are alike")
    return None


def matthews(targets: Sequence[int], predictions: Sequence[int]) -> Value:
    """Return the Matthews correlation; undefined where all targets are alike.

    Answering every example alike is chance level, 0, as scikit-learn, GLUE and T5 have it.
    """
    check_lengths(targets, predictions)
    if len({*targets}) < 2:
        return Undefined("all targets are alike")
    from sklearn.metrics import matthews_corrcoef

    return 100 * float(matthews_corrcoef(targets, predictions))


def _correlation(name: str, targets: Sequence[float], predictions: Sequence[float]) -> Value:
    import scipy.stats

    predictions = [number(prediction) for prediction in predictions]
    if undefined := _constant(targets, predictions):
        return undefined
    return 100 * float(getattr(scipy.stats, name)(targets, predictions).statistic)


def pearson(targets: Sequence[float], predictions: Sequence[float]) -> Value:
    """Linear correlation; undefined where either side is constant."""
    check_lengths(targets, predictions)
    return _correlation("pearsonr", targets, predictions)


def spearman(targets: Sequence[float], predictions: Sequence[float]) -> Value:
    """Rank correlation; undefined where either side is constant."""
    check_lengths(targets, predictions)
    return _correlation("spearmanr", targets, predictions)


def number(prediction: Any) -> float:
    """The number that a prediction, or its text, is; -1 for infinity, NaN and other texts, as in T5.

    One NaN among the predictions would make every correlation NaN.
    """
    try:
        value = float(prediction)
    except (ValueError, OverflowError):
        return -1.0
    return value if abs(value) <= LARGEST_PREDICTION else -1.0


# Answers: every target is the list of right ones, the best of which counts


def normalise_answer(text: str) -> str:
    """SQuAD's: lower case, no punctuation, no articles, single blanks."""
    text = "".join(letter for letter in text.lower() if letter not in string.punctuation)
    return " ".join(re.sub(r"\b(a|an|the)\b", " ", text).split())


def word_f1(target: str, prediction: str) -> float:
    """F1 of the bags of words; 1 when both are empty."""
    predicted, right = prediction.split(), target.split()
    if not predicted or not right:
        return float(predicted == right)
    same = sum((collections.Counter(predicted) & collections.Counter(right)).values())
    return 2 * same / (len(predicted) + len(right))


def _best(score: Callable[[str, str], float]) -> Metric:
    def metric(targets: Sequence[Sequence[str]], predictions: Sequence[str]) -> float:
        check_lengths(targets, predictions)
        scores = []
        for answers, prediction in zip(targets, map(normalise_answer, predictions), strict=True):
            scores.append(max(score(normalise_answer(answer), prediction) for answer in answers))
        return mean(scores)

    return metric


exact_match: Metric = _best(lambda answer, prediction: float(answer == prediction))
answer_f1: Metric = _best(word_f1)


# Groups: a target is (group, value)


def group_exact_match(targets: Sequence[tuple[Hashable, Any]], predictions: Sequence[Any]) -> float:
    """Share of groups in which every prediction is right (MultiRC: all answers to a question)."""
    check_lengths(targets, predictions)
    right: dict[Hashable, bool] = {}
    for (group, target), prediction in zip(targets, predictions, strict=True):
        right[group] = right.get(group, True) and target == prediction
    return mean(list(right.values()))


def ungrouped(metric: Metric) -> Metric:
    """The metric over all values, whatever their group."""
    return lambda targets, predictions: metric([value for _, value in targets], predictions)


# Texts


def word_accuracy(targets: Sequence[str], predictions: Sequence[str]) -> Value:
    """Share of the targets' words that the predictions have at the same place."""
    check_lengths(targets, predictions)
    right = words = 0
    for target, prediction in zip(targets, predictions, strict=True):
        pairs = itertools.zip_longest(target.split(), prediction.split()[: len(target.split())])
        matches = [one == other for one, other in pairs]
        right, words = right + sum(matches), words + len(matches)
    return 100 * right / words if words else Undefined("no target has a word")


class Likelihood(NamedTuple):
    """The probability that a model gives texts; parts of them may be added up before it is read."""

    nats: float  # minus the log-probability, summed
    tokens: int  # that were scored
    words: int  # of the texts, between blanks
    bytes: int  # of the texts, as UTF-8

    @property
    def perplexity(self) -> float:
        """Of a token: comparable between models with one vocabulary."""
        return math.exp(self.nats / self.tokens)

    @property
    def word_perplexity(self) -> float:
        """Comparable whatever the vocabulary, where all models count the end of a text, or none does."""
        return math.exp(self.nats / self.words)

    @property
    def bits_per_byte(self) -> float:
        """Comparable whatever the vocabulary, and whatever the writing."""
        return self.nats / math.log(2) / self.bytes


def rouge(kind: str) -> Metric:
    """Mean ROUGE F1 of kind ``rouge1``, ``rouge2`` or ``rougeLsum``, which compares sentence by sentence.

    T5 reports the median of bootstrap samples of this mean, which differs from it by chance only.
    """

    def metric(targets: Sequence[str], predictions: Sequence[str]) -> float:
        check_lengths(targets, predictions)
        from rouge_score.rouge_scorer import RougeScorer

        scorer = RougeScorer([kind], use_stemmer=False)
        lines = [[text.replace(" . ", " .\n") for text in texts] for texts in (targets, predictions)]
        return mean([scorer.score(*pair)[kind].fmeasure for pair in zip(*lines, strict=True)])

    return metric


def bleu(targets: Sequence[str] | Sequence[Sequence[str]], predictions: Sequence[str]) -> float:
    """Corpus BLEU of sacrebleu with T5's choices: international tokens, exponential smoothing.

    With several references per prediction, ``targets`` is a sequence of streams, each as long as
    ``predictions``.
    """
    streams: Any = [targets] if len(targets) and isinstance(targets[0], str) else targets
    for stream in streams or [[]]:
        check_lengths(stream, predictions)
    import sacrebleu

    score = sacrebleu.corpus_bleu(predictions, streams, smooth_method="exp", tokenize="intl", force=True)
    return float(score.score)

"""Metrics ``metric(targets, predictions) -> Value``: scores in per cent, computed as in T5.

A predicted class of -1 means that the text names no class, and counts as wrong; a predicted number of -1
means that the text is no number. A score that would be 0/0, such as the correlation with a constant, is
``Undefined`` and has a reason.
"""

import collections
import math
import operator
import re
import string
from collections.abc import Callable, Hashable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import numpy as np

from lm.config.base import SettingError

LARGEST_PREDICTION = 1e100  # the squares of larger numbers overflow


@dataclass(frozen=True)
class Undefined:
    """The value of a metric that is not defined for these targets and predictions."""

    reason: str


Value = float | Undefined
Metric = Callable[[Sequence[Any], Sequence[Any]], Value]


def defined_values(values: Mapping[str, Value]) -> dict[str, float]:
    """Return the values that are numbers."""
    return {name: value for name, value in values.items() if not isinstance(value, Undefined)}


def undefined_reasons(values: Mapping[str, Value]) -> dict[str, str]:
    """Return the reason of each undefined value."""
    return {name: value.reason for name, value in values.items() if isinstance(value, Undefined)}


def format_value(value: Value) -> str:
    """Return the value with two decimal places, or a dash and the reason why it is undefined."""
    return f"– ({value.reason})" if isinstance(value, Undefined) else f"{value:.2f}"


def mean_value(values: Mapping[str, Value]) -> Value:
    """Return the mean of the values; undefined if one of them is."""
    for name, value in values.items():
        if isinstance(value, Undefined):
            return Undefined(f"{name}: {value.reason}")
    return sum(defined_values(values).values()) / len(values)


def check_lengths(targets: Sequence[Any], predictions: Sequence[Any]) -> None:
    """Raise SettingError unless there are as many targets as predictions, and at least one."""
    if len(targets) != len(predictions) or not len(targets):
        numbers = f"{len(targets)} targets and {len(predictions)} predictions"
        raise SettingError(f"{numbers} should be equally many, and at least one of each")


def percent_mean(scores: Sequence[float]) -> float:
    """Return the mean of scores between 0 and 1, in percent."""
    return 100 * float(np.mean(scores))


# Classes and numbers


def accuracy(targets: Sequence[Any], predictions: Sequence[Any]) -> float:
    """Return the share of predictions that equal their targets [%]."""
    check_lengths(targets, predictions)
    pairs = zip(targets, predictions, strict=True)
    return percent_mean([target == prediction for target, prediction in pairs])


def token_accuracy(targets: Sequence[Sequence[Any]], predictions: Sequence[Sequence[Any]]) -> Value:
    """Return the share of correct labels among all words of all texts [%]."""
    is_correct: list[bool] = []
    for labels, predicted in _labels_by_text(targets, predictions):
        is_correct += map(operator.eq, labels, predicted)
    return percent_mean(is_correct) if is_correct else Undefined("no text has a word")


def _labels_by_text(
    targets: Sequence[Sequence[Any]], predictions: Sequence[Sequence[Any]]
) -> Iterator[tuple[Sequence[Any], Sequence[Any]]]:
    """Yield the target labels and the predicted ones of each text; SettingError for unequal numbers."""
    check_lengths(targets, predictions)
    for index, (labels, predicted) in enumerate(zip(targets, predictions, strict=True)):
        if len(labels) != len(predicted):
            raise SettingError(
                f"targets[{index}] has {len(labels)} labels and predictions[{index}] {len(predicted)} of "
                "them; both should have one per word"
            )
        yield labels, predicted


class Entity(NamedTuple):
    """A span of words that is an entity."""

    kind: str
    start: int
    end: int  # exclusive


def is_bio(labels: Sequence[str]) -> bool:
    """Return whether labels mark entities: each is O, B-TYPE or I-TYPE, and at least one is not O."""
    return bool({*labels} - {"O"}) and all(re.fullmatch("O|[BI]-.+", label) for label in labels)


def bio_entities(labels: Sequence[str]) -> list[Entity]:
    """Return the entities that BIO labels mark, in order.

    B-X begins an entity of type X, I-X continues it, O is outside. As in conlleval, an I-X that continues
    nothing begins an entity: after O, after another type, or at the start.

    >>> print(*map(tuple, bio_entities(["I-PER", "O", "B-LOC", "I-LOC", "I-ORG"])))
    ('PER', 0, 1) ('LOC', 2, 4) ('ORG', 4, 5)
    """
    entities: list[Entity] = []
    for position, label in enumerate(labels):
        prefix, _, kind = label.partition("-")
        if prefix not in ("B", "I"):
            continue
        last = entities[-1] if entities else None
        if prefix == "I" and last and last.end == position and last.kind == kind:
            entities[-1] = last._replace(end=position + 1)
        else:
            entities.append(Entity(kind, position, position + 1))
    return entities


def entity_f1(labels: Sequence[str]) -> Metric:
    """Return a metric: the F1 of entities in sequences of classes, whose names are BIO labels [%].

    An entity is right if its type and both its ends are (Tjong Kim Sang and De Meulder 2003). All texts count
    together. A class of -1, a word that the model did not read, is outside of entities.
    """

    def entities(classes: Sequence[int]) -> set[Entity]:
        return {*bio_entities(["O" if number < 0 else labels[number] for number in classes])}

    def metric(targets: Sequence[Sequence[int]], predictions: Sequence[Sequence[int]]) -> Value:
        hits = total = 0
        for classes, predicted in _labels_by_text(targets, predictions):
            expected, found = entities(classes), entities(predicted)
            hits += len(expected & found)
            total += len(expected) + len(found)
        return 200 * hits / total if total else Undefined("no target and no prediction has an entity")

    return metric


def binary_f1(targets: Sequence[int], predictions: Sequence[int]) -> Value:
    """Return the F1 of class 1 [%]; a prediction that is neither 0 nor 1 counts as the wrong class."""
    check_lengths(targets, predictions)
    hits = ones = 0
    for target, prediction in zip(targets, predictions, strict=True):
        answer = prediction if prediction in (0, 1) else 1 - target
        hits += target == answer == 1
        ones += int(target) + int(answer)
    return 200 * hits / ones if ones else Undefined("no target and no prediction is of class 1")


def macro_f1(num_classes: int) -> Metric:
    """Return a metric: the mean F1 over all classes [%]."""

    def metric(targets: Sequence[int], predictions: Sequence[int]) -> float:
        check_lengths(targets, predictions)
        from sklearn.metrics import f1_score

        labels = list(range(num_classes))
        return 100 * float(f1_score(targets, predictions, labels=labels, average="macro", zero_division=0))

    return metric


def matthews(targets: Sequence[int], predictions: Sequence[int]) -> Value:
    """Return the Matthews correlation [%]; undefined if all targets are alike.

    It is 0, chance level, if all predictions are alike, as in scikit-learn, GLUE and T5.
    """
    check_lengths(targets, predictions)
    if len({*targets}) < 2:
        return Undefined("all targets are alike")
    from sklearn.metrics import matthews_corrcoef

    return 100 * float(matthews_corrcoef(targets, predictions))


def _correlation(name: str, targets: Sequence[float], predictions: Sequence[float]) -> Value:
    """Return ``scipy.stats``' correlation of this name [%]; undefined if either side is constant."""
    check_lengths(targets, predictions)
    import scipy.stats

    numbers = [parse_number(prediction) for prediction in predictions]
    for which, values in (("targets", targets), ("predictions", numbers)):
        if len({*values}) < 2:
            return Undefined(f"all {which} are alike")
    return 100 * float(getattr(scipy.stats, name)(targets, numbers).statistic)


def pearson(targets: Sequence[float], predictions: Sequence[float]) -> Value:
    """Return Pearson's linear correlation [%]; undefined if targets or predictions are constant."""
    return _correlation("pearsonr", targets, predictions)


def spearman(targets: Sequence[float], predictions: Sequence[float]) -> Value:
    """Return Spearman's rank correlation [%]; undefined if targets or predictions are constant."""
    return _correlation("spearmanr", targets, predictions)


def parse_number(prediction: Any) -> float:
    """Return a prediction, a number or a text, as a number; -1 for infinity, NaN and other texts, as in T5.

    A single NaN would make the correlation NaN.
    """
    try:
        value = float(prediction)
    except (ValueError, OverflowError):
        return -1.0
    return value if abs(value) <= LARGEST_PREDICTION else -1.0


# Answers: each target is a list of right answers, and the best match counts


def normalise_answer(text: str) -> str:
    """Return an answer as SQuAD normalises it: lower case, no punctuation or articles, single blanks."""
    text = "".join(letter for letter in text.lower() if letter not in string.punctuation)
    return " ".join(re.sub(r"\b(a|an|the)\b", " ", text).split())


def word_f1(target: str, prediction: str) -> float:
    """Return the F1 of the bags of words, from 0 to 1; 0 if either is empty, as in SQuAD's script."""
    predicted, expected = prediction.split(), target.split()
    if not predicted or not expected:
        return 0.0
    num_shared = (collections.Counter(predicted) & collections.Counter(expected)).total()
    return 2 * num_shared / (len(predicted) + len(expected))


def _best_match(score: Callable[[str, str], float]) -> Metric:
    """Return a metric: the mean of each prediction's highest score against the right answers [%].

    The metric raises SettingError for a question without a right answer.
    """

    def metric(targets: Sequence[Sequence[str]], predictions: Sequence[str]) -> float:
        check_lengths(targets, predictions)
        scores: list[float] = []
        for answers, prediction in zip(targets, map(normalise_answer, predictions), strict=True):
            if not len(answers):
                raise SettingError(
                    f"targets[{len(scores)}] has no right answer; leave out questions without one"
                )
            scores.append(max(score(normalise_answer(answer), prediction) for answer in answers))
        return percent_mean(scores)

    return metric


exact_match: Metric = _best_match(lambda answer, prediction: float(answer == prediction))
answer_f1: Metric = _best_match(word_f1)

# Metrics that are the mean over examples of their value on each alone
MEANS_OVER_EXAMPLES: frozenset[Metric] = frozenset({accuracy, exact_match, answer_f1})
# Names of metrics that are 0 for guesses
CORRELATIONS = frozenset({"matthews", "pearson", "spearman"})


# Groups: a target is (group, value)


def group_exact_match(targets: Sequence[tuple[Hashable, Any]], predictions: Sequence[Any]) -> float:
    """Return the share of groups with only right predictions [%]; in MultiRC a group is a question."""
    check_lengths(targets, predictions)
    right: dict[Hashable, bool] = {}
    for (group, target), prediction in zip(targets, predictions, strict=True):
        right[group] = right.get(group, True) and target == prediction
    return percent_mean(list(right.values()))


def ungrouped(metric: Metric) -> Metric:
    """Return the metric of all values, whatever their group."""
    return lambda targets, predictions: metric([value for _, value in targets], predictions)


# Texts


def word_accuracy(targets: Sequence[str], predictions: Sequence[str]) -> Value:
    """Return the share of the targets' words that the predictions have at the same position [%]."""
    check_lengths(targets, predictions)
    right = words = 0
    for target, prediction in zip(targets, predictions, strict=True):
        target_words = target.split()
        right += sum(map(operator.eq, target_words, prediction.split()))
        words += len(target_words)
    return 100 * right / words if words else Undefined("no target has a word")


NORMAL_95 = 1.96  # standard errors on either side of a mean that are its 95 % interval


def _exp(nats: float) -> float:
    """Return e^nats, inf where that is no float."""
    try:
        return math.exp(nats)
    except OverflowError:
        return math.inf


class Likelihood(NamedTuple):
    """The negative log-likelihood of texts under a model, and the units to normalise it by."""

    nats: float  # minus the log-probability, summed; of masked diffusion, an upper bound
    tokens: int  # scored
    words: int  # of the texts, separated by white space
    bytes: int  # of the texts, as UTF-8
    # variance of ``nats``, if they are a bound that is estimated from random masks; None: they are exact
    variance: float | None = None

    @property
    def is_bound(self) -> bool:
        """Return whether ``nats`` are an estimated upper bound, as of masked diffusion."""
        return self.variance is not None

    @property
    def perplexity(self) -> float:
        """Return the perplexity per token, comparable between models with the same vocabulary."""
        return _exp(self.nats / self.tokens)

    @property
    def word_perplexity(self) -> float:
        """Return the perplexity per word, comparable between vocabularies; inf where it is no float.

        Text with few blanks, such as Chinese, has words of hundreds of tokens. Either all compared models or
        none should score the end of a text.
        """
        return _exp(self.nats / self.words)

    @property
    def bits_per_byte(self) -> float:
        """Return bits per byte, comparable between vocabularies and languages."""
        return self.nats / math.log(2) / self.bytes

    @property
    def bits_per_byte_interval(self) -> float:
        """Return half of the 95 % interval of the estimate of ``bits_per_byte``; 0 if it is exact."""
        return NORMAL_95 * math.sqrt(self.variance or 0.0) / math.log(2) / self.bytes


def rouge(kind: str) -> Metric:
    """Return a metric: the mean F1 of ``rouge1``, ``rouge2`` or ``rougeLsum`` [%].

    ``rougeLsum`` compares sentence by sentence. T5 reports the median of bootstrap samples of this mean,
    which differs from it by chance only.
    """

    def metric(targets: Sequence[str], predictions: Sequence[str]) -> float:
        check_lengths(targets, predictions)
        from rouge_score.rouge_scorer import RougeScorer

        scorer = RougeScorer([kind], use_stemmer=False)
        scores: list[float] = []
        for target, prediction in zip(targets, predictions, strict=True):
            found = scorer.score(_one_sentence_per_line(target), _one_sentence_per_line(prediction))
            scores.append(found[kind].fmeasure)
        return percent_mean(scores)

    return metric


def _one_sentence_per_line(text: str) -> str:
    """Return a text with a line break after each sentence, as ``rougeLsum`` expects and T5 puts them."""
    return text.replace(" . ", " .\n")


def bleu(targets: Sequence[str] | Sequence[Sequence[str]], predictions: Sequence[str]) -> float:
    """Return sacrebleu's corpus BLEU with T5's choices: international tokens, exponential smoothing.

    With several references per prediction, ``targets`` is a sequence of streams, each as long as
    ``predictions``.
    """
    streams: Any = [targets] if len(targets) and isinstance(targets[0], str) else targets
    for stream in streams or [[]]:
        check_lengths(stream, predictions)
    import sacrebleu

    score = sacrebleu.corpus_bleu(predictions, streams, smooth_method="exp", tokenize="intl", force=True)
    return float(score.score)

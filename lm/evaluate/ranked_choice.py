"""Measures the likelihood of a task's right answers, in bits, whatever the model would generate.

A small model almost never generates the right answer; its likelihood says how far the model is from it.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from itertools import chain
from math import log
from typing import Any, NamedTuple

import numpy as np

from lm.data.tasks.choices import Choices, IdPair
from lm.evaluate.loglikelihood import candidate_log_probs, continuation_log_probs

ExampleValues = dict[str, np.ndarray]  # name -> a value of each row


class ScoredChoice(NamedTuple):
    """The log-probabilities of the answers of a row's (inputs, answer) pairs."""

    log_probs: np.ndarray  # float64 [C] nats
    gold: int  # index of the right pair


@dataclass(frozen=True)
class GoldLikelihoods:
    """The likelihood of the right answer of each of N rows.

    Bits above chance are log2 C + log2 (p_gold^s / sum_c p_c^s) for C pairs, where p is the probability of a
    pair's answer, and s the inverse temperature of ``fit_inverse_temperature``.
    """

    bits: np.ndarray  # float64 [N]: -log2 p of the right answer
    num_bytes: np.ndarray  # int64 [N]: of the right answer
    # None for a task without a choice
    bits_above_chance: np.ndarray | None = None  # float64 [N]
    # float64 [N]: 1 if its log p per byte is the highest, else 0; NaN if one of them is NaN
    ranked_first: np.ndarray | None = None

    def metrics(self) -> dict[str, float]:
        """Return ``bits_per_byte`` of right answers; for a choice also the two metrics of ranking.

        These are ``bits_above_chance`` and ``ranked_accuracy`` [percent].
        """
        metrics = {"bits_per_byte": float(self.bits.sum() / self.num_bytes.sum())}
        if self.bits_above_chance is not None and self.ranked_first is not None:
            metrics["bits_above_chance"] = float(self.bits_above_chance.mean())
            metrics["ranked_accuracy"] = 100 * float(self.ranked_first.mean())
        return metrics

    def example_values(self) -> ExampleValues:
        """Return what is recorded of each row: ``bits`` and ``bytes``; for a choice ``bits`` and ``ranked``.

        ``bits`` of a choice are those above chance.
        """
        if self.bits_above_chance is not None and self.ranked_first is not None:
            return {"bits": self.bits_above_chance, "ranked": self.ranked_first}
        return {"bits": self.bits, "bytes": self.num_bytes}


def gold_likelihoods(
    model: Any, choices: Choices, shard_batch: Callable, calibration: Choices | None = None
) -> GoldLikelihoods:
    """Return the likelihoods of the right answers under a model.

    ``calibration``: other rows, on which the inverse temperature is fitted; None: ``choices``.
    """
    scored = None
    if choices.is_choice and calibration is not None:
        log_probs = pair_log_probs(model, calibration.pairs, shard_batch)
        scored = [ScoredChoice(*row) for row in zip(log_probs, calibration.gold, strict=True)]
    return likelihoods_from_log_probs(pair_log_probs(model, choices.pairs, shard_batch), choices, scored)


def likelihoods_from_log_probs(
    log_probs: Sequence[np.ndarray], choices: Choices, calibration: Sequence[ScoredChoice] | None = None
) -> GoldLikelihoods:
    """Return the likelihoods of the right answers from log p [nats] of each row's pairs.

    ``calibration``: other rows, on which the inverse temperature is fitted; None: the same rows.
    """
    rows = [ScoredChoice(*row) for row in zip(log_probs, choices.gold, strict=True)]
    bits = np.array([-row.log_probs[row.gold] / log(2) for row in rows])
    num_bytes = np.array([sizes[gold] for sizes, gold in zip(choices.num_bytes, choices.gold, strict=True)])
    if not choices.is_choice:
        return GoldLikelihoods(bits, num_bytes)
    inverse_temperature = fit_inverse_temperature(rows if calibration is None else calibration)
    above_chance = np.array([bits_above_chance(row, inverse_temperature) for row in rows])
    is_right = likeliest_pairs(log_probs, choices) == np.array(choices.gold)
    is_undefined = [np.isnan(row.log_probs).any() for row in rows]
    return GoldLikelihoods(bits, num_bytes, above_chance, np.where(is_undefined, np.nan, is_right))


def pair_log_probs(model: Any, pairs: Sequence[Sequence[IdPair]], shard_batch: Callable) -> list[np.ndarray]:
    """Return log p [nats] of each pair's answer given its inputs, [C] for each row.

    Inputs are read once if all pairs of a row have the same.
    """
    has_choice = any(len(row) > 1 for row in pairs)
    if has_choice and all(map(_has_one_context, pairs)):
        contexts = [row[0][0] for row in pairs]
        answers = [[answer for _, answer in row] for row in pairs]
        return candidate_log_probs(model, contexts, answers, shard_batch)
    log_probs = continuation_log_probs(model, list(chain.from_iterable(pairs)), shard_batch)
    ends = np.cumsum([len(row) for row in pairs])
    return np.split(np.asarray(log_probs), ends[:-1])


def _has_one_context(row: Sequence[IdPair]) -> bool:
    """Return whether all pairs of a row have the same inputs."""
    return len({tuple(inputs) for inputs, _ in row}) == 1


def likeliest_pairs(log_probs: Sequence[np.ndarray], choices: Choices) -> np.ndarray:
    """Return the index of the pair whose answer has the highest log p per byte, int64 [N]."""
    rows = zip(log_probs, choices.num_bytes, strict=True)
    return np.array([np.argmax(values / np.array(num_bytes)) for values, num_bytes in rows])


def fit_inverse_temperature(rows: Sequence[ScoredChoice]) -> float:
    """Return the exponent of p, 0 to 4, with which rows have the most bits above chance on average.

    The probabilities of whole texts differ too much or too little for what a small model knows; temperature
    scaling calibrates them (Guo et al. 2017).
    """
    from scipy.optimize import minimize_scalar

    def cost(inverse_temperature: float) -> float:
        return -float(np.mean([bits_above_chance(row, inverse_temperature) for row in rows]))

    return float(minimize_scalar(cost, bounds=(0, 4), method="bounded").x)


def bits_above_chance(row: ScoredChoice, inverse_temperature: float) -> float:
    """Return log2 C + log2 (p_gold^s / sum_c p_c^s) of a row of C pairs; s is the inverse temperature."""
    logits = inverse_temperature * (row.log_probs / log(2))
    highest = logits.max()
    normaliser = np.log2(np.exp2(logits - highest).sum())
    return float(np.log2(len(logits)) + logits[row.gold] - highest - normaliser)

"""Measures how likely a model finds the right answers of a task, in bits, whatever it would answer itself.

Unlike an answer, which a small model has almost never right, these say how far it is from right.
"""

from collections.abc import Callable, Sequence
from math import log
from typing import Any

import numpy as np

from lm.data.tasks.choices import Choices, IdPair
from lm.evaluate.loglikelihood import candidate_log_probs, continuation_log_probs

Values = dict[str, np.ndarray]  # name -> a value of every row


def likelihood_values(model: Any, choices: Choices, put: Callable, fit: Choices | None = None) -> Values:
    """Return ``gold`` [bits] and ``bytes`` of each row's answer; of a choice ``bits`` and ``ranked`` too.

    ``bits`` are those above chance: log2 |C| + log2 p^s of the right pair over the sum of all p^s, where p is
    that of its answer, and s the one ``fit_inverse_temperature`` that suits the rows of ``fit`` best, by default these: a
    small model knows more than its probabilities of whole texts say. ``ranked`` is 1 where the right pair has
    the highest log p a byte, else 0.
    """
    known = None
    if choices.choose and fit is not None:
        known = list(zip(log_probs(model, fit.pairs, put), fit.right, strict=True))
    return values_from_log_probs(log_probs(model, choices.pairs, put), choices, known)


def values_from_log_probs(
    nats: Sequence[np.ndarray], choices: Choices, fit: Sequence[tuple[np.ndarray, int]] | None = None
) -> Values:
    """Return ``likelihood_values`` from log p [nats] of each row's pairs.

    ``fit`` are (log p, right one) of other rows, to find the fit_inverse_temperature by.
    """
    logs = [values / log(2) for values in nats]
    rows = list(zip(logs, choices.right, strict=True))
    values = {
        "gold": np.array([-values[right] for values, right in rows]),
        "bytes": np.array([sizes[right] for sizes, right in zip(choices.sizes, choices.right, strict=True)]),
    }
    if choices.choose:
        sharp = fit_inverse_temperature(
            rows if fit is None else [(values / log(2), right) for values, right in fit]
        )
        values["bits"] = np.array([bits_above_chance(sharp * values, right) for values, right in rows])
        ranked = likeliest(nats, choices) == np.array(choices.right)
        values["ranked"] = ranked.astype(np.float64)
    return values


def likeliest(nats: Sequence[np.ndarray], choices: Choices) -> np.ndarray:
    """Return for every row the index of the pair whose answer has the highest log p a byte, int64 [N]."""
    pairs = zip(nats, choices.sizes, strict=True)
    return np.array([np.argmax(values / np.array(sizes)) for values, sizes in pairs])


def log_probs(model: Any, pairs: Sequence[Sequence[IdPair]], put: Callable) -> list[np.ndarray]:
    """Return log p [nats] of each pair's answer given its inputs: [C] of every row.

    Inputs are read once where all pairs of a row have the same.
    """
    contexts = [{tuple(inputs) for inputs, _ in row} for row in pairs]
    if all(len(one) == 1 for one in contexts) and any(len(row) > 1 for row in pairs):
        answers = [[answer for _, answer in row] for row in pairs]
        return candidate_log_probs(model, [row[0][0] for row in pairs], answers, put)
    flat = continuation_log_probs(model, [pair for row in pairs for pair in row], put)
    return np.split(np.asarray(flat), np.cumsum([len(row) for row in pairs])[:-1])


def fit_inverse_temperature(rows: Sequence[tuple[np.ndarray, int]]) -> float:
    """Return the power of p, 0 to 4, by which rows have the most bits above chance on average.

    A row is (log2 p [C] of its candidates, the right one).
    """
    from scipy.optimize import minimize_scalar

    def cost(power: float) -> float:
        return -float(np.mean([bits_above_chance(power * logs, right) for logs, right in rows]))

    return float(minimize_scalar(cost, bounds=(0, 4), method="bounded").x)


def bits_above_chance(logs: np.ndarray, right: int) -> float:
    """Return the bits above chance of the right candidate, from log2 p of all candidates [C]."""
    highest = logs.max()
    return float(np.log2(len(logs)) + logs[right] - highest - np.log2(np.exp2(logs - highest).sum()))


def likelihood_metrics(values: Values) -> dict[str, float]:
    """Return ``bits_per_byte`` of right answers.

    Of a choice also ``bits_above_chance`` and ``ranked_accuracy`` [percent].
    """
    metrics = {"bits_per_byte": float(values["gold"].sum() / values["bytes"].sum())}
    if "bits" in values:
        metrics["bits_above_chance"] = float(values["bits"].mean())
        metrics["ranked_accuracy"] = 100 * float(values["ranked"].mean())
    return metrics


def example_values(values: Values) -> Values:
    """Return what is kept of every row: ``bits`` and ``ranked`` of a choice, else ``bits`` and ``bytes``."""
    if "bits" in values:
        return {"bits": values["bits"], "ranked": values["ranked"]}
    return {"bits": values["gold"], "bytes": values["bytes"]}

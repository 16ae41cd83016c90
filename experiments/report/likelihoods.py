"""How likely language models find held-out documents: at the end, after equal time, in longer rows."""

from collections.abc import Iterable, Sequence
from math import exp, inf

from experiments.report.columns import Score
from experiments.runs.result import Result

# what is shown -> the property of ``Likelihood``, and its digits
MEASURES = {
    "perplexity a word": ("word_perplexity", 1),
    "perplexity a token": ("perplexity", 1),
    "bits a byte": ("bits_per_byte", 3),
}


def likelihood_score(seeds: Iterable[Result], measure: str, seconds: float = inf) -> Score | None:
    """A property of the likelihood over the seeds of a row, after so much training."""
    likelihoods = (run.likelihood(seconds) for run in seeds)
    return Score.of(getattr(x, measure) for x in likelihoods if x is not None)


def quickest(rows: Iterable[Sequence[Result]]) -> float | None:
    """How long the quickest row trained, of those that were evaluated on the way; None: none was [s]."""
    trained = [[run for run in seeds if len(run.likelihoods) > 1] for seeds in rows]
    return min(
        (max(run.likelihoods[-1]["seconds"] for run in runs) for runs in trained if runs), default=None
    )


def learning_curve(run: Result) -> list[tuple[float, float]]:
    """(seconds of training, bits a byte) at each evaluation."""
    times = [each["seconds"] for each in run.likelihoods]
    found = [(seconds, run.likelihood(seconds)) for seconds in times]
    return [(seconds, likelihood.bits_per_byte) for seconds, likelihood in found if likelihood is not None]


def perplexities(runs: Iterable[Result]) -> dict[int, Score]:
    """Length of rows [x that of training] -> perplexity of held-out text in such rows, over the seeds."""
    losses: dict[int, list[float]] = {}
    for run in runs:
        for times, loss in run.length_losses.items():
            losses.setdefault(int(times), []).append(exp(loss))
    return {times: score for times, x in losses.items() if (score := Score.of(x))}

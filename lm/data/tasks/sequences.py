"""Copy and reverse sequences of random words: a task for each range of lengths, so that scores are by length.

They show the bottleneck of recurrent encoder-decoders: a decoder that starts from one vector knows less of a
longer text, one with attention as much of any (Sutskever et al. 2014; Bahdanau et al. 2015).
"""

from collections.abc import Callable

from lm import metrics
from lm.data.documentation.word_sequences import MAX_SEQUENCE_LENGTHS
from lm.data.tasks.task import Row, Task

TARGETS_LENGTH = 40  # the same for all, so that they share compiled programs; EOS included [tokens]


def backwards(text: str) -> str:
    """Return the words in reverse order."""
    return " ".join(reversed(text.split()))


def _rewriting(name: str, longest: int, answer: Callable[[str], str]) -> Task:
    """Return a task to write ``answer`` of a sequence of ``longest`` // 2 + 1 to ``longest`` words.

    The score is the accuracy of words in their places.
    """

    def to_text(row: Row) -> tuple[str, str]:
        return f"{name}: {row['text']}", answer(row["text"])

    return Task(
        f"{name}-{longest}",
        f"documentation/sequences-{longest}",
        f"{name}-{longest}",
        lambda row: answer(row["text"]),
        {"word_accuracy": metrics.word_accuracy, "exact_match": metrics.accuracy},
        to_text,
        unscored_metrics=("exact_match",),
        report="report",
        targets_length=TARGETS_LENGTH,
    )


COPY = tuple(_rewriting("copy", longest, str) for longest in MAX_SEQUENCE_LENGTHS)
REVERSE = tuple(_rewriting("reverse", longest, backwards) for longest in MAX_SEQUENCE_LENGTHS)

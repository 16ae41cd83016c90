"""Tasks to copy and to reverse sequences of random words, one for each range of lengths.

They show the bottleneck of recurrent encoder-decoders: a decoder that starts from one vector fails on longer
sequences, and attention helps (Sutskever et al. 2014; Bahdanau et al. 2015).
"""

from collections.abc import Callable

from lm import metrics
from lm.data.documentation.word_sequences import MAX_SEQUENCE_LENGTHS
from lm.data.tasks.task import Row, Task

TARGETS_LENGTH = 40  # for all lengths, so that they share compiled programs; EOS included [tokens]


def reverse_words(text: str) -> str:
    """Return the words in reverse order."""
    return " ".join(reversed(text.split()))


def _sequence_task(name: str, max_length: int, answer: Callable[[str], str]) -> Task:
    """Return a task whose target is ``answer(sequence)``, for max_length // 2 + 1 to max_length words.

    The score is the share of words that are right at their position.
    """

    def to_text(row: Row) -> tuple[str, str]:
        return f"{name}: {row['text']}", answer(row["text"])

    return Task(
        f"{name}-{max_length}",
        f"documentation/sequences-{max_length}",
        f"{name}-{max_length}",
        lambda row: answer(row["text"]),
        {"word_accuracy": metrics.word_accuracy, "exact_match": metrics.accuracy},
        to_text,
        unscored_metrics=("exact_match",),
        report="report",
        targets_length=TARGETS_LENGTH,
    )


COPY = tuple(_sequence_task("copy", length, str) for length in MAX_SEQUENCE_LENGTHS)
REVERSE = tuple(_sequence_task("reverse", length, reverse_words) for length in MAX_SEQUENCE_LENGTHS)

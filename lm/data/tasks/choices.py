"""What the likelihoods of a task are measured of: answers to choose from, or the right one alone, as ids."""

from collections.abc import Sequence
from dataclasses import dataclass

from lm.data.tasks.task import Row, Task
from lm.data.text.vocabulary import EOS, Vocabulary

IdPair = tuple[Sequence[int], Sequence[int]]


@dataclass(frozen=True)
class Choices:
    """Of every row of a task the pairs to choose from, the bytes of their answers, and which pair is right.

    A pair is the ids of inputs and of an answer, EOS included.

    Rows with one pair let choose nothing: how likely their answer is counts alone.
    """

    pairs: Sequence[Sequence[IdPair]]
    sizes: Sequence[Sequence[int]]
    right: Sequence[int]

    @property
    def choose(self) -> bool:
        return any(len(pairs) > 1 for pairs in self.pairs)


def choices_of(
    task: Task, rows: Sequence[Row], vocabulary: Vocabulary, inputs_length: int, targets_length: int
) -> Choices:
    """The likelihoods to measure of ``rows``, as ids cut to these lengths, EOS counted, as in training."""

    def ids(text: str, length: int) -> list[int]:
        return [*vocabulary.encode(text)[: length - 1], EOS]

    pairs, sizes, places = [], [], []
    for row in rows:
        texts, right = task.choices(row)
        pairs.append([(ids(inputs, inputs_length), ids(answer, targets_length)) for inputs, answer in texts])
        sizes.append([answer_bytes(answer, ids(answer, targets_length), vocabulary) for _, answer in texts])
        places.append(right)
    return Choices(pairs, sizes, places)


def answer_bytes(answer: str, ids: Sequence[int], vocabulary: Vocabulary) -> int:
    """UTF-8 bytes of an answer, or of what is left of it when it was cut; 1 at least."""
    whole = len(vocabulary.encode(answer)) < len(ids)
    return max(len((answer if whole else vocabulary.decode(ids)).encode()), 1)

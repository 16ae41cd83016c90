"""What the likelihoods of a task are measured of: answers to choose from, or the right one alone, as ids."""

from collections.abc import Sequence
from dataclasses import dataclass

from lm.data.tasks.task import Row, Task
from lm.tokenizers.tokenizer import T5_FRAME, TextFrame, Vocabulary

IdPair = tuple[Sequence[int], Sequence[int]]


@dataclass(frozen=True)
class Choices:
    """Of every row of a task the pairs to choose from, the bytes of their answers, and which pair is right.

    A pair is the ids of inputs and of an answer, with all that frames them.

    Rows with one pair let choose nothing: how likely their answer is counts alone.
    """

    pairs: Sequence[Sequence[IdPair]]
    sizes: Sequence[Sequence[int]]
    right: Sequence[int]

    @property
    def choose(self) -> bool:
        return any(len(pairs) > 1 for pairs in self.pairs)


def choices_of(
    task: Task,
    rows: Sequence[Row],
    vocabulary: Vocabulary,
    lengths: tuple[int, int],
    frame: TextFrame = T5_FRAME,
) -> Choices:
    """The likelihoods to measure of ``rows``, framed as in training.

    ``lengths``: to which inputs and answers are cut, all that frames them counted [tokens].
    """
    inputs_length, targets_length = lengths

    def ids(text: str, length: int) -> list[int]:
        return [*[*frame.before, *vocabulary.encode(text)][: length - 1], frame.eos]

    pairs, sizes, places = [], [], []
    for row in rows:
        texts, right = task.choices(row)
        pairs.append([(ids(inputs, inputs_length), ids(answer, targets_length)) for inputs, answer in texts])
        kept = [ids(answer, targets_length)[len(frame.before) :] for _, answer in texts]
        sizes.append(
            [answer_bytes(*pair, vocabulary) for pair in zip((x for _, x in texts), kept, strict=True)]
        )
        places.append(right)
    return Choices(pairs, sizes, places)


def answer_bytes(answer: str, ids: Sequence[int], vocabulary: Vocabulary) -> int:
    """UTF-8 bytes of an answer, or of what is left of it when it was cut; 1 at least."""
    whole = len(vocabulary.encode(answer)) < len(ids)
    return max(len((answer if whole else vocabulary.decode(ids)).encode()), 1)

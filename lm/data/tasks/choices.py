"""The answers, as token ids, whose likelihoods a task compares, or the right answer alone."""

from collections.abc import Sequence
from dataclasses import dataclass

from lm.data.tasks.task import Row, Task
from lm.tokenizers.tokenizer import T5_BOUNDARY_TOKENS, BoundaryTokens, Tokenizer

IdPair = tuple[Sequence[int], Sequence[int]]


@dataclass(frozen=True)
class Choices:
    """The (inputs, answer) pairs of each row of a task that are ranked by the likelihood of the answer.

    A pair is token ids with their special tokens. In a row with one pair there is no choice: only the
    likelihood of its answer counts.
    """

    pairs: Sequence[Sequence[IdPair]]
    sizes: Sequence[Sequence[int]]  # of the answer of each pair [bytes]
    right: Sequence[int]  # index of the right pair of each row

    @property
    def choose(self) -> bool:
        return any(len(pairs) > 1 for pairs in self.pairs)


def choices_of(
    task: Task,
    rows: Sequence[Row],
    tokenizer: Tokenizer,
    lengths: tuple[int, int],
    boundary: BoundaryTokens = T5_BOUNDARY_TOKENS,
) -> Choices:
    """Return the pairs of ``rows``, with special tokens as in training.

    ``lengths``: the tokens to which inputs and answers are truncated, special tokens included.
    """
    inputs_length, targets_length = lengths

    def ids(text: str, length: int) -> list[int]:
        return [*[*boundary.prefix, *tokenizer.encode(text)][: length - 1], boundary.eos]

    pairs, sizes, places = [], [], []
    for row in rows:
        texts, right = task.choices(row)
        pairs.append([(ids(inputs, inputs_length), ids(answer, targets_length)) for inputs, answer in texts])
        kept = [ids(answer, targets_length)[len(boundary.prefix) :] for _, answer in texts]
        sizes.append(
            [answer_bytes(*pair, tokenizer) for pair in zip((x for _, x in texts), kept, strict=True)]
        )
        places.append(right)
    return Choices(pairs, sizes, places)


def answer_bytes(answer: str, ids: Sequence[int], tokenizer: Tokenizer) -> int:
    """Return the UTF-8 bytes of an answer, or of what is left of it if it was truncated; at least 1."""
    whole = len(tokenizer.encode(answer)) < len(ids)
    return max(len((answer if whole else tokenizer.decode(ids)).encode()), 1)

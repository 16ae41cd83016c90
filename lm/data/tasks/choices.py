"""A task's answers as token ids: those whose likelihoods are compared, or the right answer alone."""

from collections.abc import Sequence
from dataclasses import dataclass, replace

from lm.data.tasks.task import Row, Task
from lm.tokenizers.tokenizer import T5_BOUNDARY_TOKENS, BoundaryTokens, Tokenizer

IdPair = tuple[Sequence[int], Sequence[int]]  # inputs and answer


@dataclass(frozen=True)
class Choices:
    """For each row, the (inputs, answer) pairs that are ranked by the likelihood of the answer.

    The token ids include special tokens. A row with one pair has no choice: only the likelihood of its answer
    is measured.
    """

    pairs: Sequence[Sequence[IdPair]]
    num_bytes: Sequence[Sequence[int]]  # of the answer of each pair
    gold: Sequence[int]  # index of the right pair in each row

    @property
    def is_choice(self) -> bool:
        """Return whether any row has several pairs."""
        return any(len(pairs) > 1 for pairs in self.pairs)


def encode_choices(
    task: Task,
    rows: Sequence[Row],
    tokenizer: Tokenizer,
    lengths: tuple[int, int],
    boundary: BoundaryTokens = T5_BOUNDARY_TOKENS,
) -> Choices:
    """Return the choices of ``rows``, with special tokens as in training.

    ``lengths``: the tokens to which inputs and answers are truncated, special tokens included.
    """
    inputs_length, targets_length = lengths

    def encode(text: str, length: int) -> list[int]:
        ids = [*boundary.prefix, *tokenizer.encode(text)]
        return [*ids[: length - 1], boundary.eos]

    all_pairs, all_num_bytes, gold = [], [], []
    for row in rows:
        texts, index = task.choices(row)
        pairs, num_bytes = [], []
        for inputs, answer in texts:
            answer_ids = encode(answer, targets_length)
            pairs.append((encode(inputs, inputs_length), answer_ids))
            num_bytes.append(answer_bytes(answer, answer_ids[len(boundary.prefix) :], tokenizer))
        all_pairs.append(pairs)
        all_num_bytes.append(num_bytes)
        gold.append(index)
    return Choices(all_pairs, all_num_bytes, gold)


def shuffle_inputs(choices: Choices) -> Choices:
    """Return the choices with the inputs of each row replaced by those of the next; answers stay.

    Rows of tasks are in a random order, so that a model which needs the inputs is at chance.
    """
    pairs: list[list[IdPair]] = []
    for row, other in zip(choices.pairs, [*choices.pairs[1:], *choices.pairs[:1]], strict=True):
        inputs = [other[min(index, len(other) - 1)][0] for index in range(len(row))]
        pairs.append([(ids, answer) for ids, (_, answer) in zip(inputs, row, strict=True)])
    return replace(choices, pairs=pairs)


def first_choices(choices: Choices, limit: int) -> Choices:
    """Return the choices of the first ``limit`` rows."""
    return Choices(choices.pairs[:limit], choices.num_bytes[:limit], choices.gold[:limit])


def answer_bytes(answer: str, ids: Sequence[int], tokenizer: Tokenizer) -> int:
    """Return the UTF-8 bytes of an answer, or of its part in ``ids`` if it was truncated; at least 1."""
    is_whole = len(tokenizer.encode(answer)) < len(ids)  # ids end with EOS
    text = answer if is_whole else tokenizer.decode(ids)
    return max(len(text.encode()), 1)

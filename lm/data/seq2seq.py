"""Text-to-text rows: training rows of mixtures of tasks and a corpus, and rows for evaluation."""

import functools
import zlib
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from itertools import pairwise
from typing import Any

import numpy as np

from lm.batch import Batch
from lm.config.base import SettingError
from lm.data.batches import PickledWithoutCache, split_batches
from lm.data.checks import check_architecture
from lm.data.packing import (
    DECODERS,
    Ids,
    MarkedIds,
    PaddedTexts,
    make_packed_batch,
    pack_examples,
    pad_texts,
    round_up,
    row_capacity,
    set_decoder_start,
)
from lm.data.pretraining import DenoisingRows
from lm.data.tasks.task import Row, Task
from lm.objectives.denoising import Lengths, LossName
from lm.objectives.formatting import INPUTS
from lm.tokenizers.tokenizer import T5_BOUNDARY_TOKENS, BoundaryTokens, Tokenizer

Example = tuple[Ids, Ids]  # (inputs, targets), without EOS

ROWS_PER_BLOCK = 128  # rows that are packed together
CORPUS_LENGTH = 2**31  # of a corpus as a task: endless in effect, and below grain's limit of 2^32 [examples]


@dataclass(frozen=True)
class CorpusExamples(Sequence[Example]):
    """A corpus as one task of a mixture: its segments in random order, with new noise in every epoch."""

    source: DenoisingRows

    def __post_init__(self) -> None:
        if not INPUTS[self.source.reader.objective.inputs].ends_with_eos:
            inputs = f"objective.inputs={self.source.reader.objective.inputs!r}"
            raise SettingError(f"{inputs} needs mixing.pretraining='corpus': examples of tasks end with EOS")
        if not self.source.reader.objective.eos_after_each_example:
            found = f"objective.eos={self.source.reader.objective.eos!r}"
            why = "where mixing.pretraining reads tasks too: decoding of an answer stops at EOS"
            raise SettingError(f"{found} should be 'each-example' {why}")

    def __len__(self) -> int:
        return CORPUS_LENGTH

    def __getitem__(self, number: Any) -> Any:
        inputs, targets = self.source.example(number)
        return _without_eos(inputs), _without_eos(targets)


@dataclass(frozen=True)
class EncodedExamples(Sequence[Example]):
    """The rows of a task as (input ids, target ids), encoded when they are read.

    DataError for a row without a label.
    """

    task: Task
    rows: Sequence[Row]
    tokenizer: Tokenizer

    def __len__(self) -> int:
        return len(self.rows)

    def __getitem__(self, index: Any) -> Any:
        row = self.rows[index]
        self.task.check_labels([row], [index])
        inputs, targets = self.task.to_text(row)
        return self.tokenizer.encode(inputs), self.tokenizer.encode(targets)


def _without_eos(example: PaddedTexts) -> MarkedIds:
    count = max(example.lengths[0] - 1, 0)
    return MarkedIds(example.tokens[0, :count], example.content[0, :count])


@dataclass(frozen=True)
class MixtureRows(PickledWithoutCache):
    """Packed rows of examples that are drawn from several tasks in fixed proportions.

    Each task is reshuffled every epoch. A row holds as many successive examples as fit (Raffel et al. 2020,
    section 3.1.2). Inputs and targets that are too long are truncated before their EOS.

    Rows are packed in blocks of ROWS_PER_BLOCK rows. Block b starts at example b x n, where n is the number
    of examples that block 0 holds, so a row can be made without the blocks before it. A block that holds
    fewer than n examples skips the rest, and one that holds more has some that the next repeats: about one
    example in fifty.
    """

    examples_by_task: Mapping[str, Sequence[Example]]
    rates: Mapping[str, float]
    architecture: str
    lengths: Lengths
    seed: int
    boundary: BoundaryTokens = T5_BOUNDARY_TOKENS
    # each example in an encoder's rows is padded to a multiple of it (``FunnelConfig``) [tokens]
    pad_to_multiple_of: int = 1
    loss: LossName = "all-tokens"  # which tokens of a decoder without an encoder have a loss weight

    def __post_init__(self) -> None:
        check_architecture(self.architecture, self.seed, generates=True)
        for name, examples in self.examples_by_task.items():
            if not (rate := self.rates.get(name, 0)) > 0:
                raise SettingError(f"the rate of task {name!r} is {rate} and should be above 0")
            if not len(examples):
                raise SettingError(f"task {name!r} has no examples to train on")
        if not self.examples_by_task:
            raise SettingError("tasks=() names no task to train on")

    @functools.cached_property
    def _dataset(self) -> Any:
        """Return the endless sequence of examples; shuffled before it is repeated, so that epochs differ."""
        import grain

        def endless(name: str) -> grain.MapDataset:
            examples = grain.MapDataset.source(self.examples_by_task[name])
            if isinstance(self.examples_by_task[name], CorpusExamples):  # already shuffled
                return examples.repeat()
            return examples.shuffle(seed=zlib.crc32(f"{self.seed} {name}".encode())).repeat()

        tasks = [endless(name) for name in self.examples_by_task]
        return grain.MapDataset.mix(tasks, [self.rates[name] for name in self.examples_by_task])

    def __call__(self, row_numbers: np.ndarray) -> Batch:
        places = [divmod(number, ROWS_PER_BLOCK) for number in row_numbers.tolist()]
        rows = [self._pack_block(block)[row] for block, row in places]
        examples = [example for row in rows for example in row]
        batch_rows = np.repeat(np.arange(len(rows)), [len(row) for row in rows])
        sides = _batch_sides(examples, self.lengths, self.boundary)
        batch = make_packed_batch(
            *sides,
            batch_rows,
            self.architecture,
            self.lengths,
            len(rows),
            loss=self.loss,
            pad_to_multiple_of=self.pad_to_multiple_of,
        )
        return set_decoder_start(batch, self.boundary.decoder_start)

    @functools.cached_property
    def _pack_block(self) -> Callable[[int], list[list[Example]]]:
        """Return the function that returns the examples of each row of a block, with a cache."""
        return functools.lru_cache(2)(self._pack_block_uncached)

    @functools.cached_property
    def _examples_per_block(self) -> int:
        return sum(map(len, self._pack_block(0)))

    def _pack_block_uncached(self, block: int) -> list[list[Example]]:
        begin = block * self._examples_per_block if block else 0
        examples: list[Example] = []
        starts = np.zeros(1, np.int64)
        while len(starts) < ROWS_PER_BLOCK + 2:  # the last row may have room for more examples
            next_number = begin + len(examples)
            numbers = range(next_number, next_number + ROWS_PER_BLOCK)
            examples += [self._dataset[number] for number in numbers]
            inputs, targets = _batch_sides(examples, self.lengths, self.boundary)
            room = round_up(inputs.lengths, self.pad_to_multiple_of, self.lengths.inputs)
            side_lengths = np.stack([room, targets.lengths], axis=1)
            if self.architecture in DECODERS:
                side_lengths = side_lengths.sum(axis=1, keepdims=True)
            starts = pack_examples(side_lengths, row_capacity(self.architecture, self.lengths))
        return [examples[start:end] for start, end in pairwise(starts[: ROWS_PER_BLOCK + 1].tolist())]


def eval_batches(
    examples: Sequence[Example],
    *,
    architecture: str,
    lengths: Lengths,
    batch_size: int,
    boundary: BoundaryTokens = T5_BOUNDARY_TOKENS,
) -> list[Batch]:
    """Return all examples in order, one per row; rows of padding (segment 0) fill up the last batch."""
    check_architecture(architecture, generates=True)
    parts = split_batches(examples, batch_size)
    batches = [
        make_packed_batch(
            *_batch_sides(part, lengths, boundary), np.arange(len(part)), architecture, lengths, batch_size
        )
        for part in parts
    ]
    return [set_decoder_start(batch, boundary.decoder_start) for batch in batches]


def _batch_sides(
    examples: Sequence[Example], lengths: Lengths, boundary: BoundaryTokens
) -> tuple[PaddedTexts, PaddedTexts]:
    """Return the inputs and the targets of examples, truncated to ``lengths``, with EOS."""
    inputs = pad_texts([inputs for inputs, _ in examples], lengths.inputs, boundary)
    return inputs, pad_texts([targets for _, targets in examples], lengths.targets, boundary)

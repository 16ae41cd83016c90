"""Text-to-text rows: of mixtures of tasks, one of which may be a corpus, and for evaluation."""

import functools
import zlib
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from itertools import pairwise
from typing import Any

import numpy as np

from lm.batch import Batch
from lm.config.base import SettingError
from lm.data.batches import PickledWithoutCaches, split_into_batches
from lm.data.checks import check_architecture
from lm.data.packing import (
    DECODERS,
    Ids,
    IdsWithContent,
    Ragged,
    examples_to_batch,
    fill_rows,
    replace_start,
    row_capacity,
    to_ragged,
)
from lm.data.pretraining import DenoisingRows
from lm.data.tasks.task import Row, Task
from lm.objectives.denoising import Lengths
from lm.tokenizers.tokenizer import T5_FRAME, TextFrame, Vocabulary

Example = tuple[Ids, Ids]  # (inputs, targets), without EOS

BLOCK_ROWS = 128  # rows that are packed together: a row begins where the one before it is full [rows]
CORPUS_EXAMPLES = 2**31  # length of a corpus as a task, in effect endless; grain numbers fewer than 2^32


@dataclass(frozen=True)
class CorpusTask(Sequence[Example]):
    """A corpus as one task of a mixture: its segments in random order, with new noise in every epoch."""

    source: DenoisingRows

    def __post_init__(self) -> None:
        if self.source.reader.objective.eos_between_documents:
            raise SettingError(
                "objective.eos='between-documents' should be 'each-example' where mixing.pretraining reads "
                "tasks too: an example of a mixture ends with EOS"
            )

    def __len__(self) -> int:
        return CORPUS_EXAMPLES

    def __getitem__(self, number: Any) -> Any:
        inputs, targets = self.source.example(number)
        return _without_eos(inputs), _without_eos(targets)


@dataclass(frozen=True)
class EncodedTask(Sequence[Example]):
    """The examples of a task as (input ids, target ids), encoded when they are read.

    Reading one without a label raises DataError.
    """

    task: Task
    rows: Sequence[Row]
    vocabulary: Vocabulary

    def __len__(self) -> int:
        return len(self.rows)

    def __getitem__(self, index: Any) -> Any:
        row = self.rows[index]
        self.task.check_labels([row], [index])
        inputs, targets = self.task.to_text(row)
        return self.vocabulary.encode(inputs), self.vocabulary.encode(targets)


def _without_eos(example: Ragged) -> IdsWithContent:
    count = max(example.lengths[0] - 1, 0)
    return IdsWithContent(example.tokens[0, :count], example.content[0, :count])


@dataclass(frozen=True)
class MixtureRows(PickledWithoutCaches):
    """Packed rows of examples that are drawn from several tasks in fixed proportions.

    Each task is reshuffled every epoch. A row holds as many successive examples as fit (Raffel et al. 2020,
    section 3.1.2). Inputs and targets that are too long lose their end, but keep their EOS.

    Rows are packed in blocks of BLOCK_ROWS. If the first block holds n examples, block k begins with example
    k * n. So a row is made without all rows before it. As other blocks hold a few examples more or fewer than
    n, where two blocks meet one example in fifty or so is left out or comes twice.
    """

    examples_by_task: Mapping[str, Sequence[Example]]
    rates: Mapping[str, float]
    architecture: str
    lengths: Lengths
    seed: int
    frame: TextFrame = T5_FRAME

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
        """Return the endless sequence of examples.

        Tasks are shuffled before they are repeated, since grain then gives each epoch another order.
        """
        import grain

        def endless(name: str) -> grain.MapDataset:
            examples = grain.MapDataset.source(self.examples_by_task[name])
            if isinstance(self.examples_by_task[name], CorpusTask):  # is shuffled already
                return examples.repeat()
            return examples.shuffle(seed=zlib.crc32(f"{self.seed} {name}".encode())).repeat()

        tasks = [endless(name) for name in self.examples_by_task]
        return grain.MapDataset.mix(tasks, [self.rates[name] for name in self.examples_by_task])

    def __call__(self, numbers: np.ndarray) -> Batch:
        rows = [self._block(number // BLOCK_ROWS)[number % BLOCK_ROWS] for number in numbers.tolist()]
        examples = [example for row in rows for example in row]
        row_of_example = np.repeat(np.arange(len(rows)), [len(row) for row in rows])
        inputs, targets = _inputs_and_targets(examples, self.lengths, self.frame)
        batch = examples_to_batch(inputs, targets, row_of_example, self.architecture, self.lengths, len(rows))
        return replace_start(batch, self.frame.start)

    @functools.cached_property
    def _block(self) -> Callable[[int], list[list[Example]]]:
        """Return the function from a block's number to the examples of its rows, with a cache."""
        return functools.lru_cache(2)(self._fill_block)

    @functools.cached_property
    def _examples_per_block(self) -> int:
        return sum(map(len, self._block(0)))

    def _fill_block(self, block: int) -> list[list[Example]]:
        first = block * self._examples_per_block if block else 0
        examples: list[Example] = []
        starts = np.zeros(1, np.int64)
        while len(starts) < BLOCK_ROWS + 2:  # one row more, since the last one may have room left
            count = first + len(examples)
            examples += [self._dataset[number] for number in range(count, count + BLOCK_ROWS)]
            inputs, targets = _inputs_and_targets(examples, self.lengths, self.frame)
            sizes = np.stack([inputs.lengths, targets.lengths], axis=1)
            if self.architecture in DECODERS:
                sizes = sizes.sum(axis=1, keepdims=True)
            starts = fill_rows(sizes, row_capacity(self.architecture, self.lengths))
        return [examples[start:end] for start, end in pairwise(starts[: BLOCK_ROWS + 1].tolist())]


def eval_batches(
    examples: Sequence[Example],
    *,
    architecture: str,
    lengths: Lengths,
    batch_size: int,
    frame: TextFrame = T5_FRAME,
) -> list[Batch]:
    """Return all examples in order, one per row; rows of padding (segment 0) fill up the last batch."""
    check_architecture(architecture, generates=True)
    batches = []
    for some in split_into_batches(examples, batch_size):
        inputs, targets = _inputs_and_targets(some, lengths, frame)
        rows = np.arange(len(some))
        batch = examples_to_batch(inputs, targets, rows, architecture, lengths, batch_size)
        batches.append(replace_start(batch, frame.start))
    return batches


def _inputs_and_targets(
    examples: Sequence[Example], lengths: Lengths, frame: TextFrame
) -> tuple[Ragged, Ragged]:
    """Return the inputs and the targets of examples, truncated to ``lengths``, with EOS."""
    inputs = to_ragged([inputs for inputs, _ in examples], lengths.inputs, frame)
    return inputs, to_ragged([targets for _, targets in examples], lengths.targets, frame)

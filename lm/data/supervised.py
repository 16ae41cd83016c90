"""Rows of tasks as text: mixtures of tasks, with a corpus among them if there is one, and evaluation sets."""

import functools
import zlib
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from lm.data.batches import Batch, Uncached, in_parts
from lm.data.checks import check_architecture
from lm.data.denoised import Denoised
from lm.data.objectives import Lengths
from lm.data.packing import Ids, Marked, Ragged, features, ragged
from lm.settings import SettingError

Example = tuple[Ids, Ids]  # of inputs and of targets, without EOS

PASSES = 1_000  # over the corpus, before the noise of a task in a mixture repeats itself


@dataclass(frozen=True)
class Unsupervised(Sequence[Example]):
    """A corpus as one task of a mixture: each segment many times, each time with other noise.

    grain shuffles fewer than 2^32 examples; a mixture that outlasts PASSES over the corpus repeats its noise.
    """

    source: Denoised

    def __post_init__(self) -> None:
        if self.source.corpus.objective.separates:
            why = "where mixing.pretraining reads tasks too: an example of a mixture ends with EOS"
            raise SettingError(f"objective.eos='between-documents' should be 'each-example' {why}")

    def __len__(self) -> int:
        count = len(self.source.corpus.segments.starts)
        return count * max(min(PASSES, 2**31 // count), 1)

    def __getitem__(self, number: Any) -> Any:
        numbers = np.array([number])
        segments = numbers % len(self.source.corpus.segments.starts)
        inputs, targets = self.source.examples(segments, numbers)
        return _without_eos(inputs), _without_eos(targets)


def _without_eos(example: Ragged) -> Marked:
    count = max(example.lengths[0] - 1, 0)
    return Marked(example.tokens[0, :count], example.content[0, :count])


@dataclass(frozen=True)
class Mixed(Uncached):
    """One example of a task a row, tasks in fixed proportions, each reshuffled every epoch.

    Inputs and targets that are too long lose their end, but keep their EOS.
    """

    examples_by_task: Mapping[str, Sequence[Example]]
    rates: Mapping[str, float]
    architecture: str
    lengths: Lengths
    seed: int

    def __post_init__(self) -> None:
        check_architecture(self.architecture, self.seed, writes=True)
        for name, examples in self.examples_by_task.items():
            if not (rate := self.rates.get(name, 0)) > 0:
                raise SettingError(f"the rate of task {name!r} is {rate} and should be above 0")
            if not len(examples):
                raise SettingError(f"task {name!r} has no examples to train on")
        if not self.examples_by_task:
            raise SettingError("tasks=() names no task to train on")

    @functools.cached_property
    def _dataset(self) -> Any:
        """All rows there will ever be, by number; shuffled before repeated, each epoch has its own order."""
        import grain

        def endless(name: str) -> grain.MapDataset:
            seed = zlib.crc32(f"{self.seed} {name}".encode())
            return grain.MapDataset.source(self.examples_by_task[name]).shuffle(seed=seed).repeat()

        tasks = [endless(name) for name in self.examples_by_task]
        return grain.MapDataset.mix(tasks, [self.rates[name] for name in self.examples_by_task])

    def __call__(self, numbers: np.ndarray) -> Batch:
        examples = [self._dataset[number] for number in numbers.tolist()]
        return _unpacked(examples, self.architecture, self.lengths, len(examples))


def eval_batches(
    examples: Sequence[Example], *, architecture: str, lengths: Lengths, batch_size: int
) -> list[Batch]:
    """All examples in order, one a row; the last batch is filled up with rows of padding (segment 0)."""
    check_architecture(architecture, writes=True)
    parts = in_parts(examples, batch_size)
    return [_unpacked(part, architecture, lengths, batch_size) for part in parts]


def _unpacked(examples: Sequence[Example], architecture: str, lengths: Lengths, batch_size: int) -> Batch:
    inputs = ragged([inputs for inputs, _ in examples], lengths.inputs)
    targets = ragged([targets for _, targets in examples], lengths.targets)
    return features(inputs, targets, np.arange(len(examples)), architecture, lengths, batch_size)

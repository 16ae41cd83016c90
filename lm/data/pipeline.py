"""Settings -> batches. A batch is a pure function of (seed, step), and so is each of its rows.

A batch function is ``batches(step, rows)``: rows ``rows`` of the global batch of that step. A host asks for
those that its devices hold, which need not be one block; who asks, and in which order, changes nothing. The
step is the only state there is.

grain is imported where it is used: it brings jax along, which nothing here needs.
"""

import functools
import zlib
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, fields
from typing import Any, NamedTuple

import numpy as np

from lm.data.checks import check_batches, check_objective
from lm.data.masked import Masked, masked_lengths
from lm.data.objectives import Lengths, Objective, Ragged, denoise, lengths, sizes, uniforms
from lm.data.packing import ENCODER_DECODERS, features, fill_rows, ragged, row_room
from lm.data.segments import Running, Segments, full, generator, running
from lm.data.text.tokens import Tokens
from lm.data.text.vocabulary import Vocabulary
from lm.settings import SettingError

Batch = dict[str, np.ndarray]
BatchFunction = Callable[[int, slice], Batch]
Example = tuple[Sequence[int], Sequence[int]]  # ids of inputs and of targets, without EOS

AHEAD = 2  # batches prepared while the device works
PASSES = 1_000  # over the corpus, before the noise of a task in a mixture repeats itself


class Plan(NamedTuple):
    """One epoch: the order of its segments [segments]; each row's first place in it [rows + 1]; draws
    [segments].
    """

    order: np.ndarray
    rows: np.ndarray | None  # None: one segment a row
    draws: np.ndarray | None


@dataclass(frozen=True)
class Denoised:
    """The batch function of pre-training: every segment once an epoch, in an order and with noise of its own.

    Segments of concatenated documents fill a row each. Those of documents kept apart are packed, in the
    epoch's order, and since their noise decides how many fit, finding a row of epoch e takes the plans of the
    epochs before it: made once per process, at about half a second per million segments.
    """

    tokens: Tokens
    objective: Objective
    vocabulary: Vocabulary
    architecture: str
    limits: Lengths
    batch_size: int
    seed: int

    def __getstate__(self) -> dict[str, Any]:
        # plans are made anew elsewhere
        return {field.name: getattr(self, field.name) for field in fields(self)}

    def __call__(self, step: int, rows: slice) -> Batch:
        begin, end, _ = rows.indices(self.batch_size)
        parts = list(self._locate(step * self.batch_size + begin, step * self.batch_size + end))
        segments, numbers, draws = (np.concatenate(part) for part in list(zip(*parts, strict=True))[:3])
        row_of = np.repeat(np.arange(end - begin), np.concatenate([part[3] for part in parts]))
        inputs, targets = self.examples(segments, numbers, draws)
        return features(
            inputs,
            targets,
            row_of,
            architecture=self.architecture,
            lengths=self.limits,
            batch_size=end - begin,
        )

    def examples(self, segments: np.ndarray, numbers: np.ndarray, draws: np.ndarray) -> tuple[Ragged, Ragged]:
        """Segments [B], denoised with the random numbers of examples ``numbers`` [B], of which ``draws`` are
        first.
        """
        starts, counts = self.segments.starts[segments], self.segments.lengths[segments]
        tokens = self.text.read(starts[:, None] + np.arange(self.limits.raw))
        u = uniforms(self.seed, numbers, self.objective.draws, self.limits.raw)
        if not self.objective.concatenates:
            u[:, 0, 0] = draws  # which the plan had to know of all examples at once
        text = Ragged(tokens, counts.astype(np.int32))
        return denoise(self.objective, text, u, self.vocabulary, self.limits)

    @functools.cached_property
    def segments(self) -> Segments:
        """Documents split into at most ``raw`` tokens each, after being strung together where the objective
        does so.
        """
        strung = np.array([0, self.text.length])
        return full(strung if self.objective.concatenates else self.tokens.offsets, self.limits.raw)

    @functools.cached_property
    def text(self) -> Running:
        separator = self.vocabulary.eos if self.objective.separates else None
        return running(self.tokens.tokens, self.tokens.offsets, separator)

    @functools.cached_property
    def plan(self) -> Callable[[int], Plan]:
        return functools.lru_cache(maxsize=2)(self._plan)

    @functools.cached_property
    def rows_of_epoch(self) -> Callable[[int], int]:
        return functools.cache(lambda epoch: len(self.plan(epoch).rows) - 1)

    def _plan(self, epoch: int) -> Plan:
        count = len(self.segments.starts)
        numbers = generator(self.seed, epoch)
        order = numbers.permutation(count)
        if self.objective.concatenates:
            return Plan(order, None, None)
        draws = numbers.random(count, dtype=np.float32)
        sides = np.stack(sizes(self.objective, self.segments.lengths[order], draws), axis=1)
        if self.architecture not in ENCODER_DECODERS:
            sides = sides.sum(axis=1, keepdims=True)
        return Plan(order, fill_rows(sides, row_room(self.architecture, self.limits)), draws)

    def _locate(self, begin: int, end: int) -> Iterator[tuple[np.ndarray, ...]]:
        """Rows begin to end of all rows there will ever be -> by epoch: segments, numbers, draws, how many a
        row.
        """
        epoch, count = 0, len(self.segments.starts)
        if self.objective.concatenates:
            epoch, begin, end = begin // count, begin % count, begin % count + end - begin
        while begin < end:
            rows = count if self.objective.concatenates else self.rows_of_epoch(epoch)
            if begin < rows:
                yield self._rows(epoch, begin, min(end, rows))
            epoch, begin, end = epoch + 1, max(begin - rows, 0), end - rows

    def _rows(self, epoch: int, begin: int, end: int) -> tuple[np.ndarray, ...]:
        plan = self.plan(epoch)
        bounds = np.arange(begin, end + 1) if plan.rows is None else plan.rows[begin : end + 1]
        places = np.arange(bounds[0], bounds[-1])
        draws = np.zeros(len(places), np.float32) if plan.draws is None else plan.draws[places]
        return plan.order[places], epoch * len(plan.order) + places, draws, np.diff(bounds)


def pretraining_batches(
    tokens: Tokens,
    objective: Objective,
    vocabulary: Vocabulary,
    *,
    architecture: str,
    inputs_length: int,
    batch_size: int,
    seed: int,
) -> Denoised | Masked:
    """The batch function of a corpus under an objective; every setting is checked here."""
    check_batches(architecture, batch_size, seed)
    check_objective(objective, architecture, vocabulary)
    if architecture == "encoder":
        return Masked(
            tokens, objective, vocabulary, masked_lengths(objective, inputs_length), batch_size, seed
        )
    limits = lengths(objective, inputs_length)
    if objective.noise == "suffix" and objective.inputs == "drop" and architecture not in ENCODER_DECODERS:
        # both EOS in one row: two full examples then fill it
        limits = limits._replace(raw=max(limits.raw - 1, 1))
    return Denoised(tokens, objective, vocabulary, architecture, limits, batch_size, seed)


@dataclass(frozen=True)
class Unsupervised:
    """A corpus as one task of a mixture: each segment many times, each time with other noise.

    grain shuffles fewer than 2^32 examples; a mixture that outlasts PASSES over the corpus repeats their
    noise.
    """

    source: Denoised

    def __post_init__(self):
        if self.source.objective.separates:
            raise SettingError(
                "objective.eos='between-documents' should be 'each-example' where mixing.pretraining reads "
                "tasks too: "
                "an example of a mixture ends with EOS"
            )

    def __len__(self) -> int:
        count = len(self.source.segments.starts)
        return count * max(min(PASSES, 2**31 // count), 1)

    def __getitem__(self, number: int) -> Example:
        numbers = np.array([number])
        draws = uniforms(self.source.seed, numbers, 1, 1)[:, 0, 0]
        inputs, targets = self.source.examples(numbers % len(self.source.segments.starts), numbers, draws)
        return inputs.tokens[0, : max(inputs.lengths[0] - 1, 0)], targets.tokens[0, : targets.lengths[0] - 1]


@dataclass(frozen=True)
class Mixed:
    """The batch function of tasks: one example a row, tasks in fixed proportions, each reshuffled every
    epoch.

    Inputs and targets that are too long lose their end, but keep their EOS.
    """

    examples_by_task: Mapping[str, Sequence[Example]]
    rates: Mapping[str, float]
    architecture: str
    lengths: Lengths
    batch_size: int
    seed: int

    def __post_init__(self):
        check_batches(self.architecture, self.batch_size, self.seed, writes=True)
        for name, examples in self.examples_by_task.items():
            if not self.rates.get(name, 0) > 0:
                raise SettingError(
                    f"the rate of task {name!r} is {self.rates.get(name)} and should be above 0"
                )
            if not len(examples):
                raise SettingError(f"task {name!r} has no examples to train on")
        if not self.examples_by_task:
            raise SettingError("tasks=() names no task to train on")

    def __getstate__(self) -> dict[str, Any]:
        return {field.name: getattr(self, field.name) for field in fields(self)}

    @functools.cached_property
    def _dataset(self) -> Any:
        """All rows there will ever be, by number. Shuffling before repeating is what gives each epoch its own
        order.
        """
        import grain

        tasks = [
            grain.MapDataset.source(examples)
            .shuffle(seed=zlib.crc32(f"{self.seed} {name}".encode()))
            .repeat()
            for name, examples in self.examples_by_task.items()
        ]
        return grain.MapDataset.mix(tasks, [self.rates[name] for name in self.examples_by_task])

    def __call__(self, step: int, rows: slice) -> Batch:
        places = range(step * self.batch_size, (step + 1) * self.batch_size)[rows]
        return _unpacked(
            [self._dataset[place] for place in places],
            architecture=self.architecture,
            lengths=self.lengths,
            batch_size=len(places),
        )


def eval_batches(
    examples: Sequence[Example], *, architecture: str, lengths: Lengths, batch_size: int
) -> list[Batch]:
    """All examples in order, one a row; the last batch is filled up with rows of padding (segment 0)."""
    check_batches(architecture, batch_size, writes=True)
    return [
        _unpacked(
            [examples[place] for place in range(start, min(start + batch_size, len(examples)))],
            architecture=architecture,
            lengths=lengths,
            batch_size=batch_size,
        )
        for start in range(0, len(examples), batch_size)
    ]


def _unpacked(examples: Sequence[Example], *, architecture: str, lengths: Lengths, batch_size: int) -> Batch:
    inputs = ragged([inputs for inputs, _ in examples], lengths.inputs)
    targets = ragged([targets for _, targets in examples], lengths.targets)
    rows = np.arange(len(examples))
    return features(inputs, targets, rows, architecture=architecture, lengths=lengths, batch_size=batch_size)


def _of_host(batches: BatchFunction, rows: Sequence[slice], step: int) -> Batch:
    """This host's rows of the step's batch."""
    parts = [batches(int(step), part) for part in rows]
    return {name: np.concatenate([part[name] for part in parts]) for name in parts[0]}


def stream(
    batches: BatchFunction,
    start: int,
    stop: int,
    *,
    rows: Sequence[slice] = (slice(None),),
    workers: int = 0,
) -> Iterator[Batch]:
    """``rows`` of the batches of steps start to stop - 1, made ahead in a thread or in ``workers`` processes.

    With workers the calling script needs its ``if __name__ == "__main__":``, since they import it.
    """
    if workers < 0:
        raise SettingError(f"data.workers={workers} should be 0 or more [processes]")
    return _iterate(functools.partial(_of_host, batches, rows), start, stop, workers)


def _iterate(host: Callable[[int], Batch], start: int, stop: int, workers: int) -> Iterator[Batch]:
    import grain
    from absl import flags

    if start >= stop:
        return
    if not flags.FLAGS.is_parsed():
        flags.FLAGS.mark_as_parsed()  # grain reads flags of its own, which only absl's app.run would parse
    reading = grain.ReadOptions(num_threads=1, prefetch_buffer_size=AHEAD)
    dataset = grain.MapDataset.range(start, stop).map(host).to_iter_dataset(reading)
    if workers:
        dataset = dataset.mp_prefetch(
            grain.MultiprocessingOptions(num_workers=workers, per_worker_buffer_size=AHEAD)
        )
    iterator = iter(dataset)
    try:
        yield from iterator
    finally:
        iterator.close()  # ends the workers of a stream that is not read to its end

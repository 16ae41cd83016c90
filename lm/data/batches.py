"""A batch is a pure function of (seed, step), and so is each of its rows: the step is the only state.

A host asks for the rows that its devices hold, which need not be one block; which host asks, and in which
order, changes nothing. grain is imported where it is used: it imports jax, which nothing else here needs.
"""

import functools
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, fields
from typing import Any, Generic, Protocol, TypeVar

import numpy as np

from lm.batch import Batch, concatenate
from lm.config.base import SettingError
from lm.objectives.denoising import Lengths

BatchFunction = Callable[[int, slice], Batch]
Item = TypeVar("Item")

RECENT = 8  # calls for whole rows that last several steps, whose rows are kept
AHEAD = 2  # batches prepared while the device works
EPOCH = 2**63  # first key of the random numbers of an epoch, beyond those of the examples


@dataclass(frozen=True)
class Uncached:
    """A dataclass that leaves its cached properties behind when it is sent to another process."""

    def __getstate__(self) -> dict[str, Any]:
        return {field.name: getattr(self, field.name) for field in fields(self)}


class RowSource(Protocol):
    """What an objective or a task makes of the rows of batches; it can be sent to another process."""

    @property
    def lengths(self) -> Lengths: ...

    def __call__(self, numbers: np.ndarray) -> Batch:
        """Numbers of successive rows, counted through all epochs, int64 [B] -> their batch of B rows."""


Rows = TypeVar("Rows", bound=RowSource, covariant=True)


@dataclass(frozen=True)
class Batches(Generic[Rows]):
    """The batch function of training: ``batches(step, rows)`` are these rows of that step's global batch."""

    rows: Rows
    batch_size: int  # of all hosts [rows]

    def __post_init__(self) -> None:
        check_size(self.batch_size)

    @property
    def lengths(self) -> Lengths:
        return self.rows.lengths

    def __call__(self, step: int, rows: slice) -> Batch:
        return self.rows(np.arange(step * self.batch_size, (step + 1) * self.batch_size)[rows])


@dataclass(frozen=True)
class LastingRows(Uncached, Generic[Rows]):
    """Rows that last several steps: each reads the next part, with the recurrent state of the one before."""

    rows: Rows  # as long as all parts together
    lengths: Lengths  # of a part
    batch_size: int  # of all hosts [rows]
    steps: int  # parts of a row

    def __call__(self, numbers: np.ndarray) -> Batch:
        step, row = np.divmod(numbers, self.batch_size)
        whole = self.whole(tuple((step // self.steps * self.batch_size + row).tolist()))
        part = np.arange(len(numbers)), step % self.steps
        return whole.map(lambda x: x.reshape(len(x), self.steps, -1)[part])

    @functools.cached_property
    def whole(self) -> Callable[[tuple[int, ...]], Batch]:
        """The whole rows of these numbers; those of the last calls are kept for the next parts."""
        return functools.lru_cache(maxsize=RECENT)(lambda numbers: self.rows(np.array(numbers, np.int64)))


def check_size(batch_size: int) -> None:
    if batch_size < 1:
        raise SettingError(f"batch_size={batch_size} should be at least 1, such as 128 [rows of all hosts]")


def in_parts(rows: Sequence[Item], batch_size: int) -> list[list[Item]]:
    """``rows``, which need not know slices, in batches for evaluation."""
    check_size(batch_size)
    starts = range(0, len(rows), batch_size)
    return [[rows[i] for i in range(start, min(start + batch_size, len(rows)))] for start in starts]


# --- random numbers and orders


def uniforms(seed: np.ndarray | int, rows: np.ndarray, count: int, length: int) -> np.ndarray:
    """float32 [B,count,length] in [0, 1): those of row r are ``Generator(Philox(key=[seed, r]))``'s.

    So an example depends on its seed and number alone, and not on its batch, host or worker. Rows may have
    seeds of their own, int64 [B].
    """
    bits = np.random.Philox(key=[0, 0])
    random, state = np.random.Generator(bits), bits.state
    numbers = np.empty((len(rows), count, length), np.float32)
    for key, out in zip(np.stack(np.broadcast_arrays(seed, rows), axis=1), numbers, strict=True):
        state["state"]["key"][:] = key  # a new state is six times as fast to set as a new generator to make
        bits.state = state
        random.random(out=out, dtype=np.float32)
    return numbers


def generator(seed: int, epoch: int) -> np.random.Generator:
    """Of an epoch's order."""
    return np.random.Generator(np.random.Philox(key=np.array([seed, EPOCH + epoch], np.uint64)))


@functools.lru_cache(maxsize=4)
def _order(seed: int, epoch: int, count: int) -> np.ndarray:
    return generator(seed, epoch).permutation(count)


def shuffled(numbers: np.ndarray, count: int, seed: int) -> np.ndarray:
    """Row numbers, counted through all epochs -> which of ``count`` items each is: all once an epoch."""
    epochs = numbers // count
    items = np.empty(len(numbers), np.int64)
    for epoch in np.unique(epochs).tolist():
        items[epochs == epoch] = _order(seed, epoch, count)[numbers[epochs == epoch] % count]
    return items


# --- streams


def _of_host(batches: BatchFunction, rows: Sequence[slice], step: int) -> Batch:
    """This host's rows of the step's batch."""
    return concatenate([batches(int(step), part) for part in rows])


def stream(
    batches: BatchFunction, start: int, stop: int, *, rows: Sequence[slice] = (slice(None),), workers: int = 0
) -> Iterator[Batch]:
    """``rows`` of the batches of steps start to stop - 1, prepared by a thread or by ``workers`` processes.

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
        options = grain.MultiprocessingOptions(num_workers=workers, per_worker_buffer_size=AHEAD)
        dataset = dataset.mp_prefetch(options)
    iterator = iter(dataset)
    try:
        yield from iterator
    finally:
        iterator.close()  # ends the workers of a stream that is not read to its end

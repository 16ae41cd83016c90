"""A batch is a pure function of (seed, step), and so is each of its rows: the step is the only state.

Rows are numbered through all steps and epochs: row r of step s has the number s * batch_size + r. A host asks
for the rows that its devices hold, which need not be one block; which host asks, and in which order, changes
nothing. grain is imported where it is used: it imports jax, which nothing else here needs.
"""

import functools
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, fields
from typing import Any, Generic, Protocol, TypeVar

import numpy as np

from lm.batch import Batch, concatenate
from lm.config.base import SettingError
from lm.objectives.denoising import Lengths

BatchFunction = Callable[[int, slice], Batch]  # (step, rows of the global batch) -> those rows
Item = TypeVar("Item")

CACHED_CALLS = 8  # calls whose whole rows are cached, where rows last several steps
PREFETCH = 2  # batches prefetched while the device works
FIRST_ORDER_KEY = 2**63  # first random key of orders: those of examples are below


@dataclass(frozen=True)
class PickledWithoutCaches:
    """The base of dataclasses that are pickled, for worker processes, without their cached properties."""

    def __getstate__(self) -> dict[str, Any]:
        return {field.name: getattr(self, field.name) for field in fields(self)}


class RowSource(Protocol):
    """The rows of an objective or a task: makes a batch from their numbers; can be pickled."""

    @property
    def lengths(self) -> Lengths: ...

    def __call__(self, numbers: np.ndarray) -> Batch:
        """Return the batch of the rows with these ``numbers``, int64 [B]."""


Rows = TypeVar("Rows", bound=RowSource, covariant=True)


@dataclass(frozen=True)
class Batches(Generic[Rows]):
    """The batch function of training: ``batches(step, rows)`` returns ``rows`` of the step's global batch."""

    rows: Rows
    batch_size: int  # global, over all hosts [rows]

    def __post_init__(self) -> None:
        check_size(self.batch_size)

    @property
    def lengths(self) -> Lengths:
        return self.rows.lengths

    def __call__(self, step: int, rows: slice) -> Batch:
        return self.rows(np.arange(step * self.batch_size, (step + 1) * self.batch_size)[rows])


@dataclass(frozen=True)
class ChunkedRows(PickledWithoutCaches, Generic[Rows]):
    """Long rows that are read chunk by chunk, for truncated backpropagation through time.

    Each step reads the next chunk of a row, and continues from the recurrent state after the chunk before.
    """

    rows: Rows  # whole rows
    lengths: Lengths  # of a chunk
    batch_size: int  # global, over all hosts [rows]
    chunks_per_row: int

    def __call__(self, numbers: np.ndarray) -> Batch:
        step, row = np.divmod(numbers, self.batch_size)
        whole_numbers = step // self.chunks_per_row * self.batch_size + row
        whole = self._whole_rows(tuple(whole_numbers.tolist()))
        chunk = np.arange(len(numbers)), step % self.chunks_per_row
        return whole.map(lambda x: x.reshape(len(x), self.chunks_per_row, -1)[chunk])

    @functools.cached_property
    def _whole_rows(self) -> Callable[[tuple[int, ...]], Batch]:
        """Return the function from numbers to whole rows, with a cache for the chunks that follow."""

        def read(numbers: tuple[int, ...]) -> Batch:
            return self.rows(np.array(numbers, np.int64))

        return functools.lru_cache(maxsize=CACHED_CALLS)(read)


def check_size(batch_size: int) -> None:
    if batch_size < 1:
        raise SettingError(f"batch_size={batch_size} should be at least 1, such as 128 [rows of all hosts]")


def split_into_batches(rows: Sequence[Item], batch_size: int) -> list[list[Item]]:
    """Return ``rows``, which need not support slices, in lists of ``batch_size``; the last may be shorter."""
    check_size(batch_size)
    starts = range(0, len(rows), batch_size)
    return [[rows[i] for i in range(start, min(start + batch_size, len(rows)))] for start in starts]


# --- random numbers and orders


def uniforms(seed: np.ndarray | int, rows: np.ndarray, count: int, length: int) -> np.ndarray:
    """Return uniform random numbers in [0, 1), float32 [B,count,length].

    Those of row r are drawn by ``Generator(Philox(key=[seed, r]))``, so that an example depends on its seed
    and number alone, and not on its batch, host or worker. ``seed`` may be an array [B], of one for each row.
    """
    bits = np.random.Philox(key=[0, 0])
    random, state = np.random.Generator(bits), bits.state
    numbers = np.empty((len(rows), count, length), np.float32)
    for key, out in zip(np.stack(np.broadcast_arrays(seed, rows), axis=1), numbers, strict=True):
        state["state"]["key"][:] = key  # setting a state is six times as fast as making a new generator
        bits.state = state
        random.random(out=out, dtype=np.float32)
    return numbers


def keyed_generator(seed: int, key: int) -> np.random.Generator:
    """Return the random generator of an order, such as an epoch's; ``uniforms`` never uses the same one."""
    return np.random.Generator(np.random.Philox(key=np.array([seed, FIRST_ORDER_KEY + key], np.uint64)))


@functools.lru_cache(maxsize=4)
def _epoch_order(seed: int, epoch: int, count: int) -> np.ndarray:
    return keyed_generator(seed, epoch).permutation(count)


def shuffled_indices(numbers: np.ndarray, count: int, seed: int) -> np.ndarray:
    """Return which of ``count`` examples is read at each row number, int64 [B].

    Every epoch has each example once, in its own order. ``numbers``, int64 [B], count through all epochs.
    """
    epochs = numbers // count
    indices = np.empty(len(numbers), np.int64)
    for epoch in np.unique(epochs).tolist():
        is_in_epoch = epochs == epoch
        indices[is_in_epoch] = _epoch_order(seed, epoch, count)[numbers[is_in_epoch] % count]
    return indices


# --- streams


def _host_batch(batches: BatchFunction, rows: Sequence[slice], step: int) -> Batch:
    """Return this host's rows of the step's batch."""
    return concatenate([batches(int(step), block) for block in rows])


def stream(
    batches: BatchFunction, start: int, stop: int, *, rows: Sequence[slice] = (slice(None),), workers: int = 0
) -> Iterator[Batch]:
    """Yield ``rows`` of the batches of steps start to stop - 1.

    A thread prefetches them, or ``workers`` processes. With workers the calling script needs its
    ``if __name__ == "__main__":``, since they import it. SettingError if ``workers`` is negative.
    """
    if workers < 0:
        raise SettingError(f"data.workers={workers} should be 0 or more [processes]")
    return _iterate(functools.partial(_host_batch, batches, rows), start, stop, workers)


def _iterate(batch_of: Callable[[int], Batch], start: int, stop: int, workers: int) -> Iterator[Batch]:
    import grain
    from absl import flags

    if start >= stop:
        return
    if not flags.FLAGS.is_parsed():
        flags.FLAGS.mark_as_parsed()  # grain reads flags of its own, which only absl's app.run would parse
    options = grain.ReadOptions(num_threads=1, prefetch_buffer_size=PREFETCH)
    dataset = grain.MapDataset.range(start, stop).map(batch_of).to_iter_dataset(options)
    if workers:
        processes = grain.MultiprocessingOptions(num_workers=workers, per_worker_buffer_size=PREFETCH)
        dataset = dataset.mp_prefetch(processes)
    iterator = iter(dataset)
    try:
        yield from iterator
    finally:
        iterator.close()  # ends the workers of a stream that is not read to its end

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

BatchFunction = Callable[[int, slice], Batch]  # (step, rows of the global batch) -> these rows of its batch
Item = TypeVar("Item")

CACHED_CALLS = 8  # last calls of ``TBPTTRows`` whose whole rows stay cached while their chunks are read
PREFETCHED_BATCHES = 2  # while the device works
# Philox keys from here on shuffle epochs and windows; keys below it draw the random numbers of examples.
EPOCH_KEY = 2**63
SPREAD_KEY = EPOCH_KEY - 1  # key of the first of ``evenly_spread_uniforms``
GOLDEN_RATIO = np.uint64(0x9E3779B97F4A7C15)  # its fractional part, in units of 2^-64


@dataclass(frozen=True)
class PickledWithoutCache:
    """A dataclass that is pickled without its cached properties."""

    def __getstate__(self) -> dict[str, Any]:
        return {field.name: getattr(self, field.name) for field in fields(self)}


class RowSource(Protocol):
    """Makes batches of rows from their numbers, as an objective or a task defines them; it can be pickled."""

    @property
    def lengths(self) -> Lengths: ...

    def __call__(self, row_numbers: np.ndarray) -> Batch:
        """Return the batch of these B rows; ``row_numbers``, int64 [B], count the rows of all epochs."""


Rows = TypeVar("Rows", bound=RowSource, covariant=True)


@dataclass(frozen=True)
class Batches(Generic[Rows]):
    """The batch function of training: ``batches(step, rows)`` returns rows of the step's global batch."""

    row_source: Rows
    batch_size: int  # global, over all hosts [rows]

    def __post_init__(self) -> None:
        check_batch_size(self.batch_size)

    @property
    def lengths(self) -> Lengths:
        return self.row_source.lengths

    def __call__(self, step: int, rows: slice) -> Batch:
        row_numbers = np.arange(step * self.batch_size, (step + 1) * self.batch_size)
        return self.row_source(row_numbers[rows])


@dataclass(frozen=True)
class TBPTTRows(PickledWithoutCache, Generic[Rows]):
    """Rows for truncated backpropagation through time (TBPTT).

    A row is read over several steps: each reads the next chunk and continues from the recurrent state of the
    chunk before.
    """

    row_source: Rows  # its rows are as long as all chunks together
    lengths: Lengths  # of a chunk
    batch_size: int  # global, over all hosts [rows]
    steps: int  # chunks of a row

    def __call__(self, row_numbers: np.ndarray) -> Batch:
        step, row = np.divmod(row_numbers, self.batch_size)
        whole_rows = self.whole_rows(tuple((step // self.steps * self.batch_size + row).tolist()))
        chunk = np.arange(len(row_numbers)), step % self.steps
        return whole_rows.map(lambda x: x.reshape(len(x), self.steps, -1)[chunk])

    @functools.cached_property
    def whole_rows(self) -> Callable[[tuple[int, ...]], Batch]:
        """Return the function that makes whole rows; the last calls are cached for the chunks that follow."""
        return functools.lru_cache(maxsize=CACHED_CALLS)(
            lambda row_numbers: self.row_source(np.array(row_numbers, np.int64))
        )


def check_batch_size(batch_size: int) -> None:
    if batch_size < 1:
        raise SettingError(f"batch_size={batch_size} should be at least 1, such as 128 [rows of all hosts]")


def split_batches(rows: Sequence[Item], batch_size: int) -> list[list[Item]]:
    """Return ``rows``, which need not support slices, in batches for evaluation; the last may be smaller."""
    check_batch_size(batch_size)
    starts = range(0, len(rows), batch_size)
    return [[rows[i] for i in range(start, min(start + batch_size, len(rows)))] for start in starts]


# --- random numbers and orders


def uniforms(seed: np.ndarray | int, row_numbers: np.ndarray, count: int, length: int) -> np.ndarray:
    """Return uniform random numbers in [0, 1), float32 [B,count,length].

    Those of row r are drawn by ``Generator(Philox(key=[seed, r]))``, so that an example depends on its seed
    and number alone, and not on its batch, host or worker. Rows may have seeds of their own, int64 [B].
    """
    bits = np.random.Philox(key=[0, 0])
    random, state = np.random.Generator(bits), bits.state
    values = np.empty((len(row_numbers), count, length), np.float32)
    for key, out in zip(np.stack(np.broadcast_arrays(seed, row_numbers), axis=1), values, strict=True):
        state["state"]["key"][:] = key  # setting a state is six times as fast as making a new generator
        bits.state = state
        random.random(out=out, dtype=np.float32)
    return values


def evenly_spread_uniforms(seed: int, row_numbers: np.ndarray) -> np.ndarray:
    """Return a random number in [0, 1) for each row, float32 [B]; those of consecutive rows lie far apart.

    Each is uniform by itself. Row r has the fractional part of u + r g, where g is the golden ratio and u is
    drawn by the seed, so that any B consecutive rows cover [0, 1) almost evenly, and a row still depends on
    its seed and number alone.
    """
    first = np.random.Generator(np.random.Philox(key=[seed, SPREAD_KEY])).integers(2**64, dtype=np.uint64)
    fixed_point = first + row_numbers.astype(np.uint64) * GOLDEN_RATIO  # modulo 1: 64 bits wrap around
    return (fixed_point >> np.uint64(40)).astype(np.float32) * np.float32(2.0**-24)


def order_generator(seed: int, key: int) -> np.random.Generator:
    """Return the random generator that shuffles an epoch or a window.

    ``key``, below 2^63, is the number of the epoch or the ``order_key`` of the window.
    """
    return np.random.Generator(np.random.Philox(key=np.array([seed, EPOCH_KEY + key], np.uint64)))


@functools.lru_cache(maxsize=4)
def _order(seed: int, epoch: int, count: int) -> np.ndarray:
    return order_generator(seed, epoch).permutation(count)


def shuffled_indices(row_numbers: np.ndarray, count: int, seed: int) -> np.ndarray:
    """Return the index of each row among ``count`` items, int64 [B]: every epoch is a new permutation.

    ``row_numbers``: the rows, counted through all epochs, int64 [B].
    """
    epochs = row_numbers // count
    indices = np.empty(len(row_numbers), np.int64)
    for epoch in np.unique(epochs).tolist():
        in_epoch = epochs == epoch
        indices[in_epoch] = _order(seed, epoch, count)[row_numbers[in_epoch] % count]
    return indices


# --- streams


def _host_batch(batches: BatchFunction, rows: Sequence[slice], step: int) -> Batch:
    """Return this host's rows of the step's batch."""
    return concatenate([batches(int(step), part) for part in rows])


def stream(
    batches: BatchFunction, start: int, stop: int, *, rows: Sequence[slice] = (slice(None),), workers: int = 0
) -> Iterator[Batch]:
    """Yield ``rows`` of the batches of steps start to stop - 1.

    A thread prefetches them; if ``workers`` is above 0, so many processes make them. The calling script then
    needs its ``if __name__ == "__main__":``, since they import it. SettingError if ``workers`` is negative.
    """
    if workers < 0:
        raise SettingError(f"data.workers={workers} should be 0 or more [processes]")
    return _iterate(functools.partial(_host_batch, batches, rows), start, stop, workers)


def _iterate(make_host_batch: Callable[[int], Batch], start: int, stop: int, workers: int) -> Iterator[Batch]:
    import grain
    from absl import flags

    if start >= stop:
        return
    if not flags.FLAGS.is_parsed():
        flags.FLAGS.mark_as_parsed()  # grain reads flags of its own, which only absl's app.run would parse
    options = grain.ReadOptions(num_threads=1, prefetch_buffer_size=PREFETCHED_BATCHES)
    dataset = grain.MapDataset.range(start, stop).map(make_host_batch).to_iter_dataset(options)
    if workers:
        dataset = dataset.mp_prefetch(
            grain.MultiprocessingOptions(num_workers=workers, per_worker_buffer_size=PREFETCHED_BATCHES)
        )
    iterator = iter(dataset)
    try:
        yield from iterator
    finally:
        iterator.close()  # ends the workers of a stream that is not read to its end

"""Batches examples of unequal lengths in few shapes, since each shape is a program to compile."""

from collections.abc import Callable, Sequence
from math import ceil, floor, log2
from typing import NamedTuple

import numpy as np

BATCH_TOKENS = 4_096  # tokens of a batch on each device, padding included
# tokens that a small model reads while a program compiles: padding may cost as much
COMPILE_COST = 200_000
MAX_SHAPES = 8  # the most programs to compile, whatever the padding costs

Cost = Callable[[np.ndarray], np.ndarray]  # lengths [...,dimensions] -> cost of a row of them [tokens]


class BucketBatch(NamedTuple):
    """A batch of examples of similar lengths; its last rows may be padding."""

    examples: np.ndarray  # int64 [rows or fewer]: indices
    rows: int
    lengths: tuple[int, ...]  # to which each dimension is padded


def batches_by_length(
    lengths: np.ndarray, cost: Cost, multiple: int, max_lengths: int | Sequence[int]
) -> list[BucketBatch]:
    """Return batches of all examples, grouped by their ``lengths`` int [N,dimensions].

    The number of rows of a batch is a multiple of ``multiple``. No length is padded beyond
    ``max_lengths``, of each dimension or of all.
    """
    rounded = np.minimum(round_up(lengths), max_lengths)
    shapes, shape_index = np.unique(rounded, axis=0, return_inverse=True)
    shape_index = shape_index.ravel()
    shapes, merged_index = _merge_shapes(shapes, np.bincount(shape_index), cost)
    bucket = merged_index[shape_index]
    batches = []
    for index, shape in enumerate(shapes):
        examples = np.flatnonzero(bucket == index)
        rows = _batch_rows(BATCH_TOKENS / float(cost(shape)), len(examples), multiple)
        starts, padded = range(0, len(examples), rows), tuple(shape.tolist())
        batches += [BucketBatch(examples[start : start + rows], rows, padded) for start in starts]
    return batches


def round_up(lengths: np.ndarray) -> np.ndarray:
    """Round each length up to one of 1 to 8, 10, 12, 14, 16, 20, ...: four per power of 2.

    A length grows by a quarter at most.
    """
    lengths = np.maximum(lengths, 1)
    step = np.maximum(2 ** np.floor(np.log2(lengths)).astype(np.int64) // 4, 1)
    return -(-lengths // step) * step


def _merge_shapes(shapes: np.ndarray, counts: np.ndarray, cost: Cost) -> tuple[np.ndarray, np.ndarray]:
    """Merge pairs of shapes as long as their padding costs less than compiling a program.

    ``counts`` [shapes] are the examples of each shape. Returns the remaining shapes, and for each given shape
    the index of the one into which it was merged.
    """
    merged_index = np.arange(len(shapes))
    while len(shapes) > 1:
        both = np.maximum(shapes[:, None], shapes[None])
        separate = cost(shapes) * counts
        padding = cost(both) * (counts[:, None] + counts[None]) - separate[:, None] - separate[None]
        padding = np.where(np.tri(len(shapes), k=-1) > 0, padding, np.inf)
        removed, kept = np.unravel_index(padding.argmin(), padding.shape)  # removed > kept
        if padding[removed, kept] > COMPILE_COST and len(shapes) <= MAX_SHAPES:
            break
        shapes[kept] = both[removed, kept]
        counts[kept] += counts[removed]
        shapes, counts = np.delete(shapes, removed, axis=0), np.delete(counts, removed)
        merged_index = np.where(merged_index == removed, kept, merged_index - (merged_index > removed))
    return shapes, merged_index


def _batch_rows(max_rows: float, count: int, multiple: int) -> int:
    """Return the rows of a batch: ``multiple`` times a power of 2.

    The power of 2 is at most ``max_rows``, if this is 1 or more, and no larger than ``count`` examples need.
    """
    affordable = 2 ** floor(log2(max(max_rows, 1)))
    needed = 2 ** ceil(log2(max(count / multiple, 1)))
    return multiple * min(affordable, needed)

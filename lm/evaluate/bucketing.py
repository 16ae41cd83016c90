"""Batches questions of unequal lengths in few shapes, since each shape is a program to compile."""

from collections.abc import Callable
from math import ceil, floor, log2
from typing import NamedTuple

import numpy as np

TOKENS = 4_096  # tokens of a batch on each device, padding included
PROGRAM = 200_000  # tokens that a small model reads while a program is compiled: padding may cost as much
MOST = 8  # the most programs to compile, whatever the padding costs


class BucketBatch(NamedTuple):
    """A batch of questions: ``rows`` rows, of which the last ones are padding, and its padded lengths."""

    questions: np.ndarray  # int64 [rows or fewer]: their indices among all
    rows: int
    lengths: tuple[int, ...]


def batches_by_length(
    sizes: np.ndarray, cost: Callable[[np.ndarray], np.ndarray], multiple: int, longest: int
) -> list[BucketBatch]:
    """Return batches of all questions, grouped by their lengths ``sizes`` int [N,dimensions].

    ``cost`` maps lengths [...,dimensions] to what a row of them costs, counted in tokens [...]. The rows of a
    batch are a multiple of ``multiple``. No length is padded beyond ``longest``.
    """
    shapes, group = np.unique(np.minimum(round_up(sizes), longest), axis=0, return_inverse=True)
    shapes, merged = _merged(shapes, np.bincount(group.ravel()), cost)
    owner, parts = merged[group.ravel()], []
    for number, shape in enumerate(shapes):
        questions = np.flatnonzero(owner == number)
        rows = _rows(TOKENS / float(cost(shape)), len(questions), multiple)
        starts = range(0, len(questions), rows)
        parts += [
            BucketBatch(questions[start : start + rows], rows, tuple(shape.tolist())) for start in starts
        ]
    return parts


def round_up(sizes: np.ndarray) -> np.ndarray:
    """Round each size up to one of 1 to 8, 10, 12, 14, 16, 20, ...: four to a doubling.

    A size becomes at most a quarter larger.
    """
    sizes = np.maximum(sizes, 1)
    step = np.maximum(2 ** np.floor(np.log2(sizes)).astype(np.int64) // 4, 1)
    return -(-sizes // step) * step


def _merged(shapes: np.ndarray, counts: np.ndarray, cost: Callable) -> tuple[np.ndarray, np.ndarray]:
    """Merge pairs of shapes as long as the padding costs less than compiling a program.

    ``counts`` [shapes] are the questions of each. Returns the shapes that are left, and the index among them
    of what each shape became.
    """
    became = np.arange(len(shapes))
    while len(shapes) > 1:
        both = np.maximum(shapes[:, None], shapes[None])
        alone = cost(shapes) * counts
        extra = cost(both) * (counts[:, None] + counts[None]) - alone[:, None] - alone[None]
        extra = np.where(np.tri(len(shapes), k=-1) > 0, extra, np.inf)
        one, other = np.unravel_index(extra.argmin(), extra.shape)
        if extra[one, other] > PROGRAM and len(shapes) <= MOST:
            break
        shapes[other], counts[other] = both[one, other], counts[one] + counts[other]
        shapes, counts = np.delete(shapes, one, axis=0), np.delete(counts, one)
        became = np.where(became == one, other, became - (became > one))
    return shapes, became


def _rows(fitting: float, count: int, multiple: int) -> int:
    """Return the rows of a batch: ``multiple`` times a power of 2.

    The power is at most ``fitting``, and no larger than ``count`` questions need.
    """
    needed = 2 ** ceil(log2(max(count / multiple, 1)))
    return multiple * min(2 ** floor(log2(max(fitting, 1))), needed)

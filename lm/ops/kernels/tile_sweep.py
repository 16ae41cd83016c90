"""A loop over pairs of tiles, as a Pallas kernel for TPUs and for GPUs: outer tiles, and inner ones for each.

A TPU has a grid of both, fetches the next tiles while it computes, and keeps the accumulators in its own
memory. A GPU runs one program for each outer tile, which loops over the inner ones.
"""

from collections.abc import Callable
from functools import partial
from typing import Any, Literal, NamedTuple

import jax
import jax.numpy as jnp
from jax import Array
from jax.experimental import pallas as pl
from jax.experimental.pallas import tpu as pltpu
from jax.experimental.pallas import triton


def power_of_two(size: int) -> int:
    """Return the least power of two that is not below ``size``."""
    return 1 << (size - 1).bit_length()


class Backend(NamedTuple):
    """How a kernel is compiled, and in which tile sizes."""

    platform: str  # "tpu" or "gpu"
    tile: int  # queries or keys of a tile, a power of two [positions]
    min_tile: int  # the smallest tile, for short rows [positions]
    min_width: int  # of a head, padded to a power of two; 0: any width [features]
    interpret: bool = False  # without compiling, on any device: for tests

    def tile_size(self, length: int) -> int:
        """Return the positions of a tile for rows of this length."""
        return min(self.tile, max(self.min_tile, power_of_two(length)))

    def padded_width(self, width: int) -> int:
        """Return the features that a head is padded to."""
        return max(self.min_width, power_of_two(width)) if self.min_width else width


BACKENDS = {
    "tpu": Backend("tpu", tile=512, min_tile=128, min_width=0),  # registers hold 8 x 128 numbers
    "gpu": Backend("gpu", tile=64, min_tile=16, min_width=16),  # tensor cores multiply 16 x 16
    "cpu": Backend("tpu", tile=128, min_tile=8, min_width=0, interpret=True),
}


class Input(NamedTuple):
    """An array [B|1,N|K|1,...] that is read in tiles along ``axis``."""

    array: Array
    axis: int
    tile: int

    def block(self, heads: int, whole: bool) -> tuple[tuple[int | None, ...], Callable]:
        """Return a block's shape, one tile or all of a row and head, and its index by row, head and tile."""
        axis, (rows, groups, *inner) = self.axis, self.array.shape
        share = heads // groups
        if not whole:
            inner[axis - 2] = self.tile

        def index(row, head, tile):
            start = (row if rows > 1 else 0, jax.lax.div(head, share))
            return (*start, *(tile if d == axis and not whole else 0 for d in range(2, 2 + len(inner))))

        return (None, None, *inner), index

    def read(self, ref: Any, tile: Array) -> Array:
        """Return one tile of a reference to all tiles of a row and head."""
        inside = pl.ds(pl.multiple_of(tile * self.tile, self.tile), self.tile)
        return ref[(inside, slice(None)) if self.axis == 2 else (slice(None), inside)]


class Tiles(NamedTuple):
    """What one step of a fold reads: an outer tile and an inner one."""

    arrays: dict[str, Array]
    first_query: Array  # int32 []: the index of the first query in its row
    first_key: Array  # int32 []
    coefficient: Callable[[int], Array]  # the r-th coefficient of the head's position bias


Outputs = tuple[jax.ShapeDtypeStruct, ...]


class Fold(NamedTuple):
    """What is computed for an outer tile by a loop over inner tiles."""

    start: Callable[[], tuple[Array, ...]]  # the initial carry
    step: Callable[[tuple[Array, ...], Tiles], tuple[Array, ...]]
    finish: Callable[[tuple[Array, ...]], tuple[Array, ...]]


class Scalars(NamedTuple):
    """What the programs of one head read besides tiles."""

    query_offset: Array  # int32 []
    coefficient: Callable[[int], Array]


class Sweep(NamedTuple):
    """A fold over the inner tiles that are within bounds, for each outer tile."""

    backend: Backend
    outer: dict[str, Input]
    inner: dict[str, Input]
    outputs: Outputs  # in tiles like the outer ones: [B,N,...,positions] or [B,N,tiles,...]
    bounds: tuple[int | None, int | None]  # positions behind and ahead of an outer tile; None: all
    queries: Literal["outer", "inner"]  # which tiles are of queries; the others are of keys
    fold: Fold

    @property
    def grid(self) -> tuple[int, int, int, int]:
        """Return the numbers of rows, heads, outer and inner tiles."""
        sides = [next(iter(side.values())) for side in (self.outer, self.inner)]
        return (*self.outputs[0].shape[:2], *(x.array.shape[x.axis] // x.tile for x in sides))

    @property
    def sizes(self) -> tuple[int, int]:
        """Return the positions of an outer and of an inner tile."""
        return next(iter(self.outer.values())).tile, next(iter(self.inner.values())).tile

    def inner_range(self, outer: Array, query_offset: Array) -> tuple[Array, Array]:
        """Return the first inner tile within bounds of an outer one, and the one after the last."""
        size, inner_size = self.sizes
        first = outer * size + (query_offset if self.queries == "outer" else -query_offset)
        behind, ahead = self.bounds
        end = jnp.int32(self.grid[3])

        def tile_of(position):
            return jnp.minimum(jax.lax.div(jnp.maximum(position, 0), jnp.int32(inner_size)), end)

        low = jnp.int32(0) if behind is None else tile_of(first - behind)
        high = end if ahead is None else tile_of(first + size - 1 + ahead + inner_size)
        return low, high

    def tiles(self, arrays: dict[str, Array], outer: Array, inner: Array, scalars: Scalars) -> Tiles:
        """Return two tiles, with the indices of their first query and key in the row."""
        size, inner_size = self.sizes
        query, key = outer * size, inner * inner_size
        if self.queries == "inner":
            query, key = key, query
        return Tiles(arrays, query + scalars.query_offset, key, scalars.coefficient)


def sweep_tiles(job: Sweep, query_offset: Array, coefficients: Array) -> list[Array]:
    """Return the outputs, given the first query's index int32 [1] and the bias's coefficients [N,R]."""
    sweep = {"tpu": _sweep_tpu, "gpu": _sweep_gpu}[job.backend.platform]
    return sweep(job, query_offset, coefficients)


def _sweep_tpu(job, query_offset, coefficients):
    heads = job.grid[1]

    def outer_block(item):
        shape, index = item.block(heads, whole=False)
        return pl.BlockSpec(shape, lambda row, head, outer, inner, offset: index(row, head, outer))

    def inner_block(item):
        shape, index = item.block(heads, whole=False)

        # A tile out of bounds is not fetched: the one before stays in memory.
        def clipped_index(row, head, outer, inner, offset):
            low, high = job.inner_range(outer, offset[0])
            least, greatest = jnp.minimum(low, job.grid[3] - 1), jnp.maximum(high - 1, 0)
            return index(row, head, jnp.clip(inner, least, greatest))

        return pl.BlockSpec(shape, clipped_index)

    return _call(
        job,
        partial(_tpu_kernel, job),
        grid_spec=pltpu.PrefetchScalarGridSpec(
            num_scalar_prefetch=1,
            grid=job.grid,
            in_specs=[
                pl.BlockSpec(memory_space=pltpu.SMEM),
                *map(outer_block, job.outer.values()),
                *map(inner_block, job.inner.values()),
            ],
            out_specs=[_output(job, item) for item in job.outputs],
            scratch_shapes=[pltpu.VMEM(x.shape, x.dtype) for x in jax.eval_shape(job.fold.start)],
        ),
        compiler_params=pltpu.CompilerParams(dimension_semantics=("parallel",) * 3 + ("arbitrary",)),
    )(query_offset, coefficients, *_arrays(job))


def _tpu_kernel(job, query_offset, coefficients, *refs):
    """Run one step of the fold: an outer tile and an inner one."""
    head, outer, inner = (pl.program_id(axis) for axis in (1, 2, 3))
    inputs, outputs, carried = _split_refs(refs, job)
    scalars = Scalars(query_offset[0], lambda r: coefficients[head, r])
    low, high = job.inner_range(outer, scalars.query_offset)

    @pl.when(inner == 0)
    def _():
        for ref, x in zip(carried, job.fold.start(), strict=True):
            ref[...] = x

    @pl.when((low <= inner) & (inner < high))
    def _():
        arrays = {name: ref[...] for name, ref in inputs.items()}
        tiles = job.tiles(arrays, outer, inner, scalars)
        for ref, x in zip(carried, job.fold.step(tuple(ref[...] for ref in carried), tiles), strict=True):
            ref[...] = x

    @pl.when(inner == job.grid[3] - 1)
    def _():
        for ref, x in zip(outputs, job.fold.finish(tuple(ref[...] for ref in carried)), strict=True):
            ref[...] = x.astype(ref.dtype)


def _sweep_gpu(job, query_offset, coefficients):
    heads = job.grid[1]

    def kernel(query_offset, coefficients, *refs):
        head, outer = pl.program_id(1), pl.program_id(2)
        inputs, outputs, _ = _split_refs(refs, job)
        scalars = Scalars(query_offset[0], lambda r: coefficients[head, r])
        outer_arrays = {name: inputs[name][...] for name in job.outer}

        def step(inner, carry):
            inner_arrays = {name: item.read(inputs[name], inner) for name, item in job.inner.items()}
            return job.fold.step(carry, job.tiles(outer_arrays | inner_arrays, outer, inner, scalars))

        low, high = job.inner_range(outer, scalars.query_offset)
        carry = jax.lax.fori_loop(low, high, step, job.fold.start())
        for ref, x in zip(outputs, job.fold.finish(carry), strict=True):
            ref[...] = x.astype(ref.dtype)

    scalars = [
        pl.BlockSpec(x.shape, lambda row, head, outer, n=x.ndim: (0,) * n)
        for x in (query_offset, coefficients)
    ]
    outer = [item.block(heads, whole=False) for item in job.outer.values()]
    inner = [item.block(heads, whole=True) for item in job.inner.values()]
    return _call(
        job,
        kernel,
        grid=job.grid[:3],
        in_specs=[*scalars, *(pl.BlockSpec(shape, index) for shape, index in (*outer, *inner))],
        out_specs=[_output(job, item) for item in job.outputs],
        compiler_params=triton.CompilerParams(num_warps=4, num_stages=2),
    )(query_offset, coefficients, *_arrays(job))


def _call(job, kernel, **how):
    return pl.pallas_call(kernel, out_shape=list(job.outputs), interpret=job.backend.interpret, **how)


def _arrays(job):
    return [item.array for side in (job.outer, job.inner) for item in side.values()]


def _split_refs(refs, job):
    """Return references to inputs by name, to outputs, and to the carry."""
    names = [*job.outer, *job.inner]
    rest = refs[len(names) :]
    return dict(zip(names, refs, strict=False)), rest[: len(job.outputs)], rest[len(job.outputs) :]


def _output(job, item):
    if len(item.shape) == 5:
        shape = (None, None, None, *item.shape[3:])
        return pl.BlockSpec(shape, lambda row, head, outer, *_: (row, head, outer, 0, 0))
    shape = (None, None, item.shape[2], job.sizes[0])
    return pl.BlockSpec(shape, lambda row, head, outer, *_: (row, head, 0, outer))

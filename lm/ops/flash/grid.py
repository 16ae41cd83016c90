"""One kernel for two kinds of accelerator: still tiles, and for each the moving tiles that pass it.

A TPU has a grid of both, fetches the next tiles while it works, and holds what is carried in its own memory.
A GPU runs a program for each still tile, which loops over the moving ones.
"""

from collections.abc import Callable
from functools import partial
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax import Array
from jax.experimental import pallas as pl
from jax.experimental.pallas import tpu as pltpu
from jax.experimental.pallas import triton


def power_of_two(size: int) -> int:
    """The least one that is not below ``size``."""
    return 1 << (size - 1).bit_length()


class Backend(NamedTuple):
    """How kernels are compiled."""

    platform: str  # "tpu" or "gpu"
    tile: int  # queries or keys of a tile, a power of two [places]
    least: int  # the smallest tile, for short rows [places]
    least_width: int  # of a head; 0: any, or else a power of two [features]
    interpret: bool = False  # without compiling, on any device: for tests

    def tiles(self, length: int) -> int:
        """The places of a tile for rows of this length."""
        return min(self.tile, max(self.least, power_of_two(length)))

    def width(self, width: int) -> int:
        """The features that a head is padded to."""
        return max(self.least_width, power_of_two(width)) if self.least_width else width


BACKENDS = {
    "tpu": Backend("tpu", tile=512, least=128, least_width=0),  # registers hold 8 x 128 numbers
    "gpu": Backend("gpu", tile=64, least=16, least_width=16),  # tensor cores multiply 16 x 16
    "cpu": Backend("tpu", tile=128, least=8, least_width=0, interpret=True),
}


class Input(NamedTuple):
    """An array [B|1,N|K|1,...] that is read in tiles along ``axis``."""

    array: Array
    axis: int
    tile: int

    def block(self, heads: int, whole: bool) -> tuple[tuple[int | None, ...], Callable]:
        """A tile's shape, or that of all tiles of one row and head, and its index from row, head and tile."""
        axis, (rows, groups, *inner) = self.axis, self.array.shape
        share = heads // groups
        if not whole:
            inner[axis - 2] = self.tile

        def index(row, head, tile):
            place = (row if rows > 1 else 0, jax.lax.div(head, share))
            return (*place, *(tile if d == axis and not whole else 0 for d in range(2, 2 + len(inner))))

        return (None, None, *inner), index

    def read(self, ref: Any, tile: Array) -> Array:
        """A tile of the reference to a row's and head's."""
        places = pl.ds(pl.multiple_of(tile * self.tile, self.tile), self.tile)
        return ref[(places, slice(None)) if self.axis == 2 else (slice(None), places)]


class Tiles(NamedTuple):
    """What one step of a fold reads: a still tile, and a moving one."""

    arrays: dict[str, Array]
    places: tuple[Array, Array]  # of the first query and the first key
    number: Callable[[int], Array]  # the r-th number of the head


Outputs = tuple[jax.ShapeDtypeStruct, ...]


class Fold(NamedTuple):
    """What is computed for a still tile from all the tiles that pass it."""

    start: Callable[[], tuple[Array, ...]]  # what is carried from tile to tile
    step: Callable[[tuple[Array, ...], Tiles], tuple[Array, ...]]
    finish: Callable[[tuple[Array, ...]], tuple[Array, ...]]


class Sweep(NamedTuple):
    """Each ``still`` tile passed by the ``moving`` ones that are within its reach."""

    backend: Backend
    still: dict[str, Input]
    moving: dict[str, Input]
    outputs: Outputs  # in tiles as the still ones: [B,N,..., places] or [B,N,tiles,...]
    reach: tuple[int | None, int | None]  # places behind and ahead of a still tile; None: all
    origins: tuple[int, int]  # 1 for the side, still or moving, whose first place is ``offset``: the queries
    fold: Fold

    @property
    def grid(self) -> tuple[int, int, int, int]:
        """Rows, heads, still and moving tiles."""
        sides = [next(iter(side.values())) for side in (self.still, self.moving)]
        return (*self.outputs[0].shape[:2], *(x.array.shape[x.axis] // x.tile for x in sides))

    @property
    def sizes(self) -> tuple[int, int]:
        """Places of a still and of a moving tile."""
        return next(iter(self.still.values())).tile, next(iter(self.moving.values())).tile

    def bounds(self, tile: Array, offset: Array) -> tuple[Array, Array]:
        """The first moving tile within reach of a still one, and the one after the last."""
        size, other = self.sizes
        first = tile * size + (self.origins[0] - self.origins[1]) * offset
        behind, ahead = self.reach
        end = jnp.int32(self.grid[3])

        def whole(places):
            return jnp.minimum(jax.lax.div(jnp.maximum(places, 0), jnp.int32(other)), end)

        low = jnp.int32(0) if behind is None else whole(first - behind)
        return low, end if ahead is None else whole(first + size - 1 + ahead + other)

    def places(self, still: Array, moving: Array, offset: Array) -> tuple[Array, Array]:
        """Of the first query and the first key of two tiles."""
        (size, other), (origin, other_origin) = self.sizes, self.origins
        first, second = still * size + origin * offset, moving * other + other_origin * offset
        return (first, second) if origin else (second, first)


def sweep_tiles(job: Sweep, offset: Array, numbers: Array) -> list[Array]:
    """The outputs, from ``offset`` int32 [1] and the numbers float32 [N,R] of each head."""
    return {"tpu": _sweep_tpu, "gpu": _sweep_gpu}[job.backend.platform](job, offset, numbers)


def _sweep_tpu(job, offset, numbers):
    heads = job.grid[1]

    def specification(item):
        shape, index = item.block(heads, whole=False)
        return pl.BlockSpec(shape, lambda row, head, still, moving, offset: index(row, head, still))

    def passing(item):
        shape, index = item.block(heads, whole=False)

        # a tile out of reach is not brought: the one before stays
        def place(row, head, still, moving, offset):
            low, high = job.bounds(still, offset[0])
            least, greatest = jnp.minimum(low, job.grid[3] - 1), jnp.maximum(high - 1, 0)
            return index(row, head, jnp.clip(moving, least, greatest))

        return pl.BlockSpec(shape, place)

    return _call(
        job,
        partial(_tpu_kernel, job),
        grid_spec=pltpu.PrefetchScalarGridSpec(
            num_scalar_prefetch=1,
            grid=job.grid,
            in_specs=[
                pl.BlockSpec(memory_space=pltpu.SMEM),
                *map(specification, job.still.values()),
                *map(passing, job.moving.values()),
            ],
            out_specs=[_output(job, item) for item in job.outputs],
            scratch_shapes=[pltpu.VMEM(x.shape, x.dtype) for x in jax.eval_shape(job.fold.start)],
        ),
        compiler_params=pltpu.CompilerParams(dimension_semantics=("parallel",) * 3 + ("arbitrary",)),
    )(offset, numbers, *_arrays(job))


def _tpu_kernel(job, offset, numbers, *refs):
    """One still tile and one that passes it."""
    head, still, moving = (pl.program_id(axis) for axis in (1, 2, 3))
    inputs, outputs, carried = _parted(refs, job)
    low, high = job.bounds(still, offset[0])

    @pl.when(moving == 0)
    def _():
        for ref, x in zip(carried, job.fold.start(), strict=True):
            ref[...] = x

    @pl.when((low <= moving) & (moving < high))
    def _():
        arrays = {name: ref[...] for name, ref in inputs.items()}
        tiles = Tiles(arrays, job.places(still, moving, offset[0]), lambda r: numbers[head, r])
        for ref, x in zip(carried, job.fold.step(tuple(ref[...] for ref in carried), tiles), strict=True):
            ref[...] = x

    @pl.when(moving == job.grid[3] - 1)
    def _():
        for ref, x in zip(outputs, job.fold.finish(tuple(ref[...] for ref in carried)), strict=True):
            ref[...] = x.astype(ref.dtype)


def _sweep_gpu(job, offset, numbers):
    heads = job.grid[1]

    def kernel(offset, numbers, *refs):
        head, still = pl.program_id(1), pl.program_id(2)
        inputs, outputs, _ = _parted(refs, job)
        begin = offset[0]
        fixed = {name: inputs[name][...] for name in job.still}

        def step(moving, carry):
            arrays = fixed | {name: item.read(inputs[name], moving) for name, item in job.moving.items()}
            tiles = Tiles(arrays, job.places(still, moving, begin), lambda r: numbers[head, r])
            return job.fold.step(carry, tiles)

        low, high = job.bounds(still, begin)
        carry = jax.lax.fori_loop(low, high, step, job.fold.start())
        for ref, x in zip(outputs, job.fold.finish(carry), strict=True):
            ref[...] = x.astype(ref.dtype)

    scalars = [pl.BlockSpec(x.shape, lambda row, head, still, n=x.ndim: (0,) * n) for x in (offset, numbers)]
    still = [item.block(heads, whole=False) for item in job.still.values()]
    moving = [item.block(heads, whole=True) for item in job.moving.values()]
    return _call(
        job,
        kernel,
        grid=job.grid[:3],
        in_specs=[*scalars, *(pl.BlockSpec(shape, index) for shape, index in (*still, *moving))],
        out_specs=[_output(job, item) for item in job.outputs],
        compiler_params=triton.CompilerParams(num_warps=4, num_stages=2),
    )(offset, numbers, *_arrays(job))


def _call(job, kernel, **how):
    return pl.pallas_call(kernel, out_shape=list(job.outputs), interpret=job.backend.interpret, **how)


def _arrays(job):
    return [item.array for side in (job.still, job.moving) for item in side.values()]


def _parted(refs, job):
    """References to inputs by name, to outputs, and to what is carried."""
    names = [*job.still, *job.moving]
    rest = refs[len(names) :]
    return dict(zip(names, refs, strict=False)), rest[: len(job.outputs)], rest[len(job.outputs) :]


def _output(job, item):
    if len(item.shape) == 5:
        shape = (None, None, None, *item.shape[3:])
        return pl.BlockSpec(shape, lambda row, head, still, *_: (row, head, still, 0, 0))
    shape = (None, None, item.shape[2], job.sizes[0])
    return pl.BlockSpec(shape, lambda row, head, still, *_: (row, head, 0, still))

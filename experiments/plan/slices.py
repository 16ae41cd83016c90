"""TPU chips, the one home of the figures that plans are made with, and the slices that can be requested.

Sources. Google's documentation of each generation (cloud.google.com/tpu/docs/v4, v5e, v5p, v6e, tpu7x):
FLOP/s, HBM, network and size of a pod. ``clock``: for v4, v5e and v5p peak over products a cycle (4 units of
128 x 128 a core); for v6e and tpu7x the clock at which the compiler's cycles for a matrix product of 8192^3
are 70 and 80 % of peak (on the others 87 to 93 %). ``usable``: what libtpu 0.0.42 says is available when a
program does not fit; the runtime reserves the rest.
"""

import re
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from itertools import combinations_with_replacement
from math import ceil, log, prod

from lm.config.base import SettingError, did_you_mean

GIB = 2**30
# Between a chip and the memory of its host, one way: no figure is published, so that this is the speed of 16
# lanes of PCIe 3.0 [bytes/s].
HOST_BANDWIDTH = 16e9


@dataclass(frozen=True)
class Chip:
    """Describes one chip of a generation, and how many of them make a slice."""

    peak: float  # of bfloat16 products [FLOP/s]
    clock: float  # [cycles/s]
    usable: float  # HBM that programs may fill [bytes]
    bandwidth: float  # of HBM [bytes/s]
    link: float  # of one link to a neighbour, one way: the published figure over twice the links [bytes/s]
    outside: float  # to other slices, over the data-centre network [bytes/s]
    pod: int  # chips of the largest slice
    dimensions: int  # of the network
    devices: int = 1  # of jax, in a chip
    options: Mapping[str, str] = field(default_factory=dict)  # of topologies.get_topology_desc


_MEGACORE = {"chip_config_name": "megacore"}  # two cores are one device, as they are on v5p without options
CHIPS = {
    # no figure is published for the network outside of v4: it is that of v5p
    "v4": Chip(275e12, 1.05e9, 30.75 * GIB, 1.2e12, 50e9, 6.25e9, 4_096, 3, options=_MEGACORE),
    "v5e": Chip(197e12, 1.5e9, 15.75 * GIB, 819e9, 50e9, 3.125e9, 256, 2),
    "v5p": Chip(459e12, 1.75e9, 95.74 * GIB, 2_765e9, 100e9, 6.25e9, 8_960, 3),
    "v6e": Chip(918e12, 1.75e9, 31.25 * GIB, 1_638e9, 100e9, 12.5e9, 256, 2),
    "tpu7x": Chip(2_307e12, 2.2e9, 189.5 * GIB, 7_380e9, 100e9, 12.5e9, 9_216, 3, devices=2),
}
_FLAT = ((1, 1), (2, 2), (2, 4), (4, 4), (4, 8), (8, 8), (8, 16), (16, 16))
_DEEP = ((2, 2, 1), (2, 2, 2), (2, 2, 4), (2, 4, 4))  # larger ones are made of cubes of 4 x 4 x 4


@dataclass(frozen=True)
class Slice:
    """Chips that one network joins; the data centre's network joins ``count`` such slices."""

    name: str  # "v5e:4x4"
    chip: Chip
    shape: tuple[int, ...]
    count: int = 1

    @property
    def chips(self) -> int:
        """Return the number of chips of all slices together."""
        return prod(self.shape) * self.count

    @property
    def devices(self) -> int:
        """Return the number of jax's devices of all slices together."""
        return self.chips * self.chip.devices

    @property
    def room(self) -> float:
        """Return how much HBM of a device a program may fill [bytes]."""
        return self.chip.usable / self.chip.devices

    def bandwidth(self, axes: tuple[str, ...], size: int) -> float:
        """Return the bytes/s that a device moves in a collective over ``size`` devices along these mesh axes.

        All links count, both ways, of the dimensions of the network that so many devices fill. Half of them
        count where the last chip is not linked to the first: on sides other than 16, except in slices made of
        cubes of 4 x 4 x 4. Only what goes over the mesh axis "slice" leaves a slice.
        """
        if "slice" in axes:
            return self.chip.outside / self.chip.devices
        cubes = self.chip.dimensions == 3 and min(self.shape) >= 4
        links, chips = 0, ceil(size / self.chip.devices)
        for length in sorted(self.shape, reverse=True):
            is_ring = cubes or length == 16
            if chips > 1:
                links += 2 if is_ring else 1
            chips = ceil(chips / length)
        return self.chip.link * (links or 2) / self.chip.devices


def find_slice(name: str, count: int = 1, option: str = "--topology") -> Slice:
    """Return the slice called "v5e:4x4", ``count`` times; SettingError with the nearest if there is none.

    option: by which the user named it, for the error.
    """
    if count < 1:
        raise SettingError(f"mesh.slice={count} should be the number of slices, 1 or more, each of {option}")
    generation, _, sides = name.partition(":")
    if generation not in CHIPS:
        raise SettingError(
            f"{option} {name}: a TPU {generation!r} is unknown{did_you_mean(generation, CHIPS)} (for GPUs: "
            "lm run ROW --dry-run estimates the hours on one, lm launch slurm submits rows)"
        )
    shape, shapes = tuple(map(int, re.findall(r"\d+", sides))), list(shapes_of(generation))
    if shape not in shapes or sides != "x".join(map(str, shape)):
        size = log(max(prod(shape), 1))
        near = min(shapes, key=lambda x: (abs(log(prod(x)) - size), x != tuple(sorted(shape)), x))
        text = f"{option} {name} is no slice of {generation}; did you mean '{generation}:"
        raise SettingError(f"{text}{'x'.join(map(str, near))}', of {prod(near)} chips?")
    return Slice(name, CHIPS[generation], shape, count)


def shapes_of(generation: str) -> Iterator[tuple[int, ...]]:
    """Yield the shapes of all slices of a generation, up to the full pod."""
    chip = CHIPS[generation]
    if chip.dimensions == 2:
        yield from _FLAT
        return
    yield from _DEEP
    for sides in combinations_with_replacement(range(4, 65, 4), 3):
        if prod(sides) <= chip.pod:
            yield sides

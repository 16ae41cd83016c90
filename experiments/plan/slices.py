"""TPU chips: the one place of the figures that plans are made with, and the slices that can be asked for.

Sources. Google's documentation of each generation (cloud.google.com/tpu/docs/v4, v5e, v5p, v6e, tpu7x):
products, HBM, network and size of a pod. ``clock``: of v4, v5e and v5p peak over products a cycle (4 units of
128 x 128 a core); of v6e and tpu7x what makes the compiler's cycles for a product of 8192^3 70 and 80 % of
peak (on the others 87 to 93 %). ``usable``: what libtpu 0.0.42 says is available when a program does not fit;
the runtime keeps the rest.
"""

import re
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from itertools import combinations_with_replacement
from math import ceil, log, prod

from lm.settings import SettingError, nearest

GIB = 2**30


@dataclass(frozen=True)
class Chip:
    """What one chip of a generation can do, and how many of them there are together."""

    peak: float  # bfloat16 products [FLOP/s]
    clock: float  # [cycles/s]
    usable: float  # HBM that programs may fill [bytes]
    bandwidth: float  # of HBM [bytes/s]
    link: float  # of one link to a neighbour, one way: the published figure over twice the links [bytes/s]
    outside: float  # to other slices, over the data-centre network [bytes/s]
    pod: int  # chips of the largest slice
    dimensions: int  # of the network
    devices: int = 1  # that jax makes of a chip
    # of jax.experimental.topologies.get_topology_desc
    options: Mapping[str, str] = field(default_factory=dict)


CHIPS = {
    # two cores that are one device; no figure is published for the network outside: that of v5p
    "v4": Chip(
        275e12, 1.05e9, 30.75 * GIB, 1.2e12, 50e9, 6.25e9, 4_096, 3, options={"chip_config_name": "megacore"}
    ),
    "v5e": Chip(197e12, 1.5e9, 15.75 * GIB, 819e9, 50e9, 3.125e9, 256, 2),
    # two cores that are one device
    "v5p": Chip(459e12, 1.75e9, 95.74 * GIB, 2_765e9, 100e9, 6.25e9, 8_960, 3),
    "v6e": Chip(918e12, 1.75e9, 31.25 * GIB, 1_638e9, 100e9, 12.5e9, 256, 2),
    "tpu7x": Chip(2_307e12, 2.2e9, 189.5 * GIB, 7_380e9, 100e9, 12.5e9, 9_216, 3, devices=2),
}
_FLAT = ((1, 1), (2, 2), (2, 4), (4, 4), (4, 8), (8, 8), (8, 16), (16, 16))
_DEEP = ((2, 2, 1), (2, 2, 2), (2, 2, 4), (2, 4, 4))  # larger ones are made of cubes of 4 x 4 x 4


@dataclass(frozen=True)
class Slice:
    """Chips that one network joins; ``count`` such slices are joined by the data centre's."""

    name: str  # "v5e:4x4"
    chip: Chip
    shape: tuple[int, ...]
    count: int = 1

    @property
    def chips(self) -> int:
        return prod(self.shape) * self.count

    @property
    def devices(self) -> int:
        return self.chips * self.chip.devices

    @property
    def room(self) -> float:
        """What a program may fill of a device [bytes]."""
        return self.chip.usable / self.chip.devices

    def bandwidth(self, axes: tuple[str, ...], size: int) -> float:
        """Bytes/s that a device moves in a collective over ``size`` devices along these mesh axes.

        All links count, both ways, of the dimensions of the network that so many devices fill; half of them
        where the last chip is not joined to the first: sides other than 16 but in slices made of cubes of 4 x
        4 x 4. Slices are left only by what goes over the mesh axis "slice".
        """
        if "slice" in axes:
            return self.chip.outside / self.chip.devices
        rest, links, cubes = (
            ceil(size / self.chip.devices),
            0,
            self.chip.dimensions == 3 and min(self.shape) >= 4,
        )
        for length in sorted(self.shape, reverse=True):
            links += (rest > 1) * (2 if cubes or length == 16 else 1)
            rest = ceil(rest / length)
        return self.chip.link * (links or 2) / self.chip.devices


def find_slice(name: str, count: int = 1) -> Slice:
    """The slice called "v5e:4x4"; SettingError with the nearest one that there is."""
    if count < 1:
        raise SettingError(
            f"mesh.slice={count} should say how many slices there are: --topology is one of them"
        )
    generation, _, shape = name.partition(":")
    if generation not in CHIPS:
        raise SettingError(f"--topology {name}: a TPU {generation!r} is unknown{nearest(generation, CHIPS)}")
    asked = tuple(map(int, re.findall(r"\d+", shape)))
    shapes = list(shapes_of(generation))
    if asked not in shapes or shape != "x".join(map(str, asked)):
        wanted = max(prod(asked), 1)
        close = sorted(
            shapes, key=lambda known: (abs(log(prod(known) / wanted)), known != tuple(sorted(asked)), known)
        )
        near = f"{generation}:{'x'.join(map(str, close[0]))}"
        raise SettingError(
            f"--topology {name} is no slice of {generation}; did you mean {near!r}, of {prod(close[0])} "
            "chips?"
        )
    return Slice(name, CHIPS[generation], asked, count)


def shapes_of(generation: str) -> Iterator[tuple[int, ...]]:
    """The shapes of all slices of a generation, up to the full pod."""
    chip = CHIPS[generation]
    if chip.dimensions == 2:
        yield from _FLAT
        return
    yield from _DEEP
    for sides in combinations_with_replacement(range(4, 65, 4), 3):
        if prod(sides) <= chip.pod:
            yield sides

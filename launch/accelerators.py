"""The one table of TPUs: what each is called by each way, its machines, and what libtpu is told."""

import math
from dataclasses import dataclass
from typing import NamedTuple

from launch.command import LaunchError, closest


class Generation(NamedTuple):
    """A generation of TPUs; names and sizes are those of cloud.google.com/tpu/docs and of xpk."""

    sides: int  # numbers in a topology
    cores: int  # TensorCores of a chip, which types such as v5p-256 count
    type: str  # in types such as v5litepod-16
    one_host: int  # chips of the largest slice on one host; hosts of larger ones have 4 each
    runtime: str = ""  # image of the VMs that queued resources make; "" if these do not offer it
    machine: str = ""  # machine type of Compute Engine, with {} for its chips; "" if it does not offer it
    family: str = ""  # image family of these machines


_IMAGES = "ubuntu-accel-2204-amd64-tpu-v5e-v5p-v6e"
GENERATIONS = {
    "v4": Generation(3, 2, "v4", 4, runtime="tpu-ubuntu2204-base"),
    "v5e": Generation(2, 1, "v5litepod", 8, runtime="v2-alpha-tpuv5-lite"),
    "v5p": Generation(3, 2, "v5p", 4, "v2-alpha-tpuv5", "ct5p-hightpu-{}t", _IMAGES),
    "v6e": Generation(2, 1, "v6e", 8, "v2-alpha-tpuv6e", "ct6e-standard-{}t", _IMAGES),
    "tpu7x": Generation(
        3, 2, "tpu7x", 4, machine="tpu7x-standard-{}t", family="ubuntu-accel-2404-amd64-tpu-tpu7x"
    ),
}

# Flags of libtpu as MaxText sets them (benchmarks/xla_flags_library.py): collectives run asynchronously,
# fused with the computation that hides their latency.
ASYNC_COLLECTIVES = (
    "--xla_tpu_enable_async_collective_fusion=true",
    "--xla_tpu_enable_async_collective_fusion_fuse_all_gather=true",
    "--xla_tpu_enable_async_collective_fusion_multiple_steps=true",
    "--xla_tpu_overlap_compute_collective_tc=true",
    "--xla_enable_async_all_gather=true",
    "--xla_enable_async_all_reduce=true",
)
# The same between slices: the sums of gradients over the data-centre network, across steps.
BETWEEN_SLICES = (
    "--xla_tpu_enable_data_parallel_all_reduce_opt=true",
    "--xla_tpu_data_parallel_opt_different_sized_ops=true",
)


def libtpu_flags(slices: int) -> str:
    """Return the value of ``LIBTPU_INIT_ARGS`` for a run on so many slices."""
    return " ".join(ASYNC_COLLECTIVES + (BETWEEN_SLICES if slices > 1 else ()))


@dataclass(frozen=True)
class Slice:
    """The shape of a TPU slice, as ``lm plan`` compiles for it."""

    name: str  # key in GENERATIONS
    topology: str  # such as 4x4x8; "" if only the number of chips is known
    chips: int

    @property
    def generation(self) -> Generation:
        return GENERATIONS[self.name]

    @property
    def hosts(self) -> int:
        """Return the number of its machines, on queued resources and Compute Engine."""
        return 1 if self.chips <= self.generation.one_host else self.chips // 4

    @property
    def type(self) -> str:
        """Return the type, such as v5p-256, which has no shape."""
        return f"{self.generation.type}-{self.chips * self.generation.cores}"

    @property
    def machine(self) -> str:
        """Return the machine type of its hosts on Compute Engine."""
        return self.generation.machine.format(self.chips // self.hosts)

    def __str__(self) -> str:
        return f"{self.name}:{self.topology}" if self.topology else self.type


def parse_slice(text: str) -> Slice:
    """Return the slice of a topology such as ``v5p:4x4x8``, or of a type such as ``v5p-256``."""
    name, colon, size = text.lower().partition(":")
    if not colon:
        name, _, size = name.partition("-")
    by_type = {generation.type: known for known, generation in GENERATIONS.items()}
    name = name if name in GENERATIONS else by_type.get(name, name)
    if name not in GENERATIONS:
        raise LaunchError(
            f"--accelerator {text}: there is no TPU {name!r}{closest(name, GENERATIONS)} (for GPUs: "
            "lm launch slurm submits rows, lm run ROW --dry-run estimates the hours on one)"
        )
    generation, sides = GENERATIONS[name], size.split("x")
    example = f"{name}:{'x'.join(['4'] * generation.sides)}"
    if not all(side.isdecimal() and int(side) for side in sides):
        raise LaunchError(
            f"--accelerator {text} should be a topology, as lm plan takes it, such as {example}"
        )
    if not colon and len(sides) == 1:
        if int(size) % generation.cores:
            raise LaunchError(
                f"--accelerator {text}: a chip of {name} has {generation.cores} cores, of which {size} "
                f"should be a multiple; a topology such as {example} counts chips"
            )
        topology, chips = "", int(size) // generation.cores
    elif len(sides) == generation.sides:
        topology, chips = size, math.prod(map(int, sides))
    else:
        raise LaunchError(
            f"--accelerator {text}: {name} has topologies of {generation.sides} sides, as {example}"
        )
    if chips > generation.one_host and chips % 4:
        raise LaunchError(f"--accelerator {text}: {chips} chips are not whole hosts of 4: take {example}")
    return Slice(name, topology, chips)

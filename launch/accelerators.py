"""The one table of the TPUs that queued resources give: names, runtime images, hosts."""

import math
from typing import NamedTuple

from launch.command import LaunchError, closest


class Generation(NamedTuple):
    """What a name ``PREFIX-N`` stands for."""

    topology: str  # its name in topologies, such as v5e:4x4
    runtime: str  # image of the TPU VMs
    cores: int  # N counts cores; so many a chip
    alone: int  # chips of the largest slice on one host; larger slices have 4 on each


# Images and hosts: cloud.google.com/tpu/docs/{runtimes,v4,v5e,v5p,v6e}. Which sizes
# there are is the zone's matter.
GENERATIONS = {
    "v4": Generation("v4", "tpu-ubuntu2204-base", 2, 4),
    "v5litepod": Generation("v5e", "v2-alpha-tpuv5-lite", 1, 8),
    "v5p": Generation("v5p", "v2-alpha-tpuv5", 2, 4),
    "v6e": Generation("v6e", "v2-alpha-tpuv6e", 1, 8),
}
ON_GKE = "tpu7x"  # the Cloud TPU API ends before it: cloud.google.com/tpu/docs/tpu7x


def resolve(accelerator: str) -> tuple[str, str, int]:
    """Accelerator type, runtime image and hosts of ``v5litepod-16``, or of a topology such as ``v5e:4x4``."""
    prefix, _, size = accelerator.lower().replace(":", "-").partition("-")
    prefix = next((name for name, known in GENERATIONS.items() if prefix == known.topology), prefix)
    if prefix == ON_GKE:
        raise LaunchError(
            f"--accelerator {accelerator}: queued resources do not offer {ON_GKE}; on GKE: TPU_TYPE={ON_GKE}-"
            f"{size or 'TOPOLOGY'} CLUSTER=... RUNS=/bucket/runs launch/xpk.sh NAME (launch/README.md)"
        )
    if prefix not in GENERATIONS:
        raise LaunchError(
            f"--accelerator {accelerator}: there is no TPU {prefix!r}{closest(prefix, GENERATIONS)}"
        )
    generation, sides = GENERATIONS[prefix], size.split("x")
    if not all(side.isdigit() for side in sides):
        example = f"{prefix}-16, or a topology like {generation.topology}:2x4"
        raise LaunchError(f"--accelerator {accelerator} should be like {example}")
    count = math.prod(map(int, sides)) * (generation.cores if ":" in accelerator else 1)
    chips = count // generation.cores
    return f"{prefix}-{count}", generation.runtime, 1 if chips <= generation.alone else chips // 4

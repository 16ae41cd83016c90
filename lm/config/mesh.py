"""Settings of the device mesh, without jax, so that listing experiments does not import it."""

from collections.abc import Mapping
from dataclasses import asdict, dataclass
from math import prod

from lm.config.base import SettingError


@dataclass(frozen=True)
class MeshConfig:
    """The mesh of devices; one size may be -1: all the devices that the others leave.

    The axes are in the order of their traffic, the least first: devices that are far apart communicate least.
    """

    # number of TPU slices that only a data-centre network joins; each holds all parameters [slices]
    slice: int = 1
    # number of data-parallel groups, each with all parameters; -1: all remaining devices [devices]
    data: int = -1
    # number of devices over which the batch and the "embed" axis of the parameters are sharded [devices]
    fsdp: int = 1
    # number of devices over which the batch and a layer's experts are sharded, by exchanging tokens [devices]
    expert: int = 1
    # number of devices over which the positions of a row are sharded, for long rows [devices]
    sequence: int = 1
    # number of devices over which heads, feed-forward width and vocabulary are sharded [devices]
    tensor: int = 1

    def sizes(self, devices: int) -> dict[str, int]:
        """Return ``{mesh axis: size}`` on so many devices.

        Raises SettingError if the sizes do not multiply to that.
        """
        sizes = asdict(self)
        rest = [name for name, size in sizes.items() if size == -1]
        fixed = prod(size for size in sizes.values() if size != -1)
        if len(rest) > 1 or any(size < 1 and size != -1 for size in sizes.values()):
            raise SettingError(
                f"{describe_mesh(sizes)} should be sizes of at least 1, of which one may be -1"
            )
        if rest and devices % fixed == 0:
            sizes[rest[0]] = devices // fixed
        elif fixed != devices:
            needed = f"{'a multiple of ' if rest else ''}{fixed} devices"
            raise SettingError(f"{describe_mesh(sizes)} needs {needed} and there are {devices}")
        return sizes


def describe_mesh(sizes: Mapping[str, int]) -> str:
    """Return the axes that are used, as in ``"mesh.data=2, mesh.fsdp=4"``, or else ``"mesh.data=1"``."""
    used = {axis: size for axis, size in sizes.items() if size != 1} or {"data": 1}
    return ", ".join(f"mesh.{axis}={size}" for axis, size in used.items())

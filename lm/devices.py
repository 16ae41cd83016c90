"""Looks for accelerators by their device files, before jax is imported."""

import os
import sys
from importlib.util import find_spec
from itertools import takewhile
from pathlib import Path


def has_tpu() -> bool:
    """Return whether this machine has a device file of a TPU."""
    return any(Path("/dev").glob("accel[0-9]*")) or any(Path("/dev/vfio").glob("[0-9]*"))


def has_accelerator() -> bool:
    """Return whether this machine has a device file of a TPU or a GPU."""
    gpus = ("nvidiactl", "dxg", "kfd")  # of NVIDIA, in WSL2, of AMD
    return has_tpu() or any(Path("/dev", name).exists() for name in gpus)


def visible_gpus() -> list[str]:
    """Return the NVIDIA GPUs that this process may use, as CUDA_VISIBLE_DEVICES names them.

    CUDA sees those before the first name that is none of a GPU, such as -1 or NoDevFiles.
    """
    named = os.environ.get("CUDA_VISIBLE_DEVICES")
    if named is not None:
        return [*takewhile(_names_gpu, (name.strip() for name in named.split(",")))]
    files = [path.name.removeprefix("nvidia") for path in Path("/dev").glob("nvidia[0-9]*")]
    return sorted(filter(str.isdecimal, files), key=int)


def _names_gpu(name: str) -> bool:
    return name.isdecimal() or name.startswith(("GPU-", "MIG-"))


def choose_platform() -> None:
    """Make jax use the CPU if libtpu is installed, for planning, on a machine without TPU or GPU.

    Otherwise libtpu looks for a TPU and prints errors about worker hostnames. A platform that was chosen
    already stays.
    """
    if "JAX_PLATFORMS" in os.environ or has_accelerator() or not find_spec("libtpu"):
        return
    os.environ["JAX_PLATFORMS"] = "cpu"
    jax = sys.modules.get("jax")  # which has read the environment by then
    if jax is not None and not jax.config.jax_platforms:
        jax.config.update("jax_platforms", "cpu")

"""Which accelerators this machine has, by their device files: asked before jax is imported."""

import os
import sys
from importlib.util import find_spec
from pathlib import Path


def has_tpu() -> bool:
    """Whether there is a TPU's device file."""
    return any(Path("/dev").glob("accel[0-9]*")) or any(Path("/dev/vfio").glob("[0-9]*"))


def has_accelerator() -> bool:
    """Whether there is a device file of a TPU or a GPU."""
    gpus = ("nvidiactl", "dxg", "kfd")  # of NVIDIA, in WSL2, of AMD
    return has_tpu() or any(Path("/dev", name).exists() for name in gpus)


def choose_platform() -> None:
    """Tell jax to use the CPU where libtpu is installed, to plan with, and no TPU or GPU is there.

    Else jax has libtpu look for a TPU, which prints errors of worker hostnames that nobody asked for. A
    platform that was chosen already stays.
    """
    if "JAX_PLATFORMS" in os.environ or has_accelerator() or not find_spec("libtpu"):
        return
    os.environ["JAX_PLATFORMS"] = "cpu"
    jax = sys.modules.get("jax")  # which has read the environment by then
    if jax is not None and not jax.config.jax_platforms:
        jax.config.update("jax_platforms", "cpu")

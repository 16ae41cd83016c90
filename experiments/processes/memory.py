"""Tune memory: glibc's, which is set before Python starts, and Python's garbage collector."""

import gc
import os
import sys

from lm.devices import has_accelerator

# Of glibc.malloc. Else a small model's step on a CPU spends up to half of its time on getting memory: every
# buffer of XLA is mapped, filled with zeros by the kernel and given back anew.
TUNABLES = {
    "hugetlb": 1,  # huge pages: a 512th of the page faults
    "mmap_max": 0,  # mappings of single buffers: none, all come from the heap
    "trim_threshold": 2**40,  # free memory at the end of the heap, before it is given back [bytes]
    "top_pad": 2**26,  # by which the heap grows beyond what is asked for [bytes]
    "arena_max": 1,  # heaps, whatever the number of threads
}


def tune_memory() -> None:
    """Start this process again with TUNABLES, once; nothing where they are set, unknown or of no use."""
    if "GLIBC_TUNABLES" in os.environ or has_accelerator() or not has_glibc():
        return
    os.execve(sys.executable, sys.orig_argv, os.environ | {"GLIBC_TUNABLES": tunables()})


def tunables() -> str:
    """Return TUNABLES as the environment has them, in GLIBC_TUNABLES."""
    return ":".join(f"glibc.malloc.{name}={value}" for name, value in TUNABLES.items())


def has_glibc() -> bool:
    """Return whether the C library is glibc: macOS and musl lack the name, or its value."""
    try:
        return (os.confstr("CS_GNU_LIBC_VERSION") or "").startswith("glibc")
    except (ValueError, OSError):
        return False


def collect_garbage_rarely() -> None:
    """Have Python look for garbage after 100,000 new objects, not 700 (the default of Python 3.11).

    Importing jax, tracing and reading syntax trees make millions of objects that stay: looking through them
    took 6 % of `lm run --check`.
    """
    gc.set_threshold(100_000, 50, 100)  # of generations 0, 1 and 2; the defaults of the others are 10

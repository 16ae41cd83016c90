"""Processes that take turns, one a side and a block of calls each: what else the machine does meets all.

A side is a command and the environment that its process gets. The process calls ``serve``; ``compare`` starts
all sides, gives them turns and prints how many times as long as the first each other one takes. Only the
standard library: the Python of an opponent has nothing of this project.
"""

import json
import os
import platform
import resource
import subprocess
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass, field
from datetime import date
from pathlib import Path
from statistics import median

# how names of variables begin that decide about threads, memory and compilers
DECISIVE = ("GLIBC_", "MALLOC_", "LD_PRELOAD", "OMP_", "MKL_", "KMP_", "XLA_", "JAX_", "TORCH", "ATEN_")
Step = Callable[[], object]  # what is timed; it returns when its result is there


@dataclass(frozen=True)
class Side:
    """A program that calls ``serve``."""

    name: str
    command: Sequence[str]
    environment: Mapping[str, str] = field(default_factory=dict)  # besides this process's

    def variables(self) -> dict[str, str]:
        """Return those of its environment that are DECISIVE."""
        every = os.environ | dict(self.environment)
        return {name: every[name] for name in sorted(every) if name.startswith(DECISIVE)}


@dataclass(frozen=True)
class Measured:
    """What the process of a side has measured."""

    name: str
    first: float  # making what is timed, and its first call, which compiles [seconds]
    seconds: list[float]  # of a call, in each block
    peak: float  # most memory of the process at any time [MB]


def serve(make: Callable[[], Step], calls: int) -> None:
    """Be the process of a side: ``make`` what is timed, then time ``calls`` of it for each line of stdin."""
    begin = time.perf_counter()
    step = make()
    step()
    _tell(first=time.perf_counter() - begin)
    for _ in sys.stdin:
        begin = time.perf_counter()
        for _ in range(calls):
            step()
        seconds = (time.perf_counter() - begin) / calls
        _tell(seconds=seconds, peak=resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1e3)


def compare(title: str, sides: Sequence[Side], blocks: int) -> list[Measured]:
    """Return and print the times of all sides in so many blocks, after one that is not counted."""
    with ExitStack() as stack:
        pipes = {"stdin": subprocess.PIPE, "stdout": subprocess.PIPE, "text": True}
        environments = [os.environ | dict(side.environment) for side in sides]
        processes, firsts = [], []
        for side, environment in zip(sides, environments, strict=True):
            process = stack.enter_context(subprocess.Popen([*side.command], env=environment, **pipes))
            stack.callback(process.stdin.close)  # its loop then ends
            firsts.append(_hear(process, side)["first"])  # one after the other: they compile undisturbed
            processes.append(process)
        rounds = []
        for _ in range(blocks + 1):
            rounds.append([])
            for process, side in zip(processes, sides, strict=True):
                print(file=process.stdin, flush=True)
                rounds[-1].append(_hear(process, side))
    measured = []
    for side, first, turns in zip(sides, firsts, zip(*rounds[1:], strict=True), strict=True):
        measured.append(Measured(side.name, first, [turn["seconds"] for turn in turns], turns[-1]["peak"]))
    for each in measured:
        print(f"{title} | {_row(each, measured[0])}", flush=True)
    return measured


def describe(sides: Sequence[Side]) -> None:
    """Print the machine, the date and the environment of each side."""
    models = [
        line for line in Path("/proc/cpuinfo").read_text().splitlines() if line.startswith("model name")
    ]
    cores = sorted(os.sched_getaffinity(0))
    print(f"{date.today()}, {models[0].split(':')[1].strip()}, cores {cores}, {platform.platform()}")
    for side in sides:
        variables = " ".join(f"{name}={value}" for name, value in side.variables().items())
        print(f"{side.name}: {variables or 'no variables of threads, memory or compilers'}")


def _row(side: Measured, ours: Measured) -> str:
    """Return a line: a side's median time, memory and first call, and its time over ours by block."""
    values = (
        f"{side.name} | {1e3 * median(side.seconds):.1f} ms | {side.peak:.0f} MB | first {side.first:.1f} s"
    )
    ratios = [theirs / own for theirs, own in zip(side.seconds, ours.seconds, strict=True)]
    spread = f"{median(ratios):.2f} x ({min(ratios):.2f} to {max(ratios):.2f})"
    return f"{values} | {'' if side is ours else spread}"


def _tell(**values: float) -> None:
    print(json.dumps(values), flush=True)


def _hear(process: subprocess.Popen, side: Side) -> dict[str, float]:
    line = process.stdout.readline()
    if not line.startswith("{"):
        raise SystemExit(f"{side.name} ended, its output says why: {' '.join(side.command)}")
    return json.loads(line)

"""What a user sees while rows train: one bar with the time left, a line for each finished part, and tools."""

import re
import sys
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from importlib.util import find_spec
from typing import Any

from rich.console import Console
from rich.progress import BarColumn, Progress, TaskProgressColumn, TextColumn, TimeElapsedColumn

from experiments.processes.place import STARTED
from lm.config.base import SettingError


@dataclass(frozen=True)
class Tools:
    """Tools that watch training and change none of it."""

    # first and last step of each stage to trace with jax's profiler, such as 10:15; the trace is in
    # FOLDER/profile
    profile: str = ""
    # also log to this project of Weights & Biases; the variables WANDB_MODE, WANDB_ENTITY, ... apply
    wandb: str = ""

    def __post_init__(self):
        if self.profile and not (self.profile_steps and 0 < self.profile_steps[0] <= self.profile_steps[1]):
            raise SettingError(f"--profile {self.profile} should be FIRST:LAST, such as 10:15 [steps]")
        if self.wandb and find_spec("wandb") is None:
            raise SettingError(f"--wandb {self.wandb} needs its package: pip install 'lm-study[wandb]'")

    @property
    def profile_steps(self) -> tuple[int, int] | None:
        """Return the first and the last step to trace, or None without ``profile``."""
        match = re.fullmatch(r"(\d+):(\d+)", self.profile)
        return match and (int(match[1]), int(match[2]))


NO_TOOLS = Tools()


class Reporter:
    """Told of work done, in steps; shows it on a terminal, and as plain lines where there is none."""

    def __init__(self, console: Console, bar: Progress, total: int):
        self.console, self._bar = console, bar
        self._task = bar.add_task("starting", total=total, detail="", left="")
        self._since: float | None = None  # when the first step was done
        self._done = 0  # steps since

    def start(self, phase: str, detail: str = "") -> None:
        """Name what is being done now, and with ``detail`` what comes before its first step."""
        self._bar.update(self._task, description=phase, detail=detail)
        if not self.console.is_terminal:
            self.console.print(phase)

    def began(self, compiling: float) -> None:
        """The first step of a phase is done; of the first phase it is said how long that took."""
        if self._since is None:
            since = time.monotonic() - STARTED
            self.say(f"first step {since:.1f} s after the start; compiling it took {compiling:.1f} s")
            self._since = time.monotonic()

    def advance(self, steps: int, detail: str = "") -> None:
        """``steps`` more are done; ``detail`` is the newest figure, such as the loss.

        The time left follows from single steps after the first, whose compilation would distort it.
        """
        self._bar.update(self._task, advance=steps, detail=detail)
        self._done += steps == 1 and self._since is not None
        if self._done and self._since is not None:
            task = next(task for task in self._bar.tasks if task.id == self._task)
            seconds_per_step = (time.monotonic() - self._since) / self._done
            remaining = max(task.remaining or 0, 0)
            self._bar.update(self._task, left=f"ETA {duration(seconds_per_step * remaining)}")

    def say(self, line: str) -> None:
        """A line that stays."""
        self.console.print(line, highlight=False, markup=False, soft_wrap=True)

    def complain(self, line: str) -> None:
        """A line about what failed, which no process keeps to itself."""
        print(line, file=sys.stderr) if self.console.quiet else self.say(line)


class JobReporter(Reporter):
    """Reports on one of several runs that train at once, with a bar of its own below that of all."""

    def __init__(self, whole: Reporter, name: str, total: int):
        super().__init__(whole.console, whole._bar, total)
        self._whole, self._name = whole, name
        self._bar.update(self._task, description=name)

    def start(self, phase: str, detail: str = "") -> None:
        super().start(f"{self._name}: {phase}", detail)

    def began(self, compiling: float) -> None:
        self._whole.began(compiling)
        self._since = self._since or time.monotonic()

    def advance(self, steps: int, detail: str = "") -> None:
        super().advance(steps, detail)
        self._whole.advance(steps)

    def hear(self, told: Mapping[str, Any]) -> None:
        """Repeat a call that a ``Told`` reporter in another process got; remove the bar when the run ends."""
        call, *values = told.get("call", [None])
        if call in TOLD:
            getattr(self, call)(*values)
        if "code" in told:
            self._bar.remove_task(self._task)


class Told(Reporter):
    """A Reporter that passes on what it is told, to be shown by the process at the other end of ``send``."""

    def __init__(self, send: Callable[[dict], None]):
        def pass_on(call: str, *values: Any) -> None:
            send({"call": [call, *values]})

        for call in TOLD:
            setattr(self, call, partial(pass_on, call))


TOLD = ("start", "began", "advance", "say", "complain")


@contextmanager
def reporting(total: int, quiet: bool = False) -> Iterator[Reporter]:
    """A Reporter over ``total`` steps, whose bar ends with the block; ``quiet``: another process shows it."""
    console = Console(stderr=False, quiet=quiet, emoji=False)
    progress = (TextColumn("{task.description}"), BarColumn(bar_width=30), TaskProgressColumn())
    times = (TimeElapsedColumn(), TextColumn("{task.fields[left]}"), TextColumn("{task.fields[detail]}"))
    with Progress(*progress, *times, console=console, transient=True, disable=not console.is_terminal) as bar:
        yield Reporter(console, bar, total)


def duration(seconds: float) -> str:
    """``"1 h 02 min"``, ``"3 min 20 s"`` or ``"12 s"``."""
    minutes, below = divmod(round(seconds), 60)
    hours, minutes = divmod(minutes, 60)
    if hours:
        return f"{hours} h {minutes:02d} min"
    return f"{minutes} min {below:02d} s" if minutes else f"{below} s"

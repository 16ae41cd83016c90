"""Shows a user how training goes: a bar with the time left, and a line for each finished part."""

import re
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from importlib.util import find_spec
from typing import Any

from rich.console import Console
from rich.progress import (
    BarColumn,
    Progress,
    ProgressColumn,
    Task,
    TaskProgressColumn,
    TextColumn,
    TimeElapsedColumn,
)
from rich.table import Column

from experiments.processes.restart import STARTED
from lm.config.base import SettingError

WIDE = 110  # columns of a terminal that has room for a bar and the elapsed time
FIGURES = 42  # columns of the figures beside a name: share 4, time left 15, loss 19 and the gaps


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
    """Shows the progress of training in steps: with a bar on a terminal, and as plain lines elsewhere."""

    def __init__(self, console: Console, bar: Progress, total: int):
        self.console, self._bar = console, bar
        self._task = bar.add_task("starting", total=total, detail="", left="")
        self._since: float | None = None  # when the first step was done
        self._done = 0  # steps since
        self._tenths = 0  # tenths of all steps for which a line was printed

    def describe(self, work: str, detail: str = "") -> None:
        """Show beside the bar, if there is one, what it is of."""
        self._bar.update(self._task, description=work, detail=detail)

    def start(self, phase: str, detail: str = "") -> None:
        """Show that a phase begins; ``detail`` says what comes before its first step."""
        self.describe(phase, detail)
        if not self.console.is_terminal:
            self.console.print(f"{phase} ({detail})" if detail else phase)

    def resumed(self, phase: str, step: int, last_step: int) -> None:
        """Say that a phase goes on from the checkpoint of ``step``, which an earlier process saved."""
        self.say(f"{phase} resumed at step {step:,} of {last_step:,}")

    def first_step_done(self, compiling: float, run: str = "") -> None:
        """Clear the detail that a stage shows until its first step, which is now done.

        The first call, for the first stage, also starts the clock by which the time left is estimated. It
        prints how long after the start of the process the step was done, and how long compiling it took
        (``compiling``) [seconds]. ``run``: the name of the run whose step it was, of several at once.
        """
        self._bar.update(self._task, detail="")
        if self._since is None:
            since = time.monotonic() - STARTED
            of_run = f"{run}: " if run else ""
            self.say(f"{of_run}first step {since:.1f} s after the start; compiling it took {compiling:.1f} s")
            self._since = time.monotonic()

    def advance(self, steps: int, detail: str | None = None) -> None:
        """Add ``steps`` to those done. Show ``detail``, such as the newest loss, until another is given.

        The time left is estimated from the steps after the first that are reported one by one. Steps that are
        reported together were done by an earlier process, and the first step includes compilation.
        """
        self._bar.update(self._task, advance=steps)
        if detail is not None:
            self._bar.update(self._task, detail=detail)
        if self._since is None:
            return
        if steps == 1:
            self._done += 1
        task = next(task for task in self._bar.tasks if task.id == self._task)
        if self._done:
            seconds_per_step = (time.monotonic() - self._since) / self._done
            remaining = max(task.remaining or 0, 0)
            self._bar.update(self._task, left=f"ETA {duration(seconds_per_step * remaining)}")
        if detail is not None and not self.console.is_terminal:
            self.log_tenth(task)

    def log_tenth(self, task: Task) -> None:
        """Print a line whenever another tenth of the steps is done: a log file shows no bar."""
        tenths = int(10 * task.completed / (task.total or 1))
        if tenths > self._tenths:
            self._tenths = tenths
            figures = ", ".join(filter(None, (task.fields["detail"], task.fields["left"])))
            self.say(f"{10 * tenths} % of all steps: {figures}")

    def say(self, line: str) -> None:
        """Print a line that stays."""
        self.console.print(line, highlight=False, markup=False, soft_wrap=True)

    def complain(self, line: str) -> None:
        """Print a line about a failure, also where this process is quiet."""
        print(line, file=sys.stderr) if self.console.quiet else self.say(line)


class JobReporter(Reporter):
    """Shows one of several runs that train at once, by a bar of its own below that of all."""

    def __init__(self, whole: Reporter, name: str, total: int):
        super().__init__(whole.console, whole._bar, total)
        self._whole, self._name = whole, name
        self._bar.update(self._task, description=name)

    def start(self, phase: str, detail: str = "") -> None:
        super().start(f"{self._name}: {phase}", detail)

    def resumed(self, phase: str, step: int, last_step: int) -> None:
        self._whole.resumed(f"{self._name}: {phase}", step, last_step)

    def first_step_done(self, compiling: float, run: str = "") -> None:
        self._whole.first_step_done(compiling, run or self._name)
        self._bar.update(self._task, detail="")
        self._since = self._since or time.monotonic()

    def advance(self, steps: int, detail: str | None = None) -> None:
        super().advance(steps, detail)
        self._whole.advance(steps)

    def log_tenth(self, task: Task) -> None:
        """Print nothing: of many runs at once, the lines for the finished ones suffice."""

    def repeat(self, call: tuple[str, tuple[Any, ...]]) -> None:
        """Make a call that a ``RemoteReporter`` in another process got."""
        method, values = call
        getattr(self, method)(*values)

    def close(self) -> None:
        """Remove the bar: the run has ended."""
        self._bar.remove_task(self._task)


class RemoteReporter(Reporter):
    """A Reporter in a child process, which sends its calls to the parent, which shows them."""

    def __init__(self, send: Callable[[tuple[str, tuple[Any, ...]]], None]):
        for method in ("start", "resumed", "first_step_done", "advance", "say", "complain"):
            setattr(self, method, self._sending(method, send))

    @staticmethod
    def _sending(method: str, send: Callable[[tuple[str, tuple[Any, ...]]], None]) -> Callable[..., None]:
        return lambda *values: send((method, values))


@contextmanager
def reporting(total: int, quiet: bool = False) -> Iterator[Reporter]:
    """Yield a Reporter over ``total`` steps, whose bar ends with the block; a ``quiet`` one shows nothing."""
    console = Console(stderr=False, quiet=quiet, emoji=False)
    name, percentage = TextColumn("{task.description}"), TaskProgressColumn()
    times = TextColumn("{task.fields[left]}"), TextColumn("{task.fields[detail]}")
    columns: tuple[ProgressColumn, ...] = (
        name,
        BarColumn(bar_width=30),
        percentage,
        TimeElapsedColumn(),
        *times,
    )
    if console.width < WIDE:  # the words alone have room
        width = max(console.width - FIGURES, 8)
        name = TextColumn("{task.description}", table_column=Column(no_wrap=True, max_width=width))
        columns = (name, percentage, *times)
    with Progress(*columns, console=console, transient=True, disable=not console.is_terminal) as bar:
        yield Reporter(console, bar, total)


YEAR = 365.25 * 86_400  # [seconds]


def duration(seconds: float) -> str:
    """Return a duration as text: "1,580 years", "1 h 02 min", "3 min 20 s" or "12 s"."""
    if seconds >= 2 * YEAR:
        return f"{seconds / YEAR:,.0f} years"
    minutes, below = divmod(round(seconds), 60)
    hours, minutes = divmod(minutes, 60)
    if hours:
        return f"{hours} h {minutes:02d} min"
    return f"{minutes} min {below:02d} s" if minutes else f"{below} s"

"""What ends training early: a signal, after the step and its save; a watchdog, when nothing happens.

Imports no jax before training does: the parent process reads the exit code here.
"""

import faulthandler
import os
import signal
import sys
import threading
import time
from collections.abc import Callable
from contextlib import suppress
from itertools import count
from pathlib import Path
from typing import TypeVar

STUCK = 43  # exit code of a process that the watchdog ended
STACKS_WITHIN = 10.0  # for writing the stacks [seconds]
TWICE = 2.0  # before this a second signal counts as the first: a launcher may send it to several [seconds]

_sync_points = count(1)  # how often all processes looked for a signal: their common clock in all stages
_active: "Stopping | None" = None  # the context we are in

T = TypeVar("T")


class Interrupted(KeyboardInterrupt):
    """A signal asked to stop; the state after ``step`` is saved and training resumes from it."""

    def __init__(self, name: str, step: int):
        what = f"stopped after step {step}, which is saved" if step else "nothing was begun"
        super().__init__(f"{name}: {what}")
        self.signal, self.step = name, step


class Stopping:
    """In this context SIGINT and SIGTERM are remembered instead of obeyed, and a watchdog looks on.

    A second signal is obeyed where there is one process. With several, jax passes a SIGTERM on to all, and
    they agree on the step to stop after. The watchdog ends a process that has not called ``beat`` for
    ``patience`` seconds (0: never) with the code STUCK, having written the ``stacks`` of all its threads.
    """

    def __init__(self, patience: float, stacks: Path):
        self.patience, self.stacks = patience, stacks
        self.signal: str | None = None  # the name of the first
        self._interruptible = False
        self._last_beat, self._ended = time.monotonic(), threading.Event()

    def __enter__(self) -> "Stopping":
        global _active
        import jax

        self._processes = jax.process_count()
        self._outer, _active = _active, self
        self._handlers = {}
        if self._processes == 1 and threading.current_thread() is threading.main_thread():
            for number in (signal.SIGINT, signal.SIGTERM):
                if signal.getsignal(number) is not signal.SIG_IGN:  # as it is in the background of a script
                    self._handlers[number] = signal.signal(number, self._remember)
        if self.patience:
            threading.Thread(target=self._watch, name="watchdog", daemon=True).start()
        return self

    def __exit__(self, *_):
        global _active
        _active = self._outer
        self._ended.set()
        self._restore_handlers()

    def requested(self) -> bool:
        """Whether a signal asks to stop now; all processes have to ask at the same steps."""
        if self.signal is None and self._processes > 1:
            from jax.experimental.multihost_utils import reached_preemption_sync_point

            self.signal = "SIGTERM" if reached_preemption_sync_point(next(_sync_points)) else None
        return self.signal is not None

    def check(self, step: int) -> None:
        """Raise Interrupted if a signal came; ``step`` is saved."""
        if self.signal:
            raise Interrupted(self.signal, step)

    def interruptible(self, work: Callable[[], T]) -> T | None:
        """The result of ``work``; None if a signal ended it. Several processes end it in ``alive``."""
        with suppress(_Stop):  # around all of it: a signal may come while the last line here runs
            try:
                self._interruptible = True
                return None if self.signal else work()
            finally:
                self._interruptible = False
        return None

    def beat(self) -> None:
        """Tell the watchdog that the process is alive."""
        self._last_beat = time.monotonic()

    def _remember(self, number: int, _) -> None:
        if self.signal is None:
            self.signal, self._received = signal.Signals(number).name, time.monotonic()
            if self._interruptible:
                self._interruptible = False
                raise _Stop
        elif time.monotonic() > self._received + TWICE:
            self._restore_handlers()
            signal.raise_signal(number)

    def _restore_handlers(self) -> None:
        for number, handler in self._handlers.items():
            signal.signal(number, handler)

    def _watch(self) -> None:
        while (seconds := self._last_beat + self.patience - time.monotonic()) > 0:
            if self._ended.wait(seconds):
                return
        end_in(STACKS_WITHIN, STUCK)  # should the disk of the stacks be what hangs
        message = f"nothing was done for {self.patience:.0f} s (LM_STEP_TIMEOUT)"
        try:
            with self.stacks.open("w") as file:
                file.write(f"{time.strftime('%Y-%m-%dT%H:%M:%S%z')}: {message}\n")
                file.flush()
                faulthandler.dump_traceback(file)
            message += f"; the stacks of all threads are in {self.stacks}"
        except OSError as error:
            message += f"; {self.stacks} cannot be written: {error.strerror}"
        message += "; ended, to be restarted from the newest checkpoint"
        print(f"lm: {message}", file=sys.stderr, flush=True)
        os._exit(STUCK)


def alive() -> None:
    """Between two batches of an evaluation: tells the watchdog, and ends what is ``interruptible`` here.

    In all of several processes at once, if a signal has come; one process ends it at the signal.
    """
    if _active is not None:
        _active.beat()
        if _active._interruptible and _active._processes > 1 and _active.requested():
            raise _Stop


def end_in(seconds: float, code: int) -> None:
    """End the process with this exit code after so many seconds at the latest, whatever it does."""
    end = threading.Timer(seconds, os._exit, [code])
    end.daemon = True
    end.start()


class _Stop(BaseException):
    """Leaves an evaluation at once."""

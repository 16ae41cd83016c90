"""SIGINT and SIGTERM, which end training at the next point where it can be ended without loss."""

import signal
import threading
import time
from collections.abc import Callable
from contextlib import suppress
from itertools import count
from typing import Any

import jax
from jax.experimental import multihost_utils

# from a signal to one that counts as a second: a launcher may send the first to several [seconds]
TWICE = 2.0

# how often all processes have looked for a signal: their common clock, over all phases of a run
_asked = count(1)
_listening: "Signals | None" = None  # the one in whose context this is


class Interrupted(KeyboardInterrupt):
    """A signal asked to stop; the state after ``step`` is saved and training goes on from it when started
    again.
    """

    def __init__(self, name: str, step: int):
        super().__init__(
            f"{name}: stopped after step {step}, which is saved" if step else f"{name}: nothing was begun"
        )
        self.signal, self.step = name, step


class Signals:
    """The signals are taken down, not obeyed, while in this context.

    A second one is obeyed where there is one process. With several jax passes a SIGTERM on to all of them,
    and they agree on the moment to stop.
    """

    def __init__(self):
        self.name: str | None = None
        self.interruptible = False

    def __enter__(self) -> "Signals":
        global _listening
        here = jax.process_count() == 1 and threading.current_thread() is threading.main_thread()
        taken = (signal.SIGINT, signal.SIGTERM) if here else ()
        self._outer, _listening = _listening, self
        # as a script has it
        taken = [number for number in taken if signal.getsignal(number) is not signal.SIG_IGN]
        self._before = {number: signal.signal(number, self._take) for number in taken}
        return self

    def __exit__(self, *_):
        global _listening
        _listening = self._outer
        self._restore()

    def received(self) -> str | None:
        """The name of the signal after which to stop, here and now; all processes have to ask alike."""
        if self.name is None and jax.process_count() > 1:
            self.name = "SIGTERM" if multihost_utils.reached_preemption_sync_point(next(_asked)) else None
        return self.name

    def until_received(self, work: Callable[[], Any]) -> Any:
        """What ``work`` gives; None if a signal came before its end. Several processes look in ``check``."""
        with suppress(_Stop):  # around all of it: a signal may come while the last line here runs
            try:
                self.interruptible = True
                return None if self.name else work()
            finally:
                self.interruptible = False

    def _take(self, number: int, _) -> None:
        if self.name is None:
            self.name, self._at = signal.Signals(number).name, time.monotonic()
            if self.interruptible:
                self.interruptible = False
                raise _Stop
        elif time.monotonic() > self._at + TWICE:
            self._restore()
            signal.raise_signal(number)

    def _restore(self) -> None:
        for number, handler in self._before.items():
            signal.signal(number, handler)


def check() -> None:
    """Leave the work of ``until_received`` here, in all of several processes at once, if a signal has
    come.
    """
    if (
        _listening is not None
        and _listening.interruptible
        and jax.process_count() > 1
        and _listening.received()
    ):
        raise _Stop


class _Stop(BaseException):
    """Leaves an evaluation at once."""

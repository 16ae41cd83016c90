"""Ends training early: after a signal, once the step is saved, or by a watchdog when no step is done.

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

COMPILER_THREAD = "compile"  # name of the thread that compiles the training step, which nothing interrupts
STEP_TIMEOUT = 43  # exit code of a process that the watchdog ended
WRITE_STACKS_WITHIN = 10.0  # [seconds]
# Before this a second signal counts as the first: a launcher may send it to several processes [seconds].
SAME_SIGNAL_WITHIN = 2.0

_sync_points = count(1)  # numbers the times at which all processes look for a signal, over all stages
_active: "PreemptionHandler | None" = None  # the innermost context

T = TypeVar("T")


class Interrupted(KeyboardInterrupt):
    """Raised after a signal asked to stop; training resumes from the state after ``step``.

    This state is saved, by the run or by the one that it continues. At step 0 it is the initial state.
    """

    def __init__(self, name: str, step: int):
        self.signal, self.step = name, step
        self.stage = ""  # in which it came, for a run of several
        super().__init__(f"{name}: {self.saved}")

    @property
    def saved(self) -> str:
        """Return where training stopped and what is saved, with the stage if it is known."""
        if not self.step:
            where = f" of {self.stage}" if self.stage else ""
            return f"stopped before the first step{where}; nothing to save"
        return f"stopped after step {self.step}, which is saved" + (f" ({self.stage})" if self.stage else "")


class PreemptionHandler:
    """A context that defers SIGINT and SIGTERM to the end of a step, and runs a watchdog.

    A second signal ends the process at once. With several processes, jax passes a SIGTERM on to all, and they
    agree on the step to stop after; a SIGINT counts as SIGTERM. The first step starts that service
    (``start_preemption_service``). Before, there is nothing to save, and a signal ends the process that it
    reaches at once. The watchdog ends a process that has not called ``heartbeat`` for ``patience`` seconds
    (0: never) with exit code STEP_TIMEOUT, having written the stacks of all its threads to the file
    ``stacks``.
    """

    def __init__(self, patience: float, stacks: Path):
        self.patience, self.stacks = patience, stacks
        self.signal: str | None = None  # the name of the first
        self._interruptible = False
        self._last_heartbeat, self._ended = time.monotonic(), threading.Event()

    def __enter__(self) -> "PreemptionHandler":
        global _active
        import jax

        self._processes = jax.process_count()
        self._outer, _active = _active, self
        self._handlers = {}
        self._received: float | None = None  # when the first signal came
        if threading.current_thread() is threading.main_thread():
            # Among several processes SIGTERM is jax's.
            for number in (signal.SIGINT, signal.SIGTERM) if self._processes == 1 else (signal.SIGINT,):
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
        """Return whether a signal asks to stop now; all processes must call this at the same steps."""
        if self.signal is None and self._processes > 1 and _has_sync_manager():
            from jax.experimental.multihost_utils import reached_preemption_sync_point

            self.signal = "SIGTERM" if reached_preemption_sync_point(next(_sync_points)) else None
        return self.signal is not None

    def check(self, step: int) -> None:
        """Raise Interrupted if a signal came; training can resume from ``step``."""
        if self.signal:
            raise Interrupted(self.signal, step)

    def interruptible(self, work: Callable[[], T]) -> T | None:
        """Return the result of ``work``, or None if a signal ended it.

        One process ends it at the signal, several end it at the next ``check_preemption``.
        """
        with suppress(_Stop):  # around all of it: a signal may come while the last line here runs
            try:
                self._interruptible = True
                return None if self.signal else work()
            finally:
                self._interruptible = False
        return None

    def heartbeat(self) -> None:
        """Tell the watchdog that a step is done."""
        self._last_heartbeat = time.monotonic()

    def _remember(self, number: int, _) -> None:
        if self._received is None:
            self._received = time.monotonic()
            if self._processes > 1:
                signal.raise_signal(signal.SIGTERM)
                return
            self.signal = signal.Signals(number).name
            if self._interruptible:
                self._interruptible = False
                raise _Stop
        elif time.monotonic() > self._received + SAME_SIGNAL_WITHIN:
            self._restore_handlers()
            signal.raise_signal(number)

    def _restore_handlers(self) -> None:
        for number, handler in self._handlers.items():
            signal.signal(number, handler)

    def _watch(self) -> None:
        while (seconds := self._last_heartbeat + self.patience - time.monotonic()) > 0:
            if self._ended.wait(seconds):
                return
        exit_after(WRITE_STACKS_WITHIN, STEP_TIMEOUT)  # in case the disk of ``stacks`` is what hangs
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
        os._exit(STEP_TIMEOUT)


def check_preemption() -> None:
    """Send a heartbeat and, after a signal, end the ``interruptible`` work that calls this in all processes.

    Evaluations call it between batches. A single process is ended at the signal itself, not here.
    """
    if _active is not None:
        _active.heartbeat()
        if _active._interruptible and _active._processes > 1 and _active.requested():
            raise _Stop


def start_preemption_service() -> None:
    """Start jax's preemption service: after a SIGTERM to one process, all of them save the same step.

    Only for processes that have joined with ``jax_enable_preemption_service`` switched off, so that until now
    a SIGTERM ended one at once. All processes must call this after the same step.
    """
    import jax
    from jax._src import distributed  # jax has no public name for a start of this service by itself

    if jax.process_count() > 1 and not _has_sync_manager():
        jax.config.update("jax_enable_preemption_service", True)
        distributed.global_state.initialize_preemption_sync_manager()


def _has_sync_manager() -> bool:
    """Return whether jax passes signals on; the same for all processes after the same step."""
    from jax._src import distributed

    return distributed.global_state.preemption_sync_manager is not None


def exit_after(seconds: float, code: int) -> None:
    """Exit with ``code`` after so many seconds, whatever the process does then."""
    end = threading.Timer(seconds, os._exit, [code])
    end.daemon = True
    end.start()


def is_compiling() -> bool:
    """Return whether a training step is being compiled, which Python cannot end without an abort."""
    return any(thread.name == COMPILER_THREAD for thread in threading.enumerate())


class _Stop(BaseException):
    """Raised to leave an evaluation at once."""

"""Ends a process that is stuck: after a time without a step all its stacks are in a file, and it says
which.
"""

import faulthandler
import os
import sys
import threading
import time
from pathlib import Path

STUCK = 43  # the exit code
GRACE = 10.0  # to write the stacks in [seconds]

_alive: "Watchdog | None" = None  # the one that is told, while training


class Watchdog:
    """While in this context the process has to show a sign of life every ``patience`` seconds; see
    ``beat``.
    """

    def __init__(self, patience: float, stacks: Path):
        self.patience, self.stacks = patience, stacks
        self._last, self._ended = time.monotonic(), threading.Event()

    def __enter__(self) -> "Watchdog":
        global _alive
        self._before, _alive = _alive, self
        if self.patience:
            threading.Thread(target=self._watch, name="watchdog", daemon=True).start()
        return self

    def __exit__(self, *_):
        global _alive
        _alive = self._before
        self._ended.set()

    def beat(self) -> None:
        self._last = time.monotonic()

    def _watch(self) -> None:
        while (left := self._last + self.patience - time.monotonic()) > 0:
            if self._ended.wait(left):
                return
        end_in(GRACE, STUCK)  # should the disk of the stacks be what hangs
        said = f"nothing was done for {self.patience:.0f} s (LM_STEP_TIMEOUT)"
        try:
            with self.stacks.open("w") as file:
                file.write(f"{time.strftime('%Y-%m-%dT%H:%M:%S%z')}: {said}\n")
                file.flush()
                faulthandler.dump_traceback(file)
            said += f"; where all threads stand is in {self.stacks}"
        except OSError as error:
            said += f"; {self.stacks} cannot be written: {error.strerror}"
        print(
            f"lm: {said}; ended, to be started again from the newest checkpoint", file=sys.stderr, flush=True
        )
        os._exit(STUCK)


def beat() -> None:
    """A sign of life to the watchdog, where there is one."""
    if _alive is not None:
        _alive.beat()


def end_in(seconds: float, code: int) -> None:
    """End the process with this exit code by then at the latest, whatever it does."""
    end = threading.Timer(seconds, os._exit, [code])
    end.daemon = True
    end.start()

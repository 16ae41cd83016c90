"""Child processes whose output is shown line by line, each line with a prefix."""

import os
import shlex
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from pathlib import Path

PATIENCE = 10.0  # seconds that a process has to end by itself, when nobody waits for it any more


def say(who: str, text: str) -> None:
    """Write ``[who] text`` as whole lines, from any thread; nothing if nobody reads any more."""
    with suppress(OSError, ValueError):  # a closed terminal or pipe is no reason to leave a slice running
        sys.stdout.write("".join(f"[{who}] {line}\n" for line in text.splitlines()))
        sys.stdout.flush()


def show(arguments: Sequence[str]) -> None:
    """Print a command as one would type it."""
    print(shlex.join(arguments), flush=True)


class Child(subprocess.Popen):
    """A process in a session of its own: the terminal's Ctrl-C does not reach it, only what is sent to it."""

    def __init__(self, arguments: Sequence[str], who: str, environment: Mapping[str, str]):
        super().__init__(
            arguments,
            env=environment,
            start_new_session=True,
            text=True,
            errors="replace",
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
        )
        self.reader = threading.Thread(target=self._show, args=[who], daemon=True)
        self.reader.start()

    def _show(self, who: str) -> None:
        for line in self.stdout or ():
            say(who, line)

    def send_group(self, number: int) -> None:
        """Send a signal to the process and all that it has started."""
        with suppress(ProcessLookupError):
            os.killpg(self.pid, number)

    def finish(self) -> int:
        """Return the exit code once its last line is shown; end it, and what it started, after PATIENCE."""
        with suppress(subprocess.TimeoutExpired):
            self.wait(PATIENCE)
        self.send_group(signal.SIGKILL)
        for other in Path("/proc").glob("[0-9]*"):  # lm's trainer has a group of its own, in the same session
            with suppress(OSError):
                if os.getsid(int(other.name)) == self.pid:
                    os.kill(int(other.name), signal.SIGKILL)
        code = self.wait()
        self.reader.join(timeout=5)
        return code


def finish_all(
    children: Sequence[Child],
    patience: float,
    stop: threading.Event | None = None,
    number: int = signal.SIGKILL,
) -> list[int]:
    """Return the exit codes of all.

    When one has failed, or ``stop`` is set, the others get the signal ``number``: after ``patience`` seconds,
    in which they may notice it and save, or at once.
    """
    deadline = float("inf")
    while any(child.poll() is None for child in children):
        if deadline == float("inf") and any(child.poll() for child in children):
            deadline = time.monotonic() + patience
        if (stop is not None and stop.is_set()) or time.monotonic() > deadline:
            for child in children:
                child.send_group(number)
            break
        time.sleep(0.1)
    return [child.finish() for child in children]


@contextmanager
def on_signals(act: Callable[[int], None]) -> Iterator[None]:
    """Have Ctrl-C, SIGTERM and a closed terminal call ``act(number)``, unless they are ignored."""
    before = {number: signal.getsignal(number) for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)}
    try:
        for number, handler in before.items():
            if handler is not signal.SIG_IGN:  # as nohup has SIGHUP be
                signal.signal(number, lambda number, _: act(number))
        yield
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)

"""``--restart N``: a parent process that runs the command, and runs it again after a crash or a kill.

The command resumes from its newest checkpoint. The parent imports neither jax nor numpy, so it starts in a
tenth of a second and needs little memory. Each of several processes has a parent of its own: when one process
is gone, jax ends the others, their parents start them again, and they meet at the coordinator.
"""

import os
import signal
import subprocess
import sys
import threading
import time
from argparse import ArgumentParser
from collections.abc import Sequence
from contextlib import suppress
from types import FrameType
from typing import NoReturn

from experiments.processes.exit_codes import EXIT_CODES, PREEMPTED, exit_code, killed_by
from lm.config.base import SettingError
from lm.train.runtime.preemption import exit_after

STARTED = time.monotonic()  # of this process, near enough
RESUMABLE = ("run", "sweep", "demo")  # the commands that resume where they stopped
FINAL = {EXIT_CODES[name] for name in ("done", "bad settings", "loss not finite", "interrupted")}
LONGEST_PAUSE = 60.0  # before a restart; the first is a second, each twice the last [seconds]
AFTER_SIGNAL = 5.0  # that a process has to end after SIGTERM, when there is nothing to save [seconds]
SIGNALS = (signal.SIGTERM, signal.SIGINT, signal.SIGHUP)
PARENT = "LM_PARENT"  # in the environment of a child: the process id of its parent


def heeded_signals() -> list[int]:
    """Return those of SIGNALS that are not ignored, as nohup or the background of a script has it."""
    return [number for number in SIGNALS if signal.getsignal(number) is not signal.SIG_IGN]


def print_line(text: str) -> None:
    """Print a line for the user; nothing where nobody reads any more."""
    with suppress(OSError):
        print(f"lm: {text}", file=sys.stderr, flush=True)


def exit_after_sigterm(message: str = "") -> NoReturn:
    """Print a message and exit with PREEMPTED, within AFTER_SIGNAL: for work that has nothing to save.

    The timer is there because an exception in a callback gets lost, and leaving may take its time. A second
    signal is ignored, since an exception while a process leaves prints a traceback.
    """
    signal.signal(signal.SIGTERM, signal.SIG_IGN)
    if message:
        print_line(message)
    exit_after(AFTER_SIGNAL, PREEMPTED)
    sys.exit(PREEMPTED)


def run_with_restarts(arguments: Sequence[str]) -> None:
    """Run the command in child processes and exit as the last one does, if ``--restart N`` asks for that.

    Otherwise return. ``arguments`` are those of ``lm``.
    """
    restarts, command = pop_restart(arguments)
    if restarts and command[:1] and command[0] in RESUMABLE:
        program = sys.orig_argv[1 : len(sys.orig_argv) - len(arguments)]  # and options of Python
        sys.exit(Parent([sys.executable, *program, *command], restarts).run())


def pop_restart(arguments: Sequence[str]) -> tuple[int, list[str]]:
    """Return the number behind ``--restart``, 0 without it, and the other arguments."""
    parser = ArgumentParser(add_help=False, allow_abbrev=False, exit_on_error=False)
    parser.add_argument("--restart", nargs="?", default="0", const="")
    found, others = parser.parse_known_args(arguments)
    if not found.restart.isdecimal():
        raise SettingError(f"--restart {found.restart or 'without N'} should be a whole number from 0")
    return int(found.restart), others


class Parent:
    """Runs a command in one child process after another, and passes signals on to it."""

    def __init__(self, command: Sequence[str], restarts: int):
        self.command, self.restarts = command, restarts
        self.child: subprocess.Popen | None = None
        self.signal: int | None = None  # the last that asked to end

    def run(self) -> int:
        """Run the command until it need not, or should not, be started again; return its exit code."""
        for number in heeded_signals():
            signal.signal(number, self._pass_on)
        reason = ""
        for turn in range(self.restarts + 1):
            status = self._run_child(turn, reason)
            code = exit_code(status)
            reason = f"exit code {code}" if status >= 0 else killed_by(-status)
            if self.signal is not None or code in FINAL:
                return code
            if turn < self.restarts:
                pause = min(2.0**turn, LONGEST_PAUSE)
                print_line(f"{reason}; restart {turn + 1} of {self.restarts} in {pause:.0f} s")
                if self._signalled_within(pause):
                    return PREEMPTED
        print_line(f"{reason}; this was the last of {self.restarts} restarts")
        return code

    def _run_child(self, turn: int, reason: str) -> int:
        """Run the command once and return its exit code, or minus the number of the signal that killed it."""
        environment = os.environ | {PARENT: str(os.getpid())}
        if turn:
            environment["LM_RESTART"] = f"{turn} of {self.restarts}: {reason.partition(' (')[0]}"
        # In a group of its own: a Ctrl-C is for the parent, which passes it on. Such a group may not read the
        # terminal, and would wait for ever if it did.
        devnull = subprocess.DEVNULL
        self.child = subprocess.Popen(self.command, env=environment, process_group=0, stdin=devnull)
        if self.signal is not None:  # it came before it could be passed on
            self.child.terminate()
        status = self.child.wait()
        with suppress(OSError):
            os.killpg(self.child.pid, signal.SIGKILL)  # what the child has left behind in its group
        return status

    def _pass_on(self, number: int, _: FrameType | None) -> None:
        self.signal = number
        if self.child is not None:
            self.child.send_signal(signal.SIGTERM if number == signal.SIGHUP else number)

    def _signalled_within(self, seconds: float) -> bool:
        """Return whether a signal comes within so many seconds."""
        end = time.monotonic() + seconds
        while self.signal is None and time.monotonic() < end:
            time.sleep(0.1)
        return self.signal is not None


def end_with_parent() -> None:
    """Kill this process and those of its group when its ``Parent`` is gone; nothing if it has none."""
    parent = int(os.environ.pop(PARENT, 0))
    if not parent:
        return

    def watch() -> None:
        while os.getppid() == parent:
            time.sleep(0.5)
        os.killpg(0, signal.SIGKILL)

    threading.Thread(target=watch, name="parent", daemon=True).start()

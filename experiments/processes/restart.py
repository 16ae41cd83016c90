"""``--restart N``: a parent that starts the command again when it crashes or asks for it, as it goes on where
it was.

Of several processes each has such a parent, above its watch. Only the standard library is imported here.
"""

import ctypes
import os
import signal
import subprocess
import sys
import time
from collections.abc import Sequence
from contextlib import suppress
from pathlib import Path

from experiments.processes.exit_codes import EXIT_CODES, killed_by
from lm.settings import SettingError

COMMANDS = ("run", "sweep")  # that go on where they were
FINAL = {EXIT_CODES[name] for name in ("done", "bad settings", "loss not finite", "interrupted")}
ABORTS = 3  # in a row, each within SOON: memory that is not there will not be there the next time either
SOON = 3600.0  # after a start [seconds]
ABORTED = (-signal.SIGABRT, 128 + signal.SIGABRT)  # by itself, or as its watch tells
# between two starts; the first pause is of a second, and each twice as long as the last [seconds]
LONGEST = 60.0
PR_SET_PDEATHSIG = 1  # of Linux's prctl


def supervise(arguments: Sequence[str]) -> int | None:
    """The exit code of the command with these ``arguments``, started again as they ask; None if they do
    not.
    """
    times, rest = _asked(arguments)
    if not times or not rest or rest[0] not in COMMANDS:
        return None
    before = sys.orig_argv[1 : len(sys.orig_argv) - len(arguments)]  # Python's options and the program
    return _keep_going([sys.executable, *before, *rest], times)


def _asked(arguments: Sequence[str]) -> tuple[int, list[str]]:
    """How often to start again, and the arguments without that."""
    times, rest, left = "0", [], iter(arguments)
    for argument in left:
        name, given, value = argument.partition("=")
        if name == "--restart":
            times = value if given else next(left, "")
        else:
            rest.append(argument)
    if not times.isdecimal():
        raise SettingError(f"--restart {times} should be a whole number from 0")
    return int(times), rest


def _keep_going(command: Sequence[str], times: int) -> int:
    asked: list[int] = []  # signals to this process, which then starts nothing again
    child: subprocess.Popen | None = None

    def pass_on(number: int, _) -> None:
        asked.append(number)
        if child is not None:
            child.send_signal(signal.SIGTERM if number == signal.SIGHUP else number)

    for number in (signal.SIGTERM, signal.SIGINT, signal.SIGHUP):
        if signal.getsignal(number) is not signal.SIG_IGN:  # as nohup has SIGHUP be
            signal.signal(number, pass_on)
    about, aborts = {}, 0
    for turn in range(times + 1):
        began, child = time.monotonic(), _start(command, about)
        if asked:  # while it was being started
            child.send_signal(signal.SIGTERM)
        code = child.wait()
        aborts = aborts + 1 if code in ABORTED and time.monotonic() < began + SOON else 0
        if asked or code in FINAL:
            break
        why = killed_by(-code) if code < 0 else f"exit code {code}"
        if aborts == ABORTS or turn == times:
            _say(f"{why}; not started again after {ABORTS} such ends in a row" if aborts == ABORTS else why)
            break
        pause = min(2.0 ** min(turn, 6), LONGEST)
        about = {"LM_RESTART": f"{turn + 1} of {times}: {why.partition(' (')[0]}"}
        _say(f"{why}; restart {turn + 1} of {times} in {pause:.0f} s")
        end = time.monotonic() + pause
        while not asked and time.monotonic() < end:
            time.sleep(0.1)
        if asked:
            return EXIT_CODES["start again"]
    return code if code >= 0 else 128 - code


def _say(text: str) -> None:
    with suppress(OSError):  # nobody reads any more
        print(f"lm: {text}", file=sys.stderr, flush=True)


def _start(command: Sequence[str], about: dict[str, str]) -> subprocess.Popen:
    """In a group of its own, so that a Ctrl-C comes once: from here. It dies when this process does."""
    parent, libc = os.getpid(), ctypes.CDLL(None)

    def die_with_parent() -> None:
        libc.prctl(PR_SET_PDEATHSIG, signal.SIGKILL)
        if os.getppid() != parent:  # it was quicker
            os.kill(os.getpid(), signal.SIGKILL)

    own = die_with_parent if Path("/proc/self").exists() else None  # other systems have no prctl
    return subprocess.Popen(command, env=os.environ | about, process_group=0, preexec_fn=own)

"""The supervisor: a process above each trainer, which watches it and starts it again where that may help.

There is one above each of several processes, and above a single one with ``--restart N``. It loads only the
standard library, and nothing delays it; it forks the trainer, which resumes where the last one stopped.

Those of several processes keep a line to that of the first, and say every second that they are there.
When a process is gone, each of the others is ended, says which it was and on which host, and exits with the
code on which all are started again; when one failed, the others exit with its code. jax's own heartbeats find
what no supervisor sees: a trainer that is stopped while its supervisor lives. Alone they would end the others
later, by a crash, without naming the process, and a collective may wait for ever.
"""

import os
import selectors
import signal
import socket
import sys
import time
from collections.abc import Sequence
from contextlib import suppress
from types import FrameType
from typing import NoReturn

from experiments.processes.exit_codes import AGAIN, EXIT_CODES, Ended, killed_by
from experiments.processes.line import Line
from experiments.processes.meeting import Meeting
from experiments.processes.place import Place, find_place, is_loopback, timeout
from lm.config.base import SettingError
from lm.train.runtime.preemption import SAME_SIGNAL_WITHIN

RESUMABLE = ("run", "sweep", "demo")  # the commands that resume where they stopped
FINAL = {EXIT_CODES[name] for name in ("done", "bad settings", "loss not finite", "interrupted")}
TOGETHER = {EXIT_CODES["done"], AGAIN}  # with which all processes end by themselves
CAUSES = {EXIT_CODES["bad settings"], EXIT_CODES["loss not finite"]}  # never due to another's end
ABORTED = 128 + signal.SIGABRT  # by XLA without memory, and by jax when another process is gone
ABORTS = 3  # in a row, each within SOON: memory that is missing will be missing the next time too
SOON = 3600.0  # after a start [seconds]
LONGEST_PAUSE = 60.0  # before a restart; the first is a second, each twice the last [seconds]
BEAT = 1.0  # between two signs of life, and for news that are on their way [seconds]
UNTIL_ITS_END = 5.0  # for a process to end by itself, where another failed [seconds]
SIGNALS = (signal.SIGTERM, signal.SIGINT, signal.SIGHUP)
LINE = "LM_LINE"  # in the environment of a trainer that is started again: its end of the line, of how many


def supervise(arguments: Sequence[str]) -> Line | None:
    """In the trainer, its line to its supervisor, or None if it is not one of several. The supervisor exits.

    ``arguments`` are those of ``lm``. Several processes have to be there within LM_START_TIMEOUT; one that
    is silent for LM_HEARTBEAT counts as gone.
    """
    restarts, others = _restarts(arguments)
    restarts *= others[:1] != [] and others[0] in RESUMABLE
    if LINE in os.environ:  # started again
        number, count = map(int, os.environ.pop(LINE).split(" of "))
        line = Line(socket.socket(fileno=number))
        line.end.set_inheritable(False)
    else:
        place = find_place(os.environ) if others[:1] == ["run"] else None
        if not restarts and place is None:
            return None
        place = place or Place("localhost", 0, 1, 0)
        program = sys.orig_argv[1 : len(sys.orig_argv) - len(arguments)]  # and options of Python
        if restarts:
            sys.argv[1:] = others  # by which the processes know each other
        line = _lives(Supervisor(place), restarts, [sys.executable, *program, *others])
        count = place.count
    if count == 1:
        line.end_with_it()
        return None
    return line


def _restarts(arguments: Sequence[str]) -> tuple[int, list[str]]:
    """The number behind ``--restart``, and the other arguments."""
    times, others, words = "0", [], iter(arguments)
    for word in words:
        name, equals, value = word.partition("=")
        if name == "--restart":
            times = value if equals else next(words, "")
        else:
            others.append(word)
    if not times.isdecimal():
        raise SettingError(f"--restart {times} should be a whole number from 0")
    return int(times), others


def _lives(supervisor: "Supervisor", restarts: int, command: list[str]) -> Line:
    """Start the trainer, and up to ``restarts`` times again; only the first trainer returns.

    The others are new processes of the ``command``: its code may have changed on the disk meanwhile.
    """
    supervisor.take_signals()
    aborts, message = 0, ""
    for turn in range(restarts + 1):
        began = time.monotonic()
        if (line := supervisor.fork()) is not None:
            if turn == 0:
                return line
            os.environ["LM_RESTART"] = f"{turn} of {restarts}: {message.partition(' (')[0]}"
            os.environ[LINE] = f"{line.fileno()} of {supervisor.place.count}"
            line.end.set_inheritable(True)
            os.execv(sys.executable, command)
        ended = supervisor.watch()
        code, message = ended.code, str(ended)
        aborts = aborts + 1 if code == ABORTED and time.monotonic() < began + SOON else 0
        if supervisor.signal is not None or code in FINAL or not restarts:
            break
        message = message or f"exit code {code}"
        if aborts == ABORTS:
            message += f"; not started again after {ABORTS} such ends in a row"
            break
        if turn < restarts:
            pause = min(2.0 ** min(turn, 6), LONGEST_PAUSE)
            print_line(f"{message}; restart {turn + 1} of {restarts} in {pause:.0f} s")
            if supervisor.signalled_within(pause):
                sys.exit(AGAIN)
    if message:
        print_line(message)
    sys.exit(code)


def print_line(text: str) -> None:
    """Print a line for the user; nothing where nobody reads any more."""
    with suppress(OSError):
        print(f"lm: {text}", file=sys.stderr, flush=True)


class Supervisor:
    """Supervises one trainer after another, beside the supervisors of the run's other processes."""

    def __init__(self, place: Place):
        self.place, self.alone = place, place.count == 1
        self.start, self.silence = timeout("LM_START_TIMEOUT"), timeout("LM_HEARTBEAT")
        self.signal: int | None = None  # the first that asked this process to end
        self.signalled = 0.0  # when
        self.watching = False  # otherwise a signal is only noted

    def take_signals(self) -> None:
        """From now on signals are for this supervisor, but for those that nohup or a script ignores."""
        taken = [number for number in SIGNALS if signal.getsignal(number) is not signal.SIG_IGN]
        self.handlers = {number: signal.signal(number, self._stop) for number in taken}

    def begin(self, trainer: int, line: Line) -> None:
        """Begin to supervise the process ``trainer``, which is at the other end of ``line``."""
        self.trainer, self.line, self.meeting = trainer, line, Meeting(self.place, self.start)
        self.met = self.alone
        self.ended: set[int] = set()  # of the other processes
        self.runs = True  # the trainer does
        self.signals_wait = False  # until the trainer has saved what it learnt since its last checkpoint
        self.code: int | None = None  # with which the trainer ends
        self.verdict: tuple[float, Ended] | None = None  # when this life ends, and how

    def fork(self) -> Line | None:
        """In the trainer its line to the supervisor, where this is None."""
        for stream in (sys.stdout, sys.stderr):
            stream.flush()
        end, trainers_end = socket.socketpair()
        before = signal.pthread_sigmask(signal.SIG_BLOCK, SIGNALS)  # the trainer must not run _stop
        trainer = os.fork()
        os.setpgid(trainer, trainer)  # by both: a Ctrl-C is for the supervisor, a kill for all of the group
        if trainer:
            trainers_end.close()
            self.begin(trainer, Line(end))
        else:
            end.close()
            for number, handler in self.handlers.items():
                signal.signal(number, handler)
        signal.pthread_sigmask(signal.SIG_SETMASK, before)
        return None if trainer else Line(trainers_end)

    def watch(self) -> Ended:
        """Wait until the trainer has ended, and return how."""
        try:
            self.watching = True
            if self.signal is not None:  # before this life
                self._stop(self.signal, None)
            if not self.met:
                self.meet()
            self.run()
        except Ended as ended:
            self.watching = False
            if self.runs:
                self.pass_on(signal.SIGKILL)
                os.waitpid(self.trainer, 0)
            for line in (self.line, *self.meeting.lines.values()):
                line.end.close()
            return ended

    def signalled_within(self, seconds: float) -> bool:
        """Return whether a signal comes within so many seconds."""
        end = time.monotonic() + seconds
        while self.signal is None and time.monotonic() < end:
            time.sleep(0.1)
        return self.signal is not None

    def _stop(self, number: int, _: FrameType | None) -> None:
        if self.signal is None:
            self.signal, self.signalled = number, time.monotonic()
        if not self.watching:
            return
        if self.alone:
            self.pass_on(signal.SIGTERM if number == signal.SIGHUP else number)
        elif not self.met:
            raise Ended(AGAIN, "stopped while waiting for the other processes")
        elif (
            time.monotonic() > self.signalled + SAME_SIGNAL_WITHIN
        ):  # jax looks for the first only between two steps
            raise Ended(AGAIN, "stopped at once: signalled twice")
        elif self.runs and self.signals_wait:
            self.pass_on(signal.SIGTERM)  # on which jax has all processes save the same step

    def pass_on(self, number: int) -> None:
        """To the trainer; SIGKILL to all that it started, too."""
        with suppress(OSError):  # none is left
            (os.killpg if number == signal.SIGKILL else os.kill)(self.trainer, number)

    def meet(self) -> None:
        """Wait for the other processes, and tell the trainer how it joins them."""
        place, port = self.place, self.meeting.attend()
        self.met = True
        address = f"{place.host}:{port}"
        jax = {"coordinator_address": address, "num_processes": place.count, "process_id": place.index}
        jax["coordinator_bind_address"] = address if is_loopback(place.host) else None
        jax["initialization_timeout"] = round(self.start)
        self.line.send(jax | {"heartbeat_timeout_seconds": round(4 * self.silence + 1)})

    def run(self) -> NoReturn:
        """Until the trainer has ended, or another process is gone: Ended."""
        beat = 0.0
        with selectors.DefaultSelector() as ready:
            for index, line in ((None, self.line), *self.meeting.lines.items()):
                line.end.settimeout(self.silence)
                line.heard = time.monotonic()
                ready.register(line, selectors.EVENT_READ, (index, line))
            while True:
                if time.monotonic() > beat + BEAT:
                    beat = time.monotonic()
                    self.meeting.tell({})
                for key, _ in ready.select(timeout=0.2):
                    if not self._read(*key.data):
                        ready.unregister(key.fileobj)
                self._look(time.monotonic())

    def _read(self, index: int | None, line: Line) -> bool:
        """Take in what the trainer (None) or another process sent; False at the end of the line."""
        values = line.receive()
        for value in values or ():
            if index is None and "signals_wait" in value:
                self.signals_wait = value["signals_wait"]
            elif index is None:
                self._trainer_ends(value["code"])
            elif "code" in value:
                self._other_ends(**value)
        if values is None and index is not None:
            self._other_ends(index, AGAIN, "is gone")
        return values is not None

    def _look(self, now: float) -> None:
        """See who is silent, whether the trainer runs, and whether the end has come."""
        for index, line in self.meeting.lines.items():
            if now - line.heard > self.silence:
                self._other_ends(index, AGAIN, f"was not heard of for {self.silence:.0f} s")
        gone, status = os.waitpid(self.trainer, os.WNOHANG) if self.runs else (0, 0)
        if gone:
            self._trainer_is_gone(os.waitstatus_to_exitcode(status))
        if self.verdict is None and self.code in TOGETHER and len(self.ended) == self.place.count - 1:
            self.verdict = (now + 4 * self.silence, Ended(self.code))  # where the trainer hangs at its end
        if self.verdict is not None and now > self.verdict[0]:
            raise self.verdict[1]
        if not self.alone and self.signal is not None and not self.signals_wait and self.code is None:
            fault = f"was stopped by {signal.Signals(self.signal).name}"
            self.meeting.tell({"index": self.place.index, "code": AGAIN, "why": fault})
            raise Ended(AGAIN, f"{fault[4:]} while there was nothing to save")

    def _trainer_is_gone(self, status: int) -> None:
        """It exited with ``status``; below 0, it was killed by that signal."""
        self.runs = False
        self.pass_on(signal.SIGKILL)  # to what it left behind
        if self.code in TOGETHER:
            raise Ended(self.code)
        fault = killed_by(-status) if status < 0 else ""
        code = status if status >= 0 else 128 - status
        if self.signal is not None and status == -signal.SIGTERM:
            code = AGAIN
        if self.alone:
            raise Ended(code, fault)
        self._trainer_ends(code or EXIT_CODES["failed"], f"was {fault}" if fault else "")  # done is said

    def _trainer_ends(self, code: int, why: str = "") -> None:
        """What failed may have done so because another process is gone, the news of which is on its way."""
        if self.code is not None:
            return
        self.code = code
        if self.verdict is not None and code not in CAUSES:
            _, known = self.verdict
            if known.code in CAUSES or code == ABORTED or not why:
                self.verdict = (time.monotonic() + BEAT, known)
                return
        self.meeting.tell({"index": self.place.index, "code": code, "why": why})
        if code not in TOGETHER or why:
            message = f"{self.meeting.name(self.place.index)} {why}" if why else ""
            self.verdict = (time.monotonic() + BEAT, Ended(code, message))

    def _other_ends(self, index: int, code: int, why: str = "") -> None:
        """Another process ends: having saved with all if ``code`` is in TOGETHER and there is no ``why``."""
        if index in self.ended or index == self.place.index:
            return
        self.ended.add(index)
        if self.place.index == 0:
            self.meeting.tell({"index": index, "code": code, "why": why})
        if self.verdict is not None and self.verdict[1].code in CAUSES:
            return
        name = self.meeting.name(index)
        if why:
            raise Ended(AGAIN, f"{name} {why}; the others end too, to be started again together")
        if code in CAUSES or (code not in TOGETHER and self.verdict is None):
            ended = Ended(code, f"{name} ended with exit code {code}, and said why")
            self.verdict = (time.monotonic() + UNTIL_ITS_END, ended)

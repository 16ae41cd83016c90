"""The watch over several processes: a parent of each that trains, which no computation holds up.

The parents keep a line to the parent of the first, and say every second that they are there. When a process
is gone, each of the others is ended, says which it was and on which host, and gives the exit code on which
all are started again; when one failed, they give its exit code. jax would end them too, later or by a crash,
and not say which; a collective may wait for ever.
"""

import os
import selectors
import signal
import socket
import sys
import time
from contextlib import suppress

from experiments.processes.exit_codes import EXIT_CODES, killed_by
from experiments.processes.line import Line, is_proof, listen, proof
from experiments.processes.place import Place

AGAIN = EXIT_CODES["start again"]
BEAT = 1.0  # between two signs of life, and for news that are on their way [seconds]
GRACE = 5.0  # for a process to end by itself, where another failed [seconds]
TOGETHER = {EXIT_CODES[name] for name in ("done", "start again")}  # after which all end by themselves
# which no other process's end brings about
CAUSES = {EXIT_CODES[name] for name in ("bad settings", "loss not finite")}
ABORTED = 128 + signal.SIGABRT  # what jax does when another process is gone
TWICE = 2.0  # as in lm.train.stopping, which would bring jax along [seconds]


class Ended(Exception):
    """This process ends with ``code``; the message is its last line."""

    def __init__(self, code: int, said: str = ""):
        super().__init__(said)
        self.code = code


def fork(place: Place, start: float, silence: float) -> Line:
    """In the child, which trains: its line to the parent. The parent does not return; it ends when the child
    does.

    All have to be there within ``start`` seconds; one that is not heard of for ``silence`` seconds counts as
    gone.
    """
    for stream in (sys.stdout, sys.stderr):
        stream.flush()
    ours, childs = socket.socketpair()
    child = os.fork()
    # by both: a Ctrl-C reaches the parent alone, and one kill all that the child starts
    os.setpgid(child, child)
    if child == 0:
        ours.close()
        return Line(childs)
    childs.close()
    watch = Watch(place, start, silence, child, Line(ours))
    try:
        watch.meet()
        watch.run()
    except Ended as ended:
        for number in (signal.SIGTERM, signal.SIGINT):
            signal.signal(number, signal.SIG_IGN)
        if watch.runs:
            watch.pass_on(signal.SIGKILL)
            os.waitpid(child, 0)
        if str(ended):
            with suppress(OSError):  # nobody reads any more
                print(f"lm: {ended}", file=sys.stderr, flush=True)
        os._exit(ended.code)


class Watch:
    """Over the child and the other processes; ends by raising Ended."""

    def __init__(self, place: Place, start: float, silence: float, child: int, line: Line):
        self.place, self.start, self.silence, self.child, self.line = place, start, silence, child, line
        self.hosts = {place.index: socket.gethostname()}
        self.lines: dict[int, Line] = {}  # of the first process to all others, of the others to the first
        self.over: set[int] = set()  # of the others, those that have ended
        self.met = False
        self.asked: int | None = None  # to end, by this signal
        self.asked_at = 0.0
        self.runs = True  # the child does
        self.trains = False  # what the child has learnt since its last checkpoint would be lost with it
        self.code: int | None = None  # with which the child ends
        self.verdict: tuple[float, Ended] | None = None  # when this ends, and how

    def _ask(self, number: int, _) -> None:
        if self.asked is None:
            self.asked, self.asked_at = number, time.monotonic()
        if not self.met:
            raise Ended(AGAIN, "stopped while waiting for the other processes")
        if time.monotonic() > self.asked_at + TWICE:  # jax looks for the first only between two steps
            raise Ended(AGAIN, "stopped at once: signalled twice")
        if self.runs and self.trains:
            self.pass_on(signal.SIGTERM)  # on which jax has all processes save the same step

    def pass_on(self, number: int) -> None:
        """To the child; SIGKILL to all that it started, too."""
        with suppress(OSError):  # none is left
            (os.killpg if number == signal.SIGKILL else os.kill)(self.child, number)

    def name(self, index: int) -> str:
        host = f" on {self.hosts[index]}" if index in self.hosts else ""
        return f"process {index} of {self.place.count}{host}"

    def meet(self) -> None:
        """Wait until all processes are there; Ended with the names of those that are not."""
        for number in (signal.SIGTERM, signal.SIGINT):
            if signal.getsignal(number) is not signal.SIG_IGN:  # as for what a script runs in the background
                signal.signal(number, self._ask)
        end = time.monotonic() + self.start
        found = self._call(end) if self.place.index == 0 else self._answer(end)
        self.hosts |= {int(index): host for index, host in found["hosts"].items()}
        self.met = True
        self.line.send(found)

    def _missing(self, listed: str) -> Ended:
        waited = (
            f"did not come to {self.place.host} within {self.start:.0f} s; LM_PROCESSES=1 runs each alone"
        )
        return Ended(EXIT_CODES["failed"], f"process {listed} of {self.place.count} {waited}")

    def _call(self, end: float) -> dict:
        """The first process: take the others in."""
        try:
            door = listen(self.place.host, self.place.port)
        except OSError as error:
            said = f"LM_COORDINATOR={self.place.host}:{self.place.port} should be a free port here: {error}"
            raise Ended(EXIT_CODES["bad settings"], said) from error
        with door:
            while missing := sorted(set(range(self.place.count)) - set(self.hosts)):
                door.settimeout(max(end - time.monotonic(), 0.01))
                try:
                    line = Line(door.accept()[0])
                except TimeoutError:
                    listed = ", ".join(map(str, missing))
                    self.tell({"missing": listed})
                    raise self._missing(listed) from None
                self._take_in(line, missing)
        with socket.create_server(("", 0)) as free:  # for jax, which takes a moment to take it
            found = {"port": free.getsockname()[1], "hosts": self.hosts}
        self.tell(found)
        return found

    def _take_in(self, line: Line, missing: list[int]) -> None:
        line.end.settimeout(BEAT)
        try:
            index, count, host, proved = line.next(BEAT)["hello"]
            about = f"LM_PROCESS={int(index)} of {int(count)} on {host}"
        except (ValueError, KeyError, TypeError):
            return  # nobody that we know
        code = EXIT_CODES["bad settings"]
        if not is_proof(proved):  # it is not told what of
            said = "has another command or LM_SECRET than the first process; LM_PROCESSES=1 runs each alone"
        elif count == self.place.count and index in missing:
            self.hosts[index], self.lines[index] = host, line
            return
        else:
            said = f"the first waits for {missing} of {self.place.count}"
            # its line broke, or an earlier start's is left
            if count == self.place.count and index in self.hosts:
                code = AGAIN
        line.send({"refused": f"{about}: {said}", "code": code})

    def _answer(self, end: float) -> dict:
        """The others: go to the first process and wait until all have come."""
        place, found = self.place, None
        while not found:
            if time.monotonic() > end:
                raise self._missing("0")
            with suppress(OSError):
                line = Line(socket.create_connection((place.host, place.port), timeout=BEAT))
                line.end.settimeout(max(end - time.monotonic(), 0) + GRACE)
                line.send({"hello": [place.index, place.count, self.hosts[place.index], proof()]})
                found = line.next()
            time.sleep(0.1)
        if "refused" in found:
            raise Ended(found["code"], found["refused"])
        if "missing" in found:
            raise self._missing(found["missing"])
        self.lines[0] = line
        return found

    def tell(self, value: dict) -> None:
        """Send to all to whom there is a line."""
        for line in self.lines.values():
            line.send(value)

    def run(self) -> None:
        """Until the child has ended, or another process is gone."""
        beat = 0.0
        with selectors.DefaultSelector() as ready:
            for index, line in ((None, self.line), *self.lines.items()):
                line.end.settimeout(self.silence)
                line.heard = time.monotonic()
                ready.register(line, selectors.EVENT_READ, index)
            while True:
                if time.monotonic() > beat + BEAT:
                    beat = time.monotonic()
                    self.tell({})
                for key, _ in ready.select(timeout=0.2):
                    if not self._read(key.data, key.fileobj):
                        ready.unregister(key.fileobj)
                self._look(time.monotonic())

    def _read(self, index: int | None, line: Line) -> bool:
        """Take in what came; False at the end of the line."""
        found = line.receive()
        for value in found or ():
            if index is None and "trains" in value:
                self.trains = value["trains"]
            elif index is None:
                self._child_ends(value["code"])
            elif "code" in value:
                self._other_ends(**value)
        if found is None and index is not None:
            self._other_ends(index, AGAIN, "is gone")
        return found is not None

    def _look(self, now: float) -> None:
        """See who is silent, whether the child runs, and whether the end has come."""
        for index, line in self.lines.items():
            if now - line.heard > self.silence:
                self._other_ends(index, AGAIN, f"was not heard of for {self.silence:.0f} s")
        ended, status = os.waitpid(self.child, os.WNOHANG) if self.runs else (0, 0)
        if ended:
            self._child_is_gone(os.waitstatus_to_exitcode(status))
        if self.verdict is None and self.code in TOGETHER and len(self.over) == self.place.count - 1:
            # where the child hangs, having said its code
            self.verdict = (now + 4 * self.silence, Ended(self.code))
        if self.verdict is not None and now > self.verdict[0]:
            raise self.verdict[1]
        if self.asked is not None and not self.trains and self.code is None:
            why = f"was stopped by {signal.Signals(self.asked).name}"
            self.tell({"index": self.place.index, "code": AGAIN, "why": why})
            raise Ended(AGAIN, f"{why[4:]} while there was nothing to save")

    def _child_is_gone(self, code: int) -> None:
        self.runs = False
        self.pass_on(signal.SIGKILL)  # to what it left behind
        if self.code in TOGETHER:
            raise Ended(self.code)
        if code >= 0:
            self._child_ends(code or EXIT_CODES["failed"])  # it always says if it is done
        else:
            before = self.asked and code == -signal.SIGTERM
            self._child_ends(AGAIN if before else 128 - code, f"was {killed_by(-code)}")

    def _child_ends(self, code: int, why: str = "") -> None:
        """What failed may have failed because another process is gone, of which we hear in a moment, or have
        heard.
        """
        if self.code is not None:
            return
        self.code = code
        if self.verdict is not None and code not in CAUSES:
            _, known = self.verdict
            if known.code in CAUSES or code == ABORTED or not why:
                self.verdict = (time.monotonic() + BEAT, known)
                return
        self.tell({"index": self.place.index, "code": code, "why": why})
        if code not in TOGETHER or why:
            said = f"{self.name(self.place.index)} {why}" if why else ""
            self.verdict = (time.monotonic() + BEAT, Ended(code, said))

    def _other_ends(self, index: int, code: int, why: str = "") -> None:
        """Another process ends with ``code``, having saved with all if that is in TOGETHER; or ``why`` it
        does not.
        """
        if index in self.over or index == self.place.index:
            return
        self.over.add(index)
        if self.place.index == 0:
            self.tell({"index": index, "code": code, "why": why})
        if self.verdict is not None and self.verdict[1].code in CAUSES:
            return
        if why:
            raise Ended(AGAIN, f"{self.name(index)} {why}; the others end too, to be started again together")
        if code in CAUSES or (code not in TOGETHER and self.verdict is None):
            said = f"{self.name(index)} ended with exit code {code}, and said why"
            self.verdict = (time.monotonic() + GRACE, Ended(code, said))

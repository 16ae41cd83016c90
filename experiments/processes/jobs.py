"""Jobs side by side: a process with one thread for each.

At small sizes a core does twice as much with a run to itself as cores do that share one. The processes are
forks of a server, which has imported what they need and has started no thread.
"""

import os
import signal
import sys
import threading
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from contextlib import contextmanager
from multiprocessing import connection, get_context, parent_process, resource_tracker
from types import FrameType
from typing import Any, Generic, TypeVar

from experiments.processes.exit_codes import AGAIN, EXIT_CODES, killed_by
from experiments.processes.restart import SIGNALS
from lm.train.runtime.preemption import exit_after

# One thread that computes: of XLA, by its number of cores and within a product, and of the others.
ONE_THREAD = {"NPROC": "1", "OMP_NUM_THREADS": "1", "OPENBLAS_NUM_THREADS": "1"}
XLA_ONE_THREAD = "--xla_cpu_multi_thread_eigen=false"
AFTER_SIGNAL = 5.0  # from a signal that there is nothing to save for to a child's end, at most [seconds]
SERVER = get_context("forkserver")  # a fork of this process would inherit jax's threads as they happen to be

Job = TypeVar("Job")
Work = Callable[[Job, Callable[[Any], None]], int]  # does a job, may send what is to be shown -> exit code


def cores() -> int:
    """Return how many cores this process may use."""
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1


class Jobs(Generic[Job]):
    """Does jobs in up to ``count`` processes at once; one that fails leaves the others.

    work: a function of a module; it gets a job and a function that sends something to ``show``.
    needs: returns what a job would make and others may need too. A job whose needs nobody else is making is
    started first.
    show: gets a job and what its process sent.
    end: gets a job that has ended and, if its process died, by what.
    variables: returns the environment variables of a process by its place, of ``count``, from 0.
    preload: modules that are imported once for all processes.
    """

    def __init__(
        self,
        count: int,
        work: Work[Job],
        needs: Callable[[Job], Collection[Any]],
        show: Callable[[Job, Any], None],
        end: Callable[[Job, str | None], None],
        variables: Callable[[int], Mapping[str, str]] = lambda place: {},
        preload: Sequence[str] = (),
    ):
        SERVER.set_forkserver_preload([*preload])
        self.count, self.work = count, work
        self.needs, self.show, self.end, self.variables = needs, show, end, variables
        self.children: dict[int, Child] = {}  # at work, by the numbers of their jobs
        self.signal: int | None = None  # the last that asked to end

    def run(self, jobs: Sequence[Job]) -> list[int | None]:
        """Return the exit codes; None for a job that was not begun, since a signal came.

        It is passed on to the children, as SIGTERM, and their ends are waited for. Afterwards this process
        ignores further signals, since it ends too.
        """
        waiting = [*range(len(jobs))]
        codes: list[int | None] = [None] * len(jobs)
        with self._signals_passed_on():
            try:
                while self.children or (waiting and self.signal is None):
                    while waiting and len(self.children) < self.count and self.signal is None:
                        number = self.choose(jobs, waiting)
                        waiting.remove(number)
                        self._start(number, jobs[number])
                    for number, code in self._wait(jobs):
                        codes[number] = code
            finally:
                self._terminate()  # those that an error here has left at work
        return codes

    def choose(self, jobs: Sequence[Job], waiting: Sequence[int]) -> int:
        """Return the first ``waiting`` number, if possible of a job that need not wait for another."""
        being_made = {need for number in self.children for need in self.needs(jobs[number])}
        free = (number for number in waiting if not being_made.intersection(self.needs(jobs[number])))
        return next(free, waiting[0])

    def _start(self, number: int, job: Job) -> None:
        place = min({*range(self.count)} - {child.place for child in self.children.values()})
        self.children[number] = Child(self.work, job, place, self.variables(place))
        if self.signal is not None:  # it came before it could be passed on
            self._terminate()

    def _wait(self, jobs: Sequence[Job]) -> Iterator[tuple[int, int]]:
        """Wait a moment, show what children send, and yield (number, exit code) of jobs that have ended."""
        ready = [child.receiver for child in self.children.values() if child.sends]
        connection.wait([*ready, *(child.process.sentinel for child in self.children.values())], timeout=1)
        for number, child in [*self.children.items()]:
            status = child.process.exitcode  # asked first: nothing is sent afterwards
            for message in child.received():
                self.show(jobs[number], message)
            if status is not None:
                del self.children[number]
                self.end(jobs[number], death(status) if self.signal is None else None)
                yield number, AGAIN if status == -signal.SIGTERM else status if status >= 0 else 128 - status

    def _terminate(self) -> None:
        for child in self.children.values():
            child.process.terminate()

    @contextmanager
    def _signals_passed_on(self) -> Iterator[None]:
        """Pass signals on to the children, except those that nohup or a script ignores."""

        def pass_on(number: int, _: FrameType | None) -> None:
            self.signal = number
            self._terminate()

        taken = [number for number in SIGNALS if signal.getsignal(number) is not signal.SIG_IGN]
        before = {number: signal.signal(number, pass_on) for number in taken}
        try:
            yield
        finally:
            for number, handler in before.items():
                signal.signal(number, handler if self.signal is None else signal.SIG_IGN)


def death(status: int) -> str | None:
    """Return what a process died of that cannot have said it: a signal, or an exit code that is not ours."""
    if status < 0:
        return killed_by(-status)
    return None if status in EXIT_CODES.values() else f"its process ended with exit code {status}"


class Child:
    """A process that does one job, and sends what is to be shown meanwhile.

    It computes with one thread and has ``variables`` in its environment.
    """

    def __init__(self, work: Work[Job], job: Job, place: int, variables: Mapping[str, str]):
        self.place = place
        self.sends = True  # the other end of the pipe is open
        self.receiver, sender = SERVER.Pipe(duplex=False)
        flags = f"{os.environ.get('XLA_FLAGS', '')} {XLA_ONE_THREAD}".strip()
        environment = {**os.environ, **ONE_THREAD, "XLA_FLAGS": flags, **variables}
        self.process = SERVER.Process(target=_do, args=(work, job, sender, environment))
        with _one_thread_and_no_signals():
            self.process.start()
        sender.close()  # the process has a copy

    def received(self) -> Iterator[Any]:
        """Yield what the process has sent until now."""
        try:
            while self.sends and self.receiver.poll():
                yield self.receiver.recv()
        except (EOFError, OSError):  # it is gone
            self.sends = False


@contextmanager
def _one_thread_and_no_signals() -> Iterator[None]:
    """Have a server that is started meanwhile, and its forks, use one thread and keep signals waiting.

    A signal to the whole process group, such as Ctrl-C, is then for this process alone, which passes it on.
    """
    before = dict(os.environ)
    os.environ.update(ONE_THREAD)
    resource_tracker.ensure_running()  # else the server's start would, which unblocks signals
    mask = signal.pthread_sigmask(signal.SIG_BLOCK, SIGNALS)
    try:
        yield
    finally:
        signal.pthread_sigmask(signal.SIG_SETMASK, mask)
        os.environ.clear()
        os.environ.update(before)


def _do(work: Work[Job], job: Job, sender: connection.Connection, environment: Mapping[str, str]) -> None:
    """In a child: do the job, and exit with its code."""
    os.environ.clear()  # it is that of the server
    os.environ.update(environment)
    os.setpgid(0, 0)
    threading.Thread(target=_end_with_parent, name="parent", daemon=True).start()
    signal.signal(signal.SIGTERM, _stop)
    signal.pthread_sigmask(signal.SIG_UNBLOCK, [signal.SIGTERM])
    try:
        sys.exit(work(job, sender.send))
    finally:  # a signal that comes now would break into the ending
        signal.signal(signal.SIGTERM, signal.SIG_IGN)


def _end_with_parent() -> None:
    """Kill this process and those of its group as soon as its parent is gone."""
    parent = parent_process()
    assert parent is not None
    parent.join()
    os.killpg(0, signal.SIGKILL)


def _stop(*_) -> None:
    """End a child on SIGTERM, except while training, which saves first; the timer is for work that hangs.

    The signal may come again, also to a process that is leaving, where an exception prints a traceback.
    """
    signal.signal(signal.SIGTERM, signal.SIG_IGN)
    exit_after(AFTER_SIGNAL, AGAIN)
    sys.exit(AGAIN)

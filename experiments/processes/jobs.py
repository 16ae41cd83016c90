"""Jobs side by side, each in a process of its own, which computes with one thread.

Small runs train about twice as fast with a core each as with all cores one after another. The processes are
forks of a server, which has imported what they need and has started no thread.
"""

import os
import signal
import sys
import threading
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from contextlib import contextmanager
from functools import partial
from multiprocessing import connection, forkserver, get_context, parent_process, resource_tracker
from types import FrameType
from typing import Any, Generic, TypeVar

from experiments.processes.exit_codes import EXIT_CODES, exit_code, killed_by
from experiments.processes.restart import SIGNALS, exit_after_sigterm, heeded_signals

# Variables that leave one thread each to XLA's pools (the flag: within a matrix product) and to OpenBLAS.
ONE_THREAD = {"NPROC": "1", "OMP_NUM_THREADS": "1", "OPENBLAS_NUM_THREADS": "1"}
XLA_ONE_THREAD = "--xla_cpu_multi_thread_eigen=false"
AFTER_ERROR = 60.0  # time that children have to save and end after an error of the parent [seconds]
FORKSERVER = get_context("forkserver")  # a fork of this process would inherit jax's threads as they are

Job = TypeVar("Job")
Work = Callable[[Job, Callable[[Any], None]], int]  # does a job, may send what is to be shown -> exit code


def cores() -> int:
    """Return how many cores this process may use."""
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1


class Jobs(Generic[Job]):
    """Does jobs in up to ``count`` processes at once; a failing job does not stop the others.

    work: a module-level function, since it is pickled; it gets a job and a function that sends something to
    ``show``.
    outputs: returns what a job would write and other jobs would wait for, such as the folders of shared
    stages. A job is preferred if none of its outputs are being written by a running job.
    show: gets a job and what its process sent.
    end: gets a job that has ended and, if its process cannot have reported it, the cause.
    variables: returns the environment variables of a process by its slot, of ``count``, from 0.
    preload: modules that the server imports, once for all processes.
    """

    def __init__(
        self,
        count: int,
        work: Work[Job],
        outputs: Callable[[Job], Collection[Any]],
        show: Callable[[Job, Any], None],
        end: Callable[[Job, str | None], None],
        variables: Callable[[int], Mapping[str, str]] = lambda slot: {},
        preload: Sequence[str] = (),
    ):
        self.count, self.work, self.preload = count, work, preload
        self.outputs, self.show, self.end, self.variables = outputs, show, end, variables
        self.children: dict[int, Child] = {}  # at work, by the numbers of their jobs
        self.received_signal: int | None = None  # number of the last signal that asked to end

    def run(self, jobs: Sequence[Job]) -> list[int | None]:
        """Return the exit codes; None for a job that was not begun because a signal came.

        The signal is passed on to the children as SIGTERM, and this waits until they have ended. Afterwards
        this process ignores further signals, since it is about to end too.
        """
        waiting = [*range(len(jobs))]
        codes: list[int | None] = [None] * len(jobs)
        start_server(self.preload)
        with self._signals_passed_on():
            try:
                while self.children or (waiting and self.received_signal is None):
                    while waiting and len(self.children) < self.count and self.received_signal is None:
                        number = self.choose(jobs, waiting)
                        waiting.remove(number)
                        self._start(number, jobs[number])
                    for number, code in self._wait(jobs):
                        codes[number] = code
            finally:  # an error here leaves some at work
                self._terminate()
                for child in self.children.values():
                    child.close()
        return codes

    def choose(self, jobs: Sequence[Job], waiting: Sequence[int]) -> int:
        """Return the first ``waiting`` number, if possible of a job that need not wait for another."""
        being_written = {output for number in self.children for output in self.outputs(jobs[number])}
        free = (number for number in waiting if not being_written.intersection(self.outputs(jobs[number])))
        return next(free, waiting[0])

    def _start(self, number: int, job: Job) -> None:
        slot = min({*range(self.count)} - {child.slot for child in self.children.values()})
        self.children[number] = Child(self.work, job, slot, self.variables(slot))
        if self.received_signal is not None:  # it came before it could be passed on
            self._terminate()

    def _wait(self, jobs: Sequence[Job]) -> Iterator[tuple[int, int]]:
        """Wait a moment, show what children send, and yield (number, exit code) of jobs that have ended."""
        ready = [child.receiver for child in self.children.values() if child.is_connected]
        connection.wait([*ready, *(child.process.sentinel for child in self.children.values())], timeout=1)
        for number, child in [*self.children.items()]:
            status = child.process.exitcode  # asked first: nothing is sent afterwards
            for message in child.received():
                self.show(jobs[number], message)
            if status is not None:
                del self.children[number]
                cause = None
                if self.received_signal is None:
                    cause = unreported_cause(status, child.has_sent)
                self.end(jobs[number], cause)
                yield number, exit_code(status)

    def _terminate(self) -> None:
        for child in self.children.values():
            child.process.terminate()

    @contextmanager
    def _signals_passed_on(self) -> Iterator[None]:
        def pass_on(number: int, _: FrameType | None) -> None:
            self.received_signal = number
            self._terminate()

        before = {number: signal.signal(number, pass_on) for number in heeded_signals()}
        try:
            yield
        finally:
            for number, handler in before.items():
                signal.signal(number, handler if self.received_signal is None else signal.SIG_IGN)


def unreported_cause(status: int, has_sent: bool) -> str | None:
    """Return why a process ended if it cannot have reported that itself, else None.

    It cannot if a signal killed it, if its exit code is none of EXIT_CODES, or if it failed before it sent
    anything.
    """
    if status < 0:
        return killed_by(-status)
    if status == EXIT_CODES["failed"] and not has_sent:
        return "its process failed before it began; the error is printed above"
    return None if status in EXIT_CODES.values() else f"its process ended with exit code {status}"


class Child:
    """A process that does one job, and sends what is to be shown meanwhile.

    It computes with one thread and has ``variables`` in its environment.
    """

    def __init__(self, work: Work[Job], job: Job, slot: int, variables: Mapping[str, str]):
        self.slot = slot
        self.is_connected = True  # it has not closed its end of the pipe
        self.has_sent = False  # anything to be shown
        self.receiver, sender = FORKSERVER.Pipe(duplex=False)
        flags = f"{os.environ.get('XLA_FLAGS', '')} {XLA_ONE_THREAD}".strip()
        environment = {**os.environ, **ONE_THREAD, "XLA_FLAGS": flags, **variables}
        self.process = FORKSERVER.Process(target=_child_main, args=(work, job, sender, environment))
        self.process.start()
        sender.close()  # the process has a copy

    def received(self) -> Iterator[Any]:
        """Yield what the process has sent until now."""
        try:
            while self.is_connected and self.receiver.poll():
                message = self.receiver.recv()
                self.has_sent = True
                yield message
        except (EOFError, OSError):  # it is gone
            self.is_connected = False

    def close(self) -> None:
        """Wait AFTER_ERROR for the process to end, and kill it then; what it sends is not read any more."""
        self.receiver.close()
        self.process.join(AFTER_ERROR)
        self.process.kill()


def start_server(preload: Sequence[str]) -> None:
    """Start the fork server, of which all job processes are forks, unless it already runs.

    This returns before the server has imported ``preload``. The server has a single thread, since a fork has
    only the thread that made it. It blocks SIGNALS, and so do its forks: a signal to the whole process group,
    such as Ctrl-C, reaches only this process, which forwards it.
    """
    forkserver.set_forkserver_preload([*preload])
    resource_tracker.ensure_running()  # else the server's start would, which unblocks signals
    before = {name: os.environ.get(name) for name in ONE_THREAD}
    os.environ.update(ONE_THREAD)
    mask = signal.pthread_sigmask(signal.SIG_BLOCK, SIGNALS)
    try:
        forkserver.ensure_running()
    finally:
        signal.pthread_sigmask(signal.SIG_SETMASK, mask)
        for name, value in before.items():  # restore this process's own values
            del os.environ[name]
            if value is not None:
                os.environ[name] = value


def _child_main(
    work: Work[Job], job: Job, sender: connection.Connection, environment: Mapping[str, str]
) -> None:
    """In a child: do the job, and exit with its code. SIGINT and SIGHUP stay blocked."""
    os.environ.clear()  # those of the server
    os.environ.update(environment)
    os.setpgid(0, 0)
    when_parent_is_gone(partial(os.killpg, 0, signal.SIGKILL))  # with what it has started
    signal.signal(signal.SIGTERM, _stop)
    signal.pthread_sigmask(signal.SIG_UNBLOCK, [signal.SIGTERM])
    try:
        sys.exit(work(job, sender.send))
    finally:  # a signal that comes now would break into the ending
        signal.signal(signal.SIGTERM, signal.SIG_IGN)


def when_parent_is_gone(act: Callable[[], object]) -> None:
    """In a process of multiprocessing, have a thread call ``act`` as soon as the parent has ended."""
    parent = parent_process()
    assert parent is not None, "only a child of multiprocessing calls this"

    def wait() -> None:
        parent.join()
        act()

    threading.Thread(target=wait, name="parent", daemon=True).start()


def _stop(*_) -> None:
    """End a child on SIGTERM. Training has a handler of its own, which saves first."""
    exit_after_sigterm()

"""Jobs side by side: workers with one thread each, which take one job after another.

At small sizes a core does twice as much with a run to itself as cores do that share one.
"""

import os
import signal
import sys
import time
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from concurrent.futures import Future, ProcessPoolExecutor
from concurrent.futures.process import BrokenProcessPool
from contextlib import contextmanager
from multiprocessing import active_children, connection, get_context
from multiprocessing.process import BaseProcess
from types import FrameType
from typing import Any, Generic, TypeVar

from experiments.processes.exit_codes import AGAIN, EXIT_CODES, killed_by
from experiments.processes.restart import SIGNALS, end_with_parent
from lm.train.runtime.preemption import exit_after, is_compiling

# One thread that computes: of XLA, by its number of cores and within a product, and of the others.
ONE_THREAD = {"NPROC": "1", "OMP_NUM_THREADS": "1", "OPENBLAS_NUM_THREADS": "1"}
XLA_ONE_THREAD = "--xla_cpu_multi_thread_eigen=false"
AFTER_SIGNAL = 5.0  # from a signal that there is nothing to save for to a worker's end, at most [seconds]
SPAWN = get_context("spawn")  # a fork would inherit jax's threads as they happen to be

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
    show: gets a job and what its worker sent.
    end: gets a job that has ended and, if its worker died, by what.
    variables: returns the environment variables of a worker by its place, from 0; one that takes the place of
    a dead one has the same.
    """

    def __init__(
        self,
        count: int,
        work: Work[Job],
        needs: Callable[[Job], Collection[Any]],
        show: Callable[[Job, Any], None],
        end: Callable[[Job, str | None], None],
        variables: Callable[[int], Mapping[str, str]] = lambda place: {},
    ):
        self.count, self.work = count, work
        self.needs, self.show, self.end, self.variables = needs, show, end, variables
        self.workers: list[Worker[Job]] = []
        self.signal: int | None = None  # the last that asked to end

    def run(self, jobs: Sequence[Job]) -> list[int | None]:
        """Return the exit codes; None for a job that was not begun, since a signal came.

        It is passed on to the workers, as SIGTERM, and their ends are waited for. Afterwards this process
        ignores further signals, since it ends too.
        """
        waiting = [*range(len(jobs))]
        codes: list[int | None] = [None] * len(jobs)
        with self._signals_passed_on():
            try:
                while waiting or any(worker.number is not None for worker in self.workers):
                    if self.signal is not None:
                        waiting.clear()
                    self._hand_out(jobs, waiting)
                    for number, code in self._wait(jobs):
                        codes[number] = code
            finally:
                for worker in self.workers:
                    worker.close()
        return codes

    def _hand_out(self, jobs: Sequence[Job], waiting: list[int]) -> None:
        """Give idle workers something to do, and start workers while there are fewer than ``count``."""
        idle = [worker for worker in self.workers if worker.number is None]
        while waiting and (idle or len(self.workers) < self.count):
            if not idle:
                idle = [self._new_worker()]
            number = self.choose(jobs, waiting)
            waiting.remove(number)
            idle.pop().start(number, jobs[number])
            if self.signal is not None:  # it came before it could be passed on
                self._terminate()

    def choose(self, jobs: Sequence[Job], waiting: Sequence[int]) -> int:
        """Return the first ``waiting`` number, if possible of a job that need not wait for another."""
        at_work = [worker.number for worker in self.workers if worker.number is not None]
        being_made = {need for number in at_work for need in self.needs(jobs[number])}
        free = (number for number in waiting if not being_made.intersection(self.needs(jobs[number])))
        return next(free, waiting[0])

    def _new_worker(self) -> "Worker[Job]":
        place = min({*range(self.count)} - {worker.place for worker in self.workers})
        self.workers.append(worker := Worker(self.work, place, self.variables(place)))
        return worker

    def _wait(self, jobs: Sequence[Job]) -> Iterator[tuple[int, int]]:
        """Wait a moment, show what workers send, and yield (number, exit code) of jobs that have ended."""
        busy = [(worker.number, worker) for worker in self.workers if worker.number is not None]
        connection.wait([worker.receiver for _, worker in busy if worker.sends], timeout=0.2)
        for number, worker in busy:
            has_ended = worker.has_ended()  # asked first: nothing is sent afterwards
            for message in worker.received():
                self.show(jobs[number], message)
            if has_ended:
                code, killed = worker.result()
                if killed is not None:
                    self.workers.remove(worker)
                self.end(jobs[number], killed if self.signal is None else None)
                yield number, code

    def _terminate(self) -> None:
        for worker in self.workers:
            worker.terminate()

    @contextmanager
    def _signals_passed_on(self) -> Iterator[None]:
        """Pass signals on to the workers, except those that nohup or a script ignores."""

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


class Worker(Generic[Job]):
    """A process that does one job after another: a pool of one, whose death breaks no other pool."""

    def __init__(self, work: Work[Job], place: int, variables: Mapping[str, str]):
        self.work, self.place, self._variables = work, place, variables
        self.receiver, self._sender = SPAWN.Pipe(duplex=False)
        self.sends = True  # the other end of the pipe is open
        self.number: int | None = None  # of the job at work
        self._pool = ProcessPoolExecutor(1, SPAWN, _begin_worker, (self._sender, os.getpid()))
        self._future: Future[int]
        self._process: BaseProcess | None = None

    def start(self, number: int, job: Job) -> None:
        """Begin with a job; the first one starts the process."""
        self.number = number
        if self._process is not None:
            self._future = self._pool.submit(_do, self.work, job)
            return
        others = active_children()
        with _environment_of_workers(self._variables):
            self._future = self._pool.submit(_do, self.work, job)
        (self._process,) = {*active_children()} - {*others}
        self._sender.close()  # the process has a copy

    def received(self) -> Iterator[Any]:
        """Yield what the process has sent until now."""
        try:
            while self.sends and self.receiver.poll():
                yield self.receiver.recv()
        except (EOFError, OSError):  # it is gone
            self.sends = False

    def has_ended(self) -> bool:
        """Return whether the job at work is done, or the process is gone."""
        return self._future.done()

    def result(self) -> tuple[int, str | None]:
        """Return the exit code of the job and, if the process is gone, by what; the worker is idle then."""
        self.number = None
        try:
            return self._future.result(), None
        except SystemExit:  # the signal came again, while the job was ending after the first
            return AGAIN, None
        except BrokenProcessPool:
            assert self._process is not None
            while (status := self._process.exitcode) is None:  # until a thread of the pool has it
                time.sleep(0.01)
            status = status or EXIT_CODES["failed"]
        if status > 0:
            return status, f"its process ended with exit code {status}"
        return AGAIN if status == -signal.SIGTERM else 128 - status, killed_by(-status)

    def terminate(self) -> None:
        """Send SIGTERM: the process saves what it has learnt, and ends."""
        if self._process is not None:
            self._process.terminate()

    def close(self) -> None:
        """End the process, which an error here may have left at work."""
        if self.number is not None:
            self.terminate()
        self._pool.shutdown(cancel_futures=True)


_to_parent: connection.Connection | None = None  # in a worker, whose parent hands out the jobs


def _begin_worker(sender: connection.Connection, parent: int) -> None:
    """In a new worker: get ready for ``_do``."""
    global _to_parent
    _to_parent = sender
    os.setpgid(0, 0)  # a Ctrl-C is for the process that hands out jobs, which passes it on
    signal.signal(signal.SIGTERM, _stop)
    end_with_parent(parent)


def _do(work: Work[Job], job: Job) -> int:
    """In a worker: return the exit code of a job."""
    signal.signal(signal.SIGTERM, _stop)  # which a job that was stopped leaves ignored
    try:
        assert _to_parent is not None, "_begin_worker comes first"
        return work(job, _to_parent.send)
    except SystemExit as end:
        code = end.code if isinstance(end.code, int) else EXIT_CODES["failed" if end.code else "done"]
        if is_compiling():  # which nothing interrupts, and which would abort this process at its end
            os._exit(code)
        if code == AGAIN:
            signal.signal(signal.SIGTERM, signal.SIG_IGN)
        return code


def _stop(*_) -> None:
    """End a worker on SIGTERM, except while training, which saves first; the timer is for work that hangs.

    The signal may come again, also to a process that is leaving, where an exception prints a traceback.
    """
    signal.signal(signal.SIGTERM, signal.SIG_IGN)
    exit_after(AFTER_SIGNAL, AGAIN)
    sys.exit(AGAIN)


@contextmanager
def _environment_of_workers(variables: Mapping[str, str]) -> Iterator[None]:
    """Have processes that are started meanwhile compute with one thread, and with ``variables``.

    They do not get signals of the terminal, by which they would be hit before they can be in a group of their
    own.
    """
    before = dict(os.environ)
    flags = f"{os.environ.get('XLA_FLAGS', '')} {XLA_ONE_THREAD}".strip()
    os.environ.update({**ONE_THREAD, "XLA_FLAGS": flags, **variables})
    mask = signal.pthread_sigmask(signal.SIG_BLOCK, (signal.SIGINT, signal.SIGHUP))
    try:
        yield
    finally:
        signal.pthread_sigmask(signal.SIG_SETMASK, mask)
        os.environ.clear()
        os.environ.update(before)

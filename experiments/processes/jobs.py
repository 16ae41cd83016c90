"""Processes that share a list of tasks, each on a core of its own: the workers, and who hands the tasks out.

At small sizes a core does twice as much with a run to itself as cores do that share one. A worker is the same
command with LM_JOB in its environment; it is told the numbers of its tasks, and ends with who told it.
"""

import os
import queue
import selectors
import signal
import socket
import subprocess
import sys
import threading
from collections.abc import Callable, Collection, Iterator, Sequence
from contextlib import contextmanager, suppress
from typing import Any

from experiments.processes.exit_codes import AGAIN, EXIT_CODES, killed_by
from experiments.processes.line import Line
from experiments.processes.supervisor import SIGNALS

JOB = "LM_JOB"  # in the environment of a worker: its end of the line
# One thread that computes: of XLA, by its number of cores and within a product, and of the others.
ONE_THREAD = {"NPROC": "1", "OMP_NUM_THREADS": "1", "OPENBLAS_NUM_THREADS": "1"}
XLA_ONE_THREAD = "--xla_cpu_multi_thread_eigen=false"

Hear = Callable[[int, dict], None]  # number of a task, what its worker sent


def cores() -> int:
    """How many cores this process may use."""
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1


def handed_out() -> Iterator[tuple[int, Line]] | None:
    """In a worker the numbers of its tasks, as they come, and the line for what it has to say; else None."""
    if JOB not in os.environ:
        return None
    line = Line(socket.socket(fileno=int(os.environ[JOB])))
    line.end.set_inheritable(False)
    tasks: queue.SimpleQueue[int | None] = queue.SimpleQueue()

    def read() -> None:
        while True:  # with the other end this process ends
            tasks.put(line.need()["task"])

    threading.Thread(target=read, daemon=True).start()
    return ((task, line) for task in iter(tasks.get, None))


class Worker:
    """A process that does one task after another."""

    def __init__(self) -> None:
        end, workers_end = socket.socketpair()
        flags = f"{os.environ.get('XLA_FLAGS', '')} {XLA_ONE_THREAD}".strip()
        environment = os.environ | ONE_THREAD | {"XLA_FLAGS": flags, JOB: str(workers_end.fileno())}
        # Of a group of its own: a Ctrl-C is for the process that hands out the tasks, which passes it on.
        self.process = subprocess.Popen(
            [sys.executable, *sys.orig_argv[1:]],
            env=environment,
            pass_fds=[workers_end.fileno()],
            stdin=subprocess.DEVNULL,
            process_group=0,
        )
        workers_end.close()
        self.line = Line(end)
        self.task: int | None = None
        self.idle = True  # waits for a task

    def do(self, task: int | None) -> None:
        """Begin with a task; None: end."""
        self.task, self.idle = task, False
        self.line.send({"task": task})

    def ended(self) -> tuple[int, str]:
        """Its exit code and, if it was killed, by what."""
        self.line.end.close()
        status = self.process.wait()
        if status >= 0:
            return status, ""
        return (AGAIN if status == -signal.SIGTERM else 128 - status), killed_by(-status)


class Jobs:
    """Workers that do all tasks, up to ``count`` at once; one that fails leaves the others.

    ``needs`` tells, of the number of a task, what only one at a time can make: of those waiting a task is
    preferred that need not wait for another. A signal is passed on, and the workers' ends are waited for.
    """

    def __init__(self, count: int, needs: Callable[[int], Collection[Any]], hear: Hear):
        self.count, self.needs, self.hear = count, needs, hear
        self.workers: list[Worker] = []
        self.signal: int | None = None  # the last that asked to end

    def do(self, tasks: Sequence[int]) -> dict[int, int]:
        """{task: exit code} of all that were begun; AGAIN of those that a signal ended."""
        waiting, codes = [*tasks], dict[int, int]()
        with self._signals(), selectors.DefaultSelector() as ready:
            try:
                while self._hand_out(waiting, ready):
                    for key, _ in ready.select(timeout=0.2):
                        codes |= self._read(key.data, ready)
            finally:
                for worker in self.workers:  # that an error here leaves behind
                    worker.process.kill()
                    worker.ended()
        return codes

    def _hand_out(self, waiting: list[int], ready: selectors.BaseSelector) -> bool:
        """Give idle workers, and new ones, something to do; whether there is anything to wait for."""
        idle = [worker for worker in self.workers if worker.idle]
        while waiting and self.signal is None and (idle or len(self.workers) < self.count):
            at_work = [worker.task for worker in self.workers if worker.task is not None]
            busy = {need for task in at_work for need in self.needs(task)}
            task = next((task for task in waiting if not busy.intersection(self.needs(task))), waiting[0])
            waiting.remove(task)
            if not idle:
                idle = [self._start(ready)]
            idle.pop().do(task)
        for worker in idle:
            worker.do(None)
        return bool(self.workers)

    def _start(self, ready: selectors.BaseSelector) -> Worker:
        worker = Worker()
        self.workers.append(worker)
        ready.register(worker.line, selectors.EVENT_READ, worker)
        if self.signal is not None:  # which came before it could be passed on
            worker.process.terminate()
        return worker

    def _read(self, worker: Worker, ready: selectors.BaseSelector) -> dict[int, int]:
        """Take in what a worker sent; {its task: exit code} if that is done, or its end came before."""
        values, codes = worker.line.receive(), dict[int, int]()
        for value in values or ():
            if worker.task is not None:
                self.hear(worker.task, value)
                if "code" in value:
                    codes[worker.task], worker.task, worker.idle = value["code"], None, True
        if values is None:
            ready.unregister(worker.line)
            self.workers.remove(worker)
            code, fault = worker.ended()
            if worker.task is not None:
                codes[worker.task] = code or EXIT_CODES["failed"]
                self.hear(worker.task, {"code": codes[worker.task], "killed": fault})
        return codes

    @contextmanager
    def _signals(self) -> Iterator[None]:
        """Signals are passed on, as SIGTERM, but for those that nohup or a script ignores."""

        def pass_on(number: int, _: Any) -> None:
            self.signal = number
            for worker in self.workers:
                with suppress(OSError):
                    worker.process.terminate()

        taken = [number for number in SIGNALS if signal.getsignal(number) is not signal.SIG_IGN]
        before = {number: signal.signal(number, pass_on) for number in taken}
        try:
            yield
        finally:
            for number, handler in before.items():
                signal.signal(number, handler)

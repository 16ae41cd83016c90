"""Jobs whose ends are given as arguments, ``python planned_jobs.py CODE...``.

A job ends with the exit code, is killed by the signal where the number is negative, or waits for a SIGTERM.
The process of a job that lingers takes a moment to leave. A signal that comes again at the end is ignored.
"""

import os
import signal
import sys
import time
from multiprocessing.util import Finalize

from experiments.processes.jobs import Jobs


def work(plan, send):
    assert os.environ["NPROC"] == "1", "a job should compute with one thread"
    assert "colorsys" in sys.modules, "the server should have imported it"
    if plan == "cannot begin":
        raise ImportError("of a module that it needs")
    send(os.getpid())
    if plan == "waits":
        signal.signal(signal.SIGTERM, lambda *_: sys.exit(42))
        send("ready")
        time.sleep(60)
    if plan == "lingers":
        Finalize(None, leave, exitpriority=0)
        send("ready")
        time.sleep(60)
    if plan.startswith("-"):
        os.kill(os.getpid(), -int(plan))
    if plan == "crashes":
        os._exit(7)
    return int(plan)


def leave():
    print("leaving", flush=True)
    time.sleep(1)


def show(plan, message):
    print(plan, message, flush=True)


def end(plan, killed):
    print(plan, "ended", killed, flush=True)


if __name__ == "__main__":
    jobs = Jobs(2, work, lambda plan: (), show, end, preload=["colorsys"])
    before = dict(os.environ)
    codes = jobs.run(sys.argv[1:])
    if jobs.received_signal is not None:
        signal.raise_signal(jobs.received_signal)
    print("codes", codes, jobs.received_signal, flush=True)
    assert os.environ == before

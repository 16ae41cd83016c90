"""Jobs whose ends are given as arguments, ``python planned_jobs.py CODE...``.

A job ends with the exit code, is killed by the signal where the number is negative, or waits for a SIGTERM.
"""

import os
import signal
import sys
import time

from experiments.processes.jobs import Jobs


def work(plan, send):
    assert os.environ["NPROC"] == "1", "a worker should compute with one thread"
    send(os.getpid())
    if plan == "waits":
        signal.signal(signal.SIGTERM, lambda *_: sys.exit(42))
        send("ready")
        time.sleep(60)
    if plan.startswith("-"):
        os.kill(os.getpid(), -int(plan))
    if plan == "crashes":
        os._exit(7)
    return int(plan)


def show(plan, message):
    print(plan, message, flush=True)


def end(plan, killed):
    print(plan, "ended", killed, flush=True)


if __name__ == "__main__":
    jobs = Jobs(2, work, lambda plan: (), show, end)
    before = dict(os.environ)
    print("codes", jobs.run(sys.argv[1:]), jobs.signal, flush=True)
    assert os.environ == before

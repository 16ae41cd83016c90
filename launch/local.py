"""``lm-launch local``: N processes of ``lm run`` on this machine, which find each other over a free port."""

import os
import signal
import socket
import threading
import time
from argparse import Namespace
from collections.abc import Sequence
from secrets import token_hex

from launch.command import Job, find
from launch.policy import DONE, HOPELESS, INTERRUPTED, pause, worst
from launch.processes import Child, on_signals, say, show

GRACE = 60.0  # seconds that the others have, once one process has failed, to notice it, save and end


def environment(process: int, port: int, secret: str, asked: Namespace) -> dict[str, str]:
    """What ``lm`` reads to join the others; simulated devices on the CPU if a number of them is given."""
    own = {
        "LM_COORDINATOR": f"127.0.0.1:{port}",
        "LM_PROCESSES": str(asked.processes),
        "LM_PROCESS": str(process),
    }
    own |= {"LM_SECRET": secret}  # which no other user of this machine knows
    flags = (
        f"{os.environ.get('XLA_FLAGS', '')} --xla_force_host_platform_device_count={asked.devices}".strip()
    )
    return own | ({"XLA_FLAGS": flags, "JAX_PLATFORMS": "cpu"} if asked.devices else {})


def run(jobs: Sequence[Job], asked: Namespace) -> int:
    """Run the jobs one after another, each again after a crash; the first exit code that is not 0."""
    lm, failed, told = find("lm", "install the project (pip install -e .)"), DONE, threading.Event()
    children: list[Child] = []

    def pass_on(number: int) -> None:
        told.set()  # nothing is started again
        for child in children:
            child.send_signal(signal.SIGTERM if number == signal.SIGHUP else number)

    def attempt(command: Sequence[str]) -> int:
        children.clear()
        port, secret = _free_port(), "..." if asked.dry_run else token_hex(16)
        for process in range(asked.processes):
            own = environment(process, port, secret, asked)
            if asked.dry_run:
                show(["env", *(f"{name}={value}" for name, value in own.items()), *command])
            elif not told.is_set():
                children.append(Child(command, str(process), os.environ | own))
        if told.is_set():  # while they were being started
            pass_on(signal.SIGTERM)
        return worst(_wait(children) or [INTERRUPTED if told.is_set() else DONE])

    on_signals(pass_on)
    for job in jobs:
        failures = 0
        while code := attempt([lm, *job.arguments()]):
            if code in HOPELESS or failures >= asked.restarts or told.is_set():
                break
            failures += 1
            say("launch", f"ended with {code}; restart {failures} of {asked.restarts}")
            told.wait(pause(failures, 1.0))
        if code:
            say("launch", f"{job.name} ended with {code}")
        failed = failed or code
    return failed


def _wait(children: Sequence[Child]) -> list[int]:
    """Exit codes of all. When one has failed the others have GRACE to save and end."""
    deadline = float("inf")
    while any(child.poll() is None for child in children):
        if deadline == float("inf") and any(child.poll() for child in children):
            deadline = time.monotonic() + GRACE
        for child in children if time.monotonic() > deadline else ():
            child.kill()
        time.sleep(0.1)
    return [child.finish() for child in children]


def _free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return probe.getsockname()[1]

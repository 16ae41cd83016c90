"""N processes of ``lm run`` on this machine, which meet at a free port.

All of them are started again here, at another port, though ``--restart`` of ``lm`` could: so nothing here
depends on the project.
"""

import os
import signal
import socket
import threading
from collections.abc import Sequence
from dataclasses import dataclass

from launch.command import Job, check_at_least, program_path
from launch.policy import DONE, INTERRUPTED, NOT_RETRYABLE, pause, root_cause
from launch.processes import Child, finish_all, on_signals, say, show

AFTER_FAILURE = 60.0  # seconds that the others have, once one process has failed, to notice it, save and end


@dataclass(frozen=True)
class Processes:
    """The processes of each run."""

    processes: int = 1  # processes of each run
    devices_per_process: int = 0  # devices that each simulates on the CPU; 0: the real ones
    restarts: int = 3  # restarts of a run after crashes
    dry_run: bool = False  # print every command and run none


def environment(process: int, port: int, options: Processes) -> dict[str, str]:
    """Return what ``lm`` reads to join the others, and to simulate devices on the CPU if there are some."""
    variables = {"LM_COORDINATOR": f"127.0.0.1:{port}", "LM_PROCESSES": str(options.processes)}
    variables["LM_PROCESS"] = str(process)
    if options.devices_per_process:
        simulated = f"--xla_force_host_platform_device_count={options.devices_per_process}"
        flags = f"{os.environ.get('XLA_FLAGS', '')} {simulated}".strip()
        variables |= {"XLA_FLAGS": flags, "JAX_PLATFORMS": "cpu"}
    return variables


def run_here(jobs: Sequence[Job], options: Processes) -> int:
    """Run the jobs one after another, each again after a crash; return the first exit code that is not 0."""
    check_at_least(1, processes=options.processes)
    check_at_least(0, devices_per_process=options.devices_per_process, restarts=options.restarts)
    lm, failed = program_path("lm", "install the project (pip install -e .)"), DONE
    stopped = threading.Event()  # by a signal
    children: list[Child] = []

    def pass_on(number: int) -> None:
        stopped.set()  # nothing is started again
        for child in children:
            child.send_signal(signal.SIGTERM if number == signal.SIGHUP else number)

    def attempt(command: Sequence[str]) -> int:
        children.clear()
        port = _free_port()
        for process in range(options.processes):
            variables = environment(process, port, options)
            if options.dry_run:
                show(["env", *(f"{name}={value}" for name, value in variables.items()), *command])
            elif not stopped.is_set():
                children.append(Child(command, str(process), os.environ | variables))
        if stopped.is_set():  # while they were being started
            pass_on(signal.SIGTERM)
        return root_cause(finish_all(children, AFTER_FAILURE) or [INTERRUPTED if stopped.is_set() else DONE])

    with on_signals(pass_on):
        for job in jobs:
            failures = 0
            while code := attempt([lm, *job.arguments()]):
                if code in NOT_RETRYABLE or failures >= options.restarts or stopped.is_set():
                    break
                failures += 1
                say("launch", f"ended with {code}; restart {failures} of {options.restarts}")
                stopped.wait(pause(failures, 1.0))
            if code:
                say("launch", f"{job.name} ended with {code}")
            failed = failed or code
    return failed


def _free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return probe.getsockname()[1]

"""The processes that train one run together: how they join, what they agree on, and how one leaves.

jax.distributed finds the cluster, and its heartbeats end all processes when one is gone. This module is
imported before jax, which a command on a single machine may not need.
"""

import json
import os
import signal
import socket
import sys
import threading
from collections.abc import Callable, Mapping
from contextlib import suppress
from typing import Any

from experiments.processes.exit_codes import EXIT_CODES, PREEMPTED
from experiments.processes.restart import heeded_signals, print_line
from lm.config.base import SettingError
from lm.train.runtime.preemption import exit_after

# Seconds to wait for all processes to join, for a heartbeat of each, and for a step; 0 stands for FOREVER.
# A heartbeat of 30 s bridges a machine that is moved or overloaded, and jax's own 100 s are idle time.
TIMEOUTS = {"LM_START_TIMEOUT": 300.0, "LM_HEARTBEAT": 30.0, "LM_STEP_TIMEOUT": 1_800.0}
FOREVER = 1e6  # eleven days [seconds]
FAREWELL = 5.0  # for the others to fail in the same way, after which a process that failed leaves [seconds]
# environment variables that hold the number of processes
PROCESS_COUNT_VARIABLES = ("LM_PROCESSES", "SLURM_STEP_NUM_TASKS", "OMPI_COMM_WORLD_SIZE")
LOOPBACK = ("localhost", "127.0.0.1", "::1")  # hosts that are this machine alone
# The error of a collective contains one of these words if one of its processes has ended.
LOST_PROCESS_MESSAGES = ("Gloo", "NCCL", "heartbeat", "coordination service")


def timeout(name: str) -> float:
    """Return one of TIMEOUTS, as the environment sets it [seconds]."""
    return _number(os.environ, name, float, TIMEOUTS[name])


def _number(environment: Mapping[str, str], name: str, kind: type, default: object = None) -> Any:
    """Return a number from 0 out of the environment; SettingError if it is none."""
    try:
        value = kind(environment.get(name, default))
        if 0 <= value < float("inf"):
            return value
    except (TypeError, ValueError):
        pass
    found = f"{name}={environment[name]}" if name in environment else f"{name}, which is not set,"
    raise SettingError(f"{found} should be a number from 0")


# ---- joining and leaving


def process_count(environment: Mapping[str, str]) -> int | None:
    """Return how many processes the environment says there are; None if it does not say."""
    name = next((name for name in PROCESS_COUNT_VARIABLES if environment.get(name)), None)
    return None if name is None else _number(environment, name, int)


def cluster_arguments(environment: Mapping[str, str]) -> dict[str, Any]:
    """Return the arguments of jax.distributed.initialize that LM_COORDINATOR and its like set.

    There are none without LM_COORDINATOR, or with LM_COORDINATOR=auto: jax detects the cluster.
    """
    coordinator = environment.get("LM_COORDINATOR", "auto")
    if coordinator in ("", "auto"):
        return {}
    host, _, port = coordinator.rpartition(":")
    if not host or not port.isdecimal() or int(port) not in range(1, 65536):
        raise SettingError(f"LM_COORDINATOR={coordinator} should be host:port, of the first process, or auto")
    count, index = (_number(environment, name, int) for name in ("LM_PROCESSES", "LM_PROCESS"))
    if index >= count:
        raise SettingError(f"LM_PROCESS={index} should be below LM_PROCESSES={count}")
    found = {"coordinator_address": coordinator, "num_processes": count, "process_id": index}
    if host.strip("[]") in LOOPBACK:  # by default jax listens on all addresses, to other machines too
        found["coordinator_bind_address"] = coordinator
    return found | {"cluster_detection_method": "deactivate"}


def join_others() -> bool:
    """Join the other processes of this run, if there are any; return whether there are.

    They are those that LM_COORDINATOR names, or that jax detects: of Slurm, Open MPI, Cloud TPU, GKE and
    Kubernetes. With LM_COORDINATOR=auto, or where the environment says that there are several, it is an error
    if jax detects none. LM_PROCESSES=1 is one alone.
    All have to be there within LM_START_TIMEOUT. Until training begins, SIGTERM and SIGINT kill a process
    that has joined, also while it waits in jax for the others, where no handler of Python's could run.
    """
    if process_count(os.environ) == 1:
        return False
    arguments, patience = cluster_arguments(os.environ), timeout("LM_START_TIMEOUT") or FOREVER
    heartbeat = timeout("LM_HEARTBEAT") or FOREVER
    if arguments.get("process_id") == 0:
        _check_port(arguments["coordinator_address"])
    import jax

    handlers = {n: signal.getsignal(n) for n in heeded_signals() if n != signal.SIGHUP}
    for number in handlers:
        signal.signal(number, signal.SIG_DFL)
    jax.config.update("jax_enable_preemption_service", False)
    join_timer = threading.Timer(patience, _exit_without_others, [arguments, patience])
    join_timer.daemon = True
    join_timer.start()
    joined = False
    try:
        jax.distributed.initialize(
            **arguments,
            initialization_timeout=round(patience + 60),  # jax would abort without saying why
            heartbeat_timeout_seconds=max(round(heartbeat), 1),
        )
        joined = jax.process_count() > 1  # a cluster may be of one
    except Exception as error:  # each kind of cluster has its own errors
        if arguments or "coordinator_address" not in str(error):
            raise SettingError(
                f"jax cannot join the other processes ({error}); LM_PROCESSES=1 runs this one alone"
            ) from error
        if os.environ.get("LM_COORDINATOR") or process_count(os.environ):
            raise SettingError(
                "jax detects neither Slurm, Open MPI, a TPU nor Kubernetes: set LM_COORDINATOR=host:port, "
                "LM_PROCESSES and LM_PROCESS, or LM_PROCESSES=1 for one process alone"
            ) from error
    finally:
        join_timer.cancel()
        if not joined:
            for number, handler in handlers.items():
                signal.signal(number, handler)
    return joined


def _check_port(coordinator: str) -> None:
    """Raise SettingError if the coordinator cannot listen: jax would crash."""
    try:
        socket.create_server(("", int(coordinator.rpartition(":")[2]))).close()
    except OSError as error:
        raise SettingError(f"LM_COORDINATOR={coordinator} should be a free port here: {error}") from error


def _exit_without_others(arguments: Mapping[str, Any], seconds: float) -> None:
    """Say that the other processes did not join within ``seconds``, and end this process with exit code 1."""
    named = "process {process_id} of {num_processes} and the others did not meet at {coordinator_address}"
    failure = named.format(**arguments) if arguments else "this process and the others did not meet"
    print_line(f"{failure} within {seconds:.0f} s (LM_START_TIMEOUT); LM_PROCESSES=1 runs each alone")
    os._exit(EXIT_CODES["failed"])


def leave_others(code: int) -> None:
    """Wait until the others end too, before this process exits with ``code``.

    One that failed waits only FAREWELL for those that fail in the same way, and is gone then: jax ends those
    that go on.
    """
    import jax

    for stream in (sys.stdout, sys.stderr):
        with suppress(OSError):  # nobody reads any more
            stream.flush()
    if code not in (EXIT_CODES["done"], PREEMPTED):
        exit_after(FAREWELL, code)
    with suppress(RuntimeError):  # one of them is gone
        jax.distributed.shutdown()


def is_due_to_lost_process(error: Exception) -> bool:
    """Return whether a collective failed with this error because another process of this run has ended."""
    import jax

    return jax.process_count() > 1 and any(word in str(error) for word in LOST_PROCESS_MESSAGES)


# ---- what the processes agree on


def gathered(value: Any) -> list[Any]:
    """Return the ``value`` of each process, in the order of processes; it is sent as JSON."""
    import jax
    import numpy as np
    from jax.experimental.multihost_utils import process_allgather

    if jax.process_count() == 1:
        return [value]
    sent = json.dumps(value).encode()
    longest = int(process_allgather(np.int32(len(sent))).max())
    length = -(-longest // 1024) * 1024  # a collective is compiled for each length
    texts = process_allgather(np.frombuffer(sent.ljust(length), np.uint8))
    # process_allgather may return wider integers than the uint8 that was sent
    return [json.loads(np.asarray(text, np.uint8).tobytes()) for text in texts]


def broadcast_from_first(find: Callable[[], Any]) -> Any:
    """Call ``find`` on process 0 alone, and return its result on all processes.

    The result is sent as JSON. A SettingError that ``find`` raises is raised on all processes; after another
    error process 0 ends alone, and jax ends the others. All processes must call this: it is a barrier too.
    """
    import jax

    if jax.process_count() == 1:
        return find()
    message = {}
    if jax.process_index() == 0:
        try:
            message = {"value": find()}
        except SettingError as error:
            message = {"error": str(error)}
    message = gathered(message)[0]
    if "error" in message:
        raise SettingError(message["error"])
    return message["value"]


def main_process_first(work: Callable[[], Any]) -> Any:
    """Return ``work()``, which process 0 calls first and the others call afterwards.

    So process 0 fills the cache alone, and the others read it. A SettingError of process 0 is raised on all.
    """
    results = []
    broadcast_from_first(lambda: results.append(work()))
    return results[0] if results else work()

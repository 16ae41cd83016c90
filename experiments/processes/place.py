"""Several processes that train one run: which one this is, how they find each other, and what they agree on.

``LM_COORDINATOR=host:port``, ``LM_PROCESSES=N`` and ``LM_PROCESS=i`` say it; without them a Slurm step of
several tasks and a TPU of several hosts are recognised, and must be there with ``LM_COORDINATOR=auto``;
``LM_PROCESSES=1`` is one alone, whatever is around it. Those with another ``LM_SECRET`` are turned away. Only
the standard library is imported
here: jax is loaded by the process that trains.
"""

import os
import re
import socket
import time
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from lm.settings import SettingError

STARTED = time.monotonic()  # of this process, near enough
PORT = 8483  # where the processes of a TPU meet
METADATA = "metadata.google.internal"  # tells a TPU VM what it is
WAITS = {  # for all processes to be there, for a sign of life of one, for a step [seconds]; 0: any
    "LM_START_TIMEOUT": 300.0,
    "LM_HEARTBEAT": 15.0,
    "LM_STEP_TIMEOUT": 1_800.0,
}


@dataclass(frozen=True)
class Place:
    """Which of the processes this is; they meet at ``host:port``, on the host of the first."""

    host: str
    port: int
    count: int
    index: int


def number(environment: Mapping[str, str], name: str, default: Any, kind: type = int) -> Any:
    """A number above or equal to 0 out of the environment; SettingError if it is none."""
    try:
        value = kind(environment.get(name, default))
        if 0 <= value < float("inf"):
            return value
    except (TypeError, ValueError):
        pass
    raise SettingError(f"{name}={environment.get(name)} should be a number from 0")


def wait(name: str) -> float:
    """One of WAITS, as the environment has it."""
    return number(os.environ, name, WAITS[name], float)


def find(environment: Mapping[str, str]) -> Place | None:
    """Where this process stands among several; None if it is the only one."""
    if environment.get("LM_PROCESSES") == "1":
        return None
    given = environment.get("LM_COORDINATOR", "")
    if given in ("", "auto"):
        place = slurm(environment) or tpu(environment)
        if place is None and given:
            raise SettingError(
                "LM_COORDINATOR=auto: this is neither a Slurm step nor a TPU; give host:port instead"
            )
    else:
        host, _, port = given.rpartition(":")
        if not host or not port.isdecimal() or int(port) not in range(1, 65536):
            raise SettingError(f"LM_COORDINATOR={given} should be host:port, of the first process, or auto")
        count, index = (number(environment, name, None) for name in ("LM_PROCESSES", "LM_PROCESS"))
        place = Place(host, int(port), count, index)
    if place is not None and place.index >= place.count:
        raise SettingError(f"LM_PROCESS={place.index} should be below LM_PROCESSES={place.count}")
    return place if place is not None and place.count > 1 else None


def slurm(environment: Mapping[str, str]) -> Place | None:
    """Of a task of a Slurm step; ``srun`` sets these variables."""
    count = number(environment, "SLURM_STEP_NUM_TASKS", 0)
    # such as node[01-04,7],big
    nodes = re.match(r"([^,[]+)(?:\[(\d+))?", environment.get("SLURM_STEP_NODELIST", ""))
    if not count or nodes is None:
        return None
    port = 61440 + number(environment, "SLURM_JOB_ID", 0) % 4096  # most likely nobody else's
    return Place(nodes[1] + (nodes[2] or ""), port, count, number(environment, "SLURM_PROCID", 0))


def tpu(environment: Mapping[str, str]) -> Place | None:
    """Of a host of a TPU, or of several slices of them: GKE sets variables, a TPU VM asks its metadata
    server.
    """
    about = {name: value for name, value in environment.items() if value}
    hosts = about.get("TPU_PROCESS_ADDRESSES") or about.get("TPU_WORKER_HOSTNAMES")
    if not hosts and has_tpu() and "TPU_SKIP_MDS_QUERY" not in about:
        server = f"http://{about.get('GCE_METADATA_IP', METADATA)}/computeMetadata/v1/instance/attributes"
        try:
            hosts, about["TPU_WORKER_ID"] = (
                _ask(f"{server}/{key}") for key in ("worker-network-endpoints", "agent-worker-number")
            )
            lines = [line.partition(":") for line in _ask(f"{server}/tpu-env").splitlines()]
        except LookupError:  # not Google's, or of an age that says nothing
            return None
        about = {key.strip(): value.strip(" '") for key, _, value in lines} | about
    if not hosts:
        return None
    ends = [end.split(":") for end in hosts.split(",")]  # name, name:port or name:number:address
    names = [end[2] if len(end) == 3 else end[0] for end in ends]
    first = about.get("MEGASCALE_COORDINATOR_ADDRESS", names[0]).split(":")[0]
    count = len(names) * number(about, "MEGASCALE_NUM_SLICES", 1)
    worker = number(about, "TPU_WORKER_ID", about.get("CLOUD_TPU_TASK_ID", 0))
    return Place(first, PORT, count, worker + len(names) * number(about, "MEGASCALE_SLICE_ID", 0))


def _ask(url: str) -> str:
    """What the server says; LookupError if there is none or it does not know, OSError if it often does not
    answer.
    """
    import urllib.request  # which most need not wait for

    request = urllib.request.Request(url, headers={"Metadata-Flavor": "Google"})
    tries = 4
    while True:
        try:
            with urllib.request.urlopen(request, timeout=5) as answer:
                return answer.read().decode()
        except OSError as error:
            tries -= 1
            if getattr(error, "code", None) == 404 or isinstance(
                getattr(error, "reason", None), socket.gaierror
            ):
                raise LookupError(url) from error
            if not tries:
                raise
        time.sleep(0.5)


def has_tpu() -> bool:
    """Whether there is a TPU's device file."""
    return any(Path("/dev").glob("accel[0-9]*")) or any(Path("/dev/vfio").glob("[0-9]*"))

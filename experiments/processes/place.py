"""The place of this process among those that train one run: which it is, and where they meet.

``LM_COORDINATOR=host:port``, ``LM_PROCESSES=N`` and ``LM_PROCESS=i`` say it. Without them a Slurm step of
several tasks and a TPU of several hosts are recognised; ``LM_COORDINATOR=auto`` insists on one of these.
``LM_PROCESSES=1`` is one process alone, whatever is around it. Only the standard library is imported here.
"""

import os
import re
import socket
import time
from collections.abc import Mapping
from dataclasses import dataclass
from ipaddress import ip_address

from lm.config.base import SettingError
from lm.devices import has_tpu

STARTED = time.monotonic()  # of this process, near enough
PORT = 8483  # where the processes of a TPU meet
METADATA = "metadata.google.internal"  # the server that knows what a TPU VM is
# seconds to wait until all processes are there, for a sign of life of one, and for a step; 0: for ever
TIMEOUTS = {"LM_START_TIMEOUT": 300.0, "LM_HEARTBEAT": 15.0, "LM_STEP_TIMEOUT": 1_800.0}


@dataclass(frozen=True)
class Place:
    """Says which of the processes this is; they meet at ``host:port``, on the host of the first."""

    host: str
    port: int
    count: int
    index: int


def timeout(name: str) -> float:
    """Return one of TIMEOUTS, as the environment sets it [seconds]."""
    return _from_zero(os.environ, name, float, TIMEOUTS[name])


def _whole(environment: Mapping[str, str], name: str, default: object = None) -> int:
    return int(_from_zero(environment, name, int, default))


def _from_zero(environment: Mapping[str, str], name: str, kind: type, default: object) -> float:
    """A number above or equal to 0 out of the environment; SettingError if it is none."""
    try:
        value = kind(environment.get(name, default))
        if 0 <= value < float("inf"):
            return value
    except (TypeError, ValueError):
        pass
    raise SettingError(f"{name}={environment.get(name)} should be a number from 0")


def find_place(environment: Mapping[str, str]) -> Place | None:
    """The place of this process among several; None if it is the only one."""
    if environment.get("LM_PROCESSES") == "1":
        return None
    coordinator = environment.get("LM_COORDINATOR", "")
    if coordinator in ("", "auto"):
        place = _slurm(environment) or _tpu(environment)
        if place is None and coordinator:
            raise SettingError(
                "LM_COORDINATOR=auto: this is neither a Slurm step nor a TPU; give host:port instead"
            )
    else:
        host, _, port = coordinator.rpartition(":")
        if not host or not port.isdecimal() or int(port) not in range(1, 65536):
            raise SettingError(
                f"LM_COORDINATOR={coordinator} should be host:port, of the first process, or auto"
            )
        count, index = (_whole(environment, name) for name in ("LM_PROCESSES", "LM_PROCESS"))
        place = Place(host, int(port), count, index)
    if place is not None and place.index >= place.count:
        raise SettingError(f"LM_PROCESS={place.index} should be below LM_PROCESSES={place.count}")
    return place if place is not None and place.count > 1 else None


def _slurm(environment: Mapping[str, str]) -> Place | None:
    """Return the place of a task of a Slurm step; ``srun`` sets these variables."""
    count = _whole(environment, "SLURM_STEP_NUM_TASKS", 0)
    # such as node[01-04,7],big
    nodes = re.match(r"([^,[]+)(?:\[(\d+))?", environment.get("SLURM_STEP_NODELIST", ""))
    if not count or nodes is None:
        return None
    port = 61440 + _whole(environment, "SLURM_JOB_ID", 0) % 4096  # most likely nobody else's
    return Place(nodes[1] + (nodes[2] or ""), port, count, _whole(environment, "SLURM_PROCID", 0))


def _tpu(environment: Mapping[str, str]) -> Place | None:
    """Return the place of a host of one or more TPU slices.

    GKE sets variables; a TPU VM asks its metadata server.
    """
    known = {name: value for name, value in environment.items() if value}
    hosts = known.get("TPU_PROCESS_ADDRESSES") or known.get("TPU_WORKER_HOSTNAMES")
    if not hosts and has_tpu() and "TPU_SKIP_MDS_QUERY" not in known:
        server = f"http://{known.get('GCE_METADATA_IP', METADATA)}/computeMetadata/v1/instance/attributes"
        try:
            hosts = _fetch(f"{server}/worker-network-endpoints")
            known["TPU_WORKER_ID"] = _fetch(f"{server}/agent-worker-number")
            lines = [line.partition(":") for line in _fetch(f"{server}/tpu-env").splitlines()]
        except LookupError:  # not Google's, or too old to know
            return None
        known = {key.strip(): value.strip(" '") for key, _, value in lines} | known
    if not hosts:
        return None
    ends = [end.split(":") for end in hosts.split(",")]  # name, name:port or name:number:address
    names = [end[2] if len(end) == 3 else end[0] for end in ends]
    first = known.get("MEGASCALE_COORDINATOR_ADDRESS", names[0]).split(":")[0]
    count = len(names) * _whole(known, "MEGASCALE_NUM_SLICES", 1)
    worker = _whole(known, "TPU_WORKER_ID", known.get("CLOUD_TPU_TASK_ID", 0))
    return Place(first, PORT, count, worker + len(names) * _whole(known, "MEGASCALE_SLICE_ID", 0))


def _fetch(url: str) -> str:
    """The server's text; LookupError if it is not there or does not know, OSError after four failures."""
    import urllib.request  # which most need not wait for

    request = urllib.request.Request(url, headers={"Metadata-Flavor": "Google"})
    tries = 4
    while True:
        try:
            with urllib.request.urlopen(request, timeout=5) as answer:
                return answer.read().decode()
        except OSError as error:
            tries -= 1
            unknown = isinstance(getattr(error, "reason", None), socket.gaierror)
            if unknown or getattr(error, "code", None) == 404:
                raise LookupError(url) from error
            if not tries:
                raise
        time.sleep(0.5)


def is_loopback(host: str) -> bool:
    """Return whether a name or address is meant for this machine alone."""
    try:
        return host == "localhost" or ip_address(host).is_loopback
    except ValueError:
        return False

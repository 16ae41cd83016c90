"""Several processes that train one run: which one this is, how they find each other, and what they agree on.

``LM_COORDINATOR=host:port``, ``LM_PROCESSES=N`` and ``LM_PROCESS=i`` say it; without them a Slurm step of several tasks
and a TPU of several hosts are recognised, and must be there with ``LM_COORDINATOR=auto``; ``LM_PROCESSES=1`` is one
alone, whatever is around it. Those with another ``LM_SECRET`` are turned away. Only the standard library is imported
here: jax is loaded by the process that trains.
"""

import json
import os
import re
import signal
import socket
import sys
import time
from collections.abc import Callable, Mapping
from contextlib import suppress
from dataclasses import dataclass
from importlib.util import find_spec
from pathlib import Path
from typing import Any

from lm.config import SettingError

STARTED = time.monotonic()  # of this process, near enough
PORT = 8483  # where the processes of a TPU meet
METADATA = "metadata.google.internal"  # tells a TPU VM what it is
WAITS = {  # for all processes to be there, for a sign of life of one, for a step [seconds]; 0: any
    "LM_START_TIMEOUT": 300.0, "LM_HEARTBEAT": 15.0, "LM_STEP_TIMEOUT": 1_800.0,
}  # fmt: skip
_tell: Callable[[dict], None] = dict  # the watch over this process, where there is one


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
            raise SettingError("LM_COORDINATOR=auto: this is neither a Slurm step nor a TPU; give host:port instead")
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
    nodes = re.match(r"([^,[]+)(?:\[(\d+))?", environment.get("SLURM_STEP_NODELIST", ""))  # such as node[01-04,7],big
    if not count or nodes is None:
        return None
    port = 61440 + number(environment, "SLURM_JOB_ID", 0) % 4096  # most likely nobody else's
    return Place(nodes[1] + (nodes[2] or ""), port, count, number(environment, "SLURM_PROCID", 0))


def tpu(environment: Mapping[str, str]) -> Place | None:
    """Of a host of a TPU, or of several slices of them: GKE sets variables, a TPU VM asks its metadata server."""
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
    """What the server says; LookupError if there is none or it does not know, OSError if it often does not answer."""
    import urllib.request  # which most need not wait for

    request = urllib.request.Request(url, headers={"Metadata-Flavor": "Google"})
    tries = 4
    while True:
        try:
            with urllib.request.urlopen(request, timeout=5) as answer:
                return answer.read().decode()
        except OSError as error:
            tries -= 1
            if getattr(error, "code", None) == 404 or isinstance(getattr(error, "reason", None), socket.gaierror):
                raise LookupError(url) from error
            if not tries:
                raise
        time.sleep(0.5)


def has_tpu() -> bool:
    """Whether there is a TPU's device file."""
    return any(Path("/dev").glob("accel[0-9]*")) or any(Path("/dev/vfio").glob("[0-9]*"))


def choose_platform() -> None:
    """Without a TPU or a GPU here jax need not try libtpu, which is there to plan with and complains at length."""
    gpus = ("nvidiactl", "dxg", "kfd")  # of NVIDIA, in WSL2, of AMD
    if find_spec("libtpu") and not has_tpu() and not any(Path("/dev", name).exists() for name in gpus):
        os.environ.setdefault("JAX_PLATFORMS", "cpu")


def keep_compiled(cache: Path) -> None:
    """What is compiled is kept in ``cache/compiled``, or where JAX_COMPILATION_CACHE_DIR says.

    With JAX_ENABLE_COMPILATION_CACHE=false nothing is kept.
    """
    import jax

    if not os.environ.get("JAX_COMPILATION_CACHE_DIR"):
        jax.config.update("jax_compilation_cache_dir", str(cache.absolute() / "compiled"))
    if not os.environ.get("JAX_PERSISTENT_CACHE_MIN_COMPILE_TIME_SECS"):
        jax.config.update("jax_persistent_cache_min_compile_time_secs", 0.3)


def join() -> Callable[[int], None]:
    """Become one of several processes, if this is one; what to call with the exit code in the end.

    The process that was started watches over the others and over the one that it forks here, which trains.
    """
    place = find(os.environ)
    if place is None:
        return lambda code: None
    start, silence, _ = map(wait, WAITS)
    from experiments.line import is_loopback
    from experiments.watch import fork

    signal.signal(signal.SIGTERM, signal.SIG_DFL)  # until jax has it save a step with the others
    line = fork(place, start, silence)
    import jax  # meanwhile the others come

    met = line.need()
    line.end_with_it()
    global _tell
    _tell = line.send
    detection = None if os.environ.get("LM_COORDINATOR", "auto") == "auto" else "deactivate"  # of a Slurm task's GPUs
    jax.distributed.initialize(
        address := f"{place.host}:{met['port']}", place.count, place.index, cluster_detection_method=detection,
        coordinator_bind_address=address if is_loopback(place.host) else None,
        initialization_timeout=round(start), heartbeat_timeout_seconds=round(4 * silence + 1),
    )  # fmt: skip

    def report(code: int) -> None:
        for stream in (sys.stdout, sys.stderr):
            with suppress(OSError):  # nobody reads any more
                stream.flush()
        line.send({"code": code})

    return report


def trains(now: bool) -> None:
    """Whether a signal should wait for a checkpoint; otherwise the watch ends all processes at once."""
    _tell({"trains": now})


def agreed(find: Callable[[], Any]) -> Any:
    """What ``find`` gives, which only the first process calls; all get it, as JSON, or its SettingError."""
    import jax
    import numpy as np
    from jax.experimental.multihost_utils import broadcast_one_to_all

    if jax.process_count() == 1:
        return find()
    text = b""
    if jax.process_index() == 0:
        try:
            found = {"value": find()}
        except SettingError as error:
            found = {"error": str(error)}
        text = json.dumps(found).encode()
    room = -(-int(broadcast_one_to_all(np.int32(len(text)))) // 1024) * 1024  # few shapes, as each is compiled
    text = broadcast_one_to_all(np.frombuffer(text.ljust(room), np.uint8)).astype(np.uint8).tobytes()
    found = json.loads(text)
    if "error" in found:
        raise SettingError(found["error"])
    return found["value"]


def gathered(value: Any) -> list[Any]:
    """What each process has to say, as JSON, by its number; all get it."""
    import jax
    import numpy as np
    from jax.experimental.multihost_utils import process_allgather

    if jax.process_count() == 1:
        return [value]
    text = json.dumps(value).encode()
    room = -(-int(process_allgather(np.int32(len(text))).max()) // 1024) * 1024  # few shapes, as each is compiled
    found = process_allgather(np.frombuffer(text.ljust(room), np.uint8))
    return [json.loads(each.astype(np.uint8).tobytes()) for each in found]


def first_alone(work: Callable[[], Any]) -> Any:
    """What ``work`` gives, which the first process does before the others: they then find it in the cache."""
    made = []
    agreed(lambda: made.append(work()))
    return made[0] if made else work()

"""The processes that train one run, together: how one joins the others, and what they agree on."""

import json
import os
import signal
import sys
from collections.abc import Callable
from contextlib import suppress
from importlib.util import find_spec
from pathlib import Path
from typing import Any

from experiments.processes.place import WAITS, find, has_tpu, wait
from lm.settings import SettingError

_tell: Callable[[dict], None] = dict  # the watch over this process, where there is one


def choose_platform() -> None:
    """Without a TPU or a GPU here jax need not try libtpu, which is there to plan with and complains at
    length.
    """
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
    from experiments.processes.line import is_loopback
    from experiments.processes.watch import fork

    signal.signal(signal.SIGTERM, signal.SIG_DFL)  # until jax has it save a step with the others
    line = fork(place, start, silence)
    import jax  # meanwhile the others come

    met = line.need()
    line.end_with_it()
    global _tell
    _tell = line.send
    # of a Slurm task's GPUs
    detection = None if os.environ.get("LM_COORDINATOR", "auto") == "auto" else "deactivate"
    jax.distributed.initialize(
        address := f"{place.host}:{met['port']}",
        place.count,
        place.index,
        cluster_detection_method=detection,
        coordinator_bind_address=address if is_loopback(place.host) else None,
        initialization_timeout=round(start),
        heartbeat_timeout_seconds=round(4 * silence + 1),
    )

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
    # few shapes, as each is compiled
    room = -(-int(broadcast_one_to_all(np.int32(len(text)))) // 1024) * 1024
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
    # few shapes, as each is compiled
    room = -(-int(process_allgather(np.int32(len(text))).max()) // 1024) * 1024
    found = process_allgather(np.frombuffer(text.ljust(room), np.uint8))
    return [json.loads(each.astype(np.uint8).tobytes()) for each in found]


def first_alone(work: Callable[[], Any]) -> Any:
    """What ``work`` gives, which the first process does before the others: they then find it in the cache."""
    made = []
    agreed(lambda: made.append(work()))
    return made[0] if made else work()

"""The processes that train one run, together: how a trainer joins the others, and what they agree on."""

import json
import os
import signal
import sys
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path
from typing import Any

from experiments.processes.line import Line
from lm.config.base import SettingError

_supervisor: Line | None = None  # of this process, if it is one of several


def cache_compiled(cache: Path) -> None:
    """Compiled programs are cached in ``cache/compiled``, or where JAX_COMPILATION_CACHE_DIR says.

    With JAX_ENABLE_COMPILATION_CACHE=false none is.
    """
    import jax

    if not os.environ.get("JAX_COMPILATION_CACHE_DIR"):
        jax.config.update("jax_compilation_cache_dir", str(cache.absolute() / "compiled"))
    if not os.environ.get("JAX_PERSISTENT_CACHE_MIN_COMPILE_TIME_SECS"):
        jax.config.update("jax_persistent_cache_min_compile_time_secs", 0.3)


def join_others(line: Line) -> Callable[[int], None]:
    """Become one of several processes, as the supervisor says; what to call with the exit code in the end."""
    global _supervisor
    signal.signal(signal.SIGTERM, signal.SIG_DFL)  # until jax has it save a step with the others
    import jax  # meanwhile the others come

    others = line.need()
    line.end_with_it()
    _supervisor = line
    if os.environ.get("LM_COORDINATOR", "auto") != "auto":  # else jax finds out which GPUs are a Slurm task's
        others["cluster_detection_method"] = "deactivate"
    jax.distributed.initialize(**others)

    def report(code: int) -> None:
        for stream in (sys.stdout, sys.stderr):
            with suppress(OSError):  # nobody reads any more
                stream.flush()
        line.send({"code": code})

    return report


def signals_wait_for_checkpoint(wait: bool) -> None:
    """Tell the supervisors whether a signal waits for a checkpoint or ends all processes at once."""
    if _supervisor is not None:
        _supervisor.send({"signals_wait": wait})


def broadcast_from_first(find: Callable[[], Any]) -> Any:
    """Call ``find`` on process 0 alone, and return its result on all processes.

    The result is sent as JSON. A SettingError that ``find`` raises is raised on all processes.
    All processes must call this: it is a barrier too.
    """
    import jax
    import numpy as np
    from jax.experimental.multihost_utils import broadcast_one_to_all

    if jax.process_count() == 1:
        return find()
    text = b""
    if jax.process_index() == 0:
        try:
            message = {"value": find()}
        except SettingError as error:
            message = {"error": str(error)}
        text = json.dumps(message).encode()
    length = _rounded(int(broadcast_one_to_all(np.int32(len(text)))))
    text = broadcast_one_to_all(np.frombuffer(text.ljust(length), np.uint8)).astype(np.uint8).tobytes()
    message = json.loads(text)
    if "error" in message:
        raise SettingError(message["error"])
    return message["value"]


def gathered(value: Any) -> list[Any]:
    """The ``value`` of each process, as JSON, by its number; all get it."""
    import jax
    import numpy as np
    from jax.experimental.multihost_utils import process_allgather

    if jax.process_count() == 1:
        return [value]
    text = json.dumps(value).encode()
    length = _rounded(int(process_allgather(np.int32(len(text))).max()))
    texts = process_allgather(np.frombuffer(text.ljust(length), np.uint8))
    return [json.loads(text.astype(np.uint8).tobytes()) for text in texts]


def _rounded(length: int) -> int:
    """Up to a multiple of 1024: a collective is compiled for each length."""
    return -(-length // 1024) * 1024


def main_process_first(work: Callable[[], Any]) -> Any:
    """Return ``work()``, which process 0 calls first and the others call afterwards.

    So process 0 fills the cache alone, and the others read it. A SettingError of process 0 is raised on all.
    """
    results = []
    broadcast_from_first(lambda: results.append(work()))
    return results[0] if results else work()

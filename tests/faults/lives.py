"""Runs of small models, lived through: started by the command line, struck from outside, compared to the
bit.
"""

import atexit
import hashlib
import json
import multiprocessing
import os
import pkgutil
import resource
import signal
import socket
import sys
import threading
import time
from contextlib import suppress
from pathlib import Path

import numpy as np
from paths import ROOT
from tiny import TINY

from experiments.processes.exit_codes import EXIT_CODES
from lm.files import CHECKSUM

AGAIN, INTERRUPTED = EXIT_CODES["preempted"], EXIT_CODES["interrupted"]
ABORTED = -signal.SIGABRT  # by jax, since another process is gone
ENVIRONMENT = {
    "XLA_FLAGS": "--xla_backend_optimization_level=0 --xla_llvm_disable_expensive_passes=true",
    "JAX_PLATFORMS": "cpu",
    "PYTHONPATH": str(ROOT),
}
CLOCK = {"time", "seconds", "seconds_per_step", "tokens_per_second", "waiting_for_data", "utilisation"}
BOUND = 300.0  # in which a life does all that it does, on a busy machine [seconds]

# The imports take a life longer than its training: this server makes them once, and forks for each life.
SERVER = multiprocessing.get_context("forkserver")
SERVER.set_forkserver_preload(
    ["experiments.__main__", "experiments.runs.run", "experiments.cli.train", "tyro", "tensorboardX"]
)

FAMILIES = {
    "encoder-decoder": ["t5/1-baseline/baseline", "--tuning.mixtures", "cloze"],
    "decoder": ["gpt/base", "--tuning.mixtures", "cloze", "--tuning.heads"],
    "encoder": ["bert/base", "--tuning.heads", "acceptability"],
}
UNREAD = {  # settings of TINY that a family's models do not read
    "encoder-decoder": (),
    "decoder": ("model.num_encoder_layers",),
    "encoder": ("model.num_decoder_layers", "start.steps"),
}
SMALL = TINY | {
    "pretraining.steps": 12,
    "finetuning.steps": 6,
    "finetuning.save_every": 2,
    "finetuning.log_every": 1,
}

# What is going on when one of these is called.
MOMENTS = {
    "preparing": ("experiments.runs.run:Run", "check"),
    "compiling": ("jax.stages:Lowered", "compile"),
    "training": ("lm.train.runtime.log:Log", "write"),
    "saving": ("lm.train.runtime.checkpoints:Checkpoints", "save"),
    "evaluating": ("experiments.runs.kinds.network", "score_task"),
}


def live(command: list[str], environment: dict[str, str], said: Path, strike: tuple | None) -> None:
    """What a forked child does: the command ``lm``, as if it had been started in this environment.

    ``strike``: (moment, which of its calls, what happens then: a signal to the process that was started, or
    "full").
    """
    from experiments import __main__ as cli

    os.setsid()
    output = os.open(said, os.O_WRONLY | os.O_CREAT | os.O_APPEND)
    for stream in (1, 2):
        os.dup2(output, stream)
    signal.signal(signal.SIGINT, signal.default_int_handler)
    os.environ.update(environment)
    if strike:
        _prepare(said.parent / "struck", *strike)
    sys.argv = ["lm", *command]
    try:
        cli.main()
    finally:
        atexit._run_exitfuncs()


def _prepare(told: Path, moment: str, left: int, what: int | str) -> None:
    owner, name = MOMENTS[moment]
    owner, started = pkgutil.resolve_name(owner), os.getpid()
    whole = getattr(owner, name)

    def strike():
        told.write_text(str(time.time()))
        if what == "full":  # a file that grows beyond this cannot be written, as on a full disk
            sys.dont_write_bytecode = True  # modules would be kept cut off at that size
            resource.setrlimit(resource.RLIMIT_FSIZE, (2**14, 2**14))
        else:
            os.kill(started, what)

    def struck(*args, **kwargs):
        nonlocal left
        left -= 1
        if left == 0:
            strike() if what == "full" else threading.Timer(0.05, strike).start()
        return whole(*args, **kwargs)

    setattr(owner, name, struck)


def command(runs: Path, family: str) -> list[str]:
    settings = {name: value for name, value in SMALL.items() if name not in UNREAD[family]}
    words = [str(word) for name, value in settings.items() for word in (f"--{name}", value)]
    return ["run", *FAMILIES[family], "--runs", str(runs), *words]


def start(runs: Path, family: str, count: int = 1, strike: tuple | None = None, **environment: str) -> list:
    """The processes of a run; ``strike`` is for the last of them."""
    with socket.create_server(("localhost", 0)) as free:
        about = {"LM_COORDINATOR": f"localhost:{free.getsockname()[1]}", "LM_PROCESSES": str(count)}
    about |= ENVIRONMENT | {"LM_START_TIMEOUT": "60", "LM_HEARTBEAT": "10"} | environment
    found = []
    for index in range(count):
        given, own = about | {"LM_PROCESS": str(index)}, strike if index == count - 1 else None
        told = command(runs, family), given, runs / f"said-{index}.txt", own
        found.append(SERVER.Process(target=live, args=told))
        found[-1].start()
    return found


def ends(lives: list) -> list[int]:
    """The exit codes, -9 for a SIGKILL; who does not come to an end is ended, and that is None."""
    end, codes = time.monotonic() + BOUND, []
    for each in lives:
        each.join(max(end - time.monotonic(), 0))
        codes.append(each.exitcode)
    for each in lives:
        if each.exitcode is None:
            kill(each.pid)
            each.join()
    return codes


def kill(pid: int) -> None:
    """SIGKILL to a process and to its child if it is a parent of --restart, which has a group of its own."""
    for one in (*children(pid), pid):
        with suppress(ProcessLookupError):
            os.kill(one, signal.SIGKILL)


def children(pid: int) -> list[int]:
    with suppress(OSError):
        return [int(child) for child in Path(f"/proc/{pid}/task/{pid}/children").read_text().split()]
    return []


def said(runs: Path) -> str:
    return "\n".join(path.read_text() for path in sorted(runs.glob("said-*.txt")))


def arrays(checkpoint: Path) -> dict[str, str]:
    """The hash of every array of a checkpoint, by name: parameters, optimiser state, step."""
    import orbax.checkpoint as ocp

    with ocp.Checkpointer(ocp.PyTreeCheckpointHandler()) as reader:
        names = json.loads((checkpoint / "manifest.json").read_text())["arrays"]
        plain = {name: ocp.RestoreArgs(restore_type=np.ndarray) for name in names}
        found = reader.restore(checkpoint, args=ocp.args.PyTreeRestore(restore_args=plain))
    return {
        name: f"{x.dtype} {x.shape} {hashlib.sha256(x.tobytes()).hexdigest()}" for name, x in found.items()
    }


def came_to(runs: Path) -> dict[str, object]:
    """All that is left of a run in the end: arrays, predictions, metrics and scores, but for what the clock
    told.
    """
    found, clock = {}, CLOCK | {CHECKSUM}  # of what it told, too

    for path in sorted((runs / "nano").rglob("*")):
        key = str(path.relative_to(runs))
        if path.parent.name == "checkpoints" and path.name.isdigit():
            found[key] = arrays(path)
        elif path.name in ("metrics.jsonl", "scores.json") or "predictions" in path.parts and path.is_file():
            lines = path.read_text().splitlines() if path.suffix == ".jsonl" else [path.read_text()]
            found[key] = [{k: v for k, v in json.loads(line).items() if k not in clock} for line in lines]
    return found

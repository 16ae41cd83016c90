"""What one of two processes does in the tests, ``python pair.py PART FOLDER``, and how they are started."""

import hashlib
import os
import signal
import socket
import subprocess
import sys
import time
from pathlib import Path

from paths import ROOT

from experiments.processes import group
from experiments.processes.supervisor import supervise

CHEAP = "--xla_backend_optimization_level=0 --xla_llvm_disable_expensive_passes=true"
PRESETS = (2, 2, 2)  # of the mesh: both processes hold parts of every batch
STEPS, SAVED = 6, 3


def start(*command, count=2, only=None, devices=4, **settings):
    """The processes of a run, on this machine."""
    with socket.create_server(("localhost", 0)) as free:
        port = free.getsockname()[1]
    flags = f"--xla_force_host_platform_device_count={devices} {CHEAP}"
    common = os.environ | {"XLA_FLAGS": flags, "PYTHONPATH": str(ROOT)} | settings
    return [
        subprocess.Popen(
            [sys.executable, *map(str, command)],
            env=common
            | {"LM_COORDINATOR": f"localhost:{port}", "LM_PROCESSES": str(count), "LM_PROCESS": str(index)},
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
        )
        for index in (range(count) if only is None else only)
    ]


def ends(started):
    """(exit code, last line) of each."""
    said = [process.communicate(timeout=500)[0] for process in started]
    lines = [text.strip().splitlines() or [""] for text in said]
    return [(process.returncode, last) for process, (*_, last) in zip(started, lines, strict=True)]


def learn(folder, total, stop=None, on=PRESETS):
    """Train the toy on all devices of all processes; ``stop``: process ``stop[0]`` gets a SIGTERM at that
    batch.
    """
    import jax
    import toy

    def strike(step):
        if (jax.process_index(), step) == stop:
            os.kill(os.getpid(), signal.SIGTERM)

    group.signals_wait_for_checkpoint(True)
    return toy.run(folder, total, every=SAVED, keep=9, sizes=on, on_batch=strike)


def numbers(folder, step=None, on=PRESETS):
    """The hash of every array of a checkpoint, by name, as this process restores it."""
    import toy
    from jax.experimental.multihost_utils import process_allgather

    from lm.config.training import CheckpointConfig
    from lm.sharding import named
    from lm.train.runtime.checkpoints import Checkpoints

    with Checkpoints(str(Path(folder) / "checkpoints"), CheckpointConfig()) as checkpoints:
        state = checkpoints.restore(toy.steps(*on).abstract, step)
    arrays = {name: process_allgather(leaf, tiled=True) for name, leaf in named(state).items()}
    return {name: hashlib.sha256(array.tobytes()).hexdigest() for name, array in arrays.items()}


def agree(folder):
    """What only the first process finds, both have, an error too; what it made, the other finds made."""
    import jax

    from lm.config.base import SettingError

    def refuse():
        raise SettingError("no" * (jax.process_index() == 0))

    made = folder / "made"
    found = group.broadcast_from_first(lambda: {"process": jax.process_index(), "long": "ü" * 2000})
    there = group.main_process_first(lambda: made.exists() or made.write_text(""))
    try:
        group.broadcast_from_first(refuse)
    except SettingError as error:
        return (
            found == {"process": 0, "long": "ü" * 2000},
            there if jax.process_index() else not there,
            str(error),
        )


def differ():
    """What is said where the second process would make the run of other things."""
    import jax

    from experiments.runs import provenance
    from experiments.runs.checks import check_same_on_all_processes
    from lm.config.base import SettingError

    alike = {name: {"a": "1", "long": "x" * 2000} for name in provenance.PARTS}
    check_same_on_all_processes(alike)
    other = {name: {"a": "2"} for name in ("data", "code")} if jax.process_index() else {}
    try:
        check_same_on_all_processes(alike | other)
    except SettingError as error:
        return str(error).splitlines()


def fed(folder):
    """The hash of each row that this process feeds, by step and row, and the shards opened for them."""
    import jax
    import numpy as np
    from feeding import Watched, rows_in_streams

    from lm.config.mesh import MeshConfig
    from lm.data.batches import stream
    from lm.sharding import make_mesh, process_rows

    rows = process_rows(make_mesh(MeshConfig(*PRESETS)), 8)
    shards = Watched.several(8)
    numbers, found = np.concatenate([np.arange(8)[part] for part in rows]).tolist(), {}
    batches = rows_in_streams(shards, folder / f"tokens-{jax.process_count()}-{jax.process_index()}")
    for step, batch in enumerate(stream(batches, 0, STEPS, rows=rows)):
        for place, number in enumerate(numbers):
            features = sorted(batch.features().items())
            values = b"".join(np.ascontiguousarray(array[place]).tobytes() for _, array in features)
            found[f"{step} {number}"] = hashlib.sha256(values).hexdigest()
    return found, sorted(shard.name for shard in shards if shard.read_windows)


def laws(folder):
    """All that two processes can show in one life; the last of it is to be stopped."""
    import json

    import jax

    from lm.train.runtime.preemption import Interrupted

    learn(folder / "two", STEPS)
    learn(folder / "began-alone", STEPS)
    told = {"agreed": agree(folder), "differ": differ(), "numbers": numbers(folder / "alone", SAVED)}
    told["fed"], told["opened"] = fed(folder)
    try:
        learn(folder / "stopped", 10**6, stop=(1, 5))
    except Interrupted as stopped:
        told |= {"stopped": stopped.step}
    (folder / f"told-{jax.process_index()}.json").write_text(json.dumps(told))
    return 42


def forever(folder):
    """Until something happens to it."""
    learn(folder / "forever", 10**6)


def trainer(how):
    """One that needs no jax, in ways in which they end badly; the first of the two is the worse."""
    first = os.environ["LM_PROCESS"] == "0"
    os.environ |= {"LM_START_TIMEOUT": "60", "LM_HEARTBEAT": "3"}
    line = supervise(["run"])
    line.need()
    line.end_with_it()
    if how in ("stays", "prepares"):  # deaf to SIGTERM, with a worker
        signal.signal(signal.SIGTERM, signal.SIG_IGN)
        line.send({"signals_wait": how == "stays"})
        print(
            subprocess.Popen(["sleep", "99"], stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL).pid,
            flush=True,
        )
    elif how == "done" or first:
        line.send({"code": 0 if how == "done" else int(how)})
        Path(os.environ.get("FAILED", os.devnull)).touch()
        time.sleep(99 if how == "done" and first else 0.3)
        os._exit(0 if how == "done" else int(how))
    else:  # as jax does then
        while not Path(os.environ["FAILED"]).exists():
            time.sleep(0.1)
        time.sleep(1.0)
        os.abort()
    time.sleep(99)


if __name__ == "__main__":
    if sys.argv[1] == "trainer":
        trainer(sys.argv[2])
    end = group.join_others(supervise(["run"]))
    code = {"laws": laws, "forever": forever}[sys.argv[1]](Path(sys.argv[2]))
    end(code)
    sys.exit(code)

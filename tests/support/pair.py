"""What one of two processes does in the tests, ``python pair.py PART FOLDER``, and how they are started."""

import hashlib
import os
import signal
import socket
import subprocess
import sys
from contextlib import suppress
from pathlib import Path

from paths import ROOT

from experiments.processes import cluster

DEVICES = "--xla_force_host_platform_device_count="
PRESETS = (2, 2, 2)  # of the mesh: both processes hold parts of every batch
STEPS, SAVED = 6, 3


def start(*command, count=2, only=None, devices=4, cluster="explicit", **settings):
    """The processes of a run, on this machine; ``cluster``: "explicit", or "slurm" as jax detects it."""
    flags = [flag for flag in os.environ["XLA_FLAGS"].split() if not flag.startswith(DEVICES)]
    own = {"XLA_FLAGS": " ".join([*flags, f"{DEVICES}{devices}"]), "PYTHONPATH": str(ROOT)}
    common = os.environ | own | settings
    places = (explicit if cluster == "explicit" else slurm)(count)
    return [
        subprocess.Popen(
            [sys.executable, *map(str, command)],
            env=common | places[index],
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
        )
        for index in (range(count) if only is None else only)
    ]


def explicit(count):
    """The variables by which a user says which process is which."""
    with socket.create_server(("localhost", 0)) as free:
        about = {"LM_COORDINATOR": f"localhost:{free.getsockname()[1]}", "LM_PROCESSES": str(count)}
    return [about | {"LM_PROCESS": str(index)} for index in range(count)]


def slurm(count):
    """The variables that srun sets; jax derives a port from the number of the job."""
    for job in range(os.getpid() % 4096, 4096):
        with suppress(OSError), socket.create_server(("localhost", 61440 + job)):
            break
    about = {"SLURM_JOB_ID": str(job), "SLURM_STEP_NODELIST": "localhost", "SLURM_NTASKS": str(count)}
    about |= {"SLURM_STEP_NUM_TASKS": str(count), "SLURM_STEP_NUM_NODES": "1"}
    return [about | {"SLURM_PROCID": str(index), "SLURM_LOCALID": str(index)} for index in range(count)]


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
    found = cluster.broadcast_from_first(lambda: {"process": jax.process_index(), "long": "ü" * 2000})
    there = cluster.main_process_first(lambda: made.exists() or made.write_text(""))
    try:
        cluster.broadcast_from_first(refuse)
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


if __name__ == "__main__":
    assert cluster.join_others()
    code = {"laws": laws, "forever": forever}[sys.argv[1]](Path(sys.argv[2]))
    cluster.leave_others(code)
    sys.exit(code)

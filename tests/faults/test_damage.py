"""Files that changed on their way: never a wrong number, and never a start from scratch that nobody asked
for.
"""

import os
import random
import shutil
import subprocess
import sys
import time

import jax
import lives
import pair
import pytest
import toy

from experiments.runs.stages import stages_of
from lm.config.mesh import MeshConfig
from lm.config.training import CheckpointConfig
from lm.sharding import make_mesh
from lm.train.runtime.checkpoints import Checkpoints


@pytest.fixture(scope="module")
def trained(undisturbed):
    """A pre-training with two checkpoints, the steps that it was trained with, and the numbers of both."""
    runs, _ = undisturbed("encoder-decoder")
    (settings,) = runs.glob("nano/t5/**/settings.json")
    (folder,) = runs.glob("nano/pretraining/*/checkpoints")
    mesh = make_mesh(MeshConfig(), jax.devices()[:1])
    steps = stages_of(settings.parent)[0].steps(mesh)
    old, new = sorted(int(path.name) for path in folder.iterdir())[-2:]
    return folder, steps, {step: numbers(folder, steps, step) for step in (old, new)}


def numbers(folder, steps, step=None):
    with Checkpoints(folder, CheckpointConfig()) as checkpoints:
        return toy.numbers(checkpoints.restore(steps.abstract, step))


@pytest.mark.slow
@pytest.mark.fault(
    "F9", "any damage to any file of a real checkpoint is found, and the step before is restored"
)
def test_no_damage_to_any_file_of_a_checkpoint_ever_gives_a_wrong_number(trained, tmp_path, record_property):
    folder, steps, due = trained
    (old, new), rng, tried = sorted(due), random.Random(0), 0
    shutil.copytree(folder, tmp_path / "damaged")
    assert due[old] != due[new] == numbers(tmp_path / "damaged", steps)
    paths = sorted(path for path in (tmp_path / "damaged" / str(new)).rglob("*") if path.is_file())
    assert len(paths) > 8
    for path in paths:
        whole = path.read_bytes()
        for damaged in toy.damages(whole, rng, 2):
            path.unlink() if damaged is None else path.write_bytes(damaged)
            assert numbers(tmp_path / "damaged", steps) == due[old], (path, damaged)
            path.write_bytes(whole)
            tried += 1
    assert numbers(tmp_path / "damaged", steps) == due[new]
    record_property("dealt", f"{tried} damages to {len(paths)} files")


@pytest.mark.slow
@pytest.mark.fault("F10", "lm run ends with exit code 1, lists what is wrong with each, and trains nothing")
def test_when_all_checkpoints_are_bad_the_command_lists_them_and_starts_nothing(undisturbed, prepare):
    runs = prepare("refused")
    shutil.copytree(undisturbed("encoder-decoder")[0] / "nano", runs / "nano")
    next(runs.glob("nano/t5/**/scores.json")).unlink()
    (folder,) = runs.glob("nano/pretraining/*")
    (folder / "run.json").unlink()  # as if it had not finished
    bad = [
        max(step.rglob("*"), key=lambda path: path.stat().st_size) for step in folder.glob("checkpoints/*")
    ]
    for path in bad:
        path.write_bytes(path.read_bytes()[:-1])
    before = (folder / "metrics.jsonl").read_bytes()
    assert lives.ends(lives.start(runs, "encoder-decoder")) == [1], lives.said(runs)
    said = lives.said(runs)
    assert "no checkpoint is good" in said and all(path.name in said for path in bad)
    assert (folder / "metrics.jsonl").read_bytes() == before


@pytest.mark.slow
@pytest.mark.fault(
    "F15", "the run ends with a clear error and, once there is room, goes on to the same numbers"
)
def test_on_a_full_disk_a_run_ends_and_goes_on_where_it_was_when_there_is_room(prepare, undisturbed):
    runs = prepare("full")
    (code,) = lives.ends(lives.start(runs, "encoder-decoder", strike=("saving", 3, "full")))
    assert code == 1, lives.said(runs)
    assert "File too large" in lives.said(runs)
    assert lives.ends(lives.start(runs, "encoder-decoder")) == [0], lives.said(runs)
    assert lives.came_to(runs) == lives.came_to(undisturbed("encoder-decoder")[0])


@pytest.mark.slow
@pytest.mark.fault(
    "F21", "lm run --restart goes on by itself through kills to the numbers of an undisturbed run"
)
@pytest.mark.parametrize(("count", "kills"), [(1, 5), (2, 2)])
def test_a_run_that_is_started_again_by_itself_survives_kills(count, kills, prepare, undisturbed):
    """Of two processes one is killed; jax ends the other, and they meet again."""
    runs, rng, dealt, last = prepare("recovered"), random.Random(0), 0, 0.0
    whole, _ = undisturbed("encoder-decoder", count)
    command = [sys.executable, "-m", "experiments", *lives.command(runs, "encoder-decoder"), "--restart", "9"]
    parents = []
    for index, place in enumerate(pair.explicit(count)):
        environment = os.environ | lives.ENVIRONMENT | place | {"LM_HEARTBEAT": "10"}
        with (runs / f"said-{index}.txt").open("w") as said:
            parents.append(subprocess.Popen(command, env=environment, stdout=said, stderr=said))
    while any(parent.poll() is None for parent in parents):
        time.sleep(0.01)
        # this life, too
        trains = any(path.stat().st_mtime > last for path in runs.glob("nano/**/metrics.jsonl"))
        for child in lives.children(rng.choice(parents).pid) if trains and dealt < kills else ():
            time.sleep(rng.uniform(0, 0.2))
            lives.kill(child)
            dealt, last = dealt + 1, time.time()
    assert ([parent.returncode for parent in parents], dealt) == ([0] * count, kills), lives.said(runs)
    assert lives.came_to(runs) == lives.came_to(whole)

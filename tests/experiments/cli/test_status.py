"""``lm status``: what the files of runs say of their progress."""

import json
import os
import platform
import re
import subprocess
import sys

import published
import pytest

from experiments.cli.status import find_progress, status
from experiments.runs.init_from import import_published
from experiments.runs.paths import load_settings, save_settings
from experiments.runs.stages import stages
from experiments.study.registry import build
from lm.config.base import SettingError
from lm.files import json_with_checksum
from lm.train.runtime.processes import is_alive, process_start

ROW = "t5/1-baseline/baseline"


def begin(runs, seed, last_step, **life):
    """A run whose pre-training has written a record after ``last_step``; the folder of the run."""
    folder = runs / "nano" / ROW / f"seed-{seed}"
    save_settings(folder, build(ROW, "nano", {"seed": seed}), runs / "cache")
    every = stages(build(ROW, "nano", {"seed": seed}), folder, runs / "cache")
    by_name = {stage.name: stage for stage in every}
    for name, step in (("start", 200), ("pretraining", last_step)):
        by_name[name].folder.mkdir(parents=True)
        record = {"step": step, "kind": "train", "loss": 3.5, "seconds_per_step": 0.5}
        (by_name[name].folder / "metrics.jsonl").write_text(json.dumps(record) + "\n" + '{"step": 1')
        values = {"status": "finished", "host": platform.node(), "pid": os.getpid()}
        values |= life if name == "pretraining" else {}
        (by_name[name].folder / "run.json").write_text(json_with_checksum(values))
    os.utime(by_name["start"].folder / "run.json", (1, 1))
    os.utime(by_name["start"].folder / "metrics.jsonl", (1, 1))
    return folder


@pytest.fixture
def gone():
    """The number of a process that has ended."""
    process = subprocess.Popen([sys.executable, "-c", ""])
    process.wait()
    return process.pid


def test_a_run_has_the_state_of_its_process_its_steps_and_the_time_that_is_left(tmp_path, gone):
    begin(tmp_path, 0, 100, status="running")
    begin(tmp_path, 1, 100, status="running", pid=gone)
    begin(tmp_path, 2, 100, status="NonFiniteLoss: step 101")
    (begin(tmp_path, 3, 300) / "scores.json").write_text("{}")
    found = find_progress(tmp_path).runs
    assert [each.state for each in found] == [
        "running",
        "stopped",
        "failed (NonFiniteLoss: step 101)",
        "finished",
    ]
    first = found[0]
    assert (first.run, first.stage) == (f"nano/{ROW}/seed-0", "pretraining")
    assert (first.steps_done, first.steps_total, first.loss) == (300, 800, 3.5)
    assert first.seconds_left == pytest.approx(
        250
    )  # 500 steps, at the speed of the last stage that was trained


@pytest.mark.parametrize("name", ["pretraining", "documentation-reading"])
def test_a_run_that_a_signal_ended_has_stopped_in_any_stage(tmp_path, name):
    for seed, ending in enumerate(("SystemExit: 42", "SystemExit: 1", "Interrupted: step 3 is saved")):
        folder = begin(tmp_path, seed, 100)
        every = stages(load_settings(folder), folder, tmp_path / "cache")
        (stage,) = (stage for stage in every if stage.name == name)
        stage.folder.mkdir(parents=True, exist_ok=True)
        (stage.folder / "run.json").write_text(json_with_checksum({"status": ending}))
    found = [each.state for each in find_progress(tmp_path).runs]
    assert found == ["stopped", "failed (SystemExit: 1)", "stopped"]


@pytest.mark.skipif(process_start(os.getpid()) is None, reason="there is no /proc")
def test_a_run_whose_number_another_process_has_got_since_has_stopped(tmp_path):
    begun = process_start(os.getpid())
    with subprocess.Popen([sys.executable, "-c", "input()"], stdin=subprocess.PIPE) as child:
        assert begun < process_start(child.pid)
    begin(tmp_path, 0, 100, status="running", process_start=begun)
    begin(tmp_path, 1, 100, status="running", process_start=begun - 1)
    begin(tmp_path, 2, 100, status="running", process_start=None)  # not known on that machine
    assert [each.state for each in find_progress(tmp_path).runs] == ["running", "stopped", "running"]


@pytest.mark.skipif(process_start(os.getpid()) is None, reason="there is no /proc")
def test_a_process_that_was_killed_and_that_none_waits_for_has_stopped():
    with subprocess.Popen([sys.executable, "-c", "input()"], stdin=subprocess.PIPE) as child:
        begun = process_start(child.pid)
        assert is_alive(child.pid) and is_alive(child.pid, begun)
        child.kill()
        os.waitid(os.P_PID, child.pid, os.WEXITED | os.WNOWAIT)
        assert not is_alive(child.pid) and not is_alive(child.pid, begun)


def test_finished_runs_are_listed_when_asked_for_and_a_folder_without_runs_is_refused(tmp_path, capsys):
    begin(tmp_path, 0, 100, status="running")
    (begin(tmp_path, 1, 300) / "scores.json").write_text("{}")
    status(runs=tmp_path)
    said = capsys.readouterr().out
    assert "seed-0" in said and "seed-1" not in said and "1 of 2 runs have finished" in said
    assert "delete its folder" not in said, "no run has stopped"
    begin(tmp_path, 2, 100, status="NonFiniteLoss: step 101")
    status(runs=tmp_path, all=True)
    said = capsys.readouterr().out
    assert "seed-1" in said and "delete its folder below" in said
    with pytest.raises(SettingError, match="`lm run ROW`"):
        status(runs=tmp_path / "elsewhere")


def test_an_imported_model_is_no_stopped_run_and_is_counted_apart(tmp_path, capsys):
    begin(tmp_path, 0, 100, status="running")
    checkpoint = published.write("gpt2", tmp_path / "checkpoint")
    import_published(checkpoint, tmp_path / "model", tmp_path / "cache")
    status(runs=tmp_path)
    said = capsys.readouterr().out
    assert "pretraining" in said and "model " not in said and "delete its folder" not in said
    assert said.splitlines()[-1] == "0 of 1 runs have finished; imported models: 1"
    status(runs=tmp_path, all=True)
    assert re.search(r"(?m)^\W*model\W+imported\W+pretraining\W+–", capsys.readouterr().out)


def test_a_run_that_trains_nothing_is_listed_beside_the_others(tmp_path, capsys):
    begin(tmp_path, 0, 100, status="running")
    nothing = {"pretraining.steps": 0, "finetuning.steps": 0}
    folder = tmp_path / "nano" / "nothing" / "seed-0"
    save_settings(folder, build(ROW, "nano", nothing), tmp_path / "cache")
    by_name = {progress.run: progress for progress in find_progress(tmp_path).runs}
    assert len(by_name) == 2 and by_name["nano/nothing/seed-0"].state == "stopped"
    (folder / "scores.json").write_text("{}")
    status(runs=tmp_path)
    assert capsys.readouterr().out.splitlines()[-1].startswith("1 of 2 runs have finished")


def test_runs_that_cannot_be_read_are_counted_and_each_reason_is_named_once(tmp_path, capsys):
    (begin(tmp_path, 0, 300) / "scores.json").write_text("{}")
    damaged = begin(tmp_path, 1, 100) / "settings.json"
    damaged.write_text(damaged.read_text() + "}")
    for seed in (2, 3, 4):  # with the noise of a study module that is not named
        folder = begin(tmp_path, seed, 100)
        settings = json.loads((folder / "settings.json").read_text())
        settings["objective"]["noise"] = "mine"
        (folder / "settings.json").write_text(json_with_checksum(settings))
        if seed < 4:  # the last one has not begun a stage
            (folder / "origin.json").write_text(json_with_checksum({"code": {"--study my.py": ""}}))
    status(runs=tmp_path)
    *_, first, second, third, last = capsys.readouterr().out.splitlines()
    assert first.startswith("1 run is not shown: ") and str(damaged) in first
    assert second.startswith("2 runs are not shown: ") and "noise='mine'" in second
    assert second.endswith("--study my.py")
    assert third.startswith("1 run is not shown: ") and third.endswith("name that with --study")
    assert "--study" not in first
    assert last == "1 of 5 runs have finished"


def test_no_training_code_is_imported():
    code = (
        "import sys, experiments.cli.status\n"
        "print([name for name in ('jax', 'flax', 'tyro') if name in sys.modules])"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.strip() == "[]"

"""The launcher on this machine and on Slurm, and what runs on each worker of a slice."""

import os
import signal
import subprocess
from pathlib import Path

import pytest
from paths import ROOT
from waiting import gone, wait_for

from launch import local, policy
from launch.__main__ import dispatch
from launch.accelerators import resolve
from launch.command import Job, label
from launch.policy import worst

LAUNCH = ROOT / "launch"
LOCAL = ["local", "t5/a", "--processes=2", "--scale=base"]


@pytest.mark.parametrize(
    "codes, tells",
    [
        ([0, 0], 0),
        ([0, 42], 42),
        ([42, 1], 1),
        ([42, -9, 42], 137),
        ([3, 1], 3),
        ([42, 2], 2),
        ([130, 42], 130),
    ],
)
def test_of_several_exit_codes_the_cause_is_told(codes, tells):
    assert worst(codes) == worst(codes[::-1]) == tells


@pytest.mark.parametrize(
    "does, code, turns",
    [
        ("exit 0", 0, 1),
        ("exit 2", 2, 1),
        ('[ "$LM_PROCESS" = 0 ] && exit 42 || exit 1', 1, 2),
        ('mkdir "$0.$LM_PROCESS" 2> /dev/null && exit 42 || exit 0', 0, 2),
        ("kill -9 $$", 137, 2),
    ],
)
def test_processes_on_this_machine_are_started_again_when_that_helps(stage, monkeypatch, does, code, turns):
    monkeypatch.setenv("LM_DOES", does)
    assert dispatch([*LOCAL, "--devices-per-process=4", "--restarts=1", "--", "--seed", "1"]) == code
    made = sorted((stage.folder / "lm.calls").read_text().splitlines())
    assert made == sorted(
        f"{i}/2 cpu run t5/a --scale base --runs runs --seed 1" for i in (0, 1) for _ in range(turns)
    )


def test_a_signal_is_passed_on_and_nothing_is_started_again(stage, monkeypatch):
    monkeypatch.setenv(
        "LM_DOES", "trap 'exit 42' TERM; touch $0.$LM_PROCESS; for _ in {1..200}; do sleep 0.1; done"
    )
    stage.send(
        signal.SIGTERM, when=lambda: (stage.folder / "lm.0").exists() and (stage.folder / "lm.1").exists()
    )
    assert dispatch(["local", "t5/*", "--processes=2"]) == 42
    assert (stage.folder / "lm.calls").read_text().count("run t5") == 2


def test_a_signal_between_two_attempts_is_an_interruption_of_all_rows(stage, monkeypatch):
    monkeypatch.setattr(local, "pause", lambda *_: os.kill(os.getpid(), signal.SIGINT) or 0.0)
    monkeypatch.setenv("LM_DOES", "exit 1")
    assert dispatch(["local", "t5/*", "--processes=2"]) == 130
    assert (stage.folder / "lm.calls").read_text().count("run t5") == 2


# A process in a group of its own, as lm's trainer is.
ORPHAN = "set -m; sleep 60 > /dev/null 2>&1 < /dev/null & echo $! > "


def ends(file: Path) -> bool:
    """Whether the process with this number does, in a moment."""
    return wait_for(lambda: gone(file.read_text().strip()), 5.0)


def test_the_others_are_ended_when_one_process_has_failed(stage, monkeypatch):
    monkeypatch.setattr(local, "AFTER_FAILURE", 0.2)
    monkeypatch.setenv(
        "LM_DOES", f'{ORPHAN} "$0.$LM_PROCESS"; [ "$LM_PROCESS" = 0 ] && exit 1; sleep 60; sleep 60'
    )
    assert dispatch([*LOCAL, "--restarts=0"]) == 1
    assert ends(stage.folder / "lm.0") and ends(stage.folder / "lm.1")


@pytest.mark.parametrize(
    "code, failed, requeued",
    [
        (0, 0, 0),
        (2, 0, 0),
        (3, 0, 0),
        (42, 9, 1),
        (1, 0, 1),
        (43, 2, 1),
        (1, 3, 0),
    ],
)
def test_a_slurm_job_queues_itself_again_when_that_helps(stage, monkeypatch, capfd, code, failed, requeued):
    asks = {"srun": f'eval "echo ran ${{@: -1}}"; exit {code}', "scontrol": "echo $0 $@", "sbatch": "bash $1"}
    stage.play(**{name: f"#!/bin/bash\n{text}\n" for name, text in asks.items()})
    monkeypatch.chdir(stage.folder)
    failures = (
        stage.folder / f"{label(*(Job(name, 'base', 'runs', ()) for name in ('t5/a', 't5/b')))}-1.failures"
    )
    failures.write_text("1\n" * failed)  # of the turns before, in a row
    for name, value in {"JOB_ID": 17, "ARRAY_TASK_ID": 1}.items():
        monkeypatch.setenv(f"SLURM_{name}", str(value))
    assert (
        dispatch(
            [
                "slurm",
                "t5/*",
                "--time=1:00:00",
                "--nodes=2",
                "--gpus-per-node=4",
                "--at-once=2",
                "--scale=base",
            ]
        )
        == code
    )
    out = capfd.readouterr().out
    assert "run t5/b --scale base --runs runs" in out and out.count("scontrol requeue 17") == requeued
    assert failures.exists() == (code in (1, 43))
    text = next(stage.folder.glob("*.sbatch")).read_text()
    for line in (
        "--array=0-1%2",
        "--nodes=2",
        "--ntasks-per-node=4",
        "--gpus-per-node=4",
        "--signal=TERM@120",
    ):
        assert f"#SBATCH {line}\n" in text
    assert "--partition" not in text and "{" not in text.replace("${", "")


def test_two_sweeps_that_begin_alike_have_names_of_their_own():
    one, two = (Job(name, "base", "runs", ()) for name in ("t5/a", "t5/b"))
    assert len({label(one), label(one, two), label(two)}) == 3


def test_a_worker_goes_on_when_the_connection_is_lost_and_a_new_attempt_ends_the_old_one(tmp_path):
    def worker(attempt: str, command: str) -> subprocess.Popen:
        arguments = ["bash", LAUNCH / "worker.sh", "start", attempt, "bash", "-c", command]
        return subprocess.Popen(
            arguments, env=os.environ | {"TMPDIR": str(tmp_path)}, stdout=subprocess.PIPE, text=True
        )

    saves = (
        f"trap 'echo > {tmp_path}/saved; exit 42' TERM; echo once; for _ in {{1..200}}; do sleep 0.1; done"
    )
    first = worker("1", f"{ORPHAN} {tmp_path}/orphan; {saves}")
    assert first.stdout.readline().endswith("once\n")
    first.kill()  # what watches, as when ssh is lost; not the run
    again = worker("1", "echo twice")
    assert again.stdout.readline().endswith("once\n")
    assert worker("2", "exit 3").wait() == 3
    assert (tmp_path / "saved").exists() and again.wait() in (42, 1)  # its record may be gone already
    assert ends(tmp_path / "orphan")


def test_all_buckets_are_mounted_again_and_one_that_is_not_may_be_the_next_time(stage):
    stage.play(mountpoint="#!/bin/bash\nexit 1\n")
    stage.play(gcsfuse='#!/bin/bash\ncat; echo "${@: -2:1}" >> "$0.calls"; [ ! -e "$0.fails" ]\n')
    (stage.folder / "launch").mkdir()
    script = stage.folder / "launch" / "worker.sh"
    script.write_text((LAUNCH / "worker.sh").read_text())
    (stage.folder / "buckets").write_text("one\ntwo\n")
    own = os.environ | {"HOME": str(stage.folder), "TMPDIR": str(stage.folder)}
    assert subprocess.run(["bash", script, "start", "1", "true"], env=own).returncode == 0
    assert (stage.folder / "gcsfuse.calls").read_text() == "one\ntwo\n"
    (stage.folder / "gcsfuse.fails").touch()
    assert subprocess.run(["bash", script, "start", "2", "true"], env=own).returncode == 1


def test_the_scripts_for_other_launchers_parse():
    for name in ("worker.sh", "xpk.sh", "job.sbatch"):
        assert subprocess.run(["bash", "-n", LAUNCH / name]).returncode == 0
    task = pytest.importorskip("yaml").safe_load((LAUNCH / "skypilot.yaml").read_text())
    assert "~/bucket" in task["file_mounts"] and '--runs ~/"bucket/' in task["run"]
    task = task["resources"]
    assert task["job_recovery"]["recover_on_exit_codes"] == [policy.AGAIN]
    accelerator, runtime, _ = resolve(task["accelerators"].removeprefix("tpu-"))
    assert (accelerator, task["accelerator_args"]["runtime_version"]) == ("v5litepod-16", runtime)


@pytest.mark.parametrize("command", ["tpu", "slurm", "local", "list", "delete"])
def test_only_commands_that_start_rows_speak_of_what_is_handed_to_lm_run(command, capsys):
    with pytest.raises(SystemExit):
        dispatch([command, "--help"])
    assert ("passed to lm run" in capsys.readouterr().out) == (command in ("tpu", "slurm", "local"))


@pytest.mark.parametrize("handed", [["--runs", "elsewhere"], ["--scale=nano"], ["--study=a"]])
def test_what_the_launcher_goes_by_itself_is_not_handed_past_it(handed, capsys):
    assert dispatch([*LOCAL, "--", *handed]) == 2
    assert f"{handed[0].partition('=')[0]} should stand before --" in capsys.readouterr().err


def test_a_module_of_ones_own_is_named_to_the_slurm_job(stage, tmp_path, monkeypatch, capfd):
    (tmp_path / "my_rows.py").touch()
    monkeypatch.chdir(tmp_path)
    asked = ["slurm", "t5/a", "--time=1:00:00", "--gpus-per-node=4", "--study=my_rows.py", "--dry-run"]
    assert dispatch(asked) == 0
    assert f"--study {tmp_path / 'my_rows.py'}" in capfd.readouterr().out


def test_braces_in_an_argument_reach_the_slurm_job_as_they_are(stage, capfd):
    corpus = "text:/data/{again}/{time}/*.txt"
    asked = ["slurm", "t5/a", "--time=1:00:00", "--nodes=2", "--gpus-per-node=4", "--dry-run"]
    assert dispatch([*asked, "--", "--data.corpus", corpus]) == 0
    assert corpus in capfd.readouterr().out


def test_without_a_scale_it_is_left_to_lm_run(stage, capfd):
    assert dispatch(["local", "t5/a", "--processes=2", "--dry-run"]) == 0
    assert "run t5/a --runs runs" in capfd.readouterr().out

"""The launcher on this machine and on Slurm, and what runs on each host of a slice."""

import os
import signal
import subprocess
import sys
from pathlib import Path

import pytest
from launching import FAKES, launch
from paths import ROOT
from waiting import gone, wait_for

from experiments.study.registry import find_buildable
from launch import local
from launch.command import Job, label
from launch.policy import root_cause

WORKER = ROOT / "launch" / "worker.sh"
ROW = "t5/6-corruption-rate/15"
LOCAL = ["local", ROW, "--processes=2", "--scale=base"]
SLURM = ["slurm", ROW, "--time=1:00:00", "--nodes=2", "--gpus-per-node=4", "--scale=base"]


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
        ([42, -15], 42),
        ([1, -15], 1),
        ([-15, -15], 143),
    ],
)
def test_of_several_exit_codes_the_cause_is_told(codes, tells):
    assert root_cause(codes) == root_cause(codes[::-1]) == tells


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
    changed = ["--restarts=1", "--pretraining.steps", "7"]
    assert launch(*LOCAL, "--devices-per-process=4", *changed) == code
    made = sorted((stage.folder / "lm.calls").read_text().splitlines())
    words = f"run {ROW} --scale base --pretraining.steps 7 --runs runs"
    assert made == sorted(f"{i}/2 cpu {words}" for i in (0, 1) for _ in range(turns))


def test_a_signal_is_passed_on_and_nothing_is_started_again(stage, monkeypatch):
    monkeypatch.setenv(
        "LM_DOES", "trap 'exit 42' TERM; touch $0.$LM_PROCESS; for _ in {1..200}; do sleep 0.1; done"
    )
    stage.send(
        signal.SIGTERM, when=lambda: (stage.folder / "lm.0").exists() and (stage.folder / "lm.1").exists()
    )
    assert launch(*LOCAL, "--seeds=2") == 42
    assert (stage.folder / "lm.calls").read_text().count("run t5") == 2


def test_a_signal_between_two_attempts_is_an_interruption_of_all_runs(stage, monkeypatch):
    monkeypatch.setattr(local, "pause", lambda *_: os.kill(os.getpid(), signal.SIGINT) or 0.0)
    monkeypatch.setenv("LM_DOES", "exit 1")
    assert launch(*LOCAL, "--seeds=2") == 130
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
    assert launch(*LOCAL, "--restarts=0") == 1
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
    jobs = [Job(ROW, "runs", ("--scale", "base", "--seed", seed)) for seed in "01"]
    failures = stage.folder / f"{label(*jobs)}-1.failures"
    failures.write_text("1\n" * failed)  # of the turns before, in a row
    for name, value in {"JOB_ID": 17, "ARRAY_JOB_ID": 17, "ARRAY_TASK_ID": 1}.items():
        monkeypatch.setenv(f"SLURM_{name}", str(value))
    assert launch(*SLURM, "--seeds=2", "--at-once=2") == code
    out = capfd.readouterr().out
    assert f"run {ROW} --scale base --seed 1 --runs runs" in out
    # one task of an array may have the number of the array, which would queue all of its tasks again
    assert out.count("scontrol requeue 17_1\n") == out.count("scontrol requeue") == requeued
    # a job that gives up leaves no count to the next that is submitted
    assert failures.exists() == (code in (1, 43) and bool(requeued))
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


def test_a_slurm_job_without_restarts_gives_up_at_its_first_failure(stage, capfd):
    assert launch(*SLURM, "--restarts=0", "--dry-run") == 0
    assert "-gt 0 ]; then\n" in capfd.readouterr().out


def test_two_sweeps_that_begin_alike_have_names_of_their_own():
    one, two = (Job(name, "runs") for name in ("t5/a", "t5/b"))
    assert len({label(one), label(one, two), label(two)}) == 3


def test_a_name_is_short_enough_for_every_way():
    assert len(label(Job("a-very-long-table-of-the-study/with-a-very-long-row", "runs"))) <= 40


@pytest.fixture
def host(stage):
    """A host of a slice as far as worker.sh sees it; a function that starts an attempt on it."""
    stage.play(docker=(FAKES / "fake_docker.sh").read_text(), sudo='#!/bin/bash\nexec "$@"\n')
    (stage.folder / "launch").mkdir()
    script = stage.folder / "launch" / "worker.sh"
    script.write_text(WORKER.read_text())
    (stage.folder / "launch" / "buckets").touch()
    own = os.environ | {"LM_GS": str(stage.folder / "gs")}

    def start(*words: str, **named) -> subprocess.Popen:
        return subprocess.Popen(["bash", script, *words], env=own, text=True, **named)

    return start


def test_a_container_goes_on_when_the_connection_is_lost_and_a_new_attempt_ends_the_old_one(host, stage):
    saved = stage.folder / "saved"
    saves = f"trap 'echo > {saved}; exit 42' TERM; echo $MARK; for _ in {{1..200}}; do sleep 0.1; done"

    def attempt(number: str, line: str) -> subprocess.Popen:
        return host("start", number, "--env=MARK=once", "bash", "-c", line, stdout=subprocess.PIPE)

    first = attempt("1", saves)
    assert first.stdout.readline().endswith("once\n")
    first.kill()  # what watches, as when ssh is lost; not the run
    again = attempt("1", "echo twice")
    assert again.stdout.readline().endswith("once\n")
    assert attempt("2", "exit 3").wait() == 3
    assert saved.exists() and again.wait() in (42, 1)  # its record may be gone already


def test_a_host_pulls_the_image_and_mounts_every_bucket_again_after_a_reboot(host, stage):
    stage.play(mountpoint="#!/bin/bash\nexit 1\n")
    stage.play(gcsfuse='#!/bin/bash\ncat; echo "${@: -2}" >> "$0.calls"; [ ! -e "$0.fails" ]\n')
    stage.play(gcloud='#!/bin/bash\necho "$@" >> "$0.calls"\n')
    folder = stage.folder / "gs"
    assert host("setup", "us-docker.pkg.dev/p/lm/lm:1", "one", "two", stdin=subprocess.DEVNULL).wait() == 0
    mounted = f"one {folder}/one\ntwo {folder}/two\n"
    assert (stage.folder / "gcsfuse.calls").read_text() == mounted
    assert (stage.folder / "docker.calls").read_text() == "pull --quiet us-docker.pkg.dev/p/lm/lm:1\n"
    assert "configure-docker --quiet us-docker.pkg.dev" in (stage.folder / "gcloud.calls").read_text()
    assert host("start", "1", "bash", "-c", "true", stdin=subprocess.DEVNULL).wait() == 0
    assert (stage.folder / "gcsfuse.calls").read_text() == mounted * 2
    (stage.folder / "gcsfuse.fails").touch()
    assert host("start", "2", "bash", "-c", "true", stdin=subprocess.DEVNULL).wait() == 1


def test_the_scripts_parse():
    for name in ("worker.sh", "job.sbatch"):
        assert subprocess.run(["bash", "-n", ROOT / "launch" / name]).returncode == 0


def test_a_module_of_ones_own_is_named_to_the_slurm_job(stage, tmp_path, monkeypatch, capfd):
    (tmp_path / "my_rows.py").touch()
    monkeypatch.setenv("LM_STUDY", str(tmp_path / "my_rows.py"))
    assert launch(*SLURM, "--dry-run") == 0
    assert f"--study {tmp_path / 'my_rows.py'}" in capfd.readouterr().out


def test_braces_in_an_argument_reach_the_slurm_job_as_they_are(stage, capfd):
    corpus = "text:/data/{again}/{time}/*.txt"
    assert launch(*SLURM, "--dry-run", "--data.corpus", corpus) == 0
    assert corpus in capfd.readouterr().out


def test_a_sweep_is_a_run_for_each_row_and_seed(stage, capfd):
    sweep = "t5/6-corruption-rate"
    assert launch("local", sweep, "--seeds=3", "--dry-run") == 0
    lines = capfd.readouterr().out.splitlines()
    assert len(set(lines)) == len(lines) == 3 * len(find_buildable(sweep))
    assert sum("--seed 2" in line for line in lines) == len(find_buildable(sweep))


def test_what_no_row_reads_is_an_error_before_anything_is_started(stage, capsys):
    assert launch(*LOCAL, "--pretraining.stepz", "5") == 2
    assert launch("local", "t5/typo/15") == 2
    assert not (stage.folder / "lm.calls").exists()
    assert "lm:" in capsys.readouterr().err


def test_the_launcher_needs_no_jax():
    code = "import sys; from launch import slices, gke, resources; assert 'jax' not in sys.modules"
    assert subprocess.run([sys.executable, "-c", code], cwd=ROOT).returncode == 0

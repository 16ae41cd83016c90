"""A sweep in several processes: what one would train, whatever ends one of them."""

import os
import re
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest
import small_corpus
from paths import ROOT, SUPPORT
from tiny import TINY
from waiting import gone, wait_for

from experiments.cli.run_options import RowRun
from experiments.processes.jobs import ONE_THREAD, Jobs
from experiments.runs.result import read_result
from experiments.study.registry import build
from experiments.study.scales import SCALES
from lm.config.base import SettingError

ROW = "t5/1-baseline/baseline"
ROWS = "t5/6-corruption-rate/10"  # and the baseline
PRETRAINING = {name: value for name, value in TINY.items() if not name.startswith(("finetuning.", "tuning."))}
CHANGES = PRETRAINING | {"pretraining.steps": 3, "finetuning.steps": 0}


def start(*plan, **options):
    command = [sys.executable, SUPPORT / "planned_jobs.py", *map(str, plan)]
    environment = os.environ | {"PYTHONPATH": str(ROOT)}
    return subprocess.Popen(command, env=environment, stdout=subprocess.PIPE, text=True, **options)


def sweep(runs, *options):
    settings = [word for name, value in CHANGES.items() for word in (f"--{name}", str(value))]
    options += "--scale", "nano", "--seeds", "1", "--runs", str(runs)
    command = [sys.executable, "-m", "experiments", "sweep", ROWS, *settings, *options]
    flags = "--xla_backend_optimization_level=0 --xla_llvm_disable_expensive_passes=true"
    environment = os.environ | {"XLA_FLAGS": flags}
    return subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=False, env=environment)


@pytest.fixture(scope="module")
def cache(tmp_path_factory):
    folder = tmp_path_factory.mktemp("runs") / "cache"
    small_corpus.prepare(folder)
    return folder


@pytest.mark.slow
def test_jobs_score_what_one_process_does_and_a_run_that_fails_leaves_the_others(cache, tmp_path):
    found = {}
    for jobs in (1, 2):
        runs = tmp_path / str(jobs)
        runs.mkdir()
        (runs / "cache").symlink_to(cache)
        if jobs == 2:  # a file where the folder of a run should be
            (folder,) = (tmp_path / "1").glob("nano/t5/6*/10*")
            file = runs / folder.relative_to(tmp_path / "1")
            file.parent.mkdir(parents=True)
            file.write_text("")
        ran = sweep(runs, "--jobs", str(jobs))
        paths = sorted(runs.glob("nano/t5/**/scores.json"))
        found[jobs] = {
            path.parts[-3].partition(",")[0]: read_result(path.parent).held_out_loss for path in paths
        }
        assert ran.returncode == jobs - 1, ran.stdout + ran.stderr
    assert "2 to go, 2 at once" in ran.stdout and "6-corruption-rate/10 seed 0 failed" in ran.stdout
    assert found[1].keys() == {"baseline", "10"} and None not in found[1].values()
    others = {row: loss for row, loss in found[1].items() if row != "10"}
    assert found[2] == pytest.approx(others, rel=1e-5)  # other numbers of threads add in another order


def test_a_job_whose_process_is_killed_fails_alone():
    process = start(0, -9, 3, "crashes", 0, 0)
    out, _ = process.communicate(timeout=200)
    assert out.splitlines()[-1] == "codes [0, 137, 3, 7, 0, 0] None", out
    assert "-9 ended killed by SIGKILL" in out and "crashes ended its process ended with exit code 7" in out
    assert out.count("ended None") == 4
    pids = [line.split()[1] for line in out.splitlines() if line.split()[1].isdigit()]
    assert len({*pids}) == len(pids) == 6


def test_a_job_whose_process_fails_before_it_says_anything_is_reported():
    process = start("cannot begin", 0, 1, stderr=subprocess.PIPE)
    out, errors = process.communicate(timeout=200)
    assert out.splitlines()[-1] == "codes [1, 0, 1] None" and "of a module that it needs" in errors
    assert re.findall(r"(?m)^(.*) ended (?!None)(.*)$", out) == [
        ("cannot begin", "its process failed before it began; the error is printed above")
    ], out


@pytest.mark.parametrize("group", [False, True])
@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT, signal.SIGKILL])
def test_a_signal_ends_all_jobs_and_nothing_more_is_begun(number, group):
    """Also one to the whole group, as of Ctrl-C or a batch system: jobs are in groups of their own."""
    process = start("waits", "waits", 0, process_group=0)
    lines = [process.stdout.readline() for _ in range(4)]
    pids = [int(line.split()[1]) for line in lines if "ready" not in line]
    assert len(pids) == 2 and all(os.getpgid(pid) == pid for pid in pids)
    (os.killpg if group else os.kill)(process.pid, number)
    out, _ = process.communicate(timeout=200)
    assert all(wait_for(lambda pid=pid: gone(pid)) for pid in pids)
    if number != signal.SIGKILL:
        assert out.splitlines()[-1] == f"codes [42, 42, None] {number:d}"


def test_a_signal_that_comes_again_while_a_process_leaves_is_ignored():
    process = start("lingers", stderr=subprocess.PIPE)
    for moment in ("ready", "leaving"):
        while moment not in process.stdout.readline():
            assert process.poll() is None
        process.send_signal(signal.SIGTERM)
    out, errors = process.communicate(timeout=200)
    assert (out.splitlines()[-1], errors) == ("codes [42] 15", "")


def test_a_run_that_would_wait_for_another_is_begun_after_those_that_need_not():
    needs = {"a1": {"a"}, "a2": {"a"}, "b1": {"b"}, "b2": {"b"}}
    jobs = Jobs(3, None, needs.__getitem__, None, None)
    waiting, order = [0, 1, 2, 3], []
    while waiting:
        number = jobs.choose([*needs], waiting)
        waiting.remove(number)
        order.append(number)
        jobs.children[number] = None
    assert order == [0, 2, 1, 3]


def test_jobs_are_refused_where_a_device_or_another_process_trains(monkeypatch):
    from experiments.cli import train

    monkeypatch.delenv("JAX_PLATFORMS", raising=False)
    monkeypatch.setattr(train, "cores", lambda: 4)
    monkeypatch.setattr(train, "has_accelerator", lambda: False)

    def runs_at(scale):
        return [RowRun(ROW, build(ROW, scale), Path())]

    assert [train.job_count(0, runs_at(scale)) for scale in ("nano", "mini", "base")] == [4, 4, 1]
    assert [train.job_count(n, runs_at("base")) for n in (1, 3)] == [1, 3]
    nano = runs_at("nano")
    monkeypatch.setattr(train, "has_accelerator", lambda: True)
    monkeypatch.setattr(train, "visible_gpus", list)
    assert train.job_count(0, nano) == 1
    with pytest.raises(SettingError, match="--jobs 2: a sweep on accelerators other"):
        train.job_count(2, nano)
    with monkeypatch.context() as told:
        told.setenv("JAX_PLATFORMS", "cpu")
        assert [train.job_count(jobs, nano) for jobs in (0, 2)] == [4, 2]
    monkeypatch.setattr(train, "visible_gpus", lambda: ["0"])
    assert [train.job_count(jobs, nano) for jobs in (0, 2)] == [1, 2]
    for name, value in {"COORDINATOR": "localhost:1", "PROCESSES": "2", "PROCESS": "0"}.items():
        monkeypatch.setenv(f"LM_{name}", value)
    with pytest.raises(SettingError, match="LM_PROCESSES"):
        train.job_count(2, nano)
    assert train.job_count(0, nano) == 1


def test_jobs_share_gpus_evenly_and_the_memory_of_each(monkeypatch):
    from experiments.cli.train import share_of_gpus

    monkeypatch.delenv("XLA_PYTHON_CLIENT_MEM_FRACTION", raising=False)
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "")
    assert share_of_gpus(4, 0) == {}
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "2,5")
    shares = [share_of_gpus(5, place) for place in range(5)]
    assert [share["CUDA_VISIBLE_DEVICES"] for share in shares] == ["2", "5", "2", "5", "2"]
    assert {share["XLA_PYTHON_CLIENT_MEM_FRACTION"] for share in shares} == {"0.300"}
    monkeypatch.setenv("XLA_PYTHON_CLIENT_MEM_FRACTION", "0.2")
    assert share_of_gpus(5, 0)["XLA_PYTHON_CLIENT_MEM_FRACTION"] == "0.2"


def report_slot_and_end(job, send):
    send(os.environ["SLOT"])
    if job == "killed":
        os.kill(os.getpid(), signal.SIGKILL)
    while job == "slow" and not Path(os.environ["REPLACED"]).exists():
        time.sleep(0.05)
    return 0


def test_a_job_has_the_variables_of_its_slot_and_so_has_the_one_that_follows_it(tmp_path, monkeypatch):
    replaced, slots = tmp_path / "replaced", {}
    monkeypatch.setenv("REPLACED", str(replaced))
    jobs = Jobs(
        2,
        report_slot_and_end,
        outputs=lambda job: (),
        show=slots.__setitem__,
        end=lambda job, killed: replaced.touch() if job == "next" else None,
        variables=lambda slot: {"SLOT": f"slot {slot}"},
    )
    assert jobs.run(["killed", "slow", "next"]) == [128 + signal.SIGKILL, 0, 0]
    assert slots == {"killed": "slot 0", "slow": "slot 1", "next": "slot 0"}
    assert "SLOT" not in os.environ


def test_how_many_runs_train_at_once_follows_from_the_size_of_their_models_at_any_scale(monkeypatch):
    from experiments.cli import train

    monkeypatch.setattr(train, "cores", lambda: 4)
    monkeypatch.setattr(train, "has_accelerator", lambda: False)
    names = ("nano", "mini", "mini-real", "small", "medium", "base")
    at_once = {name: train.job_count(0, [RowRun(ROW, build(ROW, name), Path())]) for name in names}
    assert at_once == {"nano": 4, "mini": 4, "mini-real": 4, "small": 1, "medium": 1, "base": 1}
    monkeypatch.setitem(SCALES, "width", SCALES["nano"] | {"model.d_model": 96})
    monkeypatch.setitem(SCALES, "wide", SCALES["nano"] | {"model.d_model": 1024, "model.mlp.d_ff": 4096})
    small, large = (RowRun(ROW, build(ROW, name), Path()) for name in ("width", "wide"))
    assert [train.job_count(0, wanted) for wanted in ([small], [large], [small, large, small])] == [4, 1, 4]


def test_a_training_command_starts_again_once_with_the_tunables_of_memory():
    code = "import os; from experiments.processes.memory import tune_memory; tune_memory(); print(os.environ)"
    environment = {
        name: value for name, value in os.environ.items() if name not in ("GLIBC_TUNABLES", "COLUMNS")
    }
    told = [
        subprocess.run([sys.executable, "-c", code], env=environment | given, capture_output=True, text=True)
        for given in ({}, {"GLIBC_TUNABLES": "glibc.malloc.check=0"})
    ]
    assert all(done.returncode == 0 for done in told)
    assert "mmap_max=0" not in told[1].stdout
    if sys.platform == "linux" and "glibc" in (os.confstr("CS_GNU_LIBC_VERSION") or ""):
        assert "glibc.malloc.mmap_max=0" in told[0].stdout


WITHOUT_LINUX = """
import os, select, sys
del os.sched_getaffinity, select.poll
def lacks(name):
    raise ValueError(name)
os.confstr = lacks
from experiments.processes.jobs import cores
from experiments.processes.memory import tune_memory
assert cores() == os.cpu_count()
tune_memory()
import experiments.cli.data_clean, experiments.cli.plan
from experiments.__main__ import main
sys.argv[1:] = ["list", "t5/6-*"]
main()
"""


def test_a_command_works_where_the_system_lacks_what_only_linux_has():
    """As on macOS: no affinities, a Python without poll, a C library without a version."""
    environment = {
        name: value for name, value in os.environ.items() if name not in ("GLIBC_TUNABLES", "COLUMNS")
    }
    done = subprocess.run(
        [sys.executable, "-c", WITHOUT_LINUX], env=environment, capture_output=True, text=True
    )
    assert done.returncode == 0, done.stderr
    assert "t5/6-corruption-rate/50" in done.stdout


@pytest.mark.skipif(sys.platform != "linux", reason="counts threads in /proc")
def test_what_is_imported_for_all_rows_of_a_sweep_starts_no_thread_that_a_fork_would_lack():
    code = "import os, experiments.cli.train, experiments.runs.run; print(len(os.listdir('/proc/self/task')))"
    environment = os.environ | ONE_THREAD
    ran = subprocess.run([sys.executable, "-c", code], env=environment, capture_output=True, text=True)
    assert ran.stdout == "1\n", ran.stderr


def test_only_what_counts_cores_asks_for_what_macos_lacks():
    sources = [file for part in ("lm", "experiments", "launch") for file in (ROOT / part).rglob("*.py")]
    asking = [str(f.relative_to(ROOT)) for f in sources if re.search(r"sched_\w+\(|prctl", f.read_text())]
    assert asking == ["experiments/processes/jobs.py"]

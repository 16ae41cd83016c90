"""Two processes are one run: its numbers, its checkpoints, its end."""

import json
import os
import shutil
import signal
import subprocess
import sys
import time

import jax
import pair
import pytest
from pair import ends, start
from paths import SUPPORT
from small_runs import SMALL

from experiments.study.scales import SCALES
from lm.data.documentation import corpus
from lm.train.runtime.log import Log
from lm.train.runtime.records import records
from lm.train.step import build


def losses(folder):
    return {(line["step"], line["kind"]): line.get("loss", line.get("score")) for line in records(folder)}


@pytest.fixture(scope="module")
def laws(tmp_path_factory):
    """What two tasks of a Slurm step did and told, beside what one process did with as many devices."""
    folder = tmp_path_factory.mktemp("pair")
    pair.learn(folder / "alone", pair.STEPS)
    shutil.copytree(folder / "alone", folder / "began-alone")
    shutil.rmtree(folder / "began-alone" / "checkpoints" / str(pair.STEPS))
    codes = [code for code, _ in ends(start(SUPPORT / "pair.py", "laws", folder, cluster="slurm"))]
    return folder, codes, [json.loads((folder / f"told-{index}.json").read_text()) for index in range(2)]


def test_two_processes_learn_what_one_does_from_the_start_and_from_its_checkpoint(laws):
    folder, _, _ = laws
    alone = losses(folder / "alone")
    assert len(alone) == pair.STEPS + 2
    for other in ("two", "began-alone"):
        assert losses(folder / other) == pytest.approx(alone, rel=1e-5)


def test_a_checkpoint_is_the_same_to_the_bit_for_one_process_and_for_two_on_any_mesh(laws):
    folder, _, told = laws
    alone = pair.numbers(folder / "alone", pair.SAVED)
    assert told[0]["numbers"] == told[1]["numbers"] == alone
    assert pair.numbers(folder / "two", on=(8, 1, 1)) == pair.numbers(folder / "two", on=())


def test_two_processes_are_fed_the_batches_of_one_and_each_opens_shards_of_its_own(laws):
    folder, _, (first, second) = laws
    assert not first["fed"].keys() & second["fed"].keys() and not {*first["opened"]} & {*second["opened"]}
    fed, opened = pair.fed(folder)
    assert first["fed"] | second["fed"] == fed and len(fed) == pair.STEPS * 8
    assert {*first["opened"], *second["opened"]} <= {*opened}


def test_what_the_first_process_finds_all_have_and_its_error_too(laws):
    assert [each["agreed"] for each in laws[2]] == [[True, True, "no"]] * 2


def test_processes_that_would_train_on_other_things_are_refused_by_all_with_what_differs(laws):
    first, second = (each["differ"] for each in laws[2])
    assert first == second
    assert [line.strip()[:27] for line in first[1:]] == [
        "process 1: data: a: 1 -> 2",
        "process 1: data: long: xxxx",
        "process 1: code: a: 1 -> 2",
        "process 1: code: long: xxxx",
    ]


def test_a_sigterm_to_one_of_two_saves_one_step_and_both_ask_to_be_started_again(laws):
    folder, codes, told = laws
    saved = sorted(int(path.name) for path in (folder / "stopped" / "checkpoints").iterdir())
    assert codes == [42, 42]
    assert told[0]["stopped"] == told[1]["stopped"] == saved[-1]


def test_the_step_is_compiled_once_while_the_state_is_made_and_its_time_told(tmp_path, caplog):
    build.cache_clear()  # of steps that were compiled before
    jax.config.update("jax_log_compiles", True)
    try:
        pair.learn(tmp_path, 2)
    finally:
        jax.config.update("jax_log_compiles", False)
    compiled = [record.threadName for record in caplog.records if "Compiling jit(train)" in record.message]
    assert len(compiled) == 1 and compiled[0].startswith("compile")
    run = json.loads((tmp_path / "run.json").read_text())
    assert 0 < run["seconds_compiling"] < run["seconds_to_first_step"]


def test_a_record_of_an_evaluation_is_in_a_closed_file_which_a_bucket_has(tmp_path):
    with Log(tmp_path, {}) as log:
        log.resume_after(0)
        log.write(1, "train", {"loss": 1.0})
        file = log._file
        assert not file.closed
        log.write(1, "eval", {"loss": 1.0})
        assert file.closed
        log.write(2, "train", {"loss": 1.0})
    assert [(line["step"], line["kind"]) for line in records(tmp_path)] == [
        (1, "train"),
        (1, "eval"),
        (2, "train"),
    ]


@pytest.mark.parametrize("command", [["--help"], ["list"]])
def test_nothing_is_said_where_nobody_reads(command):
    read, write = os.pipe()
    os.close(read)
    ran = subprocess.run(
        [sys.executable, "-m", "experiments", *command], stdout=write, stderr=subprocess.PIPE, text=True
    )
    os.close(write)
    assert (ran.returncode in (0, 128 + signal.SIGPIPE), ran.stderr) == (True, "")


def test_work_outlives_its_reader_and_says_so_once():
    read, write = os.pipe()
    os.close(read)
    work = "import sys; from experiments.cli.terminal import ignore_broken_pipes; ignore_broken_pipes()"
    work += "; [print(line, flush=True) for line in range(3)]; sys.exit(7)"
    ran = subprocess.run([sys.executable, "-c", work], stdout=write, stderr=subprocess.PIPE, text=True)
    os.close(write)
    assert (ran.returncode, ran.stderr.count("nobody reads any more")) == (7, 1), ran.stderr


@pytest.mark.parametrize("stream", ["stdout", "stderr"])
def test_unbuffered_work_shows_a_line_at_once(stream):
    work = "import os, sys; from experiments.cli.terminal import ignore_broken_pipes; ignore_broken_pipes()"
    work += f"; print('a line', file=sys.{stream}); os._exit(0)"  # without a flush at the end
    environment = os.environ | {"PYTHONUNBUFFERED": "1"}
    ran = subprocess.run([sys.executable, "-c", work], env=environment, capture_output=True, text=True)
    assert getattr(ran, stream) == "a line\n"


def trained(runs):
    """The training steps that were logged, of all stages: after one, a signal has something to save."""
    lines = (record for path in runs.glob("**/metrics.jsonl") for record in records(path.parent))
    return sum(record["kind"] == "train" for record in lines)


def row(runs, count, signals=()):
    """A small row in words and through a head, by ``count`` processes; each signal stops a start of it."""
    changed = {k: v for k, v in SMALL.items() if v != SCALES["nano"].get(k)} | {"pretraining.steps": 40}
    flags = [word for name, value in changed.items() for word in (f"--{name}", value)]
    command = "-m", "experiments", "run", "t5/1-baseline/baseline", "--runs", runs, *flags
    command += "--tuning.mixtures", "cloze", "--tuning.heads", "follows"
    codes = []
    for number in (*signals, None):
        begun, started = trained(runs), start(*command, count=count, devices=8 // count)
        while number and trained(runs) == begun and started[0].poll() is None:
            time.sleep(0.1)
        if number:
            started[0].send_signal(number)
        codes.append([code for code, _ in ends(started)])
    (scores,) = runs.glob("nano/t5/*/*/seed-0/scores.json")  # stages have scores of their own
    return codes, json.loads(scores.read_text()), scores.parent


@pytest.mark.slow
def test_a_row_comes_to_the_same_with_one_process_and_with_two_however_they_are_stopped(tmp_path):
    corpus.prepare_sets(tmp_path / "cache", packages=corpus.STDLIB)
    for each in ("one", "two"):
        shutil.copytree(tmp_path / "cache", tmp_path / each / "cache")
    codes, due, there = row(tmp_path / "one", 1, [signal.SIGTERM])
    assert codes == [[42], [0]]
    codes, found, here = row(tmp_path / "two", 2, [signal.SIGINT, signal.SIGTERM])
    assert codes == [[42, 42], [42, 42], [0, 0]]
    assert found["tasks"].keys() == due["tasks"].keys() == {"cloze", "follows"}
    for path in sorted(there.glob("finetuning/*/metrics.jsonl")):
        name = path.parent.relative_to(there)
        assert losses(here / name) == pytest.approx(losses(path.parent), rel=1e-5)
        for answers in (there / name).glob("predictions/*/*.jsonl"):
            assert (here / name / answers.relative_to(there / name)).read_text() == answers.read_text()
    for task, best in due["tasks"].items():
        assert found["tasks"][task]["metrics"] == pytest.approx(best["metrics"], rel=1e-5)
    assert found["held_out_loss"] == pytest.approx(due["held_out_loss"], rel=1e-5)

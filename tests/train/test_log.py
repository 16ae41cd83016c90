"""What a run's folder remembers: every start of it, every step once, whatever trackers and disks do."""

import json
import os
import resource
import sys
import time
from contextlib import contextmanager
from types import SimpleNamespace

import pytest
import toy

from experiments.processes import progress
from experiments.processes.progress import Tools
from experiments.runs.status import is_stage_finished
from lm.config.base import DataError, SettingError
from lm.train.runtime import log
from lm.train.runtime.log import Log
from lm.train.runtime.processes import process_start
from lm.train.runtime.records import records


def write(folder, first, last):
    with Log(folder, {}) as made:
        made.resume_after(first)
        for step in range(first + 1, last + 1):
            made.write(step, "train", {"loss": 1.0 / step})


def starts(folder):
    return json.loads((folder / "run.json").read_text())["starts"]


def test_every_start_is_remembered_and_one_that_was_killed_has_vanished(tmp_path, monkeypatch):
    write(tmp_path, 0, 2)
    with pytest.raises(ArithmeticError), Log(tmp_path, {}):
        raise ArithmeticError("odd")
    Log(tmp_path, {}).resume_after(2)  # and no end
    monkeypatch.setenv("LM_RESTART", "1 of 3: killed by SIGKILL")
    write(tmp_path, 2, 3)
    assert [life["status"] for life in starts(tmp_path)] == [
        "finished",
        "ArithmeticError: odd",
        "vanished",
        "finished",
    ]
    assert [life["from_step"] for life in starts(tmp_path)] == [0, None, 2, 2]
    assert [life["restart"] for life in starts(tmp_path)] == [None, None, None, "1 of 3: killed by SIGKILL"]
    run = json.loads((tmp_path / "run.json").read_text())
    assert run["process_start"] == process_start(os.getpid())
    assert (run["status"], run["pid"], run["started"]) == (
        "finished",
        os.getpid(),
        starts(tmp_path)[-1]["started"],
    )


@pytest.mark.parametrize(
    "text", ["", '{"starts": [{"sta', "[]", '{"starts": 3}', '{"starts": ["a"]}', "\0" * 9]
)
def test_a_damaged_run_json_is_begun_anew_and_says_so(tmp_path, text, capsys):
    (tmp_path / "run.json").write_text(text)
    write(tmp_path, 0, 1)
    assert "run.json is damaged and begun anew" in capsys.readouterr().out
    assert [life["status"].split(":")[0] for life in starts(tmp_path)] == ["unknown", "finished"]


@pytest.mark.parametrize(
    "tail", [b"", b'{"step": 4, "kind": "tr', b"\0" * 99, b'{"step": 4, "ki\0\0\0', b"{"]
)
def test_what_a_kill_or_a_power_cut_left_of_a_line_is_mended(tmp_path, tail):
    write(tmp_path, 0, 3)
    with (tmp_path / "metrics.jsonl").open("ab") as file:
        file.write(tail)
    assert [line["step"] for line in records(tmp_path)] == [1, 2, 3]
    write(tmp_path, 2, 5)
    lines = [json.loads(line) for line in (tmp_path / "metrics.jsonl").read_text().splitlines()]
    assert [line.pop("sha256") and line["step"] for line in lines] == [1, 2, 3, 4, 5] and lines == records(
        tmp_path
    )


def lost(text: str) -> str:
    return "".join(text.splitlines(keepends=True)[1:])


@pytest.mark.parametrize(
    "damage", [lost, lambda text: text.replace("0.5", "0.4"), lambda text: text[:9] + text[10:]]
)
def test_a_record_that_was_changed_or_lost_stops_a_resume_which_leaves_the_file_as_it_is(tmp_path, damage):
    write(tmp_path, 0, 3)
    path = tmp_path / "metrics.jsonl"
    path.write_text(damage(path.read_text()))
    there = path.read_bytes()
    for go_on in (
        lambda: records(tmp_path),
        lambda: write(tmp_path, 3, 5),
        lambda: is_stage_finished(tmp_path, 3),
    ):
        with pytest.raises(DataError, match=r"metrics.jsonl .*in line [12] of [23]; put back .* or delete"):
            go_on()
    assert path.read_bytes() == there


def test_a_phase_with_a_damaged_run_json_is_gone_on_with(tmp_path):
    write(tmp_path, 0, 1)
    with Log(tmp_path, {}) as made:
        made.resume_after(1)
        made.write(1, "eval", {"score": 0.5})
    (tmp_path / "checkpoints" / "1").mkdir(parents=True)
    assert is_stage_finished(tmp_path, 1) and not is_stage_finished(tmp_path, 2)
    path = tmp_path / "run.json"
    path.write_text(path.read_text().replace('"from_step": 1', '"from_step": 0'))
    assert not is_stage_finished(tmp_path, 1)


@pytest.mark.parametrize("kind", ["train", "eval"])
def test_a_run_whose_folder_is_deleted_ends_with_that_cause_and_a_status(tmp_path, kind):
    folder = tmp_path / "run"
    with pytest.raises(FileNotFoundError, match=f"deleted or moved while the run trained: '{folder}'"):
        with Log(folder, {}) as log:
            log.resume_after(0)
            log.write(1, "eval", {"loss": 1.0})
            folder.rename(tmp_path / "moved")  # at once: a thread may be writing into it for TensorBoard
            log.write(2, kind, {"loss": 1.0})
    assert "deleted or moved" in starts(folder)[-1]["status"]


def test_a_record_that_cannot_be_written_is_an_error_that_names_the_file(tmp_path, capsys, monkeypatch):
    monkeypatch.setattr(sys, "dont_write_bytecode", True)  # Python would keep modules cut off at that size
    before = resource.getrlimit(resource.RLIMIT_FSIZE)
    try:
        with pytest.raises(OSError, match=r"File too large: '.*metrics\.jsonl'"), Log(tmp_path, {}) as made:
            made.resume_after(0)
            resource.setrlimit(resource.RLIMIT_FSIZE, (200, before[1]))
            for step in range(100):
                made.write(step, "train", {"loss": 1.0})
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, before)
    assert "run.json" in capsys.readouterr().out  # which could not be written either
    assert 0 < len(records(tmp_path)) < 10


@contextmanager
def raises_when_opened(*_):
    raise OSError("no place")
    yield


@contextmanager
def raises(*_):
    yield lambda *_: 1 / 0


@contextmanager
def hangs(*_):
    yield lambda *_: time.sleep(60)


@pytest.mark.parametrize(
    "opened, room, said",
    [
        (raises_when_opened, 3, "off from now on (OSError: no place)"),
        (raises, 3, "from now on (ZeroDivisionError:"),
        (hangs, 3, "too slow and lacks up to 9 records"),
        (hangs, 99, "too slow and lacks up to 10 records"),
    ],
)
def test_a_tracker_that_fails_or_hangs_holds_nothing_up_and_is_said_once(
    tmp_path, monkeypatch, capsys, opened, room, said
):
    monkeypatch.setattr(log, "tensorboard", opened)
    monkeypatch.setattr(log, "CLOSE_TIMEOUT", 0.2)
    monkeypatch.setattr(log, "QUEUE_SIZE", room)
    begin = time.monotonic()
    with Log(tmp_path, {}) as made:
        made.resume_after(0)
        for step in range(1, 11):
            made.write(step, "train", {"loss": 1.0})
            time.sleep(0.01)
    assert time.monotonic() - begin < 2
    assert len(records(tmp_path)) == 10
    out = capsys.readouterr().out
    assert out.count("warning") == 1 and said in out


def test_tensorboard_has_every_number_of_every_start(tmp_path):
    from tensorboardX.proto.event_pb2 import Event

    write(tmp_path, 0, 4)
    write(tmp_path, 2, 6)
    seen = []
    for path in sorted((tmp_path / "tensorboard").iterdir(), key=lambda path: path.name.rpartition(".")[2]):
        data = path.read_bytes()
        while data:  # a length of 8 bytes, its checksum of 4, the event, its checksum
            size = int.from_bytes(data[:8], "little")
            event, data = Event.FromString(data[12 : 12 + size]), data[16 + size :]
            seen.append(("start", event.step)) if event.HasField("session_log") else None
            seen += [(value.tag, event.step) for value in event.summary.value]
    with Log(tmp_path, {}, "t5/row/seed-0") as made:
        made.resume_after(6)
    # the name that TensorBoard shows
    assert list((tmp_path / "tensorboard" / "t5" / "row" / "seed-0").iterdir())
    due = [("start", 1), *(("train/loss", step) for step in (1, 2, 3, 4))]
    assert seen == [*due, ("start", 3), *(("train/loss", step) for step in (3, 4, 5, 6))]


def test_weights_and_biases_gets_every_number_under_a_name_that_stays_the_same_when_the_run_goes_on(
    tmp_path, monkeypatch
):
    asked, logged, ended = [], [], []
    fake = SimpleNamespace(
        init=lambda **given: asked.append(given) or fake,
        log=lambda values, step: logged.append((step, values)),
        finish=lambda: ended.append(True),
    )
    monkeypatch.setitem(sys.modules, "wandb", fake)
    for first in (0, 1):
        with Log(tmp_path, {"model": {"d_ff": 8}, "folder": tmp_path}, project="lm") as made:
            made.resume_after(first)
            made.write(first + 1, "train", {"loss": 0.5, "odd": float("nan")})
            made.write(first + 1, "eval", {"sst2/accuracy": 90.0})
    assert logged == [
        (step, values) for step in (1, 2) for values in ({"train/loss": 0.5}, {"eval/sst2/accuracy": 90.0})
    ]
    before, after = asked
    assert before == after and before["project"] == "lm" and before["resume"] == "allow"
    assert before["config"] == {"model": {"d_ff": 8}, "folder": str(tmp_path)} and len(ended) == 2


def test_a_trace_is_of_the_steps_that_are_named_and_bad_ones_are_refused(tmp_path):
    toy.run(tmp_path / "traced", 4, profile=(2, 3))
    assert [*(tmp_path / "traced" / "profile").rglob("*.xplane.pb")]
    toy.run(tmp_path / "plain", 4, profile=(9, 12))
    assert not (tmp_path / "plain" / "profile").exists()
    assert Tools(profile="10:15").profile_steps == (10, 15) and Tools().profile_steps is None
    for wrong in ("10", "15:10", "0:3", "a:b"):
        with pytest.raises(SettingError, match=f"--profile {wrong} should be FIRST:LAST, such as 10:15"):
            Tools(profile=wrong)


def test_a_tracker_that_is_not_installed_is_said_before_anything_is_trained(monkeypatch):
    monkeypatch.setattr(progress, "find_spec", lambda name: None)
    with pytest.raises(
        SettingError, match=r"--wandb mine needs its package: pip install 'lm-study\[wandb\]'"
    ):
        Tools(wandb="mine")

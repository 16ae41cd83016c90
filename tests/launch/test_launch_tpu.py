"""The launcher on Cloud TPU, against a gcloud that plays recorded answers; the real one reads the
commands.
"""

import json
import os
import shutil
import signal
import subprocess
import tarfile
import time
from pathlib import Path
from unittest.mock import Mock

import pytest

from launch.__main__ import dispatch
from launch.accelerators import resolve
from launch.gcloud import deletion
from launch.policy import ABSENT, FAILED, Seen, SliceState, step
from launch.processes import on_signals, show
from launch.tpu import pack

HERE = Path(__file__).parent
TPU = ["tpu", "t5/a", "--accelerator=v5litepod-16", "--zone=us-west4-a", "--runs=gs://b/r", "--scale=base"]
OFFERED = "auth config types "
ATTEMPT = "scp ssh START"


def queues(stage, *states: str) -> list:
    return [stage.absent if state == ABSENT else stage.queue(state) for state in states]


def test_a_slice_that_is_taken_away_is_deleted_and_asked_for_again_until_the_run_says_done(stage, capsys):
    states = (ABSENT, "WAITING_FOR_RESOURCES", "ACTIVE", "SUSPENDED", "PROVISIONING", "ACTIVE")
    stage.record(describe=queues(stage, *states), START=[(42, "", ""), (0, "", "")])
    assert dispatch(TPU) == 0
    first, again = (
        f"describe create describe describe {ATTEMPT} describe delete",
        f"create describe describe {ATTEMPT}",
    )
    assert stage.calls() == f"{OFFERED}{first} {again} delete "
    assert "nothing is left of it; exit code 0" in capsys.readouterr().out.splitlines()[-1]


@pytest.mark.parametrize(
    "answers, code, then",
    [
        ({"START": [2]}, 2, f"{ATTEMPT} delete"),
        ({"START": [3]}, 3, f"{ATTEMPT} delete"),
        ({"START": [1]}, 1, f"{ATTEMPT} {'describe START ' * 3}describe delete"),
        ({"START": [255, 0]}, 0, f"{ATTEMPT} describe START delete"),
        ({"ssh": [1, 0]}, 0, f"scp ssh describe {ATTEMPT} delete"),
        (
            {"create": ["Quota limit 'TPUV5s' has been exceeded. Limit: 0 in zone us-west4-a."]},
            2,
            "describe create delete",
        ),
        (
            {"create": ["UNAVAILABLE", 0], "describe": [ABSENT, ABSENT, "ACTIVE"]},
            0,
            f"create describe {ATTEMPT} delete",
        ),
        ({"describe": [ABSENT, "FAILED"]}, 1, f"describe {'create describe delete ' * 4}".strip()),
        ({"describe": [ABSENT, "ACTIVE", ABSENT], "START": [255]}, 1, f"create describe {ATTEMPT} describe"),
        ({"describe": ["ACTIVE"]}, 2, "types describe"),
        (
            {"describe": ["DELETING", ABSENT, "ACTIVE"]},
            0,
            f"describe describe create describe {ATTEMPT} delete",
        ),
    ],
)
def test_each_ending_has_its_policy(stage, answers, code, then):
    def shown(verb: str, one) -> tuple:
        if verb == "describe":
            return stage.absent if one == ABSENT else stage.queue(one)
        return (1, "", one) if isinstance(one, str) else (one, "", "")

    stage.record(**{verb: [shown(verb, one) for one in given] for verb, given in answers.items()})
    assert dispatch(TPU) == code
    assert stage.calls().endswith(f"{then} ")


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM, signal.SIGHUP])
def test_a_signal_ends_the_run_and_deletes_its_slice_even_if_the_terminal_is_gone(stage, number, monkeypatch):
    monkeypatch.setattr("sys.stdout", Mock(**{"write.side_effect": OSError(5, "Input/output error")}))
    monkeypatch.setattr("launch.processes.PATIENCE", 0.2)
    stage.record(START=[("hangs", "", "")])
    stage.send(number, when=lambda: "START" in stage.calls())
    began = time.monotonic()
    assert dispatch(TPU) == 130 and time.monotonic() - began < 30
    assert stage.calls().endswith("START delete ")


def test_under_nohup_a_closed_terminal_deletes_nothing(stage):
    signal.signal(signal.SIGHUP, signal.SIG_IGN)
    on_signals(print)
    assert signal.getsignal(signal.SIGHUP) is signal.SIG_IGN != signal.getsignal(signal.SIGTERM)


@pytest.mark.parametrize("options, last", [([], "describe "), (["--adopt"], "delete ")])
def test_before_the_first_look_a_signal_deletes_only_a_slice_that_was_to_be_adopted(stage, options, last):
    stage.record(describe=[(1, "", "UNAVAILABLE")])
    stage.send(signal.SIGTERM, when=lambda: "describe" in stage.calls())
    assert dispatch([*TPU, *options]) == 130 and stage.calls().endswith(last)


def test_a_slice_that_cannot_be_deleted_is_named_with_the_command_that_does_it(stage, capsys):
    stage.record(delete=[(1, "", "UNAVAILABLE")])
    assert dispatch(TPU) == FAILED
    *_, warning, told = capsys.readouterr().out.splitlines()
    assert "NOT DELETED" in warning and "gcloud compute tpus queued-resources delete lm-t5-a-" in told
    assert stage.calls().count("delete") == 4


def test_a_fault_of_the_launcher_itself_deletes_the_slice(stage):
    stage.record(describe=[stage.absent, (0, "no JSON", ""), stage.queue("ACTIVE")])
    assert dispatch([*TPU, "--adopt"]) == 0 and stage.calls().endswith("delete ")


def test_only_a_slice_of_ours_is_deleted():
    assert step(SliceState(), Seen(stopped=True), 3).action == "end"
    assert step(SliceState(ours=True), Seen(stopped=True), 3).action == "delete"
    assert step(SliceState(), Seen(state="ACTIVE"), 3).action == "end"
    assert step(SliceState(ours=True), Seen(state="ACTIVE"), 3).action == "set up"


def test_a_slice_that_was_lost_or_an_attempt_that_lasted_forgives_earlier_failures():
    tired = SliceState("start", ours=True, there=True, ready=True, failures=3, code=1)
    assert step(tired, Seen(code=1), 3).failures == 4
    assert step(tired, Seen(code=1, seconds=3600.0), 3).failures == 1
    lost = step(tired.to("look"), Seen(state="SUSPENDED"), 3)
    assert (lost.action, lost.then, lost.failures) == ("delete", "ask", 0)


@pytest.mark.parametrize("failures", [0, 3, 9])
def test_a_deletion_is_tried_as_often_after_any_failures_and_is_no_failure_of_the_run(failures):
    tired = SliceState("delete", ours=True, failures=failures, then="ask")
    once = step(tired, Seen(code=1), 3)
    assert (once.action, once.failures) == ("delete", failures)
    gone = step(once, Seen(), 3)
    assert (gone.action, gone.failures) == ("ask", failures)
    again = SliceState("delete", ours=True, undeleted=gone.undeleted)
    actions = [(again := step(again, Seen(code=1), 3)).action for _ in range(4)]
    assert actions == ["delete", "delete", "delete", "end"]
    assert again.ours and "NOT DELETED" in again.why


@pytest.mark.parametrize(
    "change, message",
    [
        (["--accelerator=v5litpod-16"], "there is no TPU 'v5litpod'; did you mean v5litepod?"),
        (["--accelerator=v5litepod-17"], "does not offer v5litepod-17; did you mean v5litepod-16?"),
        (["--accelerator=v6e:AxB"], "should be like v6e-16, or a topology like v6e:2x4"),
        (["--runs=/tmp/r"], "should be gs://"),
        (["--source=/"], "no constraints.txt"),
        (["--study=none.py"], "--study none.py does not exist"),
        (["--study=pyproject.toml"] * 2, "should differ in their names"),
        ("t5/typo", "did you mean t5/a?"),
        ({"auth": [(0, "", "")]}, "gcloud auth login"),
        ({"config": [(0, "(unset)", "")]}, "which project pays?"),
        ({"types": [(1, "", "PERMISSION_DENIED: zone")]}, "cannot be used in project mine. gcloud says"),
        (None, "install the Google Cloud SDK"),
    ],
)
def test_what_the_user_can_mend_is_said_before_anything_is_asked_for(
    stage, change, message, capsys, monkeypatch
):
    options = change if isinstance(change, list) else []
    if isinstance(change, dict):
        stage.record(**change)
    if change is None:
        (stage.folder / "gcloud").unlink()
        monkeypatch.setenv("PATH", str(stage.folder))
    assert dispatch(["tpu", change if isinstance(change, str) else "t5/a", *TPU[2:], *options]) == 2
    assert message in capsys.readouterr().err and "create" not in stage.calls()


@pytest.mark.parametrize("way", ["option", "environment"])
def test_a_module_of_ones_own_is_copied_to_the_slice_and_found_there(
    stage, tmp_path, monkeypatch, capsys, way
):
    file = tmp_path / "my_rows.py"
    file.write_text("ROWS = 1")
    if way == "environment":
        monkeypatch.setenv("LM_STUDY", str(file))
    given = [f"--study={file}"] * (way == "option")
    assert dispatch([*TPU, *given, "--dry-run"]) == 0
    assert "lm run t5/a --scale base --runs gs/b/r --study lm/studies/my_rows.py" in capsys.readouterr().out
    pack(Path(), [str(file)], tmp_path / "source.tgz")
    with tarfile.open(tmp_path / "source.tgz") as archive:
        assert archive.extractfile("studies/my_rows.py").read() == b"ROWS = 1"


def test_a_sweep_runs_so_many_rows_at_once_and_no_more(stage, monkeypatch):
    now, most = [], []

    def act(one, action, attempt, stop):
        now.append(one)
        most.append(len(now))
        time.sleep(0.02)
        now.remove(one)
        return Seen(state="" if action != "look" else ABSENT if most.count(1) < 2 else "ACTIVE")

    monkeypatch.setattr("launch.tpu._act", act)
    dispatch([*TPU[:1], "x/*", "y/*", *TPU[2:], "--at-once=2", "--adopt"])
    assert max(most) == 2


@pytest.mark.parametrize(
    "asked, given",
    [
        ("v5litepod-8", ("v5litepod-8", 1)),
        ("v5e:4x4", ("v5litepod-16", 4)),
        ("v4:2x2x2", ("v4-16", 2)),
        ("v6e-256", ("v6e-256", 64)),
        ("v5p:8x8x8", ("v5p-1024", 128)),
    ],
)
def test_types_and_topologies_name_the_same_slices(asked, given):
    assert resolve(asked)[::2] == given


@pytest.mark.parametrize("accelerator", ["tpu7x:4x4x4", "TPU7x-4x4x4"])
@pytest.mark.parametrize("option", [[], ["--dry-run"]])
def test_a_tpu_that_queued_resources_do_not_offer_is_refused_with_the_command_that_gets_it(
    stage, capsys, accelerator, option
):
    assert dispatch([*TPU[:2], f"--accelerator={accelerator}", *TPU[3:], *option]) == 2
    said = capsys.readouterr()
    assert "on GKE: TPU_TYPE=tpu7x-4x4x4 CLUSTER=... RUNS=/bucket/runs launch/xpk.sh NAME" in said.err
    assert not said.out and not stage.calls()


def test_a_dry_run_prints_every_command_and_the_real_gcloud_accepts_each(stage, capsys):
    real = shutil.which("gcloud", path=os.environ["PATH"].split(":", 1)[1])
    assert dispatch([*TPU, "--slices=2", "--spot", "--project=p", "--dry-run", "--", "--seed", "3"]) == 0
    for command in (TPU, ["list"], [*TPU, "--slices=2"]):
        dispatch(
            [*command, "--project=p", "--dry-run", *["--", "--mesh.slice=2"] * ("--slices=2" in command)]
        )
    show(deletion("tpu-vm", "x", "us-west4-a", "p"))
    lines = capsys.readouterr().out.splitlines()
    assert sum("--mesh.slice 2" in line for line in lines) == 1
    assert lines[2:9] == (HERE / "commands.txt").read_text().splitlines() and not stage.calls()
    if not real:
        pytest.skip("the Google Cloud SDK is not installed")
    file = stage.folder / "commands.json"
    file.write_text(json.dumps([{"command_string": line} for line in set(lines)]))
    lint = [real, "meta", "lint-gcloud-commands", f"--commands-file={file}", "--format=json"]
    done = subprocess.run(lint, capture_output=True, env=os.environ | {"CLOUDSDK_CONFIG": str(stage.folder)})
    judged = json.loads(done.stdout.splitlines()[0])
    assert len(judged) == len(set(lines)) and not [
        one["error_message"] for one in judged if not one["success"]
    ]


def test_what_is_there_is_deleted_by_name_and_a_name_that_is_not_is_refused(stage, capsys):
    stage.record(list=[(0, "projects/p/locations/us-west4-a/queuedResources/lm-t5-a", ""), (0, "", "")] * 2)
    assert dispatch(["delete", "lm-t5-b"]) == 2
    assert (
        "there is no lm-t5-b; did you mean lm-t5-a?" in capsys.readouterr().err
        and "delete" not in stage.calls()
    )
    assert dispatch(["delete", "--all"]) == 0
    assert (
        "queued-resources delete lm-t5-a --quiet --zone=us-west4-a --project=mine --force"
        in capsys.readouterr().out
    )
    assert stage.calls().count("delete") == 1
    assert dispatch(["list"]) == 0 and "none of ours" in capsys.readouterr().out

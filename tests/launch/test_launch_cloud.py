"""The launcher in a cloud, against a gcloud that plays recorded answers; the real one reads the commands."""

import json
import os
import shlex
import shutil
import signal
import subprocess
import tarfile
import threading
import time
from unittest.mock import Mock

import pytest
from launching import CLOUD, IMAGE, launch

from experiments.console import RUNS
from launch import container, gce, gcloud, gke, queued
from launch.accelerators import Slice, libtpu_flags, parse_slice
from launch.gcloud import Request
from launch.options import Machines
from launch.policy import ABSENT, FAILED, REFUSED, Limits, Outcome, SliceState, step
from launch.processes import on_signals
from launch.slices import JobSlice, run_to_its_end

ROW = "t5/6-corruption-rate/15"
GCE = ["gce", ROW, "--accelerator=v6e:4x4", "--zones", "us-east5-a", *CLOUD]
QUEUED = ["queued", ROW, "--accelerator=v5litepod-16", "--zones", "us-west4-a", *CLOUD]
LOCAL = ["local", ROW]
SLURM = ["slurm", ROW, "--time=1:00:00"]
GKE = ["gke", ROW, "--accelerator=tpu7x:2x2x4", "--cluster=c", *CLOUD]
OFFERED = "auth config offers"
ATTEMPT = "scp ssh START"
ASK = "create-policy create-template create-group"
DELETE = "delete-group delete-template delete-policy"
UP = ("RUNNING",) * 4  # a slice of 16 chips
SETUP, RUN, COPIES = "ssh " * 4, "START " * 4, "scp " * 4


def test_a_group_that_loses_a_host_is_deleted_and_asked_for_again_until_the_run_says_done(stage, capsys):
    seen = [stage.absent, stage.group(*UP[:2], action="CREATING"), stage.group(*UP)]
    lost = stage.group(*UP[:3], "TERMINATED")
    stage.record(
        describe=[*seen, lost, *seen[1:]], START=[(42, "", "")] + [(255, "", "")] * 3 + [(0, "", "")]
    )
    assert launch(*GCE, "--provisioning=spot") == 0
    up = f"describe describe {COPIES}{SETUP}{RUN}"
    life = f"{OFFERED} describe {ASK} {up}describe {DELETE} {ASK} {up}{DELETE}"
    assert stage.calls() == life
    assert "nothing is left of it; exit code 0" in capsys.readouterr().out.splitlines()[-1]


def test_a_queued_slice_that_is_taken_away_is_deleted_and_asked_for_again(stage):
    states = ("WAITING_FOR_RESOURCES", "ACTIVE", "SUSPENDED", "PROVISIONING", "ACTIVE")
    stage.record(describe=[stage.absent, *map(stage.queue, states)], START=[(42, "", ""), (0, "", "")])
    assert launch(*QUEUED) == 0
    first = f"describe create describe describe {ATTEMPT} describe delete"
    assert stage.calls() == f"{OFFERED} {first} create describe describe {ATTEMPT} delete"


@pytest.mark.parametrize(
    "answers, code, then",
    [
        ({"START": [2]}, 2, f"{ATTEMPT} delete"),
        ({"START": [3]}, 3, f"{ATTEMPT} delete"),
        ({"START": [1]}, 1, f"{ATTEMPT} {'describe START ' * 3}describe delete"),
        ({"START": [255, 0]}, 0, f"{ATTEMPT} describe START delete"),
        ({"ssh": [1, 0]}, 0, f"scp ssh describe {ATTEMPT} delete"),
        ({"create": ["Quota limit 'TPUV5s' has been exceeded."]}, 2, "describe create delete"),
        (
            {"create": ["UNAVAILABLE", 0], "describe": [ABSENT, ABSENT, "ACTIVE"]},
            0,
            f"create describe {ATTEMPT} delete",
        ),
        (
            {"describe": [ABSENT, "ACTIVE", "PREEMPTED"] + 3 * ["ACTIVE", "PREEMPTED"], "scp": [1]},
            1,
            f"describe {'create describe scp describe delete ' * 4}".strip(),
        ),
        (
            {"create": ["ALREADY_EXISTS: Resource 'x'"], "describe": [ABSENT, "PROVISIONING"]},
            2,
            "describe create describe",
        ),
        (
            {"create": ["ALREADY_EXISTS: Resource 'x'", 0], "describe": [ABSENT, ABSENT, "ACTIVE"]},
            0,
            f"describe create describe create describe {ATTEMPT} delete",
        ),
        ({"describe": [ABSENT, "FAILED"]}, 1, f"describe {'create describe delete ' * 4}".strip()),
        (
            {"describe": [ABSENT, "ACTIVE", ABSENT], "START": [255]},
            1,
            f"create describe {ATTEMPT} describe delete",
        ),
        ({"describe": ["ACTIVE"]}, 2, "offers describe"),
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
    assert launch(*QUEUED) == code
    assert stage.calls().endswith(then)


def test_after_its_run_time_a_slice_is_asked_for_again_and_the_run_goes_on_there(stage, capsys):
    states = [stage.absent, stage.queue("ACTIVE"), stage.queue("DELETING"), stage.queue("ACTIVE")]
    stage.record(describe=states, START=[(255, "", ""), (0, "", "")])
    assert launch(*QUEUED, "--provisioning=flex-start", "--max-run-time=2d") == 0
    once = f"create describe {ATTEMPT}"
    assert stage.calls() == f"{OFFERED} describe {once} describe delete {once} delete"
    assert "taken away, as at the end of --max-run-time" in capsys.readouterr().out
    unready = SliceState(owned=True, seen=True)
    assert step(unready, Outcome(state=ABSENT), Limits(is_timed=True)).after_deletion == "end"


def test_a_zone_that_refuses_is_left_for_the_next(stage):
    stage.record(create=[(1, "", "QUOTA_EXCEEDED"), (0, "", "")])
    two = [*QUEUED[:3], "--zones", "us-west4-a", "us-east1-c", *CLOUD]
    assert launch(*two) == 0
    calls = stage.calls(zones=True)
    assert "create@us-west4-a delete@us-west4-a create@us-east1-c describe@us-east1-c scp@us-east1-c" in calls
    stage.record(create=[(1, "", "QUOTA_EXCEEDED")])
    (stage.folder / "calls").unlink()
    assert launch(*two) == 2
    assert stage.calls(zones=True).endswith("create@us-east1-c delete@us-east1-c")


def test_a_zone_without_capacity_is_left_after_a_while_if_there_is_another():
    asked = SliceState(owned=True, seen=True)
    waiting = Outcome(state="WAITING_FOR_RESOURCES", seconds=400.0)
    alone = Limits(wait=1_000.0)
    assert step(step(step(asked, waiting, alone), waiting, alone), waiting, alone).action == "describe"
    two = Limits(wait=1_000.0, zones=2)
    soon = step(step(asked, waiting, two), waiting, two)
    later = step(soon, waiting, two)
    assert (soon.action, later.action, later.after_deletion, later.next_zone) == (
        "describe",
        "delete",
        "create",
        1,
    )
    moved = step(later, Outcome(), two)
    assert (moved.action, moved.zone, moved.waited) == ("create", 1, 0.0)
    back = step(SliceState(owned=True, seen=True, zone=1, waited=900.0), waiting, two)
    assert back.next_zone == 0


def test_a_slice_that_was_had_is_asked_for_again_in_its_zone():
    had = SliceState(owned=True, seen=True, ready=True, zone=1)
    for state in ("PREEMPTED", "PROVISIONING"):
        lost = step(had, Outcome(state=state), Limits(zones=3))
        assert (lost.action, lost.after_deletion, lost.next_zone, lost.failures) == ("delete", "create", 1, 0)


def test_a_run_that_is_done_when_a_signal_comes_has_ended_well():
    running = SliceState(action="start", owned=True, seen=True, ready=True)
    for code, due in ((0, 0), (1, 130), (42, 130)):
        ended = step(running, Outcome(code=code, stopped=True), Limits())
        assert (ended.action, ended.after_deletion) == ("delete", "end")
        assert step(ended, Outcome(stopped=True), Limits()).code == due
    for action in ("describe", "create", "set up"):
        state = SliceState(action=action, owned=True)
        assert step(state, Outcome(stopped=True), Limits()).code == 130


def test_a_run_that_has_failed_is_not_done_when_a_signal_comes_before_its_next_attempt(monkeypatch):
    stop, actions = threading.Event(), []

    def act(row, action, commands, zone, ssh_targets, stop):
        actions.append(action)
        if action == "start":
            threading.Timer(0.2, stop.set).start()  # in the pause of ten seconds before the next attempt
            return Outcome(FAILED), ()
        return Outcome(state="ACTIVE" if action == "describe" else ""), ()

    monkeypatch.setattr("launch.slices._act", act)
    row = JobSlice(Mock(), request("v6e:4x4", adopt=True), queued.API, Mock())
    monkeypatch.setattr(JobSlice, "commands", lambda *_: [])
    assert run_to_its_end(row, stop) == 130
    assert actions == ["describe", "set up", "start", "describe", "delete"]


def test_a_request_that_was_never_made_deletes_nothing():
    skipped = Outcome(stopped=True, skipped=True)
    ended = step(SliceState(action="create"), skipped, Limits())
    assert (ended.action, ended.code) == ("end", 130)
    assert step(SliceState(action="create", owned=True), skipped, Limits()).action == "delete"


def test_after_its_deletion_a_slice_of_the_name_may_be_that_of_another_launch():
    lost = SliceState(action="delete", owned=True, seen=True, after_deletion="create")
    anew = step(lost, Outcome(), Limits())
    exists = Outcome(code=1, message="ALREADY_EXISTS: Resource 'x'")
    found = step(step(anew, exists, Limits()), Outcome(state="ACTIVE"), Limits())
    assert (anew.action, found.action, found.code) == ("create", "end", 2)
    assert step(anew, Outcome(), Limits()).owned


def test_a_group_that_will_get_no_machines_ends_with_the_reason(stage, capsys):
    refused = stage.group("", "", "", "", action="CREATING", fault="QUOTA_EXCEEDED")
    stage.record(describe=[stage.absent, refused])
    assert launch(*GCE) == 2
    assert stage.calls().endswith(f"{ASK} describe {DELETE}")
    assert "QUOTA_EXCEEDED: sorry\n" in capsys.readouterr().out


def test_what_an_earlier_launch_has_left_of_a_group_is_deleted_and_asked_for_anew(stage):
    exists = (1, "", "The resource 'x' already exists")
    up = [stage.absent, stage.absent, stage.group(*UP)]
    stage.record(create_template=[exists, (0, "", "")], describe=up)
    assert launch(*GCE) == 0
    assert f"describe create-policy create-template {DELETE} describe {ASK} describe scp" in stage.calls()


def test_a_group_of_somebody_else_is_not_deleted(stage):
    exists = (1, "", "The resource 'x' already exists")
    stage.record(create_group=[exists], describe=[stage.absent, stage.group(*UP, action="DELETING")])
    stage.send(signal.SIGTERM, when=lambda: stage.calls().count("describe") > 2)
    assert launch(*GCE) == 130
    assert f"{ASK} describe" in stage.calls() and "delete" not in stage.calls()


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM, signal.SIGHUP])
def test_a_signal_ends_the_run_and_deletes_its_slice_even_if_the_terminal_is_gone(stage, number, monkeypatch):
    monkeypatch.setattr("sys.stdout", Mock(**{"write.side_effect": OSError(5, "Input/output error")}))
    monkeypatch.setattr("launch.processes.PATIENCE", 0.2)
    stage.record(START=[("hangs", "", "")])
    stage.send(number, when=lambda: "START" in stage.calls())
    began = time.monotonic()
    assert launch(*QUEUED) == 130 and time.monotonic() - began < 50
    assert stage.calls().endswith("START delete")


def test_under_nohup_a_closed_terminal_deletes_nothing(stage):
    signal.signal(signal.SIGHUP, signal.SIG_IGN)
    before = signal.getsignal(signal.SIGTERM)
    with on_signals(print):
        assert signal.getsignal(signal.SIGHUP) is signal.SIG_IGN
        assert signal.getsignal(signal.SIGTERM) not in (before, signal.SIG_IGN)
    assert signal.getsignal(signal.SIGTERM) is before


def test_after_the_launch_signals_are_this_process_s_own_again(stage):
    before = signal.getsignal(signal.SIGTERM)
    assert launch("local", "t5/2-architecture/encoder-decoder", "--dry-run") == 0
    assert signal.getsignal(signal.SIGTERM) is before


@pytest.mark.parametrize("options, last", [([], "describe"), (["--adopt"], "delete")])
def test_before_the_first_look_a_signal_deletes_only_a_slice_that_was_to_be_adopted(stage, options, last):
    stage.record(describe=[(1, "", "UNAVAILABLE")])
    stage.send(signal.SIGTERM, when=lambda: "describe" in stage.calls())
    assert launch(*QUEUED, *options) == 130 and stage.calls().endswith(last)


def test_a_slice_that_cannot_be_deleted_is_named_with_the_commands_that_do_it(stage, capsys):
    stage.record(delete_group=[(1, "", "UNAVAILABLE")], describe=[stage.absent, stage.group(*UP)])
    assert launch(*GCE) == FAILED
    *_, warning, group, _template, policy = capsys.readouterr().out.splitlines()
    assert "NOT DELETED" in warning and "instance-groups managed delete lm-t5-6-" in group
    assert "resource-policies delete lm-t5-6-" in policy and stage.calls().count("delete-group") == 4


def test_a_fault_of_the_launcher_itself_deletes_the_slice(stage):
    stage.record(describe=[stage.absent, (0, "no JSON", ""), stage.queue("ACTIVE")])
    assert launch(*QUEUED, "--adopt") == 0 and stage.calls().endswith("delete")


def test_a_slice_that_another_launch_has_requested_is_never_deleted_to_try_another_zone():
    exists = Outcome(code=1, message="ALREADY_EXISTS: Resource 'x'")
    state = SliceState(action="create", failures=3)
    assert step(state, exists, Limits(zones=2)).action == "end"
    ours = SliceState(action="create", failures=3, owned=True)
    assert step(ours, exists, Limits(zones=2)).action == "delete"


def test_only_a_slice_of_ours_is_deleted():
    assert step(SliceState(), Outcome(stopped=True), Limits()).action == "end"
    assert step(SliceState(owned=True), Outcome(stopped=True), Limits()).action == "delete"
    for state in ("ACTIVE", "PREEMPTED", "FAILED", REFUSED):
        assert step(SliceState(), Outcome(state=state), Limits(zones=2)).action == "end"
        assert step(SliceState(owned=True), Outcome(state=state), Limits(zones=2)).action != "end"
    denied = Outcome(code=1, message="PERMISSION_DENIED")
    assert step(SliceState(), denied, Limits()).action == "end"
    assert step(SliceState(owned=True), denied, Limits()).action == "describe", "it may cost money"


@pytest.mark.parametrize(
    "words, message",
    [
        (
            [*GCE, "--accelerator=v5e:4x4"],
            "Compute Engine offers v5p, v6e, tpu7x; v5e comes from `lm launch queued`",
        ),
        ([*GCE, "--accelerator=v5p-256"], "has no shape, which Compute Engine asks for"),
        ([*GCE, "--accelerator=v6e:4x4x4"], "v6e has topologies of 2 sides"),
        ([*GCE, "--accelerator=v6e:3x4"], "--accelerator v6e:3x4 is no slice of v6e; did you mean 'v6e:4x4'"),
        ([*GCE, "--data.corpus=text:company"], "company is a file of this machine"),
        ([*QUEUED, "--tuning.heads", "tickets.toml"], "tickets.toml is a file of this machine"),
        ([*QUEUED, "--data.vocabulary=v.model"], "v.model is a file of this machine"),
        ([*QUEUED, "--data.vocabulary=bpe:text:company"], "company is a file of this machine"),
        ([*QUEUED, "--start=mine"], "mine is a file of this machine"),
        ([*QUEUED, "--distillation.teacher=mine"], "--distillation.teacher mine is not there in a cloud"),
        ([*GCE, "--data.corpus=wikipedia"], "data.corpus='wikipedia' is unknown"),
        ([*GCE, "--zones=us-east5-a,us-east1-d"], "should be zones such as us-east5-a, several of them"),
        ([*GCE, "--zones=us-east5"], "--zones 'us-east5' should be zones"),
        ([*GCE, "--provisioning=flex-start", "--max-run-time=7d1s"], "at most 7d"),
        ([*GCE, "--mesh.fsdp=3"], "mesh.fsdp=3 needs a multiple of 3 devices and there are 16"),
        ([*GCE, "--pretraining.batch_size=24"], "batch_size"),
        ([*GCE, "--finetuning.batch_size=24"], "batch_size"),
        ([*GKE, "--accelerator=tpu7x:4x4x4", "--slices=2"], "batch_size"),
        ([*GKE, "--slices=0"], "--slices 0 should be a whole number from 1"),
        ([*GKE, "--runs=gs://"], "--runs 'gs://' should be gs://BUCKET/FOLDER"),
        ([*QUEUED, "--slices-per-run=0"], "--slices-per-run 0 should be a whole number from 1"),
        ([*GCE, "--max-run-time=0h"], "--max-run-time '0h' should be above 0"),
        ([*SLURM, "--gpus-per-node=-4"], "--gpus-per-node -4 should be a whole number from 0"),
        ([*LOCAL, "--processes=3", "--devices-per-process=1"], "batch_size"),
        (
            [*LOCAL, "--processes=2", "--devices-per-process=3", "--mesh.fsdp=4"],
            "mesh.fsdp=4 needs a multiple of 4 devices and there are 6",
        ),
        ([*LOCAL, "--data.corpus=text:nothere.txt"], "no file matches"),
        ([*SLURM, "--data.corpus=text:nothere.txt"], "no file matches"),
        ([*SLURM, "--data.vocabulary=nothere.model"], "data.vocabulary='nothere.model' does not exist"),
        ([*SLURM, "--tuning.heads", "nothere.toml"], "there is no task file nothere.toml"),
        (
            [*SLURM, "--nodes=2", "--gpus-per-node=4", "--mesh.fsdp=3"],
            "mesh.fsdp=3 needs a multiple of 3 devices and there are 8",
        ),
        ([*GCE, "--accelerator=v5p:2x2x16q"], "should be a topology, as lm plan takes it, such as v5p:4x4x4"),
        ([*GCE, "--accelerator=v66e:4x4"], "did you mean v6e?"),
        ([*GCE, "--provisioning=spott"], "on-demand, spot, flex-start, reservation:NAME"),
        ([*GCE, "--provisioning=reservation"], "on-demand, spot, flex-start, reservation:NAME"),
        ([*GCE, "--provisioning=flex-start"], "needs --max-run-time"),
        ([*GCE, "--max-run-time=3 days"], "should be a time such as 12h"),
        ([*GCE, "--labels", "Team"], "should be KEY=VALUE"),
        ([*GCE, "--at-once=0"], "--at-once 0 should be a whole number from 1"),
        ([*GCE, "--restarts=-1"], "--restarts -1 should be a whole number from 0"),
        ([*GKE, "--restarts=-1"], "--restarts -1 should be a whole number from 0"),
        ([*LOCAL, "--restarts=-1"], "--restarts -1 should be a whole number from 0"),
        ([*LOCAL, "--processes=0"], "--processes 0 should be a whole number from 1"),
        ([*GCE, "--wait=-1"], "--wait -1 should be minutes, 0 or more"),
        ([*GCE, "--wait=nan"], "--wait nan should be minutes, 0 or more"),
        ([*GCE, "--labels", "launcher=me"], "`lm launch list` finds"),
        ([*GCE, "--data=corpora"], "--data 'corpora' should be gs://BUCKET/FOLDER"),
        ([*GKE, "--data=corpora"], "--data 'corpora' should be gs://BUCKET/FOLDER"),
        ([*GKE, "--accelerator=v5litepod-10"], "10 chips are not whole hosts of 4"),
        ([*GKE, "--accelerator=v5p-22"], "11 chips are not whole hosts of 4"),
        ([*GCE, "--accelerator=v6e:4x²"], "should be a topology, as lm plan takes it, such as v6e:4x4"),
        ([*GCE, "--runs=/tmp/r"], "should be gs://"),
        ([*QUEUED, "--accelerator=tpu7x:4x4x4"], "tpu7x comes from `lm launch gce` or `lm launch gke`"),
        ([*QUEUED, "--max-run-time=4h"], "`lm launch gce` takes it always"),
        ([*QUEUED, "--accelerator=v4-7"], "of which 7 should be a multiple"),
    ],
)
@pytest.mark.parametrize("option", [[], ["--dry-run"]])
def test_what_a_way_cannot_do_is_refused_with_the_mend_before_anything_is_asked(
    stage, words, message, option, capsys
):
    assert launch(*words, *option) == 2
    said = capsys.readouterr()
    assert message in said.err and not stage.calls() and not said.out


@pytest.mark.parametrize(
    "words, there",
    [
        (["--data.corpus=text:gs://b/c"], "--data.corpus text:/gs/b/c"),
        (["--data.vocabulary=gs://b/v.model"], "--data.vocabulary /gs/b/v.model"),
        (["--tuning.heads", "gs://b/tickets.toml"], "--tuning.heads /gs/b/tickets.toml"),
        (["--start=gs://b/run"], "--start /gs/b/run"),
        (["--start=/gs/b/run"], "--start /gs/b/run"),
    ],
)
def test_what_is_in_a_bucket_is_named_by_its_path_in_the_container(stage, words, there, capsys):
    assert launch(*GCE, *words, "--dry-run") == 0
    assert there in capsys.readouterr().out


def test_a_teacher_of_the_hub_is_checked_here_and_imported_by_the_machines(stage, monkeypatch, capsys):
    folders = []

    def imported(where, runs, option):
        folders.append(runs)
        return runs / "starts" / "copy"

    monkeypatch.setattr("experiments.runs.init_from._get_or_import", imported)
    assert launch(*GCE, "--distillation.teacher=hf:org/model", "--dry-run") == 0
    assert "--distillation.teacher hf:org/model" in capsys.readouterr().out
    assert folders == [RUNS], "a bucket is no folder of this machine"


@pytest.mark.parametrize("way", [GCE, QUEUED, GKE])
def test_the_image_of_a_cloud_has_no_wandb(stage, way, monkeypatch, capsys):
    monkeypatch.setattr("experiments.processes.progress.find_spec", lambda name: object())  # it is installed
    assert launch(*way, "--wandb=mine", "--dry-run") == 2
    assert "--wandb: the image of lm launch lacks wandb" in capsys.readouterr().err
    assert launch(*LOCAL, "--wandb=mine", "--dry-run") == 0


@pytest.mark.parametrize(
    "record, message",
    [
        ({"auth": [(0, "", "")]}, "gcloud auth login"),
        ({"config": [(0, "(unset)", "")]}, "which project pays?"),
        ({"offers": [(1, "", "PERMISSION_DENIED: zone")]}, "cannot be used in project mine. gcloud says"),
        (
            {"offers": [(0, "ct6e-standard-8t", "")]},
            "does not offer ct6e-standard-4t; did you mean ct6e-standard-8t?",
        ),
        (None, "install the Google Cloud SDK"),
    ],
)
def test_what_the_user_can_mend_is_said_before_anything_is_asked_for(
    stage, record, message, capsys, monkeypatch
):
    if record is None:
        (stage.folder / "gcloud").unlink()
        monkeypatch.setenv("PATH", str(stage.folder))
    else:
        stage.record(**record)
    assert launch(*GCE) == 2
    assert message in capsys.readouterr().err and "create" not in stage.calls()


def test_two_modules_of_one_name_are_refused(stage, tmp_path, monkeypatch, capsys):
    files = [tmp_path / folder / "rows.py" for folder in "ab"]
    monkeypatch.setenv("LM_STUDY", os.pathsep.join(map(str, files)))
    assert launch(*GCE) == 2 and "should differ in their names" in capsys.readouterr().err


def test_a_module_of_ones_own_is_copied_to_the_hosts_and_found_in_the_container(
    stage, tmp_path, monkeypatch, capsys
):
    file = tmp_path / "my_rows.py"
    file.write_text("ROWS = 1")
    monkeypatch.setenv("LM_STUDY", str(file))
    assert launch(*GCE, "--dry-run") == 0
    assert f"run {ROW} --scale base --runs /gs/b/r --study /studies/my_rows.py" in capsys.readouterr().out
    container.pack([str(file)], tmp_path / "packed.tgz")
    with tarfile.open(tmp_path / "packed.tgz") as archive:
        assert archive.extractfile("studies/my_rows.py").read() == b"ROWS = 1"
        assert b"docker run" in archive.extractfile("worker.sh").read()


def test_a_sweep_runs_so_many_at_once_and_no_more(stage, monkeypatch):
    now, most = [], []

    def act(row, action, commands, zone, ssh_targets, stop):
        now.append(row)
        most.append(len(now))
        time.sleep(0.02)
        now.remove(row)
        return Outcome(state="" if action != "describe" else ABSENT if most.count(1) < 2 else "ACTIVE"), ()

    monkeypatch.setattr("launch.slices._act", act)
    launch(*QUEUED, "--seeds=4", "--at-once=2", "--adopt")
    assert max(most) == 2


@pytest.mark.parametrize(
    "asked, type, hosts",
    [
        ("v5litepod-8", "v5litepod-8", 1),
        ("v5e:4x4", "v5litepod-16", 4),
        ("v4:2x2x2", "v4-16", 2),
        ("v6e-256", "v6e-256", 64),
        ("v5p:8x8x8", "v5p-1024", 128),
        ("TPU7x:4x4x4", "tpu7x-128", 16),
    ],
)
def test_types_and_topologies_name_the_same_slices(asked, type, hosts):
    piece = parse_slice(asked)
    assert (piece.type, piece.hosts) == (type, hosts)


@pytest.mark.parametrize("asked, hosts", [("v6e:2x4", 2), ("v5litepod-8", 2), ("v6e:2x2", 1), ("v6e:1x1", 1)])
def test_on_gke_eight_chips_are_two_machines_which_have_to_meet(stage, asked, hosts, capsys):
    assert gke.host_count(parse_slice(asked)) == hosts
    assert launch(*GKE, f"--accelerator={asked}", "--dry-run") == 0
    assert ("--env=LM_COORDINATOR=auto" in capsys.readouterr().out) == (hosts > 1)


def test_a_type_before_a_topology_names_the_generation(stage, capsys):
    assert launch(*GKE, "--accelerator=v5litepod:4x4", "--dry-run") == 0
    assert "--tpu-type=v5litepod-4x4" in capsys.readouterr().out


@pytest.mark.parametrize(
    "asked, machine",
    [("v6e:2x4", "ct6e-standard-8t"), ("v6e:4x4", "ct6e-standard-4t"), ("v6e:1x1", "ct6e-standard-1t")],
)
def test_a_slice_of_one_host_is_one_machine_with_all_chips(asked, machine):
    assert parse_slice(asked).machine == machine


@pytest.mark.parametrize("api, name", [("gce", "v5p:4x4x8"), ("queued", "v4:4x4x8"), ("queued", "v5p:4x4x8")])
def test_a_slice_has_the_shape_that_was_planned(api, name):
    request = Request("x", parse_slice(name), "p", Machines(("us-east5-a",)))
    commands = {"gce": gce, "queued": queued}[api].create(request, "us-east5-a")
    words = [word.partition("=")[2] for word in commands[0] if "topology=" in word]
    assert words == ["4x4x8"]


def request(name: str, slices: int = 1, **machines) -> Request:
    return Request("x", parse_slice(name), "p", Machines(("us-east5-a",), **machines), slices)


@pytest.mark.parametrize(
    "option, template, connection",
    [
        ({"access": "internal"}, "--no-address", "--internal-ip"),
        ({"access": "iap"}, "--no-address", "--tunnel-through-iap"),
        ({"subnetwork": "s"}, "--subnet=projects/p/regions/us-east5/subnetworks/s", None),
        ({"network": "n"}, "--network=n", None),
        ({"service_account": "a@p"}, "--service-account=a@p", None),
        ({"labels": ("team=nlp",)}, "--labels=launcher=lm,team=nlp", None),
        ({"max_run_time": "12h"}, "--max-run-duration=12h", None),
        ({"provisioning": "reservation:r"}, "--reservation=r", None),
    ],
)
def test_an_option_of_the_machines_is_in_the_template_and_in_the_connection(option, template, connection):
    asked = request("v6e:4x4", **option)
    assert template in gce.create(asked, "us-east5-a")[1]
    if connection:
        assert connection in gce.run(asked, "us-east5-a", ["h"], "true")[0]
        assert connection in gce.copy(asked, "us-east5-a", ["h"], "a", "b")[0]


def test_libtpu_hides_the_latency_of_collectives_unless_told_otherwise():
    options = container.Container(IMAGE, "v5e:4x4")
    assert container.environment_variables(options, 4, 1)["LIBTPU_INIT_ARGS"] == libtpu_flags(1)
    assert set(libtpu_flags(1).split()) < set(libtpu_flags(2).split())
    none = container.Container(IMAGE, "v5e:4x4", libtpu_flags="")
    assert container.environment_variables(none, 4, 1) == {"LM_COORDINATOR": "auto"}


# (words, a part that the commands must have)
LINTED = [
    (GCE, "--accelerator-topology=4x4"),
    (
        [*GCE, "--accelerator=v5p:2x2x1", "--provisioning=spot", "--labels", "team=nlp"],
        "--provisioning-model=SPOT",
    ),
    ([*GCE, "--accelerator=tpu7x:4x4x4", "--provisioning=flex-start", "--max-run-time=2d"], "FLEX_START"),
    (
        [*GCE, "--provisioning=reservation:r", "--access=iap", "--network=n", "--subnetwork=s"],
        "--reservation=r",
    ),
    ([*GCE, "--service-account=a@p", "--max-run-time=12h", "--access=internal"], "--no-address"),
    ([*QUEUED, "--slices-per-run=2", "--provisioning=spot", "--mesh.slice", "2"], "--node-count=2"),
    ([*QUEUED, "--accelerator=v4:2x2x4", "--service-account=a@p", "--access=iap"], "--topology=2x2x4"),
    ([*QUEUED, "--accelerator=v5p:2x2x4", "--provisioning=reservation:r"], "--type=v5p"),
    ([*QUEUED, "--provisioning=flex-start", "--max-run-time=2d", "--network=n"], "--max-run-duration=2d"),
    (["list"], "queued-resources list"),
]
# What gcloud has learnt since the oldest release that the test should pass with.
NEWER = {" --target-size-policy-mode=bulk": "", "=FLEX_START": "=SPOT"}


@pytest.fixture
def printed(stage, capsys):
    """Every command that LINTED prints."""
    lines = []
    for words, part in LINTED:
        assert launch(*words, "--project=p", "--dry-run") == 0
        out = capsys.readouterr().out
        assert part in out
        lines += [line for line in out.splitlines() if line.startswith("gcloud ")]
    assert not stage.calls()
    return [*dict.fromkeys(lines)]


@pytest.mark.slow
def test_the_real_gcloud_accepts_every_command(stage, printed):
    real = shutil.which("gcloud", path=os.environ["PATH"].split(":", 1)[1])
    if not real:
        pytest.skip("the Google Cloud SDK is not installed")

    def faults(lines: list[str]) -> dict[str, str]:
        file = stage.folder / "commands.json"
        file.write_text(json.dumps([{"command_string": line} for line in lines]))
        lint = [real, "meta", "lint-gcloud-commands", f"--commands-file={file}", "--format=json"]
        own = os.environ | {"CLOUDSDK_CONFIG": str(stage.folder)}
        judged = json.loads(subprocess.run(lint, capture_output=True, env=own).stdout.splitlines()[0])
        assert len(judged) == len(lines)
        return {
            line: each["error_message"]
            for line, each in zip(lines, judged, strict=True)
            if not each["success"]
        }

    older = []
    for line in faults(printed):
        for new, old in NEWER.items():
            line = line.replace(new, old)
        older.append(line)
    assert not older or not faults(older)


def test_the_real_xpk_accepts_every_command(stage, capsys):
    xpk = shutil.which("xpk")
    if not xpk:
        pytest.skip("xpk is not installed")
    for accelerator in ("tpu7x:2x2x4", "v5p:4x4x4", "v6e:4x4", "v5litepod-16", "v4:2x2x4"):
        words = ["gke", ROW, f"--accelerator={accelerator}", "--cluster=c", "--slices=2", *CLOUD]
        assert launch(*words, "--zone=us-east5-a", "--project=p", "--provisioning=spot", "--dry-run") == 0
        command = shlex.split(capsys.readouterr().out)
        done = subprocess.run([*command, "--dry-run"], capture_output=True, text=True)
        assert done.returncode == 0, done.stdout + done.stderr
        assert "kind: JobSet" in done.stdout and "--mesh.slice 2" in done.stdout


def test_a_run_on_gke_is_one_command_with_image_shape_and_grace(stage, capsys):
    words = [*GKE, "--slices=2", "--dry-run"]
    assert launch(*words) == 0
    out = capsys.readouterr().out
    for part in (
        "xpk workload create --workload=lm-t5-6-",
        "--tpu-type=tpu7x-2x2x4 --num-slices=2",
        f"--docker-image={IMAGE}",
        "--env=LM_COORDINATOR=auto",
        "exec lm run t5/6-corruption-rate/15 --scale base --runs /gs/b/r --mesh.slice 2",
    ):
        assert part in out
    assert launch(*words, "--provisioning=sometimes") == 2


def test_an_image_is_built_from_the_containerfile_and_pushed(stage, capsys):
    assert launch("image", IMAGE, "--dry-run") == 0
    assert capsys.readouterr().out.splitlines() == [
        f"docker build --file=Containerfile '--build-arg=EXTRA=[tpu]' --tag={IMAGE} .",
        f"docker push {IMAGE}",
    ]
    stage.play(docker='#!/bin/bash\necho "$1" >> "$0.calls"; exit 7\n')
    assert launch("image", IMAGE) == 7 and (stage.folder / "docker.calls").read_text() == "build\n"
    for option in ((), ("--dry-run",)):
        assert launch("image", IMAGE, "--source=/nonexistent", *option) == 2
        assert "it has no Containerfile" in capsys.readouterr().err


def test_what_is_there_is_deleted_by_name_and_a_name_that_is_not_is_refused(stage, capsys):
    queue, group = "lm-t5-a-0123ab us-west4-a", "lm-t5-b-0123ab us-east5-a"
    stage.record(list=[(0, queue, ""), (0, "", ""), (0, group, "")] * 2 + [(0, "", "")])
    assert launch("delete", "lm-t5-c-0123ab") == 2
    assert "there is no lm-t5-c-0123ab; did you mean lm-t5-" in capsys.readouterr().err
    assert "delete" not in stage.calls()
    assert launch("delete", "--all") == 0
    out = capsys.readouterr().out
    assert "queued-resources delete lm-t5-a-0123ab --quiet --zone=us-west4-a --project=mine --force" in out
    assert "instance-templates delete lm-t5-b-0123ab --quiet --region=us-east5" in out
    assert stage.calls().endswith(f"delete list list {DELETE}")
    assert launch("list") == 0 and "none of ours" in capsys.readouterr().out


def test_a_misspelt_name_beside_a_right_one_deletes_nothing(stage, capsys):
    queue = "lm-t5-a-0123ab us-west4-a"
    stage.record(list=[(0, queue, ""), (0, "", ""), (0, "", "")] * 3)
    assert launch("delete", "lm-t5-a-0123ab", "lm-t5-a-0123ac") == 2
    assert "there is no lm-t5-a-0123ac; did you mean lm-t5-a-0123ab?" in capsys.readouterr().err
    assert "delete" not in stage.calls()
    assert launch("delete", "lm-t5-a-0123ab") == 0
    assert stage.calls().count("delete") == 1


def test_a_host_is_counted_only_when_it_runs(stage):
    asked = Request("x", Slice("v6e", "4x4", 16), "p", Machines(("z",)))

    def state(*given, **named) -> str:
        return gce.parse_status(asked, stage.group(*given, **named)[1]).state

    assert state(*UP) == "ACTIVE"
    assert state(*UP[:3]) == state(*UP, action="CREATING") == state() == "PROVISIONING"
    assert state(*UP[:3], "STOPPING") == "PREEMPTED"
    assert state(*UP, action="DELETING") == "DELETING"
    short = {"action": "CREATING", "fault": "ZONE_RESOURCE_POOL_EXHAUSTED"}
    assert state("", "", "", "", **short) == "PROVISIONING"


def test_a_deletion_that_a_signal_ended_is_no_success(stage, monkeypatch):
    queue, none = (0, "lm-t5-a-0123ab us-west4-a", ""), (0, "", "")
    stage.record(list=[queue, none, none])
    monkeypatch.setattr("launch.resources.gcloud.call", killed_in("delete"))
    assert launch("delete", "--all") not in (0, None)


def killed_in(verb: str):
    """``gcloud.call``, whose command with this verb a signal ends."""
    call = gcloud.call
    return lambda command: Outcome(-9) if verb in command else call(command)

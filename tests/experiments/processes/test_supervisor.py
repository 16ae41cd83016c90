"""Supervisors of several processes: who is gone is named, the cause of an end is not its consequences."""

import os
import signal
import socket
import sys
import threading
import time
from pathlib import Path

import pytest
from pair import ends, start
from paths import SUPPORT
from waiting import gone, wait_for

from experiments.processes.exit_codes import Ended
from experiments.processes.line import Line
from experiments.processes.meeting import Meeting, listen, proof
from experiments.processes.place import Place
from experiments.processes.supervisor import ABORTED, Supervisor
from lm.train.runtime.log import records


@pytest.mark.slow
@pytest.mark.parametrize(
    ("who", "how"),
    [("supervisor", signal.SIGKILL), ("supervisor", signal.SIGSTOP), ("trainer", signal.SIGKILL)],
)
@pytest.mark.parametrize("victim", [0, 1])
def test_when_a_process_vanishes_the_others_end_in_time_and_name_it(tmp_path, victim, how, who):
    started = start(SUPPORT / "pair.py", "forever", tmp_path, LM_HEARTBEAT="8")
    while len(records(tmp_path / "forever")) < 3:
        assert all(process.poll() is None for process in started)
        time.sleep(0.2)
    pid = started[victim].pid
    target = pid if who == "supervisor" else int(Path(f"/proc/{pid}/task/{pid}/children").read_text())
    before = time.monotonic()
    os.kill(target, how)
    ((code, said),) = ends([started[1 - victim]])
    took = time.monotonic() - before
    started[victim].kill()
    assert (code, took < 20) == (42, True), said
    assert f"process {victim} of 2 on {socket.gethostname()} " in said


def test_a_process_that_does_not_come_is_named():
    missing = "of 3 did not come to localhost within 1 s; LM_PROCESSES=1 runs each alone"
    for one, others in ((1, "0"), (0, "1, 2")):
        started = start(SUPPORT / "pair.py", "forever", "/nowhere", only=[one], count=3, LM_START_TIMEOUT="1")
        assert ends(started) == [(1, f"lm: process {others} {missing}")]


@pytest.mark.parametrize("code", [1, 2, 3])
def test_all_end_with_the_exit_code_of_the_one_that_failed_though_the_others_then_crash(tmp_path, code):
    started = start(SUPPORT / "pair.py", "trainer", code, FAILED=str(tmp_path / "failed"))
    (first, _), (second, said) = ends(started)
    assert (first, second) == (code, code), said
    assert f"process 0 of 2 on {socket.gethostname()} ended with exit code {code}" in said


def supervisor_of(index):
    ours, theirs = socket.socketpair()
    supervisor = Supervisor(Place("h", 5, 2, index))
    supervisor.begin(0, Line(ours))
    supervisor.meeting.lines = {0: Line(theirs)} if index else {}
    return supervisor


@pytest.mark.parametrize(
    ("events", "code"),
    [
        ([(None, 1, ""), (0, 42, "is gone")], 42),  # an exception may be the message that another is gone
        ([(None, 3, ""), (0, 42, "is gone")], 3),  # a loss that is not finite is not
        ([(None, ABORTED, "was killed by SIGABRT"), (0, 2, "")], 2),
        ([(0, 1, ""), (None, 137, "was killed by SIGKILL")], 137),
        ([(0, 2, ""), (None, 2, "")], 2),
    ],
)
def test_what_may_follow_from_another_end_gives_way_to_it(events, code):
    supervisor = supervisor_of(1)
    try:
        for index, *how in events:
            supervisor._trainer_ends(*how) if index is None else supervisor._other_ends(index, *how)
        verdict = supervisor.verdict[1]
    except Ended as ended:
        verdict = ended
    assert verdict.code == code


def staying():
    """Two trainers that do not end by themselves: their processes, and the workers' ids."""
    started = start(SUPPORT / "pair.py", "trainer", "stays")
    return started, [int(each.stdout.readline()) for each in started]


def test_a_second_signal_ends_a_trainer_that_does_not_heed_the_first_and_all_that_it_started():
    started, workers = staying()
    for wait in (2.5, 0):
        started[1].send_signal(signal.SIGINT)
        time.sleep(wait)
    (first, said), (second, _) = ends(started)
    assert (first, second) == (42, 42), said
    assert end(workers)


def test_a_trainer_and_its_workers_do_not_outlive_the_supervisor():
    started, workers = staying()
    started[0].kill()
    ends(started)
    assert end(workers)


def end(workers):
    """Whether they do, in a moment."""
    return wait_for(lambda: all(map(gone, workers)), 5.0)


@pytest.mark.slow
def test_a_trainer_that_hangs_when_all_are_done_is_ended():
    before = time.monotonic()
    assert [code for code, _ in ends(start(SUPPORT / "pair.py", "trainer", "done"))] == [0, 0]
    assert 12 < time.monotonic() - before < 30


@pytest.mark.parametrize(
    ("missing", "but", "code"), [([], {}, 42), ([1], {"proof": "another's"}, 2), ([1], {"count": 9}, 2)]
)
def test_who_comes_again_is_to_start_again_and_who_does_not_belong_is_told_so(missing, but, code):
    meeting, (ours, theirs) = Meeting(Place("h", 5, 2, 0), 9.0), socket.socketpair()
    meeting.hosts[1] = "there"
    told = {"index": 1, "count": 2, "host": "there", "proof": proof()} | but
    ours.settimeout(5)
    Line(ours).send({"hello": [*told.values()]})
    meeting.take_in(Line(theirs), missing)
    told = Line(ours).next()
    assert told["code"] == code and not any(word in told["refused"] for word in sys.argv[1:])


@pytest.mark.parametrize(
    "sent",
    [b"[" * 99_999, b"{" * 9_999 + b"\n", b"GET / HTTP/1.1\n", b"[]\n", b'{"hello": 1}\n', b"[[[\n" * 999],
)
def test_a_stranger_at_the_door_is_not_answered_and_holds_nobody_up(sent):
    meeting, (ours, theirs) = Meeting(Place("h", 5, 2, 0), 9.0), socket.socketpair()
    ours.settimeout(5)
    threading.Thread(target=ours.sendall, args=[sent], daemon=True).start()
    before = time.monotonic()
    meeting.take_in(Line(theirs), [1])
    theirs.shutdown(socket.SHUT_WR)
    assert meeting.lines == {} and ours.recv(9) == b"" and time.monotonic() < before + 3


def test_one_who_says_a_letter_at_a_time_is_not_waited_for():
    meeting, (ours, theirs) = Meeting(Place("h", 5, 2, 0), 9.0), socket.socketpair()
    over = threading.Event()

    def drip():
        while not over.wait(0.2):
            ours.sendall(b" ")

    threading.Thread(target=drip, daemon=True).start()
    before = time.monotonic()
    meeting.take_in(Line(theirs), [1])
    over.set()
    assert time.monotonic() < before + 3


def test_only_who_knows_the_secret_belongs(monkeypatch):
    meeting, (ours, theirs) = Meeting(Place("h", 5, 2, 0), 9.0), socket.socketpair()
    Line(ours).send({"hello": [1, 2, "there", proof()]})
    monkeypatch.setenv("LM_SECRET", "a secret")
    meeting.take_in(Line(theirs), [1])
    assert meeting.lines == {} and "another command or LM_SECRET" in Line(ours).next()["refused"]


@pytest.mark.parametrize(
    "host, all", [("127.0.0.1", False), ("localhost", False), ("no-such-host.invalid", True)]
)
def test_the_door_is_at_the_address_given(host, all):
    with listen(host, 0) as door:
        assert (door.getsockname()[0] in ("0.0.0.0", "::")) == all


def test_values_come_whole_though_their_pieces_do_not():
    ours, theirs = socket.socketpair()
    threading.Timer(0.2, ours.sendall, [b"1}\n"]).start()
    ours.sendall(b'{"a": ')
    assert Line(theirs).next() == {"a": 1}


def test_no_value_is_lost_that_comes_together_with_another():
    ours, theirs = socket.socketpair()
    ours.sendall(b'{"a": 1}\n{"b": 2}\n')
    ours.close()
    line = Line(theirs)
    assert [line.next(), line.receive(), line.receive()] == [{"a": 1}, [{"b": 2}], None]


def test_a_signal_ends_at_once_what_has_nothing_to_save():
    started = start(SUPPORT / "pair.py", "trainer", "prepares")
    workers = [int(each.stdout.readline()) for each in started]
    before = time.monotonic()
    started[1].send_signal(signal.SIGINT)
    (first, said), (second, _) = ends(started)
    assert (first, second) == (42, 42) and time.monotonic() - before < 10
    assert "process 1 of 2" in said and "was stopped by SIGINT" in said
    assert end(workers)

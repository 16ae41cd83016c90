"""Joining other processes with jax.distributed, and what ends those whose peer is gone."""

import os
import signal
import socket
import subprocess
import sys
import time

import jax
import pytest
from pair import ends, start
from paths import ROOT, SUPPORT

from experiments.processes import cluster
from lm.config.base import SettingError
from lm.train.runtime.records import records

EXPLICIT = {"LM_COORDINATOR": "h:5", "LM_PROCESSES": "3", "LM_PROCESS": "1"}
STEP = {"SLURM_STEP_NODELIST": "node[07-10,12],big", "SLURM_STEP_NUM_TASKS": "4"}


def test_explicit_settings_become_the_arguments_of_jax_and_jax_listens_to_other_machines_only_if_it_must():
    found = cluster.cluster_arguments(EXPLICIT)
    assert found == {
        "coordinator_address": "h:5",
        "num_processes": 3,
        "process_id": 1,
        "cluster_detection_method": "deactivate",
    }
    here = cluster.cluster_arguments(EXPLICIT | {"LM_COORDINATOR": "127.0.0.1:5"})
    assert here["coordinator_bind_address"] == "127.0.0.1:5"
    assert cluster.cluster_arguments({}) == cluster.cluster_arguments({"LM_COORDINATOR": "auto"}) == {}


@pytest.mark.parametrize(
    ("changed", "message"),
    [
        ({"LM_COORDINATOR": "h"}, "LM_COORDINATOR=h should be host:port"),
        ({"LM_COORDINATOR": "h:65536"}, "LM_COORDINATOR=h:65536 should be host:port"),
        ({"LM_PROCESSES": "many"}, "LM_PROCESSES=many should be a number"),
        ({"LM_PROCESS": "3"}, "LM_PROCESS=3 should be below LM_PROCESSES=3"),
    ],
)
def test_an_explicit_setting_that_cannot_be_is_refused(changed, message):
    with pytest.raises(SettingError, match=message):
        cluster.cluster_arguments(EXPLICIT | changed)


def test_an_explicit_setting_that_is_missing_is_said_not_to_be_set():
    with pytest.raises(SettingError, match="LM_PROCESSES, which is not set, should be a number"):
        cluster.cluster_arguments({"LM_COORDINATOR": "h:5"})


@pytest.mark.parametrize("one", [EXPLICIT | {"LM_PROCESSES": "1"}, STEP | {"SLURM_STEP_NUM_TASKS": "1"}])
def test_where_the_environment_says_that_there_is_one_process_jax_is_not_asked(monkeypatch, one):
    """A Slurm step of one task is also the shell of an allocation."""
    for name, value in one.items():
        monkeypatch.setenv(name, value)
    monkeypatch.setattr(jax.distributed, "initialize", lambda **_: pytest.fail("jax was asked"))
    assert not cluster.join_others()


def test_one_process_is_alone_where_jax_detects_no_cluster_unless_it_should_be_in_one(monkeypatch):
    for name in {*EXPLICIT, *STEP} & {*os.environ}:
        monkeypatch.delenv(name)
    monkeypatch.setattr(jax.config, "update", lambda *_: None)

    def detect(**arguments):
        assert arguments["heartbeat_timeout_seconds"] == 30 and "coordinator_address" not in arguments
        raise ValueError("coordinator_address should be defined.")

    monkeypatch.setattr(jax.distributed, "initialize", detect)
    before = signal.signal(signal.SIGTERM, heed := lambda *_: None)
    try:
        assert not cluster.join_others()
        assert signal.getsignal(signal.SIGTERM) == heed
    finally:
        signal.signal(signal.SIGTERM, before)
    for name, value in {"LM_COORDINATOR": "auto", "OMPI_COMM_WORLD_SIZE": "2"}.items():
        with monkeypatch.context() as changed, pytest.raises(SettingError, match="jax detects neither"):
            changed.setenv(name, value)
            cluster.join_others()


def test_a_port_that_is_taken_is_named_where_jax_would_crash(monkeypatch):
    with socket.create_server(("localhost", 0)) as taken:
        port = taken.getsockname()[1]
        for name, value in EXPLICIT.items():
            monkeypatch.setenv(name, value)
        monkeypatch.setenv("LM_COORDINATOR", f"localhost:{port}")
        monkeypatch.setenv("LM_PROCESS", "0")
        with pytest.raises(SettingError, match=f"LM_COORDINATOR=localhost:{port} should be a free port"):
            cluster.join_others()


def test_processes_that_do_not_meet_end_in_time_and_say_so():
    for index in (0, 1):
        started = start(
            SUPPORT / "pair.py", "forever", "/nowhere", only=[index], count=3, LM_START_TIMEOUT="2"
        )
        ((code, said),) = ends(started)
        assert code == 1 and said.startswith(f"lm: process {index} of 3 and the others did not meet at "), (
            said
        )
        assert "within 2 s (LM_START_TIMEOUT); LM_PROCESSES=1 runs each alone" in said


WAITS = """
import ctypes, jax, signal, sys
from experiments.processes import cluster

def wait(**_):
    print("waits", flush=True)
    mutex = ctypes.create_string_buffer(64)
    for _ in range(2):  # the second does not return, and runs no handler of Python's
        ctypes.CDLL(None).pthread_mutex_lock(mutex)

signal.signal(signal.SIGTERM, lambda *_: sys.exit(42))
jax.distributed.initialize = wait
cluster.join_others()
"""


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT])
def test_a_signal_ends_a_process_at_once_that_waits_in_jax_for_others(number):
    process = subprocess.Popen([sys.executable, "-c", WAITS], cwd=ROOT, stdout=subprocess.PIPE, text=True)
    assert process.stdout.readline() == "waits\n"
    process.send_signal(number)
    assert process.wait(20) == -number


@pytest.mark.slow
@pytest.mark.parametrize("how", [signal.SIGKILL, signal.SIGSTOP])
@pytest.mark.parametrize("victim", [0, 1])
def test_when_a_process_vanishes_the_others_end_within_the_heartbeat(tmp_path, victim, how):
    """By jax, which aborts them, or as a collective fails."""
    started = start(SUPPORT / "pair.py", "forever", tmp_path, LM_HEARTBEAT="8")
    while len(records(tmp_path / "forever")) < 3:
        assert all(process.poll() is None for process in started)
        time.sleep(0.2)
    before = time.monotonic()
    started[victim].send_signal(how)
    ((code, said),) = ends([started[1 - victim]])
    took = time.monotonic() - before
    started[victim].kill()
    assert code in (-signal.SIGABRT, 1) and took < 20, (code, took, said)

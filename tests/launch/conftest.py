"""The fake programs of ``launching``, as a fixture."""

import os
import signal

import pytest
from launching import Stage

from launch import local, policy

HANDLED = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)


@pytest.fixture
def stage(tmp_path, monkeypatch):
    """The fakes, without any pause between two calls; the handlers of signals are put back afterwards."""
    monkeypatch.setenv("PATH", f"{tmp_path}:{os.environ['PATH']}")
    monkeypatch.delenv("LM_STUDY", raising=False)
    monkeypatch.setattr(policy, "POLL_INTERVAL", 0.0)
    for module in (policy, local):
        monkeypatch.setattr(module, "pause", lambda failures, first: 0.0)
    before = {number: signal.getsignal(number) for number in HANDLED}
    yield Stage(tmp_path)
    for number, handler in before.items():
        signal.signal(number, handler)

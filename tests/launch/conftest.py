"""A folder of programs that play recorded answers: gcloud, lm and what a test adds."""

import json
import os
import signal
import subprocess
import sys
import threading
from pathlib import Path

import pytest
from waiting import wait_for

from launch import local, policy

HERE = Path(__file__).parent


class Stage:
    """The fake programs, first on PATH."""

    absent = (
        1,
        "",
        "ERROR: (gcloud.compute.tpus.queued-resources.describe) NOT_FOUND: Resource was not found.",
    )

    def __init__(self, folder: Path):
        self.folder = folder
        self.play(gcloud=(HERE / "fake_gcloud.py").read_text(), lm=(HERE / "fake_lm.sh").read_text())
        self.record()

    def play(self, **programs: str) -> None:
        """Put programs on PATH; the first line of each names its interpreter."""
        for name, text in programs.items():
            (self.folder / name).write_text(text.replace("#!python", f"#!{sys.executable} -SE"))
            (self.folder / name).chmod(0o755)

    def record(self, **answers: list) -> None:
        """What gcloud answers to each verb, one call after another: (exit code, output, error)."""
        kinds = [
            {"name": f"projects/p/locations/z/acceleratorTypes/{name}"} for name in ("v5litepod-16", "v6e-8")
        ]
        usual = {
            "auth": [(0, "me@x.org", "")],
            "config": [(0, "mine", "")],
            "types": [(0, json.dumps(kinds), "")],
        }
        usual["describe"] = [self.absent, self.queue("ACTIVE")]
        (self.folder / "answers").write_text(json.dumps(usual | answers))

    @staticmethod
    def queue(state: str, message: str = "") -> tuple:
        """What describe answers of a queued resource."""
        return (0, json.dumps({"state": {"state": state, "failedData": {"error": {"message": message}}}}), "")

    def calls(self) -> str:
        """The verbs that gcloud was called with."""
        path = self.folder / "calls"
        return path.read_text().replace("\n", " ") if path.exists() else ""

    def send(self, number: int, when) -> None:
        """Send this process a signal as soon as something is true."""

        def wait() -> None:
            if wait_for(when):
                os.kill(os.getpid(), number)

        threading.Thread(target=wait).start()


@pytest.fixture(scope="session")
def source(tmp_path_factory):
    """A checkout of what the launcher needs of the project."""
    folder = tmp_path_factory.mktemp("source")
    (folder / "launch").mkdir()
    for name in ("pyproject.toml", "constraints.txt", "launch/worker.sh"):
        (folder / name).touch()
    subprocess.run(["git", "init", "-q", folder], check=True)
    return folder


@pytest.fixture
def stage(tmp_path, monkeypatch, source):
    """The fakes, without any pause between two calls; the handlers of signals are put back afterwards."""
    monkeypatch.chdir(source)
    monkeypatch.setenv("PATH", f"{tmp_path}:{os.environ['PATH']}")
    monkeypatch.setattr(policy, "LOOK_EVERY", 0.0)
    for module in (policy, local):
        monkeypatch.setattr(module, "pause", lambda failures, first: 0.0)
    before = {number: signal.getsignal(number) for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)}
    yield Stage(tmp_path)
    for number, handler in before.items():
        signal.signal(number, handler)

"""A folder of programs that play recorded answers: gcloud, lm and what a test adds."""

import json
import os
import signal
import sys
import threading
from pathlib import Path

from waiting import wait_for

from experiments import __main__ as cli

FAKES = Path(__file__).parents[1] / "launch"
IMAGE = "us-docker.pkg.dev/p/lm/lm:1"
CLOUD = [f"--image={IMAGE}", "--runs=gs://b/r", "--scale=base"]


class Stage:
    """The fake programs, first on PATH."""

    absent = (1, "", "ERROR: (gcloud.compute) NOT_FOUND: Resource was not found.")

    def __init__(self, folder: Path):
        self.folder = folder
        self.play(gcloud=(FAKES / "fake_gcloud.py").read_text(), lm=(FAKES / "fake_lm.sh").read_text())
        self.record()

    def play(self, **programs: str) -> None:
        """Put programs on PATH; the first line of each names its interpreter."""
        for name, text in programs.items():
            (self.folder / name).write_text(text.replace("#!python", f"#!{sys.executable} -SE"))
            (self.folder / name).chmod(0o755)

    def record(self, **answers: list) -> None:
        """What gcloud answers to each verb, one call after another: (exit code, output, error)."""
        usual = {
            "auth": [(0, "me@x.org", "")],
            "config": [(0, "mine", "")],
            "offers": [(0, "v5litepod-16\nv6e-8\nct6e-standard-4t\nct5p-hightpu-4t", "")],
            "describe": [self.absent, self.queue("ACTIVE")],
        }
        verbs = {verb.replace("_", "-"): given for verb, given in answers.items()}
        (self.folder / "answers").write_text(json.dumps(usual | verbs))

    @staticmethod
    def queue(state: str, message: str = "") -> tuple:
        """What is answered of a queued resource."""
        return (0, json.dumps({"state": {"state": state, "failedData": {"error": {"message": message}}}}), "")

    @staticmethod
    def group(*states: str, action: str = "NONE", fault: str = "") -> tuple:
        """What is answered of the hosts of a managed instance group."""
        errors = {"errors": {"errors": [{"code": fault, "message": "sorry"}]}} if fault else {}
        hosts = [
            {
                "instance": f"projects/p/zones/z/instances/host-{number}",
                "instanceStatus": state,
                "currentAction": action,
                "lastAttempt": errors,
            }
            for number, state in enumerate(states)
        ]
        return (0, json.dumps(hosts), "")

    def calls(self, zones: bool = False) -> str:
        """The verbs that gcloud was called with, and the zones if asked."""
        path = self.folder / "calls"
        lines = path.read_text().splitlines() if path.exists() else []
        return " ".join(line.strip().replace(" ", "@") if zones else line.split()[0] for line in lines)

    def send(self, number: int, when) -> None:
        """Send this process a signal as soon as something is true, and only while a launcher handles it."""

        def wait() -> None:
            unhandled = (signal.SIG_DFL, signal.default_int_handler)
            if wait_for(when) and signal.getsignal(number) not in unhandled:
                os.kill(os.getpid(), number)

        threading.Thread(target=wait).start()


def launch(*words: str) -> int:
    """The exit code of ``lm launch``."""
    try:
        return cli.dispatch(["launch", *words])
    except SystemExit as end:
        return end.code

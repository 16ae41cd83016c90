"""What is started: ``lm run NAME ...``; ``lm`` itself is called to list the rows."""

import difflib
import hashlib
import re
import shutil
import subprocess
import sys
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path


class LaunchError(Exception):
    """Something that the user can mend, said before anything is paid for."""


@dataclass(frozen=True)
class Job:
    """One row: ``lm run name --scale scale --runs runs extra...``."""

    name: str
    scale: str
    runs: str
    extra: tuple[str, ...]

    def arguments(self) -> list[str]:
        return ["run", self.name, "--scale", self.scale, "--runs", self.runs, *self.extra]


def label(*jobs: Job) -> str:
    """A name that clouds and queues accept (63 of a-z0-9-), the same whenever the same jobs are started."""
    words = "\0".join(word for job in jobs for word in job.arguments())
    name = re.sub("[^a-z0-9]+", "-", jobs[0].name.lower())[:36].strip("-")
    return f"lm-{name}-{hashlib.sha256(words.encode()).hexdigest()[:6]}"


def closest(name: str, known: Iterable[str]) -> str:
    """``; did you mean ...?``, or nothing if no spelling is close."""
    close = difflib.get_close_matches(name, list(known), n=1, cutoff=0.5)
    return f"; did you mean {close[0]}?" if close else ""


def program_path(program: str, remedy: str) -> str:
    """Path of a command; if it is not here an error that says the remedy."""
    beside = Path(sys.executable).with_name(program)  # in a virtual environment that is not activated
    path = shutil.which(program) or (str(beside) if beside.exists() else None)
    if path is None:
        raise LaunchError(f"the command {program} is not on PATH: {remedy}")
    return path


def jobs(patterns: Sequence[str], scale: str, runs: str, extra: Sequence[str]) -> list[Job]:
    """A job for each row that the patterns mean; ``lm`` says which, and refuses what it does not know."""
    if early := {word.partition("=")[0] for word in extra} & {"--scale", "--runs"}:
        raise LaunchError(
            f"{' and '.join(sorted(early))} should stand before --, as lm-launch goes by it too"
        )
    lm, names = program_path("lm", "install the project here (pip install -e .); it knows the rows"), []
    for pattern in patterns:
        answer = subprocess.run([lm, "list", pattern, "--names"], capture_output=True, text=True)
        if answer.returncode:
            raise LaunchError(answer.stderr.strip().removeprefix("lm: "))
        names += answer.stdout.split()
    return [Job(name, scale, runs, tuple(extra)) for name in dict.fromkeys(names)]

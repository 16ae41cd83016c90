"""What is started: ``lm run NAME ...``; ``lm`` itself is called to list the rows."""

import difflib
import hashlib
import os
import re
import shutil
import subprocess
import sys
from argparse import Namespace
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path


class LaunchError(Exception):
    """Something that the user can mend, said before anything is paid for."""


@dataclass(frozen=True)
class Job:
    """One row: ``lm run name [--scale scale] --runs runs extra... --study FILE ...``."""

    name: str
    scale: str
    runs: str
    extra: tuple[str, ...]
    studies: tuple[str, ...] = ()  # modules of the user's own

    def arguments(self) -> list[str]:
        own = [word for file in self.studies for word in ("--study", file)]
        scale = ["--scale", self.scale] if self.scale else []  # else that of lm run
        return ["run", self.name, *scale, "--runs", self.runs, *self.extra, *own]


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


def own_modules(given: Sequence[Path]) -> tuple[str, ...]:
    """Paths of the user's modules, those of LM_STUDY if none is given."""
    files = given or [Path(name) for name in os.environ.get("LM_STUDY", "").split(os.pathsep) if name]
    for file in files:
        if not file.is_file():
            raise LaunchError(f"--study {file} does not exist; name a Python file such as my_rows.py")
    return tuple(str(file.absolute()) for file in files)


def jobs(options: Namespace, extra: Sequence[str]) -> list[Job]:
    """A job for each row that the names mean; ``lm`` says which, and refuses what it does not know."""
    if early := {word.partition("=")[0] for word in extra} & {"--scale", "--runs", "--study"}:
        raise LaunchError(
            f"{' and '.join(sorted(early))} should stand before --, as lm-launch goes by it too"
        )
    lm, names = program_path("lm", "install the project here (pip install -e .); it knows the rows"), []
    studies = own_modules(options.study)
    own = os.environ | {"LM_STUDY": os.pathsep.join(studies)}
    for pattern in options.names:
        answer = subprocess.run([lm, "list", pattern, "--names"], capture_output=True, text=True, env=own)
        if answer.returncode:
            raise LaunchError(answer.stderr.strip().removeprefix("lm: "))
        names += answer.stdout.split()
    shared = options.scale, options.runs, tuple(extra), studies
    return [Job(name, *shared) for name in dict.fromkeys(names)]

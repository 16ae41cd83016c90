"""Holds the job that is started, ``lm run ROW ...``, names it where it runs, and checks its options."""

import difflib
import hashlib
import re
import shutil
import sys
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path


class LaunchError(Exception):
    """Something that the user can mend, said before anything is paid for."""


@dataclass(frozen=True)
class Job:
    """One run: ``lm run name words... --runs runs --study FILE ...``."""

    name: str
    runs: str
    words: tuple[str, ...] = ()  # scale, settings and other options of lm run
    studies: tuple[str, ...] = ()  # modules of the user's own

    def arguments(self) -> list[str]:
        """Return the words behind ``lm`` that start the run."""
        own = [word for file in self.studies for word in ("--study", file)]
        return ["run", self.name, *self.words, "--runs", self.runs, *own]


def label(*jobs: Job) -> str:
    """Return a name that clouds and queues accept, the same whenever the same jobs are started.

    It has at most 40 characters of a-z0-9-, since GKE adds to it.
    """
    words = "\0".join(word for job in jobs for word in job.arguments())
    name = re.sub("[^a-z0-9]+", "-", jobs[0].name.lower())[:30].strip("-")
    return f"lm-{name}-{hashlib.sha256(words.encode()).hexdigest()[:6]}"


def closest(name: str, known: Iterable[str]) -> str:
    """Return ``; did you mean ...?``, or nothing if no spelling is close."""
    close = difflib.get_close_matches(name, list(known), n=1, cutoff=0.5)
    return f"; did you mean {close[0]}?" if close else ""


def check_at_least(least: int, **numbers: int) -> None:
    """Raise LaunchError for an option, named by its keyword, that is below ``least``."""
    for name, number in numbers.items():
        if number < least:
            raise LaunchError(f"--{name.replace('_', '-')} {number} should be a whole number from {least}")


def program_path(program: str, remedy: str) -> str:
    """Return the path of a command; LaunchError with the remedy if it is not here."""
    beside = Path(sys.executable).with_name(program)  # in a virtual environment that is not activated
    path = shutil.which(program) or (str(beside) if beside.exists() else None)
    if path is None:
        raise LaunchError(f"the command {program} is not on PATH: {remedy}")
    return path

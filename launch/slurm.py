"""``lm-launch slurm``: one job array, a task a row, that saves before its time is up and queues itself
again.
"""

import re
import shlex
import subprocess
from argparse import Namespace
from collections.abc import Sequence
from importlib.resources import files
from pathlib import Path

from launch.command import Job, find, label
from launch.policy import AGAIN, DONE, HOPELESS
from launch.processes import show


def script(jobs: Sequence[Job], asked: Namespace) -> str:
    """The sbatch script: job.sbatch with its {blanks} filled in; a line whose blank is empty or 0 is left
    out.
    """
    lm = find("lm", "install the project (pip install -e .)")
    made = {
        "name": label(*jobs),
        "last": str(len(jobs) - 1),
        "tasks": max(asked.gpus, 1),
        "commands": "\n".join("  " + shlex.quote(shlex.join([lm, *job.arguments()])) for job in jobs),
        "hopeless": " | ".join(map(str, (DONE, *HOPELESS))),
        "again": AGAIN,
    }
    blanks = {f"{{{name}}}": value for name, value in (vars(asked) | made).items()}
    lines = files("launch").joinpath("job.sbatch").read_text().splitlines(keepends=True)
    text = "".join(line for line in lines if not any(blank in line and not blanks[blank] for blank in blanks))
    # All at once: what is filled in may hold braces of its own, such as a path.
    return re.sub("|".join(map(re.escape, blanks)), lambda blank: str(blanks[blank[0]]), text)


def run(jobs: Sequence[Job], asked: Namespace) -> int:
    """Write the script into this folder and submit it; the exit code is sbatch's."""
    text, path = script(jobs, asked), Path(f"{label(*jobs)}.sbatch")
    if asked.dry_run:
        print(text)
        show(["sbatch", str(path)])
        return DONE
    find("sbatch", "start this on a machine of the Slurm cluster")
    path.write_text(text, encoding="utf-8")
    return subprocess.run(["sbatch", path]).returncode

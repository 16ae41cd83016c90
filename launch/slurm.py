"""``lm-launch slurm``: a job array, a task a row, that saves before its time is up and requeues itself."""

import re
import shlex
import subprocess
from argparse import Namespace
from collections.abc import Sequence
from importlib.resources import files
from pathlib import Path

from launch.command import Job, label, program_path
from launch.policy import AGAIN, DONE, HOPELESS
from launch.processes import show


def script(jobs: Sequence[Job], options: Namespace) -> str:
    """The sbatch script: job.sbatch with its {blanks} filled in, without lines whose blank is empty or 0."""
    lm = program_path("lm", "install the project (pip install -e .)")
    values = {
        "name": label(*jobs),
        "last": str(len(jobs) - 1),
        "tasks": max(options.gpus, 1),
        "commands": "\n".join("  " + shlex.quote(shlex.join([lm, *job.arguments()])) for job in jobs),
        "hopeless": " | ".join(map(str, (DONE, *HOPELESS))),
        "again": AGAIN,
    }
    blanks = {f"{{{name}}}": value for name, value in (vars(options) | values).items()}
    lines = files("launch").joinpath("job.sbatch").read_text().splitlines(keepends=True)
    text = "".join(line for line in lines if not any(blank in line and not blanks[blank] for blank in blanks))
    # All at once: what is filled in may hold braces of its own, such as a path.
    return re.sub("|".join(map(re.escape, blanks)), lambda blank: str(blanks[blank[0]]), text)


def submit(jobs: Sequence[Job], options: Namespace) -> int:
    """Write the script into this folder and submit it; the exit code is sbatch's."""
    text, path = script(jobs, options), Path(f"{label(*jobs)}.sbatch")
    if options.dry_run:
        print(text)
        show(["sbatch", str(path)])
        return DONE
    program_path("sbatch", "start this on a machine of the Slurm cluster")
    path.write_text(text, encoding="utf-8")
    return subprocess.run(["sbatch", path]).returncode

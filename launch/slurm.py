"""A Slurm job array, a task for each run, that saves before its time is up and requeues itself."""

import re
import shlex
import subprocess
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from importlib.resources import files
from pathlib import Path

from launch.command import Job, LaunchError, check_at_least, label, program_path
from launch.policy import DONE, NOT_RETRYABLE, RUN_PREEMPTED
from launch.processes import show


@dataclass(frozen=True)
class SlurmJob:
    """The resources of each task of the array."""

    time: str  # limit of one job, such as 24:00:00, before which it saves and queues itself again
    nodes: int = 1  # nodes of each run
    gpus_per_node: int = 8  # 0 for a cluster without GPUs
    partition: str = ""  # by default the cluster's
    at_once: int = 1  # runs at the same time
    restarts: int = 3  # consecutive failures of a run to tolerate
    dry_run: bool = False  # print the script and the command, and run nothing


def script(jobs: Sequence[Job], options: SlurmJob) -> str:
    """Return the sbatch script: job.sbatch with its {blanks} filled in.

    A line whose blank is empty or 0 is left out.
    """
    lm = program_path("lm", "install the project (pip install -e .)")
    values = asdict(options) | {
        "name": label(*jobs),
        "last": str(len(jobs) - 1),
        "tasks": max(options.gpus_per_node, 1),
        "restarts": str(options.restarts),  # a line of the script with the number 0 would be left out
        "commands": "\n".join("  " + shlex.quote(shlex.join([lm, *job.arguments()])) for job in jobs),
        "hopeless": " | ".join(map(str, (DONE, *NOT_RETRYABLE))),
        "again": RUN_PREEMPTED,
    }
    blanks = {f"{{{name}}}": value for name, value in values.items()}
    empty_blanks = [blank for blank, value in blanks.items() if not value]
    text = ""
    for line in files("launch").joinpath("job.sbatch").read_text().splitlines(keepends=True):
        if not any(blank in line for blank in empty_blanks):
            text += line
    # All at once: what is filled in may hold braces of its own, such as a path.
    return re.sub("|".join(map(re.escape, blanks)), lambda blank: str(blanks[blank[0]]), text)


def submit(jobs: Sequence[Job], options: SlurmJob) -> int:
    """Write the script into this folder and submit it; return the exit code of sbatch."""
    check_at_least(1, nodes=options.nodes, at_once=options.at_once)
    check_at_least(0, gpus_per_node=options.gpus_per_node, restarts=options.restarts)
    if not re.fullmatch(r"\d+|(\d+-)?\d+(:\d+){1,2}|\d+-\d+", options.time):
        raise LaunchError(f"--time {options.time} should be minutes, H:M:S, D-H or D-H:M:S, such as 24:00:00")
    text, path = script(jobs, options), Path(f"{label(*jobs)}.sbatch")
    if options.dry_run:
        print(text)
        show(["sbatch", str(path)])
        return DONE
    program_path("sbatch", "start this on a machine of the Slurm cluster")
    path.write_text(text, encoding="utf-8")
    return subprocess.run(["sbatch", path]).returncode

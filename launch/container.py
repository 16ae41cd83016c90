"""The container in which ``lm`` runs in a cloud: its image, its command, and what a host gets to start it."""

import re
import subprocess
import tarfile
from collections.abc import Sequence
from dataclasses import replace
from importlib.resources import files
from pathlib import Path
from shlex import join

from launch.accelerators import libtpu_flags
from launch.command import Job, LaunchError, program_path
from launch.options import Container
from launch.policy import DONE
from launch.processes import show

ARCHIVE_NAME = "lm-launch.tgz"  # in a host's home folder: worker.sh and the folder STUDIES
STUDIES = "studies"
BUCKETS = "/gs"  # folder with a mounted folder for each bucket, on hosts and in containers
_BUCKET = re.compile("gs://([^/]+)")


def build_commands(image: str, source: Path, extra: str) -> list[list[str]]:
    """Return the commands that build the image from the Containerfile and push it."""
    file = source / "Containerfile"
    return [
        ["docker", "build", f"--file={file}", f"--build-arg=EXTRA=[{extra}]", f"--tag={image}", str(source)],
        ["docker", "push", image],
    ]


def build(image: str, source: Path, extra: str, dry_run: bool) -> int:
    """Build the image and push it, or print the commands; return the exit code of the first that fails."""
    if not (source / "Containerfile").exists():
        raise LaunchError(f"--source {source} should be the project's folder; it has no Containerfile")
    commands = build_commands(image, source, extra)
    if dry_run:
        for command in commands:
            show(command)
        return DONE
    program_path("docker", "install Docker, or build the Containerfile with another program")
    codes = (subprocess.run(command).returncode for command in commands)
    return next(filter(None, codes), DONE)


def pack(studies: Sequence[str], target: Path) -> None:
    """Write to ``target`` what a host needs beside the image."""
    with tarfile.open(target, "w:gz") as archive:
        archive.add(str(files("launch").joinpath("worker.sh")), "worker.sh")
        for file in studies:
            archive.add(file, f"{STUDIES}/{Path(file).name}")


def check_job(job: Job, options: Container) -> None:
    """Raise LaunchError for a job that cannot run in a cloud.

    Its folder has to be in a bucket, or the results would be lost with the machine. Its data sets are in no
    relative folder. Its study modules need different file names, or one would overwrite the other.
    """
    if not _BUCKET.match(job.runs):
        raise LaunchError(
            f"--runs {job.runs!r} should be gs://BUCKET/FOLDER: the machines' disks are deleted with them"
        )
    if options.data and not options.data.startswith(("gs://", "/")):
        raise LaunchError(f"--data {options.data!r} should be gs://BUCKET/FOLDER, or a path in the image")
    studies = sorted(Path(file).name for file in job.studies)
    if len(set(studies)) < len(studies):
        raise LaunchError(f"--study: {', '.join(studies)} should differ in their names, which are copied")


def lm_words(job: Job, slices: int) -> list[str]:
    """Return the words of ``lm`` inside of the container, where buckets and study modules are folders."""
    copied = replace(job, studies=tuple(f"/{STUDIES}/{Path(file).name}" for file in job.studies))
    words = copied.arguments()
    if slices > 1 and not any(word.split("=")[0] == "--mesh.slice" for word in words):
        words += ["--mesh.slice", str(slices)]
    return [_BUCKET.sub(rf"{BUCKETS}/\1", word) for word in words]


def environment_variables(options: Container, processes: int, slices: int) -> dict[str, str]:
    """Return the environment of the container: how the processes meet, flags of libtpu, and data sets."""
    flags = options.libtpu_flags
    variables = {
        "LIBTPU_INIT_ARGS": libtpu_flags(slices) if flags is None else flags,
        "LM_COORDINATOR": "auto" if processes > 1 else "",
        "TFDS_DATA_DIR": _BUCKET.sub(rf"{BUCKETS}/\1", options.data),
    }
    return {name: value for name, value in variables.items() if value}


def buckets(job: Job, options: Container) -> list[str]:
    """Return the names of all buckets that the run reads or writes."""
    words = [*job.arguments(), options.data]
    return sorted({bucket for word in words for bucket in _BUCKET.findall(word)})


def setup_command(job: Job, options: Container) -> str:
    """Return the command line by which a host unpacks, installs what it lacks, and pulls the image."""
    unpack = f"rm -rf lm-launch && mkdir -p lm-launch/{STUDIES} && tar -xzf {ARCHIVE_NAME} -C lm-launch"
    return (
        f"{unpack} && {join(['bash', 'lm-launch/worker.sh', 'setup', options.image, *buckets(job, options)])}"
    )


def start_command(job: Job, options: Container, processes: int, slices: int, attempt: str) -> str:
    """Return the command line by which a host runs the container and shows its output until it ends."""
    variables = environment_variables(options, processes, slices)
    environment = [f"--env={name}={value}" for name, value in variables.items()]
    words = ["bash", "lm-launch/worker.sh", "start", attempt, *environment, options.image]
    return join([*words, *lm_words(job, slices)])

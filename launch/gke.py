"""Runs on GKE: a JobSet for each, which xpk makes (github.com/AI-Hypercomputer/xpk) and Kueue queues."""

import subprocess
from collections.abc import Sequence
from dataclasses import dataclass
from shlex import join

from launch import container
from launch.accelerators import Slice, parse_slice
from launch.command import Job, LaunchError, check_at_least, label, program_path
from launch.options import FLEX_START, PROVISIONING, RESERVATION, SPOT, Container
from launch.policy import DONE
from launch.processes import show

GRACE = 120  # that a pod has to save when it is told to go [seconds]
# xpk restarts after 42 (preempted) and 127 to 255 (killed); a crash and a stuck step may pass, too
RESTART_AFTER = "1,43"


@dataclass(frozen=True)
class Cluster:
    """Where the JobSets run: a cluster that xpk has made, with the buckets attached at /gs/BUCKET."""

    cluster: str  # name of the cluster
    zone: str = ""  # zone or region of the cluster; by default gcloud's
    # capacity that the cluster makes by itself for the runs: on-demand, spot, flex-start or reservation:NAME;
    # by default the node pools that it has
    provisioning: str = ""
    slices: int = 1  # slices of each run, joined by the data-centre network
    priority: str = "medium"  # of the runs in the queue: very-low, low, medium, high or very-high
    restarts: int = 100  # restarts of a run, also after preemptions
    dry_run: bool = False  # print every command and run none


def host_count(piece: Slice) -> int:
    """Return the number of machines of a slice: on GKE each has at most four chips, so that 2x4 are two."""
    return max(1, piece.chips // 4)


def tpu_type(piece: Slice) -> str:
    """Return xpk's name of a slice, with its shape if that is known."""
    return f"{piece.generation.type}-{piece.topology}" if piece.topology else piece.type


def command(job: Job, options: Container, cluster: Cluster) -> list[str]:
    """Return the command that creates the JobSet of a run."""
    piece = parse_slice(options.accelerator)
    capacity = {"": [], "on-demand": ["--on-demand"], SPOT: ["--spot"], FLEX_START: ["--flex"]}
    kind, _, name = cluster.provisioning.partition(":")
    if kind == RESERVATION and name:
        capacity[cluster.provisioning] = [f"--reservation={name}"]
    if cluster.provisioning not in capacity:
        raise LaunchError(
            f"--provisioning {cluster.provisioning!r} should be one of {', '.join(PROVISIONING)}"
        )
    processes = host_count(piece) * cluster.slices
    environment = container.environment_variables(options, processes, cluster.slices)
    # exec, so that the signal to go reaches lm, which saves
    line = f"exec {join(['lm', *container.lm_words(job, cluster.slices)])}"
    where = [f"--zone={cluster.zone}"] if cluster.zone else []
    where += [f"--project={options.project}"] if options.project else []
    return [
        "xpk",
        "workload",
        "create",
        f"--workload={label(job)}",
        f"--cluster={cluster.cluster}",
        *where,
        f"--tpu-type={tpu_type(piece)}",
        f"--num-slices={cluster.slices}",
        *capacity[cluster.provisioning],
        f"--priority={cluster.priority}",
        f"--docker-image={options.image}",
        *(f"--env={name}={value}" for name, value in environment.items()),
        f"--max-restarts={cluster.restarts}",
        f"--restart-on-exit-codes={RESTART_AFTER}",
        f"--termination-grace-period-seconds={GRACE}",
        f"--command={line}",
    ]


def submit(jobs: Sequence[Job], options: Container, cluster: Cluster) -> int:
    """Create the JobSets; return the first exit code of xpk that is not 0."""
    check_at_least(0, restarts=cluster.restarts)
    for job in jobs:
        container.check_job(job, options)
        if job.studies:
            raise LaunchError(
                f"--study {job.studies[0]}: nothing is copied to GKE; put the module into the image, or use "
                "`lm launch gce`"
            )
    commands = [command(job, options, cluster) for job in jobs]
    if cluster.dry_run:
        for each in commands:
            show(each)
        return DONE
    program_path("xpk", "pip install xpk, into an environment of its own")
    codes = [subprocess.run(each).returncode for each in commands]
    return next(filter(None, codes), DONE)

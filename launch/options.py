"""Options that several ways of launching have; the comments are their help."""

import re
from dataclasses import dataclass
from typing import Literal

from launch.command import LaunchError, check_at_least

PROVISIONING = ("on-demand", "spot", "flex-start", "reservation:NAME")
UNITS = {"d": 86_400, "h": 3_600, "m": 60, "s": 1}  # of a time [seconds]
FLEX_START, SPOT, RESERVATION = "flex-start", "spot", "reservation"


@dataclass(frozen=True)
class Container:
    """Says what runs on the machines of a cloud."""

    # container image that every machine runs, as lm launch image builds and pushes it, such as
    # us-docker.pkg.dev/PROJECT/lm/lm:1
    image: str
    # slice of TPUs for each run: a topology as lm plan takes it, such as v5p:4x4x8; or a type such as
    # v5litepod-16
    accelerator: str
    # flags of libtpu, as --libtpu-flags=...; by default those that hide the latency of collectives
    libtpu_flags: str | None = None
    data: str = ""  # gs:// folder of prepared data sets: TFDS_DATA_DIR of the runs
    project: str = ""  # project that pays; by default gcloud's


@dataclass(frozen=True)
class Machines:
    """Says how machines are asked for, and how long to wait for them."""

    zones: tuple[str, ...]  # zones in the order in which they are tried, such as us-east5-a us-central1-b
    # how capacity is paid for: on-demand, spot (cheaper, may be preempted), flex-start (queued, for at most
    # --max-run-time), or reservation:NAME
    provisioning: str = "on-demand"
    # time after which a slice is taken away, such as 12h; at most 7d with flex-start. The run goes on in the
    # next slice
    max_run_time: str = ""
    network: str = ""  # VPC network of the machines; by default the project's default network
    subnetwork: str = ""  # subnetwork of the machines
    # how this machine reaches them: by their external addresses; or they have internal addresses only, and
    # are reached from inside of the network, or through an IAP tunnel
    access: Literal["external", "internal", "iap"] = "external"
    service_account: str = ""  # service account of the machines; by default the project's default one
    labels: tuple[str, ...] = ()  # labels of the machines, such as team=nlp cost=42
    # minutes to wait in a zone for capacity before the next one is tried; with one zone, without end
    wait: float = 30.0
    at_once: int = 1  # runs at the same time, each on a slice of its own
    restarts: int = 3  # consecutive failures of a run to tolerate
    adopt: bool = False  # take over slices that an earlier launch has left
    dry_run: bool = False  # print every command and run none


def check_machines(machines: Machines) -> None:
    """Raise LaunchError for an option that no way of launching can use."""
    kind, colon, name = machines.provisioning.partition(":")
    if (
        kind not in ("on-demand", SPOT, FLEX_START, RESERVATION)
        or bool(name) != (kind == RESERVATION)
        or (colon and not name)
    ):
        raise LaunchError(
            f"--provisioning {machines.provisioning!r} should be one of {', '.join(PROVISIONING)}"
        )
    if machines.max_run_time and not re.fullmatch(r"(\d+d)?(\d+h)?(\d+m)?(\d+s)?", machines.max_run_time):
        raise LaunchError(f"--max-run-time {machines.max_run_time!r} should be a time such as 12h or 1d6h")
    if machines.max_run_time and not seconds(machines.max_run_time):
        raise LaunchError(f"--max-run-time {machines.max_run_time!r} should be above 0, such as 12h")
    if kind == FLEX_START and not 0 < seconds(machines.max_run_time) <= seconds("7d"):
        raise LaunchError(
            "--provisioning flex-start needs --max-run-time, at most 7d, such as --max-run-time 2d"
        )
    for pair in machines.labels:
        if not re.fullmatch(r"[a-z][a-z0-9_-]*=[a-z0-9_-]*", pair):
            raise LaunchError(f"--labels {pair!r} should be KEY=VALUE, of a-z, 0-9, - and _")
        if pair.startswith("launcher="):
            raise LaunchError(f"--labels {pair!r}: by launcher=lm `lm launch list` finds its machines")
    for zone in machines.zones or [""]:
        if not re.fullmatch(r"[a-z]+-[a-z]+\d+-[a-z0-9]+", zone):
            raise LaunchError(
                f"--zones {zone!r} should be zones such as us-east5-a, several of them separated by blanks"
            )
    check_at_least(1, at_once=machines.at_once)
    check_at_least(0, restarts=machines.restarts)
    if not machines.wait >= 0:  # nan is not
        raise LaunchError(f"--wait {machines.wait:g} should be minutes, 0 or more")


def seconds(time: str) -> int:
    """Return a time such as 1d6h in seconds; 0 for ""."""
    return sum(int(number) * UNITS[unit] for number, unit in re.findall(r"(\d+)([dhms])", time))


def reservation(machines: Machines) -> str:
    """Return the name of the reservation to use; "" without one."""
    kind, _, name = machines.provisioning.partition(":")
    return name if kind == RESERVATION else ""

"""Calls gcloud: its login, its project, and requests for slices."""

import subprocess
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import NamedTuple

from launch.accelerators import Slice
from launch.command import LaunchError, program_path
from launch.options import Machines
from launch.policy import ABSENT, Outcome

LABEL = "launcher=lm"  # of everything that the launcher asks for
LIST_ACCOUNTS = ["gcloud", "auth", "list", "--filter=status:ACTIVE", "--format=value(account)"]
GET_PROJECT = ["gcloud", "config", "get-value", "project"]
_ALIVE = ["--ssh-flag=-oServerAliveInterval=30", "--ssh-flag=-oServerAliveCountMax=4"]
_ACCESS = {"external": [], "internal": ["--internal-ip"], "iap": ["--tunnel-through-iap"]}


@dataclass(frozen=True)
class Request:
    """A slice, or several joined by the data-centre network, under a name."""

    name: str
    slice: Slice
    project: str
    machines: Machines
    slices: int = 1
    runtime: str = ""  # image of the VMs of a queued resource, if not the usual one

    @property
    def hosts(self) -> int:
        return self.slice.hosts * self.slices

    @property
    def labels(self) -> str:
        return ",".join([LABEL, *self.machines.labels])


class Status(NamedTuple):
    """Holds gcloud's answer to a request: a state of ``policy``, why, and which names ssh and scp take."""

    state: str
    message: str = ""
    ssh_targets: tuple[str, ...] = ()


class SliceApi(NamedTuple):
    """An interface by which Google's cloud gives slices: its actions in a zone as commands of gcloud."""

    check_request: Callable[[Request], None]  # raises LaunchError for a request that it cannot meet
    list_offers: Callable[[Request, str], list[str]]  # the command that prints what the zone has
    offer_name: Callable[[Request], str]  # which of them the request needs
    create: Callable[[Request, str], list[list[str]]]
    describe: Callable[[Request, str], list[str]]
    parse_status: Callable[[Request, str], Status]  # from the output of ``describe``
    copy: Callable[[Request, str, Sequence[str], str, str], list[list[str]]]  # targets, from, to: at once
    run: Callable[[Request, str, Sequence[str], str], list[list[str]]]  # targets, a command line: at once
    delete: Callable[[Request, str], list[list[str]]]


def zone_options(zone: str, project: str) -> list[str]:
    """Return the options of every command about a zone; without questions on the terminal."""
    return ["--quiet", f"--zone={zone}", f"--project={project}"]


def connection_options(machines: Machines) -> list[str]:
    """Return the options of ssh and scp."""
    return _ACCESS[machines.access]


def ssh_options(machines: Machines) -> list[str]:
    """Return the options of ssh, which ends when its connection is dead."""
    return [*connection_options(machines), *_ALIVE]


def call(arguments: Sequence[str]) -> Outcome:
    """Run a command to its end, out of reach of the terminal's Ctrl-C.

    The message of the outcome is what the command prints or, if it fails, its error.
    """
    done = subprocess.run(arguments, capture_output=True, text=True, start_new_session=True)
    message = (done.stderr if done.returncode else done.stdout).strip()
    absent = done.returncode and ("NOT_FOUND" in message or "was not found" in message)
    return Outcome(done.returncode, ABSENT if absent else "", message)


def output_of(arguments: Sequence[str], meaning: str = "gcloud does not work") -> str:
    """Return the output of a command that has to succeed; LaunchError that begins with ``meaning`` if not."""
    outcome = call(arguments)
    if outcome.code:
        raise LaunchError(f"{meaning}. gcloud says:\n{outcome.message}")
    return outcome.message


def billed_project(project: str, dry_run: bool = False) -> str:
    """Return the project to work in: ``project``, or gcloud's; LaunchError without it or a login.

    With ``dry_run`` gcloud is not asked, and PROJECT stands for its project.
    """
    if dry_run:
        return project or "PROJECT"
    program_path("gcloud", "install the Google Cloud SDK, then run `gcloud auth login`")
    if not output_of(LIST_ACCOUNTS):
        raise LaunchError("gcloud is not logged in: run `gcloud auth login`")
    project = project or output_of(GET_PROJECT)
    if project in ("", "(unset)"):
        raise LaunchError("which project pays? Give --project, or run `gcloud config set project PROJECT`")
    return project

"""What gcloud is asked before and beside a run: the login, the zone, and what is there now."""

import json
import subprocess
from collections.abc import Sequence

from launch.command import LaunchError, closest, program_path
from launch.policy import Seen

TPUS = ["gcloud", "compute", "tpus"]
LABEL = "launcher=lm"  # of everything that the launcher asks for
LOGGED_IN = ["gcloud", "auth", "list", "--filter=status:ACTIVE", "--format=value(account)"]
PROJECT = ["gcloud", "config", "get-value", "project"]

# Requests (queued resources) and machines (nodes): where their label stands, and the columns that tell them.
_NODE = "tpu.nodeSpec[0].node"
_COLUMNS = f"tpu.nodeSpec.len():label=SLICES,{_NODE}.acceleratorType,state.state"
RESOURCES = {
    "queued-resources": (f"{_NODE}.labels", _COLUMNS),
    "tpu-vm": ("labels", "acceleratorType.basename(),state"),
}


def place(zone: str, project: str) -> list[str]:
    return ["--quiet", f"--zone={zone}", f"--project={project}"]  # quiet: no questions on the terminal


def list_command(kind: str, zone: str, project: str, names_only: bool = False) -> list[str]:
    """List our requests or machines in a zone, or in all (``-``); UP is like P1DT8H, 1 day 8 hours."""
    label, columns = RESOURCES[kind]
    columns = f"name.basename(),name.segment(3):label=ZONE,{columns},createTime.duration(parts=2):label=UP"
    output = "value(name)" if names_only else f"table({columns})"
    return [*TPUS, kind, "list", *place(zone, project), f"--filter={label}.{LABEL}", f"--format={output}"]


def deletion(kind: str, name: str, zone: str, project: str) -> list[str]:
    """Delete a request with its machines, or a machine; gcloud answers when they are gone."""
    force = ["--force"] if kind == "queued-resources" else []
    return [*TPUS, kind, "delete", name, *place(zone, project), *force]


def types(zone: str, project: str) -> list[str]:
    return [*TPUS, "tpu-vm", "accelerator-types", "list", *place(zone, project), "--format=json"]


def call(arguments: Sequence[str]) -> Seen:
    """Run to the end, out of reach of the terminal's Ctrl-C; the message is its output, or its error."""
    done = subprocess.run(arguments, capture_output=True, text=True, start_new_session=True)
    return Seen(done.returncode, message=(done.stderr if done.returncode else done.stdout).strip())


def answer(arguments: Sequence[str], meaning: str = "gcloud does not work") -> str:
    """Output of a command that has to succeed; else an error that says what it means."""
    seen = call(arguments)
    if seen.code:
        raise LaunchError(f"{meaning}. gcloud says:\n{seen.message}")
    return seen.message


def paying(project: str) -> str:
    """The project to work in: ``project``, or gcloud's default; LaunchError without it or a login."""
    program_path("gcloud", "install the Google Cloud SDK, then run `gcloud auth login`")
    if not answer(LOGGED_IN):
        raise LaunchError("gcloud is not logged in: run `gcloud auth login`")
    project = project or answer(PROJECT)
    if project in ("", "(unset)"):
        raise LaunchError("which project pays? Give --project, or run `gcloud config set project PROJECT`")
    return project


def check_zone(accelerator: str, zone: str, project: str) -> None:
    """An error unless the zone exists, may be used and offers the accelerator."""
    kinds = json.loads(answer(types(zone, project), f"--zone {zone} cannot be used in project {project}"))
    offered = [kind["name"].split("/")[-1] for kind in kinds]
    if accelerator not in offered:
        raise LaunchError(f"--zone {zone} does not offer {accelerator}{closest(accelerator, offered)}")

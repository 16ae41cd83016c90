"""Slices of the Cloud TPU API, by queued resources: cloud.google.com/tpu/docs/queued-resources.

The API gets bug fixes only. v4 and v5e come from it alone; TPU7x does not come from it.
"""

import json
from collections.abc import Sequence

from launch.accelerators import GENERATIONS
from launch.command import LaunchError
from launch.gcloud import Request, SliceApi, Status, connection_options, ssh_options, zone_options
from launch.options import FLEX_START, SPOT, reservation

TPUS = ["gcloud", "compute", "tpus"]
QUEUED = [*TPUS, "queued-resources"]
ALPHA = ["gcloud", "alpha", "compute", "tpus", "queued-resources"]


def check_request(request: Request) -> None:
    """Raise LaunchError for a slice or an option that the Cloud TPU API does not offer, with what does."""
    piece, machines = request.slice, request.machines
    if not piece.generation.runtime:
        offered = ", ".join(name for name, known in GENERATIONS.items() if known.runtime)
        raise LaunchError(
            f"--accelerator {piece}: queued resources offer {offered}; {piece.name} comes from "
            "`lm launch gce` or `lm launch gke`"
        )
    if machines.max_run_time and machines.provisioning != FLEX_START:
        raise LaunchError(
            "--max-run-time: queued resources take it with --provisioning flex-start only; "
            "`lm launch gce` takes it always"
        )


def list_offers(request: Request, zone: str) -> list[str]:
    """Return the command that prints the types that the zone has."""
    types = [*TPUS, "tpu-vm", "accelerator-types", "list", *zone_options(zone, request.project)]
    return [*types, "--format=value(name.basename())"]


def create(request: Request, zone: str) -> list[list[str]]:
    """Return the command that queues the request, with the topology where gcloud takes one."""
    name, machines, piece = request.name, request.machines, request.slice
    nodes = [f"--node-id={name}"]
    if request.slices > 1:
        nodes = [f"--node-count={request.slices}", f"--node-prefix={name}"]
    command, shape_options = QUEUED, [f"--accelerator-type={piece.type}"]
    if piece.topology and piece.generation.sides == 3:  # the type of a 2D slice says its topology
        shape_options = [f"--type={piece.generation.type}", f"--topology={piece.topology}"]
        command = QUEUED if piece.name == "v4" else ALPHA  # the stable command takes a topology for v4 only
    options = [
        f"--runtime-version={request.runtime or piece.generation.runtime}",
        f"--labels={request.labels}",
    ]
    if machines.provisioning == SPOT:
        options += ["--spot"]
    if machines.provisioning == FLEX_START:
        command = ALPHA
        options += ["--provisioning-model=flex-start", f"--max-run-duration={machines.max_run_time}"]
    if reserved := reservation(machines):
        command = ALPHA
        options += ["--reserved", f"--reservation={reserved}"]
    if machines.network:
        options += [f"--network={machines.network}"]
    if machines.subnetwork:
        options += [f"--subnetwork={machines.subnetwork}"]
    if machines.access != "external":
        options += ["--internal-ips"]
    if machines.service_account:
        options += [f"--service-account={machines.service_account}"]
    options += zone_options(zone, request.project)
    return [[*command, "create", name, *nodes, *shape_options, *options]]


def describe(request: Request, zone: str) -> list[str]:
    """Return the command that describes the request."""
    return [*QUEUED, "describe", request.name, *zone_options(zone, request.project), "--format=json"]


def parse_status(request: Request, printed: str) -> Status:
    """Return the state of the queued resource; gcloud addresses its hosts by its name."""
    state = json.loads(printed)["state"]
    fault = state.get("failedData", {}).get("error", {}).get("message", "")
    return Status(state["state"], fault, (request.name,))


def copy(
    request: Request, zone: str, ssh_targets: Sequence[str], source: str, target: str
) -> list[list[str]]:
    """Return the command that copies a file to all hosts."""
    options = [*_all_hosts_options(request, zone), *connection_options(request.machines)]
    return [[*QUEUED, "scp", source, f"{name}:{target}", *options] for name in ssh_targets]


def run(request: Request, zone: str, ssh_targets: Sequence[str], line: str) -> list[list[str]]:
    """Return the command that runs a command line on all hosts."""
    options = [*_all_hosts_options(request, zone), *ssh_options(request.machines), f"--command={line}"]
    return [[*QUEUED, "ssh", name, *options] for name in ssh_targets]


def _all_hosts_options(request: Request, zone: str) -> list[str]:
    return ["--worker=all", "--node=all", *zone_options(zone, request.project)]


def delete(request: Request, zone: str) -> list[list[str]]:
    """Return the command that deletes the request with its nodes; it answers when they are gone."""
    return [[*QUEUED, "delete", request.name, *zone_options(zone, request.project), "--force"]]


def offer_name(request: Request) -> str:
    return request.slice.type


API = SliceApi(check_request, list_offers, offer_name, create, describe, parse_status, copy, run, delete)

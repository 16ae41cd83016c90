"""Slices of Compute Engine: an instance template, a workload policy and a managed instance group of hosts.

docs.cloud.google.com/compute/docs/tpus/create-tpu-mig-multi-host-slice. Multi-host groups need the policy,
which has the topology, and the bulk mode, which makes all hosts or none. The group does not repair hosts: a
slice that has lost one is deleted and asked for again, since its container has to be started on all.
"""

import json
from collections.abc import Sequence

from launch.accelerators import GENERATIONS
from launch.command import LaunchError
from launch.gcloud import Request, SliceApi, Status, connection_options, ssh_options, zone_options
from launch.options import FLEX_START, RESERVATION, SPOT, reservation
from launch.policy import REFUSALS, REFUSED

COMPUTE = ["gcloud", "compute"]
GROUPS = [*COMPUTE, "instance-groups", "managed"]
IMAGES = "ubuntu-os-accelerator-images"  # project of Google's images for TPUs
BOOT_DISK = "200GB"  # for the container image and the cache of the buckets
LOST = ("STOPPING", "STOPPED", "TERMINATED", "SUSPENDING", "SUSPENDED", "PENDING_STOP")


def check_request(request: Request) -> None:
    """Raise LaunchError for a slice that Compute Engine does not offer; it names the command that does."""
    piece = request.slice
    if not piece.generation.machine:
        offered = ", ".join(name for name, known in GENERATIONS.items() if known.machine)
        raise LaunchError(
            f"--accelerator {piece}: Compute Engine offers {offered}; {piece.name} comes from "
            "`lm launch queued`"
        )
    if not piece.topology:
        example = f"{piece.name}:{'2x2x4' if piece.generation.sides == 3 else '4x4'}"
        raise LaunchError(
            f"--accelerator {piece} has no shape, which Compute Engine asks for: give a topology, as lm plan "
            f"takes it, such as {example}"
        )


def list_offers(request: Request, zone: str) -> list[str]:
    """Return the command that prints the machine types with TPUs that the zone has."""
    named = [f"--zones={zone}", "--filter=name~^(ct|tpu)", "--format=value(name)"]
    return [*COMPUTE, "machine-types", "list", "--quiet", f"--project={request.project}", *named]


def create(request: Request, zone: str) -> list[list[str]]:
    """Return the commands that ask for the slice: a policy with its shape, a template, a group."""
    name, machines, project = request.name, request.machines, request.project
    region = zone.rpartition("-")[0]
    resources = f"projects/{project}/regions/{region}"
    quiet = ["--quiet", f"--project={project}"]
    policy = [*COMPUTE, "resource-policies", "create", "workload-policy", name, *quiet, f"--region={region}"]
    policy += ["--type=HIGH_THROUGHPUT", f"--accelerator-topology={request.slice.topology}"]
    template = [
        *COMPUTE,
        "instance-templates",
        "create",
        name,
        *quiet,
        f"--instance-template-region={region}",
    ]
    template += [f"--machine-type={request.slice.machine}", "--maintenance-policy=TERMINATE"]
    template += [f"--image-project={IMAGES}", f"--image-family={request.slice.generation.family}"]
    template += [f"--boot-disk-size={BOOT_DISK}", f"--labels={request.labels}", "--scopes=cloud-platform"]
    template += _provisioning(request)
    if machines.service_account:
        template += [f"--service-account={machines.service_account}"]
    if machines.network:
        template += [f"--network={machines.network}"]
    if machines.subnetwork:
        subnet = machines.subnetwork
        template += [f"--subnet={subnet if '/' in subnet else f'{resources}/subnetworks/{subnet}'}"]
    if machines.access != "external":
        template += ["--no-address"]
    group = [*GROUPS, "create", name, *zone_options(zone, project), f"--size={request.hosts}"]
    group += [f"--template={resources}/instanceTemplates/{name}", "--default-action-on-vm-failure=do-nothing"]
    if request.hosts > 1:
        group += [f"--workload-policy={resources}/resourcePolicies/{name}"]
    if request.hosts > 1 or machines.provisioning.startswith((FLEX_START, RESERVATION)):
        group += ["--target-size-policy-mode=bulk"]
    return [policy, template, group] if request.hosts > 1 else [template, group]


def _provisioning(request: Request) -> list[str]:
    machines = request.machines
    limit = [f"--max-run-duration={machines.max_run_time}"] if machines.max_run_time else []
    if machines.provisioning == FLEX_START:
        return ["--provisioning-model=FLEX_START", "--instance-termination-action=DELETE", *limit]
    if name := reservation(machines):
        bound = ["--provisioning-model=RESERVATION_BOUND", "--instance-termination-action=DELETE"]
        return [*bound, "--reservation-affinity=specific", f"--reservation={name}", *limit]
    if machines.provisioning == SPOT:
        return ["--provisioning-model=SPOT", "--instance-termination-action=STOP", *limit]
    return ["--instance-termination-action=STOP", *limit] if limit else []


def describe(request: Request, zone: str) -> list[str]:
    """Return the command that lists the hosts of the group."""
    return [*GROUPS, "list-instances", request.name, *zone_options(zone, request.project), "--format=json"]


def parse_status(request: Request, printed: str) -> Status:
    """Return the state of the group: that of a slice, which is there if all of its hosts run."""
    hosts = json.loads(printed or "[]")
    names = tuple(sorted(host["instance"].rpartition("/")[2] for host in hosts))
    faults: list[str] = []
    for host in hosts:
        errors = host.get("lastAttempt", {}).get("errors", {}).get("errors", [])
        faults += [f"{fault['code']}: {fault.get('message', '')}" for fault in errors]
    message = "; ".join(dict.fromkeys(faults))  # each once, though all hosts may have it
    states = [host.get("instanceStatus", "") for host in hosts]
    actions = [host.get("currentAction", "NONE") for host in hosts]
    if hosts and all(action == "DELETING" for action in actions):
        return Status("DELETING")
    if any(state in LOST for state in states):
        return Status("PREEMPTED", message)
    if len(hosts) == request.hosts and set(states) == {"RUNNING"} and {*actions} <= {"NONE", "VERIFYING"}:
        return Status("ACTIVE", ssh_targets=names)
    if any(word in message.upper() for word in REFUSALS):
        return Status(REFUSED, message)
    return Status("PROVISIONING", message)


def copy(
    request: Request, zone: str, ssh_targets: Sequence[str], source: str, target: str
) -> list[list[str]]:
    """Return the command for each host that copies a file to it."""
    options = [*zone_options(zone, request.project), *connection_options(request.machines)]
    return [[*COMPUTE, "scp", source, f"{host}:{target}", *options] for host in ssh_targets]


def run(request: Request, zone: str, ssh_targets: Sequence[str], line: str) -> list[list[str]]:
    """Return the command for each host that runs a command line on it."""
    options = [*zone_options(zone, request.project), *ssh_options(request.machines), f"--command={line}"]
    return [[*COMPUTE, "ssh", host, *options] for host in ssh_targets]


def delete(request: Request, zone: str) -> list[list[str]]:
    """Return the commands that delete what ``create`` makes; the first returns once the hosts are gone."""
    return deletions(request.name, zone, request.project, request.hosts > 1)


def deletions(name: str, zone: str, project: str, has_policy: bool = True) -> list[list[str]]:
    """Return the commands that delete all that ``create`` makes, in an order that gcloud accepts."""
    region = ["--quiet", f"--region={zone.rpartition('-')[0]}", f"--project={project}"]
    commands = [
        [*GROUPS, "delete", name, *zone_options(zone, project)],
        [*COMPUTE, "instance-templates", "delete", name, *region],
    ]
    return [*commands, [*COMPUTE, "resource-policies", "delete", name, *region]] if has_policy else commands


def offer_name(request: Request) -> str:
    return request.slice.machine


API = SliceApi(check_request, list_offers, offer_name, create, describe, parse_status, copy, run, delete)

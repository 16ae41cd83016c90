"""Lists what the launcher has in the cloud now, and deletes it whatever it is doing."""

from collections.abc import Sequence
from dataclasses import dataclass

from launch import gce, gcloud, queued
from launch.command import LaunchError, closest
from launch.policy import DONE
from launch.processes import show

# The name of everything that ``command.label`` names; groups of Compute Engine have no labels.
_NAMED = "^lm-.*-[0-9a-f]{6}$"
_NODE = "tpu.nodeSpec[0].node"
_UP = "duration(parts=2):label=UP"  # like P1DT8H, a day and eight hours
_QUEUED = f"tpu.nodeSpec.len():label=SLICES,{_NODE}.acceleratorType,state.state,createTime.{_UP}"
# kind: (command, filter, zone in its path, columns that describe it)
KINDS = {
    "queued-resources": (queued.QUEUED, f"{_NODE}.labels.{gcloud.LABEL}", "name.segment(3)", _QUEUED),
    "tpu-vm": (
        [*queued.TPUS, "tpu-vm"],
        f"labels.{gcloud.LABEL}",
        "name.segment(3)",
        f"acceleratorType.basename(),state,createTime.{_UP}",
    ),
    "instance-groups": (
        gce.GROUPS,
        f"name~{_NAMED}",
        "zone.basename()",
        f"targetSize:label=HOSTS,status.isStable:label=STABLE,creationTimestamp.{_UP}",
    ),
    "instances": (
        [*gce.COMPUTE, "instances"],
        f"labels.{gcloud.LABEL}",
        "zone.basename()",
        f"machineType.basename(),status,creationTimestamp.{_UP}",
    ),
}
# Requests and groups take their machines with them.
DELETED = ("queued-resources", "tpu-vm", "instance-groups")


def list_command(kind: str, zone: str, project: str, names_only: bool = False) -> list[str]:
    """Return the command that lists what is ours of a kind, in a zone or in all (``""``)."""
    command, ours, in_zone, columns = KINDS[kind]
    if kind.startswith("instance"):
        where = ["--quiet", f"--project={project}", *([f"--zones={zone}"] if zone else [])]
    else:
        where = gcloud.zone_options(zone or "-", project)
    shown = f"table(name.basename(),{in_zone}:label=ZONE,{columns})"
    if names_only:
        shown = f"value(name.basename(),{in_zone})"
    return [*command, "list", *where, f"--filter={ours}", f"--format={shown}"]


def list_all(zone: str, project: str, dry_run: bool) -> int:
    """Print what is there of each kind; return DONE."""
    project = gcloud.billed_project(project, dry_run)
    for kind in KINDS:
        command = list_command(kind, zone, project)
        show(command)
        if not dry_run:
            print(gcloud.output_of(command) or "none of ours")
    return DONE


def deletions(kind: str, name: str, zone: str, project: str) -> list[list[str]]:
    """Return the commands that delete one of DELETED with its machines; gcloud answers when they are gone."""
    if kind == "instance-groups":
        return gce.deletions(name, zone, project)
    force = ["--force"] if kind == "queued-resources" else []
    return [[*KINDS[kind][0], "delete", name, *gcloud.zone_options(zone, project), *force]]


def delete(names: Sequence[str], everything: bool, zone: str, project: str, dry_run: bool) -> int:
    """Delete slices by name, or all of ours; return the first exit code of gcloud that is not 0.

    LaunchError for a name that does not exist, before anything is deleted.
    """
    if bool(names) == everything:
        raise LaunchError("name the slices to delete, or say --all")
    project = gcloud.billed_project(project)
    if names:
        known = [resource.name for kind in DELETED for resource in _listed(kind, zone, project)]
        for name in names:
            if name not in known:
                raise LaunchError(f"there is no {name}{closest(name, known)}")
    codes: list[int] = []
    for kind in DELETED:
        # Listed only now: the deletions of the kinds before may have taken some of these with them.
        for resource in _listed(kind, zone, project):
            if not everything and resource.name not in names:
                continue
            for command in deletions(kind, resource.name, resource.zone, project):
                show(command)
                outcome = gcloud.Outcome() if dry_run else gcloud.call(command)
                print(outcome.message)
                codes.append(DONE if outcome.state == gcloud.ABSENT else outcome.code)
    return next(filter(None, codes), DONE)


@dataclass(frozen=True)
class _Resource:
    """Holds where a request, machine or group in the cloud is."""

    name: str
    zone: str


def _listed(kind: str, zone: str, project: str) -> list[_Resource]:
    """Return what is ours of a kind, in a zone or in all (``""``)."""
    lines = gcloud.output_of(list_command(kind, zone, project, names_only=True)).splitlines()
    return [_Resource(*line.split()) for line in lines]

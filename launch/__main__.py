"""The command ``lm-launch``: starts ``lm run NAME ...`` on Cloud TPU, on Slurm or on this machine."""

import argparse
import io
import sys
from collections.abc import Callable, Sequence
from functools import partial
from pathlib import Path
from typing import Any

from launch import gcloud, local, slurm, tpu
from launch.command import LaunchError, closest, jobs
from launch.policy import BAD_SETTINGS, DONE, Seen
from launch.processes import show


def main() -> None:
    """Run the command line in ``sys.argv``; end the process with its exit code."""
    if isinstance(sys.stdout, io.TextIOWrapper):
        sys.stdout.reconfigure(errors="replace")  # a run may write what the terminal cannot show
    sys.exit(dispatch(sys.argv[1:]))


def dispatch(arguments: Sequence[str]) -> int:
    """Run one command; its exit code is that of the run, or 2 for what the user can mend."""
    cut = arguments.index("--") if "--" in arguments else len(arguments)
    options = _parser().parse_args(arguments[:cut])
    try:
        if "names" in options:
            return options.act(jobs(options, arguments[cut + 1 :]), options)
        return options.act(options)
    except LaunchError as error:
        print(f"lm-launch: {error}", file=sys.stderr)
        return BAD_SETTINGS


def _positive(text: str) -> int:
    if not text.isdigit() or int(text) < 1:
        raise argparse.ArgumentTypeError(f"{text!r} should be a whole number from 1")
    return int(text)


def _command(commands: Any, name: str, act: Callable, runs: str | None, text: str) -> Callable:
    """A command's ``add_argument``; one with ``runs`` starts rows."""
    command = commands.add_parser(name, help=text, description=text)
    command.set_defaults(act=act)
    add = command.add_argument
    add("--dry-run", action="store_true", help="print every command and run none")
    if runs is not None:
        command.epilog = "What stands after -- is passed to lm run."
        add("names", nargs="+", metavar="NAME", help="a row of the study, or a pattern such as 't5/6-*'")
        add("--scale", default="", help="size of the study, such as base; by default that of lm run")
        add("--runs", default=runs, help="folder of the runs, which all processes see")
        own = "module with rows of your own, as for lm, once for each; else those of LM_STUDY"
        add("--study", type=Path, action="append", default=[], metavar="FILE", help=own)
        add("--restarts", type=int, default=3, help="consecutive failures tolerated")
    return add


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(prog="lm-launch", description=__doc__.splitlines()[0])
    commands = parser.add_subparsers(required=True, metavar="COMMAND")
    add_command, number = partial(_command, commands), {"type": _positive, "default": 1}
    on_tpu = add_command("tpu", tpu.run_slices, "", "Run each row on a Cloud TPU slice of its own.")
    on_tpu("--accelerator", required=True, help="such as v5litepod-16, or a topology such as v5e:4x4")
    on_tpu("--slices", **number, help="slices a row, joined by the data-centre network")
    on_tpu("--spot", action="store_true", help="cheaper, but may be preempted")
    on_tpu("--data", default="", help="gs:// folder of prepared data sets: the workers' TFDS_DATA_DIR")
    on_tpu("--runtime", default="", help="image of the TPU VMs, if not the accelerator's usual one")
    on_tpu("--source", type=Path, default=Path("."), help="the project's folder, copied to the workers")
    on_tpu("--adopt", action="store_true", help="take over a slice that an earlier launch left")
    on_slurm = add_command("slurm", slurm.submit, "runs", "Submit the rows to Slurm as one job array.")
    on_slurm("--nodes", **number)
    on_slurm("--gpus-per-node", dest="gpus", type=int, default=8, help="0 for a cluster without GPUs")
    limit = "limit of one job, such as 24:00:00, before which it saves and queues itself again"
    on_slurm("--time", required=True, help=limit)
    on_slurm("--partition", default="")
    here = add_command("local", local.run_here, "runs", "Run the rows on this machine, one after another.")
    here("--processes", **number)
    simulated = {"dest": "devices", "type": int, "default": 0}
    here("--devices-per-process", **simulated, help="simulated on the CPU; 0: the real ones")
    listed = add_command("list", _list, None, "Show what the launcher has on Cloud TPU now.")
    deleted = add_command("delete", _delete_slices, None, "Delete slices, whatever they are doing.")
    deleted("slices", nargs="*", metavar="SLICE", help="names as lm-launch list shows them")
    deleted("--all", action="store_true", help="all that lm-launch list shows")
    for option in (on_tpu, on_slurm):
        option("--at-once", **number, help="rows of a sweep that run at the same time")
    for option in (on_tpu, listed, deleted):
        option("--zone", required=option is on_tpu, default="-", help="such as us-west4-a; - is every zone")
        option("--project", default="", help="by default gcloud's")
    return parser


def _list(options: argparse.Namespace) -> int:
    project = options.project or "PROJECT" if options.dry_run else gcloud.paying(options.project)
    for kind in gcloud.RESOURCES:
        command = gcloud.list_command(kind, options.zone, project)
        show(command)
        if not options.dry_run:
            print(gcloud.answer(command) or "none of ours")
    return DONE


def _delete_slices(options: argparse.Namespace) -> int:
    if bool(options.slices) == options.all:
        raise LaunchError("name the slices to delete, or say --all")
    project = gcloud.paying(options.project)
    known, codes = [], [DONE]
    for kind in gcloud.RESOURCES:  # requests first: their machines go with them
        paths = gcloud.answer(gcloud.list_command(kind, options.zone, project, names_only=True))
        for zone, name in (path.split("/")[3::2] for path in paths.split()):
            known.append(name)
            if options.all or name in options.slices:
                command = gcloud.deletion(kind, name, zone, project)
                show(command)
                seen = Seen() if options.dry_run else gcloud.call(command)
                print(seen.message)
                codes.append(seen.code)
    for name in set(options.slices) - set(known):
        raise LaunchError(f"there is no {name}{closest(name, known)}")
    return max(codes)


if __name__ == "__main__":
    main()

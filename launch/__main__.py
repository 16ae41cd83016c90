"""The command ``lm-launch``: starts ``lm run NAME ...`` on Cloud TPU, on Slurm or on this machine."""

import argparse
import sys
from collections.abc import Callable, Sequence
from pathlib import Path

from launch import gcloud, local, slurm, tpu
from launch.command import LaunchError, jobs, nearest
from launch.policy import BAD_SETTINGS, DONE, Seen
from launch.processes import show


def main() -> None:
    """Run the command line in ``sys.argv``; end the process with its exit code."""
    sys.stdout.reconfigure(errors="replace")  # a run may write what the terminal cannot show
    sys.exit(dispatch(sys.argv[1:]))


def dispatch(arguments: Sequence[str]) -> int:
    """Run one command; its exit code is that of the run, or 2 for what the user can mend."""
    cut = arguments.index("--") if "--" in arguments else len(arguments)
    asked = _parser().parse_args(arguments[:cut])
    try:
        if "names" in asked:
            return asked.act(jobs(asked.names, asked.scale, asked.runs, arguments[cut + 1 :]), asked)
        return asked.act(asked)
    except LaunchError as error:
        print(f"lm-launch: {error}", file=sys.stderr)
        return BAD_SETTINGS


def _count(text: str) -> int:
    if not text.isdigit() or int(text) < 1:
        raise argparse.ArgumentTypeError(f"{text!r} should be a whole number from 1")
    return int(text)


def _command(commands, act: Callable, runs: str | None, name: str, text: str) -> Callable:
    """A command's ``add_argument``; one with ``runs`` starts rows."""
    made = commands.add_parser(name, help=text, description=text)
    made.set_defaults(act=act)
    made.add_argument("--dry-run", action="store_true", help="print every command and run none")
    if runs is not None:
        made.epilog = "What stands after -- is handed to lm run."
        made.add_argument(
            "names", nargs="+", metavar="NAME", help="a row of the study, or a pattern such as 't5/6-*'"
        )
        made.add_argument("--scale", default="base", help="size of the study: nano, mini, mini-real or base")
        made.add_argument("--runs", default=runs, help="folder of the runs, which all processes see")
        made.add_argument("--restarts", type=int, default=3, help="failures in a row that are forgiven")
    return made.add_argument


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(prog="lm-launch", description=__doc__.splitlines()[0])
    commands = parser.add_subparsers(required=True, metavar="COMMAND")
    on_tpu = _command(
        commands, tpu.run, "", "tpu", "Run each row on a Cloud TPU slice of its own, deleted in the end."
    )
    on_tpu("--accelerator", required=True, help="such as v5litepod-16, or a topology such as v5e:4x4")
    on_tpu("--slices", type=_count, default=1, help="slices a row, joined by the data-centre network")
    on_tpu("--spot", action="store_true", help="cheaper, and may be taken away")
    on_tpu("--data", default="", help="gs:// folder of prepared data sets: the workers' TFDS_DATA_DIR")
    on_tpu("--runtime", default="", help="image of the TPU VMs, if not the accelerator's usual one")
    on_tpu("--source", type=Path, default=Path("."), help="the project's folder, copied to the workers")
    on_tpu("--adopt", action="store_true", help="go on with a slice that an earlier launch left")
    on_slurm = _command(commands, slurm.run, "runs", "slurm", "Submit the rows to Slurm as one job array.")
    on_slurm("--nodes", type=_count, default=1)
    on_slurm("--gpus-per-node", dest="gpus", type=int, default=8, help="0 for a cluster without GPUs")
    on_slurm(
        "--time", required=True, help="limit of one turn, such as 24:00:00; it saves before and queues again"
    )
    on_slurm("--partition", default="")
    here = _command(commands, local.run, "runs", "local", "Run the rows on this machine, one after another.")
    here("--processes", type=_count, default=1)
    here(
        "--devices-per-process",
        dest="devices",
        type=int,
        default=0,
        help="simulated on the CPU; 0: the real ones",
    )
    listed = _command(commands, _list, None, "list", "Show what the launcher has on Cloud TPU now.")
    deleted = _command(commands, _delete, None, "delete", "Delete slices, whatever they are doing.")
    deleted("slices", nargs="*", metavar="SLICE", help="names as lm-launch list shows them")
    deleted("--all", action="store_true", help="all that lm-launch list shows")
    for option in (on_tpu, on_slurm):
        option("--at-once", type=_count, default=1, help="rows of a sweep that run at the same time")
    for option in (on_tpu, listed, deleted):
        option("--zone", required=option is on_tpu, default="-", help="such as us-west4-a; - is every zone")
        option("--project", default="", help="by default gcloud's")
    return parser


def _list(asked: argparse.Namespace) -> int:
    project = asked.project or "PROJECT" if asked.dry_run else gcloud.paying(asked.project)
    for kind in gcloud.LISTED:
        command = gcloud.listing(kind, asked.zone, project)
        show(command)
        if not asked.dry_run:
            print(gcloud.answer(command) or "none of ours")
    return DONE


def _delete(asked: argparse.Namespace) -> int:
    if bool(asked.slices) == asked.all:
        raise LaunchError("name the slices to delete, or say --all")
    project = gcloud.paying(asked.project)
    known, codes = [], [DONE]
    for kind in gcloud.LISTED:  # requests first: their machines go with them
        there = gcloud.answer(gcloud.listing(kind, asked.zone, project, names_only=True))
        for zone, name in (path.split("/")[3::2] for path in there.split()):
            known.append(name)
            if asked.all or name in asked.slices:
                command = gcloud.deletion(kind, name, zone, project)
                show(command)
                seen = Seen() if asked.dry_run else gcloud.run(command)
                print(seen.message)
                codes.append(seen.code)
    for name in set(asked.slices) - set(known):
        raise LaunchError(f"there is no {name}{nearest(name, known)}")
    return max(codes)


if __name__ == "__main__":
    main()

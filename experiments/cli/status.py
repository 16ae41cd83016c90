"""``lm status``: runs in progress and finished runs, from their files alone."""

import json
import platform
import time
from collections.abc import Iterator, Mapping
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

from experiments.cli.run_names import names_of
from experiments.console import MISSING, RUNS, print_line, show_listing
from experiments.processes.exit_codes import AGAIN, EXIT_CODES
from experiments.processes.progress import duration
from experiments.runs.paths import SETTINGS
from experiments.study.names import RESERVED_SCALES, RESERVED_TABLES
from experiments.study.paths import check_runs
from lm.config.base import SettingError
from lm.files import parse_with_checksum
from lm.train.runtime import manifest
from lm.train.runtime.processes import is_alive

if TYPE_CHECKING:  # with jax, which takes a second
    from experiments.runs.kinds.stage import Stage

NO_RUNS = {*RESERVED_SCALES, *RESERVED_TABLES}  # folders beside those of runs
SILENT = 1_800.0  # a run on another host that has written nothing for so long has stopped [seconds]
HEADS = ("run", "state", "stage", "steps", "loss", "last record", "time of steps left")
# How the status of a stage begins that a signal ended, wherever it was: the same command resumes.
STOPPED = (
    "Interrupted",
    "KeyboardInterrupt",
    f"SystemExit: {AGAIN}",
    f"SystemExit: {EXIT_CODES['interrupted']}",
)
LINE = 65_536  # bytes from the end of metrics.jsonl that hold its last record


class Found(NamedTuple):
    """Holds what the runs of a folder say."""

    runs: "list[Progress]"
    unreadable: dict[Path, str]  # folders of runs whose files cannot be read, and why


@dataclass(frozen=True)
class Progress:
    """Says how far a run has come."""

    run: str  # its folder, below that of the runs, and its short names
    state: str  # running, stopped, failed or finished
    stage: str  # the stage that was trained last
    step: int  # steps done of all stages
    steps: int  # steps of all stages
    loss: float | None  # of the last record of training
    seen: float  # when it last wrote a record [seconds since 1970]
    left: float | None  # time of the steps left, without compiling and scoring [seconds]


def status(*, runs: Path = RUNS, all: bool = False) -> None:
    """Show the runs in progress and those that stopped: stage, steps, loss, last record, time of steps left.

    That time is without compiling and scoring. Reads files only, and starts no training code; the folder may
    be a copy or a mounted bucket.

        lm status
        lm status --runs elsewhere --all

    Args:
        runs: Folder of runs, or of one run.
        all: Also list the runs that have finished.
    """
    check_runs(runs)
    found, unreadable = find_progress(runs)
    if not found and not unreadable:
        raise SettingError(f"{runs} holds no run; `lm run ROW` starts one")
    shown = [each for each in found if all or each.state != "finished"]
    if shown:
        shown.sort(key=lambda each: each.seen, reverse=True)
        show_listing(HEADS, [row_of(each, time.time()) for each in shown])
    for line in unreadable_lines(unreadable):
        print_line(line)
    finished = sum(each.state == "finished" for each in found)
    print_line(f"{finished} of {len(found) + len(unreadable)} runs have finished")


def row_of(progress: Progress, now: float) -> tuple[str, ...]:
    """Return what is shown of a run under each of HEADS."""
    loss = MISSING if progress.loss is None else f"{progress.loss:.3f}"
    end = MISSING
    if progress.state == "running" and progress.left is not None:
        end = duration(progress.left)
    steps = f"{progress.step:,} of {progress.steps:,}"
    ago = f"{duration(max(now - progress.seen, 0))} ago"
    return progress.run, progress.state, progress.stage, steps, loss, ago, end


def find_progress(runs: Path) -> Found:
    """Return the progress of each run in a folder of runs, and the runs that cannot be read."""
    found = Found([], {})
    for folder in run_folders(runs):
        try:
            found.runs.append(progress_of(folder, runs))
        except (SettingError, OSError) as error:
            if (folder / SETTINGS).exists():  # it was not deleted meanwhile
                found.unreadable[folder] = str(error)
    return found


def unreadable_lines(unreadable: Mapping[Path, str]) -> list[str]:
    """Return a line for each reason why runs cannot be read: how many, and what one of them says."""
    reasons: dict[str, list[str]] = {}
    for folder, reason in unreadable.items():
        reasons.setdefault(reason.replace(str(folder), ""), []).append(reason)
    return [
        f"{len(same)} run{'s are' if len(same) > 1 else ' is'} not shown: {same[0]}"
        for same in reasons.values()
    ]


def run_folders(folder: Path) -> Iterator[Path]:
    """Yield the folders of runs at or below ``folder``, without looking into their stages."""
    if (folder / SETTINGS).exists():
        yield folder
        return
    for child in sorted(folder.iterdir() if folder.is_dir() else ()):
        if child.is_dir() and not child.is_symlink() and child.name not in NO_RUNS:
            yield from run_folders(child)


def progress_of(folder: Path, runs: Path) -> Progress:
    """Return how far the run in ``folder`` has come."""
    from experiments.runs.stages import stages_of

    stages = stages_of(folder)
    name = str(folder if folder == runs else folder.relative_to(runs))
    names = "".join(f" (@{short})" for short in names_of(folder, runs))
    records = {stage.name: last_record(stage.folder) for stage in stages}
    steps = sum(stage.num_steps for stage in stages)
    done: dict[str, int] = {}
    for stage in stages:
        saved = max(manifest.steps(stage.folder / "checkpoints"), default=stage.first_step)
        step = max(records[stage.name].get("step", stage.first_step), saved)
        done[stage.name] = min(step, stage.training.steps) - stage.first_step
    begun = [stage for stage in stages if records[stage.name] or (stage.folder / "run.json").exists()]
    last = max(begun, key=lambda stage: last_change(stage.folder), default=stages[0])
    seen = last_change(last.folder) or (folder / SETTINGS).stat().st_mtime
    return Progress(
        run=name + names,
        state="finished" if (folder / "scores.json").exists() else state_of(last, seen),
        stage=last.name,
        step=sum(done.values()),
        steps=steps,
        loss=records[last.name].get("loss"),
        seen=seen,
        left=time_left(stages, records, done),
    )


def state_of(stage: "Stage", seen: float) -> str:
    """Return whether the process that trains a stage still runs, has stopped, or has failed."""
    path = stage.folder / "run.json"
    if not path.exists():
        return "stopped"
    life = parse_with_checksum(path.read_bytes(), path)
    status = str(life.get("status"))
    if status not in ("running", "finished"):
        return "stopped" if status.startswith(STOPPED) else f"failed ({status})"
    if life.get("host") == platform.node() and isinstance(life.get("pid"), int):
        return "running" if is_alive(life["pid"], life.get("process_start")) else "stopped"
    return "running" if time.time() - seen < SILENT else "stopped"


def is_in_training(stage: "Stage") -> bool:
    """Return whether a process is training a stage at this moment; False if its files are damaged."""
    path = stage.folder / "run.json"
    with suppress(SettingError, OSError):
        status = parse_with_checksum(path.read_bytes(), path).get("status")
        return status == "running" and state_of(stage, last_change(stage.folder)) == "running"
    return False


def last_change(folder: Path) -> float:
    """Return when a stage last wrote a record; 0 if never [seconds since 1970]."""
    paths = (folder / "metrics.jsonl", folder / "run.json")
    return max((path.stat().st_mtime for path in paths if path.exists()), default=0.0)


def last_record(folder: Path) -> dict[str, Any]:
    """Return the last record of training of a stage; {} without one."""
    path = folder / "metrics.jsonl"
    if not path.exists():
        return {}
    with path.open("rb") as file:
        file.seek(max(path.stat().st_size - LINE, 0))
        lines = file.read().splitlines()
    for line in reversed(lines):
        with suppress(ValueError):  # a line that a kill cut short, or the first one read
            record = json.loads(line)
            if isinstance(record, dict) and record.get("kind") == "train":
                return record
    return {}


def time_left(
    stages: "tuple[Stage, ...]", records: dict[str, dict[str, Any]], done: dict[str, int]
) -> float | None:
    """Return the time of the steps left, by the speed of each stage or of the last one."""
    total, speed = 0.0, None
    for stage in stages:
        speed = records[stage.name].get("seconds_per_step", speed)
        left = stage.num_steps - done[stage.name]
        if left and speed is None:
            return None
        total += left * (speed or 0.0)
    return total

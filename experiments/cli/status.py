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
from experiments.processes.exit_codes import EXIT_CODES, PREEMPTED
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
SILENT_SECONDS = 1_800.0  # a run on another host that has written nothing for so long has stopped [seconds]
COLUMN_HEADINGS = ("run", "state", "stage", "steps", "loss", "last record", "time of steps left")
# How the recorded status of a stage begins if a signal ended it, in training or outside of it. The same
# command resumes such a run.
STOPPED = (
    "Interrupted",
    "KeyboardInterrupt",
    f"SystemExit: {PREEMPTED}",
    f"SystemExit: {EXIT_CODES['interrupted']}",
)
IMPORTED = "imported"  # state of a model that was trained elsewhere, whose run has no step to train
TAIL_BYTES = 65_536  # so many bytes at the end of metrics.jsonl hold its last record


class Found(NamedTuple):
    """Holds the runs of a folder: those that can be read, and those that cannot."""

    runs: "list[Progress]"
    unreadable: dict[Path, str]  # folders of runs whose files cannot be read, and why


@dataclass(frozen=True)
class Progress:
    """Holds how far a run has come."""

    run: str  # its folder, below that of the runs, and its short names
    state: str  # running, stopped, failed, finished, or IMPORTED
    stage: str  # the stage that was trained last
    steps_done: int  # of all stages
    steps_total: int  # of all stages
    loss: float | None  # of the last record of training
    last_written: float  # when it last wrote a record [seconds since 1970]
    seconds_left: float | None  # that the remaining steps take, without compiling and scoring; None: unknown


def status(*, runs: Path = RUNS, all: bool = False) -> None:
    """Show the runs in progress and those that stopped: stage, steps, loss, last record, time of steps left.

    That time is without compiling and scoring. Reads files only, and starts no training code; the folder may
    be a copy or a mounted bucket.

        lm status
        lm status --runs elsewhere --all

    Args:
        runs: Folder of runs, or of one run.
        all: Also list the runs that have finished, and imported models.
    """
    check_runs(runs)
    found, unreadable = find_progress(runs)
    if not found and not unreadable:
        raise SettingError(
            f"{runs} holds no run yet; `lm run ROW` starts one, which is listed once its data is prepared"
        )
    shown = [each for each in found if all or each.state not in ("finished", IMPORTED)]
    if shown:
        shown.sort(key=lambda each: each.last_written, reverse=True)
        show_listing(COLUMN_HEADINGS, [row_of(each, time.time()) for each in shown])
    for line in unreadable_lines(unreadable):
        print_line(line)
    finished = sum(each.state == "finished" for each in found)
    imported = sum(each.state == IMPORTED for each in found)
    beside = f"; imported models: {imported}" if imported else ""
    trained_here = len(found) - imported + len(unreadable)
    print_line(f"{finished} of {trained_here} runs have finished{beside}")
    if any(each.state.startswith(("stopped", "failed")) for each in shown):
        print_line(
            "The same command resumes a run that stopped or failed; to drop one, delete its folder below "
            f"{runs}"
        )


def row_of(progress: Progress, now: float) -> tuple[str, ...]:
    """Return what is shown of a run under each of COLUMN_HEADINGS."""
    loss = MISSING if progress.loss is None else f"{progress.loss:.3f}"
    remaining = MISSING
    if progress.state == "running" and progress.seconds_left is not None:
        remaining = duration(progress.seconds_left)
    steps = f"{progress.steps_done:,} of {progress.steps_total:,}" if progress.steps_total else MISSING
    ago = f"{duration(max(now - progress.last_written, 0))} ago"
    return progress.run, progress.state, progress.stage, steps, loss, ago, remaining


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
    has_scores = (folder / "scores.json").exists()
    if not stages:  # neither pre-trained nor fine-tuned
        return Progress(
            run=name + names,
            state="finished" if has_scores else "stopped",
            stage=MISSING,
            steps_done=0,
            steps_total=0,
            loss=None,
            last_written=(folder / SETTINGS).stat().st_mtime,
            seconds_left=None,
        )
    records = {stage.name: last_record(stage.folder) for stage in stages}
    done: dict[str, int] = {}
    for stage in stages:
        saved = max(manifest.steps(stage.folder / "checkpoints"), default=stage.first_step)
        step = max(records[stage.name].get("step", stage.first_step), saved)
        done[stage.name] = min(step, stage.training.steps) - stage.first_step
    begun = [stage for stage in stages if records[stage.name] or (stage.folder / "run.json").exists()]
    last = max(begun, key=lambda stage: last_change(stage.folder), default=stages[0])
    last_written = last_change(last.folder) or (folder / SETTINGS).stat().st_mtime
    is_imported = not begun and any(0 in manifest.steps(stage.folder / "checkpoints") for stage in stages)
    if is_imported:
        state = IMPORTED
    elif has_scores:
        state = "finished"
    else:
        state = state_of(last, last_written)
    return Progress(
        run=name + names,
        state=state,
        stage=last.name,
        steps_done=sum(done.values()),
        steps_total=0 if is_imported else sum(stage.num_steps for stage in stages),
        loss=records[last.name].get("loss"),
        last_written=last_written,
        seconds_left=time_left(stages, records, done),
    )


def state_of(stage: "Stage", last_written: float) -> str:
    """Return whether the process that trains a stage still runs, has stopped, or has failed."""
    path = stage.folder / "run.json"
    if not path.exists():
        return "stopped"
    record = parse_with_checksum(path.read_bytes(), path)
    status = str(record.get("status"))
    if status not in ("running", "finished"):
        return "stopped" if status.startswith(STOPPED) else f"failed ({status})"
    if record.get("host") == platform.node() and isinstance(record.get("pid"), int):
        return "running" if is_alive(record["pid"], record.get("process_start")) else "stopped"
    return "running" if time.time() - last_written < SILENT_SECONDS else "stopped"


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
        file.seek(max(path.stat().st_size - TAIL_BYTES, 0))
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
    """Return the time that the remaining steps take [seconds]; None if it is unknown.

    A stage without a recorded speed is taken to be as fast as the stage before it.
    """
    total, seconds_per_step = 0.0, None
    for stage in stages:
        seconds_per_step = records[stage.name].get("seconds_per_step", seconds_per_step)
        steps_left = stage.num_steps - done[stage.name]
        if steps_left and seconds_per_step is None:
            return None
        total += steps_left * (seconds_per_step or 0.0)
    return total

"""The folder of a stage while it is trained: its lock, its log, and whether it has finished.

The status of a stage is that of its ``run.json``, which the log writes last: "finished" means that the stage
was trained, saved and evaluated to its end.
"""

import os
import platform
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import jax
from filelock import FileLock, Timeout

from experiments.processes.cluster import broadcast_from_first
from experiments.processes.progress import Reporter
from experiments.runs.paths import COUNTS_FILE
from lm.files import matches_checksum
from lm.train.runtime import manifest
from lm.train.runtime.log import Log
from lm.train.runtime.records import now, num_records_when_finished, records


def saved_steps(folder: Path) -> tuple[int, ...]:
    """Return the steps after which the model of the stage in ``folder`` was saved whole, in order."""
    if (folder / COUNTS_FILE).exists() and matches_checksum(folder / COUNTS_FILE):
        return (1,)  # all text is counted as one step
    return tuple(manifest.steps(folder / "checkpoints"))


def is_stage_finished(folder: Path, steps: int) -> bool:
    """Return whether the stage in ``folder`` finished after ``steps`` and still has its model and records.

    DataError if the records are damaged, whether it has finished or resumes.
    """

    def ended() -> bool:
        recorded, expected = len(records(folder)), num_records_when_finished(folder, steps)
        return expected is not None and recorded >= expected and steps in saved_steps(folder)

    return broadcast_from_first(ended)


@contextmanager
def locked(folder: Path, reporter: Reporter) -> Iterator[None]:
    """Keep the folder of a stage to one process: another that shares it waits, and then finds it finished.

    The lock ends with the process that holds it, and its file says which that is.
    """
    if jax.process_index():
        yield
        return
    folder.mkdir(parents=True, exist_ok=True)
    path = folder / "lock"
    lock = FileLock(path, poll_interval=0.2, fallback_to_soft=False)
    try:
        try:
            lock.acquire(blocking=False)
        except Timeout:
            holder = path.read_text() or "another process"
            reporter.say(f"{holder} trains {folder}, which this run shares; waiting for it")
            lock.acquire()
    except OSError as error:
        reporter.complain(
            f"{path} cannot be locked ({error.strerror}): the file system of --runs has no flock. See to it "
            f"that no second process trains {folder} now"
        )
    try:
        path.write_text(f"process {os.getpid()} on {platform.node()} since {now()}")
        yield
    finally:
        lock.release()


class StageLog(Log):
    """A log whose newest loss a reporter shows too, and from which step training goes on.

    phase: what the reporter calls the stage. first_step, last_step: of the stage; training that begins after
    a later step than ``first_step`` has resumed.
    """

    def __init__(
        self,
        folder: Path,
        settings: Mapping[str, Any],
        reporter: Reporter,
        title: str = "",
        project: str = "",
        phase: str = "training",
        first_step: int = 0,
        last_step: int = 0,
    ):
        super().__init__(folder, settings, title, project)
        self._reporter, self._phase = reporter, phase
        self._first_step, self._last_step = first_step, last_step

    def resume_after(self, step: int) -> None:
        super().resume_after(step)
        if step > self._first_step:
            self._reporter.resumed(self._phase, step, self._last_step)

    def log_first_step(self, compile_seconds: float) -> None:
        super().log_first_step(compile_seconds)
        self._reporter.first_step_done(compile_seconds)

    def write(self, step: int, kind: str, values: Mapping[str, float | None]) -> None:
        super().write(step, kind, values)
        if "content_loss" in values:
            losses = f"{values['content_loss']:.2f} ({values['reference_loss']:.2f} without context)"
            self._reporter.advance(0, f"content loss {losses}")
        elif "loss" in values:
            name = "loss" if kind == "train" else "held-out loss"
            self._reporter.advance(0, f"{name} {values['loss']:.3f}")

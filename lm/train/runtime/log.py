"""The records of a run: run.json, metrics.jsonl and TensorBoard, written by the first process.

metrics.jsonl is authoritative: TensorBoard and Weights & Biases may lose records.
"""

import hashlib
import json
import math
import os
import platform
import queue
import threading
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import AbstractContextManager, contextmanager
from errno import ENOENT
from functools import partial
from pathlib import Path
from typing import Any, Self, TextIO

import jax
import numpy as np
from jax.experimental import multihost_utils

from lm.files import (
    json_with_checksum,
    line_with_checksum,
    name_file_in_errors,
    parse_with_checksum,
    write,
)
from lm.train.runtime.processes import process_start
from lm.train.runtime.records import current_commit, now, packages, records

RESTART = "LM_RESTART"  # in the environment: which restart of the command this is, and why
QUEUE_SIZE = 1_000  # records that may wait to be written by a tracker
CLOSE_TIMEOUT = 5.0  # time to write the queued records at the end [seconds]

WriteScalars = Callable[[int, Mapping[str, float]], None]  # the values of a step, by name


class NonFiniteLoss(ArithmeticError):
    """Raised if loss or gradient of ``step`` is not finite, or if it is the last of too many skipped updates.

    No state from that step on has been saved.
    """

    def __init__(self, step: int, why: str):
        super().__init__(f"step {step} {why}")
        self.step = step

    def add(self, message: str) -> None:
        """Append ``message`` to the error's own."""
        self.args = (f"{self}; {message}",)


class Log:
    """Writes the records of one run; use as a context, whose end becomes the status.

    ``settings`` go to ``run.json``, which describes this start of the run and lists all starts in "starts".
    The "status" of a start is "running", "finished" or an error; that of a start which was killed becomes
    "vanished" at the next start. "finished" is written after all records, together with the "step" of the
    last record and the number of "records". In TensorBoard the run has the name of its folder, followed by
    ``title``, which is for folders named by a hash. With a ``project`` the numbers go to Weights & Biases
    too.

    Raises OSError, with the name of the file, where a record cannot be written.
    """

    def __init__(self, folder: str | Path, settings: Mapping[str, Any], title: str = "", project: str = ""):
        self.folder, self._is_first_process = Path(folder), jax.process_index() == 0
        self._events, self._project = self.folder / "tensorboard" / title, project
        self._trackers: list[Tracker] = []
        self._file: TextIO | None = None
        self._checksum = ""  # of the last line of metrics.jsonl
        self._step = 0  # of the last record
        self._count = 0  # of records
        self._opened_at = time.perf_counter()  # [seconds]
        if not self._is_first_process:
            return
        self.folder.mkdir(parents=True, exist_ok=True)
        # the entry of this start in "starts" of run.json
        self._start_record: dict[str, Any] = {
            "status": "running",
            "started": now(),
            "ended": None,
            "host": platform.node(),
            "pid": os.getpid(),
            "process_start": process_start(os.getpid()),
            "commit": current_commit(),
            "from_step": None,
            "evaluating": None,
            "restart": os.environ.get(RESTART),
        }
        self._run: dict[str, Any] = {
            "devices": f"{jax.device_count()} x {jax.devices()[0].device_kind}",
            "python": platform.python_version(),
            "packages": packages(),
            "settings": settings,
            "starts": [*_earlier_starts(self.folder / "run.json"), self._start_record],
        }
        self._write_run()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, error_type: type | None, error: BaseException | None, _):
        if not self._is_first_process:
            return
        for tracker in self._trackers:
            tracker.close()
        if error_type is None:
            self._start_record |= {"status": "finished", "step": self._step, "records": self._count}
        else:
            self._start_record["status"] = f"{error_type.__name__}: {error}"
        self._start_record["ended"] = now()
        for finish in (self.sync, self._write_run):
            try:
                finish()
            except OSError as fault:
                if error is None:
                    raise
                _warn(str(fault))  # the error that came first is raised

    def resume_after(self, step: int) -> None:
        """Begin to write after ``step``; called once, before the first ``write``.

        Deletes the records of later steps, which training writes again, and opens the trackers.
        """
        if not self._is_first_process:
            return
        kept = [record for record in records(self.folder) if record["step"] <= step]
        lines = [self._line(record) for record in kept]
        self._step, self._count = step, len(lines)
        write(self._path, "".join(lines))
        self._start_record["from_step"] = step
        self._write_run()
        self._trackers = [Tracker("TensorBoard", partial(tensorboard, self._events, step + 1))]
        if self._project:
            open_writer = partial(weights_and_biases, self._project, self.folder, self._run["settings"])
            self._trackers.append(Tracker("Weights & Biases", open_writer))

    def write(self, step: int, kind: str, values: Mapping[str, float | None]) -> None:
        """Write one record of the values after ``step`` updates, without those that are None.

        ``kind`` is "train", "eval" or another. Trackers get the finite numbers alone.
        """
        if not self._is_first_process:
            return
        assert self._trackers, "resume_after comes first"
        present = {name: value for name, value in values.items() if value is not None}
        if not self._path.exists():  # writes to a file that was deleted are lost
            raise FileNotFoundError(ENOENT, "deleted or moved while the run trained", str(self.folder))
        with name_file_in_errors(self._path):
            line = self._line({"step": step, "kind": kind, "time": round(time.time(), 3), **present})
            self._file = self._file or self._path.open("a")
            self._file.write(line)
            self._file.flush()
        self._step, self._count = step, self._count + 1
        if kind != "train":  # scores are read from the file while the run goes on
            self.sync()
        numbers = {name: v for name, v in present.items() if isinstance(v, float | int) and math.isfinite(v)}
        for tracker in self._trackers:
            tracker.write(step, {f"{kind}/{name}": value for name, value in numbers.items()})

    def sync(self) -> None:
        """Store all records durably; the next one opens the file again.

        A file is closed, since a mounted bucket stores it only then.
        """
        file, self._file = self._file, None  # closed once, even if that fails
        if file is not None:
            with name_file_in_errors(self._path), file:
                file.flush()
                os.fsync(file.fileno())

    def _line(self, record: Mapping[str, Any]) -> str:
        """Return the line of a record; its checksum covers the line before, so that a gap is noticed."""
        line, self._checksum = line_with_checksum(record, self._checksum)
        return line

    @contextmanager
    def evaluating(self, step: int) -> Iterator[None]:
        """Set "evaluating" in run.json to ``step`` while this context lasts.

        If the process is killed the mark stays, and ``evaluation_crashes`` counts it at the next start. After
        an exception it is removed: the message names the cause, so the next start may try again.
        """
        self._set_evaluating(step)
        try:
            yield
        except (Exception, KeyboardInterrupt):
            if self._is_first_process:
                self._start_record["evaluating"] = None  # which is written together with the status
            raise
        self._set_evaluating(None)

    def _set_evaluating(self, step: int | None) -> None:
        if self._is_first_process:
            self._start_record["evaluating"] = step
            self._write_run()

    def evaluation_crashes(self, step: int) -> int:
        """Return how many starts directly before this one were killed in the evaluation of ``step``."""
        count = 0
        for start in reversed(self._run["starts"][:-1]) if self._is_first_process else ():
            if start.get("evaluating") != step:
                break
            count += 1
        return int(multihost_utils.broadcast_one_to_all(np.int32(count)))

    @property
    def _path(self) -> Path:
        return self.folder / "metrics.jsonl"

    def has_record(self, step: int, kind: str) -> bool:
        """Return whether there is a record of this kind after ``step``, as the first process sees it."""
        exists = self._is_first_process and (step, kind) in {
            (r["step"], r["kind"]) for r in records(self.folder)
        }
        return bool(multihost_utils.broadcast_one_to_all(np.int32(exists)))

    def log_first_step(self, compile_seconds: float) -> None:
        """Record that the first step is done, and how long it took to compile [seconds]."""
        if self._is_first_process:
            since = time.perf_counter() - self._opened_at
            self._run |= {
                "seconds_to_first_step": round(since, 3),
                "seconds_compiling": round(compile_seconds, 3),
            }
            self._write_run()

    def _write_run(self) -> None:
        """Write run.json: the run's members beside those of this start, which is the last of "starts" too."""
        members = json.loads(json.dumps(self._start_record | self._run, default=str))
        write(self.folder / "run.json", json_with_checksum(members))


class Tracker:
    """Writes records to TensorBoard or W&B in a thread, so that training never waits for them.

    ``open_writer`` returns a context whose value is the function that writes a record. After an error in the
    context there is a warning, and no more records are written.
    """

    def __init__(self, name: str, open_writer: Callable[[], AbstractContextManager[WriteScalars]]):
        self.name, self._open_writer = name, open_writer
        self._queue: queue.Queue = queue.Queue(QUEUE_SIZE)
        self._is_working, self._num_lost = True, 0
        self._thread = threading.Thread(target=self._write_all, name=name, daemon=True)
        self._thread.start()

    def write(self, step: int, values: Mapping[str, float]) -> None:
        """Queue a record; if the queue is full it is dropped and counted."""
        if self._is_working:
            self._put((step, values), wait=0.0)

    def close(self) -> None:
        """Write the queued records, waiting for CLOSE_TIMEOUT seconds at most."""
        end = time.monotonic() + CLOSE_TIMEOUT
        if self._is_working and self._put(None, CLOSE_TIMEOUT):
            self._thread.join(max(end - time.monotonic(), 0.0))
        num_lost = self._num_lost + self._queue.qsize()
        if self._is_working and num_lost:
            _warn(f"{self.name} was too slow and lacks up to {num_lost} records; metrics.jsonl has them")
        self._is_working = False

    def _put(self, record: tuple | None, wait: float) -> bool:
        try:
            self._queue.put(record, block=wait > 0, timeout=wait or None)
        except queue.Full:
            self._num_lost += record is not None
            return False
        return True

    def _write_all(self) -> None:
        try:
            with self._open_writer() as write_scalars:
                while (record := self._queue.get()) is not None:
                    write_scalars(*record)
        except Exception as error:
            if self._is_working:
                self._is_working = False
                _warn(f"{self.name} is off from now on ({type(error).__name__}: {error}); training goes on")


@contextmanager
def tensorboard(folder: Path, first: int) -> Iterator[WriteScalars]:
    """Open a TensorBoard log in ``folder`` and yield the function that writes scalars.

    It begins with an event at which TensorBoard drops the events of earlier starts from step ``first`` on.
    Events are written one by one: the library's own writer waits for its thread, which never ends if the disk
    is full.
    """
    from tensorboardX.event_file_writer import EventsWriter
    from tensorboardX.proto.event_pb2 import Event, SessionLog
    from tensorboardX.summary import scalar

    folder.mkdir(parents=True, exist_ok=True)
    # The first step is part of the file's name: two starts within one second would share a file.
    writer = EventsWriter(str(folder / "events"), f".{first}")
    try:
        start = SessionLog(status=SessionLog.START)
        writer.write_event(Event(step=first, session_log=start, wall_time=time.time()))

        def write_scalars(step: int, values: Mapping[str, float]) -> None:
            wall_time = time.time()
            for name, value in values.items():
                writer.write_event(Event(step=step, wall_time=wall_time, summary=scalar(name, value)))
            writer.flush()

        yield write_scalars
    finally:
        writer.close()


@contextmanager
def weights_and_biases(project: str, folder: Path, settings: Mapping[str, Any]) -> Iterator[WriteScalars]:
    """Open a W&B run of ``project``, one for each folder, which resumes with it; WANDB_* variables apply."""
    import wandb  # an optional dependency

    place = folder.resolve()
    identity = hashlib.sha256(str(place).encode()).hexdigest()[:16]
    run = wandb.init(
        project=project,
        name="/".join(place.parts[-4:]),
        id=identity,
        resume="allow",
        config=json.loads(json.dumps(settings, default=str)),
        dir=str(folder),
    )
    try:
        yield lambda step, values: run.log(dict(values), step=step)
    finally:
        run.finish()


def _earlier_starts(path: Path) -> list[dict[str, Any]]:
    try:
        starts = [dict(start) for start in parse_with_checksum(path.read_bytes(), path)["starts"]]
    except FileNotFoundError:
        return []
    except (OSError, ValueError, TypeError, KeyError) as error:
        _warn(f"{path} is damaged and begun anew ({type(error).__name__}: {error})")
        return [{"status": f"unknown: run.json was damaged ({type(error).__name__})"}]
    if starts and starts[-1].get("status") == "running":
        starts[-1]["status"] = "vanished"
    return starts


def _warn(text: str) -> None:
    print(f"warning: {text}", flush=True)

"""What a run says of itself: run.json, metrics.jsonl (the truth) and, beside it, TensorBoard. First process
only.
"""

import json
import math
import os
import platform
import subprocess
import time
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from errno import ENOENT
from functools import partial
from importlib import metadata
from pathlib import Path
from typing import Any

import jax
import numpy as np
from jax.experimental import multihost_utils

from lm.files import naming, seal, seal_line, unseal, unseal_lines, write
from lm.settings import DataError
from lm.train.trackers import Tracker, tensorboard

RESTART = "LM_RESTART"  # in the environment: which restart of the command this is, and why
PACKAGES = (
    "jax",
    "jaxlib",
    "flax",
    "optax",
    "orbax-checkpoint",
    "grain",
    "numpy",
    "sentencepiece",
    "tokenizers",
)


class NonFiniteLoss(ArithmeticError):
    """Loss or gradient is infinite or not a number, or too often left out; no state from this step on was
    saved.
    """

    def __init__(self, step: int, why: str):
        super().__init__(f"step {step} {why}")
        self.step = step

    def add(self, said: str) -> None:
        """To the message."""
        self.args = (f"{self}; {said}",)


class Log:
    """One run's records; ``settings`` is what ``run.json`` shows. Use as a context: its end becomes the
    status.

    ``run.json`` tells of this start of the run, and in "starts" of all: one that did not end in order
    "vanished". TensorBoard calls a run by its folder, and by ``title`` where the folder's name is none that a
    reader knows. OSError, with the name of the file, where a record cannot be written.
    """

    def __init__(self, folder: str | Path, settings: Mapping[str, Any], title: str = ""):
        self.folder, self._writes = Path(folder), jax.process_index() == 0
        self._events = self.folder / "tensorboard" / title
        self._tracker = self._file = None
        self._mark = ""  # the checksum of the last line
        self._start = time.perf_counter()
        if self._writes:
            self.folder.mkdir(parents=True, exist_ok=True)
            self._life = {
                "status": "running",
                "started": now(),
                "ended": None,
                "host": platform.node(),
                "pid": os.getpid(),
                "commit": _commit(),
                "from_step": None,
                "evaluating": None,
                "restart": os.environ.get(RESTART),
            }
            self._run = {
                "devices": f"{jax.device_count()} x {jax.devices()[0].device_kind}",
                "python": platform.python_version(),
                "packages": packages(),
                "settings": settings,
                "starts": [*_earlier(self.folder / "run.json"), self._life],
            }
            self._write_run()

    def __enter__(self) -> "Log":
        return self

    def __exit__(self, kind: type | None, error: BaseException | None, _):
        if not self._writes:
            return
        if self._tracker is not None:
            self._tracker.close()
        self._life |= {"status": "finished" if kind is None else f"{kind.__name__}: {error}", "ended": now()}
        for finish in (self._close, self._write_run):
            try:
                finish()
            except OSError as fault:
                if error is None:
                    raise
                print(f"warning: {fault}", flush=True)  # beside the error that came first

    def start(self, step: int) -> None:
        """Go on after ``step``: forget all later records, which will come again."""
        if not self._writes:
            return
        kept = [self._line(record) for record in records(self.folder) if record["step"] <= step]
        write(self._path, "".join(kept))
        self._file = self._path.open("a")
        self._life["from_step"] = step
        self._write_run()
        self._tracker = Tracker("TensorBoard", partial(tensorboard, self._events, step + 1))

    def write(self, step: int, kind: str, values: Mapping[str, float]) -> None:
        """One line of numbers after ``step`` updates; ``kind`` is "train", "eval" or what else there is."""
        if not self._writes:
            return
        values = {name: value for name, value in values.items() if value is not None}
        if not self._path.exists():  # what is written into a file that has no name any more is lost
            raise FileNotFoundError(ENOENT, "deleted or moved while the run trained", str(self.folder))
        with naming(self._path):
            self._file.write(
                self._line({"step": step, "kind": kind, "time": round(time.time(), 3), **values})
            )
            self._file.flush()
        # a mounted bucket takes a file when it is closed, and best_of its scores from there
        if kind != "train":
            self._close()
            self._file = self._path.open("a")
        shown = {name: v for name, v in values.items() if isinstance(v, float | int) and math.isfinite(v)}
        self._tracker.write(step, {f"{kind}/{name}": value for name, value in shown.items()})

    def _line(self, record: Mapping[str, Any]) -> str:
        """``record`` as the line that follows those before, by whose checksum a lost one is noticed."""
        line, self._mark = seal_line(record, self._mark)
        return line

    @contextmanager
    def evaluating(self, step: int) -> Iterator[None]:
        """In run.json the evaluation of ``step`` is under way in here, for good if it ends the process."""
        self._set_evaluating(step)
        yield
        self._set_evaluating(None)

    def _set_evaluating(self, step: int | None) -> None:
        if self._writes:
            self._life["evaluating"] = step
            self._write_run()

    def ended_evaluating(self, step: int) -> int:
        """How many starts before this one, in a row, ended in the evaluation of ``step``."""
        earlier = (
            [life.get("evaluating") for life in reversed(self._run["starts"][:-1])] if self._writes else []
        )
        ended = next((n for n, evaluated in enumerate(earlier) if evaluated != step), len(earlier))
        return int(multihost_utils.broadcast_one_to_all(np.int32(ended)))

    @property
    def _path(self) -> Path:
        return self.folder / "metrics.jsonl"

    def _close(self) -> None:
        file, self._file = self._file, None  # once, whatever comes of it
        if file is not None:
            with naming(self._path), file:
                file.flush()
                os.fsync(file.fileno())

    def lacks(self, step: int, kind: str) -> bool:
        """Whether no such record is there, as the first process finds it."""
        found = self._writes and (step, kind) in {(r["step"], r["kind"]) for r in records(self.folder)}
        return not multihost_utils.broadcast_one_to_all(np.int32(found))

    def began(self, compiling: float) -> None:
        """The first step is done, of which ``compiling`` were seconds that the compiler took."""
        if self._writes:
            since = time.perf_counter() - self._start
            self._run |= {"seconds_to_first_step": round(since, 3), "seconds_compiling": round(compiling, 3)}
            self._write_run()

    def _write_run(self) -> None:
        write(self.folder / "run.json", seal(json.loads(json.dumps(self._life | self._run, default=str))))


def records(folder: str | Path) -> list[dict[str, Any]]:
    """All records of a run in order, without a last one that a kill cut short; DataError if any was changed
    or lost.
    """
    path = Path(folder) / "metrics.jsonl"
    mend = f"put back a copy that is whole, or delete {folder} to train it anew"
    found = unseal_lines(path.read_bytes(), path, mend) if path.exists() else []
    if all(isinstance(each.get("step"), int) and isinstance(each.get("kind"), str) for each in found):
        return found
    raise DataError(f"{path} has a line that is no record of a run; {mend}")


def status(folder: Path) -> str:
    """What ``run.json`` says of the last start: "running", "finished" or an error; DataError if it is
    damaged.
    """
    path = folder / "run.json"
    return str(unseal(path.read_bytes(), path).get("status")) if path.exists() else "not begun"


def _earlier(path: Path) -> list[dict[str, Any]]:
    """The starts of a run before this one."""
    try:
        found = [dict(life) for life in unseal(path.read_bytes(), path)["starts"]]
    except FileNotFoundError:
        return []
    except (OSError, ValueError, TypeError, KeyError) as error:
        print(f"warning: {path} is damaged and begun anew ({type(error).__name__}: {error})", flush=True)
        return [{"status": f"unknown: run.json was damaged ({type(error).__name__})"}]
    if found and found[-1].get("status") == "running":
        found[-1]["status"] = "vanished"
    return found


def packages() -> dict[str, str]:
    """The versions of what numbers depend on, of PACKAGES."""
    return {name: metadata.version(name) for name in PACKAGES}


def now() -> str:
    """Date, time and zone."""
    return time.strftime("%Y-%m-%dT%H:%M:%S%z")


def _commit() -> str | None:
    """The commit of the code that runs, marked where files differ from it; None where git does not know this
    file.
    """
    try:
        here = Path(__file__)
        subprocess.run(
            ["git", "ls-files", "--error-unmatch", here.name],
            cwd=here.parent,
            capture_output=True,
            check=True,
            timeout=10,
        )
        call = ["git", "describe", "--always", "--dirty", "--abbrev=40", "--exclude=*"]
        done = subprocess.run(call, cwd=here.parent, capture_output=True, text=True, timeout=10)
    except (OSError, subprocess.SubprocessError):
        return None
    return done.stdout.strip() or None

"""What a run says of itself: run.json, metrics.jsonl (the truth) and, beside it, TensorBoard. First process only."""

import json
import math
import os
import platform
import subprocess
import time
from collections.abc import Mapping
from importlib import metadata
from pathlib import Path
from typing import Any

import jax
import numpy as np
from jax.experimental import multihost_utils

PACKAGES = ("jax", "jaxlib", "flax", "optax", "orbax-checkpoint", "grain", "numpy")


class NonFiniteLoss(ArithmeticError):
    """Loss or gradient is infinite or not a number; no state from this step on was saved."""

    def __init__(self, step: int, values: Mapping[str, float]):
        super().__init__(f"step {step} is not finite: {dict(values)}; the checkpoints before it are intact")
        self.step = step


class Log:
    """One run's records; ``settings`` is what ``run.json`` shows. Use as a context: its end becomes the status."""

    def __init__(self, folder: str | Path, settings: Mapping[str, Any]):
        self.folder, self._writes = Path(folder), jax.process_index() == 0
        self._board = self._file = None
        self._start = time.perf_counter()
        if self._writes:
            self.folder.mkdir(parents=True, exist_ok=True)
            self._run = {
                "status": "running",
                "started": _now(),
                "ended": None,
                "host": platform.node(),
                "devices": f"{jax.device_count()} x {jax.devices()[0].device_kind}",
                "python": platform.python_version(),
                "packages": {name: metadata.version(name) for name in PACKAGES},
                "commit": _commit(),
                "settings": settings,
            }
            self._write_run()

    def __enter__(self) -> "Log":
        return self

    def __exit__(self, kind: type | None, error: BaseException | None, _):
        for file in (self._file, self._board):
            if file is not None:
                file.close()
        if self._writes:
            status = "finished" if kind is None else f"{kind.__name__}: {error}"
            self._run |= {"status": status, "ended": _now()}
            self._write_run()

    def start(self, step: int) -> None:
        """Go on after ``step``: forget all later records, which will come again."""
        if not self._writes:
            return
        kept = [record for record in records(self.folder) if record["step"] <= step]
        path = self.folder / "metrics.jsonl"
        replace_file(path, "".join(json.dumps(record) + "\n" for record in kept))
        self._file = path.open("a")
        from tensorboardX import SummaryWriter  # takes half a second to import

        self._board = SummaryWriter(str(self.folder / "tensorboard"), purge_step=step + 1)

    def write(self, step: int, kind: str, values: Mapping[str, float]) -> None:
        """One line of numbers after ``step`` updates; ``kind`` is "train", "eval" or what else there is."""
        if not self._writes:
            return
        values = {name: value for name, value in values.items() if value is not None}
        self._file.write(json.dumps({"step": step, "kind": kind, "time": round(time.time(), 3), **values}) + "\n")
        self._file.flush()
        if kind != "train":  # a mounted bucket takes a file when it is closed, and best_of its scores from there
            self._file.close()
            self._file = (self.folder / "metrics.jsonl").open("a")
        for name, value in values.items():
            if isinstance(value, float | int) and math.isfinite(value):
                self._board.add_scalar(f"{kind}/{name}", value, step)

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
        replace_file(self.folder / "run.json", json.dumps(self._run, indent=1, default=str) + "\n")


def records(folder: str | Path) -> list[dict[str, Any]]:
    """All records of a run in order; a last line that a kill cut short is left out."""
    path, found = Path(folder) / "metrics.jsonl", []
    for line in path.read_text().splitlines() if path.exists() else []:
        try:
            found.append(json.loads(line))
        except ValueError:
            continue
    return found


def replace_file(path: Path, text: str) -> None:
    """Write ``path`` as a whole or not at all."""
    new = path.with_name(path.name + ".new")
    with new.open("w") as file:
        file.write(text)
        file.flush()
        os.fsync(file.fileno())
    new.replace(path)


def _now() -> str:
    return time.strftime("%Y-%m-%dT%H:%M:%S%z")


def _commit() -> str | None:
    """The commit of the code that runs, marked where files differ from it; None where git does not know this file."""
    try:
        here = Path(__file__)
        subprocess.run(
            ["git", "ls-files", "--error-unmatch", here.name], cwd=here.parent, capture_output=True, check=True
        )
        call = ["git", "describe", "--always", "--dirty", "--abbrev=40", "--exclude=*"]
        done = subprocess.run(call, cwd=Path(__file__).parent, capture_output=True, text=True, timeout=10)
    except (OSError, subprocess.SubprocessError):
        return None
    return done.stdout.strip() or None

"""The numbers of each step: read while the next one runs, checked, and written with the speed of training."""

import time
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import jax
import numpy as np

from lm.batch import Batch
from lm.config.training import LoopConfig
from lm.train.flops import peak
from lm.train.runtime.log import Log, NonFiniteLoss
from lm.train.step import Metrics

# Metrics of every step that are checked. "skipped_updates", a key of metrics.jsonl: 1 if it was skipped.
CHECKED = ("loss", "grad_norm", "skipped_updates", "consecutive_skipped")


class Profile:
    """A trace of the steps from the first to the last, by jax's profiler; a context, whose end ends it too.

    ``tensorboard --logdir FOLDER`` (with its profile plugin) and https://ui.perfetto.dev show it.
    """

    def __init__(self, folder: Path, steps: tuple[int, int] | None):
        self.folder, self.steps, self._runs = folder, steps, False

    def before(self, step: int) -> None:
        """Start, if this step is one to be traced and none was before."""
        if self.steps and not self._runs and self.steps[0] <= step <= self.steps[1]:
            jax.profiler.start_trace(self.folder)
            self._runs = True

    def after(self, step: int, metrics: Metrics) -> None:
        """End, once the last step is done on the devices."""
        if self._runs and self.steps and step >= self.steps[1]:
            jax.block_until_ready(metrics)
            self._stop()

    def _stop(self) -> None:
        self._runs = False
        jax.profiler.stop_trace()

    def __enter__(self) -> "Profile":
        return self

    def __exit__(self, *_: object) -> None:
        if self._runs:
            self._stop()


class Meter:
    """Reads the numbers of each step while the next one runs, and writes every ``log_every``-th.

    NonFiniteLoss at a step whose loss or gradient is not finite, unless its update was skipped, and at the
    last of too many skipped in a row. ``flops``: of one step.
    """

    def __init__(self, log: Log, config: LoopConfig, flops: float | None):
        self.log, self.config, self.flops = log, config, flops
        self.unread: list[tuple[int, Metrics]] = []
        self.skipped = 0.0  # updates since the last line
        device_peak = peak(jax.devices()[0])
        self.peak = device_peak and device_peak * jax.device_count()  # FLOP/s
        self.positions = 0  # of a batch, inputs and targets, padding included
        self.restart()

    def restart(self) -> None:
        """Measure speed from the end of the next step on: compiling, saving and evaluating do not count."""
        self.since: float | None = None
        self.first, self.waited = 0, 0.0

    def add(self, step: int, metrics: Metrics, batch: Batch) -> None:
        """Register a started step: wait for the one before it, and read that if its line is due.

        jax returns before a step is computed. Reading the step before, not this one, keeps devices busy.
        """
        if self.unread:
            before, numbers = self.unread[-1]
            jax.block_until_ready(numbers["loss"])  # never more than one step ahead of the devices
            if self.since is None:
                self.since, self.first, self.waited = time.perf_counter(), before, 0.0
            if before % self.config.log_every == 0:
                self.read(before)
        self.positions = sum(side.tokens.size for side in batch.sides.values())
        self.unread.append((step, metrics))

    def read(self, last: int) -> None:
        """Read and check all unread steps, up to ``last``, and write the line of that one if it is due."""
        numbers = [{name: m[name] for name in CHECKED if name in m} for _, m in self.unread]
        for (step, _), values in zip(self.unread, jax.device_get(numbers), strict=True):
            self._check(step, values)
        if self.unread and (last % self.config.log_every == 0 or last == self.config.steps):
            metrics = jax.device_get(self.unread[-1][1])  # the others were needed for the check alone
            if "skipped_updates" in metrics:
                metrics["skipped_updates"], self.skipped = self.skipped, 0.0
            metrics.pop("consecutive_skipped", None)
            values = {name: float(x) if np.isfinite(x) else None for name, x in metrics.items()}
            self.log.write(last, "train", values | self._rates(last))
        self.unread.clear()

    @contextmanager
    def waiting(self) -> Iterator[None]:
        """Count the time inside as waiting for data if the devices have nothing to do at its end."""
        start = time.perf_counter()
        yield
        loss: Any = self.unread[-1][1]["loss"] if self.unread else None
        if loss is None or loss.is_ready():
            self.waited += time.perf_counter() - start

    def _check(self, step: int, values: Mapping[str, np.ndarray]) -> None:
        skipped = float(values.get("skipped_updates", 0.0))
        self.skipped += skipped
        numbers = {name: float(values[name]) for name in ("loss", "grad_norm")}
        if not (np.isfinite([*numbers.values()]).all() or skipped > 0):
            raise NonFiniteLoss(step, f"is not finite: {numbers}")
        most = self.config.guard.in_a_row
        if values.get("consecutive_skipped", 0) >= most:
            raise NonFiniteLoss(step, f"is the last of {most} in a row to be left out: {numbers}")

    def _rates(self, last: int) -> dict[str, float | None]:
        if self.since is None or last <= self.first:
            return {}
        elapsed = time.perf_counter() - self.since
        seconds = elapsed / (last - self.first)
        rates = {
            "seconds_per_step": seconds,
            "tokens_per_second": self.positions / seconds,
            "waiting_for_data": self.waited / elapsed,  # share of time, at most
            "utilisation": self.flops / seconds / self.peak if self.flops and self.peak else None,
        }
        self.since, self.first, self.waited = time.perf_counter(), last, 0.0
        return rates

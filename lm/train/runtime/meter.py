"""Metrics of each step: read while the next step runs, checked, and logged with the speed of training."""

import time
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import jax
import numpy as np

from lm.batch import Batch
from lm.config.training import LoopConfig
from lm.train.flops import peak_flops
from lm.train.runtime.log import Log, NonFiniteLoss
from lm.train.step import Metrics

# Metrics of every step that are checked. "skipped_updates", a key of metrics.jsonl: 1 if it was skipped.
CHECKED = ("loss", "grad_norm", "skipped_updates", "consecutive_skipped")


class Profile:
    """Traces steps by jax's profiler, from the first to the last of ``steps``; leaving the context ends it.

    ``tensorboard --logdir FOLDER`` (with its profile plugin) and https://ui.perfetto.dev show it.
    """

    def __init__(self, folder: Path, steps: tuple[int, int] | None):
        self.folder, self.steps, self._runs = folder, steps, False

    def before(self, step: int) -> None:
        """Start the trace if this step is to be traced and no step before was."""
        if self.steps and not self._runs and self.steps[0] <= step <= self.steps[1]:
            jax.profiler.start_trace(self.folder)
            self._runs = True

    def after(self, step: int, metrics: Metrics) -> None:
        """End the trace once the last step is done on the devices."""
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


class MetricsWriter:
    """Reads the metrics of each step while the next one runs, and logs those of every ``log_every``-th step.

    ``flops`` are those of one step. Raises NonFiniteLoss at a step whose loss or gradient is not finite,
    unless its update was skipped, and at the last of too many consecutive skips.
    """

    def __init__(self, log: Log, config: LoopConfig, flops: float | None):
        self.log, self.config, self.flops = log, config, flops
        self.pending: list[tuple[int, Metrics]] = []
        self.skipped = 0  # updates since the last line
        device_peak = peak_flops(jax.devices()[0])
        self.peak = device_peak and device_peak * jax.device_count()  # FLOP/s
        self.tokens_per_batch = 0  # inputs and targets, padding included
        self.restart_timer()

    def restart_timer(self) -> None:
        """Measure speed anew from the end of the next step on, without compiling, saving and evaluating."""
        self.since: float | None = None
        self.first, self.waited = 0, 0.0

    def add(self, step: int, metrics: Metrics, batch: Batch) -> None:
        """Add a started step; wait for the step before it, and log that if it is a ``log_every``-th.

        jax returns before a step is computed. Reading the step before, not this one, keeps devices busy.
        """
        if self.pending:
            before, numbers = self.pending[-1]
            jax.block_until_ready(numbers["loss"])  # never more than one step ahead of the devices
            if self.since is None:
                self.since, self.first, self.waited = time.perf_counter(), before, 0.0
            if before % self.config.log_every == 0:
                self.read(before)
        self.tokens_per_batch = sum(side.tokens.size for side in batch.sides.values())
        self.pending.append((step, metrics))

    def read(self, last: int) -> None:
        """Read and check all pending steps up to ``last``, and log that one if it is a ``log_every``-th."""
        numbers = [{name: m[name] for name in CHECKED if name in m} for _, m in self.pending]
        for (step, _), values in zip(self.pending, jax.device_get(numbers), strict=True):
            self._check(step, values)
        if self.pending and (last % self.config.log_every == 0 or last == self.config.steps):
            metrics = jax.device_get(self.pending[-1][1])  # the others were needed for the check alone
            if "skipped_updates" in metrics:
                metrics["skipped_updates"], self.skipped = self.skipped, 0
            metrics.pop("consecutive_skipped", None)
            values = {name: float(x) if np.isfinite(x) else None for name, x in metrics.items()}
            self.log.write(last, "train", values | self._rates(last))
        self.pending.clear()

    @contextmanager
    def waiting(self) -> Iterator[None]:
        """Count the time in this context as waiting for data if the devices are idle at its end."""
        start = time.perf_counter()
        yield
        loss: Any = self.pending[-1][1]["loss"] if self.pending else None
        if loss is None or loss.is_ready():
            self.waited += time.perf_counter() - start

    def _check(self, step: int, values: Mapping[str, np.ndarray]) -> None:
        skipped = int(values.get("skipped_updates", 0))
        self.skipped += skipped
        numbers = {name: float(values[name]) for name in ("loss", "grad_norm")}
        if not (np.isfinite([*numbers.values()]).all() or skipped > 0):
            raise NonFiniteLoss(step, f"is not finite: {numbers}")
        limit = self.config.guard.in_a_row
        if values.get("consecutive_skipped", 0) >= limit:
            raise NonFiniteLoss(step, f"is the last of {limit} in a row to be left out: {numbers}")

    def _rates(self, last: int) -> dict[str, float | None]:
        if self.since is None or last <= self.first:
            return {}
        elapsed = time.perf_counter() - self.since
        seconds = elapsed / (last - self.first)
        rates = {
            "seconds_per_step": seconds,
            "tokens_per_second": self.tokens_per_batch / seconds,
            "waiting_for_data": self.waited / elapsed,  # upper bound on the share of time
            "utilisation": self.flops / seconds / self.peak if self.flops and self.peak else None,
        }
        self.since, self.first, self.waited = time.perf_counter(), last, 0.0
        return rates

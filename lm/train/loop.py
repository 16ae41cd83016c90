"""The loop: step, read the step before while the device works, evaluate, save; until the end or a signal."""

import signal
import threading
import time
from collections import deque
from collections.abc import Callable, Iterable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from functools import partial
from itertools import count
from typing import Any

import jax
import numpy as np
from jax.experimental import multihost_utils

from lm import sharding
from lm.train.checkpoints import Checkpoints
from lm.train.config import LoopConfig
from lm.train.log import Log, NonFiniteLoss
from lm.train.state import State
from lm.train.step import Batch, Metrics, Steps
from lm.train.throughput import peak

HostBatch = dict[str, np.ndarray]
Evaluate = Callable[[State], dict[str, float]]


class Interrupted(KeyboardInterrupt):
    """A signal asked to stop; the state after ``step`` is saved and training goes on from it when started again."""

    def __init__(self, name: str, step: int):
        super().__init__(f"{name}: stopped after step {step}, which is saved")
        self.signal, self.step = name, step


def train(
    steps: Steps,
    seed: int,
    data: Callable[[int], Iterable[HostBatch]],
    checkpoints: Checkpoints,
    log: Log,
    evaluate: Evaluate,
    config: LoopConfig,
    initial: Callable[[], State] | None = None,
    flops: float | None = None,
) -> State:
    """Train to ``config.steps`` from the newest checkpoint, else from ``initial`` (random by ``seed``).

    ``data(start)`` gives this process's parts of the batches of steps start, start + 1, ... ; ``flops`` is those of
    one step, for the utilisation of the devices. The step is compiled while the first state is made.
    """
    restored = checkpoints.restore(steps.abstract)
    start = 0 if restored is None else int(restored.step)
    log.start(start)
    train_step, meter = steps.train_step(seed), Meter(log, config, flops)
    with Signals() as signals, ThreadPoolExecutor(1, "compile") as other:
        finish = partial(_finish, signals, meter, checkpoints, log, evaluate, config)
        batches = prefetch(data(start), steps.put, config.prefetch, meter)
        ahead = other.submit(_prepare, steps, seed, batches) if start < config.steps else None
        state = restored if restored is not None else initial() if initial else steps.init(seed)
        if restored is not None and _evaluates(start, config) and log.lacks(start, "eval"):
            finish(state, start)  # a signal cut the evaluation short
        for step in range(start + 1, config.steps + 1):
            batch, compiling = ahead.result() if step == start + 1 else (next(batches), None)
            begin = time.perf_counter()
            state, metrics = train_step(state, batch)
            if compiling is not None:
                compiling += time.perf_counter() - begin
                jax.block_until_ready(metrics["loss"])
                log.began(compiling)
            meter.add(step, metrics, batch)
            finish(state, step)
    checkpoints.wait()
    return state


def _prepare(steps: Steps, seed: int | tuple[int, ...], batches: Iterator[Batch]) -> tuple[Batch, float]:
    """The first batch, and the seconds it took to compile the step for it; jax finds that when the step is called."""
    batch, begin = next(batches), time.perf_counter()
    if np.ndim(seed) == 0:  # several runs at once have states that ``abstract`` does not describe
        number = jax.ShapeDtypeStruct((), np.uint32, sharding=sharding.replicated(steps.mesh))
        steps.train.lower(steps.abstract, sharding.described(batch), number).compile()
    return batch, time.perf_counter() - begin


def _evaluates(step: int, config: LoopConfig) -> bool:
    return step == config.steps or step % config.evaluate_every == 0


def _finish(
    signals: "Signals",
    meter: "Meter",
    checkpoints: Checkpoints,
    log: Log,
    evaluate: Evaluate,
    config: LoopConfig,
    state: State,
    step: int,
) -> None:
    """Evaluate and save what is due after ``step``, having read that step's numbers; raise if asked to stop."""
    stop = signals.received()
    saves = step == config.steps or step % checkpoints.config.every == 0
    if not (stop or saves or _evaluates(step, config)):
        return
    meter.read(step)
    values = signals.until_received(lambda: evaluate(state)) if _evaluates(step, config) and not stop else None
    if values is not None:
        log.write(step, "eval", values)
    stop = stop or signals.name
    if stop or saves:
        checkpoints.save(state, None if values is None else values.get(config.score))
    if stop:
        checkpoints.wait()
        raise Interrupted(stop, step)
    meter.restart()


def prefetch(
    data: Iterable[HostBatch], put: Callable[[HostBatch], Batch], ahead: int, meter: "Meter"
) -> Iterator[Batch]:
    """The batches on the devices, ``ahead`` of them before they are asked for."""
    queue, source = deque(), iter(data)
    while True:
        with meter.waiting():
            while len(queue) <= ahead and (batch := next(source, None)) is not None:
                queue.append(put(batch))
        if not queue:
            raise ValueError("the data ended before the last step")
        yield queue.popleft()


class Meter:
    """Reads each step's numbers while the next step runs; writes every ``log_every``-th and stops at a bad one."""

    def __init__(self, log: Log, config: LoopConfig, flops: float | None):
        self.log, self.config, self.flops = log, config, flops
        self.unread: list[tuple[int, Metrics]] = []
        device_peak = peak(jax.devices()[0])
        self.peak = device_peak and device_peak * jax.device_count()
        self.restart()

    def restart(self) -> None:
        """Measure from the end of the next step on: what came before is no training."""
        self.since, self.first, self.waited, self.positions = None, 0, 0.0, 0

    def add(self, step: int, metrics: Metrics, batch: Batch) -> None:
        if self.unread:
            before = self.unread[-1][0]
            jax.block_until_ready(self.unread[-1][1]["loss"])  # never more than one step ahead of the devices
            if self.since is None:
                self.since, self.first, self.waited = time.perf_counter(), before, 0.0
            if before % self.config.log_every == 0:
                self.read(before)
        self.positions = sum(x.size for name, x in batch.items() if name.endswith("_input_tokens"))
        self.unread.append((step, metrics))

    def read(self, last: int) -> None:
        """Read all steps not yet read, up to ``last``, and write that one if it is due."""
        names = ("loss", "grad_norm")
        checked = jax.device_get([{name: metrics[name] for name in names} for _, metrics in self.unread])
        for (step, _), values in zip(self.unread, checked, strict=True):
            if not np.isfinite([*values.values()]).all():
                raise NonFiniteLoss(step, {name: value.tolist() for name, value in values.items()})
        if self.unread and (last % self.config.log_every == 0 or last == self.config.steps):
            values = {name: value.tolist() for name, value in jax.device_get(self.unread[-1][1]).items()}
            self.log.write(last, "train", values | self._rates(last))
        self.unread.clear()

    def _rates(self, last: int) -> dict[str, float | None]:
        if self.since is None or last <= self.first:
            return {}
        elapsed = time.perf_counter() - self.since
        seconds = elapsed / (last - self.first)
        rates = {
            "seconds_per_step": seconds,
            "tokens_per_second": self.positions / seconds,  # inputs and targets, padding included
            "waiting_for_data": self.waited / elapsed,  # share of time, at most
            "utilisation": self.flops / seconds / self.peak if self.flops and self.peak else None,
        }
        self.since, self.first, self.waited = time.perf_counter(), last, 0.0
        return rates

    @contextmanager
    def waiting(self):
        """Count the time inside if the devices have nothing to do at its end."""
        start = time.perf_counter()
        yield
        if not self.unread or self.unread[-1][1]["loss"].is_ready():
            self.waited += time.perf_counter() - start


_asked = count(1)  # how often all processes have looked for a signal: their common clock, over all phases of a run


class Signals:
    """SIGINT and SIGTERM are taken down, not obeyed, while in this context.

    A second one is obeyed where there is one process. With several jax passes a SIGTERM on to all of them, and they
    agree on the step to stop after.
    """

    def __init__(self):
        self.name: str | None = None
        self._interruptible = False

    def __enter__(self) -> "Signals":
        here = jax.process_count() == 1 and threading.current_thread() is threading.main_thread()
        taken = (signal.SIGINT, signal.SIGTERM) if here else ()
        self._before = {number: signal.signal(number, self._take) for number in taken}
        return self

    def __exit__(self, *_):
        self._restore()

    def received(self) -> str | None:
        """The name of the signal after which to stop, here and now."""
        if jax.process_count() > 1 and multihost_utils.reached_preemption_sync_point(next(_asked)):
            return "SIGTERM"
        return self.name

    def until_received(self, work: Callable[[], Any]) -> Any:
        """What ``work`` gives; None if a signal came before its end."""
        try:
            self._interruptible = True
            return None if self.name else work()
        except _Stop:
            return None
        finally:
            self._interruptible = False

    def _take(self, number: int, _) -> None:
        self.name = signal.Signals(number).name
        self._restore()
        if self._interruptible:
            raise _Stop

    def _restore(self) -> None:
        for number, handler in self._before.items():
            signal.signal(number, handler)


class _Stop(BaseException):
    """Leaves an evaluation at once."""

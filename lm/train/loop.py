"""The loop: step, read the step before while the device works, save, evaluate; until the end or a signal."""

import threading
import time
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Mapping
from concurrent.futures import Future
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from functools import partial
from typing import Any

import jax
import numpy as np

from lm import sharding
from lm.settings import SettingError
from lm.train.checkpoints import CheckpointError, Checkpoints
from lm.train.config import LoopConfig
from lm.train.log import Log, NonFiniteLoss
from lm.train.signals import Interrupted, Signals
from lm.train.state import State
from lm.train.step import Batch, Metrics, Steps
from lm.train.throughput import peak
from lm.train.watchdog import Watchdog

# of an evaluation that ends the process: two kills from outside may well meet one evaluation, three hardly
TRIES = 3
HostBatch = dict[str, np.ndarray]
Evaluate = Callable[[State], dict[str, float]]


@dataclass(frozen=True)
class Run:
    """What is trained: from what data and which state, and where that is kept, written down and evaluated."""

    seed: int
    data: Callable[[int], Iterable[HostBatch]]  # first step -> this process's parts of the batches from it on
    checkpoints: Checkpoints
    log: Log
    evaluate: Evaluate
    initial: Callable[[], State] | None = None  # the state before the first step; None: random by the seed
    flops: float | None = None  # of one step, for the utilisation of the devices


def train(steps: Steps, run: Run, config: LoopConfig) -> State:
    """Train to ``config.steps`` from the newest checkpoint, else from the run's initial state.

    The step is compiled while the first state is made. Raises Interrupted after a signal, having saved, and
    NonFiniteLoss, each process having written its part of the batch.
    """
    seed, checkpoints, log = run.seed, run.checkpoints, run.log
    restored = checkpoints.restore(steps.abstract)
    start = 0 if restored is None else int(restored.step)
    if start > config.steps:
        raise SettingError(
            f"{log.folder} is trained to step {start} already, which is more than steps={config.steps}"
        )
    log.start(start)
    train_step, meter = steps.train_step(seed), Meter(log, config, run.flops)
    stacks = log.folder / f"stuck-{jax.process_index()}.txt"
    with Signals() as signals, Watchdog(config.patience, stacks) as watchdog, _batch_kept(run):
        finish = partial(_finish, signals, meter, run, config)
        put = partial(sharding.put_batch, mesh=steps.mesh)
        batches = prefetch(run.data(start), put, config.prefetch, meter)
        ahead = _begin(partial(_prepare, steps, seed, batches)) if start < config.steps else None
        state = restored if restored is not None else run.initial() if run.initial else steps.init(seed)
        if restored is not None and _evaluates(start, config) and log.lacks(start, "eval"):
            _evaluate(signals, run, config, state)  # it was cut short
        for step in range(start + 1, config.steps + 1):
            batch, compiling = _first(signals, ahead, start) if step == start + 1 else (next(batches), None)
            begin = time.perf_counter()
            state, metrics = train_step(state, batch)
            if compiling is not None:
                compiling += time.perf_counter() - begin
                jax.block_until_ready(metrics["loss"])
                log.began(compiling)
            meter.add(step, metrics, batch)
            watchdog.beat()
            finish(state, step)
        checkpoints.wait()
        checkpoints.tidy(config.steps)
    if signals.name:
        raise Interrupted(signals.name, config.steps)
    return state


def _begin(work: Callable[[], Any]) -> Future:
    """``work`` in a thread which no end of the process waits for: nothing interrupts a compiler."""
    future = Future()

    def run():
        try:
            future.set_result(work())
        except BaseException as error:
            future.set_exception(error)

    threading.Thread(target=run, name="compile", daemon=True).start()
    return future


def _first(signals: Signals, ahead: Future, start: int) -> tuple[Batch, float]:
    """What ``_prepare`` gives; a signal need not wait for it, as all there is to save is saved."""
    prepared = signals.until_received(ahead.result)
    if prepared is None:
        raise Interrupted(signals.name, start)
    return prepared


@contextmanager
def _batch_kept(run: Run) -> Iterator[None]:
    """Of a step that is not finite the batch is written beside the log, and the message says where."""
    try:
        yield
    except NonFiniteLoss as error:
        path = run.log.folder / f"batch-{error.step}-{jax.process_index()}.npz"
        with suppress(OSError):
            np.savez(path, **next(iter(run.data(error.step - 1))))
            error.add(f"its batch is in {path}")
        with suppress(CheckpointError):
            run.checkpoints.wait()
        newest = max((step for step in run.checkpoints.steps() if step < error.step), default=None)
        error.add(
            "nothing was saved yet"
            if newest is None
            else f"the checkpoint of step {newest} is from before it"
        )
        raise


def _prepare(steps: Steps, seed: int, batches: Iterator[Batch]) -> tuple[Batch, float]:
    """The first batch, and the seconds it took to compile the step for it; jax finds that when the step is
    called.
    """
    batch, begin = next(batches), time.perf_counter()
    number = jax.ShapeDtypeStruct((), np.uint32, sharding=sharding.replicated(steps.mesh))
    steps.train.lower(steps.abstract, sharding.described(batch), number).compile()
    return batch, time.perf_counter() - begin


def _evaluates(step: int, config: LoopConfig) -> bool:
    return step == config.steps or step % config.evaluate_every == 0


def _finish(signals: Signals, meter: "Meter", run: Run, config: LoopConfig, state: State, step: int) -> None:
    """Save what is due after ``step``, having read that step's numbers, then evaluate it; raise if asked to
    stop.
    """
    stop, evaluates = signals.received(), _evaluates(step, config)
    if not (stop or evaluates or step % run.checkpoints.config.every == 0):
        return
    meter.read(step)
    run.checkpoints.save(state)
    if stop:
        run.checkpoints.wait()
        raise Interrupted(stop, step)
    if evaluates:
        run.checkpoints.settle()  # whatever the evaluation does to this process, the step is on the disk
        _evaluate(signals, run, config, state)
    meter.restart()


def _evaluate(signals: Signals, run: Run, config: LoopConfig, state: State) -> None:
    """Evaluate a state that is saved: its checkpoint gets the scores, then the log its line; raise if asked
    to stop.
    """
    step, log = int(state.step), run.log
    if (ended := log.ended_evaluating(step)) >= TRIES:
        raise SettingError(
            f"the evaluation of step {step} has ended this run {ended} times in a row, how is in "
            f"{log.folder}/run.json "
            "under starts; the step is saved. Mend this, such as too little memory, and start again: it "
            "is tried anew"
        )
    with log.evaluating(step):
        values = signals.until_received(lambda: run.evaluate(state))
        if values is not None:
            run.checkpoints.score(step, *_ranks(values, config))
            log.write(step, "eval", values)
    if signals.name:
        run.checkpoints.wait()
        raise Interrupted(signals.name, step)


def _ranks(values: Mapping[str, float], config: LoopConfig) -> tuple[dict[str, float], dict[str, float]]:
    """What ranks a checkpoint: the score and that of each task; and, by its name, the mean loss of what each
    is of.
    """
    scores = {name: value for name, value in values.items() if name.split("/")[-1] == config.score}
    losses = {name: value for name, value in values.items() if name.split("/")[-1] == "loss"}
    of = {
        name: [losses[n] for n in losses if n.startswith(name.removesuffix(config.score))] for name in scores
    }
    return scores, {name: sum(found) / len(found) for name, found in of.items() if found}


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
    """Reads each step's numbers while the next step runs; writes every ``log_every``-th and stops at a bad
    one.
    """

    def __init__(self, log: Log, config: LoopConfig, flops: float | None):
        self.log, self.config, self.flops = log, config, flops
        self.unread: list[tuple[int, Metrics]] = []
        self.left_out = 0.0  # updates since the last line
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
        names = ("loss", "grad_norm", "left_out", "left_out_in_a_row")
        checked = jax.device_get([{name: m[name] for name in names if name in m} for _, m in self.unread])
        for (step, _), values in zip(self.unread, checked, strict=True):
            self._check(step, values)
        if self.unread and (last % self.config.log_every == 0 or last == self.config.steps):
            found = jax.device_get(self.unread[-1][1])
            if "left_out" in found:
                found["left_out"], self.left_out = self.left_out, 0.0
            found.pop("left_out_in_a_row", None)
            values = {name: float(x) if np.isfinite(x) else None for name, x in found.items()}
            self.log.write(last, "train", values | self._rates(last))
        self.unread.clear()

    def _check(self, step: int, values: Mapping[str, np.ndarray]) -> None:
        left_out = values.get("left_out", 0.0)
        self.left_out += left_out
        shown = {name: float(values[name]) for name in ("loss", "grad_norm")}
        if not (np.isfinite([*shown.values()]).all() or left_out > 0):
            raise NonFiniteLoss(step, f"is not finite: {shown}")
        if values.get("left_out_in_a_row", 0) >= self.config.guard.in_a_row:
            raise NonFiniteLoss(
                step, f"is the last of {self.config.guard.in_a_row} in a row to be left out: {shown}"
            )

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

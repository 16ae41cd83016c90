"""The training loop: run a step, read the metrics of the one before, save, evaluate; to the end or a signal.

jax starts a step and returns at once, so the loop prepares batches and writes lines while devices compute.
"""

import threading
import time
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Mapping
from concurrent.futures import Future
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from typing import Any

import jax
import numpy as np
from jax.sharding import Mesh

from lm import sharding
from lm.batch import Batch
from lm.config.base import SettingError
from lm.config.training import LoopConfig
from lm.train.runtime.checkpoints import CheckpointError, Checkpoints
from lm.train.runtime.log import Log, NonFiniteLoss
from lm.train.runtime.meter import Meter, Profile
from lm.train.runtime.preemption import Stopping
from lm.train.state import State
from lm.train.step import Metrics, Steps

# Tries of an evaluation during which the process is killed. Two kills from outside may hit the same one by
# chance, three hardly: then it is the evaluation's fault, such as too much memory.
TRIES = 3


@dataclass(frozen=True)
class Run:
    """What is trained: from what data and which state, and where that is saved, logged and evaluated."""

    seed: int
    data: Callable[[int], Iterable[Batch]]  # first step -> this process's parts of the batches from it on
    checkpoints: Checkpoints
    log: Log
    evaluate: Callable[[State], dict[str, float]]
    initial: Callable[[], State] | None = None  # the state before the first step; None: random by the seed
    flops: float | None = None  # of one step, to compute the utilisation of devices; None: unknown

    def start(self, restored: State | None, config: LoopConfig) -> int:
        """The last step already trained, 0 in a new run; the log records it as a start."""
        start = 0 if restored is None else int(restored.step)
        if start > config.steps:
            reached = f"{self.log.folder} is trained to step {start} already"
            raise SettingError(f"{reached}, which is more than steps={config.steps}")
        self.log.start(start)
        return start

    def first_state(self, steps: Steps) -> State:
        """The state before the first step."""
        return self.initial() if self.initial else steps.init(self.seed)


def train(steps: Steps, run: Run, config: LoopConfig) -> State:
    """Train to ``config.steps`` from the newest checkpoint, else from the run's initial state.

    Raises Interrupted after a signal, having saved, and NonFiniteLoss, each process having written its part
    of the batch.
    """
    restored = run.checkpoints.restore(steps.abstract)
    start = run.start(restored, config)
    stacks = run.log.folder / f"stuck-{jax.process_index()}.txt"
    profile = Profile(run.log.folder / "profile", config.profile)
    with Stopping(config.patience, stacks) as stopping, _bad_batch_saved(run), profile:
        meter = Meter(run.log, config, run.flops)
        milestones = Milestones(run, config, meter, stopping)
        batches = Prefetched(run.data(start), steps.mesh, config.prefetch, meter)
        # The step compiles in a thread while the first state is made: both take long.
        train_step = CompiledStep(steps, run, batches)
        state = run.first_state(steps) if restored is None else restored
        if restored is not None:
            milestones.make_up(state)
        train_step.wait(stopping, start)
        for step in range(start + 1, config.steps + 1):
            batch = next(batches)
            profile.before(step)
            state, metrics = train_step(state, batch)
            profile.after(step, metrics)
            meter.add(step, metrics, batch)  # reads the step before
            stopping.beat()
            milestones.reach(state, step)  # saves, evaluates, stops
        run.checkpoints.wait()
        run.checkpoints.tidy(config.steps)
    stopping.check(config.steps)
    return state


class Prefetched(Iterator[Batch]):
    """Batches on the devices, ``ahead`` of them copied before they are needed; ValueError after the last."""

    def __init__(self, data: Iterable[Batch], mesh: Mesh, ahead: int, meter: Meter):
        self._source, self._mesh, self._ahead, self._meter = iter(data), mesh, ahead, meter
        self._queue: deque[Batch] = deque()

    def __next__(self) -> Batch:
        if self.peek() is None:
            raise ValueError("the data ended before the last step")
        return self._queue.popleft()

    def peek(self) -> Batch | None:
        """The next batch, which stays in the queue; None if there is none."""
        with self._meter.waiting():
            while len(self._queue) <= self._ahead and (batch := next(self._source, None)) is not None:
                self._queue.append(sharding.put_batch(batch, self._mesh))
        return self._queue[0] if self._queue else None


class CompiledStep:
    """The training step, which compiles in a thread for the first of ``batches``; the log is told the time.

    The end of the process does not wait for that thread, as nothing interrupts a compiler.
    """

    def __init__(self, steps: Steps, run: Run, batches: Prefetched):
        self._step, self._log = steps.train_step(run.seed), run.log
        self._seconds: float | None = None  # that compilation took, until it is logged
        self._compiled: Future[float] = Future()

        def compile_ahead() -> None:
            try:
                batch, begin = batches.peek(), time.perf_counter()
                if batch is not None:
                    steps.compile_train(batch)
                self._compiled.set_result(time.perf_counter() - begin)
            except BaseException as error:
                self._compiled.set_exception(error)

        threading.Thread(target=compile_ahead, name="compile", daemon=True).start()

    def wait(self, stopping: Stopping, start: int) -> None:
        """Return when it is compiled; a signal need not wait for that, as step ``start`` is saved."""
        self._seconds = stopping.interruptible(self._compiled.result)
        if self._seconds is None:
            stopping.check(start)

    def __call__(self, state: State, batch: Batch) -> tuple[State, Metrics]:
        if self._seconds is None:
            return self._step(state, batch)
        # The first call still takes a moment: it counts as compilation.
        begin = time.perf_counter()
        state, metrics = self._step(state, batch)
        seconds, self._seconds = self._seconds + time.perf_counter() - begin, None
        jax.block_until_ready(metrics["loss"])
        self._log.began(seconds)
        return state, metrics


@dataclass(frozen=True)
class Milestones:
    """Saves, evaluates and stops a run after the steps where that is due."""

    run: Run
    config: LoopConfig
    meter: Meter
    stopping: Stopping

    def reach(self, state: State, step: int) -> None:
        """What is due after ``step``, once its numbers are read; Interrupted if a signal asked to stop."""
        checkpoints, evaluates = self.run.checkpoints, self._evaluates(step)
        stops = self.stopping.requested()
        saves = stops or step == self.config.steps or checkpoints.config.due(step)
        if not (saves or evaluates):
            return
        self.meter.read(step)
        if saves:
            checkpoints.save(state)
        if stops:
            checkpoints.wait()
            self.stopping.check(step)
        if evaluates:
            checkpoints.settle()  # whatever the evaluation does to this process, what is saved stays
            self.evaluate(state, saves)
        self.meter.restart()

    def make_up(self, state: State) -> None:
        """Evaluate a restored state if its evaluation was cut short."""
        step = int(state.step)
        if self._evaluates(step) and self.run.log.lacks(step, "eval"):
            self.evaluate(state, saved=True)

    def evaluate(self, state: State, saved: bool) -> None:
        """Evaluate a state: first its checkpoint, if it has one, gets the scores, then the log its line."""
        step, log, checkpoints = int(state.step), self.run.log, self.run.checkpoints
        if (ended := log.ended_evaluating(step)) >= TRIES:
            raise SettingError(
                f"the evaluation of step {step} has ended this run {ended} times in a row; how is in "
                f"{log.folder}/run.json under starts. Mend the cause, such as too little memory, and start "
                "again: training goes on from the last checkpoint, and the evaluation is tried anew"
            )
        with log.evaluating(step):
            values = self.stopping.interruptible(lambda: self.run.evaluate(state))
            if values is not None:
                if saved:
                    checkpoints.score(step, *_scores_and_losses(values, self.config.score))
                log.write(step, "eval", values)
        if self.stopping.signal:
            if not saved:
                checkpoints.save(state)
            checkpoints.wait()
            self.stopping.check(step)

    def _evaluates(self, step: int) -> bool:
        ends = step == self.config.steps or step in self.run.checkpoints.config.steps
        return ends or step % self.config.evaluate_every == 0


LOSSES = ("loss", "bits_per_byte")  # decide between checkpoints of equal score: less is better


def _scores_and_losses(values: Mapping[str, float], score: str) -> tuple[dict[str, float], dict[str, float]]:
    """What ranks a checkpoint: the score and that of each task; and, by its name, the mean loss beside it."""
    scores = {name: value for name, value in values.items() if name.split("/")[-1] == score}
    losses = {name: value for name, value in values.items() if name.split("/")[-1] in LOSSES}
    means = {}
    for name in scores:
        task = [losses[loss] for loss in losses if loss.startswith(name.removesuffix(score))]
        if task:
            means[name] = sum(task) / len(task)
    return scores, means


@contextmanager
def _bad_batch_saved(run: Run) -> Iterator[None]:
    """After a NonFiniteLoss the step's batch is written beside the log, and the message names the file."""
    try:
        yield
    except NonFiniteLoss as error:
        path = run.log.folder / f"batch-{error.step}-{jax.process_index()}.npz"
        with suppress(OSError):
            batch: dict[str, Any] = next(iter(run.data(error.step - 1))).features()
            np.savez(path, **batch)
            error.add(f"its batch is in {path}")
        with suppress(CheckpointError):
            run.checkpoints.wait()
        newest = max((step for step in run.checkpoints.steps() if step < error.step), default=None)
        before = f"the checkpoint of step {newest} is from before it"
        error.add("nothing was saved yet" if newest is None else before)
        raise

"""The training loop: run a step, read the metrics of the previous step, save and evaluate periodically.

JAX dispatches a step asynchronously, so the loop prepares batches and writes logs while devices compute.
"""

import threading
import time
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Mapping
from concurrent.futures import Future
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from importlib import import_module
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
from lm.train.runtime.meter import MetricsWriter, Profile
from lm.train.runtime.preemption import COMPILER_THREAD, PreemptionHandler, start_preemption_service
from lm.train.state import State
from lm.train.step import Metrics, Steps

# After this many kills during the evaluation of one step, that evaluation is not tried again. Two kills from
# outside can be coincidence; three are probably caused by the evaluation, for example by its memory.
MAX_EVALUATION_TRIES = 3


@dataclass(frozen=True)
class Run:
    """The data, checkpoints, log and evaluation of a run."""

    seed: int
    data: Callable[[int], Iterable[Batch]]  # steps done -> this process's rows of the batches that follow
    checkpoints: Checkpoints
    log: Log
    evaluate: Callable[[State], dict[str, float]]
    initial: Callable[[], State] | None = None  # returns the state to start from; None: random by the seed
    flops: float | None = None  # of one step, to compute the utilisation of devices; None: unknown
    first_step: int = 0  # step of the state to start from: steps of another run, which this one continues
    teacher_params: dict[str, jax.Array] | None = None  # parameters of the teacher, if the steps have one

    def start(self, restored: State | None, config: LoopConfig) -> int:
        """Resume the log after the steps already done, and return their number: ``first_step`` in a new run.

        Records of later steps, which an interrupted run wrote after its last checkpoint, are deleted from the
        log. Raises SettingError if more than ``config.steps`` steps are done.
        """
        start = self.first_step if restored is None else int(restored.step)
        if start > config.steps:
            raise SettingError(
                f"{self.log.folder} is trained to step {start} already, which is more than "
                f"steps={config.steps}: ask for at least as many, or train in another folder"
            )
        self.log.resume_after(start)
        return start

    def initial_state(self, steps: Steps) -> State:
        """Return the state before the first step."""
        return self.initial() if self.initial else steps.initial_state(self.seed)


def train(steps: Steps, run: Run, config: LoopConfig) -> State:
    """Return the state after ``config.steps``, from the newest checkpoint or else the run's initial state.

    Raises Interrupted after a signal, once the state is saved. Raises NonFiniteLoss, once each process has
    written its shard of the batch.
    """
    restored = run.checkpoints.restore(steps.abstract)
    start = run.start(restored, config)
    stack_traces = run.log.folder / f"stuck-{jax.process_index()}.txt"
    profile = Profile(run.log.folder / "profile", config.profile)
    with PreemptionHandler(config.patience, stack_traces) as preemption, _save_bad_batch(run), profile:
        if preemption.requested():  # with several processes, a signal may come between two stages
            preemption.check(start)
        meter = MetricsWriter(run.log, config, run.flops)
        periodic = PeriodicActions(run, config, meter, preemption)
        batches = Prefetched(run.data(start), steps.mesh, config.prefetch, meter)
        # The step compiles in a thread while the initial state is computed: both take long.
        train_step = CompiledStep(steps, run, batches)
        state = run.initial_state(steps) if restored is None else restored
        if restored is not None:
            meter.skipped = restored.unlogged_skips
            state = restored.with_unlogged_skips(0)
            periodic.catch_up_evaluation(state)
        train_step.wait(preemption, start)
        for step in range(start + 1, config.steps + 1):
            batch = next(batches)
            profile.before(step)
            state, metrics = train_step(state, batch)
            profile.after(step, metrics)
            meter.add(step, metrics, batch)  # waits for the step before this one, and may log it
            preemption.heartbeat()
            periodic.on_step_end(state, step)  # saves, evaluates, stops
        run.checkpoints.wait()
        run.checkpoints.garbage_collect(config.steps)
    preemption.check(config.steps)
    return state


class Prefetched(Iterator[Batch]):
    """Iterates over batches on the devices, to which the next ``ahead`` batches are copied in advance.

    Raises ValueError after the last batch, since there should be one for each step.
    """

    def __init__(self, data: Iterable[Batch], mesh: Mesh, ahead: int, meter: MetricsWriter):
        self._source, self._mesh, self._ahead, self._meter = iter(data), mesh, ahead, meter
        self._queue: deque[Batch] = deque()

    def __next__(self) -> Batch:
        if self.peek() is None:
            raise ValueError("the data ended before the last step")
        return self._queue.popleft()

    def peek(self) -> Batch | None:
        """Return the next batch, which stays in the queue; None if there is none."""
        with self._meter.waiting():
            while len(self._queue) <= self._ahead and (batch := next(self._source, None)) is not None:
                self._queue.append(sharding.put_batch(batch, self._mesh))
        return self._queue[0] if self._queue else None


class CompiledStep:
    """The training step, compiled in a thread for the shapes of the first of ``batches``.

    The compile time is logged. The thread is a daemon, since a compilation cannot be interrupted and the
    process may have to end before it.
    """

    def __init__(self, steps: Steps, run: Run, batches: Prefetched):
        self._step, self._log = steps.seeded_train_step(run.seed, run.teacher_params), run.log
        # None until the step is compiled, and again once the time is logged
        self._compile_seconds_to_log: float | None = None
        self._compiled: Future[float] = Future()

        def compile_ahead() -> None:
            try:
                batch, begin = batches.peek(), time.perf_counter()
                if batch is not None:
                    steps.compile_train_step(batch)
                self._compiled.set_result(time.perf_counter() - begin)
            except BaseException as error:
                self._compiled.set_exception(error)

        # grain, which makes batches, replaces Python's import function for a moment while it is imported. It
        # is imported before the thread starts, since the thread might import something at that moment.
        import_module("grain")
        threading.Thread(target=compile_ahead, name=COMPILER_THREAD, daemon=True).start()

    def wait(self, preemption: PreemptionHandler, start: int) -> None:
        """Wait until the step is compiled; raise Interrupted at a signal.

        Nothing has to be saved then, since no step has been done after ``start``: its state is the initial
        one, or was saved by this run or by the run that it continues.
        """
        self._compile_seconds_to_log = preemption.interruptible(self._compiled.result)
        if self._compile_seconds_to_log is None:
            preemption.check(start)

    def __call__(self, state: State, batch: Batch) -> tuple[State, Metrics]:
        if self._compile_seconds_to_log is None:
            return self._step(state, batch)
        # The first call is slower than the others, so it counts as compilation.
        begin = time.perf_counter()
        state, metrics = self._step(state, batch)
        seconds = self._compile_seconds_to_log + time.perf_counter() - begin
        self._compile_seconds_to_log = None
        jax.block_until_ready(metrics["loss"])
        self._log.log_first_step(seconds)
        start_preemption_service()
        return state, metrics


@dataclass(frozen=True)
class PeriodicActions:
    """Saving, evaluating and stopping, which happen after some steps."""

    run: Run
    config: LoopConfig
    meter: MetricsWriter
    preemption: PreemptionHandler

    def on_step_end(self, state: State, step: int) -> None:
        """Save and evaluate if that is due after ``step``; raise Interrupted after a stop signal.

        The metrics of the step are read first, so that no state with a non-finite loss is saved.
        """
        checkpoints, should_evaluate = self.run.checkpoints, self._should_evaluate(step)
        should_stop = self.preemption.requested()
        should_save = should_stop or step == self.config.steps or checkpoints.config.due(step)
        if not (should_save or should_evaluate):
            return
        self.meter.read(step)
        if should_save:
            self._save(state)
        if should_stop:
            checkpoints.wait()
            self.preemption.check(step)
        if should_evaluate:
            checkpoints.wait_until_finished()  # the evaluation may end this process
            self.evaluate(state, is_saved=should_save)
        self.meter.restart_timer()

    def catch_up_evaluation(self, state: State) -> None:
        """Evaluate a restored state if the evaluation of its step is due and was interrupted."""
        step = int(state.step)
        if self._should_evaluate(step) and not self.run.log.has_record(step, "eval"):
            self.evaluate(state, is_saved=True)

    def evaluate(self, state: State, is_saved: bool) -> None:
        """Evaluate a state; write the scores to its checkpoint, if it is saved, and then to the log.

        Raises SettingError if the process was killed in this evaluation MAX_EVALUATION_TRIES times.
        """
        step, log, checkpoints = int(state.step), self.run.log, self.run.checkpoints
        if (crashes := log.evaluation_crashes(step)) >= MAX_EVALUATION_TRIES:
            raise SettingError(
                f"the evaluation of step {step} has ended this run {crashes} times in a row; see `starts` in "
                f"{log.folder}/run.json for how it ended. Fix the cause, e.g. too little memory, and "
                "restart: training resumes from the last checkpoint and the evaluation is retried"
            )
        with log.evaluating(step):
            values = self.preemption.interruptible(lambda: self.run.evaluate(state))
            if values is not None:
                if is_saved:
                    checkpoints.write_scores(step, *_scores_and_losses(values, self.config.score))
                log.write(step, "eval", values)
        if self.preemption.signal:
            if not is_saved:
                self._save(state)
            checkpoints.wait()
            self.preemption.check(step)

    def _save(self, state: State) -> None:
        """Flush the records up to this step to disk, then save the state.

        A run that resumes from it does not write those records again.
        """
        self.run.log.sync()
        self.run.checkpoints.save(state.with_unlogged_skips(self.meter.skipped))

    def _should_evaluate(self, step: int) -> bool:
        is_named = step == self.config.steps or step in self.run.checkpoints.config.steps
        return is_named or step % self.config.evaluate_every == 0


LOSSES = ("loss", "bits_per_byte")  # between checkpoints of equal score the lower one is better


def _scores_and_losses(values: Mapping[str, float], score: str) -> tuple[dict[str, float], dict[str, float]]:
    """Return scores by name, which rank checkpoints, and a mean loss for each score, which breaks ties."""

    def measure(name: str) -> str:
        """Return the last part of a name such as "copy/exact_match"."""
        return name.split("/")[-1]

    scores = {name: value for name, value in values.items() if measure(name) == score}
    losses = {name: value for name, value in values.items() if measure(name) in LOSSES}
    means = {}
    for name in scores:
        prefix = name.removesuffix(score)
        task_losses = [loss for loss_name, loss in losses.items() if loss_name.startswith(prefix)]
        if task_losses:
            means[name] = sum(task_losses) / len(task_losses)
    return scores, means


@contextmanager
def _save_bad_batch(run: Run) -> Iterator[None]:
    """On a NonFiniteLoss in this context, save the step's batch beside the log and name it in the error."""
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
        if newest is None:
            error.add("nothing was saved yet")
        else:
            error.add(f"the checkpoint of step {newest} is from before it")
        raise

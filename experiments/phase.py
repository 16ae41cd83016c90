"""One phase of training in its folder: what all phases of a run share, and how each is brought to its end."""

import fcntl
import json
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import asdict, dataclass, replace
from pathlib import Path

import jax

from experiments.experiment import Experiment, PhaseConfig
from experiments.prepare import Prepared
from experiments.processes import agreed
from experiments.progress import Reporter
from lm import sharding
from lm.data import pipeline
from lm.data.objectives import Lengths
from lm.data.packing import row_length
from lm.nn.tuned import BODY
from lm.train import together
from lm.train.checkpoints import Checkpoints
from lm.train.config import LoopConfig
from lm.train.log import Log
from lm.train.state import State
from lm.train.step import Steps
from lm.train.throughput import step_flops
from lm.train.together import Run

Start = Callable[[Steps], State]  # the state before the first step of a phase


@dataclass(frozen=True)
class Session:
    """What every phase of a run reads and tells."""

    experiment: Experiment
    prepared: Prepared
    mesh: jax.sharding.Mesh
    cache: Path  # of prepared data
    reporter: Reporter


@dataclass(frozen=True)
class Phase:
    """What is trained in the folder that holds ``checkpoints``, how, and from where."""

    session: Session
    config: PhaseConfig
    steps: Steps
    batches: pipeline.BatchFunction
    lengths: Lengths
    checkpoints: Checkpoints
    evaluate: Callable[[State], dict[str, float]]
    start: Start | None = None

    @property
    def folder(self) -> Path:
        return Path(self.checkpoints.folder).parent

    def data(self, first: int) -> Iterator[pipeline.Batch]:
        """This process's parts of the batches from step ``first`` on, each of them a step of progress."""
        reporter = self.session.reporter
        rows = sharding.rows_of_process(self.steps.mesh, self.config.batch_size)
        reporter.advance(first)
        workers = self.session.experiment.data.workers
        stream = pipeline.stream(self.batches, first, self.config.steps, rows=rows, workers=workers)
        for batch in stream:
            yield batch
            reporter.advance(1)

    @property
    def flops(self) -> float:
        """Of one step."""
        model = self.session.experiment.model
        if any(name.startswith(BODY) for name in self.steps.abstract.params):
            model = replace(model, logits="none")  # what a head tells costs next to nothing
        targets = row_length(model.architecture, self.lengths)
        return step_flops(model, self.config.batch_size, self.lengths.inputs, targets)

    def run(self, log: Log) -> Run:
        start = None if self.start is None else lambda: self.start(self.steps)
        return Run(self.session.experiment.seed, self.data, self.checkpoints, log, self.evaluate, start)


def fit(phases: Sequence[Phase]) -> None:
    """Train phases that differ in seed and data to their end, wherever they are now, several at once on one device."""
    with ExitStack() as locks:
        for phase in phases:
            locks.enter_context(locked(phase.folder, phase.session.reporter))
        _fit(phases)


def _fit(phases: Sequence[Phase]) -> None:
    left = []
    for phase in phases:
        if finished(phase.folder, phase.config.steps):
            phase.session.reporter.advance(phase.config.steps)
        else:
            left.append(phase)
    if not left:
        return
    config, steps, flops = left[0].config, left[0].steps, left[0].flops
    loop = LoopConfig(config.steps, config.log_every, evaluate_every=config.save_every, score="score")
    with ExitStack() as logs:
        runs = []
        for phase in left:
            shown = ShownLog(phase.folder, asdict(phase.session.experiment), phase.session.reporter)
            runs.append(phase.run(logs.enter_context(shown)))
        together.train(steps, runs, loop, flops)


def finished(folder: Path, steps: int) -> bool:
    """Whether the phase in ``folder`` was trained, evaluated and saved to its end."""

    def ended() -> bool:
        try:
            status = json.loads((folder / "run.json").read_text())["status"]
        except (OSError, ValueError, KeyError):  # not begun, or cut short
            return False
        return status == "finished" and (folder / "checkpoints" / str(steps)).is_dir()

    return agreed(ended)


@contextmanager
def locked(folder: Path, reporter: Reporter) -> Iterator[None]:
    """The folder of a phase, for one run at a time: another that shares it waits, and then finds it done."""
    if jax.process_index():
        yield
        return
    folder.mkdir(parents=True, exist_ok=True)
    with (folder / "lock").open("w") as lock:
        try:
            fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            reporter.say(f"another process trains {folder}; waiting for it")
            fcntl.flock(lock, fcntl.LOCK_EX)
        yield


class ShownLog(Log):
    """A log whose newest loss is seen on the terminal too."""

    def __init__(self, folder: Path, settings: dict, reporter: Reporter):
        super().__init__(folder, settings)
        self._reporter = reporter

    def began(self, compiling: float) -> None:
        super().began(compiling)
        self._reporter.began(compiling)

    def write(self, step: int, kind: str, values: dict[str, float]) -> None:
        super().write(step, kind, values)
        if "loss" in values:
            self._reporter.advance(0, f"{'loss' if kind == 'train' else 'held-out loss'} {values['loss']:.3f}")

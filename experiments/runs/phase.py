"""One phase of training in its folder: what all phases of a run share, and how each is brought to its end."""

import fcntl
import os
import platform
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import asdict, dataclass, replace
from functools import partial
from pathlib import Path
from typing import TextIO

import jax

from experiments.processes.group import agreed, trains
from experiments.processes.place import wait
from experiments.runs import origin, vocabularies
from experiments.runs.prepare import Prepared
from experiments.runs.progress import Reporter
from experiments.study.experiment import Experiment, PhaseConfig, result_settings
from lm import sharding
from lm.data.batches import Batch, Batches, stream
from lm.data.objectives import Lengths
from lm.data.packing import row_length
from lm.nn.composed import BODY
from lm.settings import SettingError
from lm.train import manifest
from lm.train.checkpoints import Checkpoints
from lm.train.config import CheckpointConfig, LoopConfig
from lm.train.log import Log, now, packages, records, status
from lm.train.loop import Run, train
from lm.train.state import State
from lm.train.step import Steps
from lm.train.throughput import step_flops

Start = Callable[[Steps], State]  # the state before the first step of a phase


@dataclass(frozen=True)
class Session:
    """What every phase of a run reads and tells."""

    experiment: Experiment
    prepared: Prepared
    mesh: jax.sharding.Mesh
    cache: Path  # of prepared data
    reporter: Reporter
    allow: frozenset[str] = frozenset()  # of origin.ORIGINS: what may have changed since a phase was begun
    title: str = ""  # of the run: its row and seed


@dataclass(frozen=True)
class Phase:
    """What is trained in the folder that holds ``checkpoints``, how, and from where."""

    session: Session
    config: PhaseConfig
    steps: Steps
    batches: Batches
    lengths: Lengths
    checkpoints: Checkpoints
    evaluate: Callable[[State], dict[str, float]]
    read: Mapping[str, str]  # every split that it reads -> its fingerprint
    start: Start | None = None
    settings: Experiment | None = None  # that matter to it; None: all of the session's

    @property
    def folder(self) -> Path:
        return Path(self.checkpoints.folder).parent

    def data(self, first: int) -> Iterator[Batch]:
        """This process's parts of the batches from step ``first`` on, each of them a step of progress."""
        reporter = self.session.reporter
        rows = sharding.rows_of_process(self.steps.mesh, self.config.batch_size)
        reporter.advance(first)
        workers = self.session.experiment.data.workers
        for batch in stream(self.batches, first, self.config.steps, rows=rows, workers=workers):
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

    def begun_with(self) -> origin.Origin:
        """What it is trained with."""
        return {
            "settings": result_settings(self.settings or self.session.experiment),
            "vocabulary": {"fingerprint": self.session.prepared.vocabulary.fingerprint},
            "data": self.read,
            "code": origin.code(),
            "packages": packages(),
        }

    def run(self, log: Log) -> Run:
        start = None if self.start is None else lambda: self.start(self.steps)
        return Run(
            self.session.experiment.seed, self.data, self.checkpoints, log, self.evaluate, start, self.flops
        )


def checkpoints_of(experiment: Experiment, config: PhaseConfig, folder: Path) -> Checkpoints:
    """Of a phase: the newest, the best by each score, and one in every ``config.keep_hours``."""
    kept = CheckpointConfig(config.save_every, best="highest", hours=config.keep_hours)
    return Checkpoints(folder / "checkpoints", kept, experiment.guard)


def fit(phase: Phase) -> None:
    """Train a phase to its end from wherever it is now."""
    with locked(phase.folder, phase.session.reporter):
        done = finished(phase.folder, phase.config.steps)
        agreed(partial(_check_origin, phase, done))
        if done:
            phase.session.reporter.advance(phase.config.steps)
        else:
            _train(phase)


def _train(phase: Phase) -> None:
    config, experiment = phase.config, phase.session.experiment
    loop = LoopConfig(
        config.steps,
        config.log_every,
        config.save_every,
        "score",
        experiment.guard,
        patience=wait("LM_STEP_TIMEOUT"),
    )
    missing = {"corrupt_records_left_out": dict(phase.session.prepared.left_out)}
    with ShownLog(phase, asdict(experiment) | missing) as log:
        train(phase.steps, phase.run(log), loop)
        agreed(lambda: None)  # the first has written the last checkpoint
        trains(False)


def _check_origin(phase: Phase, done: bool) -> None:
    begun = bool(manifest.steps(phase.folder / "checkpoints"))
    state = "finished" if done else "begun" if begun else "new"
    now = phase.begun_with()
    origin.check(phase.folder, now, state, phase.session.allow, phase.session.reporter.say)
    # of a finished phase another may be allowed
    if origin.read(phase.folder)["vocabulary"] == now["vocabulary"]:
        vocabularies.keep(phase.folder, phase.session.prepared.vocabulary)


def finished(folder: Path, steps: int) -> bool:
    """Whether the phase in ``folder`` was trained, saved and evaluated to its end.

    DataError if its records are damaged, whether it has ended or is gone on with.
    """

    def ended() -> bool:
        evaluated = any((line["kind"], line["step"]) == ("eval", steps) for line in records(folder))
        try:
            done = status(folder) == "finished"
        except (SettingError, OSError):  # which the log says, and begins it anew
            done = False
        return done and evaluated and steps in manifest.steps(folder / "checkpoints")

    return agreed(ended)


@contextmanager
def locked(folder: Path, reporter: Reporter) -> Iterator[None]:
    """The folder of a phase, for one run at a time: another that shares it waits, and then finds it done.

    The lock ends with the process that holds it; the file tells which that is.
    """
    if jax.process_index():
        yield
        return
    folder.mkdir(parents=True, exist_ok=True)
    with (folder / "lock").open("a+") as lock:
        try:
            _lock(lock, folder, reporter)
        except OSError as error:
            reporter.complain(
                f"{lock.name} cannot be locked ({error.strerror}): the file system of --runs has no flock. "
                f"See to it that no second process trains {folder} now"
            )
        lock.truncate(0)
        lock.write(f"process {os.getpid()} on {platform.node()} since {now()}")
        lock.flush()
        yield


def _lock(lock: TextIO, folder: Path, reporter: Reporter) -> None:
    try:
        fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        lock.seek(0)
        reporter.say(f"{lock.read() or 'another process'} trains {folder}; waiting for it")
        fcntl.flock(lock, fcntl.LOCK_EX)


class ShownLog(Log):
    """A log whose newest loss is seen on the terminal too."""

    def __init__(self, phase: Phase, settings: dict):
        shared = phase.settings is not None  # a pre-training, whose folder is called by a hash
        super().__init__(phase.folder, settings, phase.session.title if shared else "")
        self._reporter = phase.session.reporter

    def began(self, compiling: float) -> None:
        super().began(compiling)
        trains(True)
        self._reporter.began(compiling)

    def write(self, step: int, kind: str, values: dict[str, float]) -> None:
        super().write(step, kind, values)
        if "loss" in values:
            self._reporter.advance(
                0, f"{'loss' if kind == 'train' else 'held-out loss'} {values['loss']:.3f}"
            )

"""One phase of training in its folder: what all phases of a run share, and how each is brought to its end."""

import json
from collections.abc import Callable, Iterable, Iterator
from dataclasses import asdict, dataclass, replace
from pathlib import Path

import jax

from experiments.experiment import Experiment, PhaseConfig
from experiments.prepare import Prepared
from experiments.progress import Reporter
from lm import sharding
from lm.data import pipeline
from lm.data.objectives import Lengths
from lm.data.packing import row_length
from lm.nn.tuned import BODY
from lm.train.checkpoints import Checkpoints
from lm.train.config import LoopConfig
from lm.train.log import Log
from lm.train.loop import train
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


def fit(
    session: Session,
    phase: PhaseConfig,
    steps: Steps,
    batches: pipeline.BatchFunction,
    lengths: Lengths,
    checkpoints: Checkpoints,
    evaluate: Callable[[State], dict[str, float]],
    start: Start | None = None,
) -> None:
    """Train one phase to its end, wherever it is now, in the folder that holds its ``checkpoints``."""
    experiment, reporter = session.experiment, session.reporter
    folder = Path(checkpoints.folder).parent
    if finished(folder, phase.steps):
        reporter.advance(phase.steps)
        return
    index, count = sharding.shard_of_batch(steps.mesh, phase.batch_size)

    def data(first: int) -> Iterator[pipeline.Batch]:
        reporter.advance(first)
        stream = pipeline.stream(
            batches, first, phase.steps, batch_size=phase.batch_size, process_index=index, process_count=count,
            workers=experiment.data.workers,
        )  # fmt: skip
        return _counted(stream, reporter)

    config = LoopConfig(phase.steps, phase.log_every, evaluate_every=phase.save_every, score="score")
    targets = row_length(experiment.model.architecture, lengths)
    headed = any(name.startswith(BODY) for name in steps.abstract.params)  # what a head tells costs next to nothing
    model = replace(experiment.model, logits="none") if headed else experiment.model
    flops = step_flops(model, phase.batch_size, lengths.inputs, targets)
    initial = None if start is None else lambda: start(steps)
    with ShownLog(folder, asdict(experiment), reporter) as log:
        train(steps, experiment.seed, data, checkpoints, log, evaluate, config, initial, flops)


def finished(folder: Path, steps: int) -> bool:
    """Whether the phase in ``folder`` was trained, evaluated and saved to its end."""
    path = folder / "run.json"
    ended = path.exists() and json.loads(path.read_text())["status"] == "finished"
    return ended and (folder / "checkpoints" / str(steps)).is_dir()


def _counted(stream: Iterable, reporter: Reporter) -> Iterator:
    """``stream``, and every item of it as a step of progress."""
    for item in stream:
        yield item
        reporter.advance(1)


class ShownLog(Log):
    """A log whose newest loss is seen on the terminal too."""

    def __init__(self, folder: Path, settings: dict, reporter: Reporter):
        super().__init__(folder, settings)
        self._reporter = reporter

    def write(self, step: int, kind: str, values: dict[str, float]) -> None:
        super().write(step, kind, values)
        if "loss" in values:
            self._reporter.advance(0, f"{'loss' if kind == 'train' else 'held-out loss'} {values['loss']:.3f}")

"""What the stages of a run share while they are trained, and the folder that each has to itself meanwhile."""

import fcntl
import os
import platform
from collections.abc import Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from typing import TextIO

import jax

from experiments.processes.group import agreed, trains
from experiments.runs import origin
from experiments.runs.prepare import Prepared, fingerprints
from experiments.runs.progress import Reporter
from experiments.runs.stages import Stage
from experiments.runs.vocabularies import store_vocabulary
from experiments.study.experiment import result_settings
from lm import sharding
from lm.data.batches import Batch, Batches, stream
from lm.data.denoised import Denoised
from lm.data.masked import Masked
from lm.data.objectives import Lengths
from lm.data.packing import row_length
from lm.data.segments import SEGMENTS
from lm.data.supervised import Mixed, Unsupervised
from lm.data.text.ahead import encoding_ahead
from lm.train import manifest
from lm.train.log import Log, came_to_its_end, now, packages, records
from lm.train.throughput import step_flops


@dataclass(frozen=True)
class Session:
    """What every stage of a run reads, is placed on and reports to."""

    prepared: Prepared
    mesh: jax.sharding.Mesh
    reporter: Reporter
    allow: frozenset[str] = field(default_factory=frozenset)  # of origin.ORIGINS: what may have changed
    title: str = ""  # of the run: its row and seed


def data(stage: Stage, session: Session, batches: Batches, first: int) -> Iterator[Batch]:
    """This process's parts of the batches from step ``first`` on, each of them a step of progress."""
    reporter, training = session.reporter, stage.training
    rows = sharding.rows_of_process(session.mesh, training.batch_size)
    config = stage.settings.data
    reporter.advance(first)
    with _encoders(batches, rows, config.encoders):
        for batch in stream(batches, first, training.steps, rows=rows, workers=config.workers):
            yield batch
            reporter.advance(1)


def _encoders(batches: Batches, rows: Sequence[slice], processes: int) -> AbstractContextManager[None]:
    """Processes that encode ahead what this process's rows need of the corpus."""
    source = batches.rows
    if isinstance(source, Mixed):  # whose examples are dealt to all streams
        corpora = [x.source for x in source.examples_by_task.values() if isinstance(x, Unsupervised)]
        kind, rows, source = SEGMENTS, [slice(None)], corpora[0] if corpora else None
    elif isinstance(source, Denoised | Masked):
        kind = source.kind
    else:
        source = None
    if source is None or not processes:
        return nullcontext()
    reading = source.reading
    notes = {stream: reading.notes(stream, kind) for stream in reading.streams_of(rows)}
    return encoding_ahead(reading.streams, notes, processes)


def flops(stage: Stage, lengths: Lengths) -> float:
    """Of one step."""
    model = stage.settings.model
    if stage.kind == "head":
        model = replace(model, logits="none")  # the head itself costs next to nothing
    targets = row_length(model.architecture, lengths)
    return step_flops(model, stage.training.batch_size, lengths.inputs, targets)


def origin_of(stage: Stage, session: Session) -> origin.Origin:
    """What a stage is trained with."""
    return {
        "settings": result_settings(stage.decisive),
        "vocabulary": {"fingerprint": session.prepared.vocabulary.fingerprint},
        "data": fingerprints(stage, session.prepared.cache),
        "code": origin.code(),
        "packages": packages(),
    }


def check_origin(stage: Stage, session: Session, is_finished: bool) -> None:
    """SettingError if the stage in the folder was started with something else; a new one is recorded."""
    started = bool(manifest.steps(stage.folder / "checkpoints"))
    state = "finished" if is_finished else "begun" if started else "new"
    current = origin_of(stage, session)
    origin.check(stage.folder, current, state, session.allow, session.reporter.say)
    # --allow vocabulary on a finished stage: its own stays
    if origin.read(stage.folder)["vocabulary"] == current["vocabulary"]:
        store_vocabulary(stage.folder, session.prepared.vocabulary)


def finished(folder: Path, steps: int) -> bool:
    """Whether the stage in ``folder`` was trained, saved and evaluated to its end.

    DataError if its records are damaged, whether it has ended or resumes.
    """

    def ended() -> bool:
        evaluated = any((line["kind"], line["step"]) == ("eval", steps) for line in records(folder))
        return came_to_its_end(folder) and evaluated and steps in manifest.steps(folder / "checkpoints")

    return agreed(ended)


@contextmanager
def locked(folder: Path, reporter: Reporter) -> Iterator[None]:
    """The folder of a stage, for one run at a time: another that shares it waits, and then finds it done.

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

    def __init__(self, stage: Stage, session: Session):
        skipped = {"corrupt_records_left_out": dict(session.prepared.left_out)}
        title = session.title if stage.kind == "pretrain" else ""  # its folder is named by a hash
        super().__init__(stage.folder, asdict(stage.settings) | skipped, title)
        self._reporter = session.reporter

    def began(self, compiling: float) -> None:
        super().began(compiling)
        trains(True)
        self._reporter.began(compiling)

    def write(self, step: int, kind: str, values: Mapping[str, float]) -> None:
        super().write(step, kind, values)
        if "content_loss" in values:
            losses = f"{values['content_loss']:.2f} ({values['reference_loss']:.2f} without context)"
            self._reporter.advance(0, f"content loss {losses}")
        elif "loss" in values:
            name = "loss" if kind == "train" else "held-out loss"
            self._reporter.advance(0, f"{name} {values['loss']:.3f}")

"""What the stages of a run share while they are trained, and the folder that each has to itself meanwhile."""

import fcntl
import os
import platform
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import asdict, dataclass, field, replace
from functools import partial
from pathlib import Path
from typing import TextIO

import jax
import jax.numpy as jnp
import numpy as np

from experiments.processes.group import agreed, trains
from experiments.processes.progress import NO_TOOLS, Reporter, Tools
from experiments.runs import origin
from experiments.runs.prepare import Prepared, fingerprints, in_own_order, store_vocabulary
from experiments.runs.stages import Stage, saved_steps
from experiments.study.settings_diff import result_settings
from lm import sharding
from lm.batch import Batch
from lm.classical.word2vec import Tables, as_large, initial_tables, mean_loss, train_epoch
from lm.config.base import changes
from lm.data.batches import Batches, LastingRows, stream
from lm.data.corpus.prefetch import encoding_ahead
from lm.data.corpus.token_cache import Tokens
from lm.data.masked_lm import Masked
from lm.data.packing import row_length
from lm.data.pretraining import Denoised
from lm.data.segments import SEGMENTS
from lm.data.seq2seq import Mixed, Unsupervised
from lm.objectives.denoising import Lengths
from lm.train.flops import step_flops
from lm.train.runtime.checkpoints import Checkpoints
from lm.train.runtime.log import Log, NonFiniteLoss, is_finished, now, packages, records
from lm.train.runtime.preemption import PreemptionHandler
from lm.train.state import State
from lm.train.step import Steps


@dataclass(frozen=True)
class Session:
    """What every stage of a run reads, is placed on and reports to."""

    prepared: Prepared
    mesh: jax.sharding.Mesh
    reporter: Reporter
    allow: frozenset[str] = field(default_factory=frozenset)  # of origin.ORIGINS: what may have changed
    title: str = ""  # of the run: its row and seed
    tools: Tools = NO_TOOLS


def data(stage: Stage, session: Session, batches: Batches, first: int) -> Iterator[Batch]:
    """This process's parts of the batches from step ``first`` on, each of them a step of progress."""
    reporter, training = session.reporter, stage.training
    rows = sharding.process_rows(session.mesh, training.batch_size)
    config = stage.settings.data
    reporter.advance(first)
    with _encoders(batches, rows, config.encoders):
        for batch in stream(batches, first, training.steps, rows=rows, workers=config.workers):
            yield batch
            reporter.advance(1)


def _encoders(batches: Batches, rows: Sequence[slice], processes: int) -> AbstractContextManager[None]:
    """Processes that encode ahead what this process's rows need of the corpus."""
    source = batches.rows.rows if isinstance(batches.rows, LastingRows) else batches.rows
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
        model = changes(model, {"output.logits": "none"})  # the head itself costs next to nothing
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
    started = bool(saved_steps(stage.folder))
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
        return is_finished(folder) and evaluated and steps in saved_steps(folder)

    return agreed(ended)


def train_vectors(stage: Stage, session: Session, steps: Steps, checkpoints: Checkpoints) -> None:
    """Train skip-gram's tables over the word pieces of the text; a step is a pass over it, and is saved.

    After the last, vectors of centres get the root mean square of a new embedding, and those of contexts are
    divided by the same number, so that the products of the two stay.
    """
    config, seed, texts = stage.settings.vectors, stage.settings.seed, session.prepared
    corpora = in_own_order(stage.settings, texts), texts.validation
    train, held_out = (_documents(corpus.first(config.tokens)) for corpus in corpora)
    skipgram = config.of_width(stage.settings.model.embed_width)
    with checkpoints, ShownLog(stage, session) as log, PreemptionHandler(0.0, stage.folder) as stopping:
        restored, fresh = checkpoints.restore(steps.abstract), steps.init(seed)
        start = 0 if restored is None else int(restored.step)
        vocab_size = stage.settings.model.vocab_size
        tables = initial_tables(jax.random.key(seed), vocab_size, skipgram.d_model)
        if restored is not None:
            tables = Tables(*(_local(restored.params[name], session.mesh) for name in TABLE_NAMES))
        log.start(start)
        session.reporter.advance(start)
        for epoch in range(start, config.epochs):
            began = time.perf_counter()
            after = stopping.interruptible(partial(train_epoch, tables, train, skipgram, seed, epoch))
            stopping.check(epoch)
            assert after is not None, "only a signal ends a pass, and is raised"
            tables = jax.block_until_ready(after)
            if not all(np.isfinite(table).all() for table in map(np.asarray, tables)):
                why = f"of vectors.learning_rate={config.learning_rate} and vectors.batch={config.batch}"
                raise NonFiniteLoss(epoch + 1, f"of skip-gram is not finite: lower one {why}")
            seconds, count = time.perf_counter() - began, sum(map(len, train))
            log.write(epoch + 1, "train", {"seconds_per_step": seconds, "tokens": float(count)})
            if epoch + 1 == config.epochs:
                tables = as_large(tables, fresh.params[TABLE_NAMES[0]])
            checkpoints.save(_with_tables(fresh, tables, epoch + 1))
            session.reporter.advance(1)
        checkpoints.wait()
        if not log.has_record(config.epochs, "eval"):
            log.write(config.epochs, "eval", {"loss": mean_loss(tables, held_out, skipgram, seed)})


TABLE_NAMES = ("embed.table", "contexts.table")  # skip-gram's, as parameters


def _documents(tokens: Tokens) -> list[np.ndarray]:
    return np.split(tokens.tokens, tokens.offsets[1:-1])


def _local(array: jax.Array, mesh: jax.sharding.Mesh) -> jax.Array:
    """All of an array, on this process's first device."""
    return jnp.asarray(np.asarray(jax.device_put(array, sharding.replicated(mesh))))


def _with_tables(state: State, tables: Tables, step: int) -> State:
    """``state`` after ``step``, with these parameters."""
    values = dict(zip(TABLE_NAMES, map(np.asarray, tables), strict=True))
    params = {name: jax.device_put(values[name], like.sharding) for name, like in state.params.items()}
    return replace(state, step=jax.device_put(np.int32(step), state.step.sharding), params=params)


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
        hashed = stage.kind in ("pretrain", "vectors")  # a hash is the name of its folder
        title = session.title if hashed else ""
        settings = asdict(stage.settings) | skipped
        super().__init__(stage.folder, settings, title, session.tools.wandb)
        self._reporter = session.reporter

    def log_first_step(self, compiling: float) -> None:
        super().log_first_step(compiling)
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

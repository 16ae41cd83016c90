"""The checkpoints of a run: written by orbax in the background, with checksums, verified before use."""

import logging
import math
import os
import re
import sys
import time
from collections.abc import Callable, Mapping
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import suppress
from dataclasses import replace
from errno import ECHILD
from functools import cache, partial
from pathlib import Path
from types import MappingProxyType
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.experimental import multihost_utils

from lm import sharding
from lm.config.base import SettingError
from lm.config.training import NEVER_SKIP, CheckpointConfig, GuardConfig, Weights
from lm.train.runtime import manifest
from lm.train.runtime.manifest import UNFINISHED, Manifest
from lm.train.state import State

GUARD = "guard."  # prefix of the names of the guard's arrays
NOTHING, ALL_BAD = -1, -2  # stand for a step: there is no checkpoint, or no good one

Scores = Mapping[str, float | None]


def _same_name(name: str) -> str:
    return name


class CheckpointError(RuntimeError):
    """Raised if there are checkpoints and none can be used; the message says how each is damaged."""


class SaveError(CheckpointError):
    """Raised if a step was not saved; tells why, which checkpoint is the newest good one, and what to do."""


class Checkpoints:
    """Saves and restores a run's checkpoints in ``folder/<step>``; use as a context.

    At its end the context waits for the last save. After a save that fails, the next call raises SaveError.
    With ``guard.failed_save="retry"`` only ``wait`` and the methods that restore raise it, unless a ``save``
    has succeeded since; other calls warn. So the last state is always saved, or an error is raised. With
    several processes an error of orbax at the start of a save is raised at once, whatever the setting.
    """

    def __init__(self, folder: str | Path, config: CheckpointConfig, guard: GuardConfig = NEVER_SKIP):
        self.folder, self.config = Path(folder).absolute(), config
        self._stops_after_failed_save = guard.failed_save == "stop"
        ocp = _orbax()
        _silence_orbax()
        # Compression saves a twelfth of the size of parameters, and doubles the processor time of a save.
        self._orbax = ocp.AsyncCheckpointer(ocp.PyTreeCheckpointHandler(use_compression=False))
        self._thread = ThreadPoolExecutor(1, "checkpoint")
        # the step that is being saved, and the error of this process, once there is one
        self._saving: tuple[int, Future[Exception | None]] | None = None
        self._failed: SaveError | None = None  # of the last save, until another one succeeds
        self._drafts = 0  # number of temporary folders, equal in all processes
        self._steps_before_save: set[int] = set()  # steps in the folder when the last save began

    def __enter__(self) -> "Checkpoints":
        return self

    def __exit__(self, kind: type | None, *_):
        try:
            if kind is None:
                self.wait()
            elif self._saving is not None and (error := self._saving[1].result()) is not None:
                # only a warning: the error that ended the context is raised
                message = self._message(self._saving[0], error, self._newest_good_step())
                print(f"warning: {message}", flush=True)
        finally:
            self._thread.shutdown()
            self._orbax.close()

    def steps(self) -> list[int]:
        """Return the steps that were saved completely, in order; they may have been damaged since."""
        return [*manifest.steps(self.folder)]

    def save(self, state: State) -> None:
        """Start saving, and return once the state may be changed."""
        self.wait_until_finished()
        self._failed = None
        arrays, step = sharding.named(state), int(state.step)
        size = sum(array.nbytes for array in arrays.values())
        shapes = {name: _shape(array) for name, array in arrays.items()}
        header = {"step": step, "saved": time.time(), "scores": {}, "losses": {}, "arrays": shapes}
        error = None
        if jax.process_index() == 0:
            error = _exception_of(manifest.prepare_folder, self.folder, size)
            self._steps_before_save = set(self._steps_there())
        self._drafts += 1  # a save that failed may still be writing into its own
        error, draft = self._error_of_any_process(error), self.folder / f"{UNFINISHED}{step}-{self._drafts}"
        if error is None:
            error = _exception_of(self._orbax.save, draft, args=_orbax().args.PyTreeSave(arrays), force=True)
            if error is not None and jax.process_count() > 1:  # the others wait for this one, inside of orbax
                raise SaveError(self._message(step, error, self._newest_good_step())) from error
        self._saving = step, self._thread.submit(self._finish, draft, header, error)
        if error is not None and self._stops_after_failed_save:
            self.wait()

    def write_scores(self, step: int, scores: Scores, losses: Scores = MappingProxyType({})) -> None:
        """Write finite ``scores``, which rank checkpoints, into the checkpoint of ``step`` if there is one.

        ``losses``, by the name of a score, decide between checkpoints for which that score is equal. Raises
        SaveError if the scores cannot be written.
        """
        self.wait_until_finished()
        ranks = {} if jax.process_index() else {"scores": _finite(scores), "losses": _finite(losses)}
        error = self._error_of_any_process(_exception_of(manifest.write_scores, self.folder, step, ranks))
        if error is not None:
            message = f"the scores of {self.folder / str(step)} could not be written: {error}"
            raise SaveError(message) from error
        self.garbage_collect(step)

    def wait_until_finished(self) -> None:
        """Wait until the last save is complete; if it failed, raise SaveError, or with "retry" only warn."""
        self._wait_until_finished(self._stops_after_failed_save)

    def wait(self) -> None:
        """Wait until the last save is complete; if it failed, raise SaveError whatever ``failed_save`` is."""
        self._wait_until_finished(stops=True)
        failed, self._failed = self._failed, None
        if failed is not None:
            raise failed

    def restore(
        self, abstract: State, step: int | None = None, source: Callable[[str], str] = _same_name
    ) -> State | None:
        """Return the newest good state, or that of ``step``, sharded as ``abstract``; None if none was saved.

        ``source`` maps the name of an array of the state to its name in the checkpoint. A damaged checkpoint
        is skipped with a warning. The guard's settings may differ from those at the time of saving. Raises
        CheckpointError if ``step`` was not saved or is damaged, or if all checkpoints are damaged.
        """
        step = self._good_step(step)
        if step is None:
            return None
        like = sharding.named(abstract)
        arrays = self._read(step, {source(name): leaf for name, leaf in like.items()}, complete=True)
        return jax.tree.unflatten(jax.tree.structure(abstract), [arrays[source(name)] for name in like])

    def restore_model(
        self,
        state: State,
        step: int | None = None,
        source: Callable[[str], str | None] = _same_name,
        weights: Weights = "scored",
    ) -> State:
        """Return ``state`` with the parameters of a checkpoint, no average of them, and all else as it is.

        ``source`` maps the name of a parameter of ``state`` to its name in the checkpoint, or to None if it
        is not to be restored. ``weights`` says which parameters are read: the "last" ones, the "average" of
        them (``optimizer.ema``), or those that evaluations have "scored": the average if one was kept, or
        else the last. Raises CheckpointError if there is no good checkpoint, or no "average" to read.
        """
        step = self._good_step(step)
        if step is None:
            raise CheckpointError(f"there is no checkpoint in {self.folder}")
        arrays_there = manifest.read_manifest(self._path(step), step)["arrays"]
        has_average = any(name.startswith("average.") for name in arrays_there)
        if weights == "average" and not has_average:
            raise CheckpointError(f"{self.folder} keeps no average of the parameters (optimizer.ema=0)")
        kind = "average" if has_average and weights != "last" else "params"
        sources = {name: f"{kind}.{saved}" for name in state.params if (saved := source(name)) is not None}
        like = sharding.abstract_arrays(state.params)
        arrays = self._read(step, {saved: like[name] for name, saved in sources.items()}, complete=False)
        params = state.params | {name: arrays[saved] for name, saved in sources.items()}
        return replace(state, params=params, average=None)

    def parameter_names(self, step: int) -> frozenset[str]:
        """Return the names of the saved parameters of ``step``; raise CheckpointError if it was not saved."""
        if step not in self.steps():
            raise CheckpointError(f"there is no checkpoint {step} in {self.folder}")
        saved = manifest.read_manifest(self._path(step), step)["arrays"]
        return frozenset(name.removeprefix("params.") for name in saved if name.startswith("params."))

    def best(self, name: str = "score") -> int | None:
        """Return the step with the best score of this name; None if no step has one."""
        return manifest.best(manifest.manifests(self.folder), name, self.config.best)

    def garbage_collect(self, last: int) -> None:
        """Delete checkpoints that are not kept once ``last`` is the newest step; warn where that fails."""
        if jax.process_index() == 0:
            try:
                manifest.garbage_collect(self.folder, last, self.config)
            except OSError as error:
                print(f"warning: old checkpoints in {self.folder} cannot be removed: {error}", flush=True)

    def _steps_there(self) -> list[int]:
        """Return ``steps``, or none if the folder cannot be read."""
        try:
            return self.steps()
        except OSError:
            return []

    def _path(self, step: int) -> Path:
        return manifest.steps(self.folder).get(step, self.folder / str(step))

    def _good_step(self, step: int | None) -> int | None:
        """Return the newest good step, or ``step`` if that is good; process 0 looks and broadcasts it.

        Return None if nothing was saved; raise CheckpointError if ``step`` was not, or nothing is good.
        """
        self.wait()
        good, faults = NOTHING, {}
        if jax.process_index() == 0:
            paths = manifest.steps(self.folder)
            for candidate in [each for each in reversed(paths) if step in (None, each)]:
                path = self.folder / str(candidate)
                fault = manifest.find_damage(paths[candidate], candidate)
                if fault is None:
                    good = candidate
                    break
                faults[path], good = fault, ALL_BAD
                print(f"warning: checkpoint {path} is skipped: {fault}", flush=True)
        good = int(multihost_utils.broadcast_one_to_all(np.int32(good)))
        if good == NOTHING and step is not None:
            raise CheckpointError(f"there is no checkpoint {step} in {self.folder}, only {self.steps()}")
        if good == ALL_BAD:
            listed = "".join(f"\n  {path}: {fault}" for path, fault in faults.items())
            older = f"without {self.folder / str(step)} training resumes from an older one"
            mend = f"remove {self.folder} to start from scratch" if step is None else older
            raise CheckpointError(f"no checkpoint is good; {mend}:{listed}")
        return None if good == NOTHING else good

    def _read(self, step: int, like: Mapping[str, Any], complete: bool) -> dict[str, jax.Array]:
        """Return the arrays named in ``like``, bit for bit: orbax would silently cast to another dtype.

        With ``complete`` the checkpoint may hold no other arrays, except those of the guard. Arrays of the
        guard that the checkpoint lacks are zeros. Raises SettingError if a name, shape or dtype differs.
        """
        folder = self._path(step)
        saved = manifest.read_manifest(folder, step)["arrays"]
        missing = {name: leaf for name, leaf in like.items() if name.startswith(GUARD) and name not in saved}
        like = {name: leaf for name, leaf in like.items() if name not in missing}
        shapes = {name: _shape(leaf) for name, leaf in like.items()}
        compared = set(shapes)
        if complete:
            compared |= {name for name in saved if not name.startswith(GUARD)}
        differences = [
            f"\n  {name}: saved {saved.get(name)}, needed {shapes.get(name)}"
            for name in sorted(compared)
            if saved.get(name) != shapes.get(name)
        ]
        if differences:
            listed = "".join(differences[:10])
            raise SettingError(f"checkpoint {folder} is of another model or optimiser:{listed}")
        ocp = _orbax()
        arguments = ocp.checkpoint_utils.construct_restore_args(like)
        restore = ocp.args.PyTreeRestore(like, restore_args=arguments, partial_restore=True)
        arrays = self._orbax.restore(folder, args=restore)
        for name, leaf in missing.items():
            zeros = partial(jnp.zeros, leaf.shape, leaf.dtype)
            arrays[name] = jax.jit(zeros, out_shardings=leaf.sharding)()
        return arrays

    def _wait_until_finished(self, stops: bool) -> None:
        """Wait for the last save; if it failed, all processes raise SaveError if ``stops``, or else warn."""
        saving, self._saving = self._saving, None
        if saving is None or (error := self._error_of_any_process(saving[1].result())) is None:
            return
        if jax.process_index() == 0:
            with suppress(OSError):
                manifest.clear_leftovers(self.folder)
        step, newest = saving[0], self._newest_good_step()
        failed = SaveError(self._message(step, error, newest))
        if stops:
            raise failed from error
        self._failed = failed
        print(f"warning: {self._message(step, error, newest, retries=True)}", flush=True)

    def _error_of_any_process(self, error: Exception | None) -> Exception | None:
        """Return the error of this process or, where training continues after errors, that of another.

        Where an error stops training, the process that failed ends at once, and the others with it.
        """
        if jax.process_count() == 1 or self._stops_after_failed_save:
            return error
        failed = multihost_utils.process_allgather(np.asarray(error is not None)).any()
        other = ChildProcessError(ECHILD, "another process could not write its part")
        return error or (other if failed else None)

    def _newest_good_step(self) -> int | None:
        """Return the newest step whose checkpoint is good; None without one, or if none can be read."""
        with suppress(OSError):
            for step, path in reversed(manifest.steps(self.folder).items()):
                if manifest.find_damage(path, step) is None:
                    return step
        return None

    def _message(self, step: int, error: Exception, newest: int | None, retries: bool = False) -> str:
        """Return why the step was not saved, which checkpoint is the newest good one, and what to do.

        ``newest`` is the step of that checkpoint. With ``retries`` training goes on after this failure.
        """
        code = re.search(r"os_error_code='(\d+)'", str(error))  # in tensorstore's long messages
        if code is not None:
            why = os.strerror(int(code[1]))
        else:
            why = getattr(error, "strerror", None) or f"{error!r:.300}"
        if not self.folder.exists() or self._steps_before_save - set(self._steps_there()):
            why = "the folder was deleted while it was written"
        good = "no checkpoint is good" if newest is None else f"the newest good checkpoint is {newest}"
        failed = f"step {step} could not be saved in {self.folder}: {why}; {good}"
        if retries:
            return f"{failed}. Training goes on, and the next save tries again"
        if newest is None:
            return f"{failed}. Mend this and start again"
        return f"{failed}. Mend this and start again: training resumes from step {newest}"

    def _finish(self, draft: Path, header: Manifest, error: Exception | None) -> Exception | None:
        """Finish a save in the thread of each process; return the error if the step was not saved."""
        error = error or _exception_of(self._orbax.wait_until_finished)
        if error is None and jax.process_index() == 0:
            error = _exception_of(manifest.publish, draft, header, self.config)
            error = error or _exception_of(self.garbage_collect, header["step"])
        return error


def _finite(values: Scores) -> dict[str, float]:
    return {name: float(x) for name, x in values.items() if x is not None and math.isfinite(x)}


def _exception_of(work: Callable[..., Any], *args: Any, **options: Any) -> Exception | None:
    """Call ``work`` with these arguments, and return the exception that it raised; None without one."""
    try:
        work(*args, **options)
    except Exception as error:
        return error
    return None


def _shape(array: Any) -> list:
    return [list(array.shape), str(array.dtype)]


@cache
def _orbax() -> Any:
    """Return the package orbax.checkpoint, imported when first needed: that takes a fifth of a second."""
    import orbax.checkpoint

    return orbax.checkpoint


@cache  # so that it runs once: each further call would wrap the hook again
def _silence_orbax() -> None:
    """Suppress what orbax's threads print of an error, since it is raised here too."""
    before = sys.unraisablehook

    def is_not_from_orbax(record: logging.LogRecord) -> bool:
        return not record.exc_info or not {"orbax", "asyncio"} & {*Path(record.pathname).parts}

    def hook(unraisable: Any) -> None:
        # "Event loop is closed" is a consequence of an error that is raised already.
        if str(unraisable.exc_value) != "Event loop is closed":
            before(unraisable)

    sys.unraisablehook = hook
    for name in ("absl", "asyncio"):
        logging.getLogger(name).addFilter(is_not_from_orbax)

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


class CheckpointError(RuntimeError):
    """Raised if there are checkpoints and none can be used; the message says how each is damaged."""


class SaveError(CheckpointError):
    """Raised if a step was not saved; tells why, which checkpoint is the newest good one, and what to do."""


class Checkpoints:
    """Saves and restores a run's checkpoints in ``folder/<step>``; a context, which waits for the last save.

    After a save that fails, the next call raises SaveError. With ``guard.failed_save="retry"`` only ``wait``
    does, and only if no ``save`` has succeeded since: the last state is always saved, or an error is raised.
    """

    def __init__(self, folder: str | Path, config: CheckpointConfig, guard: GuardConfig = NEVER_SKIP):
        self.folder, self.config, self._stops = Path(folder).absolute(), config, guard.failed_save == "stop"
        ocp = _orbax()
        _silence_orbax()
        # Compression saves a twelfth of the size of parameters, and doubles the processor time of a save.
        self._orbax = ocp.AsyncCheckpointer(ocp.PyTreeCheckpointHandler(use_compression=False))
        self._thread = ThreadPoolExecutor(1, "checkpoint")
        self._saving: tuple[int, Future[Exception | None]] | None = (
            None  # the step, and the error of this process
        )
        self._failed: SaveError | None = None  # of the last save, until another one succeeds
        self._drafts = 0  # number of temporary folders, equal in all processes
        self._before: set[int] = set()  # steps in the folder when the last save began

    def __enter__(self) -> "Checkpoints":
        return self

    def __exit__(self, kind: type | None, *_):
        try:
            if kind is None:
                self.wait()
            elif self._saving is not None and (error := self._saving[1].result()) is not None:
                print(f"warning: {self._message(self._saving[0], error)}", flush=True)  # the first is raised
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
            error = _error(manifest.prepare_folder, self.folder, size)
            self._before = set(self._steps_there())
        self._drafts += 1  # a save that failed may still be writing into its own
        error, draft = self._any_process_error(error), self.folder / f"{UNFINISHED}{step}-{self._drafts}"
        if error is None:
            error = _error(self._orbax.save, draft, args=_orbax().args.PyTreeSave(arrays), force=True)
            if error is not None and jax.process_count() > 1:  # the others wait for this one, inside of orbax
                raise SaveError(self._message(step, error)) from error
        self._saving = step, self._thread.submit(self._finish, draft, header, error)
        if error is not None and self._stops:
            self.wait()

    def score(self, step: int, scores: Scores, losses: Scores = MappingProxyType({})) -> None:
        """Write finite ``scores``, which rank checkpoints, into that of ``step``, if it was saved.

        ``losses`` by the name of a score break its ties. Raises SaveError if the scores cannot be written.
        """
        self.wait_until_finished()
        ranks = {} if jax.process_index() else {"scores": _finite(scores), "losses": _finite(losses)}
        if (
            error := self._any_process_error(_error(manifest.write_scores, self.folder, step, ranks))
        ) is not None:
            message = f"the scores of {self.folder / str(step)} could not be written: {error}"
            raise SaveError(message) from error
        self.garbage_collect(step)

    def wait_until_finished(self) -> None:
        """Wait until the last save is complete; if it failed, raise SaveError, or with "retry" only warn."""
        self._wait_until_finished(self._stops)

    def wait(self) -> None:
        """Wait until the last save is complete; if it failed, raise SaveError whatever ``failed_save`` is."""
        self._wait_until_finished(stops=True)
        failed, self._failed = self._failed, None
        if failed is not None:
            raise failed

    def restore(
        self, abstract: State, step: int | None = None, source: Callable[[str], str] = str
    ) -> State | None:
        """Return the newest good state, or that of ``step``, sharded as ``abstract``; None if none was saved.

        ``source`` maps the name of an array of the state to its name in the checkpoint. A damaged checkpoint
        is skipped with a warning. The guard's settings may differ from those at the time of saving. Raises
        CheckpointError if all checkpoints are damaged.
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
        source: Callable[[str], str | None] = str,
        weights: Weights = "scored",
    ) -> State:
        """Return ``state`` with the parameters of a checkpoint, no average of them, and all else as it is.

        ``source`` maps the name of a parameter of ``state`` to its name in the checkpoint, or to None if it
        is not to be restored. Raises CheckpointError if there is no checkpoint.
        """
        step = self._good_step(step)
        if step is None:
            raise CheckpointError(f"there is no checkpoint in {self.folder}")
        arrays_there = manifest.read_manifest(self._path(step), step)["arrays"]
        has_mean = any(name.startswith("average.") for name in arrays_there)
        if weights == "average" and not has_mean:
            raise CheckpointError(f"{self.folder} keeps no average of the parameters (optimizer.ema=0)")
        kind = "average" if has_mean and weights != "last" else "params"
        sources = {name: f"{kind}.{saved}" for name in state.params if (saved := source(name)) is not None}
        like = sharding.abstract_arrays(state.params)
        arrays = self._read(step, {saved: like[name] for name, saved in sources.items()}, complete=False)
        params = state.params | {name: arrays[saved] for name, saved in sources.items()}
        return replace(state, params=params, average=None)

    def parameters(self, step: int) -> frozenset[str]:
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
        """Return the newest good step, or ``step`` if that is good; process 0 looks and broadcasts it."""
        self.wait()
        good, faults = NOTHING, {}
        if jax.process_index() == 0:
            paths = manifest.steps(self.folder)
            for candidate in reversed(paths) if step is None else [step]:
                path = self.folder / str(candidate)
                fault = manifest.find_damage(paths.get(candidate, path), candidate)
                if fault is None:
                    good = candidate
                    break
                faults[path], good = fault, ALL_BAD
                print(f"warning: checkpoint {path} is skipped: {fault}", flush=True)
        good = int(multihost_utils.broadcast_one_to_all(np.int32(good)))
        if good == ALL_BAD:
            listed = "".join(f"\n  {path}: {fault}" for path, fault in faults.items())
            older = f"without {self.folder / str(step)} training resumes from an older one"
            mend = f"remove {self.folder} to start from scratch" if step is None else older
            raise CheckpointError(f"no checkpoint is good; {mend}:{listed}")
        return None if good == NOTHING else good

    def _read(self, step: int, like: Mapping[str, Any], complete: bool) -> dict[str, jax.Array]:
        """Return the arrays named in ``like``, bit for bit: orbax would silently cast to another dtype.

        With ``complete`` the checkpoint may hold no other arrays. Those of the guard may be missing, and are
        zeros then, or superfluous. Raises SettingError if a name, shape or dtype differs.
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
        if saving is None or (error := self._any_process_error(saving[1].result())) is None:
            return
        if jax.process_index() == 0:
            with suppress(OSError):
                manifest.clear_leftovers(self.folder)
        message = self._message(saving[0], error)
        if stops:
            raise SaveError(message) from error
        self._failed = SaveError(message)
        print(f"warning: {message}, or with the next save", flush=True)

    def _any_process_error(self, error: Exception | None) -> Exception | None:
        """Return the error of this process or, where training continues after errors, that of another.

        Where an error stops training, the process that failed ends at once, and the others with it.
        """
        if jax.process_count() == 1 or self._stops:
            return error
        failed = multihost_utils.process_allgather(np.asarray(error is not None)).any()
        other = ChildProcessError(ECHILD, "another process could not write its part")
        return error or (other if failed else None)

    def _message(self, step: int, error: Exception) -> str:
        """Return why the step was not saved, which checkpoint is the newest good one, and what to do."""
        code = re.search(r"os_error_code='(\d+)'", str(error))  # in tensorstore's long messages
        if code is not None:
            why = os.strerror(int(code[1]))
        else:
            why = getattr(error, "strerror", None) or f"{error!r:.300}"
        if not self.folder.exists() or self._before - set(self._steps_there()):
            why = "the folder was deleted while it was written"
        good = "no checkpoint is good"
        with suppress(OSError):
            paths = reversed(manifest.steps(self.folder).items())
            newest = next((n for n, path in paths if manifest.find_damage(path, n) is None), None)
            if newest is not None:
                good = f"the newest good checkpoint is {newest}"
        failed = f"step {step} could not be saved in {self.folder}: {why}; {good}"
        return f"{failed}. Mend this and start again: training resumes from the newest"

    def _finish(self, draft: Path, header: Manifest, error: Exception | None) -> Exception | None:
        """Finish a save in the thread of each process; return the error if the step was not saved."""
        error = error or _error(self._orbax.wait_until_finished)
        if error is None and jax.process_index() == 0:
            error = _error(manifest.publish, draft, header, self.config)
            error = error or _error(self.garbage_collect, header["step"])
        return error


def _finite(values: Scores) -> dict[str, float]:
    return {name: float(x) for name, x in values.items() if x is not None and math.isfinite(x)}


def _error(work: Callable[..., Any], *args: Any, **options: Any) -> Exception | None:
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


@cache  # each hook calls the one before
def _silence_orbax() -> None:
    """Suppress what orbax's threads print of an error, since it is raised here too."""
    before = sys.unraisablehook

    def is_news(record: logging.LogRecord) -> bool:
        return not record.exc_info or not {"orbax", "asyncio"} & {*Path(record.pathname).parts}

    def hook(unraisable: Any) -> None:
        if (
            str(unraisable.exc_value) != "Event loop is closed"
        ):  # a consequence of an error that is raised already
            before(unraisable)

    sys.unraisablehook = hook
    for name in ("absl", "asyncio"):
        logging.getLogger(name).addFilter(is_news)

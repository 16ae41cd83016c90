"""Checkpoints that are proved: written by orbax, listed with a checksum for every file, verified before use.

A step is written under another name, then its manifest, then it is renamed: what has a step's name was
complete. What is taken away gets another name before it is deleted.
"""

import logging
import math
import os
import re
import shutil
import sys
import time
from collections.abc import Callable, Mapping
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import suppress
from dataclasses import replace
from errno import ECHILD, ENOSPC
from functools import cache, partial
from pathlib import Path
from types import MappingProxyType
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import orbax.checkpoint as ocp
from jax.experimental import multihost_utils

from lm import sharding
from lm.files import write
from lm.settings import SettingError
from lm.train import manifest
from lm.train.config import EVERY_UPDATE, CheckpointConfig, GuardConfig
from lm.train.manifest import MANIFEST, REPLACED, UNFINISHED, Manifest
from lm.train.state import State

GUARD = "guard."  # before the names of what is remembered to leave updates out

Scores = Mapping[str, float | None]


class CheckpointError(RuntimeError):
    """There are checkpoints and none can be used; the message lists them with what is wrong with each."""


class SaveError(CheckpointError):
    """A step was not saved; the message says why, which checkpoint is the newest good one, and what to do."""


class Checkpoints:
    """The checkpoints of one run, in ``folder/<step>``; use as a context, which waits for the last save.

    Without ``guard.failed_save="retry"``, a save that fails is a SaveError of whatever is called next; with
    it, of ``wait`` alone if no other ``save`` came since, so that what is saved last is saved.
    """

    def __init__(self, folder: str | Path, config: CheckpointConfig, guard: GuardConfig = EVERY_UPDATE):
        self.folder, self.config, self._stops = Path(folder).absolute(), config, guard.failed_save == "stop"
        _hush()
        self._orbax = ocp.AsyncCheckpointer(ocp.PyTreeCheckpointHandler())
        self._thread = ThreadPoolExecutor(1, "checkpoint")
        self._saving: tuple[int, Future[Exception | None]] | None = None  # its step, and what went wrong here
        self._failed: SaveError | None = None  # of the last save, which the next one makes good

    def __enter__(self) -> "Checkpoints":
        return self

    def __exit__(self, kind: type | None, *_):
        try:
            if kind is None:
                self.wait()
            elif self._saving is not None and (error := self._saving[1].result()) is not None:
                # what came before it is raised
                print(f"warning: {self._said(self._saving[0], error)}", flush=True)
        finally:
            self._thread.shutdown()
            self._orbax.close()

    def steps(self) -> list[int]:
        """The steps that were saved completely, in order; they may have been damaged since."""
        return [*manifest.steps(self.folder)]

    def save(self, state: State) -> None:
        """Start saving; returns when the state may be changed."""
        self.settle()
        self._failed = None
        arrays, stops = sharding.named(state), self._stops
        about = {"step": int(state.step), "saved": time.time(), "scores": {}, "losses": {}}
        about["arrays"] = {name: _about(array) for name, array in arrays.items()}
        unfinished = self.folder / f"{UNFINISHED}{about['step']}"
        error = self._agreed(_error(partial(self._begin, sum(array.nbytes for array in arrays.values()))))
        if error is None:
            error = _error(
                partial(self._orbax.save, unfinished, args=ocp.args.PyTreeSave(arrays), force=True)
            )
            if error is not None and jax.process_count() > 1:  # the others wait for this one, inside of orbax
                raise SaveError(self._said(about["step"], error)) from error
        self._saving = about["step"], self._thread.submit(self._finish, unfinished, about, error)
        if error is not None and stops:
            self.wait()

    def score(self, step: int, scores: Scores, losses: Scores = MappingProxyType({})) -> None:
        """Rank the checkpoint of ``step``, if it was saved, by these ``scores``, by name: those that are
        finite.

        ``losses``: by the name of the score, decide where it ties. SaveError if they cannot be written.
        """
        self.settle()
        ranks = {} if jax.process_index() else {"scores": _finite(scores), "losses": _finite(losses)}
        if (error := self._agreed(_error(partial(manifest.rank, self.folder, step, ranks)))) is not None:
            raise SaveError(
                f"the scores of {self.folder / str(step)} could not be written: {error}"
            ) from error
        self.tidy(step)

    def settle(self) -> None:
        """Return when the last save is complete and proved; SaveError if it failed and the next one is no
        remedy.
        """
        self._settle(self._stops)

    def wait(self) -> None:
        """Return when the last save is complete and proved; SaveError if it failed."""
        self._settle(stops=True)
        failed, self._failed = self._failed, None
        if failed is not None:
            raise failed

    def restore(self, abstract: State, step: int | None = None) -> State | None:
        """The newest good state, or that of ``step``, placed as ``abstract`` says; None if nothing was ever
        saved.

        A bad checkpoint is passed over with a warning. CheckpointError where there are some and none is good.
        Updates may be left out from now on though none were before, or no more.
        """
        step = self._good(step)
        if step is None:
            return None
        like = sharding.named(abstract)
        found = self._read(step, like, whole=True)
        return jax.tree.unflatten(jax.tree.structure(abstract), [found[name] for name in like])

    def restore_model(
        self, state: State, step: int | None = None, source: Callable[[str], str | None] = str
    ) -> State:
        """``state`` with the parameters alone from here; never without: CheckpointError if there is no
        checkpoint.

        ``source`` gives the name here of a parameter of ``state``, None for one that stays as it is.
        """
        step = self._good(step)
        if step is None:
            raise CheckpointError(f"there is no checkpoint in {self.folder}")
        names = {name: found for name in state.params if (found := source(name)) is not None}
        like = sharding.described(state.params)
        found = self._read(
            step, {f"params.{there}": like[name] for name, there in names.items()}, whole=False
        )
        return replace(
            state, params=state.params | {name: found[f"params.{there}"] for name, there in names.items()}
        )

    def best(self, name: str = "score") -> int | None:
        """The step with the best score of this name; None if no step has one."""
        return manifest.best(manifest.manifests(self.folder), name, self.config.best)

    def tidy(self, last: int) -> None:
        """Take away what is not kept now that ``last`` is the newest step, and what a kill left of doing
        so.
        """
        if jax.process_index():
            return
        try:
            # later ones are of a course given up: this run began before them
            found = manifest.manifests(self.folder)
            stay = manifest.kept({n: each for n, each in found.items() if n <= last}, self.config)
            for each in found.keys() - stay:
                self._remove(self._place(each))
            self._sweep()
        except OSError as error:
            print(f"warning: old checkpoints in {self.folder} cannot be removed: {error}", flush=True)

    def _place(self, step: int) -> Path:
        return manifest.steps(self.folder).get(step, self.folder / str(step))

    def newest(self) -> int | None:
        """The newest good step; None if nothing was ever saved."""
        return self._good(None)

    def _good(self, step: int | None) -> int | None:
        """The newest good step, or ``step`` if that is good; the first process looks and tells the others."""
        self.wait()
        found, faults = -1, {}
        if jax.process_index() == 0:
            for candidate in reversed(self.steps()) if step is None else [step]:
                fault = manifest.fault(self._place(candidate), candidate)
                if fault is None:
                    found = candidate
                    break
                faults[candidate] = fault
                print(
                    f"warning: checkpoint {self.folder / str(candidate)} is passed over: {fault}", flush=True
                )
            found = -2 if found < 0 and faults else found
        found = int(multihost_utils.broadcast_one_to_all(np.int32(found)))
        if found == -2:
            listed = "".join(f"\n  {self.folder / str(step)}: {fault}" for step, fault in faults.items())
            older = f"without {self.folder / str(step)} training goes on from an older one"
            mend = f"remove {self.folder} to start from scratch" if step is None else older
            raise CheckpointError(f"no checkpoint is good; {mend}:{listed}")
        return None if found == -1 else found

    def _read(self, step: int, like: Mapping[str, Any], whole: bool) -> dict[str, jax.Array]:
        """The arrays named in ``like``, bit for bit: orbax would cast another dtype without a word.

        Of a ``whole`` state nothing else may be there. What is remembered to leave updates out may be
        missing, or left
        over: it begins with zeros.
        """
        folder = self._place(step)
        saved = manifest.read(folder, step)["arrays"]
        new = {name: leaf for name, leaf in like.items() if name.startswith(GUARD) and name not in saved}
        like = {name: leaf for name, leaf in like.items() if name not in new}
        due = {name: _about(leaf) for name, leaf in like.items()}
        others = {name for name in saved if whole and not name.startswith(GUARD)}
        names = sorted(due.keys() | others)
        wrong = [
            f"\n  {n}: saved {saved.get(n)}, due {due.get(n)}" for n in names if saved.get(n) != due.get(n)
        ]
        if wrong:
            raise SettingError(f"checkpoint {folder} is of another model or optimiser:{''.join(wrong[:10])}")
        arguments = ocp.checkpoint_utils.construct_restore_args(like)
        found = self._orbax.restore(
            folder, args=ocp.args.PyTreeRestore(like, restore_args=arguments, partial_restore=True)
        )
        zeros = {
            n: jax.jit(partial(jnp.zeros, x.shape, x.dtype), out_shardings=x.sharding)()
            for n, x in new.items()
        }
        return found | zeros

    def _settle(self, stops: bool) -> None:
        """Wait for the last save; if it failed, raise or, unless it ``stops``, warn. All processes do the
        same.
        """
        saving, self._saving = self._saving, None
        if saving is None or (error := self._agreed(saving[1].result())) is None:
            return
        if jax.process_index() == 0:
            with suppress(OSError):
                self._sweep()
        said = self._said(saving[0], error)
        if stops:
            raise SaveError(said) from error
        self._failed = SaveError(said)
        print(f"warning: {said}, or with the next save", flush=True)

    def _agreed(self, error: Exception | None) -> Exception | None:
        """The error of this process or, where all go on after one, that of another.

        Where it stops, the process that failed ends at once, and so do the others, which may wait for it.
        """
        if jax.process_count() == 1 or self._stops:
            return error
        failed = multihost_utils.process_allgather(np.asarray(error is not None)).any()
        return error or (
            ChildProcessError(ECHILD, "another process could not write its part") if failed else None
        )

    def _said(self, step: int, error: Exception) -> str:
        code = re.search(r"os_error_code='(\d+)'", str(error))  # as tensorstore says it, among much else
        why = os.strerror(int(code[1])) if code else getattr(error, "strerror", None) or repr(error)
        good = "no checkpoint is good"
        with suppress(OSError):
            places = reversed(manifest.steps(self.folder).items())
            newest = (
                f"the newest good checkpoint is {n}" for n, path in places if manifest.fault(path, n) is None
            )
            good = next(newest, good)
        return (
            f"step {step} could not be saved in {self.folder}: {why}; {good}. "
            "Mend this and start again: training goes on from the newest"
        )

    def _begin(self, size: int) -> None:
        """Make the folder, and OSError if nothing can be made in it or there is no room for ``size``
        bytes.
        """
        if jax.process_index() == 0:
            self.folder.mkdir(parents=True, exist_ok=True)
            self._sweep()
            disk = shutil.disk_usage(self.folder)
            if disk.free < size and disk.total:  # some file systems say 0 of everything
                raise OSError(ENOSPC, f"{size / 1e9:.2g} GB are needed, {disk.free / 1e9:.2g} GB are free")
            probe = self.folder / f"{UNFINISHED}probe"
            probe.mkdir()
            probe.rmdir()

    def _finish(self, unfinished: Path, about: Manifest, error: Exception | None) -> Exception | None:
        """In the thread, of each process: what went wrong."""
        error = error or _error(self._orbax.wait_until_finished)
        if error is None and jax.process_index() == 0:
            error = _error(partial(self._complete, unfinished, about))
        return error

    def _complete(self, unfinished: Path, about: Manifest) -> None:
        """Give the checkpoint its manifest and its name, and take those away that are not kept."""
        step = about["step"]
        before = {n: each for n, each in manifest.manifests(self.folder).items() if n < step}
        about["hour"] = manifest.hour(before, about["saved"], self.config)
        about["files"] = manifest.checksums(unfinished)
        write(unfinished / MANIFEST, manifest.sealed(about))
        done = self.folder / str(step)
        if done.exists():
            done.rename(self.folder / f"{REPLACED}{step}")
        unfinished.rename(done)
        self.tidy(step)

    def _remove(self, path: Path) -> None:
        _delete(path.rename(self.folder / f"{UNFINISHED}{path.name}-removed"))

    def _sweep(self) -> None:
        """Clear away what a kill or a failed save left; what it was about to replace gets its name back."""
        for path in [*self.folder.iterdir()]:
            done = self.folder / path.name.removeprefix(REPLACED)
            if path.name.startswith(UNFINISHED):
                _delete(path)
            elif done != path and done.exists():
                self._remove(path)
            elif done != path:
                path.rename(done)


def _finite(values: Scores) -> dict[str, float]:
    return {
        name: float(value) for name, value in values.items() if value is not None and math.isfinite(value)
    }


def _error(work: Callable[[], Any]) -> Exception | None:
    try:
        work()
    except Exception as error:
        return error
    return None


def _delete(path: Path) -> None:
    if path.is_dir() and not path.is_symlink():
        shutil.rmtree(path, ignore_errors=True)
    else:
        path.unlink(missing_ok=True)


def _about(array: Any) -> list:
    return [list(array.shape), str(array.dtype)]


@cache
def _hush() -> None:
    """Keep off the terminal what orbax's threads write there of an error: it is raised to us too."""
    before = sys.unraisablehook

    def is_news(record: logging.LogRecord) -> bool:
        return not record.exc_info or not {"orbax", "asyncio"} & {*Path(record.pathname).parts}

    def tell(unraisable: Any) -> None:
        if str(unraisable.exc_value) != "Event loop is closed":  # which others of its writes would have told
            before(unraisable)

    sys.unraisablehook = tell
    for name in ("absl", "asyncio"):
        logging.getLogger(name).addFilter(is_news)

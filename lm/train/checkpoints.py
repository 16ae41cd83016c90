"""Checkpoints that are proved: written by orbax, listed with a checksum for every file, verified before use.

A step is written under another name, then its manifest, then it is renamed: what has a step's name was complete.
"""

import hashlib
import json
import math
from collections.abc import Callable, Mapping
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import replace
from typing import Any

import jax
import numpy as np
import orbax.checkpoint as ocp
from etils import epath
from jax.experimental import multihost_utils

from lm import sharding
from lm.config import SettingError
from lm.train.config import CheckpointConfig
from lm.train.state import State

MANIFEST = "manifest.json"
UNFINISHED = "unfinished-"


class CheckpointError(RuntimeError):
    """There are checkpoints and none can be used; the message lists them with what is wrong with each."""


class Checkpoints:
    """The checkpoints of one run, in ``folder/<step>``; use as a context, which waits for the last save."""

    def __init__(self, folder: str, config: CheckpointConfig):
        self.folder, self.config = epath.Path(folder).absolute(), config
        self._orbax = ocp.AsyncCheckpointer(ocp.PyTreeCheckpointHandler())
        self._thread = ThreadPoolExecutor(1, "checkpoint")
        self._saving: Future | None = None
        self._swept = False

    def __enter__(self) -> "Checkpoints":
        return self

    def __exit__(self, *_):
        try:
            self.wait()
        finally:
            self._thread.shutdown()
            self._orbax.close()

    def steps(self) -> list[int]:
        """The steps that were saved completely, in order; they may have been damaged since."""
        if not self.folder.exists():
            return []
        return sorted(int(path.name) for path in self.folder.iterdir() if path.name.isdigit())

    def save(self, state: State, score: float | None = None) -> None:
        """Start saving; returns when the state may be changed. Errors of the last save are raised here, or by wait."""
        self.wait()
        step, first = int(state.step), jax.process_index() == 0
        unfinished = self.folder / f"{UNFINISHED}{step}"
        if first and not self._swept and self.folder.exists():  # what a kill left behind
            for path in self.folder.iterdir():
                if path.name.startswith(UNFINISHED):
                    path.rmtree()
        self._swept = True
        self.folder.mkdir(parents=True, exist_ok=True)
        arrays = sharding.named(state)
        self._orbax.save(unfinished, args=ocp.args.PyTreeSave(arrays), force=True)
        score = score if score is not None and math.isfinite(score) else None
        about = {"step": step, "score": score, "arrays": {name: _about(array) for name, array in arrays.items()}}
        self._saving = self._thread.submit(self._finish, unfinished, about) if first else None

    def wait(self) -> None:
        """Return when the last save is complete and proved."""
        saving, self._saving = self._saving, None
        if saving is None:
            self._orbax.wait_until_finished()
        else:
            saving.result()

    def restore(self, abstract: State, step: int | None = None) -> State | None:
        """The newest good state, or that of ``step``, placed as ``abstract`` says; None if nothing was ever saved.

        A bad checkpoint is passed over with a warning. CheckpointError where there are some and none is good.
        """
        step = self._good(step)
        if step is None:
            return None
        found = self._read(step, sharding.named(abstract), partial=False)
        return jax.tree.unflatten(jax.tree.structure(abstract), [found[name] for name in sharding.named(abstract)])

    def restore_model(self, state: State, step: int | None = None, source: Callable[[str], str | None] = str) -> State:
        """``state`` with the parameters alone from here; never without: CheckpointError if there is no checkpoint.

        ``source`` gives the name here of a parameter of ``state``, None for one that stays as it is.
        """
        step = self._good(step)
        if step is None:
            raise CheckpointError(f"there is no checkpoint in {self.folder}")
        names = {name: found for name in state.params if (found := source(name)) is not None}
        like = sharding.described(state.params)
        found = self._read(step, {f"params.{there}": like[name] for name, there in names.items()}, partial=True)
        return replace(state, params=state.params | {name: found[f"params.{there}"] for name, there in names.items()})

    def best(self) -> int | None:
        """The step with the best score."""
        sign = {"lowest": 1, "highest": -1}[self.config.best]
        scores = {step: score for step in self.steps() if (score := self._score(step)) is not None}
        return min(scores, key=lambda step: (sign * scores[step], step), default=None)

    def _good(self, step: int | None) -> int | None:
        """The newest good step, or ``step`` if that is good; the first process looks and tells the others."""
        self.wait()
        found, faults = -1, {}
        if jax.process_index() == 0:
            for candidate in reversed(self.steps()) if step is None else [step]:
                fault = self._fault(candidate)
                if fault is None:
                    found = candidate
                    break
                faults[candidate] = fault
                print(f"warning: checkpoint {self.folder / str(candidate)} is passed over: {fault}", flush=True)
            found = -2 if found < 0 and faults else found
        found = int(multihost_utils.broadcast_one_to_all(np.int32(found)))
        if found == -2:
            listed = "".join(f"\n  {self.folder / str(step)}: {fault}" for step, fault in faults.items())
            raise CheckpointError(f"no checkpoint is good; remove {self.folder} to start from scratch:{listed}")
        return None if found == -1 else found

    def _read(self, step: int, like: Mapping[str, Any], partial: bool) -> dict[str, jax.Array]:
        """The arrays named in ``like``, bit for bit: orbax would cast another dtype without a word."""
        folder = self.folder / str(step)
        saved = json.loads((folder / MANIFEST).read_text())["arrays"]
        due = {name: _about(leaf) for name, leaf in like.items()}
        names = due.keys() if partial else due.keys() | saved.keys()
        wrong = [
            f"\n  {n}: saved {saved.get(n)}, due {due.get(n)}" for n in sorted(names) if saved.get(n) != due.get(n)
        ]
        if wrong:
            raise SettingError(f"checkpoint {folder} is of another model or optimiser:{''.join(wrong[:10])}")
        arguments = ocp.checkpoint_utils.construct_restore_args(dict(like))
        return self._orbax.restore(
            folder, args=ocp.args.PyTreeRestore(dict(like), restore_args=arguments, partial_restore=partial)
        )

    def _finish(self, unfinished: epath.Path, about: dict[str, Any]) -> None:
        self._orbax.wait_until_finished()
        manifest = {**about, "files": _checksums(unfinished)}
        (unfinished / MANIFEST).write_text(json.dumps({"sha256": _seal(manifest), **manifest}, indent=1))
        done = self.folder / str(about["step"])
        if done.exists():
            done.rmtree()
        unfinished.rename(done)
        for step in self.steps():
            if step > about["step"]:  # of a course given up: it was damaged, and this run went on from before it
                (self.folder / str(step)).rmtree()
        for step in self.steps()[: -self.config.keep]:
            if step != self.best():
                (self.folder / str(step)).rmtree()

    def _score(self, step: int) -> float | None:
        try:
            return json.loads((self.folder / str(step) / MANIFEST).read_text())["score"]
        except (OSError, ValueError, KeyError):
            return None

    def _fault(self, step: int) -> str | None:
        """What is wrong with a checkpoint, or None."""
        folder = self.folder / str(step)
        try:
            manifest = json.loads((folder / MANIFEST).read_text())
            seal = manifest.pop("sha256")
        except (OSError, ValueError, KeyError, AttributeError, TypeError) as error:
            return f"{MANIFEST} cannot be read ({type(error).__name__})"
        if seal != _seal(manifest):
            return f"{MANIFEST} was changed"
        found = _checksums(folder)
        for name in manifest["files"].keys() | found.keys():
            if manifest["files"].get(name) != found.get(name):
                kind = "missing" if name not in found else "unknown" if name not in manifest["files"] else "changed"
                return f"file {name} is {kind}"
        return None


def _about(array: Any) -> list:
    return [list(array.shape), str(array.dtype)]


def _checksums(folder: epath.Path) -> dict[str, str]:
    """``{path below folder: sha256}`` of every file but the manifest."""

    def files(below):
        for path in below.iterdir():
            yield from files(path) if path.is_dir() else [path]

    def checksum(path):
        with path.open("rb") as file:
            return hashlib.file_digest(file, "sha256").hexdigest()

    paths = {str(path.relative_to(folder)): path for path in files(folder)} if folder.exists() else {}
    paths.pop(MANIFEST, None)
    with ThreadPoolExecutor(8) as pool:
        return dict(zip(paths, pool.map(checksum, paths.values()), strict=True))


def _seal(manifest: Mapping[str, Any]) -> str:
    return hashlib.sha256(json.dumps(manifest, sort_keys=True).encode()).hexdigest()

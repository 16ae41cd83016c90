"""Several runs of one model that differ in seed and data, trained at once on one device, each as if it were alone.

Their parameters, optimiser states and batches get a leading axis, over which the step is mapped. That is for small
models on an accelerator, which one alone leaves idle; on two CPU cores three steps at once take as long as three, or
longer. On disk such a run is like any other: it has its own checkpoints, log and evaluations, and each of its steps
counts with its share of the time.
"""

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, replace
from functools import lru_cache
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from lm.settings import SettingError
from lm.train import loop
from lm.train.checkpoints import Checkpoints
from lm.train.config import LoopConfig
from lm.train.log import Log
from lm.train.state import State
from lm.train.step import Steps


@dataclass(frozen=True)
class Run:
    """What ``loop.train`` takes for one run alone, and runs that are trained together do not share."""

    seed: int | tuple[int, ...]
    data: Callable[[int], Iterable[loop.HostBatch]]
    checkpoints: Checkpoints
    log: Log
    evaluate: loop.Evaluate
    initial: Callable[[], State] | None = None


def train(steps: Steps, runs: Sequence[Run], config: LoopConfig, flops: float | None = None) -> None:
    """Train all ``runs`` to ``config.steps``, those at once that are at the same step now; ``flops``: of one alone.

    What ends one ends all that are trained with it: a signal, having saved all; a loss that is not finite.
    """
    if len(runs) > 1 and steps.mesh.size > 1:
        raise SettingError(f"mesh of {steps.mesh.size} devices: runs are trained together on one device only")
    groups: dict[int | None, list[Run]] = {None: [*runs]} if len(runs) == 1 else {}
    for run in runs if not groups else ():
        groups.setdefault(run.checkpoints.newest(), []).append(run)
    for group in groups.values():
        one, compiled = (group[0], steps) if len(group) == 1 else (_merged(group), together(steps))
        flops_of_all = None if flops is None else flops * len(group)
        loop.train(
            compiled, one.seed, one.data, one.checkpoints, one.log, one.evaluate, config, one.initial, flops_of_all
        )


def _merged(runs: Sequence[Run]) -> Run:
    """All of ``runs``, which are at the same step, as one whose state and batches are stacked."""

    def data(start):
        for batches in zip(*(run.data(start) for run in runs), strict=True):
            yield {name: np.stack([batch[name] for batch in batches]) for name in batches[0]}

    def evaluate(state):
        found = [run.evaluate(part) for run, part in zip(runs, split(state), strict=True)]
        return {name: [values.get(name) for values in found] for name in found[0]}

    def initial():
        return stack([run.initial() for run in runs])

    checkpoints, log = _Checkpoints([run.checkpoints for run in runs]), _Log([run.log for run in runs])
    given = initial if all(run.initial for run in runs) else None
    return Run(tuple(run.seed for run in runs), data, checkpoints, log, evaluate, given)


def together(steps: Steps) -> Steps:
    """The steps of states that are stacked, but for the number of the step; ``abstract`` and ``eval`` stay of one."""
    create, train = _mapped(steps.create, steps.train, steps.abstract.structure)
    return replace(steps, create=create, train=train)


@lru_cache(maxsize=16)  # for the same steps the same functions, which are compiled once
def _mapped(create: Callable, train: Callable, structure: Any) -> tuple[Callable, Callable]:
    axes = State(None, 0, 0, structure, 0)
    mapped = jax.vmap(train, in_axes=(axes, 0, 0), out_axes=(axes, 0))
    return jax.jit(jax.vmap(create, out_axes=axes)), jax.jit(mapped, donate_argnums=0)


@jax.jit
def stack(states: Sequence[State]) -> State:
    """One state of several that are at the same step."""
    stacked = jax.tree.map(lambda *leaves: jnp.stack(leaves), *states)
    return replace(stacked, step=states[0].step)


@jax.jit
def split(state: State) -> list[State]:
    """The states of which ``stack`` made one."""
    count = next(iter(state.params.values())).shape[0]
    parts = (state.params, state.opt_state, state.guard)
    each = [jax.tree.map(lambda leaf, index=index: leaf[index], parts) for index in range(count)]
    return [State(state.step, params, opt_state, state.structure, guard) for params, opt_state, guard in each]


class _Checkpoints:
    """``Checkpoints`` of several runs at the same step."""

    def __init__(self, each: Sequence[Checkpoints]):
        self.each, self.config = each, each[0].config

    def restore(self, abstract: State) -> State | None:
        found = [checkpoints.restore(abstract) for checkpoints in self.each]
        return None if found[0] is None else stack(found)

    def save(self, state: State) -> None:
        for checkpoints, part in zip(self.each, split(state), strict=True):
            checkpoints.save(part)

    def score(self, step: int, *ranks: Mapping[str, list[float | None]]) -> None:
        for index, checkpoints in enumerate(self.each):
            checkpoints.score(step, *({name: values[index] for name, values in each.items()} for each in ranks))

    def settle(self) -> None:
        for checkpoints in self.each:
            checkpoints.settle()

    def steps(self) -> list[int]:
        return self.each[0].steps()

    def wait(self) -> None:
        for checkpoints in self.each:
            checkpoints.wait()

    def tidy(self, last: int) -> None:
        for checkpoints in self.each:
            checkpoints.tidy(last)


class _Log:
    """``Log`` of several runs: numbers that are lists are one for each, the others are of all."""

    def __init__(self, each: Sequence[Log]):
        self.each, self.folder = each, each[0].folder

    def start(self, step: int) -> None:
        for log in self.each:
            log.start(step)

    def began(self, compiling: float) -> None:
        for log in self.each:
            log.began(compiling)

    def lacks(self, step: int, kind: str) -> bool:
        return any(log.lacks(step, kind) for log in self.each)

    @contextmanager
    def evaluating(self, step: int) -> Iterator[None]:
        with ExitStack() as stack:
            for log in self.each:
                stack.enter_context(log.evaluating(step))
            yield

    def ended_evaluating(self, step: int) -> int:
        return max(log.ended_evaluating(step) for log in self.each)

    def write(self, step: int, kind: str, values: Mapping[str, Any]) -> None:
        for index, log in enumerate(self.each):
            if kind == "eval" and not log.lacks(step, kind):
                continue  # a kill fell between the lines of two runs
            own = {name: value[index] if isinstance(value, list) else value for name, value in values.items()}
            if own.get("seconds_per_step"):
                own["seconds_per_step"] /= len(self.each)
            log.write(step, kind, own)

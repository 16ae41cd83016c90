"""Runs trained at once are, each by itself, the runs trained alone."""

import json
import os
import signal
from contextlib import ExitStack

import numpy as np
import pytest
import toy

from lm.train import together
from lm.train.checkpoints import MANIFEST, Checkpoints
from lm.train.config import CheckpointConfig, LoopConfig
from lm.train.log import Log, NonFiniteLoss, records
from lm.train.signals import Interrupted

SEEDS, TOTAL = (0, 3, 5), 8
CLOCK = {"time", "seconds_per_step", "tokens_per_second", "waiting_for_data"}


def train(folder, seeds=SEEDS, total=TOTAL, on_batch=None, poison=()):
    """``seeds`` together, each in its folder, from wherever they are; what they were at the end."""

    def data(seed, start):
        for step in range(start, total):
            if on_batch:
                on_batch(step)
            yield toy.batch(step + 100 * seed, poison)

    steps = toy.steps()
    with ExitStack() as stack:
        runs = []
        for seed in seeds:
            here = folder / f"seed-{seed}"
            runs.append(
                together.Run(
                    seed,
                    lambda start, seed=seed: data(seed, start),
                    stack.enter_context(Checkpoints(here / "checkpoints", CheckpointConfig(every=4))),
                    stack.enter_context(Log(here, {"seed": seed})),
                    lambda state, seed=seed: steps.evaluate(state, [toy.batch(10_000 + seed)]),
                )
            )
        together.train(steps, runs, LoopConfig(steps=total, log_every=1, evaluate_every=4))
        return {run.seed: run.checkpoints.restore(steps.abstract) for run in runs}


@pytest.fixture(scope="module")
def alone(tmp_path_factory):
    folder = tmp_path_factory.mktemp("alone")
    return {seed: train(folder, [seed])[seed] for seed in SEEDS}, folder


def assert_same(found, folder, alone):
    states, there = alone
    for seed, state in found.items():
        assert int(state.step) == TOTAL
        for name, value in states[seed].params.items():
            np.testing.assert_allclose(state.params[name], value, rtol=1e-4, atol=1e-5, err_msg=name)
        own, due = (records(each / f"seed-{seed}") for each in (folder, there))
        assert [line.keys() - CLOCK for line in own] == [line.keys() - CLOCK for line in due]
        for line, other in zip(own, due, strict=True):
            for name in other.keys() - CLOCK - {"kind"}:
                assert line[name] == pytest.approx(other[name], rel=1e-3), (seed, name)
        own, due = (each / f"seed-{seed}" / "checkpoints" for each in (folder, there))
        assert {path.name for path in own.iterdir()} >= {path.name for path in due.iterdir()}  # a signal's step too
        own, due = (json.loads((each / str(TOTAL) / MANIFEST).read_text())["scores"] for each in (own, due))
        assert own == pytest.approx(due, rel=1e-3)


def test_runs_trained_together_are_those_trained_alone(tmp_path, alone):
    assert_same(train(tmp_path), tmp_path, alone)
    compiled = together.together(toy.steps())
    assert compiled.train is together.together(toy.steps()).train and compiled.train._cache_size() == 1


def test_a_signal_saves_all_and_they_go_on_together_or_with_one_that_lags_behind(tmp_path, alone):
    train(tmp_path, SEEDS[:1], total=4)

    asked = []

    def stop(step):
        if step == 3 and not asked:  # by the first of the two
            asked.append(os.kill(os.getpid(), signal.SIGTERM))

    with pytest.raises(Interrupted):
        train(tmp_path, SEEDS[1:], on_batch=stop)
    saved = {seed: os.listdir(tmp_path / f"seed-{seed}" / "checkpoints") for seed in SEEDS}
    assert saved[3] == saved[5] != saved[0]
    assert_same(train(tmp_path), tmp_path, alone)


def test_a_loss_that_is_not_finite_in_one_run_stops_all_before_it_is_saved(tmp_path):
    with pytest.raises(NonFiniteLoss, match="step 6"):
        train(tmp_path, SEEDS[:2], poison=[5])  # of seed 0
    assert {path.name for path in tmp_path.glob("*/checkpoints/*")} == {"4"}

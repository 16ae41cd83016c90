"""Steps and the loop: micro-batches, resuming, signals, losses that are not finite, and what a run writes
down.
"""

import json
import os
import signal
import subprocess
import sys
import time
from dataclasses import replace

import jax
import numpy as np
import pytest
import toy
from paths import ROOT

from lm.batch import Batch
from lm.config.base import SettingError, changes
from lm.config.layers import AttentionConfig, MlpConfig
from lm.config.model import ModelConfig
from lm.config.training import CheckpointConfig, LossConfig
from lm.sharding import named
from lm.train.flops import step_flops
from lm.train.loop import MAX_EVALUATION_TRIES
from lm.train.runtime import manifest
from lm.train.runtime.checkpoints import Checkpoints
from lm.train.runtime.log import Log, NonFiniteLoss
from lm.train.runtime.preemption import Interrupted
from lm.train.runtime.records import records

NO_DROPOUT = replace(toy.MODEL, dropout=0.0)


def trained(steps, count=2, seed=0):
    state, step = steps.initial_state(seed), steps.seeded_train_step(seed)
    for i in range(count):
        state, metrics = step(state, steps.shard_batch(toy.batch(i)))
    return state, {name: float(value) for name, value in metrics.items()}


@pytest.mark.parametrize("sizes, parts", [pytest.param((), 4, marks=pytest.mark.slow), ((2, 2, 2), 2)])
def test_microbatches_with_ragged_targets_make_the_step_of_one_batch(sizes, parts):
    whole, numbers = trained(toy.steps(model=NO_DROPOUT))
    split, others = trained(toy.steps(*sizes, model=NO_DROPOUT, microbatches=parts))
    assert others == pytest.approx(numbers, rel=1e-5)
    for name, value in whole.params.items():
        np.testing.assert_allclose(split.params[name], value, rtol=1e-4, atol=1e-6, err_msg=name)


def test_rows_that_microbatches_cannot_share_evenly_are_refused():
    steps = toy.steps(microbatches=3)
    with pytest.raises(SettingError, match=f"microbatches=3 .*{toy.ROWS} rows.*1, 2, 4, 8, 16"):
        steps.compile_train_step(steps.shard_batch(toy.batch(0)))


def test_a_step_counts_every_target_alike():
    steps = toy.steps(model=NO_DROPOUT, loss_config=LossConfig(z_loss=0.0))
    state, batch = steps.initial_state(0), toy.batch(0)
    logits = np.asarray(state.eval_model(batch), np.float64)
    logs, targets = logits - np.log(np.exp(logits).sum(-1, keepdims=True)), batch.decoder.targets
    loss = -np.take_along_axis(logs, targets[..., None], -1)[..., 0]
    weights = batch.decoder.loss_weights
    due = (loss * weights).sum() / weights.sum()
    assert steps.evaluate(state, [batch])["loss"] == pytest.approx(due, rel=1e-5)
    halves = [batch.map(lambda x, rows=rows: x[rows]) for rows in (slice(0, 4), slice(4, None))]
    assert steps.evaluate(state, halves)["loss"] == pytest.approx(due, rel=1e-5)
    _, metrics = steps.seeded_train_step(0)(state, steps.shard_batch(batch))
    assert metrics["loss"] == pytest.approx(due, rel=1e-5) and metrics["tokens"] == weights.sum()


@pytest.mark.parametrize("share", [0.5, 1e-4])
def test_loss_weights_are_relative_also_where_their_sum_is_below_1(share):
    steps = toy.steps(model=NO_DROPOUT, loss_config=LossConfig(z_loss=0.0))
    whole = toy.batch(0)
    weights = whole.decoder.loss_weights
    part = Batch.from_features(whole.features() | {"decoder_loss_weights": share / weights.sum() * weights})
    due = steps.evaluate(steps.initial_state(0), [whole])["loss"]
    assert steps.evaluate(steps.initial_state(0), [part])["loss"] == pytest.approx(due, rel=1e-5)
    _, metrics = steps.seeded_train_step(0)(steps.initial_state(0), steps.shard_batch(part))
    assert float(metrics["loss"]) == pytest.approx(due, rel=1e-5)


def test_z_loss_pulls_in_training_and_is_not_in_the_reported_loss():
    (_, without), (_, strong) = (
        trained(toy.steps(model=NO_DROPOUT, loss_config=LossConfig(z_loss=z)), 1) for z in (0.0, 1.0)
    )
    assert (
        strong["loss"] == pytest.approx(without["loss"], rel=1e-5)
        and without["z_loss"] == 0 < strong["z_loss"]
    )
    assert strong["grad_norm"] != pytest.approx(without["grad_norm"], rel=1e-2)


def test_dropout_differs_between_steps_and_seeds_and_is_the_same_again():
    steps = toy.steps()

    def loss(seed, step):
        state = replace(steps.initial_state(0), step=jax.numpy.asarray(step, jax.numpy.int32))
        return float(steps.seeded_train_step(seed)(state, steps.shard_batch(toy.batch(0)))[1]["loss"])

    assert loss(0, 0) == loss(0, 0) and len({loss(0, 0), loss(0, 1), loss(1, 0)}) == 3


def test_runs_of_one_shape_share_their_compilation():
    steps = toy.steps()
    trained(steps, seed=0)
    compiled = steps.jit_train_step._cache_size()
    trained(toy.steps(), seed=1)
    assert toy.steps() is steps and steps.jit_train_step._cache_size() == compiled


def test_a_frozen_parameter_stays():
    steps = toy.steps(mask_updates=frozen)
    state, before = trained(steps)[0], steps.initial_state(0)
    assert (state.params["table"] == before.params["table"]).all()
    assert (state.params["blocks"] != before.params["blocks"]).any()


def frozen(updates, step):
    return updates | {"table": 0 * updates["table"]}


def lines(folder):
    """What a run logged, without what the clock told."""
    clock = ("time", "seconds_per_step", "tokens_per_second", "waiting_for_data")
    return [
        {name: value for name, value in record.items() if name not in clock} for record in records(folder)
    ]


@pytest.fixture(scope="module")
def uninterrupted(tmp_path_factory):
    folder = tmp_path_factory.mktemp("uninterrupted")
    return toy.numbers(toy.run(folder, 12)), lines(folder)


def test_a_run_in_two_sessions_is_the_run_in_one_bit_for_bit(tmp_path, uninterrupted):
    state = toy.run(tmp_path, 8)
    assert int(state.step) == 8
    assert toy.numbers(toy.run(tmp_path, 12)) == uninterrupted[0]
    assert lines(tmp_path) == uninterrupted[1]
    (tmp_path / "checkpoints" / "unfinished-4-removed").mkdir()  # by a kill after the last save
    assert toy.numbers(toy.run(tmp_path, 12)) == uninterrupted[0]  # nothing is left to do but to tidy up
    assert sorted(path.name for path in (tmp_path / "checkpoints").iterdir()) == ["12", "4", "8"]


def test_a_mean_of_the_parameters_is_evaluated_and_resumed_and_training_goes_on_without_it(
    tmp_path, uninterrupted
):
    kept = replace(toy.OPTIMIZER, ema=0.99)
    whole, parts = toy.run(tmp_path / "whole", 12, optimizer=kept), tmp_path / "parts"
    toy.run(parts, 8, optimizer=kept)
    numbers = toy.numbers(toy.run(parts, 12, optimizer=kept))
    assert numbers == toy.numbers(whole) and lines(parts) == lines(tmp_path / "whole")
    # Only the mean, and what is evaluated by it, differs from a run without.
    assert {name: numbers[name] for name in uninterrupted[0]} == uninterrupted[0]
    for line, other in zip(lines(parts), uninterrupted[1], strict=True):
        assert (line == other) == (line["kind"] == "train")
    assert all((leaf == whole.average[name]).all() for name, leaf in named(whole.eval_model).items())
    # What starts from the run starts from the mean: fine-tuning without one, or with a new one.
    steps = toy.steps()
    with Checkpoints(parts / "checkpoints", CheckpointConfig()) as checkpoints:
        found = checkpoints.restore_model(steps.initial_state(1))
        tuned = found.warm_start(toy.steps(optimizer=kept).initial_state(1))
    assert int(found.step) == 0 and found.average is None
    for name, value in whole.average.items():
        assert (found.params[name] == value).all() and (tuned.average[name] == value).all()
    toy.steps(optimizer=kept).seeded_train_step(0)(
        tuned, steps.shard_batch(toy.batch(0))
    )  # no buffer is in it twice


@pytest.mark.parametrize("name", ["SIGTERM", "SIGINT"])
def test_a_signal_ends_the_step_saves_and_the_next_session_goes_on(tmp_path, uninterrupted, name):
    def stop(step):
        if step == 7:  # asked for ahead of its step
            os.kill(os.getpid(), getattr(signal, name))

    with pytest.raises(Interrupted, match=f"{name}: stopped after step [5-7], which is saved") as caught:
        toy.run(tmp_path, 12, on_batch=stop)
    assert (tmp_path / "checkpoints" / str(caught.value.step)).is_dir()
    assert json.loads((tmp_path / "run.json").read_text())["status"].startswith("Interrupted")
    assert signal.getsignal(signal.SIGTERM) == signal.SIG_DFL
    assert toy.numbers(toy.run(tmp_path, 12)) == uninterrupted[0]
    assert lines(tmp_path) == uninterrupted[1]


def test_a_signal_cuts_an_evaluation_short_and_it_is_made_up_for(tmp_path, uninterrupted):
    def stop(_):
        os.kill(os.getpid(), signal.SIGTERM)
        time.sleep(60)

    with pytest.raises(Interrupted, match="step 4"):
        toy.run(tmp_path, 12, evaluate=stop)
    assert toy.numbers(toy.run(tmp_path, 12)) == uninterrupted[0]
    assert lines(tmp_path) == uninterrupted[1]


def test_evaluations_between_checkpoints_save_nothing_unless_a_signal_comes(tmp_path, capfd):
    toy.run(tmp_path / "whole", 6, every=4, looks=2)
    assert "warning" not in capfd.readouterr().out
    assert [record["step"] for record in records(tmp_path / "whole") if record["kind"] == "eval"] == [2, 4, 6]
    assert [*manifest.steps(tmp_path / "whole" / "checkpoints")] == [4, 6]

    def stop(_):
        os.kill(os.getpid(), signal.SIGTERM)
        time.sleep(60)

    with pytest.raises(Interrupted, match="step 2"):
        toy.run(tmp_path / "cut", 6, every=4, looks=2, evaluate=stop)
    assert [*manifest.steps(tmp_path / "cut" / "checkpoints")] == [2]
    toy.run(tmp_path / "cut", 6, every=4, looks=2)
    assert lines(tmp_path / "cut") == lines(tmp_path / "whole")


class Killed(BaseException):
    """Ends a session as a kill does: nothing of ours is done any more but what runs at the end of a
    context.
    """


@pytest.mark.parametrize("moment", ["evaluation", "scores", "line"])
def test_a_run_that_dies_between_a_save_and_the_line_of_its_evaluation_loses_nothing(
    tmp_path, uninterrupted, monkeypatch, moment
):
    def dies(*args):
        if moment != "line" or args[2] == "eval":
            raise Killed
        write(*args)

    write = Log.write
    with monkeypatch.context() as patch, pytest.raises(Killed):
        if moment != "evaluation":
            patch.setattr(*{"scores": (Checkpoints, "write_scores"), "line": (Log, "write")}[moment], dies)
        toy.run(tmp_path, 12, evaluate=dies if moment == "evaluation" else None)
    assert [path.name for path in (tmp_path / "checkpoints").iterdir()] == ["4"]
    assert toy.numbers(toy.run(tmp_path, 12)) == uninterrupted[0]
    assert lines(tmp_path) == uninterrupted[1]
    with Checkpoints(tmp_path / "checkpoints", CheckpointConfig()) as checkpoints:
        assert manifest.manifests(checkpoints.folder)[4]["scores"].keys() == {"loss"}


def test_a_checkpoint_is_saved_only_once_the_lines_before_it_are_durable(tmp_path, monkeypatch):
    """A disk without power has what was synced, and a mounted bucket what was closed."""
    synced, saved = [0], []
    fsync, save = os.fsync, Checkpoints.save

    def syncing(file):
        fsync(file)
        path = tmp_path / "metrics.jsonl"
        if path.exists() and os.path.samestat(os.fstat(file), path.stat()):
            synced[0] = len(records(tmp_path))

    def saving(self, state):
        saved.append((int(state.step), synced[0]))
        save(self, state)

    monkeypatch.setattr(os, "fsync", syncing)
    monkeypatch.setattr(Checkpoints, "save", saving)
    toy.run(tmp_path, 12, evaluate=lambda _: {"loss": 1.0}, looks=12)
    assert saved == [(4, 4), (8, 8), (12, 12)]


def test_an_evaluation_that_ends_the_run_again_and_again_is_told_and_tried_anew_only_when_asked_again(
    tmp_path,
):
    def dies(_):
        raise Killed

    for _ in range(2):
        for _ in range(MAX_EVALUATION_TRIES):
            with pytest.raises(Killed):
                toy.run(tmp_path, 12, evaluate=dies)
        with pytest.raises(
            SettingError,
            match=rf"the evaluation of step 4 has ended this run {MAX_EVALUATION_TRIES} times in a row",
        ):
            toy.run(tmp_path, 12, evaluate=dies)
    assert int(toy.run(tmp_path, 12).step) == 12


@pytest.mark.parametrize("error", [ValueError, KeyboardInterrupt])
def test_a_run_goes_on_once_the_cause_of_an_exception_in_its_evaluation_is_mended(error, tmp_path):
    def fails(_):
        raise error("odd")

    for _ in range(MAX_EVALUATION_TRIES):
        with pytest.raises(error, match="odd"):
            toy.run(tmp_path, 4, evaluate=fails)
    assert int(toy.run(tmp_path, 4, evaluate=lambda _: {"loss": 1.0}).step) == 4


def test_a_run_killed_at_any_moment_goes_on_bit_for_bit(tmp_path, uninterrupted):
    command = [sys.executable, toy.__file__, str(tmp_path), "100000"]
    environment = os.environ | {"PYTHONPATH": str(ROOT)}
    process = subprocess.Popen(command, env=environment, stdout=subprocess.DEVNULL)
    deadline = time.monotonic() + 60
    while (
        not (tmp_path / "checkpoints" / "4").exists()
        and process.poll() is None
        and time.monotonic() < deadline
    ):
        time.sleep(0.005)
    process.kill()
    process.wait()
    saved = max(int(path.name) for path in (tmp_path / "checkpoints").iterdir() if path.name.isdigit())
    total = saved + 4
    (tmp_path / "metrics.jsonl").open("a").write('{"step": 3')  # the line that the kill cut
    resumed = toy.numbers(toy.run(tmp_path, total))
    due = tmp_path / "due"
    assert resumed == (uninterrupted[0] if total == 12 else toy.numbers(toy.run(due, total)))
    assert [r["step"] for r in lines(tmp_path) if r["kind"] == "train"] == list(range(1, total + 1))
    assert not list((tmp_path / "checkpoints").glob("unfinished-*"))


@pytest.mark.parametrize("bad", [7, 8])  # steps: of one that is to be saved, too
def test_a_loss_that_is_not_finite_stops_the_run_its_batch_is_kept_and_no_state_from_it_is_saved(
    tmp_path, bad
):
    poison, said = [bad - 1], f"step {bad} is not finite.* its batch is in .*; the checkpoint of step 4"
    with pytest.raises(NonFiniteLoss, match=said):
        toy.run(tmp_path, 12, log_every=100, poison=poison)
    assert [path.name for path in (tmp_path / "checkpoints").iterdir()] == ["4"]
    assert f"NonFiniteLoss: step {bad}" in json.loads((tmp_path / "run.json").read_text())["status"]
    with np.load(tmp_path / f"batch-{bad}-0.npz") as kept:
        for name, due in toy.batch(bad - 1, poison).features().items():
            np.testing.assert_array_equal(kept[name], due)
    assert int(toy.run(tmp_path, 8).step) == 8


def test_step_flops_are_six_for_every_weight_and_position_and_the_scores():
    config = ModelConfig(
        "decoder",
        1000,
        1,
        2,
        d_model=64,
        mlp=MlpConfig(d_ff=128),
        attention=AttentionConfig(d_kv=16, num_heads=4),
    )
    weights = 1000 * 64 + 2 * (4 * 64 * 64 + 2 * 64 * 128)
    scores = 2 * 2 * 2 * 32 * 32 * 64  # layers x (scores, sum) x 2 x T x T x N H
    assert step_flops(config, 8, 0, 32) == 8 * (6 * weights * 32 + 3 * scores)
    bare = changes(config, {"output.logits": "none"})
    assert step_flops(config, 8, 0, 32) - step_flops(bare, 8, 0, 32) == 8 * 6 * 1000 * 64 * 32

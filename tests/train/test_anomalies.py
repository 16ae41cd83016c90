"""An update that is left out changes nothing; a process that is stuck says where, and ends."""

import json
import os
import signal
import subprocess
import sys
import threading
import time
from dataclasses import replace
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import toy
from paths import GOLDEN, ROOT, SUPPORT

from lm import sharding
from lm.config.base import SettingError
from lm.config.training import GuardConfig
from lm.train.runtime.log import NonFiniteLoss
from lm.train.runtime.preemption import STEP_TIMEOUT, Interrupted, PreemptionHandler
from lm.train.runtime.records import records
from lm.train.state import check_update, initial_guard

SKIP = GuardConfig(non_finite="skip", in_a_row=3)


def test_of_an_update_that_is_left_out_only_the_step_counts():
    steps = toy.steps(guard=SKIP)
    state, train = steps.initial_state(0), steps.seeded_train_step(0)
    state, _ = train(state, steps.shard_batch(toy.batch(0)))
    before = toy.numbers(state)
    state, metrics = train(state, steps.shard_batch(toy.batch(1, poison=[1])))
    after = toy.numbers(state)
    assert {name for name in before if before[name] != after[name]} == {"step", "guard.consecutive_skipped"}
    assert (
        not np.isfinite(metrics["loss"]) and metrics["skipped_updates"] == metrics["consecutive_skipped"] == 1
    )
    state, metrics = train(state, steps.shard_batch(toy.batch(2)))
    assert toy.numbers(state) != after and metrics["skipped_updates"] == metrics["consecutive_skipped"] == 0


def assert_alike(found, due, updates):
    """Fail unless arrays differ by what another program rounds otherwise: a bit of the largest an update."""
    for name, value in due.items():
        rounding = updates * np.finfo(np.float32).eps * np.abs(np.asarray(value, np.float64)).max()
        np.testing.assert_allclose(found[name], value, rtol=0, atol=rounding, err_msg=name)


def test_a_guard_that_never_has_to_act_changes_no_number_but_by_rounding(tmp_path):
    plain, guarded = (
        toy.run(tmp_path / "plain", 8),
        toy.run(tmp_path / "guarded", 8, guarding=replace(SKIP, spikes=6.0)),
    )
    mine, due = sharding.named(guarded), sharding.named(plain)
    assert {name for name in mine if not name.startswith("guard.")} == due.keys()
    assert_alike(mine, due, updates=8)


def test_what_was_left_out_is_counted_and_a_run_in_two_sessions_is_the_run_in_one(tmp_path):
    whole = toy.run(tmp_path / "whole", 12, poison=[3, 4, 8], guarding=SKIP, log_every=6)
    toy.run(tmp_path / "parts", 4, poison=[3, 4, 8], guarding=SKIP, log_every=6)
    assert toy.numbers(toy.run(tmp_path / "parts", 12, poison=[3, 4, 8], guarding=SKIP)) == toy.numbers(whole)
    lines = train_lines(tmp_path / "whole")
    assert [(line["step"], line["skipped_updates"]) for line in lines] == [(6, 2), (12, 1)]
    json.loads((tmp_path / "whole" / "metrics.jsonl").read_text().splitlines()[0], parse_constant=pytest.fail)


def train_lines(folder):
    return [record for record in records(folder) if record["kind"] == "train"]


def test_a_run_that_is_killed_between_two_lines_counts_each_update_left_out_once(tmp_path):
    class Killed(BaseException):
        """Ends a session as a kill does."""

    def dies(_):
        raise Killed

    settings = {"poison": [2, 3, 8], "guarding": SKIP, "log_every": 6}
    whole = toy.run(tmp_path / "whole", 12, **settings)
    with pytest.raises(Killed):
        toy.run(tmp_path / "cut", 12, evaluate=dies, **settings)  # after step 4
    assert toy.numbers(toy.run(tmp_path / "cut", 12, **settings)) == toy.numbers(whole)
    for folder in ("whole", "cut"):
        counts = [(line["step"], line["skipped_updates"]) for line in train_lines(tmp_path / folder)]
        assert counts == [(6, 2), (12, 1)]


def test_a_run_that_was_stopped_goes_on_leaving_updates_out_and_back(tmp_path):
    with pytest.raises(NonFiniteLoss):
        toy.run(tmp_path, 12, poison=[6])
    toy.run(tmp_path, 8, poison=[6], guarding=SKIP)
    whole = sharding.named(toy.run(tmp_path / "whole", 12, poison=[6], guarding=SKIP))
    found = sharding.named(toy.run(tmp_path, 12, poison=[6]))  # nothing is left out any more
    assert found.keys() == whole.keys() - {"guard.consecutive_skipped", "guard.skipped_since_line"}
    assert_alike(whole, found, updates=12)


def test_a_run_that_is_trained_further_than_asked_is_left_as_it_is(tmp_path):
    toy.run(tmp_path, 8)
    with pytest.raises(SettingError, match="trained to step 8 already, which is more than steps=4"):
        toy.run(tmp_path, 4)
    assert {path.name for path in (tmp_path / "checkpoints").iterdir()} == {"4", "8"}


def test_too_many_in_a_row_end_the_run(tmp_path):
    with pytest.raises(NonFiniteLoss, match="step 8 is the last of 3 in a row .*the checkpoint of step 4"):
        toy.run(tmp_path, 12, poison=[5, 6, 7], guarding=SKIP)
    assert [path.name for path in (tmp_path / "checkpoints").iterdir()] == ["4"]


def judged(config, losses, norms):
    """Which updates are made."""

    def step(memory, numbers):
        return check_update(config, memory, *numbers)[::-1]

    numbers = jnp.array([losses, norms], jnp.float32).T
    return np.array(jax.lax.scan(step, initial_guard(config), numbers)[1])


def test_a_spike_is_left_out():
    rng = np.random.default_rng(0)
    losses = 3 + 6 * np.exp(-np.arange(1_000) / 200) + rng.normal(0, 0.1, 1_000)  # steep, then flat
    norms, config = np.ones(1_000), GuardConfig(spikes=6.0)
    losses[300], losses[500:504], losses[50] = 12, 9, 30
    # at 50 who knows?
    assert np.flatnonzero(~judged(config, losses, norms)).tolist() == [300, 500, 501, 502, 503]
    for bad in (losses, norms):
        for value in (np.nan, np.inf):
            bad[600] = value
            assert judged(config, losses, norms)[600]  # on which the loop stops
            assert not judged(replace(config, non_finite="skip"), losses, norms)[600]
        bad[600] = 1


def test_nothing_is_left_out_of_ordinary_runs():
    # known by heart, but for an example
    learnt = np.minimum(np.random.default_rng(0).lognormal(-6, 2, 1_000), 0.5)
    with np.load(GOLDEN / "courses.npz") as courses:
        for losses, norms in [*courses.values(), (learnt, np.ones(1_000))]:
            assert judged(GuardConfig(spikes=6.0), losses, norms).all()


@pytest.mark.parametrize(
    ("new", "said"), [({"spikes": 0.0}, "spikes=0.0 .* above 0"), ({"in_a_row": 0}, "at least 1")]
)
def test_a_guard_that_makes_no_sense_is_refused(new, said):
    with pytest.raises(SettingError, match=said):
        GuardConfig(**new)


@pytest.mark.slow
def test_a_stuck_step_ends_the_process_which_writes_where_its_threads_stand(tmp_path):
    script = f"""
import time, toy
def stuck(state):
    time.sleep(99 * (int(state.step) == 8))
    return {{"loss": 0.0}}
toy.run({str(tmp_path)!r}, 99, patience=15.0, evaluate=stuck)
"""
    environment = os.environ | {"PYTHONPATH": os.pathsep.join(map(str, (SUPPORT, ROOT)))}
    before = time.monotonic()
    done = subprocess.run(
        [sys.executable, "-c", script], env=environment, capture_output=True, text=True, timeout=90
    )
    assert (done.returncode, time.monotonic() - before < 80) == (STEP_TIMEOUT, True), done.stderr
    assert "nothing was done for 15 s" in done.stderr and str(tmp_path / "stuck-0.txt") in done.stderr
    assert "in stuck" in (tmp_path / "stuck-0.txt").read_text()
    assert (tmp_path / "checkpoints" / "4").is_dir()


def test_a_signal_need_not_wait_for_the_compiler(tmp_path, monkeypatch):
    done = threading.Event()

    def compiling(*_):
        os.kill(os.getpid(), signal.SIGTERM)
        time.sleep(20)
        done.set()

    monkeypatch.setattr(jax.stages.Lowered, "compile", compiling)
    with pytest.raises(Interrupted, match="SIGTERM: stopped before the first step; nothing to save"):
        toy.run(tmp_path, 4)
    assert not done.is_set()


def test_a_signal_during_the_last_save_is_not_lost(tmp_path):
    def stop(state):
        if int(state.step) == 4:
            os.kill(os.getpid(), signal.SIGTERM)
        return {"loss": 0.0}

    with pytest.raises(Interrupted, match="after step 4, which is saved"):
        toy.run(tmp_path, 4, evaluate=stop)


def test_a_signal_at_any_line_of_what_it_may_interrupt_is_taken_down_and_goes_no_further():
    code, sent = PreemptionHandler.interruptible.__code__, []
    for due in sorted({line for *_, line in code.co_lines() if line}):

        def trace(frame, event, _, due=due):
            if frame.f_code is code and event == "line" and frame.f_lineno == due and due not in sent:
                sent.append(due)
                signal.raise_signal(signal.SIGTERM)
            return trace

        with PreemptionHandler(0.0, Path("stacks")) as preemption:
            before = sys.gettrace()
            sys.settrace(trace)
            try:
                preemption.interruptible(lambda: None)
            finally:
                sys.settrace(before)
            assert not preemption._interruptible and (preemption.signal == "SIGTERM") == (due in sent)
    assert len(sent) > 3

"""A signal at any moment: all end within a bound, asking to be started again, and nothing that was learnt is
lost.
"""

import signal
import time

import lives
import pytest

from lm.train.runtime.records import records

QUICKLY = 45.0  # from the signal to the end of all, on a busy machine [seconds]
# In the order in which a run comes to them, with the number of the call: each is stopped where the last went
# on.
MOMENTS = {"preparing": 1, "compiling": 1, "training": 3, "saving": 2, "evaluating": 2}


@pytest.fixture(scope="module", params=["1-SIGTERM", "1-SIGINT", "2-SIGTERM", "2-SIGINT"])
def stopped(request, prepare):
    """A run whose last process gets the signal at every moment, one a life; {moment: what came of it}, its
    folder.
    """
    count, _, name = request.param.partition("-")
    count, number, runs, found = int(count), getattr(signal, name), prepare("stopped"), {}
    for moment, call in MOMENTS.items():
        (runs / "struck").unlink(missing_ok=True)
        # a step that is found in the cache is not compiled for long enough
        anew = {"JAX_ENABLE_COMPILATION_CACHE": "false"} if moment == "compiling" else {}
        codes = lives.ends(lives.start(runs, "encoder-decoder", count, (moment, call, number), **anew))
        struck = runs / "struck"
        took = time.time() - float(struck.read_text()) if struck.exists() else None
        found[moment] = codes, took, lost(runs)
    return found, count, number, runs


def lost(runs):
    """How many steps of a phase, at most, were taken and written down, and are not saved."""
    found = [0]
    for folder in (path.parent for path in runs.glob("nano/**/metrics.jsonl")):
        saved = [int(path.name) for path in (folder / "checkpoints").glob("*") if path.name.isdigit()]
        found += [
            record["step"] - max(saved, default=0) for record in records(folder) if record["kind"] == "train"
        ]
    return max(found)


@pytest.mark.slow
@pytest.mark.fault("F5", "all end with the code to start again, within seconds, and lose at most one step")
@pytest.mark.fault("F6", "one process does so without jax.distributed")
@pytest.mark.fault("F7", "so they do when it comes inside a save")
@pytest.mark.parametrize("moment", MOMENTS)
def test_a_signal_at_any_moment_ends_all_in_time_with_a_common_step(stopped, moment):
    found, count, number, runs = stopped
    codes, took, steps = found[moment]
    *others, code = codes
    assert code == (lives.INTERRUPTED if moment == "preparing" and number == signal.SIGINT else lives.AGAIN)
    # before the first step one process ends at once, and jax ends the others
    due = {lives.AGAIN, lives.ABORTED} if moment in ("preparing", "compiling") else {lives.AGAIN}
    assert {*others} <= due, lives.said(runs)
    assert took < QUICKLY and steps <= 1


@pytest.mark.slow
@pytest.mark.fault(
    "F1", "stopped five times, a run comes to the same arrays, answers and metrics as in one life"
)
@pytest.mark.fault("F2", "so does a run of two processes")
def test_a_run_stopped_at_every_moment_comes_to_what_it_does_undisturbed(stopped, undisturbed):
    _, count, _, runs = stopped
    assert lives.ends(lives.start(runs, "encoder-decoder", count)) == [0] * count, lives.said(runs)
    found, due = lives.came_to(runs), lives.came_to(undisturbed("encoder-decoder", count)[0])
    differ = {name for name in found.keys() | due.keys() if name not in found or name not in due}
    # a stop's own is one of the newest, which are kept
    assert all("/checkpoints/" in name for name in differ)
    # but the last of each phase is there
    assert all(name.rpartition("/")[2] not in ("6", "12") for name in differ)
    assert all(found[name] == due[name] for name in found.keys() & due.keys())

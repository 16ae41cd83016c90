"""SIGKILL at any moment, of any process, again and again: what a run comes to stays the same, to the bit."""

import os
import random
import time
from contextlib import suppress

import lives
import pytest

KILLS = int(os.environ.get("FAULT_KILLS", "4"))  # of each case
ENDS = {0, 1, lives.AGAIN, -9, lives.ABORTED}  # 1: the other did not come


def strike(runs, started, rng, length):
    """Kill one or all at a random moment, or while the state is being saved; True if that came before the
    end.
    """
    begin, saves, before = time.monotonic(), set(), rng.random() < 0.5
    moment, wanted = rng.uniform(0, length), rng.randint(1, 8)
    while all(each.exitcode is None for each in started):
        with suppress(FileNotFoundError):  # it is saved meanwhile
            saves |= {(path, path.stat().st_ino) for path in unfinished(runs)} if before else set()
        if len(saves) >= wanted or not before and time.monotonic() > begin + moment:
            time.sleep(rng.uniform(0, 0.05))
            for each in rng.sample(started, rng.randint(1, len(started))):
                with suppress(ProcessLookupError):  # it has just ended
                    os.kill(each.pid, 9)
            return True
        time.sleep(0.005)
    return False


def unfinished(runs):
    for pattern in ("pretraining/*", "*/*/*/*/finetuning/*"):
        yield from runs.glob(f"nano/{pattern}/checkpoints/unfinished-*")


@pytest.mark.slow
@pytest.mark.fault(
    "F8", "killed again and again, in a save too, a run comes to the same arrays, answers and metrics"
)
@pytest.mark.parametrize("family", lives.FAMILIES)
@pytest.mark.parametrize("count", [1, 2])
def test_a_run_killed_at_random_moments_comes_to_what_it_does_undisturbed(
    family, count, prepare, undisturbed, record_property
):
    rng, dealt, inside, left, folders = random.Random(f"{family} {count}"), 0, 0, [], [prepare("killed")]
    whole, length = undisturbed(family, count)
    due = lives.came_to(whole)
    assert len(due) > 8
    while dealt < KILLS or folders:
        runs, begin = folders[-1], time.monotonic()
        started = lives.start(runs, family, count)
        struck = dealt < KILLS and strike(runs, started, rng, length)
        codes = lives.ends(started)
        assert set(codes) <= (ENDS if struck else {0}), (codes, lives.said(runs))
        if any(codes):
            dealt, inside = dealt + 1, inside + any(unfinished(runs))
            continue
        length = min(length, time.monotonic() - begin)
        assert lives.came_to(runs) == due
        left += unfinished(runs)
        folders = [prepare("killed")] if dealt < KILLS else []
    record_property("dealt", f"{dealt} kills, {inside} inside a save")
    assert not left, "a run that is done should have nothing unfinished"

"""A sweep that is killed again and again ends with the numbers of one that never was."""

import json
import os
import random
import signal
import subprocess
import sys
from pathlib import Path

import pytest
from test_run import TINY

from lm.data import documentation

PATTERN = "t5/1[02]-*/[agl]*"  # all parameters, adapters, gradual unfreezing, leave-one-out
SWEEP = f"""
import sys
from pathlib import Path
from experiments.scales import SCALES
from experiments.sweep import sweep
SCALES["tiny"] = {TINY!r}
sweep({PATTERN!r}, "tiny", 1, Path(sys.argv[1]))
"""
KILLS = 10


def start(runs: Path) -> subprocess.Popen:
    return subprocess.Popen([sys.executable, "-c", SWEEP, str(runs)], stdout=subprocess.DEVNULL, start_new_session=True)


def numbers(runs: Path) -> dict[str, dict]:
    """What each run came to, but for the seconds it took."""
    found = {str(path.relative_to(runs)): json.loads(path.read_text()) for path in runs.glob("tiny/t5/**/scores.json")}
    return {name: {key: value for key, value in scores.items() if key != "seconds"} for name, scores in found.items()}


@pytest.mark.slow
def test_a_sweep_killed_at_random_moments_ends_with_the_same_numbers(tmp_path):
    whole, killed, rng = tmp_path / "whole", tmp_path / "killed", random.Random(0)
    for runs in (whole, killed):
        documentation.prepare(runs / "cache", packages=documentation.STDLIB)
    assert start(whole).wait() == 0
    interrupted = 0
    for _ in range(KILLS):
        process = start(killed)
        try:
            process.wait(rng.uniform(4, 40))
        except subprocess.TimeoutExpired:
            os.killpg(process.pid, signal.SIGKILL)
            interrupted += process.wait() != 0
    assert start(killed).wait() == 0
    assert interrupted >= KILLS // 2
    assert len(numbers(whole)) == 7  # the baseline and "all" are one
    assert numbers(killed) == numbers(whole)

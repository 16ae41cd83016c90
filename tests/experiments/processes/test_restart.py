"""The command that is started again: after crashes, as often as asked, and not against its user's will."""

import os
import signal
import subprocess
import sys

import pytest
from paths import ROOT
from waiting import gone, wait_for

from experiments.processes.restart import pop_restart, run_with_restarts
from lm.config.base import SettingError

LIVES = """
import os, signal, sys, time
from pathlib import Path
from experiments.processes import restart
restart.LONGEST_PAUSE = 0.05
try:
    restart.run_with_restarts(sys.argv[1:])
except SystemExit:
    print([name for name in ("jax", "numpy", "tyro") if name in sys.modules])
    raise
restart.end_with_parent()
command, folder, *plan = sys.argv[1:]
with open(Path(folder, "lives"), "a") as lives:
    print(os.getpid(), os.environ.get("LM_RESTART"), file=lives)
turn = int(os.environ.get("LM_RESTART", "0 ").split()[0])
if plan[turn] == "waits":
    for number in (signal.SIGTERM, signal.SIGINT):
        signal.signal(number, lambda number, _: sys.exit(40 + number))
    Path(folder, "ready").touch()
    time.sleep(60)
if int(plan[turn]) < 0:
    os.kill(os.getpid(), -int(plan[turn]))
sys.exit(int(plan[turn]))
"""


def start(folder, *arguments):
    command = [sys.executable, "-c", LIVES, "run", folder, *map(str, arguments)]
    both = {"stdout": subprocess.PIPE, "stderr": subprocess.PIPE}
    return subprocess.Popen(command, cwd=ROOT, text=True, **both)


def starts(folder):
    return (folder / "lives").read_text().splitlines()


@pytest.mark.parametrize(
    "codes, times, code",
    [
        ([42, 0], 3, 0),
        ([1, -9, 0], 5, 0),
        ([2], 3, 2),
        ([3], 3, 3),
        ([130], 3, 130),
        ([42, 42, 42], 2, 42),
        ([-9, -6, -6, -6, -6], 4, 134),
    ],
)
def test_it_is_started_again_when_that_may_help_and_told_why(tmp_path, codes, times, code):
    process = start(tmp_path, *codes, "--restart", times)
    out, err = process.communicate(timeout=300)
    assert (process.returncode, out.strip()) == (code, "[]")  # of jax nothing is loaded
    told = [line.split(maxsplit=1)[1].strip() for line in starts(tmp_path)]
    why = [f"killed by {signal.Signals(-c).name}" if c < 0 else f"exit code {c}" for c in codes]
    assert told == ["None", *(f"{turn} of {times}: {each}" for turn, each in enumerate(why[:-1], 1))]
    assert err.count("; restart ") == len(codes) - 1


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT])
def test_a_signal_is_passed_on_and_nothing_is_started_again(tmp_path, number):
    process = start(tmp_path, "waits", "0", "--restart=5")
    assert wait_for((tmp_path / "ready").exists, 200)
    child = int(starts(tmp_path)[0].split()[0])
    assert os.getpgid(child) == child  # a Ctrl-C does not reach it, too
    process.send_signal(number)
    assert process.wait(200) == 40 + number
    assert len(starts(tmp_path)) == 1


def test_the_command_dies_with_its_parent(tmp_path):
    process = start(tmp_path, "waits", "--restart=5")
    assert wait_for((tmp_path / "ready").exists, 200)
    process.kill()
    assert wait_for(lambda: gone(starts(tmp_path)[0].split()[0]))


def test_only_what_goes_on_is_started_again_and_the_number_must_be_one():
    for arguments in (["run", "name"], ["report", "--restart", "3"], ["run", "name", "--restart", "0"], []):
        assert run_with_restarts(arguments) is None
    words = ["run", "--restart=3", "name", "--model.x", "-1", "--", "--restar", "5"]
    assert pop_restart(words) == (3, [*words[:1], *words[2:]])
    for wrong in (["often"], ["-3"], []):
        with pytest.raises(SettingError, match="--restart .* should be a whole number from 0"):
            run_with_restarts(["run", "name", "--restart", *wrong])
    assert os.environ.get("LM_RESTART") is None

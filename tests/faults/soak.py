"""``soak.py [MINUTES [ROWS [FOLDER]]]``: sweeps with a fault every minute come to what an undisturbed one
does.

Each is started again until it is done. What the command refuses because of a fault is done as it says: the
folder that it names is removed.
"""

import json
import os
import random
import re
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from collections import Counter
from pathlib import Path

from lm.files import CHECKSUM

DONE, FAILED, STOPPED = 0, 1, (42, 130, -9)
CHECKPOINTS, METRICS = "nano/**/checkpoints/[0-9]*/**/*", "nano/**/metrics.jsonl"
SIGNALS = ("SIGKILL", "SIGTERM", "SIGINT", "SIGSTOP")


def flip(whole, rng):
    place = rng.randrange(len(whole))
    return whole[:place] + bytes([whole[place] ^ 1 << rng.randrange(8)]) + whole[place + 1 :]


DAMAGES = {  # name -> (files, what becomes of one; None: it is deleted)
    "bit of a checkpoint": (CHECKPOINTS, flip),
    "file of a checkpoint": (CHECKPOINTS, lambda whole, rng: None),
    "last line of metrics": (
        METRICS,
        lambda whole, rng: whole[: whole[:-1].rfind(b"\n") + 1 + rng.randrange(9)],
    ),
}


def main(minutes: float, rows: str, folder: Path) -> None:
    rng, dealt = random.Random(time.time_ns()), Counter()
    assert sweep(rows, folder / "calm").wait() == DONE, folder
    due, turn, end = scores(folder / "calm"), 0, time.monotonic() + 60 * minutes
    while turn == 0 or time.monotonic() < end:
        turn += 1
        runs = folder / str(turn)
        runs.mkdir()
        (runs / "cache").symlink_to(folder / "calm" / "cache")
        while (code := disturbed(rows, runs, rng, dealt, end)) != DONE:
            said = (runs / "said.txt").read_text()
            refused = re.search(r"(?:remove|without) (\S+) (?:to start from scratch|training goes on)", said)
            assert code in STOPPED or refused, f"exit code {code}: {said[-2000:]}"
            if code == FAILED:
                dealt["refused, and the folder removed"] += 1
                shutil.rmtree(refused[1])
        assert scores(runs) == due, f"{runs} differs from {folder / 'calm'} after {dict(dealt)}"
        print(f"sweep {turn} came to the same scores; dealt until now: {dict(dealt)}", flush=True)


def disturbed(rows, runs, rng, dealt, end):
    """The exit code of one start, which ends by itself or by a fault."""
    process = sweep(rows, runs)
    while process.poll() is None:
        try:
            process.wait(rng.uniform(20, 100))
        except subprocess.TimeoutExpired:
            if time.monotonic() < end:
                what = rng.choice([*SIGNALS, *DAMAGES])
                dealt[what] += split_shards(what, process, runs, rng)
    return process.returncode


def split_shards(what, process, runs, rng):
    """True if there was anything to be damaged; what is damaged is read again, for all are killed."""
    os.killpg(process.pid, getattr(signal, what, signal.SIGKILL))
    if what == "SIGSTOP":
        time.sleep(rng.uniform(1, 20))
        os.killpg(process.pid, signal.SIGCONT)
    if what in SIGNALS:
        return True
    process.wait()
    pattern, damaged = DAMAGES[what]
    files = [path for path in runs.glob(pattern) if path.is_file() and path.stat().st_size]
    if pattern == METRICS:  # what a phase that is done has written is not cut short by a kill
        files = [path for path in files if '"finished"' not in (path.parent / "run.json").read_text()]
    if files:
        path = (
            rng.choice(files) if pattern == CHECKPOINTS else max(files, key=lambda file: file.stat().st_mtime)
        )
        becomes = damaged(path.read_bytes(), rng)
        path.unlink() if becomes is None else path.write_bytes(becomes)
    return bool(files)


def sweep(rows, runs):
    runs.mkdir(parents=True, exist_ok=True)
    with (runs / "said.txt").open("w") as said:
        command = [sys.executable, "-m", "experiments", "sweep", rows, "--runs", runs]
        return subprocess.Popen(command, stdout=said, stderr=said, start_new_session=True)


def scores(runs):
    """What each run came to, but for the seconds it took and their checksum."""
    found = {
        str(path.relative_to(runs)): json.loads(path.read_text()) for path in runs.glob("nano/**/scores.json")
    }
    return {
        name: {key: value for key, value in each.items() if key not in ("seconds", CHECKSUM)}
        for name, each in found.items()
    }


if __name__ == "__main__":
    given = [*sys.argv[1:], *("30", "t5/6-corruption-rate/50", "")[len(sys.argv) - 1 :]]
    main(float(given[0]), given[1], Path(given[2] or tempfile.mkdtemp(prefix="soak-")).absolute())

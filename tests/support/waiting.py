"""Waiting for what other processes do."""

import time
from pathlib import Path


def wait_for(found, seconds=20.0):
    """What ``found()`` gives as soon as that is true; what it gives in the end if it never is."""
    until = time.monotonic() + seconds
    while not found() and time.monotonic() < until:
        time.sleep(0.02)
    return found()


def gone(pid):
    """Whether the process with this number has ended, though nobody may have asked how."""
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] == "Z"
    except OSError:
        return True

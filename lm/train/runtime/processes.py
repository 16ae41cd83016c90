"""Tells processes apart: the number of one that has ended is given to another, in containers soon."""

import os
from contextlib import suppress
from pathlib import Path


def process_start(pid: int) -> int | None:
    """Return when a process of this machine began, in ticks since the machine did; None if unknown."""
    with suppress(OSError, ValueError, IndexError):  # it has ended, or there is no /proc, as on macOS
        fields = Path(f"/proc/{pid}/stat").read_text(errors="replace").rpartition(")")[2].split()
        return int(fields[19])  # the 22nd of proc_pid_stat(5), counted behind the name of the program
    return None


def is_alive(pid: int, start: int | None = None) -> bool:
    """Return whether a process of this machine runs; with ``start`` the one that began then, if known."""
    try:
        os.kill(pid, 0)
    except ProcessLookupError:
        return False
    except PermissionError:  # another user's
        pass
    now = process_start(pid)
    return start is None or now is None or now == start
